"""For tests of Triton kernels: its interpreter, made to round as GPUs do, and code for absent GPUs."""
import re
import subprocess
import types

import numpy as np
import pytest
import torch

from fp8gpt.fp8.kernels import casts, norms
from fp8gpt.fp8.kernels.casts import tl

SHARED_MEMORY = 232_448     # bytes a block of threads may take, on an H200
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = {'bf16': torch.bfloat16, 'fp32': torch.float32, 'fp8e4nv': E4M3, 'fp8e5': E5M2}


def converted(data, source, target, rounding):
    """torch's conversion of floats: the interpreter's own truncates to bf16 and carries nothing in FP8. GPUs
    saturate where FP8 overflows."""
    bits = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8))
    given, dtype = bits.view(DTYPES[source.name]), DTYPES[target.name]
    if dtype in (E4M3, E5M2):
        largest = torch.finfo(dtype).max
        given = given.clamp(-largest, largest)
    found = given.to(dtype).view(torch.uint8).numpy()
    return found.view(f'uint{target.primitive_bitwidth}').reshape(data.shape)


def four_codes(a, dtype, pack):
    """casts.four_codes, whose instruction of a GPU the interpreter does not know."""
    codes = [each.to(dtype).to(tl.uint8, bitcast=True) for each in a]
    if pack == 4:
        return codes[0].to(tl.int8, bitcast=True)
    first, second, third, fourth = [code.to(tl.uint32) for code in codes]
    return (first | second << 8 | third << 16 | fourth << 24).to(tl.int32, bitcast=True)


@pytest.fixture
def interpreted(monkeypatch):
    """Let the kernels run in Triton's interpreter, on the CPU: with right conversions, and loop bounds that
    NumPy 2.4 takes for integers."""
    triton = pytest.importorskip('triton')
    from triton.runtime import interpreter
    from fp8gpt import loss
    tl = triton.language
    for module in (tl, tl.standard, casts, norms, loss):
        for name, value in list(vars(module).items()):
            if isinstance(value, triton.JITFunction):
                function = four_codes if name == 'four_codes' else value.fn
                monkeypatch.setattr(module, name, interpreter.InterpretedFunction(function))
    everywhere = types.SimpleNamespace(__globals__={'tl': tl, 'core': tl.core})
    scope = interpreter._patch_lang(everywhere)
    scope.set_attr(tl.tensor, '__index__', lambda self: int(self.handle.data.item()))
    # once for all, since calls within a kernel would undo nothing
    monkeypatch.setattr(interpreter, '_patch_lang', lambda function: interpreter._LangPatchScope())
    monkeypatch.setattr(interpreter, '_convert_float', converted)
    monkeypatch.setattr(triton.knobs.runtime, 'interpret', True)
    yield
    scope.restore()


def steps(a, b):
    """How many representable numbers lie between a and b, of one float type; 1 is next to each other."""
    def place(tensor):
        bits = 8 * tensor.itemsize
        codes = tensor.contiguous().view(getattr(torch, f'int{bits}')).long()
        return torch.where(codes < 0, -(codes + 2**(bits - 1)), codes)
    return (place(a) - place(b)).abs()


def nearly_equal(apart):
    """Whether few values differ, and those by their last bit: fp32 values that differ by a few 2**-22 move
    one rounding to bf16 in 2**12. apart: their steps()."""
    return apart.numel() == 0 or apart.max() <= 1 and (apart > 0).sum() <= 1 + apart.numel() * 2**-12


class Gpu:
    """What Triton asks of a driver, answered for sm_`arch`. It launches nothing."""
    utils = types.SimpleNamespace(
        load_binary=lambda *of_kernel: (None, None, 0, 0, 1024),
        get_device_properties=lambda device: {'max_shared_mem': SHARED_MEMORY, 'multiprocessor_count': 132})

    def __init__(self, arch):
        self.arch = arch

    def get_current_device(self):
        return self.arch

    def get_active_torch_device(self):
        return torch.device('cuda', 0)

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget
        return GPUTarget('cuda', self.arch, 32)

    def launcher_cls(self, source, metadata):
        return lambda *arguments: None


class Compiled:
    """A kernel that is compiled where it would be launched. code: the result of the last launch."""

    def __init__(self, kernel):
        self.kernel, self.code = kernel, None

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.code = self.kernel.warmup(*arguments, grid=grid, **options)
        return launch


def code_for(monkeypatch, arch, module, kernel, call):
    """Return the code, for sm_`arch`, of the kernel of a module, by name, that call() launches."""
    triton = pytest.importorskip('triton')
    with monkeypatch.context() as patch:
        recorder = Compiled(getattr(module, kernel))
        patch.setattr(module, kernel, recorder)
        patch.setattr(module, 'in_triton', lambda x: True, raising=False)
        patch.setattr(triton.runtime.driver, '_active', Gpu(arch))
        call()
    return recorder.code


def usage(code, arch):
    """Return (registers a thread, bytes spilled) by ptxas."""
    from triton.backends.nvidia.compiler import get_ptxas
    name = f'sm_{arch}' + 'a' * (arch >= 90)
    words = [get_ptxas(arch).path, '-v', f'--gpu-name={name}', '-o', '/dev/null', '-']
    done = subprocess.run(words, input=code.asm['ptx'], capture_output=True, text=True, check=True)
    found = re.search(r'(\d+) bytes spill stores.*Used (\d+) registers', done.stderr, re.DOTALL)
    return int(found[2]), int(found[1])
