"""List the GPUs that are known, with the figures of their data sheets, and say what a device here is.

torch is imported late: plan.py checks a GPU's name without waiting for it.
"""
import contextlib
import platform
import re
from typing import NamedTuple


class Gpu(NamedTuple):
    """Describe a GPU: dense TFLOP/s in bf16 and FP8 (None: none that runs here), summed in fp32, and TB/s of
    memory, as the data sheets have them; MiB of memory, as nvidia-smi has it (a data sheet's 80 GB are 81,559
    MiB, 85.5 GB); GB/s to other GPUs, both directions together, by NVLink or PCIe."""
    name: str
    bf16: float
    fp8: float | None
    bandwidth: float
    mebibytes: int
    link: int

    @property
    def memory(self):
        """Return GB of 10^9 bytes. torch sees some hundred MB less: plan.MARGIN is for that too."""
        return self.mebibytes * 2**20 / 1e9


# The first pattern found in a lower-case name decides; an NVL card's figures are others, and not known here.
# Where a sheet gives TFLOP/s with sparsity, half of it.
GPUS = [(re.compile(rf'(?<![a-z0-9])({pattern})(?!\d)'), Gpu(*row)) for pattern, *row in (
    ('h200(?!.*nvl)', 'H200', 989, 1979, 4.8, 143_771, 900),
    ('h100.*pcie', 'H100 PCIe', 756, 1513, 2.0, 81_559, 600),
    ('h100(?!.*nvl)', 'H100 SXM', 989, 1979, 3.35, 81_559, 900),
    # nvidia.com/en-us/data-center/hgx, an eighth of the board
    ('b200', 'B200', 2250, 4500, 8.0, 183_359, 1800),
    ('a100.*40', 'A100 40GB', 312, None, 1.555, 40_960, 600),
    ('a100', 'A100 80GB', 312, None, 2.039, 81_920, 600),
    # nvidia.com/en-us/data-center/l4
    (r'l4\b', 'L4', 121, 242.5, 0.3, 23_034, 64),
    # NVIDIA Ada GPU Architecture whitepaper of GeForce
    (r'(rtx)?4090(?! d\b|.*laptop)', 'RTX 4090', 165, 330, 1.008, 24_564, 64),
    # images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf
    (r'(rtx)?5090(?! d\b|.*laptop)', 'RTX 5090', 209.5, 419, 1.792, 32_607, 128))]


def find_gpu(name):
    """Return the row of a GPU's name, as a device or a user writes it; None where there is none."""
    name = re.sub('[-_ ]+', ' ', name.lower())
    # a slice of a GPU has a part of these figures: of MIG, or of a vGPU, as GRID A100-10C
    rows = () if re.search(r' mig | \d+[acq]$', name) else GPUS
    return next((gpu for pattern, gpu in rows if pattern.search(name)), None)


def gpu_of(device):
    """Return the row of a torch.device; None where it has none."""
    if device.type != 'cuda':
        return None
    import torch
    return find_gpu(torch.cuda.get_device_name(device))


def device_name(device):
    """Return a GPU's name, or a CPU's with its number of threads."""
    import torch
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    model = platform.machine()
    with contextlib.suppress(OSError, TypeError), open('/proc/cpuinfo') as file:    # not on every system
        model = re.search('model name.*: (.*)', file.read())[1]
    return f'{device.type.upper()}, {model}, {torch.get_num_threads()} threads'


FAULTY = '12.8', '12.9'     # releases of ptxas with wrong code: triton-lang/triton 11111 and 11581


def assembler_lines(device):
    """Return the line about the assembler of Triton's code for a device, or for an H100 where that is a CPU;
    [] without Triton."""
    import torch
    gpu, arch = 'an H100', 90
    if device.type == 'cuda':
        major, minor = torch.cuda.get_device_capability(device)
        gpu, arch = 'this GPU', 10 * major + minor
    try:
        import triton
        from triton.backends.nvidia.compiler import get_ptxas
        release = get_ptxas(arch).version
    except (ImportError, RuntimeError):     # the latter where Triton has no ptxas
        return []
    line = f"assembler Triton {triton.__version__} makes {gpu}'s code by ptxas {release}"
    if release in FAULTY:
        cure, newer = 'pip install "torch==2.15.*"', get_ptxas(90)
        if newer.version not in FAULTY:     # torch 2.15 takes it from sm_90 on, but it knows older GPUs, too
            cure = f'export TRITON_PTXAS_PATH={newer.path}'
        line += f', which may miscompile FP8 casts:\n          {cure}'
    return [line]


def device_line(device):
    """Return the line about a device; in its second row, the device's peaks."""
    import torch
    gpu, known = gpu_of(device), 'its peak is not in the table of gpus.py, so no MFU'
    if gpu:
        in_fp8 = f'{gpu.fp8:,} in fp8' if gpu.fp8 else 'no FP8 that runs here'
        known = f'peak {gpu.bf16:,} TFLOP/s in bf16, {in_fp8}'
    return f'device    {device_name(device)}, torch {torch.__version__}\n          {known}'
