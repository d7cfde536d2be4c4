"""Benchmarks. The first four compare FP8 with bf16 in the same run: ratios matter, machines are noisy.

$ python bench.py pair config/gpt2_fp8.py --recipes=tensorwise,delayed  # training steps, FP8 and bf16 in turn
$ python bench.py gemm config/gpt2_fp8.py                               # each shape of linear in that model
$ python bench.py lora config/gpt2_fp8.py --lora_targets=all            # training steps with adapters
$ python bench.py quality config/quickstart.py --steps=300 --seeds=3    # losses of whole runs
$ python bench.py sample                                                # sampling
$ python bench.py data --data_files='texts/*.parquet'                   # tokenizing and loading
$ python bench.py tables                                                # the pages' tables, from results/

The first four take train_fp8.py's config files and flags too. Each prints a table and writes a JSON with
hardware, versions and commit into runs/bench, which git ignores. Exit code 1: a verdict was FAIL.
"""
import os
import sys

from configurator import (
    CONFIG_FILES, MachineError, Parser, SettingError, UserError, at_least, configure, one_line_errors,
    read_script)

ROOT = os.path.dirname(os.path.abspath(__file__))


def bench_arguments(words):
    """Return the command line: `command`, its own arguments, and `words`, those of train_fp8.py, which are
    checked. Raises SettingError."""
    parser = Parser(__doc__)

    def add(name, what, *flags, matrix=None):
        command = parser.add_command(name, what)
        command.add('--results', 'runs/bench', help='folder of JSONs, none is overwritten')
        for flag, default in zip(('--backends', '--recipes'), matrix or ()):
            command.add(flag, default, help="commas between; '' = as the settings say")
        for flag, default, meaning in flags:
            command.add(flag, default, type=at_least(1), help=meaning)
        return command

    rounds, warmup = ('--rounds', 5, 'their median is reported'), ('--warmup', 3, 'steps before those')
    steps = '--steps', 10, 'timed in each round'
    add('pair', 'training steps, bf16 and FP8 in turn: a row for each backend and recipe',
        rounds, warmup, steps, matrix=('', ''))
    add('gemm', 'each shape of linear in a model, bf16 and FP8 in turn',
        rounds, warmup, steps, matrix=('native', 'all'))
    adapters = add('lora', 'training steps with adapters, bf16 and FP8 in turn', rounds, warmup, steps)
    adapters.add('--ranks', '0,8,16,32', help='a row for each; 0: full training')
    whole = add('quality', 'whole runs of train.py and train_fp8.py; exit code 0: FP8 is as good (PASS), '
                '1: FAIL, 4: more seeds would decide (WARN, INCONCLUSIVE)',
                ('--steps', 300, 'of each run'), ('--seeds', 3, 'runs of each script, from seed 1337 on'),
                matrix=('', ''))
    whole.add('--out', '', help="folder that keeps the runs; '' = runs/quality-<config>")
    sample = add('sample', 'tokens/s of one continuation alone and of ten in one batch',
                 ('--new_tokens', 200, 'of each continuation'))
    sample.add('--preset', 'gpt2', help="a name of model.py's PRESETS, random weights")
    loading = add('data', 'tokens/s of tokenizing parquet files, and of loading batches', rounds)
    loading.add('--data_files', required=True, help='parquet files, a glob')
    add('tables', 'write the tables of results on README.md and docs/*.md anew')
    asked, asked.words = parser.parse_known_args(words)
    if asked.command in ('pair', 'gemm', 'lora', 'quality'):
        configure(os.path.join(ROOT, 'train_fp8.py'), asked.words, nearby=vars(asked))
    elif asked.words:
        parser.error(f'what is {asked.words[0]!r}?')
    return asked


if __name__ == '__main__':
    one_line_errors()
    bench_arguments(sys.argv[1:])

# Imported only now: --help and a mistyped setting are answered without waiting for torch.
import contextlib
import dataclasses
import functools
import gc
import glob
import hashlib
import itertools
import json
import math
import re
import statistics
import subprocess
import tempfile
import time

import numpy as np
import torch

from fp8gpt import data, distributed, files, fp8, lora, optim, runlog, shards
from fp8gpt.fp8 import health
from fp8gpt.run import Length, Run, choose_precision
from model import GPT, PRESETS, Linear, Penalty, generate

PRECISIONS = ('bf16', 'FP8')


# ----------------------------------------------------------------------------------------- rows, and settings

def cell_text(value):
    """Return a table's cell: four digits of a number, `least .. most` of a list, a dash for None."""
    if value is None:
        return '-'
    if isinstance(value, list):
        return ' .. '.join(map(cell_text, value))
    if isinstance(value, float):
        return f'{value:,.4g}' if abs(value) < 1e4 else f'{value:,.0f}'
    return str(value)


def markdown(rows, heading=True):
    """Return rows, dicts, as a Markdown table. A row may lack a column."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ['---'] * len(columns)] if heading else []
    lines += [[cell_text(row.get(column)) for column in columns] for row in rows]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def fill(arguments, run, cells, **facts):
    """Print each row as soon as it is measured and write all to a new JSON, with hardware, versions and
    commit; return them. cells: (columns, work) pairs; work() returns more columns. The verdict of a cell that
    cannot run is the reason, and the next cell follows."""
    name = f'{arguments.command}-{run.config.stem or "flags"}' if run else arguments.command
    path, number = f'{arguments.results}/{name}.json', 2
    while os.path.exists(path):
        path, number = f'{arguments.results}/{name}-{number}.json', number + 1
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    found = {'device': runlog.device_name(device), 'versions': runlog.versions(),
             'words': arguments.words, **facts, 'rows': []}
    for columns, work in cells:
        try:
            columns |= work()
        except (UserError, fp8.OptionError, fp8.DeviceError, RuntimeError) as error:  # OutOfMemoryError, too
            columns['verdict'] = (str(error).splitlines() or [type(error).__name__])[0]
        rows = found['rows']
        print(markdown([columns], heading=not rows or columns.keys() != rows[-1].keys()), flush=True)
        rows.append(columns)
        files.write_json(path, found)
        gc.collect()
        torch.compiler.reset()
        torch.cuda.empty_cache()
    print(path)
    return found['rows']


def read_run(words, adapters=False):
    """Return the run.Run of train_fp8.py's config files and flags, whose dataset may be missing. Raises
    SettingError for what cannot be compared. adapters: whether there may be some."""
    config = configure(os.path.join(ROOT, 'train_fp8.py'), words)
    run = Run.of(config, distributed.init(config['device']).device, data_required=False)
    if run.config['lora_rank'] and not adapters:
        raise SettingError('lora_rank: `python bench.py lora` times adapters, at several ranks')
    of_checkpoint = run.config['init_from'].endswith('.pt')     # a Hugging Face model's weights are not read
    if run.config['dtype'] != 'bf16' or not run.batch_size or of_checkpoint or run.resumed:
        raise SettingError('FP8 against bf16 wants dtype=bf16, a batch_size other than 0, and no checkpoint')
    return run


def settled_as(words):
    """Return (run.Run, run.Precision) of these words, as in train_fp8.py. Raises MachineError where the
    run would train in bf16."""
    run = read_run(words, adapters=True)
    settled = choose_precision(run)
    if not settled.choice.on:
        raise MachineError(f'bf16 only: {settled.choice.reason}')
    return run, settled


def matrix(arguments):
    """Yield ({'backend', 'recipe'} as far as they are named, the words with these) for each combination."""
    recipes = fp8.RECIPES if arguments.recipes == 'all' else arguments.recipes.split(',')
    for orders in itertools.product(arguments.backends.split(','), recipes):
        asked = {name: value for name, value in zip(('backend', 'recipe'), orders) if value}
        yield asked, [*arguments.words, *(f'--fp8_{name}={value}' for name, value in asked.items())]


def calls_of(module, settled):
    """Return {'bf16': call, 'FP8': call} of a GPT or a linear, each compiled where that helps."""
    if not settled.bf16_compiled:
        return {'bf16': module, 'FP8': module}
    module.compile(dynamic=False)

    def eager(*inputs, **options):
        with torch.compiler.set_stance('force_eager'):
            return module(*inputs, **options)
    return {'bf16': module, 'FP8': module if settled.compiled else eager}


def speed_verdict(ratio):
    """Return the verdict on bf16's time over FP8's."""
    return f'{"FP8" if round(ratio, 2) >= 1 else "SLOWER"} x{ratio:.2f}'


# ------------------------------------------------------------------------------------------ pair, lora: steps

class Trainer:
    """A GPT with what an optimizer step of it takes, as in the training scripts."""

    def __init__(self, run, settled, choice):
        config, spec = run.config, lora.Spec.of(run.config)
        self.model = GPT(
            run.window_config,
            linear=fp8.linear_factory(choice, Linear),
            seed=config['seed'],
            checkpoint_every=run.checkpoint_every,
            checkpoint=fp8.checkpointer(choice),
            param_dtype=run.param_dtype,
            loss_chunks=config['loss_chunks'],
        ).to(run.device)
        if config['penalty_weight']:
            self.model.penalty = Penalty(config['penalty_weight'], run.device)
        if spec.rank:
            lora.add(self.model, spec)
        weights = self.model.weights().items()
        self.initial = {name: p.detach().to('cpu', copy=True) for name, p in weights}
        betas = 0.9, config['beta2']
        self.optimizer = optim.make_optimizer(
            self.model, betas, config['weight_decay'], config['optimizer'], run.compiled)
        self.grad_clip = config['grad_clip'] or math.inf
        self.calls = calls_of(self.model, settled)
        self.state = fp8.State(self.model, choice)
        self.skips = torch.zeros(3, device=run.device)

    def restart(self, precision, step):
        """Take back the initial weights and, in FP8, calibrate on the first step's data."""
        self.model.load_weights(self.initial)
        self.optimizer.state.clear()
        if precision == 'FP8':
            _, n_targets, [(x, y, examples), *_] = step
            self.state.calibrate(
                lambda: self.model(x, y, n_targets=n_targets, examples=examples).backward())
            self.optimizer.zero_grad(set_to_none=True)

    def train(self, precision, steps):
        """Take optimizer steps in a precision; return the last one's loss. steps: see steps_of."""
        with fp8.paused() if precision == 'bf16' else contextlib.nullcontext():
            for lr, n_targets, micro_batches in steps:
                optim.set_rate(self.optimizer, lr)
                step_loss = 0.0
                for number, (x, y, examples) in enumerate(micro_batches):
                    self.state.micro_step(number, len(micro_batches))
                    loss = self.calls[precision](x, y, n_targets=n_targets, examples=examples)
                    loss.backward()
                    step_loss += loss.detach()
                grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)
                optim.step_if_finite(self.optimizer, grad_norm, self.skips)
                self.state.after_step()
                self.optimizer.zero_grad(set_to_none=True)
        return step_loss


def random_data(folder, block_size, vocab_size, tokens):
    """Return the data.TokenData of a shard of random tokens, which is made in the folder."""
    writer = shards.ShardWriter(folder, 'train', 10**9, vocab_size)
    writer.add(np.random.default_rng(0).integers(0, vocab_size, tokens).astype(writer.dtypes['']))
    writer.finish_shard()
    return data.TokenData(folder, 'train', block_size)


def steps_of(run, count):
    """Return (what the data are, [(learning rate, number of targets, [(x, y, examples) of each micro-step])
    of `count` steps])."""
    config, B, T = run.config, run.batch_size, run.window_config.block_size
    source = run.folder or f'random tokens, as {config["dataset"]} is not prepared'
    micro_steps = Length.of(config, 1, tokens_per_epoch=0).micro_steps
    schedule = optim.Schedule(
        count, config['max_lr'], warmup_steps=config['warmup_steps'], lr_schedule='constant')
    steps = []
    with tempfile.TemporaryDirectory() as out:
        train = data.TokenData(run.folder, 'train', T) if run.folder else random_data(
            out, T, run.window_config.vocab_size, (count * micro_steps * B + 1) * T)
        loader = data.Loader(train, B, config['seed'], device=run.device, num_workers=0)
        for step in range(count):
            micro_batches = [loader.next() for _ in range(micro_steps)]
            n_targets = float(sum((y != -1).sum().item() for _, y, _ in micro_batches))
            steps.append((schedule.rate(step), n_targets, micro_batches))
    print(f'data: {source}; a step is {micro_steps} micro-steps of {B} x {T} tokens', flush=True)
    return source, steps


def steps_row(words, steps, arguments):
    """Return a row of `pair` or `lora`: in each round both precisions take all steps, from the same weights,
    and those after the warm-up are timed."""
    run, settled = settled_as(words)
    choice, cuda = settled.choice, run.device.type == 'cuda'
    both = Trainer(run, settled, choice)
    trainers = {'bf16': both, 'FP8': both}
    if run.config['lora_rank']:     # a frozen weight in FP8 has no bf16 weight
        trainers['bf16'] = Trainer(run, settled, fp8.OFF)
    print(fp8.summary(both.model, choice), flush=True)
    warmup, timed = steps[:arguments.warmup], steps[arguments.warmup:]
    seconds, losses, gigabytes = ({precision: [] for precision in PRECISIONS} for _ in range(3))
    for number, precision in itertools.product(range(arguments.rounds), PRECISIONS):
        if number % 2:      # the order swaps: a clock that drifts favours none
            precision = PRECISIONS[1 - PRECISIONS.index(precision)]
        trainer = trainers[precision]
        trainer.restart(precision, steps[0])
        if cuda:
            torch.cuda.reset_peak_memory_stats(run.device)
        trainer.train(precision, warmup)
        took = health.seconds(lambda: losses[precision].append(trainer.train(precision, timed).item()))
        seconds[precision].append(took / len(timed))
        gigabytes[precision].append(torch.cuda.max_memory_allocated(run.device) / 1e9 if cuda else 0)

    row = {'backend': choice.backend, 'recipe': choice.recipe}
    tokens = len(steps[0][2]) * run.batch_size * run.window_config.block_size
    for precision in PRECISIONS:
        rate = 1 / statistics.median(seconds[precision])
        peak = runlog.peak_flops(runlog.gpu_of(run.device), precision.lower())
        row[f'{precision} steps/s'] = rate
        row[f'{precision} tokens/s'] = rate * tokens
        row[f'{precision} MFU'] = peak and rate * tokens * run.flops_per_token / peak
        row[f'{precision} GB'] = statistics.median(gigabytes[precision]) or None
        row[f'{precision} loss'] = losses[precision][-1]
    ratios = [b / f for b, f in zip(*seconds.values())]
    row['loss difference, %'] = 100 * (row['FP8 loss'] / row['bf16 loss'] - 1)
    row['ratio'] = statistics.median(ratios)
    row['least .. most'] = [min(ratios), max(ratios)]
    row['verdict'] = speed_verdict(row['ratio'])
    return row


def bench_steps(arguments):
    """Time training steps in both precisions: for `pair` a row for each backend and recipe, for `lora` one
    for each rank."""
    lora_ranks = arguments.command == 'lora'
    run = read_run(arguments.words, adapters=lora_ranks)
    source, steps = steps_of(run, arguments.warmup + arguments.steps)
    asked = matrix(arguments) if not lora_ranks else (
        ({'rank': rank}, [*arguments.words, f'--lora_rank={rank}']) for rank in arguments.ranks.split(','))
    cells = ((columns, functools.partial(steps_row, words, steps, arguments)) for columns, words in asked)
    fill(arguments, run, cells, data=source)


# ------------------------------------------------------------------------------------------------------- gemm

def gemm_row(words, shape, arguments):
    """Return a row of `gemm`: a single linear, forward and backward; medians over the rounds. shape: (name,
    in_features, out_features)."""
    run, settled = settled_as(words)
    name, K, N = shape
    linear = fp8.linear_factory(settled.choice, Linear)(K, N, bias=False, name=name).to(run.device)
    for p in linear.parameters():
        torch.nn.init.normal_(p, std=0.02)
    B, T = run.batch_size, run.window_config.block_size
    x, dy = (torch.randn(B, T, width, dtype=torch.bfloat16, device=run.device) for width in (K, N))
    x.requires_grad_()

    def forward_backward(call):
        call(x).backward(dy)
        x.grad = None
        linear.zero_grad(set_to_none=True)

    runs = {precision: functools.partial(forward_backward, call)
            for precision, call in calls_of(linear, settled).items()}
    if linear.bf16_reason:
        del runs['FP8']
    else:
        fp8.State(linear, dataclasses.replace(settled.choice, keep=())).calibrate(runs['FP8'])
    runs['bf16'] = fp8.paused()(runs['bf16'])
    times = health.medians(runs, arguments.rounds, arguments.warmup, arguments.steps)
    row = {}
    for precision, took in times.items():
        row[f'{precision} ms'] = took * 1e3
        row[f'{precision} TFLOP/s'] = 6 * B * T * N * K / took / 1e12
    if linear.bf16_reason:
        return {**row, 'verdict': f'bf16: {linear.bf16_reason}'}
    ratio = times['bf16'] / times['FP8']
    return {**row, 'ratio': ratio, 'verdict': speed_verdict(ratio)}


def bench_gemm(arguments):
    """Time a block's linears and the head in both precisions, a row for each backend and recipe."""
    run = read_run(arguments.words)
    M = run.batch_size * run.window_config.block_size
    *linears, head = run.window_config.linears()
    cells = []
    for name, K, N in (*linears[:len(linears) // run.window_config.n_layer], head):
        for asked, words in matrix(arguments):
            columns = {'linear': name.removeprefix('h.0.'), 'M': M, 'N': N, 'K': K, **asked}
            cells.append((columns, functools.partial(gemm_row, words, (name, K, N), arguments)))
    fill(arguments, run, cells)


# ----------------------------------------------------------------------------------------------- sample, data

def bench_sample(arguments):
    """Time one continuation alone, and ten in one batch. Raises SettingError for an unknown preset."""
    if arguments.preset not in PRESETS:
        raise SettingError(f'no preset is called {arguments.preset!r}; there are {", ".join(PRESETS)}')
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    model = GPT(PRESETS[arguments.preset], param_dtype=torch.bfloat16).to(device)

    def row(samples):
        start = torch.zeros((samples, 1), dtype=torch.long, device=device)

        def run():
            list(generate(model, start, arguments.new_tokens, temperature=0.8, top_k=200))
        took = health.medians({'': run}, rounds=3, warmup=1)['']
        return {'tokens/s': samples * arguments.new_tokens / took}

    cells = [({'samples': samples, 'new tokens each': arguments.new_tokens}, functools.partial(row, samples))
             for samples in (1, 10)]
    fill(arguments, None, cells, model=arguments.preset)


def tokenizing(arguments):
    """Return a row: prepare_data.py as a whole process that reads and writes."""
    rates = []
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as out:
            start = time.perf_counter()
            words = f'--data_files={arguments.data_files}', f'--data_dir={out}'
            said = finish([os.path.join(ROOT, 'prepare_data.py'), 'bench', *words])
            took = time.perf_counter() - start
            splits = shards.read_meta(os.path.join(out, 'bench-gpt2'))['splits']
        rates.append(sum(split['tokens'] for split in splits.values()) / took)
    library = said.partition('tokenized by ')[2].splitlines()[0]
    return {'tokens/s': statistics.median(rates), 'tokenized by': library}


def loading(arguments, B=64, T=1024):
    """Return a row: the loader without workers on a shard of random tokens, 100 batches at a time."""
    with tempfile.TemporaryDirectory() as out:
        loader = data.Loader(random_data(out, T, 50257, 20_000_000), B, 0, num_workers=0)
        took = health.medians({'': loader.next}, arguments.rounds, times=100)['']
    return {'tokens/s': B * T / took}


def bench_data(arguments):
    """Time tokenizing of parquet files that have a text column, and loading."""
    cells = [({'what': 'tokenizing, reading and writing included'}, functools.partial(tokenizing, arguments)),
             ({'what': 'loading batches of 64 x 1024'}, functools.partial(loading, arguments))]
    fill(arguments, None, cells, cores=os.cpu_count())


# ---------------------------------------------------------------------------------------------------- quality

SCRIPTS = {'bf16': 'train.py', 'FP8': 'train_fp8.py'}
PASSES, WARNS = 0.5, 2      # % that FP8's validation loss must be shown not to be worse by
# Student's t, two-sided 95%, for 1, 2, ... degrees of freedom; t95 has the others
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


class Undecided(UserError):
    """What these seeds do not show."""
    exit_code = 4


def t95(freedom):
    """Return Student's t, two-sided 95%; beyond the table by Fisher's series in 1 / freedom."""
    if freedom <= len(T95):
        return T95[freedom - 1]
    return 1.95996 + 2.37227 / freedom + 2.82250 / freedom**2 + 2.55585 / freedom**3


def half_interval(deviation, n):
    """Return half the 95% interval of the mean of n normal values whose standard deviation is estimated."""
    return t95(n - 1) * deviation / n**0.5


def seeds_to_decide(deviation):
    """Return how many seeds make an FP8 that is as good as bf16 pass four times of five, for gaps of this
    standard deviation in %: mean and half interval together take 1.96 + 0.84 standard errors, 1.43 half
    intervals."""
    n = max(2, int((2.8 * deviation / PASSES)**2))
    while 1.43 * half_interval(deviation, n) > PASSES:
        n += 1
    return n


def compare(bf16, eight):
    """Return (the mean over seeds of FP8 - bf16 in % of bf16, its 95% interval by Student's t), from a value
    per seed in each precision. The interval is None with one seed."""
    gaps = [100 * (f / b - 1) for b, f in zip(bf16, eight)]
    gap = statistics.fmean(gaps)
    if len(gaps) == 1 or not math.isfinite(gap):
        return gap, None
    noise = half_interval(statistics.stdev(gaps), len(gaps))
    return gap, [gap - noise, gap + noise]


def loss_verdict(gap, interval, seeds):
    """Return the verdict on a compared validation loss. PASS, WARN: all of the interval is under their limit,
    which an FP8 that is worse by the limit passes once in 40 times. FAIL: all of it is over PASS's limit."""
    if not math.isfinite(gap):
        return 'FAIL'
    if interval is None:
        return 'INCONCLUSIVE, one seed'
    low, high = interval
    if high < PASSES:
        return 'PASS'
    if low > PASSES and high >= WARNS:
        return 'FAIL'
    enough = max(seeds + 1, seeds_to_decide((high - low) / 2 / half_interval(1, seeds)))
    word = 'WARN, not more than 2% worse' if high < WARNS else 'INCONCLUSIVE'
    return f'{word}, {enough} seeds would decide'


def finish(words):
    """Run `python words...`; return what it printed. Raises MachineError with its last line of stderr."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ['in silence']
        raise MachineError(f'{os.path.basename(words[0])} failed: {lines[-1].removeprefix("error: ")}')
    return done.stdout


def trained(script, words, folder, steps):
    """Return the plot.Run of a finished run under these words: the one in the folder where settings, code,
    data, versions and GPU are the same, else a new one."""
    import plot
    path, words = os.path.join(ROOT, script), [*words, f'--checkpoint_dir={folder}', '--overwrite']
    config, sources = configure(path, words), hashlib.sha256()
    for source in sorted(glob.glob(f'{ROOT}/*.py') + glob.glob(f'{ROOT}/fp8gpt/**/*.py', recursive=True)):
        with open(source, 'rb') as file:
            sources.update(file.read())
    where = (config[name] for name in ('data_dir', 'dataset', 'tokenizer', 'split_name'))
    meta = files.read_json(os.path.join(shards.dataset_dir(*where), 'meta.json'))
    device = runlog.device_name(distributed.init(config['device']).device)
    made_of = [dict(config), sources.hexdigest(), meta, device, torch.__version__]
    mark = os.path.join(folder, 'complete.json')
    earlier = files.read_json(mark).get('made_of') == made_of
    if not earlier:
        os.makedirs(folder, exist_ok=True)
        files.write_json(mark, {})
        finish([path, *words])
    run = plot.read_run(folder)
    if steps not in run.val:
        raise MachineError(f'{folder} was stopped before step {steps}; the same command goes on')
    files.write_json(mark, {'made_of': made_of})
    print(f'{folder}: validation loss {run.val[steps]:.4f}{", an earlier run" * earlier}', flush=True)
    return run


def train_seeds(run, words, asked, arguments):
    """Return {'bf16': [the plot.Run of each seed], 'FP8': the same}. asked: backend and recipe by name."""
    steps = arguments.steps
    weaker = {'eval_freq': max(1, steps // 10), 'log_freq': max(1, steps // 100), 'sample_freq': 0,
              'checkpoint_freq': steps, 'keep_checkpoints': 1}
    limits = {'max_steps': steps, 'max_tokens': 0, 'num_epochs': 0, 'max_hours': 0}
    orders = {f'fp8_{name}': value for name, value in asked.items()}
    flags = {**weaker, **run.config.layers[1], **orders, **limits}      # layers[1]: the command line's
    configs = [word for word in words if word.endswith(CONFIG_FILES)]
    out = arguments.out or f'runs/quality-{run.config.stem or "flags"}'
    labels = {'bf16': 'bf16', 'FP8': '-'.join(asked.values()) or 'fp8'}
    runs = {precision: [] for precision in PRECISIONS}
    for seed, precision in itertools.product(range(1337, 1337 + arguments.seeds), PRECISIONS):
        script = SCRIPTS[precision]
        known = read_script(os.path.join(ROOT, script)).settings
        own = [f'--{name}={value}' for name, value in (flags | {'seed': seed}).items() if name in known]
        folder = os.path.join(out, f'{labels[precision]}-{seed}')
        runs[precision].append(trained(script, [*configs, *own], folder, steps))
    return runs


def quality_row(run, words, asked, arguments):
    """Train in both precisions; return the row that compares them. Validation loss decides."""
    runs = train_seeds(run, words, asked, arguments)

    def each(value):
        return [[value(one) for one in runs[precision]] for precision in PRECISIONS]

    def last_tenth(one):
        losses = list(one.train.values())
        return statistics.fmean(losses[-max(1, len(losses) // 10):])

    losses = each(lambda one: one.val[arguments.steps])
    gap, interval = compare(*losses)
    row = {'seeds': arguments.seeds}
    row |= {f'{precision} validation loss': statistics.fmean(of) for precision, of in zip(PRECISIONS, losses)}
    row |= {'gap, %': gap, '95%': interval, 'training loss gap, %': compare(*each(last_tenth))[0]}
    if all(one.hellaswag for one in runs['bf16'] + runs['FP8']):
        bf16, eight = map(statistics.fmean, each(lambda one: one.hellaswag[arguments.steps]))
        row['HellaSwag gap, points'] = 100 * (eight - bf16)
    return {**row, 'verdict': loss_verdict(gap, interval, arguments.seeds)}


def bench_quality(arguments):
    """Compare whole runs, a row for each backend and recipe. Raises MachineError where a verdict is FAIL or a
    run failed, Undecided where one is not PASS."""
    run, cells = read_run(arguments.words, adapters=True), []
    for asked, words in matrix(arguments):
        settled_as(words)       # before hours are spent
        cells.append((asked, functools.partial(quality_row, run, words, asked, arguments)))
    verdicts = [row['verdict'] for row in fill(arguments, run, cells)]
    undecided = [verdict for verdict in verdicts if verdict.startswith(('WARN', 'INCONCLUSIVE'))]
    failed = [verdict for verdict in verdicts if verdict != 'PASS' and verdict not in undecided]
    if failed:
        raise MachineError(failed[0].replace('FAIL', 'FAIL: validation loss in FP8 is worse'))
    if undecided:
        raise Undecided(f'validation loss: {undecided[0]}')


# ----------------------------------------------------------------------------------------------------- tables

MARKED = re.compile(r'(<!-- bench.py tables: (\S+) -->\n)(?:\|.*\n)*')


def with_tables(page):
    """Return a page's text with each marked table written anew. `<!-- bench.py tables: GLOB -->` stands above
    the table of the results that GLOB names."""
    def table(match):
        rows = []
        for path in sorted(glob.glob(os.path.join(ROOT, match[2]))):
            with open(path) as file:
                rows += json.load(file)['rows']
        return f'{match[1]}{markdown(rows)}\n'
    return MARKED.sub(table, page)


def bench_tables(arguments):
    """Write the tables on README.md and docs/*.md anew."""
    for path in [f'{ROOT}/README.md', *glob.glob(f'{ROOT}/docs/*.md')]:
        with open(path, encoding='utf-8') as file:
            page = with_tables(file.read()).encode()
        files.write(path, lambda file, page=page: file.write(page))


def main(words):
    """Run one benchmark and write its figures."""
    arguments = bench_arguments(words)
    os.makedirs(arguments.results, exist_ok=True)
    benches = {'pair': bench_steps, 'gemm': bench_gemm, 'lora': bench_steps, 'quality': bench_quality,
               'sample': bench_sample, 'data': bench_data, 'tables': bench_tables}
    benches[arguments.command](arguments)


if __name__ == '__main__':
    main(sys.argv[1:])
