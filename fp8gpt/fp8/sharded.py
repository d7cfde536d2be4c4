"""Gathers the weights that FSDP2 shards in FP8: a byte a weight, with one scale for all ranks' shards.

FSDP2 asks a rank's shard, a plain tensor, what is to be gathered (its fsdp_pre_all_gather), and hands over
what arrives (fsdp_post_all_gather). Here these hooks are a ShardedWeight's `sent` and `received`. Optimizer,
checkpoint and clipping see the DTensor that they see without FP8. What arrives is a linear's WEIGHT_CACHE, as
of a frozen weight: W alone, of which backward makes W^T when it has been gathered again.
"""
import torch
import torch.distributed as dist

from .linear import E4M3, TENSOR, WEIGHT, Fp8Linear, inverse, mode, update_amax


class ShardedWeight:
    """Casts this rank's shard of an Fp8Linear's weight, and gathers the shards.

    fsdp_param: FSDP2's own account of the weight. codes: the shard in FP8; scale_inv (1, 1): the whole
    weight's. host: the shard in the host's memory where FP8 is all that the device keeps; else None. in_full:
    whether FSDP2 gathers the weight itself; see gather_as."""

    def __init__(self, linear, fsdp_param):
        self.linear, self.fsdp_param, self.in_full = linear, fsdp_param, False
        self.codes = self.scale_inv = self.host = None
        linear.sharded = self
        self.set_hooks()
        fsdp_param._init_extensions()       # FSDP2 looks for hooks before its first pass alone

    @property
    def weight(self):
        """Return the weight, a DTensor."""
        return self.fsdp_param.sharded_param

    @property
    def shard(self):
        """Return this rank's part of it, a plain tensor (rows / ranks, columns)."""
        return self.weight._local_tensor

    def cast(self, amax):
        """Cast the shard. amax: the whole weight's, 0-dim; or, for delayed scaling, the shard's."""
        quantizer = self.linear.arithmetic.quantizers.w
        scale = quantizer.scale(amax) if scales_itself(self.linear) else self.linear.scale[WEIGHT]
        self.codes, self.scale_inv = quantizer.codes(self.shard, scale), inverse(scale, amax).view(1, 1)
        update_amax(self.linear.amax, weight=amax)
        self.set_hooks()

    def set_hooks(self):
        """Set FSDP2's two hooks on the shard: anew where load_state_dict(assign=True) has replaced it."""
        self.shard.fsdp_pre_all_gather, self.shard.fsdp_post_all_gather = self.sent, self.received

    def drop(self):
        """Move the shard, which does not train, to the host's memory; NaN stands where it was."""
        host = self.shard.cpu()     # pinned, a GPU reads it at the bus's full speed
        self.host = host.pin_memory() if self.shard.is_cuda else host
        self.weight._local_tensor = self.shard.new_full((), torch.nan).expand(host.shape)
        self.fsdp_param._sharded_param_data = self.shard.view(-1)
        self.set_hooks()

    def sent(self, mesh, size, stride, module, policy):
        """Return this rank's part of what is gathered, and what `received` gets beside it. size, stride: the
        whole weight's. policy: FSDP2's MixedPrecisionPolicy."""
        # by which FSDP2 makes the parameter: that of a handle, which takes no memory
        self.fsdp_param._contiguous_orig_stride = (size[1], 1) if self.in_full else (0, 0)
        if not self.in_full:
            return (self.codes.view(torch.uint8),), self.scale_inv      # gloo knows no FP8
        shard = self.shard if self.host is None else self.host.to(self.codes.device, non_blocking=True)
        return (shard.to(policy.param_dtype or shard.dtype),), None

    def received(self, outputs, scale_inv, dtype, *, out=None):
        """Take the gathered weight, outputs' only tensor. Return what becomes the linear's parameter, and no
        buffers; nothing where it is there (out). In FP8 it is a handle, to which autograd gives the gradient.
        """
        [data] = outputs
        self.linear.w8, self.linear.w8_scale_inv = None if self.in_full else data.view(E4M3), scale_inv
        if out is None:
            return data if self.in_full else data.new_full((), -0.0, dtype=dtype), ()


def sharded_weights(model):
    """Return a ShardedWeight for each weight of a model's Fp8Linears that FSDP2 shards in equal parts of rows
    over one dimension of ranks, and of which one scale serves the whole tensor."""
    sharded = []
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if hasattr(module, '_get_fsdp_state') else None
        for fsdp_param in group.fsdp_params if group else ():
            linear, weight = fsdp_param._module_info.module, fsdp_param.sharded_param
            by_rows = [placement.is_shard(0) for placement in weight.placements] == [True]
            if isinstance(linear, Fp8Linear) and weight.dim() == 2 and by_rows:
                q = linear.arithmetic.quantizers
                if q.w.block == q.wt.block == TENSOR and len(weight) % weight.device_mesh.size() == 0:
                    sharded.append(ShardedWeight(linear, fsdp_param))
    return sharded


def gather_as(model, weights, in_full):
    """Have FSDP2 gather a model's ShardedWeights themselves, or in FP8, until this is called again: backward
    gathers what forward did, though fp8.paused() may have ended."""
    if any(each.in_full != in_full for each in weights):
        for module in model.modules():
            if hasattr(module, 'reshard'):      # a pass without backward may have left them whole
                module.reshard()
        for each in weights:    # FSDP2 keeps the buffers of its first call, of another size
            each.in_full, each.fsdp_param.all_gather_outputs = in_full, []
            vars(each.fsdp_param).pop('_unsharded_param', None)


def scales_itself(linear):
    """Return whether a weight's scale comes from its own amax."""
    return linear.scale is None or mode.calibrating


@torch.no_grad()
def cast_shards(weights):
    """Cast the shards of ShardedWeights by scales of the whole weights. All ranks call it: their amaxes are
    one all-reduce, which delayed scaling does later."""
    amaxes = torch.stack(torch._foreach_norm([each.shard for each in weights], torch.inf)).float()
    if scales_itself(weights[0].linear):
        dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=weights[0].weight.device_mesh.get_group())
    for each, amax in zip(weights, amaxes):
        each.cast(amax)
