"""The fused casts and their scales: torch's form against the model's expressions, the Triton kernels against
torch's form in Triton's interpreter, and their code for GPUs that are not there."""
import itertools
import math
import re

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fp8gpt.fp8.linear import E4M3, E5M2, TENSOR, Quantizer
from fp8gpt.fp8.kernels import casts
from fp8gpt.fp8.kernels.casts import cast, cast_in_torch
from fp8gpt.fp8.kernels import WeightQuantizer
from helpers import same_bits
from model import gelu, swiglu
from triton_tools import Gpu, code_for, interpreted, nearly_equal, steps, usage    # noqa: F401

HOWS = list(casts.VALUES)
DTYPES = {'e4m3': E4M3, 'e5m2': E5M2}
SCALES = {'e4m3': torch.tensor(60.0), 'e5m2': torch.tensor(8000.0)}      # beyond the range for an amax of 8
SMALL = 2e-4            # below it, GELU's and SiLU's tails: cancelled in torch's form


def inputs_of(how, M, C):
    """bf16 inputs whose cast is (M, C), N(0, 2^2). Heads: 24 wide, and their memory ordered in three ways."""
    generator = torch.Generator().manual_seed(M + C)

    def normal(*shape):
        return (2 * torch.randn(shape, generator=generator)).bfloat16()
    if how == 'heads':
        T = M // 2
        q, k, v = normal(2, T, 3, 24), normal(2, 1, T, 24), normal(2, 2, T, 48)[..., 8:32]
        return [q, k.transpose(1, 2), v.transpose(1, 2)]
    if how == 'norm':
        x, (rstd, mean), (weight, bias) = normal(M, C), normal(2, M).float(), normal(2, C).float()
        return [x, rstd.exp(), weight, mean, bias]
    shapes = {
        'swiglu': [(M, 2 * C)],
        'gelu_backward': [(M, C), (M, C)],
        'swiglu_backward': [(M, C), (M, 2 * C)],
    }
    return [normal(*shape) for shape in shapes.get(how, [(M, C)])]


# ----------------------------------------------------------------------------------------------- torch's form

def by_autograd(operation, gradients, a):
    a = a.clone().requires_grad_()
    torch.autograd.backward(operation(a), gradients)
    return a.grad


MODELS = {      # as model.py computes it
    'plain': lambda x: x,
    'gelu': gelu,
    'swiglu': swiglu,
    'gelu_backward': lambda dz, a: by_autograd(gelu, dz, a),
    'swiglu_backward': lambda dz, a: by_autograd(swiglu, dz, a),
    'heads': lambda *heads: by_autograd(
        lambda qkv: qkv.unflatten(-1, (6, 24)).split((3, 1, 2), 2), heads,
        torch.zeros(2, 40, 144).bfloat16()).flatten(0, 1),
}


def test_torchs_form_is_the_quantizers_of_what_the_model_computes():
    wrong = []
    for how, (name, dtype) in itertools.product(MODELS, DTYPES.items()):
        inputs, scale = inputs_of(how, 80, 208), SCALES[name]
        x = MODELS[how](*inputs)
        expected = Quantizer(dtype, TENSOR, False, 0)(x, scale).data
        data, data_t, partials, column_sums = cast(inputs, how, scale, dtype, True)
        right = [same_bits(data, expected), same_bits(data_t, expected.t()),
                 partials.amax() == x.abs().amax() == casts.partial_amaxes(inputs, how).amax(),
                 torch.allclose(column_sums.sum(0), x.float().sum(0), rtol=1e-5, atol=1e-4)]
        wrong += [] if all(right) else [(how, name, right)]
    assert wrong == []


def test_a_scale_and_a_cast_are_the_quantizers_and_show_what_is_not_finite():
    wrong = []
    for dtype, scale, bad in itertools.product(
            (torch.float32, torch.bfloat16), (None, torch.tensor(30.0)), (9.0, math.inf, math.nan)):
        quantizer, w = Quantizer(E4M3, TENSOR, False, 1), torch.randn(48, 80).to(dtype)
        w[3, 5] = bad
        both = (kind.both(w, quantizer, scale) for kind in (WeightQuantizer(*quantizer), quantizer))
        for found, expected in zip(*both):
            amaxes = [str(each.amax.item()) for each in (found, expected)]
            right = [amaxes == [str(bad)] * 2, found.scale_inv.isfinite().item() == math.isfinite(bad)]
            if math.isfinite(bad):
                right += [same_bits(found.data, expected.data), found.scale_inv == expected.scale_inv]
            wrong += [] if all(right) else [(dtype, scale, bad, right)]
    assert wrong == []


def test_a_compiler_knows_what_the_ops_return():
    checks = 'test_schema', 'test_faketensor'
    for how in HOWS:
        inputs, scale = inputs_of(how, 80, 208), SCALES['e5m2']
        torch.library.opcheck(cast, (inputs, how, scale, E5M2, how == 'plain'), test_utils=checks)
    with FakeTensorMode():
        x = torch.empty(32768, 768, dtype=torch.bfloat16, device='cuda')
        _, data_t, partials, column_sums = cast([x], 'plain', torch.empty((), device='cuda'), E4M3, True)
    assert (data_t.shape, partials.shape, column_sums.shape) == ((768, 32768), (3072,), (256, 768))


# ------------------------------------------------------------------------------------ the interpreted kernels

def codes_match(how, inputs, found, scale, dtype):
    """Whether a kernel's codes (M, C) are torch's: bit for bit where nothing is computed; else a few may be
    neighbours. SMALL values may be apart by e4m3's smallest."""
    least = 1.01 * 2**-9 / min(scale.item(), 112)
    expected = cast_in_torch(inputs, how, scale, dtype, False)[0]
    value = torch.cat(list(casts.VALUES[how](*inputs)), 1).float()
    known, small = value.isfinite(), value.abs() < SMALL
    apart = steps(found, expected)
    if how in ('plain', 'heads'):
        return bool((apart == 0).all())
    tail = ((found.float() - expected.float()) / scale).abs()[known & small]
    return nearly_equal(apart[known & ~small]) and bool((tail <= least).all())


@pytest.mark.slow
@pytest.mark.usefixtures('interpreted')
@pytest.mark.filterwarnings('ignore::RuntimeWarning')   # NumPy's, of infinities
def test_kernels_cast_sum_and_find_the_amax_as_torch_does():
    wrong, shape = [], (144, 176)       # edges that fill no tile
    cases = [(how, inputs_of(how, *shape)) for how in HOWS]
    cases += [('norm', inputs_of('norm', *shape)[:count]) for count in (3, 4)]
    [x] = inputs_of('plain', 208, 80)
    cases += [('plain', [x.t()]), ('plain', [x.float() / 3])]   # a weight is fp32
    for (how, inputs), (name, dtype) in itertools.product(cases, DTYPES.items()):
        scale = SCALES[name]
        data, data_t, partials, column_sums = cast(inputs, how, scale, dtype, True)
        peak, sums = cast_in_torch(inputs, how, scale, dtype, True)[2:]
        magnitudes = torch.cat(list(casts.VALUES[how](*inputs)), 1).float().abs().sum(0)
        right = [codes_match(how, inputs, data, scale, dtype),
                 same_bits(data_t, data.t().contiguous()),
                 partials.amax().item() == pytest.approx(peak.item(), rel=2**-8, abs=0),
                 ((column_sums.sum(0) - sums.sum(0)).abs() < 2**-8 * magnitudes).all().item()]
        wrong += [] if all(right) else [(how, len(inputs), name, right)]
    a = torch.arange(-2**15, 2**15).to(torch.int16).view(torch.bfloat16).view(256, 256)     # every number
    one = torch.ones_like(a)
    gate_up = torch.cat([a, one], 1)
    curves = {'gelu': [a], 'swiglu': [gate_up], 'gelu_backward': [one, a], 'swiglu_backward': [one, gate_up]}
    for (how, inputs), dtype in itertools.product(curves.items(), DTYPES.values()):
        scale = torch.tensor(torch.finfo(dtype).max / 4)
        found = cast(inputs, how, scale, dtype, False)[0]
        wrong += [] if codes_match(how, inputs, found, scale, dtype) else [(how, dtype)]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.usefixtures('interpreted')
@pytest.mark.filterwarnings('ignore::RuntimeWarning')
def test_kernels_show_what_is_not_finite_and_end_at_the_range():
    wrong = []
    for how, bad in itertools.product(HOWS, ('inf', '-inf', 'nan')):
        inputs = inputs_of(how, 80, 16)
        inputs[0].select(-1, 3).select(1 if how == 'heads' else 0, 5).fill_(float(bad))
        amaxes = [str(op(inputs, how, torch.tensor(1.0), E4M3, False)[2].amax().item())
                  for op in (cast, cast_in_torch)]
        wrong += [] if amaxes in (['inf'] * 2, ['nan'] * 2) else [(how, bad, amaxes)]
    assert wrong == []
    big = torch.tensor([[1e30, -1e30, math.inf, -math.inf] * 4] * 16, dtype=torch.bfloat16)
    data = cast([big], 'plain', torch.tensor(2.0), E4M3, False)[0]
    assert data.float()[0, :4].tolist() == [448, -448, 448, -448]


# --------------------------------------------------------------------------------------------- code for GPUs

def of_a_block(how, D=64, heads=25):
    """Inputs whose strides are those of a preset's, for all that a compiler sees: multiples of 16."""
    if how == 'heads':
        return [torch.zeros(2, heads, 64, D, dtype=torch.bfloat16).transpose(1, 2)] * 3
    return inputs_of(how, 128, 1600)


# seven casts by turns in two formats, so that the next GPU has the other one
GPU_CASES = [(of_a_block(how), how, name, arch) for (arch, how), name in zip(
    itertools.product((89, 90, 100, 120), HOWS), itertools.cycle(DTYPES))]
GPU_CASES += [
    (of_a_block('norm')[:3], 'norm', 'e5m2', 90),
    ([torch.zeros(128, 1600)], 'plain', 'e4m3', 90),
    (of_a_block('heads', 128), 'heads', 'e4m3', 90),
    (of_a_block('heads', 80), 'heads', 'e5m2', 90),
    (of_a_block('heads', heads=1), 'heads', 'e5m2', 90),    # Triton takes an argument of 1 for a constant
]


@pytest.mark.slow
@pytest.mark.parametrize('inputs, how, dtype, arch', GPU_CASES)
def test_a_kernel_is_made_for_gpus(monkeypatch, inputs, how, dtype, arch):
    monkeypatch.setenv('TRITON_DEFAULT_FP_FUSION', '0')     # as in Triton 3.10
    code = code_for(monkeypatch, arch, casts, 'cast_kernel',
                    lambda: cast(inputs, how, torch.ones(()), DTYPES[dtype], True))
    ptx = code.asm['ptx']
    assert code.metadata.enable_fp_fusion
    reads, writes = (re.findall(rf'\b{kind}\.global\.(\S+)', ptx) for kind in ('ld', 'st'))
    if how != 'norm':       # whose statistics are one number a row
        assert set(reads) == {'v4.b32', 'b32'}
        assert reads.count('b32') == 1, 'not the scale alone'
    halves = 2 if how == 'swiglu_backward' else 1
    assert writes.count('v2.b32') == 4 * halves             # 8 codes of each of four rows
    assert writes.count('v4.b32') == 2 * halves             # 16 codes of each of two columns
    assert len(writes) <= 6 * halves + 3                    # column sums and an amax
    assert '.NaN' not in ptx
    crossing = re.findall(r'convert_layout.*-> tensor<\d+x\d+x(\w+)', code.asm['ttgir'])
    assert crossing == ['i32'] * halves, 'codes that cross threads one by one are miscompiled'
    assert not re.search(r'addptr .*xi32>', code.asm['ttir']), 'M * C may pass 2**31'
    assert set(re.findall(r'cvt\S*e[45]m[23]\S*', ptx)) == {f'cvt.rn.satfinite.{dtype}x2.f32'}
    assert 'f16' not in re.sub('bf16', '', ptx)     # where a cast would round twice
    registers, spilled = usage(code, arch)
    assert spilled == 0
    assert 2 * registers * 32 * code.metadata.num_warps <= 65_536, 'no two programs share a multiprocessor'
    assert 2 * (code.metadata.shared + 1024) <= 100 << 10, 'nor do they on sm_89 and sm_120'


@pytest.mark.slow
def test_a_launch_takes_the_kernel_that_triton_takes(monkeypatch):
    triton = pytest.importorskip('triton')
    launch, right = casts.launch, []

    def compare(kernel, grid, arguments, key, **options):
        launch(kernel, grid, arguments, key, **options)
        options = {'enable_fp_fusion': True, **options}
        right.append(casts.COMPILED[key] is kernel.warmup(*arguments, grid=grid, **options))
    for name, value in dict(launch=compare, COMPILED={}, in_triton=lambda x: True).items():
        monkeypatch.setattr(casts, name, value)
    monkeypatch.setattr(triton.runtime.driver, '_active', Gpu(90))
    x, scales = torch.zeros(128, 160).bfloat16(), torch.ones(2)
    rows = [x, x.float(), x[:, :144], x[:, 1:145], x[:, :144].clone(), x[:112]]
    for _ in range(2):
        for each in rows:
            cast([each], 'plain', scales[0], E4M3, False)
        cast(rows[:1], 'plain', scales[1], E4M3, False)
        cast(rows[:1], 'plain', scales[0], E5M2, False)
        cast(rows[:1], 'plain', scales[0], E5M2, True)
    assert len(casts.COMPILED) == 9 and len(right) == 18 and all(right)
