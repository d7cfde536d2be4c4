import math

import pytest
import torch

from model import GPT, GPTConfig
from optim import accumulation, check_schedule, largest_batch_size, learning_rate, load_named_state, make_optimizer, named_state, run_length, step_if_finite


def test_schedule_by_hand():
    rates = [learning_rate(s, 110, 1.0, 0.1, 10) for s in range(110)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and rates[109] == pytest.approx(0.1)    # first step, end of warm-up, last step
    assert rates[59] == pytest.approx(0.55)                                              # half of the cosine
    assert rates[34] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)       # a quarter
    assert all(a < b for a, b in zip(rates[:9], rates[1:10])) and all(a > b for a, b in zip(rates[9:], rates[10:]))
    assert learning_rate(500, 110, 1.0, 0.1, 10) == pytest.approx(0.1)


@pytest.mark.parametrize('warmup', [0, 1])
def test_schedule_with_next_to_no_warmup(warmup):
    rates = [learning_rate(s, 10, 2.0, 0.0, warmup) for s in range(10)]
    assert max(rates) == rates[0] and rates[-1] == pytest.approx(0.0)


def test_schedule_against_torch():
    p = torch.nn.Parameter(torch.zeros(1))
    reference = torch.optim.SGD([p], lr=3e-3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(reference, T_max=50, eta_min=3e-4)
    for step in range(50):
        reference.step(), cosine.step()
        assert learning_rate(step, 50, 3e-3, 0.1, 0) == pytest.approx(reference.param_groups[0]['lr'])


def test_wsd_and_constant_by_hand():
    rates = [learning_rate(s, 100, 1.0, 0.1, 10, 'wsd', 0.2) for s in range(100)]
    assert rates[4] == 0.5 and set(rates[9:80]) == {1.0} and rates[80] == pytest.approx(1 - 0.9 / 20)
    assert rates[89] == pytest.approx(0.55) and rates[99] == pytest.approx(0.1)
    assert [learning_rate(s, 100, 1.0, 0.1, 4, 'constant') for s in (0, 3, 50, 99)] == [0.25, 1.0, 1.0, 1.0]
    assert learning_rate(99, 100, 1.0, 0.1, 0, 'wsd', 0.0) == 1.0


@pytest.mark.parametrize('arguments, message', [
    ((1760, 2000, 'cosine', 0.2), 'warmup_steps=2000, but the run has 1760 steps'), ((100, 90, 'wsd', 0.2), 'overlap'),
    ((100, 10, 'cosin', 0.2), 'lr_schedule is one of cosine, wsd, constant'), ((100, 10, 'wsd', 1.5), 'decay_share is 0 to 1')])
def test_schedules_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_schedule(*arguments)
    check_schedule(10, 10, 'cosine', 0.2)


def test_accumulation():
    assert accumulation(8, 1024, 2) == 1 and accumulation(8, 1024, 2, 0, 5) == 5
    assert accumulation(8, 1024, 8, 2**19) == 8 and accumulation(8, 1024, 8, 2**19, 8) == 8
    assert accumulation(8, 1024, 8, target_effective_batch_size=512) == 8 and accumulation(8, 1024, 8, 2**19, 8, 512) == 8


@pytest.mark.parametrize('arguments, message', [
    ((8, 1024, 12, 500_000), 'total_batch_size=500000 is not a multiple of 98304 .*; the nearest is 491520'),
    ((8, 1024, 1, 100), 'the nearest is 8192'), ((8, 1024, 8, 2**19, 4), '8 micro-steps'),
    ((8, 1024, 12, 0, 0, 512), 'target_effective_batch_size=512 is not a multiple of 96 .batch_size 8 x 12 ranks.; the nearest is 480'),
    ((8, 1024, 1, 2**19, 0, 500), 'give one of the two'), ((8, 1024, 1, 0, 3, 512), '64 micro-steps')])
def test_batches_that_do_not_divide(arguments, message):
    with pytest.raises(ValueError, match=message):
        accumulation(*arguments)


@pytest.mark.parametrize('fits, limit, allowed, expected', [
    (20, 128, lambda size: True, 16), (20, 8, lambda size: True, 8), (20, 128, lambda size: 12 % size == 0, 4), (1, 128, lambda size: True, 1)])
def test_largest_batch_size(fits, limit, allowed, expected):
    class Limited(torch.nn.Linear):
        def forward(self, idx, targets):
            if len(idx) > fits:
                raise torch.OutOfMemoryError('CUDA out of memory')
            return super().forward(idx.float()).sum()
    model = Limited(16, 4)
    assert largest_batch_size(model, 16, limit, allowed, torch.device('cpu')) == expected and model.weight.grad is None
    fits = 0
    with pytest.raises(RuntimeError, match='not even of one sequence of 16 tokens'):
        largest_batch_size(model, 16, limit, allowed, torch.device('cpu'))


def test_run_length():
    assert run_length(100, 1050) == (11, 'num_epochs=1')
    assert run_length(100, 1050, max_steps=7, max_tokens=600, num_epochs=2) == (6, 'max_tokens=600')
    assert run_length(100, 1000, num_epochs=0.5) == (5, 'num_epochs=0.5')
    assert run_length(100, 1000, max_tokens=10) == (1, 'max_tokens=10')


@pytest.fixture
def model():
    return GPT(GPTConfig(vocab_size=64, block_size=16, n_layer=2, n_head=2, n_embd=32))


def test_every_parameter_is_in_one_group(model):
    optimizer = make_optimizer(model, (0.9, 0.95), 0.1)
    decayed, plain = optimizer.param_groups
    assert decayed['weight_decay'] == 0.1 and plain['weight_decay'] == 0.0
    names = {id(p): name for name, p in model.weights().items()}
    assert {names[id(p)] for p in decayed['params']} == {n for n in names.values() if n.endswith('weight') and 'ln' not in n}
    assert len(decayed['params']) + len(plain['params']) == len(names)


@pytest.mark.filterwarnings('ignore:optimizer contains')
def test_a_doubled_parameter_is_an_error():
    class Doubled(torch.nn.Module):
        def parameters(self, recurse=True):
            p = torch.nn.Parameter(torch.zeros(2, 2))
            return iter([p, p])
    with pytest.raises(AssertionError):
        make_optimizer(Doubled(), (0.9, 0.95), 0.1)


def step(model, optimizer, spoil=None, skips=None):
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
    assert step(model, optimizer, skips=skips) == [0, 0, 0]
    weights = {n: p.clone() for n, p in model.weights().items()}
    state = {n: {k: v.clone() for k, v in s.items()} for n, s in named_state(optimizer, model).items()}
    assert step(model, optimizer, spoil, skips) == [1, 1, 1]
    assert step(model, optimizer, spoil, skips) == [2, 2, 2]
    assert all(torch.equal(weights[n], p) for n, p in model.weights().items())
    assert all(torch.equal(v, named_state(optimizer, model)[n][k]) for n, s in state.items() for k, v in s.items())
    assert step(model, optimizer, skips=skips) == [2, 0, 2] and not torch.equal(weights['wte.weight'], model.wte.weight)
    assert step(model, optimizer, spoil, skips) == [3, 1, 2]


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
