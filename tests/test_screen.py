"""The first screen of a run: width, first lines, progress, the bar, what is told before it computes."""
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
import torch

from fp8gpt import gpus
from fp8gpt import batch_size_finder
import plan
from fp8gpt import resolve
from fp8gpt import runlog
from fp8gpt import settle
from conftest import ROOT, environment, records, refused, run
from fp8gpt.parallel import Ranks

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


def test_steps_health_and_the_end_are_a_line_each(quick):
    pattern = (r'step 5/10 \| 50% \| \d+ s left \| loss \d\.\d{4} \| lr \d\.\de-0\d \| '
               r'norm \d+\.\d\d \| [\d,]+ tok/s \| FP8')
    assert any(re.fullmatch(pattern, line) for line in quick[1])
    assert any(re.fullmatch(r'step 5/10 \| val loss \d\.\d{4} \| \d\.\d{3} bits per byte', line)
               for line in quick[1])
    [line] = [line for line in quick[1] if 'SQNR' in line]
    assert re.fullmatch(r'step 5/10 \| FP8 health: good \| lowest SQNR \d\d\.\d dB \(h\.\S+ \w+\) \| '
                        r'lost \d\.\d%', line)
    # the end does not repeat the precision
    assert quick[1][-2:] == ['done: checkpoints_fp8/latest.pt is step 10, in FP8',
                             'next: python sample.py --ckpt checkpoints_fp8/latest.pt']
    assert sum('FP8 Training' in line for line in quick[1]) == 1


# ------------------------------------------------------------------------------------------------ other runs

class Split:
    """A split of a large dataset."""
    tokens, n_windows, block_size, packing = 10_000_000_000, 9_765_625, 1024, None
    tokens_per_epoch = tokens


CONFIGS = [path.name for path in sorted((ROOT / 'config').iterdir())
           if path.suffix in ('.py', '.yaml') and not path.name.startswith(('finetune', 'sweep'))]


def test_every_configs_first_lines_are_100_columns_wide(monkeypatch):
    monkeypatch.setattr(gpus, 'device_name', lambda device: 'NVIDIA H100 80GB HBM3')
    monkeypatch.setattr(gpus, 'gpu_of', lambda device: gpus.find_gpu('H100'))
    wide = []
    for name in CONFIGS:
        config = plan.plan_arguments([str(ROOT / 'config' / name)]).config
        asked = resolve.run(config, torch.device('cuda'), data_required=False)
        lines = resolve.intro(asked, 1, (Split, Split))
        wide += [line for line in lines if len(line.splitlines()[0]) > 100]
    assert wide == []


LOGGED = {'checkpoint_dir': '', 'eval_only': False, 'verbose': False, 'dry_run': False, 'num_workers': 1,
          'target_val_loss': 0.0, 'usd_per_gpu_hour': 0.0}
FIGURES = {'epoch': 0, 'loss': 3.2, 'learning_rate': 6e-4, 'grad_norm': 0.8, 'tokens_per_sec': 3443.2,
           'data_wait': 0.0, 'skipped': 0}


@pytest.fixture
def log(monkeypatch):
    """log(device, gpu) -> a RunLog of 1,000 steps without files, on a pretended GPU; log.time: the clock."""
    def log(device='cpu', gpu=None):
        monkeypatch.setattr(runlog, 'gpu_of', lambda device: gpu and gpus.find_gpu(gpu))
        monkeypatch.setattr(runlog.time, 'monotonic', lambda: log.time)
        made = runlog.RunLog(Ranks(0, 1, torch.device(device)), LOGGED)
        made.last_step = 1000
        return made
    log.time = 100.0
    return log


def test_the_longest_line_is_100_columns_wide(log, capsys):
    made = log('cuda', 'H100')
    made.last_step, made.since = 600_000, (1, 0.0)
    figures = {**FIGURES, 'epoch': 12, 'tokens_per_sec': 1.2e6, 'skipped': 2}
    made.train_step(590_000, 'bf16', 8e8, **figures)
    [line] = capsys.readouterr().out.splitlines()
    assert len(line) <= 100
    assert line.endswith(' | 1.20M tok/s | mfu 97% | BF16 | skipped: 2')


def test_what_is_not_known_has_no_column(log, capsys):
    log().train_step(500, 'fp8', 7e6, **FIGURES)
    line = 'step 500/1,000 | 50% | loss 3.2000 | lr 6.0e-04 | norm 0.80 | 3,443 tok/s | FP8\n'
    assert capsys.readouterr().out == line


def test_the_time_left_is_by_the_speed_since_the_first_line(log):
    made = log()
    assert made.progress(10) == ['1%']
    log.time += 180
    assert made.progress(100) == ['10%', '30 min left']
    log.time += 20
    assert made.progress(1000) == ['100%']


def test_verbose_says_the_rest(log, capsys):
    made = log()
    made.intro('model\nwidth')
    made.config = {**LOGGED, 'verbose': True}
    made.intro('data\nfolder')
    assert capsys.readouterr().out == 'model\ndata\nfolder\n'


def test_hours_that_are_not_measured_have_no_share(log, capsys):
    made = log()
    made.last_step = runlog.OPEN
    made.train_step(1, 'bf16', 7e6, **FIGURES)
    assert capsys.readouterr().out.startswith('step 1 | loss ')


@pytest.mark.parametrize('percents, mean, says', [([50, 74], 62, 'GPU 62% busy\n'), ([95, 97], 96, '')])
def test_a_gpu_that_waits_is_told(percents, mean, says, log, monkeypatch, tmp_path, capsys):
    answers = iter(percents)
    monkeypatch.setattr(torch.cuda, 'utilization', lambda device: next(answers))
    made = log('cuda', 'H100')
    made.file = open(tmp_path / 'log.jsonl', 'w')
    for step in 1, 2:
        log.time += 2
        made.after_step(step, 1000)
    made.train_step(2, 'fp8', 8e8, **FIGURES)
    made.close()
    assert records(tmp_path, 'train/gpu_utilization') == [(2, mean)]
    assert capsys.readouterr().out.partition('| FP8\n')[2] == says


def test_a_driver_that_does_not_answer_is_left_out(monkeypatch):
    def utilization(device):
        raise ModuleNotFoundError('nvidia-ml-py does not seem to be installed')
    monkeypatch.setattr(torch.cuda, 'utilization', utilization)
    asked = gpus.Utilization(torch.device('cuda'))
    asked.look()
    assert asked.mean() is None


# ---------------------------------------------------------------------------------------------------- the bar

BARRED = """
import runpy
import sys
from fp8gpt import runlog
runlog.DELAY = 0
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def on_a_terminal(words):
    """What a terminal gets from `python words...`."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 100, 0, 0))     # rows, columns, pixels
    env = environment(PYTHONPATH=str(ROOT))
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=env, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b''
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # so a pseudo-terminal ends
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert process.wait() == 0, shown.decode()
    return shown.decode()


@pytest.mark.slow
def test_a_bar_stands_on_a_terminal_alone(tiny, tmp_path):
    script = tmp_path / 'barred.py'
    script.write_text(BARRED)
    words = [str(script), 'train.py', *tiny, '--overwrite', f'--checkpoint_dir={tmp_path}/c']
    shown = on_a_terminal(words)
    assert 'training:' in shown
    assert 'validation:' in shown
    for step in range(1, 11):  # each line from the first column, where the bar was
        assert re.search(rf'[\r\n]step {step}/10 \| [^\r\n]* \| BF16\r\n', shown)
    piped = run(*words)
    assert 'training:' not in piped.stdout + piped.stderr
    with open(tmp_path / 'c' / 'log.jsonl') as file:
        assert all(map(json.loads, file))


# ----------------------------------------------------------------------------------------- before it computes

@pytest.mark.parametrize('script, module, work', [
    ('train_fp8.py', settle, 'settle'), ('train.py', batch_size_finder, 'settle_batch_size')])
def test_a_directory_in_use_is_refused_before_anything_compiles(
        script, module, work, tiny, tmp_path, monkeypatch, capsys):
    (tmp_path / 'step_000005.pt').touch()

    def compiling(*arguments, **options):
        raise AssertionError('it compiles')
    monkeypatch.setattr(module, work, compiling)
    code, message = refused(script, *tiny, '--compile=on', f'--checkpoint_dir={tmp_path}')
    assert code == 2
    assert 'holds an earlier run, step_000005.pt: ' in message
    assert sorted(os.listdir(tmp_path)) == ['.lock', 'step_000005.pt']
    out = capsys.readouterr().out
    assert out.startswith('model     ')
    assert out.endswith('compile   may take a minute or two\n')


def test_a_run_that_takes_a_cpu_hours_says_so(tiny, tmp_path):
    words = [*tiny, '--max_steps=1000000000', '--dry_run', f'--checkpoint_dir={tmp_path}']      # says all
    lines = r'^time      at least [\d,]+ hours on this CPU\n          config/quickstart.py takes minutes, '
    assert re.search(lines, run('train.py', *words).stdout, re.M)


def test_the_hours_are_by_the_cpus_speed(monkeypatch):
    monkeypatch.setattr(gpus, 'cpu_flops', lambda: 2e11)
    lines = gpus.patience_lines(900 * 3600 * 1e11, torch.device('cpu'))
    assert lines[0] == 'time      at least 900 hours on this CPU'
    assert gpus.patience_lines(0.9 * 3600 * 1e11, torch.device('cpu')) == []
    assert gpus.patience_lines(900 * 3600 * 1e11, torch.device('cuda')) == []


def test_a_cpus_speed_is_measured():
    assert 1e8 < gpus.cpu_flops() == gpus.cpu_flops() < 1e14     # said twice, it is the same
