"""Benchmarks, each against another way of doing the same in the same run; ratios matter, machines are noisy.

$ python bench.py pair config/gpt2_fp8.py --recipes=tensorwise,delayed   # training steps, FP8 and bf16 in turn
$ python bench.py gemm config/gpt2_fp8.py                                # each shape of linear in that model, FP8 and bf16 in turn
$ python bench.py quality config/quickstart.py --steps=300 --seeds=3     # losses and HellaSwag of whole runs, FP8 against bf16
$ python bench.py sample                                                 # tokens/s of sampling, against nanoGPT's way
$ python bench.py data --data_files='texts/*.parquet'                    # tokenizing and loading, against build-nanogpt's and nanoGPT's ways

The first three take train_fp8.py's config files and flags too. Each prints a table, writes results/<name>.json with
hardware, versions and commit, and ends with that JSON on one line. Exit code 1: a verdict was FAIL.
"""
import argparse
import contextlib
import dataclasses
import functools
import gc
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import types

import numpy as np
import torch

import checkpoint
import data
import fp8
import hellaswag
import measure
import optim
import parallel
import plan
import runlog
from configurator import MachineError, SettingError, UserError, configure, one_line_errors, read_script
from measure import seconds
from model import GPT, PRESETS, GPTConfig, KVCache, Linear, checkpoint_every
from tokenizer import get_tokenizer

HERE = os.path.dirname(os.path.abspath(__file__))
PRECISIONS = ('bf16', 'FP8')


def save(name, rows, folder, **facts):
    """Writes rows (dicts) and facts to <folder>/<name>.json with hardware, versions and commit; returns all that."""
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    packages = {d.name: d.version for d in importlib.metadata.distributions() if d.name in ('transformer_engine', 'torchao')}
    result = {'bench': name, 'device': runlog.device_name(device), 'versions': runlog.versions() | packages, **facts, 'rows': rows}
    data.write_json(os.path.join(folder, f'{name}.json'), result)
    return result


def report(name, rows, folder, **facts):
    """Prints rows as a Markdown table, saves them, ends with the saved JSON on one line. A row may lack a column."""
    number = lambda value: f'{value:,.4g}' if abs(value) < 1e4 else f'{value:,.0f}'
    text = lambda value: ' .. '.join(map(text, value)) if isinstance(value, list) else number(value) if isinstance(value, float) else str(value)
    result, columns = save(name, rows, folder, **facts), list(dict.fromkeys(key for row in rows for key in row))
    print('|', ' | '.join(columns), '|\n|', ' | '.join('---' for _ in columns), '|')
    for row in rows:
        print('|', ' | '.join(text(row[column]) if row.get(column) is not None else '-' for column in columns), '|')
    print(json.dumps(result))


def finish(words, **kwargs):
    """Runs `python words...`; returns what it printed. Raises RuntimeError with its last line where it fails."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, **kwargs)
    if done.returncode:
        raise MachineError(f'{os.path.basename(words[0])} failed: {(done.stderr.strip().splitlines() or ["in silence"])[-1].removeprefix("error: ")}')
    return done.stdout


# ----------------------------------------------------------------------------------------- bf16 and FP8 in turn

def read_settings(words):
    """What train_fp8.py's config files and flags mean here: `words` (they), `files` and `stem` (config files and their name),
    `config`, `model` (GPTConfig), `device`, `compiling`, `folder` of the dataset (None where it is not prepared), `tokens` of a
    micro-batch. Raises ValueError for settings that cannot be timed."""
    config, model = plan.read(words)
    files = [word.removeprefix('--config=') for word in words if word.endswith(('.py', '.yaml', '.yml'))]
    if config['dtype'] != 'bf16' or not config['batch_size'] or config['init_from'] not in ('scratch', *PRESETS):
        raise SettingError('FP8 against bf16 wants dtype=bf16, a batch_size other than 0, and init_from scratch or a preset')
    folder = data.dataset_dir(config['data_dir'], config['dataset'], config['tokenizer'])
    device, stem = parallel.init(config['device']).device, os.path.splitext(os.path.basename([*files, 'flags'][0]))[0]
    return types.SimpleNamespace(words=words, files=files, stem=stem, config=config, model=model, device=device,
                                 folder=folder if os.path.isdir(folder) else None,
                                 compiling=config['compile'] == 'on' or config['compile'] == 'auto' and device.type == 'cuda',
                                 tokens=config['batch_size'] * model.block_size)


def choose(settings, words):
    """fp8.choose under these words, as train_fp8.py calls it. Raises RuntimeError also where a request would end in bf16."""
    config = configure(os.path.join(HERE, 'train_fp8.py'), words)
    keep = config['fp8_keep']
    choice = fp8.choose(config['use_fp8'], config['fp8_backend'], settings.device, torch.bfloat16, settings.tokens, settings.compiling,
                        config['fp8_recipe'], config['fp8_format'], config['fp8_margin'], config['fp8_interval'], config['fp8_amax_history'],
                        '' if keep == 'auto' else keep, plan.linears(settings.model))
    if keep == 'auto' and choice.on:
        compiling = fp8.compiles(choice, settings.compiling, 'auto')[0]
        choice = measure.auto_keep(settings.model, choice, config['batch_size'], settings.device, compiling, settings.compiling)
    if not choice.on:
        raise MachineError(f'bf16 only: {choice.reason}')
    return choice


def matrix(arguments, words):
    """({'backend', 'recipe'}, words that order them) of each cell; one that is not named is left to the settings."""
    for pair in itertools.product(arguments.backends.split(','), arguments.recipes.split(',')):
        asked = {name: value for name, value in zip(('backend', 'recipe'), pair) if value}
        yield asked, [*words, *(f'--fp8_{name}={value}' for name, value in asked.items())]


def fill(name, settings, cells, folder, **facts):
    """The rows of cells [(columns, work() -> more columns)], saved after each and reported at the end. A cell that cannot
    run has the reason for its verdict, and the next one follows."""
    rows, name, facts = [], f'{name}-{settings.stem}', {'device': runlog.device_name(settings.device), 'words': settings.words, **facts}
    for columns, work in cells:
        try:
            columns |= work()
        except (UserError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
            columns['verdict'] = (str(error).splitlines() or [type(error).__name__])[0]
        rows.append(columns)
        save(name, rows, folder, **facts)
        gc.collect()
        torch.compiler.reset()
        torch.cuda.empty_cache()
    report(name, rows, folder, **facts)
    return rows


def ways(module, choice, compiling):
    """({'bf16': module, 'FP8': module}, compiled where that helps; fp8.State)."""
    compiled, state = torch.compile(module) if compiling else module, fp8.State(module, choice)
    return {'bf16': compiled, 'FP8': compiled if fp8.compiles(choice, compiling, 'auto')[0] else module}, state


def in_turn(rounds):
    """(round, precision, context in which FP8 modules compute in it); the order swaps, so that a drifting clock favours none."""
    for number in range(rounds):
        for precision in PRECISIONS[::-1] if number % 2 else PRECISIONS:
            yield number, precision, fp8.paused() if precision == 'bf16' else contextlib.nullcontext()


def speed_verdict(ratio, keep='', spread=(1, 1)):
    """ratio: bf16's time over FP8's; spread: its least and most. fp8_keep=auto promises at most 1.02 of bf16's time."""
    doubt, promise = ', rounds disagree' * (spread[0] < 1 < spread[1]), '' if keep != 'auto' else ', PASS' if 1 / ratio <= 1.02 else ', FAIL'
    return f'{"FP8" if round(ratio, 2) >= 1 else "SLOWER"} x{ratio:.2f}{doubt}{promise}'


def optimizer_steps(model, raw_model, optimizer, steps, grad_clip, state):
    """What the loop does, and nothing around it. steps: [(learning rate, [(x, y) of each micro-step])]. Returns the last
    step's training loss, a 0-dim tensor."""
    skips = torch.zeros(3, device=steps[0][1][0][0].device)
    for lr, micro_batches in steps:
        for group in optimizer.param_groups:
            group['lr'] = lr
        n_targets, step_loss = float(sum(y.numel() for _, y in micro_batches)), 0.0
        for number, (x, y) in enumerate(micro_batches):
            state.micro_step(number, len(micro_batches))
            loss = model(x, y, n_targets=n_targets)
            loss.backward()
            step_loss += loss.detach()
        grad_norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip or float('inf'))
        optim.step_if_finite(optimizer, grad_norm, skips)
        state.after_step()
        optimizer.zero_grad(set_to_none=True)
    return step_loss


def pair_cell(settings, words, batches, arguments, found):
    """One row of `pair`: one model, its FP8 linears paused for bf16, from the same weights on the same batches each time.
    found: a dict that gets {precision: {figure: [of each round]}}."""
    config, device, cuda = settings.config, settings.device, settings.device.type == 'cuda'
    choice = choose(settings, words)
    raw_model = GPT(settings.model, fp8.linear_factory(choice, Linear), torch.bfloat16, config['seed'],
                    checkpoint_every(config['grad_checkpointing'])).to(device)
    raw_model.checkpoint = fp8.checkpointer(choice)
    print(fp8.summary(raw_model, choice), flush=True)
    initial = {name: p.detach().to('cpu', copy=True) for name, p in raw_model.weights().items()}
    optimizer = optim.make_optimizer(raw_model, (config['beta1'], config['beta2']), config['weight_decay'])
    models, state = ways(raw_model, choice, settings.compiling)
    lr = lambda step: optim.learning_rate(step, len(batches), config['max_lr'], 1, config['warmup_steps'], 'constant')
    steps, (x, y), tokens = [(lr(step), batch) for step, batch in enumerate(batches)], batches[0][0], arguments.micro_steps * settings.tokens
    for _, precision, context in in_turn(arguments.rounds):
        raw_model.load_weights(initial)
        optimizer.state.clear()
        if precision == 'FP8':
            state.calibrate(lambda: raw_model(x, y, n_targets=float(tokens)).backward())
            optimizer.zero_grad(set_to_none=True)
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        losses = []
        work = lambda part: losses.append(optimizer_steps(models[precision], raw_model, optimizer, part, config['grad_clip'], state))
        with context:
            work(steps[:arguments.warmup])
            took = seconds(lambda: work(steps[arguments.warmup:])) / arguments.steps
        peak = torch.cuda.max_memory_allocated(device) / 1e9 if cuda else None
        for name, value in (('seconds a step', took), ('loss', losses[-1].item()), ('GB', peak)):
            found.setdefault(precision, {}).setdefault(name, []).append(value)
    row = {'backend': choice.backend, 'recipe': choice.recipe}
    for precision in PRECISIONS:
        rate, peak = 1 / statistics.median(found[precision]['seconds a step']), plan.peak_flops(plan.gpu_of(device), precision.lower())
        row |= {f'{precision} steps/s': rate, f'{precision} tokens/s': rate * tokens,
                f'{precision} MFU': peak and rate * tokens * raw_model.flops_per_token(settings.model.block_size) / peak,
                f'{precision} GB': statistics.median(found[precision]['GB']) if cuda else None}
    ratios, losses = ([b / f for b, f in zip(found['bf16'][name], found['FP8'][name])] for name in ('seconds a step', 'loss'))
    ratio, spread = statistics.median(ratios), [min(ratios), max(ratios)]
    return {**row, 'loss difference, %': 100 * statistics.median(1 / ratio - 1 for ratio in losses), 'ratio': ratio, 'least .. most': spread,
            'verdict': speed_verdict(ratio, config['fp8_keep'], spread)}


def bench_pair(arguments, words):
    """training steps, bf16 and FP8 in turn; also takes train_fp8.py's config files and flags

    --backends=native,te --recipes=tensorwise,delayed: a row for each pair of them, else one as the settings say. A row is the
    median of `rounds`; each does `steps` timed optimizer steps of `micro_steps` micro-batches behind `warmup` ones."""
    settings = read_settings(words)
    B, T, seed, rounds = settings.config['batch_size'], settings.model.block_size, settings.config['seed'], {}
    source, generator = settings.folder or f'random tokens, as {settings.config["dataset"]} is not prepared', torch.Generator().manual_seed(seed)
    batch = lambda: torch.randint(settings.model.vocab_size, (2, B, T), generator=generator).to(settings.device).unbind()
    if settings.folder:
        batch = data.Loader(data.TokenData(source, 'train', T), B, seed, device=settings.device, num_workers=0).next
    batches = [[batch() for _ in range(arguments.micro_steps)] for _ in range(arguments.warmup + arguments.steps)]
    print(f'data: {source}; a step is {arguments.micro_steps} micro-steps of {B} x {T} tokens', flush=True)
    cells = ((asked, functools.partial(pair_cell, settings, cell, batches, arguments, rounds.setdefault(' '.join(asked.values()) or 'as set', {})))
             for asked, cell in matrix(arguments, words))
    rows = fill('pair', settings, cells, arguments.results, data=source, micro_steps=arguments.micro_steps, rounds=rounds)
    return any(row['verdict'].endswith(', FAIL') for row in rows) and 'FAIL: fp8_keep=auto takes more than 1.02 of bf16\'s time'


def gemm_cell(settings, words, name, N, K, bias, arguments):
    """One row of `gemm`: a single linear, forward alone and with backward; medians over the repeats."""
    choice, (B, T) = choose(settings, words), (settings.config['batch_size'], settings.model.block_size)
    linear = fp8.linear_factory(choice, Linear)(K, N, bias=bias, name=name).to(settings.device)
    reason = linear.bf16_reason
    for p in linear.parameters():
        torch.nn.init.normal_(p, std=0.02)
    x, dy = (torch.randn(B, T, n, device=settings.device, dtype=torch.bfloat16, requires_grad=leaf) for n, leaf in ((K, True), (N, False)))
    (calls, state), times, row = ways(linear, dataclasses.replace(choice, keep=()), settings.compiling), {}, {}

    def both(precision):
        calls[precision](x).backward(dy)
        x.grad = None
        linear.zero_grad(set_to_none=True)
    if not reason:
        state.calibrate(lambda: both('FP8'))
    for number, precision, context in in_turn(1 + arguments.repeats):
        if precision == 'bf16' or not reason:
            with context:
                took = seconds(lambda: calls[precision](x), arguments.iterations), seconds(lambda: both(precision), arguments.iterations)
            times.setdefault(precision, []).extend([took] * (number > 0))  # round 0 warms up
    for part, at, flops in (('fwd', 0, 2 * B * T * N * K), ('fwd+bwd', 1, 6 * B * T * N * K)):
        took = {precision: statistics.median(pair[at] for pair in pairs) for precision, pairs in times.items()}
        for precision in took:
            row |= {f'{part} {precision} ms': took[precision] * 1e3, f'{part} {precision} TFLOP/s': flops / took[precision] / 1e12}
        row[f'{part} ratio'] = None if reason else took['bf16'] / took['FP8']
    return {**row, 'verdict': f'bf16: {reason}' if reason else speed_verdict(row['fwd+bwd ratio'])}


def bench_gemm(arguments, words):
    """each distinct shape of linear in a model, bf16 and FP8 in turn; takes train_fp8.py's config files and flags

    A row for each backend and recipe is the median of `repeats` means over `iterations` calls."""
    settings, shapes = read_settings(words), {}
    for name, module in GPT(dataclasses.replace(settings.model, n_layer=1)).named_modules():
        if isinstance(module, Linear):  # the head is a case of its own, whatever its shape
            shapes.setdefault((*module.weight.shape, module.bias is not None, name == 'lm_head'), []).append(name)
    cells = (({'linear': ', '.join(names).replace('h.0.', ''), 'M': settings.tokens, 'N': N, 'K': K, **asked},
              functools.partial(gemm_cell, settings, cell, names[0], N, K, bias, arguments))
             for (N, K, bias, _), names in shapes.items() for asked, cell in matrix(arguments, words))
    fill('gemm', settings, cells, arguments.results)


# --------------------------------------------------------------------------------- whole runs, bf16 against FP8

def trained(script, words, folder, steps):
    """plot.read_run of a finished run under these words: the one in the folder where its settings are the same, else a new one."""
    import plot
    path, mark, words = os.path.join(HERE, script), os.path.join(folder, 'complete.json'), [*words, f'--checkpoint_dir={folder}', '--overwrite']
    settings = dict(configure(path, words))
    if not (earlier := data.read_json(mark) == settings):
        os.makedirs(folder, exist_ok=True)
        data.write_json(mark, {})
        finish([path, *words])
    run = plot.read_run(folder)
    if steps not in run['val']:
        raise MachineError(f'{folder} was stopped before step {steps}; the same command takes over what is finished')
    data.write_json(mark, settings)
    print(f'{folder}: validation loss {run["val"][steps]:.4f}, {run["speed"]:,.0f} tokens/s' + ', an earlier run' * earlier, flush=True)
    return run


def hellaswag_of(run, path, items, device):
    """hellaswag.evaluate of a run's last checkpoint, in bf16."""
    state = checkpoint.load(os.path.join(run['header']['config']['checkpoint_dir'], 'latest.pt'))
    model = GPT(GPTConfig(**state['model_config'])).to(device)
    model.load_weights(state['weights'])
    return hellaswag.evaluate(model, get_tokenizer(state['tokenizer']), path, device, limit=items)


def bench_quality(arguments, words):
    """whole runs of train.py and train_fp8.py with the same config files, flags and seeds

    `seeds` runs of each, from seed 1337, of `steps` steps; unless a flag says otherwise one evaluates ten times, logs a hundred
    times, and neither samples nor saves on the way. `out` (runs/quality-<config>) keeps them, and what is finished there with
    the same settings is not run again. HellaSwag takes its first items; 0 leaves it out. The figures: plot.compare_runs."""
    import plot
    settings, steps, items = read_settings(words), arguments.steps, arguments.hellaswag_items
    choose(settings, words)  # before hours are spent
    name, known, runs = f'quality-{settings.stem}', read_script(os.path.join(HERE, 'train.py'))[0], {p: [] for p in PRECISIONS}
    flags = {'eval_freq': max(1, steps // 10), 'log_freq': max(1, steps // 100), 'sample_freq': 0, 'hellaswag_freq': 0, 'checkpoint_freq': steps,
             'keep_checkpoints': 1, **settings.config.layers[1], 'max_steps': steps, 'max_tokens': 0, 'num_epochs': 0}
    for seed in range(1337, 1337 + arguments.seeds):
        for p, script in (('bf16', 'train.py'), ('FP8', 'train_fp8.py')):
            own = [f'--{key}={value}' for key, value in {**flags, 'seed': seed}.items() if p == 'FP8' or key in known]
            runs[p].append(trained(script, [*settings.files, *own], os.path.join(arguments.out or f'runs/{name}', f'{p.lower()}-{seed}'), steps))
    path, results = os.path.join(settings.config['data_dir'], 'hellaswag', 'hellaswag_val.jsonl'), None
    if items and os.path.exists(path):
        results = {p: [hellaswag_of(run, path, items, settings.device) for run in runs[p]] for p in PRECISIONS}
    else:
        print('HellaSwag is left out: ' + (f'there is no {path}' if items else 'hellaswag_items=0'))
    rows, verdict = plot.compare_runs(runs, results, picture := os.path.join(arguments.results, f'{name}.png'))
    noise = f'{arguments.seeds} seeds in pairs' if arguments.seeds > 1 else 'one seed, so no noise band is known'
    print(f'{verdict} | noise: {noise} | {picture}')
    report(name, rows, arguments.results, verdict=verdict, noise=noise, words=words, device=runlog.device_name(settings.device),
           runs={p: [{**run['header'], 'val': run['val'], 'train': run['train']} for run in runs[p]] for p in PRECISIONS})
    return verdict == 'FAIL' and 'FAIL: a figure is more than 10% worse in FP8 than in bf16'


# ------------------------------------------------------------------------------------------------- sampling

def nanogpt_sample(model, idx, new_tokens, device):
    """nanoGPT's generate: the whole sequence through the model for each token (its head only at the last position)."""
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for _ in range(new_tokens):
            idx = idx[:, -model.config.block_size:]
            logits = model(idx, cache=KVCache(model.config, len(idx), idx.shape[1], model.dtype, device))[:, -1] / 0.8
            logits = logits.masked_fill(logits < logits.topk(200).values[:, -1:], float('-inf'))
            idx = torch.cat([idx, torch.multinomial(logits.softmax(-1), 1, generator=generator)], 1)


def bench_sample(arguments, words):
    """sampling: bf16 weights, a key/value cache and all samples in a batch, against nanoGPT's fp32, no cache, one by one"""
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    theirs, ours = (GPT(PRESETS[arguments.preset], dtype=dtype).to(device) for dtype in (torch.float32, torch.bfloat16))
    for p in ours.parameters():
        p.data = p.data.bfloat16()
    rows = []
    for streams, new_tokens in ((1, arguments.new_tokens), (arguments.samples, arguments.sample_tokens)):
        start = torch.zeros((streams, 1), dtype=torch.long, device=device)
        run_ours = lambda n=new_tokens: list(ours.generate(start, n, temperature=0.8, top_k=200))
        run_ours(3)
        own = seconds(run_ours)
        their_seconds = seconds(lambda: [nanogpt_sample(theirs, start[:1], new_tokens, device) for _ in range(streams)])
        own_seconds = statistics.mean([own, seconds(run_ours)])  # before and after: the machine may have changed meanwhile
        rows.append({'samples': streams, 'new tokens each': new_tokens, 'ours, tokens/s': streams * new_tokens / own_seconds,
                     "nanoGPT's way, tokens/s": streams * new_tokens / their_seconds, 'ratio': their_seconds / own_seconds})
    report('sample', rows, arguments.results, model=arguments.preset)


# ----------------------------------------------------------------------------------------------------- data

def their_encode(row):
    """build-nanogpt's: ids as a list, checked, then as uint16."""
    tokens = np.array([their_encoding.eot_token] + their_encoding.encode_ordinary(row['text']))
    assert (0 <= tokens).all() and (tokens < 2**16).all()
    return tokens.astype(np.uint16)


def fineweb_py(files, out):
    """build-nanogpt's way: the dataset loaded through `datasets`, half of the cores in a pool, chunks of 16, one array a shard."""
    global their_encoding
    import datasets
    import tiktoken
    their_encoding = tiktoken.get_encoding('gpt2')
    rows = datasets.load_dataset('parquet', data_files=files, split='train', cache_dir=os.path.join(out, 'cache'))
    shard, n, count = np.empty(10**8, np.uint16), 0, 0
    with multiprocessing.get_context('fork').Pool(max(1, os.cpu_count() // 2)) as pool:
        for tokens in pool.imap(their_encode, rows, chunksize=16):
            if n + len(tokens) > len(shard):
                np.save(os.path.join(out, f'shard_{count}'), shard)
                n, count = 0, count + 1
            shard[n:n + len(tokens)] = tokens
            n += len(tokens)
    np.save(os.path.join(out, f'shard_{count}'), shard[:n])
    print(n)


def bench_tokenizing(files, repeats):
    """tokens/s of prepare_data.py and of build-nanogpt's way as whole processes, reading and writing included, alternated."""
    times, tokens = {'ours': [], 'theirs': []}, {}
    for _ in range(repeats):
        for who in times:
            out = tempfile.mkdtemp()
            command = {'ours': ['prepare_data.py', 'bench', f'--data_files={files}', f'--data_dir={out}'],
                       'theirs': ['bench.py', 'fineweb_py', files, out]}[who]
            start = time.perf_counter()
            said = finish(command, cwd=HERE)
            times[who].append(time.perf_counter() - start)
            tokens[who] = int(said.split()[-1]) if who == 'theirs' else sum(
                split['tokens'] for split in data.read_meta(os.path.join(out, 'bench-gpt2'))['splits'].values())
            shutil.rmtree(out)
    if tokens['ours'] != tokens['theirs']:
        raise MachineError(f'not the same work: {tokens}')
    return {who: tokens[who] / statistics.median(times[who]) for who in times}


def nanogpt_batch(path, batch_size, block_size):
    """nanoGPT's get_batch on a shard's tokens: the file mapped anew, a copy for each row of x and of y."""
    tokens = np.memmap(path, np.uint16, 'r', data.HEADER * 4)
    ix = torch.randint(len(tokens) - block_size, (batch_size,))
    return [torch.stack([torch.from_numpy(tokens[i + s:i + s + block_size].astype(np.int64)) for i in ix]) for s in (0, 1)]  # x, y


def bench_loader(batch_size, block_size, batches):
    """tokens/s of the loader without workers and of nanoGPT's way, alternated, on a shard of 50M random tokens; and the share
    of a step that one worker makes a consumer of 600,000 tokens/s wait."""
    out = tempfile.mkdtemp()
    writer = data.ShardWriter(out, 'train', 10**9, 50257)
    writer.add(np.random.default_rng(0).integers(0, 50257, 50_000_000, dtype=np.uint16))
    writer.finish_shard()
    train = data.TokenData(out, 'train', block_size)
    loader, path = data.Loader(train, batch_size, 0, num_workers=0), os.path.join(out, 'train_000000.bin')
    times = {'ours': [], 'theirs': []}
    for _ in range(5):
        times['ours'].append(seconds(lambda: [loader.next() for _ in range(batches)]))
        times['theirs'].append(seconds(lambda: [nanogpt_batch(path, batch_size, block_size) for _ in range(batches)]))
    rates = {who: batches * batch_size * block_size / statistics.median(times[who]) for who in times}
    loader = data.Loader(train, batch_size, 0, num_workers=1)
    loader.next()
    step, loader.waited = batch_size * block_size / 600_000, 0.0
    for _ in range(50):
        loader.next()
        time.sleep(step)  # what a GPU would take
    shutil.rmtree(out)
    return rates, loader.waited / (50 * step)


def bench_data(arguments, words):
    """tokenizing and loading, against build-nanogpt's and nanoGPT's ways, on parquet files with a text column"""
    tokenizing = bench_tokenizing(arguments.data_files, arguments.repeats)
    loading, wait = bench_loader(arguments.batch_size, arguments.block_size, 100)
    rows = [{'what': what, 'ours, tokens/s': rates['ours'], 'theirs, tokens/s': rates['theirs'], 'ratio': rates['ours'] / rates['theirs']}
            for what, rates in (("tokenizing, against build-nanogpt's fineweb.py way", tokenizing),
                                (f"batches of {arguments.batch_size} x {arguments.block_size}, against nanoGPT's get_batch way", loading))]
    report('data', rows, arguments.results, data_wait_share_at_600k_tokens_per_second=wait, cores=os.cpu_count())


COMMANDS = {  # options and their defaults; the functions' docstrings say what they are
    'pair': (bench_pair, {'backends': '', 'recipes': '', 'rounds': 5, 'steps': 10, 'warmup': 3, 'micro_steps': 1}),
    'gemm': (bench_gemm, {'backends': 'native', 'recipes': ','.join(fp8.RECIPES), 'repeats': 10, 'iterations': 20}),
    'quality': (bench_quality, {'steps': 300, 'seeds': 3, 'hellaswag_items': 1000, 'out': ''}),
    'sample': (bench_sample, {'preset': 'gpt2', 'new_tokens': 500, 'samples': 10, 'sample_tokens': 200}),
    'data': (bench_data, {'data_files': None, 'repeats': 3, 'batch_size': 64, 'block_size': 1024}),
}


def main():
    """Parses the command line and runs one benchmark."""
    if sys.argv[1:2] == ['fineweb_py']:  # the other side of bench_tokenizing, in a process of its own
        return fineweb_py(*sys.argv[2:])
    look = {'formatter_class': argparse.RawDescriptionHelpFormatter, 'allow_abbrev': False}  # --seed is not short for --seeds
    parser = argparse.ArgumentParser(description=__doc__, **look)
    commands = parser.add_subparsers(required=True, metavar='command')
    for name, (bench, options) in COMMANDS.items():
        command = commands.add_parser(name, help=bench.__doc__.splitlines()[0], description=bench.__doc__, **look)
        for option, default in {**options, 'results': os.path.join(HERE, 'results')}.items():
            command.add_argument(f'--{option}', type=type(default or ''), default=default, required=default is None,
                                 choices=PRESETS if option == 'preset' else None, metavar=default)
        command.set_defaults(bench=bench)
    arguments, words = parser.parse_known_args()
    if words and arguments.bench in (bench_sample, bench_data):
        parser.error(f'unknown: {" ".join(words)}')
    if any(value < 1 for name, value in vars(arguments).items() if isinstance(value, int) and name != 'hellaswag_items'):
        parser.error('a number of things is at least 1')
    os.makedirs(arguments.results, exist_ok=True)
    if failure := arguments.bench(arguments, words):
        raise MachineError(failure)


if __name__ == '__main__':
    one_line_errors()
    main()
