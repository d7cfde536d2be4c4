"""Checkpoints: <checkpoint_dir>/step_000250.pt, with latest.pt and best_model.pt as further names of the same files.

A checkpoint is a dict of tensors, str, int, float, bool, None, lists, tuples and dicts, so that it loads with
weights_only=True: {'step', 'position', 'tokens', 'best_val_loss', 'weights', 'optimizer', 'model_config', 'tokenizer',
'precision', 'config', 'versions'} and, from train_fp8.py, 'fp8_state'. It appears under its name only when it is whole and
on the disk.
"""
import fcntl
import glob
import os
import shutil
import time
import zipfile

import torch

from configurator import DataError, MissingError, SettingError


def step_path(directory, step):
    return os.path.join(directory, f'step_{step:06d}.pt')


def steps_in(directory):
    """Paths of the step files, oldest first."""
    return sorted(glob.glob(os.path.join(directory, 'step_*.pt')))


def save(directory, state, keep, best=False):
    """Writes step_<state['step']>.pt, unless it is there (a run reaches a step once; a new best, known only after that save,
    is written again), and names it latest.pt and, where `best`, best_model.pt. Then removes the oldest step files but `keep`
    (0 = keep all). Raises OSError on a full disk: what was there before is untouched."""
    path = step_path(directory, state['step'])
    if best or not os.path.exists(path):
        try:
            with open(path + '.tmp', 'wb') as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(path + '.tmp', path)
        except (OSError, RuntimeError) as error:  # torch wraps a failed write in a RuntimeError
            if os.path.exists(path + '.tmp'):
                os.remove(path + '.tmp')
            free = shutil.disk_usage(directory).free
            raise DataError(f'could not write {path} ({str(error).splitlines()[0]}; {free / 1e9:.2f} GB free)') from error
    _link(path, os.path.join(directory, 'latest.pt'))
    if best:
        _link(path, os.path.join(directory, 'best_model.pt'))
    for old in [p for p in steps_in(directory) if p != path][:-(keep - 1) or None] if keep else []:
        os.remove(old)


def _link(path, name):
    """Gives a file a second name in one rename; a copy where the file system has no hard links."""
    if os.path.exists(name) and os.path.samefile(path, name):
        return  # renaming one link onto another would leave both
    temporary = name + '.tmp'
    try:
        os.link(path, temporary)
    except OSError:
        shutil.copyfile(path, temporary)
    os.replace(temporary, name)


def find(resume, directory):
    """The path that `resume` means: '' and an 'auto' without a checkpoint are None, 'latest' and 'best' are looked for in
    the directory, anything else is a path. Raises FileNotFoundError."""
    if not resume:
        return None
    names = {'latest': 'latest.pt', 'auto': 'latest.pt', 'best': 'best_model.pt'}
    path = os.path.join(directory, names[resume]) if resume in names else resume
    if os.path.isfile(path):
        return path
    if resume == 'auto':
        return None
    raise MissingError(f'resume={resume}: there is no {path}; --resume=auto starts afresh where there is none')


def load(path):
    """The checkpoint at a path, tensors on the CPU. Raises FileNotFoundError, or OSError where its checksums do not hold
    (torch.load would take flipped bits)."""
    if not os.path.isfile(path):
        raise MissingError(f'there is no checkpoint {path}')
    problem = None
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
        problem = bad and f'the checksum of {bad} does not hold'
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        problem = str(error)
    if problem:
        others = [p for p in steps_in(os.path.dirname(path) or '.') if not os.path.samefile(p, path)]
        raise DataError(f'{path} is damaged ({problem})' + (f'; the one before it is {others[-1]}' if others else ''))
    return torch.load(path, map_location='cpu', weights_only=True, mmap=True)


def start(directory, resumed_from, resumed_step, overwrite):
    """Makes the directory and locks it for this run: keep the returned file open.

    resumed_from: path of the checkpoint that the run goes on from, or None. Raises OSError where another run holds the
    directory, and ValueError where the run would mix with an earlier one's checkpoints: any, for a new run, or later ones
    than it resumes from. `overwrite` removes those."""
    os.makedirs(directory, exist_ok=True)
    lock = open(os.path.join(directory, '.lock'), 'w')
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise DataError(f'another run is writing to {directory}: give this one another --checkpoint_dir') from None
    for leftover in glob.glob(os.path.join(directory, '*.tmp')):
        os.remove(leftover)
    own = resumed_from and os.path.samefile(os.path.dirname(resumed_from) or '.', directory)
    old = [p for p in steps_in(directory) if p > step_path(directory, resumed_step)] if own else glob.glob(os.path.join(directory, '*.pt'))
    if old and not overwrite:
        raise SettingError(f'{directory} holds {"later checkpoints, " if own else "an earlier run, "}{os.path.basename(sorted(old)[-1])}: '
                         '--resume=latest goes on with it, --checkpoint_dir=... starts elsewhere, --overwrite removes it')
    for path in old:
        os.remove(path)
    return lock


def room_warning(directory, state_bytes, keep):
    """A line where the disk has no room for `keep` checkpoints (0: one), one more being written and the best; else None."""
    needed, free = state_bytes * ((keep or 1) + 2), shutil.disk_usage(directory).free
    if free < needed:
        return f'disk: checkpoints here may take {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free'


def table(directory):
    """Lines that list a directory's checkpoints."""
    lines = []
    for path in sorted(glob.glob(os.path.join(directory, '*.pt'))):
        try:
            state = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
            loss = state['best_val_loss']
            lines.append(f'{path}  step {state["step"]:>6}  tokens {state["tokens"]:>13,}  best val loss '
                         f'{"-" if loss is None else format(loss, ".4f"):>7}  {state["precision"]["name"]}  '
                         f'{os.path.getsize(path) / 1e6:,.0f} MB  {time.strftime("%Y-%m-%d %H:%M", time.localtime(os.path.getmtime(path)))}')
        except Exception:  # whatever torch makes of a file that is none of ours
            lines.append(f'{path}  cannot be read')
    return lines or [f'no checkpoints in {directory}']
