"""What a run shows while it goes on: progress, the clock, the bar."""
import sys
import types

import torch

from fp8gpt import gpus, runlog
from fp8gpt.distributed import Ranks


def test_a_line_of_progress_on_a_gpu(monkeypatch, capsys):
    """Of 1,000 steps without files, on a pretended H100 that is half busy."""
    times = [100.0]
    monkeypatch.setattr(runlog, 'gpu_of', lambda device: gpus.find_gpu('H100'))
    monkeypatch.setattr(runlog.time, 'monotonic', lambda: times[-1])
    monkeypatch.setattr(torch.cuda, 'utilization', lambda device: 50)
    config = {'checkpoint_dir': '', 'eval_only': False, 'dry_run': False, 'num_workers': 1}
    run = types.SimpleNamespace(config=config | {'target_val_loss': 0.0}, device=torch.device('cuda'),
                                flops_per_token=8e8)
    log = runlog.RunLog(Ranks(0, 1, run.device), run)
    log.last_step = 1000
    assert log.progress(10) == ['1%']
    times.append(280.0)
    assert log.progress(100) == ['10%', '30:00 left']
    log.train_step(1000, 'bf16', epoch=12, loss=3.2, learning_rate=6e-4, grad_norm=0.8, tokens_per_sec=1.2e6,
                   data_wait=0.0, skipped=2)
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
