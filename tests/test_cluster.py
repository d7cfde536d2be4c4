"""Ranks that are gone or stand still, and the files of slurm/ under a SLURM that is a few lines of shell."""
import os
import re
import shlex
import signal

import pytest

import forked
import parallel
from conftest import ROOT, in_ranks, start_ranks

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
parallel.BEAT, parallel.QUIET, parallel.SILENCE = 0.5, 2, 4
parallel.FIRST, parallel.STEADY, parallel.SLOW_DISK = 30, 3, 1e5
whole_next, whole_save, calls = data.Loader.next, checkpoint.save, []

def next(loader):
    calls.append(1)
    if os.environ['RANK'] == {rank!r} and len(calls) == 6 and '--resume=auto' not in sys.argv:
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


def script_of(folder, what='pass', rank=1, save_seconds=0):
    path = folder / 'script.py'
    path.write_text(SCRIPT.format(root=str(ROOT), what=what, rank=str(rank), save_seconds=save_seconds))
    return path


def ends(words, rank):
    """What both ranks say on stderr, once the other one than `rank` has ended; that one is killed then."""
    started = start_ranks(2, *words)
    done = {1 - rank: forked.finish(words, *started[1 - rank], timeout=60)}
    if started[rank][0].is_alive():
        os.kill(started[rank][0].pid, signal.SIGKILL)
    done[rank] = forked.finish(words, *started[rank], timeout=60)
    assert done[1 - rank].returncode == 1
    return done[0].stderr + done[1].stderr


@pytest.mark.parametrize('what, message', [
    (KILLED, r'rank 1 is gone \(rank 1: step \d, '),
    (STOPPED, r'rank 1 has given no sign of life for 4 s \(rank 1: step \d, '),
    ('time.sleep(600)', r'no rank goes on: a micro-step in bf16 has taken rank . \d+ s, where 3 are its limit'
                        r'.*rank 1: step 5, a micro-step in bf16 at train.py:\d+'),
], ids=['killed', 'stopped', 'hanging'])
def test_a_rank_that_is_gone_or_hangs_ends_the_others_in_one_line(what, message, tiny, tmp_path):
    script = script_of(tmp_path, what)
    said = ends([script, *tiny, '--checkpoint_freq=2', f'--checkpoint_dir={tmp_path}/c'], 1)
    assert said.count('error: ') == 1
    assert 'Traceback' not in said
    assert re.search(message, said)
    command = shlex.split(re.search('To go on from the last checkpoint: (.*)', said)[1])
    if what == KILLED:
        assert 'resumed   ' in in_ranks(2, *command[3:]).stdout  # behind torchrun's words


def test_the_rank_of_the_store_that_is_gone_is_told_too(tiny, tmp_path):
    said = ends([script_of(tmp_path, KILLED, rank=0), *tiny, f'--checkpoint_dir={tmp_path}/c'], 0)
    assert 'error: rank 0 is gone' in said


def test_a_mistake_of_one_rank_is_told_alone(tiny, tmp_path):
    script = script_of(tmp_path, 'raise RuntimeError("a mistake")')
    said = ends([script, *tiny, f'--checkpoint_dir={tmp_path}/c'], 1)
    assert said.count('Traceback') == 1
    assert 'RuntimeError: a mistake' in said
    assert 'error: rank' not in said


def test_a_rank_that_is_behind_is_waited_for(tiny, tmp_path):
    """Rank 0 saves for 6 s at step 6; the other one's micro-steps may take 3."""
    words = [*tiny, '--max_steps=7', '--checkpoint_freq=6', f'--checkpoint_dir={tmp_path}/c']
    assert 'done: ' in in_ranks(2, script_of(tmp_path, save_seconds=6), *words).stdout


def test_limits_follow_what_work_takes():
    """A laptop's steps of 200 s are waited for five times as long."""
    watch = parallel.Watch(0, 1)
    limits = []
    for _ in range(5):
        watch.on(0, 'a micro-step')
        limits.append(watch.work.limit)
        watch.clock += 200
    assert limits == [parallel.FIRST] * 3 + [5 * 200] * 2
    watch.on(0, 'a micro-step in another precision')
    assert watch.work.limit == parallel.FIRST
    watch.on(0, 'saving', 100e9)
    assert watch.work.limit == parallel.STEADY + 5000
