"""The time of an optimizer step, modelled part by part, and what each linear has of it; nothing is run.

    step_seconds(Shape(PRESETS['gpt2'], sequences=32, gpu=find_gpu('h200')), fp8.OFF)     # part -> seconds

A matrix multiplication takes its FLOPs at GEMM of the dense peak plus its operands' and result's bytes at
BANDWIDTH of the memory's: adding the two, not overlapping them, is what makes a small K, M or N lose, as
K / (K + K0) for a K0 of 175 (bf16, H200) to 500 (FP8, H100). Attention: 2 + 5 multiplications over the causal
half, in bf16 in either column.

All else of a pass is traffic: bytes that kernels read and write between those. traffic.json has what
`python bench.py traffic` counted of the code that torch.compile makes for an H200 (a B200 for mxfp8), fitted
over blocks of several widths:

    bytes of a block = tokens (a n_embd + b n_kv_head head_dim + c ffn_dim) + d weights
    bytes of the embedding, or of head and loss = tokens (a n_embd + b vocabulary) + c weights

Traffic takes TRAFFIC of the memory's bandwidth, and a kernel at least LAUNCH. What several GPUs exchange:
planning/network.py. No data loading, evaluation or saving.
"""
import dataclasses
import functools
import json
import os
from typing import NamedTuple

import torch

import fp8
from fp8_kernels.kept import FEWEST
from fp8_linear import RECIPES
from gpus import peak_flops
from planning import network
from planning.memory import moment_bytes, parameters
from model import PRESETS

# attained on an H100 with large inputs: torchao 0.18, testing/training/roofline_utils.py
GEMM, BANDWIDTH = 0.78, 0.92
ATTENTION = 0.35        # of the bf16 peak: FlashAttention-2 on an H100 (Shah et al. 2024)
# ours, not measured: 4.0 of an H200's 4.8 TB/s; seconds, the least that a kernel takes
TRAFFIC, LAUNCH = 0.83, 2.5e-6

COUNTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'traffic.json')
WAITING = 'waiting for other GPUs'
PIECES = {  # of a model -> what its bytes are in proportion to; see sizes
    'block': ('n_embd', 'kv', 'ffn_dim', 'weights'),
    'embedding': ('n_embd', 'vocabulary', 'table'),
    'head and loss': ('n_embd', 'vocabulary', 'table'),
}
LIKE = {'gelu': 'gpt2', 'swiglu': 'h100-350m'}     # kind of block -> the preset that is built of such


# ---------------------------------------------------------------------------------------------------- traffic

class Traffic(NamedTuple):
    """bytes: read and written by `launches` kernels; `small` of these move next to none."""
    bytes: float
    launches: float
    small: float

    def seconds(self, gpu):
        moving = self.bytes / (gpu.bandwidth * 1e12 * TRAFFIC)
        return LAUNCH * self.small + max(moving, LAUNCH * (self.launches - self.small))

    def less(self, linears):
        """Without the casts of these linears' weights."""
        weights = sum(k * n for _, k, n in linears)
        return Traffic(self.bytes - CAST.bytes * weights, self.launches - CAST.launches * len(linears),
                       self.small - CAST.small * len(linears))

    def toward(self, other, share):
        """This far on the way to another."""
        return Traffic(*(a + share * (b - a) for a, b in zip(self, other)))


def sizes(config, tokens):
    """name -> what bytes are counted in proportion to: elements of a micro-batch's activations, and
    weights."""
    widths = {
        'n_embd': config.n_embd,
        'kv': config.n_kv_head * config.head_dim,
        'ffn_dim': config.ffn_dim,
        'vocabulary': config.padded_vocab_size,
    }
    elements = {name: tokens * width for name, width in widths.items()}
    elements['weights'] = sum(k * n for _, k, n in blocks(config)[0])
    elements['table'] = config.padded_vocab_size * config.n_embd
    return elements


@functools.cache
def counts():
    """kind of block -> name of a recipe and its kernels -> piece -> what traffic.json has of it."""
    with open(COUNTS) as file:
        return json.load(file)


def counted(shape, name, piece='block'):
    """Traffic of a piece of the model, forward and backward. name: 'bf16', or see name_of."""
    row = counts()[shape.config.mlp][name][piece]
    elements = sizes(shape.config, shape.tokens)
    count = sum(row[size] * elements[size] for size in PIECES[piece])
    return Traffic(count, row['launches'], row['small'])


def name_of(choice):
    """A fp8.Choice's in traffic.json."""
    if not choice.on:
        return 'bf16'
    return f'{choice.recipe} triton' if choice.kernels == 'triton' else choice.recipe


def uncounted(shape, backend):
    """[(what is not counted, what stands for it)]."""
    config, standing = shape.config, []
    preset = PRESETS[LIKE[config.mlp]]
    if backend not in ('auto', 'off', 'native'):
        standing.append((f'fp8_backend={backend}', 'native'))
    if shape.choice.format == 'e5m2':
        standing.append(('fp8_format=e5m2', 'hybrid'))
    if shape.param_dtype == torch.bfloat16:
        standing.append(('param_dtype=bf16', 'fp32 weights, which are cast,'))
    if shape.loss_chunks > 1:
        standing.append((f'loss_chunks={shape.loss_chunks}', 'the loss in one piece'))
    parts = [f'{name}={getattr(config, name)}' for name in ('norm', 'position', 'bias', 'qkv_bias', 'qk_norm')
             if getattr(config, name) != getattr(preset, name)]
    if config.n_head * config.head_dim != config.n_embd:
        parts.append(f'head_dim={config.head_dim}')
    if parts:
        standing.append((f'{", ".join(parts)} with mlp={config.mlp}', f'a block of {LIKE[config.mlp]}'))
    return standing


# of a weight's cast in a compiled block, counted with and without, in every recipe the same: bytes
# an element, launches, small ones; and of one that stays cast, in eager mode, once a step
CAST = Traffic(14, 4, 1)
KEPT_CAST = {
    'tensorwise': Traffic(35, 12, 6), 'delayed': Traffic(35, 21, 15), 'rowwise': Traffic(74, 24, 13),
    'rowwise_gw_hp': Traffic(74, 24, 13), 'blockwise': Traffic(35, 13, 7), 'mxfp8': Traffic(77.5, 24, 1)}


# ---------------------------------------------------------------------------------------------------- linears

def blocks(config):
    """[[(name, in_features, out_features)] of a block's linears] of each block."""
    *linears, _ = config.linears()
    each = len(linears) // config.n_layer
    return [linears[i:i + each] for i in range(0, len(linears), each)]


def matmul(gpu, in_fp8, m, k, n):
    """Seconds of (m, k) x (k, n) -> bf16."""
    operand, precision = (1, 'fp8') if in_fp8 else (2, 'bf16')
    count = operand * (m * k + k * n) + 2 * m * n
    compute = 2 * m * k * n / (peak_flops(gpu, precision) * GEMM)
    return max(LAUNCH, compute + count / (gpu.bandwidth * 1e12 * BANDWIDTH))


def matmul_seconds(shape, choice, linear):
    """Of one micro-step's forward, dgrad and, unless it is frozen, wgrad. linear: (name, in_features,
    out_features)."""
    _, k, n = linear
    M, gpu = shape.tokens, shape.gpu
    in_fp8 = not fp8.why_bf16(choice, *linear)
    fp8_wgrad = in_fp8 and RECIPES[choice.recipe].fp8_wgrad and linear[0] != fp8.HEAD
    wgrad = 0.0 if shape.adapters.rank else matmul(gpu, fp8_wgrad, n, M, k)
    return matmul(gpu, in_fp8, M, k, n) + matmul(gpu, in_fp8, M, n, k) + wgrad


def adapter_seconds(shape):
    """Of one micro-step's adapters, in bf16 in either column: six multiplications each; the sum with y is
    read and written in forward, dropout aside."""
    M, rank, gpu, seconds = shape.tokens, shape.adapters.rank, shape.gpu, 0.0
    for k, n in shape.adapters.shapes(shape.config):
        seconds += 3 * (matmul(gpu, False, M, k, rank) + matmul(gpu, False, M, rank, n))
        seconds += Traffic(6 * M * n, 1, 0).seconds(gpu)
    return shape.config.n_layer * seconds


def shares(choice, block):
    """linear -> its share of what FP8 adds to a block's traffic, or spares: by inputs and outputs; for those
    in FP8."""
    total = sum(k + n for _, k, n in block)
    return {(name, k, n): (k + n) / total for name, k, n in block if not fp8.why_bf16(choice, name, k, n)}


def block_traffic(shape, choice, block):
    """Traffic of a block, of whose linears some may stay bf16: then kernels of its own do not do it."""
    share = shares(choice, block)
    if len(share) < len(block):
        choice = dataclasses.replace(choice, kernels='inductor')
    traffic = counted(shape, 'bf16').toward(counted(shape, name_of(choice)), sum(share.values()))
    spared = [] if choice.kernels == 'triton' else stay_cast(shape, choice, block)
    return traffic.less(spared)


def gain(shape, choice, linear):
    """FP8's speed over bf16's of a linear of a block, with its share of the block's casts."""
    number = int(linear[0].split('.')[1])
    block = blocks(shape.config)[number]
    added = block_traffic(shape, choice, block).seconds(shape.gpu) - counted(shape, 'bf16').seconds(shape.gpu)
    share = shares(choice, block)
    casts = added * share[linear] / sum(share.values())
    return matmul_seconds(shape, fp8.OFF, linear) / (matmul_seconds(shape, choice, linear) + casts)


# --------------------------------------------------------------------------------------------------- the step

def stay_cast(shape, choice, block):
    """A block's linears whose weights stay cast for all of a step; none that are gathered anew."""
    if shape.sharded:
        return []
    share = shares(choice, block)
    fused = choice.kernels == 'triton' and len(share) == len(block)
    return list(share) if fused or shape.adapters.rank or shape.micro_steps >= FEWEST else []


def kept_casts(shape, choice):
    """Seconds of the casts, once a step, of the weights that stay cast; frozen ones are cast once a run."""
    seconds = 0.0
    for block in () if shape.adapters.rank else blocks(shape.config):
        for _, k, n in stay_cast(shape, choice, block):
            each = KEPT_CAST[choice.recipe]
            seconds += each._replace(bytes=each.bytes * k * n).seconds(shape.gpu)
    return seconds


def step_seconds(shape, choice):
    """part -> seconds of an optimizer step. choice: an fp8.Choice, fp8.OFF = bf16."""
    config, gpu, M = shape.config, shape.gpu, shape.tokens
    P = shape.adapters.parameters(config) if shape.adapters.rank else sum(parameters(config).values())
    *linears, head = config.linears()
    attention = 7 * M * config.block_size * config.n_head * config.head_dim / (gpu.bf16 * 1e12 * ATTENTION)
    traffic = [block_traffic(shape, choice, block).seconds(gpu) for block in blocks(config)]
    of_blocks = {
        'linears: matmuls': sum(matmul_seconds(shape, choice, linear) for linear in linears),
        'adapters': adapter_seconds(shape),
        'attention': config.n_layer * max(LAUNCH, attention),
        'casts, norms, activations': sum(traffic),
    }
    loss = 'bf16' if fp8.why_bf16(choice, *head) else 'fp8_head'
    of_loss = counted(shape, loss, 'head and loss').seconds(gpu)
    micro = {
        **of_blocks,
        'head and loss': matmul_seconds(shape, choice, head) + of_loss,
        # forward is a third
        'recomputation': sum(shape.recomputed) / config.n_layer / 3 * sum(of_blocks.values()),
        'embedding': counted(shape, 'bf16', 'embedding').seconds(gpu),
    }
    parts = {name: shape.micro_steps * seconds for name, seconds in micro.items()}
    parts['casts of weights that stay'] = kept_casts(shape, choice)
    width = shape.param_dtype.itemsize
    # a micro-step's and the sum of those before are read, and the new sum written
    adding = Traffic((shape.micro_steps - 1) * 3 * width * P / shape.shards, 0, 0)
    parts['adding gradients'] = adding.seconds(gpu)
    of_adamw = (3 + 3) * width * P + 2 * moment_bytes(config, shape.optimizer)  # g x 3; p, g, m, v -> p, m, v
    if width == 2:
        of_adamw += 2 * 2 * P   # numbers drawn for the rounding
    parts['clipping, AdamW'] = Traffic(of_adamw / shape.shards, 0, 0).seconds(gpu)
    forward = (sum(micro.values()) - micro['recomputation']) / 3
    backward = sum(micro.values()) - forward
    parts[WAITING] = network.not_hidden(shape, forward, backward)
    return parts
