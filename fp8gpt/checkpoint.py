"""Checkpoints: <checkpoint_dir>/step_000250.pt; latest.pt and best_model.pt are hard links to such files.

A checkpoint is a dict of tensors, str, int, float, bool, None, lists, tuples and dicts, so that it loads with
weights_only=True. It has the parts in PARTS and, from train_fp8.py, 'fp8_state'; 'hours' are those that
optim.Budget counted (older files lack it). Where 'lora' is not None, the weights are adapters alone: see
lora.py. A checkpoint that a run only starts from may have an empty 'optimizer'. A file appears under its name
only when it is whole and on the disk.

A run saves a step before it evaluates it, so that an evaluation that dies loses nothing. The loss of the best
model is in best_model.json, {'step', 'best_val_loss'}, and `load` fills it in from that step on.

Of a sharded model, rank 0 gathers and writes the same file. Where its host is too small for that, each rank
writes its rows of the moments to a file in the folder step_000250/ beside it, and 'optimizer' is {'ranks':
their number}.

After a kill between two names latest.pt may be older than the newest step file; `find` then takes the step
file. After a kill between best_model.pt and best_model.json the best loss is that in the checkpoint itself.
"""
import glob
import math
import os
import re
import shutil
import time
import zipfile
import zlib

import torch
import torch.distributed as dist

from configurator import DataError, SettingError, first_line
from fp8gpt import files
from fp8gpt.distributed import is_rank_0, is_sharded, rank_0s, whole
from model import GPT, GPTConfig

PARTS = {
    'step': int,
    'position': int,        # in sequences
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
OF_LORA = {'rank': int, 'alpha': (int, float), 'targets': str, 'base': str, 'seed': int, 'fingerprint': str}
MOST = 2**62    # of a step, position or number of tokens


def step_path(directory, step):
    """Return the path of a step's checkpoint."""
    return os.path.join(directory, f'step_{step:06d}.pt')


def step_of(path):
    """Return the step in a step file's name; None for another file."""
    match = re.fullmatch(r'step_(\d{6,})\.pt', os.path.basename(path))
    return int(match[1]) if match else None


def files_in(directory, ending='.pt'):
    """Return the paths of a directory's files by that ending, by name; none where there is no directory."""
    names = glob.glob(f'{glob.escape(directory)}/*{ending}')
    return sorted(filter(os.path.isfile, names))


def steps_in(directory):
    """Return the paths of the step files, oldest first."""
    return sorted((path for path in files_in(directory) if step_of(path) is not None), key=step_of)


# ------------------------------------------------------------------------------------------------------- save

def save(directory, state, keep, best=False):
    """Write step_<state['step']>.pt on rank 0, unless it is there (a run reaches a step once), and name it
    latest.pt and, where `best`, best_model.pt, whose loss is state['best_val_loss']. Then remove the oldest
    step files but `keep` (0 = keep all). All ranks call this. Raises DataError on a full disk: what was there
    before is untouched."""
    path = step_path(directory, state['step'])
    if not rank_0s(os.path.exists(path)):
        if rank_0s(_too_large(state)):
            state = {**state, 'optimizer': _write_parts(state['optimizer'], path.removesuffix('.pt'))}
        gathered = _gathered(state)
        if is_rank_0():
            files.write(path, lambda file: torch.save(gathered, file))
    if not is_rank_0():
        return
    _link(path, os.path.join(directory, 'latest.pt'))
    if best:
        _link(path, os.path.join(directory, 'best_model.pt'))
        known = {key: state[key] for key in ('step', 'best_val_loss')}
        files.write_json(os.path.join(directory, 'best_model.json'), known)
    for old in steps_in(directory)[:-keep] if keep else ():
        os.remove(old)
    _drop_parts(directory)


def host_bytes():
    """Return the memory of this rank's host, in bytes."""
    return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')


def _too_large(state):
    """Return whether a checkpoint's tensors are sharded and too large for one host to gather."""
    moments = _flat(state['optimizer']).values()
    size = sum(t.numel() * t.element_size() for t in [*moments, *state['weights'].values()])
    return any(map(is_sharded, moments)) and size > host_bytes()


def _gathered(state):
    """Return a dict of dicts of tensors, sharded ones gathered on rank 0's CPU, one at a time."""
    if isinstance(state, dict):
        return {name: _gathered(value) for name, value in state.items()}
    if not is_sharded(state):
        return state
    tensor = whole(state.detach())
    return tensor.cpu() if is_rank_0() else None


def _link(path, name):
    """Give a file a second name in one rename; a copy where the file system has no hard links. Raises
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


def _step_within(path):
    """Return a checkpoint's step; None where the file is missing, or cannot be read."""
    try:
        return _mapped(path)['step']
    except Exception:  # torch raises many kinds for a damaged file
        return None


# ------------------------------------------------------------------------------------------------------- load

def find(resume, directory, moments=True):
    """Return the path that `resume` means: None for '' and for an 'auto' without a checkpoint; for 'latest'
    and 'auto' the directory's newest step that is whole, for 'best' its best model; else a path. moments: see
    damage. Raises MissingError."""
    path = resume
    if resume in ('latest', 'auto'):
        whole_ones = (step for step in reversed(steps_in(directory)) if not damage(step, moments))
        path = next(whole_ones, os.path.join(directory, 'latest.pt'))
    elif resume == 'best':
        path = os.path.join(directory, 'best_model.pt')
    path = files.checkpoint_of(path)
    if os.path.isfile(path):
        return path
    if resume in ('', 'auto'):
        return None
    raise files.nothing_to_resume(resume, path)


def load(path, moments=False):
    """Return the checkpoint at a path, tensors on the CPU, its weights checked by name, shape and dtype.
    moments: whether those in files of ranks are wanted too; 'optimizer' gets their 'parts', the paths. Raises
    MissingError; DataError where its checksums do not hold (torch.load would take flipped bits), and
    for what is no checkpoint of ours."""
    path = files.checkpoint_file(path)
    problem = damage(path, moments)
    if problem:
        raise DataError(f'{path} is damaged, or no checkpoint ({problem}); '
                        'in a run, --resume=latest takes the newest that is whole')
    try:
        state = _read(path)
        _check_parts(state)
        if parts := parts_of(path, state):
            state['optimizer']['parts'] = parts
    except Exception as error:  # torch raises many kinds for another program's file
        problem = first_line(error)
        raise DataError(f'{path} is no checkpoint of train.py or train_fp8.py ({problem})') from None
    return state


def _mapped(path):
    """Return the content of a file, its tensors mapped. Its code is not run. Raises any error of torch."""
    return torch.load(path, map_location='cpu', weights_only=True, mmap=True)


def _read(path):
    """Return the content of a file, with the loss of the best model up to its step: that in best_model.json,
    if it is of best_model.pt's step."""
    state, directory = _mapped(path), os.path.dirname(path)
    best = files.read_json(os.path.join(directory, 'best_model.json'))
    step, loss = _step_within(os.path.join(directory, 'best_model.pt')), best.get('best_val_loss')
    if step is not None and best.get('step') == step <= state['step'] and type(loss) is float:
        state['best_val_loss'] = loss
    return state


def damage(path, moments=True):
    """Return what is wrong with a checkpoint's file, as a clause; None where its checksums are right.
    moments: whether to check the files of its moments, too, if it has such."""
    try:
        for each in [path, *(parts_of(path, _mapped(path)) if moments else ())]:
            with zipfile.ZipFile(each) as archive:
                if bad := archive.testzip():
                    return f'the checksum of {each}, {bad}, does not hold'
    except Exception as error:  # zipfile's own, zlib's, torch's, ...: as the damage has it
        return first_line(error)


def _check_parts(state):
    """Raise an error of any kind unless a file holds a checkpoint's parts and a GPT's weights."""
    _check_kinds(state, PARTS)
    _check_kinds(state['precision'], {'name': str})
    for name in ('step', 'position', 'tokens'):
        if not 0 <= state[name] < MOST:
            raise ValueError(f'its {name} is {state[name]:.3g}')
    if not isinstance(state.get('fp8_state') or {}, dict):
        raise ValueError('its fp8_state is of another type')
    if not math.isfinite(state['best_val_loss'] or 0):
        raise ValueError('its best validation loss is not finite')
    config, weights = GPTConfig(**state['model_config']), state['weights']
    if config.n_layer > len(weights):
        raise ValueError(f'it has fewer weights than its {config.n_layer} layers')
    shapes, in_bf16 = weight_shapes(config), state['config'].get('param_dtype') == 'bf16'
    if state.get('lora'):  # of adapters, in fp32; lora.py knows what they are to be
        _check_kinds(state['lora'], OF_LORA)
        ranks = {len(p) for name, p in weights.items() if name.endswith('.A.weight')}
        if ranks != {state['lora']['rank']} or not 0 < state['lora']['alpha'] < math.inf:
            raise ValueError('its adapters have another rank, or no finite alpha')
        shapes, in_bf16 = {name: p.shape for name, p in weights.items()}, False
    dtype = torch.bfloat16 if in_bf16 else torch.float32
    check_names(weights.keys(), shapes.keys(), 'weights')
    for name, shape in shapes.items():
        check_tensor(name, weights[name], shape, dtype)


def _check_kinds(found, kinds):
    """Raise an error of any kind unless a dict has the entries of {name: type}."""
    for name, kind in kinds.items():
        if not isinstance(found[name], kind) or isinstance(found[name], bool):
            raise ValueError(f'its {name} is of another type')


def check_names(found, wanted, what):
    """Raise ValueError unless `found` holds the names `wanted`."""
    names = sorted(map(str, found ^ wanted))
    if names:
        raise ValueError(f'{len(names)} names of its {what} are missing or too many, {names[0]} first')


def check_tensor(name, tensor, shape, dtype):
    """Raise ValueError unless a tensor is dense, finite, and has this shape and dtype."""
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype or tensor.layout != torch.strided:
        raise ValueError(f'{name} is of another shape or type')
    if tensor.is_floating_point() and not tensor.isfinite().all():
        raise ValueError(f'{name} holds NaN or infinity')


@torch.no_grad()
def load_moments(moments, saved):
    """Copy a checkpoint's 'optimizer' into `moments`, see optim.named_state, on any number of ranks: each
    reads its own rows. Raises DataError where it is another model's or optimizer's."""
    try:
        parts = [_mapped(path) for path in saved['parts']] if 'parts' in saved else [_flat(saved)]
        flat = _flat(moments)
        check_names(set().union(*parts), flat.keys(), 'optimizer state')
        for name, tensor in flat.items():
            pieces = [part[name] for part in parts if name in part]
            own, found = tensor, pieces[0]
            if tensor.dim():
                dtypes = {piece.dtype for piece in pieces}
                if sum(map(len, pieces)) != len(tensor) or dtypes != {tensor.dtype}:
                    raise ValueError(f'{name} is of another shape or type')
                start = 0
                if is_sharded(tensor):  # FSDP2's parts are of one length, but for the last ones
                    own, mesh = tensor.to_local(), tensor.device_mesh
                    start = mesh.get_local_rank() * math.ceil(len(tensor) / mesh.size())
                found = _rows(pieces, start, len(own))
            check_tensor(name, found, own.shape, tensor.dtype)
            own.copy_(found)
    except Exception as error:  # torch raises many kinds for another program's file
        raise DataError(f'the checkpoint does not fit this optimizer ({first_line(error)}): '
                        '--init_from=CHECKPOINT starts anew from its weights') from None


def _rows(pieces, start, count):
    """Return rows `start` to `start + count` of tensors that lie one after the other. Of mapped ones, no
    other row is read."""
    found = []
    for piece in pieces:
        found.append(piece[max(0, start):max(0, start + count)])
        start -= len(piece)
    return torch.cat(found)


def _flat(state):
    """Return {'weight, key': tensor} of an optimizer's state by weight and key."""
    return {f'{name}, {key}': tensor for name, kept in state.items() for key, tensor in kept.items()}


def weight_shapes(config):
    """Return {name: shape} of a GPT's weights."""
    with torch.device('meta'):
        return {name: tuple(p.shape) for name, p in GPT(config).weights().items()}


def fingerprint(model):
    """Return a checksum of a thousand values of each of a GPT's weights, cast to bf16."""
    crc = 0
    for p in model.weights().values():
        values = whole(p.detach()).flatten()
        some = values[::len(values) // 1000 + 1].bfloat16().cpu().contiguous()
        crc = zlib.crc32(some.view(torch.int16).numpy(), crc)
    return f'{crc:08x}'


# --------------------------------------------------------------------------- optimizers that no host can hold

PART = re.compile(r'rank_\d+\.pt(\.tmp)?')     # the files in a step's folder


def parts_of(path, state):
    """Return the paths of the files that hold a checkpoint's moments, one a rank; [] where its own file does.
    Raises an error of any kind for a number of ranks that no run has."""
    ranks = state['optimizer'].get('ranks', 0)
    if ranks not in range(2**16):
        raise ValueError(f'its moments are those of {ranks} ranks')
    folder = step_path(os.path.dirname(path), state['step']).removesuffix('.pt')
    return [os.path.join(folder, f'rank_{rank}.pt') for rank in range(ranks)]


def _write_parts(moments, folder):
    """Have each rank write its rows of the moments, and rank 0 what is not sharded, to a file in a folder,
    which counts once a checkpoint is beside it: until then, _drop_parts removes it. Returns what that
    checkpoint has as 'optimizer'. Raises DataError on all ranks where one cannot write."""
    rank, problems = dist.get_rank(), [None] * dist.get_world_size()
    if is_rank_0():
        _remove_parts(folder)
    dist.barrier()
    rows = {name: tensor.to_local() if is_sharded(tensor) else tensor
            for name, tensor in _flat(moments).items() if is_rank_0() or is_sharded(tensor)}
    problem = None
    try:
        files.write(os.path.join(folder, f'rank_{rank}.pt'), lambda file: torch.save(rows, file))
    except DataError as error:
        problem = str(error)
    dist.all_gather_object(problems, problem)
    for problem in filter(None, problems):
        if is_rank_0():
            _remove_parts(folder)
        raise DataError(problem)
    return {'ranks': len(problems)}


def _remove_parts(folder):
    """Remove a folder that holds nothing but what _write_parts writes; no other folder, which is the user's,
    and no link."""
    is_folder = os.path.isdir(folder) and not os.path.islink(folder)
    if is_folder and all(map(PART.fullmatch, os.listdir(folder))):
        shutil.rmtree(folder)


def _drop_parts(directory):
    """Remove the folders of moments whose checkpoint is gone, and what a kill left of one."""
    best = _step_within(os.path.join(directory, 'best_model.pt')) or 0
    named = {*steps_in(directory), step_path(directory, best)}
    for folder in glob.glob(f'{glob.escape(directory)}/step_*'):
        if step_of(f'{folder}.pt') is not None and f'{folder}.pt' not in named:
            _remove_parts(folder)


# ------------------------------------------------------------------------------------------------ a directory

def start_directory(directory, resumed_from, resumed_step, overwrite):
    """Make the directory and lock it for this run: keep the returned lock.

    resumed_from: path of the checkpoint that the run resumes from, or None. Raises DataError where another
    run holds the directory, and SettingError where the run would mix with an earlier one's checkpoints: any,
    for a new run, or later ones than it resumes from. `overwrite` removes those; later ones that are damaged
    are set aside."""
    os.makedirs(directory, exist_ok=True)
    lock = _lock(directory)
    for leftover in files_in(directory, '.tmp'):
        os.remove(leftover)
    for path in _in_the_way(directory, resumed_from, resumed_step, overwrite):
        os.remove(path)
    current = step_path(directory, resumed_step)
    if not _is_in(directory, resumed_from):
        files.remove(os.path.join(directory, 'best_model.json'))
    elif os.path.isfile(current):
        _link(current, os.path.join(directory, 'latest.pt'))
    _drop_parts(directory)
    return lock


def check_directory(directory, resumed_from, resumed_step, overwrite):
    """Raise the errors of start_directory before a run compiles for minutes. Creates and removes nothing."""
    if os.path.isdir(directory):
        with _lock(directory):
            _in_the_way(directory, resumed_from, resumed_step, overwrite)


def _lock(directory):
    refusal = f'another run is writing to {directory}: give this one another --checkpoint_dir'
    return files.lock(os.path.join(directory, '.lock'), refusal)


def _is_in(directory, path):
    """Return whether a path is in a directory."""
    return path and os.path.samefile(os.path.dirname(path) or '.', directory)


def _in_the_way(directory, resumed_from, resumed_step, overwrite):
    """Return the paths of the checkpoints that a run would mix with. Raises SettingError unless they may
    go."""
    what, old = 'an earlier run', files_in(directory)
    if _is_in(directory, resumed_from):
        what, old = 'later checkpoints', _later(directory, resumed_step)
    if old and not overwrite:
        raise SettingError(f'{directory} holds {what}, {os.path.basename(old[-1])}: '
                           '--resume=latest resumes it, --checkpoint_dir=... starts elsewhere, '
                           '--overwrite removes it')
    return old


def _later(directory, step):
    """Return the paths of the whole step files after a step. The run will write those steps again, so damaged
    files get another name."""
    later = [path for path in steps_in(directory) if step_of(path) > step]
    for path in filter(damage, later):
        os.replace(path, f'{path}.damaged')
        print(f'{path} is damaged: set aside as {path}.damaged', flush=True)
    return list(filter(os.path.exists, later))


def table(directory):
    """Return the lines that list a directory's checkpoints, each with its step's validation loss in the log.
    """
    lines, log = [], os.path.join(directory, 'log.jsonl')
    records = files.read_log(log) if os.path.exists(log) else []
    losses = {record['step']: f'{record["val/loss"]:.4f}' for record in records
              if isinstance(record.get('val/loss'), float)}
    for path in files_in(directory):
        try:
            state = _mapped(path)
            written = time.localtime(os.path.getmtime(path))
            lines.append(
                f'{path}  step {state["step"]:>6}  tokens {state["tokens"]:>13,}  '
                f'val loss {losses.get(state["step"], "-"):>7}  {state["precision"]["name"]}  '
                f'{os.path.getsize(path) / 1e6:,.0f} MB  {time.strftime("%Y-%m-%d %H:%M", written)}')
        except Exception:  # torch raises many kinds for another program's file
            lines.append(f'{path}  cannot be read')
    return lines or [f'no checkpoints in {directory}']
