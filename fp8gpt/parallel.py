"""Ranks: who am I, the model in DDP, reductions, agreeing to stop. A single process pays nothing for it.

Where a rank is gone, torchrun ends the others of its node; a rank that stands still ends by the time limit of
the process group: 10 minutes for NCCL, 30 for gloo.
"""
import dataclasses
import datetime
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from configurator import MachineError
from fp8gpt.sharding import is_sharded

PATIENCE = datetime.timedelta(hours=12)     # with rank 0, where it works alone; NCCL's own is 10 minutes


@dataclasses.dataclass
class Ranks:
    """This process among `world_size`: `main` is rank 0, the one that prints and saves."""
    rank: int
    world_size: int
    device: torch.device

    @property
    def main(self):
        return self.rank == 0


def init(device='auto'):
    """Joins the process group where torchrun started us. device: auto (cuda, else cpu) | cuda | cpu | ...
    Raises MachineError where CUDA is asked for and not there."""
    if device == 'auto':
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
    if device.startswith('cuda') and not torch.cuda.is_available():
        raise MachineError('device=cuda, but torch sees no CUDA GPU here; --device=cpu trains on the CPU')
    rank, world_size = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    if device == 'cuda':
        device = f'cuda:{os.environ.get("LOCAL_RANK", 0)}'
        torch.cuda.set_device(device)
    if 'RANK' in os.environ and world_size > 1:
        # gloo beside nccl: agreeing to stop must not wait for the GPU
        dist.init_process_group('cpu:gloo,cuda:nccl' if device.startswith('cuda') else 'gloo')
    return Ranks(rank, world_size, torch.device(device))


def on_rank_0(work, *arguments):
    """Rank 0 does work(*arguments), the others wait for it up to PATIENCE. Where it ends the process instead,
    by an error of which it tells, the others end too, in silence. Raises MachineError after PATIENCE."""
    if not dist.is_initialized():
        work(*arguments)
        return
    group, start = dist.new_group(backend='gloo', timeout=PATIENCE), time.monotonic()
    if dist.get_rank() == 0:
        work(*arguments)
    try:
        dist.barrier(group)
    except RuntimeError:  # a rank is gone, and its connections with it; or it took too long
        if dist.get_rank() == 0 or time.monotonic() - start < PATIENCE.total_seconds():
            os._exit(1)  # without finalisation, see leave
        raise MachineError(f'rank 0 needed more than {PATIENCE} for {work.__module__}.{work.__name__}: '
                           'run once in a single process, which waits for itself') from None


def wrap(model, ranks):
    """Return the model, compiled or not, in DDP; as it is in a single process, and where its gradients are
    sharded."""
    if ranks.world_size == 1:
        return model
    in_parts = any(map(is_sharded, model.parameters()))
    if in_parts and all(is_sharded(p) for p in model.parameters() if p.requires_grad):
        return model
    torch._dynamo.config.optimize_ddp = False   # it would cut graphs at DDP's buckets: they end with a block
    ids = [ranks.device.index] if ranks.device.type == 'cuda' else None
    return torch.nn.parallel.DistributedDataParallel(
        model,
        device_ids=ids,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        init_sync=not in_parts)


def sync_gradients(model, now):
    """Whether the next backward reduces gradients over ranks: of DDP, only a step's last micro-step needs to.
    Sharded ones are reduced in each: until then they would be whole."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model.require_backward_grad_sync = now


def sum_over_ranks(x):
    """The tensor summed over ranks, in place; returns it."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def smallest_of_ranks(number):
    """The smallest of the ranks' whole numbers, on each."""
    number = torch.tensor(number)
    if dist.is_initialized():
        dist.all_reduce(number, op=dist.ReduceOp.MIN)
    return int(number)


def rank_0s(value):
    """Rank 0's value, on each: anything that pickles."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def leave(error=None):
    """The last call of a script: waits for the other ranks and ends this one. error: a line for stderr, exit
    code 1; else 0. Returns in a single process without error.

    A rank leaves without the interpreter's finalisation: gloo's threads may still be dropping Python
    references then, and the one that does aborts the process (2 of 28 runs of four ranks ended so)."""
    if error and int(os.environ.get('RANK', 0)) == 0:
        print(f'error: {error}', file=sys.stderr)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if error else 0)
    if error:
        raise SystemExit(1)


class StopRequest:
    """SIGTERM, Ctrl-C, a terminal that closes, or a file asks for a stop after the step under way; a second
    Ctrl-C interrupts."""

    def __init__(self, stop_file, ranks):
        self.stop_file, self.ranks, self.signalled = stop_file, ranks, False
        if ranks.main and os.path.exists(stop_file):
            os.remove(stop_file)  # a stop that an earlier run did not live to see
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGINT, self._note)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup it is to go on
            signal.signal(signal.SIGHUP, self._note)

    def _note(self, number, frame):
        self.signalled = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def asked(self):
        """True on every rank as soon as one was asked: one small all-reduce on the CPU."""
        asked = self.signalled or (self.ranks.main and os.path.exists(self.stop_file))
        if dist.is_initialized():
            flag = torch.tensor(int(asked))
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            asked = bool(flag)
        if asked and self.ranks.main and os.path.exists(self.stop_file):
            os.remove(self.stop_file)
        return asked
