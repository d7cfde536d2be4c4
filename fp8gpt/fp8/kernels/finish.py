"""The small ends of the casts, each in one launch: a scale from partial amaxes, an amax noted, partial sums
added up. Left to a compiler they are some thirty launches a block, of no bytes and 2.5 us each.
"""
import torch
from torch import Tensor

from ..linear import LARGEST_SCALE
from .casts import constexpr, in_triton, jit, tl, triton

FINITE = 0x7F7FFFFF     # the bits of the largest finite fp32


# ----------------------------------------------------------------------------------------------- torch's form

def scale_in_torch(partials, largest):
    scale = (largest / partials.amax()).clamp(max=LARGEST_SCALE)
    return scale, 1 / scale


def note_in_torch(partials, scale, running, slot):
    amax = partials.amax()
    running[slot] = torch.maximum(running[slot], amax)
    return (1 / scale).where(amax.isfinite(), torch.nan)


# ------------------------------------------------------------------------------------------- Triton's kernels

@jit
def largest_bits(partials, P, BLOCK: constexpr):
    """The bits of the largest of partials (P,), none negative: as integers NaN > inf > numbers."""
    most = tl.zeros([BLOCK], tl.int32)
    for start in range(0, P, BLOCK):
        at = start + tl.arange(0, BLOCK)
        part = tl.load(partials + at, mask=at < P, other=0.0)
        most = tl.maximum(most, part.to(tl.int32, bitcast=True))
    return tl.max(most, 0)


@jit
def scale_kernel(partials, scale, scale_inv, P, largest, limit, BLOCK: constexpr):
    """By one program."""
    bits = largest_bits(partials, P, BLOCK)
    amax = bits.to(tl.float32, bitcast=True)
    found = tl.div_rn(tl.cast(1.0, tl.float32), amax) * largest  # as torch divides a number by a tensor
    found = tl.where(found > limit, limit, found)  # a NaN stays one
    tl.store(scale, found)
    tl.store(scale_inv, tl.div_rn(tl.cast(1.0, tl.float32), found))


@jit
def note_kernel(partials, scale, running, scale_inv, P, finite: constexpr, BLOCK: constexpr):
    """By one program. running: the slot's own address."""
    bits = largest_bits(partials, P, BLOCK)
    before = tl.load(running).to(tl.int32, bitcast=True)
    tl.store(running, tl.maximum(before, bits).to(tl.float32, bitcast=True))
    inverse = tl.div_rn(tl.cast(1.0, tl.float32), tl.load(scale))
    tl.store(scale_inv, tl.where(bits > finite, float('nan'), inverse))


@jit
def sums_kernel(inputs, outputs, sizes, BLOCK: constexpr, ROWS: constexpr):
    """Programs (blocks of columns, which input)."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for i in tl.static_range(len(inputs)):
        if tl.program_id(1) == i:
            P, C = sizes[i]
            total = tl.zeros([ROWS, BLOCK], tl.float32)
            for start in range(0, P, ROWS):
                rows = start + tl.arange(0, ROWS)
                inside = (rows < P)[:, None] & (columns < C)[None, :]
                total += tl.load(inputs[i] + rows[:, None] * C + columns[None, :], mask=inside, other=0.0)
            tl.store(outputs[i] + columns, tl.sum(total, 0), mask=columns < C)


# ---------------------------------------------------------------------------------------------------- the ops

def number(x):
    """A 0-dim tensor on x's device, fp32, not filled."""
    return x.new_empty((), dtype=torch.float32)


@torch.library.custom_op('fp8_kernels::scale_of', mutates_args=())
def scale_of(partials: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """partials (P,) fp32: amaxes of the parts of a tensor; largest: the number that its amax becomes ->
    scale = largest / amax and 1 / scale, 0-dim fp32."""
    if not in_triton(partials):
        return scale_in_torch(partials, largest)
    outputs = number(partials), number(partials)
    scale_kernel[1,](partials, *outputs, P=len(partials), largest=largest, limit=LARGEST_SCALE, BLOCK=1024)
    return outputs


@torch.library.custom_op('fp8_kernels::note_amax', mutates_args=('running',))
def note_amax(partials: Tensor, scale: Tensor, running: Tensor, slot: int) -> Tensor:
    """Takes the amax of partials (P,) into the running maxima (3,), and gives 1 / scale, of an earlier step's
    scale, 0-dim, or NaN where the amax is not finite: a clamp would have hidden it."""
    if not in_triton(partials):
        return note_in_torch(partials, scale, running, slot)
    scale_inv = number(partials)
    sizes = {'P': len(partials), 'finite': FINITE, 'BLOCK': 1024}
    note_kernel[1,](partials, scale, running[slot:], scale_inv, **sizes)
    return scale_inv


@torch.library.custom_op('fp8_kernels::sum_partials', mutates_args=())
def sum_partials(partials: list[Tensor]) -> list[Tensor]:
    """[(P_i, C_i)] fp32 -> [(C_i,)], added up row by row, always in the same order."""
    if not in_triton(partials[0]):
        return [each.sum(0) for each in partials]
    outputs = [each.new_empty(each.shape[1]) for each in partials]
    widest = max(each.shape[1] for each in partials)
    sizes = tuple(tuple(each.shape) for each in partials)
    sums_kernel[triton.cdiv(widest, 128), len(partials)](
        tuple(partials), tuple(outputs), sizes, BLOCK=128, ROWS=16)
    return outputs


scale_of.register_fake(lambda partials, largest: (number(partials), number(partials)))
note_amax.register_fake(lambda partials, scale, running, slot: number(partials))
sum_partials.register_fake(lambda partials: [each.new_empty(each.shape[1]) for each in partials])
