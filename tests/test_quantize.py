"""The casts and matrix multiplications against fp64, torchao, and CUDA's own checks."""
import dataclasses
import itertools
import re
import shutil

import pytest
import torch
from torch._subclasses import FakeTensorMode

import quantize as q
from quantize import E4M3, E5M2, FORMATS, TABLE, Cast, Operand, casts, dequantize, emulated_mm, linear_backward, linear_forward, scaled_mm

M, K, N = 128, 384, 256
CELLS = list(itertools.product(TABLE, FORMATS))
NATIVE_ON_CPU = [cell for cell in CELLS if cell[0] in (('tensorwise', 'delayed', 'rowwise', 'rowwise_gw_hp') if torch.__version__ >= (2, 13) else ('tensorwise', 'delayed'))]


def random(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def operands():
    return random(M, K, seed=1), random(N, K, seed=2, dtype=torch.float32), random(M, N, seed=3)


def linear(recipe, fmt, mm, x, w, dy):
    """y, dx, dw, and the six operands that were multiplied."""
    seen = []
    def spy(a, b, *rest, **kw):
        seen.extend([a, b])
        return mm(a, b, *rest, **kw)
    kit = casts(recipe, fmt)
    y, *saved = linear_forward(x, w, kit, spy)
    return (y, *linear_backward(dy, *saved, kit, spy, torch.float32)), seen


@pytest.mark.parametrize('dtype, largest', [(E4M3, 448.0), (E5M2, 57344.0)])
@pytest.mark.parametrize('magnitude', [1e-6, 1.0, 1e4])
def test_values_round_to_the_nearest_representable(dtype, largest, magnitude):
    grid = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    grid = grid[grid.isfinite()].unique()
    x = random(40, 32, dtype=torch.float32) * magnitude
    values, inverse, _ = q.quantize(x, Cast(dtype, q.TENSOR, False, 0))
    scale = largest / x.abs().max().double()
    assert abs(inverse.item() * scale - 1) < 1e-6
    distance = (x.double() * scale).unsqueeze(-1).sub(grid).abs()
    chosen = (x.double() * scale - values.double()).abs()
    assert (chosen <= distance.min(-1).values * (1 + 1e-4) + 1e-4).all()
    assert values.double().abs().max() == largest  # the whole range is used


@pytest.mark.parametrize('recipe', TABLE)
def test_edges(recipe):
    cast = casts(recipe, 'e4m3').x
    zero = q.quantize(torch.zeros(128, 128), cast)
    assert (zero.values.float() == 0).all() and zero.inverse.isfinite().all() and (zero.inverse > 0).all()
    for bad in (float('nan'), float('inf')):
        x = torch.ones(128, 128)
        x[3, 5] = bad
        assert not emulated_mm(q.quantize(x, cast), q.quantize(torch.ones(128, 128), cast), torch.float32)[3].isfinite().any()


@pytest.mark.parametrize('recipe', TABLE)
@pytest.mark.parametrize('margin', [0, 2])
def test_a_block_fills_its_range_up_to_the_margin(recipe, margin):
    x = random(256, 256) * torch.exp2(random(256, 1, seed=5, dtype=torch.float32) * 4)
    cast = casts(recipe, 'e4m3', margin).x
    values, inverse, _ = q.quantize(x, cast)
    rows, columns = (size or 256 for size in cast.block)
    tiles = values.float().view(256 // rows, rows, 256 // columns, columns).abs().amax((1, 3)) * 2**margin
    assert inverse.shape == (256 // rows, 256 // columns)
    assert ((tiles <= 464) & (tiles > (208 if cast.pow2 else 440))).all()  # a power of two may leave half of it
    if cast.pow2:
        assert (inverse.log2() == inverse.log2().round()).all()


def test_delayed_takes_the_scale_it_is_given_and_shows_what_is_not_finite():
    cast, x = casts('delayed', 'hybrid').x, random(16, 16)
    reach = torch.tensor(1 / 2.0)  # amax 2 of earlier steps: larger values are clamped
    values, inverse, _ = q.quantize(x, cast, reach, x.abs().amax().float())
    assert inverse.item() == pytest.approx(2 / 448) and torch.equal(dequantize(Operand(values, inverse, cast.block)).abs() >= 2, x.float().abs() > 1.93)
    x[0, 0] = float('inf')
    assert q.quantize(x, cast, reach, x.abs().amax().float()).inverse.isnan().all()


@pytest.mark.parametrize('recipe, fmt', CELLS)
def test_emulate_against_fp64(recipe, fmt):
    """Rounding to 3 (2) bits of mantissa errs by at most 2**-4 (2**-3), uniformly: about 2.5% (5%) of an operand's norm, and
    sqrt(2) of that for two; a bf16 wgrad has only the output's rounding."""
    x, w, dy = operands()
    (y, dx, dw), _ = linear(recipe, fmt, emulated_mm, x, w, dy)
    one, two = 0.027, 0.053
    of_x, of_w, of_dy = (two if dtype == E5M2 else one for dtype in FORMATS[fmt])
    x, w, dy = x.double(), w.double(), dy.double()
    for found, exact, bound in ((y, x @ w.t(), (of_x**2 + of_w**2)**0.5), (dx, dy @ w, (of_dy**2 + of_w**2)**0.5),
                                (dw, dy.t() @ x, (of_dy**2 + one**2)**0.5 if casts(recipe, fmt).xt else 0.003)):
        assert bound / 2 < relative(found, exact) < bound * 1.1
    assert y.dtype == dx.dtype == torch.bfloat16 and dw.dtype == torch.float32


@pytest.mark.parametrize('recipe, fmt', NATIVE_ON_CPU)
def test_native_agrees_with_emulate_and_operands_are_equal(recipe, fmt):
    native, native_operands = linear(recipe, fmt, scaled_mm, *operands())
    emulated, emulated_operands = linear(recipe, fmt, emulated_mm, *operands())
    assert all(relative(a, b) < 1e-3 for a, b in zip(native, emulated))
    assert len(native_operands) == len(emulated_operands) == (6 if casts(recipe, fmt).xt else 4)
    for a, b in zip(native_operands, emulated_operands):
        assert a.values.dtype == b.values.dtype and torch.equal(a.values.view(torch.uint8), b.values.view(torch.uint8)) and torch.equal(a.inverse, b.inverse)
        assert a.values.is_contiguous()


@pytest.mark.parametrize('recipe', ['tensorwise', 'rowwise', 'rowwise_gw_hp'])
def test_against_torchao(recipe):
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear
    x, w, dy = operands()
    config = Float8LinearConfig.from_recipe_name({'rowwise_gw_hp': 'rowwise_with_gw_hp'}.get(recipe, recipe))
    theirs = Float8Linear(K, N, bias=False, config=dataclasses.replace(config, emulate=True)).bfloat16()
    theirs.weight.data.copy_(w)
    leaf = x.clone().requires_grad_()
    y = theirs(leaf)
    y.backward(dy)
    ours, _ = linear(recipe, 'hybrid' if recipe == 'tensorwise' else 'e4m3', emulated_mm, x, theirs.weight.detach().float(), dy)
    # they round scales through other steps: a value on the edge may fall to the other side
    assert all(relative(a, b) < 5e-3 for a, b in zip(ours, (y, leaf.grad, theirs.weight.grad)))


@pytest.mark.filterwarnings('ignore')
def test_mxfp8_is_torchaos_bit_for_bit():
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode
    from torchao.prototype.mx_formats.utils import to_blocked
    x = random(200, 320) * torch.exp2(torch.randint(-20, 20, (200, 1), generator=torch.Generator().manual_seed(1)).float()).bfloat16()
    ours, theirs = q.quantize(x, casts('mxfp8', 'e4m3').x), MXTensor.to_mx(x, E4M3, 32, ScaleCalculationMode.RCEIL)
    assert torch.equal(ours.values.view(torch.uint8), theirs.qdata.view(torch.uint8)) and torch.equal(ours.inverse, theirs.scale.float())
    assert torch.equal(q._layout(ours).view(torch.uint8), to_blocked(theirs.scale).view(torch.uint8))


def test_a_block_far_below_the_others_keeps_its_digits():
    """What fine scales are for: of two rows a million apart, per-tensor scaling flushes one to zero."""
    x = random(128, 128)
    x[1] *= 2**-20
    lost = {recipe: relative(dequantize(q.quantize(x, casts(recipe, 'e4m3').x))[1], x[1]) for recipe in TABLE}
    assert lost['tensorwise'] == 1 and all(lost[recipe] < 0.05 for recipe in ('rowwise', 'blockwise', 'mxfp8'))


@pytest.mark.parametrize('mm', [scaled_mm, emulated_mm])
@pytest.mark.parametrize('a, b, message', [
    (torch.zeros(16, 24, dtype=E4M3), torch.zeros(16, 24, dtype=E4M3), 'multiples of 16'),
    (torch.zeros(16, 32, dtype=E4M3), torch.zeros(24, 32, dtype=E4M3), 'multiples of 16'),
    (torch.zeros(7, 32, dtype=E4M3), torch.zeros(16, 32, dtype=E4M3), 'multiples of 16'),
    (torch.zeros(16, 32, dtype=E4M3), torch.zeros(32, 16, dtype=E4M3).t(), 'contiguous along the sum'),
    (torch.zeros(32, 16, dtype=E4M3).t(), torch.zeros(16, 32, dtype=E4M3), 'contiguous along the sum'),
    (torch.zeros(16, 32, dtype=E5M2), torch.zeros(16, 32, dtype=E5M2), 'e5m2 and e5m2'),
])
def test_cudas_rules_hold_on_a_cpu(mm, a, b, message):
    with pytest.raises(ValueError, match=message):
        mm(*(Operand(values, torch.ones(1, 1), q.TENSOR) for values in (a, b)), torch.bfloat16)


@pytest.mark.parametrize('recipe, fmt', CELLS)
def test_traces_under_cudas_own_checks(recipe, fmt):
    with FakeTensorMode():
        x, w = torch.empty(M, K, device='cuda', dtype=torch.bfloat16), torch.empty(N, K, device='cuda')
        (y, dx, dw), seen = linear(recipe, fmt, scaled_mm, x, w, torch.empty(M, N, device='cuda', dtype=torch.bfloat16))
        assert (y.shape, dx.shape, dw.shape) == ((M, N), (M, K), (N, K)) and dw.dtype == torch.float32
        with pytest.raises(RuntimeError):  # the checks are there: torch itself refuses a row-major right side
            one = torch.ones((), device='cuda')
            torch._scaled_mm(seen[0].values, torch.empty(K, N, device='cuda').to(E4M3), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


@pytest.mark.skipif(not shutil.which('g++'), reason='Inductor needs a C++ compiler')
@pytest.mark.parametrize('recipe', ['tensorwise', 'delayed', 'mxfp8'])
def test_inductor_fuses_the_casts_and_shows_what_is_not_finite(recipe):
    """A norm and both casts of its output in one kernel, eager's values but where the norm's rounding to bf16 is fused away; an
    inf comes out as NaN or inf, however the arithmetic is simplified."""
    from torch._inductor.utils import run_and_get_code
    kit = casts(recipe, 'e4m3')

    def norm_and_cast(x):
        x = torch.nn.functional.rms_norm(x, (256,)).bfloat16() if x.dtype == torch.float32 else x
        delayed = (torch.tensor(0.2), x.abs().amax().float()) if recipe == 'delayed' else ()
        return q.quantize_both(x, kit.x, kit.xt, *delayed)
    x = random(128, 256, dtype=torch.float32)
    compiled, code = run_and_get_code(torch.compile(norm_and_cast, fullgraph=True), x)
    assert len(re.findall(r'^\s+cpp_fused\w+\(', code[0], re.M)) == 1
    for a, b in zip(compiled, norm_and_cast(x)):
        assert torch.equal(a.inverse, b.inverse) and (a.values.view(torch.uint8) != b.values.view(torch.uint8)).float().mean() < 0.05
        assert relative(dequantize(a), dequantize(b)) < 0.02
    x = random(128, 256)
    x[3, 4] = float('inf')
    for operand in torch.compile(norm_and_cast, fullgraph=True)(x):
        assert not dequantize(operand).isfinite().all()
