"""The fused casts and their scales: torch's form against the model's expressions, the Triton kernels against
torch's form in Triton's interpreter, and their code for GPUs that are not there. As a script, under
TRITON_INTERPRET=1, this file prints what the interpreted kernels compute."""
import itertools
import json
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from conftest import run
from fp8gpt.fp8.linear import E4M3, E5M2, TENSOR, Quantizer
from fp8gpt.fp8.kernels import casts
from fp8gpt.fp8.kernels.casts import cast, cast_in_torch
from fp8gpt.fp8.kernels.modules import quantise
from helpers import same_bits
from triton_tools import code_for, patch_interpreter, usage

try:
    import triton
except ImportError:
    triton = None

needs_triton = pytest.mark.skipif(triton is None, reason='Triton is not installed')
HOWS = list(casts.VALUES)
CURVES = [how for how in HOWS if 'glu' in how or 'gelu' in how]
SHAPES = [(16, 16), (144, 176)]        # one tile, and edges that fill none
BAD = 'inf', '-inf', 'nan'
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


def value_of(how, inputs):
    """What is cast, (M, C)."""
    return torch.cat(list(casts.VALUES[how](*inputs)), 1)


def codes(data):
    """FP8 -> int32 in the order of the values; -0 is 0."""
    bits = data.view(torch.uint8).int()
    return torch.where(bits > 127, 128 - bits, bits)


def every_bf16():
    """All 65,536 bf16 numbers, (256, 256)."""
    return torch.arange(-2**15, 2**15).to(torch.int16).view(torch.bfloat16).view(256, 256)


# ----------------------------------------------------------------------- what the interpreted kernels compute

def apart(how, inputs, found, scale, dtype):
    """A kernel's codes (M, C) beside torch's: how many differ, by how many codes at most, and how far SMALL
    values are apart."""
    expected = cast_in_torch(inputs, how, scale, dtype, False)[0]
    value = value_of(how, inputs).float()
    known, small = value.isfinite(), value.abs() < SMALL
    codes_apart = (codes(found) - codes(expected)).abs()[known & ~small]
    tail = ((found.float() - expected.float()) / scale).abs()[known & small]
    return {'differ': int((codes_apart > 0).sum()), 'furthest': int(codes_apart.max()),
            'of': codes_apart.numel(), 'tail': max([0.0, *tail.tolist()])}


def compared(how, inputs, scale, dtype):
    """The kernel's outputs beside torch's, in figures."""
    data, data_t, partials, column_sums = cast(inputs, how, scale, dtype, True)
    peak, sums = cast_in_torch(inputs, how, scale, dtype, True)[2:]
    magnitudes = value_of(how, inputs).float().abs().sum(0)
    return apart(how, inputs, data, scale, dtype) | {
        'transposed': torch.equal(data_t.view(torch.uint8), data.view(torch.uint8).t()),
        'amax': [float(partials.amax()), float(peak)],
        'partials': len(partials),
        'sums': float(((column_sums.sum(0) - sums.sum(0)) / magnitudes).abs().max()),
    }


def of_every_number(how):
    """apart(), by dtype, where each bf16 number is GELU's or SiLU's input; 4 is the range's end."""
    a, one = every_bf16(), torch.ones(256, 256, dtype=torch.bfloat16)
    inputs = {
        'gelu': [a],
        'swiglu': [torch.cat([a, one], 1)],
        'gelu_backward': [one, a],
        'swiglu_backward': [one, torch.cat([a, one], 1)],
    }[how]
    rows = {}
    for name, dtype in DTYPES.items():
        scale = torch.tensor(torch.finfo(dtype).max / 4)
        found = cast(inputs, how, scale, dtype, False)[0]
        rows[name] = apart(how, inputs, found, scale, dtype)
    return rows


def main():
    """Prints {case: figures}."""
    patch_interpreter()
    figures = {}
    for how, (M, C), (name, dtype) in itertools.product(HOWS, SHAPES, DTYPES.items()):
        figures[f'{how} {M} {C} {name}'] = compared(how, inputs_of(how, M, C), SCALES[name], dtype)
    columns = [inputs_of('plain', 208, 80)[0].t()]
    figures['plain of a transpose'] = compared('plain', columns, SCALES['e4m3'], E4M3)
    for how, bad in itertools.product(HOWS, BAD):
        inputs = inputs_of(how, 80, 16)
        inputs[0].select(-1, 3).select(-1, 5).fill_(float(bad))
        outputs = [op(inputs, how, torch.tensor(1.0), E4M3, False)[2] for op in (cast, cast_in_torch)]
        figures[f'{how} {bad}'] = [str(float(partials.amax())) for partials in outputs]
    big = torch.tensor([[1e30, -1e30, float('inf'), -float('inf')] * 4] * 16, dtype=torch.bfloat16)
    figures['beyond'] = cast([big], 'plain', torch.tensor(2.0), E4M3, False)[0].float()[0, :4].tolist()
    for how in CURVES:
        figures[f'{how} of every number'] = of_every_number(how)
    print(json.dumps(figures))


@pytest.fixture(scope='module')
def interpreted():
    """main()'s figures, of a process of its own."""
    pytest.importorskip('triton')
    environment = {'TRITON_INTERPRET': '1', 'PYTHONPATH': '.:tests'}
    done = run('tests/test_casts.py', fork=False, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


CASES = [f'{how} {M} {C} {dtype}' for how, (M, C), dtype in itertools.product(HOWS, SHAPES, DTYPES)]
CASES.append('plain of a transpose')


# A kernel's fp32 values differ from torch's in their last bits, a few 2**-22: one rounding to bf16, in steps
# of 2**-8 and less, in 2**12 falls to the other side, and takes at most the next code.
def few(count, of):
    return count <= 1 + of * 2**-12


@pytest.mark.slow
def test_kernels_cast_sum_and_find_the_amax_as_torch_does(interpreted):
    """Bit for bit where nothing is computed; else a few codes may be neighbours."""
    wrong = []
    for case in CASES:
        found = interpreted[case]
        exact = case.split()[0] in ('plain', 'heads')
        right = {
            'codes': found['furthest'] <= 1 and few(found['differ'], found['of']),
            'exact': not exact or (found['differ'], found['tail']) == (0, 0),
            'transposed': found['transposed'],
            'amax': found['amax'][0] == pytest.approx(found['amax'][1], rel=0 if exact else 2**-8, abs=0),
            'sums': found['sums'] < 2**-8,
        }
        wrong += [(case, what, found) for what, yes in right.items() if not yes]
    assert wrong == []
    assert interpreted['plain 144 176 e4m3']['partials'] == 3 * 2      # there are edges that fill no tile


@pytest.mark.slow
def test_kernels_cast_every_number_as_torch_does(interpreted):
    wrong = []
    for how, dtype in itertools.product(CURVES, DTYPES):
        found = interpreted[f'{how} of every number'][dtype]
        codes_match = found['furthest'] <= 1 and few(found['differ'], found['of'])
        step = 2**-9 / (torch.finfo(E4M3).max / 4)      # between e4m3's smallest values, at this scale
        if not (codes_match and found['of'] > 19_000 and found['tail'] <= 1.01 * step):
            wrong.append((how, dtype, found))
    assert wrong == []


@pytest.mark.slow
def test_kernels_show_what_is_not_finite_and_end_at_the_range(interpreted):
    pairs = {(how, bad): interpreted[f'{how} {bad}'] for how, bad in itertools.product(HOWS, BAD)}
    assert {case: pair for case, pair in pairs.items() if pair not in (['inf'] * 2, ['nan'] * 2)} == {}
    assert interpreted['beyond'] == [448, -448, 448, -448]


# ----------------------------------------------------------------------------------------------- torch's form

def by_autograd(expression, dz, a):
    a = a.clone().requires_grad_()
    expression(a).backward(dz)
    return a.grad


def swiglu(a):
    gate, up = a.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu(a):
    return F.gelu(a, approximate='tanh')


def norm(x, rstd, weight, mean=0, bias=0):
    """A norm's output from its statistics, (M, C)."""
    return ((x.float().t() - mean).mul(rstd).t() * weight + bias).bfloat16()


MODELS = {      # as model.py computes it
    'layernorm': norm,
    'rmsnorm': norm,
    'plain': lambda x: x,
    'gelu': gelu,
    'swiglu': swiglu,
    'gelu_backward': lambda dz, a: by_autograd(gelu, dz, a),
    'swiglu_backward': lambda dz, a: by_autograd(swiglu, dz, a),
    'heads': lambda *heads: torch.cat(heads, 1).transpose(1, 2).reshape(-1, 6 * 24),
}


def test_torchs_form_is_the_quantizers_of_what_the_model_computes():
    wrong = []
    for how, (name, dtype) in itertools.product(HOWS, DTYPES.items()):
        inputs, scale = inputs_of(how, 80, 208), SCALES[name]
        x = MODELS[how](*inputs)
        expected = Quantizer(dtype, TENSOR, False, 0)(x, scale).data
        data, data_t, partials, column_sums = cast(inputs, how, scale, dtype, True)
        right = [same_bits(data, expected), same_bits(data_t, expected.t()),
                 partials.amax() == x.abs().amax() == casts.partial_amaxes(inputs, how).amax(),
                 torch.allclose(column_sums.sum(0), x.float().sum(0), rtol=1e-5, atol=1e-4)]
        wrong += [] if all(right) else [(how, name, right)]
    assert wrong == []


def test_a_cast_takes_in_its_amax_and_shows_what_is_not_finite():
    """By the scale it is given, and by its own."""
    quantizer, x = Quantizer(E4M3, TENSOR, False, 0), torch.ones(16, 16).bfloat16()
    for scales, bad in itertools.product((torch.full((3,), 2.0), None), (3.0, math.inf, math.nan)):
        running = torch.full((3,), 2.0)
        x[3, 5] = bad
        both = quantise(quantizer, 'plain', [x], (running, scales, 1))[:2]
        assert running.tolist() == pytest.approx([2, bad, 2], nan_ok=True)
        assert all(each.dequantize().isfinite().all() == math.isfinite(bad) for each in both)


def test_a_compiler_knows_what_the_ops_return():
    checks = 'test_schema', 'test_faketensor'
    for how in HOWS:
        inputs, scale = inputs_of(how, 80, 208), SCALES['e5m2']
        torch.library.opcheck(cast, (inputs, how, scale, E5M2, how == 'plain'), test_utils=checks)


def test_a_gpus_programs_are_known_without_it():
    with FakeTensorMode():
        x = torch.empty(32768, 768, dtype=torch.bfloat16, device='cuda')
        scale = torch.empty((), device='cuda')
        data, data_t, partials, column_sums = cast([x], 'plain', scale, E4M3, True)
    assert data_t.shape == (768, 32768)
    assert partials.shape == (3072,)
    assert column_sums.shape == (256, 768)


# --------------------------------------------------------------------------------------------- code for GPUs

def of_a_block(how, D=64):
    """Inputs whose strides are those of a preset's, for all that a compiler sees: multiples of 16."""
    if how == 'heads':
        return [torch.zeros(2, 64, 25, D, dtype=torch.bfloat16)] * 3
    return inputs_of(how, 128, 1600)


def accesses(ptx, kind):
    """How wide the code's reads ('ld') or writes ('st') of global memory are."""
    return re.findall(rf'\b{kind}\.global\.(\S+)', ptx)


GPU_CASES = [(how, name, 90, 64) for how, name in zip(HOWS, itertools.cycle(DTYPES))]
GPU_CASES += [('plain', 'e5m2', 100, 64), ('heads', 'e4m3', 90, 128), ('heads', 'e5m2', 90, 80)]


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize('how, dtype, arch, D', GPU_CASES)
def test_a_kernel_is_made_for_gpus(monkeypatch, how, dtype, arch, D):
    """Short of running: 16 bytes a thread and access, and none of what is known to break."""
    inputs, scale = of_a_block(how, D), torch.ones(())
    code = code_for(monkeypatch, arch, casts, 'cast_kernel',
                    lambda: cast(inputs, how, scale, DTYPES[dtype], True))
    ptx = code.asm['ptx']
    reads, writes = accesses(ptx, 'ld'), accesses(ptx, 'st')
    if not how.endswith('norm'):        # whose statistics are one number a row
        assert set(reads) == {'v4.b32', 'b32'}
        assert reads.count('b32') == 1, 'not the scale alone'
    halves = 2 if how == 'swiglu_backward' else 1
    assert writes.count('v4.b32') == 4 * halves             # 32 bytes a thread, twice
    assert len(writes) <= 4 * halves + 3                    # column sums and an amax
    assert '.NaN' not in ptx
    assert not re.search(r'addptr .*xi32>', code.asm['ttir']), 'M * C may pass 2**31'
    assert set(re.findall(r'cvt\S*e[45]m[23]\S*', ptx)) == {f'cvt.rn.satfinite.{dtype}x2.f32'}
    registers, spilled = usage(code, arch)
    assert spilled == 0
    assert 2 * registers * 32 * code.metadata.num_warps <= 65_536, 'no two programs share a multiprocessor'


@pytest.mark.slow
@needs_triton
def test_a_kernel_takes_one_head_each_of_q_k_and_v(monkeypatch):
    """Triton takes an argument of 1 for a constant."""
    heads = [x[:, :, :1] for x in of_a_block('heads')]
    assert code_for(monkeypatch, 90, casts, 'cast_kernel',
                    lambda: cast(heads, 'heads', torch.ones(()), E5M2, False))


if __name__ == '__main__':
    main()
