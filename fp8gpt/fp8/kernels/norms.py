"""Computes LayerNorm and RMSNorm in one reading of their inputs. Forward adds a branch to the residual stream
and, for delayed scaling, casts the norm to FP8. (Without a scale, torch.compile makes one kernel of it.)
Backward adds the residual's gradient; torch.compile would read twice, by rows and by columns.

    xhat = (x - mean) * rstd        y = xhat * weight + bias        RMSNorm: neither mean nor bias
    dx = (g - xhat avg(g xhat) - avg(g)) * rstd + residual          g = dy * weight; RMSNorm: without avg(g)

Averages are over a row. Values are rounded to bf16 where a plain model rounds them; statistics and sums are
fp32, in a fixed order. On a CPU torch computes it: the reference against which the kernel is tested.
"""
import torch
from torch import Tensor

from .casts import (
    bf16, cast_in_torch, constexpr, in_triton, jit, key_of, launch, load_fp32, normalise, op, store_cast, tl,
    triton)

PROGRAMS = 264      # two for each multiprocessor of an H100 or H200
WIDEST = 2048       # columns of which a program of norm_cast holds 16 rows in registers


def tile_of(C):
    """Return (rows, warps, registers a thread) of a turn of a program.

    256 columns a warp, eight a thread: no two warps share a column, so sums over rows stay in registers. Two
    programs share a multiprocessor, of up to 4096 columns. 8 rows of 1024 columns and 2 of 2048 are the most
    that do not spill."""
    width = 1 << (C - 1).bit_length()     # Triton's tiles have no other widths
    if width <= 1024:
        return 8, max(1, width // 256), 255
    return max(1, 4096 // width), 8, 128 if width <= 4096 else 255


# ------------------------------------------------------------------------------------------- Triton's kernels

@jit
def norm_cast_kernel(inputs, outputs, scale, eps: constexpr, C: constexpr):
    """Let a program take 16 rows, so that it stores 16 bytes of each column, transposed. inputs, outputs: as
    norm_cast's."""
    x, delta, weight, bias = inputs
    program = tl.program_id(0)
    first = tl.cast(program, tl.int64) * 16
    start = first * C
    M = tl.num_programs(0).to(tl.int64) * 16
    rows = tl.arange(0, 16)[:, None]
    columns = tl.arange(0, triton.next_power_of_2(C))[None, :]
    held = columns < C
    tokens = first + rows
    tile = rows * C + columns
    y = load_fp32(x + start + tile, held)
    y += load_fp32(delta + start + tile, held)
    y = bf16(y)
    tl.store(outputs[3] + start + tile, y, mask=held)
    if len(outputs) > 5:
        average = tl.sum(y, 1, keep_dims=True) / C
        tl.store(outputs[5] + tokens, average)
        y = tl.where(held, y - average, 0.0)
    variance = tl.sum(y * y, 1, keep_dims=True) / C
    inverse = tl.rsqrt(variance + eps)
    tl.store(outputs[4] + tokens, inverse)
    y *= inverse
    y *= load_fp32(weight + columns, held)
    if bias is not None:
        y += load_fp32(bias + columns, held)
    places = start + tile, columns * M + tokens
    bits = store_cast(bf16(y), tl.load(scale), outputs, places, held)
    tl.store(outputs[2] + program, bits.to(tl.float32, bitcast=True))


@jit
def norm_backward_kernel(inputs, outputs, M, C: constexpr, BLOCK_M: constexpr):
    """Let a program take every num_programs-th block of BLOCK_M rows and sum over its blocks."""
    dy, total, mean, rstd, weight, residual = inputs
    dx, sums = outputs
    program = tl.program_id(0)
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, triton.next_power_of_2(C))
    held = (columns < C)[None, :]
    tile = rows[:, None] * C + columns[None, :]
    w = load_fp32(weight + columns, columns < C)[None, :]
    weight_sum = tl.zeros_like(w)
    bias_sum = tl.zeros_like(w)
    for block in range(program, M // BLOCK_M, tl.num_programs(0)):
        first = tl.cast(block, tl.int64) * BLOCK_M
        start = first * C
        g = load_fp32(dy + start + tile, held)
        xhat = load_fp32(total + start + tile, held)
        above = load_fp32(residual + start + tile, held)      # early, though it is added last
        inverse = tl.load(rstd + first + rows)[:, None]
        if mean is not None:
            average = tl.load(mean + first + rows)
            xhat -= average[:, None]
        xhat *= inverse
        weight_sum += tl.sum(g * xhat, 0, keep_dims=True)
        bias_sum += tl.sum(g, 0, keep_dims=True)
        g *= w
        along = tl.sum(g * xhat, 1, keep_dims=True) / C
        slope = g - xhat * along
        if mean is not None:
            slope -= tl.sum(g, 1, keep_dims=True) / C
        tl.store(dx + start + tile, bf16(bf16(slope * inverse) + above), mask=held)
    own = program * C + columns[None, :]
    tl.store(sums + own, weight_sum, mask=held)
    if mean is not None:
        tl.store(sums + tl.num_programs(0) * C + own, bias_sum, mask=held)


# --------------------------------------------------------------------------------------------------- the ops

def add_and_normalise(x, delta, weight, bias, of_norm):
    """Return the norm (M, C) of x + delta, that sum, rstd (M,) and, unless `rms`, mean (M,). x, delta (M, C)
    bf16; delta and bias may be None. of_norm: eps and `rms`."""
    eps, rms = of_norm
    total = x if delta is None else x + delta
    centred, mean = total.float(), None
    if not rms:
        mean = centred.mean(1)
        centred = centred - mean[:, None]
    rstd = (centred.square().mean(1) + eps).rsqrt()
    [y] = normalise(total, rstd, weight, mean, bias)
    statistics = [rstd] if rms else [rstd, mean]
    return y, total, *statistics


def unfilled_norm_cast(inputs, eps, rms, scale, dtype):
    """Return norm_cast's outputs, not filled."""
    total = torch.empty_like(inputs[0])
    M, C = total.shape
    data = total.new_empty(M, C, dtype=dtype)
    data_t = data.new_empty(C, M)
    programs = M // 16 if in_triton(total) else 1
    amaxes = total.new_empty(programs, dtype=torch.float32)
    statistics = [amaxes.new_empty(M) for _ in range(2 - rms)]
    return [data, data_t, amaxes, total, *statistics]


@op(unfilled_norm_cast)
def norm_cast(inputs: list[Tensor | None], eps: float, rms: bool, scale: Tensor, dtype: torch.dtype
              ) -> list[Tensor]:
    """Return data, data_t and amaxes of the norm of x + delta, as cast does; x + delta (M, C), bf16; rstd
    (M,) and, unless `rms`, mean (M,), fp32. inputs: x, delta (M, C) bf16, weight (C,), bias (C,) or None. M
    is a multiple of 16, C at most WIDEST."""
    if not in_triton(inputs[0]):
        y, *others = add_and_normalise(*inputs, (eps, rms))
        *of_cast, _ = cast_in_torch([y], 'plain', scale, dtype, False)
        return [*of_cast, *others]
    outputs = unfilled_norm_cast(inputs, eps, rms, scale, dtype)
    M, C = outputs[0].shape
    arguments = tuple(inputs), tuple(outputs), scale, eps, C
    tensors = scale, *inputs
    key = 'norm_cast', eps, rms, dtype, scale.get_device(), *map(key_of, tensors)
    warps = max(4, triton.next_power_of_2(C) // 128)
    grid = M // 16, 1, 1
    launch(norm_cast_kernel, grid, arguments, key, num_warps=warps, maxnreg=128)
    return outputs


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
