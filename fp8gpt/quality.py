"""Is FP8 as good? Whole runs of train.py and train_fp8.py with the same settings and seeds, and what they
differ by, beside the noise of the seeds: `bench.py quality`.
"""
import ast
import hashlib
import math
import os
import pathlib
import statistics

import torch

from fp8gpt import checkpoint, files, shards
import hellaswag
from fp8gpt.bench_rows import ROOT, choose, finish, matrix, report, unused
from configurator import MachineError, UserError, configure, read_script
from fp8gpt.runlog import device_name
from model import GPT, GPTConfig
from fp8gpt.tokenizer import get_tokenizer

SCRIPTS = {'bf16': 'train.py', 'FP8': 'train_fp8.py'}
VERDICTS = 'PASS', 'WARN', 'INCONCLUSIVE', 'FAIL'  # the last one of the figures' is the benchmark's
# Unit of a gap -> PASS and WARN: how much worse FP8 must be shown not to be. Points are HellaSwag's.
LIMITS = {'%': (0.5, 2), 'points': (1, 2)}
# Student's t, two-sided 95%, for 1, 2, ... degrees of freedom; t95 has the others
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


# ----------------------------------------------------------------------------------------------------- runs

def sources(path):
    """sha256 of a script and of all of ours that it may import, late imports too."""
    found, waiting = {}, [path]
    while waiting:
        path = waiting.pop()
        if path in found or not os.path.isfile(path):
            continue
        with open(path, 'rb') as file:
            found[path] = file.read()
        for node in ast.walk(ast.parse(found[path])):
            names, folder = [], ROOT
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or '', *(f'{node.module or ""}.{alias.name}' for alias in node.names)]
                if node.level:
                    folder = os.path.join(os.path.dirname(path), *['..'] * (node.level - 1))
            for name in names:
                module = os.path.normpath(os.path.join(folder, *name.split('.')))
                waiting += [f'{module}.py', os.path.join(module, '__init__.py')]
    return hashlib.sha256(b''.join(found[path] for path in sorted(found))).hexdigest()


def provenance(path, settings, device):
    """What decides the losses of a run: two that agree in it end alike. settings: the script's, checked."""
    names = 'data_dir', 'dataset', 'tokenizer', 'split_name'
    folder = shards.dataset_dir(*(settings[name] for name in names))
    meta = files.read_json(os.path.join(folder, 'meta.json'))
    foreign = [[file.name, file.stat().st_size] for file in sorted(pathlib.Path(folder).glob('*.bin'))]
    return {
        'settings': dict(settings),
        'sources': sources(path),
        'torch': str(torch.__version__),
        'device': device_name(device),
        'shards': meta.get('shards', foreign),
    }


def trained(script, words, folder, steps, device):
    """The plot.Run of a finished run under these words: the one in the folder where its provenance is the
    same, else a new one."""
    import plot
    path = os.path.join(ROOT, script)
    mark = os.path.join(folder, 'complete.json')
    words = [*words, f'--checkpoint_dir={folder}', '--overwrite']
    made_of = provenance(path, configure(path, words), device)
    earlier = files.read_json(mark) == made_of
    if not earlier:
        os.makedirs(folder, exist_ok=True)
        files.write_json(mark, {})
        finish([path, *words])
    run = plot.read_run(folder)
    if steps not in run.val:
        why = f'{folder} was stopped before step {steps}'
        raise MachineError(f'{why}; the same command takes over what is finished')
    files.write_json(mark, made_of)
    said = f'{folder}: validation loss {run.val[steps]:.4f}, {run.speed:,.0f} tokens/s'
    print(f'{said}, an earlier run' if earlier else said, flush=True)
    return run


def train_seeds(settings, steps, seeds, out, asked):
    """{'bf16': [the Run of each seed], 'FP8': the same}. settings: see bench.read_settings. out: a folder.
    asked: backend and recipe, as in rows.Cell; each pair of them has folders of its own."""
    labels = {'bf16': 'bf16', 'FP8': '-'.join(asked.values()) or 'fp8'}
    flags = {
        'eval_freq': max(1, steps // 10),
        'log_freq': max(1, steps // 100),
        'sample_freq': 0,
        'hellaswag_freq': 0,
        'checkpoint_freq': steps,
        'keep_checkpoints': 1,
        **settings.config.layers[1],  # the command line's
        **{f'fp8_{name}': value for name, value in asked.items()},
        'max_steps': steps,
        'max_tokens': 0,
        'num_epochs': 0,
        'max_hours': 0,
    }
    runs = {precision: [] for precision in SCRIPTS}
    for seed in seeds:
        flags['seed'] = seed
        for precision, script in SCRIPTS.items():
            known = read_script(os.path.join(ROOT, script)).settings
            own = [f'--{name}={value}' for name, value in flags.items() if name in known]
            folder = os.path.join(out, f'{labels[precision]}-{seed}')
            run = trained(script, [*settings.files, *own], folder, steps, settings.device)
            runs[precision].append(run)
    return runs


def hellaswag_of(run, path, items, device):
    """hellaswag.evaluate of a run's last checkpoint, in bf16."""
    folder = run.header['config']['checkpoint_dir']
    state = checkpoint.load(os.path.join(folder, 'latest.pt'))
    model = GPT(GPTConfig(**state['model_config'])).to(device)
    model.load_weights(state['weights'])
    tokenizer = get_tokenizer(state['tokenizer'], folder)
    return hellaswag.evaluate(model, tokenizer, path, device, limit=items)


def hellaswag_of_all(runs, settings, items):
    """{precision: [hellaswag.evaluate's of each run]} on the first items; None, with a line that says why,
    where there are none."""
    path = os.path.join(settings.config['data_dir'], 'hellaswag', 'hellaswag_val.jsonl')
    if not items:
        print('HellaSwag is left out: hellaswag_items=0')
        return None
    if not os.path.exists(path):
        print(f'HellaSwag is left out: there is no {path}')
        return None
    found = {precision: [] for precision in runs}
    for precision in runs:
        for run in runs[precision]:
            found[precision].append(hellaswag_of(run, path, items, settings.device))
    return found


class Inconclusive(UserError):
    """What these seeds do not tell."""
    exit_code = 4


def compare_seeds(settings, arguments):
    """Trains, compares, draws, reports, for each backend and recipe. Raises MachineError where a verdict is
    FAIL, Inconclusive where one is not shown. arguments: of `bench.py quality`; settings: see
    bench.read_settings."""
    name = f'quality-{settings.stem}'
    cells = list(matrix(settings, arguments))
    for cell in cells:
        choose(settings, cell.words)  # before hours are spent
    worst = [compare_cell(cell, name if len(cells) == 1 else f'{name}-{"-".join(cell.asked.values())}')
             for cell in cells]
    final = max(worst, key=badness)
    if word_of(final) == 'FAIL':
        raise MachineError(f'{final["figure"]}: {final["verdict"]}: FP8 is {final["gap"]:+.2f} '
                           f'{final["unit"]} from bf16')
    if word_of(final) == 'INCONCLUSIVE':
        raise Inconclusive(f'{final["figure"]}: {final["verdict"]}')


def badness(row):
    """Sorts rows of compare() by verdict."""
    return VERDICTS.index(word_of(row)), row['seeds to tell'] or 0


def compare_cell(cell, name):
    """Of one backend and recipe: the runs, <name>.json and <name>.png; returns the row that decides."""
    import plot
    settings, arguments = cell.settings, cell.arguments
    out = arguments.out or f'runs/quality-{settings.stem}'
    seeds = range(1337, 1337 + arguments.seeds)
    runs = train_seeds(settings, arguments.steps, seeds, out, cell.asked)
    accuracies = hellaswag_of_all(runs, settings, arguments.hellaswag_items)
    points = compare_curves(runs)
    rows = compare_runs(runs, points, accuracies)
    worst = max(rows, key=badness)
    verdict = f'{worst["figure"]}: {worst["verdict"]}'
    rows += time_row(runs, points)
    name = unused(arguments.results, name)
    picture = os.path.join(arguments.results, f'{name}.png')
    plot.plot_quality(runs, points, picture)
    noise = f'{len(seeds)} seeds in pairs' if len(seeds) > 1 else 'one seed, so no noise band is known'
    print(f'{" ".join([*cell.asked.values(), ""])}{verdict} | noise: {noise} | {picture}')
    facts = {
        'verdict': verdict,
        'noise': noise,
        'words': cell.words,
        'device': device_name(settings.device),
        'runs': {precision: [run_facts(run) for run in runs[precision]] for precision in runs},
    }
    report(name, rows, arguments.results, **facts)
    return worst


def run_facts(run):
    """A run's part of the JSON: device, versions, config and losses."""
    return {**run.header, 'val': run.val, 'train': run.train}


# ----------------------------------------------------------------------------------------------- statistics

def t95(freedom):
    """Student's t, two-sided 95%; behind the table by Fisher's series in 1 / freedom."""
    if freedom <= len(T95):
        return T95[freedom - 1]
    return 1.95996 + 2.37227 / freedom + 2.82250 / freedom**2 + 2.55585 / freedom**3


def half_interval(deviation, n):
    """Half the 95% interval of the mean of n normal values of this standard deviation, estimated from
    them."""
    return t95(n - 1) * deviation / n**0.5


def decide(worse, noise, limits):
    """The verdict on FP8's being `worse` by a mean over seeds, give or take `noise`, half its 95% interval.
    PASS and WARN are shown: the whole interval is under their limit. FAIL: all of it is over PASS's limit.
    What is just as bad as the limit passes once in 40 times."""
    passes, warns = limits
    if worse + noise < passes:
        return 'PASS'
    if worse + noise < warns:
        return 'WARN'
    return 'FAIL' if worse - noise > passes else 'INCONCLUSIVE'


def seeds_to_tell(deviation, limit):
    """How many seeds make an FP8 that is as good as bf16 pass four times of five, for gaps of this standard
    deviation: mean and half interval together take 1.96 + 0.84 standard errors, 1.43 half intervals."""
    n = max(2, int((2.8 * deviation / limit)**2))
    while 1.43 * half_interval(deviation, n) > limit:
        n += 1
    return n


def compare(figure, bf16, eight, accuracy=False):
    """One figure's row, from a value per seed in each precision. gap: the mean over seeds of FP8 - bf16, in
    % of bf16 or in points of accuracy; '95%': its interval and noise: half of it, by Student's t on the gaps
    of equal seeds. None with one seed, which decides nothing, unless a loss is not a number."""
    if accuracy:
        gaps = [100 * (f - b) for b, f in zip(bf16, eight)]
    else:
        gaps = [100 * (f / b - 1) for b, f in zip(bf16, eight)]
    gap = statistics.mean(gaps)
    unit = 'points' if accuracy else '%'
    row = {
        'figure': figure,
        'bf16': statistics.mean(bf16),
        'bf16 sd': None,
        'FP8': statistics.mean(eight),
        'FP8 sd': None,
        'gap': gap,
        '95%': None,
        'noise': None,
        'bf16 seeds apart': None,
        'unit': unit,
        'seeds to tell': None,
        'verdict': 'INCONCLUSIVE, one seed',
    }
    if not math.isfinite(gap):
        return {**row, 'verdict': 'FAIL'}
    if len(gaps) == 1:
        return row
    deviation = statistics.stdev(gaps)
    noise = half_interval(deviation, len(gaps))
    verdict = decide(-gap if accuracy else gap, noise, LIMITS[unit])
    if verdict == 'INCONCLUSIVE':
        row['seeds to tell'] = seeds_to_tell(deviation, LIMITS[unit][0])
        verdict += f', {row["seeds to tell"]} seeds would tell'
    row['bf16 sd'] = statistics.stdev(bf16)
    row['FP8 sd'] = statistics.stdev(eight)
    row['95%'] = [gap - noise, gap + noise]
    row['noise'] = noise
    whole = 1 if accuracy else min(bf16)
    row['bf16 seeds apart'] = 100 * (max(bf16) - min(bf16)) / whole
    row['verdict'] = verdict
    return row


def word_of(row):
    """A verdict without what qualifies it."""
    return row['verdict'].split(',')[0]


def extra_tokens(points):
    """How many more tokens, in % of the run's, close FP8's gap at the end of bf16's mean curve, by its slope
    between the last two evaluations; negative where FP8 is ahead. Else why that cannot be read off: its
    slope is no farther good than that. points: compare_curves'."""
    steps = [step for step in points if step]
    if len(steps) < 2:
        return 'the curve is too short'
    before, last = steps[-2:]
    fall = points[before]['bf16'] - points[last]['bf16']
    gap = points[last]['FP8'] - points[last]['bf16']
    if not fall > 0:
        return 'the curve does not fall at its end'
    if abs(gap) > fall:
        return 'the curve is too short'
    return 100 * gap / fall * (last - before) / last


def steps_to(curve, loss):
    """Where {step: loss} first is at most `loss`, linearly between evaluations; None where it never is."""
    points = sorted(curve.items())
    for (s0, l0), (s1, l1) in zip([points[0], *points], points):
        if l0 <= loss:  # from the start
            return s0
        if l1 <= loss:
            return s0 + (s1 - s0) * (l0 - loss) / (l0 - l1)


def wilson(p, n):
    """95% interval of a share p of n (Wilson 1927)."""
    z = 1.96
    middle = p + z * z / (2 * n)
    half = z * (p * (1 - p) / n + z * z / (4 * n * n))**0.5
    whole = 1 + z * z / n
    return [(middle - half) / whole, (middle + half) / whole]


def compare_each(figure, runs, value):
    """compare() of value(run) of each run."""
    bf16 = [value(run) for run in runs['bf16']]
    eight = [value(run) for run in runs['FP8']]
    return compare(figure, bf16, eight)


def compare_curves(runs):
    """step -> compare()'s row of the validation loss there, for the steps that all runs share."""
    evaluated = [set(run.val) for run in runs['bf16'] + runs['FP8']]
    points = {}
    for step in sorted(set.intersection(*evaluated)):
        points[step] = compare_each(step, runs, lambda run: run.val[step])
    return points


def last_tenth(run):
    """Mean training loss over the last tenth of the logged steps."""
    losses = list(run.train.values())
    return statistics.mean(losses[-max(1, len(losses) // 10):])


def compare_runs(runs, points, accuracies):
    """The rows of training loss, validation loss and, where there are `accuracies`, HellaSwag. Its interval,
    too, is of the gaps of equal seeds, all on the same items: it speaks of these items, not of others.

    runs: {'bf16': [Run of each seed], 'FP8': the same}. points: compare_curves'. accuracies:
    hellaswag.evaluate's of each run; or None."""
    last = points[max(points)]
    training = compare_each('training loss', runs, last_tenth)
    validation = {**last, 'figure': 'validation loss', 'extra tokens, %': extra_tokens(points)}
    if not accuracies:
        return [training, validation]
    bf16 = [result['acc_norm'] for result in accuracies['bf16']]
    eight = [result['acc_norm'] for result in accuracies['FP8']]
    test = compare('HellaSwag acc_norm', bf16, eight, accuracy=True)
    for precision in runs:
        items = accuracies[precision][0]['items']
        test[f'{precision} 95%'] = wilson(test[precision], items)
    return [training, validation, test]


def time_row(runs, points):
    """[The row of the time to the higher of the two final losses]: each precision's mean curve says in how
    many steps, its median seconds a step says how long. [] where a loss is not a number, and so never
    reached."""
    last = points[max(points)]
    target = max(last[p] for p in runs)
    took = {}
    for precision in runs:
        curve = {step: row[precision] for step, row in points.items()}
        steps = steps_to(curve, target)
        if steps is None:
            return []
        seconds_a_step = [run.tokens / run.speed for run in runs[precision]]
        took[precision] = steps * statistics.median(seconds_a_step)
    ratio = took['bf16'] / took['FP8']
    verdict = f'{"FP8" if ratio >= 1 else "SLOWER"} x{ratio:.2f}'
    figure = f'seconds to validation loss {target:.4f}'
    return [{'figure': figure, **took, 'ratio': ratio, 'verdict': verdict}]
