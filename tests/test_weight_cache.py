"""Weights cast once per step and cached over its micro-steps: the same bits, fewer casts."""
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import fp8_models
from fp8_models import NATIVE, build, gradients, on_a_cpu, tokens, trained
from fp8gpt import fp8
from fp8gpt.optim import set_rate


@pytest.fixture
def casts(monkeypatch):
    """A list that grows by a linear each time a weight is cast for the cache."""
    cast, real = [], fp8.cast_weight
    monkeypatch.setattr(fp8, 'cast_weight', lambda *given: cast.append(given) or real(*given))
    return cast


@pytest.fixture
def counter(monkeypatch):
    """A counter of graphs; fp8_models then trains by compiled pieces, each a whole graph."""
    counter = CompileCounterWithBackend('aot_eager')

    def built(*arguments):
        torch._dynamo.reset()
        model, state, optimizer = build(*arguments)
        model.compile(backend=counter, fullgraph=True)
        return model, state, optimizer
    monkeypatch.setattr(fp8_models, 'build', built)
    return counter


def without_cache(monkeypatch):
    monkeypatch.setattr(fp8.WeightCache, 'refresh', lambda *_: None)


@pytest.mark.parametrize('backend, recipe', [('emulate', 'rowwise_gw_hp'), ('native', 'delayed')])
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
def test_compiled_caching_changes_no_bit_and_adds_no_graph(casts, counter, monkeypatch):
    choice = on_a_cpu('native', 'delayed')
    cached = trained(choice, micro_steps=4)
    assert len(casts) == 3 * 8
    graphs = counter.frame_count
    without_cache(monkeypatch)
    assert torch.equal(trained(choice, micro_steps=4), cached)
    assert counter.frame_count == 2 * graphs


def test_few_micro_steps_and_evaluation_cache_nothing(casts):
    model, state, _ = build(NATIVE)
    state.weight_cache.new_step(fp8.FEWEST - 1)
    gradients(model)
    state.weight_cache.new_step(fp8.FEWEST)
    with fp8.paused(), torch.no_grad():
        model(*tokens())
    assert not casts


def test_weights_are_cast_anew_after_a_step():
    """Whichever State ends it."""
    model, first, optimizer = build(NATIVE)
    second, (plain, _, _) = fp8.State(model, NATIVE), build(NATIVE)
    first.weight_cache.new_step(fp8.FEWEST)
    gradients(model)
    assert all(linear.w8 is not None for linear in fp8.fp8_linears(model).values())
    set_rate(optimizer, 1e-2)
    optimizer.step()
    second.after_step()
    plain.load_weights(model.weights())
    assert torch.equal(gradients(model), gradients(plain))
