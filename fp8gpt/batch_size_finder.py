"""batch_size=0: the most sequences of a micro-batch that train on this GPU, by trial.

A trial is two whole steps as the run makes them: compiled, micro-steps that find gradients, the optimizer's
step with its state. Few are made: memory grows about linearly with the batch, so two small trials tell where
to look, and one there whether that is right. Parameters stay as they are, bit for bit.
"""
import bisect
import dataclasses
import functools
import math

import torch

from fp8gpt import distributed, optim, resolve
from configurator import MachineError
from fp8gpt.gpus import device_name

HEADROOM = 0.1      # of a GPU's memory: for evaluation, samples and the allocator's gaps
NO_ROOM = -2**60    # bytes that a trial leaves which ran out of memory
FOUND_ON = 'batch_size_found_on'    # beside a checkpoint's settings: the GPUs of that search


def settle_batch_size(run, model, optimizer, ranks, packed):
    """The run's batch_size; where that is 0 the largest that fits every rank, which becomes the setting. A
    resumed run takes what was found, on as many GPUs of the same name, and searches again on others. Raises
    MachineError where no batch fits, SettingError where none divides the step's target. See Trial."""
    config, here = run.config, f'{ranks.world_size} x {device_name(ranks.device)}'
    before = run.resumed['config'] if run.resumed else {}
    there, size = before.get(FOUND_ON), before.get('batch_size')
    chosen = config['batch_size'] and (not there or 'batch_size' in config.given)
    if chosen or ranks.device.type != 'cuda':
        return config['batch_size']
    sizes = resolve.batch_sizes(config, ranks.world_size)
    if there == here and size in sizes:
        run.changes.append(f'batch     batch_size={size}, as found on {there} before')
    else:
        again = f', not the {size} found on {there}' if there else ''
        size, trials = search(sizes or [1], Trial(run, model, optimizer, ranks, packed).room)
        run.changes.append(f'batch     batch_size={size} fits, and {HEADROOM:.0%} of the memory beside it, '
                           f'by {trials} trials{again}')
    config.update({'batch_size': size, FOUND_ON: here})
    return size


def search(sizes, room):
    """(the largest of the ascending sizes that fits, the number of trials). room(size): the bytes that a
    trial leaves, negative where it does not fit. Raises MachineError where none fits."""
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
    """The size that leaves nothing, by the line through the largest trial that fits and the smallest that
    does not or, where none told by how much, through the two largest that fit. left: size -> bytes."""
    fitting = sorted(size for size in left if left[size] >= 0)
    beyond = sorted(size for size in left if NO_ROOM < left[size] < 0)
    a, b = (fitting + beyond[:1])[-2:]
    per_sequence = (left[a] - left[b]) / (b - a)
    return a + left[a] / per_sequence if per_sequence > 0 else math.inf


@dataclasses.dataclass
class Trial:
    """A training step to be tried. model: as the run computes it, compiled or not. packed: whether windows
    hold several examples, which attention keeps apart."""
    run: resolve.Run
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    ranks: distributed.Ranks
    packed: bool = False

    def room(self, size):
        """The bytes that two steps with micro-batches of `size` sequences leave, beside the head-room, on the
        rank where they are fewest. Compiles, and makes the optimizer's state, in the first; both go again."""
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
        """A whole step at a learning rate of 0, which changes no parameter. The second
        micro-step finds the first one's gradients, and takes as much memory as any later one."""
        device, block_size = self.ranks.device, self.run.config['block_size']
        micro_steps = resolve.micro_steps_of(self.run.config, size, block_size, self.ranks.world_size)
        x = torch.zeros((size, block_size), dtype=torch.long, device=device)
        examples = x.clone() if self.packed else None
        for _ in range(min(2, micro_steps)):
            self.model(x, x.clone(), n_targets=float(x.numel()), examples=examples).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optim.set_rate(self.optimizer, 0.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def allowed_bytes(device):
    """Of a GPU, for tensors: its memory less the head-room and what is not torch's, as CUDA's context."""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return (1 - HEADROOM) * total - others


def peak_bytes(work, device):
    """The most that tensors take on a GPU while work() runs."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    work()
    return torch.cuda.max_memory_allocated(device)
