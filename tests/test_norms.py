"""fp8/kernels/norms.py: torch forms against model.Norm and fp8_linear.Quantizer, Triton kernels against
the torch forms (in an interpreter), and compiled for GPUs that are not there."""
import re
import subprocess
import types

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fp8gpt.fp8.linear import DeviceError
from conftest import run
from fp8gpt.fp8.linear import E4M3, E5M2, TENSOR, Quantizer
from fp8gpt.fp8.kernels import norms
from model import Norm

# what PRESETS norm: width, rms; a dtype, and for which GPU, sm_
PRESETS = (768, False, E4M3, 90), (1024, True, E4M3, 90), (1280, False, E5M2, 90), (1600, False, E4M3, 100)
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


def applied(norm, x, delta, scale, dtype=E4M3):
    """norms.norm by a module's parameters."""
    weight, bias = norm.weight.detach(), None if norm.bias is None else norm.bias.detach()
    return norms.norm(x, delta, weight, bias, norm.eps, norm.rms, scale, dtype)


# ------------------------------------------------------------------------------------------ the torch forms

@KINDS
def test_what_a_plain_model_norms_and_quantises(rms):
    norm, x, delta, _ = plain(64, 768, rms)
    y = norm(x + delta).detach()
    for dtype, scale in ((E4M3, 20.0), (E5M2, 20.0), (E4M3, 1000.0), (E5M2, 1e5)):      # two beyond the range
        quantised = Quantizer(dtype, TENSOR, False, 0)(y, torch.tensor(scale), y.abs().amax())
        total, _, _, data, data_t, partials = applied(norm, x, delta, torch.tensor(scale), dtype)
        assert torch.equal(total, x + delta)
        assert nearly_equal(data, quantised.data)
        assert torch.equal(data_t.float(), data.t().float())
        assert steps(partials.amax().bfloat16(), y.abs().amax()) <= 1


@KINDS
def test_without_a_delta_and_a_scale_they_are_not_returned(rms):
    norm, x, *_ = plain(32, 80, rms)
    total, mean, rstd, data, data_t, partials = applied(norm, x, None, None)
    shapes = [tuple(tensor.shape) for tensor in (total, mean, rstd, data, data_t)]
    assert shapes == [(0, 80), (0,) if rms else (32,), (32,), (0, 80), (80, 0)]
    assert steps(partials.amax().bfloat16(), norm(x).detach().abs().amax()) <= 1


@KINDS
def test_the_second_reading_casts_what_the_first_would_have(rms):
    norm, x, delta, _ = plain(64, 768, rms)
    total, mean, rstd, data, data_t, _ = applied(norm, x, delta, torch.tensor(20.0))
    bias = None if norm.bias is None else norm.bias.detach()
    again = norms.norm_cast(total, mean, rstd, norm.weight.detach(), bias, rms, torch.tensor(20.0), E4M3)
    assert [(a.float() == b.float()).all() for a, b in zip(again, (data, data_t))] == [True, True]


@KINDS
def test_backward_is_autograds(rms):
    norm, x, dy, residual = plain(64, 768, rms)
    _, mean, rstd, *_ = applied(norm, x, None, None)
    for above in (None, residual):
        norm.zero_grad()
        total = x.clone().requires_grad_()
        torch.autograd.backward([norm(total), total], [dy, torch.zeros_like(dy) if above is None else above])
        dx, dweight, dbias, partials = norms.norm_backward(
            dy, x, mean, rstd, norm.weight.detach(), rms, above)
        assert nearly_equal(dx, total.grad)
        torch.testing.assert_close(dweight.sum(0), norm.weight.grad, rtol=1e-5, atol=1e-4)  # fp32 sums of 64
        if rms:
            assert dbias.shape == (0, 768)
        else:
            torch.testing.assert_close(dbias.sum(0), norm.bias.grad, rtol=1e-5, atol=1e-4)
        assert partials.amax() == dx.abs().amax()


def test_shapes_that_no_fp8_multiplication_takes_are_refused():
    for M, C in ((24, 64), (32, 72)):
        norm, x, *_ = plain(M, C, True)
        with pytest.raises(ValueError, match=f'multiples of 16, not {M} x {C}'):
            applied(norm, x, None, None)


def test_a_kernel_without_triton_says_what_to_install(monkeypatch):
    monkeypatch.setattr(norms, 'triton', None)
    monkeypatch.setattr(norms, 'INTERPRETED', True)
    norm, x, *_ = plain(16, 64, True)
    with pytest.raises(DeviceError, match='pip install triton'):
        applied(norm, x, None, None)


# --------------------------------------------------------------------------------------- what a compiler sees

def every_op(M, C, rms, dtype=E4M3):
    """(name, arguments) of each op."""
    norm, x, delta, dy = plain(M, C, rms)
    weight, bias, scale = norm.weight.detach(), None if rms else norm.bias.detach(), torch.tensor(20.0)
    total, mean, rstd, *_ = applied(norm, x, delta, None)
    yield 'norm', (x, delta, weight, bias, 1e-5, rms, scale, dtype)
    yield 'norm', (x, None, weight, bias, 1e-5, rms, None, dtype)
    yield 'norm_cast', (total, mean, rstd, weight, bias, rms, scale, dtype)
    yield 'norm_backward', (dy, total, mean, rstd, weight, rms, delta)


@KINDS
def test_a_compiler_is_told_the_right_shapes(rms):
    for name, arguments in every_op(32, 80, rms):
        torch.library.opcheck(getattr(norms, name), arguments, test_utils=('test_schema', 'test_faketensor'))


def test_sums_over_tokens_stay_small_beside_the_tokens():
    """4,096 tokens are 512 blocks, and 264 programs: each of 132 multiprocessors sums for two."""
    with FakeTensorMode(), torch.device('cuda'):
        dy = torch.empty(4096, 1024, dtype=torch.bfloat16)
        mean, weight = torch.empty(4096), torch.empty(1024)
        _, dweight, dbias, _ = norms.norm_backward(dy, dy, mean, mean, weight, False, None)
    assert dweight.shape == dbias.shape == (264, 1024)


# ------------------------------------------------------------------------------------------------ the kernels

@pytest.fixture(scope='module')
def interpreted(tmp_path_factory):
    """{case: {op: (kernel's outputs, torch form's)}}"""
    pytest.importorskip('triton', reason='the kernels are Triton\'s')
    path = tmp_path_factory.mktemp('interpreted') / 'results.pt'
    run('tests/interpreted_norms.py', path, fork=False, env={'TRITON_INTERPRET': '1'})
    return torch.load(path)


def outputs(interpreted, op, number):
    """(case, the kernel's, the torch form's) output of that number, of all cases."""
    for case, results in interpreted.items():
        if op in results:
            kernels, torchs = results[op]
            yield case, kernels[number], torchs[number]


EXACT = [('norm', 0), ('norm', 1), ('norm', 3), ('norm', 4), ('norm_cast', 0), ('norm_cast', 1),
         ('norm_backward', 0)]      # total, mean, FP8 codes, gradients


@pytest.mark.slow
def test_kernels_compute_what_the_torch_forms_do(interpreted):
    """Statistics are sums of another order; one value in 2**12, and one at least, may be a neighbour."""
    wrong = []
    for op, number in EXACT:
        for case, kernels, torchs in outputs(interpreted, op, number):
            known = torchs.float().isfinite()
            if not torch.equal(known, kernels.float().isfinite()) or not (
                    known.sum() == 0 or nearly_equal(kernels[known], torchs[known])):
                wrong.append((op, number, case))
    for case, kernels, torchs in outputs(interpreted, 'norm', 2):
        finite = torchs.isfinite()
        if not torch.equal(finite, kernels.isfinite()) or steps(kernels, torchs)[finite].max() > 8:
            wrong.append(('rstd', case))    # 8 of fp32's last bits, over sums of up to 1600 values
    for op, number in (('norm', 5), ('norm_backward', 3)):
        for case, kernels, torchs in outputs(interpreted, op, number):
            close = torch.isclose(kernels.amax(), torchs.amax(), rtol=2**-8, equal_nan=True)
            if not close or kernels.amax().isfinite() != (case not in ('nan', 'inf')):
                wrong.append((op, 'amax', case))
    for number in (1, 2):       # each program sums its own blocks
        for case, kernels, torchs in outputs(interpreted, 'norm_backward', number):
            if not torch.allclose(kernels.sum(0), torchs.sum(0), rtol=1e-5, atol=1e-4, equal_nan=True):
                wrong.append(('sums', number, case))
    assert wrong == []
    data = interpreted['beyond the range']['norm'][0][3].float()
    assert (data.abs() == 57344).float().mean() > 0.3
    assert max(len(results['norm_backward'][0][1]) for results in interpreted.values()) == 4


# ----------------------------------------------------------------------------------- compiled, without a GPU

class Launches:
    """In a kernel's place: keeps what it is launched with, by name."""

    def __init__(self, kernel):
        self.kernel, self.arguments = kernel, None

    def __getitem__(self, grid):
        def launch(inputs, outputs, **others):
            self.arguments = {'inputs': inputs, 'outputs': outputs, **others}
        return launch


NAMES = {torch.bfloat16: '*bf16', torch.float32: '*fp32', E4M3: '*fp8e4nv', E5M2: '*fp8e5'}


def compiled(launches, capability):
    """A launch's kernel as Triton makes it for a GPU, where pointers and M are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    constants, aligned = {}, {}

    def type_of(value, *place):
        if isinstance(value, tuple):
            return tuple(type_of(one, *place, i) for i, one in enumerate(value))
        if value is None or launches.kernel.params[place[0]].is_constexpr:
            constants[place] = value
            return 'constexpr'
        if isinstance(value, float):
            return 'fp32'
        aligned[place] = [['tt.divisibility', 16]]
        return 'i32' if isinstance(value, int) else NAMES[value.dtype]
    options = dict(launches.arguments)
    names = [parameter.name for parameter in launches.kernel.params]
    signature = {name: type_of(options.pop(name), place) for place, name in enumerate(names)}
    source = ASTSource(launches.kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget('cuda', capability, 32), options=options)


def spilled(kernel, folder):
    """Bytes of stack that a thread has: what did not fit its registers."""
    import triton
    (folder / 'kernel.cubin').write_bytes(kernel.asm['cubin'])
    command = triton.knobs.nvidia.cuobjdump.path, '-res-usage', folder / 'kernel.cubin'
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r'STACK:(\d+)', text)[1])


@pytest.mark.slow
@pytest.mark.parametrize('C, rms, dtype, capability', PRESETS)
@pytest.mark.parametrize('name', ['norm', 'norm_cast', 'norm_backward'])
def test_kernels_compile_for_the_presets(monkeypatch, tmp_path, name, C, rms, dtype, capability):
    pytest.importorskip('triton', reason='the kernels are Triton\'s')
    arguments = next(arguments for op, arguments in every_op(32, C, rms, dtype) if op == name)
    launches = Launches(getattr(norms, f'{name}_kernel'))
    monkeypatch.setattr(norms, f'{name}_kernel', launches)
    monkeypatch.setattr(norms, 'INTERPRETED', True)
    getattr(norms, name)(*arguments)
    kernel = compiled(launches, capability)
    ptx = kernel.asm['ptx']
    assert not re.search(r'(min|max)\S*\.NaN|(min|max)imumf', ptx + kernel.asm['ttgir'])
    kind = 'e4m3' if dtype == E4M3 else 'e5m2'
    casts = set() if name == 'norm_backward' else {f'cvt.rn.satfinite.{kind}x2.f32'}
    assert set(re.findall(r'cvt\S*e[45]m[23]\S*', ptx)) == casts
    assert not re.search(r'(min|max)\S*\.f32', ptx), 'the cast saturates by itself'
    assert spilled(kernel, tmp_path) <= 32
