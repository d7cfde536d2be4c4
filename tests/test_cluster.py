"""Ranks that are gone or stand still."""
import os
import re
import shlex
import signal

import pytest

import forked
from conftest import ROOT, in_ranks, start_ranks

pytestmark = pytest.mark.slow

# train.py, one of whose ranks does something in its sixth micro-step, under limits of seconds
SCRIPT = """
import os
import runpy
import signal
import sys
import time
sys.path.insert(0, {root!r})
import checkpoint
import data
import parallel
parallel.BEAT, parallel.QUIET, parallel.SILENCE = 0.5, 2, {silence}
parallel.FIRST, parallel.STEADY, parallel.SLOW_DISK = 60, {steady}, 1e5
whole_next, whole_save, calls = data.Loader.next, checkpoint.save, []

def next(loader):
    calls.append(1)
    if os.environ['RANK'] == '1' and len(calls) == 6 and '--resume=auto' not in sys.argv:
        {what}
    return whole_next(loader)
data.Loader.next = next

def save(folder, state, *more):
    if state['step'] == 6:
        time.sleep({save_seconds})
    whole_save(folder, state, *more)
checkpoint.save = save
runpy.run_path({root!r} + '/train.py', run_name='__main__')
"""
KILLED = 'os.kill(os.getpid(), signal.SIGKILL)'
STOPPED = 'os.kill(os.getpid(), signal.SIGSTOP)'
HANGING = 'time.sleep(600)'


def script_of(folder, what='pass', save_seconds=0, silence=60, steady=60):
    """silence, steady: seconds, of which a test needs one to be short; a loaded machine may well take 10."""
    path = folder / 'script.py'
    path.write_text(SCRIPT.format(root=str(ROOT), what=what, save_seconds=save_seconds,
                                  silence=silence, steady=steady))
    return path


def ends(words):
    """Return what both ranks say on stderr, once rank 0 has ended; rank 1 is killed then."""
    started = start_ranks(2, *words)
    first = forked.finish(words, *started[0], timeout=240)
    if started[1][0].is_alive():
        os.kill(started[1][0].pid, signal.SIGKILL)
    assert first.returncode == 1
    return first.stderr + forked.finish(words, *started[1], timeout=240).stderr


@pytest.mark.parametrize('what, limits, message', [
    (KILLED, {}, r'rank 1 is gone \(rank 1: step \d, '),
    (STOPPED, {'silence': 10}, r'rank 1 has given no sign of life for 10 s \(rank 1: step \d, '),
    (HANGING, {'steady': 10}, r'no rank goes on: a micro-step in bf16 has taken rank . \d+ s, where 10 are '
                              r'its limit.*rank 1: step 5, a micro-step in bf16 at train.py:\d+'),
], ids=['killed', 'stopped', 'hanging'])
def test_a_rank_that_is_gone_or_hangs_ends_the_others_in_one_line(what, limits, message, tiny, tmp_path):
    script = script_of(tmp_path, what, **limits)
    said = ends([script, *tiny, '--checkpoint_freq=2', f'--checkpoint_dir={tmp_path}/c'])
    assert said.count('error: ') == 1
    assert 'Traceback' not in said
    assert re.search(message, said)
    command = shlex.split(re.search('To go on from the last checkpoint: (.*)', said)[1])
    if what == KILLED:
        assert 'resumed   ' in in_ranks(2, *command[3:]).stdout  # behind torchrun's words


def test_a_mistake_of_one_rank_is_told_alone(tiny, tmp_path):
    script = script_of(tmp_path, 'raise RuntimeError("a mistake")')
    said = ends([script, *tiny, f'--checkpoint_dir={tmp_path}/c'])
    assert said.count('Traceback') == 1
    assert 'RuntimeError: a mistake' in said
    assert 'error: rank' not in said


def test_a_rank_that_is_behind_is_waited_for(tiny, tmp_path):
    """Rank 0 saves for 15 s at step 6; the other one's micro-steps may take 10."""
    words = [*tiny, '--max_steps=7', '--checkpoint_freq=6', f'--checkpoint_dir={tmp_path}/c']
    assert 'done: ' in in_ranks(2, script_of(tmp_path, save_seconds=15, steady=10), *words).stdout
