"""Delayed scaling's state: amaxes, histories, scales, and what a checkpoint holds of them."""
import pytest
import torch
import torch.nn as nn

from fp8gpt import fp8
from fp8gpt.fp8 import linear_factory
from fp8_models import NATIVE, SMALL, on_a_cpu
from helpers import Waits
from model import GPT, Linear

E4M3, E5M2 = 448, 57344  # largest values: of input and weight, and of the gradient
ONES = torch.ones(16, 32, dtype=torch.bfloat16)


def delayed_layer(**options):
    """(a model of one linear, the linear, its State)."""
    choice = on_a_cpu('native', 'delayed', **options)
    layer = nn.Sequential(fp8.make_linear(choice, 32, 16, False))
    layer[0].bf16_reason = None
    return layer, layer[0], fp8.State(layer, choice)


def test_delayed_scales_by_hand():
    """amax of x: 1, 4, 2, 2 over a history of two: the scale of the next step is 448 / (2^margin max of the
    last two)."""
    layer, linear, state = delayed_layer(amax_history=2, margin=1)
    x = torch.zeros(16, 32, dtype=torch.bfloat16)
    layer(x + 8).sum().backward()
    with pytest.raises(RuntimeError, match='State.calibrate'):
        state.after_step()
    for run in (lambda: None), torch.no_grad()(lambda: layer(x + 1)):
        with pytest.warns(UserWarning, match='saw no training pass'):
            state.calibrate(run)
    state.calibrate(lambda: layer(x + 1).sum().backward())      # what was seen without scales is no amax
    assert linear.scale[0].item() == E4M3 / 2
    for amax, expected in ((4, 4), (2, 4), (2, 2)):
        before = linear.scale.clone()
        for part in (1, amax, 1):  # over micro-steps the maximum counts, and the scale stays
            layer(x + part).sum().backward()
            assert torch.equal(linear.scale, before)
        state.after_step()
        assert linear.scale[0].item() == E4M3 / (2 * expected)
        assert linear.amax.abs().sum() == 0
    state.calibrate(lambda: layer(x + 1).sum().backward())      # of another run: none of these amaxes counts
    assert linear.scale[0].item() == E4M3 / 2


def test_no_step_waits_for_the_gpu():
    layer, linear, state = delayed_layer()
    state.calibrate(lambda: layer(ONES).sum().backward())
    layer(2 * ONES).sum().backward()
    with Waits() as waits:
        state.after_step()
    assert not waits.found
    assert linear.scale[0].item() == E4M3 / 2


def test_a_scale_fills_the_range_of_its_format_and_is_finite():
    for format, amax, expected in (
            ('hybrid', 4.0, (E4M3 / 4, E4M3 / 2, E5M2 / 8)), ('e4m3', 4.0, (E4M3 / 4, E4M3 / 2, E4M3 / 8)),
            ('e5m2', 4.0, (E5M2 / 4, E4M3 / 2, E5M2 / 8)),
            ('e4m3', 2.0**-60, (E4M3 * 2.0**60, E4M3 / 2, E4M3 / 8)),
            ('e4m3', 2.0**-126, (2.0**126, E4M3 / 2, E4M3 / 8)), ('e4m3', 0.0, (1.0, E4M3 / 2, E4M3 / 8))):
        layer, linear, state = delayed_layer(format=format)
        with torch.no_grad():
            linear.weight.fill_(2)
        state.calibrate(lambda layer=layer, amax=amax: (layer(ONES * amax) * 8).sum().backward())
        assert tuple(linear.scale.tolist()) == expected


def test_a_weight_of_zeros_and_a_layer_without_tokens_train():
    """As zero-initialised projections do, and experts: the result is finite, and an FP8 one later on."""
    linear = fp8.make_linear(on_a_cpu('native', 'delayed'), 32, 16, False)
    model, linear.bf16_reason = nn.Sequential(linear), None
    torch.nn.init.zeros_(linear.weight)
    state = fp8.State(model, on_a_cpu('native', 'delayed'))
    assert torch.equal(model(ONES), torch.zeros(16, 16)), 'before the calibration, too'
    with pytest.warns(UserWarning, match='saw no training pass'):
        state.calibrate(lambda: model(ONES[:0]).sum().backward())
    assert linear.scale.tolist() == [1.0, 1.0, 1.0]
    for _ in range(3):
        with torch.no_grad():
            model(100 * ONES)       # an evaluation is no step
        y = model(ONES)
        y.sum().backward()
        assert y.isfinite().all() and linear.weight.grad.isfinite().all()
        with torch.no_grad():
            linear.weight -= 0.5 * linear.weight.grad
        linear.weight.grad = None
        state.after_step()
    assert linear.scale.tolist() == [E4M3, E4M3 / 16, E5M2]     # amaxes 1, and two steps of 0.5 * 16
    saved = state.state_dict()
    before = saved['history'].clone()
    model(200 * ONES).sum().backward()
    state.after_step()
    assert torch.equal(saved['history'], before), 'as it was when it was taken'


def test_a_last_layer_of_zeros_starts_all_layers_at_once():
    """Those below it see their first gradient after a step; by a scale of 1, small ones would all be zeros,
    one layer a step. They are as large as those that are known, to a factor that e5m2 holds."""
    choice = on_a_cpu('native', 'delayed', interval=100)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in 'abcdef'))
    nn.init.zeros_(model[-1].weight)
    fp8.convert(model, choice)
    state, x = fp8.State(model, choice), torch.randn(64, 32, generator=torch.Generator().manual_seed(0))

    def run():
        model.zero_grad()
        (model(x).sum() / 1e7).backward()

    state.calibrate(run)
    for _ in range(2):
        run()
        with torch.no_grad():
            for p in model.parameters():
                p -= 1e4 * p.grad       # a step as of Adam, whose size is that of no gradient
        state.after_step()
    assert all(linear.weight.grad.any() for linear in model)


def test_scales_of_other_layers_are_not_taken():
    def model():
        model = nn.Sequential(*(fp8.make_linear(on_a_cpu('native', 'delayed'), 32, 32, False) for _ in 'ab'))
        for linear in model:
            linear.bf16_reason = None
        return model, fp8.State(model, on_a_cpu('native', 'delayed'))
    layers, state = model()
    state.calibrate(lambda: layers(ONES).sum().backward())
    saved = state.state_dict()
    for names, taken in ((saved['layers'], True), (saved['layers'][::-1], False), (['0', '2'], False)):
        _, state = model()
        state.load({**saved, 'layers': names})
        assert state.needs_calibration != taken


def test_scales_over_steps():
    for interval, history, amaxes, expected in (
            (3, 4, (2, 4, float('inf'), 8, 8, 8), [1, 1, 4, 4, 4, 8]),  # every third; the inf leaves no mark
            (1, 2, (4, float('inf'), 2), [4, 4, 4]),                    # and counts as the step before it
            (1, 1, (2, 0, 4), [2, 2, 4])):                              # a tensor of zeros keeps its scale
        layer, linear, state = delayed_layer(amax_history=history, interval=interval)
        state.calibrate(lambda layer=layer: layer(ONES).sum().backward())
        seen = []
        for amax in amaxes:
            layer(ONES * amax).sum().backward()
            state.after_step()
            seen.append(E4M3 / linear.scale[0].item())
        assert seen == expected


def test_a_layer_that_rests_longer_than_the_history_keeps_its_scale():
    choice = on_a_cpu('native', 'delayed', amax_history=1)
    model = nn.ModuleList(nn.Linear(32, 32) for _ in 'ab')
    fp8.convert(model, choice)
    state = fp8.State(model, choice)
    state.calibrate(lambda: sum(layer(ONES).sum() for layer in model).backward())
    for amax in 2, 4:
        model[0](amax * ONES).sum().backward()
        state.after_step()
    assert [layer.scale[0].item() for layer in model] == [E4M3 / 4, E4M3]


def test_a_state_that_does_not_fit_is_calibrated_anew():
    """Of another divisor or history, or by scales that would lose all values. Other recipes have no state."""
    layer, linear, state = delayed_layer(amax_history=2)
    state.load(None, divisor=4)
    state.calibrate(lambda: layer(ONES).sum().backward())
    saved, wrong = state.state_dict(), []
    nan, zero = torch.full((1, 3), torch.nan), torch.zeros(1, 3)
    for change, fits in (
            ({}, True), ({'divisor': 8}, False), ({'history': torch.zeros(4, 1, 3)}, False),
            ({'scale': nan}, False), ({'scale': zero}, False), ({'scale': 1 / zero}, False)):
        layer, other, fresh = delayed_layer(amax_history=2)
        layer(ONES * 100)   # as a search for the batch size does, before load
        fresh.load({**saved, **change}, divisor=4)
        loaded = not fresh.needs_calibration, torch.equal(other.scale, linear.scale)
        if loaded != (fits, fits) or other.amax.any():
            wrong.append(change)
    assert wrong == []
    assert fp8.State(GPT(SMALL, linear_factory(NATIVE, Linear)), NATIVE).state_dict() == {}
    assert not fp8.State(GPT(SMALL), fp8.OFF).needs_calibration
