"""Ranks of a run: DDP, FSDP2, reductions, agreeing to stop. A single process pays nothing for them.

If a rank dies, torchrun ends the other ranks of its node. If a rank hangs, the process group's time limit
ends the run: 30 minutes, torch's own for a group that is not NCCL's alone.
"""
import contextlib
import dataclasses
import datetime
import functools
import os
import signal
import sys
import warnings

import torch
import torch.distributed as dist

from configurator import MachineError, SettingError, first_line, say_in_run

PATIENCE = datetime.timedelta(hours=12)     # with rank 0, where it works alone; others have 30 minutes


@dataclasses.dataclass
class Ranks:
    """The place of this process among `world_size`: `main` is rank 0, the one that prints and saves."""
    rank: int
    world_size: int
    device: torch.device

    @property
    def main(self):
        return self.rank == 0


def init(device='auto'):
    """Join the process group where torchrun started us and return the Ranks. device: auto (cuda, else cpu) |
    cuda | cpu. Raises MachineError where CUDA is asked for and not there, and for more ranks than GPUs;
    SettingError for an environment that torchrun has not made."""
    place = {name: os.environ.get(name, '0') for name in ('RANK', 'LOCAL_RANK')}
    place['WORLD_SIZE'] = os.environ.get('WORLD_SIZE', '1')
    numbers = [int(number) if number.isdecimal() else -1 for number in place.values()]
    rank, local_rank, world_size = numbers
    needed = {'RANK', 'MASTER_ADDR', 'MASTER_PORT'} if world_size > 1 else set()
    if min(numbers) < 0 or rank >= world_size or needed - os.environ.keys():
        raise SettingError(f'the environment has {place}, which are no ranks: start several by torchrun, or '
                           f'one after `unset {" ".join(place)}`')
    if world_size == 1:     # else torchrun ends a rank that waits in C++, where Python's handlers do not run
        signal.signal(signal.SIGTERM, _end_early)
    if device == 'auto':
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
    if device == 'cuda' and not torch.cuda.is_available():
        raise MachineError('device=cuda, but torch sees no CUDA GPU here; --device=cpu trains on the CPU')
    backend = 'gloo'
    if device == 'cuda':
        if local_rank >= (gpus := torch.cuda.device_count()):
            raise MachineError(f'LOCAL_RANK={local_rank}, but torch sees {gpus} GPUs here, a rank each: '
                               f'torchrun --nproc_per_node={gpus}')
        # Gradients split segments that do not grow, and the next micro-step's logits find none that is large
        # enough: 160 sequences of GPT-2 124M, 76 GB, were too many for 85 GB
        if 'PYTORCH_CUDA_ALLOC_CONF' not in os.environ:     # its older name
            os.environ.setdefault('PYTORCH_ALLOC_CONF', 'expandable_segments:True')
        device = f'cuda:{local_rank}'
        torch.cuda.set_device(device)
        if world_size > 1:      # DDP keeps to the stream in which it is made; no graph captures the default
            torch.cuda.set_stream(torch.cuda.Stream())
        backend = 'cpu:gloo,cuda:nccl'      # agreeing to stop must not wait for the GPU
    if world_size > 1:
        try:
            dist.init_process_group(backend)
        except (RuntimeError, ValueError) as error:
            at = f'{os.environ["MASTER_ADDR"]}:{os.environ["MASTER_PORT"]}'
            raise MachineError(f'rank {rank} finds no rank 0 at {at} ({first_line(error)})') from None
    return Ranks(rank, world_size, torch.device(device))


def _end_early(number, frame):
    """End the process: a single one's handler of SIGTERM until there is a StopRequest."""
    print('error: stopped by SIGTERM', file=sys.stderr, flush=True)
    os._exit(128 + number)


def is_rank_0():
    """Return whether this process is rank 0, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def is_first_of_node():
    """Return whether this process is the first of its machine."""
    return not dist.is_initialized() or os.environ.get('LOCAL_RANK', '0') == '0'


def on_rank_0(work, *arguments):
    """Return work(*arguments) on rank 0, None on the others, which wait for it up to PATIENCE. If it raises,
    rank 0 prints the error and the others end in silence."""
    return _while_others_wait(is_rank_0(), work, arguments)


def once_a_node(work, *arguments):
    """Return work(*arguments), done by one rank of each machine, while the others wait as in on_rank_0. Ranks
    of a machine with other arguments do their own."""
    if not dist.is_initialized():
        return work(*arguments)
    place = os.environ.get('GROUP_RANK'), arguments
    first = of_all_ranks(place).index(place)
    return of_all_ranks(_while_others_wait(dist.get_rank() == first, work, arguments))[first]


def of_all_ranks(value):
    """Return the ranks' values, in a list on each rank: anything that pickles."""
    values = [None] * dist.get_world_size()
    with _silent_without_others():
        dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def _silent_without_others():
    """End this rank where the connection to another is lost: the line of the one that failed is enough."""
    try:
        yield
    except RuntimeError:
        os._exit(1)     # without finalisation, see leave


def _while_others_wait(works, work, arguments):
    """Return work(*arguments) on the ranks that have to do it, None on the others, once all have done it."""
    if not dist.is_initialized():
        return work(*arguments) if works else None
    with _silent_without_others():
        group = _patient_group()
    value = work(*arguments) if works else None
    with _silent_without_others():
        dist.barrier(group)
    return value


@functools.cache
def _patient_group():
    """Return a group of all ranks that waits up to PATIENCE: one, since each would keep its connections."""
    return dist.new_group(backend='gloo', timeout=PATIENCE)


def check_alike(decisive):
    """Raise SettingError on rank 0, and end the other ranks, where one of them has another value than rank 0
    in a dict of what decides the run's result: settings, data, the step that it resumes from, versions."""
    if not dist.is_initialized():
        return
    with _silent_without_others():
        ours = rank_0s(decisive)
    pairs = {name: [each.get(name, 'missing') for each in (ours, decisive)] for name in [*ours, *decisive]}
    unlike = [(name, *pair) for name, pair in pairs.items() if pair[0] != pair[1]]
    for rank, first in enumerate(of_all_ranks(unlike[:1])):     # all of the dicts may be gigabytes
        for name, ours, other in first:
            on_rank_0(_refuse, f'rank 0 has {name}={ours}, rank {rank} has {name}={other}: '
                               'all ranks need the same settings, data, checkpoints and versions')


def _refuse(problem):
    raise SettingError(problem)


def sum_over_ranks(x):
    """Sum a tensor over ranks, in place, and return it."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def smallest_of_ranks(number):
    """Return the smallest of the ranks' whole numbers, on each rank."""
    number = torch.tensor(number)
    if dist.is_initialized():
        dist.all_reduce(number, op=dist.ReduceOp.MIN)
    return int(number)


def rank_0s(value):
    """Return rank 0's value, on each rank: anything that pickles."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def leave(error=None):
    """Wait for the other ranks and end this one: the last call of a script. error: a line for stderr, with
    exit code 1; else 0. Returns in a single process without error.

    A rank leaves without the interpreter's finalisation: gloo's threads may still be dropping Python
    references then, and the one that does aborts the process (2 of 28 runs of four ranks ended so)."""
    if error and is_rank_0():
        print(f'error: {error}', file=sys.stderr)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if error else 0)
    if error:
        raise SystemExit(1)


class Stopped(Exception):
    """Ends an evaluation or a sample, because the run was asked to stop."""


class StopRequest:
    """A request to stop after the step under way: by SIGTERM, Ctrl-C, a terminal that closes, a signal by
    which schedulers warn of a job's end, or a file. A second Ctrl-C interrupts. As signals are the process's,
    so is the latest StopRequest: see until_asked.

    lock: the files.Lock of the stop_file's folder, on rank 0 of a run that writes."""
    latest = None
    signals = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2

    def __init__(self, stop_file, lock=None):
        self.stop_file, self.signalled = stop_file, False
        StopRequest.latest = self
        if lock and os.path.exists(stop_file) and os.path.getmtime(stop_file) < lock.process_start:
            os.remove(stop_file)    # a request to an earlier run, which had ended
            say_in_run(f'{stop_file} is older than this run: removed')
        for number in self.signals:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:   # nohup's run goes on
                signal.signal(number, self._note)

    def _note(self, number, frame):
        self.signalled = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def asked(self):
        """Return whether any rank was asked, the same on every rank: one small all-reduce on the CPU."""
        file_there = is_rank_0() and os.path.exists(self.stop_file)
        if not smallest_of_ranks(-int(self.signalled or file_there)):
            return False        # and `signalled` stays: a signal may have come since it was read
        self.signalled = True
        if file_there:
            os.remove(self.stop_file)
        return True


def until_asked(things):
    """Yield the things, of which all ranks have the same number. Before each and after the last, raise
    Stopped once the run is asked to stop."""
    def look():
        if StopRequest.latest and StopRequest.latest.asked():
            raise Stopped
    for thing in things:
        look()
        yield thing
    look()


def finish_all(works, must):
    """Call each of the functions. Return whether all have ended: not where until_asked ends one early. An
    error in one that is not in `must` is a line; on several ranks, which wait for each other in it, it ends
    the run."""
    for work in works:
        try:
            work()
        except Stopped:
            if is_rank_0():
                say_in_run('asked to stop: the evaluation or sample under way is left out')
            return False
        except Exception as error:
            if work in must or dist.is_initialized():
                raise
            say_in_run(f'WARNING: left out at this step: {work.__name__}: {type(error).__name__}: '
                       f'{first_line(error)}')
    return True


# ------------------------------------------------------------------------------------------------ DDP, FSDP2

def wrap(model, ranks):
    """Return a GPT in DDP; the GPT itself in a single process, or where all gradients are sharded."""
    if ranks.world_size == 1 or all(map(is_sharded, model.weights().values())):
        return model
    torch._dynamo.config.optimize_ddp = False   # it would cut graphs at DDP's buckets: they end with a block
    ids = [ranks.device.index] if ranks.device.type == 'cuda' else None
    # torch 2.13 prefers a name that torch 2.11 does not have
    warnings.filterwarnings('ignore', '`broadcast_buffers` is deprecated', FutureWarning)
    return torch.nn.parallel.DistributedDataParallel(
        model,
        device_ids=ids,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        init_sync=not any(map(is_sharded, model.parameters())))     # adapters of a sharded model


def sync_gradients(model, now):
    """Set whether DDP's next backward reduces gradients: only a step's last micro-step needs to. Sharded
    gradients are reduced in each micro-step: until then they would be whole."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model.require_backward_grad_sync = now


def is_sharded(tensor):
    """Return whether a tensor is a DTensor, of which this rank has its part."""
    return hasattr(tensor, 'device_mesh')


def whole(tensor):
    """Return a tensor, gathered from all ranks where it is sharded: all call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def part(tensor):
    """Return this rank's part of a tensor: all of it where it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def copies_take_parts():
    """Return a context in which copying a whole tensor into a sharded one copies this rank's part."""
    if not dist.is_initialized():
        return contextlib.nullcontext()
    from torch.distributed.tensor.experimental import implicit_replication  # late: it takes a second
    return implicit_replication()


def sharded(config):
    """Return whether a run's parameters are sharded: by its sharding_mode, on several ranks."""
    return config['sharding_mode'] != 'ddp' and dist.is_initialized()


def building(config):
    """Return a context in which a model to be sharded is built without memory: no rank holds it whole."""
    return torch.device('meta') if sharded(config) else contextlib.nullcontext()


def place(gpt, run, ranks):
    """Put a GPT on its device, sharded where the run, a run.Run, is, and give it its first weights: the
    source's or the seed's, one whole parameter at a time. Raises SettingError for what cannot be sharded."""
    if sharded(run.config):
        shard(gpt, run, ranks)
    else:
        gpt.to(ranks.device)
    with copies_take_parts():
        if run.source:
            gpt.load_weights(run.source['weights'])
        else:
            gpt.init_weights(run.config['seed'])


def shard(gpt, run, ranks):
    """Shard a GPT on the meta device over all ranks, by FSDP2 (torch's fully_shard), and allocate each rank's
    part. A block's linears are one group, everything else another.

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
    gpt.register_forward_hook(drop_whole)


def drop_whole(gpt, inputs, output):
    """Free the gathered weights after a forward pass that has no backward pass to free them: a hook."""
    if not torch.is_grad_enabled():
        for module in gpt.modules():
            if hasattr(module, 'reshard'):
                module.reshard()
