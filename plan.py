"""Model what a configuration needs before a GPU is rented: memory, time, money, and what FP8 gains.

$ python plan.py config/gpt2_fp8.py --gpu=h200 --gpus=8 --usd_per_gpu_hour=3   # the price is yours
$ python plan.py config/h100_350m_fp8.py --batch_size=0         # the largest micro-batch modelled to fit
$ python plan.py --init_from=gpt2-xl --batch_size=16 --max_tokens=3e10 --gpu=b200
$ python plan.py --init_from=llama-3.1-8b --sharding_mode=fsdp_full --gpus=8,64,512   # a column for each

Every other word is a setting of train_fp8.py. Memory is counted where backward starts: a block of model.py
runs on tensors without data, and what autograd keeps is added up. Time is FLOPs and bytes over rates.
"""
import os
import sys

from configurator import MissingError, Parser, SettingError, at_least, configure, one_line_errors, say
from fp8gpt.gpus import GPUS, find_gpu


def plan_arguments(words):
    """Return the command line, with train_fp8.py's settings as `config` and --gpu, if it is given, as a row
    of gpus.GPUS. Raises SettingError."""
    parser = Parser(__doc__)
    parser.add_argument('--gpu', default='', help='h100, h200, b200, a100, ...; else the one here, else h100')
    parser.add_argument('--gpus', default=[1], help='how many; commas between: a column for each',
                        type=lambda text: [at_least(1)(word) for word in text.split(',')])
    parser.add_argument('--network', type=at_least(0.001, float), default=50.0,
                        help='GB/s of a GPU between nodes; 50, the default, is a card of 400 Gb/s each')
    parser.add_argument('--usd_per_gpu_hour', type=at_least(0, float), default=0.0, help='0 = not known')
    parser.add_argument('--vocab_size', type=at_least(0), default=0,
                        help='tokens; 0 = those of the model or dataset')
    asked, rest = parser.parse_known_args(words)
    asked.config = configure('train_fp8.py', rest, nearby=vars(asked))
    asked.config['vocab_size'] = asked.vocab_size
    if asked.config['resume']:
        raise SettingError('a plan starts from settings: in place of --resume, --init_from=that checkpoint')
    if asked.config['dtype'] != 'bf16':
        raise SettingError(f'plan.py models bf16 and FP8, not dtype={asked.config["dtype"]}')
    name, asked.gpu = asked.gpu, find_gpu(asked.gpu)
    if name and not asked.gpu:
        known = ', '.join(gpu.name for _, gpu in GPUS)
        raise SettingError(f'no data sheet of {name!r} here; --gpu is one of {known}')
    return asked


if __name__ == '__main__':
    one_line_errors()
    plan_arguments(sys.argv[1:])

# Imported only now: --help and a mistyped setting are answered without waiting for torch.
import dataclasses
import functools
import math

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from fp8gpt import fp8, lora, optim, pretrained
from fp8gpt.batch_size_finder import HEADROOM, largest_fitting
from fp8gpt.run import (
    Length, Run, batch_line, dataset, length_line, model_line, tokens_per_epoch)
from model import GPT, PRESETS, Linear, rope_tables

NODE = 8        # GPUs that NVLink joins
MARGIN = 2.0    # GB: CUDA's context, workspaces, buffers and the allocator's gaps
WORTH = 1.05    # FP8's least gain for the verdict: equal loss costs about as much in more tokens

# Shares of a GPU's peaks: a multiplication takes its FLOPs at the first, then its operands' and result's
# bytes at the second, so a small K, M or N loses. Measured on an H100 (results/gpu/calibrate.json); operands
# that lie in its cache let the second pass 1.
MATMUL = {'bf16': (0.75, 2.6), 'fp8': (0.72, 1.5)}
# of the memory's bandwidth, in kernels between multiplications; fitted to whole steps (alone, torch.compile's
# have 0.85 and ours 0.73)
TRAFFIC = 0.75
# of bf16's peak, for heads of 128 and long sequences; for heads of 64 and 1,024 tokens 225 TFLOP/s of an
# H100, both passes, of 250 measured there
ATTENTION = 0.45
NETWORK = 0.80          # of the bandwidth between GPUs; nccl-tests on DGX H100s reach 0.8 to 1.0
HOST, HOST_TRITON = 37e-6, 42e-6    # seconds of that H100's host a launch; only where no graph replays it
# Of the kernels between a block's multiplications, forward and backward: bytes a token times n_embd, times
# the width of qkv, of up (or gate_up); bytes a weight; launches. Counted in torch.compile's code for an H200
# (mxfp8: B200; torch 2.13) and fitted over seven models, to 7%; norms of queries and keys are not in them.
BLOCK_KERNELS = {
    'bf16': (41.5, 10.4, 6.8, 13.4, 23),
    'tensorwise': (33.1, 20.8, 16.7, 23.1, 52),
    'tensorwise triton': (39.6, 12.1, 16.0, 8.4, 57),
    'delayed': (32.6, 19.6, 14.2, 25.3, 56),
    'delayed triton': (0.0, 16.1, 14.1, 2.6, 52),
    'rowwise': (66.2, 14.0, 19.4, 7.2, 54),
    'rowwise_gw_hp': (44.3, 12.1, 10.1, 19.7, 40),
    'blockwise': (119.2, 22.6, 17.6, 19.6, 59),
    'mxfp8': (113.0, 23.4, 15.8, 23.3, 77),
}
# Bytes that casting a weight moves, in a compiled block and, eager, once a step: without our kernels, by them
CAST_BYTES = (14, 27), (10, 10)
# torchao's AdamW, of 8-bit moments or bf16 weights: seconds a value whose moments have 8 bits (H100;
# results/gpu/full_1b.json), and of the host a tensor, which it updates one by one (two cores, AMD EPYC)
LOW_BIT, LOW_BIT_HOST = 26e-12, 0.2e-3
# FLOPs of a step's multiplications, by the setting `optimizer`; its moments are counted by optim.moment_bytes
OPTIMIZER_FLOPS = {'adamw': lambda model: 0, 'adamw8bit': lambda model: 0, 'muon': optim.muon_flops}


class OnGpu(TorchFunctionMode):
    """Hides from model.py that fake tensors are on a CPU, whose linears may compute in fp32, and gives them
    the address 0, as torch warns of those without one."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        hidden = func in (torch.Tensor.is_cpu.__get__, torch.Tensor.data_ptr)
        return 0 if hidden else func(*args, **(kwargs or {}))


def new_model(config, adapters, param_dtype, choice=fp8.OFF):
    """Return a GPT, with the adapters of a lora.Spec, whose linears are as a fp8.Choice says."""
    model = GPT(config, fp8.linear_factory(choice, Linear), seed=None, param_dtype=param_dtype)
    if adapters.rank:
        lora.add(model, adapters)
    return model


def partitioned(forward, parameters):
    """Return forward(state, inputs) traced and split into forward and backward as torch.compile does it: its
    partitioner decides what backward keeps and what it computes again. parameters: how many `state` has."""
    from torch._functorch import aot_autograd, partitioners     # late: these take a second
    from torch._inductor.decomposition import select_decomp_table

    def partition(graph, inputs, **options):
        options['static_lifetime_input_indices'] = list(range(parameters))      # they stay anyway
        return partitioners.min_cut_rematerialization_partition(graph, inputs, **options)

    return aot_autograd.aot_function(
        forward, fw_compiler=lambda graph, inputs: graph, partition_fn=partition,
        decompositions=select_decomp_table(), keep_inference_input_mutations=True)


@functools.cache
def kept_bytes(config, sequences, choice, adapters, param_dtype, compiled, keeps):
    """Return the bytes that autograd keeps of a block, parameters and weights cast once a step (keeps) aside.

    Compiled, that is what Inductor's partitioner says: norms, activations and casts are computed again."""
    with FakeTensorMode(allow_non_fake_inputs=True), OnGpu():
        model = new_model(dataclasses.replace(config, n_layer=1), adapters, param_dtype, choice)
        cache = fp8.WeightCache(model)
        if keeps:
            cache.new_step(fp8.FEWEST)
            cache.refresh(model, ())
        rope = rope_tables(config, config.block_size) if config.position == 'rope' else None
        x = torch.zeros(sequences, config.block_size, config.n_embd, dtype=torch.bfloat16, requires_grad=True)
        inputs = x, x.detach().requires_grad_(), rope, None
        block, kept = model.h[0], set()
        casts = {f'{name}.{key}': vars(linear)[key] for name, linear in fp8.fp8_linears(block).items()
                 for key in fp8.TENSORS if vars(linear)[key] is not None}
        state = dict(block.named_parameters()) | casts
        forward = functools.partial(torch.func.functional_call, block)

        def pack(tensor):
            kept.add(tensor.untyped_storage())
            return tensor

        if compiled:
            forward = partitioned(forward, len(state))
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            forward(state, inputs)
        ours = {tensor.untyped_storage() for tensor in (*state.values(), *(rope or ()))}
    return sum(storage.nbytes() for storage in kept - ours)


def known_row(table, setting, value):
    """Return a table's row of a setting's value. Raises SettingError where the table has none."""
    if value not in table:
        raise SettingError(f'plan.py does not model {setting}={value}, only {", ".join(table)}')
    return table[value]


def linear_seconds(gpu, precisions, m, k, n):
    """Return the seconds of a linear k -> n on m tokens: of forward, dgrad and, if there is a third
    precision, wgrad. precisions: 'bf16' or 'fp8', of each."""
    seconds, sizes = 0.0, m * k + k * n + m * n
    for precision, result in zip(precisions, (m * n, m * k, k * n)):
        of_peak, of_bandwidth = MATMUL[precision]
        width = 1 if precision == 'fp8' else 2      # bytes of an operand's value
        moved = width * (sizes - result) + 2 * result
        seconds += 2 * m * k * n / (of_peak * getattr(gpu, precision) * 1e12)
        seconds += moved / (of_bandwidth * gpu.bandwidth * 1e12)
    return seconds


class Plan:
    """The memory and time of a run.Run whose linears are as a fp8.Choice says: fp8.OFF, or native's. gpu: a
    row of gpus.GPUS. length: a run.Length, of last_step optim.OPEN where it is not known. network: the flag.

    model: without memory. parameters: their number, adapters aside. seconds: {part: seconds} of an optimizer
    step, in which a GPU of a ring sends `sent` bytes. speed: the tokens a second of all GPUs together.
    recomputed: the number of blocks that backward computes again. Figures have worked examples in
    tests/test_plan.py. Raises SettingError for an optimizer or FP8 kernels that no row here describes."""

    def __init__(self, run, gpu, choice, length, gpus=1, network=50.0):
        self.run, self.gpu, self.length, self.gpus = run, gpu, length, gpus
        self.sequences = run.batch_size     # now: a search for the largest changes the setting
        self.config = run.window_config
        self.tokens = self.sequences * self.config.block_size
        self.adapters = lora.Spec.of(run.config)
        self.frozen = bool(self.adapters.rank)
        self.sharding, self.optimizer = run.config['sharding_mode'], run.config['optimizer']
        self.shards = 1 if self.sharding == 'ddp' else gpus
        with torch.device('meta'):
            self.model = new_model(self.config, self.adapters, run.param_dtype)
        self.peak = gpu.bf16 * 1e12     # FLOP/s
        self.rate = TRAFFIC * gpu.bandwidth * 1e12      # bytes/s of kernels between multiplications
        self.count_parameters()
        self.find_fp8_linears(choice)
        self.seconds = self.step_seconds(network)
        self.step = sum(self.seconds.values())
        self.speed = length.tokens_per_step / self.step

    def count_parameters(self):
        """Count parameters and the bytes of what belongs to them, on all GPUs together."""
        config, every = self.config, self.run.checkpoint_every
        weights = list(self.model.parameters())
        self.trained = [p for p in weights if p.requires_grad]
        self.weights = sum(p.nbytes for p in weights)
        self.gradients = sum(p.nbytes for p in self.trained)
        self.moments = optim.moment_bytes(self.model, self.optimizer)
        self.parameters = sum(p.numel() for p in weights) - self.adapters.parameters(config)
        self.block_weights = sum(k * n for _, k, n in config.linears()[:4])
        others = self.parameters - config.n_layer * self.block_weights      # outside of the blocks' linears
        self.other_bytes = self.run.param_dtype.itemsize * others
        self.recomputed = len(range(0, config.n_layer, every)) if every else 0

    def find_fp8_linears(self, choice):
        """Find which linears are in FP8. Casts are counted by fp8_share: of the values that the blocks'
        linears read and write for a token, the share that is read and written by those in FP8."""
        *linears, head = self.config.linears()
        self.in_fp8 = {name for name, k, n in (*linears, head) if not fp8.why_bf16(choice, name, k, n)}
        casts = [(k, n) for name, k, n in linears if name in self.in_fp8]
        self.fp8_share = sum(map(sum, casts)) / sum(k + n for _, k, n in linears)
        self.fp8_weights, self.fp8_head = sum(k * n for k, n in casts), head[0] in self.in_fp8
        if self.fp8_share < 1:      # our kernels are modelled for blocks that are all in FP8
            choice = dataclasses.replace(choice, kernels='inductor')
        self.choice, self.triton = choice, choice.kernels == 'triton'
        self.keeps = self.length.micro_steps >= fp8.FEWEST and self.shards == 1 and not self.frozen

    # ----- memory

    @functools.cached_property
    def memory(self):
        """{component: bytes} of one GPU at its peak, where backward starts."""
        config, dtype, logits = self.config, self.run.param_dtype, self.logits_bytes()
        of_adapters = 1 if self.frozen else self.shards     # they are whole on each GPU
        # DDP's buckets, beside the gradients that are added up until its last backward fills them
        in_buckets = of_adapters == 1 < self.gpus and self.length.micro_steps > 1
        in_fp8_alone = self.frozen * (dtype.itemsize - 1) * self.fp8_weights
        block = kept_bytes(config, self.sequences, self.choice, adapters=self.adapters, param_dtype=dtype,
                           compiled=self.run.compiled, keeps=self.keeps)
        # of a block that is computed again its input; the inputs of the last norm and the head, the tokens
        inputs = self.tokens * (2 * config.n_embd * self.recomputed + 4 * config.n_embd + 16)
        return {
            'weights': (self.weights - in_fp8_alone) // self.shards,
            'gradients': (1 + in_buckets) * self.gradients // of_adapters,
            f'{self.optimizer} moments': self.moments // of_adapters,
            'gathered from other GPUs': self.gathered_bytes() * (self.shards > 1),
            'FP8 weights, cast once a step': 2 * self.fp8_weights * self.keeps,
            'activations': block * (config.n_layer - self.recomputed) + inputs,
            'logits and their gradient': logits,
            'one recomputed block, beyond the logits': max(0, (self.recomputed > 0) * block - logits),
        }

    def gathered_bytes(self):
        """Return the bytes of whole weights and gradients that FSDP2 holds at once: those outside of blocks
        as parameters are; of blocks in bf16, and a block's gradients in bf16 and fp32, 6 bytes each."""
        trains = not self.frozen
        whole = 1 + (self.config.n_layer if self.sharding == 'fsdp_grad_op' else 2)   # blocks
        return self.other_bytes * (1 + trains) + self.block_weights * (2 * whole + 6 * trains)

    def logits_bytes(self):
        """Return the bytes of the logits and their gradient, of which loss_chunks holds a part at a time.

        Compiled: both in bf16, and for an FP8 head the gradient in e5m2 too; 8 bytes a token of its loss and
        logarithm. Eager: logarithms and two gradients in fp32."""
        C, V = self.config.n_embd, self.config.padded_vocab_size
        chunks, width = self.run.config['loss_chunks'], self.run.param_dtype.itemsize
        logits = self.tokens * ((4 + self.fp8_head) * V + 8 if self.run.compiled else 12 * V) // chunks
        if chunks > 1:      # sums of the head's and its input's gradients
            logits += (4 + width) * V * C + self.tokens * 2 * C
        return logits

    def fits(self, headroom=0.0):
        """Return whether the run leaves MARGIN, and a share `headroom`, of the GPU's memory."""
        return sum(self.memory.values()) / 1e9 <= (1 - headroom) * self.gpu.memory - MARGIN

    # ----- time of a micro-step

    def micro_step_seconds(self):
        """Return {part: seconds} of a micro-step's forward and backward, and the seconds that the GPU
        computes. If the host takes longer to launch the blocks' kernels, the GPU waits for the rest."""
        L, M = self.config.n_layer, self.tokens
        *linears, head = self.linears_seconds()
        adapted = sum(k + n for k, n in self.adapters.linears(self.config))
        moved, launching = self.between_matmuls()
        parts = {
            'linears: matmuls': sum(linears),
            # thin: bound by bytes, 6 of multiplications, 5 of torch.compile's kernels (counted in Llama 8B)
            'adapters': L * 11 * M * adapted / self.rate,
            'attention': self.attention_seconds(),
            'casts, norms, activations': L * moved / self.rate,
        }
        parts['recomputation'] = self.recomputed / L / 3 * sum(parts.values())  # forward is a third
        parts['embedding, head and loss'] = head + self.bytes_outside_blocks() / self.rate
        computing = sum(parts.values())
        launched = self.run.launched_share(self.gpus, self.length.micro_steps)
        parts['waiting for the host'] = launched * max(0.0, L * launching - computing)
        return parts, computing

    def linears_seconds(self):
        """Return [seconds] of each linear, the head last: no wgrad of frozen ones, in bf16 by the recipe."""
        seconds = []
        for name, k, n in self.config.linears():
            precision = 'fp8' if name in self.in_fp8 else 'bf16'
            of_weight = precision if fp8.RECIPES[self.choice.recipe].fp8_wgrad else 'bf16'
            passes = (precision, precision, of_weight)[:2 if self.frozen else 3]
            seconds.append(linear_seconds(self.gpu, passes, self.tokens, k, n))
        return seconds

    def attention_seconds(self):
        """Return the seconds of all blocks' attention, forward and backward.

        For a token that looks at T tokens, a product over heads of `width` together takes 2 T width FLOPs,
        and by the causal mask half. Forward has two products, backward five (Dao et al. 2022, algorithms 1
        and 4). The share of the peak for narrow heads and short sequences is fitted, see ATTENTION."""
        config, T = self.config, self.config.block_size
        rate = ATTENTION * min(1, config.head_dim / 128)**0.5 * T / (T + 400) * self.peak
        return 7 * self.tokens * T * config.n_layer * config.n_head * config.head_dim / rate

    def between_matmuls(self):
        """Return the bytes of a block's kernels between its multiplications, as tests/test_kernels.py counts
        them in compiled code, and the seconds in which the host launches a block: these kernels, 12
        multiplications and attention's two. If some casts are in FP8, both lie between the figures of bf16
        and of the recipe. A weight takes fewer bytes in bf16, and if its casts are kept for a step."""
        bf16 = BLOCK_KERNELS['bf16']
        recipe = known_row(BLOCK_KERNELS, 'fp8_recipe', self.choice.recipe + ' triton' * self.triton)
        of_embd, of_qkv, of_up, of_weight, launches = (
            a + self.fp8_share * (b - a) for a, b in zip(bf16, recipe))
        if self.run.param_dtype.itemsize == 2:
            of_weight -= bf16[3]        # nothing is cast from fp32, and no gradient to it
        cast, kept = CAST_BYTES[self.triton]
        of_weight += self.keeps * self.fp8_share * (kept / self.length.micro_steps - cast)
        (_, C, qkv), _, (_, _, up) = self.config.linears()[:3]
        moved = self.tokens * (of_embd * C + of_qkv * qkv + of_up * up)
        moved += max(0.0, of_weight) * self.block_weights
        return moved, launches * (HOST_TRITON if self.triton else HOST) + 14 * HOST

    def bytes_outside_blocks(self):
        """Return the bytes of the loss, of the head's casts and last norm, and of the embedding. Each logit
        is read and its gradient written once, in bf16; an FP8 head's is written in e5m2, too."""
        M, C, V = self.tokens, self.config.n_embd, self.config.padded_vocab_size
        of_loss = M * (10 * C + 4 * V) + 12 * V * C + self.fp8_head * (M * (3 * C + V) + 8 * V * C)
        return of_loss + 12 * C * M + 4 * V * C

    # ----- time of a step

    def step_seconds(self, network):
        """Return {part: seconds} of a step. Messages of FSDP2 are hidden by all that the GPU computes, those
        of DDP by the last backward, two thirds of a micro-step."""
        micro_steps, (parts, computing) = self.length.micro_steps, self.micro_step_seconds()
        parts = {name: micro_steps * seconds for name, seconds in parts.items()}
        parts['gradients, clipping, optimizer'] = self.update_seconds()
        hidden = computing * 2 / 3 if self.shards == 1 else computing * micro_steps
        link = self.gpu.link / 2        # GB/s in one direction
        if self.gpus > NODE:
            link = min(link, NODE * network)
        parts['waiting for other GPUs'] = max(0.0, self.sent / (NETWORK * link * 1e9) - hidden)
        return parts

    def update_seconds(self):
        """Return the seconds of adding up gradients, of clipping and of the optimizer.

        Clipping reads gradients for their norm, then reads and writes them; AdamW reads them, reads and
        writes weights, as many bytes, and moments. Each further micro-step reads two gradients and writes
        their sum. So with n micro-steps gradients' bytes are moved 6 + 3 (n - 1) times."""
        moved = (3 * self.length.micro_steps + 3) * self.gradients + 2 * self.moments
        flops = known_row(OPTIMIZER_FLOPS, 'optimizer', self.optimizer)(self.model)
        in_8_bits = sum(p.numel() for p in self.trained if optim.in_8_bits(p, self.optimizer))
        by_torchao = bool(in_8_bits) or any(p.dtype != torch.float32 for p in self.trained)
        low_bit = max(LOW_BIT * in_8_bits / self.shards, LOW_BIT_HOST * by_torchao * len(self.trained))
        return moved / self.shards / self.rate + flops / (MATMUL['bf16'][0] * self.peak) + low_bit

    @property
    def sent(self):
        """Return the bytes that each GPU of a ring of n sends in a step: (n - 1) / n of what is gathered or
        scattered (NVIDIA's nccl-tests, doc/PERFORMANCE.md).

        DDP scatters sums of gradients, then gathers them. FSDP2 gathers bf16 weights of blocks, twice where
        backward gathers them again, and the other weights; it scatters gradients in fp32."""
        if self.shards == 1:
            passed = 2 * self.gradients
        else:
            gathers = 2 if self.sharding == 'fsdp_full' else 1
            gathered = 2 * gathers * self.config.n_layer * self.block_weights + self.other_bytes
            passed = self.length.micro_steps * (gathered + 4 * sum(p.numel() for p in self.trained))
        return passed * (self.gpus - 1) / self.gpus


def all_plans(run, gpu, length, gpus, network):
    """Return {title: Plan} in bf16 and, on a GPU that has it, in native's FP8. Raises fp8.OptionError for an
    order of FP8 that does not run."""
    choices = {'bf16': fp8.OFF}
    if gpu.fp8:
        sharded, options = gpus > 1 and run.config['sharding_mode'] != 'ddp', fp8.Options.of(run.config)
        recipe, tokens = options.recipe.removeprefix(fp8.FIRST), run.batch_size * run.config['block_size']
        needed = fp8.RECIPES[recipe].capability if recipe in fp8.RECIPES else ()
        if gpu.capability < needed:
            if recipe == options.recipe:
                raise fp8.OptionError(f'the recipe {recipe} needs a GPU of compute capability '
                                      f'{needed[0]}.{needed[1]}, which {gpu.name} lacks: name another --gpu')
            recipe = 'auto'
        place = fp8.Place(torch.device('cuda'), tokens, run.compiled)
        choice = fp8.Choice.of(dataclasses.replace(options, recipe=recipe, sharded=sharded), 'native', place)
        try:
            fp8.check_choice(choice, place)
        except fp8.OptionError:
            if options.orders:
                raise
            choice = fp8.OFF
        choices['FP8'] = choice
    return {title: Plan(run, gpu, choice, length, gpus, network=network)
            for title, choice in choices.items()}


def verdict(plans):
    """Return the line that says what FP8 would do, of the Plans of all_plans: whether a run fits decides
    before its speed."""
    bf16, in_fp8 = plans['bf16'], plans.get('FP8')
    gpu, fitting = f'{bf16.gpus} x {bf16.gpu.name}', in_fp8 and in_fp8.fits()
    if not bf16.fits() and not fitting:
        return (f'verdict   too big for {gpu} (modelled): a smaller --batch_size, --grad_checkpointing=full, '
                '--loss_chunks=8, more GPUs with --sharding_mode=fsdp_full')
    if not in_fp8:
        return f'verdict   {bf16.gpu.name} has no FP8 that runs here (sm_89 and later have): bf16 trains'
    if not fitting:
        return f'verdict   only bf16 fits on {gpu} (modelled): --no_fp8, or a smaller --batch_size'
    gain = in_fp8.speed / bf16.speed
    line = f'verdict   predicted FP8 x{gain:.2f} over bf16 on {gpu} (modelled)'
    if not bf16.fits():
        line += ': bf16 does not fit, train in FP8'
    elif gain < WORTH:
        line += ': FP8 is not worth it here, train in bf16 (--no_fp8)'
    return line


def print_row(title, values, form='.2f'):
    """Print a row of the table."""
    print(f'{title:<36}' + ''.join(f' {value:>11{form}}' for value in values))


def print_table(columns, usd):
    """Print a table with a column for each of {title: Plan}. usd: a GPU-hour's price, 0 = not known."""
    first, *_ = plans = list(columns.values())

    def rows(title, parts, unit):
        print()
        print_row(title, columns, '')
        for name in parts[0]:
            values = [part[name] / unit for part in parts]
            if any(values):
                print_row(f'  {name}', values)
        print_row('  sum', [sum(part.values()) / unit for part in parts])

    mode = 'torch.compile' if first.run.compiled else 'eager'
    rows(f'memory per GPU, GB ({mode})', [plan.memory for plan in plans], 1e9)
    print_row(f'  in {first.gpu.memory:.1f} GB less {MARGIN:g}',
              ['fits' if plan.fits() else 'too big' for plan in plans], '')
    rows('time of a step, ms (torch.compile)', [plan.seconds for plan in plans], 1e-3)
    if any(plan.gpus > 1 for plan in plans):
        print_row('  GB that each GPU sends', [plan.sent / 1e9 for plan in plans])
    print_row('  tokens/s, all GPUs', [plan.speed for plan in plans], ',.0f')
    max_hours = first.run.config['max_hours']
    if first.length.last_step != optim.OPEN or max_hours:
        print_runs(plans, max_hours, usd)


def print_runs(plans, max_hours, usd):
    """Print the rows of whole runs: hours, tokens, dollars."""
    hours = [min(plan.length.last_step * plan.step / 3600, max_hours or math.inf) for plan in plans]
    if max(hours) >= 0.1:
        print_row('  the run, hours', hours, ',.2f')
    else:
        print_row('  the run, seconds', [each * 3600 for each in hours], '.3g')
    tokens = [each * 3600 * plan.speed for each, plan in zip(hours, plans)]
    unit, size = ('million tokens', 1e6) if min(tokens) >= 1e7 else ('tokens', 1)
    print_row(f'  the run, {unit}', [each / size for each in tokens], ',.0f')
    if usd:
        print_row(f'  the run, USD at {usd:g} an hour',
                  [each * plan.gpus * usd for each, plan in zip(hours, plans)], ',.2f')


def settled(config):
    """Return the run.Run on any GPU. Of a model of the hub that is a preset, nothing is fetched."""
    name, vocab_size = config['init_from'], config['vocab_size']
    config = pretrained.fine_tuning('train_fp8.py', config)
    config['vocab_size'], tokenizer = vocab_size, config['tokenizer']
    preset = name.lower().rpartition('/')[2].removesuffix('-instruct')
    if preset in PRESETS and not os.path.exists(name):
        config.update(init_from=preset, vocab_size=vocab_size or PRESETS[preset].vocab_size)
        if not dataset(config, required=False)[0]:
            config['tokenizer'] = 'gpt2'    # any that needs no files: nothing is tokenized here
    run = Run.of(config, torch.device('cuda'), data_required=False)
    run.config['tokenizer'] = tokenizer
    return run


def main(words):
    """Print the plan of a command line. Raises SettingError, MachineError."""
    asked = plan_arguments(words)
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else ''
    found = asked.gpu or find_gpu(here)
    gpu = found or find_gpu('h100')
    run, lines, columns, epoch, unknown = settled(asked.config), [], {}, 0, ''
    if here and not found:
        lines.append(f'          no data sheet of {here}, which is here: --gpu names another than {gpu.name}')
    config, size = run.config, run.batch_size
    searched = not size
    title = 'FP8' if gpu.fp8 and config['use_fp8'] and config['fp8_backend'] != 'off' else 'bf16'
    try:
        epoch = tokens_per_epoch(run)
    except MissingError as error:
        if not (config['max_steps'] or config['max_tokens']):   # which may end the run before an epoch does
            unknown = f'run       length unknown: {error}'
            config['max_steps'] = optim.OPEN
        config['num_epochs'] = 0

    def plans_of(size, gpus):
        """Return all_plans with micro-batches of `size` sequences, which the settings then have."""
        config['batch_size'] = size
        return all_plans(run, gpu, Length.of(config, gpus, epoch), gpus, asked.network)

    for gpus in asked.gpus:
        if searched:
            size = largest_fitting(
                config, gpus, lambda size: plans_of(size, gpus)[title].fits(HEADROOM))
            lines.append(f'batch     batch_size=0: {size} is the largest up to {config["max_batch_size"]} '
                         f'that is modelled to leave {HEADROOM:.0%} of the memory')
        plans = plans_of(size, gpus)
        columns |= plans if len(asked.gpus) == 1 else {f'{gpus} GPUs': plans[title]}
        bf16 = plans['bf16']
        lines += [batch_line(config, bf16.length, gpus),
                  unknown or length_line(run, bf16.length, bf16.model)]
    say(model_line(run.window_config),
        f'device    {gpu.name}: {gpu.bf16:,} TFLOP/s in bf16, {gpu.fp8 or 0:,} in FP8, '
        f'{gpu.bandwidth} TB/s, {gpu.memory:.1f} GB',
        *lines)
    print_table(columns, asked.usd_per_gpu_hour)
    say('', verdict(plans))


if __name__ == '__main__':
    main(sys.argv[1:])
