"""Weights that are cast once a step and kept for all its micro-steps, in both layouts.

Casting a weight moves 14 bytes of each number by torch.compile's kernels, 35 or more without, as here; kept,
it takes 2 bytes of memory, and moves none but those that the multiplications read. Kept weights are buffers
of their linear, so a compiled graph takes them as it takes the weight itself: one graph serves every
micro-step. A weight is cast before the first forward pass of a step, by the linear's own quantizers, so that
keeping it changes no bit.

A weight that does not train is cast once, with a scale of its own, and kept for good in the place of its fp32
numbers: it takes 2 bytes in the place of 4. Evaluation in bf16 reads the cast.
"""
import torch

from ..linear import WEIGHT, WEIGHT_CACHE, Fp8Linear, mode, set_mode, update_amax

FEWEST = 4      # micro-steps of a step in which keeping pays, by plan.py: the cast to be kept is dearer


class Keeper:
    """Keeps the cast weights of a model's Fp8Linears in steps of FEWEST micro-steps or more, and those that
    do not train for good. Of sharded weights none are kept: casts would be whole."""

    def __init__(self, model):
        self.linears = [module for module in model.modules()
                        if isinstance(module, Fp8Linear) and not hasattr(module.weight, 'device_mesh')]
        self.frozen = [linear for linear in self.linears if not linear.weight.requires_grad]
        self.linears = [linear for linear in self.linears if linear.weight.requires_grad]
        for linear in self.frozen:
            cast(linear)
            linear.weight = None
        self.new_step(1)
        if self.linears:
            model.register_forward_pre_hook(self.refresh)

    def new_step(self, micro_steps):
        """Drops what is kept. (A fused optimizer changes weights without counting up their version.)"""
        for linear in self.linears:
            linear.kept_of = None
            linear.keeps = micro_steps >= FEWEST
            drop(linear)

    def refresh(self, model, arguments):
        """A hook: kept weights are never older than the weights. A compiler that traces a block by itself
        takes them as they are."""
        if mode.paused or torch.compiler.is_compiling():
            return
        for linear in self.linears:
            if linear.keeps:
                keep(linear)


def follows(linear):
    """Whether the kept cast of an Fp8Linear's weight stays for the step and follows a change in the next: one
    that leaves the weight's version, as a fused optimizer's does. The weight is left as it was."""
    seen = []
    with torch.no_grad(), set_mode(calibrating=True):
        for change in (False, True, False):
            if change:
                linear.weight.data.neg_()
            else:
                linear.kept_of = None
            keep(linear)
            seen.append(linear.w8.view(torch.uint8).clone())
        linear.weight.data.neg_()
    linear.kept_of = None
    drop(linear)
    return torch.equal(*seen[:2]) and not torch.equal(*seen[1:])


def drop(linear):
    """From here on, an Fp8Linear casts its weight itself."""
    for name in WEIGHT_CACHE:
        setattr(linear, name, None)


def keep(linear):
    """Casts the weight of an Fp8Linear, both layouts, into its buffers WEIGHT_CACHE, where
    it has changed since."""
    state = linear.weight._version, mode.calibrating
    if linear.kept_of == state:
        return
    scale = None if mode.calibrating or linear.scale is None else linear.scale[WEIGHT]
    update_amax(linear.amax, {WEIGHT: cast(linear, scale)})
    linear.kept_of = state


def cast(linear, scale=None):
    """Fills the buffers WEIGHT_CACHE of an Fp8Linear; returns its weight's amax. scale: see Quantizer."""
    q, weight = linear.arithmetic.quantizers, linear.weight.detach()
    w, wt = q.w.both(weight, q.wt, scale)
    for name, tensor in zip(WEIGHT_CACHE, (*w[:2], *wt[:2])):
        setattr(linear, name, tensor)
    return w.amax
