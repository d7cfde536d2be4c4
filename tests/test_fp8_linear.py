"""The casts and matrix multiplications against fp64, torchao, and CUDA's own checks."""
import dataclasses
import itertools
import re
import shutil

import pytest
import torch
from torch._subclasses import FakeTensorMode

from backends import SCALING, block_scaled_mm_op, blocked_layout, native_mm
from fp8_linear import (
    E4M3, E5M2, FORMATS, RECIPES, TENSOR, Arithmetic, Float8Tensor, Quantizer, decode, emulated_mm,
    linear_backward, linear_forward, quantizers, scaled_mm)
from fp8_models import NATIVE_ON_A_CPU
from helpers import random, relative, same_bits, spied
from model import PRESETS

M, K, N = 128, 384, 256
CELLS = list(itertools.product(RECIPES, FORMATS))
NATIVE_ON_CPU = [cell for cell in CELLS if cell[0] in NATIVE_ON_A_CPU]


def operands():
    return random(M, K, seed=1), random(N, K, seed=2, dtype=torch.float32), random(M, N, seed=3)


def linear(recipe, format, mm, x, w, dy):
    """(y, dx, dw), and the six operands that were multiplied."""
    spy, multiplied = spied(mm)
    arithmetic = Arithmetic(quantizers(recipe, format), spy)
    y, *saved = linear_forward(x, w, arithmetic)
    return (y, *linear_backward(dy, *saved, arithmetic, torch.float32)), multiplied


def unrounded(a, b, out_dtype, bias=None, fast=False):
    return emulated_mm(a, b, torch.float32)


# ------------------------------------------------------------------------------------------------- quantising

@pytest.mark.parametrize('dtype, largest', [(E4M3, 448.0), (E5M2, 57344.0)])
@pytest.mark.parametrize('magnitude', [1e-6, 1.0, 1e4])
def test_values_round_to_the_nearest_representable(dtype, largest, magnitude):
    grid = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    grid = grid[grid.isfinite()].unique()
    x = random(40, 32, dtype=torch.float32) * magnitude
    data, scale_inv, _ = Quantizer(dtype, TENSOR, False, 0)(x)
    scale = largest / x.abs().max().double()
    assert abs(scale_inv.item() * scale - 1) < 1e-6
    distance = (x.double() * scale).unsqueeze(-1).sub(grid).abs()
    chosen = (x.double() * scale - data.double()).abs()
    assert (chosen <= distance.min(-1).values * (1 + 1e-4) + 1e-4).all()
    assert data.double().abs().max() == largest  # the whole range is used


@pytest.mark.parametrize('power', range(-120, 121, 20))
@pytest.mark.parametrize('power_of_two', [False, True])
@pytest.mark.parametrize('block', [TENSOR, (1, 0), (1, 32), (128, 128)], ids=str)
@pytest.mark.parametrize('dtype', [E4M3, E5M2], ids=['e4m3', 'e5m2'])
def test_magnitude_costs_no_bits(dtype, block, power_of_two, power):
    """Of gradients, divided by the step's targets, whole blocks may be of 1e-15 and less."""
    x = random(128, 128, dtype=torch.float32)
    for margin in (0, 4):
        quantize = Quantizer(dtype, block, power_of_two, margin)
        small = quantize(x * 2.0**power)
        assert (small.scale_inv >= torch.finfo(torch.float32).tiny).all()
        assert (1 / small.scale_inv).isfinite().all()
        back, expected = small.dequantize().double() * 2.0**-power, quantize(x).dequantize().double()
        noise, usual = ((x - each).square().mean() for each in (back, expected))
        assert usual / 1.4 < noise < 1.4 * usual  # 1.5 dB: where the scale falls between powers of two


@pytest.mark.parametrize('recipe', RECIPES)
def test_edges(recipe):
    quantize = quantizers(recipe, 'e4m3').x
    zero = quantize(torch.zeros(128, 128))
    assert (zero.data.float() == 0).all()
    assert zero.scale_inv.isfinite().all()
    assert (zero.scale_inv > 0).all()
    for bad in (float('nan'), float('inf')):
        x = torch.ones(128, 128)
        x[3, 5] = bad
        product = emulated_mm(quantize(x), quantize(torch.ones(128, 128)), torch.float32)
        assert not product[3].isfinite().any()


@pytest.mark.parametrize('recipe', RECIPES)
@pytest.mark.parametrize('margin', [0, 2])
def test_a_block_fills_its_range_up_to_the_margin(recipe, margin):
    x = random(256, 256) * torch.exp2(random(256, 1, seed=5, dtype=torch.float32) * 4)
    quantize = quantizers(recipe, 'e4m3', margin).x
    data, scale_inv, _ = quantize(x)
    rows, columns = (size or 256 for size in quantize.block)
    tiles = data.float().view(256 // rows, rows, 256 // columns, columns).abs().amax((1, 3)) * 2**margin
    assert scale_inv.shape == (256 // rows, 256 // columns)
    assert (tiles <= 464).all()
    assert (tiles > (208 if quantize.power_of_two else 440)).all()  # a power of two may leave half of it
    if quantize.power_of_two:
        assert (scale_inv.log2() == scale_inv.log2().round()).all()


def test_delayed_takes_the_scale_it_is_given_and_shows_what_is_not_finite():
    quantize, x = quantizers('delayed', 'hybrid').x, random(16, 16)
    scale = torch.tensor(448 / 2.0)  # amax 2 of earlier steps: larger values are clamped
    quantised = quantize(x, scale, x.abs().amax().float())
    assert quantised.scale_inv.item() == pytest.approx(2 / 448)
    assert torch.equal(quantised.dequantize().abs() >= 2, x.float().abs() > 1.93)
    x[0, 0] = float('inf')
    assert quantize(x, scale, x.abs().amax().float()).scale_inv.isnan().all()


def test_a_block_far_below_the_others_keeps_its_digits():
    """What fine scales are for: of two rows a million apart, per-tensor scaling flushes one to zero."""
    x = random(128, 128)
    x[1] *= 2**-20
    lost = {recipe: relative(quantizers(recipe, 'e4m3').x(x).dequantize()[1], x[1]) for recipe in RECIPES}
    assert lost['tensorwise'] == 1
    for recipe in ('rowwise', 'blockwise', 'mxfp8'):
        assert lost[recipe] < 0.05


@pytest.mark.filterwarnings('ignore')
def test_mxfp8_is_torchaos_bit_for_bit():
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode
    from torchao.prototype.mx_formats.utils import to_blocked
    powers = torch.randint(-20, 20, (200, 1), generator=torch.Generator().manual_seed(1)).float()
    x = random(200, 320) * torch.exp2(powers).bfloat16()
    ours = quantizers('mxfp8', 'e4m3').x(x)
    theirs = MXTensor.to_mx(x, E4M3, 32, ScaleCalculationMode.RCEIL)
    assert same_bits(ours.data, theirs.qdata)
    assert torch.equal(ours.scale_inv, theirs.scale.float())
    assert same_bits(blocked_layout(ours), to_blocked(theirs.scale))


# ------------------------------------------------------------------------------------------------ multiplying

@pytest.mark.parametrize('recipe, format', CELLS)
def test_emulate_against_fp64(recipe, format):
    """Rounding to 3 (2) bits of mantissa errs by at most 2**-4 (2**-3), uniformly: about 2.5% (5%) of an
    operand's norm, and sqrt(2) of that for two; a bf16 wgrad has only the output's rounding."""
    x, w, dy = operands()
    (y, dx, dw), _ = linear(recipe, format, emulated_mm, x, w, dy)
    assert y.dtype == torch.bfloat16
    assert dx.dtype == torch.bfloat16
    assert dw.dtype == torch.float32
    one, two = 0.027, 0.053
    of_x, of_w, of_dy = (two if dtype == E5M2 else one for dtype in FORMATS[format])
    x, w, dy = x.double(), w.double(), dy.double()
    bound_of_dw = (of_dy**2 + one**2)**0.5 if quantizers(recipe, format).xt else 0.003
    for found, exact, bound in (
            (y, x @ w.t(), (of_x**2 + of_w**2)**0.5),
            (dx, dy @ w, (of_dy**2 + of_w**2)**0.5),
            (dw, dy.t() @ x, bound_of_dw)):
        assert bound / 2 < relative(found, exact) < bound * 1.1


@pytest.mark.parametrize('recipe, format', NATIVE_ON_CPU)
def test_native_agrees_with_emulate_and_operands_are_equal(recipe, format):
    native, native_operands = linear(recipe, format, scaled_mm, *operands())
    emulated, emulated_operands = linear(recipe, format, emulated_mm, *operands())
    for a, b in zip(native, emulated):
        assert relative(a, b) < 1e-3
    assert len(native_operands) == (6 if quantizers(recipe, format).xt else 4)
    assert len(native_operands) == len(emulated_operands)
    for a, b in zip(native_operands, emulated_operands):
        assert a.data.dtype == b.data.dtype
        assert same_bits(a.data, b.data)
        assert torch.equal(a.scale_inv, b.scale_inv)
        assert a.data.is_contiguous()


@pytest.mark.parametrize('recipe', NATIVE_ON_A_CPU)
def test_a_bias_is_added_before_the_output_is_rounded(recipe):
    x, w, _ = operands()
    bias, kinds = random(N, seed=4, dtype=torch.float32), quantizers(recipe, 'e4m3')
    exact, emulated, native = (
        linear_forward(x, w, Arithmetic(kinds, mm), b)[0]
        for mm, b in ((unrounded, None), (emulated_mm, bias), (scaled_mm, bias)))
    assert torch.equal(emulated, (exact + bias.bfloat16().float()).bfloat16())
    assert relative(native, emulated) < 1e-3


@pytest.mark.parametrize('recipe', ['tensorwise', 'rowwise', 'rowwise_gw_hp'])
def test_against_torchao(recipe):
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear
    x, w, dy = operands()
    name = {'rowwise_gw_hp': 'rowwise_with_gw_hp'}.get(recipe, recipe)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(name), emulate=True)
    theirs = Float8Linear(K, N, bias=False, config=config).bfloat16()
    theirs.weight.data.copy_(w)
    leaf = x.clone().requires_grad_()
    y = theirs(leaf)
    y.backward(dy)
    format = 'hybrid' if recipe == 'tensorwise' else 'e4m3'
    ours, _ = linear(recipe, format, emulated_mm, x, theirs.weight.detach().float(), dy)
    # they round scales through other steps: a value on the edge may fall to the other side
    for a, b in zip(ours, (y, leaf.grad, theirs.weight.grad)):
        assert relative(a, b) < 5e-3


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
    a, b = (Float8Tensor(data, torch.ones(1, 1), TENSOR) for data in (a, b))
    with pytest.raises(ValueError, match=message):
        mm(a, b, torch.bfloat16)


def trace(recipe, format, tokens, K, N):
    """A linear at this shape under torch's own checks of what CUDA can do."""
    with FakeTensorMode():
        x = torch.empty(tokens, K, device='cuda', dtype=torch.bfloat16)
        w = torch.empty(N, K, device='cuda')
        dy = torch.empty(tokens, N, device='cuda', dtype=torch.bfloat16)
        (y, dx, dw), _ = linear(recipe, format, native_mm, x, w, dy)
        assert (y.shape, dx.shape, dw.shape) == ((tokens, N), (tokens, K), (N, K))
        assert dw.dtype == torch.float32


@pytest.mark.parametrize('recipe, format', CELLS)
def test_traces_for_cuda(recipe, format):
    trace(recipe, format, M, K, N)


@pytest.mark.parametrize('recipe', RECIPES)
@pytest.mark.parametrize('preset', PRESETS)
def test_traces_for_cuda_at_the_presets_shapes(preset, recipe):
    config, format, multiple = PRESETS[preset], RECIPES[recipe].format, RECIPES[recipe].multiple
    for _, K, N in config.linears()[:4]:  # of a block
        if K % multiple == N % multiple == 0:  # else the linear stays in bf16
            for sequences in (1, 12, 64):
                trace(recipe, format, sequences * config.block_size, K, N)


def test_the_trace_has_cudas_checks():
    """torch itself refuses a row-major right side, and a scale that is not laid out as cuBLAS wants it."""
    with FakeTensorMode():
        one = torch.ones((), device='cuda')
        left, right = (torch.empty(256, 256, device='cuda').to(E4M3) for _ in range(2))
        with pytest.raises(RuntimeError):
            torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16)
        scale_a, scale_b = torch.ones(256, 2, device='cuda'), torch.ones(2, 2, device='cuda')
        kinds = [SCALING[1, 128], SCALING[128, 128]]
        with pytest.raises(RuntimeError):
            block_scaled_mm_op(left, right.t(), scale_a, scale_b, kinds, [], torch.bfloat16)


@pytest.mark.skipif(not shutil.which('g++'), reason='Inductor needs a C++ compiler')
@pytest.mark.parametrize('recipe', ['tensorwise', 'delayed', 'mxfp8'])
def test_inductor_fuses_the_casts_and_shows_what_is_not_finite(recipe):
    """A norm and both casts of its output in one kernel, eager's values but where the norm's rounding to bf16
    is fused away; an inf comes out as NaN or inf, however the arithmetic is simplified."""
    from torch._inductor.utils import run_and_get_code
    q = quantizers(recipe, 'e4m3')

    def norm_and_cast(x):
        if x.dtype == torch.float32:
            x = torch.nn.functional.rms_norm(x, (256,)).bfloat16()
        if recipe == 'delayed':
            return q.x.both(x, q.xt, torch.tensor(448 * 0.2), x.abs().amax().float())
        return q.x.both(x, q.xt)

    x = random(128, 256, dtype=torch.float32)
    compiled, code = run_and_get_code(torch.compile(norm_and_cast, fullgraph=True), x)
    assert len(re.findall(r'^\s+cpp_fused\w+\(', code[0], re.M)) == 1
    for a, b in zip(compiled, norm_and_cast(x)):
        assert torch.equal(a.scale_inv, b.scale_inv)
        assert (a.data.view(torch.uint8) != b.data.view(torch.uint8)).float().mean() < 0.05
        assert relative(a.dequantize(), b.dequantize()) < 0.02
    x = random(128, 256)
    x[3, 4] = float('inf')
    for operand in torch.compile(norm_and_cast, fullgraph=True)(x):
        assert not operand.dequantize().isfinite().all()


@pytest.mark.parametrize('dtype', [E4M3, E5M2])
def test_decode_gives_every_value_bit_for_bit(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    wanted, got = codes.float(), decode(codes)
    assert got.dtype == torch.float32
    assert torch.equal(got.isnan(), wanted.isnan())
    assert same_bits(got[~got.isnan()], wanted[~wanted.isnan()])


def test_decode_leaves_its_input_and_takes_a_transposed_one():
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    decoded = decode(codes.view(E4M3).t()).nan_to_num()
    assert torch.equal(codes, torch.arange(256, dtype=torch.uint8).view(16, 16))
    assert torch.equal(decoded, codes.view(E4M3).float().t().nan_to_num())
