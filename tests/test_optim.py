"""The schedule by hand and against torch, the parameter groups, and steps that are not finite."""
import functools
import math
import sys

import pytest
import torch

from configurator import MachineError, SettingError
from fp8gpt.checkpoint import load_moments
from fp8gpt.optim import Schedule, make_optimizer, moment_bytes, named_state, set_rate, step_if_finite
from helpers import random, same_tensors
from model import GPT, GPTConfig


def rates(steps, *schedule, **more):
    """The rates of steps; schedule: last_step, max_lr, min_lr_ratio, warmup_steps."""
    return [Schedule(*schedule, **more).rate(step) for step in steps]


def test_schedule_by_hand():
    found = rates(range(110), 110, 1.0, 0.1, 10)
    quarter = (1 + math.cos(math.pi / 4)) / 2
    by_hand = {0: 0.1, 9: 1.0, 34: 0.1 + 0.9 * quarter, 59: 0.55, 109: 0.1}
    assert {step: found[step] for step in by_hand} == pytest.approx(by_hand)
    assert found[:10] == sorted(set(found[:10]))                    # up at each step, then down at each
    assert found[9:] == sorted(set(found[9:]), reverse=True)
    assert rates([500], 110, 1.0, 0.1, 10) == [pytest.approx(0.1)]
    for warmup in (0, 1):
        found = rates(range(10), 10, 2.0, 0.0, warmup)
        assert (max(found), found[-1]) == (found[0], pytest.approx(0.0))


def test_wsd_and_constant_by_hand():
    found = rates(range(100), 100, 1.0, 0.1, 10, lr_schedule='wsd')
    assert set(found[9:80]) == {1.0}
    assert [found[step] for step in (4, 80, 89, 99)] == pytest.approx([0.5, 1 - 0.9 / 20, 0.55, 0.1])
    found = rates((39, 40, 99), 100, 1.0, 0.0, 10, lr_schedule='wsd', decay_share=0.6)
    assert found == pytest.approx([1.0, 1 - 1 / 60, 0.0])
    assert rates((0, 3, 50, 99), 100, 1.0, 0.1, 4, lr_schedule='constant') == [0.25, 1.0, 1.0, 1.0]


def test_schedules_that_do_not_fit():
    for last_step, settings, message in (
        (1760, {'warmup_steps': 2000}, 'warmup_steps=2000, but the run has 1760 steps'),
        (100, {'warmup_steps': 90, 'lr_schedule': 'wsd'}, 'overlap'),
    ):
        with pytest.raises(SettingError, match=message):
            Schedule(last_step, 1.0, **settings).check()
    all_warmup = Schedule(10, 1.0, warmup_steps=10)
    assert all_warmup.check() is all_warmup


BETAS = 0.9, 0.95


@pytest.fixture
def model():
    return GPT(GPTConfig(vocab_size=64, block_size=16, n_layer=2, n_head=2, n_embd=32))


def test_every_parameter_is_in_one_group(model):
    decayed, plain = make_optimizer(model, BETAS, 0.1).param_groups
    assert (decayed['weight_decay'], plain['weight_decay']) == (0.1, 0.0)
    names = {id(p): name for name, p in model.weights().items()}
    matrices = {n for n in names.values() if n.endswith('weight') and 'ln' not in n}
    assert {names[id(p)] for p in decayed['params']} == matrices
    assert len(decayed['params']) + len(plain['params']) == len(names)


def low_bit(model, kind='adamw', dtype=torch.bfloat16, **options):
    """Return the optimizer of a model that becomes one of this dtype, at a rate of 0.01."""
    optimizer = make_optimizer(model.to(dtype), BETAS, 0.1, kind, **options)
    set_rate(optimizer, 0.01)
    return optimizer


OPTIMIZERS = {
    'fused AdamW': functools.partial(low_bit, dtype=torch.float32),
    'AdamW': lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=False),
    'fused SGD': lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True),
    'adamw8bit, bf16': functools.partial(low_bit, kind='adamw8bit'),
    'muon': functools.partial(low_bit, kind='muon', dtype=torch.float32),
}


def one_step(model, optimizer, skips, spoil=None):
    """Make one step of the optimizer and return the counts of skips. spoil: what one gradient becomes."""
    x = torch.arange(32).view(2, 16)
    model(x, x).backward()
    if spoil is not None:
        model.wpe.weight.grad[0, 0] = spoil
    step_if_finite(optimizer, torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), skips)
    model.zero_grad()
    return skips.tolist()


def snapshot(model, optimizer):
    """Return copies of all parameters and of every tensor of the optimizer's state."""
    state = [value for kept in named_state(optimizer, model).values() for value in kept.values()]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *state)]


@pytest.mark.parametrize('made', OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_non_finite_step_is_skipped_by_every_optimizer(model, made):
    optimizer, skips = made(model), torch.zeros(3)
    assert one_step(model, optimizer, skips) == [0, 0, 0]
    before = snapshot(model, optimizer)
    assert one_step(model, optimizer, skips, float('nan')) == [1, 1, 1]
    assert one_step(model, optimizer, skips, float('inf')) == [2, 2, 2]
    assert all(map(torch.equal, before, snapshot(model, optimizer)))
    assert one_step(model, optimizer, skips) == [2, 0, 2]
    assert not all(map(torch.equal, before, snapshot(model, optimizer)))
    assert all(p.isfinite().all() for p in model.parameters())
    assert one_step(model, optimizer, skips, float('nan')) == [3, 1, 2]


@pytest.mark.parametrize('kind', ['adamw', 'adamw8bit'])
def test_state_by_name_survives_another_order(model, kind):
    """In bf16, whose moments stay in fp32."""
    optimizer = low_bit(model, kind)
    one_step(model, optimizer, torch.zeros(3))
    saved = {name: {key: tensor.clone() for key, tensor in kept.items()}
             for name, kept in named_state(optimizer, model).items()}
    matrix, vector = saved['h.0.mlp.up.weight'], saved['ln_f.weight']
    assert matrix['exp_avg'].dtype == (torch.uint8 if kind == 'adamw8bit' else torch.float32)
    assert vector['exp_avg'].dtype == torch.float32
    other = low_bit(model, kind)
    other.param_groups[0]['params'].reverse()
    load_moments(named_state(other, model), saved)
    for each in (optimizer, other):
        assert same_tensors(named_state(each, model), saved)
    spoiled = {**vector, 'exp_avg': vector['exp_avg'] * torch.nan}
    for wrong in ({'h.9.weight': {}}, {**saved, 'ln_f.weight': saved['wte.weight']},
                  {**saved, 'ln_f.weight': spoiled}):
        with pytest.raises(OSError, match='does not fit this optimizer'):
            load_moments(named_state(other, model), wrong)


def trained(made, dtype=torch.float32, steps=20, shape=(64, 64), seed=0):
    """Return a weight after steps of an optimizer, made(model), along gradients that its dtype can hold."""
    model = torch.nn.Linear(*shape, dtype=dtype)
    with torch.no_grad():
        model.weight.copy_(random(*model.weight.shape, seed=5))
        model.bias.zero_()
    optimizer = made(model)
    for number in range(steps):
        optimizer.seed = seed + number
        for p in model.parameters():
            p.grad = random(*p.shape, seed=100 + number).to(dtype)
        optimizer.step()
    return model.weight.detach().double()


def reference(model):
    groups = [{'params': [model.weight], 'weight_decay': 0.1}, {'params': [model.bias], 'weight_decay': 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, betas=BETAS, fused=False)


def test_fewer_bits_end_near_adamw_in_fp32():
    start, end = trained(reference, steps=0), trained(reference)
    for kind, dtype, most in (('adamw8bit', torch.float32, 0.03), ('adamw', torch.bfloat16, 0.2),
                              ('adamw8bit', torch.bfloat16, 0.2)):
        found = trained(functools.partial(low_bit, kind=kind, dtype=dtype), dtype)
        assert 0 < (found - end).norm() / (end - start).norm() < most, (kind, dtype)


@pytest.mark.parametrize('kind', ['adamw', 'adamw8bit'])
def test_steps_smaller_than_bf16_can_hold_are_not_lost(kind):
    """A hundredth of the distance to the next bf16 number each: rounded to nearest, none would count."""
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = make_optimizer(torch.nn.ParameterList([weight]), BETAS, 0.0, kind)
    set_rate(optimizer, 2**-8 / 100)
    for number in range(100):
        optimizer.seed = number
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert (1 - weight.double()).mean().item() == pytest.approx(2**-8, rel=0.05)


def test_rounding_depends_on_the_seed_alone():
    """Ranks round alike, though the loop's own seed differs from rank to rank."""
    ends = []
    for rank, seed in ((0, 0), (1, 0), (0, 50)):
        torch.manual_seed(rank)
        ends.append(trained(low_bit, torch.bfloat16, seed=seed))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_bytes_of_moments():
    linear = torch.nn.Linear(512, 256)
    for kind, expected in (('adamw', 8 * (512 * 256 + 256)),
                           ('adamw8bit', 2 * (512 * 256 + 4 * 512) + 8 * 256)):
        kept = named_state(make_optimizer(linear, BETAS, 0.1, kind), linear).values()
        assert moment_bytes(linear, kind) == expected
        assert sum(t.nbytes for state in kept for t in state.values()) == expected + 2 * 4  # a step each


def test_without_torchao_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, 'torchao.optim', None)
    with pytest.raises(MachineError, match='pip install torchao'):
        make_optimizer(torch.nn.Linear(4, 4), BETAS, 0.1, 'adamw8bit')


@pytest.mark.slow
def test_the_compiled_step_is_the_eager_one():
    torch._dynamo.reset()
    for shape in ((64, 64), (128, 96)):
        ends = [trained(functools.partial(low_bit, kind='adamw8bit', dtype=torch.float32, compiled=compiled),
                        torch.float32, 3, shape) for compiled in (True, False)]
        torch.testing.assert_close(*ends, rtol=0, atol=1e-3)    # where a sum's last bit decides about a code
        assert (ends[0] == ends[1]).double().mean() > 0.9
