"""Each case of CASES through the kernel of fp8/kernels/norms.py, interpreted, and through its torch form.

    TRITON_INTERPRET=1 python tests/interpreted_norms.py OUT        # saves {case: (kernel's, torch's)}
"""
import os
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from fp8gpt.fp8.kernels import norms
from triton_tools import patch_interpreter

CASES = {  # (M, C), rms: neither 80, 112 nor 1600 columns fill a tile
    'layer': ((48, 80), False),
    'layer, wide': ((16, 1600), False),
    'rms': ((96, 112), True),
    'rms, wide': ((32, 768), True),
    'off centre': ((16, 80), False),
    'nan': ((48, 80), False),
    'inf': ((48, 80), True),
}


def both(case):
    """Return the kernel's outputs and the torch form's."""
    (M, C), rms = CASES[case]
    generator = torch.Generator().manual_seed(len(case))
    x, dy, above = torch.randn(3, M, C, generator=generator).bfloat16()
    if case == 'off centre':    # (0 - mean) * rstd, beyond the last column, is far larger than any xhat
        x += 50
    if case in ('nan', 'inf'):
        x[M // 2, C // 2] = dy[M - 1, 3] = float(case)
    mean = None if rms else x.float().mean(1)
    rstd = ((x.float() if rms else x.float() - mean[:, None]).square().mean(1) + 1e-5).rsqrt()
    weight = 1 + torch.randn(C, generator=generator) / 4
    inputs = dy, x, mean, rstd, weight, above
    return norms.norm_backward(*inputs), norms.in_torch(*inputs)


if __name__ == '__main__':
    assert os.environ['TRITON_INTERPRET'] == '1'
    patch_interpreter()
    norms.PROGRAMS = 4      # of which each takes several blocks, some one more than others
    torch.save({case: both(case) for case in CASES}, sys.argv[1])
