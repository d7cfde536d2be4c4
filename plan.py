"""Estimate what a run needs before a GPU is rented: memory, time, money, and what FP8 gains.

$ python plan.py config/gpt2_fp8.py --gpu=h200 --gpus=8 --usd_per_gpu_hour=3   # the price is yours
$ python plan.py config/h100_350m_fp8.py --batch_size=0         # the largest micro-batch that should fit
$ python plan.py --init_from=gpt2-xl --batch_size=16 --max_tokens=3e10 --gpu=b200

Every other word is a setting of train_fp8.py. Time is FLOPs over the share of its peak that an H100 reached
at that width, and FP8's gain is the one measured there, with native, our kernels and CUDA graphs. Memory is
counted under torch.compile. docs/fp8.md has the errors. Several GPUs also wait for one all-gather of bf16
weights a step (in FP8, sharded, of half as many bytes), at 400 GB/s a node or the link's rate: a bound where
the rest of what they send is hidden.
"""
import os
import sys

from configurator import MissingError, Parser, SettingError, at_least, configure, one_line_errors, say
from fp8gpt.gpus import GPUS, find_gpu, gpu_of


def plan_arguments(words):
    """Return the command line, with train_fp8.py's settings as `config` and --gpu, if it is given, as a row
    of gpus.GPUS. Raises SettingError."""
    parser = Parser(__doc__)
    parser.add_argument('--gpu', default='', help='h100, h200, b200, a100, ...; else the one here, else h100')
    parser.add_argument('--gpus', type=at_least(1), default=1, help='how many: one number, for one column')
    parser.add_argument('--usd_per_gpu_hour', type=at_least(0, float), default=0.0, help='0 = not known')
    parser.add_argument('--vocab_size', type=at_least(0), default=0,
                        help='tokens; 0 = those of the model or dataset')
    parser.add_argument('--network', help='is gone: 400 GB/s a node are assumed')
    asked, rest = parser.parse_known_args(words)
    asked.config = config = configure('train_fp8.py', rest)
    config['vocab_size'] = asked.vocab_size
    name, asked.gpu = asked.gpu, find_gpu(asked.gpu)
    known = ', '.join(gpu.name for _, gpu in GPUS)
    for wrong, message in (
            (asked.network, 'leave --network out: 400 GB/s a node are assumed'),
            (config['resume'], 'a plan starts from settings: in place of --resume, '
                               '--init_from=that checkpoint'),
            (config['dtype'] != 'bf16', f'plan.py models bf16 and FP8, not dtype={config["dtype"]}'),
            (name and not asked.gpu, f'no data sheet of {name!r} here; --gpu is one of {known}')):
        if wrong:
            raise SettingError(message)
    return asked


if __name__ == '__main__':
    one_line_errors()
    plan_arguments(sys.argv[1:])

# Imported only now: --help and a mistyped setting are answered without waiting for torch.
import numpy
import torch

from fp8gpt import fp8, lora, optim, pretrained
from fp8gpt.batch_size_finder import HEADROOM, largest_fitting
from fp8gpt.run import (
    Length, batch_line, dataset_if_any, length_line, micro_steps, model_line, preview, tokens_per_epoch)
from model import GPT, LONGEST_ROW, PRESETS

# By n_embd, what one H100 did (results/gpu: 124m.json, 350m.json, 1.5b.json, lora_8b.json); lines in between.
MFU = (768, 1024, 1600), (0.447, 0.488, 0.508)                  # share of its peak in bf16
GAINS = (768, 1024, 1600, 4096), (1.08, 1.17, 1.27, 1.34)       # of FP8, tensorwise
RECIPES = {'auto': 1.0, 'tensorwise': 1.0, 'delayed': 1.09}     # times GAINS; no other is measured
LEAST = 768         # n_embd from which FP8 was measured
LOW_BIT = 26e-12    # seconds a value of 8-bit AdamW (results/gpu/full_1b.json)
MARGIN = 2.0        # GB: CUDA's context, workspaces, buffers and the allocator's gaps
WORTH = 1.05        # FP8's least gain for the verdict: equal loss costs about as much in more tokens


def settled(config):
    """Return (the run.Run on any GPU, its GPT without memory, with adapters). Of a model of the hub that is a
    preset, nothing is fetched."""
    vocab_size, config = config['vocab_size'], pretrained.fine_tuning('train_fp8.py', config)
    config['vocab_size'], name, tokenizer = vocab_size, config['init_from'], config['tokenizer']
    preset = name.lower().rpartition('/')[2].removesuffix('-instruct').removeprefix('meta-')
    if preset in PRESETS and not os.path.exists(name):
        config.update(init_from=preset, vocab_size=vocab_size or PRESETS[preset].vocab_size)
        if not dataset_if_any(config).folder:
            config['tokenizer'] = 'gpt2'    # any that needs no files: nothing is tokenized here
    run = preview(config, torch.device('cuda'))
    run.config['tokenizer'] = tokenizer
    with torch.device('meta'):
        model = GPT(run.window_config, seed=None, param_dtype=run.param_dtype)
        if config['lora_rank']:
            lora.add(model, lora.Spec.of(config))
    return run, model


def recomputed(run):
    """Return the share of the blocks that backward computes again."""
    every, n_layer = run.checkpoint_every, run.model_config.n_layer
    return len(range(0, n_layer, every)) / n_layer if every else 0.0


def kept_bytes(c, in_fp8):
    """Return the bytes a token that autograd keeps of a block. c: a GPTConfig.

    In GPT-2's shape they are 34 n_embd in bf16 (Korthikanti et al. 2022, without dropout): the inputs of
    linears, of attention and of the activation, and 6 n_embd; with RoPE also queries and keys before it. In
    FP8 linears' inputs are bytes, but attention's output is kept in bf16, too."""
    _, K, N = zip(*c.linears()[:4])
    rotated = (c.position == 'rope') * (N[0] - c.n_kv_head * c.head_dim)
    return 6 * c.n_embd + 2 * (sum(K) + N[0] + N[2] + rotated) - in_fp8 * (sum(K) - K[1])


def recipe_of(config):
    """Return the recipe that a run's settings ask for: of 'auto:delayed', delayed."""
    return config['fp8_recipe'].removeprefix('auto:')


def gathered_bytes(run, others, matrices, in_fp8):
    """Return the bytes that a rank of a sharded model holds whole: the embedding, the head and their
    gradients, two blocks' weights, or all, and a block's gradients. others: bytes of what is no matrix of a
    block; matrices: the number of those weights."""
    config, blocks = run.config, run.model_config.n_layer
    in_full = config['sharding_mode'] == 'fsdp_full'
    sent = matrices * (1 if in_fp8 and recipe_of(config) in RECIPES else 2)
    gradients = 8 * matrices / blocks * (not config['lora_rank'])
    return 2 * others + gradients + sent * (2 / blocks if in_full else 1)


def memory(run, model, gpus, in_fp8):
    """Return {part: bytes} of one GPU where backward starts."""
    c, config, again = run.window_config, run.config, recomputed(run)
    tokens, mode, itemsize = run.batch_size * c.block_size, config['sharding_mode'], run.param_dtype.itemsize
    block, matrices = tokens * kept_bytes(c, in_fp8), sum(k * n for _, k, n in c.linears()[:-1])
    # 2 bytes a logit and, but where fp8gpt/loss.py writes it in the logit's place, 2 or 3 of its gradient
    each = 5 if in_fp8 and config['fp8_head'] else 4 if c.padded_vocab_size > LONGEST_ROW else 2
    logits = tokens * c.padded_vocab_size * each / config['loss_chunks']
    weights, shards = sum(p.nbytes for p in model.parameters()), 1 if mode == 'ddp' else gpus
    count = micro_steps(config, run.batch_size, gpus)
    whole = gathered_bytes(run, weights - itemsize * matrices, matrices, in_fp8)
    if config['lora_rank']:
        weights += in_fp8 * (1 - itemsize) * matrices   # frozen ones are in FP8 alone
    elif shards > 1 or count >= fp8.FEWEST:
        weights += in_fp8 * (1 + (shards == 1)) * matrices      # W, and W^T, are cast once a step
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    if shards == 1 < min(gpus, count):
        gradients *= 2      # those added up, and DDP's buckets
    return {
        'weights': weights / shards,
        'gradients': gradients / shards,
        'moments': optim.moment_bytes(model, config['optimizer']) / shards,
        'gathered from other GPUs': whole * (shards > 1),
        'activations': c.n_layer * ((1 - again) * block + again * 2 * c.n_embd * tokens),
        'logits, or a recomputed block': max(logits, block * (again > 0)),
    }


def step_seconds(run, model, gpu, length, gpus):
    """Return {precision: seconds} of a step, without FP8's where its gain is not measured. length: a
    run.Length."""
    c, config, width = run.window_config, run.config, run.model_config.n_embd
    forward = c.flops_per_token(c.block_size) / 3 - 2 * width * c.vocab_size    # of the blocks
    flops = length.tokens_per_step / gpus * (run.flops_per_token + recomputed(run) * forward)
    computing = flops / (numpy.interp(width, *MFU) * gpu.bf16 * 1e12)
    gather = 2 * c.count_parameters() * (1 - 1 / gpus) / (1e9 * min(gpu.link / 2, 400))
    is_sharded, beside = config['sharding_mode'] != 'ddp', 0
    if config['optimizer'] == 'adamw8bit':
        beside = LOW_BIT * optim.moment_bytes(model, 'adamw') / 8 / (gpus if is_sharded else 1)
    seconds, of_recipe = {'bf16': computing + beside + gather}, RECIPES.get(recipe_of(config))
    if gpu.fp8 and of_recipe and width >= LEAST:
        faster = of_recipe * numpy.interp(width, *GAINS)
        seconds['FP8'] = computing / faster + beside + gather / (1 + is_sharded)
    return seconds


def verdict(gpu, seconds, fits):
    """Return the line that says what to do. seconds: of step_seconds."""
    if not fits:
        return ('verdict   too big: a smaller --batch_size, --grad_checkpointing=full, --loss_chunks=8, more '
                'GPUs with --sharding_mode=fsdp_full')
    if not gpu.fp8:
        return f'verdict   {gpu.name} has no FP8 that runs here (sm_89 and later have): bf16 trains'
    if 'FP8' not in seconds:
        return "verdict   FP8's gain is not measured in this recipe or width: `python bench.py pair` does"
    gain = seconds['bf16'] / seconds['FP8']
    advice = ': not worth it, train in bf16 (--no_fp8)' if gain < WORTH else ''
    return f'verdict   FP8 x{gain:.2f} over bf16, from gains of one H100{advice}'


def run_line(length, of_step, max_hours, usd):
    """Return a clause about a run of steps that take `of_step` seconds. usd: of an hour of all GPUs, or 0."""
    hours, speed = length.last_step * of_step / 3600, length.tokens_per_step / of_step
    if length.last_step == optim.OPEN and not max_hours:
        return f'{speed:,.0f} tokens/s'
    hours = min(hours, max_hours or hours)
    return (f'{speed:,.0f} tokens/s, {hours:,.2f} hours, {hours * speed * 3.6e-3:,.1f}M tokens'
            + f', ${hours * usd:,.2f}' * (usd > 0))


def main(words):
    """Print the plan of a command line. Raises SettingError, MachineError."""
    asked, epoch, note = plan_arguments(words), 0, ''
    here = torch.cuda.is_available() and gpu_of(torch.device('cuda'))
    gpu, gpus, (run, model) = asked.gpu or here or find_gpu('h100'), asked.gpus, settled(asked.config)
    config = run.config
    in_fp8 = bool(gpu.fp8) and config['use_fp8'] and config['fp8_backend'] != 'off'

    def fits(size, headroom=HEADROOM):
        """Return whether micro-batches of `size` sequences, which the settings then have, leave headroom."""
        config['batch_size'] = size
        total = sum(memory(run, model, gpus, in_fp8).values()) / 1e9
        return total <= (1 - headroom) * gpu.memory - MARGIN

    fitting = fits(run.batch_size or largest_fitting(config, gpus, fits), headroom=0)
    try:
        epoch = tokens_per_epoch(run)
    except MissingError as error:
        note = f'run       the length of an epoch is unknown: {error}'
        config.update(num_epochs=0, max_steps=config['max_steps'] or optim.OPEN)
    length, parts = Length.of(config, gpus, epoch), memory(run, model, gpus, in_fp8)
    seconds = step_seconds(run, model, gpu, length, gpus)
    say(model_line(run.window_config), f'device    {gpus} x {gpu.name}, of {gpu.memory:.1f} GB each',
        batch_line(config, length, gpus), note or length_line(run, length))
    precision = 'FP8' if in_fp8 else 'bf16'
    say(f'memory    {sum(parts.values()) / 1e9:.2f} GB of a GPU, in {precision} by torch.compile',
        *(f'          {size / 1e9:.2f} {part}' for part, size in parts.items() if size))
    for precision, each in seconds.items():
        say(f'{precision:<9} {run_line(length, each, config["max_hours"], gpus * asked.usd_per_gpu_hour)}')
    say(verdict(gpu, seconds, fitting))


if __name__ == '__main__':
    main(sys.argv[1:])
