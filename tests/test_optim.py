"""The schedule by hand and against torch, the parameter groups, and steps that are not finite."""
import functools
import math

import pytest
import torch

from configurator import SettingError
from helpers import random
from model import GPT, GPTConfig
from fp8gpt.optim import (
    LowBitAdamW, Schedule, dynamic_map, load_named_state, make_optimizer, moment_bytes, named_state, quantize,
    round_at_random, set_rate, step_if_finite)

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
    for warmup in (0, 1):
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


def test_schedules_that_do_not_fit():
    for last_step, settings, message in (
        (1760, {'warmup_steps': 2000}, 'warmup_steps=2000, but the run has 1760 steps'),
        (100, {'warmup_steps': 90, 'lr_schedule': 'wsd'}, 'overlap'),
    ):
        with pytest.raises(SettingError, match=message):
            Schedule(last_step, 1.0, **settings).check()
    all_warmup = Schedule(10, 1.0, warmup_steps=10)
    assert all_warmup.check() is all_warmup


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


def fused_adamw(model):
    optimizer = make_optimizer(model, (0.9, 0.95), 0.1)
    set_rate(optimizer, 0.01)
    return optimizer


def matrices_of(model):
    return [p for p in model.h.parameters() if p.dim() == 2]    # torch's Muon takes no others


def low_bit(kind, dtype):
    """A maker of LowBitAdamW, of a model that becomes one of this dtype."""
    def made(model):
        optimizer = make_optimizer(model.to(dtype), (0.9, 0.95), 0.1, kind)
        assert type(optimizer) is LowBitAdamW
        set_rate(optimizer, 0.01)
        return optimizer
    return made


LOW_BIT = {
    'adamw, bf16': low_bit('adamw', torch.bfloat16),
    'adamw8bit, fp32': low_bit('adamw8bit', torch.float32),
    'adamw8bit, bf16': low_bit('adamw8bit', torch.bfloat16),
}
ALL = {
    'fused AdamW': fused_adamw,
    'AdamW': lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=False),
    'fused SGD': lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True),
    'SGD': lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    'Muon': lambda model: torch.optim.Muon(matrices_of(model), lr=0.01),
    **LOW_BIT,
}


@pytest.fixture
def stance():
    yield
    torch.compiler.set_stance('default')


def snapshot(model, optimizer):
    """Copies of all parameters and of every tensor of the optimizer's state."""
    state = [value for p in model.parameters() for value in optimizer.state.get(p, {}).values()]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *state)]


@pytest.mark.parametrize('made', ALL.values(), ids=ALL)
def test_a_non_finite_step_is_skipped_by_every_optimizer(model, made):
    optimizer, skips = made(model), torch.zeros(3)
    assert step(model, optimizer, skips) == [0, 0, 0]
    before = snapshot(model, optimizer)
    assert step(model, optimizer, skips, float('nan')) == [1, 1, 1]
    assert step(model, optimizer, skips, float('inf')) == [2, 2, 2]
    for old, new in zip(before, snapshot(model, optimizer), strict=True):
        assert torch.equal(old, new)
    assert step(model, optimizer, skips) == [2, 0, 2]
    changed = [not torch.equal(old, new) for old, new in zip(before, snapshot(model, optimizer))]
    assert any(changed)
    assert all(p.isfinite().all() for p in model.parameters())
    assert step(model, optimizer, skips, float('nan')) == [3, 1, 2]


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


# --------------------------------------------------------------------------- bf16 weights, moments of 8 bits

def test_codes_are_those_of_torchao():
    from torchao.optim import subclass_8bit
    for signed, theirs in ((True, 'get_qmap_signed'), (False, 'get_qmap_unsigned')):
        values = torch.tensor(getattr(subclass_8bit, theirs)())
        assert torch.equal(dynamic_map(signed), values)
        x = random(8, 256, dtype=torch.float32) ** 5
        x = x if signed else x.abs()
        scaled, their_scale = subclass_8bit.scale_tensor(x, 256)
        codes, scale = quantize(x, dynamic_map(signed))
        assert torch.equal(scale.flatten(), their_scale)
        assert torch.equal(codes, subclass_8bit.quantize_8bit_with_qmap(scaled, values))


def test_rounding_at_random_is_right_on_average():
    values = torch.tensor([1.0, 1.001, -1.003, 3e-5, -7e-20, 0.0])
    x = values.repeat(100_000, 1)
    noise = torch.empty(x.shape, dtype=torch.int16)
    noise.random_(-2**15, 2**15, generator=torch.Generator().manual_seed(1))
    rounded = round_at_random(x, noise)
    for value, column in zip(values, rounded.t()):
        spacing = (value.abs() * 2**-7).item()  # of bf16's numbers, at most
        assert (column.float() - value).abs().max() <= spacing
        assert column.double().mean().item() == pytest.approx(value.item(), abs=0.01 * spacing)
    assert (rounded[:, 0] == 1).all()           # a bf16 number stays
    assert len(rounded[:, 1].unique()) == 2


def trained(made, dtype=torch.float32, steps=20, shape=(64, 64)):
    """A parameter after steps of an optimizer, made(model), along gradients that its dtype can hold."""
    model = torch.nn.Linear(*shape, dtype=dtype)
    with torch.no_grad():
        model.weight.copy_(random(*model.weight.shape, seed=5))
        model.bias.zero_()
    optimizer = made(model)
    for number in range(steps):
        optimizer.seed = number
        for p in model.parameters():
            p.grad = random(*p.shape, seed=100 + number).to(dtype)
        optimizer.step()
    return model.weight.detach().double()


def reference(model):
    decayed, plain = [model.weight], [model.bias]
    groups = [{'params': decayed, 'weight_decay': 0.1}, {'params': plain, 'weight_decay': 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), fused=False)


def test_with_everything_in_fp32_it_is_adamw():
    def ours(model):
        groups = reference(model).param_groups
        return LowBitAdamW(groups, (0.9, 0.95), 1e-8, 'adamw', compiled=False)
    torch.testing.assert_close(trained(ours), trained(reference), rtol=0, atol=2e-6)


def astray(made, dtype):
    """How far a parameter ends from where AdamW in fp32 ends, as a share of the way there."""
    start, end = trained(reference, steps=0), trained(reference)
    return ((trained(made, dtype) - end).norm() / (end - start).norm()).item()


def test_moments_of_8_bits_end_where_torchaos_do(stance):
    def theirs(model):
        from torchao.optim import AdamW8bit
        torch.compiler.set_stance('force_eager')
        return AdamW8bit(model.parameters(), lr=torch.tensor(0.01), betas=(0.9, 0.95), weight_decay=0.1)
    ours, theirs = trained(LOW_BIT['adamw8bit, fp32']), trained(theirs)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-4)     # a last bit may decide about a code
    assert ((ours - theirs).abs() < 1e-6).double().mean() > 0.9


def test_fewer_bits_end_near_adamw_in_fp32():
    for name, most in (('adamw8bit, fp32', 0.03), ('adamw, bf16', 0.2), ('adamw8bit, bf16', 0.2)):
        dtype = torch.bfloat16 if 'bf16' in name else torch.float32
        assert 0 < astray(LOW_BIT[name], dtype) < most, name


@pytest.mark.parametrize('name', ['adamw, bf16', 'adamw8bit, bf16'])
def test_steps_smaller_than_bf16_can_hold_are_not_lost(name):
    """A hundredth of the distance to the next bf16 number each: rounded to nearest, none would count."""
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    model = torch.nn.ParameterList([weight])
    optimizer = make_optimizer(model, (0.9, 0.95), 0.0, name.split(',')[0])
    set_rate(optimizer, 2**-8 / 100)
    for number in range(100):
        optimizer.seed = number
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert (1 - weight.double()).mean().item() == pytest.approx(2**-8, rel=0.05)


def test_ranks_round_alike_whatever_else_they_draw():
    """The loop's own seed differs from rank to rank."""
    ends = []
    for rank in (0, 1):
        torch.manual_seed(rank)
        ends.append(trained(LOW_BIT['adamw8bit, bf16'], torch.bfloat16))
    assert torch.equal(*ends)


def test_each_step_rounds_anew():
    def of_seed(seed):
        def made(model):
            optimizer = LOW_BIT['adamw, bf16'](model)
            optimizer.step = functools.partial(step, optimizer)
            return optimizer

        def step(optimizer):
            optimizer.seed = seed
            LowBitAdamW.step(optimizer)
        return trained(made, torch.bfloat16, steps=1)
    assert not torch.equal(of_seed(1), of_seed(2))


def test_bytes_of_moments():
    linear = torch.nn.Linear(512, 256)
    assert moment_bytes(linear, 'adamw') == 8 * (512 * 256 + 256)
    assert moment_bytes(linear, 'adamw8bit') == 2 * (512 * 256 + 4 * 512) + 8 * 256
    optimizer = make_optimizer(linear, (0.9, 0.95), 0.1, 'adamw8bit')
    for p in linear.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    kept = [t for p in linear.parameters() for t in optimizer.state[p].values()]
    assert sum(t.nbytes for t in kept) == moment_bytes(linear, 'adamw8bit') + 2 * 4  # a step each


@pytest.mark.slow
def test_the_compiled_step_is_the_eager_one():
    """Graphs are of any shape from the second one on."""
    def compiled(model):
        optimizer = make_optimizer(model, (0.9, 0.95), 0.1, 'adamw8bit', compiled=True)
        set_rate(optimizer, 0.01)
        return optimizer
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = []
    for shape in ((64, 64), (128, 96), (32, 256)):
        ends = [trained(made, torch.bfloat16, 3, shape) for made in (compiled, LOW_BIT['adamw8bit, bf16'])]
        assert (ends[0] - ends[1]).abs().max() <= 2**-6
        assert (ends[0] != ends[1]).double().mean() < 0.01  # where a sum's last bit decides
        graphs.append(torch._dynamo.utils.counters['stats']['unique_graphs'])
    assert graphs[1] == graphs[2] <= 4
