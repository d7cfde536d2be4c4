"""Defines mxfp8's cast of a matrix and of its transpose, a scale for each 32 values along the sum, in one
reading, with the scales in the layout that cuBLAS wants. (torch.compile reads a tensor for each of the two,
and the scales again.) On a CPU torch computes it, on a GPU a Triton kernel.
"""
import math

import torch
from torch import Tensor

from ..backends import blocked_layout
from ..linear import Float8Tensor, Quantizer
from .casts import constexpr, in_triton, jit, key_of, launch, load_fp32, op, tl


class MxQuantizer(Quantizer):
    """Is a Quantizer for blocks of 32 whose `both` is one kernel where x and x^T have one format. Its
    scale_inv are in blocked_layout."""

    def both(self, x, transposed, scale=None):
        if transposed != self:
            return super().both(x, transposed, scale)
        data, scale_inv, data_t, scale_inv_t = cast_both(x, self.dtype, self.margin)
        return Float8Tensor(data, scale_inv, self.block), Float8Tensor(data_t, scale_inv_t, self.block)


@jit
def scale_of(bits, shift, axis: constexpr):
    """Return the scale, fp32, of values with these magnitudes, as bits, along an axis, and the code of its
    inverse, which is NaN's where a value is not finite.

    Both formats' largest value is 1.75 * 2**shift. So an amax of m 2**e has the scale 2**(shift - e), or half
    of it if m > 1.75, which the sum below carries into the exponent: torch's division to the bit, for amaxes
    below 2**126."""
    amax = tl.max(bits, axis, keep_dims=True)
    finite = amax < 0x7F800000
    exponent = (tl.where(finite, amax, 0) + 0x1FFFFF) >> 23
    exponent = tl.maximum(exponent - shift, 1)      # of the inverse; 254 minus it is the scale's
    return ((254 - exponent) << 23).to(tl.float32, bitcast=True), tl.where(finite, exponent, 255).to(tl.uint8)


@jit
def cast_both_kernel(x, outputs, M, K, shift):
    """Cast a tile of 32 rows and 128 columns: 64 values a thread of two warps, so that most of an amax is
    found within a thread. outputs: data (M, K), its scales, data_t (K, M), its scales."""
    data, scales, data_t, scales_t = outputs
    across, down = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)     # M * K may pass 2**31
    row, column, block = tl.arange(0, 32)[:, None], tl.arange(0, 128)[None, :], tl.arange(0, 4)[None, :]
    rows, columns = down * 32 + row, across * 128 + column
    inside = (rows < M) & (columns < K)
    value = load_fp32(x + rows * K + columns, inside)
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    scale, inverse = scale_of(bits.reshape(32, 4, 32), shift, 2)
    codes = (value.reshape(32, 4, 32) * scale).reshape(32, 128)
    tl.store(data + rows * K + columns, codes.to(data.dtype.element_ty), mask=inside)
    # 512 scales of 128 rows and 4 blocks follow each other; what is outside x gets some number, not NaN
    first = (down // 4 * tl.num_programs(0) + across) * 512 + down % 4 * 4
    tl.store(scales + (first + row * 16 + block), inverse.reshape(32, 4))
    scale, inverse = scale_of(bits, shift, 0)
    tl.store(data_t + columns * M + rows, (value * scale).to(data.dtype.element_ty), mask=inside)
    first = (across * (tl.num_programs(1) // 4) + down // 4) * 512 + down % 4
    tl.store(scales_t + (first + column % 32 * 16 + column // 32 * 4), inverse)


def unfilled_both(x, dtype, margin):
    """Return cast_both's outputs, not filled."""
    M, K = x.shape
    codes = x.new_empty(M, K, dtype=dtype)
    scales = x.new_empty(-(-M // 128) * -(-K // 128) * 512, dtype=torch.float8_e8m0fnu)
    return codes, scales, codes.new_empty(K, M), torch.empty_like(scales)


@op(unfilled_both)
def cast_both(x: Tensor, dtype: torch.dtype, margin: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a Quantizer's data and scale_inv, this in blocked_layout, in blocks of 32, of x (M, K) and of
    x^T, M and K multiples of 32. A block that is not finite has the scale NaN, and any data."""
    if not in_triton(x):
        quantizer = Quantizer(dtype, (1, 32), True, margin)
        one, other = quantizer.both(x, quantizer)
        return one.data, blocked_layout(one), other.data, blocked_layout(other)
    outputs, (M, K) = unfilled_both(x, dtype, margin), x.shape
    shift = int(math.log2(torch.finfo(dtype).max)) - margin
    codes = tuple(each.view(torch.uint8) if each.dim() == 1 else each for each in outputs)
    x = x.contiguous()
    launch(cast_both_kernel, (-(-K // 128), -(-M // 128) * 4, 1), (x, codes, M, K, shift),
           ('cast_both', dtype, margin, x.get_device(), key_of(x)), num_warps=2)
    return outputs
