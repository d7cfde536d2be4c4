"""Defines the kernel of the loss: one reading of a row of logits gives its cross-entropy and its gradient.

    nats = log(sum(exp(logits))) - logits[target]       share = softmax(logits) - one_hot(target)

A program of 512 threads holds a row in registers, and writes the shares in its place: 4 bytes a logit move,
and the threads wait for memory once. Only compiled code for a GPU imports this file, since it needs Triton.
"""
import torch
import triton
import triton.language as tl
from torch import Tensor

PART = tl.constexpr(4096)       # columns: 16 bytes for each of 512 threads


@triton.jit
def loss_kernel(logits, targets, nats, V: tl.constexpr, WIDTH: tl.constexpr):
    """Compute a row of WIDTH logits, of which V are in use; padding is -inf."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, PART)
    logits += row * WIDTH       # which may pass 2**31
    place, target = logits + columns, tl.load(targets + row)
    values, most, total = (), float('-inf'), 0.0
    for first in tl.static_range(0, WIDTH, PART):
        x = tl.load(place + first, first + columns < WIDTH).to(tl.float32)
        values += (tl.where(first + columns < V, x, float('-inf')),)
        most = tl.maximum(most, values[-1])
    most = tl.max(most, 0)
    for i in tl.static_range(len(values)):
        total += tl.exp(values[i] - most)       # the powers stay in registers, too
    own = tl.load(logits + tl.maximum(target, 0), target < V, float('-inf'))
    total = tl.sum(total, 0)        # all threads have loaded `own` before any stores
    log_p, factor = own - most - tl.log(total), 1 / total
    if target < 0:
        log_p, factor = 0.0, 0.0
    tl.store(nats + row, -log_p)
    for i in tl.static_range(len(values)):
        share = tl.exp(values[i] - most) * factor
        tl.store(place + i * PART, share, i * PART + columns < WIDTH)
    tl.debug_barrier()      # another thread has stored the target's probability
    tl.store(logits + target, tl.exp(log_p) - 1, target >= 0)


@torch.library.custom_op('fp8gpt::nats_in_place', mutates_args={'logits', 'nats'})
def nats_in_place(logits: Tensor, targets: Tensor, nats: Tensor, vocab_size: int) -> None:
    """Fill nats (M,), fp32, with the cross-entropies of logits (M, V), whose columns from vocab_size on are
    padding, and the logits with the shares. Of a target of -1, both are 0. V: a multiple of 64 up to 51,200;
    of longer rows, registers spill."""
    loss_kernel[(len(logits),)](
        logits, targets, nats, V=vocab_size, WIDTH=logits.shape[1], num_warps=16, enable_fp_fusion=True)


@torch.compiler.assume_constant_result      # asked while code is compiled, of the GPU itself
def launches(device):
    """Return whether a GPU takes the kernel."""
    try:
        nats_in_place(torch.zeros(1, 64, device=device), torch.zeros(1, dtype=torch.int64, device=device),
                      torch.empty(1, device=device), 64)
    except RuntimeError:
        return False
    return True
