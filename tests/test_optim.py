"""The schedule by hand, the parameter groups, steps that are not finite, and each optimizer: few bits near
torch's AdamW, Muon against torch's and against its formula in fp64 by singular values."""
import functools
import math
import sys

import pytest
import torch

from configurator import MachineError, SettingError, configure
from conftest import ROOT
from fp8gpt.checkpoint import load_moments
from fp8gpt import lora, optim
from fp8gpt.optim import (
    Schedule, make_optimizer, moment_bytes, named_state, set_rate, step_if_finite)
from helpers import peak_bytes, random, same_tensors
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


def test_the_step_before_the_decay_of_wsd_is_kept():
    old, new = (Schedule(last, 1.0, lr_schedule='wsd') for last in (100, 200))
    assert old.rate(old.step_to_keep - 1) == new.rate(old.step_to_keep)     # of a longer run, no jump
    assert (old.step_to_keep, Schedule(100, 1.0).step_to_keep) == (80, 0)
    assert Schedule(100, 1.0, lr_schedule='wsd', decay_share=0.55).step_to_keep == 45   # 44.999... in fp64


def test_a_warm_up_that_nobody_typed_is_cut_to_a_tenth_of_a_shorter_run():
    for last_step, warmup, is_shorter, typed, wanted in (
            (100, 10, True, False, 10), (100, 11, True, False, 10), (100, 11, False, False, 11),
            (100, 101, False, False, 10), (5, 2, True, False, 1), (100, 90, True, True, 90)):
        config = configure(ROOT / 'train.py', [f'--warmup_steps={warmup}'] * typed)
        schedule = Schedule(last_step, 1.0, warmup_steps=warmup)
        line = schedule.fit(config, is_shorter)
        assert schedule.warmup_steps == wanted
        said = f'schedule  warmup_steps={wanted}, a tenth of the run, not {warmup}'
        assert line == said * (wanted != warmup)


def test_a_rate_that_jumps_is_said():
    """A cosine that ended at a tenth, made twice as long, is in its middle; wsd before its decay stays."""
    old, new = (Schedule(last, 1.0, lr_schedule='cosine') for last in (100, 200))
    assert 'was 1.00e-01 until now and is 5.' in new.jump(100, old.rate(99))
    assert old.jump(50, old.rate(49)) == old.jump(0, None) == ''
    old, new = (Schedule(last, 1.0, lr_schedule='wsd') for last in (100, 200))
    assert new.jump(old.step_to_keep, old.rate(old.step_to_keep - 1)) == ''


def test_schedules_that_do_not_fit():
    for last_step, settings, message in (
        (1760, {'warmup_steps': 2000}, 'warmup_steps=2000, but the run has 1760 steps'),
        (100, {'warmup_steps': 90, 'lr_schedule': 'wsd'}, 'overlap'),
    ):
        with pytest.raises(SettingError, match=message):
            Schedule(last_step, 1.0, **settings).check()
    all_warmup = Schedule(10, 1.0, warmup_steps=10)
    all_warmup.check()


BETAS = 0.9, 0.95


@pytest.fixture
def model():
    return GPT(GPTConfig(vocab_size=64, block_size=16, n_layer=2, n_head=2, n_embd=32))


def test_every_parameter_is_in_one_group(model):
    """AdamW decays all matrices, Muon those of blocks."""
    names = {id(p): name for name, p in model.weights().items()}
    matrices = {n for n in names.values() if n.endswith('weight') and 'ln' not in n}
    for kind, wanted in (('adamw', matrices), ('muon', {n for n in matrices if n.startswith('h.')})):
        groups = make_optimizer(model, BETAS, 0.1, kind).param_groups
        plain, decayed = sorted(groups, key=lambda group: group['weight_decay'])
        assert (decayed['weight_decay'], plain['weight_decay']) == (0.1, 0.0)
        assert {names[id(p)] for p in decayed['params']} == wanted
        assert sorted(names[id(p)] for group in groups for p in group['params']) == sorted(names.values())


def low_bit(model, kind='adamw', dtype=torch.bfloat16, weight_decay=0.1, **options):
    """Return the optimizer of a model that becomes one of this dtype, at a rate of 0.01."""
    optimizer = make_optimizer(model.to(dtype), BETAS, weight_decay, kind, **options)
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
    rows = [({'h.9.weight': {}}, 'missing, too many')]
    rows += [({**saved, 'ln_f.weight': {**vector, 'exp_avg': spoiled}}, said) for spoiled, said in (
        (vector['exp_avg'][1:], 'of another shape'),)]
    for wrong, said in rows:
        with pytest.raises(OSError, match=f'does not fit this optimizer .*{said}.*--init_from=CHECKPOINT'):
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


def test_bytes_of_moments(model):
    linear = torch.nn.Linear(512, 256)
    in_blocks = sum(k * n for _, k, n in model.config.linears()[:-1])
    others = sum(p.numel() for p in model.parameters()) - in_blocks
    for each, kind, expected in ((linear, 'adamw', 8 * (512 * 256 + 256)),
                                 (linear, 'adamw8bit', 2 * (512 * 256 + 4 * 512) + 8 * 256),
                                 (model, 'muon', 4 * in_blocks + 8 * others)):
        assert moment_bytes(each, kind) == expected
        optimizer = make_optimizer(each, BETAS, 0.1, kind)
        for p in each.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        held = (item for kept in named_state(optimizer, each).values() for item in kept.items())
        assert sum(t.nbytes for name, t in held if name != 'step') == expected


def test_what_cannot_be_had_is_told_in_one_line(model, monkeypatch):
    with pytest.raises(SettingError, match='optimizer=muon takes whole fp32 weights'):
        make_optimizer(model.bfloat16(), BETAS, 0.1, 'muon')
    monkeypatch.setitem(sys.modules, 'torchao.optim.adam', None)
    with pytest.raises(MachineError, match='pip install torchao'):
        make_optimizer(torch.nn.Linear(4, 4), BETAS, 0.1, 'adamw8bit')


def test_a_step_is_torchaos_own_bit_for_bit():
    from torchao.optim import AdamW8bit
    theirs = functools.partial(AdamW8bit, lr=0.01, betas=BETAS, weight_decay=0.1, bf16_stochastic_round=True)
    ends = []
    for make in (theirs, lambda parameters: low_bit(torch.nn.ParameterList(parameters), 'adamw8bit')):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(64, 64).bfloat16())
        optimizer = make([p])
        for _ in range(3):
            p.grad = torch.randn_like(p)
            torch.manual_seed(0)
            with torch.compiler.set_stance('force_eager'):
                optimizer.step()
            ends.append(p.detach().clone())
    assert torch.equal(ends[0], ends[3])
    for ours, others in ((ends[1], ends[4]), (ends[2], ends[5])):   # but where a second moment's code is 0
        assert (ours != others).float().mean() < 0.01


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_a_weight_without_a_gradient_moves_no_further_than_by_adamw(dtype):
    """Rows of an embedding, whose token comes once. The smallest gradients' squares are below 8 bits: their
    weights moved by hundreds of learning rates."""
    weight = torch.nn.Parameter(torch.zeros(16, 256, dtype=dtype))
    optimizer = low_bit(torch.nn.ParameterList([weight]), 'adamw8bit', dtype)
    set_rate(optimizer, 1e-3)
    gradient = random(16, 256, dtype=torch.float32).to(dtype)
    for step in range(4):
        before = weight.detach().clone()
        weight.grad = gradient if not step else torch.zeros_like(weight)
        optimizer.step()
        assert (weight - before).abs().max() < 1.2e-3, step


@pytest.mark.slow
def test_the_compiled_step_is_the_eager_one():
    torch._dynamo.reset()
    for shape in ((64, 64), (128, 96)):
        ends = [trained(functools.partial(low_bit, kind='adamw8bit', dtype=torch.float32, compiled=compiled),
                        torch.float32, 3, shape) for compiled in (True, False)]
        torch.testing.assert_close(*ends, rtol=0, atol=1e-3)    # where a sum's last bit decides about a code
        assert (ends[0] == ends[1]).double().mean() > 0.9


# ------------------------------------------------------------------------------------------------------ Muon

SHAPE = dict(vocab_size=64, block_size=16, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, mlp='swiglu')


def muon(weight_decay=0.1, **more):
    """Return a model and its Muon, whose momentum has warmed up."""
    model = GPT(GPTConfig(**{**SHAPE, **more}))
    optimizer = low_bit(model, 'muon', torch.float32, weight_decay=weight_decay)
    for p, _ in optimizer.matrices:
        optimizer.state[p].update(step=torch.tensor(300.0), momentum=torch.zeros_like(p))
    return model, optimizer


def stepped(optimizer, weights, seed):
    """Make a step of the optimizer along gradients {name: p} that are drawn by seed and name."""
    for name, p in weights.items():
        p.grad = random(*p.shape, seed=1000 * seed + len(name)).float()
    optimizer.step()


def test_parameters_move_as_by_torchs_muon_and_adamw(monkeypatch):
    """torch rounds to bf16 in Muon's iterations; here both compute in fp32."""
    monkeypatch.setattr(torch.Tensor, 'bfloat16', torch.Tensor.float)
    monkeypatch.setattr(torch, 'bfloat16', torch.float32)   # as torch 2.15 names it there
    model, optimizer = muon(tie_embeddings=False)
    copies = {name: p.detach().clone() for name, p in model.weights().items()}
    names = 'h.0.attn.proj.weight', 'h.1.mlp.down.weight', 'h.1.attn.proj.weight'   # one linear each
    matrices = {name: copies[name] for name in names}
    others = {name: p for name, p in copies.items() if not name.startswith('h.')}
    theirs = torch.optim.Muon(matrices.values(), lr=0.01, weight_decay=0.1, momentum=0.95,
                              adjust_lr_fn='match_rms_adamw')
    adamw = torch.optim.AdamW(others.values(), lr=0.01, betas=BETAS, weight_decay=0.0)
    for seed in range(3):
        stepped(optimizer, model.weights(), seed)
        stepped(theirs, matrices, seed)
        stepped(adamw, others, seed)
    for name, p in (matrices | others).items():     # fifteen products of numbers near 1, each to fp32's 2^-24
        rtol, atol = (0, 1e-5 * p.abs().max().item()) if name in matrices else (1e-5, 1e-6)
        torch.testing.assert_close(model.weights()[name], p, rtol=rtol, atol=atol)


def test_queries_keys_and_values_are_orthogonalised_apart():
    """In fp64: five times the odd polynomial of the singular values of each linear's gradient."""
    model, optimizer = muon(weight_decay=0.0, mlp='gelu')
    before = {name: p.detach().double() for name, p in model.weights().items()}
    stepped(optimizer, model.weights(), 0)
    for name, parts in (('h.0.attn.qkv.weight', [32, 16, 16]), ('h.1.mlp.up.weight', [128])):
        p = model.weights()[name]
        for part, change in zip(p.grad.double().split(parts), (before[name] - p.double()).split(parts)):
            part = part * (0.05 * 0.95 + 0.05)      # Nesterov's, of momentum 0.95 from zeros
            u, s, vt = torch.linalg.svd(part, full_matrices=False)
            s = s / s.square().sum().sqrt()
            for _ in range(5):
                s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
            wanted = 0.01 * 0.2 * math.sqrt(max(part.shape)) * (u * s) @ vt
            assert (change - wanted).norm() < 1e-4 * wanted.norm()  # before - after cancels 2 digits


def test_the_memory_of_muons_step_is_that_of_a_stack(monkeypatch):
    """Copies of all matrices would be as large as the gradients, beside which they are."""
    model, optimizer = muon(n_layer=16)
    stepped(optimizer, model.weights(), 0)
    largest = max(p.numel() for p, _ in optimizer.matrices)
    monkeypatch.setattr(optim, 'STACK', largest)
    assert peak_bytes(optimizer.step) < 8 * 4 * largest < sum(p.nbytes for p, _ in optimizer.matrices)


def test_muon_asks_for_no_kernel_for_each_matrix():
    """There a GPU, whose host has waited for the norm, would wait for the host."""
    model, optimizer = muon()
    stepped(optimizer, model.weights(), 0)
    with torch.profiler.profile() as profile:
        optimizer.step()
    asked = {event.name for event in profile.events() if not event.name.startswith('Optimizer')
             and event.cpu_parent.name.startswith('Optimizer')}
    assert 'aten::_foreach_lerp_' in asked
    assert not asked & {'aten::lerp', 'aten::lerp_', 'aten::mul_', 'aten::sub_', 'aten::stack'}


def test_adapters_move_alone_by_muon():
    config, spec = GPTConfig(**SHAPE, position='rope'), lora.Spec(rank=4, targets='all')
    model = GPT(config)
    lora.add(model, spec)
    optimizer = low_bit(model, 'muon', torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    stepped(optimizer, model.weights(), 0)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == model.weights().keys()
    assert all('.lora.' in name for name in moved)
