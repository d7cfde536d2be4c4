"""The health of the casts against counting by hand, and the decisions that timings lead to."""
import dataclasses
import json
import math

import pytest
import torch

import backends
import fp8
import measure
from configurator import MachineError
from conftest import ROOT, in_ranks
from fp8 import Choice, linear_factory
from fp8_linear import E4M3, E5M2, quantizers
from fp8_models import CPU, NATIVE
from fp8_models import tokens as batch
from helpers import random, spied
from model import GPT, GPTConfig, Linear

CONFIG = GPTConfig(vocab_size=64, block_size=64, n_layer=2, n_head=2, n_embd=64)
DELAYED = dataclasses.replace(NATIVE, recipe='delayed')
CHOICES = [
    NATIVE,
    Choice(backend='emulate', recipe='delayed', margin=1),
    Choice(backend='torchao', recipe='rowwise', format='e4m3'),
]


def model_and_run(choice, **kwargs):
    model = GPT(CONFIG, linear_factory(choice, Linear), **kwargs)

    def run():
        model(*batch()).backward()
    return model, run


# ---------------------------------------------------------------------------------------------------- numbers

@pytest.mark.parametrize('dtype, largest, expected', [(E4M3, 448, 31.5), (E5M2, 57344, 25.5)])
def test_figures_of_normal_values(dtype, largest, expected):
    x = random(256, 256, dtype=torch.float32)
    quantizer = quantizers('tensorwise', 'e4m3' if dtype == E4M3 else 'e5m2').x
    amax, scale, saturated, flushed, sqnr = measure.tensor_health(x, quantizer).tolist()
    assert amax == x.abs().max()
    assert scale == pytest.approx(largest / amax)
    back = (x.double() * scale).to(dtype).double() / scale
    exact = 10 * math.log10(x.double().square().sum() / (x - back).square().sum())
    assert sqnr == pytest.approx(exact, abs=0.01)
    assert abs(sqnr - expected) < 0.3
    assert saturated == 0
    assert flushed == (back == 0).float().mean()


def test_clamped_and_lost_values_are_counted():
    """A scale for amax 1: of 64 x 64 values, three are above it and 10 below what e4m3 can hold, 2**-10 / 448
    of it."""
    x = torch.full((64, 64), 0.5)
    x[0, :3], x[1, :10], x[2, 0] = 3.0, 1e-6, 1.0
    figures = measure.tensor_health(x, quantizers('delayed', 'hybrid').x, torch.tensor(448.0)).tolist()
    *_, saturated, flushed, _ = figures
    assert saturated == pytest.approx(3 / 4096)
    assert flushed == pytest.approx(10 / 4096)


@pytest.mark.parametrize('checkpoint_every', [0, 1])
@pytest.mark.parametrize('choice', CHOICES, ids=lambda c: c.backend)
def test_health_sees_what_the_layers_see(choice, checkpoint_every):
    model, run = model_and_run(choice, checkpoint_every=checkpoint_every)
    state = fp8.State(model, choice)
    state.calibrate(run)
    model.zero_grad()
    seen = {}

    def spy(module, arguments, y):
        seen['input'] = arguments[0].detach().clone()
        y.register_hook(lambda dy: seen.update(grad=dy))
    seen['weight'] = model.h[1].mlp.down.weight
    handle = model.h[1].mlp.down.register_forward_hook(spy)
    rows = measure.health(model, choice, run)
    handle.remove()
    assert len(rows) == 8 * 3
    assert len({(r['layer'], r['tensor']) for r in rows}) == 8 * 3
    found = {r['tensor']: r for r in rows if r['layer'] == 'h.1.mlp.down'}
    for tensor, values in seen.items():
        assert found[tensor]['amax'] == values.abs().max()
        assert found[tensor]['amax'] > 0
    if choice.recipe == 'delayed':
        assert found['weight']['scale'] == pytest.approx(448 / 2 / found['weight']['amax'], rel=1e-3)
    assert all(24 < r['sqnr_db'] < 33 for r in rows)
    assert not any(m._forward_hooks for m in model.modules())


def test_the_sick_layer_comes_first():
    model, run = model_and_run(NATIVE)
    with torch.no_grad():
        model.h[1].mlp.up.weight[3, 4] = 1e4  # one outlier flushes the rest of a tensor that shares its scale
    rows = measure.health(model, NATIVE, run)
    sick = next(r for r in rows if (r['layer'], r['tensor']) == ('h.1.mlp.up', 'weight'))
    # half of e4m3's least, 2**-10, is 0.0218 at this scale, and the weights are normal with 0.02
    assert sick['flushed'] == pytest.approx(math.erf(0.0218 / 0.02 / 2**0.5), abs=0.02)
    assert sick['scale'] == pytest.approx(448 / 1e4)
    assert sick['sqnr_db'] > 40  # the outlier is the signal: the share of zeros tells
    assert 'h.1.mlp.' in measure.worst(rows)[0]['layer']


def test_what_is_not_finite_comes_before_all():
    model, run = model_and_run(NATIVE)
    with torch.no_grad():
        model.h[0].attn.proj.weight[0, 0] = float('nan')
    rows = measure.health(model, NATIVE, run)
    assert not math.isfinite(measure.worst(rows)[0]['sqnr_db'])
    lines = measure.health_lines(7, rows)
    assert len(lines) == 5
    assert lines[0].startswith('step     7 | h.')
    scalars = measure.health_scalars(rows)
    assert scalars['fp8_fwd_scale'] > 0
    assert 'fp8_h.1.mlp.up/weight_flushed' in scalars


def test_aggregates_by_hand():
    def row(tensor, scale, sqnr):
        return {'layer': 'a', 'tensor': tensor, 'amax': 1.0, 'scale': scale,
                'saturated': 0.1, 'flushed': 0.2, 'sqnr_db': sqnr}
    rows = [row('input', 2.0, 30.0), row('weight', 8.0, 29.0), row('grad', 100.0, 25.0)]
    scalars = measure.health_scalars(rows)
    assert scalars['fp8_fwd_scale'] == pytest.approx(4)
    assert scalars['fp8_bwd_scale'] == pytest.approx(100)
    assert scalars['fp8_sqnr_db'] == 25


# ------------------------------------------------------------------------------------------------------- time

ALL = ['qkv', 'proj', 'up', 'down']


@pytest.mark.parametrize('bf16, whole, without, losing', [
    (10, 8, (8.5, 7.9, 9, 9), ['proj']),                # proj is slower in FP8 than in bf16
    (10, 8, (8.5, 8.5, 9, 9), []),
    (10, 12, (11, 11, 11.5, 11), ALL),
    (10, 10.5, (10.6, 10.6, 10.6, 10.6), ALL),          # all gain nothing, and no single one is to blame
])
def test_layers_that_do_not_gain_stay_bf16(bf16, whole, without, losing):
    times = {f'without {name}': t for name, t in zip(ALL, without)}
    assert measure.losing_layers({'in bf16': bf16, 'in fp8': whole, **times}) == losing


def block_run(device='cuda', batch_size=2, **fields):
    plain = {'choice': NATIVE, 'compiled': False, 'bf16_compiled': False, **fields}
    return measure.BlockRun(CONFIG, batch_size=batch_size, device=torch.device(device), **plain)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Blocks are timed on a CPU by a clock by which FP8 is slower, and remembered in a folder of the test's.
    The list has an entry for each that was timed."""
    def medians(runs, times):
        for run in runs.values():
            run()
        return {name: {'in bf16': 1.0, 'in fp8': 2.0}.get(name, 1.5) for name in runs}

    timed, real = [], measure.measure_block

    def measure_block(block):
        timed.append(block)
        return real(dataclasses.replace(block, device=CPU))

    monkeypatch.setattr(measure, 'medians', medians)
    monkeypatch.setattr(measure, 'measure_block', measure_block)
    monkeypatch.setattr(measure, 'CACHE', str(tmp_path / 'deep' / 'keep.json'))
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda d: 'Test GPU')
    return timed


def test_a_block_is_measured_once_for_each_shape(measured, capsys):
    """Where FP8 is slower, every linear ends in bf16; the second time nothing is timed."""
    first = measure.auto_keep(block_run())
    assert not first.on
    assert 'no faster in FP8' in first.reason
    assert 'without attn.qkv' in capsys.readouterr().out
    assert measure.auto_keep(block_run()) == first
    assert len(measured) == 1
    measure.auto_keep(block_run(batch_size=4))
    assert len(measured) == 2


def test_what_is_remembered_decides(measured):
    measure.auto_keep(block_run())
    with open(measure.CACHE) as file:
        known = json.load(file)
    [found] = known.values()
    assert set(found['keep']) == {'attn.qkv', 'attn.proj', 'mlp.up', 'mlp.down'}
    assert not found['gains']
    assert min(found['seconds'].values()) > 0
    found.update(keep=['attn.proj'], gains=True)  # as if one layer alone had lost
    with open(measure.CACHE, 'w') as file:
        json.dump(known, file)
    chosen = measure.auto_keep(block_run())
    model = GPT(CONFIG, linear_factory(chosen, Linear))
    fp8.State(model, chosen)
    assert '6 of 9 linears' in fp8.summary(model, chosen)
    assert 'h.0.attn.proj, h.1.attn.proj: kept by fp8_keep' in fp8.summary(model, chosen)


def test_on_a_cpu_nothing_is_measured(measured, capsys):
    block = block_run(device='cpu')
    assert measure.auto_keep(block) == block.choice
    assert 'a CPU only emulates' in capsys.readouterr().out
    assert not measured


def test_every_variant_of_a_block_is_compiled_by_itself(monkeypatch):
    """More variants than torch.compile keeps graphs of one code by default, none left to run uncompiled."""
    real = torch.compile
    monkeypatch.setattr(torch, 'compile', lambda module: real(module, backend='aot_eager', fullgraph=True))
    block = block_run('cpu', choice=DELAYED, compiled=True, bf16_compiled=True)
    times = measure.measure_block(block)['seconds']
    without = {f'without {name}' for name in ('attn.qkv', 'attn.proj', 'mlp.up', 'mlp.down')}
    assert {'in bf16', 'in fp8', *without} <= times.keys()


@pytest.mark.parametrize('choice', [NATIVE, DELAYED], ids=lambda c: c.recipe)
def test_what_is_timed_multiplies_neither_zeros_nor_nans(choice, monkeypatch):
    spy, operands = spied(backends.native_mm)
    monkeypatch.setattr(backends.Native, 'mm', staticmethod(spy))

    def medians(runs, times):
        operands.clear()
        runs['in fp8']()
        assert len(operands) == 4 * 3 * 2
        for operand in operands:
            back = operand.dequantize()
            assert back.isfinite().all()
            assert (back != 0).float().mean() > 0.5
        return dict.fromkeys(runs, 1.0)
    monkeypatch.setattr(measure, 'medians', medians)
    measure.measure_block(block_run('cpu', choice=choice))


def test_a_block_without_scales_is_not_timed(monkeypatch):
    monkeypatch.setattr(fp8.State, 'calibrate', lambda *_: None)
    with pytest.raises(MachineError, match='attn.qkv, whose input has amax .* and scale 0.0; --fp8_keep='):
        measure.measure_block(block_run('cpu', choice=DELAYED))


@pytest.mark.parametrize('figures', [{'amax': 0.0}, {'amax': math.inf}, {'scale': math.nan}])
def test_operands_that_are_zero_or_not_finite_are_refused(figures):
    row = {'layer': 'mlp.up', 'tensor': 'grad', 'amax': 1.0, 'scale': 448.0}
    measure.check_operands([row])
    with pytest.raises(MachineError, match='mlp.up'):
        measure.check_operands([row, {**row, **figures}])


TWO_RANKS = """
import dataclasses
import sys
sys.path[:0] = {paths!r}
import torch, torch.distributed as dist
import measure, parallel
from test_measure import DELAYED, block_run
ranks = parallel.init('cpu')

def medians(runs, times):
    for run in runs.values():
        run()
        dist.all_reduce(torch.ones(1))      # as Transformer Engine does at the end of each pass
    times = {{'in bf16': 2.0, 'in fp8': 1.5, 'without attn.proj': 1.4 + ranks.rank}}
    return {{name: times.get(name, 1.8) for name in runs}}

real = measure.measure_block
measure.medians = medians
measure.measure_block = lambda block: real(dataclasses.replace(block, device=torch.device('cpu')))
measure.CACHE = f'{folder}/{{ranks.rank}}.json'
torch.cuda.get_device_name = lambda device: 'Test GPU'
for _ in range(2):
    chosen = measure.auto_keep(block_run(choice=DELAYED))
    with open(f'{folder}/found{{ranks.rank}}', 'a') as file:
        print(chosen.keep, file=file)
parallel.leave()
"""


def test_ranks_measure_together_and_take_rank_0s_word(tmp_path):
    """Each by its own clock, by which another layer loses; what rank 0 remembers, no rank measures again."""
    script = tmp_path / 'script.py'
    script.write_text(TWO_RANKS.format(paths=[str(ROOT), str(ROOT / 'tests')], folder=tmp_path))
    out = in_ranks(2, script, timeout=60).stdout
    assert out.count('fp8_keep=auto: a block takes') == 2
    for rank in range(2):
        assert (tmp_path / f'found{rank}').read_text() == "('attn.proj',)\n" * 2
    assert (tmp_path / '0.json').exists()
    assert not (tmp_path / '1.json').exists()


def test_speedup_leaves_no_trace():
    model, run = model_and_run(DELAYED)
    state = fp8.State(model, DELAYED)
    state.calibrate(run)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert 0 < measure.speedup(run, run, state) < math.inf
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize('B, T, rows', [(32, 1024, 8), (4, 1024, 4), (2, 16384, 1), (500, 100, 500)])
def test_a_glance_is_8k_tokens_in_whole_sequences(B, T, rows):
    x = torch.arange(B * T).view(B, T)
    assert [part.shape for part in measure.glance(x, x)] == [(rows, T)] * 2
