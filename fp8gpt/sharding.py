"""FSDP: a model sharded over ranks, and its checkpoints. In a single process, and in DDP, all stays whole."""
import contextlib
import dataclasses
import os
import pathlib
import pickle
import re
import shutil
import zlib

import torch
import torch.distributed as dist

from configurator import DataError, SettingError

METADATA = '.metadata'  # of torch.distributed.checkpoint: which tensor's part is where in a folder
OF_SHARDS = re.compile(r'(\.metadata|__\d+_\d+\.distcp)(\.tmp)?')     # the files that it writes to a folder


def sharded(config):
    """Whether a run's parameters are sharded: by its sharding_mode, on several ranks."""
    return config['sharding_mode'] != 'ddp' and dist.is_initialized()


def is_sharded(tensor):
    """Whether a tensor is a DTensor, of which this rank has its part."""
    return hasattr(tensor, 'device_mesh')


def building(config):
    """Inside, a model to be sharded is built without memory: no rank ever holds the whole."""
    return torch.device('meta') if sharded(config) else contextlib.nullcontext()


def place(gpt, run, ranks):
    """Puts a GPT on its device, sharded where the run, a run.Run, is, and gives it its first weights: the
    source's or the seed's, one whole parameter at a time. Raises SettingError for what cannot be sharded."""
    filling = contextlib.nullcontext()
    if sharded(run.config):
        from torch.distributed.tensor.experimental import implicit_replication  # late: it takes a second
        shard(gpt, run, ranks)
        filling = implicit_replication()  # copies into a shard take its part of a whole tensor
    else:
        gpt.to(ranks.device)
    with filling:
        if run.source:
            gpt.load_weights(run.source['weights'])
        else:
            gpt.init_weights(run.config['seed'])


def shard(gpt, run, ranks):
    """Shards a GPT on the meta device over all ranks, by FSDP2 (torch's fully_shard), and makes room for each
    rank's part. A block's linears are one group, everything else another.

    A linear computes with its weight and bias in the activations' dtype, so they are cast before they travel;
    norms and embeddings compute in fp32, and travel so. Gradients are summed in fp32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    if not run.batch_size:
        raise SettingError('batch_size=0 looks for what fits one GPU by itself, and a sharded model is on '
                           'all: name a batch_size, or --sharding_mode=ddp')
    in_full = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    as_used = dataclasses.replace(in_full, param_dtype=run.compute_dtype)
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    linears = set()
    for module in gpt.h.modules():
        own = list(module.parameters(recurse=False))
        if any(p.dim() == 2 for p in own):
            linears.update(own)
    fully_shard(gpt, mesh=mesh, mp_policy=in_full, ignored_params=linears)
    again = run.config['sharding_mode'] == 'fsdp_full'
    for block in gpt.h:
        others = set(block.parameters()) - linears
        fully_shard(block, mesh=mesh, mp_policy=as_used, ignored_params=others, reshard_after_forward=again)
    gpt.to_empty(device=ranks.device)
    if gpt.config.position == 'rope':
        gpt.make_rope(len(gpt.rope_cos))
    gpt.register_forward_hook(drop_whole)


def drop_whole(gpt, inputs, output):
    """A hook: behind a pass without a backward pass, which would do it, whole weights go."""
    if not torch.is_grad_enabled():
        for module in gpt.modules():
            if hasattr(module, 'reshard'):
                module.reshard()


def whole(tensor):
    """A tensor, gathered from all ranks where it is sharded: all call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


# ------------------------------------------------------------------------------------------------ checkpoints

def gathered(state):
    """A dict of dicts of tensors, sharded ones gathered on rank 0's CPU one by one, None on the others."""
    if isinstance(state, dict):
        return {name: gathered(value) for name, value in state.items()}
    if not is_sharded(state):
        return state
    tensor = whole(state.detach())
    return tensor.cpu() if is_rank_0() else None


def host_bytes():
    """Memory of this rank's host."""
    return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')


def for_one_file(state, path, agree):
    """A checkpoint as rank 0 writes it to a path: sharded tensors gathered; None where it is there already.
    Where they are more than its host holds, the optimizer's stay in shards: torch.distributed.checkpoint
    writes them to a folder beside, all ranks at once, and state['optimizer'] is {'folder': its name, 'bytes':
    each file's size, 'crc32': each file's checksum}. All ranks call this; agree: of their values, the one
    that all take. Raises DataError where they cannot be written."""
    if agree(os.path.exists(path)):
        return None
    moments = state['optimizer']
    tensors = [tensor for kept in moments.values() for tensor in kept.values()]
    size = sum(tensor.numel() * tensor.element_size() for tensor in [*tensors, *state['weights'].values()])
    if any(map(is_sharded, tensors)) and agree(size > host_bytes()):
        state = {**state, 'optimizer': _write_folder(moments, path.removesuffix('.pt'), agree)}
    return gathered(state)


def is_rank_0():
    return not dist.is_initialized() or dist.get_rank() == 0


def _write_folder(moments, folder, agree):
    """{'folder', 'bytes', 'crc32'}, see for_one_file. The folder appears under its name only when it is
    whole."""
    import torch.distributed.checkpoint as dcp  # late: it takes a second
    temporary = f'{folder}.tmp'
    if is_rank_0():
        remove_folder(temporary)
        remove_folder(folder)
    in_the_way = agree(next(filter(_holds_something, (temporary, folder)), None))
    if in_the_way:
        raise DataError(f'{in_the_way} is not of this program, and where a checkpoint is to be: move it')
    try:
        dcp.save({'optimizer': moments}, checkpoint_id=temporary)
    except dcp.CheckpointException as error:
        if is_rank_0():
            remove_folder(temporary)
        first = next(iter(error.failures.values()))[0]
        raise DataError(f'{temporary} cannot be written: {first}') from None
    rank, names = dist.get_rank(), os.listdir(temporary)
    mine = [name for name in names if name.startswith(f'__{rank}_') or rank == 0 and name == METADATA]
    sums = [None] * dist.get_world_size()
    dist.all_gather_object(sums, {name: _crc32(os.path.join(temporary, name)) for name in mine})
    if is_rank_0():
        os.rename(temporary, folder)
    dist.barrier()
    crc32 = {name: crc for part in sums for name, crc in part.items()}
    sizes = {name: os.path.getsize(os.path.join(folder, name)) for name in crc32}
    return {'folder': os.path.basename(folder), 'bytes': sizes, 'crc32': crc32}


def remove_folder(folder):
    """Removes a folder that holds what torch.distributed.checkpoint writes and nothing else; no other folder,
    which is the user's, and no link."""
    if os.path.isdir(folder) and not os.path.islink(folder):
        names = os.listdir(folder)
        if names and all(map(OF_SHARDS.fullmatch, names)):
            shutil.rmtree(folder)


def _holds_something(path):
    """Whether something is at a path that a folder cannot be renamed to: all but an empty folder."""
    if os.path.islink(path) or not os.path.isdir(path):
        return os.path.lexists(path)
    return os.listdir(path) != []


def _crc32(path):
    """The checksum of a file."""
    crc = 0
    with open(path, 'rb') as file:
        while piece := file.read(2**24):
            crc = zlib.crc32(piece, crc)
    return crc


def odd_shards(shards, folder):
    """How what a checkpoint says of its folder of shards differs from what _write_folder returns, a clause;
    None where it does not. folder: the name that it is to have. Files from before there were checksums lack
    'crc32'."""
    sizes = shards.get('bytes')
    crc32 = shards.get('crc32', sizes)
    if shards['folder'] != folder:
        return f'its shards are not in {folder}'
    if not isinstance(sizes, dict) or not isinstance(crc32, dict) or crc32.keys() != sizes.keys():
        return 'its list of shards is of another type'
    names = {METADATA, *sizes, *crc32}
    whole_numbers = all(type(number) is int for number in (*sizes.values(), *crc32.values()))
    if names != sizes.keys() or not whole_numbers or not all(map(OF_SHARDS.fullmatch, names)):
        return 'its list of shards is of another type'
    return None


def folder_damage(shards, directory):
    """What is wrong with the folder of shards in a directory, a clause; None where it is whole. shards: in
    which odd_shards finds nothing."""
    for name, size in shards['bytes'].items():
        path = os.path.join(directory, shards['folder'], name)
        if not os.path.isfile(path) or os.path.getsize(path) != size:
            return f'{path} is missing or not as long as it was'
        try:
            if 'crc32' in shards and _crc32(path) != shards['crc32'][name]:
                return f'the checksum of {path} does not hold'
        except OSError as error:
            return f'{path} cannot be read, {error.strerror}'
    return None


def read_folder(moments, shards):
    """Fills a dict of dicts of tensors, sharded or not, from a folder of for_one_file's, on any number of
    ranks. shards: as odd_shards wants it, and 'path', the folder's. Raises DataError for a folder that holds
    something else.

    torch.distributed.checkpoint unpickles its .metadata, and whatever that calls bytes instead of a tensor:
    code in either would run. So .metadata is read with the classes below alone, BytesStorageMetadata is not
    among them, and the tensors themselves torch reads with weights_only=True."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    allowed = [metadata.Metadata, metadata.TensorStorageMetadata, metadata.TensorProperties,
               metadata.ChunkStorageMetadata, metadata.MetadataIndex, metadata.StorageMeta,
               metadata._MEM_FORMAT_ENCODING, _StorageInfo, torch.serialization._get_layout]
    allowed = {(value.__module__, value.__name__): value for value in allowed}
    allowed |= {('torch', str(dtype).removeprefix('torch.')): dtype for dtype in (torch.float32, torch.uint8)}
    allowed |= {('torch', 'Size'): torch.Size}
    allowed |= {(module, 'PosixPath'): pathlib.PurePosixPath for module in ('pathlib', 'pathlib._local')}

    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            if (module, name) not in allowed:
                raise ValueError(f'{METADATA} names {module}.{name}')
            return allowed[module, name]

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *arguments, **options):
            return noted

    try:
        with open(os.path.join(shards['path'], METADATA), 'rb') as file:
            noted = Unpickler(file).load()
        if {info.relative_path for info in noted.storage_data.values()} - shards['bytes'].keys():
            raise ValueError(f'{METADATA} names files that are not listed')
        dcp.load({'optimizer': moments}, storage_reader=Reader(shards['path']),
                 no_dist=not dist.is_initialized())
    except (Exception, dcp.CheckpointException) as error:  # whatever it makes of a file that is none of ours
        first = next(iter(error.failures.values()))[0] if hasattr(error, 'failures') else error
        problem = str(first).split('\n')[0][:100]
        raise DataError(f'{shards["path"]} holds no shards of this checkpoint ({problem})') from None


# ----------------------------------------------------------------------------------------------- what is said

def lines(run, ranks):
    """What the run's first lines say of its sharding_mode."""
    mode = run.config['sharding_mode']
    if mode == 'ddp':
        return []
    if not sharded(run.config):
        return [f'sharding  {mode} changes nothing in a single process']
    dtype, param_dtype = run.config['dtype'], run.config['param_dtype']
    return [f'sharding  {mode} over {ranks.world_size} ranks\n          '
            f'weights of the blocks\' linears travel in {dtype}, all others in {param_dtype}, '
            'gradients in fp32']
