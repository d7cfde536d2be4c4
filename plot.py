"""Pictures of runs, from their log.jsonl.

$ python plot.py loss checkpoints checkpoints_fp8 --out=docs/loss.png   # curves, and each run's distance from the first
$ python plot.py lr config/gpt2_fp8.py --out=lr.png                     # the schedule of a config, or of flags alone
$ python plot.py lr --warmup_steps=2000 --max_steps=1760 --max_lr=3e-3  # ... and what is wrong with it
"""
import argparse
import json
import os
import statistics

import matplotlib
import numpy as np

matplotlib.use('Agg')
import matplotlib.pyplot as plt

import data
import optim
import plan
from configurator import MissingError, SettingError, one_line_errors


def read_run(directory):
    """One run's log: {'name', 'tokens': tokens per step, 'train': {step: loss}, 'val': {step: loss}, 'hellaswag': {step:
    acc_norm}, 'speeds': {step: tokens/s}, 'speed': their median, 'header': device, versions and config}.
    Raises FileNotFoundError, or ValueError where there is nothing to draw."""
    path = os.path.join(directory, 'log.jsonl')
    if not os.path.exists(path):
        raise MissingError(f'no {path}: name the checkpoint_dir of a run')
    with open(path) as file:
        records = [json.loads(line) for line in file if line.endswith('\n')]
    train = {r['step']: float(r['train/loss']) for r in records if 'train/loss' in r}
    if not train:
        raise SettingError(f'{path} holds no training step yet')
    header = next(r for r in reversed(records) if 'config' in r)
    precision = next(r['precision'] for r in reversed(records) if 'precision' in r)
    per_step = np.median([r['train/tokens_per_sec'] * r['train/dt_ms'] / 1e3 for r in records if 'train/dt_ms' in r])
    return {
        'name': f'{os.path.basename(os.path.normpath(directory))} ({precision})', 'tokens': round(per_step), 'train': train,
        'val': {r['step']: float(r['val/loss']) for r in records if 'val/loss' in r},
        'hellaswag': {r['step']: r['hellaswag/acc_norm'] for r in records if 'hellaswag/acc_norm' in r},
        'speeds': {r['step']: r['train/tokens_per_sec'] for r in records if 'train/tokens_per_sec' in r and r['step'] > 1},
        'header': {key: header.get(key) for key in ('device', 'versions', 'config')},
        'speed': np.median([r['train/tokens_per_sec'] for r in records if 'train/tokens_per_sec' in r]),
    }


def plot_loss(directories, out, json_out):
    """Training and validation loss over tokens; below, both relative to the first run's, the speed and, where a run has it,
    HellaSwag. Writes a PNG and, if json_out is given, what the picture shows and what produced it."""
    runs = [read_run(directory) for directory in directories]
    below = [('speeds', 'tokens/s')] + [('hellaswag', 'HellaSwag acc_norm')] * any(run['hellaswag'] for run in runs)
    figure, (top, bottom, *others) = plt.subplots(
        2 + len(below), 1, figsize=(8, 7 + 2 * len(below)), sharex=True, height_ratios=(3, *[1] * (1 + len(below))), layout='constrained')
    first = runs[0]
    for run, color in zip(runs, plt.rcParams['axes.prop_cycle'].by_key()['color'] * len(runs)):
        steps = np.array(sorted(run['train']))
        top.plot(steps * run['tokens'] / 1e6, [run['train'][s] for s in steps], color=color, alpha=0.3, linewidth=0.8)
        steps = np.array(sorted(run['val']))
        last = f', ends at {run["val"][steps[-1]]:.4f}' if len(steps) else ''
        top.plot(steps * run['tokens'] / 1e6, [run['val'][s] for s in steps], 'o-', color=color, markersize=4, label=run['name'] + last)
        for kind, style in (('train', '-'), ('val', 'o-')):
            common = np.array(sorted(first[kind].keys() & run[kind].keys()))
            gap = [100 * (run[kind][s] / first[kind][s] - 1) for s in common]
            bottom.plot(common * run['tokens'] / 1e6, gap, style, color=color, markersize=4, alpha=0.3 if kind == 'train' else 1, linewidth=0.8)
        for axes, (key, label) in zip(others, below):
            axes.plot([step * run['tokens'] / 1e6 for step in run[key]], list(run[key].values()), '.-', color=color, linewidth=0.8, markersize=2)
            axes.set(ylabel=label, ylim=(0, None) if key == 'speeds' else None)
    top.set(ylabel='loss, nats a token')
    top.legend(title='validation (dots); training is the thin line')
    bottom.set(ylabel=f'% from {first["name"]}')
    figure.axes[-1].set(xlabel='tokens, millions')
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    figure.savefig(out, dpi=110)
    if json_out:
        data.write_json(json_out, {run['name']: {
            **run['header'], 'tokens_per_step': run['tokens'], 'median_tokens_per_sec': run['speed'], 'val_loss': run['val'],
            'train_loss': run['train'], 'hellaswag_acc_norm': run['hellaswag']} for run in runs})
    for run in runs:
        val = f'validation loss {run["val"][max(run["val"])]:.4f} at step {max(run["val"])}, ' if run['val'] else ''
        hellaswag = f', HellaSwag acc_norm {run["hellaswag"][max(run["hellaswag"])]:.4f}' if run['hellaswag'] else ''
        print(f'{run["name"]}: {val}median {run["speed"]:,.0f} tokens/s{hellaswag}')
    print(out)


# Student's t, two-sided 95%, for 1, 2, ... degrees of freedom; behind the last one the band is a little too wide
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def compare(figure, bf16, eight, allowed, accuracy=False):
    """One figure's row, from a value per seed in each precision. gap: the mean over seeds of FP8 - bf16, in % of bf16 or in
    points of accuracy. noise: half the 95% interval of that mean, by Student's t on the gaps of equal seeds; a gap inside
    may be the seeds' alone. None with one seed. PASS: worse by at most `allowed`; WARN: by at most 10% of bf16; else FAIL."""
    gaps = [100 * (f - b) if accuracy else 100 * (f / b - 1) for b, f in zip(bf16, eight)]
    gap, several = statistics.mean(gaps), len(gaps) > 1
    spread = lambda values: statistics.stdev(values) if several else None
    noise = T95[min(len(gaps) - 1, len(T95)) - 1] * spread(gaps) / len(gaps)**0.5 if several else None
    worse, most = (-gap, 10 * statistics.mean(bf16)) if accuracy else (gap, 10)
    verdict = 'PASS' if worse <= allowed else 'WARN' if worse <= most else 'FAIL'
    if several and verdict != 'PASS' and worse <= noise:
        verdict += ', within seed noise'
    elif several and verdict == 'PASS' and noise > allowed:
        verdict += ', with more seed noise than it allows'
    apart = 100 * (max(bf16) - min(bf16)) / (1 if accuracy else min(bf16)) if several else None
    return {'figure': figure, 'bf16': statistics.mean(bf16), 'bf16 sd': spread(bf16), 'FP8': statistics.mean(eight), 'FP8 sd': spread(eight),
            'gap': gap, 'noise': noise, 'bf16 seeds apart': apart, 'unit': 'points' if accuracy else '%', 'verdict': verdict}


def steps_to(curve, loss):
    """Where {step: loss} first is at most `loss`, linearly between evaluations; None where it never is."""
    points = sorted(curve.items())
    for (s0, l0), (s1, l1) in zip([points[0], *points], points):
        if l1 <= loss:
            return s1 if l0 <= loss else s0 + (s1 - s0) * (l0 - loss) / (l0 - l1)


def wilson(p, n):
    """95% interval of a share p of n (Wilson 1927)."""
    z = 1.96
    middle, half = p + z * z / (2 * n), z * (p * (1 - p) / n + z * z / (4 * n * n))**0.5
    return [(middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)]


def compare_runs(runs, hellaswag, out):
    """(rows, verdict: the worst of theirs) of runs in both precisions, and a PNG of their validation curves.

    runs: {'bf16': [read_run(...) of each seed], 'FP8': the same}. hellaswag: hellaswag.evaluate's of each; or None.
    Training loss is the mean over the last tenth of the logged steps. The last row is the time to the higher of the two final
    losses: each precision's mean curve says in how many steps, its median seconds a step says how long."""
    def row(figure, value, allowed):
        return compare(figure, *([value(run) for run in runs[p]] for p in ('bf16', 'FP8')), allowed)
    steps = sorted(set.intersection(*(set(run['val']) for both in runs.values() for run in both)))
    points = [row(step, lambda run: run['val'][step], 3) for step in steps]
    rows = [row('training loss', lambda run: statistics.mean(list(run['train'].values())[-max(1, len(run['train']) // 10):]), 2),
            points[-1] | {'figure': 'validation loss'}]
    if hellaswag:
        rows.append(compare('HellaSwag acc_norm', *([result['acc_norm'] for result in hellaswag[p]] for p in ('bf16', 'FP8')), 1, accuracy=True))
        rows[-1] |= {f'{p} 95%': wilson(rows[-1][p], hellaswag[p][0]['items']) for p in runs}
    verdict = max((row['verdict'].split(',')[0] for row in rows), key=('PASS', 'WARN', 'FAIL').index)
    target = max(points[-1][p] for p in runs)
    needed = {p: steps_to({point['figure']: point[p] for point in points}, target) for p in runs}
    if None not in needed.values():  # a loss that is not a number is never reached
        took = {p: needed[p] * statistics.median(run['tokens'] / run['speed'] for run in runs[p]) for p in runs}
        ratio = took['bf16'] / took['FP8']
        rows.append({'figure': f'seconds to validation loss {target:.4f}', **took, 'ratio': ratio,
                     'verdict': f'{"FP8" if ratio >= 1 else "SLOWER"} x{ratio:.2f}'})

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(2, 1), layout='constrained')
    tokens = np.array(steps) * runs['bf16'][0]['tokens'] / 1e6
    for p, color in zip(runs, plt.rcParams['axes.prop_cycle'].by_key()['color']):
        for run in runs[p]:
            top.plot(tokens, [run['val'][step] for step in steps], color=color, alpha=0.4, linewidth=0.8)
        top.plot(tokens, [point[p] for point in points], color=color, linewidth=2.2, label=f'{p}, ends at {points[-1][p]:.4f}')
    bottom.axhline(0, color='gray', linewidth=0.8)
    bottom.plot(tokens, [point['gap'] for point in points], 'o-', color=color, markersize=4, label='FP8 - bf16')
    if points[-1]['noise'] is not None:
        noise = np.array([point['noise'] for point in points])
        bottom.fill_between(tokens, -noise, noise, color='gray', alpha=0.25, linewidth=0, label='seed noise, 95%')
    top.set(ylabel='validation loss, nats a token')
    top.legend(title=f'mean of {len(runs["bf16"])} seeds (thin: each)')
    bottom.set(ylabel='gap, % of bf16', xlabel='tokens, millions')
    bottom.legend()
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    figure.savefig(out, dpi=110)
    return rows, verdict


def plot_lr(words, out):
    """The learning rate over the steps, by optim.learning_rate itself, on one GPU. Writes a PNG. A schedule that the training scripts
    would refuse is drawn in red, with the reason."""
    config, model_config = plan.read(words)
    sequences = config['batch_size'] or 1  # of an automatic one only the targets are known
    micro_steps = plan.micro_steps_of(config, model_config, sequences, 1)
    last_step, ended_by = plan.run_length(config, model_config, micro_steps * sequences * model_config.block_size)
    settings = [config[name] for name in ('max_lr', 'min_lr_ratio', 'warmup_steps', 'lr_schedule', 'decay_share')]
    mistake = None
    try:
        optim.check_schedule(last_step, *settings[2:])
    except ValueError as error:
        if config['lr_schedule'] not in optim.SCHEDULES:
            raise
        mistake = str(error)
    steps = np.unique(np.linspace(0, last_step - 1, 2000).astype(int))
    rates = [optim.learning_rate(int(step), last_step, *settings) for step in steps]
    figure, axes = plt.subplots(figsize=(8, 4), layout='constrained')
    axes.plot(steps, rates, color='red' if mistake else None)
    axes.axhline(config['max_lr'], color='gray', linewidth=0.8, linestyle=':')
    axes.set(xlabel='step', ylabel='learning rate', ylim=(0, None))
    title = f'{config["lr_schedule"]}: {last_step:,} steps ({ended_by}), warm-up {config["warmup_steps"]:,}'
    axes.set_title('MISTAKE: ' + mistake if mistake else title, wrap=True, fontsize=10, color='red' if mistake else 'black')
    axes.grid(alpha=0.3)
    figure.savefig(out, dpi=110)
    print(f'{title}: step 0 {rates[0]:.2e}, highest {max(rates):.2e}, last {rates[-1]:.2e}')
    print(*([f'MISTAKE: {mistake}'] if mistake else ()), out, sep='\n')


if __name__ == '__main__':
    one_line_errors()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar='command')
    loss = commands.add_parser('loss', help='draw the losses of runs')
    loss.add_argument('runs', nargs='+', help='checkpoint_dir of each run; the first is the one the others are held against')
    loss.add_argument('--out', default='loss.png', help='the PNG to write')
    loss.add_argument('--json', help='a JSON to write: the numbers, with hardware, versions and settings')
    lr = commands.add_parser('lr', help='draw the learning-rate schedule of a config file and flags, those of train_fp8.py')
    lr.add_argument('--out', default='lr.png', help='the PNG to write')
    loss.set_defaults(draw=lambda a, rest: parser.error(f'unknown: {rest}') if rest else plot_loss(a.runs, a.out, a.json))
    lr.set_defaults(draw=lambda a, rest: plot_lr(rest, a.out))
    arguments, rest = parser.parse_known_args()
    arguments.draw(arguments, rest)
