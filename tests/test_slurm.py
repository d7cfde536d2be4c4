"""The files of slurm/, run as typed under the few lines of SLURM in tests/slurm/: a node is a torchrun."""
import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from conftest import ROOT, TINY, environment

pytestmark = pytest.mark.slow


@pytest.fixture
def repository(tmp_path, tiny_data):
    """A folder as a clone is, with a config tiny.yaml."""
    folder = tmp_path / 'repository'
    folder.mkdir()
    for path in [*ROOT.glob('*.py'), ROOT / 'slurm']:
        (folder / path.name).symlink_to(path)
    (folder / '.venv').symlink_to(sys.prefix)
    (folder / 'logs').mkdir()
    config = dict(word.removeprefix('--').split('=') for word in TINY)
    config |= {'dataset': tiny_data, 'max_steps': 40, 'checkpoint_freq': 5, 'fp8_backend': 'native'}
    (folder / 'tiny.yaml').write_text(''.join(f'{name}: {value}\n' for name, value in config.items()))
    return folder


def typed(line, repository, rc=0, **env):
    """What a line typed in the repository says."""
    env = environment(PATH=f'{ROOT}/tests/slurm:{os.environ["PATH"]}', **env)
    words = shlex.split(line)
    done = subprocess.run(words, cwd=repository, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == rc, done.stderr
    return done.stdout


def logs(repository, name='fp8_train'):
    """(what is in the job's .out, what in its .err)."""
    found = sorted((repository / 'logs').iterdir())
    assert [re.sub(r'(_\d+)+', '_JOB', path.name) for path in found] == [f'{name}_JOB.err', f'{name}_JOB.out']
    return [path.read_text() for path in reversed(found)]


def test_a_job_on_two_nodes_is_stopped_before_its_limit_and_requeued_until_it_is_done(repository):
    folder = repository / 'checkpoints_tiny'
    line = 'sbatch --export=CONFIG=tiny.yaml --nodes=2 slurm/train.sbatch --seed=7'
    said = typed(line, repository, FAKE_LIMIT=str(folder / 'latest.pt'))
    out, err = logs(repository)
    assert said == '2 starts, exit code 0\n', err
    assert out.count('batch     2 ranks x') == 2
    assert out.count('stopped at step') == 1
    step = re.search(r'stopped at step (\d+), saved', out)[1]
    assert out.count(f'\ntime limit near: saved at step {step}, requeued as start 2 (SLURM holds it for two '
                     'minutes)\n') == 1
    assert out.count('resumed   checkpoints_tiny/step_') == 1
    assert out.count('done: checkpoints_tiny/latest.pt is step 40') == 1
    assert 'error: ' not in err
    assert not (folder / 'STOP').exists()
    records = [json.loads(record) for record in (folder / 'log.jsonl').read_text().splitlines()]
    started = [record for record in records if 'config' in record]
    job = re.search(r'_(\d+)', os.listdir(repository / 'logs')[0])[1]
    assert [record['slurm_job_id'] for record in started] == [job] * 2
    assert started[0]['slurm_job_nodelist'] == 'localhost[1-2]'
    assert started[0]['host'] == os.uname().nodename
    assert started[0]['config']['seed'] == 7
    assert started[0]['precision'] == started[1]['precision'] == 'fp8'


def test_a_job_of_less_than_ten_minutes_is_not_requeued(repository):
    """The signal comes up to six minutes before the limit: it would begin for ever, and train a few steps."""
    folder = repository / 'checkpoints_tiny'
    line = 'sbatch --export=CONFIG=tiny.yaml --nodes=1 slurm/train.sbatch --max_steps=100000'
    said = typed(line, repository, FAKE_LIMIT=str(folder / 'latest.pt'), FAKE_LEFT='4:59')
    out, err = logs(repository)
    assert said == '1 starts, exit code 0\n', err
    assert out.startswith('time limit: 4:59 left, less than ten minutes: this job is not requeued\n')
    step = re.search(r'stopped at step (\d+), saved', out)[1]
    assert out.endswith(f'near: saved at step {step}; to go on: the same sbatch with more --time\n')
    assert not (folder / 'STOP').exists()


OUT_OF_MEMORY = """
import os
import sys
print(*sys.argv[1:], sorted(os.environ))
print('error: out of memory (CUDA out of memory): halve --batch_size', file=sys.stderr)
sys.exit(3)
"""


def test_a_job_out_of_memory_is_not_requeued(repository):
    """What --export does not name is not handed on. A job in bf16 has a folder of its own."""
    (repository / 'train.py').unlink()
    (repository / 'train.py').write_text(OUT_OF_MEMORY)
    line = 'sbatch --export=CONFIG=tiny.yaml,SCRIPT=train.py slurm/train.sbatch --batch_size=16'
    said = typed(line, repository, NOT_HANDED_ON='1')
    out, err = logs(repository)
    assert said == '1 starts, exit code 1\n', err
    assert out.startswith('tiny.yaml --resume=auto --batch_size=16 --checkpoint_dir=checkpoints_tiny_bf16 [')
    assert err.count('error: out of memory') == 1
    assert 'NOT_HANDED_ON' not in out
    for name in 'HOME', 'TORCHINDUCTOR_CACHE_DIR', 'TIKTOKEN_CACHE_DIR':
        assert f"'{name}'" in out


def test_a_sweep_is_a_point_a_task_or_an_agent(repository):
    (repository / '.venv').unlink()
    (repository / '.venv' / 'bin').mkdir(parents=True)
    for name, text in ('python', '$*'), ('wandb', '$AGENT wandb $*'):
        (repository / '.venv' / 'bin' / name).write_text(f'#!/bin/sh\necho "{text}"\n')
        (repository / '.venv' / 'bin' / name).chmod(0o755)
    default = 'sweep.py config/sweep_shakespeare.py --point=3 --penalty_weight=0,0.005,0.01,0.02,0.05'
    for options, flags, words in (
        ('--array=3', '', default),
        ('', '--max_lr=1,2', 'sweep.py config/sweep_shakespeare.py --max_lr=1,2'),
        ('--export=SWEEP=other.py', '--max_lr=1,2', 'sweep.py other.py --max_lr=1,2'),
        ('--export=SWEEP_ID=me/llm-fp8/x1', '', 'wandb agent me/llm-fp8/x1'),
    ):
        typed(f'sbatch {options} slurm/sweep.sbatch {flags}', repository)
        [file] = (repository / 'logs').glob('*.out')
        agent = file.stem.split('_')[2] + ' ' if 'SWEEP_ID' in options else ''
        assert logs(repository, 'fp8_sweep')[0] == f'{agent}{words}\n'
        for path in (repository / 'logs').iterdir():
            path.unlink()


def test_caches_are_in_a_folder_that_nobody_else_made(tmp_path):
    def cache(tmp):
        env = environment(SLURM_SUBMIT_DIR=str(tmp_path), TMPDIR=str(tmp))
        env.pop('TRITON_CACHE_DIR', None)
        code = f'source {ROOT}/slurm/environment.sh; echo $TRITON_CACHE_DIR'
        done = subprocess.run(['bash', '-c', code], env=env, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    for name in 'own', 'shared', 'others':
        (tmp_path / name).mkdir()
    folder = f'fp8gpt_{os.getuid()}'
    assert cache(tmp_path / 'own') == f'{tmp_path}/own/{folder}/triton'
    (tmp_path / 'shared' / folder).symlink_to(tmp_path / 'others')
    found = cache(tmp_path / 'shared')
    assert found.startswith(f'{tmp_path}/shared/tmp.') and folder not in found
