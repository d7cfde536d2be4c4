"""The schedule by hand and against torch, the parameter groups, and steps that are not finite."""
import math

import pytest
import torch

from configurator import SettingError
from model import GPT, GPTConfig
from optim import Schedule, load_named_state, make_optimizer, named_state, set_rate, step_if_finite

# ------------------------------------------------------------------------------ the schedule

def rates(steps, *schedule, **more):
    """The rates of steps; schedule: last_step, max_lr, min_lr_ratio, warmup_steps."""
    return [Schedule(*schedule, **more).rate(step) for step in steps]


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


@pytest.mark.parametrize('last_step, settings, message', [
    (1760, {'warmup_steps': 2000}, 'warmup_steps=2000, but the run has 1760 steps'),
    (100, {'warmup_steps': 90, 'lr_schedule': 'wsd'}, 'overlap'),
])
def test_schedules_that_do_not_fit(last_step, settings, message):
    with pytest.raises(SettingError, match=message):
        Schedule(last_step, 1.0, **settings).check()


def test_a_run_may_be_all_warmup():
    schedule = Schedule(10, 1.0, warmup_steps=10)
    assert schedule.check() is schedule


def test_the_line_tells_the_landmarks():
    line = Schedule(100, 1.0, warmup_steps=10).line()
    assert line.startswith('schedule  cosine: step 0 1.00e-01, step 9 1.00e+00, step 25 ')
    assert line.endswith(', step 99 1.00e-01')


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
    model.zero_grad()
    return skips.tolist()


def unfused_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=False)


def fused_adamw(model):
    optimizer = make_optimizer(model, (0.9, 0.95), 0.1)
    set_rate(optimizer, 0.01)
    return optimizer


def fused_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def muon(model):
    """Of the blocks' matrices: torch's takes no others."""
    return torch.optim.Muon([p for p in model.h.parameters() if p.dim() == 2], lr=0.01)


def adamw8bit(model):
    """It compiles its step, which an eager run stands for."""
    from torchao.optim import AdamW8bit
    torch.compiler.set_stance('force_eager')
    optimizer = AdamW8bit(model.parameters())
    set_rate(optimizer, 0.01)
    return optimizer


@pytest.fixture
def stance():
    yield
    torch.compiler.set_stance('default')


def snapshot(model, optimizer):
    """Copies of all parameters and of every tensor of the optimizer's state."""
    state = [value for p in model.parameters() for value in optimizer.state.get(p, {}).values()]
    state = [getattr(value, 'codes', value) for value in state]  # torchao's 8-bit tensors
    return [tensor.detach().clone() for tensor in (*model.parameters(), *state)]


@pytest.mark.parametrize('spoil', [float('nan'), float('inf')])
@pytest.mark.parametrize('made', [fused_adamw, unfused_adamw, fused_sgd, sgd, muon, adamw8bit])
def test_a_non_finite_step_is_skipped_by_every_optimizer(model, stance, made, spoil):
    optimizer, skips = made(model), torch.zeros(3)
    assert step(model, optimizer, skips) == [0, 0, 0]
    before = snapshot(model, optimizer)
    assert step(model, optimizer, skips, spoil) == [1, 1, 1]
    assert step(model, optimizer, skips, spoil) == [2, 2, 2]
    for old, new in zip(before, snapshot(model, optimizer), strict=True):
        assert torch.equal(old, new)
    assert step(model, optimizer, skips) == [2, 0, 2]
    changed = [not torch.equal(old, new) for old, new in zip(before, snapshot(model, optimizer))]
    assert any(changed)
    assert all(p.isfinite().all() for p in model.parameters())
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
