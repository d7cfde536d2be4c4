"""What GPUs exchange in an optimizer step: bytes, and the seconds of it that computing does not hide.
Modelled; nothing is run.

Among N GPUs in a ring, each sends S (N - 1) / N of S bytes that are gathered from all, or summed and
scattered to all; an all-reduce is one of each. Within a node they go at one direction of the GPUs' link,
between nodes at that of a node's network cards together, over which NCCL spreads its rings. Each of a ring's
N - 1 hops takes its time whatever it carries, and that is what hundreds of GPUs wait for.

DDP sums the gradients once a step, beside the last micro-step's backward. FSDP gathers a block's weights just
before they are needed and scatters the sum of its gradients, in each micro-step: fsdp_full gathers twice, for
forward and for backward, fsdp_grad_op once. Linears' weights travel in bf16, in which they compute, other
weights in the parameters' dtype, sums of gradients in fp32. What travels for one block, another one's
computing hides; the first block of a micro-step waits for its weights, and the last one for its sum.
"""
import dataclasses
import math

from planning.memory import parameters

# of the link's and the cards' bandwidth: an assumption; nccl-tests on DGX H100s are told to reach 0.8 to 1.0
ATTAINED = 0.8
# seconds of a collective's start, of a hop within a node, of one between nodes: what NCCL itself reckons with
# for rings and long messages (2.30, src/graph/tuning.cc: baseLatencies, hwLatencies)
START, HOP, FAR_HOP = 8.4e-6, 3.4e-6, 14e-6
BUCKET = 25 * 2**20     # bytes of gradients that DDP sums at once


@dataclasses.dataclass(frozen=True)
class Group:
    """What FSDP gathers at once: bytes of weights as they travel, and of the gradients that are summed."""
    weights: float
    gradients: float


def groups(shape):
    """(a block's Group, that of all else)."""
    config, width = shape.config, shape.param_dtype.itemsize
    count = parameters(config)
    of_block = (count['attention'] + count['MLP']) / config.n_layer
    rest = sum(count.values()) - of_block * config.n_layer
    if shape.adapters.rank:  # nothing else has gradients; they are fp32, and whole on each GPU
        trained = shape.adapters.parameters(config) / config.n_layer
        return Group(2 * of_block, 4 * trained), Group(width * rest, 0)
    summed = 4 if shape.sharded else width
    return Group(2 * of_block, summed * of_block), Group(width * rest, summed * rest)


def travels(shape):
    """collective -> bytes that one GPU sends, and receives, in an optimizer step."""
    block, rest = groups(shape)
    layers, share = shape.config.n_layer, (shape.gpus - 1) / shape.gpus
    gradients = share * (layers * block.gradients + rest.gradients)
    if not shape.sharded:
        return {'all-reduces of gradients': 2 * gradients}
    gathers = 2 if shape.sharding == 'fsdp_full' else 1
    weights = share * (gathers * layers * block.weights + rest.weights)
    return {'gathers of weights': shape.micro_steps * weights,
            'sums of gradients': shape.micro_steps * gradients}


def bandwidth(shape):
    """Bytes a second that each GPU of a ring sends."""
    link = shape.gpu.link / 2
    if shape.nodes > 1:
        link = min(link, shape.gpus_per_node * shape.network)
    return ATTAINED * link * 1e9


def seconds(shape, count):
    """Of one gather, or of one sum that is scattered, of so many bytes, in a ring."""
    if not count or shape.gpus == 1:
        return 0.0
    far = shape.nodes - 1
    hops = far * FAR_HOP + (shape.gpus - 1 - far) * HOP
    return START + hops + count * (shape.gpus - 1) / shape.gpus / bandwidth(shape)


def all_reduce_seconds(shape, count):
    """Of DDP's all-reduces of so many bytes together, in BUCKETs: each goes up a tree of nodes and down
    again."""
    if shape.gpus == 1:
        return 0.0
    near = min(shape.gpus, shape.gpus_per_node) - 1
    hops = 2 * (near * HOP + math.log2(shape.nodes) * FAR_HOP)
    sent = 2 * count * (shape.gpus - 1) / shape.gpus
    return math.ceil(count / BUCKET) * (START + hops) + sent / bandwidth(shape)


def not_hidden(shape, forward, backward):
    """Seconds of an optimizer step that pass in waiting. forward, backward: of computing, a micro-step's."""
    block, rest = groups(shape)
    layers = shape.config.n_layer
    if not shape.sharded:
        return max(0.0, all_reduce_seconds(shape, layers * block.gradients + rest.gradients) - backward)
    gather, scatter = seconds(shape, block.weights), seconds(shape, block.gradients)
    again = gather if shape.sharding == 'fsdp_full' else 0.0
    waits = max(0.0, (layers - 1) * gather - forward)
    waits += max(0.0, (layers - 1) * (again + scatter) - backward)
    ends = gather + again + scatter + seconds(shape, rest.weights) + seconds(shape, rest.gradients)
    return shape.micro_steps * (waits + ends)
