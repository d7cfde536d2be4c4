"""Each case of CASES through the kernels of fp8/kernels/norms.py, interpreted, and through their torch forms.

    TRITON_INTERPRET=1 python tests/interpreted_norms.py OUT        # saves {case: {op: (kernel's, torch's)}}
"""
import os
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from fp8gpt.fp8.kernels import norms
from interpreting import patch_interpreter

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CASES = {  # (M, C), rms, delta, bias, scale, dtype, residual: neither 80, 112 nor 1600 columns fill a tile
    'layer': ((48, 80), False, True, True, 3.0, E4M3, True),
    'layer, alone': ((64, 112), False, False, False, 0.37, E5M2, False),
    'layer, wide': ((16, 1600), False, True, True, None, E4M3, True),
    'rms': ((96, 112), True, True, False, 3.0, E4M3, True),
    'rms, alone': ((80, 80), True, False, False, None, E5M2, False),
    'rms, wide': ((32, 768), True, True, False, 11.0, E4M3, False),
    'beyond the range': ((16, 80), False, True, True, 1e5, E5M2, True),
    'off centre': ((16, 80), False, False, True, 3.0, E4M3, False),
    'nan': ((48, 80), False, True, True, 3.0, E4M3, True),
    'inf': ((48, 80), True, True, False, 3.0, E4M3, True),
}


def inputs(case):
    """The arguments of norm and, but for what norm gives, of norm_backward."""
    (M, C), rms, delta, bias, scale, dtype, residual = CASES[case]
    generator = torch.Generator().manual_seed(len(case))

    def drawn(*shape):
        return torch.randn(shape, generator=generator)
    x, delta, dy = drawn(M, C).bfloat16(), drawn(M, C).bfloat16() if delta else None, drawn(M, C).bfloat16()
    if case == 'off centre':    # (0 - mean) * rstd, beyond the last column, is far larger than any xhat
        x += 50
    if case in ('nan', 'inf'):
        x[M // 2, C // 2] = dy[M - 1, 3] = float(case)
    weight, bias = 1 + drawn(C) / 4, drawn(C) if bias else None
    scale = None if scale is None else torch.tensor(scale)
    above = drawn(M, C).bfloat16() if residual else None
    return (x, delta, weight, bias, 1e-5, rms, scale, dtype), (dy, above)


def both(op, *arguments):
    """(the kernel's outputs, the torch form's)."""
    results = []
    for norms.INTERPRETED in (True, False):
        results.append(op(*arguments))
    return tuple(results)


def play(case):
    """{op: (kernel's outputs, torch's)}; statistics given to an op are the torch form's."""
    arguments, (dy, above) = inputs(case)
    x, delta, weight, bias, _, rms, scale, dtype = arguments
    results = {'norm': both(norms.norm, *arguments)}
    total, *statistics = results['norm'][1][:3]
    total = x if delta is None else total
    if scale is not None:
        affine = weight, bias, rms, scale, dtype
        results['norm_cast'] = both(norms.norm_cast, total, *statistics, *affine)
    results['norm_backward'] = both(norms.norm_backward, dy, total, *statistics, weight, rms, above)
    return results


if __name__ == '__main__':
    assert os.environ['TRITON_INTERPRET'] == '1'
    patch_interpreter()
    norms.PROGRAMS = 4      # of which each takes several blocks, some one more than others
    torch.save({case: play(case) for case in CASES}, sys.argv[1])
