"""Ranks that are gone or wrong."""
import os
import shutil
import signal

import pytest

import forked
from conftest import RANK_IN_WORDS, in_ranks, records, run, runner, start_ranks, write_tiny_data
from fp8gpt.checkpoint import read

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


def apart(tmp_path, *words, codes=(2, 1)):
    """Return what two ranks of train.py say on stderr, each with its rank in place of RANK in the words."""
    started = start_ranks(2, runner(tmp_path, RANK_IN_WORDS), 'train.py', *words)
    done = [forked.finish(words, *each, timeout=60) for each in started]
    assert tuple(each.returncode for each in done) == codes
    return ''.join(each.stderr for each in done)


def test_ranks_that_would_train_unlike_things_are_refused_in_one_line(tiny, tiny_data, tmp_path):
    """Settings, also such that one rank refuses alone; copies of the data, with meta.json or without;
    checkpoints that one of them does not have, or has of another run."""
    (tmp_path / 'other').mkdir()
    write_tiny_data(tmp_path / 'other', 'Another text of as many letters, ' * 3000)
    for rank, data in enumerate((tiny_data, tmp_path / 'other' / 'tiny-byte')):
        (tmp_path / f'data{rank}').symlink_to(data)
        foreign = tmp_path / f'foreign{rank}'
        shutil.copytree(tiny_data, foreign, ignore=shutil.ignore_patterns('*.json'))
        with open(foreign / 'train_000001.bin', 'r+b') as file:
            file.seek(5000)
            file.write(bytes([65 + rank, 0]))
        run('train.py', *tiny, '--max_steps=2', f'--seed={rank}', f'--checkpoint_dir={tmp_path}/same{rank}')
    in_ranks(2, 'train.py', *tiny, '--max_steps=2', f'--checkpoint_dir={tmp_path}/run0')
    folder = f'--checkpoint_dir={tmp_path}/new'
    for words, said in (
        ([folder, '--seed=RANK'], 'rank 0 has seed=0, rank 1 has seed=1: all ranks need the same'),
        ([folder, f'--dataset={tmp_path}/dataRANK'], 'rank 0 has train_000000.bin=['),
        ([f'--checkpoint_dir={tmp_path}/runRANK', '--resume=auto', '--max_steps=9'],
         'rank 0 has resumed step=2, rank 1 has resumed step=None'),
        ([folder, f'--dataset={tmp_path}/foreignRANK'], 'rank 0 has train_000001.bin=['),
        ([f'--checkpoint_dir={tmp_path}/sameRANK', '--resume=auto', '--seed=1'],
         'rank 0 has checkpoint (crc32)='),
    ):
        error = apart(tmp_path, *tiny, *words)
        assert said in error and error.count('\n') == 1, error
    error = apart(tmp_path, *tiny, folder, '--n_embd=6RANK', codes=(1, 2))
    assert error.startswith('error: n_embd=61 must be') and error.count('\n') == 1, error
    assert not (tmp_path / 'new').exists() and not (tmp_path / 'run1').exists()


def test_ranks_that_choose_unlike_precisions_are_refused(tiny, tmp_path):
    """A GPU's trial may fail alone, as where another process holds its memory."""
    choose = "from fp8gpt import fp8\nif os.environ['RANK'] == '1':\n    fp8.choose = lambda *_: fp8.OFF"
    words = [runner(tmp_path, choose), 'train_fp8.py', '--fp8_backend=native', *tiny]
    started = start_ranks(2, *words, f'--checkpoint_dir={tmp_path}/new')
    done = [forked.finish(words, *each, timeout=60) for each in started]
    assert [each.returncode for each in done] == [2, 1]
    assert "rank 0 has FP8={'fp8_backend': 'native', " in done[0].stderr
    assert ', rank 1 has FP8=off: all ranks need the same ' in done[0].stderr


def test_two_ranks_then_one_then_four_end_at_max_tokens(tiny, tmp_path):
    """A rank takes 4 x 64 = 256 tokens a step: 5 steps of 512, 4 of 256, then 6 of 1,024, to 9,728."""
    seen = [512, 1024, 1536, 2048, 2560, 2816, 3072, 3328, 3584, 4608, 5632, 6656, 7680, 8704, 9728]
    for ranks, max_steps, last in (2, 5, 5), (1, 9, 9), (4, 0, 15):
        run('-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={ranks}', 'train.py', *tiny,
            '--max_tokens=9728', f'--max_steps={max_steps}', '--resume=auto', f'--checkpoint_dir={tmp_path}')
        state = read(f'{tmp_path}/latest.pt')
        assert (state['step'], state['tokens'], state['position'] * 64) == (last, *2 * [seen[last - 1]])
        assert records(tmp_path, 'train/tokens') == [*enumerate(seen[:last], 1)]
