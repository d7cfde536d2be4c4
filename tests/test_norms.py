"""fp8/kernels/norms.py: the torch form against model.Norm, the Triton kernel against the torch form (in an
interpreter), and compiled for GPUs that are not there."""
import itertools
import re
import types

import pytest
import torch

from fp8gpt.fp8.kernels import norms
from fp8gpt.fp8.kernels.casts import normalise
from fp8gpt.fp8.kernels.norms import norm_backward
from model import Norm
from triton_tools import code_for, interpreted, nearly_equal, steps, usage    # noqa: F401


def plain(M, C, rms):
    """A model's norm, and the arguments of its norm_backward for random dy, x and residual (M, C)."""
    torch.manual_seed(C)
    norm = Norm(types.SimpleNamespace(norm_eps=1e-5, norm='rmsnorm' if rms else 'layernorm', bias=True), C)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(C) / 4)
    dy, x, residual = torch.randn(3, M, C).bfloat16()
    return norm, [dy, x, *statistics(x, rms), norm.weight.detach(), residual]


def statistics(x, rms):
    """Return the mean, None for RMSNorm, and rstd of x (M, C), each (M,)."""
    mean = None if rms else x.float().mean(1)
    centred = x.float() if rms else x.float() - mean[:, None]
    return mean, (centred.square().mean(1) + 1e-5).rsqrt()


@pytest.mark.parametrize('rms', [False, True], ids=['layer', 'rms'])
def test_forward_is_the_models_and_backward_autograds(rms):
    norm, inputs = plain(64, 768, rms)
    dy, x, mean, rstd, weight, residual = inputs
    total = x.clone().requires_grad_()
    y = norm(total)
    assert nearly_equal(steps(normalise(x, rstd, weight, mean, norm.bias)[0], y))
    torch.autograd.backward([y, total], [dy, residual])
    dx, sums = norm_backward(*inputs)
    assert nearly_equal(steps(dx, total.grad))
    for found, parameter in zip(sums, norm.parameters()):
        torch.testing.assert_close(found.sum(0), parameter.grad, rtol=1e-5, atol=1e-4)  # fp32 sums of 64
    assert len(sums) == 2 - rms
    torch.library.opcheck(norm_backward, tuple(inputs), test_utils=('test_schema', 'test_faketensor'))


@pytest.mark.slow
@pytest.mark.usefixtures('interpreted')
@pytest.mark.filterwarnings('ignore::RuntimeWarning')   # NumPy's, of infinities
def test_the_kernel_computes_what_the_torch_form_does(monkeypatch):
    """Each program sums its own blocks. Neither 80, 112 nor 1600 columns fill a tile."""
    monkeypatch.setattr(norms, 'PROGRAMS', 4)   # each takes several blocks, some one more than others
    wrong = []
    for case, M, C, rms in (
            ('', 48, 80, False), ('', 16, 1600, False), ('', 96, 112, True), ('', 32, 768, True),
            ('off centre', 16, 80, False), ('nan', 48, 80, False), ('inf', 48, 80, True)):
        _, (dy, x, mean, rstd, weight, residual) = plain(M, C, rms)
        if case == 'off centre':    # (0 - mean) * rstd, beyond the last column, is far larger than any xhat
            x += 50
        elif case:
            x[M // 2, C // 2] = dy[M - 1, 3] = float(case)
        inputs = dy, x, *statistics(x, rms), weight, residual
        found, expected = norm_backward(*inputs), norms.in_torch(*inputs)
        known = expected[0].isfinite()
        right = [torch.equal(known, found[0].isfinite()), nearly_equal(steps(found[0], expected[0])[known])]
        sums = found[1].sum(1), expected[1].sum(1)
        right.append(torch.allclose(*sums, rtol=1e-5, atol=1e-4, equal_nan=True))
        wrong += [] if all(right) else [(case, M, C, right)]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize('C, rms, arch', [      # what PRESETS norm
    (768, False, 90), (1024, True, 90), (1280, False, 90), (1600, False, 90), (2048, True, 90),
    (4096, True, 90), (8192, False, 90), *itertools.product((1024, 1600), (False,), (89, 100, 120))])
def test_the_kernel_compiles_for_the_presets(monkeypatch, C, rms, arch):
    _, inputs = plain(32, C, rms)
    code = code_for(monkeypatch, arch, norms, 'norm_backward_kernel', lambda: norm_backward(*inputs))
    reads, writes = (re.findall(rf'\b{kind}\.global\.(\S+)', code.asm['ptx']) for kind in ('ld', 'st'))
    statistics = [width for width in reads if width != 'v4.b32']    # fewer than four rows' mean and rstd
    assert len(statistics) <= 2 and len(reads) > 6
    assert set(writes) == {'v4.b32'}
    assert usage(code, arch)[1] <= 32
    assert code.metadata.shared + 1024 <= 100 << 10     # sm_89's and sm_120's
