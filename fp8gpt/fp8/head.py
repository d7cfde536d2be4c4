"""Defines the output head and its loss in FP8. Its gradients' scale is known beforehand: no amax is sought.

    logits = h W^T          nats = sum over targets of log(sum(exp(logits))) - logits[target]
    share = softmax(logits) - one_hot(target)          dlogits = g share

A share lies in [-1, 1], and what follows the loss makes g, a number. So e5m2's largest is the scale of every
share, and forward can compute the gradients but for g: one kernel reads a row of logits, sums, reads it again
while it is in cache, and writes the shares twice: in e5m2 for dh = g share W, and in bf16 for dW = g share^T
h, which stays a bf16 product. Smallest share: 2^-32, in e5m2 with a scale of 2^16; with 50,257 tokens the
mean one is 2^-16.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import Function

from .linear import (
    E5M2, TENSOR, Arithmetic, Float8Tensor, autocast, cast_linear, falls_back, mode, quantizers,
    refuse_second_derivative)


class Fp8HeadNats(Function):
    """Computes the sum of cross-entropies in nats, fp32, of h (M, C) bf16, weight (V, C) and targets (M,). A
    target of -1 adds nothing."""

    @staticmethod
    def forward(ctx, h, weight, targets, arithmetic, vocab_size):
        q, mm = arithmetic
        w8, wt = q.w.both(weight, q.wt)
        logits = mm(q.x(h), w8, h.dtype, fast=True)                         # (M, V), padding too
        used, targets = logits.to(torch.float32, copy=True), targets[:, None]
        used[:, vocab_size:].fill_(-math.inf)                               # shares of 0
        most = used.amax(1, keepdim=True)
        log_sums = most + (used - most).exp_().sum(1, keepdim=True).log()   # a form that Inductor reads once
        nats = (log_sums - used.gather(1, targets.clamp(min=0))).masked_fill(targets == -1, 0)
        log_sums = log_sums.masked_fill(targets == -1, math.inf)            # shares of 0
        columns = torch.arange(used.shape[1], dtype=torch.int32, device=h.device)
        share = (used - log_sums).exp_().sub_((columns == targets.int()).to(h.dtype))     # fp32
        largest = torch.finfo(E5M2).max
        in_e5m2 = Float8Tensor((share * largest).to(E5M2), share.new_full((1, 1), 1 / largest), TENSOR)
        dh = mm(in_e5m2, wt, h.dtype)                                                 # (M, V) (C, V)^T
        ctx.save_for_backward(dh, share.to(h.dtype).t() @ h)                          # (V, M) (M, C)
        ctx.weight_dtype = weight.dtype
        return nats.sum()

    @staticmethod
    def backward(ctx, g):
        refuse_second_derivative()
        dh, dw = ctx.saved_tensors
        return (dh * g).to(dh.dtype), dw.to(ctx.weight_dtype) * g, None, None, None


class Fp8Head(nn.Linear):
    """Computes the loss of an output head without bias in FP8; logits by themselves are in the input's dtype.
    """
    plain = staticmethod(cast_linear)

    def __init__(self, in_features, out_features, mm, margin):
        super().__init__(in_features, out_features, bias=False)
        self.arithmetic = Arithmetic(quantizers('tensorwise', 'hybrid', margin), mm)

    @property
    def takes_targets(self):
        """Return whether forward is to compute the loss: not while FP8 is paused."""
        return not mode.paused

    def forward(self, x, targets=None, vocab_size=None):
        """Return logits (B, T, V) of x (B, T, C), in x's dtype; with targets (B, T), -1 where there is none
        and below vocab_size, the sum of their cross-entropies in nats."""
        x = autocast(x)
        if targets is None:
            return self.plain(self, x)
        x, targets = x.flatten(0, -2), targets.flatten()
        if falls_back(x, 16):
            logits = self.plain(self, x)[:, :vocab_size].float()
            return F.cross_entropy(logits, targets, ignore_index=-1, reduction='sum')
        return Fp8HeadNats.apply(x, self.weight, targets, self.arithmetic, vocab_size)
