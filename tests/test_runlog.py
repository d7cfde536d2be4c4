"""What a run shows and logs; where reading or writing fails, the log goes on, or says in one line why not."""
import errno
import json
import os
import sys
import types
from unittest import mock

import torch

from fp8gpt import files, gpus, runlog
from fp8gpt.distributed import Ranks, finish_all

RANKS = Ranks(0, 1, torch.device('cpu'))
FULL = OSError(errno.ENOSPC, 'No space left on device')


CONFIG = {'checkpoint_dir': '', 'use_tensorboard': False, 'use_wandb': False,
          'eval_only': False, 'dry_run': False, 'overwrite': False, 'target_val_loss': 0.0,
          'num_workers': 1}


def opened(folder, resumed_step=0, device=RANKS.device):
    """Return a RunLog whose files are open."""
    folder.mkdir(exist_ok=True)
    config, resumed = {**CONFIG, 'checkpoint_dir': str(folder)}, resumed_step and {'step': resumed_step}
    run = types.SimpleNamespace(config=config, device=device, resumed=resumed, data={},
                                revisions={}, resume_path=resumed and f'{folder}/latest.pt')
    log = runlog.RunLog(RANKS, run)
    log.open('bf16', last_step=10)
    return log


def test_a_peak_of_memory_from_before_the_loop_is_forgotten(tmp_path, monkeypatch):
    reset = mock.Mock()
    monkeypatch.setattr(torch.cuda, 'reset_peak_memory_stats', reset)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'NVIDIA H200')
    for device in RANKS.device, torch.device('cuda:3'):
        opened(tmp_path, device=device).close()
    reset.assert_called_once_with(device)


def figures(path):
    records = map(json.loads, path.read_text().splitlines())
    return [record['step'] for record in records if 'config' not in record]


DAMAGED = ['{"step": 3, "train/lo\n', 'hello\n', '[1, 2]\n', '{"train/loss": 4.7}\n', '{"step": "3"}\n',
           'null\n', '\n', '\udcff\udcfe{}\n', '[' * 10**5 + '\n']


def test_a_damaged_line_is_dropped(tmp_path):
    log, path = opened(tmp_path), tmp_path / 'log.jsonl'
    for step in range(1, 5):
        log.scalars(step, precision='bf16', train_loss=5 - step / 10, train_dt_ms=2., train_tokens_per_sec=9.)
    log.close()
    whole = path.read_text().splitlines(keepends=True)
    for line in DAMAGED:
        path.write_text(''.join([*whole[:3], line, *whole[4:]]), errors='surrogateescape')
        assert [record['step'] for record in files.read_log(path)] == [0, 1, 2, 4]
        opened(tmp_path, resumed_step=4).close()
        assert figures(path) == [1, 2, 4]
    path.write_text(''.join(whole)[:-5])        # cut short by a kill
    opened(tmp_path, resumed_step=4).close()
    assert figures(path) == [1, 2, 3]


def test_a_log_that_is_a_link_or_no_file_is_replaced(tmp_path):
    (tmp_path / 'secret').write_text('{"step": 0, "secret": 1}\n')
    for number, make in enumerate((os.mkfifo, lambda path: path.symlink_to(tmp_path / 'secret'),
                                   lambda path: path.symlink_to(tmp_path / 'nothing'))):
        for resumed_step in 0, 4:
            folder = tmp_path / f'{number}-{resumed_step}'
            folder.mkdir()
            make(folder / 'log.jsonl')
            opened(folder, resumed_step).close()
            assert (folder / 'log.jsonl').is_file() and not (folder / 'log.jsonl').is_symlink()
    assert 'config' not in (tmp_path / 'secret').read_text() and not (tmp_path / 'nothing').exists()


def refusing(error):
    """A stream, or a writer, that takes nothing."""
    failing = mock.Mock(side_effect=error)
    return mock.Mock(spec=['write'], write=failing, flush=failing, close=failing)


def test_what_cannot_be_written_is_said_once_and_the_rest_is(tmp_path, monkeypatch, capsys):
    for name in 'log.jsonl', 'use_tensorboard':
        log, board = opened(tmp_path / name), refusing(FULL)
        log.writers[name] = board.write, board.close
        for step in range(1, 30):
            log.scalars(step, train_loss=1.)
        log.close()
        assert capsys.readouterr().out.count(f'WARNING: {name} is not written: [Errno 28] No space left') == 1
    assert figures(tmp_path / name / 'log.jsonl') == [*range(1, 30)]
    for name, error in {'head': BrokenPipeError(errno.EPIPE, 'Broken pipe'), 'full': FULL}.items():
        log = opened(tmp_path / name)
        monkeypatch.setattr(sys, 'stdout', refusing(error))
        assert finish_all([mock.Mock(side_effect=KeyError, __name__='sample')], [])
        monkeypatch.setattr(sys, 'stdout', refusing(error))
        log.say('a line', 'another')
        log.scalars(1, train_loss=1.)
        log.close()
        assert figures(tmp_path / name / 'log.jsonl') == [1]


def test_what_tensorboard_and_wandb_show(tmp_path, monkeypatch, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    monkeypatch.chdir(tmp_path)
    config = {'checkpoint_dir': './checkpoints', 'run_name': 'mine', 'wandb_project': 'p'}
    losses = {'val/loss': 2.5, 'val/bits': 8.0}
    rows = (3, {**losses, 'precision': 'bf16', 'fp8/sqnr/h.0': 30.0}), (4, {'sample': 'ROMEO: no'})
    write, close = runlog.open_tensorboard(config, 'bf16', [])
    sent = []
    wandb = types.SimpleNamespace(Error=ValueError, init=lambda **options: types.SimpleNamespace(
        id='x', define_metric=lambda *a, **k: None, log=sent.append, finish=None))
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    monkeypatch.setattr(runlog, 'one_line_errors', lambda: None)
    (tmp_path / 'checkpoints').mkdir()
    send, _ = runlog.open_wandb(config, 'bf16', [])
    for row in rows:
        write(*row)
        send(*row)
    close()
    board = EventAccumulator('runs/mine-bf16/checkpoints').Reload()
    assert [(event.step, event.value) for event in board.Scalars('_main/val_loss')] == [(3, 2.5)]
    assert board.Tags()['scalars'] == ['_main/val_loss', 'val/bits']
    for typed, exported, project in ('', '', 'llm-fp8'), ('', 'ours', 'ours'), ('p', 'ours', 'p'):
        monkeypatch.setenv('WANDB_PROJECT', exported)
        wandb.init = mock.Mock(wraps=wandb.init)
        runlog.open_wandb({**config, 'wandb_project': typed}, 'bf16', [])
        assert wandb.init.call_args.kwargs['project'] == project
    text, = board.Tensors('sample/text_summary')
    assert (text.step, text.tensor_proto.string_val[0]) == (4, b'ROMEO: no')
    assert sent == [{'step': 3, **losses}, {'step': 4, 'sample': 'ROMEO: no'}]
    # a resume at step 4 writes anew what the log has, a new run nothing: TensorBoard's page reads each events
    # file, whatever purge_step says; no two folders share a board
    log = [{'step': step, 'val/loss': 2.5, 'config': {}} for step in (3, 4)]
    for records, steps in (log, [3, 4, 5]), ([], [5]):
        write, close = runlog.open_tensorboard(config, 'bf16', [])
        write(3, {'val/loss': 2.5})
        write(4, {'val/loss': 2.4})
        write(5, {'val/loss': 9.0})
        close()
        write, close = runlog.open_tensorboard(config, 'bf16', records)
        write(5, {'val/loss': 2.3})
        close()
        board = EventAccumulator('runs/mine-bf16/checkpoints').Reload()
        assert [event.step for event in board.Scalars('_main/val_loss')] == steps
        assert len(os.listdir('runs/mine-bf16/checkpoints')) == 1
    for name in 'x/y', 'x_y', '../x', 'x':
        runlog.open_tensorboard({**config, 'checkpoint_dir': name}, 'fp8', [])[1]()
    assert len({path.parent for path in tmp_path.glob('runs/mine-fp8/**/events*')}) == 4


def test_a_line_of_progress_on_a_gpu(monkeypatch, capsys):
    """Of 1,000 steps without files, on a pretended H100 that is half busy."""
    monkeypatch.setattr(runlog, 'gpu_of', lambda device: gpus.find_gpu('H100'))
    monkeypatch.setattr(torch.cuda, 'utilization', lambda device: 50)
    run = types.SimpleNamespace(config=CONFIG, device=torch.device('cuda'), flops_per_token=8e8)
    log = runlog.RunLog(Ranks(0, 2, run.device), run)      # of two GPUs, whose peak is twice one's
    log.last_step = 1000
    figures = dict(epoch=12, loss=3.2, learning_rate=6e-4, grad_norm=0.8, tokens_per_sec=2.4e6, dt_ms=2000,
                   data_wait=0.25)
    log.train_step(100, 'bf16', **figures, skipped=2)
    assert capsys.readouterr().out == (
        'step 100 | 30:00 left | loss 3.2000 | norm 0.80 | 2.40M tok/s | mfu 97% '
        '| GPU 50% busy | waits for data: 25% | BF16 | skipped: 2\n')
    figures['data_wait'] = 0.0
    log.last_step = 120_000
    log.train_step(19_073, 'fp8', **figures, skipped=0)
    out = capsys.readouterr().out.splitlines()[0]
    assert 'left' in out and len(out.replace(' | GPU 50% busy', '')) <= 80      # of a usual terminal
    log.last_step = 1000
    monkeypatch.delattr(torch.cuda, 'utilization')      # as where nothing answers
    log.train_step(1000, 'fp8', **figures, skipped=0)
    out = capsys.readouterr().out
    assert 'mfu 49% | FP8\n' in out and 'busy' not in out      # of twice bf16's peak


def test_the_clock_counts_steps_and_no_pauses(monkeypatch):
    seconds = iter([0, 1, 101, 106, 106])
    monkeypatch.setattr(runlog.time, 'perf_counter', lambda: next(seconds))
    loader = types.SimpleNamespace(waited=10.0, device='cpu')
    clock = runlog.Clock(loader)
    with clock.paused():
        loader.waited += 1.5
    clock.steps += 3
    found = clock.read(tokens_per_step=500)
    assert found == {'dt_ms': 2000, 'tokens_per_sec': 250, 'data_wait': 0.25}


def test_what_a_pause_waits_for_belongs_to_the_steps_before(monkeypatch):
    """A GPU works behind its host, which would wait for it in an evaluation or a save."""
    now = [0.0]
    monkeypatch.setattr(runlog.time, 'perf_counter', lambda: now[0])
    monkeypatch.setattr(torch.accelerator, 'synchronize', lambda: now.append(now.pop() + 4))
    clock = runlog.Clock(types.SimpleNamespace(waited=0.0, device=torch.device('cuda:0')))
    clock.steps += 2
    with clock.paused():
        now.append(now.pop() + 100)
    assert clock.read(tokens_per_step=500)['dt_ms'] == 2000
