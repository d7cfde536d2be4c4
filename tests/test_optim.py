import math

import pytest
import torch

from model import GPT, GPTConfig
from optim import (
    accumulation,
    check_schedule,
    largest_batch_size,
    learning_rate,
    load_named_state,
    make_optimizer,
    named_state,
    run_length,
    step_if_finite,
)

# ------------------------------------------------------------------------------ the schedule

def rates(steps, last_step, *settings, **more):
    """learning_rate at steps; settings: max_lr, min_lr_ratio, warmup_steps."""
    return [learning_rate(step, last_step, *settings, **more) for step in steps]


def test_schedule_by_hand():
    found = rates(range(110), 110, 1.0, 0.1, 10)
    assert found[0] == 0.1                      # the first step
    assert found[9] == 1.0                      # the warm-up's end
    assert found[109] == pytest.approx(0.1)     # the last step
    assert found[59] == pytest.approx(0.55)     # half of the cosine
    quarter = (1 + math.cos(math.pi / 4)) / 2
    assert found[34] == pytest.approx(0.1 + 0.9 * quarter)
    # up at each step, then down at each
    assert found[:10] == sorted(set(found[:10]))
    assert found[9:] == sorted(set(found[9:]), reverse=True)
    assert rates([500], 110, 1.0, 0.1, 10) == [pytest.approx(0.1)]


@pytest.mark.parametrize('warmup', [0, 1])
def test_schedule_with_next_to_no_warmup(warmup):
    found = rates(range(10), 10, 2.0, 0.0, warmup)
    assert max(found) == found[0]
    assert found[-1] == pytest.approx(0.0)


def test_schedule_against_torch():
    p = torch.nn.Parameter(torch.zeros(1))
    reference = torch.optim.SGD([p], lr=3e-3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(reference, T_max=50, eta_min=3e-4)
    for rate in rates(range(50), 50, 3e-3, 0.1, 0):
        reference.step()
        cosine.step()
        assert rate == pytest.approx(reference.param_groups[0]['lr'])


def test_wsd_by_hand():
    found = rates(range(100), 100, 1.0, 0.1, 10, lr_schedule='wsd', decay_share=0.2)
    assert found[4] == 0.5
    assert set(found[9:80]) == {1.0}
    assert found[80] == pytest.approx(1 - 0.9 / 20)
    assert found[89] == pytest.approx(0.55)
    assert found[99] == pytest.approx(0.1)
    assert rates([99], 100, 1.0, 0.1, 0, lr_schedule='wsd', decay_share=0.0) == [1.0]


def test_constant_by_hand():
    found = rates((0, 3, 50, 99), 100, 1.0, 0.1, 4, lr_schedule='constant')
    assert found == [0.25, 1.0, 1.0, 1.0]


@pytest.mark.parametrize('arguments, message', [
    ((1760, 2000, 'cosine', 0.2), 'warmup_steps=2000, but the run has 1760 steps'),
    ((100, 90, 'wsd', 0.2), 'overlap'),
    ((100, 10, 'cosin', 0.2), 'lr_schedule is one of cosine, wsd, constant'),
    ((100, 10, 'wsd', 1.5), 'decay_share is 0 to 1'),
])
def test_schedules_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_schedule(*arguments)
    check_schedule(10, 10, 'cosine', 0.2)


# ------------------------------------------------------------------------------ batches and length

def micro_steps(world_size, total=0, given=0, sequences=0):
    """accumulation of micro-batches of 8 x 1024 tokens."""
    return accumulation(
        8,
        1024,
        world_size,
        total_batch_size=total,
        gradient_accumulation_steps=given,
        target_effective_batch_size=sequences,
    )


@pytest.mark.parametrize('arguments, steps', [
    (dict(world_size=2), 1),
    (dict(world_size=2, given=5), 5),
    (dict(world_size=8, total=2**19), 8),
    (dict(world_size=8, total=2**19, given=8), 8),
    (dict(world_size=8, sequences=512), 8),
    (dict(world_size=8, total=2**19, given=8, sequences=512), 8),
])
def test_accumulation(arguments, steps):
    assert micro_steps(**arguments) == steps


@pytest.mark.parametrize('arguments, message', [
    (dict(world_size=12, total=500_000),
     'total_batch_size=500000 is not a multiple of 98304 .*; the nearest is 491520'),
    (dict(world_size=1, total=100), 'the nearest is 8192'),
    (dict(world_size=8, total=2**19, given=4), '8 micro-steps'),
    (dict(world_size=12, sequences=512),
     'target_effective_batch_size=512 is not a multiple of 96 .batch_size 8 x 12 ranks.; '
     'the nearest is 480'),
    (dict(world_size=1, total=2**19, sequences=500), 'give one of the two'),
    (dict(world_size=1, given=3, sequences=512), '64 micro-steps'),
])
def test_batches_that_do_not_divide(arguments, message):
    with pytest.raises(ValueError, match=message):
        micro_steps(**arguments)


class Limited(torch.nn.Linear):
    """A model that has memory for so many sequences."""

    def __init__(self, fits):
        super().__init__(16, 4)
        self.fits = fits

    def forward(self, idx, targets):
        if len(idx) > self.fits:
            raise torch.OutOfMemoryError('CUDA out of memory')
        return super().forward(idx.float()).sum()


@pytest.mark.parametrize('fits, limit, allowed, expected', [
    (20, 128, lambda size: True, 16),
    (20, 8, lambda size: True, 8),
    (20, 128, lambda size: 12 % size == 0, 4),
    (1, 128, lambda size: True, 1),
])
def test_largest_batch_size(fits, limit, allowed, expected):
    model, cpu = Limited(fits), torch.device('cpu')
    assert largest_batch_size(model, 16, limit, allowed, cpu) == expected
    assert model.weight.grad is None
    with pytest.raises(RuntimeError, match='not even of one sequence of 16 tokens'):
        largest_batch_size(Limited(0), 16, limit, allowed, cpu)


def test_run_length():
    assert run_length(100, 1050) == (11, 'num_epochs=1')
    first = run_length(100, 1050, max_steps=7, max_tokens=600, num_epochs=2)
    assert first == (6, 'max_tokens=600')
    assert run_length(100, 1000, num_epochs=0.5) == (5, 'num_epochs=0.5')
    assert run_length(100, 1000, max_tokens=10) == (1, 'max_tokens=10')


# ------------------------------------------------------------------------------ the optimizer

@pytest.fixture
def model():
    return GPT(GPTConfig(vocab_size=64, block_size=16, n_layer=2, n_head=2, n_embd=32))


def test_every_parameter_is_in_one_group(model):
    optimizer = make_optimizer(model, (0.9, 0.95), 0.1)
    decayed, plain = optimizer.param_groups
    assert decayed['weight_decay'] == 0.1
    assert plain['weight_decay'] == 0.0
    names = {id(p): name for name, p in model.weights().items()}
    matrices = {n for n in names.values() if n.endswith('weight') and 'ln' not in n}
    assert {names[id(p)] for p in decayed['params']} == matrices
    assert len(decayed['params']) + len(plain['params']) == len(names)


@pytest.mark.filterwarnings('ignore:optimizer contains')
def test_a_doubled_parameter_is_an_error():
    class Doubled(torch.nn.Module):
        def parameters(self, recurse=True):
            p = torch.nn.Parameter(torch.zeros(2, 2))
            return iter([p, p])
    with pytest.raises(AssertionError):
        make_optimizer(Doubled(), (0.9, 0.95), 0.1)


def step(model, optimizer, skips=None, spoil=None):
    """One step of the optimizer; returns the counts of skips. spoil: what becomes of one gradient."""
    x = torch.arange(32).view(2, 16)
    model(x, x).backward()
    if spoil is not None:
        model.wpe.weight.grad[0, 0] = spoil
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    skips = torch.zeros(3) if skips is None else skips
    step_if_finite(optimizer, norm, skips)
    optimizer.zero_grad()
    return skips.tolist()


@pytest.mark.parametrize('spoil', [float('nan'), float('inf')])
def test_a_non_finite_step_is_skipped(model, spoil):
    optimizer = make_optimizer(model, (0.9, 0.95), 0.1)
    for group in optimizer.param_groups:
        group['lr'] = 0.01
    skips = torch.zeros(3)
    assert step(model, optimizer, skips) == [0, 0, 0]
    weights = {name: p.clone() for name, p in model.weights().items()}
    state = {}
    for name, values in named_state(optimizer, model).items():
        state[name] = {key: value.clone() for key, value in values.items()}
    assert step(model, optimizer, skips, spoil) == [1, 1, 1]
    assert step(model, optimizer, skips, spoil) == [2, 2, 2]
    for name, p in model.weights().items():
        assert torch.equal(weights[name], p)
    now = named_state(optimizer, model)
    for name, values in state.items():
        for key, value in values.items():
            assert torch.equal(value, now[name][key])
    assert step(model, optimizer, skips) == [2, 0, 2]
    assert not torch.equal(weights['wte.weight'], model.wte.weight)
    assert step(model, optimizer, skips, spoil) == [3, 1, 2]


def test_state_by_name_survives_another_order(model):
    optimizer = make_optimizer(model, (0.9, 0.95), 0.1)
    step(model, optimizer)
    other = make_optimizer(model, (0.9, 0.95), 0.1)
    other.param_groups[0]['params'].reverse()
    load_named_state(other, model, named_state(optimizer, model))
    for p in model.parameters():
        assert torch.equal(optimizer.state[p]['exp_avg'], other.state[p]['exp_avg'])
    with pytest.raises(ValueError, match='another model'):
        load_named_state(other, model, {'h.9.weight': {}})
