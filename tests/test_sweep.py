"""Sweeps: what makes a grid, what is refused, runs that are done, cut off or fail. Agents: test_slurm.py."""
import csv
import io
import json
import math
import os
import signal
import subprocess
import sys

import pytest

import sweep
from configurator import SettingError, UserError, configure
from conftest import ROOT, environment, run
from fp8gpt import files

YAML = '''
program: train.py
method: grid
metric: {name: val/loss, goal: minimize}
parameters:
  max_lr: {values: [0.001, 1e-2]}
  n_layer: {value: 1}
'''


def listed(*words):
    """Return the labels of a command line's points."""
    return [os.path.basename(one.folder) for one in sweep.points([*map(str, words)])]


@pytest.fixture
def written(tmp_path):
    def write(text, name='grid'):
        path = tmp_path / f'{name}.yaml'
        path.write_text(text)
        return path
    return write


def test_lists_on_a_command_line_and_in_a_file_make_a_grid(written, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    words = ['--fp8_keep=h.0,mlp.down', '--max_lr=1e-3,2e-3', '--use_fp8=on,off']    # a text is taken whole
    assert listed('config/quickstart.py', *words) == [
        f'max_lr={lr},use_fp8={switch}' for lr in ('1e-3', '2e-3') for switch in ('on', 'off')]
    words = ['--max_lr', '1e-3,2e-3', '--no_fp8', '--config', 'config/quickstart.py']
    assert listed(*words) == ['max_lr=1e-3', 'max_lr=2e-3']
    path = written(YAML)
    assert listed(path) == ['max_lr=0.001', 'max_lr=1e-2']
    assert listed(written(YAML.replace('method: grid\n', ''))) == ['max_lr=0.001', 'max_lr=1e-2']
    assert listed(path, '--seed=1,2')[:2] == ['max_lr=0.001,seed=1', 'max_lr=0.001,seed=2']
    assert listed(path, '--max_lr=0.5') == ['max_lr=0.5']
    first, second = (one.settings for one in sweep.points(['--seed=7', str(path)]))
    assert (first['max_lr'], first['n_layer'], first['seed']) == (1e-3, 1, 7)
    assert second['max_lr'] == 1e-2
    line = '${env} ${interpreter} ${program} --seed=7 --overwrite --use_wandb --run_name=${envvar:X} ${args}'
    path = written(YAML.replace('method:', f'command: {line.split()}\nmethod:'))
    first, _ = sweep.points(['config/sweep_shakespeare.py', str(path)])
    assert first.folder == 'sweeps/sweep_shakespeare/max_lr=0.001'
    names = 'seed', 'use_wandb', 'overwrite', 'run_name', 'n_embd', 'n_layer'
    assert [first.settings[name] for name in names] == [7, False, False, 'sweep', 96, 1]
    # a line each, as slurm/sweep.sbatch counts them
    sweep.main(['config/sweep_penalty.yaml', '--dry_run'])
    assert len(capsys.readouterr().out.splitlines()) == 5


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
MISTYPED = {
    '--max_lrr=1,2': 'the nearest is max_lr',
    '--max_lr=1e-3,fast': "max_lr wants a number > 0, not 'fast'",
    '--resume=latest': 'leave out resume',
    '--dataset=a/b --beta2=0.9,0.9': 'two runs would share sweeps/sweep/beta2=0.9',
    '--max_lr=1,2 --learning_rate=3,4': 'max_lr and learning_rate are one setting',
    '--max_lr=1,2 --learning_rate=3': 'max_lr and learning_rate are one setting',
    '--use_fp8=on,off --mixed_precision=fp8,bf16': 'use_fp8 and mixed_precision are one setting',
}
# what stands in YAML, what is put there: what the one line says
NO_GRID = {
    ('method: grid', 'method: bayes'): 'method: bayes is for W&B alone',
    ('method: grid', 'method: grid\nearly_terminate: {type: hyperband}'): 'early_terminate is for W&B alone',
    ('{name: val/loss, goal: minimize}', '{name: hellaswag/acc, goal: maximize}'): 'is for W&B alone',
    ('program: train.py', 'program: bench.py'): 'neither train.py nor train_fp8.py',
    ('{values: [0.001, 1e-2]}', '{min: 0.1, max: 1}'): 'max_lr has neither a list of `values:`',
    ('{values: [0.001, 1e-2]}', '{values: [0.001, null]}'): 'each a number or a text',
    ('{values: [0.001, 1e-2]}', '{values: [[1], [2]]}'): 'each a number or a text',
    ('max_lr:', 'overwrite:'): 'the sweep sets it',
    ('program: train.py', 'command: ["${program}", "${args}", "${args_json}"]'): '${args_json} is refused',
    ('program: train.py', 'command: ${program} ${args}'): 'command: ${program} ${args} is refused: it may',
}
# aliases of aliases, a billion runs, and Python by way of a file that runs none
NO_GRID['n_layer: {value: 1}', 'x: {value: &a [1, 1]}\n  y: {value: [*a, *a]}'] = 'is not YAML: write *a out'
many = f'{{values: {list(range(1, 1000))}}}'
NO_GRID['n_layer: {value: 1}', f'n_layer: {many}\n  seed: {many}\n  n_embd: {many}'] = '1,994,005,998 runs'
for line in 'config: {values: [config/quickstart.py, config/../evil.py]}', '"config=a": {value: evil.py}':
    NO_GRID['n_layer: {value: 1}', line] = 'would run Python'
NO_GRID['method: grid', 'method: grid\ncommand: ["--config=evil.py"]'] = 'would run Python'
# W&B's agent runs whatever `command` says; a stranger's file does not do that here
for line in 'sh -c ls ${program} ${args}', '${interpreter} bench.py ${args}', '${program} -c ${args}':
    NO_GRID['method:', f'command: {line.split()}\nmethod:'] = 'is refused: it may have'


def test_what_makes_no_grid_is_refused_before_any_run(written, monkeypatch):
    monkeypatch.chdir(ROOT)
    wrong, paths = [], iter(range(99))
    cases = {line: (line.split(), message) for line, message in MISTYPED.items()}
    for (before, after), message in NO_GRID.items():
        assert before in YAML
        cases[after] = [written(YAML.replace(before, after), next(paths))], message
    for what, (words, message) in cases.items():
        with pytest.raises(SettingError) as refusal:
            listed(*words)
        wrong += [what] * (message not in str(refusal.value) or '\n' in str(refusal.value))
    assert wrong == []


def test_points_fail_stop_and_go_on(tmp_path, monkeypatch):
    """n_head=2 is stopped once after its evaluation, 3 does not start, the loss of 4 is NaN. Nothing can be
    printed, which ends no sweep."""
    taken = []

    def train(command):
        assert command[:2] == [sys.executable, str(ROOT / 'train_fp8.py')]
        flags = dict(word.removeprefix('--').split('=', 1) for word in command if word.startswith('--'))
        heads = int(flags['n_head'])
        taken.append(heads)
        assert flags['resume'] == 'auto'
        if heads == 3:
            return 2
        records = [{'step': 0, 'time': 1.0, 'config': {}, 'device': 'a CPU', 'versions': {'torch': '2'}},
                   *({'step': step, 'train/loss': 5.0, 'train/tokens_per_sec': 9.0, 'train/dt_ms': 2.0,
                      'precision': 'bf16'} for step in (1, 2)),
                   {'step': 2, 'val/loss': math.nan if heads == 4 else 5 / heads}]
        if taken != [4, 1, 3, 2]:
            records.append({'step': 2, 'finished': True})
        with open(os.path.join(flags['checkpoint_dir'], 'log.jsonl'), 'w') as file:
            file.writelines(json.dumps(record) + '\n' for record in records)
        return 0

    def sweeps(*words):
        with pytest.raises(UserError) as refusal:
            sweep.main(['--n_embd=64', '--n_head=4,1,3,2', '--name=s', *words])
        with open('sweeps/s/results.csv') as file:
            return str(refusal.value), list(csv.DictReader(file))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, 'train', train)
    monkeypatch.setattr(sys, 'stdout', io.TextIOWrapper(open('/dev/full', 'wb', 0), write_through=True))
    message, rows = sweeps()
    assert message == '1 of 4 runs failed: sweeps/s/n_head=3'
    assert [(row['n_head'], row['val loss']) for row in rows] == [
        ('1', '5.0'), ('4', 'nan'), ('3', ''), ('2', '')]
    message, rows = sweeps()
    assert taken == [4, 1, 3, 2, 3, 2]
    assert [(row['n_head'], row['val loss']) for row in rows] == [
        ('2', '2.5'), ('1', '5.0'), ('4', 'nan'), ('3', '')]
    assert os.path.getsize('sweeps/s/results.png') > 10_000
    assert (rows[0]['tokens/s'], rows[0]['torch'], rows[0]['device']) == ('9.0', '2', 'a CPU')
    message, _ = sweeps('--seed=7')
    assert 'was run with seed=1337, now 7: another --name' in message


def test_runs_of_two_tokenizers_are_ranked_by_what_a_byte_takes_them(tmp_path, monkeypatch, capsys):
    """The first has more nats per token, as its tokens are longer, and fewer per byte."""
    monkeypatch.chdir(tmp_path)
    found = sweep.points(['--n_layer=1,2,3'], 's')
    for point, loss, bits in zip(found, (6.9, 3.4, math.nan), (3.0, 4.8, math.nan)):
        records = [{'config': {}, 'device': 'a CPU', 'versions': {}, 'train/loss': 5.0, 'train/dt_ms': 2.0,
                    'train/tokens_per_sec': 9.0}, {'val/loss': loss, 'val/bits_per_byte': bits},
                   {'finished': True}]
        files.write_text(f'{point.folder}/log.jsonl', ''.join(
            json.dumps({'step': 1} | record) + '\n' for record in records))
    sweep.report_sweep(found[::-1])
    with open('sweeps/s/results.csv') as file:
        assert [row['n_layer'] for row in csv.DictReader(file)] == ['1', '2', '3']


@pytest.mark.slow
def test_a_run_is_cut_off_by_sigterm_and_goes_on(tiny, tmp_path):
    words = [ROOT / 'sweep.py', *tiny, '--max_steps=600', '--seed=1,2', '--point=1']
    words = [*map(str, words), '--checkpoint_freq=1000']
    options = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
    process = subprocess.Popen([sys.executable, *words], cwd=tmp_path, env=environment(), **options)
    for line in process.stdout:
        if line.startswith('step 3/'):
            process.send_signal(signal.SIGTERM)
            break
    rest = process.stdout.read()
    assert process.wait() == 130
    assert 'stopped at step ' in rest
    assert os.listdir(tmp_path / 'sweeps/sweep') == ['seed=2']
    out = run(*words, fork=False, cwd=tmp_path).stdout
    assert 'resumed   sweeps/sweep/seed=2/step_' in out
    assert 'done: sweeps/sweep/seed=2/latest.pt is step 600' in out
