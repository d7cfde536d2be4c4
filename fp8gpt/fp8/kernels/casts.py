"""Defines one FP8 cast for what precedes a multiplication: it reads its inputs once, computes a norm, GELU,
SwiGLU or a derivative on the way, and writes the values in FP8, their transpose, amax and column sums.

    data, data_t, partials, column_sums = cast([a], 'gelu', scale, torch.float8_e4m3fn, False)

`how` says which values (M, C) are cast, of which inputs; M tokens and C features in multiples of 16:

    plain            x (M, C)
    norm             (x - mean) rstd weight + bias of x (M, C), rstd (M,), weight (C,), mean (M,), bias (C,);
                     without bias, or, as RMSNorm has it, without mean and bias
    gelu             gelu(a), in tanh's form, of a (M, C)
    swiglu           silu(gate) * up of a (M, 2C), gate | up
    gelu_backward    gelu'(a) * dz of dz (M, C) and a (M, C)
    swiglu_backward  d gate | d up of dz (M, C / 2) and a (M, C), gate | up
    heads            dq, dk, dv, each (B, T, its heads, D), side by side: M = B T, C = all heads times D

Where a model rounds to bf16 between two operations, so does the cast. On a CPU torch computes it, on a GPU a
Triton kernel, whose exp is good to 21 bits where bf16 keeps 8.
A kernel is bound by memory only if it is short: an H100 has time for 9 instructions a byte, an H200 for 6,
one counted for each value; these take 3 to 7.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from ..linear import TENSOR, Quantizer

try:
    import triton
    import triton.language as tl
    jit, constexpr = triton.jit, tl.constexpr
except ImportError:
    triton, tl, constexpr, jit = None, None, None, staticmethod     # nothing is launched then


# -------------------------------------------------------------------------------------- the values, by torch

def normalise(x, rstd, weight, mean=None, bias=None):
    """Return a norm's output, as model.Norm rounds it."""
    y = x.float() if mean is None else x.float() - mean[:, None]
    y = y * rstd[:, None] * weight
    return [(y if bias is None else y + bias).to(x.dtype)]


def swiglu_parts(a):
    """Return silu(gate) * up of a (M, 2C), gate | up."""
    gate, up = a.chunk(2, dim=-1)
    return [F.silu(gate) * up]


def swiglu_backward(dz, a):
    """Return d gate and d up of dz (M, C) and a (M, 2C)."""
    gate, up = a.chunk(2, dim=-1)
    return torch.ops.aten.silu_backward(dz * up, gate), dz * F.silu(gate)


VALUES = {      # how -> the function that returns the values in parts, which lie side by side
    'plain': lambda x: [x],
    'norm': normalise,
    'gelu': lambda a: [F.gelu(a, approximate='tanh')],
    'swiglu': swiglu_parts,
    'gelu_backward': lambda dz, a: [torch.ops.aten.gelu_backward(dz, a, approximate='tanh')],
    'swiglu_backward': swiglu_backward,
    'heads': lambda *heads: [x.flatten(2).flatten(0, 1) for x in heads],
}


def partial_amaxes(inputs, how):
    """Return the largest magnitudes (P,), fp32, of the values of 16 tokens each. torch.compile's kernel for
    it writes no values. A norm's are of single tokens: one kernel finds them and the norm's statistics."""
    tokens = 1 if how == 'norm' else 16
    parts = [part.reshape(len(part) // tokens, -1) for part in VALUES[how](*inputs)]
    return torch.cat([torch.linalg.vector_norm(part, torch.inf, dim=1).float() for part in parts])


def cast_in_torch(inputs, how, scale, dtype, sums):
    """Return what `cast` does: the kernel's reference."""
    x = torch.cat(list(VALUES[how](*inputs)), dim=1)
    quantised = Quantizer(dtype, TENSOR, power_of_two=False, margin=0)(x, scale)
    column_sums = x.sum(0, keepdim=True, dtype=torch.float32)[:sums]    # (0, C) without
    return quantised.data, quantised.data.t().contiguous(), quantised.amax.float().reshape(1), column_sums


# ------------------------------------------------------------------------------------------- Triton's kernel

@jit
def bf16(x):
    """Round x, fp32, to bf16."""
    return x.to(tl.bfloat16).to(tl.float32)


@jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)). A square stands for the division, which takes eight instructions."""
    root = tl.rsqrt(1 + tl.exp2(-1.4426950408889634 * x))
    return root * root


@jit
def sigmoid_in_gelu(a):
    """Return (1 + tanh(u)) / 2 = sigmoid(2 u), where u = sqrt(2 / pi) (a + 0.044715 a^3)."""
    return sigmoid(a * (1.5957691216057308 + 0.07135481627260025 * a * a))


@jit
def gelu_derivative(a):
    """Return gelu'(a) = s + a s (1 - s) 2 u', where s = sigmoid(2 u)."""
    s = sigmoid_in_gelu(a)
    return s + s * (1 - s) * a * (1.5957691216057308 + 0.21406444881780076 * a * a)


@jit
def load_fp32(pointer, inside):
    """Load values as fp32; zero outside."""
    value = tl.load(pointer, mask=inside, other=0.0)
    return value.to(tl.float32)


@jit
def load_tile(x, place, skip):
    """Load a tile (BLOCK_M, BLOCK_C) of x = (pointer, stride of rows), `skip` columns on. place: the tile's
    rows (BLOCK_M, 1) and columns (1, BLOCK_C), and which of both are inside x."""
    rows, columns, inside = place
    return load_fp32(x[0] + (rows * x[1] + columns + skip), inside)


@jit
def load_head(x, head, place, sizes):
    """Load a tile of one head of x = (pointer, strides of sequences, tokens and heads)."""
    rows, columns, inside = place
    T = sizes[2]
    sequence = (rows.to(tl.int32) // T).to(tl.int64)
    at = sequence * x[1] + head * x[3] + (rows - sequence * T) * x[2] + columns
    return load_fp32(x[0] + at, inside)


@jit
def load_heads(inputs, place, sizes, D: constexpr):
    """Load a tile of this program's head among the heads of q, k and v."""
    head = tl.program_id(0).to(tl.int64)
    rows, columns, inside = place
    place = rows, columns - head * D, inside
    if head < sizes[3]:
        tile = load_head(inputs[0], head, place, sizes)
    elif head < sizes[4]:
        tile = load_head(inputs[1], head - sizes[3], place, sizes)
    else:
        tile = load_head(inputs[2], head - sizes[4], place, sizes)
    return tile


@jit
def normalised(x, inputs, place, sizes):
    """Return the output of a norm of a tile x, fp32; zero outside, where a bias would enter the amax."""
    rows, columns, inside = place
    known_row, known_column = rows < sizes[0], columns < sizes[1]
    if len(inputs) > 3:
        x -= load_fp32(inputs[3][0] + rows, known_row)
    x *= load_fp32(inputs[1][0] + rows, known_row)
    x *= load_fp32(inputs[2][0] + columns, known_column)
    if len(inputs) > 4:
        x += load_fp32(inputs[4][0] + columns, known_column)
    return tl.where(inside, bf16(x), 0.0)


@jit
def values(inputs, place, sizes, how: constexpr, tile: constexpr):
    """Return the values, fp32: a tuple of one (BLOCK_M, BLOCK_C), or of two that lie sizes[1] columns apart.
    """
    if how == 'heads':
        x = load_heads(inputs, place, sizes, tile[2])
    else:
        x = load_tile(inputs[0], place, 0)
    found = (x,)
    if how == 'norm':
        found = (normalised(x, inputs, place, sizes),)
    elif how == 'gelu':
        found = (bf16(x * sigmoid_in_gelu(x)),)
    elif how == 'swiglu':
        up = load_tile(inputs[0], place, sizes[1])
        found = (bf16(bf16(x * sigmoid(x)) * up),)
    elif how == 'gelu_backward':
        found = (bf16(x * gelu_derivative(load_tile(inputs[1], place, 0))),)
    elif how == 'swiglu_backward':
        gate = load_tile(inputs[1], place, 0)
        up = load_tile(inputs[1], place, sizes[1])
        s = sigmoid(gate)
        d_gate = bf16(x * up) * s * (1 + gate * (1 - s))
        d_up = x * bf16(gate * s)
        found = bf16(d_gate), bf16(d_up)
    return found


@jit
def magnitude(x):
    """Return the bits of abs(x), fp32."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def four_codes(a, dtype: constexpr, pack: constexpr):
    """Cast fp32 to FP8, saturated, by one conversion on every GPU: Triton's own goes through fp16 on sm_89.
    a: four tiles and pack 1, for a tile of 32 bits, the first tile's codes in the lowest byte; or one tile
    and pack 4, for its codes as integers."""
    e4m3: constexpr = '''{ .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high}; }'''
    e5m2: constexpr = '''{ .reg .b16 low, high;
        cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
        mov.b32 $0, {low, high}; }'''
    code: constexpr = e4m3 if dtype == tl.float8e4nv else e5m2
    if pack == 1:
        codes = tl.inline_asm_elementwise(code, '=r,f,f,f,f', a, dtype=tl.int32, is_pure=True, pack=1)
    else:
        codes = tl.inline_asm_elementwise(code, '=r,f,f,f,f', a, dtype=tl.int8, is_pure=True, pack=4)
    return codes


@jit
def place_of(sizes, tile: constexpr):
    """Return the place of this program's tile: its rows / 4 and its columns, int64, since offsets may pass
    2**31; which of both, and which columns, are inside; data_t's words in a column."""
    across, down = tl.program_id(0), tl.program_id(1)
    quads = tl.arange(0, tile[0] // 4).to(tl.int64)[:, None]
    columns = tl.arange(0, tile[1]).to(tl.int64)[None, :]
    own = columns < tl.minimum(tile[2], sizes[1] - across * tile[2])
    quads += down * (tile[0] // 4)
    columns += across * tile[2]
    words = sizes[0] // 16 * 4      # shows the compiler that stores of four words are aligned
    return quads, columns, (quads < words) & own, own, words


@jit
def store_four(outputs, four, factor, place, sums: constexpr):
    """Store the casts of four tiles, whose rows take turns, and with `sums` their column sums. Return the
    bits of the largest magnitude. place: see place_of; and data's width."""
    data, data_t, _, column_sums = outputs
    quads, columns, inside, own, words, width = place
    dtype: constexpr = data.dtype.element_ty
    largest = magnitude(four[0])
    for row in tl.static_range(4):
        code = four_codes((four[row] * factor,), dtype, 4)
        tl.store(data + (quads * 4 + row) * width + columns, code.to(dtype, bitcast=True), mask=inside)
        largest = tl.maximum(largest, magnitude(four[row]))
    most = tl.max(largest)
    scaled = four[0] * factor, four[1] * factor, four[2] * factor, four[3] * factor
    tl.store(data_t + columns * words + quads, four_codes(scaled, dtype, 1), mask=inside)
    if sums:
        total = tl.sum((four[0] + four[1]) + (four[2] + four[3]), 0, keep_dims=True)
        tl.store(column_sums + tl.program_id(1) * width + columns, total, mask=own)
    return most


@jit
def cast_kernel(inputs, outputs, scale, sizes, how: constexpr, tile: constexpr, sums: constexpr):
    """Cast a tile. outputs: data (M, width), data_t (width, M / 4) in words of 32 bits, partials (P,),
    column_sums (programs down, width), where width is sizes[1] for each of the values. sizes, tile: see
    tiling.

    Threads hold runs of a row, and data_t wants runs of a column, so that values cross threads. Four rows in
    a word do: single codes that cross are miscompiled by Triton's ptxas (triton-lang/triton#11111; on an
    H100, columns of data_t were zeros or other codes). Amaxes are found as bits: as integers, NaN > inf >
    numbers."""
    quads, columns, inside, own, words = place_of(sizes, tile)
    rows = quads * 4
    a = values(inputs, (rows, columns, inside), sizes, how, tile)
    b = values(inputs, (rows + 1, columns, inside), sizes, how, tile)
    c = values(inputs, (rows + 2, columns, inside), sizes, how, tile)
    d = values(inputs, (rows + 3, columns, inside), sizes, how, tile)
    width = sizes[1] * len(a)
    factor = tl.load(scale)
    most = 0
    for part in tl.static_range(len(a)):
        place = quads, columns, inside, own, words, width
        largest = store_four(outputs, (a[part], b[part], c[part], d[part]), factor, place, sums)
        most = tl.maximum(most, largest)
        columns += sizes[1]
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(outputs[2] + program, most.to(tl.float32, bitcast=True))


# ---------------------------------------------------------------------------------------------------- the op

def in_triton(x):
    """Return whether a Triton kernel computes on x: on a GPU, and on a CPU under TRITON_INTERPRET=1."""
    return x.is_cuda or triton is not None and triton.knobs.runtime.interpret


def tiling(inputs, how):
    """Return (sizes, tile, grid). sizes: M, C (of one of swiglu_backward's two halves), and for heads T, q's
    heads, q's and k's. tile: BLOCK_M, BLOCK_C, columns in use. grid: programs (across, down); (1, 1) where
    torch computes.

    A tile of 128 x 64 reads bf16 in runs of 128 contiguous bytes, writes FP8 in runs of 64 and transposed in
    runs of 128: whole sectors of 32 bytes. In some 80 registers a thread, three such programs share an SM.
    swiglu_backward, of three inputs and two outputs, takes half a tile. A program takes one head, so that it
    reads one tensor. The grid runs along rows first: reads stay in DRAM's open pages."""
    if how == 'heads':
        q, k, v = (x.shape[2] for x in inputs)
        B, T, _, D = inputs[0].shape
        block_c = 1 << (D - 1).bit_length()
        sizes = B * T, (q + k + v) * D, T, q, q + k
        tile = min(128, 8192 // block_c), block_c, D
    else:
        M, C = inputs[0].shape
        sizes = M, C // 2 if how == 'swiglu' else C
        tile = 64 if how == 'swiglu_backward' else 128, 64, 64
    grid = -(-sizes[1] // tile[2]), -(-sizes[0] // tile[0])
    return sizes, tile, grid if in_triton(inputs[0]) else (1, 1)


def unfilled_cast(inputs, how, scale, dtype, sums):
    """Return cast's outputs, not filled."""
    (M, C, *_), _, (across, down) = tiling(inputs, how)
    if how == 'swiglu_backward':
        C *= 2
    data = inputs[0].new_empty(M, C, dtype=dtype)
    partials = inputs[0].new_empty(across * down, dtype=torch.float32)
    column_sums = partials.new_empty(down if sums else 0, C)
    return data, data.new_empty(C, M), partials, column_sums


COMPILED = {}       # key -> Triton's kernel, see launch


def launch(kernel, grid, arguments, key, **options):
    """Launch kernel[grid](*arguments), constexprs included. key: all that Triton compiles a kernel for. A
    known one starts in a fifth of the host time."""
    compiled = COMPILED.get(key)
    if compiled is None:
        # a * b + c rounds once, as Triton's default says until 3.9, and no longer in 3.10
        COMPILED[key] = kernel[grid](*arguments, enable_fp_fusion=True, **options)
    else:
        compiled[grid](*arguments)


def key_of(x):
    """Return what Triton compiles for in a tensor, which may be None."""
    return x if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() % 16)


def op(unfilled):
    """Return a decorator that makes a function an op, into which compilers do not look. unfilled: returns the
    function's outputs, not filled. A call takes a third of the host time of torch.library.custom_op's;
    torch.library.triton_op loses the tensors in a kernel's tuples."""
    def define(function):
        name = f'fp8_kernels::{function.__name__}'
        schema = torch.library.infer_schema(function, mutates_args=())
        torch.library.define(name, schema, tags=(torch.Tag.needs_exact_strides,))
        torch.library.impl(name, 'default', function)
        torch.library.register_fake(name, unfilled)
        return getattr(torch.ops.fp8_kernels, function.__name__).default
    return define


@op(unfilled_cast)
def cast(inputs: list[Tensor], how: str, scale: Tensor, dtype: torch.dtype,
         sums: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return data (M, C) and data_t (C, M): the values times scale (0-dim, fp32) in `dtype`, saturated,
    where NaN may become any; partials (P,), fp32, whose largest is the amax, be it inf or NaN; column_sums
    (programs down, C), fp32, to be summed over dim 0, or (0, C) without `sums`."""
    if not in_triton(inputs[0]):
        return cast_in_torch(inputs, how, scale, dtype, sums)
    outputs = unfilled_cast(inputs, how, scale, dtype, sums)
    rows = [x if x.stride(-1) == 1 else x.contiguous() for x in inputs]
    strided = tuple((x, *x.stride()[:-1]) for x in rows)
    sizes, tile, grid = tiling(inputs, how)
    key = how, dtype, sums, scale.get_device(), *map(key_of, (scale, *rows))
    data, data_t, *rest = outputs
    filled = data, data_t.view(torch.int32), *rest
    launch(cast_kernel, (*grid, 1), (strided, filled, scale, sizes, how, tile, sums), key,
           num_warps=tile[0] * tile[1] // 1024)
    return outputs
