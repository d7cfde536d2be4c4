"""FP8 casts that read a tensor once: the value, the transposed copy, the amax and the column sums in one
kernel, GELU, SwiGLU, their derivatives or the joining of attention's heads computed on the way.

    data, data_t, partials, column_sums = torch.ops.fp8_kernels.cast([a], 'gelu', scale, torch.float8_e4m3fn, False)
    amax = torch.ops.fp8_kernels.amax([a], 'gelu').amax()

`how` says what is cast, (M, C), of which inputs, M tokens and C features in multiples of 16:

    plain            x (M, C)
    gelu             gelu(a), tanh's form, of a (M, C)
    swiglu           silu(gate) * up of a (M, 2C), gate | up
    gelu_backward    dz gelu'(a) of dz and a (M, C)
    swiglu_backward  d gate | d up (M, C) of dz (M, C / 2) and a (M, C), gate | up
    heads            dq, dk, dv, each (B, its heads, T, D), side by side: M = B T, C = all heads times D

What a model would round to bf16 between two operations is rounded so here. On a CPU torch computes it; on a
GPU a Triton kernel does, whose results differ by the last bit of exp and of fused multiply-adds.
"""
from typing import NamedTuple

import torch
import torch.nn.functional as F

from configurator import MachineError

try:
    import triton
    import triton.language as tl
    jit, constexpr = triton.jit, tl.constexpr
except ImportError:
    triton = constexpr = None   # the torch forms serve

    def jit(function):
        """Nothing: without Triton no kernel is launched."""
        return function


# ------------------------------------------------------------------------------------------------ torch's form

def swiglu(a):
    """a (M, 2C) -> (M, C), as model.MLP computes it."""
    gate, up = a.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_backward(dz, a):
    """dz, a (M, C) -> (M, C)."""
    return torch.ops.aten.gelu_backward(dz, a, approximate='tanh')


def swiglu_backward(dz, a):
    """dz (M, C), a (M, 2C) -> (M, 2C)."""
    gate, up = a.chunk(2, dim=-1)
    d_gate = torch.ops.aten.silu_backward(dz * up, gate)
    return torch.cat([d_gate, dz * F.silu(gate)], dim=-1)


def join_heads(*heads):
    """Tensors (B, its heads, T, D) -> (B T, all heads times D)."""
    return torch.cat(heads, 1).transpose(1, 2).flatten(2).flatten(0, 1)


VALUES = {
    'plain': lambda x: x,
    'gelu': lambda a: F.gelu(a, approximate='tanh'),
    'swiglu': swiglu,
    'gelu_backward': gelu_backward,
    'swiglu_backward': swiglu_backward,
    'heads': join_heads,
}


# --------------------------------------------------------------------------------------------- Triton's kernels

@jit
def bf16(x):
    """x, fp32, rounded to bf16."""
    return x.to(tl.bfloat16).to(tl.float32)


@jit
def tanh_in_gelu(a):
    """tanh(sqrt(2 / pi) (a + 0.044715 a^3)), any shape. Of |u|, since 1 + tanh cancels where a is negative."""
    u = 0.7978845608028654 * (a + 0.044715 * a * a * a)
    t = 1 - 2 / (1 + tl.exp(2 * tl.abs(u)))
    return tl.where(u < 0, -t, t)


@jit
def gelu_derivative(a):
    """d gelu(a) / d a, any shape."""
    t = tanh_in_gelu(a)
    inner = 0.7978845608028654 * (1 + 3 * 0.044715 * a * a)
    return 0.5 * (1 + t) + 0.5 * a * (1 - t * t) * inner


@jit
def here(tile: constexpr, M, C):
    """This program's tile of (M, C): its first row and column; rows (BLOCK_M,) and columns (BLOCK_C,) from
    there; which of them are inside, (BLOCK_M, BLOCK_C)."""
    row, column = tl.program_id(1) * tile[0], tl.program_id(0) * tile[2]
    rows, columns = tl.arange(0, tile[0]), tl.arange(0, tile[1])
    own = (columns < tile[2]) & (column + columns < C)
    return row, column, rows, columns, (row + rows < M)[:, None] & own[None, :]


@jit
def corner(pointer, row, column, stride):
    """Where (row, column) is. Only this may lie beyond 2**31; offsets from here are small."""
    return pointer + tl.cast(row, tl.int64) * stride + column


@jit
def load(x, place, skip):
    """The tile (BLOCK_M, BLOCK_C), fp32, of x = (pointer, stride of rows), `skip` columns on; zero outside."""
    row, column, rows, columns, inside = place
    at = corner(x[0], row, column + skip, x[1]) + rows[:, None] * x[1] + columns[None, :]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@jit
def load_head(x, head, place, T):
    """The same of one head of x = (pointer, strides of sequences, heads and tokens)."""
    row, column, rows, columns, inside = place
    sequence, token = (row + rows) // T, (row + rows) % T
    at = x[0] + tl.cast(head, tl.int64) * x[2] + sequence.to(tl.int64) * x[1] + token.to(tl.int64) * x[3]
    return tl.load(at[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@jit
def load_heads(inputs, place, sizes):
    """The same of the head that is this program's. sizes: M, C, T, q's heads, q's and k's."""
    head = tl.program_id(0)
    if head < sizes[3]:
        x = load_head(inputs[0], head, place, sizes[2])
    elif head < sizes[4]:
        x = load_head(inputs[1], head - sizes[3], place, sizes[2])
    else:
        x = load_head(inputs[2], head - sizes[4], place, sizes[2])
    return x


@jit
def values(inputs, place, sizes, how: constexpr):
    """What is cast, as a tuple of tiles (BLOCK_M, BLOCK_C), fp32: one, or two that lie C columns apart."""
    C = sizes[1]
    if how == 'heads':
        found = (load_heads(inputs, place, sizes),)
    elif how == 'plain':
        found = (load(inputs[0], place, 0),)
    elif how == 'gelu':
        a = load(inputs[0], place, 0)
        found = (bf16(0.5 * a * (1 + tanh_in_gelu(a))),)
    elif how == 'swiglu':
        gate, up = load(inputs[0], place, 0), load(inputs[0], place, C)
        found = (bf16(bf16(gate / (1 + tl.exp(-gate))) * up),)
    elif how == 'gelu_backward':
        dz, a = load(inputs[0], place, 0), load(inputs[1], place, 0)
        found = (bf16(dz * gelu_derivative(a)),)
    else:
        dz, gate, up = load(inputs[0], place, 0), load(inputs[1], place, 0), load(inputs[1], place, C)
        sigmoid = 1 / (1 + tl.exp(-gate))
        d_gate = bf16(dz * up) * sigmoid * (1 + gate * (1 - sigmoid))
        found = bf16(d_gate), bf16(dz * bf16(gate / (1 + tl.exp(-gate))))
    return found


@jit
def largest_bits(x):
    """The largest |x| as its bits, int32: as integers NaN > inf > any number, with no maximum of floats,
    whose NaN-propagating form miscompiles beside a transposed store (triton-lang/triton#11111)."""
    return tl.max(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0)


@jit
def program():
    """This program's number among the partials."""
    return tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)


@jit
def amax_kernel(inputs, partials, sizes, how: constexpr, tile: constexpr):
    """partials (programs,) = the largest |value| of each program's tile."""
    place = here(tile, sizes[0], sizes[1])
    found = values(inputs, place, sizes, how)
    bits = largest_bits(found[0])
    for part in tl.static_range(1, len(found)):
        bits = tl.maximum(bits, largest_bits(found[part]))
    tl.store(partials + program(), bits.to(tl.float32, bitcast=True))


@jit
def cast_kernel(inputs, outputs, scale, sizes, how: constexpr, sums: constexpr, tile: constexpr):
    """outputs: data (M, C), data_t (C, M), partials (programs,), column_sums (programs down, C); C is twice
    sizes[1] where there are two tiles of values."""
    data, data_t, partials, column_sums = outputs
    M, C = sizes[0], sizes[1]
    place = here(tile, M, C)
    row, column, rows, columns, inside = place
    found = values(inputs, place, sizes, how)
    width, bits = C * len(found), 0
    largest = 57344.0 if data.dtype.element_ty == tl.float8e5 else 448.0
    factor = tl.load(scale)
    for part in tl.static_range(len(found)):
        x, first = found[part], column + part * C
        bits = tl.maximum(bits, largest_bits(x))
        code = tl.minimum(tl.maximum(x * factor, -largest), largest).to(data.dtype.element_ty)
        at = corner(data, row, first, width) + rows[:, None] * width + columns[None, :]
        tl.store(at, code, mask=inside)
        at = corner(data_t, first, row, M) + columns[:, None] * M + rows[None, :]
        tl.store(at, tl.trans(code), mask=tl.trans(inside))
        if sums:
            at = corner(column_sums, tl.program_id(1), first, width) + columns
            own = (columns < tile[2]) & (column + columns < C)
            tl.store(at, tl.sum(x, 0), mask=own)
    tl.store(partials + program(), bits.to(tl.float32, bitcast=True))


# ------------------------------------------------------------------------------------------------- the two ops

class Plan(NamedTuple):
    """How a kernel cuts what is cast. sizes: M, C (of one of swiglu_backward's two halves), and for heads T,
    q's heads, q's and k's. tile: (BLOCK_M, BLOCK_C, columns that are used). grid: programs (across, down)."""
    sizes: tuple
    tile: tuple
    num_warps: int
    grid: tuple


def plan(inputs, how):
    """The Plan for inputs as in the table above; one program where torch computes.

    A tile of 64 x 128 reads bf16 in runs of 256 contiguous bytes and writes FP8 in runs of 128, transposed in
    runs of 64: whole sectors of 32 bytes, and 16 bytes a thread. 8 warps hold 32 values a thread, so four or
    so such programs share an SM, with 64 kB of reads on their way, where Hopper's memory wants 25. 32,768 x
    768 makes 3,072 programs for its 132 SMs. swiglu_backward has three inputs and two outputs, and takes half
    a tile on half the warps. Heads are one program wide each, whatever their D, so that a program reads one
    tensor."""
    x = inputs[-1]
    if how == 'heads':
        T, D = x.shape[2:]
        ends = inputs[0].shape[1], inputs[0].shape[1] + inputs[1].shape[1]
        sizes = x.shape[0] * T, (ends[1] + x.shape[1]) * D, T, *ends
        BLOCK_C = max(16, 1 << (D - 1).bit_length())
        tile, num_warps = (min(128, 8192 // BLOCK_C), BLOCK_C, D), 8
    else:
        sizes = x.shape[0], x.shape[1] // (2 if 'swiglu' in how else 1)
        tile, num_warps = (64, 128, 128), 8
        if how == 'swiglu_backward':
            tile, num_warps = (64, 64, 64), 4
    grid = -(-sizes[1] // tile[2]), -(-sizes[0] // tile[0])
    return Plan(sizes, tile, num_warps, grid if in_triton(x) else (1, 1))


def in_triton(x):
    """Whether a kernel computes on x: on a GPU; on a CPU under TRITON_INTERPRET=1."""
    return x.is_cuda or triton is not None and triton.knobs.runtime.interpret


def pointers(inputs):
    """The kernels' form of the inputs: (tensor, its strides but for the last, which is 1). Raises MachineError
    without Triton."""
    if triton is None:
        raise MachineError('fused FP8 casts on a GPU want Triton: pip install "triton>=3.6,<3.8"')
    rows = [x if x.stride(-1) == 1 else x.contiguous() for x in inputs]
    return tuple((x, *x.stride()[:-1]) for x in rows)


def empty_outputs(inputs, how, dtype, sums):
    """(data, data_t, partials, column_sums), not yet filled."""
    sizes, _, _, (across, down) = plan(inputs, how)
    M, C = sizes[0], sizes[1] * (2 if how == 'swiglu_backward' else 1)
    x = inputs[0]
    return (x.new_empty(M, C, dtype=dtype), x.new_empty(C, M, dtype=dtype),
            x.new_empty(across * down, dtype=torch.float32),
            x.new_empty(down if sums else 0, C, dtype=torch.float32))


@torch.library.custom_op('fp8_kernels::cast', mutates_args=())
def cast(inputs: list[torch.Tensor], how: str, scale: torch.Tensor, dtype: torch.dtype,
         sums: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """inputs and how: the table above. scale: 0-dim, fp32. -> data (M, C) and data_t (C, M), in `dtype`;
    partials (programs,), fp32, of which the largest is the amax, NaN and inf included; column_sums (programs
    down, C), fp32, to be summed over dim 0, or (0, C) without `sums`. Beyond the range codes are the largest's;
    NaN's code may be any."""
    if not in_triton(inputs[0]):
        return cast_in_torch(inputs, how, scale, dtype, sums)
    outputs = empty_outputs(inputs, how, dtype, sums)
    sizes, tile, num_warps, grid = plan(inputs, how)
    cast_kernel[grid](pointers(inputs), outputs, scale, sizes, how=how, sums=sums, tile=tile,
                      num_warps=num_warps)
    return outputs


def cast_in_torch(inputs, how, scale, dtype, sums):
    """What cast computes, by torch: the kernels' reference."""
    x, largest = VALUES[how](*inputs), torch.finfo(dtype).max
    data = (x.float() * scale).clamp(-largest, largest).to(dtype)
    column_sums = x.sum(0, dtype=torch.float32)[None]
    return data, data.t().contiguous(), amax_in_torch(x), column_sums if sums else column_sums[:0].clone()


@torch.library.custom_op('fp8_kernels::amax', mutates_args=())
def amax(inputs: list[torch.Tensor], how: str) -> torch.Tensor:
    """inputs and how: the table above. -> partials (programs,), fp32, as cast's."""
    if not in_triton(inputs[0]):
        return amax_in_torch(VALUES[how](*inputs))
    sizes, tile, num_warps, grid = plan(inputs, how)
    partials = inputs[0].new_empty(grid[0] * grid[1], dtype=torch.float32)
    amax_kernel[grid](pointers(inputs), partials, sizes, how=how, tile=tile, num_warps=num_warps)
    return partials


def amax_in_torch(x):
    """The largest |x|, (1,), fp32."""
    return x.abs().amax().float().reshape(1)


@cast.register_fake
def _(inputs, how, scale, dtype, sums):
    return empty_outputs(inputs, how, dtype, sums)


@amax.register_fake
def _(inputs, how):
    across, down = plan(inputs, how).grid
    return inputs[0].new_empty(across * down, dtype=torch.float32)
