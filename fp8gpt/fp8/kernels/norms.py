"""Computes the backward pass of LayerNorm and RMSNorm in one reading of its inputs, where torch.compile would
read twice, by rows and by columns. The gradient of the residual stream is added, too.

    xhat = (x - mean) * rstd        y = xhat * weight + bias        RMSNorm: neither mean nor bias
    dx = (g - xhat avg(g xhat) - avg(g)) * rstd + residual          g = dy * weight; RMSNorm: without avg(g)

Averages are over a row. Values are rounded to bf16 where a plain model rounds them; statistics and sums are
fp32, in a fixed order. On a CPU torch computes it: the reference against which the kernel is tested.
"""
import torch
from torch import Tensor

from .casts import bf16, constexpr, in_triton, jit, key_of, launch, load_fp32, op, tl, triton

PROGRAMS = 264      # two for each multiprocessor of an H100 or H200


def tile_of(C):
    """Return (rows, warps, registers a thread) of a turn of a program.

    256 columns a warp, eight a thread: no two warps share a column, so sums over rows stay in registers. Two
    programs share a multiprocessor, of up to 4096 columns. 8 rows of 1024 columns and 2 of 2048 are the most
    that do not spill."""
    width = 1 << (C - 1).bit_length()     # Triton's tiles have no other widths
    if width <= 1024:
        return 8, max(1, width // 256), 255
    return max(1, 4096 // width), 8, 128 if width <= 4096 else 255


# ------------------------------------------------------------------------------------------- Triton's kernel

@jit
def load_rows(inputs, first, tile, held, C: constexpr):
    """Load a block of rows from `first` on: dy, xhat and the residual's gradient, tiles, and rstd (rows, 1).
    tile: the offsets of a block's values; held: which are inside."""
    dy, total, mean, rstd, _, residual = inputs
    rows = first + tl.arange(0, tile.shape[0])
    start = first * C
    g = load_fp32(dy + start + tile, held)
    xhat = load_fp32(total + start + tile, held)
    above = load_fp32(residual + start + tile, held)      # early, though it is added last
    inverse = tl.load(rstd + rows)[:, None]
    if mean is not None:
        average = tl.load(mean + rows)
        xhat -= average[:, None]
    return g, xhat * inverse, above, inverse


@jit
def norm_backward_kernel(inputs, outputs, M, C: constexpr, BLOCK_M: constexpr):
    """Let a program take every num_programs-th block of BLOCK_M rows and sum over its blocks."""
    _, _, mean, _, weight, _ = inputs
    dx, sums = outputs
    program = tl.program_id(0)
    columns = tl.arange(0, triton.next_power_of_2(C))
    held = (columns < C)[None, :]
    tile = tl.arange(0, BLOCK_M)[:, None] * C + columns[None, :]
    w = load_fp32(weight + columns, columns < C)[None, :]
    weight_sum = tl.zeros_like(w)
    bias_sum = tl.zeros_like(w)
    for block in range(program, M // BLOCK_M, tl.num_programs(0)):
        first = tl.cast(block, tl.int64) * BLOCK_M
        g, xhat, above, inverse = load_rows(inputs, first, tile, held, C)
        weight_sum += tl.sum(g * xhat, 0, keep_dims=True)
        bias_sum += tl.sum(g, 0, keep_dims=True)
        g *= w
        along = tl.sum(g * xhat, 1, keep_dims=True) / C
        slope = g - xhat * along
        if mean is not None:
            slope -= tl.sum(g, 1, keep_dims=True) / C
        tl.store(dx + first * C + tile, bf16(bf16(slope * inverse) + above), mask=held)
    own = program * C + columns[None, :]
    tl.store(sums + own, weight_sum, mask=held)
    if mean is not None:
        tl.store(sums + tl.num_programs(0) * C + own, bias_sum, mask=held)


# ---------------------------------------------------------------------------------------------------- the op

def unfilled_gradients(dy, x, mean, rstd, weight, residual):
    """Return norm_backward's outputs, not filled."""
    (M, C), programs = dy.shape, 1
    if in_triton(dy):
        programs = min(PROGRAMS, M // tile_of(C)[0])
    sums = dy.new_empty(1 if mean is None else 2, programs, C, dtype=torch.float32)
    return torch.empty_like(dy), sums


def in_torch(dy, x, mean, rstd, weight, residual):
    """Return what norm_backward does: the kernel's reference."""
    xhat = (x.float() if mean is None else x.float() - mean[:, None]) * rstd[:, None]
    dy = dy.float()
    g = dy * weight
    slope = g - xhat * (g * xhat).mean(1, keepdim=True)
    if mean is not None:
        slope = slope - g.mean(1, keepdim=True)
    dx = (slope * rstd[:, None]).to(x.dtype) + residual
    sums = [(dy * xhat).sum(0)] if mean is None else [(dy * xhat).sum(0), dy.sum(0)]
    return dx, torch.stack(sums)[:, None]


@op(unfilled_gradients)
def norm_backward(dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor,
                  residual: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of a norm's input x (M, C), bf16, to which residual (M, C) is added, and partial
    sums (2, programs, C), fp32, of its weight's and bias's; (1, programs, C) where mean is None, as RMSNorm
    has it. dy (M, C) bf16, mean and rstd (M,) fp32, M a multiple of 16."""
    inputs = dy, x, mean, rstd, weight, residual
    if not in_triton(dy):
        return in_torch(*inputs)
    dx, sums = outputs = unfilled_gradients(*inputs)
    (M, C), (rows, warps, registers) = dy.shape, tile_of(dy.shape[1])
    launch(norm_backward_kernel, (sums.shape[1], 1, 1), (inputs, outputs, M, C, rows),
           ('norm_backward', dy.get_device(), *map(key_of, inputs)), num_warps=warps, maxnreg=registers)
    return outputs
