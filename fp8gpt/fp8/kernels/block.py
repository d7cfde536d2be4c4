"""A transformer block in FP8 by kernels of its own: each cast happens where its input is written or read.

    fuse(model)     # Blocks whose four linears are in FP8, with one scale a tensor, become FusedBlocks

A block is two halves around attention, which is left as it is:

    first    total = x + branch       q, k, v = qkv(norm(total))
    second   total = x + proj(y)      branch = down(act(up(norm(total))))

The last addition waits for the next block's first half, so that a sum is never written only to be read by a
norm. Weights are cast once a step, see WeightCache. The result is the plain block's, bit for bit where the
arithmetic is: model.py stays what is to be read.
"""
from typing import NamedTuple

import torch

from ..linear import KEPT, TENSOR, Float8Tensor, Fp8Linear, mode
from .casts import amax as amax_of, cast
from .finish import note_amax, scale_of, sum_partials
from .norms import norm, norm_backward, norm_cast
from model import GPT, Block, Norm, attend

INPUT, GRAD = 0, 2      # slots of an Fp8Linear's amax and scale


# ----------------------------------------------------------------------------------------------- the linears

class Linear8:
    """An Fp8Linear as the kernels see it: its tensors are an autograd.Function's arguments, COUNT of them."""
    COUNT = 9

    def __init__(self, arithmetic, tensors):
        self.q, self.mm = arithmetic
        self.weight, self.bias = tensors[:2]
        self.amax, self.scale = tensors[2:4]
        w, w_scale_inv, wt, wt_scale_inv, self.bias16 = tensors[4:]
        self.w8 = Float8Tensor(w, w_scale_inv, TENSOR)
        self.wt = Float8Tensor(wt, wt_scale_inv, TENSOR)

    def quantise(self, slot, inputs, how='plain', sums=False, partials=None):
        """(the operand, its transpose, partial column sums) of fp8_kernels.casts' inputs; notes their amax.
        partials: amaxes of its parts, where they are known."""
        quantizer = self.q.dy if slot == GRAD else self.q.x
        dtype = quantizer.dtype
        if self.scale is None:
            if partials is None:
                partials = amax_of(inputs, how)
            scale, scale_inv = self.own_scale(slot, partials, quantizer)
            data, data_t, _, column_sums = cast(inputs, how, scale, dtype, sums)
        else:
            scale = self.scale[slot]
            data, data_t, partials, column_sums = cast(inputs, how, scale, dtype, sums)
            scale_inv = note_amax(partials, scale, self.amax, slot)
        x8, xt = operands(data, data_t, scale_inv)
        return x8, xt, column_sums

    def own_scale(self, slot, partials, quantizer):
        """(scale, 1 / scale) of a tensor from its own amaxes; notes them where delayed scaling calibrates."""
        if self.amax is not None:
            note_amax(partials, partials[0], self.amax, slot)
        largest = quantizer.largest / 2**quantizer.margin
        return scale_of(partials, largest)

    def normalise(self, x, branch, norm_tensors, settings):
        """(total, its mean and rstd, the norm's output as operand and transpose)."""
        weight, bias = norm_tensors
        eps, rms = settings
        scale = None if self.scale is None else self.scale[INPUT]
        kind = {'rms': rms, 'dtype': self.q.x.dtype}
        total, mean, rstd, data, data_t, partials = norm(
            x, branch, weight, bias, eps=eps, scale=scale, **kind)
        if branch is None:
            total = x
        if scale is None:
            scale, scale_inv = self.own_scale(INPUT, partials, self.q.x)
            data, data_t = norm_cast(
                total, mean, rstd, weight, bias, scale=scale, **kind)
        else:
            scale_inv = note_amax(partials, scale, self.amax, INPUT)
        x8, xt = operands(data, data_t, scale_inv)
        return total, mean, rstd, x8, xt

    def multiply(self, x8):
        """y bf16."""
        return self.mm(
            x8, self.w8, torch.bfloat16, bias=self.bias16, fast=True)

    def backward(self, dy8, dyt, xt):
        """dx bf16, dW in the weight's dtype."""
        dx = self.mm(dy8, self.wt, torch.bfloat16)
        dw = self.mm(dyt, xt, self.weight.dtype)
        return dx, dw


def operands(data, data_t, scale_inv):
    """Float8Tensors of a cast."""
    scale_inv = scale_inv.view(1, 1)
    operand = Float8Tensor(data, scale_inv, TENSOR)
    transposed = Float8Tensor(data_t, scale_inv, TENSOR)
    return operand, transposed


def tensors_of(linear):
    """A Linear8's tensors, of an Fp8Linear with kept weights."""
    scale = None if mode.calibrating else linear.scale
    kept = [getattr(linear, name) for name in KEPT]
    return linear.weight, linear.bias, linear.amax, scale, *kept


# ------------------------------------------------------------------------------------------------ the halves

class FirstHalf(torch.autograd.Function):
    """x, branch (M, C) or None -> total (M, C), and qkv (M, N) of its norm, as heads q, k, v (B, T,
    heads, head_dim), whose gradients come as they are."""

    @staticmethod
    def forward(ctx, x, branch, settings, arithmetic, *tensors):
        norm_weight, norm_bias, *tensors = tensors
        qkv = Linear8(arithmetic, tensors)
        total, mean, rstd, x8, xt = qkv.normalise(
            x, branch, (norm_weight, norm_bias), settings.norm)
        heads = qkv.multiply(x8)
        q, k, v = settings.heads(heads)
        ctx.settings, ctx.qkv = settings, qkv
        ctx.branch = branch is not None
        ctx.norm_bias = norm_bias is not None
        ctx.save_for_backward(total, mean, rstd, norm_weight, *xt[:2])
        return total, q, k, v

    @staticmethod
    def backward(ctx, dtotal, *dheads):
        total, mean, rstd, norm_weight, *xt = ctx.saved_tensors
        qkv = ctx.qkv
        _, rms = ctx.settings.norm
        xt = Float8Tensor(*xt, TENSOR)
        biased = qkv.bias is not None
        heads = [d.transpose(1, 2) for d in dheads]
        dy8, dyt, dbias = qkv.quantise(GRAD, heads, 'heads', sums=biased)
        dh, dw = qkv.backward(dy8, dyt, xt)
        dx, dnorm_weight, dnorm_bias, _ = norm_backward(
            dh, total, mean, rstd, norm_weight, rms=rms, residual=dtotal)
        dnorm_weight, dnorm_bias, dbias = added_up(
            (dnorm_weight, True),
            (dnorm_bias, ctx.norm_bias),
            (dbias, biased))
        dbranch = dx if ctx.branch else None
        rest = [None] * (Linear8.COUNT - 2)
        return dx, dbranch, None, None, dnorm_weight, dnorm_bias, dw, dbias, *rest


class SecondHalf(torch.autograd.Function):
    """x (M, C), y (M, heads) -> total = x + proj(y), and branch = down(act(up(norm(total))))."""

    @staticmethod
    def forward(ctx, x, y, settings, arithmetic, *tensors):
        norm_weight, norm_bias, *tensors = tensors
        linears = []
        for each in arithmetic:
            linears.append(Linear8(each, tensors[:Linear8.COUNT]))
            tensors = tensors[Linear8.COUNT:]
        proj, up, down = linears
        y8, yt, _ = proj.quantise(INPUT, [y])
        branch = proj.multiply(y8)
        total, mean, rstd, x8, xt = up.normalise(
            x, branch, (norm_weight, norm_bias), settings.norm)
        a = up.multiply(x8)
        z8, zt, _ = down.quantise(INPUT, [a], settings.act)
        ctx.settings = settings
        ctx.linears = linears
        ctx.norm_bias = norm_bias is not None
        ctx.save_for_backward(
            total, mean, rstd, norm_weight, a,
            *yt[:2],
            *xt[:2],
            *zt[:2])
        return total, down.multiply(z8)

    @staticmethod
    def backward(ctx, dtotal, dbranch):
        total, mean, rstd, norm_weight, a, *saved = ctx.saved_tensors
        yt = Float8Tensor(*saved[0:2], TENSOR)
        xt = Float8Tensor(*saved[2:4], TENSOR)
        zt = Float8Tensor(*saved[4:6], TENSOR)
        proj, up, down = ctx.linears
        act_backward = f'{ctx.settings.act}_backward'
        _, rms = ctx.settings.norm
        biased = proj.bias is not None
        dy8, dyt, dbias_down = down.quantise(GRAD, [dbranch], sums=biased)
        dz, dw_down = down.backward(dy8, dyt, zt)
        dy8, dyt, dbias_up = up.quantise(GRAD, [dz, a], act_backward, sums=biased)
        dh, dw_up = up.backward(dy8, dyt, xt)
        dx, dnorm_weight, dnorm_bias, partials = norm_backward(
            dh, total, mean, rstd, norm_weight, rms=rms, residual=dtotal)
        known = None
        if proj.scale is None:
            known = partials
        dy8, dyt, dbias_proj = proj.quantise(GRAD, [dx], sums=biased, partials=known)
        dy, dw_proj = proj.backward(dy8, dyt, yt)
        dnorm_weight, dnorm_bias, dbias_proj, dbias_up, dbias_down = added_up(
            (dnorm_weight, True),
            (dnorm_bias, ctx.norm_bias),
            (dbias_proj, biased),
            (dbias_up, biased),
            (dbias_down, biased))
        rest = [None] * (Linear8.COUNT - 2)
        of_proj = dw_proj, dbias_proj, *rest
        of_up = dw_up, dbias_up, *rest
        of_down = dw_down, dbias_down, *rest
        return dx, dy, None, None, dnorm_weight, dnorm_bias, *of_proj, *of_up, *of_down


def added_up(*partials):
    """The column sums of (partials, wanted), None where they are not wanted."""
    those = [each for each, wanted in partials if wanted]
    sums = sum_partials(those)
    found = iter(sums)
    return [next(found) if wanted else None for _, wanted in partials]


# ------------------------------------------------------------------------------------------------- the block

class Settings(NamedTuple):
    """norm: (eps, rms). act: 'gelu' | 'swiglu'. shape: (B, T). split: heads of q, k and v. head_dim."""
    norm: tuple
    act: str
    shape: tuple
    split: tuple
    head_dim: int

    def heads(self, qkv):
        """(M, N) -> q, k, v, views (B, T, heads, head_dim)."""
        heads = qkv.view(*self.shape, -1, self.head_dim)
        return heads.split(self.split, 2)


class FusedBlock(Block):
    """A Block whose stream is a tensor (B, T, C), or (total, branch), which are still to be added."""

    def forward(self, x, rope, cache, mask=None):
        if mode.paused or self.attn.qkv._forward_hooks:  # who looks at the linears finds them
            return super().forward(joined(x), rope, cache, mask)
        branch = None
        if isinstance(x, tuple):
            x, branch = x
        B, T, C = x.shape
        rows = x.reshape(-1, C)
        if branch is not None:
            branch = branch.view(-1, C)
        settings = self.settings(B, T)
        qkv = self.attn.qkv
        total, q, k, v = FirstHalf.apply(
            rows, branch, settings, qkv.arithmetic,
            *of_norm(self.ln_1),
            *tensors_of(qkv))
        q, k = self.attn.normed_and_rotated(q, k, rope)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = attend(q, k, v, mask=mask)
        y = y.transpose(1, 2)
        y = y.reshape(B * T, -1)
        proj, down = self.attn.proj, self.mlp.down
        up = self.mlp.gate_up if self.mlp.swiglu else self.mlp.up
        arithmetic = proj.arithmetic, up.arithmetic, down.arithmetic
        total, branch = SecondHalf.apply(
            total, y, settings, arithmetic,
            *of_norm(self.ln_2),
            *tensors_of(proj),
            *tensors_of(up),
            *tensors_of(down))
        total = total.view(B, T, C)
        branch = branch.view(B, T, C)
        return total, branch

    def settings(self, B, T):
        """Of B sequences of T tokens."""
        attn = self.attn
        return Settings(
            norm=(self.ln_1.eps, self.ln_1.rms),
            act='swiglu' if self.mlp.swiglu else 'gelu',
            shape=(B, T),
            split=(attn.n_head, attn.n_kv_head, attn.n_kv_head),
            head_dim=attn.head_dim)


def of_norm(module):
    return module.weight, module.bias


def joined(x):
    """What a FusedBlock hands on, added up."""
    if isinstance(x, tuple):
        x = x[0] + x[1]
    return x


class JoiningBlock(Block):
    """A plain block behind a FusedBlock."""

    def forward(self, x, rope, cache, mask=None):
        return super().forward(joined(x), rope, cache, mask)


class JoiningNorm(Norm):
    """The norm behind the last FusedBlock."""

    def forward(self, x):
        return super().forward(joined(x))


def linears_of(block):
    """Those that came from the factory."""
    modules = block.modules()
    return [module for module in modules if hasattr(module, 'bf16_reason')]


def can_be_fused(block):
    """Whether a block's linears are all native's, with one scale a tensor and one format for an operand and
    its transpose."""
    for linear in linears_of(block):
        if not isinstance(linear, Fp8Linear):
            return False
        q = linear.arithmetic.quantizers
        whole = q.x.block == TENSOR
        alike = q.x == q.xt and q.dy == q.dyt
        if not (whole and alike):
            return False
    return True


def fuse(model):
    """Makes the Blocks of a GPT, or a Block, that can be FusedBlocks, in place. Returns their linears, which
    want kept weights."""
    blocks = [module for module in model.modules() if type(module) is Block]
    for block in blocks:
        block.__class__ = FusedBlock if can_be_fused(block) else JoiningBlock
    if isinstance(model, GPT):
        model.ln_f.__class__ = JoiningNorm
    return fused_linears(model)


def fused_linears(model):
    """The linears of its FusedBlocks."""
    blocks = [module for module in model.modules() if isinstance(module, FusedBlock)]
    return [linear for block in blocks for linear in linears_of(block)]
