"""batch_size=0: find the largest micro-batch that trains on this GPU, by trials of whole training steps.

A trial is two steps as the run makes them: compiled, micro-steps that find gradients, the optimizer's step
with its state. Bisection keeps trials few: 3 for the powers of two up to 128. Parameters stay as they are,
bit for bit.
"""
import bisect

import torch

from fp8gpt import distributed, optim
from fp8gpt.run import micro_steps
from configurator import MachineError, error_line

HEADROOM = 0.1      # of a GPU's memory: for evaluation, samples and the allocator's gaps


def find_batch_size(run, model, optimizer, ranks, packed):
    """Return the largest batch_size that fits every rank.

    model: as the run computes it, compiled or not. packed: whether windows hold several examples, which
    attention keeps apart. Raises MachineError where no batch fits."""
    config, device = run.config, ranks.device

    def step(x, examples, steps):
        """Make a whole step on tokens x (B, T) at a learning rate of 0, which changes no parameter. The
        second micro-step finds the first one's gradients, and takes as much memory as any later one."""
        for _ in range(steps):
            model(x, x.clone(), n_targets=float(x.numel()), examples=examples).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.set_rate(optimizer, 0.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def fits(size):
        """Return whether two steps with micro-batches of `size` sequences leave HEADROOM on every rank. The
        first step compiles and makes the optimizer's state, which is removed again."""
        torch._dynamo.reset()  # or two sizes would make one graph of any size
        steps = min(2, micro_steps(config, size, ranks.world_size))
        try:
            x = torch.zeros((size, config['block_size']), dtype=torch.long, device=device)
            examples = x.clone() if packed else None
            step(x, examples, steps)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            step(x, examples, steps)
            fitting = torch.cuda.max_memory_allocated(device) <= allowed_bytes(device)
        except RuntimeError as error:
            if error_line(error)[1] != 3:   # not of memory
                raise
            fitting = False
        finally:
            optimizer.zero_grad(set_to_none=True)
            optimizer.state.clear()
            torch._dynamo.reset()
        return bool(distributed.smallest_of_ranks(int(fitting)))

    size = largest_fitting(config, ranks.world_size, fits)
    run.notes.append(f'batch     batch_size={size} fits, with {HEADROOM:.0%} of the memory left')
    return size


def largest_fitting(config, world_size, fits):
    """Return the largest batch size up to max_batch_size that divides a step's sequences on each rank and for
    which fits(size) is true. Raises MachineError where none is."""
    wanted = config['target_effective_batch_size'] or config['total_batch_size'] // config['block_size']
    sizes = range(1, config['max_batch_size'] + 1)
    sizes = [size for size in sizes if wanted % (size * world_size) == 0] or [1]
    fitting = bisect.bisect_left(sizes, True, key=lambda size: not fits(size))
    if not fitting:
        raise MachineError('batch_size=0: no batch fits here, not even of one sequence: '
                           '--grad_checkpointing=full and --loss_chunks=8 take less memory')
    return sizes[fitting - 1]


def allowed_bytes(device):
    """Return the bytes of a GPU for tensors: its memory less HEADROOM and the memory that is not torch's,
    such as CUDA's context."""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return (1 - HEADROOM) * total - others
