"""FP8 arithmetic: casting a tensor, multiplying two cast ones, and the three matrix multiplications of a linear.

Eight bits hold a sign, an exponent and a mantissa: e4m3 has more mantissa (largest value 448) and serves weights and
activations, e5m2 has more range (57344) and serves gradients; together: "hybrid" (Micikevicius et al. 2022). A block of
values is multiplied by scale = largest / amax, its largest magnitude, before the cast, and products are multiplied by the
inverse scales. A linear is three matrix multiplications, and each operand is cast along the dimension that is summed over:

    forward  y  = x  W^T    x (M, K)       W (N, K)       sums over K
    dgrad    dx = dy W      dy (M, N)      W^T (K, N)     over N
    wgrad    dW = dy^T x    dy^T (N, M)    x^T (K, M)     over tokens, M

A recipe says which values share a scale (TABLE): all of a tensor, a row, or a block; "delayed" takes yesterday's amax. Where
rows and columns share alike, the transposed operand is a transposed copy; else it is cast anew from the unrounded values.

The GPU's FP8 units want both operands contiguous along the sum, and dimensions in multiples of 16. A CPU's torch._scaled_mm
is an emulation that takes anything, so those rules are checked here, on every device.
"""
import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {'hybrid': (E4M3, E4M3, E5M2), 'e4m3': (E4M3, E4M3, E4M3), 'e5m2': (E5M2, E4M3, E5M2)}  # input, weight, grad
AMAX_FLOOR = 1e-12                  # an all-zero tensor gets a finite scale
EXPONENT = 0x7F800000               # of a float32's bits: masked with it, a number is rounded down to a power of two

TENSOR, ROW = (0, 0), (1, 0)        # (rows, columns) of the block that shares a scale; 0: all of them
TABLE = {
    # recipe:       blocks of x and dy, of W, of W for dgrad; scales are powers of two; wgrad in FP8; dimensions' multiple
    'tensorwise':    (TENSOR, TENSOR, TENSOR, False, True, 16),
    'delayed':       (TENSOR, TENSOR, TENSOR, False, True, 16),
    'rowwise':       (ROW, ROW, ROW, True, True, 16),                          # torchao's, after Xi et al. 2024
    'rowwise_gw_hp': (ROW, ROW, TENSOR, True, False, 16),                      # torchao's rowwise_with_gw_hp
    'blockwise':     ((1, 128), (128, 128), (128, 128), True, True, 128),      # DeepSeek-V3 2024, section 3.3
    'mxfp8':         ((1, 32), (1, 32), (1, 32), True, True, 32),              # OCP MX 2023; scales rounded up, Mishra et al. 2025
}


class Cast(NamedTuple):
    """How an operand is cast. block: (rows, columns) that share a scale, columns running along the sum. margin: powers of
    two left free above the amax."""
    dtype: torch.dtype
    block: tuple
    pow2: bool
    margin: int


class Casts(NamedTuple):
    """The six operands of a linear; xt and dyt are None where wgrad is not in FP8. multiple: of M, N and K."""
    x: Cast
    w: Cast
    dy: Cast
    wt: Cast
    dyt: Cast | None
    xt: Cast | None
    multiple: int


class Operand(NamedTuple):
    """values (R, C) in FP8 and inverse scales (R / rows, C / columns) fp32 of blocks (rows, columns); or values in bf16 and
    None, None."""
    values: torch.Tensor
    inverse: torch.Tensor | None
    block: tuple | None


@functools.cache
def casts(recipe, fmt, margin=0):
    """The Casts of a recipe in a format. e5m2's wgrad takes the activation in e4m3: there is no product of e5m2 and e5m2."""
    (x, w, dy), (rows, weight, weight_t, pow2, wgrad, multiple) = FORMATS[fmt], TABLE[recipe]

    def cast(dtype, block):
        return Cast(dtype, block, pow2, margin)
    return Casts(cast(x, rows), cast(w, weight), cast(dy, rows), cast(w, weight_t),
                 cast(dy, rows) if wgrad else None, cast(E4M3, rows) if wgrad else None, multiple)


def quantize(x, cast, reach=None, seen=None):
    """x (R, C), any float type -> Operand with x ~ values * inverse.

    reach: a 0-dim tensor, 1 / (amax 2^margin), if not to be taken from x; seen: x's own amax then. NaN and inf stay
    non-finite, so that a bad step is seen; finite values are clamped, since casts beyond the range give inf or NaN on
    some devices."""
    largest = torch.finfo(cast.dtype).max
    rows, columns = cast.block[0] or x.shape[0], cast.block[1] or x.shape[1]
    tiles = x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
    if reach is None:
        amax = (x.abs().amax() if cast.block == TENSOR else tiles.abs().amax((1, 3), keepdim=True)).float()
        scale = largest / 2**cast.margin / amax.clamp(min=AMAX_FLOOR)
        if cast.pow2:
            scale = (scale.view(torch.int32) & EXPONENT).view(torch.float32)
        inverse = 1 / scale
    else:
        scale = largest * reach
        inverse = (1 / scale).where(seen.isfinite(), torch.nan)  # the clamp would hide an inf (and a compiler drops `+ 0 * seen`)
    values = (tiles.float() * scale).clamp(-largest, largest).to(cast.dtype).view(x.shape)
    return Operand(values, inverse.reshape(x.shape[0] // rows, x.shape[1] // columns), cast.block)


def dequantize(operand):
    """An Operand's values times inverse scales, fp32."""
    (rows, columns), inverse = operand.values.shape, operand.inverse
    tiles = operand.values.float().reshape(inverse.shape[0], rows // inverse.shape[0], inverse.shape[1], columns // inverse.shape[1])
    return (tiles * inverse[:, None, :, None]).view(rows, columns)


def quantize_both(x, cast, cast_t, reach=None, seen=None):
    """(x (R, C) cast for sums over C, x^T (C, R) cast for sums over R; x itself where cast_t is None)."""
    one = quantize(x, cast, reach, seen)
    if cast_t is None:
        return one, Operand(x, None, None)
    if cast_t == cast and cast.block[0] == cast.block[1]:
        return one, Operand(_transpose(one.values), one.inverse.t(), cast.block)
    return one, quantize(_transpose(x), cast_t, reach, seen)


def _contiguous(x):
    """A row-major copy. (x.contiguous() is the same, but CPU builds cannot trace it for CUDA.)"""
    return x.clone(memory_format=torch.contiguous_format)


def _transpose(x):
    return _contiguous(x.t())


# ----------------------------------------------------------------------------------------------- multiplying

def _check_cuda_rules(a, b):
    """What CUDA's FP8 units refuse, refused everywhere. Raises ValueError."""
    (M, K), N = a.values.shape, b.values.shape[0]
    if a.values.stride(1) != 1 or b.values.stride(1) != 1:
        raise ValueError(f'FP8 operands are contiguous along the sum; strides here are {a.values.stride()} and {b.values.stride()}')
    if M % 16 or K % 16 or N % 16:
        raise ValueError(f'FP8 dimensions are multiples of 16, not {M} x {K} times {K} x {N}')
    if a.values.dtype == E5M2 and b.values.dtype == E5M2:
        raise ValueError('there is no FP8 product of e5m2 and e5m2')


def emulated_mm(a, b, out_dtype, fast=False):
    """a (M, K) times b (N, K)^T -> (M, N), multiplied and summed in fp32: what the others compute, to be read."""
    _check_cuda_rules(a, b)
    return (dequantize(a) @ dequantize(b).t()).to(out_dtype)


def scaled_mm(a, b, out_dtype, fast=False):
    """The same by torch's FP8 kernels. fast: sum with fewer bits, as is usual in forward and not in backward."""
    _check_cuda_rules(a, b)
    scale_a, scale_b = a.inverse, b.inverse
    if a.block[1] == 0:
        if a.block == b.block == TENSOR:
            scale_a, scale_b = scale_a.reshape(()), scale_b.reshape(())
        else:  # (M, 1) and (1, N); a scale for all becomes one a row
            scale_a, scale_b = (_contiguous(s.expand(len(o.values), 1)) for s, o in ((scale_a, a), (scale_b, b)))
            scale_b = scale_b.view(1, -1)
        return torch._scaled_mm(a.values, b.values.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype, use_fast_accum=fast)
    swizzle = [F.SwizzleType.SWIZZLE_32_4_4.value] if a.block == (1, 32) else []
    return torch._scaled_mm_v2(
        a.values, b.values.t(), [_layout(a)], [_SCALING[a.block]], swizzle, [_layout(b)], [_SCALING[b.block]], swizzle, None, out_dtype)


_SCALING = {(1, 128): F.ScalingType.BlockWise1x128.value, (128, 128): F.ScalingType.BlockWise128x128.value,
            (1, 32): F.ScalingType.BlockWise1x32.value}


def _layout(operand):
    """Inverse scales as cuBLAS wants them (its manual, "Scaling factors layouts")."""
    inverse = operand.inverse
    if operand.block == (1, 128):
        return _transpose(inverse).t()                                       # (R, C / 128), column by column
    if operand.block == (128, 128):
        return F.pad(inverse, (0, -inverse.shape[1] % 4)).t()                # (C / 128 padded to fours, R / 128), likewise
    padded = F.pad(inverse, (0, -inverse.shape[1] % 4, 0, -inverse.shape[0] % 128))
    tiles = padded.view(len(padded) // 128, 4, 32, padded.shape[1] // 4, 4)  # of 128 rows x 4 scales, rows 32 apart side by side
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).to(torch.float8_e8m0fnu)


def linear_forward(x, weight, casts, mm, reaches=(None, None), seen=(None, None)):
    """x (M, K) bf16, weight (N, K) fp32 or bf16 -> y (M, N) in x's dtype, and the Operands x^T, W^T for backward."""
    x8, xt = quantize_both(x, casts.x, casts.xt, reaches[0], seen[0])
    w8, wt = quantize_both(weight, casts.w, casts.wt, reaches[1], seen[1])
    return mm(x8, w8, x.dtype, fast=True), xt, wt


def linear_backward(dy, xt, wt, casts, mm, weight_dtype, reach=None, seen=None):
    """dy (M, N) -> dx (M, K) in dy's dtype, dW (N, K) in weight_dtype."""
    dy8, dyt = quantize_both(dy, casts.dy, casts.dyt, reach, seen)
    dx = mm(dy8, wt, dy.dtype)
    if casts.xt is None:
        return dx, (dy.t() @ xt.values).to(weight_dtype)
    # CUDA's kernels give fp32 from one scale a tensor, bf16 from finer ones
    return dx, mm(dyt, xt, weight_dtype if casts.xt.block == TENSOR else dy.dtype).to(weight_dtype)


class Matmul(torch.autograd.Function):
    """y = x W^T. amax, reach: None, or delayed scaling's (3,) of input, weight and gradient: the running maximum, updated here,
    and 1 / (amax 2^margin) of earlier steps, or None to take it from the tensors."""

    @staticmethod
    def forward(ctx, x, weight, casts, mm, amax, reach):
        ctx.casts, ctx.mm, ctx.weight_dtype, ctx.amax, ctx.reach = casts, mm, weight.dtype, amax, reach
        reaches, seen = (None, None), (None, None)
        if amax is not None:
            seen = _see(amax, 0, x), _see(amax, 1, weight)
            reaches = reaches if reach is None else (reach[0], reach[1])
        y, xt, wt = linear_forward(x, weight, casts, mm, reaches, seen)
        ctx.blocks = xt.block, wt.block
        ctx.save_for_backward(xt.values, xt.inverse, wt.values, wt.inverse)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, x_inverse, w, w_inverse = ctx.saved_tensors
        seen = reach = None
        if ctx.amax is not None:
            seen, reach = _see(ctx.amax, 2, dy), None if ctx.reach is None else ctx.reach[2]
        operands = Operand(x, x_inverse, ctx.blocks[0]), Operand(w, w_inverse, ctx.blocks[1])
        dx, dw = linear_backward(dy, *operands, ctx.casts, ctx.mm, ctx.weight_dtype, reach, seen)
        return dx, dw, None, None, None, None


def _see(amax, slot, x):
    """x's largest magnitude, fp32, also noted in amax[slot]: a maximum, so that recomputation changes nothing."""
    seen = x.detach().abs().amax().float()
    amax[slot] = torch.maximum(amax[slot], seen)
    return seen
