"""Runs sized by a budget: hours, a target, the memory of a GPU; and what ends one that runs out of memory."""
import itertools
import os
import random
import re
import subprocess
import sys
import types
from unittest import mock

import pytest
import torch

from fp8gpt import batch_size_finder, distributed, optim
from fp8gpt.checkpoint import read
from configurator import MachineError
from conftest import ROOT, in_ranks, losses, records, run, runner
from model import GPT, GPTConfig
from fp8gpt.optim import OPEN, Budget, Schedule

CPU = torch.device('cpu')
MAX_LR, MIN_LR = 1.0, 0.1


class Run:
    """The loop's use of a Budget. durations: of steps, in seconds, with what is done between them. step,
    hours: where a resumed run goes on."""

    def __init__(self, durations, schedule, limit=OPEN, step=0, hours=0.0, stop=OPEN):
        self.seconds, self.rates, self.estimates = 0.0, [], []
        self.budget = Budget(400 / 3600, limit, hours, lambda: self.seconds)
        schedule = Schedule(limit, MAX_LR, MIN_LR, lr_schedule=schedule, warmup_steps=20)
        schedule.last_step = last_step = self.budget.last_step(step)
        while step < min(stop, last_step):
            self.rates.append(schedule.rate(step))
            self.seconds += next(durations)
            step += 1
            schedule.last_step = last_step = self.budget.after_step(step)
            self.estimates.append(last_step)


def steps_of(seconds):
    """Yield durations of steps, the first of which compiles for a minute."""
    yield 60.0
    yield from seconds


def uneven():
    """Some steps ten times as long as others, some a thousandth."""
    draw = random.Random(1)
    while True:
        yield draw.choice([0.001, 0.5, 1.0, 1.0, 5.0])


def test_the_decay_ends_with_the_hours():
    for schedule in 'cosine', 'wsd':
        slowing = (1.0 + step / 100 for step in itertools.count())
        for seconds in itertools.repeat(1.0), slowing, uneven():
            done = Run(steps_of(seconds), schedule)
            after = done.rates[20 - 1:]
            drops = [before - rate for before, rate in zip(after, after[1:])]
            assert max(after) == after[0] == MAX_LR
            assert min(drops) >= -1e-12, 'a rate rises after the warm-up'
            assert after[-1] - MIN_LR <= max(drops)
            assert 400 <= done.budget.hours * 3600 < 400 + 10


def test_steps_of_one_length_have_the_rates_of_a_run_by_steps():
    """The first step counts as the second one took. A resumed run goes on where the share of the hours was,
    and a limit of steps may come first."""
    def taken(**options):
        return Run(steps_of(itertools.repeat(1.0)), 'cosine', **options)
    whole, by_steps = taken(), Schedule(400, MAX_LR, MIN_LR, lr_schedule='cosine', warmup_steps=20)
    assert whole.rates == pytest.approx([by_steps.rate(step) for step in range(400)])
    assert whole.estimates[10:] == pytest.approx([400] * 390)
    first = taken(stop=150)
    assert len(first.rates) == 150
    rest = taken(step=150, hours=first.budget.hours)
    assert first.rates + rest.rates == pytest.approx(whole.rates, abs=0.004)    # a step's change
    for limit, steps in ((100, 100), (1000, 400)):
        rates = taken(limit=limit).rates
        assert (len(rates), rates[-1]) == (steps, pytest.approx(MIN_LR))


TICKING = """
import itertools, torch
from fp8gpt import optim
ticks = itertools.count()
speed = 1 if os.environ.get('RANK', '0') == '0' else 3
optim.Budget.__init__.__defaults__ = (0.0, lambda: 36.0 * speed * next(ticks))
torch.cuda.empty_cache = lambda: print('emptied')
"""


@pytest.fixture
def ticking(tmp_path_factory):
    """A runner of scripts under which a step takes a hundredth of an hour on rank 0, and three on others."""
    return runner(tmp_path_factory.mktemp('ticking'), TICKING)


BY_HOURS = ['--max_steps=0', '--eval_freq=0', '--target_val_loss=5']


def test_hours_end_a_run_and_a_target_is_printed_once(ticking, tiny, tmp_path):
    folder, words = tmp_path, [*BY_HOURS, '--max_hours=0.297', '--empty_cache_freq=10']
    out = run(ticking, 'train.py', *tiny, *words, f'--checkpoint_dir={folder}').stdout
    assert out.count('emptied\n') == 2    # --empty_cache_freq: after 10 and 20 steps of 30
    assert 'until max_hours=0.297\n' in out
    assert re.search(r'^step 15 \| .* left \| ', out, re.M)
    assert re.search(r'^step 30 \| loss ', out, re.M)
    state = read(folder / 'latest.pt')
    assert (state['step'], state['hours']) == (30, pytest.approx(0.3))
    assert records(folder, 'train/learning_rate')[-1] == (30, pytest.approx(3e-4))
    assert 'target    5 reached at step 30: 7,680 tokens, 0.30 hours' in out
    lowest, = (loss for step, loss in records(folder, 'val/loss') if step)
    reached = {'val_loss': [(30, lowest)], 'tokens': [(30, 7680)], 'hours': [(30, pytest.approx(0.3))]}
    assert {name: records(folder, f'target/{name}') for name in reached} == reached

    words = ['--resume=latest', '--max_hours=0.397', '--target_val_loss=5', f'--checkpoint_dir={folder}']
    assert 'target    5 reached' not in run(ticking, 'train.py', *words).stdout
    assert read(folder / 'latest.pt')['step'] == 40
    assert [step for step, _ in records(folder, 'target/hours')] == [30]


def test_a_resume_by_hours_keeps_the_warm_up_that_was_cut(here, tiny, tmp_path, monkeypatch):
    """A warm-up of 100 steps, by default, is a tenth of a run of 30. A resumed run that began with the one of
    100 took a fifth of the rate for its first two steps, and warned of another schedule."""
    words = [word for word in tiny if not word.startswith('--warmup_steps')]
    words += [*BY_HOURS, '--max_hours=0.297', '--checkpoint_freq=10', '--keep_checkpoints=0', '--n_layer=1']

    def rates(*words):
        ticks = itertools.count()
        monkeypatch.setattr(Budget.__init__, '__defaults__', (0.0, lambda: 36.0 * next(ticks)))
        out = here('train.py', *words)
        assert 'WARNING: the learning rate' not in out
        return dict(records(words[-1].partition('=')[2], 'train/learning_rate'))
    whole = rates(*words, f'--checkpoint_dir={tmp_path}/whole')
    rest = rates(f'--resume={tmp_path}/whole/step_000020.pt', f'--checkpoint_dir={tmp_path}/rest')
    assert list(whole) == [*range(1, 31)] and list(rest) == [*range(21, 31)]
    assert rest == pytest.approx({step: whole[step] for step in rest}, rel=0.2)      # a step's change


def test_a_warm_up_beyond_the_hours_stops_the_run(ticking, tiny, tmp_path):
    words = [*BY_HOURS, '--max_hours=0.297', '--warmup_steps=31', f'--checkpoint_dir={tmp_path}']
    done = run(ticking, 'train.py', *tiny, *words, rc=2)
    assert 'warmup_steps=31, but the run has 30 steps' in done.stderr
    assert '--warmup_steps=2\n' in done.stderr
    assert list(losses(tmp_path)) == [1, 2]
    assert not list(tmp_path.glob('*.pt'))


@pytest.mark.slow
def test_ranks_go_by_one_clock(ticking, tiny, tmp_path):
    words = [*BY_HOURS, '--max_hours=0.097', '--batch_size=2', f'--checkpoint_dir={tmp_path}']
    in_ranks(2, ticking, 'train.py', *tiny, *words)
    state = read(tmp_path / 'latest.pt')
    assert (state['step'], state['hours']) == (10, pytest.approx(0.1))


CONFIG = {'block_size': 16, 'total_batch_size': 0, 'gradient_accumulation_steps': 0,
          'target_effective_batch_size': 0, 'max_batch_size': 128}
ONE = distributed.Ranks(0, 1, CPU)


def test_the_largest_batch_that_fits_divides_the_step():
    def largest(target, ranks, fitting):
        config, tried = {**CONFIG, 'target_effective_batch_size': target}, []
        size = batch_size_finder.largest_fitting(
            config, ranks, lambda size: tried.append(size) or size <= fitting)
        assert len(tried) <= 8
        return size
    for asked, size in (((0, 1, 128), 128), ((0, 1, 100), 100), ((0, 2, 1), 1), ((96, 1, 95), 48),
                        ((96, 2, 95), 48), ((96, 3, 31), 16)):
        assert largest(*asked) == size
    with pytest.raises(MachineError, match='--grad_checkpointing=full'):
        largest(96, 1, 0)


class Seen(GPT):
    """Notes what a trial gives to it."""
    def forward(self, idx, targets, n_targets, examples=None):
        accumulates = self.wte.weight.grad is not None
        self.seen.append((tuple(idx.shape), n_targets, examples is not None, accumulates))
        return super().forward(idx, targets, n_targets, examples)


def tried(monkeypatch, size, target=0, packed=False, kind='adamw', **options):
    """(whether a size fits, what the model was given, how often the optimizer had state before a measured
    step) of a trial on a pretended GPU of 350 bytes, where each sequence takes 100."""
    model = Seen(GPTConfig(vocab_size=64, block_size=16, n_layer=1, n_head=2, n_embd=32), **options)
    model.seen = []
    optimizer = optim.make_optimizer(model, (0.9, 0.95), 0.1, kind)
    optim.set_rate(optimizer, 0.1)  # at the start it is 0, which would hide a step
    found = []
    monkeypatch.setattr(torch.cuda, 'reset_peak_memory_stats', lambda device: found.append(
        len(optimizer.state) == len(list(model.parameters()))))
    monkeypatch.setattr(torch.cuda, 'max_memory_allocated', lambda device: 100 * model.seen[-1][0][0])
    monkeypatch.setattr(batch_size_finder, 'allowed_bytes', lambda device: 350)
    monkeypatch.setattr(batch_size_finder, 'largest_fitting', lambda config, ranks, fits: fits(size) * size)
    run = types.SimpleNamespace(config={**CONFIG, 'target_effective_batch_size': target}, notes=[])
    before = {name: p.clone() for name, p in model.named_parameters()}
    fits = batch_size_finder.find_batch_size(run, model, optimizer, ONE, packed) == size
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    assert not optimizer.state
    return fits, model.seen, found


@pytest.mark.parametrize('options', [{}, {'kind': 'adamw8bit', 'param_dtype': torch.bfloat16}], ids=str)
def test_a_trial_is_a_whole_step_and_leaves_no_trace(monkeypatch, options):
    """The measured step finds the optimizer's state, its second micro-step the gradients of the first. So it
    is where the trial is out of memory."""
    fits, seen, found = tried(monkeypatch, 3, target=12, **options)
    assert (fits, found) == (True, [True])
    assert seen == [((3, 16), 48.0, False, False), ((3, 16), 48.0, False, True)] * 2
    _, seen, _ = tried(monkeypatch, 3, packed=True)     # of a run without a second micro-step
    assert seen == [((3, 16), 48.0, True, False)] * 2
    assert not tried(monkeypatch, 4)[0]

    for error in (torch.OutOfMemoryError('CUDA out of memory'),
                  RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`')):
        monkeypatch.setattr(torch.nn.utils, 'clip_grad_norm_', mock.Mock(side_effect=error))
        fits, _, found = tried(monkeypatch, 3, **options)
        assert (fits, found) == (False, [])
    monkeypatch.setattr(torch.nn.utils, 'clip_grad_norm_', mock.Mock(side_effect=RuntimeError('another')))
    with pytest.raises(RuntimeError, match='another'):
        tried(monkeypatch, 3, **options)


def test_a_tenth_of_the_memory_and_what_others_hold_is_left_free(monkeypatch):
    """Of 80 bytes, torch holds 30 and others 10: 72 less 10 are for tensors."""
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda device: (40, 80))
    monkeypatch.setattr(torch.cuda, 'memory_reserved', lambda device: 30)
    assert batch_size_finder.allowed_bytes('cuda') == pytest.approx(62)


FULL = """
import torch
from fp8gpt import optim
step_if_finite = optim.step_if_finite
left = [3]
def full(*arguments):
    left[0] -= 1
    if left[0] < 0 and os.environ.get('RANK', '1') == '1' and '--batch_size=2' not in sys.argv:
        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.')
    step_if_finite(*arguments)
optim.step_if_finite = full
"""


@pytest.fixture
def full(tmp_path_factory):
    """A runner of scripts under which (rank 1's) memory is full in step 4, unless batch_size is 2."""
    return runner(tmp_path_factory.mktemp('full'), FULL)


def test_out_of_memory_goes_on_with_half_the_batch(full, tiny, tmp_path):
    words = [*tiny, '--checkpoint_freq=2', '--total_batch_size=256', f'--checkpoint_dir={tmp_path}']
    done = run(full, 'train.py', *words, rc=3)
    said = 'error: out of memory (CUDA out of memory. Tried to allocate 2.00 GiB.): in training, halve '
    assert done.stderr.startswith(said)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {'.lock', 'latest.pt', 'log.jsonl', 'step_000002.pt'}
    out = run(full, 'train.py', *words, '--batch_size=2', '--resume=auto').stdout
    assert '1 ranks x 2 micro-steps x 2 x 64 tokens = 256 tokens a step' in out
    assert 'step_000002.pt at step 2, ' in out
    assert list(losses(tmp_path)) == list(range(1, 11))


@pytest.mark.slow
def test_ranks_end_where_one_is_out_of_memory(full, tiny, tmp_path):
    ranks = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2']
    words = [*tiny, '--batch_size=4', f'--checkpoint_dir={tmp_path}']
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)}
    done = subprocess.run([*ranks, full, 'train.py', *words], cwd=ROOT, env=env, timeout=280,
                          capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count('error: out of memory') == 1
    assert 'exitcode  : 3 ' in done.stderr
