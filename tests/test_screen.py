"""The first screen of a run: width, first lines, progress, the bar."""
import sys
import types

import pytest
import torch

from fp8gpt import gpus, runlog
from conftest import ROOT, records, run
from fp8gpt.distributed import Ranks

QUICK = ['--data_dir=.', '--dataset=tiny', '--max_steps=10', '--warmup_steps=2', '--eval_tokens=1024',
         '--eval_freq=5', '--log_freq=5', '--fp8_stats_freq=5', '--sample_freq=0']


@pytest.fixture(scope='module')
def quick(tiny_data, tmp_path_factory):
    """(folder, lines) of the quickstart's first steps, on tiny data; its paths are as short as a user's."""
    folder = tmp_path_factory.mktemp('quick')
    (folder / tiny_data.name).symlink_to(tiny_data)
    words = [ROOT / 'train_fp8.py', ROOT / 'config/quickstart.py', *QUICK]
    return folder, run(*words, cwd=folder).stdout.splitlines()


def first_lines(lines):
    """Those before the first step's."""
    return lines[:next(i for i, line in enumerate(lines) if line.startswith('step '))]


def test_the_first_lines_are_few_and_100_columns_wide(quick):
    assert max(map(len, quick[1])) <= 100
    lines = first_lines(quick[1])
    assert [line.split()[0] for line in lines] == ['model', 'data', 'batch', 'run', 'device', 'precision']
    enabled = 'FP8 Training Enabled: 16 of 17 linears, tensorwise (native), bf16: lm_head'
    assert lines[-1] == f'precision FP8 | {enabled}'


def test_the_rest_of_them_is_in_the_log(quick):
    [(_, intro)] = records(quick[0] / 'checkpoints_fp8', 'intro')
    whole = '\n'.join(intro)
    for words in 'vocabulary 257 (padded to 320)', 'FLOPs', 'so no MFU', 'lm_head: the output head decides':
        assert words in whole
        assert words not in '\n'.join(quick[1])


LOGGED = {'checkpoint_dir': '', 'eval_only': False, 'dry_run': False, 'num_workers': 1,
          'target_val_loss': 0.0}
FIGURES = {'epoch': 12, 'loss': 3.2, 'learning_rate': 6e-4, 'grad_norm': 0.8, 'tokens_per_sec': 1.2e6,
           'data_wait': 0.0, 'skipped': 2}


@pytest.fixture
def log(monkeypatch):
    """A RunLog of 1,000 steps without files, on a pretended H100 that is half busy; log.time: the clock."""
    monkeypatch.setattr(runlog, 'gpu_of', lambda device: gpus.find_gpu('H100'))
    monkeypatch.setattr(runlog.time, 'monotonic', lambda: log.time)
    monkeypatch.setattr(torch.cuda, 'utilization', lambda device: 50)
    run = types.SimpleNamespace(config=LOGGED, device=torch.device('cuda'), flops_per_token=8e8)
    log = runlog.RunLog(Ranks(0, 1, run.device), run)
    log.last_step, log.time = 1000, 100.0
    return log


def test_a_line_of_progress_on_a_gpu(log, capsys):
    assert log.progress(10) == ['1%']
    log.time += 180
    assert log.progress(100) == ['10%', '30:00 left']
    log.train_step(1000, 'bf16', **FIGURES)
    assert capsys.readouterr().out == (
        'step 1,000/1,000 | 100% | loss 3.2000 | lr 6.0e-04 | norm 0.80 | epoch 12 | 1,200,000 tok/s '
        '| mfu 97% | BF16 | skipped: 2\nGPU 50% busy\n')


def test_the_clock_counts_steps_and_no_pauses(monkeypatch):
    """Three steps of 2 s, 1.5 s of it waiting, and an evaluation of 100 s."""
    seconds = iter([0, 1, 101, 106, 106])
    monkeypatch.setattr(runlog.time, 'perf_counter', lambda: next(seconds))
    loader = types.SimpleNamespace(waited=10.0)
    clock = runlog.Clock(loader)
    with clock.paused():
        loader.waited += 1.5
    clock.steps += 3
    found = clock.read(tokens_per_step=500)
    assert found == {'dt_ms': 2000, 'tokens_per_sec': 250, 'data_wait': 0.25}


def test_a_driver_that_does_not_answer_is_left_out(monkeypatch):
    def utilization(device):
        raise ModuleNotFoundError('nvidia-ml-py does not seem to be installed')
    monkeypatch.setattr(torch.cuda, 'utilization', utilization)
    assert runlog.gpu_utilization(torch.device('cuda')) is None


def test_rank_0_shows_a_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(runlog, 'DELAY', 0)
    for is_terminal, is_rank_0 in ((True, True), (False, True), (True, False)):
        monkeypatch.setattr(sys.stderr, 'isatty', lambda: is_terminal, raising=False)
        monkeypatch.setattr(runlog, 'is_rank_0', lambda: is_rank_0)
        assert list(runlog.bar(range(3), 'validation')) == [0, 1, 2]
        assert ('validation:' in capsys.readouterr().err) == (is_terminal and is_rank_0)
