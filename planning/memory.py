"""What training keeps in a GPU's memory, counted at its peak, where backward starts. Nothing here knows the
model's layers: a change of model.py changes the count.

    memory(Shape(PRESETS['gpt2'], sequences=32), 'fp8')    # component -> bytes of one GPU; no GPU needed

Persistent: weights and gradients, 4 bytes a parameter each in fp32 or 2 in bf16, and AdamW's two moments, 8
bytes in fp32 or 2.03 in 8 bits; beside adapters a frozen weight alone, or 2 bytes in FP8 (W and W^T). For
backward, what autograd keeps: model.py itself runs, on tensors without data, and Trace notes what is kept. Of
that, torch.compile keeps less: what is computed elementwise from fewer bytes is computed again in backward,
as a norm's fp32 input from bf16, or SwiGLU's silu(gate). In eager mode the loss keeps log-probabilities in
fp32 and takes two more such tensors in backward (12 bytes a logit); compiled, bf16 logits and a bf16 gradient
(4 bytes). An FP8 linear keeps its input and weight in FP8, transposed, of which a compiler may yet recompute
some; where weights stay cast for the whole step, both casts count. A checkpointed block keeps its bf16 input;
one block at a time is recomputed. A loss in chunks has one chunk's logits at a time, and keeps the gradients
of its input, bf16, and of the head's weight, fp32, beside the one that it becomes.
"""
import collections
import dataclasses
import functools
import math
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fp8
import lora
import optim
from fp8_kernels.block import FusedBlock, fuse, fused_linears
from fp8_kernels.kept import FEWEST, Keeper
from fp8_linear import E4M3, E5M2, KEPT, RECIPES
from gpus import Gpu
from model import GPT, GPTConfig, Linear, Norm

MARGIN = 2.0    # GB, our allowance for CUDA's context, workspaces, buffers and the allocator's gaps


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is planned. sequences: of one GPU's micro-batch. gpu: a row of gpus.GPUS, None = unknown.
    checkpoint_every, param_dtype, loss_chunks: see GPT. optimizer: the setting. choice: how the FP8 column is
    computed. sharding: the setting sharding_mode, over all gpus. For the time alone: micro_steps of an
    optimizer step; gpus_per_node; network: GB/s of a GPU between nodes."""
    config: GPTConfig
    sequences: int
    micro_steps: int = 1
    gpus: int = 1
    sharding: str = 'ddp'
    gpus_per_node: int = 8
    network: float = 50.0
    gpu: Gpu | None = None
    compiled: bool = True
    checkpoint_every: int = 0
    param_dtype: torch.dtype = torch.float32
    loss_chunks: int = 1
    optimizer: str = 'adamw'
    choice: fp8.Choice = fp8.Choice('native', reason='planned')
    adapters: lora.Spec = lora.NONE

    @classmethod
    def of(cls, run, **fields):
        """Of a resolve.Run; fields: those that it does not tell. Raises SettingError for kernels that are
        not there."""
        asked = fp8.Options.of(run.config)
        choice = fp8.Choice.of(asked, 'native', reason='planned')
        fp8.check_kernels(choice, 'native' if asked.backend in ('auto', 'off') else asked.backend)
        return cls(run.window_config, run.batch_size, compiled=run.compiled,
                   checkpoint_every=run.checkpoint_every, param_dtype=run.param_dtype,
                   loss_chunks=run.config['loss_chunks'], optimizer=run.config['optimizer'],
                   choice=choice, adapters=lora.Spec.of(run.config),
                   sharding=run.config['sharding_mode'], **fields)

    @property
    def nodes(self):
        return math.ceil(self.gpus / self.gpus_per_node)

    @property
    def sharded(self):
        """Whether a GPU holds only its share of weights, gradients and moments."""
        return self.gpus > 1 and self.sharding != 'ddp'

    @property
    def shards(self):
        """Of what trains; adapters are whole on each GPU."""
        return self.gpus if self.sharded and not self.adapters.rank else 1

    @property
    def tokens(self):
        """Of a micro-batch."""
        return self.sequences * self.config.block_size

    @property
    def recomputed(self):
        """Whether each block is recomputed in backward, as GPT does it."""
        every = self.checkpoint_every
        return [bool(every) and i % every == 0 for i in range(self.config.n_layer)]

    def choice_in(self, precision):
        """What the linears run in, in 'bf16' or 'fp8'."""
        if precision == 'bf16':
            return fp8.OFF
        multiple = RECIPES[self.choice.recipe].multiple
        if self.tokens % multiple == 0:
            return self.choice
        why = f'{self.sequences} x {self.config.block_size} tokens are not a multiple of {multiple}'
        return dataclasses.replace(fp8.OFF, reason=why)


# ------------------------------------------------------------------------------------------------- parameters

PARTS = {'attn': 'attention', 'mlp': 'MLP', 'lm_head': 'head'}


@functools.cache
def parameters(config):
    """kind -> number of GPT's parameters, the vocabulary's padding included."""
    with torch.device('meta'):
        model = GPT(config)
    count = dict.fromkeys(('embeddings', 'attention', 'MLP', 'norms', 'head'), 0)
    for name, p in model.named_parameters():
        module = model.get_submodule(name.rpartition('.')[0])
        kind = next((kind for part, kind in PARTS.items() if part in name.split('.')), 'others')
        if isinstance(module, nn.Embedding):
            kind = 'embeddings'
        if isinstance(module, Norm):
            kind = 'norms'
        count[kind] = count.get(kind, 0) + p.numel()
    return count


@functools.cache
def moment_bytes(config, optimizer, spec=lora.NONE):
    """Of AdamW's moments of all that trains. optimizer: the setting."""
    with torch.device('meta'):
        model = GPT(config)
        if spec.rank:
            lora.add(model, spec)
        return optim.moment_bytes(model, optimizer)


# ------------------------------------------------------------------------------------------ kept for backward

ACTIVATIONS = 'activations'
INPUTS = 'inputs of linears'
WEIGHTS = 'cast weights of linears'
LOGITS = 'logits and their gradient'
GATHERED = 'gathered from other GPUs'

ATEN = torch.ops.aten
FLASH = ATEN._scaled_dot_product_flash_attention_for_cpu.default
MATMULS = {ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default, FLASH}


class FusedRMSNorm(torch.autograd.Function):
    """What a GPU's kernel keeps: its input and a number a row. (A CPU's keeps the normalised values too.) Its
    output is contiguous."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1]))
        return x.new_empty(x.shape)


def fused_rms_norm(input, normalized_shape, weight=None, eps=None):
    """In the place of F.rms_norm; without values."""
    return FusedRMSNorm.apply(input, weight)


class GpuKernels(TorchFunctionMode):
    """In the place of a CPU's functions those of a GPU, where they keep something else. Attention's flash
    kernels keep the same."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.rms_norm:
            func = fused_rms_norm
        if func == torch.Tensor.is_cpu.__get__:
            return False
        return func(*args, **(kwargs or {}))


def storages(values):
    """Those of all tensors in nested tuples and dicts."""
    return {leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}


class Trace(TorchDispatchMode):
    """Notes, while a model runs, what autograd keeps for backward, for whom, and how it was made.

    saved: storage -> (owner, kind). owner: a block's anatomy, None outside of blocks. sources: storage ->
    those from which it can be computed again, elementwise. constant: storages that depend on no token."""

    def __init__(self, model):
        super().__init__()
        self.saved, self.sources = {}, {}
        self.parameters = storages([*model.parameters(), *model.buffers()])
        self.constant = set(self.parameters)
        self.owner, self.kind, self.vocabulary = None, ACTIVATIONS, model.config.padded_vocab_size
        fused = set(fused_linears(model))  # with a hook on these, a FusedBlock would be a plain one
        for block in model.h:
            block.register_forward_pre_hook(self.becomes(owner=anatomy(block)))
            block.register_forward_hook(self.becomes(owner=None))
        for module in model.modules():
            if hasattr(module, 'bf16_reason') and module not in fused:  # a linear, by the factory
                module.register_forward_pre_hook(self.becomes(kind=INPUTS))
                module.register_forward_hook(self.becomes(kind=ACTIVATIONS))
        model.lm_head.register_forward_hook(self.becomes(kind=LOGITS))

    def becomes(self, **values):
        """A hook for modules, which sets the owner or the kind of what is kept from there on."""
        def hook(*_):
            vars(self).update(values)
        return hook

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        read = storages((args, kwargs))
        for storage in storages(result) - read:  # neither a view nor in place
            if read <= self.constant:
                self.constant.add(storage)
            if torch.Tag.pointwise in func.tags or func is ATEN._to_copy.default:
                self.sources[storage] = read
            if func is ATEN._log_softmax.default:  # from its input and each row's maximum and log-sum
                rows = result.numel() // result.shape[-1]
                self.sources[storage] = {*read, torch.UntypedStorage(8 * rows, device='meta')}
        if func in MATMULS:
            self.written(read)
        return result

    def written(self, operands):
        """What a matrix multiplication or attention reads lies in memory in any case."""
        for storage in operands:
            self.sources.pop(storage, None)

    def keep(self, tensor):
        """A pack hook of saved_tensors_hooks."""
        storage, kind = tensor.untyped_storage(), self.kind
        if kind == INPUTS or tensor.dtype in (E4M3, E5M2):
            kind = INPUTS
            self.written([storage])
            if storage in self.constant:
                kind = WEIGHTS
            elif tensor.shape[-1] == self.vocabulary:  # of a head that takes the loss in itself
                kind = LOGITS
        if tensor.numel() > 1:  # scales of whole tensors are nothing
            self.saved.setdefault(storage, (self.owner, kind))
        return tensor

    def count(self, compiled):
        """owner -> kind -> bytes that are kept for backward, parameters aside. compiled: in the place of what
        can be computed again, elementwise, from fewer bytes, those."""
        kept, count = set(self.parameters), collections.defaultdict(collections.Counter)
        sources = self.sources if compiled else {}

        def cost(storage):
            """The fewest bytes to keep, beyond those that are kept, to have it in backward."""
            if storage in kept:
                return 0
            again = sum(map(cost, sources[storage])) if storage in sources else math.inf
            return min(storage.nbytes(), again)

        def keep(storage, owner, kind):
            if cost(storage) == storage.nbytes():
                count[owner][kind] += storage.nbytes()
            elif storage not in kept:
                for source in sources[storage]:
                    keep(source, owner, kind)
            kept.add(storage)

        for storage in sorted(self.saved, key=lambda storage: storage in sources):
            keep(storage, *self.saved[storage])
        return count


def anatomy(block):
    """Classes, settings and shapes: blocks that are alike in these keep the same."""
    parts, settings = [], (bool, int, float, str, tuple)
    for module in block.modules():
        plain = {name: value for name, value in vars(module).items() if isinstance(value, settings)}
        shapes = [tuple(p.shape) for p in module.parameters(recurse=False)]
        parts.append((type(module), plain, shapes))
    return str(parts)


class Kept(NamedTuple):
    """For backward: kind -> bytes of each of `blocks`, if it is not checkpointed, and of the rest; inputs:
    tensors that each block is given. For the whole step: bytes of weights that are kept cast, and of those
    that are not in FP8 alone; the number of those that train."""
    blocks: list
    rest: dict
    inputs: list
    casts: int
    weights: int
    gradients: int


@functools.cache
def kept_for_backward(config, sequences, choice, compiled, micro_steps=1,
                      param_dtype=torch.float32, spec=lora.NONE):
    """The Kept of one of a step's micro-steps, its loss in one chunk. Of blocks that are alike, one runs."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = GPT(config, fp8.linear_factory(choice, Linear), param_dtype=param_dtype)
        if spec.rank:
            lora.add(model, spec)
        keeper = Keeper(model, always=fuse(model) if choice.kernels == 'triton' else ())
        weights = sum(p.nbytes for p in model.parameters())
        gradients = sum(p.nbytes for p in model.weights().values())
        keeper.new_step(micro_steps)
        keeper.refresh(model, ())
        fused = [isinstance(block, FusedBlock) for block in model.h]
        casts = [getattr(linear, name) for linear in keeper.linears + keeper.frozen for name in KEPT]
        layers = [anatomy(block) for block in model.h]
        model.h = nn.ModuleList(dict(zip(layers, model.h)).values())
        model.h[0].ln_1.requires_grad_()  # or a frozen one would have no gradient before qkv, as in block 0
        trace = Trace(model)
        batch = torch.zeros((2, sequences, config.block_size), dtype=torch.long)
        trace.keep(batch)
        with saved_tensors_hooks(trace.keep, lambda tensor: tensor), GpuKernels(), trace:
            model(*batch)
    count = trace.count(compiled)
    inputs = [1, *(1 + before for before in fused)][:len(layers)]   # a FusedBlock hands on a pair
    return Kept(
        blocks=[count[layer] for layer in layers],
        rest=count[None],
        inputs=inputs,
        casts=sum(tensor.nbytes for tensor in casts if tensor is not None and tensor.numel() > 1),
        weights=weights,
        gradients=gradients,
    )


# --------------------------------------------------------------------------------------------- all of a GPU's

def gathered(shape):
    """Bytes of what FSDP has of all GPUs for a while: embeddings, head and norms with their gradients; of
    linears the weights, in bf16, of two blocks or of all (fsdp_grad_op), and of the next one as they arrive;
    a block's gradients as computed and as summed."""
    count, width = parameters(shape.config), shape.param_dtype.itemsize
    blocks = count['attention'] + count['MLP']
    block = blocks / shape.config.n_layer
    whole = blocks if shape.sharding == 'fsdp_grad_op' else 2 * block
    trained = not shape.adapters.rank
    rest = (1 + trained) * width * (sum(count.values()) - blocks)
    return int(rest + 2 * (whole + block) + trained * (2 + 4) * block)


def memory(shape, precision):
    """component -> bytes of one GPU at the peak, in 'bf16' or 'fp8'; see the top of this file."""
    config, choice, width = shape.config, shape.choice_in(precision), shape.param_dtype.itemsize
    of_pass = kept_for_backward(
        config, shape.sequences, choice, shape.compiled,
        micro_steps=1 if shape.sharded else min(shape.micro_steps, FEWEST),  # no cast stays whole
        param_dtype=shape.param_dtype, spec=shape.adapters)
    kept, recomputing = collections.Counter(of_pass.rest), 0
    for block, inputs, again in zip(of_pass.blocks, of_pass.inputs, shape.recomputed):
        if again:
            kept[ACTIVATIONS] += inputs * shape.tokens * 2 * config.n_embd
            recomputing = max(recomputing, sum(block.values()))
        else:
            kept.update(block)
    head_in_fp8 = not fp8.why_bf16(choice, *config.linears()[-1])
    gradient = (2 + head_in_fp8) * config.padded_vocab_size if shape.compiled else 8 * config.vocab_size
    logits = (kept[LOGITS] + shape.tokens * gradient) // shape.loss_chunks
    if shape.loss_chunks > 1:
        of_weight = (4 + width) * config.padded_vocab_size * config.n_embd
        logits += of_weight + shape.tokens * 2 * config.n_embd
    in_dtype = 'bf16' if width == 2 else 'fp32'
    moments = '8-bit' if shape.optimizer == 'adamw8bit' else 'fp32'
    return {
        f'{in_dtype} weights': of_pass.weights // (shape.gpus if shape.sharded else 1),
        f'{in_dtype} gradients': of_pass.gradients // shape.shards,
        f'{moments} AdamW moments': moment_bytes(config, shape.optimizer, shape.adapters) // shape.shards,
        **({GATHERED: gathered(shape)} if shape.sharded else {}),
        ACTIVATIONS: kept[ACTIVATIONS],
        INPUTS: kept[INPUTS],
        WEIGHTS: kept[WEIGHTS] + of_pass.casts,
        LOGITS: logits,
        'one recomputed block, beyond the logits': max(0, recomputing - logits),
    }


def fits(shape, precision):
    """Whether the GPU has that much memory."""
    return sum(memory(shape, precision).values()) / 1e9 <= shape.gpu.memory - MARGIN
