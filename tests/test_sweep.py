"""Sweeps: what makes a grid, what is refused, runs that are done, cut off or fail. Agents: test_slurm.py."""
import json
import math
import os
import signal
import subprocess
import sys

import pytest

import sweep
from configurator import UserError, configure
from conftest import ROOT, accepted, environment, run, write_tiny_data
from fp8gpt import files


def listed(*words):
    """Return the labels of a command line's points."""
    return [os.path.basename(folder) for folder, *_ in sweep.points(words, None)]


def test_lists_make_a_grid(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    words = ['--fp8_keep=h.0,mlp.down', '--max_lr=1e-3,2e-3', '--use_fp8=on,off']    # a text is taken whole
    assert listed('config/quickstart.py', *words) == [
        f'max_lr={lr},use_fp8={switch}' for lr in ('1e-3', '2e-3') for switch in ('on', 'off')]
    words = ['--learning_rate', '5', '--no_fp8', '--config', 'config/quickstart.py', '--use_flash_attn']
    words += ['--learning_rate', '1e-3,2e-3']
    for (folder, values, line), lr in zip(sweep.points(words, None), ('1e-3', '2e-3'), strict=True):
        assert (folder, values) == (f'sweeps/quickstart/learning_rate={lr}', {'learning_rate': lr})
        settings = configure('train_fp8.py', line)
        names = 'max_lr', 'use_fp8', 'n_embd', 'checkpoint_dir', 'resume'
        assert [settings[name] for name in names] == [float(lr), False, 128, folder, 'auto']
    assert sweep.points(['--seed=7'], 's')[0][0] == 'sweeps/s/run'
    sweep.main(['--n_layer=1,2', '--seed=1,2', '--dry_run'])
    assert capsys.readouterr().out.splitlines()[3] == 'sweeps/sweep/n_layer=2,seed=2'   # --point=3


def test_wandbs_agents_run_at_once_in_a_folder_each(monkeypatch):
    """The command of the sweep file, as W&B's own agent fills it in."""
    agent = pytest.importorskip('wandb.sdk.launch.sweeps.utils')
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv('AGENT', '7')
    command = agent.create_sweep_command(agent.load_sweep_config('config/sweep_penalty.yaml')['command'])
    args = agent.create_sweep_command_args({'args': {'penalty_weight': {'value': 0.01}}})['args']
    assert command[:3] == ['${env}', '${interpreter}', '${program}']
    words = [filled for word in command[3:] for filled in (args if word == '${args}' else [word])]
    config = configure('train_fp8.py', words)
    names = 'checkpoint_dir', 'penalty_weight', 'use_wandb', 'overwrite', 'n_embd'
    assert [config[name] for name in names] == ['sweeps/agent-7', 0.01, True, True, 96]


# words -> what the one line says
NO_GRID = {
    '--max_lrr=1,2': 'the nearest is max_lr',
    '--max_lr=1e-3,fast': "max_lr wants a number > 0, not 'fast'",
    '--resume=latest': 'leave out --resume: the sweep sets resume',
    '--out_dir=x': 'leave out --out_dir: the sweep sets checkpoint_dir',
    '--max_lr=1,2 --learning_rate=3': 'the sweep sets max_lr, or another flag does',
    '--use_fp8=on,off --mixed_precision=fp8,bf16': 'the sweep sets use_fp8, or another flag does',
    'config/quickstart.py quickstart': "what is 'quickstart'?",
    '--seed=1,2 --point=2': 'point=2, but the runs are 0 to 1',
}
# sweep files of W&B: a grid, flat lines alone, aliases of aliases, Python by way of a file that runs none
WANDB = {
    'grid.yaml': 'program: train.py\nmethod: grid\nparameters: {max_lr: {values: [0.001, 1e-2]}}\n',
    'flat.yml': 'program: run_sweep.py\nmethod: bayes\n',
    'bomb.yaml': 'method: grid\nparameters: {a: &a [1, 1], b: &b [*a, *a], c: &c [*b, *b]}\n',
    'evil.yaml': 'method: grid\nparameters: {config: {value: evil.py}}\n',
}


def test_what_makes_no_grid_is_refused_before_any_run(tmp_path, monkeypatch):
    for name, text in {**WANDB, 'evil.py': 'open("ran", "w")', 'quickstart.py': 'max_lr = 1e-2'}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    rows = [(2, message, ['sweep.py', *line.replace('config/', '').split()])
            for line, message in NO_GRID.items()]
    rows += [(2, f'`wandb sweep {name}`, then `sbatch', ['sweep.py', name, '--max_lr=1,2']) for name in WANDB]
    assert accepted(rows) == []
    assert not (tmp_path / 'ran').exists() and not (tmp_path / 'sweeps').exists()


def test_points_fail_stop_and_go_on(tmp_path, monkeypatch, capsys):
    """n_head=2 is stopped once after its evaluation, 3 does not start, the loss of 4 is NaN."""
    taken = []

    def train(words):
        flags = dict(word.removeprefix('--').split('=', 1) for word in words)
        heads = int(flags['n_head'])
        taken.append(heads)
        assert flags['resume'] == 'auto'
        if heads == 3:
            return 2
        records = [{'step': 2, 'val/loss': math.nan if heads == 4 else 5 / heads, 'val/bits_per_byte': None}]
        if taken != [4, 1, 3, 2]:
            records.append({'step': 2, 'finished': True})
        files.write_text(f'{flags["checkpoint_dir"]}/log.jsonl',
                         ''.join(files.json_text(record) + '\n' for record in records))
        return 0

    def sweeps(*words):
        with pytest.raises(UserError, match='1 of 4 runs failed: sweeps/s/n_head=3'):
            sweep.main(['--n_embd=64', '--n_head=4,1,3,2', '--name=s', *words])
        with open('sweeps/s/results.csv') as file:
            table = file.read()
        said = capsys.readouterr().out
        assert said.endswith(table)
        return said.splitlines()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, 'train', train)
    assert sweeps() == ['n_head,val loss,bits per byte', '1,5.0,', '4,NaN,', '3,,', '2,,']
    skipped = [f'finished  sweeps/s/n_head={heads}: skipped' for heads in (4, 1)]
    assert sweeps() == [*skipped, 'n_head,val loss,bits per byte', '2,2.5,', '1,5.0,', '4,NaN,', '3,,']
    assert taken == [4, 1, 3, 2, 3, 2]


def test_runs_of_two_tokenizers_are_ranked_by_what_a_byte_takes_them(tmp_path, monkeypatch):
    """The first has more nats per token, as its tokens are longer, and fewer per byte."""
    monkeypatch.chdir(tmp_path)
    found = sweep.points(['--n_layer=1,2,3'], 's')
    for (folder, *_), loss, bits in zip(found, (6.9, 3.4, 'NaN'), (3.0, 4.8, 'NaN')):
        record = {'step': 1, 'val/loss': loss, 'val/bits_per_byte': bits, 'finished': True}
        files.write_text(f'{folder}/log.jsonl', json.dumps(record))
    sweep.report_sweep(found[::-1])
    assert (tmp_path / 'sweeps/s/results.csv').read_text().splitlines()[1:] == [
        '1,6.9,3.0', '2,3.4,4.8', '3,NaN,NaN']


def test_the_task_of_an_array_that_ends_last_makes_the_table(tmp_path, monkeypatch):
    """A finished run is skipped only where the numbers of the command are those that it had."""
    def train(words):
        settings = configure('train_fp8.py', words)
        record = {'step': 1, 'val/loss': settings['max_lr'], 'config': dict(settings), 'finished': True}
        files.write_text(f'{settings["checkpoint_dir"]}/log.jsonl', json.dumps(record))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, 'train', train)
    for point, is_made in (1, False), (0, True):
        sweep.main(['--max_lr=1,2', '--max_steps=5', f'--point={point}'])
        assert (tmp_path / 'sweeps/sweep/results.csv').exists() == is_made
    with pytest.raises(UserError, match='max_lr=1 was trained with max_steps=5, not 6: give another --name'):
        sweep.main(['--max_lr=1,2', '--max_steps=6'])
    folder = write_tiny_data(tmp_path)      # prepared anew since, by whatever is in the log
    words, path = ['--max_lr=1,2', '--max_steps=5', f'--dataset={folder}'], 'sweeps/sweep/max_lr=1/log.jsonl'
    record = json.loads((tmp_path / path).read_text())
    (tmp_path / path).write_text(json.dumps(record | {'data': {'val_000000.bin': [5000, 1]}}))
    with pytest.raises(UserError, match='max_lr=1 was trained on other data than is in .*tiny-byte'):
        sweep.main(words)


@pytest.mark.slow
def test_a_run_is_cut_off_by_sigterm_and_goes_on(tiny, tmp_path):
    words = [ROOT / 'sweep.py', *tiny, '--max_steps=600', '--seed=1,2', '--point=1']
    words = [*map(str, words), '--checkpoint_freq=1000']
    options = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
    process = subprocess.Popen([sys.executable, *words], cwd=tmp_path, env=environment(), **options)
    for line in process.stdout:
        if line.startswith('step 3 |'):
            process.send_signal(signal.SIGTERM)
            break
    rest = process.stdout.read()
    assert process.wait() == 130
    assert 'stopped at step ' in rest
    assert os.listdir(tmp_path / 'sweeps/sweep') == ['seed=2']
    out = run(*words, fork=False, cwd=tmp_path).stdout
    assert 'resumed   sweeps/sweep/seed=2/step_' in out
    assert 'done: sweeps/sweep/seed=2/latest.pt is step 600' in out
