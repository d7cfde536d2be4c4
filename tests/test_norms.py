"""fp8/kernels/norms.py: the torch form against model.Norm, the Triton kernel against the torch form (in an
interpreter), and compiled for GPUs that are not there."""
import itertools
import re
import types

import pytest
import torch

from fp8gpt.fp8.kernels import norms
from fp8gpt.fp8.kernels.norms import norm_backward, norm_cast
from fp8gpt.fp8.linear import E4M3, E5M2, TENSOR, Quantizer
from helpers import same_bits
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


def of_cast(M, C, rms, dtype=E4M3):
    """A model's norm, and the arguments of norm_cast for random x and delta (M, C)."""
    norm, (x, delta, *_, weight, _) = plain(M, C, rms)
    bias = None if rms else norm.bias.detach()
    return norm, [[x, delta, weight, bias], 1e-5, rms, torch.tensor(99.0), dtype]    # some values are clamped


@pytest.mark.parametrize('dtype', [E4M3, E5M2])
@pytest.mark.parametrize('rms, biased', [(False, True), (False, False), (True, False)])
def test_forward_is_the_models_norm_and_the_quantizers_cast(rms, biased, dtype):
    norm, arguments = of_cast(64, 208, rms, dtype)
    if not biased:
        norm.bias = arguments[0][3] = None
    (x, delta, *_), _, _, scale, _ = arguments
    data, data_t, amaxes, total, rstd, *mean = norm_cast(*arguments)
    expected = Quantizer(dtype, TENSOR, False, 0)(norm(x + delta), scale)
    assert torch.equal(total, x + delta)
    assert nearly_equal(steps(data, expected.data)) and same_bits(data_t, data.t())
    assert amaxes.amax().item() == pytest.approx(expected.amax.item(), rel=2**-8)
    torch.testing.assert_close([*mean, rstd], [each for each in statistics(total, rms) if each is not None])
    torch.library.opcheck(norm_cast, tuple(arguments), test_utils=('test_schema', 'test_faketensor'))


@pytest.mark.parametrize('rms', [False, True], ids=['layer', 'rms'])
def test_backward_is_autograds(rms):
    norm, inputs = plain(64, 768, rms)
    dy, x, _, _, _, residual = inputs
    total = x.clone().requires_grad_()
    torch.autograd.backward([norm(total), total], [dy, residual])
    dx, sums = norm_backward(*inputs)
    assert nearly_equal(steps(dx, total.grad))
    for found, parameter in zip(sums, norm.parameters()):
        torch.testing.assert_close(found.sum(0), parameter.grad, rtol=1e-5, atol=1e-4)  # fp32 sums of 64
    assert len(sums) == 2 - rms
    torch.library.opcheck(norm_backward, tuple(inputs), test_utils=('test_schema', 'test_faketensor'))


CASES = (       # neither 80, 112 nor 1600 columns fill a tile
    ('', 48, 80, False), ('', 16, 1600, False), ('', 96, 112, True), ('', 32, 768, True),
    ('off centre', 16, 80, False), ('nan', 48, 80, False), ('inf', 48, 80, True))


@pytest.mark.slow
@pytest.mark.usefixtures('interpreted')
@pytest.mark.filterwarnings('ignore::RuntimeWarning')   # NumPy's, of infinities
def test_the_forward_kernel_computes_what_the_torch_form_does(monkeypatch):
    wrong = []
    for (case, M, C, rms), dtype in zip(CASES, itertools.cycle((E4M3, E5M2))):
        _, arguments = of_cast(M, C, rms, dtype)
        if case == 'off centre':
            arguments[0][0] += 50
        elif case:
            arguments[0][0][M // 2, C // 2] = float(case)
        data, data_t, amaxes, total, *found = norm_cast(*arguments)
        with monkeypatch.context() as patch:
            patch.setattr(norms, 'in_triton', lambda x: False)
            expected = norm_cast(*arguments)
        known = total.isfinite().all(1)
        right = [nearly_equal(steps(data, expected[0])[known]), same_bits(data_t, data.t()),
                 len(amaxes) == M // 16, torch.equal(total[known], expected[3][known])]
        close = zip((amaxes.amax(), *found), (expected[2].amax(), *expected[4:]), (2**-8, 1e-5, 1e-5))
        right += [torch.allclose(a, b, rtol, 1e-6, equal_nan=True) for a, b, rtol in close]
        wrong += [] if all(right) else [(case, M, C, right)]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.usefixtures('interpreted')
@pytest.mark.filterwarnings('ignore::RuntimeWarning')   # NumPy's, of infinities
def test_the_backward_kernel_computes_what_the_torch_form_does(monkeypatch):
    """Each program sums its own blocks."""
    monkeypatch.setattr(norms, 'PROGRAMS', 4)   # each takes several blocks, some one more than others
    wrong = []
    for case, M, C, rms in CASES:
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
def test_the_kernels_compile_for_the_presets(monkeypatch, C, rms, arch):
    """16 bytes a thread and access, beside single numbers: a scale, an amax, statistics of a few rows."""
    _, inputs = plain(32, C, rms)
    kernels = {'norm_backward_kernel': (lambda: norm_backward(*inputs), 2, 0)}
    if C <= norms.WIDEST:
        kernels['norm_cast_kernel'] = (lambda: norm_cast(*of_cast(32, C, rms)[1]), 1, 3 - rms)
    for name, (call, *single) in kernels.items():
        code = code_for(monkeypatch, arch, norms, name, call)
        ptx = code.asm['ptx']
        for kind, most in zip(('ld', 'st'), single):
            widths = re.findall(rf'\b{kind}\.global\.(\S+)', ptx)
            assert widths.count('v4.b32') > len(widths) / 2 and sum(w != 'v4.b32' for w in widths) <= most
        assert all('satfinite' in cast for cast in re.findall(r'cvt\S*e4m3\S*', ptx)) and '.NaN' not in ptx
        assert not re.search(r'addptr .*f8E4M3FN>.*xi32>', code.asm['ttir']), 'M * C may pass 2**31'
        assert usage(code, arch)[1] <= 32
        assert code.metadata.shared + 1024 <= 100 << 10     # sm_89's and sm_120's
