"""What a configuration needs and what FP8 buys it, before a GPU is rented: memory, time, money. No GPU, data
or weights needed.

$ python plan.py config/gpt2_fp8.py --gpu=h200 --gpus=8 --usd_per_gpu_hour=3   # the price is yours
$ python plan.py config/h100_350m_fp8.py --batch_size=0         # the largest micro-batch modelled to fit
$ python plan.py --init_from=gpt2-xl --batch_size=16 --max_tokens=3e10 --gpu=b200

Every word but --gpu, --gpus and --usd_per_gpu_hour is a setting of train_fp8.py. All of this is modelled, not
measured:

Memory is counted at its peak, where backward starts. Persistent, 16 bytes a parameter: weights, gradients and
AdamW's two moments in fp32. For backward, what autograd keeps: model.py itself runs, on tensors without data,
and Trace notes what is kept. Of that, torch.compile keeps less: what is computed elementwise from fewer bytes
is computed again in backward, as a norm's fp32 input from bf16, or SwiGLU's silu(gate). In eager mode the
loss keeps log-probabilities in fp32 and takes two more such tensors in backward (12 bytes a logit); compiled,
bf16 logits and a bf16 gradient (4 bytes). An FP8 linear keeps its input and weight in FP8, transposed, of
which a compiler may yet recompute some. A checkpointed block keeps its bf16 input; one block at a time is
recomputed.

Time is a roofline, one micro-step after the other, with torch.compile's fusion. A matrix multiplication takes
its FLOPs at GEMM of the dense peak plus its operands' and result's bytes at BANDWIDTH of the memory's: adding
the two, not overlapping them, is what makes a small K, M or N lose, as K / (K + K0) for a K0 of 175 (bf16,
H200) to 500 (FP8, H100). Attention: 2 + 5 multiplications over the causal half, in bf16 in either column. The
rest is traffic: see `elementwise`, `cast_bytes` and `step_seconds`. DDP's all-reduce of fp32 gradients runs
beside the last micro-step's backward; what is left over counts. No data loading, evaluation or saving.
"""
import argparse
import collections
import dataclasses
import functools
import math
import os
import re
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import data
import fp8
import resolve
import runlog
from configurator import MachineError, MissingError, SettingError, configure, one_line_errors
from fp8_linear import RECIPES, TENSOR
from model import GPT, GPTConfig, Linear, Norm

# attained on an H100 with large inputs: torchao 0.18, testing/training/roofline_utils.py
GEMM, BANDWIDTH = 0.78, 0.92
LAUNCH = 2e-6           # seconds, the least that a kernel takes: the same file
ATTENTION = 0.35        # of the bf16 peak: FlashAttention-2 on an H100 (Shah et al. 2024)
MARGIN = 2.0            # GB, our allowance for CUDA's context, workspaces, buffers and the allocator's gaps
CURRENT = fp8.Choice().recipe   # fp8_recipe=auto, and what stands for a recipe whose time is not modelled


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is planned. sequences: of one GPU's micro-batch. gpu: a row of runlog.GPUS, None = unknown.
    checkpoint_every: see GPT. choice: how the FP8 column is computed."""
    config: GPTConfig
    sequences: int
    micro_steps: int = 1
    gpus: int = 1
    gpu: runlog.Gpu | None = None
    compiled: bool = True
    checkpoint_every: int = 0
    choice: fp8.Choice = fp8.Choice('native', reason='planned')

    @classmethod
    def of(cls, run, **fields):
        """Of a resolve.Run; fields: those that it does not tell. Raises SettingError for an unknown
        recipe."""
        options = fp8.Options.of(run.config)
        fp8.check_names(options)
        recipe = CURRENT if options.recipe == 'auto' else options.recipe
        choice = fp8.Choice('native', recipe, keep=options.keep, reason='planned')
        return cls(run.model_config, run.batch_size, compiled=run.compiled,
                   checkpoint_every=run.checkpoint_every, choice=choice, **fields)

    @property
    def tokens(self):
        """Of a micro-batch."""
        return self.sequences * self.config.block_size

    @property
    def recomputed(self):
        """Whether each block is recomputed in backward, as GPT does it."""
        every = self.checkpoint_every
        return [bool(every) and i % every == 0 for i in range(self.config.n_layer)]

    @property
    def recipe(self):
        """The name of the recipe whose time is modelled: the asked for, or what stands for it."""
        asked = self.choice.recipe
        return asked if RECIPES[asked].activation == TENSOR else CURRENT

    def choice_in(self, precision):
        """What the linears of a column run in."""
        multiple = RECIPES[self.choice.recipe].multiple
        if precision == 'bf16':
            return fp8.OFF
        if self.tokens % multiple:
            why = (f'{self.sequences} x {self.config.block_size} tokens are not a multiple of {multiple}')
            return dataclasses.replace(fp8.OFF, reason=why)
        return self.choice


# ---------------------------------------------------------------------------------------- memory, from model.py

PARTS = {'attn': 'attention', 'mlp': 'MLP', 'lm_head': 'head'}


@functools.cache
def parameters(config):
    """kind -> number of GPT's parameters, the vocabulary's padding included."""
    with torch.device('meta'):
        model = GPT(config)
    kinds = dict.fromkeys(('embeddings', 'attention', 'MLP', 'norms', 'head'), 0)
    for name, p in model.named_parameters():
        module = model.get_submodule(name.rpartition('.')[0])
        kind = next((kind for part, kind in PARTS.items() if part in name.split('.')), 'others')
        if isinstance(module, nn.Embedding):
            kind = 'embeddings'
        if isinstance(module, Norm):
            kind = 'norms'
        kinds[kind] = kinds.get(kind, 0) + p.numel()
    return kinds


class FusedRMSNorm(torch.autograd.Function):
    """What a GPU's kernel keeps: its input and a number a row. (A CPU's keeps the normalised values too.)"""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1]))
        return torch.empty_like(x)


class GpuKernels(TorchFunctionMode):
    """In the place of a CPU's functions those of a GPU, where they keep something else. Attention's flash
    kernels keep the same."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.rms_norm:
            x, _, weight, _ = args
            return FusedRMSNorm.apply(x, weight)
        return func(*args, **(kwargs or {}))


ATEN = torch.ops.aten
FLASH = ATEN._scaled_dot_product_flash_attention_for_cpu.default
IN_LINEARS = 'inputs of linears'
WEIGHTS = 'cast weights of linears'
LOGITS = 'logits and their gradient'


class Trace(TorchDispatchMode):
    """Notes, while a model runs, what autograd keeps for backward, for whom, and how it was made.

    saved: [(storage, owner, kind)]. owner: a block's number, None outside of them. sources: storage -> those
    that it can be computed from again, elementwise. whole: storages that a matrix multiplication or attention
    takes, so that they are written in any case. constant: storages that depend on no token."""

    def __init__(self, model):
        super().__init__()
        self.parameters = {p.untyped_storage() for p in (*model.parameters(), *model.buffers())}
        self.constant, self.whole = set(self.parameters), set()
        self.sources, self.saved = {}, []
        self.owner, self.kind = None, 'activations'
        for i, block in enumerate(model.h):
            self.during(block, 'owner', i)
        for module in model.modules():
            if hasattr(module, 'bf16_reason'):  # the factory's
                self.during(module, 'kind', IN_LINEARS)
        model.lm_head.register_forward_hook(lambda *_: setattr(self, 'kind', LOGITS))

    def during(self, module, name, value):
        """While the module runs, self.<name> is value."""
        outside = getattr(self, name)
        module.register_forward_pre_hook(lambda *_: setattr(self, name, value))
        module.register_forward_hook(lambda *_: setattr(self, name, outside))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        read, made = storages((args, kwargs)), storages(result)
        for storage in made - read:  # neither a view nor in place
            if read <= self.constant:
                self.constant.add(storage)
            if torch.Tag.pointwise in func.tags or func is ATEN._to_copy.default:
                self.sources[storage] = read
            if func is ATEN._log_softmax.default:  # from its input and each row's maximum and log-sum
                rows = result.numel() // result.shape[-1]
                self.sources[storage] = {*read, torch.UntypedStorage(8 * rows, device='meta')}
        if func is FLASH:
            self.whole |= read | made
        return result

    def keep(self, tensor):
        """A pack hook of saved_tensors_hooks."""
        storage, kind = tensor.untyped_storage(), self.kind
        if kind == IN_LINEARS:
            self.whole.add(storage)
            kind = WEIGHTS if storage in self.constant else IN_LINEARS
        if tensor.numel() > 1:  # scales of whole tensors are nothing
            self.saved.append((storage, self.owner, kind))
        return tensor


def storages(values):
    """Those of all tensors in nested tuples and dicts."""
    return {leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}


def counted(trace, compiled):
    """owner -> kind -> bytes that are kept for backward, parameters aside. compiled: what takes fewer bytes
    to compute again, elementwise, is not kept."""
    kept = set(trace.parameters)
    count = collections.defaultdict(collections.Counter)

    def anew(storage):
        if storage not in trace.sources:
            return math.inf
        return sum(least(source) for source in trace.sources[storage])

    def least(storage):
        return 0 if storage in kept else min(storage.nbytes(), anew(storage))

    def keep(storage, owner, kind):
        if storage in kept:
            return
        if compiled and storage not in trace.whole and anew(storage) < storage.nbytes():
            for source in trace.sources[storage]:
                keep(source, owner, kind)
        else:
            count[owner][kind] += storage.nbytes()
        kept.add(storage)

    for entry in sorted(trace.saved, key=lambda entry: entry[0] not in trace.whole):
        keep(*entry)
    return count


@functools.cache
def kept_for_backward(config, sequences, choice, compiled):
    """([kind -> bytes] of each block, kind -> bytes of the rest). Blocks of the same modules and shapes keep
    the same, so one of them runs."""
    with FakeTensorMode():
        model = GPT(config, fp8.linear_factory(choice, Linear))
        first = {}
        alike = [first.setdefault(repr(block), i) for i, block in enumerate(model.h)]
        trace = Trace(model)
        model.h = nn.ModuleList(model.h[i] for i in first.values())
        idx, targets = (torch.zeros((sequences, config.block_size), dtype=torch.long) for _ in range(2))
        trace.keep(idx)
        trace.keep(targets)
        with saved_tensors_hooks(trace.keep, lambda tensor: tensor), GpuKernels(), trace:
            model(idx, targets)
    count = counted(trace, compiled)
    return [count[i] for i in alike], count[None]


def memory(shape, precision):
    """component -> bytes of one GPU at the peak, in 'bf16' or 'fp8'; see the top of this file."""
    config, P = shape.config, sum(parameters(shape.config).values())
    blocks, rest = kept_for_backward(config, shape.sequences, shape.choice_in(precision), shape.compiled)
    kept, recomputing = collections.Counter(rest), 0
    for block, again in zip(blocks, shape.recomputed):
        if again:
            kept['activations'] += shape.tokens * 2 * config.n_embd
            recomputing = max(recomputing, sum(block.values()))
        else:
            kept.update(block)
    gradient = 2 * config.padded_vocab_size if shape.compiled else 8 * config.vocab_size
    logits = kept[LOGITS] + shape.tokens * gradient
    return {
        'fp32 weights': 4 * P,
        'fp32 gradients': 4 * P,
        'fp32 AdamW moments': 8 * P,
        'activations': kept['activations'],
        IN_LINEARS: kept[IN_LINEARS],
        WEIGHTS: kept[WEIGHTS],
        LOGITS: logits,
        'one recomputed block, beyond the logits': max(0, recomputing - logits),
    }


def fits(shape, precision):
    """Whether the GPU has that much memory."""
    return sum(memory(shape, precision).values()) / 1e9 <= shape.gpu.memory - MARGIN


# ------------------------------------------------------------------------------------------------------- time

# Who writes a tensor before its cast. own: an elementwise kernel, for this linear alone; shared: such a
# kernel, but bf16 stays too (the residual stream's gradient); opaque: attention's kernel, into which nothing
# fuses. linear -> (its input, its output's gradient); others: own.
WRITERS = {'qkv': ('own', 'opaque'), 'proj': ('opaque', 'shared'), 'down': ('own', 'shared')}
# Bytes per element beyond bf16's. Where the scale is the tensor's own, its amax fuses into the writer (not an
# opaque one: +2), then the cast reads 2 and writes 1, and 1 transposed.
CASTS = {'own': 4, 'shared': 4, 'opaque': 6}
# Delayed, the scale is known: an own writer writes 1 + 1 in place of 2, a shared one 1 + 1 besides.
DELAYED_CASTS = {'own': 0, 'shared': 2, 'opaque': 4}


def moving(gpu, count):
    """Seconds of a kernel that reads and writes `count` bytes."""
    return max(LAUNCH, count / (gpu.bandwidth * 1e12 * BANDWIDTH)) if count else 0.0


def matmul(gpu, in_fp8, m, k, n):
    """Seconds of (m, k) x (k, n) -> bf16."""
    operand = 1 if in_fp8 else 2
    peak = runlog.peak_flops(gpu, 'fp8' if in_fp8 else 'bf16')
    count = operand * (m * k + k * n) + 2 * m * n
    return max(LAUNCH, 2 * m * k * n / (peak * GEMM) + count / (gpu.bandwidth * 1e12 * BANDWIDTH))


def cast_bytes(config, recipe, name, elements):
    """Bytes that quantising one linear's input and its output's gradient moves: one entry per kernel.
    elements: of the two."""
    writers = WRITERS.get(name.split('.')[-1], ('own', 'own'))
    if name.endswith('qkv') and config.position == 'rope':
        writers = 'own', 'own'  # the rotation's backward writes the gradient
    table = DELAYED_CASTS if recipe.delayed else CASTS
    return [table[writer] * count for writer, count in zip(writers, elements)]


def linear_seconds(shape, linear, recipe=None):
    """(matmuls, casts) of one micro-step's forward, dgrad and wgrad. linear: (name, in_features,
    out_features). recipe: a fp8_linear.Recipe, None = bf16.

    The weight is read in fp32 and written in bf16 (6 bytes) or as two FP8 copies (6, and 4 more to take its
    amax)."""
    name, k, n = linear
    gpu, M, casts = shape.gpu, shape.tokens, [6 * k * n]
    if recipe:
        casts = [(6 if recipe.delayed else 10) * k * n]
        casts += cast_bytes(shape.config, recipe, name, (M * k, M * n))
    matmuls = sum(matmul(gpu, bool(recipe), *sizes) for sizes in ((M, k, n), (M, n, k), (n, M, k)))
    return matmuls, sum(moving(gpu, count) for count in casts)


def elementwise(config):
    """Bytes per token of one block, forward and backward, between its matmuls in bf16, fused: norm with the
    residual sum before it (read 2, write 2), activation, rotation with the copy of attention's output, and
    bias gradients, which read theirs again."""
    C, hidden, kv = config.n_embd, config.ffn_dim, config.n_kv_head * config.head_dim
    swiglu = config.mlp == 'swiglu'
    norms = 2 * (8 * C + 8 * C)
    activation = hidden * (6 + 10 if swiglu else 4 + 6)
    rotation = 2 * 4 * (C + kv) + 2 * 4 * C if config.position == 'rope' else 0
    up = 2 * hidden if swiglu else hidden
    bias = 2 * (C + 2 * kv + C + up + C) if config.bias else 0
    return [norms, activation, rotation, bias]


def step_seconds(shape, recipes):
    """part -> seconds of an optimizer step. recipes: linear's name -> fp8_linear.Recipe, or None = bf16."""
    config, gpu, M = shape.config, shape.gpu, shape.tokens
    C, L, P = config.n_embd, config.n_layer, sum(parameters(config).values())
    cost = {linear[0]: linear_seconds(shape, linear, recipes[linear[0]]) for linear in config.linears()}
    loss = 2 * moving(gpu, M * 4 * config.padded_vocab_size)    # forward reads twice, backward reads, writes
    head = sum(cost.pop('lm_head')) + loss
    blocks = {
        'linears: matmuls': sum(matmuls for matmuls, _ in cost.values()),
        'linears: casts': sum(casts for _, casts in cost.values()),
        'attention': L * max(LAUNCH, 7 * M * config.block_size * C / (gpu.bf16 * 1e12 * ATTENTION)),
        'norms, activations': L * sum(moving(gpu, M * count) for count in elementwise(config)),
    }
    micro = {
        **blocks,
        'head and loss': head,
        'recomputation': sum(shape.recomputed) / L / 3 * sum(blocks.values()),      # forward is a third
        # gradients: bf16 read, fp32 read and written
        'embeddings, gradients': moving(gpu, 14 * M * C) + moving(gpu, 10 * P),
    }
    parts = {name: shape.micro_steps * seconds for name, seconds in micro.items()}
    parts['clipping, AdamW'] = moving(gpu, (12 + 28) * P)                     # g x 3; p, g, m, v -> p, m, v
    reduce = 2 * (shape.gpus - 1) / shape.gpus * 4 * P / (gpu.link / 2 * 1e9)   # a ring's, at the link's peak
    parts['all-reduce, not hidden'] = max(0.0, reduce - 2 / 3 * sum(micro.values()))
    return parts


# ------------------------------------------------------------------------------------------------------- plan

@dataclasses.dataclass
class Row:
    """A linear, that of all blocks in one. share: of the FLOPs. why_bf16: None in FP8. gain: FP8's speed over
    bf16's; None where there is none."""
    name: str
    in_features: int
    out_features: int
    why_bf16: str | None
    count: int = 0
    share: float = 0.0
    gain: float | None = None


@dataclasses.dataclass
class Plan:
    """precision is 'bf16' or 'fp8' throughout. flops: per token. memory: precision -> component -> bytes of
    one GPU. seconds: precision -> part -> seconds of a step; without a GPU, or for FP8 on one without FP8
    units, None."""
    shape: Shape
    parameters: dict
    flops: int
    memory: dict
    seconds: dict
    linears: list

    @property
    def tokens_per_step(self):
        return self.shape.tokens * self.shape.micro_steps * self.shape.gpus

    def gigabytes(self, precision):
        return sum(self.memory[precision].values()) / 1e9

    def speed(self, precision):
        """Tokens per second of all GPUs together."""
        return self.tokens_per_step / sum(self.seconds[precision].values())

    def gain(self):
        """FP8's speed over bf16's."""
        return self.speed('fp8') / self.speed('bf16')

    def hours(self, precision, tokens):
        return tokens / self.speed(precision) / 3600


def plan(shape):
    """The Plan of a Shape."""
    config, both = shape.config, ('bf16', 'fp8')
    flops = config.flops_per_token(config.block_size)
    choice, recipe = shape.choice_in('fp8'), RECIPES[shape.recipe]
    reasons = {linear: fp8.why_bf16(choice, *linear) for linear in config.linears()}
    recipes = {
        'bf16': dict.fromkeys((name for name, _, _ in reasons), None),
        'fp8': {linear[0]: None if why else recipe for linear, why in reasons.items()},
    }
    seconds = dict.fromkeys(both)
    for precision in both:
        if runlog.peak_flops(shape.gpu, precision):
            seconds[precision] = step_seconds(shape, recipes[precision])
    rows = {}
    for linear, why in reasons.items():
        name, k, n = linear
        row = Row(re.sub(r'\.\d+\.', '.*.', name), k, n, why)
        row = rows.setdefault((row.name, why), row)
        row.count += 1
        row.share += 6 * k * (config.vocab_size if name == 'lm_head' else n) / flops
        if seconds['fp8'] and not why:
            row.gain = sum(linear_seconds(shape, linear)) / sum(linear_seconds(shape, linear, recipe))
    bytes_of = {precision: memory(shape, precision) for precision in both}
    return Plan(shape, parameters(config), flops, bytes_of, seconds=seconds, linears=list(rows.values()))


def outlook(run, length, world_size, precision):
    """What a training script says of its memory and speed beforehand: lines, as many as are modelled in this
    precision. run, length: resolve's."""
    shape = Shape.of(run, gpu=runlog.gpu_of(run.device), gpus=world_size, micro_steps=length.micro_steps)
    made, gpu, lines = plan(shape), shape.gpu, []
    if precision in made.memory:
        total = made.gigabytes(precision) * 1e9
        unit, size = ('GB', 1e9) if total >= 1e9 else ('MB', 1e6)
        parts = (f'{name} {count / size:.2f}' for name, count in made.memory[precision].items() if count)
        room = ''
        if gpu:
            verb = 'fits' if fits(shape, precision) else 'does not fit'
            room = f'; {verb} {gpu.name}: {gpu.memory} GB less {MARGIN:g}'
        lines.append(f'memory    {total / size:.2f} {unit} a rank (modelled): {", ".join(parts)}{room}')
    if made.seconds.get(precision):
        hours = made.hours(precision, length.last_step * length.tokens_per_step)
        gain = f'; FP8 x{made.gain():.2f} over bf16' if made.seconds['fp8'] else ''
        lines.append(f'speed     {made.speed(precision):,.0f} tokens/s, {runlog.duration(hours * 3600)} '
                     f'(modelled, with torch.compile){gain}')
    return lines


# ----------------------------------------------------------------------------------------------------- report

def row(made, name, form, of):
    """A line of the report: of(precision), formatted, in bf16 and FP8."""
    cells = (format(of(p), form) if made.seconds[p] else 'n/a' for p in ('bf16', 'fp8'))
    return f'  {name:<42}' + ''.join(f'{cell:>10}' for cell in cells)


def heading(text):
    return f'{text:<44}{"bf16":>10}{"FP8":>10}'


def memory_lines(made):
    shape = made.shape
    lines = [heading(f'memory per GPU, GB ({"torch.compile" if shape.compiled else "eager"})')]
    for name, count in made.memory['bf16'].items():
        if count:
            lines.append(row(made, name, '.2f', lambda p: made.memory[p][name] / 1e9))
    room = f'in {shape.gpu.memory} GB less {MARGIN:g} (CUDA context, workspaces)'
    return [
        *lines,
        row(made, 'sum', '.2f', made.gigabytes),
        row(made, room, '', lambda p: 'fits' if fits(shape, p) else 'too big'),
    ]


def time_lines(made):
    lines = [heading('time of a step, ms (modelled, torch.compile)')]
    for name, part in made.seconds['bf16'].items():
        if part:
            lines.append(row(made, name, '.2f', lambda p: made.seconds[p][name] * 1e3))

    def mfu(p):
        return made.speed(p) / made.shape.gpus * made.flops / runlog.peak_flops(made.shape.gpu, p)
    return [
        *lines,
        row(made, 'sum', '.2f', lambda p: sum(made.seconds[p].values()) * 1e3),
        row(made, 'tokens/s, all GPUs', ',.0f', made.speed),
        row(made, 'MFU, of that precision\'s peak', '.1%', mfu),
    ]


def price_lines(made, span, tokens, usd):
    """What a span of training takes. usd: per GPU-hour, 0 = not known."""
    def gpu_hours(p):
        return made.hours(p, tokens) * made.shape.gpus
    lines = [
        row(made, f'{span}, hours', ',.2f', lambda p: made.hours(p, tokens)),
        row(made, f'{span}, GPU-hours', ',.2f', gpu_hours),
    ]
    if usd:
        lines.append(row(made, f'{span}, USD at {usd:g} per GPU-hour', ',.2f', lambda p: gpu_hours(p) * usd))
    return lines


def linear_lines(made):
    lines = [f'{"linear":<24}{"tokens x in x out":>24}{"FLOPs":>8}  {"gain":<7}in']
    for linear in made.linears:
        runs = f'FP8, {made.shape.recipe}' if made.shape.gpu.fp8 else 'bf16: no FP8 units'
        if linear.why_bf16:
            runs = f'bf16: {linear.why_bf16}'
        gain = f'x{linear.gain:.2f}' if linear.gain else ''
        sizes = f'{made.shape.tokens:>10} x {linear.in_features} x {linear.out_features}'
        name = f'{linear.name} x {linear.count}'
        lines.append(f'{name:<24}{sizes}'.ljust(48) + f'{linear.share:>8.1%}  {gain:<7}{runs}')
    return lines


def verdict(made, asked_off):
    """The lines that say what FP8 would do for this model. asked_off: whether the settings switch it off."""
    gpu = made.shape.gpu
    if not gpu.fp8:
        return [f'verdict   {gpu.name} has no FP8 units (sm_89 and later have): it trains in bf16']
    line = f'verdict   predicted FP8 x{made.gain():.2f} over bf16 (modelled)'
    if made.gain() < 1:
        line += ': slower, so train in bf16 (--no_fp8)'
    if asked_off:
        line += '; FP8 is switched off in these settings'
    slow = [linear.name.removeprefix('h.*.') for linear in made.linears if linear.gain and linear.gain < 1]
    keep = f'          slower in FP8 than in bf16: keep them with --fp8_keep={",".join(slow)}'
    return [line, keep] if slow else [line]


def report(made, run, length, unknown, usd):
    """The lines that `python plan.py` prints. unknown: why the run's length is not known, or ''."""
    shape, gpu = made.shape, made.shape.gpu
    total = sum(made.parameters.values())
    kinds = ', '.join(f'{kind} {count:,}' for kind, count in made.parameters.items())
    tied = ' (tied)' if shape.config.tie_embeddings else ''
    span = resolve.run_line(shape.config, length)
    prices = price_lines(made, '10^9 tokens', 1e9, usd)
    if unknown:
        span = f'run       {made.flops / 1e6:,.0f}M FLOPs a token; length unknown: {unknown}'
    else:
        prices += price_lines(made, 'the run', length.last_step * made.tokens_per_step, usd)
    units = f'{gpu.fp8:,} in FP8' if gpu.fp8 else 'no FP8 units'
    asked_off = gpu.fp8 and precision_of(run, gpu) == 'bf16'
    lines = [
        resolve.model_line(shape.config, total),
        f'          {total:,} = {kinds}{tied}',
        resolve.batch_line(run.config, length, shape.gpus),
        span,
        f'device    {shape.gpus} x {gpu.name}: {gpu.bf16:,} TFLOP/s in bf16, {units}, '
        f'{gpu.bandwidth} TB/s, {gpu.memory} GB',
        '', *memory_lines(made),
        '', *time_lines(made), *prices,
        '', *linear_lines(made),
        '', *verdict(made, asked_off),
        f'modelled, not measured: {GEMM:.0%} of the FLOP/s and {BANDWIDTH:.0%} of the bandwidth (torchao\'s '
        f'roofline_utils.py, H100), {ATTENTION:.0%} in attention (FlashAttention-2: Shah et al. 2024), peaks '
        'of NVIDIA\'s data sheets, casts fused by torch.compile',
    ]
    if shape.gpus > 8:
        lines.append(f'the all-reduce counts {gpu.link} GB/s between all {shape.gpus} GPUs: '
                     'a network between nodes is slower, and not modelled')
    return lines


# -------------------------------------------------------------------------------------- from the command line

def read(words):
    """The resolve.Run of train_fp8.py under these words, on a pretended GPU."""
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'train_fp8.py')
    config = configure(script, words)
    if config['resume']:
        raise SettingError('a plan starts from settings: in place of --resume, '
                           '--init_from=that checkpoint takes its architecture')
    if config['dtype'] != 'bf16':
        raise SettingError(f'plan.py models bf16 and FP8, not dtype={config["dtype"]}')
    return resolve.run(config, torch.device('cuda'), data_required=False)


def precision_of(run, gpu):
    """What the run would train in."""
    off = not run.config['use_fp8'] or run.config['fp8_backend'] == 'off'
    return 'bf16' if off or not gpu.fp8 else 'fp8'


def largest_batch(run, shape, precision):
    """batch_size=0: the most sequences, in powers of two, that divide the step's and are modelled to fit.
    Raises MachineError where none does."""
    wanted = resolve.step_sequences(run.config)
    size = 2 ** run.config['max_batch_size'].bit_length() // 2
    while size:
        if wanted % (size * shape.gpus) == 0 and fits(dataclasses.replace(shape, sequences=size), precision):
            return size
        size //= 2
    raise MachineError(f'batch_size=0: no batch is modelled to fit {shape.gpu.name}, '
                       f'not even of one sequence of {shape.config.block_size} tokens')


def epoch_tokens(run):
    """Training tokens of the dataset, 0 where the run's length does not depend on them. Raises
    MissingError."""
    config = run.config
    if not config['num_epochs'] and (config['max_steps'] or config['max_tokens']):
        return 0
    folder = data.dataset_dir(config['data_dir'], config['dataset'], config['tokenizer'])
    train = data.TokenData(folder, 'train', config['block_size'])
    return train.n_windows * train.block_size


def main(words):
    """Prints the plan of a command line. Raises SettingError, MachineError."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument('--gpu', help='h100, h200, b200, a100, ...; default: the one here, else h100')
    parser.add_argument('--gpus', type=int, default=1, help='how many, data-parallel')
    parser.add_argument('--usd_per_gpu_hour', type=float, default=0.0,
                        help='what one costs; 0 = no money in the output')
    own, words = parser.parse_known_args(words)
    if own.gpus < 1 or own.usd_per_gpu_hour < 0:
        raise SettingError('--gpus is at least 1 and --usd_per_gpu_hour at least 0, '
                           f'not {own.gpus} and {own.usd_per_gpu_hour:g}')
    name = own.gpu or (torch.cuda.get_device_name() if torch.cuda.is_available() else 'h100')
    gpu = runlog.find_gpu(name)
    if not gpu:
        known = ', '.join(gpu.name for _, gpu in runlog.GPUS)
        raise SettingError(f'no data sheet of {name!r} here; --gpu is one of {known}')
    run, said, unknown = read(words), [], ''
    shape, precision = Shape.of(run, gpu=gpu, gpus=own.gpus), precision_of(run, gpu)
    if shape.recipe != shape.choice.recipe:
        said.append(f'recipe    fp8_recipe={shape.choice.recipe} is not modelled: {shape.recipe}, '
                    'which moves the same tensors, stands for it')
    if not run.batch_size:
        size = run.config['batch_size'] = largest_batch(run, shape, precision)
        said.append(f'batch     batch_size=0: {size} is the largest power of two up to '
                    f'{run.config["max_batch_size"]} that is modelled to fit in {precision}')
    tokens_per_epoch = 0
    try:
        tokens_per_epoch = epoch_tokens(run)
    except MissingError as error:
        unknown = str(error)
    length = resolve.length(run.config, shape.config.block_size, own.gpus, tokens_per_epoch)
    shape = dataclasses.replace(shape, sequences=run.batch_size, micro_steps=length.micro_steps)
    print(*said, *report(plan(shape), run, length, unknown, own.usd_per_gpu_hour), sep='\n')


if __name__ == '__main__':
    one_line_errors()
    main(sys.argv[1:])
