"""Sweeps: what makes a grid, what is refused, runs that are done, cut off or fail, and W&B's reading of the
file."""
import csv
import os
import signal
import subprocess
import sys

import pytest

from conftest import ROOT, environment, records, refused, run
from files import read_json

YAML = '''
program: train.py
method: grid
metric: {name: val/loss, goal: minimize}
parameters:
  max_lr: {values: [0.001, 1e-2]}
  n_layer: {value: 1}
'''


def listed(*words, cwd=ROOT):
    """The labels that --dry_run lists."""
    lines = run(ROOT / 'sweep.py', *words, '--dry_run', fork=False, cwd=cwd).stdout.splitlines()
    return [line.split('  ')[1] for line in lines]


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / 'grid.yaml'
        path.write_text(text)
        return path
    return write


def test_lists_make_a_grid_and_texts_are_whole():
    words = ['--fp8_keep=h.0,mlp.down', '--max_lr=1e-3,2e-3', '--use_fp8=on,off']
    assert listed('config/quickstart.py', *words) == [
        'max_lr=1e-3,use_fp8=on',
        'max_lr=1e-3,use_fp8=off',
        'max_lr=2e-3,use_fp8=on',
        'max_lr=2e-3,use_fp8=off',
    ]


def test_flags_may_be_spelt_in_two_words():
    words = ['--max_lr', '1e-3,2e-3', '--no_fp8', '--config', 'config/quickstart.py', '--point', '-1']
    assert listed(*words) == ['max_lr=1e-3', 'max_lr=2e-3']


def test_a_sweep_file_makes_one_too(written):
    path = written(YAML)
    assert listed(path) == ['max_lr=0.001', 'max_lr=1e-2']
    assert listed(path, '--seed=1,2')[:2] == ['max_lr=0.001,seed=1', 'max_lr=0.001,seed=2']
    assert listed(path, '--max_lr=0.5') == ['max_lr=0.5']


def test_the_count_alone_is_printed():
    """As a script wants it that submits a SLURM array."""
    assert run('sweep.py', 'config/sweep_penalty.yaml', '--count').stdout == '5\n'


@pytest.mark.parametrize('words, message', [
    (['--max_lrr=1,2'], 'the nearest is max_lr'),
    (['--max_lr=1e-3,fast'], "max_lr wants a number > 0, not 'fast'"),
    (['--max_lr=1e-3,0.001'], 'max_lr=0.001 and max_lr=1e-3 are the same run'),
    (['--resume=latest'], "resume is the sweep's own"),
    (['--max_lr=1e-3,2e-3', '--point=2'], 'the runs are 0 to 1'),
    (['config/sweep_penalty.yaml', 'config/sweep_penalty.yaml'], 'one sweep file at a time'),
])
def test_a_mistyped_line_is_refused_before_any_run(words, message):
    code, said = refused('sweep.py', *words)
    assert code == 2
    assert message in said


@pytest.mark.parametrize('before, after, message', [
    ('method: grid', 'method: random', '`wandb sweep` and `wandb agent`'),
    ('method: grid', 'method: bayes', 'method: bayes is for W&B alone'),
    ('method: grid', 'method: grid\nearly_terminate: {type: hyperband}', 'early_terminate is for W&B alone'),
    ('program: train.py', 'program: bench.py', 'neither train.py nor train_fp8.py'),
    ('{values: [0.001, 1e-2]}', '{min: 0.1, max: 1}', 'max_lr has neither a list of `values:`'),
    ('{values: [0.001, 1e-2]}', '{values: []}', 'max_lr has neither a list of `values:`'),
    ('max_lr:', 'max_lrr:', 'the nearest is max_lr'),
    ('max_lr:', 'overwrite:', "the sweep's own"),
    ('program: train.py', 'command: ["${program}", "${args}", "${args_json}"]', '${args_json} is for W&B'),
    ('program: train.py', 'command: ${program} ${args}', 'wants a list of words'),
    ('program: train.py', 'command: [[ls]]', 'wants a list of words'),
    ('max_lr:', 'seed: {values: [&a 1, *a]}\n  max_lr:', 'line 6 has an anchor (&)'),
    ('{values: [0.001, 1e-2]}', '{values: [[[[[[[[[1]]]]]]]]]}', 'nests deeper than'),
    ('{values: [0.001, 1e-2]}', f'{{values: {list(range(1001))}}}', 'the grid has 1,001 runs'),
    ('program: train.py', 'command: ["${program}"]', 'lacks ${args}'),
    ('method: grid', 'method: [', 'is not YAML'),
])
def test_a_file_that_makes_no_grid(written, before, after, message):
    code, said = refused('sweep.py', written(YAML.replace(before, after)))
    assert code == 2
    assert message in said


def commanded(line):
    """YAML with a command of a line's words."""
    return YAML.replace('method:', f'command: {line.split()}\nmethod:')


def test_a_sweep_file_runs_nothing_but_the_program(written):
    """W&B's agent runs whatever `command` says; a stranger's file does not do that here."""
    wrong = []
    for line in ('sh -c ls ${program} ${args}',
                 '${env} sh ${program} ${args}',
                 'python -c ls ${program} ${args}',
                 '${interpreter} bench.py ${args}',
                 '${program} -c ${args}',
                 '${program} ${args} ls',
                 '${program} ${args} ${envvar:HOME}'):
        code, said = refused('sweep.py', written(commanded(line)))
        if code != 2 or not said.startswith('command: '):
            wrong.append(line)
    for line in ('${env} ${interpreter} ${program} ${args}',
                 'python3 train.py --run_name=${envvar:NAME} ${args}'):
        if listed(written(commanded(line))) != ['max_lr=0.001', 'max_lr=1e-2']:
            wrong.append(line)
    assert wrong == []


def test_a_sweep_from_its_first_run_to_its_table(tiny, tmp_path):
    """The second of three points fails. Taken again, a run that is done does nothing."""
    words = [ROOT / 'sweep.py', *tiny, '--program=train', '--max_steps=2', '--log_freq=1', '--name=s']
    words += ['--warmup_steps=1', '--n_head=1,3,2']     # tiny has an n_head, too
    done = run(*words, rc=1, fork=False, cwd=tmp_path)
    assert '1 of 3 runs failed: n_head=3: n_embd=64 must be a multiple of n_head=3' in done.stderr
    with open(tmp_path / 'sweeps/s/results.csv') as file:
        rows = list(csv.DictReader(file))
    assert {row['n_head']: row['status'] for row in rows} == {'1': 'done', '2': 'done', '3': 'failed'}
    best, second, failed = (row['val loss'] for row in rows)
    assert float(best) < float(second)
    assert failed == ''
    assert float(rows[0]['tokens/s']) > 0
    assert rows[0]['torch']
    assert (tmp_path / 'sweeps/s/sweep.png').read_bytes()[:4] == b'\x89PNG'

    assert 'step' not in run(*words, '--point=0', fork=False, cwd=tmp_path).stdout
    point = tmp_path / 'sweeps/s/n_head=1/point.json'
    point.write_text(point.read_text().replace('"run_name": ""', '"run_name": "gpt"'))    # as once called
    assert run(*words, '--dry_run', fork=False, cwd=tmp_path).stdout.count('  done  ') == 2
    changed = run(*words, '--seed=7', rc=2, fork=False, cwd=tmp_path)
    assert 'was run with seed=1337, now 7: another --name' in changed.stderr


def test_nothing_runs_where_the_first_run_cannot(tmp_path):
    words = ['--program=train', '--dataset=nothing', '--tokenizer=byte', '--max_lr=1e-3,2e-3']
    said = run(ROOT / 'sweep.py', *words, rc=1, fork=False, cwd=tmp_path).stderr
    assert 'nothing was run, max_lr=1e-3 cannot: ' in said
    assert not os.path.exists(tmp_path / 'sweeps')


def test_a_run_that_is_stopped_goes_on(tiny, tmp_path):
    words = [ROOT / 'sweep.py', *tiny, '--program=train', '--max_steps=100', '--seed=1,2', '--point=1']
    words = [*map(str, words), '--checkpoint_freq=1000']
    options = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
    process = subprocess.Popen([sys.executable, *words], cwd=tmp_path, env=environment(), **options)
    for line in process.stdout:
        if line.startswith('step 3/'):
            process.send_signal(signal.SIGTERM)
            break
    rest = process.stdout.read()
    assert process.wait() == 0
    assert 'seed=2: stopped' in rest
    assert os.listdir(tmp_path / 'sweeps/sweep') == ['seed=2']

    out = run(*words, fork=False, cwd=tmp_path).stdout
    assert 'resumed   sweeps/sweep/seed=2/latest.pt at step' in out
    assert 'seed=2: done' in out


# --------------------------------------------------------------------------------------------- W&B's reading


def test_an_agent_of_wandb_starts_the_run_that_the_file_means(tiny, tmp_path, monkeypatch):
    """By the agent's own code, without a server."""
    pytest.importorskip('wandb')
    from wandb.sdk.launch.sweeps.utils import load_sweep_config
    from wandb.wandb_agent import Agent
    for name in ('train_fp8.py', 'config'):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / 'bin').mkdir()
    (tmp_path / 'bin' / 'python').write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / 'bin' / 'python').chmod(0o755)
    monkeypatch.chdir(tmp_path)
    variables = {'MODE': 'offline', 'SWEEP_ID': 'sweep1', 'DIR': '.', 'RUN_ID': '', 'SWEEP_PARAM_PATH': ''}
    for name, value in variables.items():
        monkeypatch.setenv(f'WANDB_{name}', value)
    monkeypatch.setenv('PATH', f'{tmp_path}/bin:{os.environ["PATH"]}')
    monkeypatch.setenv('AGENT', '7')

    sweep = load_sweep_config('config/sweep_penalty.yaml')
    assert sweep['method'] == 'grid'
    assert sweep['parameters']['penalty_weight'] == {'values': [0, 0.005, 0.01, 0.02, 0.05]}
    values = dict(word.removeprefix('--').split('=') for word in [*tiny, '--max_steps=2', '--warmup_steps=1'])
    values |= {'penalty_weight': 0.01, 'penalty_type': 'z_loss'}
    agent = Agent(api=None, queue=None, sweep_id='sweep1')
    agent._sweep_command = sweep['command']
    args = {name: {'value': value} for name, value in values.items()}
    agent._command_run({'run_id': 'run1', 'program': sweep['program'], 'args': args})
    process = agent._run_processes['run1']
    assert process.wait() == 0

    folder = tmp_path / 'sweeps/agent-7'
    assert read_json(str(folder / 'wandb.json')) == {'id': 'run1'}
    config = records(folder, 'config')[0][1]
    assert (config['penalty_weight'], config['run_name']) == (0.01, 'sweep')
    assert [value > 0 for _, value in records(folder, 'train/penalty')] == [True, True]
