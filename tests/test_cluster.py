"""Ranks that are gone or wrong."""
import os
import signal

import pytest

import forked
from conftest import in_ranks, runner, start_ranks

pytestmark = pytest.mark.slow

BEFORE = """
import signal
from fp8gpt import data
whole_next, calls = data.Loader.next, []

def next(loader):
    calls.append(1)
    if os.environ['RANK'] == '1' and len(calls) == 6 and '--resume=auto' not in sys.argv:
        {what}
    return whole_next(loader)
data.Loader.next = next
"""


def words_of(folder, what):
    """Return the words of train.py, whose rank 1 does something in its sixth micro-step."""
    return runner(folder, BEFORE.format(what=what)), 'train.py', f'--checkpoint_dir={folder}/c'


def ends(words):
    """Return what each rank says on stderr, once rank 0 has ended; rank 1 is killed then, as by torchrun."""
    started = start_ranks(2, *words)
    first = forked.finish(words, *started[0], timeout=240)
    if started[1][0].is_alive():
        os.kill(started[1][0].pid, signal.SIGKILL)
    assert first.returncode == 1
    return first.stderr, forked.finish(words, *started[1], timeout=240).stderr


def test_a_rank_that_is_gone_ends_the_others_in_one_line(tiny, tmp_path):
    words = *words_of(tmp_path, 'os.kill(os.getpid(), signal.SIGKILL)'), *tiny, '--checkpoint_freq=2'
    line = 'error: the connection to another rank is lost: what that rank printed says why\n'
    other, its_own = ends(words)
    assert other.endswith(line)
    assert (other.count('error: '), 'Traceback' in other, 'error' in its_own) == (1, False, False)
    assert 'resumed   ' in in_ranks(2, *words, '--resume=auto').stdout


def test_a_mistake_of_one_rank_is_told_alone(tiny, tmp_path):
    other, its_own = ends([*words_of(tmp_path, 'raise RuntimeError("a mistake")'), *tiny])
    assert its_own.count('Traceback') == 1
    assert 'RuntimeError: a mistake' in its_own
    assert 'Traceback' not in other
    assert 'the connection to another rank is lost' in other
