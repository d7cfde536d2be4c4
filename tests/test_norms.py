"""fp8/kernels' norm against model.py's, and the Triton kernel of its backward pass against the torch form (in
an interpreter), and compiled for GPUs that are not there."""
import itertools
import re
import types

import pytest
import torch

from fp8gpt.fp8.kernels import kernel_norm, norms
from fp8gpt.fp8.kernels.norms import norm_backward
from model import AddNorm
from triton_tools import code_for, interpreted, nearly_equal, steps, usage    # noqa: F401


def random_inputs(M, C, rms):
    """The arguments of norm_backward, of random dy, x and residual (M, C)."""
    torch.manual_seed(C)
    dy, x, residual = torch.randn(3, M, C).bfloat16()
    return [dy, x, *statistics(x, rms), 1 + torch.randn(C) / 4, residual]


def statistics(x, rms):
    """Return the mean, None for RMSNorm, and rstd of x (M, C), each (M,)."""
    mean = None if rms else x.float().mean(1)
    centred = x.float() if rms else x.float() - mean[:, None]
    return mean, (centred.square().mean(1) + 1e-5).rsqrt()


def test_both_passes_are_the_models():
    for norm, bias in (('layernorm', True), ('layernorm', False), ('rmsnorm', False)):
        dy, x, *_, weight, residual = inputs = random_inputs(64, 768, norm == 'rmsnorm')
        torch.library.opcheck(norm_backward, tuple(inputs), test_utils=('test_schema', 'test_faketensor'))
        results = []
        for kind in (kernel_norm(AddNorm), AddNorm):
            module = kind(types.SimpleNamespace(norm_eps=1e-5, norm=norm, bias=bias), 768)
            module.weight.data.copy_(weight)
            inputs = x.clone().requires_grad_(), residual.clone().requires_grad_()
            total, y = module(*inputs)
            y = y if kind is AddNorm else y.tensor()
            torch.autograd.backward([total, y], [residual, dy])
            tensors = total, y, *(each.grad for each in inputs)
            results.append((tensors, [p.grad for p in module.parameters()]))
        (found, sums), (expected, expected_sums) = results
        assert all(nearly_equal(steps(*pair)) for pair in zip(found, expected)), (norm, bias)
        for pair in zip(sums, expected_sums, strict=True):
            torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-4)     # fp32 sums of 64


CASES = (       # neither 80, 112 nor 1600 columns fill a tile
    ('', 48, 80, False), ('', 16, 1600, False), ('', 96, 112, True), ('', 32, 768, True),
    ('off centre', 16, 80, False), ('nan', 48, 80, False), ('inf', 48, 80, True))


@pytest.mark.slow
@pytest.mark.usefixtures('interpreted')
@pytest.mark.filterwarnings('ignore::RuntimeWarning')   # NumPy's, of infinities
def test_the_backward_kernel_computes_what_the_torch_form_does(monkeypatch):
    monkeypatch.setattr(norms, 'PROGRAMS', 4)   # each takes several blocks, some one more than others
    wrong = []
    for case, M, C, rms in CASES:
        dy, x, *_, weight, residual = random_inputs(M, C, rms)
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
    """16 bytes a thread and access, beside single numbers: statistics of a few rows."""
    inputs = random_inputs(32, C, rms)
    code = code_for(monkeypatch, arch, norms, 'norm_backward_kernel', lambda: norm_backward(*inputs))
    for kind, most in ('ld', 2), ('st', 0):
        widths = re.findall(rf'\b{kind}\.global\.(\S+)', code.asm['ptx'])
        assert widths.count('v4.b32') > len(widths) / 2 and sum(w != 'v4.b32' for w in widths) <= most
    assert '.NaN' not in code.asm['ptx']
    assert usage(code, arch)[1] <= 32
    assert code.metadata.shared + 1024 <= 100 << 10     # sm_89's and sm_120's
