"""Weights cast once a step and kept over its micro-steps: the same bits, fewer casts."""
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from fp8gpt import fp8
import fp8_models
from fp8gpt.fp8.kernels import kept
from fp8_models import NATIVE, build, gradients, on_a_cpu, tokens, trained
from fp8gpt.optim import set_rate

CHOICES = [('emulate', 'rowwise_gw_hp'),
           ('emulate', 'mxfp8'), ('native', 'tensorwise'), ('native', 'delayed')]


@pytest.fixture
def casts(monkeypatch):
    """A list that grows by a linear each time a weight is cast to be kept, the check beforehand aside."""
    monkeypatch.setattr(fp8, 'follows', lambda linear: True)
    cast, real = [], kept.noted

    def noted(amax, scale, tensors):
        cast.extend(tensors)
        return real(amax, scale, tensors)
    monkeypatch.setattr(kept, 'noted', noted)
    return cast


def without_keeping(monkeypatch):
    monkeypatch.setattr(kept.Keeper, 'refresh', lambda *_: None)


def compiled(monkeypatch):
    """Has fp8_models train by compiled pieces, each one whole graph; returns their counter."""
    counter = CompileCounterWithBackend('aot_eager')
    torch._dynamo.reset()

    def built(*arguments):
        model, state, optimizer = build(*arguments)
        model.compile(backend=counter, fullgraph=True)
        return model, state, optimizer
    monkeypatch.setattr(fp8_models, 'build', built)
    return counter


@pytest.mark.parametrize('backend, recipe', CHOICES)
def test_keeping_changes_no_bit(backend, recipe, casts, monkeypatch):
    """Whether or not blocks are recomputed: then a cast is kept from forward to backward."""
    choice = on_a_cpu(backend, recipe)
    keeping = trained(choice, micro_steps=4)
    assert len(casts) == 3 * 8
    assert torch.equal(trained(choice, checkpoint_every=1, micro_steps=4), keeping)
    assert len(casts) == 6 * 8
    without_keeping(monkeypatch)
    assert torch.equal(trained(choice, micro_steps=4), keeping)
    assert len(casts) == 6 * 8


@pytest.mark.slow
@pytest.mark.parametrize('backend, recipe', CHOICES[1:])
def test_compiled_keeping_changes_no_bit_and_adds_no_graph(backend, recipe, casts, monkeypatch):
    choice = on_a_cpu(backend, recipe)
    counter = compiled(monkeypatch)
    keeping = trained(choice, micro_steps=4)
    assert len(casts) == 3 * 8
    graphs = counter.frame_count
    without_keeping(monkeypatch)
    counter = compiled(monkeypatch)
    assert torch.equal(trained(choice, micro_steps=4), keeping)
    assert graphs == counter.frame_count


def test_one_micro_step_keeps_nothing(casts):
    model, state, _ = build(NATIVE)
    state.micro_step(0, 1)
    gradients(model)
    assert not casts
    assert all(linear.w8 is None for linear in fp8.fp8_linears(model).values())


def test_a_step_drops_what_was_kept_whichever_state_ends_it():
    """After a fused optimizer's step, too, which no version of a tensor counts."""
    model, first, optimizer = build(NATIVE)
    second = fp8.State(model, NATIVE)
    first.micro_step(0, 4)
    gradients(model)
    assert all(linear.w8 is not None for linear in fp8.fp8_linears(model).values())
    set_rate(optimizer, 1e-2)
    optimizer.step()
    second.after_step()
    plain, _, _ = build(NATIVE)
    plain.load_weights(model.weights())
    assert torch.equal(gradients(model), gradients(plain))


def test_weights_that_change_between_micro_steps_are_cast_anew():
    model, state, _ = build(NATIVE)
    state.micro_step(0, 4)
    gradients(model)
    halves = {name: p.detach() / 2 for name, p in model.weights().items()}
    model.load_weights(halves)
    plain, _, _ = build(NATIVE)
    plain.load_weights(halves)
    assert torch.equal(gradients(model), gradients(plain))


def test_evaluation_between_micro_steps_is_bf16_and_casts_nothing(casts):
    model, state, _ = build(NATIVE)
    state.micro_step(0, 4)
    with fp8.paused(), torch.no_grad():
        model(*tokens())
    assert not casts


def test_a_cast_that_does_not_follow_its_weight_is_found_before_training(monkeypatch):
    real = kept.keep

    def by_version_alone(linear):
        linear.kept_of = getattr(linear, 'stale', linear.kept_of)
        real(linear)
        linear.stale = linear.kept_of
    model = build(NATIVE)[0]
    before = model.h[0].attn.qkv.weight.detach().clone()
    fp8.State(model, NATIVE)
    assert torch.equal(model.h[0].attn.qkv.weight, before)
    monkeypatch.setattr(kept, 'keep', by_version_alone)
    with pytest.raises(RuntimeError, match='stale weights'):
        fp8.State(model, NATIVE)
