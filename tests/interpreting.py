"""Triton's interpreter, made to round as GPUs do, for tests of the kernels."""
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
