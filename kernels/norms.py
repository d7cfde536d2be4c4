"""LayerNorm and RMSNorm that leave their output in FP8, twice: a row at a time for the forward multiplication,
transposed for the weight gradient's. On a GPU each is one Triton kernel that reads its inputs once.

    total = x + delta                                                       the residual stream's addition
    xhat  = (total - mean) * rstd        y = xhat * weight + bias           RMSNorm: no mean, no bias
    data  = (y * scale) in FP8           data_t = data^T                    see fp8_linear.py

norm does all of it where the scale is known before (delayed scaling). Where it comes from y itself, norm gives
y's amax and norm_cast computes the same y again, for a second reading of total costs less than y, written and
read. norm_backward adds what the residual stream brings from above.

Values are rounded to bf16 where a plain model rounds them, statistics are fp32, sums have a fixed order. An op
on a CPU is its torch form, which the kernels are tested against. An amax is largest by its bits as an integer,
so that NaN > inf > the finite; NaN itself may be cast to a number, and the caller asks whether amax is finite.
"""
import os
import types

import torch
from torch import Tensor

from configurator import MachineError

try:
    import triton
    import triton.language as tl
    jit = triton.jit
except ImportError:  # the torch forms and the shapes need none
    triton, tl = None, types.SimpleNamespace(constexpr=None)

    def jit(function):
        return function

INTERPRETED = os.environ.get('TRITON_INTERPRET') == '1'     # kernels run on a CPU, slowly
PROGRAMS = 264                                              # of norm_backward: two for each of 132 multiprocessors
TILE = 64                                                   # norm_cast's: 64 bytes are two sectors, either way


def runs_kernel(x):
    """Whether x is a kernel's: on a CPU only Triton's interpreter runs one."""
    return x.device.type == 'cuda' or INTERPRETED


def check(x):
    """Raises ValueError for x (M, C) that no FP8 multiplication takes, MachineError where Triton is missing."""
    if x.shape[0] % 16 or x.shape[1] % 16:
        raise ValueError(f'FP8 dimensions are multiples of 16, not {x.shape[0]} x {x.shape[1]}')
    if runs_kernel(x) and triton is None:
        raise MachineError('the FP8 kernels are written in Triton, which is not installed: pip install triton')


def padded(C):
    """The power of two that holds a row: Triton's tiles have no other widths."""
    return 1 << (C - 1).bit_length()


def norm_tile(M, C):
    """(rows, warps) of a program of norm.

    data_t is written `rows` bytes at a time: 32 are a sector of memory, 16 half of one, which the cache joins
    to its neighbour's. A program keeps its rows in fp32 between statistics and output: 32 x 1024 (C of 768 and
    1024) or 16 x 2048 (1280 and 1600) values are 128 KB, half of a multiprocessor's registers. 16 warps hold
    64 of them a thread, and as many registers are left for addresses and the rest. 4096 columns leave 8 rows."""
    rows = max(1, min(32 if M % 32 == 0 else 16, 32768 // padded(C)))
    return rows, min(16, max(1, rows * padded(C) // 2048))


def backward_tile(C):
    """(rows, warps, registers a thread) of a step of norm_backward's programs.

    256 columns a warp, eight a thread: no two warps share a column, so the sums over rows stay in registers.
    Two programs share a multiprocessor, so that one computes while the other's tiles, 24 or 48 KB, are on their
    way: half of its 65,536 registers each. 8 rows of 1024 columns and 2 of 2048 are the most that do not spill."""
    if padded(C) <= 1024:
        return 8, max(1, padded(C) // 256), 255
    return max(1, 4096 // padded(C)), 8, 128


# -------------------------------------------------------------------------------------------------- torch forms

def statistics(total, eps, rms):
    """mean (M,), or (0,), and rstd (M,), fp32, of total (M, C)."""
    wide = total.float()
    mean = wide.new_empty(0)
    if not rms:
        mean = wide.mean(1)
        wide = wide - mean[:, None]
    return mean, (wide.square().mean(1) + eps).rsqrt()


def normalized(total, mean, rstd, weight, bias):
    """xhat (M, C) fp32 and y (M, C) in total's dtype; mean (M,), or (0,) for RMSNorm."""
    wide = total.float()
    if len(mean):
        wide = wide - mean[:, None]
    xhat = wide * rstd[:, None]
    y = xhat * weight
    return xhat, (y if bias is None else y + bias).to(total.dtype)


def cast(y, scale, dtype):
    """y (M, C) -> (M, C) and (C, M) in FP8, as fp8_linear.Quantizer does for one scale (0-dim)."""
    largest = torch.finfo(dtype).max
    data = (y.float() * scale).clamp(-largest, largest).to(dtype)
    return data, data.t().contiguous()


def largest_of(y):
    """|y|'s largest, (1,) fp32."""
    return y.abs().amax().float().view(1)


# ----------------------------------------------------------------------------------------------- Triton kernels

@jit
def magnitude(value):
    """|value|'s bits, int32, of a bf16 tile."""
    return value.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def store_casts(value, scale, data, data_t, first, rows, columns, M, C):
    """Stores a tile of bf16 values in FP8 into data (M, C) and data_t (C, M). first: the tile's first row, int64;
    rows: from there on; columns: of all."""
    largest: tl.constexpr = 448.0 if data.dtype.element_ty == tl.float8e4nv else 57344.0
    scaled = value.to(tl.float32) * tl.load(scale)
    clamped = tl.minimum(tl.maximum(scaled, -largest), largest)     # neither of which propagates NaN
    codes = clamped.to(data.dtype.element_ty)
    inside = (first + rows < M)[:, None] & (columns < C)[None, :]
    tl.store(data + first * C + (rows[:, None] * C + columns[None, :]), codes, mask=inside)
    across = columns.to(tl.int64)[:, None] * M
    tl.store(data_t + first + (across + rows[None, :]), tl.trans(codes), mask=tl.trans(inside))


@jit
def affine(wide, mean, rstd, weight, bias, columns, C):
    """(wide - mean) * rstd * weight + bias, bf16, of a tile; mean (rows,) or None, rstd (rows,)."""
    if mean is not None:
        wide -= mean[:, None]
    value = wide * rstd[:, None] * tl.load(weight + columns, mask=columns < C, other=0)[None, :]
    if bias is not None:
        value += tl.load(bias + columns, mask=columns < C, other=0)[None, :]
    return value.to(tl.bfloat16)


@jit
def norm_kernel(  # noqa: PLR0913  a kernel's arguments are flat
        x, delta, weight, bias, scale, total, mean, rstd, data, data_t, partials, M, eps,
        C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """A program norms BLOCK_M whole rows; what is None is neither read nor written."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_C)
    inside = (columns < C)[None, :]
    tile = rows[:, None] * C + columns[None, :]
    value = tl.load(x + first * C + tile, mask=inside, other=0)
    if delta is not None:
        added = tl.load(delta + first * C + tile, mask=inside, other=0)
        value = (value.to(tl.float32) + added).to(tl.bfloat16)
        tl.store(total + first * C + tile, value, mask=inside)
    wide = value.to(tl.float32)
    centred = wide
    average = None
    if mean is not None:
        average = tl.sum(wide, 1) / C
        tl.store(mean + first + rows, average)
        centred = tl.where(inside, wide - average[:, None], 0)
    inverse = tl.rsqrt(tl.sum(centred * centred, 1) / C + eps)
    tl.store(rstd + first + rows, inverse)
    y = affine(wide, average, inverse, weight, bias, columns, C)
    most = tl.max(tl.max(magnitude(y), 1), 0)    # y is 0 beyond C
    tl.store(partials + tl.program_id(0), most.to(tl.float32, bitcast=True))
    if scale is not None:
        store_casts(y, scale, data, data_t, first, rows, columns, M, C)


@jit
def norm_cast_kernel(  # noqa: PLR0913
        total, mean, rstd, weight, bias, scale, data, data_t, M,
        C: tl.constexpr, BLOCK: tl.constexpr):
    """A program casts BLOCK x BLOCK values."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    rows = tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    below = first + rows < M
    inside = below[:, None] & (columns < C)[None, :]
    wide = tl.load(total + first * C + (rows[:, None] * C + columns[None, :]), mask=inside, other=0)
    average = None
    if mean is not None:
        average = tl.load(mean + first + rows, mask=below, other=0)
    inverse = tl.load(rstd + first + rows, mask=below, other=0)
    y = affine(wide.to(tl.float32), average, inverse, weight, bias, columns, C)
    store_casts(y, scale, data, data_t, first, rows, columns, M, C)


@jit
def norm_backward_kernel(  # noqa: PLR0913
        dy, total, mean, rstd, weight, residual, dx, dweight, dbias, partials, M,
        C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """A program takes every num_programs-th block of BLOCK_M rows and sums over its own."""
    program = tl.program_id(0)
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_C)
    tile = rows[:, None] * C + columns[None, :]
    inside = (columns < C)[None, :]
    w = tl.load(weight + columns, mask=columns < C, other=0)[None, :]
    sum_weight = tl.zeros([BLOCK_C], tl.float32)
    sum_bias = tl.zeros([BLOCK_C], tl.float32)
    most = tl.zeros([BLOCK_C], tl.int32)
    for block in range(program, M // BLOCK_M, tl.num_programs(0)):
        first = tl.cast(block, tl.int64) * BLOCK_M
        start = first * C
        g = tl.load(dy + start + tile, mask=inside, other=0).to(tl.float32)
        xhat = tl.load(total + start + tile, mask=inside, other=0).to(tl.float32)
        if residual is not None:        # asked for early, though it is added last
            above = tl.load(residual + start + tile, mask=inside, other=0)
        inverse = tl.load(rstd + first + rows)[:, None]
        if mean is not None:
            xhat -= tl.load(mean + first + rows)[:, None]
        xhat *= inverse
        sum_weight += tl.sum(g * xhat, 0)
        sum_bias += tl.sum(g, 0)
        g *= w                                                      # 0 beyond C
        slope = g - xhat * (tl.sum(g * xhat, 1) / C)[:, None]
        if mean is not None:
            slope -= (tl.sum(g, 1) / C)[:, None]
        value = (slope * inverse).to(tl.bfloat16)
        if residual is not None:
            value = (value.to(tl.float32) + above).to(tl.bfloat16)
        tl.store(dx + start + tile, value, mask=inside)
        most = tl.maximum(most, tl.max(tl.where(inside, magnitude(value), 0), 0))
    tl.store(dweight + program * C + columns, sum_weight, mask=columns < C)
    if mean is not None:
        tl.store(dbias + program * C + columns, sum_bias, mask=columns < C)
    tl.store(partials + program, tl.max(most, 0).to(tl.float32, bitcast=True))


# ---------------------------------------------------------------------------------------------------------- ops

def given(tensor):
    """None for an empty tensor: a kernel leaves it out."""
    return tensor if tensor.numel() else None


def norm_outputs(x, delta, weight, bias, eps, rms, scale, dtype):
    """norm's outputs, not filled."""
    M, C = x.shape
    programs = M // norm_tile(M, C)[0] if runs_kernel(x) else 1
    cast_rows = 0 if scale is None else M
    wide = x.new_empty(0, dtype=torch.float32)
    return (
        x.new_empty(0 if delta is None else M, C),
        wide.new_empty(0 if rms else M),
        wide.new_empty(M),
        x.new_empty(cast_rows, C, dtype=dtype),
        x.new_empty(C, cast_rows, dtype=dtype),
        wide.new_empty(programs))


@torch.library.custom_op('fp8_kernels::norm', mutates_args=())
def norm(x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, rms: bool,
         scale: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x and delta (M, C) bf16, weight and bias (C,) fp32, scale 0-dim fp32 -> total (M, C) bf16, (0, C) where
    delta is None; mean (M,), (0,) where rms; rstd (M,); data (M, C) and data_t (C, M) in dtype, (0, C) and
    (C, 0) where scale is None; |y|'s largest values, (programs,) fp32. Raises what check does."""
    check(x)
    outputs = norm_outputs(x, delta, weight, bias, eps, rms, scale, dtype)
    total, mean, rstd, data, data_t, partials = outputs
    if not runs_kernel(x):
        value = x if delta is None else x + delta
        mean, rstd = statistics(value, eps, rms)
        y = normalized(value, mean, rstd, weight, bias)[1]
        if scale is not None:
            data, data_t = cast(y, scale, dtype)
        return total if delta is None else value, mean, rstd, data, data_t, largest_of(y)
    M, C = x.shape
    rows, warps = norm_tile(M, C)
    norm_kernel[(M // rows,)](
        x=x, delta=delta, weight=weight, bias=bias, scale=scale,
        total=total, mean=given(mean), rstd=rstd, data=data, data_t=data_t, partials=partials,
        M=M, eps=eps, C=C, BLOCK_M=rows, BLOCK_C=padded(C), num_warps=warps)
    return outputs


def norm_cast_outputs(total, mean, rstd, weight, bias, rms, scale, dtype):
    """norm_cast's outputs, not filled."""
    M, C = total.shape
    return total.new_empty(M, C, dtype=dtype), total.new_empty(C, M, dtype=dtype)


@torch.library.custom_op('fp8_kernels::norm_cast', mutates_args=())
def norm_cast(total: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor | None, rms: bool,
              scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """norm's input to the statistics (x where there was no delta), its mean and rstd -> its data and data_t,
    for a scale that was made of its amax."""
    check(total)
    if not runs_kernel(total):
        return cast(normalized(total, mean, rstd, weight, bias)[1], scale, dtype)
    outputs = norm_cast_outputs(total, mean, rstd, weight, bias, rms, scale, dtype)
    M, C = total.shape
    norm_cast_kernel[(-(-M // TILE), -(-C // TILE))](
        total=total, mean=given(mean), rstd=rstd, weight=weight, bias=bias, scale=scale,
        data=outputs[0], data_t=outputs[1], M=M, C=C, BLOCK=TILE, num_warps=4)
    return outputs


def norm_backward_outputs(dy, total, mean, rstd, weight, rms, residual):
    """norm_backward's outputs, not filled."""
    M, C = dy.shape
    programs = min(PROGRAMS, M // backward_tile(C)[0]) if runs_kernel(dy) else 1
    wide = dy.new_empty(0, dtype=torch.float32)
    return (
        dy.new_empty(M, C),
        wide.new_empty(programs, C),
        wide.new_empty(0 if rms else programs, C),
        wide.new_empty(programs))


@torch.library.custom_op('fp8_kernels::norm_backward', mutates_args=())
def norm_backward(dy: Tensor, total: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, rms: bool,
                  residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dy, total and residual (M, C) bf16; norm's mean, rstd, weight -> dx (M, C) bf16, the gradient of total,
    rounded, then added to residual; partial sums of dweight and dbias (programs, C) fp32, dbias (0, C) where
    rms; |dx|'s largest values, (programs,) fp32. Raises what check does."""
    check(dy)
    if not runs_kernel(dy):
        xhat = normalized(total, mean, rstd, weight, None)[0]
        dbias = dy.float()
        g = dbias * weight
        slope = g - xhat * (g * xhat).mean(1, keepdim=True)
        if not rms:
            slope = slope - g.mean(1, keepdim=True)
        dx = (slope * rstd[:, None]).to(dy.dtype)
        dx = dx if residual is None else dx + residual
        dweight = (dbias * xhat).sum(0, keepdim=True)
        return dx, dweight, dbias.sum(0, keepdim=True)[:0 if rms else 1].clone(), largest_of(dx)
    outputs = norm_backward_outputs(dy, total, mean, rstd, weight, rms, residual)
    dx, dweight, dbias, partials = outputs
    M, C = dy.shape
    rows, warps, registers = backward_tile(C)
    norm_backward_kernel[(len(partials),)](
        dy=dy, total=total, mean=given(mean), rstd=rstd, weight=weight, residual=residual,
        dx=dx, dweight=dweight, dbias=dbias, partials=partials,
        M=M, C=C, BLOCK_M=rows, BLOCK_C=padded(C), num_warps=warps, maxnreg=registers)
    return outputs


norm.register_fake(norm_outputs)
norm_cast.register_fake(norm_cast_outputs)
norm_backward.register_fake(norm_backward_outputs)
