"""Weights cast once per step and cached over its micro-steps: the same bits, fewer casts."""
import dataclasses

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import fp8_models
from fp8_models import NATIVE, build, gradients, on_a_cpu, tokens, trained
from fp8gpt import fp8
from fp8gpt.fp8 import backends
from fp8gpt.optim import set_rate
from helpers import compiled, random


@pytest.fixture
def casts(monkeypatch):
    """A list that grows by a linear each time a weight is cast for the cache."""
    cast, real = [], fp8.cast_weight
    monkeypatch.setattr(fp8, 'cast_weight', lambda *given: cast.append(given) or real(*given))
    return cast


def cached_twice_and_not(choice, casts, monkeypatch, *built_otherwise):
    """Train by three steps of four micro-steps, with the cache and then without: the weights are the same."""
    cached = trained(choice, micro_steps=4)
    assert len(casts) == 3 * 8
    for options in built_otherwise:
        assert torch.equal(trained(choice, micro_steps=4, **options), cached)
    taken = len(casts)
    monkeypatch.setattr(fp8.WeightCache, 'refresh', lambda *_: None)
    assert torch.equal(trained(choice, micro_steps=4), cached)
    assert len(casts) == taken == 3 * 8 * (1 + len(built_otherwise))


@pytest.mark.parametrize('backend, recipe', [('emulate', 'rowwise_gw_hp'), ('native', 'delayed')])
def test_caching_changes_no_bit(backend, recipe, casts, monkeypatch):
    cached_twice_and_not(on_a_cpu(backend, recipe), casts, monkeypatch, {'checkpoint_every': 1})


@pytest.mark.slow
@pytest.mark.parametrize('kernels', ['inductor', 'triton'])
def test_compiled_caching_changes_no_bit_and_adds_no_graph(kernels, casts, monkeypatch):
    counter, graphs = CompileCounterWithBackend('aot_eager'), []

    def built(*arguments):
        graphs.append(counter.frame_count)
        model, state, optimizer = build(*arguments)
        return compiled(model, backend=counter, fullgraph=True), state, optimizer
    monkeypatch.setattr(fp8_models, 'build', built)
    cached_twice_and_not(on_a_cpu('native', 'delayed', kernels=kernels), casts, monkeypatch)
    assert counter.frame_count == 2 * graphs[1] > 0


@pytest.mark.parametrize('kernels', ['inductor', 'triton'])
@pytest.mark.parametrize('units', [False, True])
def test_a_cached_cast_breaks_no_graph(kernels, units, monkeypatch):
    """Dynamo takes no autograd.Function that gets a tensor twice. Compiled code gives the same bits, with a
    CPU's units for bf16, too."""
    monkeypatch.setattr(backends, 'HAS_UNITS', units)
    choice, x = dataclasses.replace(NATIVE, kernels=kernels), random(16, 32)
    linear = torch.nn.Linear(32, 64)
    fp8.convert(linear, choice)
    fp8.State(linear, choice).weight_cache.new_step(fp8.FEWEST)
    expected = linear(x)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(linear.forward, backend='eager', fullgraph=True)(x), expected)


def test_few_micro_steps_and_evaluation_cache_nothing(casts):
    model, state, _ = build(NATIVE)
    state.weight_cache.new_step(fp8.FEWEST - 1)
    gradients(model)
    state.weight_cache.new_step(fp8.FEWEST)
    with fp8.paused(), torch.no_grad():
        model(*tokens())
    assert not casts


def test_weights_are_cast_anew_after_a_step():
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
