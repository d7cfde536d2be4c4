"""The health of the casts against counting by hand, and the decisions that timings lead to."""
import dataclasses
import math
import re

import pytest
import torch

from fp8gpt import fp8
from fp8gpt import measure
from fp8gpt.fp8 import Choice, linear_factory
from fp8gpt.fp8.linear import E4M3, E5M2, quantizers
from fp8_models import NATIVE
from fp8_models import tokens as batch
from helpers import random
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
    lines = measure.health_lines(rows, NATIVE)
    assert re.match(r'FP8 health: \d+ of 24 casts are off \| limits: python diagnose.py --help', lines[0])
    assert 'SQNR nan dB' in lines[1]
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
    assert [part.shape for part in measure.glance(x, x)[:2]] == [(rows, T)] * 2
