"""Defines a linear and a norm whose FP8 casts are kernels of our own: a cast computes the norm or activation
before it, or the gradient of what comes after it.

A norm, and a linear followed by an activation (see model.linear_then), return a Deferred, whose value is only
computed when the next KernelLinear casts it. So the order of operations stays model.Block's alone. For
anything else a Deferred turns into a tensor.
"""
import functools

import torch
from torch.autograd import Function

from ..linear import (
    GRAD, INPUT, TENSOR, WEIGHT, Float8Tensor, Fp8Linear, Quantizer, autocast, dgrad_operand, falls_back,
    inverse, mode, refuse_second_derivative, update_amax, weight_operands)
from .casts import VALUES, cast, partial_amaxes
from .norms import norm_backward

# what may follow a multiplication -> how the gradient of the multiplication's result is cast
GRADIENTS = {None: 'plain', 'heads': 'heads', 'gelu': 'gelu_backward', 'swiglu': 'swiglu_backward'}


class Deferred:
    """Stands for the value of VALUES[how](*inputs), which is not computed yet. handle: a tensor of its shape,
    without memory, whose gradient is the value's; see handle_of. value: the tensor, once someone
    has asked for it, who may change it in place or hook its gradient."""

    def __init__(self, handle, how, inputs):
        self.handle, self.how, self.inputs, self.value = handle, how, inputs, None

    def tensor(self):
        """Return the value."""
        if self.value is None:
            [value] = VALUES[self.how](*self.inputs)
            # who only looks, under no_grad or in inference_mode, takes no gradient away
            inference = not torch.compiler.is_compiling() and self.handle.is_inference()
            with torch.inference_mode(inference), torch.enable_grad():
                self.value = self.handle + value.detach().view(self.handle.shape)
        return self.value

    def __getattr__(self, name):
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        arguments, options = torch.utils._pytree.tree_map(as_tensor, (arguments, options or {}))
        return function(*arguments, **options)


def operator(name):
    """Return the method `name` of Deferred: the tensor's."""
    return lambda self, *others: getattr(self.tensor(), name)(*others)


for name in ('add', 'radd', 'iadd', 'sub', 'rsub', 'isub', 'mul', 'rmul', 'imul', 'truediv', 'itruediv',
             'rtruediv', 'neg', 'abs', 'pow', 'matmul', 'eq', 'ne', 'lt', 'le', 'gt', 'ge', 'len', 'getitem',
             'setitem', 'reduce_ex'):       # the last is pickle's
    setattr(Deferred, f'__{name}__', operator(f'__{name}__'))


def as_tensor(x):
    """Return a Deferred's value, and anything else as it is."""
    return x.tensor() if isinstance(x, Deferred) else x


def handle_of(x, *shape):
    """Return a tensor of this shape and x's dtype that takes no memory. Of -0.0: added to any value, it
    changes no bit."""
    return x.new_full((), -0.0).expand(shape)


# ------------------------------------------------------------------------------------------------- the linear

def quantise(quantizer, how, inputs, scale, sums=False):
    """Return VALUES[how](*inputs) (M, C), and their transpose, as Float8Tensors, and partial sums over M.
    scale: delayed scaling's, 0-dim; with None, it is the values' own."""
    if scale is None:
        amax = partial_amaxes(inputs, how).amax()
        scale = quantizer.scale(amax)
        data, data_t, _, sums = cast(inputs, how, scale, quantizer.dtype, sums)
    else:
        data, data_t, partials, sums = cast(inputs, how, scale, quantizer.dtype, sums)
        amax = partials.amax()
    scale_inv = inverse(scale, amax).view(1, 1)
    return Float8Tensor(data, scale_inv, TENSOR, amax), Float8Tensor(data_t, scale_inv, TENSOR, amax), sums


class KernelMatmul(Function):
    """Computes linear.Matmul with what is around it. x: the handle (..., K) of a Deferred. around: how the
    Deferred is cast, the number of its inputs, a key of GRADIENTS and model.py's function of that name.
    tensors: the cache's, then the Deferred's inputs. Returns y; q, k and v of it; or, before an activation,
    the activation's handle and y, which its cast reads."""

    @staticmethod
    def forward(ctx, x, around, weight, bias, arithmetic, running, scale, *tensors):
        how, count, kernel, function = around
        cache, inputs = tensors[:-count], tensors[-count:]
        q, mm = arithmetic
        ctx.arithmetic, ctx.running, ctx.shape, ctx.how = arithmetic, running, x.shape, GRADIENTS[kernel]
        ctx.scale = (None,) * 3 if scale is None else scale
        ctx.weight_dtype, ctx.bias_dtype = (p.dtype if p is not None else None for p in (weight, bias))
        x8, xt, _ = quantise(q.x, how, inputs, ctx.scale[INPUT])
        w8, wt = weight_operands(weight, q, ctx.scale[WEIGHT], cache)
        update_amax(running, x8.amax, w8.amax)
        ctx.has_wt = wt.data is not None
        wt = wt if ctx.has_wt else w8
        y = mm(x8, w8, x.dtype, bias=None if bias is None else bias.to(x.dtype), fast=True)
        if kernel in ('gelu', 'swiglu'):
            ctx.save_for_backward(*wt[:2], *xt[:2], y)
            ctx.mark_non_differentiable(y)
            return handle_of(x, *x.shape[:-1], y.shape[1] // (2 if kernel == 'swiglu' else 1)), y
        ctx.save_for_backward(*wt[:2], *xt[:2])
        y = y.view(*x.shape[:-1], -1)
        return y if function is None else function(y)

    @staticmethod
    def backward(ctx, dy, *others):
        refuse_second_derivative()
        (q, mm), (wt, wt_scale, xt, xt_scale, *y) = ctx.arithmetic, ctx.saved_tensors
        inputs = [dy, *others] if ctx.how == 'heads' else [dy.flatten(0, -2), *y]
        biased = ctx.bias_dtype is not None
        dy8, dyt, sums = quantise(q.dy, ctx.how, inputs, ctx.scale[GRAD], sums=biased)
        update_amax(ctx.running, grad=dy8.amax)
        wt = dgrad_operand(Float8Tensor(wt, wt_scale, TENSOR), ctx.has_wt, q, dy8)
        dx = mm(dy8, wt, dy.dtype, fast=True)
        dw = mm(dyt, Float8Tensor(xt, xt_scale, TENSOR), ctx.weight_dtype)
        db = sums.sum(0).to(ctx.bias_dtype) if biased else None
        return dx.view(ctx.shape), None, dw, db, *[None] * (len(ctx.needs_input_grad) - 4)


class WeightQuantizer(Quantizer):
    """Quantises with one scale a tensor; `both` moves 10 bytes a weight of fp32, in eager mode too."""

    def both(self, x, transposed, scale=None):
        one, other, _ = quantise(self, 'plain', [x], scale)
        # two tensors, though alike: Dynamo breaks the graph at a Function that gets one twice, as of a cache
        return one, other._replace(scale_inv=other.scale_inv.t())


class KernelLinear(Fp8Linear):
    """Runs an Fp8Linear by our kernels: one scale a tensor, and one format for it and its transpose."""

    def forward(self, input, function=None, kernel=None):
        """Return function(self(x)), or self(x): a Deferred where function is an activation. x: input."""
        x = input
        if isinstance(x, Deferred) and x.value is not None:
            x = x.value
        if falls_back(x.handle if isinstance(x, Deferred) else x, 16):
            y = super().forward(as_tensor(x))
            return y if function is None else function(y)
        if not isinstance(x, Deferred):
            x = autocast(x)
            x = Deferred(x, 'plain', [x.detach().flatten(0, -2)])       # another tensor, be x (M, K) itself
        around = x.how, len(x.inputs), kernel, function
        y = KernelMatmul.apply(x.handle, around, *self.operands(), *x.inputs)
        if kernel in ('gelu', 'swiglu'):
            handle, a = y
            return Deferred(handle, kernel, [a])
        return y

    def then(self, x, function, kernel):
        """Return function(self(x)), by one multiplication where kernels of this name compute the function."""
        hooks = self._forward_pre_hooks, self._forward_hooks, self._backward_pre_hooks, self._backward_hooks
        if any(hooks):      # they see the linear's own input and output, and may change either
            return function(self(as_tensor(x)))
        if kernel not in GRADIENTS:
            return function(self(x))
        return self.forward(x, function, kernel)


# --------------------------------------------------------------------------------------------------- the norm

class AddAndNorm(Function):
    """Computes x + delta, a handle of its norm, and what the norm's cast reads: rstd (M,) and, unless `rms`,
    mean (M,). x, delta (..., C) bf16; delta and bias may be None. settings: eps and `rms`."""

    @staticmethod
    def forward(ctx, x, delta, weight, bias, settings):
        eps, rms = settings
        rows = (x if delta is None else x + delta).flatten(0, -2).contiguous()
        centred, mean = rows.float(), []
        if not rms:
            mean = [centred.mean(1)]
            centred = centred - mean[0][:, None]
        rstd = (centred.square().mean(1) + eps).rsqrt()
        ctx.save_for_backward(rows, weight, rstd, *mean)
        ctx.mark_non_differentiable(rstd, *mean)
        return rows.view(x.shape), handle_of(x, *x.shape), rstd, *mean

    @staticmethod
    def backward(ctx, dtotal, dy, *others):
        rows, weight, rstd, *mean = ctx.saved_tensors
        dx, sums = norm_backward(
            dy.flatten(0, -2).contiguous(), rows, *(mean or [None]), rstd, weight,
            residual=dtotal.flatten(0, -2).contiguous())
        sums, dx = sums.sum(1).to(weight.dtype), dx.view(dy.shape)
        dbias = sums[1] if ctx.needs_input_grad[3] else None
        return dx, dx if ctx.needs_input_grad[1] else None, sums[0], dbias, None


@functools.cache
def kernel_norm(base):
    """Return a subclass of `base`, model.AddNorm, that leaves its last part to a KernelLinear's cast."""
    class KernelNorm(base):
        def forward(self, x, delta=None):
            C = x.shape[-1]
            if mode.paused or x.numel() // C % 16 or C % 16:
                return super().forward(x, delta)
            total, handle, rstd, *mean = AddAndNorm.apply(
                x, delta, self.weight, self.bias, (self.eps, self.rms))
            bias = [] if self.bias is None else [self.bias]
            inputs = [total.flatten(0, -2), rstd, self.weight, *mean, *bias]
            return total, Deferred(handle, 'norm', inputs)

    return KernelNorm
