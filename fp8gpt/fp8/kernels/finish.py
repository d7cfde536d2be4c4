"""What follows a kernel's partial results, in one launch: a scale from partial amaxes, sums of partial sums.
Left to a compiler they are thirty launches a block, of no bytes and 2.5 us each.
"""
import torch
from torch import Tensor

from ..linear import LARGEST_SCALE
from .casts import constexpr, in_triton, jit, tl, triton


@jit
def scale_kernel(partials, given, running, outputs, P, largest, limit, BLOCK: constexpr):
    """One program. It compares bits: as integers, NaN > inf > numbers. running: the address of one number."""
    most = tl.zeros([BLOCK], tl.int32)
    for start in range(0, P, BLOCK):
        at = start + tl.arange(0, BLOCK)
        part = tl.load(partials + at, mask=at < P, other=0.0)
        most = tl.maximum(most, part.to(tl.int32, bitcast=True))
    bits = tl.max(most, 0)
    if running is not None:
        before = tl.load(running).to(tl.int32, bitcast=True)
        tl.store(running, tl.maximum(before, bits).to(tl.float32, bitcast=True))
    if given is not None:
        scale = tl.load(given)
        scale_inv = tl.where(bits >= 0x7F800000, float('nan'), tl.div_rn(tl.cast(1.0, tl.float32), scale))
    else:
        scale = tl.div_rn(tl.cast(1.0, tl.float32), bits.to(tl.float32, bitcast=True)) * largest
        scale = tl.where(scale > limit, limit, scale)   # a NaN stays one
        scale_inv = tl.div_rn(tl.cast(1.0, tl.float32), scale)
    tl.store(outputs[0], scale)
    tl.store(outputs[1], scale_inv)


def scale_in_torch(partials, given, running, index, largest):
    """Return what scale_of does: the kernel's reference."""
    amax = partials.amax()
    if running is not None:
        running[index] = torch.maximum(running[index], amax)
    if given is not None:
        return given.clone(), (1 / given).where(amax.isfinite(), torch.nan)
    scale = (largest / amax).clamp(max=LARGEST_SCALE)
    return scale, 1 / scale


def numbers(partials, given, running, index, largest):
    """Return scale_of's outputs, not filled."""
    return partials.new_empty(()), partials.new_empty(())


@torch.library.custom_op('fp8_kernels::scale_of', mutates_args=('running',))
def scale_of(partials: Tensor, given: Tensor | None, running: Tensor | None, index: int,
             largest: float) -> tuple[Tensor, Tensor]:
    """Return scale and 1 / scale, 0-dim fp32, of partial amaxes (P,). given: delayed scaling's scale, whose
    inverse is NaN where the amax is not finite, since a clamp would hide that; None: largest / amax. running
    (3,): running maxima, of which running[index] takes in the amax."""
    if in_triton(partials):
        outputs = numbers(partials, given, running, index, largest)
        address = None if running is None else running[index:]
        scale_kernel[1,](partials, given, address, outputs, P=len(partials), largest=largest,
                         limit=LARGEST_SCALE, BLOCK=8192, num_warps=8)
        return outputs
    return scale_in_torch(partials, given, running, index, largest)


@jit
def sums_kernel(inputs, outputs, P, C, BLOCK: constexpr, ROWS: constexpr):
    """Programs (blocks of columns, which input)."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for i in tl.static_range(len(inputs)):
        if tl.program_id(1) == i:
            total = tl.zeros([ROWS, BLOCK], tl.float32)
            for start in range(0, P, ROWS):
                rows = start + tl.arange(0, ROWS)
                inside = (rows < P)[:, None] & (columns < C)[None, :]
                total += tl.load(inputs[i] + rows[:, None] * C + columns[None, :], mask=inside, other=0.0)
            tl.store(outputs[i] + columns, tl.sum(total, 0), mask=columns < C)


@torch.library.custom_op('fp8_kernels::sum_partials', mutates_args=())
def sum_partials(partials: list[Tensor]) -> list[Tensor]:
    """Return sums (C,) of partial sums (P, C), fp32, always in the same order."""
    if not in_triton(partials[0]):
        return [each.sum(0) for each in partials]
    (P, C), outputs = partials[0].shape, [each.new_empty(each.shape[1]) for each in partials]
    sums_kernel[triton.cdiv(C, 128), len(partials)](
        tuple(partials), tuple(outputs), P, C, BLOCK=128, ROWS=16)
    return outputs


scale_of.register_fake(numbers)
sum_partials.register_fake(lambda partials: [each.new_empty(each.shape[1]) for each in partials])
