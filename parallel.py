"""Ranks: who am I, the model in DDP, reductions, agreeing to stop, a watch over ranks that are gone. A single
process pays nothing for it."""
import collections
import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
from typing import NamedTuple

import torch
import torch.distributed as dist

from configurator import MachineError, told
from errors import command
from sharding import forward_alone, hooks_outside, is_sharded

PATIENCE = datetime.timedelta(hours=12)     # with rank 0, where it works alone; NCCL's own is 10 minutes


@dataclasses.dataclass
class Ranks:
    """This process among `world_size`: `main` is rank 0, the one that prints and saves. watch: see Watch."""
    rank: int
    world_size: int
    device: torch.device
    watch: 'Watch' = None

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
        # Watch ends what hangs; NCCL's own prints a trace, and would end ranks that wait for a long save
        os.environ.setdefault('TORCH_NCCL_ASYNC_ERROR_HANDLING', '0')
        # gloo beside nccl: agreeing to stop must not wait for the GPU
        dist.init_process_group('cpu:gloo,cuda:nccl' if device.startswith('cuda') else 'gloo')
    return Ranks(rank, world_size, torch.device(device), Watch(rank, world_size))


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
    """model, compiled or not, in DDP; as it is in a single process, and where its gradients are sharded."""
    if ranks.world_size == 1:
        return model
    in_parts = any(map(is_sharded, model.parameters()))
    if in_parts and hasattr(model, 'pieces'):
        model.pieces['block'] = hooks_outside(torch.compile(forward_alone, dynamic=False))
    if in_parts and all(is_sharded(p) for p in model.parameters() if p.requires_grad):
        return model
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
        over.set()
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


# ---------------------------------------------------------------------------------------- ranks that are gone

BEAT = 1                    # seconds between two signs of life
QUIET = 10                  # seconds of one piece of work, after which a rank looks after the others
SILENCE = 60                # seconds without a sign of life, after which a rank is gone
FIRST = 3600                # seconds for a new kind of work, which torch.compile may have to compile
STEADY = 90                 # seconds at least for a kind that was timed; else
SLOWER = 5                  # times the longest that it took
SLOW_DISK = 20e6            # bytes/s
over = threading.Event()    # the script has ended well: no rank is watched any more


class Work(NamedTuple):
    """What a rank does. number: of pieces of work before it. since, limit: seconds, of Watch.clock."""
    number: int
    step: int
    what: str
    since: float
    limit: float


class Sign(NamedTuple):
    """A sign of life. number: of the rank's work; text: what that is."""
    beat: int
    number: int
    text: str


class Watch:
    """Ends this rank in one line where another one is gone or stands still, and would be waited for for ever.

    A thread leaves signs of life in the store of the process group. Where this rank's work takes long, it
    reads those of the others. A rank without new ones is gone: killed, stopped, or its node is. Where all
    live, a rank that is behind this one is waited for, since it has limits of its own; where none is, this
    one stands still, and its limit counts. An error that another rank's end raises becomes that line too."""

    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size
        self.clock = 0.0                        # seconds, but for those that this process was stopped
        self.times = collections.Counter()      # kind of work -> how often it began
        self.longest = collections.Counter()    # kind of work -> seconds, but for the first two times
        self.work = Work(0, 0, 'preparing', self.clock, PATIENCE.total_seconds())
        self.heard = {}                         # rank -> (its last sign, when that was new)
        if world_size == 1:
            return
        # a connection of its own: the main thread may be waiting on the process group's
        self.store = dist.TCPStore(
            os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']),
            is_master=False, timeout=datetime.timedelta(seconds=QUIET))
        self.prefix = f'watch {os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)}'
        self.other_hook, sys.excepthook = sys.excepthook, self._raised
        threading.Thread(target=self._live, daemon=True).start()

    def on(self, step, what, n_bytes=0):
        """From here on this rank does `what`, a kind of work, in a step. Every rank says so, in one order. It
        has FIRST seconds the first three times, then SLOWER times the longest before, and at least STEADY;
        where it writes n_bytes, what a slow disk takes."""
        before = self.work
        if self.times[before.what] > 2:
            self.longest[before.what] = max(self.longest[before.what], self.clock - before.since)
        self.times[what] += 1
        limit = max(STEADY, SLOWER * self.longest[what]) if self.times[what] > 3 else FIRST
        if n_bytes:
            limit = STEADY + n_bytes / SLOW_DISK
        self.work = Work(before.number + 1, step, what, self.clock, limit)

    def _live(self):
        """The thread: a sign of life at each beat, and a look after the others where this rank waits long."""
        then = time.monotonic()
        for beat in itertools.count():
            now = time.monotonic()
            self.clock, then = self.clock + min(now - then, 2 * QUIET), now
            work = self.work
            waits = self.clock - work.since > QUIET
            where = f' at {_place()}' if waits else ''
            self._leave(Sign(beat, work.number, f'step {work.step}, {work.what}{where}'))
            if waits:
                self._look_after_others(work)
            else:
                self.heard.clear()
            if over.wait(BEAT):
                return

    def _look_after_others(self, work):
        signs = self._signs()
        for rank in range(self.world_size):
            sign = signs.get(rank)
            if rank not in self.heard or sign not in (None, self.heard[rank][0]):
                self.heard[rank] = sign, self.clock
        for rank, (sign, when) in self.heard.items():
            if self.clock - when > SILENCE:
                self._end(f'rank {rank} has given no sign of life for {SILENCE} s', {rank: sign})
        took = self.clock - work.since
        if signs and took > work.limit and all(sign.number >= work.number for sign in signs.values()):
            self._end(f'no rank goes on: {work.what} has taken rank {self.rank} {took:.0f} s, '
                      f'where {work.limit:.0f} are its limit', signs)

    def _raised(self, kind, error, trace):
        """sys.excepthook: tells a rank that is gone from an error of this one's own. Ends the process without
        finalisation, see leave."""
        self.on(self.work.step, 'ending')
        if issubclass(kind, RuntimeError) and told(error) is None:
            before = self._signs()
            time.sleep(5 * BEAT)
            after = self._signs()
            for rank in range(self.world_size):
                if rank != self.rank and after.get(rank) == before.get(rank):
                    self._end(f'rank {rank} is gone', {rank: after.get(rank)})
        self._first_to_tell()
        try:
            self.other_hook(kind, error, trace)
            code = 1
        except SystemExit as end:
            code = end.code
        sys.__stderr__.flush()
        os._exit(code)

    def _end(self, why, signs):
        """Ends the process; the first rank that does tells why. signs: rank -> Sign or None, of those that it
        is about."""
        if self._first_to_tell():
            last = [f'rank {rank}: {sign.text}' for rank, sign in signs.items() if sign]
            print(f'error: {why} ({"; ".join(last[:8])}). To go on from the last checkpoint: '
                  f'{command("--resume=auto")}', file=sys.__stderr__, flush=True)
        os._exit(1)  # see leave

    # The store is gone where rank 0, or its node, is: then no rank gives signs of life.

    def _leave(self, sign):
        with contextlib.suppress(RuntimeError):
            self.store.set(f'{self.prefix} {self.rank}', json.dumps(sign))

    def _signs(self):
        """rank -> its last Sign."""
        keys = [f'{self.prefix} {rank}' for rank in range(self.world_size)]
        with contextlib.suppress(RuntimeError):
            return {rank: Sign(*json.loads(sign)) for rank, sign in enumerate(self.store.multi_get(keys))}
        return {}

    def _first_to_tell(self):
        with contextlib.suppress(RuntimeError):
            return self.store.add(f'{self.prefix} told', 1) == 1
        return True


def _place():
    """Where in this folder the main thread is, as 'data.py:210'."""
    here = os.path.dirname(os.path.abspath(__file__))
    for frame, line in traceback.walk_stack(sys._current_frames()[threading.main_thread().ident]):
        path = os.path.abspath(frame.f_code.co_filename)
        if os.path.dirname(path) == here and os.path.exists(path):  # a frozen module has no file
            return f'{os.path.basename(path)}:{line}'
    return 'an unknown place'
