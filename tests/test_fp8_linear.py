"""The casts and matrix multiplications against fp64, torchao, and CUDA's own checks."""
import contextlib
import dataclasses
import functools
import itertools
import re
import shutil

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fp8gpt import fp8
from fp8gpt.fp8 import backends
from fp8gpt.fp8.backends import TORCHAO_RECIPES, blocked_layout, native_mm
from fp8gpt.fp8.linear import (
    E4M3, E5M2, FORMATS, RECIPES, TENSOR, Arithmetic, Float8Tensor, Quantizer, emulated_mm,
    quantizers, scaled_mm, values_in)
from fp8_models import ON_A_CPU, on_a_cpu
from helpers import products, random, relative, same_bits, spied
from model import GPT, PRESETS, GPTConfig, Linear

M, K, N = 128, 384, 256
CELLS = list(itertools.product(RECIPES, FORMATS))


def operands():
    return random(M, K, seed=1), random(N, K, seed=2, dtype=torch.float32), random(M, N, seed=3)


def linear(recipe, format, mm, x, w, dy):
    """(y, dx, dw), and the six operands that were multiplied."""
    spy, multiplied = spied(mm)
    arithmetic = Arithmetic(quantizers(recipe, format), spy)
    return products(x, w, dy, arithmetic), multiplied


@pytest.mark.parametrize('backend', ['native', 'emulate'])
def test_autocast_changes_no_bit_of_a_product(backend):
    """Around a whole model, as docs/fp8.md shows it, and around backward. fp16's weights run, too: under
    autocast, a CPU refuses to stack them."""
    autocast, found = functools.partial(torch.autocast, 'cpu', torch.bfloat16), {}
    for recipe, weights in itertools.product(RECIPES, (torch.float32, torch.float16)):
        linear = fp8.make_linear(on_a_cpu(backend, recipe), K, N).to(weights)
        for around in itertools.product((contextlib.nullcontext, autocast), repeat=2):
            x = operands()[0].requires_grad_()
            with around[0]():
                y = linear(x)
            with around[1]():
                gradients = torch.autograd.grad(y, [x, *linear.parameters()], operands()[2])
            plain = found.setdefault((recipe, weights), (y, *gradients))
            assert all(map(torch.equal, plain, (y, *gradients))), (recipe, weights, around)


@pytest.mark.parametrize('recipe', RECIPES)
def test_a_model_without_values_gives_shapes(recipe):
    for backend in 'native', 'emulate':
        with torch.device('meta'):
            linear = fp8.make_linear(on_a_cpu(backend, recipe), K, N)
            linear(torch.empty(M, K)).sum().backward()
        assert linear.weight.grad.shape == (N, K)


@pytest.mark.parametrize('backend, recipe', ON_A_CPU)
def test_strides_change_no_bit(backend, recipe):
    """Such as those of a convolution's channels, (B, C, T) as (B, T, C)."""
    linear = fp8.make_linear(on_a_cpu(backend, recipe), K, N)
    found = []
    for each in (lambda x: x), (lambda x: x.mT.contiguous().mT), (lambda x: torch.stack([x, -x], 1)[:, 0]):
        x, dy = (each(operand.view(2, M // 2, -1)) for operand in operands()[::2])
        y = linear(x.requires_grad_())
        found.append((y, *torch.autograd.grad(y, [x, *linear.parameters()], dy)))
    assert all(map(torch.equal, 2 * found[0], found[1] + found[2]))


def test_values_round_to_the_nearest_representable():
    for (dtype, largest), magnitude in itertools.product(((E4M3, 448.0), (E5M2, 57344.0)), (1e-6, 1.0, 1e4)):
        grid = torch.arange(256, dtype=torch.uint8).view(dtype).double()
        grid = grid[grid.isfinite()].unique()
        x = random(40, 32, dtype=torch.float32) * magnitude
        data, scale_inv, *_ = Quantizer(dtype, TENSOR, False, 0)(x)
        scale = largest / x.abs().max().double()
        assert abs(scale_inv.item() * scale - 1) < 2**-22
        distance = (x.double() * scale).unsqueeze(-1).sub(grid).abs().min(-1).values
        chosen = (x.double() * scale - data.double()).abs()
        assert (chosen - distance <= 2**-22 * largest).all()    # fp32's rounding of x * scale
        assert data.double().abs().max() == largest  # the whole range is used


def test_codes_are_read_exactly_in_any_layout():
    for dtype in E4M3, E5M2:
        codes = torch.arange(256, dtype=torch.uint8).view(16, 16).view(dtype)
        for data in codes, codes.t(), codes[::2]:
            values, factor = values_in(torch.float32, data)
            exact = data.float()
            same = (values * factor).view(torch.int32) == exact.view(torch.int32)   # -0, too
            assert (same | exact.isnan()).all()


def test_magnitude_costs_no_bits():
    """Of gradients, divided by the step's targets, whole blocks may be of 1e-15 and less."""
    x, wrong = random(128, 128, dtype=torch.float32), []
    for case in itertools.product((E4M3, E5M2), (TENSOR, (1, 0), (1, 32), (128, 128)), (False, True), (0, 4)):
        quantize = Quantizer(*case)
        usual = (x - quantize(x).dequantize().double()).square().mean()
        for power in range(-120, 121, 40):
            small = quantize(x * 2.0**power)
            finite = (small.scale_inv >= torch.finfo(torch.float32).tiny).all()
            finite &= (1 / small.scale_inv).isfinite().all()
            noise = (x - small.dequantize().double() * 2.0**-power).square().mean()
            # 1.5 dB: where the scale falls between powers of two
            if not (finite and usual / 1.4 < noise < 1.4 * usual):
                wrong.append((*case, power))
    assert wrong == []


def test_zeros_have_a_scale_what_is_not_finite_shows_and_a_block_fills_its_range_up_to_the_margin():
    for recipe, bad in itertools.product(RECIPES, (float('nan'), float('inf'))):
        quantize, x = quantizers(recipe, 'e4m3').x, torch.ones(128, 128)
        zero = quantize(0 * x)
        assert (zero.data.float() == 0).all()
        assert (zero.scale_inv.isfinite() & (zero.scale_inv > 0)).all()
        x[3, 5] = bad
        product = emulated_mm(quantize(x), quantize(torch.ones(128, 128)), torch.float32)
        assert not product[3].isfinite().any()
    x = random(256, 256) * torch.exp2(random(256, 1, seed=5, dtype=torch.float32) * 4)
    for recipe, margin in itertools.product(RECIPES, (0, 2)):
        quantize = quantizers(recipe, 'e4m3', margin).x
        data, scale_inv, *_ = quantize(x)
        rows, columns = (size or 256 for size in quantize.block)
        tiles = data.float().view(256 // rows, rows, 256 // columns, columns).abs().amax((1, 3)) * 2**margin
        assert scale_inv.shape == tiles.shape
        # a code's rounding apart; a power of two may leave half of the range
        assert (tiles <= 448 * (1 + 2**-4)).all()
        assert (tiles >= 448 * (1 - 2**-4) / (2 if quantize.power_of_two else 1)).all()
        if quantize.power_of_two:
            assert (scale_inv.log2() == scale_inv.log2().round()).all()


def test_delayed_takes_the_scale_it_is_given_and_shows_what_is_not_finite():
    quantize, x = quantizers('delayed', 'hybrid').x, random(16, 16)
    scale = torch.tensor(448 / 2.0)  # amax 2 of earlier steps: larger values are clamped
    quantised = quantize(x, scale)
    assert quantised.scale_inv.item() == pytest.approx(2 / 448)
    assert torch.equal(quantised.dequantize().abs() >= 2, x.float().abs() > 1.93)   # 432 of 448 rounds up
    kinds = quantizers('delayed', 'e5m2')       # x in e5m2, x^T in e4m3
    for operand, exact in zip(kinds.x.both(x, kinds.xt, torch.tensor(57344 / 4)), (x, x.t())):
        assert relative(operand.dequantize(), exact) < 0.06
    x[0, 0] = float('inf')
    assert quantize(x, scale).scale_inv.isnan().all()


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


def test_emulate_against_fp64():
    """Rounding to 3 (2) bits of mantissa errs by at most 2**-4 (2**-3), uniformly: about 2.5% (5%) of an
    operand's norm, and sqrt(2) of that for two; a bf16 wgrad has only the output's rounding."""
    wrong, one, two = [], 0.027, 0.053
    for recipe, format in CELLS:
        x, w, dy = operands()
        (y, dx, dw), _ = linear(recipe, format, emulated_mm, x, w, dy)
        assert y.dtype == dx.dtype == torch.bfloat16
        of_x, of_w, of_dy = (two if dtype == E5M2 else one for dtype in FORMATS[format])
        x, w, dy = x.double(), w.double(), dy.double()
        bound_of_dw = (of_dy**2 + one**2)**0.5 if quantizers(recipe, format).xt else 0.003
        for name, found, exact, bound in (
                ('y', y, x @ w.t(), (of_x**2 + of_w**2)**0.5),
                ('dx', dx, dy @ w, (of_dy**2 + of_w**2)**0.5),
                ('dw', dw, dy.t() @ x, bound_of_dw)):
            if not bound / 2 < relative(found, exact) < bound * 1.1:
                wrong.append((recipe, format, name))
    assert wrong == []


@pytest.mark.filterwarnings('ignore')     # of oneDNN's switch
def test_torchs_product_agrees_with_emulates_and_operands_are_equal():
    """By a CPU's torch._scaled_mm, which stands for a GPU's here; with oneDNN it may take a thousandfold."""
    recipes = 'tensorwise', 'delayed', *(('rowwise', 'rowwise_gw_hp') if torch.__version__ >= (2, 13) else ())
    for recipe, format in itertools.product(recipes, FORMATS):
        with torch.backends.mkldnn.flags(enabled=False):
            native, native_operands = linear(recipe, format, scaled_mm, *operands())
        emulated, emulated_operands = linear(recipe, format, emulated_mm, *operands())
        for a, b in zip(native, emulated):
            assert relative(a, b) < 2**-8       # of bf16
        assert len(native_operands) == (6 if quantizers(recipe, format).xt else 4)
        for a, b in zip(native_operands, emulated_operands, strict=True):
            assert a.data.dtype == b.data.dtype
            assert same_bits(a.data, b.data)
            assert torch.equal(a.scale_inv, b.scale_inv)


def h100_mm(a, b, out_dtype, bias=None, fast=False):
    """emulated_mm's product as an H100 sums it: 32 products at a time, each and the running sum cut toward
    zero to 13 bits below the largest; unless `fast`, each 128 products anew, and these sums added in fp32."""
    mmaemu = pytest.importorskip('mmaemu')
    sums = mmaemu.accumulate(a.data, b.data, use_fast_accum=fast, profile='hopper', splitk=1)
    product = sums * (a.scale_inv * b.scale_inv)
    return (product if bias is None else product + bias).to(out_dtype)


@pytest.mark.slow       # a CPU takes seconds to cut bits
def test_a_block_by_an_h100s_sums():
    """Its inputs and dy are mostly of one sign, so sums grow with the tokens: a product is cut by up to 2^-13
    of the running sum. A sum of 128 loses at most 128 * 2^-13 = 2^-6 of itself, a fast one of 4,096 up to
    half; in the mean an eighth, since cuts are half a unit and the sum grows. Forward and dgrad sum at most
    512: they lose less than bf16's rounding, 2^-9. A difference d moves d / step of the next cast's codes by
    a step, which is at most 2^-2: in all (2^-9 * 2^-2)^0.5 < 2^-5."""
    ones = Float8Tensor(torch.ones(16, 2**15).to(E4M3), torch.ones(1, 1), TENSOR)
    for fast, total in (True, 2**14), (False, 2**15):
        assert (h100_mm(ones, ones, torch.float32, fast=fast) == total).all()
    config = GPTConfig(vocab_size=64, block_size=4096, n_layer=1, n_head=1, n_embd=32, ffn_dim=512)
    block = GPT(config, fp8.linear_factory(on_a_cpu('emulate'), Linear)).h[0]
    for norm in block.ln_1, block.ln_2:
        norm.bias.data.fill_(2)
    dy, found = random(1, 4096, 32, seed=2).abs(), {}

    def fast_wgrad(a, b, out_dtype, bias=None, fast=False):
        return h100_mm(a, b, out_dtype, bias, fast or out_dtype == torch.float32)
    for mm in emulated_mm, h100_mm, fast_wgrad:
        for linear in (block.attn.qkv, block.attn.proj, block.mlp.up, block.mlp.down):
            linear.arithmetic = linear.arithmetic._replace(mm=mm)
        x = random(1, 4096, 32, seed=1).requires_grad_()
        with torch.autocast('cpu', torch.bfloat16):
            _, y = block(x, None, None, None)
        weights = [p for p in block.parameters() if p.dim() == 2]
        found[mm] = [y, *torch.autograd.grad(y, [x, *weights], dy)]
    off, fast_off = ([relative(*pair) for pair in zip(found[mm], found[emulated_mm])]
                     for mm in (h100_mm, fast_wgrad))
    assert max(off[:2]) < 2**-5 and max(off[2:]) < 2**-6 < min(fast_off[2:]), (off, fast_off)


def test_a_gpu_sums_fast_but_for_wgrad(monkeypatch):
    """Fast is with fewer bits than fp32. Sums over features lose about what bf16's rounding does, those over
    tokens, whose products agree in sign, 2% and more at 32,768 (docs/log.md)."""
    fast = []

    def spy(a, b, use_fast_accum, **options):
        fast.append(use_fast_accum)
        return torch.zeros(len(a), b.shape[1], dtype=options['out_dtype'])
    monkeypatch.setattr(torch, '_scaled_mm', spy)
    linear('tensorwise', 'hybrid', scaled_mm, *operands())
    assert fast == [True, True, False]      # forward, dgrad, wgrad


@pytest.mark.filterwarnings('ignore')     # of oneDNN's switch
def test_a_bias_joins_a_product_in_fp32_afterwards(monkeypatch):
    """Of a model in fp32 without autocast: CUDA's kernels refuse a bias there."""
    def as_cuda(*operands, bias, out_dtype, kernel=torch._scaled_mm, **options):
        assert bias is None or out_dtype != torch.float32, 'Bias is not supported when out_dtype is Float32'
        return kernel(*operands, bias=bias, out_dtype=out_dtype, **options)
    monkeypatch.setattr(torch, '_scaled_mm', as_cuda)
    x, w, bias = torch.randn(32, 64), torch.randn(48, 64), torch.randn(48)
    q = quantizers('tensorwise', 'hybrid')
    for dtype in torch.float32, torch.bfloat16:
        with torch.backends.mkldnn.flags(enabled=False):
            y = scaled_mm(q.x(x), q.w(w), dtype, bias.to(dtype))
        assert y.dtype == dtype and relative(y, emulated_mm(q.x(x), q.w(w), torch.float32, bias)) < 2**-8


@pytest.mark.parametrize('units', [False, True])
def test_a_cpu_multiplies_as_emulate_does(units, monkeypatch):
    """Bit for bit, but for products in bf16 by units for it."""
    monkeypatch.setattr(backends, 'HAS_UNITS', units)
    for recipe in RECIPES:
        (*native, dw), (*emulated, wanted) = (
            linear(recipe, 'hybrid', mm, *operands())[0] for mm in (native_mm, emulated_mm))
        assert torch.equal(dw, wanted)      # in fp32, or of several scales
        if not units or RECIPES[recipe].activation != TENSOR:
            assert all(map(torch.equal, native, emulated))


@pytest.mark.parametrize('format', [E4M3, E5M2])
@pytest.mark.parametrize('bias', [None, random(48, seed=3)])
def test_units_for_bf16_round_a_product_of_codes_once(format, bias, monkeypatch):
    """Each code, subnormal or not, is exact in bf16, and the product of two in fp32: what differs is the
    order of a sum in fp32. A scale that is NaN, of a bad step, is seen in every value."""
    monkeypatch.setattr(backends, 'HAS_UNITS', True)
    codes = torch.arange(256, dtype=torch.uint8).view(format)
    codes = codes.where(codes.float().isfinite(), torch.zeros((), dtype=format)).repeat(32, 1)
    b = Quantizer(E4M3, TENSOR, False, 0)(random(48, 256, seed=2))
    for scale_inv in 3e-5, 700.0:
        a = Float8Tensor(codes, torch.full((1, 1), scale_inv), TENSOR)
        left, right = a.dequantize().double(), b.dequantize().double().t()
        exact, terms = left @ right, left.abs() @ right.abs()
        if bias is not None:
            exact, terms = exact + bias, terms + bias.abs()
        error = (native_mm(a, b, torch.bfloat16, bias) - exact).abs()
        assert (error <= 2**-8 * exact.abs() + 256 * 2**-24 * terms).all()
    bad = a._replace(scale_inv=torch.full((1, 1), torch.nan))
    assert native_mm(bad, b, torch.bfloat16, bias).isnan().all()


@pytest.mark.parametrize('recipe', ['tensorwise', 'rowwise', 'rowwise_gw_hp'])
def test_against_torchaos_float8linear(recipe):
    """The torchao backend is that, with the fp32 weight; emulate comes near it."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear
    config = Float8LinearConfig.from_recipe_name(TORCHAO_RECIPES[recipe])
    theirs = Float8Linear(K, N, bias=True, config=dataclasses.replace(config, emulate=True))
    results, (x, _, dy) = [], operands()
    for backend in ('theirs', 'torchao', 'emulate'):
        layer = theirs if backend == 'theirs' else fp8.make_linear(on_a_cpu(backend, recipe), K, N)
        layer.load_state_dict(theirs.state_dict())
        y = layer(x.requires_grad_())
        results.append([y, *torch.autograd.grad(y, (x, layer.weight, layer.bias), dy)])
    for exact, same, near in zip(*results):
        assert torch.equal(same, exact)
        assert near.dtype == exact.dtype
        # they round scales through other steps: a value on the edge may fall to the other side
        assert relative(near, exact) < 2**-7        # two roundings to bf16; FP8's own are 4% and more


@pytest.mark.parametrize('device', ['cpu', 'meta'])
def test_cudas_rules_hold_on_every_device_but_a_cpu_takes_any_layout(device):
    def zeros(*shape, dtype=E4M3):
        return torch.zeros(shape, dtype=dtype, device=device)
    for mm, (a, b, message) in itertools.product((scaled_mm, emulated_mm), (
            (zeros(16, 24), zeros(16, 24), 'multiples of 16'),
            (zeros(16, 32), zeros(24, 32), 'multiples of 16'),
            (zeros(7, 32), zeros(16, 32), 'multiples of 16'),
            (zeros(16, 32), zeros(32, 16).t(), 'contiguous along the sum'),
            (zeros(32, 16).t(), zeros(16, 32), 'contiguous along the sum'),
            (zeros(16, 32, dtype=E5M2), zeros(16, 32, dtype=E5M2), 'e5m2 and e5m2'))):
        a, b = (Float8Tensor(data, torch.ones(1, 1, device=device), TENSOR) for data in (a, b))
        free = device == 'cpu' and 'contiguous' in message
        with contextlib.nullcontext() if free else pytest.raises(ValueError, match=message):
            mm(a, b, torch.bfloat16)


@pytest.mark.parametrize('recipe', RECIPES)
def test_traces_for_cuda_at_the_presets_shapes(recipe):
    multiple = RECIPES[recipe].multiple
    cases = {format: (format, M, K, N) for format in FORMATS}
    for config in PRESETS.values():
        for _, *shape in config.linears()[:4]:      # of a block
            if not any(size % multiple for size in shape):  # else the linear stays in bf16
                shape = config.block_size, *shape
                rules_see = tuple(size % 128 for size in shape)
                cases[rules_see] = RECIPES[recipe].format, *shape
    for format, tokens, k, n in cases.values():
        with FakeTensorMode():
            x, dy = (torch.empty(tokens, size, device='cuda', dtype=torch.bfloat16) for size in (k, n))
            (y, dx, dw), _ = linear(recipe, format, native_mm, x, torch.empty(n, k, device='cuda'), dy)
            assert (y.shape, dx.shape, dw.shape) == ((tokens, n), (tokens, k), (n, k))
            arithmetic = Arithmetic(quantizers(recipe, format), native_mm)
            w8, _ = arithmetic.quantizers.w.both(torch.empty(n, k, device='cuda'), arithmetic.quantizers.wt)
            y, dx, _ = products(x, None, dy, arithmetic, (*w8[:2], None, None))     # of a frozen weight
            assert (y.shape, dx.shape) == ((tokens, n), (tokens, k))


@pytest.mark.slow
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
        return q.x.both(x, q.xt, torch.tensor(448 * 0.2) if recipe == 'delayed' else None)

    x = random(128, 256, dtype=torch.float32)
    compiled, code = run_and_get_code(torch.compile(norm_and_cast, fullgraph=True), x)
    assert len(re.findall(r'^\s+cpp_fused\w+\(', code[0], re.M)) == 1
    for a, b in zip(compiled, norm_and_cast(x)):
        assert torch.equal(a.scale_inv, b.scale_inv)
        # bf16's steps are 2**-4 of e4m3's: less than one value in 2**4 takes the next code, 2**-3 off
        assert (a.data.view(torch.uint8) != b.data.view(torch.uint8)).float().mean() < 2**-4
        assert relative(a.dequantize(), b.dequantize()) < 2**-2 * 2**-3
    x = random(128, 256)
    x[3, 4] = float('inf')
    for operand in torch.compile(norm_and_cast, fullgraph=True)(x):
        assert not operand.dequantize().isfinite().all()


@pytest.mark.parametrize('backend, recipe', ON_A_CPU)
def test_no_tokens_are_no_error(backend, recipe):
    """As nn.Linear has them: of an expert to which no token came."""
    linear = fp8.make_linear(on_a_cpu(backend, recipe), 128, 256)
    for shape in (0, 128), (2, 0, 128):
        x = torch.ones(shape, dtype=torch.bfloat16, requires_grad=True)
        y = linear(x)
        y.sum().backward()
        assert (y.shape, x.grad.shape) == ((*shape[:-1], 256), x.shape)
    assert not linear.weight.grad.any() and not linear.bias.grad.any()


@pytest.mark.filterwarnings('ignore:calls whose tokens')
@pytest.mark.parametrize('recipe, multiple', [
    ('tensorwise', 16), ('rowwise', 16), ('mxfp8', 32), ('blockwise', 128)])
def test_tokens_that_fill_no_block_of_the_recipe_are_multiplied_in_bf16(recipe, multiple):
    linear = fp8.make_linear(on_a_cpu('native', recipe), 128, 256)
    for tokens in multiple, 3 * multiple, multiple // 2, multiple + multiple // 2:
        x = random(tokens, 128)
        with fp8.paused():
            in_bf16 = linear(x)
        assert torch.equal(linear(x), in_bf16) == (tokens % multiple > 0), tokens
    assert not linear(x.view(-1, 2, 128)[:multiple // 2])._is_view()       # FSDP2 warns of one
