"""Checkpoints: their names, kills, full disks, damage, files from strangers."""
import contextlib
import errno
import fcntl
import functools
import io
import itertools
import os
import pathlib
import pickle
import re
import socket
import time
import zipfile
from unittest import mock

import pytest
import torch

from configurator import DataError, MachineError, SettingError, UserError
from conftest import refused
from damage import replaced, survived
from fp8gpt import checkpoint, files
from fp8gpt.checkpoint import find, read, save, start_directory, steps_in, table
from helpers import checkpoint_of, same_tensors
from model import GPT, GPTConfig

MODEL = GPT(GPTConfig(vocab_size=64, block_size=8, n_layer=1, n_head=1, n_embd=16))


def state(step, best_val_loss=1.5):
    made = checkpoint_of(MODEL, step, best_val_loss=best_val_loss)
    return replaced(made, ('weights', 'wte.weight'), torch.arange(1024.).view(64, 16) + step)


@pytest.fixture
def folder(tmp_path):
    """A checkpoint_dir, as the scripts give it."""
    return str(tmp_path)


def step_in(path):
    """Return the step of a checkpoint that is whole."""
    return torch.load(path, weights_only=True)['step']


def start(folder, resumed_from=None, resumed_step=0, overwrite=False):
    """Start a run in a directory and end it."""
    lock = locked(folder)
    try:
        start_directory(folder, lock, resumed_from, resumed_step, overwrite)
    finally:
        lock.release()


def locked(folder):
    """Return the lock of a folder, held if the folder exists."""
    return checkpoint.lock_directory({'checkpoint_dir': folder, 'dry_run': False, 'eval_only': False})


def lock_file(folder):
    return pathlib.Path(folder, '.lock')


def test_names_links_and_keep(folder, tmp_path):
    assert table(folder) == [f'no checkpoints in {folder}']
    assert find('auto', folder) is None
    with pytest.raises(FileNotFoundError, match='resume=best: there is no'):
        find('best', folder)
    for step in (10, 20, 30, 40):
        save(folder, state(step), keep=2, best=step == 20)
    assert list(steps_in(folder).values()) == [f'{folder}/step_000030.pt', f'{folder}/step_000040.pt']
    assert os.path.samefile(f'{folder}/latest.pt', f'{folder}/step_000040.pt')
    assert read(find('best', folder))['step'] == 20
    assert find(folder, 'elsewhere') == f'{folder}/latest.pt'
    assert find('latest', folder) == f'{folder}/step_000040.pt'
    assert not list(tmp_path.glob('*.tmp'))
    save(folder, state(50), keep=0)
    assert list(steps_in(folder)) == [30, 40, 50]
    assert '50' in table(folder)[-1]


def test_a_best_model_found_after_its_save_is_a_link_that_knows_its_loss(folder, tmp_path):
    (tmp_path / 'best_model.json').write_text('{"step": 10, "best_val_loss": 0.1}')     # of an earlier run
    start(folder)
    save(folder, state(5), keep=0)
    save(folder, state(10), keep=0)
    written = os.stat(f'{folder}/step_000010.pt')
    save(folder, state(10, 1.2), keep=0, best=True)
    found = os.stat(f'{folder}/best_model.pt')
    assert (found.st_ino, found.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
    assert not list(tmp_path.glob('*.tmp'))
    for name, loss in (('best_model', 1.2), ('latest', 1.2), ('step_000005', 1.5)):
        assert read(f'{folder}/{name}.pt')['best_val_loss'] == loss
    (tmp_path / 'best_model.pt').unlink()
    (tmp_path / 'best_model.pt').write_bytes(b'hello')  # damaged: the latest is still read
    assert read(f'{folder}/latest.pt')['best_val_loss'] == 1.5


def test_a_run_removes_what_a_run_of_ours_wrote_and_nothing_else(folder, tmp_path):
    others = ['teacher.pt', 'notes.tmp', 'latest.pt.tmp', 'step_000001.pt.tmp', 'step_1.pt', 'log.txt']
    for name in others:
        (tmp_path / name).write_text('precious')
    start(folder)
    save(folder, state(5), keep=0, best=True)
    (tmp_path / 'step_000006.pt').write_text('precious')    # our name, another's content
    torch.save({'model': torch.ones(1)}, tmp_path / 'step_000007.pt')
    (tmp_path / 'step_000007.pt.damaged').write_text('precious')     # set aside earlier
    left = files.temporary_name(f'{folder}/step_000008.pt')
    pathlib.Path(left).touch()
    with pytest.raises(UserError, match='an earlier run, step_000005.pt'):
        start(folder)
    start(folder, overwrite=True)
    aside = ['step_000006.pt.damaged', 'step_000007.pt.damaged', 'step_000007.pt.damaged2']
    assert sorted(os.listdir(folder)) == sorted([*others, *aside])
    assert {(tmp_path / name).read_text() for name in [*others, *aside[:2]]} == {'precious'}


def test_a_directory_that_is_none_is_refused(tmp_path):
    (tmp_path / 'file').touch()
    (tmp_path / 'dangling').symlink_to('nowhere')
    for name in 'file', 'dangling':
        with pytest.raises(SettingError, match=f'{name} is no folder, or cannot be written'):
            locked(f'{tmp_path}/{name}')
    with pytest.raises(SettingError, match='is not UTF-8 here'):    # a run would write what nobody can read
        locked(os.fsdecode(b'caf\xe9'))
    locked(f'{tmp_path}/caf\xe9')


def test_a_directory_that_cannot_be_written_is_refused_before_the_run(tmp_path, monkeypatch):
    """No permission, or a disk without writing: the system says so of the folder, or of the one above."""
    monkeypatch.setattr(os, 'access', lambda path, mode: not os.path.samefile(path, tmp_path))
    for name in '.', 'new', 'new/er':
        with pytest.raises(SettingError, match='cannot be written: name another'):
            locked(os.path.normpath(f'{tmp_path}/{name}'))
    os.mkdir(tmp_path / 'mine')
    locked(f'{tmp_path}/mine/new')


def test_nothing_is_written_through_a_link(folder, tmp_path):
    """No name that a write takes for a while can be known before."""
    taken = []
    files.write(f'{folder}/a', lambda file: taken.append(file.name))
    victim = tmp_path / 'victim'
    victim.write_text('precious')
    for name in 'a', 'b', 'latest.pt', 'step_000001.pt':
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to(victim)
        (tmp_path / f'{name}.tmp').symlink_to(victim)
    os.symlink(victim, taken[0])
    files.write(f'{folder}/a', lambda file: taken.append(file.name))
    files.write_text(f'{folder}/b', 'new')
    start(folder, overwrite=True)
    save(folder, state(1), keep=1)
    assert taken[0] != taken[1]
    assert victim.read_text() == 'precious'
    assert read(f'{folder}/latest.pt')['step'] == 1


class Killed(BaseException):
    """No handler of an error sees it, as none sees a kill."""


CALLS = 'replace', 'rename', 'link', 'remove', 'unlink', 'fsync', 'open'


@pytest.fixture
def dying(monkeypatch):
    """dying(work, k, error): whether work() ended by `error`, raised in place of the k-th call of the system
    that changes files, or half-way through writing a checkpoint."""
    def run(work, k, error):
        left = itertools.count(k, -1)

        def counted(real, before=lambda *arguments: None):
            def call(*arguments, **options):
                if next(left) == 0:
                    before(*arguments)
                    raise error
                return real(*arguments, **options)
            return call

        with monkeypatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, counted(getattr(os, name)))
            half = counted(torch.save, before=lambda state, file: file.write(b'PK half of it'))
            patch.setattr(torch, 'save', half)
            try:
                work()
            except (Killed, OSError) as died:
                assert died is error or isinstance(died, UserError)
                return True
        return next(left) < 0
    return run


@pytest.mark.parametrize('error', [Killed(), OSError(28, 'No space left on device')], ids=['killed', 'full'])
def test_killed_or_full_at_any_call_of_a_save_the_next_one_works(dying, error, tmp_path, monkeypatch):
    """A killed run is resumed by auto, one whose disk is full goes on itself."""
    monkeypatch.setattr(os, 'fsync', lambda number: None)  # of what a power cut does, this shows nothing
    for k in itertools.count():
        folder = str(tmp_path / str(k))
        start(folder)
        save(folder, state(1, 1.4), keep=2, best=True)
        save(folder, state(2, 1.4), keep=2)
        if not dying(functools.partial(save, folder, state(3, 1.2), 2, True), k, error):
            break
        path = find('auto', folder)
        step, best = read(path)['step'], step_in(find('best', folder))
        assert step in (2, 3) and best in (1, 3)
        if isinstance(error, Killed):
            start(folder, path, step)
            assert step_in(f'{folder}/latest.pt') == step
        assert not [name for name in os.listdir(folder) if name.endswith('.tmp')]
        save(folder, state(step + 1), keep=2)
        assert step_in(find('auto', folder)) == step + 1
        assert step_in(f'{folder}/best_model.pt') == best
    assert k > 10, 'the save dies at several calls'


def test_a_full_disk_takes_the_room_of_what_the_new_file_replaces(folder, monkeypatch):
    """It has room for three: the best, the one before and the new one."""
    def into_what_is_left(state, file, write=torch.save):
        if len(steps_in(folder)) > 1:
            raise OSError(28, 'No space left on device')
        write(state, file)
    for step in 1, 2, 3:
        save(folder, state(step), keep=2, best=step == 1)
    monkeypatch.setattr(torch, 'save', into_what_is_left)
    save(folder, state(4), keep=2)
    assert [*steps_in(folder)] == [3, 4] and step_in(find('best', folder)) == 1
    for keep in 0, 1, 3:
        with pytest.raises(UserError, match='No space left'):
            save(folder, state(5), keep)
        assert [*steps_in(folder)] == [3, 4]
    monkeypatch.setattr(torch, 'save', mock.Mock(side_effect=OSError(errno.EIO, 'Input/output error')))
    with pytest.raises(UserError, match='Input/output error'):
        save(folder, state(5), keep=2)
    assert [*steps_in(folder)] == [3, 4], 'room would not help'


def test_the_highest_whole_step_is_the_latest(folder, tmp_path):
    """Also where its step file is gone; and wsd's run keeps the step before its decay."""
    for step in range(1, 7):
        save(folder, state(step), keep=2, before=3)
    assert [*steps_in(folder)] == [3, 5, 6]
    save(folder, state(7), keep=2, before=2)    # an estimate that fell
    assert [*steps_in(folder)] == [3, 6, 7]
    os.remove(f'{folder}/step_000007.pt')
    assert find('latest', folder) == f'{folder}/latest.pt'
    (tmp_path / 'latest.pt').write_bytes(b'damaged')
    assert find('auto', folder) == f'{folder}/step_000006.pt'


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Its content first, then the folder's entry: else a power cut leaves an empty file of that name."""
    calls, fsync, replace = [], os.fsync, os.replace

    def flushed(number):
        found = os.fstat(number)
        calls.append(found.st_ino)
        assert found.st_size >= len('content')      # a buffer is empty by then
        fsync(number)

    def named(old, new):
        calls.append('name')
        replace(old, new)
    monkeypatch.setattr(os, 'fsync', flushed)
    monkeypatch.setattr(os, 'replace', named)
    files.write_text(str(tmp_path / 'file'), 'content')
    assert calls == [(tmp_path / 'file').stat().st_ino, 'name', tmp_path.stat().st_ino]


CANNOT = errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS      # CIFS, FUSE


def test_a_disk_that_cannot_flush_a_folder_is_written_and_one_that_fails_is_told(tmp_path, monkeypatch):
    fsync = os.fsync
    for number, is_told in (*((number, False) for number in CANNOT), (errno.EIO, True)):
        def flush(file, number=number):
            if os.path.isdir(f'/proc/self/fd/{file}'):
                raise OSError(number, os.strerror(number))
            fsync(file)
        monkeypatch.setattr(os, 'fsync', flush)
        with pytest.raises(DataError, match=os.strerror(number)) if is_told else contextlib.nullcontext():
            files.write_text(str(tmp_path / 'file'), 'content')


def test_a_damaged_newest_step_is_passed_over_and_set_aside(folder, capsys):
    for step in (1, 2, 3):
        save(folder, state(step), keep=0)
    for step, content in ((2, b'PK\3\4'), (3, b'')):
        with open(f'{folder}/step_{step:06d}.pt', 'r+b') as file:
            file.truncate()
            file.write(content)
    path = find('auto', folder)
    assert path == f'{folder}/step_000001.pt'
    start(folder, path, 1)
    assert read(f'{folder}/latest.pt')['step'] == 1
    assert capsys.readouterr().out.count('set aside as') == 2
    save(folder, state(2), keep=0)
    assert read(find('latest', folder))['step'] == 2


def test_copies_where_links_fail(folder, monkeypatch):
    def no_links(*args):
        raise OSError('not supported')
    monkeypatch.setattr(os, 'link', no_links)
    for step in (1, 2):
        save(folder, state(step), keep=1, best=step == 1)
    assert [read(f'{folder}/{name}.pt')['step'] for name in ('latest', 'best_model')] == [2, 1]


def test_start_protects_earlier_runs(tmp_path):
    """In a folder whose brackets are no pattern, and of steps past a million."""
    d, other = str(tmp_path / 'run[1]'), str(tmp_path / 'run1')
    start(d)
    for step in (999_999, 1_000_000, 1_000_001):
        save(d, state(step), keep=2)
    assert list(steps_in(d)) == [1_000_000, 1_000_001]
    assert all('run[1]' in line for line in table(d))
    with pytest.raises(ValueError, match='an earlier run, step_1000001.pt.*--overwrite'):
        start(d)
    start(d, f'{d}/latest.pt', 1_000_001)
    with pytest.raises(ValueError, match='later checkpoints, step_1000001.pt'):
        start(d, f'{d}/step_1000000.pt', 1_000_000)
    start(d, f'{d}/step_1000000.pt', 1_000_000, True)
    assert list(steps_in(d)) == [1_000_000]
    start(other, f'{d}/step_1000000.pt', 1_000_000)  # a branch elsewhere
    save(other, state(2), keep=0)
    with pytest.raises(ValueError, match='an earlier run'):
        start(other, f'{d}/step_1000000.pt', 1_000_000)


def test_a_later_file_without_its_step_file_is_protected_too(folder, tmp_path):
    for step in (1, 2):
        save(folder, state(step), keep=0, best=True)
    os.remove(f'{folder}/step_000002.pt')
    with pytest.raises(UserError, match='later checkpoints, latest.pt'):
        start(folder, f'{folder}/step_000001.pt', 1)
    start(folder, f'{folder}/step_000001.pt', 1, overwrite=True)
    assert sorted(os.listdir(folder)) == ['latest.pt', 'step_000001.pt']
    assert find('auto', folder) == f'{folder}/step_000001.pt'


# ------------------------------------------------------------------------------------- one writer to a folder

def test_one_run_per_directory(folder, capsys, monkeypatch):
    """Any other is refused at once, a requeued one of another job, too; the holder's file stays."""
    with locked(folder) as lock:
        before = os.stat(lock.path)
        for job in '', '8':
            if job:
                monkeypatch.setenv('SLURM_JOB_ID', job)
                monkeypatch.setenv('SLURM_RESTART_COUNT', '1')
            with pytest.raises(DataError, match=f'^another run is writing to {folder}: give this one'):
                locked(folder)
        assert os.path.samestat(before, os.stat(lock.path)) and lock_file(folder).read_text() == lock.holder
    assert not lock_file(folder).exists()
    start(folder)
    assert capsys.readouterr().out == ''


def test_a_lock_that_is_no_lock_of_ours_is_named_and_stays(folder):
    path = lock_file(folder)
    path.write_text('4242\nnode07\n')      # of another program
    with pytest.raises(DataError, match=f'{path} is no lock of ours: remove it if'):
        locked(folder)
    assert path.read_text() == '4242\nnode07\n'
    path.write_text('')                     # a killed run's first moment
    locked(folder).release()
    path.mkdir()
    with pytest.raises(OSError) as refusal:     # one line, which names its file itself
        locked(folder)
    assert refusal.value.filename == str(path) and path.is_dir()


def no_flock(monkeypatch, number=errno.ENOSYS):
    def flock(file, operation):
        raise OSError(number, os.strerror(number))
    monkeypatch.setattr(fcntl, 'flock', flock)


@pytest.mark.parametrize('number', [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_on_a_disk_without_flock_the_file_is_the_lock(folder, number, monkeypatch):
    no_flock(monkeypatch, number)
    with locked(folder) as lock:
        os.utime(lock.path, (time.time() - 95,) * 2)
        with pytest.raises(DataError, match=f'{lock.path} is of host {socket.gethostname()}, process '
                                            rf'{os.getpid()}, .*, touched 9\d s ago: remove it if'):
            locked(folder)
        lock.check()
        assert time.time() - os.stat(lock.path).st_mtime < 9
    start(folder)
    lock_file(folder).touch()       # left by a run that was killed while it made the file
    os.utime(lock_file(folder), (1, 1))
    with pytest.raises(DataError, match='is of nobody, touched'):
        locked(folder)
    no_flock(monkeypatch, errno.EIO)
    lock_file(folder).unlink()
    with pytest.raises(DataError, match=f'{folder}/.lock cannot be locked .*another disk'):
        locked(folder)


class Hours:
    """A clock in place of files.time, whose sleep takes no time. events: {seconds: a function that is called
    then}. ahead: seconds that its wall clock is ahead of the disk's."""

    def __init__(self, events, ahead=0):
        self.now, self.events, self.ahead = 0.0, events, ahead

    def monotonic(self):
        return self.now

    def time(self):
        return time.time() + self.now + self.ahead

    def sleep(self, seconds):
        self.now += max(seconds, 1)
        for at in [at for at in self.events if at <= self.now]:
            self.events.pop(at)()


@pytest.fixture
def requeued(monkeypatch):
    """The environment of a job's first start; requeued() makes it the second one's."""
    monkeypatch.setenv('SLURM_JOB_ID', '7')
    monkeypatch.delenv('SLURM_RESTART_COUNT', raising=False)
    return lambda count=1: monkeypatch.setenv('SLURM_RESTART_COUNT', str(count))


@pytest.mark.parametrize('flock', [True, False])
def test_a_requeued_run_waits_for_its_own_first_start(folder, flock, requeued, monkeypatch, capsys):
    """A line a minute. The lock is its own once the old ranks have ended; so it is for a second requeue."""
    if not flock:
        no_flock(monkeypatch)
    for count in 1, 2:
        old = locked(folder)
        requeued(count)
        monkeypatch.setattr(files, 'time', Hours({150: old.release}))
        with locked(folder) as lock:
            lock.check()
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 3, lines
        assert all(line.startswith(f'waiting: another run is writing to {folder}') for line in lines)


def test_a_requeued_run_takes_the_lock_of_a_run_that_is_silent_on_a_disk_without_flock(
        folder, requeued, monkeypatch, capsys):
    """After ten minutes without a sign of life, by its own clock, and not by the other host's."""
    no_flock(monkeypatch)
    for ahead in 0, -600, 600:
        old = locked(folder)
        requeued()
        hours = Hours({at: old.check for at in (100, 500)}, ahead)
        monkeypatch.setattr(files, 'time', hours)
        with locked(folder) as lock:
            assert 1100 < hours.now < 1110
            assert f'{lock.path} has not changed for 600 s: taken over' in capsys.readouterr().out
            # ranks that were silent and live: they write nothing any more
            with pytest.raises(MachineError, match='not the lock of this run any more: .* saves nothing'):
                save(folder, state(5), keep=0, lock=old)
            lock.check()
            old.release()
            lock.check()
        assert [*os.listdir(folder)] == []


def test_with_flock_ranks_that_never_end_keep_their_lock(folder, requeued, monkeypatch):
    old = locked(folder)
    requeued()
    hours = Hours({36_000: old.release})
    monkeypatch.setattr(files, 'time', hours)
    locked(folder).release()
    assert hours.now >= 36_000


def test_a_holder_whose_lock_is_removed_saves_nothing(folder):
    lock = locked(folder)
    lock_file(folder).unlink()
    with pytest.raises(MachineError, match='not the lock of this run any more'):
        save(folder, state(5), keep=0, lock=lock)
    assert os.listdir(folder) == []
    other = locked(folder)
    lock.release()      # removes nothing of the other's
    other.check()


def test_the_checkpoint_to_resume_is_chosen_under_the_lock(tiny, folder):
    """The holder may write the first one, or remove one that was just chosen."""
    with locked(folder):
        code, said = refused('train.py', *tiny, '--resume=latest', f'--checkpoint_dir={folder}')
    assert (code, said.startswith('another run is writing to')) == (1, True)


# ------------------------------------------------------------------------------------- what a file may hold

def test_a_checkpoint_from_before_some_fields_is_read(folder):
    older = state(1)
    for name in ('head_dim', 'qkv_bias', 'qk_norm', 'rope_factor', 'rope_low', 'rope_high', 'rope_original'):
        del older['model_config'][name]
    save(folder, older, keep=0)
    assert GPTConfig(**read(f'{folder}/latest.pt')['model_config']) == MODEL.config


def test_a_damaged_checkpoint_is_told_in_one_line(folder):
    save(folder, state(1), keep=0)
    path = f'{folder}/step_000001.pt'
    whole = read(path)['weights']
    assert not survived(path, read, lambda found: same_tensors(found['weights'], whole), cases=100)


def test_a_variable_that_another_launcher_left_hides_no_damage(folder, monkeypatch):
    """A single process checks what it reads, whatever LOCAL_RANK is."""
    save(folder, state(1), keep=0)
    path = pathlib.Path(f'{folder}/step_000001.pt')
    raw = bytearray(path.read_bytes())
    raw[raw.index(state(1)['weights']['wte.weight'].numpy().tobytes()[:64])] ^= 1
    path.write_bytes(raw)
    for left in '3', 'node7':
        monkeypatch.setenv('LOCAL_RANK', left)
        with pytest.raises(DataError, match='checksum'):
            read(str(path))


class Code:
    """Makes a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ('ran',)


def saved(value, **options):
    raw = io.BytesIO()
    torch.save(value, raw, **options)
    return raw.getvalue()


FOREIGN = {
    'text': b'hello',
    'a pickle': pickle.dumps({'step': 1}),
    'code': saved({**state(1), 'versions': Code()}),
    'a state_dict': saved(torch.nn.Linear(2, 2).state_dict()),
    'an older format': saved(state(1), _use_new_zipfile_serialization=False),
}
MISFITS = {
    ('format',): [2],
    ('weights',): [{}],
    ('weights', 'wte.weight'): [torch.zeros(128, 16), 'a word'],
    ('weights', 'extra'): [torch.zeros(1)],
    ('model_config', 'n_layer'): [10**9],
    ('model_config', 'n_head'): [3],
    ('model_config', 'experts'): [8],
}


def test_what_is_no_checkpoint_is_refused_in_one_line_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, wrong = tmp_path / 'theirs.pt', []
    changed = {(*at, str(value)): saved(replaced(state(1), at, value))
               for at, values in MISFITS.items() for value in values}
    for what, raw in (FOREIGN | changed).items():
        path.write_bytes(raw)
        try:
            wrong.append((what, read(str(path))['step']))
        except UserError as refusal:
            if not re.fullmatch(f'{path} is .*no checkpoint.*', str(refusal)):
                wrong.append((what, str(refusal)))
    assert wrong == [] and not (tmp_path / 'ran').exists()
    for part in checkpoint.PARTS:
        path.write_bytes(saved({name: value for name, value in state(1).items() if name != part}))
        with pytest.raises(DataError, match=f'is no checkpoint of .*it has no {part}'):
            read(str(path))
    renamed = tmp_path / 'step_000009.pt'       # a run would take its step for saved there
    renamed.write_bytes(saved(state(1)))
    with pytest.raises(DataError, match='is of step 1: rename it step_000001.pt'):
        checkpoint.check_name(str(renamed), read(str(renamed))['step'])
    renamed.unlink()
    path.write_bytes(saved(replaced(state(1), ('precision', 'name'), 'fp8\nerror: fake')))
    assert 'fp8\\nerror: fake' in table(str(tmp_path))[0]


def test_what_cannot_be_read_is_not_damaged(folder, monkeypatch):
    """No permission, a failing disk, too many open files: the newest step is neither passed over nor renamed.
    """
    for step in 1, 2:
        save(folder, state(step), keep=0)
    newest, before = f'{folder}/step_000002.pt', sorted(os.listdir(folder))
    for number in errno.EACCES, errno.EIO, errno.EMFILE:
        def refuse(path, *mode, number=number):
            raise OSError(number, os.strerror(number), path)
        checkpoint._damage.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint.zipfile, 'ZipFile', refuse)
            patch.setattr(checkpoint, '_mapped', refuse)
            for use in (lambda: find('auto', folder), lambda: read(newest),
                        lambda: start(folder, f'{folder}/step_000001.pt', 1),
                        lambda: start(folder, overwrite=True)):
                with pytest.raises(DataError, match=rf'/\w+.pt cannot be read \({os.strerror(number)}'):
                    use()
    assert sorted(os.listdir(folder)) == before
    monkeypatch.setattr('builtins.open', lambda path, *rest, **more: refuse(path))
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        files.read_json(__file__)       # not {}, as of a dataset that is to be prepared again
    monkeypatch.setattr(os, 'listdir', refuse)
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        find('auto', folder)            # not the file of an older step, or none


def test_a_compressed_file_is_refused_before_it_is_inflated(folder):
    path = f'{folder}/latest.pt'
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
        archive.writestr('a/data.pkl', bytes(2**28))
    start = time.perf_counter()
    with pytest.raises(DataError, match='it is compressed'):
        read(path)
    assert table(folder) == [f'{path}  cannot be read'] and not checkpoint.is_ours(path)
    assert time.perf_counter() - start < 0.1


def test_a_device_is_not_replaced(monkeypatch):
    """As /dev/null would be, where root writes."""
    replaced = mock.Mock(side_effect=OSError)
    monkeypatch.setattr(os, 'replace', replaced)
    with pytest.raises(DataError):
        files.write_text('/dev/null', 'text')
    assert not replaced.called


def test_what_is_no_file_is_not_waited_for(folder, tmp_path):
    (tmp_path / 'run').mkdir()
    os.mkfifo(tmp_path / 'latest.pt')
    os.mkfifo(tmp_path / 'log.jsonl')
    (tmp_path / 'step_000001.pt').mkdir()
    assert find('auto', str(tmp_path)) is None
    for name in ('latest.pt', 'step_000001.pt'):
        with pytest.raises(UserError, match=f'there is no checkpoint .*{name}'):
            read(str(tmp_path / name))
    paths = [f'{tmp_path}/{name}' for name in ('latest.pt', 'step_000001.pt')]
    assert table(str(tmp_path)) == [f'{path}  cannot be read' for path in paths]
    with pytest.raises(SettingError, match='holds an earlier run'):     # it would take that step for saved
        start(str(tmp_path))
    start(str(tmp_path), overwrite=True)
    assert {f'{path}.damaged' for path in paths} <= {*map(str, tmp_path.iterdir())}
    save(f'{folder}/run', state(5), keep=0)
    os.mkfifo(f'{folder}/run/best_model.pt')
    assert read(f'{folder}/run/latest.pt')['step'] == 5
