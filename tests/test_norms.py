"""fp8/kernels/norms.py: the torch form against model.Norm, the Triton kernel against the torch form (in an
interpreter), and compiled for GPUs that are not there."""
import types

import pytest
import torch

from conftest import run
from fp8gpt.fp8.kernels import norms
from model import Norm
from triton_tools import code_for, usage

# what PRESETS norm: width, rms; and for which GPU, sm_
PRESETS = (768, False, 90), (1024, True, 90), (1280, False, 90), (1600, False, 100)
KINDS = pytest.mark.parametrize('rms', [False, True], ids=['layer', 'rms'])


def steps(a, b):
    """How many representable numbers lie between a and b, of one dtype; 1 is next to each other."""
    def place(tensor):
        bits = 8 * tensor.itemsize
        codes = tensor.contiguous().view(getattr(torch, f'int{bits}')).long()
        return torch.where(codes < 0, -(codes + 2**(bits - 1)), codes)
    return (place(a) - place(b)).abs()


def nearly_equal(a, b):
    """Whether few values differ, and those by their last bit: statistics that differ by a few 2**-22 move one
    rounding to bf16 in 2**12."""
    apart = steps(a, b)
    return apart.max() <= 1 and (apart > 0).sum() <= 1 + apart.numel() * 2**-12


def plain(M, C, rms):
    """A model's norm, its inputs x and delta, and a gradient (M, C)."""
    torch.manual_seed(C)
    norm = Norm(types.SimpleNamespace(norm_eps=1e-5, norm='rmsnorm' if rms else 'layernorm', bias=True), C)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(C) / 4)
    return norm, *torch.randn(3, M, C).bfloat16()


def statistics(x, norm):
    """Return the mean, None for RMSNorm, and rstd of x (M, C), each (M,)."""
    mean = None if norm.rms else x.float().mean(1)
    centred = x.float() if norm.rms else x.float() - mean[:, None]
    return mean, (centred.square().mean(1) + norm.eps).rsqrt()


# ------------------------------------------------------------------------------------------- the torch form

@KINDS
def test_backward_is_autograds(rms):
    norm, x, dy, residual = plain(64, 768, rms)
    total = x.clone().requires_grad_()
    torch.autograd.backward([norm(total), total], [dy, residual])
    dx, dweight, dbias = norms.norm_backward(dy, x, *statistics(x, norm), norm.weight.detach(), residual)
    assert nearly_equal(dx, total.grad)
    torch.testing.assert_close(dweight.sum(0), norm.weight.grad, rtol=1e-5, atol=1e-4)  # fp32 sums of 64
    if rms:
        assert dbias.shape == (0, 768)
    else:
        torch.testing.assert_close(dbias.sum(0), norm.bias.grad, rtol=1e-5, atol=1e-4)


# --------------------------------------------------------------------------------------- what a compiler sees

@KINDS
def test_a_compiler_is_told_the_right_shapes(rms):
    norm, x, dy, _ = plain(32, 80, rms)
    arguments = dy, x, *statistics(x, norm), norm.weight.detach(), dy
    torch.library.opcheck(norms.norm_backward, arguments, test_utils=('test_schema', 'test_faketensor'))


# ------------------------------------------------------------------------------------------------ the kernels

@pytest.fixture(scope='module')
def interpreted(tmp_path_factory):
    """{case: (kernel's outputs, torch form's)}"""
    pytest.importorskip('triton', reason='the kernels are Triton\'s')
    path = tmp_path_factory.mktemp('interpreted') / 'results.pt'
    run('tests/interpreted_norms.py', path, fork=False, env={'TRITON_INTERPRET': '1'})
    return torch.load(path)


@pytest.mark.slow
def test_the_kernel_computes_what_the_torch_form_does(interpreted):
    """Statistics are sums of another order; one value in 2**12, and one at least, may be a neighbour. Each
    program sums its own blocks."""
    wrong = []
    for case, (kernels, torchs) in interpreted.items():
        known = torchs[0].float().isfinite()
        right = [torch.equal(known, kernels[0].float().isfinite()),
                 known.sum() == 0 or nearly_equal(kernels[0][known], torchs[0][known])]
        right += [torch.allclose(kernels[i].sum(0), torchs[i].sum(0), rtol=1e-5, atol=1e-4, equal_nan=True)
                  for i in (1, 2)]
        wrong += [] if all(right) else [(case, right)]
    assert wrong == []
    assert max(len(kernels[1]) for kernels, _ in interpreted.values()) == 4


# ----------------------------------------------------------------------------------- compiled, without a GPU

@pytest.mark.slow
@pytest.mark.parametrize('C, rms, arch', PRESETS)
def test_the_kernel_compiles_for_the_presets(monkeypatch, C, rms, arch):
    pytest.importorskip('triton', reason='the kernel is Triton\'s')
    norm, x, dy, _ = plain(32, C, rms)
    code = code_for(
        monkeypatch, arch, norms, 'norm_backward_kernel',
        lambda: norms.norm_backward(dy, x, *statistics(x, norm), norm.weight.detach(), dy))
    assert usage(code, arch)[1] <= 32
