"""Checkpoints: <checkpoint_dir>/step_000250.pt; latest.pt and best_model.pt are further names of such files.

A checkpoint is a dict of tensors, str, int, float, bool, None, lists, tuples and dicts, so that it
loads with weights_only=True: {'step', 'position', 'tokens', 'best_val_loss', 'weights', 'optimizer',
'model_config', 'tokenizer', 'precision', 'config', 'versions'} and, from train_fp8.py, 'fp8_state'.
It appears under its name only when it is whole and on the disk.

A run saves a step before it evaluates it, so that an evaluation that dies loses nothing. What it learns then
is in best_model.json, {'step', 'best_val_loss'}: the best model's, and `load` gives it from that step on.
"""
import contextlib
import fcntl
import glob
import json
import os
import shutil
import time
import zipfile

import torch

from configurator import DataError, MissingError, SettingError

PLAIN = torch.Tensor, torch.nn.Parameter, str, int, float, bool, type(None)


def step_path(directory, step):
    """Where a step's checkpoint is."""
    return os.path.join(directory, f'step_{step:06d}.pt')


def steps_in(directory):
    """Paths of the step files, oldest first."""
    return sorted(glob.glob(os.path.join(directory, 'step_*.pt')))


def save(directory, state, keep, best=False):
    """Writes step_<state['step']>.pt, unless it is there (a run reaches a step once), and names it
    latest.pt and, where `best`, best_model.pt, whose loss is state['best_val_loss']. Then removes the
    oldest step files but `keep` (0 = keep all). Raises DataError on a full disk: what was there before is
    untouched; TypeError for a state that load would not read."""
    check_plain(state, 'state')
    path = step_path(directory, state['step'])
    if not os.path.exists(path):
        _write(path, lambda file: torch.save(state, file))
    _link(path, os.path.join(directory, 'latest.pt'))
    if best:  # its loss first: it counts once best_model.pt is of that step
        known = json.dumps({key: state[key] for key in ('step', 'best_val_loss')})
        _write(os.path.join(directory, 'best_model.json'), lambda file: file.write(known.encode()))
        _link(path, os.path.join(directory, 'best_model.pt'))
    if keep:
        newest_first = [p for p in reversed(steps_in(directory)) if p != path]
        for old in newest_first[keep - 1:]:
            os.remove(old)


def check_plain(value, name):
    """Raises TypeError for anything but plain tensors, str, int, float, bool, None, lists, tuples and
    dicts: torch.save takes more than weights_only=True gives back, as an 8-bit optimizer's tensors."""
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            check_plain(item, f'{name}[{key!r}]')
    elif type(value) not in PLAIN:
        raise TypeError(f'{name} is of {type(value)}, which a checkpoint cannot give back')


def _write(path, fill):
    """Writes a file whole, to the disk, or not at all. fill(file) writes its content."""
    temporary = path + '.tmp'
    try:
        with open(temporary, 'wb') as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch wraps a failed write in a RuntimeError
        if os.path.exists(temporary):
            os.remove(temporary)
        free = shutil.disk_usage(os.path.dirname(path)).free
        why = f'{str(error).splitlines()[0]}; {free / 1e9:.2f} GB free'
        raise DataError(f'could not write {path} ({why})') from error


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
    """The path that `resume` means: '' and an 'auto' without a checkpoint are None, 'latest' and
    'best' are looked for in the directory, anything else is a path. Raises MissingError."""
    if not resume:
        return None
    names = {'latest': 'latest.pt', 'auto': 'latest.pt', 'best': 'best_model.pt'}
    path = os.path.join(directory, names[resume]) if resume in names else resume
    if os.path.isfile(path):
        return path
    if resume == 'auto':
        return None
    raise MissingError(f'resume={resume}: there is no {path}; '
                       '--resume=auto starts afresh where there is none')


def load(path):
    """The checkpoint at a path, tensors on the CPU. Raises MissingError, or DataError where its
    checksums do not hold (torch.load would take flipped bits)."""
    if not os.path.isfile(path):
        raise MissingError(f'there is no checkpoint {path}')
    problem = _damage(path)
    if problem:
        line = f'{path} is damaged ({problem})'
        directory = os.path.dirname(path) or '.'
        others = [p for p in steps_in(directory) if not os.path.samefile(p, path)]
        if others:
            line += f'; the one before it is {others[-1]}'
        raise DataError(line)
    return _read(path)


def _read(path):
    """The checkpoint at a path, its tensors mapped, with the loss of the best model up to its step."""
    state = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
    best = _best(os.path.dirname(path))
    if best and best['step'] <= state['step']:
        state['best_val_loss'] = best['best_val_loss']
    return state


def _best(directory):
    """best_model.json; None where it is not of the step that best_model.pt is of, as after a kill between
    the two."""
    path = os.path.join(directory, 'best_model')
    try:
        with open(path + '.json') as file:
            best = json.load(file)
        state = torch.load(path + '.pt', map_location='cpu', weights_only=True, mmap=True)
        return best if best['step'] == state['step'] else None
    except Exception:  # missing, or whatever torch makes of a damaged file
        return None


def _damage(path):
    """What is wrong with a zip file, a clause; None where its checksums hold."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        return str(error)
    return f'the checksum of {bad} does not hold' if bad else None


def start(directory, resumed_from, resumed_step, overwrite):
    """Makes the directory and locks it for this run: keep the returned file open.

    resumed_from: path of the checkpoint that the run goes on from, or None. Raises DataError where
    another run holds the directory, and SettingError where the run would mix with an earlier one's
    checkpoints: any, for a new run, or later ones than it resumes from. `overwrite` removes
    those."""
    os.makedirs(directory, exist_ok=True)
    lock = open(os.path.join(directory, '.lock'), 'w')
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        problem = f'another run is writing to {directory}: give this one another --checkpoint_dir'
        raise DataError(problem) from None
    for leftover in glob.glob(os.path.join(directory, '*.tmp')):
        os.remove(leftover)
    if resumed_from and os.path.samefile(os.path.dirname(resumed_from) or '.', directory):
        what = 'later checkpoints'
        old = [p for p in steps_in(directory) if p > step_path(directory, resumed_step)]
    else:
        what = 'an earlier run'
        old = glob.glob(os.path.join(directory, '*.pt'))
    if old and not overwrite:
        raise SettingError(f'{directory} holds {what}, {os.path.basename(max(old))}: '
                           '--resume=latest goes on with it, --checkpoint_dir=... starts elsewhere, '
                           '--overwrite removes it')
    for path in old:
        os.remove(path)
    if old and what == 'an earlier run':
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(directory, 'best_model.json'))
    return lock


def room_warning(directory, state_bytes, keep):
    """A line where the disk has no room for `keep` checkpoints (0: one), one more being written and
    the best; else None. state_bytes: of one checkpoint."""
    needed = state_bytes * ((keep or 1) + 2)
    free = shutil.disk_usage(directory).free
    if free < needed:
        sizes = f'{needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free'
        return f'disk: checkpoints here may take {sizes}'


def table(directory):
    """Lines that list a directory's checkpoints."""
    lines = []
    for path in sorted(glob.glob(os.path.join(directory, '*.pt'))):
        try:
            lines.append(_row(path))
        except Exception:  # whatever torch makes of a file that is none of ours
            lines.append(f'{path}  cannot be read')
    return lines or [f'no checkpoints in {directory}']


def _row(path):
    state = _read(path)
    loss = state['best_val_loss']
    best = '-' if loss is None else f'{loss:.4f}'
    written = time.localtime(os.path.getmtime(path))
    return (f'{path}  step {state["step"]:>6}  tokens {state["tokens"]:>13,}  '
            f'best val loss {best:>7}  {state["precision"]["name"]}  '
            f'{os.path.getsize(path) / 1e6:,.0f} MB  {time.strftime("%Y-%m-%d %H:%M", written)}')
