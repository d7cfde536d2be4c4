"""Benchmarks. The first four compare FP8 with bf16 in the same run: ratios matter, machines are noisy.

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

from configurator import MachineError, Parser, SettingError, at_least, configure, one_line_errors

HERE = os.path.dirname(os.path.abspath(__file__))


def arguments_of(words):
    """Return the command line: `command`, its own arguments, and `words`, those of train_fp8.py, which are
    checked. Raises SettingError."""
    parser = Parser(__doc__)
    some = {'help': "commas between; '' = as the settings say"}

    def add(name, what, backends=None, recipes=None):
        command = parser.add_command(name, what)
        command.add('--results', 'runs/bench', help='folder of JSONs and pictures, none is overwritten')
        if backends is not None:
            command.add('--backends', backends, **some)
            command.add('--recipes', recipes, **some)
        return command

    def counts(command, **defaults):
        for name, (default, what) in defaults.items():
            low = 0 if name == 'hellaswag_items' else 1
            command.add(f'--{name}', default, type=at_least(low), help=what)

    pair = add('pair', 'training steps, bf16 and FP8 in turn: a row for each backend and recipe', '', '')
    counts(pair, rounds=(5, 'their median is reported'), steps=(10, 'timed optimizer steps of each'),
           warmup=(3, 'steps before them'))
    gemm = add('gemm', 'each shape of linear in a model, bf16 and FP8 in turn', 'native', 'all')
    counts(gemm, repeats=(10, 'their median is reported'), iterations=(20, 'calls a repeat'))
    lora = add('lora', 'training steps by four models: both precisions, with adapters and without')
    lora.add('--ranks', '0,8,16,32', help='a row for each; 0: full training')
    counts(lora, rounds=(5, 'their median is reported'), warmup=(2, 'steps before them'))
    quality = add('quality', 'whole runs of train.py and train_fp8.py; exit code 0: FP8 is as good (PASS, '
                  'WARN), 1: FAIL, 4: the seeds do not tell', '', '')
    quality.add('--out', '', help="folder that keeps the runs; '' = runs/quality-<config>")
    counts(quality, steps=(300, 'of each run'), seeds=(3, 'runs of each script, from seed 1337 on'),
           hellaswag_items=(1000, 'the first ones; 0 leaves HellaSwag out'))
    sample = add('sample', 'tokens/s of one continuation alone and of several in one batch')
    sample.add('--preset', 'gpt2', help="a name of model.py's PRESETS, random weights")
    counts(sample, new_tokens=(500, 'of one continuation'), samples=(10, 'continuations together'),
           sample_tokens=(200, 'of each of these'))
    data = add('data', 'tokens/s of tokenizing parquet files, and of loading batches of their windows')
    data.add('--data_files', required=True, help='parquet files, a glob')
    counts(data, repeats=(3, 'their median is reported'), batch_size=(64, 'sequences of a batch'),
           block_size=(1024, 'tokens of a sequence'))
    asked, asked.words = parser.parse_known_args(words)
    if asked.command not in ('sample', 'data'):
        configure(os.path.join(HERE, 'train_fp8.py'), asked.words, nearby=vars(asked))
    elif asked.words:
        parser.error(f'what is {asked.words[0]!r}?')
    return asked


if __name__ == '__main__':
    one_line_errors()
    arguments_of(sys.argv[1:])

# Imported only now: --help and a mistyped setting are answered without waiting for torch.
import contextlib
import dataclasses
import functools
import statistics
import tempfile
import time

import numpy as np
import torch

from fp8gpt import data, fp8, lora, measure, optim, quality, shards
from fp8gpt.bench_rows import (
    ROOT, build, choose, fill, finish, matrix, read_settings, report, speed_verdict, unused, ways)
from fp8gpt.runlog import gpu_of, peak_flops
from model import GPT, PRESETS, Linear, generate

PRECISIONS = ('bf16', 'FP8')
WAIT_RATE = 600_000     # tokens/s of a consumer whose waiting for data is measured


# --------------------------------------------------------------------------------------------- training steps

class Pair:
    """One model that trains in either precision, its FP8 linears paused for bf16."""

    def __init__(self, model, settled, settings):
        config = settings.config
        self.model, self.device = model, settings.device
        weights = model.weights().items()
        self.initial = {name: p.detach().to('cpu', copy=True) for name, p in weights}
        betas = 0.9, config['beta2']
        self.optimizer = optim.make_optimizer(
            model, betas, config['weight_decay'], config['optimizer'], settings.run.compiled)
        self.grad_clip = config['grad_clip'] or float('inf')
        self.ways = ways(model, settled)
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


# ------------------------------------------------------------------------------------------ sampling and data

def bench_sample(arguments):
    """Tokens a second of one continuation, and of several in one batch. Raises SettingError for an unknown
    preset."""
    if arguments.preset not in PRESETS:
        raise SettingError(f'no preset is called {arguments.preset!r}; there are {", ".join(PRESETS)}')
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    model, rows = GPT(PRESETS[arguments.preset], param_dtype=torch.bfloat16).to(device), []
    for samples, new_tokens in ((1, arguments.new_tokens), (arguments.samples, arguments.sample_tokens)):
        start = torch.zeros((samples, 1), dtype=torch.long, device=device)

        def run(tokens=new_tokens):
            list(generate(model, start, tokens, temperature=0.8, top_k=200))

        run(3)
        took = statistics.median(measure.seconds(run) for _ in range(3))
        rate = samples * new_tokens / took
        rows.append({'samples': samples, 'new tokens each': new_tokens, 'tokens/s': rate})
    report(unused(arguments.results, 'sample'), rows, arguments.results, model=arguments.preset)


def tokenizing(files, repeats):
    """(tokens/s of prepare_data.py as a whole process that reads and writes, the median; its library)."""
    rates = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as out:
            start = time.perf_counter()
            said = finish(['prepare_data.py', 'bench', '--data_files', files, '--data_dir', out], cwd=ROOT)
            took = time.perf_counter() - start
            splits = shards.read_meta(os.path.join(out, 'bench-gpt2'))['splits']
        rates.append(sum(split['tokens'] for split in splits.values()) / took)
    return statistics.median(rates), said.partition('tokenized by ')[2].splitlines()[0]


def loading(batch_size, block_size, tokens=50_000_000, batches=100):
    """(tokens/s of the loader without workers on a shard of random tokens; the share of a step for which a
    consumer of WAIT_RATE waits for one worker)."""
    with tempfile.TemporaryDirectory() as out:
        writer = shards.ShardWriter(out, 'train', 10**9, 50257)
        writer.add(np.random.default_rng(0).integers(0, 50257, tokens, dtype=np.uint16))
        writer.finish_shard()
        train = data.TokenData(out, 'train', block_size)
        loader = data.Loader(train, batch_size, 0, num_workers=0)
        took = statistics.median(measure.seconds(loader.next, batches) for _ in range(5))
        one_worker = data.Loader(train, batch_size, 0, num_workers=1)
        wait = waiting_share(one_worker, batch_size * block_size / WAIT_RATE)
    return batch_size * block_size / took, wait


def waiting_share(loader, step, steps=50):
    """The share of `steps` steps of `step` seconds that next() blocks."""
    loader.next()
    loader.waited = 0.0
    for _ in range(steps):
        loader.next()
        time.sleep(step)  # what a GPU would take
    return loader.waited / (steps * step)


def bench_data(arguments):
    """Tokens a second of tokenizing parquet files that have a text column, and of loading."""
    B, T, folder = arguments.batch_size, arguments.block_size, arguments.results
    rate, library = tokenizing(arguments.data_files, arguments.repeats)
    loaded, wait = loading(B, T)
    rows = [{'what': 'tokenizing, reading and writing included', 'tokens/s': rate},
            {'what': f'loading batches of {B} x {T}', 'tokens/s': loaded}]
    facts = {'data_wait_share_at_600k_tokens_per_second': wait, 'cores': os.cpu_count()}
    name = 'data-gigatoken' if library.startswith('gigatoken') else 'data-tiktoken'
    report(unused(folder, name), rows, folder, tokenized_by=library, **facts)


# ----------------------------------------------------------------------------------------------- command line

def bench_quality(arguments):
    """Whole runs of both scripts; see quality.compare_seeds."""
    quality.compare_seeds(read_settings(arguments.words, adapters=True), arguments)


def main(words):
    """Runs one benchmark and writes its figures."""
    arguments = arguments_of(words)
    os.makedirs(arguments.results, exist_ok=True)
    benches = {'pair': bench_pair, 'gemm': bench_gemm, 'lora': bench_lora, 'quality': bench_quality,
               'sample': bench_sample, 'data': bench_data}
    benches[arguments.command](arguments)


if __name__ == '__main__':
    main(sys.argv[1:])
