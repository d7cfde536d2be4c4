"""speedrun.sh, whole, on a CPU: a tiny model, a text from here, a make that is pretended."""
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from conftest import ROOT, environment

pytestmark = pytest.mark.slow

CONFIG = """
# $ python prepare_data.py tiny --tokenizer=byte --data_files=text.txt --val_fraction=0.3    # as headers say
dataset, tokenizer, fp8_backend = 'tiny', 'byte', 'native'
n_layer, n_head, n_embd, block_size, batch_size = 2, 4, 64, 64, 4
max_steps, warmup_steps, eval_tokens, checkpoint_freq, log_freq = 60, 2, 1024, 5, 1
"""
STAGES = ['install', 'data', 'items', 'train', 'evaluate', 'sample']


@pytest.fixture
def repository(tmp_path):
    """A folder as a clone is."""
    folder = tmp_path / 'repository'
    folder.mkdir()
    for path in [*ROOT.glob('*.py'), *(ROOT / name for name in ('speedrun.sh', 'results', 'fp8gpt'))]:
        (folder / path.name).symlink_to(path)
    (folder / '.venv').symlink_to(sys.prefix)
    (folder / 'tiny.py').write_text(CONFIG)
    (folder / 'text.txt').write_text((ROOT / 'fp8gpt/fp8/linear.py').read_text() * 4)
    lines = (ROOT / 'tests/data/hellaswag.jsonl').read_text().splitlines(keepends=True)
    (folder / 'items.jsonl').write_text(lines[0] + lines[-1])
    (tmp_path / 'bin').mkdir()
    (tmp_path / 'bin' / 'make').write_text('#!/bin/sh\necho "make $*"\n')
    (tmp_path / 'bin' / 'make').chmod(0o755)
    return folder


def start(repository, *words, **env):
    more = {'CONFIG': 'tiny.py', 'ITEMS': 'hellaswag --data_files=items.jsonl', 'GPUS': '0',
            'PATH': f'{repository.parent}/bin:{os.environ["PATH"]}', **env}
    return subprocess.Popen(
        ['bash', 'speedrun.sh', *words], cwd=repository, env=environment(**more), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


def finish(process, rc=0):
    """(what it says, each stage's line)."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == rc, out + err
    return out, err, [line[3:] for line in out.splitlines() if line.startswith('== ')]


def test_a_dry_run_plans_the_run_and_lists_the_stages(repository):
    out, _, told = finish(start(repository, '--dry_run', '--max_steps=10000', USD_PER_GPU_HOUR='3', GPUS='8'))
    assert told == STAGES
    assert 'device    8 x H100 SXM' in out
    assert re.search(r'hours, .*M tokens, \$\d', out)
    assert "'prepare_data.py' 'tiny' '--tokenizer=byte' '--data_files=text.txt' '--val_fraction=0.3'\n" in out
    assert "'--nproc_per_node=8' 'train_fp8.py' 'tiny.py' '--max_steps=10000' '--resume=auto'" in out
    assert not (repository / 'data').exists() and not (repository / 'checkpoints_tiny').exists()


def test_killed_and_stopped_it_goes_on_where_it_was(repository):
    first = start(repository)
    log = repository / 'checkpoints_tiny' / 'log.jsonl'
    deadline = time.monotonic() + 240
    while not (repository / 'checkpoints_tiny' / 'step_000005.pt').exists():
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()

    second = start(repository)  # it takes a STOP that is there before its first step for an old one
    while not re.search('"config".*"config".*train/loss', log.read_text(), re.DOTALL):
        assert second.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    (repository / 'checkpoints_tiny' / 'STOP').touch()
    out, err, _ = finish(second, rc=1)
    assert re.search(r'^resumed +checkpoints_tiny/\w+\.pt at step \d+', out, re.MULTILINE), out
    assert out.count('done before, left out') == 2
    assert err.endswith('speedrun.sh: train was stopped; the same line goes on there\n')

    out, _, told = finish(start(repository))
    assert [line.split()[0] for line in told] == STAGES
    assert 'done: checkpoints_tiny/latest.pt is step 60' in out
    assert 'HellaSwag 2 items' in out
    assert 'The moon is' in out
    assert out.count('done before, left out') == 2
    steps = [json.loads(line).get('step') for line in log.read_text().splitlines()]
    assert max(step for step in steps if step) == 60
    out, _, _ = finish(start(repository, '--max_steps=61'))     # what is trained on is evaluated again
    assert out.count('done before, left out') == 2 and 'HellaSwag 2 items' in out
    (repository / 'data').rename(repository / 'elsewhere')      # as on a new machine
    out, _, _ = finish(start(repository, '--max_steps=61'))
    assert out.count('done before, left out') == 3 and 'hellaswag_val.jsonl is ready' in out


def test_a_stage_that_fails_ends_it_in_one_line(repository):
    _, err, told = finish(start(repository, DATA='tiny --data_files=missing.txt'), rc=1)
    assert [line.split()[0] for line in told] == ['install', 'data']
    assert err.splitlines()[-1] == (
        'speedrun.sh: data ended with exit code 1; with that put right, the same line goes on there')
