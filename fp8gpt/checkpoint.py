"""Checkpoints: <checkpoint_dir>/step_000250.pt; latest.pt and best_model.pt are hard links to such files.

A checkpoint is a dict of tensors, str, int, float, bool, None, lists, tuples and dicts, so that it loads with
weights_only=True. It has the parts in PARTS, and others, which train.py's `save` lists and older files lack:
'position' is in sequences, 'hours' are those that optim.Budget counted, 'measured_on' is what best_val_loss
is of. Where 'lora' is not None, the weights are adapters alone: see lora.py. A checkpoint that a run only
starts from may have an empty 'optimizer'. A file appears under its name only when it is whole and on the
disk. Of a sharded model, rank 0 gathers and writes the same file.

A run saves a step before it evaluates it, so that an evaluation that dies loses nothing. The loss of the best
model is in best_model.json, {'step', 'best_val_loss', 'measured_on'}, and `load` fills it in from there on.

After a kill between two names latest.pt may be older than the newest step file; `find` then takes the step
file. After a kill between best_model.pt and best_model.json the best loss is that in the checkpoint itself.
"""
import contextlib
import errno
import functools
import glob
import itertools
import math
import os
import re
import shutil
import zipfile
import zlib
from os.path import (
    basename, dirname, exists, isdir, isfile, join, lexists, samefile)

import torch

from configurator import DataError, MissingError, SettingError, first_line, printable, say
from fp8gpt import files
from fp8gpt.distributed import (
    copies_take_parts, is_first_of_node, is_rank_0, is_sharded, on_rank_0, rank_0s, whole)
from model import GPT, GPTConfig

FORMAT = 1      # of a checkpoint; a larger one's parts are not known here
PARTS = {'step', 'position', 'tokens', 'best_val_loss', 'weights', 'optimizer', 'model_config', 'tokenizer',
         'precision', 'config'}


def step_path(directory, step):
    """Return the path of a step's checkpoint."""
    return join(directory, f'step_{step:06d}.pt')


def files_in(directory):
    """Return the paths of a directory's *.pt, by name; none where there is no directory. Some may be no
    files. Raises OSError for a directory that cannot be read."""
    names = sorted(os.listdir(directory)) if isdir(directory) else ()
    return [join(directory, name) for name in names if name.endswith('.pt')]


def steps_in(directory):
    """Return {step: path} of the step files, oldest first."""
    found = {}
    for path in files_in(directory):
        if match := re.fullmatch(r'step_(\d{6,})\.pt', basename(path)):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def _all_steps(directory):
    """Return {path: step} of a directory's files, the oldest step first; of one step its own file last. The
    others may be copies, or their step file may be gone."""
    found = {}
    for path in _links_in(directory):
        with contextlib.suppress(Exception):    # torch raises many kinds for another program's file
            found[path] = int(_mapped(path)['step'])
    found |= {path: step for step, path in steps_in(directory).items()}
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


def _links_in(directory):
    return [*filter(lexists, (join(directory, name) for name in ('best_model.pt', 'latest.pt')))]


# ------------------------------------------------------------------------------------------------------- save

def save(directory, state, keep, best=False, before=0, lock=None):
    """Write step_<state['step']>.pt on rank 0, unless it is there (a run reaches a step once), and name it
    latest.pt and, where `best`, best_model.pt, whose loss is state['best_val_loss']. Then remove the oldest
    step files but `keep` (0 = keep all) and the newest up to the step `before`; on a full disk these first.
    All ranks call this, and wait for rank 0. Raises DataError, there, where that makes no room: the newest
    files are untouched; and what lock.check raises, before anything is written."""
    if not rank_0s(exists(step_path(directory, state['step']))):
        state = gathered(state)
    if problem := on_rank_0(functools.partial(
            _write, directory, state, keep, best=best, before=before, lock=lock)):
        raise problem


def _write(directory, state, keep, best, before, lock):
    """Write and remove what `save` does. Return the OSError that ends this, which the other ranks must not
    wait for."""
    if lock:
        lock.check()
    path = step_path(directory, state['step'])
    fill = functools.partial(torch.save, {'format': FORMAT, **state})
    try:
        try:
            if not exists(path):
                files.write(path, fill)
        except DataError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, None)     # None: torch kept the reason
            if not is_full or keep < 2 or not _remove_oldest(directory, keep - 1, before):
                raise
            files.write(path, fill)
        _link(path, join(directory, 'latest.pt'))
        if best:
            _link(path, join(directory, 'best_model.pt'))
            known = {key: state.get(key) for key in ('step', 'best_val_loss', 'measured_on')}
            files.write_json(join(directory, 'best_model.json'), known)
        if keep:
            _remove_oldest(directory, keep, before)
    except OSError as error:
        return error


def _remove_oldest(directory, keep, before):
    """Remove the oldest step files but `keep` and the newest up to the step `before`, if that is not 0.
    Return the paths of those removed."""
    steps = steps_in(directory)
    # max_hours estimates `before`: the first step after it, where none is left before it
    kept = max((step for step in steps if step <= before), default=min(steps, default=0)) if before else None
    old = [path for path in [*steps.values()][:-keep] if path != steps.get(kept) and is_ours(path)]
    for path in old:
        os.remove(path)
    return old


def gathered(state):
    """Return nested dicts with each sharded tensor whole: on rank 0's CPU, None on other ranks. All ranks
    call this. They gather one tensor at a time, so that a GPU holds one whole tensor. The memory of rank 0's
    host has to take the state: with fp32 weights and AdamW 12 bytes per parameter, 96 GB for Llama 3.1 8B and
    847 GB for 70B."""
    if isinstance(state, dict):
        return {name: gathered(value) for name, value in state.items()}
    if not is_sharded(state):
        return state
    tensor = whole(state.detach())
    return tensor.cpu() if is_rank_0() else None


def _link(path, name):
    """Give a file a second name in one rename; a copy where the file system has no hard links. Raises
    DataError."""
    if exists(name) and samefile(path, name):
        return  # renaming one link onto another would leave both
    temporary = files.temporary_name(name)
    try:
        os.link(path, temporary)
        files.rename(temporary, name)
    except OSError:
        files.remove(temporary)
        with open(path, 'rb') as source:
            files.write(name, lambda file: shutil.copyfileobj(source, file, 2**24))


# ------------------------------------------------------------------------------------------------------- load

def find(resume, directory):
    """Return the path that `resume` means: None for '' and for an 'auto' without a checkpoint; for 'latest'
    and 'auto' the directory's whole file of the highest step, for 'best' its best model; else a path. Raises
    MissingError."""
    path = resume
    if resume in ('latest', 'auto'):
        whole_ones = itertools.filterfalse(damage, reversed(_all_steps(directory)))
        path = next(whole_ones, join(directory, 'latest.pt'))
    elif resume == 'best':
        path = join(directory, 'best_model.pt')
    path = files.checkpoint_of(path)
    if isfile(path):
        return path
    if resume in ('', 'auto'):
        return None
    raise MissingError(f'resume={resume}: there is no {path}{files.checkpoints()}; '
                       '--resume=auto starts afresh where there is none')


def read(path):
    """Return the checkpoint at a path, tensors mapped on the CPU, its weights checked by name, shape and
    dtype. Raises MissingError; DataError where its checksums do not hold (torch.load would take flipped
    bits), and for what is no checkpoint of ours."""
    path = files.checkpoint_file(path)
    problem = is_first_of_node() and damage(path)
    if problem:
        raise DataError(f'{path} is damaged, or no checkpoint ({problem}): in a run, --resume=latest takes '
                        'the newest whole one; where there is none, --overwrite starts afresh; a Hugging '
                        'Face model is named by its folder')
    try:
        state = _mapped(path)
        _check_parts(state)
    except Exception as error:  # torch raises many kinds for another program's file
        problem = first_line(error)
        raise DataError(f'{path} is no checkpoint of train.py or train_fp8.py ({problem})') from None
    best_model = join(dirname(path), 'best_model')
    with contextlib.suppress(Exception):    # of the two files one is missing, or cannot be read
        step = _mapped(files.checkpoint_file(f'{best_model}.pt'))['step']
        best = files.read_json(f'{best_model}.json')
        alike = best.get('measured_on') == state.get('measured_on')
        if alike and best['step'] == step <= state['step'] and math.isfinite(best['best_val_loss']):
            state['best_val_loss'] = best['best_val_loss']
    return state


def check_name(path, step):
    """Raise DataError where a file of this step has another step's name, by which a run would count it."""
    own, name = step_path('', step), basename(path)
    if re.fullmatch(r'step_\d+\.pt', name) and name != own:
        raise DataError(f'{path} is of step {step}: rename it {own}')


def _mapped(path):
    """Return the content of a file, its tensors mapped. Its code is not run. Raises ValueError for what is no
    file, or compressed, and any error of torch."""
    if problem := _unfit(path):
        raise ValueError(problem)
    return torch.load(path, map_location='cpu', weights_only=True, mmap=True)


def _unfit(path):
    """Return why a file is not opened, as a clause; None for a zip of stored entries. Raises zipfile's
    errors."""
    if not isfile(path):
        return 'it is no file'      # a pipe would be waited for
    with zipfile.ZipFile(path) as archive:
        if any(entry.compress_type for entry in archive.infolist()):
            return 'it is compressed'       # torch stores; a stranger's 6 MB may grow to 6 GB


def damage(path):
    """Return what is wrong with a checkpoint's file, as a clause; None where its checksums are right. A file
    that has not changed is read once. Raises DataError where it cannot be read: it may be whole."""
    about = os.lstat(path)
    return _damage(path, about.st_size, about.st_mtime_ns)


@functools.cache
def _damage(path, size, changed):
    try:
        if problem := _unfit(path):
            return problem
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except Exception as error:  # zipfile's own, zlib's, ...: as the damage has it
        _raise_if_unreadable(path, error)
        return first_line(error)
    return bad and f'the checksum of {bad} does not hold'


def crc32(path):
    """Return a checksum of the checksums in a checkpoint's file."""
    with zipfile.ZipFile(path) as archive:
        return zlib.crc32(repr([entry.CRC for entry in archive.infolist()]).encode())


def _raise_if_unreadable(path, error):
    """Raise DataError where an error is the system's, of no permission, a failing disk, too many open files,
    and says nothing about the file's content. EINVAL is of a place that a damaged file names."""
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
        raise DataError(f'{path} cannot be read ({error.strerror})') from error


def _check_parts(state):
    """Raise an error of any kind unless a file holds a checkpoint's parts and a GPT's weights."""
    if state.get('format', 1) > FORMAT:
        raise ValueError('a later version of this repository wrote it')
    if lacks := PARTS - state.keys():
        raise ValueError(f'it has no {min(lacks)}')
    if not state.get('lora'):   # lora.py knows what adapters are to be
        check_shapes(shapes_of(state['weights']), weight_shapes(GPTConfig(**state['model_config'])))


def check_shapes(found, wanted):
    """Raise ValueError unless two dicts {name: shape} are equal."""
    if odd := sorted(dict(found.items() ^ wanted.items())):
        raise ValueError(f'{len(odd)} tensors are missing, too many or of another shape, {odd[0]} first')


@torch.no_grad()
def load_moments(moments, saved):
    """Copy a checkpoint's 'optimizer' into `moments`, see optim.named_state, on any number of ranks: each
    reads its own rows. Raises DataError where it is another model's or optimizer's."""
    try:
        source, target = _flat(saved), _flat(moments)
        check_shapes(shapes_of(source), shapes_of(target))
        for name, tensor in target.items():
            with copies_take_parts():
                tensor.copy_(source[name])
    except Exception as error:  # torch raises many kinds for another program's file
        raise DataError(f'the checkpoint does not fit this optimizer ({first_line(error)}): '
                        '--init_from=CHECKPOINT starts anew from its weights') from None


def _flat(state):
    """Return {'weight, key': tensor} of an optimizer's state by weight and key."""
    return {f'{name}, {key}': tensor for name, kept in state.items() for key, tensor in kept.items()}


def shapes_of(tensors):
    """Return {name: shape} of {name: tensor}."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def weight_shapes(config):
    """Return {name: shape} of a GPT's weights."""
    with torch.device('meta'):
        return shapes_of(GPT(config, seed=None).weights())


# ------------------------------------------------------------------------------------------------ a directory

def lock_directory(config):
    """Return the Lock of a run's checkpoint_dir, taken where the folder exists; None for a run that writes
    nothing. Raises SettingError for a folder that cannot be used, and what Lock.take raises."""
    directory = config['checkpoint_dir']
    if config['dry_run'] or config['eval_only']:
        return None
    is_other = lexists(directory) and not isdir(directory)
    if is_other or not os.access(files.nearest_folder(directory), os.W_OK | os.X_OK):
        raise SettingError(f'checkpoint_dir={directory} is no folder, or cannot be written: name another')
    if os.fsencode(directory) != directory.encode(errors='replace'):
        raise SettingError(f'checkpoint_dir={directory} is not UTF-8 here, and torch.load opens no '
                           'such path: name another, or set LC_ALL=C.UTF-8')
    lock = files.Lock(join(directory, '.lock'),
                      f'another run is writing to {directory}: give this one another --checkpoint_dir')
    if isdir(directory):
        lock.take()
    return lock


def start_directory(directory, lock, resumed_from, resumed_step, overwrite):
    """Make the directory for this run, and take its lock. Raises what check_directory and Lock.take raise."""
    os.makedirs(directory, exist_ok=True)
    lock.take()
    in_the_way = check_directory(directory, resumed_from, resumed_step, overwrite)
    for path in [*files.temporary_names(join(glob.escape(directory), '*')), *in_the_way]:
        os.remove(path)
    current = step_path(directory, resumed_step)
    if not isfile(join(directory, 'best_model.pt')):
        files.remove(join(directory, 'best_model.json'))
    if files.is_in(directory, resumed_from) and isfile(current):
        _link(current, join(directory, 'latest.pt'))


def is_ours(path):
    """Return whether a file's content says that a run of train.py or train_fp8.py wrote it."""
    try:
        return {'step', 'weights', 'model_config'} <= _mapped(path).keys()
    except Exception as error:      # torch raises many kinds for another program's file
        _raise_if_unreadable(path, error)
        return False


def check_directory(directory, resumed_from, resumed_step, overwrite):
    """Return the paths of the checkpoints that a run would mix with: any, for a new run, or later ones than
    it resumes from. Those that are damaged, or that no run of ours wrote, get another name, since the run
    will write them again. Raises SettingError unless `overwrite` says that the others may go.

    resumed_from: path of the checkpoint that the run resumes from, or None."""
    is_resumed = files.is_in(directory, resumed_from)
    if is_resumed:
        what, steps = 'later checkpoints', _all_steps(directory)
        named = [path for path, step in steps.items() if step > resumed_step]
    else:
        what, named = 'an earlier run', [*_links_in(directory), *steps_in(directory).values()]
    others = [path for path in named if not is_ours(path) or is_resumed and damage(path)]
    old = [path for path in named if path not in others]
    if (old if is_resumed else named) and not overwrite:
        raise SettingError(f'{directory} holds {what}, {basename((old or named)[-1])}: '
                           '--resume=latest resumes it, --checkpoint_dir=... starts elsewhere, '
                           '--overwrite removes it')
    for path in others:
        aside = files.set_aside(path, '.damaged')
        say(f'{path} is damaged, or no checkpoint: set aside as {aside}')
    return old


def table(directory):
    """Return the lines that list a directory's checkpoints, each with its step's validation loss in the log.
    """
    lines = []
    losses = {record['step']: f'{record["val/loss"]:.4f}'
              for record in files.read_log(join(directory, 'log.jsonl'))
              if isinstance(record.get('val/loss'), float)}
    for path in sorted(files_in(directory), key=len):   # step 1,000,000 after 999,999
        try:
            state = _mapped(path)
            lines.append(f'{path}  step {state["step"]:>6}  tokens {state["tokens"]:>13,}  '
                         f'val loss {losses.get(state["step"], "-"):>7}  {state["precision"]["name"]}')
        except Exception:  # torch raises many kinds for another program's file
            lines.append(f'{path}  cannot be read')
    return [printable(line) for line in lines] or [f'no checkpoints in {directory}']
