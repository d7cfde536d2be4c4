"""LayerNorm and RMSNorm whose output is FP8, twice: by rows for the forward multiplication, and transposed
for the weight gradient's. On a GPU each op is one Triton kernel, which reads its inputs once.

    total = x + delta                                               the addition to the residual stream
    xhat = (total - mean) * rstd        y = xhat * weight + bias    RMSNorm: neither mean nor bias
    data = (y * scale) in FP8           data_t = data^T             see linear.py

norm does it all where the scale is known before (delayed scaling). Where the scale is y's own, norm gives y's
amax, and norm_cast computes y once more: reading total again costs less than y written and read.

Values are rounded to bf16 where a plain model rounds them; statistics and sums are fp32, in a fixed order. On
a CPU an op is its torch form, which its kernel is tested against; what is beyond FP8's range becomes its
largest number, a NaN stays one. An amax is the largest by its bits, as integers: NaN > inf > the rest.
"""
import os

import torch
from torch.library import custom_op

from ..linear import DeviceError
from .casts import bf16, constexpr, jit, tl, triton

INTERPRETED = os.environ.get('TRITON_INTERPRET') == '1'     # kernels run on a CPU, too
PROGRAMS = 264      # of norm_backward: two for each multiprocessor of an H100 or H200
TILE = 64           # norm_cast's: 64 bytes are two sectors of memory, by rows and transposed


def runs_kernel(x):
    """Whether x is a kernel's and not the torch form's."""
    return x.device.type == 'cuda' or INTERPRETED


def check(x):
    """Raises ValueError for x (M, C) that no FP8 multiplication takes, DeviceError without Triton."""
    M, C = x.shape
    if M % 16 or C % 16:
        raise ValueError(f'FP8 dimensions are multiples of 16, not {M} x {C}')
    if runs_kernel(x) and triton is None:
        raise DeviceError('the FP8 kernels want Triton, which is not installed: pip install triton')


def padded(C):
    """The power of two that holds C columns: Triton's tiles have no other widths."""
    return 1 << (C - 1).bit_length()


def norm_tile(M, C):
    """(rows, warps) of a program of norm.

    data_t is written `rows` bytes at a time: 32 are a sector of memory, 16 half of one, which the cache joins
    to its neighbour's. Between statistics and output the rows stay in registers: 32 x 1024 values (C of 768,
    1024) or 16 x 2048 (1280, 1600), half of a multiprocessor's 65,536. 16 warps hold 64 of them a thread, and
    64 registers are left for all else."""
    width = padded(C)
    most = 32 if M % 32 == 0 else 16
    fitting = 32768 // width
    rows = max(1, min(most, fitting))
    warps = max(1, rows * width // 2048)
    return rows, warps


def backward_tile(C):
    """(rows, warps, registers a thread) of a turn of norm_backward's programs.

    256 columns a warp, eight a thread: no two warps share a column, so the sums over rows stay in registers.
    Two programs share a multiprocessor, half of its registers each: one computes while the other's 24 or 48
    KB are on their way. 8 rows of 1024 columns and 2 of 2048 are the most that do not spill."""
    width = padded(C)
    if width <= 1024:
        warps = max(1, width // 256)
        return 8, warps, 255
    rows = max(1, 4096 // width)
    return rows, 8, 128


# --------------------------------------------------------------------------------------------- Triton kernels

@jit
def read(pointer, at, inside):
    """fp32 values, 0 where not inside."""
    value = tl.load(pointer + at, mask=inside, other=0)
    return value.to(tl.float32)


@jit
def magnitude(value):
    """|value|'s bits, int32, of fp32 values."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def affine(xhat, weight, bias, columns, C):
    """y of a tile."""
    held = columns < C
    factor = read(weight, columns, held)    # loaded as (1, C) it would change the tile's layout
    y = xhat * factor[None, :]
    if bias is not None:
        shift = read(bias, columns, held)
        y += shift[None, :]
    return bf16(y)


@jit
def store_casts(scaled, casts, place, M, C):
    """Stores a tile in FP8, and transposed, from row `first` on; the cast saturates by itself."""
    data, data_t = casts
    first, rows, columns, inside = place
    codes = scaled.to(data.dtype.element_ty)
    tile = rows[:, None] * C + columns[None, :]
    tl.store(data + first * C + tile, codes, mask=inside)
    columns = columns.to(tl.int64)
    tile_t = columns[:, None] * M + rows[None, :]
    codes_t, inside_t = tl.trans(codes), tl.trans(inside)
    tl.store(data_t + first + tile_t, codes_t, mask=inside_t)


@jit
def norm_kernel(inputs, outputs, M, eps, C: constexpr, BLOCK_M: constexpr):
    """A program norms BLOCK_M whole rows. An input or output that is None is left out."""
    x, delta, weight, bias, scale = inputs
    total, mean, rstd, data, data_t, amax = outputs
    program = tl.program_id(0).to(tl.int64)
    first = program * BLOCK_M
    start = first * C       # a scalar: the tile's own offsets need 32 bits, and fewer registers
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, triton.next_power_of_2(C))
    held = (columns < C)[None, :]
    tile = rows[:, None] * C + columns[None, :]
    value = read(x + start, tile, held)
    if delta is not None:
        branch = read(delta + start, tile, held)
        value = bf16(value + branch)
        tl.store(total + start + tile, value, mask=held)
    if mean is not None:
        average = tl.sum(value, 1) / C
        tl.store(mean + first + rows, average)
        value -= average[:, None]
        value = tl.where(held, value, 0)
    variance = tl.sum(value * value, 1) / C
    inverse = tl.rsqrt(variance + eps)
    tl.store(rstd + first + rows, inverse)
    xhat = value * inverse[:, None]
    y = affine(xhat, weight, bias, columns, C)
    most = tl.max(magnitude(y), 1)
    peak = most.to(tl.float32, bitcast=True)
    tl.store(amax + first + rows, peak)
    if scale is not None:
        scaled = y * tl.load(scale)
        place = first, rows, columns, held
        store_casts(scaled, (data, data_t), place, M, C)


@jit
def norm_cast_kernel(inputs, outputs, M, C: constexpr, BLOCK: constexpr):
    """A program casts BLOCK x BLOCK values."""
    total, mean, rstd, weight, bias, scale = inputs
    program = tl.program_id(0).to(tl.int64)
    first = program * BLOCK
    start = first * C
    rows = tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + rows
    tile = rows[:, None] * C + columns[None, :]
    below = first + rows < M
    held = columns < C
    inside = below[:, None] & held[None, :]
    value = read(total + start, tile, inside)
    if mean is not None:
        average = read(mean + first, rows, below)
        value -= average[:, None]
    inverse = read(rstd + first, rows, below)
    value *= inverse[:, None]
    y = affine(value, weight, bias, columns, C)
    scaled = y * tl.load(scale)
    place = first, rows, columns, inside
    store_casts(scaled, outputs, place, M, C)


@jit
def norm_backward_kernel(inputs, outputs, M, C: constexpr, BLOCK_M: constexpr):
    """A program takes every num_programs-th block of BLOCK_M rows, and sums over its own."""
    dy, total, mean, rstd, weight, residual = inputs
    dx, dweight, dbias, amax = outputs
    program = tl.program_id(0)
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, triton.next_power_of_2(C))
    held = (columns < C)[None, :]
    tile = rows[:, None] * C + columns[None, :]
    w = read(weight, columns, columns < C)[None, :]
    weight_sum = tl.zeros_like(w)
    bias_sum = tl.zeros_like(w)
    most = magnitude(bias_sum)
    for block in range(program, M // BLOCK_M, tl.num_programs(0)):
        first = tl.cast(block, tl.int64) * BLOCK_M
        start = first * C
        g = read(dy + start, tile, held)
        xhat = read(total + start, tile, held)
        if residual is not None:        # asked for early, though it is added last
            above = read(residual + start, tile, held)
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
        value = bf16(slope * inverse)
        if residual is not None:
            value = bf16(value + above)
        tl.store(dx + start + tile, value, mask=held)
        bits = tl.where(held, magnitude(value), 0)
        highest = tl.max(bits, 0, keep_dims=True)
        most = tl.maximum(most, highest)
    own = program * C + columns[None, :]
    tl.store(dweight + own, weight_sum, mask=held)
    if mean is not None:
        tl.store(dbias + own, bias_sum, mask=held)
    most = tl.max(most)
    peak = most.to(tl.float32, bitcast=True)
    tl.store(amax + program, peak)


# ------------------------------------------------------------------------------------------------ torch forms

def fp32(x, *shape):
    """Not filled."""
    return x.new_empty(shape, dtype=torch.float32)


def empty_casts(x, rows, dtype):
    """data (rows, C) and data_t (C, rows), not filled."""
    C = x.shape[1]
    data = x.new_empty(rows, C, dtype=dtype)
    return data, data.new_empty(C, rows)


def given(*tensors):
    """None for an empty tensor: a kernel leaves it out."""
    return tuple(tensor if tensor.numel() else None for tensor in tensors)


def centred(total, mean):
    """total - mean (M, C), fp32; mean (M,), or (0,) for RMSNorm."""
    total = total.float()
    if len(mean):
        total = total - mean[:, None]
    return total


def normed(total, mean, rstd, weight, bias):
    """y (M, C)."""
    xhat = centred(total, mean) * rstd[:, None]
    y = xhat * weight
    if bias is not None:
        y = y + bias
    return y.bfloat16()


def cast(y, scale, dtype):
    """data (M, C) and data_t (C, M), as fp8_linear.Quantizer casts by one scale."""
    largest = torch.finfo(dtype).max
    scaled = y.float() * scale
    clamped = scaled.clamp(-largest, largest)
    data = clamped.to(dtype)
    return data, data.t().contiguous()


# -------------------------------------------------------------------------------------------------------- ops

def norm_outputs(x, delta, rms, scale, dtype):
    """norm's outputs, not filled."""
    M, C = x.shape
    total = x.new_empty(0 if delta is None else M, C)
    mean = fp32(x, 0 if rms else M)
    rstd = fp32(x, M)
    data, data_t = empty_casts(x, 0 if scale is None else M, dtype)
    amax = fp32(x, M)
    return total, mean, rstd, data, data_t, amax


@custom_op('fp8_kernels::norm', mutates_args=(), schema=(
    '(Tensor x, Tensor? delta, Tensor weight, Tensor? bias, float eps, bool rms, Tensor? scale, '
    'ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)'))
def norm(x, delta, weight, bias, eps, rms, scale, dtype):
    """x and delta (M, C) bf16, weight and bias (C,) fp32, scale 0-dim fp32 -> total (M, C) bf16, (0, C) where
    delta is None; mean (M,), (0,) where rms; rstd (M,); data (M, C) and data_t (C, M) in dtype, (0, C) and
    (C, 0) where scale is None; |y|'s largest of each row, (M,) fp32. Raises what check does."""
    check(x)
    outputs = norm_outputs(x, delta, rms, scale, dtype)
    if runs_kernel(x):
        M, C = x.shape
        rows, warps = norm_tile(M, C)
        inputs = x, delta, weight, bias, scale
        sizes = {'M': M, 'C': C, 'BLOCK_M': rows}
        launch = norm_kernel[(M // rows,)]
        launch(inputs, given(*outputs), eps=eps, **sizes, num_warps=warps)
        return outputs
    total, mean, _, data, data_t, _ = outputs
    if delta is not None:
        total = x = x + delta
    if not rms:
        mean = x.float().mean(1)
    variance = centred(x, mean).square().mean(1)
    rstd = (variance + eps).rsqrt()
    y = normed(x, mean, rstd, weight, bias)
    if scale is not None:
        data, data_t = cast(y, scale, dtype)
    amax = y.abs().amax(1)
    return total, mean, rstd, data, data_t, amax.float()


@norm.register_fake
def norm_shapes(x, delta, weight, bias, eps, rms, scale, dtype):
    return norm_outputs(x, delta, rms, scale, dtype)


@custom_op('fp8_kernels::norm_cast', mutates_args=(), schema=(
    '(Tensor total, Tensor mean, Tensor rstd, Tensor weight, Tensor? bias, bool rms, Tensor scale, '
    'ScalarType dtype) -> (Tensor, Tensor)'))
def norm_cast(total, mean, rstd, weight, bias, rms, scale, dtype):
    """norm's total (its x where there was no delta), mean and rstd, and a scale made of its amax -> data (M,
    C) and data_t (C, M) of the same y. Raises what check does."""
    check(total)
    if runs_kernel(total):
        M, C = total.shape
        outputs = empty_casts(total, M, dtype)
        inputs = total, *given(mean), rstd, weight, bias, scale
        grid = triton.cdiv(M, TILE), triton.cdiv(C, TILE)
        launch = norm_cast_kernel[grid]
        launch(inputs, outputs, M=M, C=C, BLOCK=TILE, num_warps=4)
        return outputs
    y = normed(total, mean, rstd, weight, bias)
    return cast(y, scale, dtype)


@norm_cast.register_fake
def norm_cast_shapes(total, mean, rstd, weight, bias, rms, scale, dtype):
    return empty_casts(total, len(total), dtype)


def norm_backward_outputs(dy, rms):
    """norm_backward's outputs, not filled."""
    M, C = dy.shape
    programs = 1
    if runs_kernel(dy):
        rows, _, _ = backward_tile(C)
        programs = min(PROGRAMS, M // rows)
    dx = torch.empty_like(dy)
    dweight = fp32(dy, programs, C)
    dbias = fp32(dy, 0 if rms else programs, C)
    amax = fp32(dy, programs)
    return dx, dweight, dbias, amax


@custom_op('fp8_kernels::norm_backward', mutates_args=(), schema=(
    '(Tensor dy, Tensor total, Tensor mean, Tensor rstd, Tensor weight, bool rms, Tensor? residual) '
    '-> (Tensor, Tensor, Tensor, Tensor)'))
def norm_backward(dy, total, mean, rstd, weight, rms, residual):
    """dy, total, residual (M, C) bf16; norm's mean and rstd -> dx (M, C) bf16: total's gradient, rounded,
    then added to residual; partial sums of dweight and dbias (programs, C) fp32, dbias (0, C) where rms;
    |dx|'s largest of each program, fp32. Raises what check does."""
    check(dy)
    outputs = norm_backward_outputs(dy, rms)
    if runs_kernel(dy):
        M, C = dy.shape
        rows, warps, registers = backward_tile(C)
        inputs = dy, total, *given(mean), rstd, weight, residual
        sizes = {'M': M, 'C': C, 'BLOCK_M': rows}
        launch = norm_backward_kernel[outputs[3].shape]
        launch(inputs, given(*outputs), **sizes, num_warps=warps, maxnreg=registers)
        return outputs
    xhat = centred(total, mean) * rstd[:, None]
    dy = dy.float()
    g = dy * weight
    along = (g * xhat).mean(1, keepdim=True)
    slope = g - xhat * along
    if not rms:
        slope = slope - g.mean(1, keepdim=True)
    dx = (slope * rstd[:, None]).bfloat16()
    if residual is not None:
        dx = dx + residual
    dweight = (dy * xhat).sum(0, keepdim=True)
    dbias = outputs[2]
    if not rms:
        dbias = dy.sum(0, keepdim=True)
    amax = dx.abs().amax().float()
    return dx, dweight, dbias, amax.view(1)


@norm_backward.register_fake
def norm_backward_shapes(dy, total, mean, rstd, weight, rms, residual):
    return norm_backward_outputs(dy, rms)
