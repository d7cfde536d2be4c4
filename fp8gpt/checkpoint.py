"""Checkpoints: <checkpoint_dir>/step_000250.pt; latest.pt and best_model.pt are further names of such files.

A checkpoint is a dict of tensors, str, int, float, bool, None, lists, tuples and dicts, so that it
loads with weights_only=True: {'step', 'position', 'tokens', 'best_val_loss', 'weights', 'optimizer',
'model_config', 'tokenizer', 'precision', 'config', 'versions'} and, from train_fp8.py, 'fp8_state'; files
from before there were budgets lack 'hours', which optim.Budget counts. With
'lora', not None, its weights are adapters alone: see lora.py. What a run is only to start from may have an
empty 'optimizer'.
It appears under its name only when it is whole and on the disk.

A run saves a step before it evaluates it, so that an evaluation that dies loses nothing. What it learns then
is in best_model.json, {'step', 'best_val_loss'}: the best model's, and `load` gives it from that step on.

Of a sharded model, rank 0 gathers and writes the same file; where its host is too small for that, 'optimizer'
names a folder beside the file, step_000250/, which torch.distributed.checkpoint wrote, and the size and crc32
of each file in it.

A kill between two names leaves latest.pt or best_model.pt behind the step files: then these count, and the
next run on the folder puts the names right.
"""
import dataclasses
import os
import re
import shutil
import time
import zipfile
import zlib

import torch

from fp8gpt import files, optim
from configurator import DataError, MissingError, SettingError
from model import GPT, GPTConfig
from fp8gpt.parallel import rank_0s
from fp8gpt.sharding import folder_damage, for_one_file, is_rank_0, odd_shards, remove_folder, whole

PLAIN = torch.Tensor, torch.nn.Parameter, str, int, float, bool, type(None)
PARTS = {
    'step': int,
    'position': int,
    'tokens': int,
    'best_val_loss': (float, type(None)),
    'weights': dict,
    'optimizer': dict,
    'model_config': dict,
    'tokenizer': str,
    'precision': dict,
    'config': dict,
    'versions': dict,
}
ZIP = b'PK\3\4'  # what a zip file, such as torch.save writes, begins with
NO_ZIP = 'it is no zip file'
FOREIGN = 'is no checkpoint of train.py or train_fp8.py'


def step_path(directory, step):
    """Where a step's checkpoint is."""
    return os.path.join(directory, f'step_{step:06d}.pt')


def folder_of(step):
    """The name of the folder beside a step's checkpoint that has its moments, where they are in shards."""
    return os.path.basename(step_path('', step)).removesuffix('.pt')


def step_of(path):
    """The step in a step file's name; None for another file."""
    match = re.fullmatch(r'step_(\d{6,})\.pt', os.path.basename(path))
    return int(match[1]) if match else None


def _drop_folders(directory):
    """Removes the folders of shards that no checkpoint names any more, and what a kill left of one; a user's
    folder of such a name stays."""
    best = step_path(directory, _best(directory).get('step', -1))
    for entry in list(os.scandir(directory)):
        name = entry.name.removesuffix('.tmp')
        path = os.path.join(directory, f'{name}.pt')
        named = path == best or os.path.exists(path)
        if step_of(path) is not None and (entry.name != name or not named):
            remove_folder(entry.path)


def files_in(directory, ending='.pt'):
    """Paths of a directory's files by that ending, by name; none where there is no directory."""
    names = sorted(os.listdir(directory)) if os.path.isdir(directory) else []
    paths = (os.path.join(directory, name) for name in names if name.endswith(ending))
    return [path for path in paths if os.path.isfile(path)]


def steps_in(directory):
    """Paths of the step files, oldest first."""
    return sorted((path for path in files_in(directory) if step_of(path) is not None), key=step_of)


# ------------------------------------------------------------------------------------------------------- save

def save(directory, state, keep, best=False):
    """All ranks call this; rank 0 writes step_<state['step']>.pt, unless it is there (a run reaches a step
    once), and names it latest.pt and, where `best`, best_model.pt, whose loss is state['best_val_loss']. Then
    removes the oldest step files but `keep` (0 = keep all). Raises DataError on a full disk: what was there
    before is untouched; TypeError for a state that load would not read."""
    path = step_path(directory, state['step'])
    gathered = for_one_file(state, path, agree=rank_0s)
    if not is_rank_0():
        return
    if gathered:
        check_plain(gathered, 'state')
        files.write(path, lambda file: torch.save(gathered, file))
    _link(path, os.path.join(directory, 'latest.pt'))
    if best:
        known = {key: state[key] for key in ('step', 'best_val_loss')}
        files.write_json(os.path.join(directory, 'best_model.json'), known)
    _name_best(directory)
    if keep:
        newest_first = [p for p in reversed(steps_in(directory)) if p != path]
        for old in newest_first[keep - 1:]:
            os.remove(old)
    _drop_folders(directory)


def check_plain(value, name):
    """Raises TypeError for anything but plain tensors, str, int, float, bool, None, lists, tuples and
    dicts: torch.save takes more than weights_only=True gives back, as an 8-bit optimizer's tensors."""
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            check_plain(item, f'{name}[{key!r}]')
    elif type(value) not in PLAIN:
        raise TypeError(f'{name} is of {type(value)}, which a checkpoint cannot give back')


def _link(path, name):
    """Gives a file a second name in one rename; a copy where the file system has no hard links. Raises
    DataError."""
    if os.path.exists(name) and os.path.samefile(path, name):
        return  # renaming one link onto another would leave both
    temporary = name + '.tmp'
    files.remove(temporary)
    try:
        os.link(path, temporary)
        files.rename(temporary, name)
    except OSError:
        files.remove(temporary)
        with open(path, 'rb') as source:
            files.write(name, lambda file: shutil.copyfileobj(source, file, 2**24))


def _best_path(directory):
    """best_model.pt; the step file that best_model.json tells of, where best_model.pt is of another step."""
    path = os.path.join(directory, 'best_model.pt')
    told = _best(directory)
    step_file = told and step_path(directory, told['step'])
    return step_file if step_file and _step_within(path) != told['step'] else path


def _name_best(directory):
    """Makes best_model.pt the file that best_model.json tells of."""
    path, name = _best_path(directory), os.path.join(directory, 'best_model.pt')
    if path != name:
        _link(path, name)


def _best(directory):
    """best_model.json; {} unless best_model.pt or a step file is of its step."""
    told = files.read_json(os.path.join(directory, 'best_model.json'))
    step, loss = told.get('step'), told.get('best_val_loss')
    if type(step) is not int or type(loss) is not float:
        return {}
    there = os.path.isfile(step_path(directory, step))
    return told if there or _step_within(os.path.join(directory, 'best_model.pt')) == step else {}


def _step_within(path):
    """The step that a checkpoint is of; None where it is missing, or cannot be read."""
    try:
        return torch.load(path, map_location='cpu', weights_only=True, mmap=True)['step']
    except Exception:  # whatever torch makes of a damaged file
        return None


# ------------------------------------------------------------------------------------------------------- load

def find(resume, directory, moments=True):
    """The path that `resume` means: '' and an 'auto' without a checkpoint are None, 'latest' and 'auto' the
    directory's newest step that is whole, 'best' its best one; anything else is a path. moments: see damage.
    Raises MissingError."""
    if not resume:
        return None
    path = resume
    if resume in ('latest', 'auto'):
        path = _latest_path(directory, moments)
    elif resume == 'best':
        path = _best_path(directory)
    if os.path.isfile(path):
        return path
    if resume == 'auto':
        return None
    raise MissingError(f'resume={resume}: there is no {path}; '
                       '--resume=auto starts afresh where there is none')


def _latest_path(directory, moments):
    """latest.pt, or the newest step file that is whole, where that is another file."""
    path = os.path.join(directory, 'latest.pt')
    newest = next((p for p in reversed(steps_in(directory)) if not damage(p, moments)), path)
    there = os.path.isfile(path) and os.path.isfile(newest)
    return path if there and os.path.samefile(path, newest) else newest


def load(path, moments=False):
    """The checkpoint at a path, tensors on the CPU, its weights and moments checked by name, shape and dtype.
    moments: whether those in a folder of shards are wanted too; 'optimizer' gets the folder's 'path' then.
    Raises MissingError; DataError where its checksums do not hold (torch.load would take flipped bits), and
    for what is no checkpoint of ours."""
    if not os.path.exists(path):
        raise MissingError(f'there is no checkpoint {path}')
    if not os.path.isfile(path):
        raise DataError(f'{path} is no file, so no checkpoint')
    problem = damage(path, moments)
    if problem:
        wrong = FOREIGN if problem == NO_ZIP else 'is damaged'
        others = [p for p in steps_in(os.path.dirname(path) or '.') if not os.path.samefile(p, path)]
        hint = f'; the one before it is {others[-1]}' if others else ''
        raise DataError(f'{path} {wrong} ({problem}){hint}')
    try:
        state = _read(path)
        problem = misfit(state)
    except Exception as error:  # whatever torch makes of a file that is none of ours
        problem = str(error).split('\n')[0][:100]
    if problem:
        raise DataError(f'{path} {FOREIGN} ({problem})')
    if moments and 'folder' in state['optimizer']:
        state['optimizer']['path'] = os.path.join(os.path.dirname(path), state['optimizer']['folder'])
    return state


def _read(path):
    """What a file holds, its tensors mapped, with the loss of the best model up to its step. Code in it is
    not run. Raises whatever torch does."""
    state = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
    best = _best(os.path.dirname(path))
    if best and best['step'] <= state['step']:
        state['best_val_loss'] = best['best_val_loss']
    return state


def damage(path, moments=True):
    """What is wrong with a checkpoint's file, a clause; None where its checksums hold. moments: whether those
    of its folder of shards, if it has one, are to hold too. Raises DataError where it cannot be read."""
    try:
        with open(path, 'rb') as file:
            start = file.read(len(ZIP))
    except OSError as error:
        raise DataError(f'{path} cannot be read ({error.strerror})') from None
    if not start:
        return 'it is empty'
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except Exception as error:  # zipfile's own, zlib's, struct's, ...: as the damage has it
        if start != ZIP and not zipfile.is_zipfile(path):
            return NO_ZIP
        return ' '.join(str(error).split()) or type(error).__name__
    if bad:
        return f'the checksum of {bad} does not hold'
    return _shards_damage(path) if moments else None


def _shards_damage(path):
    """folder_damage of a checkpoint's folder of shards. None where it has none, or is none of ours."""
    try:
        state = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
        shards = state['optimizer']
        if 'folder' not in shards or odd_shards(shards, folder_of(state['step'])):
            return None
    except Exception:  # whatever torch makes of a file that is none of ours: load says so
        return None
    return folder_damage(shards, os.path.dirname(path))


def misfit(state):
    """Why a run cannot go on from what a file holds, a clause; None where it can. Whoever loads the weights,
    moments and FP8 state after this finds their names, shapes and dtypes as they are to be."""
    for name, kind in PARTS.items():
        if name not in state:
            return f'it has no {name}'
        if not isinstance(state[name], kind) or isinstance(state[name], bool):
            return f'its {name} is of another type'
    for name in 'name', 'reason':
        if not isinstance(state['precision'].get(name), str):
            return f'its precision has no {name}'
    model_config = state['model_config']
    for field in dataclasses.fields(GPTConfig):
        if type(model_config.get(field.name, field.default)) is not field.type:
            return f'its {field.name} is of another type'
    config = GPTConfig(**model_config)
    if config.n_layer > len(state['weights']):
        return f'it has fewer weights than its {config.n_layer} layers'
    shapes, in_bf16 = weight_shapes(config), state['config'].get('param_dtype') == 'bf16'
    if state.get('lora'):  # of adapters, in fp32; lora.py knows what they are to be
        shapes, in_bf16 = {name: tuple(p.shape) for name, p in state['weights'].items()}, False
    weights = {name: (shape, torch.bfloat16 if in_bf16 else torch.float32) for name, shape in shapes.items()}
    return _odd(state['weights'], weights, 'weights') or _odd_moments(state, weights) \
        or _odd_fp8_state(state.get('fp8_state'))


def weight_shapes(config):
    """name -> shape of a GPT's weights."""
    with torch.device('meta'):
        return {name: tuple(p.shape) for name, p in GPT(config).weights().items()}


def fingerprint(model):
    """Of a GPT's weights: a checksum of a thousand values of each, in bf16, whatever dtype they have."""
    crc = 0
    for p in model.weights().values():
        values = whole(p.detach()).flatten()
        some = values[::len(values) // 1000 + 1].bfloat16().cpu().contiguous()
        crc = zlib.crc32(some.view(torch.int16).numpy(), crc)
    return f'{crc:08x}'


def _odd(found, wanted, what):
    """How tensors differ from {name: (shape, dtype)}, a clause; None where they do not."""
    if not isinstance(found, dict):
        return f'its {what} are of another type'
    names = sorted(map(str, found.keys() ^ wanted.keys()))
    if names:
        return f'{len(names)} names of its {what} are missing or too many, {names[0]} first'
    for name, (shape, dtype) in wanted.items():
        tensor = found[name]
        plain = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
        if not plain or tuple(tensor.shape) != shape or tensor.dtype != dtype:
            return f'in its {what}, {name} is of another shape or type'
    return None


def _odd_moments(state, weights):
    """_odd of AdamW's state, by the weights' shapes; a checkpoint to start from alone has none. torch would
    not check it, and crash."""
    found, optimizer = state['optimizer'], state['config'].get('optimizer', 'adamw')
    if 'folder' in found:
        return odd_shards(found, folder_of(state['step']))
    if not found:
        return None
    names = sorted(map(str, found.keys() ^ weights.keys()))
    if names:
        return f'moments of {len(names)} weights are missing or too many, {names[0]} first'
    for name, (shape, _) in weights.items():
        odd = _odd(found[name], optim.state_of(shape, optimizer), f'moments of {name}')
        if odd:
            return odd
    return None


def _odd_fp8_state(saved):
    """_odd of fp8.State's; a run without delayed scaling has none."""
    if not saved:
        return None
    if type(saved['steps']) is not int or type(saved['divisor']) is not int:
        return 'its fp8_state is of another type'
    scale = len(saved['layers']), 3
    tensors = {'history': ((len(saved['history']), *scale), torch.float32), 'scale': (scale, torch.float32)}
    return _odd({name: saved[name] for name in tensors}, tensors, 'fp8_state')


# ------------------------------------------------------------------------------------------------ a directory

def start(directory, resumed_from, resumed_step, overwrite):
    """Makes the directory and locks it for this run: keep the returned file open.

    resumed_from: path of the checkpoint that the run goes on from, or None. Raises DataError where
    another run holds the directory, and SettingError where the run would mix with an earlier one's
    checkpoints: any, for a new run, or later ones than it resumes from. `overwrite` removes
    those; later ones that are damaged are set aside."""
    os.makedirs(directory, exist_ok=True)
    lock = _lock(directory)
    for leftover in files_in(directory, '.tmp'):
        os.remove(leftover)
    for path in _in_the_way(directory, resumed_from, resumed_step, overwrite):
        os.remove(path)
    if _is_in(directory, resumed_from):
        _name_best(directory)
        current, latest = step_path(directory, resumed_step), os.path.join(directory, 'latest.pt')
        if os.path.isfile(current) and _step_within(latest) != resumed_step:
            _link(current, latest)
    else:
        files.remove(os.path.join(directory, 'best_model.json'))
    _drop_folders(directory)
    return lock


def check(directory, resumed_from, resumed_step, overwrite):
    """Raises what start would raise: before a run computes for minutes, and makes nothing."""
    if os.path.isdir(directory):
        with _lock(directory):
            _in_the_way(directory, resumed_from, resumed_step, overwrite)


def _lock(directory):
    refusal = f'another run is writing to {directory}: give this one another --checkpoint_dir'
    return files.lock(os.path.join(directory, '.lock'), refusal)


def _is_in(directory, path):
    return path and os.path.samefile(os.path.dirname(path) or '.', directory)


def _in_the_way(directory, resumed_from, resumed_step, overwrite):
    """Paths of the checkpoints that a run would mix with. Raises SettingError where they may not go."""
    what, old = 'an earlier run', files_in(directory)
    if _is_in(directory, resumed_from):
        what, old = 'later checkpoints', _later(directory, resumed_step)
    if old and not overwrite:
        raise SettingError(f'{directory} holds {what}, {os.path.basename(max(old, key=_age))}: '
                           '--resume=latest goes on with it, --checkpoint_dir=... starts elsewhere, '
                           '--overwrite removes it')
    return old


def _age(path):
    """Sorts step files behind other names, by step."""
    return step_of(path) or -1


def _later(directory, step):
    """Paths of the whole step files behind a step. The run that comes by writes those steps again, so damaged
    ones get another name."""
    whole = []
    for path in steps_in(directory):
        if step_of(path) > step:
            problem = damage(path)
            if problem:
                os.replace(path, f'{path}.damaged')
                print(f'{path} is damaged ({problem}): set aside as {path}.damaged', flush=True)
            else:
                whole.append(path)
    return whole


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
    for path in files_in(directory):
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
