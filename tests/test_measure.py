"""The health of the casts against counting by hand, and the decisions that timings lead to."""
import json
import math

import pytest
import torch

import fp8
import measure
from fp8 import Choice, linear_factory
from model import GPT, GPTConfig, Linear
from quantize import E4M3, E5M2, casts

CONFIG = GPTConfig(vocab_size=64, block_size=64, n_layer=2, n_head=2, n_embd=64)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def model_and_run(choice, **kwargs):
    model = GPT(CONFIG, linear_factory(choice, Linear), **kwargs)
    idx = torch.randint(0, 64, (2, 65), generator=torch.Generator().manual_seed(0))

    def run():
        model(idx[:, :-1], idx[:, 1:]).backward()
    return model, run


@pytest.mark.parametrize('dtype, largest, expected', [(E4M3, 448, 31.5), (E5M2, 57344, 25.5)])
def test_figures_of_normal_values(dtype, largest, expected):
    x = random(256, 256)
    cast = casts('tensorwise', 'e4m3' if dtype == E4M3 else 'e5m2').x
    amax, scale, saturated, flushed, sqnr = measure.tensor_health(x, cast).tolist()
    assert amax == x.abs().max() and scale == pytest.approx(largest / amax)
    back = (x.double() * scale).to(dtype).double() / scale
    assert sqnr == pytest.approx(10 * math.log10(x.double().square().sum() / (x - back).square().sum()), abs=0.01) and abs(sqnr - expected) < 0.3
    assert saturated == 0 and flushed == (back == 0).float().mean()


def test_clamped_and_lost_values_are_counted():
    """A scale for amax 1: of 64 x 64 values, three are above it and 10 below what e4m3 can hold, 2**-10 / 448 of it."""
    x = torch.full((64, 64), 0.5)
    x[0, :3], x[1, :10], x[2, 0] = 3.0, 1e-6, 1.0
    *_, saturated, flushed, _ = measure.tensor_health(x, casts('delayed', 'hybrid').x, torch.tensor(1.0)).tolist()
    assert saturated == pytest.approx(3 / 4096) and flushed == pytest.approx(10 / 4096)


@pytest.mark.parametrize('checkpoint_every', [0, 1])
@pytest.mark.parametrize('choice', [Choice('native', ''), Choice('emulate', '', 'delayed', margin=1), Choice('torchao', '', 'rowwise', 'e4m3')], ids=lambda c: c.backend)
def test_health_sees_what_the_layers_see(choice, checkpoint_every):
    model, run = model_and_run(choice, checkpoint_every=checkpoint_every)
    state = fp8.State(model, choice)
    state.calibrate(run)
    model.zero_grad()
    seen = {}

    def spy(module, arguments, y):
        seen['x'] = arguments[0].detach().clone()
        y.register_hook(lambda dy: seen.update(dy=dy))
    handle = model.h[1].mlp.down.register_forward_hook(spy)
    rows = measure.health(model, choice, run)
    handle.remove()
    assert [(r['layer'], r['tensor']) for r in rows if r['layer'] == 'h.1.mlp.down'] and len(rows) == 8 * 3 and len({(r['layer'], r['tensor']) for r in rows}) == 24
    found = {r['tensor']: r for r in rows if r['layer'] == 'h.1.mlp.down'}
    for tensor, values in (('input', seen['x']), ('grad', seen['dy']), ('weight', model.h[1].mlp.down.weight)):
        assert found[tensor]['amax'] == values.abs().max() > 0
    if choice.recipe == 'delayed':
        assert found['weight']['scale'] == pytest.approx(448 / 2 / found['weight']['amax'], rel=1e-3)
    assert all(24 < r['sqnr_db'] < 33 for r in rows)
    assert not any(m._forward_hooks for m in model.modules())


def test_the_sick_layer_comes_first():
    model, run = model_and_run(Choice('native', ''))
    with torch.no_grad():
        model.h[1].mlp.up.weight[3, 4] = 1e4  # one outlier flushes the rest of a tensor that shares its scale
    rows = measure.health(model, Choice('native', ''), run)
    sick = next(r for r in rows if (r['layer'], r['tensor']) == ('h.1.mlp.up', 'weight'))
    # half of e4m3's least, 2**-10, is 0.0218 at this scale, and the weights are normal with 0.02
    assert sick['flushed'] == pytest.approx(math.erf(0.0218 / 0.02 / 2**0.5), abs=0.02) and sick['scale'] == pytest.approx(448 / 1e4)
    assert sick['sqnr_db'] > 40 and 'h.1.mlp.' in measure.worst(rows)[0]['layer']  # the outlier is the signal: the share of zeros tells
    with torch.no_grad():
        model.h[0].attn.proj.weight[0, 0] = float('nan')
    rows = measure.health(model, Choice('native', ''), run)
    assert not math.isfinite(measure.worst(rows)[0]['sqnr_db']) and len(measure.health_lines(rows)) == 5
    scalars = measure.health_scalars(rows)
    assert scalars['fp8_fwd_scale'] > 0 and 'fp8_h.1.mlp.up/weight_flushed' in scalars


def test_aggregates_by_hand():
    row = lambda tensor, scale, sqnr: {'layer': 'a', 'tensor': tensor, 'amax': 1.0, 'scale': scale, 'saturated': 0.1, 'flushed': 0.2, 'sqnr_db': sqnr}
    scalars = measure.health_scalars([row('input', 2.0, 30.0), row('weight', 8.0, 29.0), row('grad', 100.0, 25.0)])
    assert scalars['fp8_fwd_scale'] == pytest.approx(4) and scalars['fp8_bwd_scale'] == pytest.approx(100) and scalars['fp8_sqnr_db'] == 25


@pytest.mark.parametrize('bf16, whole, without, losing', [
    (10, 8, dict(qkv=8.5, proj=7.9, up=9, down=9), ['proj']),               # proj is slower in FP8 than in bf16
    (10, 8, dict(qkv=8.5, proj=8.5, up=9, down=9), []),
    (10, 12, dict(qkv=11, proj=11, up=11.5, down=11), ['qkv', 'proj', 'up', 'down']),
    (10, 10.5, dict(qkv=10.6, proj=10.6, up=10.6, down=10.6), ['qkv', 'proj', 'up', 'down']),  # all gain nothing, and no single one is to blame
])
def test_layers_that_do_not_gain_stay_bf16(bf16, whole, without, losing):
    assert measure.losing_layers({'in bf16': bf16, 'in fp8': whole, **{f'without {name}': t for name, t in without.items()}}) == losing


def test_a_block_is_measured_and_remembered(monkeypatch, tmp_path, capsys):
    """Where FP8 is slower, every linear ends in bf16; the second time nothing is timed. Each variant runs, on a clock of our own."""
    monkeypatch.setattr(measure, 'medians', lambda runs, times: [run() for run in runs.values()] and {
        name: {'in bf16': 1.0, 'in fp8': 2.0}.get(name, 1.5) for name in runs})
    monkeypatch.setattr(measure, 'CACHE', str(tmp_path / 'deep' / 'keep.json'))
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda d: 'Test GPU')
    measured = []
    real = measure.measure_block
    monkeypatch.setattr(measure, 'measure_block', lambda *a: measured.append(1) or real(*a[:3], torch.device('cpu'), *a[4:]))
    choice = Choice('native', '')
    first = measure.auto_keep(CONFIG, choice, 2, torch.device('cuda'), False, False)
    assert not first.on and 'no faster in FP8' in first.reason and len(measured) == 1
    assert 'without attn.qkv' in capsys.readouterr().out
    assert measure.auto_keep(CONFIG, choice, 2, torch.device('cuda'), False, False) == first and len(measured) == 1
    assert measure.auto_keep(CONFIG, choice, 4, torch.device('cuda'), False, False) and len(measured) == 2  # another shape
    known = json.loads((tmp_path / 'deep' / 'keep.json').read_text())
    assert len(known) == 2
    for found in known.values():
        assert set(found['keep']) == {'attn.qkv', 'attn.proj', 'mlp.up', 'mlp.down'} and not found['gains'] and min(found['seconds'].values()) > 0
        found.update(keep=['attn.proj'], gains=True)  # as if one layer alone had lost
    (tmp_path / 'deep' / 'keep.json').write_text(json.dumps(known))
    chosen = measure.auto_keep(CONFIG, choice, 2, torch.device('cuda'), False, False)
    model = GPT(CONFIG, linear_factory(chosen, Linear))
    fp8.State(model, chosen)
    assert '6 of 9 linears' in fp8.summary(model, chosen) and 'h.0.attn.proj, h.1.attn.proj: kept by fp8_keep' in fp8.summary(model, chosen)
    assert measure.auto_keep(CONFIG, choice, 2, torch.device('cpu'), False, False) == choice and 'a CPU only emulates' in capsys.readouterr().out


def test_every_variant_of_a_block_is_compiled_by_itself(monkeypatch):
    """More variants than torch.compile keeps graphs of one code by default, none of them left to run uncompiled."""
    monkeypatch.setattr(torch, 'compile', lambda module, real=torch.compile: real(module, backend='aot_eager', fullgraph=True))
    times = measure.measure_block(CONFIG, Choice('native', '', 'delayed'), 2, torch.device('cpu'), True, True)['seconds']
    assert {'in bf16', 'in fp8', 'without attn.qkv', 'without attn.proj', 'without mlp.up', 'without mlp.down'} <= times.keys()


def test_speedup_leaves_no_trace():
    choice = Choice('native', '', 'delayed')
    model, run = model_and_run(choice)
    state = fp8.State(model, choice)
    state.calibrate(run)
    before = {n: b.clone() for n, b in model.named_buffers()}
    assert 0 < measure.speedup(run, run, state) < math.inf
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())


def test_a_glance_is_8k_tokens_in_whole_sequences():
    batch = lambda B, T: [torch.arange(B * T).view(B, T)] * 2
    assert [measure.glance(*batch(B, T))[1].shape for B, T in ((32, 1024), (4, 1024), (2, 16384), (500, 100))] == [(8, 1024), (4, 1024), (1, 16384), (500, 100)]
