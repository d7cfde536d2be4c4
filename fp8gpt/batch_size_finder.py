"""batch_size=0: find the most sequences of a micro-batch that train on this GPU, by trial.

A trial is two whole steps as the run makes them: compiled, micro-steps that find gradients, the optimizer's
step with its state. Few are made: memory grows about linearly with the batch, so two small trials tell where
to look, and one there whether that is right. Parameters stay as they are, bit for bit.
"""
import bisect
import dataclasses
import functools
import math

import torch

from fp8gpt import distributed, optim
from fp8gpt.run import FOUND_ON, Run, batch_sizes, micro_steps
from fp8gpt.runlog import device_name
from configurator import MachineError

HEADROOM = 0.1      # of a GPU's memory: for evaluation, samples and the allocator's gaps
NO_ROOM = -2**60    # bytes that a trial leaves which ran out of memory


def find_batch_size(run, model, optimizer, ranks, packed):
    """Return the largest batch_size that fits every rank, and put it into the run's settings. A resumed run
    takes what was found, on as many GPUs of the same name. See Trial for the arguments. Raises MachineError
    where no batch fits, SettingError where none divides the step's target."""
    here = f'{ranks.world_size} x {device_name(ranks.device)}'
    before = run.resumed['config'] if run.resumed else {}
    there, size = before.get(FOUND_ON), before.get('batch_size')
    sizes = batch_sizes(run.config, ranks.world_size)
    if there == here and size in sizes:
        run.changes.append(f'batch     batch_size={size}, as found on {there} before')
    else:
        size, trials = search(sizes or [1], Trial(run, model, optimizer, ranks, packed).room)
        run.changes.append(f'batch     batch_size={size} fits, with {HEADROOM:.0%} of the memory left, '
                           f'by {trials} trials')
    run.config.update({'batch_size': size, FOUND_ON: here})
    return size


def search(sizes, room):
    """Return (the largest of the ascending sizes that fits, the number of trials). room(size): the bytes that
    a trial leaves, negative where it does not fit. Raises MachineError where none fits."""
    left, low, high, i = {}, 0, len(sizes), 0  # sizes[:low] fit, sizes[high:] do not
    while low <= i < high:
        left[sizes[i]] = room(sizes[i])
        low, high = (i + 1, high) if left[sizes[i]] >= 0 else (low, i)
        i = low
        if len(left) > 1:
            i = bisect.bisect_right(sizes, most(left)) - 1
        if i >= high:  # where one beyond ran out of memory, the line is wrong
            i = high - 1 if high == len(sizes) else (low + high) // 2
    if not low:
        raise MachineError('batch_size=0: no batch fits here, not even of one sequence: '
                           '--grad_checkpointing=full and --loss_chunks=8 take less memory')
    return sizes[low - 1], len(left)


def most(left):
    """Return the size that leaves nothing, by the line through the largest trial that fits and the smallest
    that does not or, where none told by how much, through the two largest that fit. left: size -> bytes."""
    fitting = sorted(size for size in left if left[size] >= 0)
    beyond = sorted(size for size in left if NO_ROOM < left[size] < 0)
    a, b = (fitting + beyond[:1])[-2:]
    per_sequence = (left[a] - left[b]) / (b - a)
    return a + left[a] / per_sequence if per_sequence > 0 else math.inf


@dataclasses.dataclass
class Trial:
    """A training step to be tried. model: as the run computes it, compiled or not. packed: whether windows
    hold several examples, which attention keeps apart."""
    run: Run
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    ranks: distributed.Ranks
    packed: bool = False

    def room(self, size):
        """Return the bytes that two steps with micro-batches of `size` sequences leave, apart from HEADROOM,
        on the rank where they are fewest. The first step compiles and makes the optimizer's state, which go
        again."""
        step = functools.partial(self.step, size)
        torch._dynamo.reset()  # or two sizes would make one graph of any size
        try:
            step()
            left = allowed_bytes(self.ranks.device) - peak_bytes(step, self.ranks.device)
        except torch.OutOfMemoryError:
            left = NO_ROOM
        finally:
            self.optimizer.zero_grad(set_to_none=True)
            self.optimizer.state.clear()
            torch._dynamo.reset()
        return distributed.smallest_of_ranks(int(left))

    def step(self, size):
        """Make a whole step at a learning rate of 0, which changes no parameter. The second
        micro-step finds the first one's gradients, and takes as much memory as any later one."""
        device, config = self.ranks.device, self.run.config
        x = torch.zeros((size, config['block_size']), dtype=torch.long, device=device)
        examples = x.clone() if self.packed else None
        for _ in range(min(2, micro_steps(config, size, self.ranks.world_size))):
            self.model(x, x.clone(), n_targets=float(x.numel()), examples=examples).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optim.set_rate(self.optimizer, 0.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def allowed_bytes(device):
    """Return the bytes of a GPU for tensors: its memory less HEADROOM and what is not torch's, as CUDA's
    context."""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return (1 - HEADROOM) * total - others


def peak_bytes(work, device):
    """Return the most bytes that tensors take on a GPU while work() runs."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    work()
    return torch.cuda.max_memory_allocated(device)
