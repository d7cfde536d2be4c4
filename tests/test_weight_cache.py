"""Weights cast once per step and cached over its micro-steps: the same bits, fewer casts."""
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import fp8_models
from fp8_models import NATIVE, build, gradients, on_a_cpu, tokens, trained
from fp8gpt import fp8
from fp8gpt.optim import set_rate

CHOICES = [('emulate', 'rowwise_gw_hp'),
           ('emulate', 'mxfp8'), ('native', 'tensorwise'), ('native', 'delayed')]


@pytest.fixture
def casts(monkeypatch):
    """A list that grows by a linear each time a weight is cast for the cache."""
    cast, real = [], fp8.cast_weight
    monkeypatch.setattr(fp8, 'cast_weight', lambda *given: cast.append(given) or real(*given))
    return cast


def without_cache(monkeypatch):
    monkeypatch.setattr(fp8.WeightCache, 'refresh', lambda *_: None)


def compiled(monkeypatch):
    """Have fp8_models train by compiled pieces, each a whole graph; return their counter."""
    counter = CompileCounterWithBackend('aot_eager')
    torch._dynamo.reset()

    def built(*arguments):
        model, state, optimizer = build(*arguments)
        model.compile(backend=counter, fullgraph=True)
        return model, state, optimizer
    monkeypatch.setattr(fp8_models, 'build', built)
    return counter


@pytest.mark.parametrize('backend, recipe', CHOICES)
def test_caching_changes_no_bit(backend, recipe, casts, monkeypatch):
    """Whether or not blocks are recomputed: then a cast is cached from forward to backward."""
    choice = on_a_cpu(backend, recipe)
    cached = trained(choice, micro_steps=4)
    assert len(casts) == 3 * 8
    assert torch.equal(trained(choice, checkpoint_every=1, micro_steps=4), cached)
    assert len(casts) == 6 * 8
    without_cache(monkeypatch)
    assert torch.equal(trained(choice, micro_steps=4), cached)
    assert len(casts) == 6 * 8


@pytest.mark.slow
@pytest.mark.parametrize('backend, recipe', CHOICES[1:])
def test_compiled_caching_changes_no_bit_and_adds_no_graph(backend, recipe, casts, monkeypatch):
    choice = on_a_cpu(backend, recipe)
    counter = compiled(monkeypatch)
    cached = trained(choice, micro_steps=4)
    assert len(casts) == 3 * 8
    graphs = counter.frame_count
    without_cache(monkeypatch)
    counter = compiled(monkeypatch)
    assert torch.equal(trained(choice, micro_steps=4), cached)
    assert graphs == counter.frame_count


def test_one_micro_step_and_evaluation_cache_nothing(casts):
    model, state, _ = build(NATIVE)
    state.micro_step(0, 1)
    gradients(model)
    assert all(linear.w8 is None for linear in fp8.fp8_linears(model).values())
    state.micro_step(0, 4)
    with fp8.paused(), torch.no_grad():
        model(*tokens())
    assert not casts


def test_changed_weights_are_cast_anew():
    """Between micro-steps, and after a fused optimizer's step, which no version of a tensor counts, whichever
    State ends it."""
    model, first, optimizer = build(NATIVE)
    second = fp8.State(model, NATIVE)
    plain, _, _ = build(NATIVE)
    first.micro_step(0, 4)
    gradients(model)
    assert all(linear.w8 is not None for linear in fp8.fp8_linears(model).values())
    for change in ('load', 'step'):
        if change == 'load':
            model.load_weights({name: p.detach() / 2 for name, p in model.weights().items()})
        else:
            set_rate(optimizer, 1e-2)
            optimizer.step()
            second.after_step()
        plain.load_weights(model.weights())
        assert torch.equal(gradients(model), gradients(plain))
