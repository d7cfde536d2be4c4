"""For tests of Triton kernels: its interpreter, made to round as GPUs do, and code for absent GPUs."""
import re
import subprocess

import numpy as np
import torch

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


def patch_interpreter():
    """Right conversions, and loop bounds that NumPy 2.4 takes for integers."""
    from triton.runtime import interpreter
    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, '__index__', lambda self: int(self.handle.data.item()))
    interpreter._convert_float, interpreter._patch_lang_tensor = converted, patched


class Gpu:
    """What Triton asks of a driver before it compiles, answered for sm_`arch`."""

    def __init__(self, arch):
        self.arch = arch

    def get_current_device(self):
        return self.arch

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget
        return GPUTarget('cuda', self.arch, 32)


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
    import triton
    with monkeypatch.context() as patch:
        recorder = Compiled(getattr(module, kernel))
        patch.setattr(module, kernel, recorder)
        patch.setattr(module, 'in_triton', lambda x: True)
        patch.setattr(triton.runtime.driver, '_active', Gpu(arch))
        call()
    return recorder.code


def usage(code, arch):
    """Return (registers a thread, bytes spilled) by ptxas."""
    from triton.backends.nvidia.compiler import get_ptxas
    words = [get_ptxas(arch).path, '-v', f'--gpu-name=sm_{arch}a', '-o', '/dev/null', '-']
    done = subprocess.run(words, input=code.asm['ptx'], capture_output=True, text=True, check=True)
    found = re.search(r'(\d+) bytes spill stores.*Used (\d+) registers', done.stderr, re.DOTALL)
    return int(found[2]), int(found[1])
