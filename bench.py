"""Benchmarks, each against another way of doing the same in the same run; ratios matter, machines are noisy.

$ python bench.py pair config/gpt2_fp8.py --recipes=tensorwise,delayed  # training steps, FP8 and bf16 in turn
$ python bench.py gemm config/gpt2_fp8.py                               # each shape of linear in that model
$ python bench.py lora config/gpt2_fp8.py --lora_targets=all            # training steps beside adapters
$ python bench.py quality config/quickstart.py --steps=300 --seeds=3    # whole runs
$ python bench.py sample                                                # sampling
$ python bench.py data --data_files='texts/*.parquet'                   # tokenizing and loading

The first four take train_fp8.py's config files and flags too. Each prints a table, writes a JSON with
hardware, versions and commit into runs/bench, which git ignores, and ends with that JSON on one line (of
quality without the runs' curves). Exit code 1: a verdict was FAIL.
"""
import os
import sys
import types

from configurator import MachineError, configure, one_line_errors

command = ''         # pair | gemm | lora | quality | sample | data
results = 'runs/bench'  # folder of JSONs and pictures, of which none is written over
config_beside = ['train_fp8.py']
# pair: training steps, bf16 and FP8 in turn
# A row for each pair of backend and recipe. A step has as many micro-steps as the settings mean on one GPU.
backends = ''        # commas between, as native,te; '' = as the settings say
recipes = ''         # commas between, as tensorwise,delayed; '' = as the settings say
rounds = 5           # >= 1: whose median is told
steps = 10           # >= 1: timed optimizer steps of each
warmup = 3           # >= 1: others before them
# gemm: each shape of linear in a model, bf16 and FP8 in turn
# A row for each backend and recipe.
backends = 'native'  # commas between; '' = as the settings say
recipes = 'all'      # commas between; '' = as the settings say
repeats = 10         # >= 1: means whose median is told
iterations = 20      # >= 1: calls that each is the mean of
# lora: training steps with adapters, bf16 and FP8 in turn
# Seconds of a step by four models, in either precision with adapters and without theirs; all are in memory.
ranks = '0,8,16,32'  # a row for each; 0: full training
rounds = 5           # >= 1: whose median is told
warmup = 2           # >= 1: steps before them
# quality: whole runs of train.py and train_fp8.py with the same config files, flags and seeds
# Ten evaluations and a hundred log lines each, unless a flag says otherwise. What the same sources, settings,
# data and machine made is not run again. Several backends or recipes share the runs in bf16, and have a JSON
# each. Exit code 0 where FP8 is shown to be as good (PASS, WARN), 1 for FAIL, 4 where the seeds do not tell.
backends = ''        # commas between; '' = as the settings say
recipes = ''         # commas between; '' = as the settings say
steps = 300          # >= 1: of each run
seeds = 3            # >= 1: runs of each script, from seed 1337 on
hellaswag_items = 1000  # >= 0: the first ones; 0 leaves HellaSwag out
out = ''             # folder that keeps the runs; '' = runs/quality-<config>
# sample: bf16, a key/value cache and one batch against nanoGPT's fp32, no cache, one by one
preset = 'gpt2'      # a name of model.py's PRESETS, random weights
new_tokens = 500     # >= 1: of one continuation
samples = 10         # >= 1: continuations together
sample_tokens = 200  # >= 1: of each of these
config_beside = []
# data: tokenizing and loading parquet files against build-nanogpt's and nanoGPT's ways
data_files = ''      # required: parquet files, a glob
repeats = 3          # >= 1: of each way
batch_size = 64      # >= 1: sequences of a batch
block_size = 1024    # >= 1: tokens of a sequence
config_beside = []


def command_line(words):
    """`command`, its settings, `words`: those of train_fp8.py, which are checked. Raises SettingError."""
    asked = configure(__file__, words)
    words = asked.beside.words if asked.beside else []
    return types.SimpleNamespace(**asked, command=asked.command, words=words)


if __name__ == '__main__':
    one_line_errors()
    command_line(sys.argv[1:])

# Imported only now: --help and a mistyped setting are answered without waiting for torch.
import contextlib
import dataclasses
import functools
import statistics

import torch

import data
import fp8
import lora
import measure
import optim
from benchmarks import peers, quality
from benchmarks.rows import build, choose, fill, matrix, read_settings, speed_verdict, ways
from gpus import gpu_of, peak_flops
from model import GPT, Compiled, Linear

PRECISIONS = ('bf16', 'FP8')


# --------------------------------------------------------------------------------------------- training steps

class Pair:
    """One model that trains in either precision, its FP8 linears paused for bf16."""

    def __init__(self, model, settled, settings):
        config = settings.config
        self.model, self.device = model, settings.device
        weights = model.weights().items()
        self.initial = {name: p.detach().to('cpu', copy=True) for name, p in weights}
        betas = config['beta1'], config['beta2']
        self.optimizer = optim.make_optimizer(
            model, betas, config['weight_decay'], config['optimizer'], settings.run.compiled)
        self.grad_clip = config['grad_clip'] or float('inf')
        self.ways = ways(model, settled, Compiled)
        self.state = fp8.State(model, settled.choice)

    def restart(self, precision, n_targets, micro_batches):
        """The initial weights, a new optimizer's state; in FP8 the calibration on the first step's data."""
        self.model.load_weights(self.initial)
        self.optimizer.state.clear()
        if precision == 'FP8':
            x, y, examples = micro_batches[0]
            self.state.calibrate(
                lambda: self.model(x, y, n_targets=n_targets, examples=examples).backward())
            self.optimizer.zero_grad(set_to_none=True)


def optimizer_steps(pair, precision, steps):
    """What the loop does, and nothing around it. steps: [(learning rate, number of targets,
    [(x, y, examples) of each micro-step])]. Returns the last step's training loss, a 0-dim tensor."""
    model, optimizer, state = pair.ways[precision], pair.optimizer, pair.state
    skips = torch.zeros(3, device=pair.device)
    for lr, n_targets, micro_batches in steps:
        optim.set_rate(optimizer, lr)
        step_loss = 0.0
        for number, (x, y, examples) in enumerate(micro_batches):
            state.micro_step(number, len(micro_batches))
            loss = model(x, y, n_targets=n_targets, examples=examples)
            loss.backward()
            step_loss += loss.detach()
        grad_norm = torch.nn.utils.clip_grad_norm_(pair.model.parameters(), pair.grad_clip)
        optim.step_if_finite(optimizer, grad_norm, skips)
        state.after_step()
        optimizer.zero_grad(set_to_none=True)
    return step_loss


def in_turn(rounds):
    """(precision, context that pauses FP8 in bf16's turn); the order swaps: a drifting clock favours none."""
    for number in range(rounds):
        for precision in PRECISIONS[::-1] if number % 2 else PRECISIONS:
            yield precision, fp8.paused() if precision == 'bf16' else contextlib.nullcontext()


def n_targets(micro_batches):
    """Of a step."""
    return float(sum((y != -1).sum().item() for _, y, _ in micro_batches))


def time_pair(pair, steps, arguments, found):
    """Takes the steps in each precision `rounds` times, from the same weights on the same batches; the
    first `warmup` are not timed. found: a dict that gets {precision: {figure: [of each round]}}."""
    cuda = pair.device.type == 'cuda'
    warmup, timed = steps[:arguments.warmup], steps[arguments.warmup:]
    for precision, context in in_turn(arguments.rounds):
        pair.restart(precision, *steps[0][1:])
        if cuda:
            torch.cuda.reset_peak_memory_stats(pair.device)
        losses = []
        with context:
            optimizer_steps(pair, precision, warmup)
            took = measure.seconds(lambda: losses.append(optimizer_steps(pair, precision, timed)))
        peak = torch.cuda.max_memory_allocated(pair.device) / 1e9 if cuda else None
        figures = found.setdefault(precision, {'seconds a step': [], 'loss': [], 'GB': []})
        figures['seconds a step'].append(took / len(timed))
        figures['loss'].append(losses[0].item())
        figures['GB'].append(peak)


def pair_row(cell, batches, found):
    """One row of `pair`. batches: [[(x, y, examples) of a micro-step] of a step]. found: see time_pair."""
    settings = cell.settings
    config = settings.config
    settled = choose(settings, cell.words)
    choice = settled.choice
    model = build(settings, choice)
    print(fp8.summary(model, choice), flush=True)
    pair = Pair(model, settled, settings)
    schedule = optim.Schedule(
        len(batches), config['max_lr'], warmup_steps=config['warmup_steps'], lr_schedule='constant')
    rates = [schedule.rate(step) for step in range(len(batches))]
    steps = list(zip(rates, map(n_targets, batches), batches))
    time_pair(pair, steps, cell.arguments, found)

    row = {'backend': choice.backend, 'recipe': choice.recipe}
    gpu = gpu_of(settings.device)
    cuda = settings.device.type == 'cuda'
    tokens = len(batches[0]) * settings.tokens
    flops = settings.run.flops_per_token
    for precision in PRECISIONS:
        figures = found[precision]
        rate = 1 / statistics.median(figures['seconds a step'])
        peak = peak_flops(gpu, precision.lower())
        row[f'{precision} steps/s'] = rate
        row[f'{precision} tokens/s'] = rate * tokens
        row[f'{precision} MFU'] = peak and rate * tokens * flops / peak
        row[f'{precision} GB'] = statistics.median(figures['GB']) if cuda else None

    def ratios(figure):
        return [b / f for b, f in zip(found['bf16'][figure], found['FP8'][figure])]

    times = ratios('seconds a step')
    spread = [min(times), max(times)]
    row['loss difference, %'] = 100 * statistics.median(1 / ratio - 1 for ratio in ratios('loss'))
    row['ratio'] = statistics.median(times)
    row['least .. most'] = spread
    row['verdict'] = speed_verdict(row['ratio'], config['fp8_keep'], spread)
    return row


def batch_maker(settings):
    """(what the data are, a function that makes the next micro-batch x, y, examples)."""
    B, T = settings.config['batch_size'], settings.model.block_size
    seed = settings.config['seed']
    if settings.run.folder:
        train = data.TokenData(settings.run.folder, 'train', T)
        loader = data.Loader(train, B, seed, device=settings.device, num_workers=0)
        return settings.run.folder, loader.next
    generator = torch.Generator().manual_seed(seed)

    def random_batch():
        tokens = torch.randint(settings.model.vocab_size, (2, B, T), generator=generator)
        return *tokens.to(settings.device).unbind(), None

    return f'random tokens, as {settings.config["dataset"]} is not prepared', random_batch


def bench_pair(arguments):
    """Training steps in both precisions, a row for each cell of the matrix."""
    settings = read_settings(arguments.words)
    micro_steps = settings.micro_steps
    source, next_batch = batch_maker(settings)
    steps = arguments.warmup + arguments.steps
    batches = [[next_batch() for _ in range(micro_steps)] for _ in range(steps)]
    shape = f'{settings.config["batch_size"]} x {settings.model.block_size}'
    print(f'data: {source}; a step is {micro_steps} micro-steps of {shape} tokens', flush=True)
    rounds = {}

    def cells():
        for cell in matrix(settings, arguments):
            found = rounds.setdefault(' '.join(cell.asked.values()) or 'as set', {})
            yield cell.asked, functools.partial(pair_row, cell, batches, found)

    facts = {'data': source, 'micro_steps': micro_steps, 'rounds': rounds}
    rows = fill('pair', settings, cells(), arguments.results, **facts)
    if any(row['verdict'].endswith(', FAIL') for row in rows):
        raise MachineError("FAIL: fp8_keep=auto takes more than 1.02 of bf16's time")


# ------------------------------------------------------------------------------------------- beside adapters

def stepper(settings, settled, precision, micro_batches, bare=False):
    """run(): an optimizer step in 'bf16' or 'FP8', of a model of its own: a frozen base in FP8 has no bf16
    weights. bare: without adapters, but with all other gradients."""
    choice = settled.choice if precision == 'FP8' else fp8.OFF
    model = build(settings, choice)
    if bare:
        for adapters in [module for module in model.modules() if isinstance(module, lora.Adapters)]:
            adapters.hook.remove()
        model.h[0].ln_1.requires_grad_()    # what comes behind has a gradient
    pair = Pair(model, dataclasses.replace(settled, choice=choice), settings)
    step = n_targets(micro_batches), micro_batches
    if precision == 'FP8':
        pair.restart(precision, *step)
    return functools.partial(optimizer_steps, pair, precision, [(1e-4, *step)])


def lora_row(settings, arguments, micro_batches):
    """One row of `lora`."""
    spec = lora.Spec.of(settings.config)
    settled = choose(settings, settings.words)
    ways = [(precision, bare) for precision in PRECISIONS for bare in (False, True)[:1 + bool(spec.rank)]]
    runs = {way: stepper(settings, settled, way[0], micro_batches, bare=way[1]) for way in ways}
    times = measure.medians(runs, arguments.rounds, arguments.warmup)
    row = {'adapters, % of FLOPs': 600 * spec.parameters(settings.model) / settings.run.flops_per_token}
    for precision in PRECISIONS:
        whole = times[precision, False]
        row[f'{precision} ms'] = whole * 1e3
        row[f'adapters, % of {precision}'] = 100 * (1 - times.get((precision, True), whole) / whole)
    row['ratio'] = times['bf16', False] / times['FP8', False]
    row['verdict'] = speed_verdict(row['ratio'])
    return row


def bench_lora(arguments):
    """Training steps in both precisions, a row for each rank."""
    settings = read_settings(arguments.words, adapters=True)
    _, next_batch = batch_maker(settings)
    micro_batches = [next_batch() for _ in range(settings.micro_steps)]

    def cells():
        for rank in arguments.ranks.split(','):
            here = read_settings([*arguments.words, f'--lora_rank={rank}'], adapters=True)
            yield {'rank': rank}, functools.partial(lora_row, here, arguments, micro_batches)

    fill('lora', settings, cells(), arguments.results)


# --------------------------------------------------------------------------------------------- single linears

@dataclasses.dataclass(frozen=True)
class Shape:
    """A linear's: (M, K) x (K, N), with M tokens."""
    N: int
    K: int
    bias: bool
    head: bool  # a case of its own, whatever its shape


def gemm_row(cell, name, shape):
    """One row of `gemm`: a single linear, forward alone and with backward; medians over the repeats."""
    settings, arguments = cell.settings, cell.arguments
    settled = choose(settings, cell.words)
    choice = settled.choice
    factory = fp8.linear_factory(choice, Linear)
    linear = factory(shape.K, shape.N, bias=shape.bias, name=name).to(settings.device)
    for p in linear.parameters():
        torch.nn.init.normal_(p, std=0.02)
    B, T = settings.config['batch_size'], settings.model.block_size
    like = {'device': settings.device, 'dtype': torch.bfloat16}
    x = torch.randn(B, T, shape.K, requires_grad=True, **like)
    dy = torch.randn(B, T, shape.N, **like)
    calls = ways(linear, settled)
    state = fp8.State(linear, dataclasses.replace(choice, keep=()))

    def forward_backward(call):
        call(x).backward(dy)
        x.grad = None
        linear.zero_grad(set_to_none=True)

    def repeat(work, argument):
        for _ in range(arguments.iterations):
            work(argument)

    reason = linear.bf16_reason
    if reason:
        del calls['FP8']
    else:
        state.calibrate(lambda: forward_backward(calls['FP8']))
    runs = {}
    for precision, call in calls.items():
        runs['fwd', precision] = functools.partial(repeat, call, x)
        runs['fwd+bwd', precision] = functools.partial(repeat, forward_backward, call)
    for part in ('fwd', 'fwd+bwd'):
        runs[part, 'bf16'] = measure.in_bf16(runs[part, 'bf16'])
    times = measure.medians(runs, arguments.repeats, warmup=1)

    row = {}
    for part, multiplications in (('fwd', 1), ('fwd+bwd', 3)):
        flops = multiplications * 2 * settings.tokens * shape.N * shape.K
        for precision in calls:
            took = times[part, precision] / arguments.iterations
            row[f'{part} {precision} ms'] = took * 1e3
            row[f'{part} {precision} TFLOP/s'] = flops / took / 1e12
        row[f'{part} ratio'] = None if reason else times[part, 'bf16'] / times[part, 'FP8']
    row['verdict'] = f'bf16: {reason}' if reason else speed_verdict(row['fwd+bwd ratio'])
    return row


def bench_gemm(arguments):
    """Each shape of linear in both precisions, a row for each cell of the matrix."""
    settings = read_settings(arguments.words)
    shapes = {}
    one_layer = GPT(dataclasses.replace(settings.model, n_layer=1))
    for name, module in one_layer.named_modules():
        if isinstance(module, Linear):
            N, K = module.weight.shape
            shape = Shape(N, K, bias=module.bias is not None, head=name == 'lm_head')
            shapes.setdefault(shape, []).append(name)

    def cells():
        for shape, names in shapes.items():
            linear = ', '.join(names).replace('h.0.', '')
            columns = {'linear': linear, 'M': settings.tokens, 'N': shape.N, 'K': shape.K}
            for cell in matrix(settings, arguments):
                yield columns | cell.asked, functools.partial(gemm_row, cell, names[0], shape)

    fill('gemm', settings, cells(), arguments.results)


# ----------------------------------------------------------------------------------------------- command line

def bench_quality(arguments):
    """Whole runs of both scripts; see quality.compare_seeds."""
    quality.compare_seeds(read_settings(arguments.words, adapters=True), arguments)


def main(words):
    """Runs one benchmark and writes its figures."""
    arguments = command_line(words)
    os.makedirs(arguments.results, exist_ok=True)
    benches = {'pair': bench_pair, 'gemm': bench_gemm, 'lora': bench_lora, 'quality': bench_quality,
               'sample': peers.bench_sample, 'data': peers.bench_data}
    benches[arguments.command](arguments)


if __name__ == '__main__':
    main(sys.argv[1:])
