"""Defines a linear and a norm whose FP8 casts are kernels of our own: a cast computes the norm or activation
before it, or the gradient of what comes after it.

A KernelLinear is called as model.linear_then calls it: linear.then(x, activation). The result is a Deferred,
whose activation is only computed when the next KernelLinear casts it; a KernelNorm returns one too. So the
order of operations stays model.Block's alone. For anything else a Deferred turns into a tensor.
"""
import functools

import torch
from torch.autograd import Function

from ..linear import (
    GRAD, INPUT, TENSOR, WEIGHT, Float8Tensor, Fp8Linear, Quantizer, autocast, falls_back, inverse, mode,
    update_amax, weight_operands)
from .casts import VALUES, cast, partial_amaxes
from .norms import WIDEST, add_and_normalise, norm_backward, norm_cast


class Deferred:
    """Stands for the value of VALUES[how](*inputs), which is not computed yet. handle: a tensor of its shape,
    without memory, whose gradient is the value's. known: nothing; the largest magnitudes of its parts; or
    the cast for the linear `reader`, data and data_t, and those."""

    def __init__(self, handle, how, inputs, known=(), reader=None):
        self.handle, self.how, self.inputs = handle, how, inputs
        self.known, self.reader = known, reader

    def tensor(self):
        """Return the value."""
        return Computed.apply(self.handle, self.how, *self.inputs)

    def __getattr__(self, name):
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        arguments, options = torch.utils._pytree.tree_map(as_tensor, (arguments, options or {}))
        return function(*arguments, **options)


def operator(name):
    """Return the method `name` of Deferred: the tensor's."""
    return lambda self, *others: getattr(self.tensor(), name)(*others)


for name in ('add', 'radd', 'sub', 'rsub', 'mul', 'rmul', 'truediv', 'neg', 'pow', 'matmul', 'getitem'):
    setattr(Deferred, f'__{name}__', operator(f'__{name}__'))


def as_tensor(x):
    """Return a Deferred's value, and anything else as it is."""
    return x.tensor() if isinstance(x, Deferred) else x


class Computed(Function):
    """Computes the tensor of a Deferred."""

    @staticmethod
    def forward(ctx, handle, how, *inputs):
        [value] = VALUES[how](*inputs)
        return value.view(handle.shape)

    @staticmethod
    def backward(ctx, dy):
        return dy, *[None] * (len(ctx.needs_input_grad) - 1)


def handle_of(x, *shape):
    """Return a tensor of this shape and x's dtype that takes no memory."""
    return x.new_empty(()).expand(shape)


# ------------------------------------------------------------------------------------------------- the linear

def quantise(quantizer, how, inputs, scale, known=(), sums=False):
    """Return VALUES[how](*inputs) (M, C), and their transpose, as Float8Tensors, and partial sums over M.
    scale: delayed scaling's, 0-dim, or None. known: as a Deferred's, for this scale."""
    *of_cast, partials = known or [None]
    if scale is None:
        partials = partial_amaxes(inputs, how) if partials is None else partials
        scale = quantizer.scale(partials.amax())
        *of_cast, _, sums = cast(inputs, how, scale, quantizer.dtype, sums)
    elif not of_cast:
        *of_cast, partials, sums = cast(inputs, how, scale, quantizer.dtype, sums)
    data, data_t = of_cast
    amax = partials.amax()
    scale_inv = inverse(scale, amax).view(1, 1)
    return Float8Tensor(data, scale_inv, TENSOR, amax), Float8Tensor(data_t, scale_inv, TENSOR, amax), sums


class KernelMatmul(Function):
    """Computes linear.Matmul with what is around it. x: the handle (..., K) of a Deferred. around: its `how`,
    the operation that follows the multiplication (None, or model.py's activation or SplitHeads), and where
    the Deferred's `known` and its inputs end. tensors: `running` and `scale` as Matmul's, those, and the
    cache's. The result is y, or q, k and v of it; with an activation, its handle and y,
    which the activation's cast reads."""

    @staticmethod
    def forward(ctx, x, around, arithmetic, weight, bias, *tensors):
        how, then, known, end = around
        q, mm = arithmetic
        running, scale, *tensors = tensors
        known, inputs, cache = tensors[:known], tensors[known:end], tensors[end:]
        ctx.arithmetic, ctx.running, ctx.shape = arithmetic, running, x.shape
        ctx.scale = (None,) * 3 if scale is None else scale
        ctx.kind = then and then.kernel
        ctx.weight_dtype, ctx.bias_dtype = (p.dtype if p is not None else None for p in (weight, bias))
        x8, xt, _ = quantise(q.x, how, inputs, ctx.scale[INPUT], known)
        w8, wt = weight_operands(weight, q, ctx.scale[WEIGHT], cache)
        update_amax(running, {INPUT: x8.amax, WEIGHT: w8.amax})
        y = mm(x8, w8, x.dtype, bias=None if bias is None else bias.to(x.dtype), fast=True)
        ctx.save_for_backward(*wt[:2], *xt[:2], *([y] if ctx.kind in ('gelu', 'swiglu') else []))
        if ctx.kind in ('gelu', 'swiglu'):
            ctx.mark_non_differentiable(y)
            return handle_of(x, *x.shape[:-1], y.shape[1] // (2 if ctx.kind == 'swiglu' else 1)), y
        y = y.view(*x.shape[:-1], -1)
        return y if then is None else then(y)

    @staticmethod
    def backward(ctx, dy, *others):
        (q, mm), (wt, wt_scale, xt, xt_scale, *y) = ctx.arithmetic, ctx.saved_tensors
        if ctx.kind == 'heads':
            how, inputs = 'heads', [dy, *others]
        else:       # with y, dy is the gradient of the activation's output
            how, inputs = f'{ctx.kind}_backward' if y else 'plain', [dy.flatten(0, -2), *y]
        biased = ctx.bias_dtype is not None
        dy8, dyt, sums = quantise(q.dy, how, inputs, ctx.scale[GRAD], sums=biased)
        update_amax(ctx.running, {GRAD: dy8.amax})
        dx = mm(dy8, Float8Tensor(wt, wt_scale, TENSOR), dy.dtype)
        dw = mm(dyt, Float8Tensor(xt, xt_scale, TENSOR), ctx.weight_dtype)
        db = sums.sum(0).to(ctx.bias_dtype) if biased else None
        return dx.view(ctx.shape), None, None, dw, db, *[None] * (len(ctx.needs_input_grad) - 5)


class WeightQuantizer(Quantizer):
    """Is a Quantizer, one scale a tensor, whose `both` moves 10 bytes a weight of fp32, in eager mode too."""

    def both(self, x, transposed, scale=None):
        return quantise(self, 'plain', [x], scale)[:2]


class KernelLinear(Fp8Linear):
    """Is an Fp8Linear by our kernels: one scale a tensor, and one format for a tensor and its transpose."""

    def forward(self, x, function=None):
        """Return function(self(x)), or self(x): a Deferred where function is an activation."""
        if falls_back(x.handle if isinstance(x, Deferred) else x, 16):
            y = super().forward(as_tensor(x))
            return y if function is None else function(y)
        if not isinstance(x, Deferred):
            x = autocast(x)
            x = Deferred(x, 'plain', [x.flatten(0, -2)])
        known = x.known if x.reader is self else x.known[-1:]
        around = x.how, function, len(known), len(known) + len(x.inputs)
        weight, bias, arithmetic, running, scale, *cache = self.operands()
        tensors = running, scale, *known, *x.inputs, *cache
        y = KernelMatmul.apply(x.handle, around, arithmetic, weight, bias, *tensors)
        if function is None or function.kernel == 'heads':
            return y
        handle, a = y
        return Deferred(handle, function.kernel, [a])

    def then(self, x, function):
        """Return function(self(x)), by one multiplication where the kernels know the function."""
        known = getattr(function, 'kernel', None) in VALUES
        if not known or self._forward_hooks:    # hooks see the linear's own output
            return function(self(x))
        return self.forward(x, function)


# --------------------------------------------------------------------------------------------------- the norm

class AddAndNorm(Function):
    """Computes x + delta, a handle of its norm, rstd (M,), unless `rms` mean (M,), and what a Deferred knows
    of the norm. x, delta (..., C) bf16; delta may be None if scale is. settings: eps, `rms` and the cast's
    dtype. scale: delayed scaling's (3,), or None."""

    @staticmethod
    def forward(ctx, x, delta, weight, bias, settings, scale):
        *of_norm, dtype = settings
        inputs = [each if each is None else each.flatten(0, -2).contiguous() for each in (x, delta)]
        inputs += weight, bias
        if scale is None:
            y, rows, *statistics = add_and_normalise(*inputs, of_norm)
            known = [y.abs().amax(1).float()]   # by rows, so that one kernel has them and the statistics
        else:
            outputs = norm_cast(inputs, *of_norm, scale[INPUT], dtype)
            known, (rows, *statistics) = outputs[:3], outputs[3:]
        ctx.dtypes = [p.dtype if p is not None else None for p in (weight, bias)]
        ctx.save_for_backward(rows, weight, *statistics)
        ctx.mark_non_differentiable(*known, *statistics)
        return rows.view(x.shape), handle_of(x, *x.shape), *statistics, *known

    @staticmethod
    def backward(ctx, dtotal, dy, *others):
        rows, weight, rstd, *mean = ctx.saved_tensors
        dx, sums = norm_backward(
            dy.flatten(0, -2).contiguous(), rows, *(mean or [None]), rstd, weight,
            residual=dtotal.flatten(0, -2).contiguous())
        dweight, dbias = (None if dtype is None else each.to(dtype)
                          for each, dtype in zip((*sums.sum(1), None), ctx.dtypes))
        dx = dx.view(dy.shape)
        return dx, dx if ctx.needs_input_grad[1] else None, dweight, dbias, None, None


@functools.cache
def kernel_norm(base):
    """Return a subclass of `base`, model.AddNorm, that leaves its last part to a KernelLinear's cast, or, by
    delayed scaling's scale, casts for its reader."""
    class KernelNorm(base):
        def forward(self, x, delta=None, reader=None):
            C = x.shape[-1]
            scale = dtype = None
            if mode.paused or x.numel() // C % 16 or C % 16:
                return super().forward(x, delta)
            if isinstance(reader, KernelLinear) and delta is not None and C <= WIDEST:
                scale = None if mode.calibrating else reader.scale
                dtype = reader.arithmetic.quantizers.x.dtype
            settings = self.eps, self.rms, dtype
            parameters = self.weight, self.bias
            total, handle, rstd, *others = AddAndNorm.apply(x, delta, *parameters, settings, scale)
            mean = others[:not self.rms]
            known = others[len(mean):]
            bias = [] if self.bias is None else [self.bias]
            inputs = [total.flatten(0, -2), rstd, self.weight, *mean, *bias]
            return total, Deferred(handle, 'norm', inputs, known, reader)

    return KernelNorm
