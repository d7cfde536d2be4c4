"""A transformer block in FP8 by kernels of its own: each cast happens where its input is written or read.

    fuse(model)     # Blocks whose four linears are in FP8, with one scale a tensor, become FusedBlocks

A block is two halves around attention, which is left as it is:

    first    total = x + branch       q, k, v = qkv(norm(total))
    second   total = x + proj(y)      branch = down(act(up(norm(total))))

The last addition waits for the next block's first half, so that a sum is never written only to be read by a
norm. Weights are cast once, until they change. The result is the plain block's, bit for bit where the
arithmetic is: model.py stays what is to be read.
"""
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fp8_linear import TENSOR, Float8Tensor, Fp8Linear, mode, note
from fp8_kernels.casts import amax as amax_of, cast
from fp8_kernels.finish import note_amax, scale_of, sum_partials
from fp8_kernels.norms import norm, norm_backward, norm_cast
from model import GPT, Block, Norm, rotate

INPUT, WEIGHT, GRAD = range(3)      # slots of an Fp8Linear's amax and scale
KEPT = 'w8', 'w8_scale_inv', 'wt8', 'wt8_scale_inv', 'bias16'   # its weight (N, K), (K, N), its bias


# ----------------------------------------------------------------------------------------------- the linears

class Linear8:
    """An Fp8Linear as the kernels see it: its tensors are an autograd.Function's arguments, COUNT of them."""
    COUNT = 9

    def __init__(self, arithmetic, tensors):
        self.q, self.mm = arithmetic
        self.weight, self.bias, self.amax, self.scale, *kept = tensors
        w, w_scale_inv, wt, wt_scale_inv, self.bias16 = kept
        self.w8 = Float8Tensor(w, w_scale_inv, TENSOR)
        self.wt = Float8Tensor(wt, wt_scale_inv, TENSOR)

    def quantise(self, slot, inputs, how='plain', sums=False, partials=None):
        """(the operand, its transpose, partial column sums) of fp8_kernels.casts' inputs; notes their amax.
        partials: amaxes of its parts, where they are known."""
        quantizer = self.q.dy if slot == GRAD else self.q.x
        scale = None if self.scale is None else self.scale[slot]
        if scale is None:
            partials = amax_of(inputs, how) if partials is None else partials
            scale, scale_inv = self.own_scale(slot, partials, quantizer)
            data, data_t, _, column_sums = cast(inputs, how, scale, quantizer.dtype, sums)
        else:
            data, data_t, partials, column_sums = cast(inputs, how, scale, quantizer.dtype, sums)
            scale_inv = note_amax(partials, scale, self.amax, slot)
        return *operands(data, data_t, scale_inv), column_sums

    def own_scale(self, slot, partials, quantizer):
        """(scale, 1 / scale) of a tensor from its own amaxes; notes them where delayed scaling calibrates."""
        if self.amax is not None:
            note_amax(partials, partials[0], self.amax, slot)
        return scale_of(partials, quantizer.largest / 2**quantizer.margin)

    def normalise(self, x, branch, norm_tensors, settings):
        """(total, its mean and rstd, the norm's output as operand and transpose)."""
        (weight, bias), (eps, rms), dtype = norm_tensors, settings, self.q.x.dtype
        scale = None if self.scale is None else self.scale[INPUT]
        total, mean, rstd, data, data_t, partials = norm(
            x, branch, weight, bias, eps=eps, rms=rms, scale=scale, dtype=dtype)
        total = x if branch is None else total
        if scale is None:
            scale, scale_inv = self.own_scale(INPUT, partials, self.q.x)
            data, data_t = norm_cast(
                total, mean, rstd, weight, bias, rms=rms, scale=scale, dtype=dtype)
        else:
            scale_inv = note_amax(partials, scale, self.amax, INPUT)
        return total, mean, rstd, *operands(data, data_t, scale_inv)

    def multiply(self, x8):
        return self.mm(x8, self.w8, torch.bfloat16, bias=self.bias16, fast=True)

    def backward(self, dy8, dyt, xt):
        """dx bf16, dW in the weight's dtype."""
        return self.mm(dy8, self.wt, torch.bfloat16), self.mm(dyt, xt, self.weight.dtype)


def operands(data, data_t, scale_inv):
    """Float8Tensors of a cast."""
    scale_inv = scale_inv.view(1, 1)
    return Float8Tensor(data, scale_inv, TENSOR), Float8Tensor(data_t, scale_inv, TENSOR)


def tensors_of(linear):
    """A Linear8's tensors, of an Fp8Linear with kept weights."""
    scale = None if mode.calibrating else linear.scale
    return linear.weight, linear.bias, linear.amax, scale, *(getattr(linear, name) for name in KEPT)


def keep_weights(model):
    """Casts the weights of all FusedBlocks, where they have changed since."""
    for linear in fused_linears(model):
        keep_weight(linear)


def keep_weight(linear):
    """Casts the weight of an Fp8Linear, both layouts, into its buffers KEPT, where it has changed since."""
    weight = linear.weight
    state = weight._version, mode.calibrating
    if getattr(linear, 'kept_of', None) == state:
        return
    scale, amax = None, weight.detach().abs().amax().float()
    if linear.amax is not None:
        note(linear.amax, {WEIGHT: amax})
        scale = None if mode.calibrating else linear.scale[WEIGHT]
    q = linear.arithmetic.quantizers
    w, wt = q.w.both(weight.detach(), q.wt, scale, amax)
    bias = None if linear.bias is None else linear.bias.detach().to(torch.bfloat16)
    for name, tensor in zip(KEPT, (w.data, w.scale_inv, wt.data, wt.scale_inv, bias)):
        linear.register_buffer(name, tensor, persistent=False)
    linear.kept_of = state


# ------------------------------------------------------------------------------------------------ the halves

class FirstHalf(torch.autograd.Function):
    """x, branch (M, C) or None -> total (M, C), and qkv (M, N) of its norm, as heads q, k, v (B, T,
    heads, head_dim), whose gradients come as they are."""

    @staticmethod
    def forward(ctx, x, branch, settings, arithmetic, *tensors):
        norm_tensors, qkv = tensors[:2], Linear8(arithmetic, tensors[2:])
        total, mean, rstd, x8, xt = qkv.normalise(x, branch, norm_tensors, settings.norm)
        q, k, v = settings.heads(qkv.multiply(x8))
        ctx.settings, ctx.qkv, ctx.branch = settings, qkv, branch is not None
        ctx.norm_bias = norm_tensors[1] is not None
        ctx.save_for_backward(total, mean, rstd, norm_tensors[0], *xt[:2])
        return total, q, k, v

    @staticmethod
    def backward(ctx, dtotal, *dheads):
        total, mean, rstd, norm_weight, *xt = ctx.saved_tensors
        qkv, rms = ctx.qkv, ctx.settings.norm[1]
        dy8, dyt, dbias = qkv.quantise(
            GRAD, [d.transpose(1, 2) for d in dheads], 'heads', sums=qkv.bias is not None)
        dh, dw = qkv.backward(dy8, dyt, Float8Tensor(*xt, TENSOR))
        dx, *dnorm, _ = norm_backward(dh, total, mean, rstd, norm_weight, rms=rms, residual=dtotal)
        *dnorm, dbias = added_up((dnorm[0], True), (dnorm[1], ctx.norm_bias), (dbias, qkv.bias is not None))
        return dx, dx if ctx.branch else None, None, None, *dnorm, dw, dbias, *[None] * (Linear8.COUNT - 2)


class SecondHalf(torch.autograd.Function):
    """x, y (M, C) -> total = x + proj(y), and branch = down(act(up(norm(total))))."""

    @staticmethod
    def forward(ctx, x, y, settings, arithmetic, *tensors):
        norm_tensors, tensors = tensors[:2], tensors[2:]
        proj, up, down = (Linear8(each, tensors[Linear8.COUNT * i:Linear8.COUNT * (i + 1)])
                          for i, each in enumerate(arithmetic))
        y8, yt, _ = proj.quantise(INPUT, [y])
        total, mean, rstd, x8, xt = up.normalise(x, proj.multiply(y8), norm_tensors, settings.norm)
        a = up.multiply(x8)
        z8, zt, _ = down.quantise(INPUT, [a], settings.act)
        ctx.settings, ctx.linears, ctx.norm_bias = settings, (proj, up, down), norm_tensors[1] is not None
        ctx.save_for_backward(total, mean, rstd, norm_tensors[0], a, *yt[:2], *xt[:2], *zt[:2])
        return total, down.multiply(z8)

    @staticmethod
    def backward(ctx, dtotal, dbranch):
        total, mean, rstd, norm_weight, a, *saved = ctx.saved_tensors
        yt, xt, zt = (Float8Tensor(*saved[i:i + 2], TENSOR) for i in (0, 2, 4))
        proj, up, down = ctx.linears
        biased, rms = proj.bias is not None, ctx.settings.norm[1]
        dy8, dyt, dbias_down = down.quantise(GRAD, [dbranch], sums=biased)
        dz, dw_down = down.backward(dy8, dyt, zt)
        dy8, dyt, dbias_up = up.quantise(GRAD, [dz, a], f'{ctx.settings.act}_backward', sums=biased)
        dh, dw_up = up.backward(dy8, dyt, xt)
        dx, *dnorm, partials = norm_backward(dh, total, mean, rstd, norm_weight, rms=rms, residual=dtotal)
        known = partials if proj.scale is None else None
        dy8, dyt, dbias_proj = proj.quantise(GRAD, [dx], sums=biased, partials=known)
        dy, dw_proj = proj.backward(dy8, dyt, yt)
        *dnorm, dbias_proj, dbias_up, dbias_down = added_up(
            (dnorm[0], True), (dnorm[1], ctx.norm_bias),
            (dbias_proj, biased), (dbias_up, biased), (dbias_down, biased))
        linears = [(dw_proj, dbias_proj), (dw_up, dbias_up), (dw_down, dbias_down)]
        rest = [None] * (Linear8.COUNT - 2)
        return dx, dy, None, None, *dnorm, *(d for pair in linears for d in (*pair, *rest))


def added_up(*partials):
    """The column sums of (partials, wanted), None where they are not wanted."""
    sums = iter(sum_partials([each for each, wanted in partials if wanted]))
    return [next(sums) if wanted else None for _, wanted in partials]


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
        return qkv.view(*self.shape, -1, self.head_dim).split(self.split, 2)


class FusedBlock(Block):
    """A Block whose stream is a tensor (B, T, C), or (total, branch), which are still to be added."""

    def forward(self, x, rope, cache):
        if mode.paused or self.attn.qkv._forward_hooks:  # who looks at the linears finds them
            return super().forward(joined(x), rope, cache)
        x, branch = x if isinstance(x, tuple) else (x, None)
        attn, mlp = self.attn, self.mlp
        B, T, C = x.shape
        up = mlp.gate_up if mlp.swiglu else mlp.up
        settings = Settings((self.ln_1.eps, self.ln_1.rms), 'swiglu' if mlp.swiglu else 'gelu', (B, T),
                            (attn.n_head, attn.n_kv_head, attn.n_kv_head), attn.head_dim)
        branch = None if branch is None else branch.view(-1, C)
        total, q, k, v = FirstHalf.apply(
            x.reshape(-1, C), branch, settings, attn.qkv.arithmetic,
            *of_norm(self.ln_1), *tensors_of(attn.qkv))
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=attn.n_kv_head != attn.n_head)
        linears = attn.proj, up, mlp.down
        total, branch = SecondHalf.apply(
            total, y.transpose(1, 2).reshape(-1, C), settings, tuple(each.arithmetic for each in linears),
            *of_norm(self.ln_2), *(tensor for each in linears for tensor in tensors_of(each)))
        return total.view(B, T, C), branch.view(B, T, C)


def of_norm(module):
    return module.weight, module.bias


def joined(x):
    """What a FusedBlock hands on, added up."""
    return x[0] + x[1] if isinstance(x, tuple) else x


class JoiningBlock(Block):
    """A plain block behind a FusedBlock."""

    def forward(self, x, rope, cache):
        return super().forward(joined(x), rope, cache)


class JoiningNorm(Norm):
    """The norm behind the last FusedBlock."""

    def forward(self, x):
        return super().forward(joined(x))


def linears_of(block):
    """Those that came from the factory."""
    return [m for m in block.modules() if hasattr(m, 'bf16_reason')]


def can_be_fused(block):
    """Whether a block's linears are all native's, with one scale a tensor and one format for an operand and
    its transpose."""
    if not all(isinstance(linear, Fp8Linear) for linear in linears_of(block)):
        return False
    kinds = [linear.arithmetic.quantizers for linear in linears_of(block)]
    return all(q.x.block == TENSOR and q.x == q.xt and q.dy == q.dyt for q in kinds)


def fuse(model):
    """Makes the Blocks of a GPT, or a Block, that can be FusedBlocks, in place. Returns their linears, whose
    weights are cast again when they have changed by an operation that counts up their version, or when
    `kept_of` is None."""
    for block in [module for module in model.modules() if type(module) is Block]:
        block.__class__ = FusedBlock if can_be_fused(block) else JoiningBlock
    if isinstance(model, GPT):
        model.ln_f.__class__ = JoiningNorm
    model.register_forward_pre_hook(refresh)
    return fused_linears(model)


def fused_linears(model):
    """The linears of its FusedBlocks."""
    blocks = [module for module in model.modules() if isinstance(module, FusedBlock)]
    return [linear for block in blocks for linear in linears_of(block)]


def refresh(model, arguments):
    """A hook: kept weights are never older than the weights. A compiler that traces a block by itself takes
    them as they are."""
    if not mode.paused and not torch.compiler.is_compiling():
        keep_weights(model)
