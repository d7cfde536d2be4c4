"""Pictures of runs, from their log.jsonl.

$ python plot.py loss checkpoints checkpoints_fp8 --out=docs/loss.png   # curves, and each run's distance from the first
"""
import argparse
import json
import os

import matplotlib
import numpy as np

matplotlib.use('Agg')
import matplotlib.pyplot as plt

from configurator import one_line_errors


def read_run(directory):
    """One run's log: {'name', 'tokens': tokens per step, 'train': {step: loss}, 'val': {step: loss}, 'speed': tokens/s}.
    Raises FileNotFoundError, or ValueError where there is nothing to draw."""
    path = os.path.join(directory, 'log.jsonl')
    if not os.path.exists(path):
        raise FileNotFoundError(f'no {path}: name the checkpoint_dir of a run')
    with open(path) as file:
        records = [json.loads(line) for line in file if line.endswith('\n')]
    train = {r['step']: float(r['train/loss']) for r in records if 'train/loss' in r}
    if not train:
        raise ValueError(f'{path} holds no training step yet')
    precision = next(r['precision'] for r in reversed(records) if 'precision' in r)
    per_step = np.median([r['train/tokens_per_sec'] * r['train/dt_ms'] / 1e3 for r in records if 'train/dt_ms' in r])
    return {
        'name': f'{os.path.basename(os.path.normpath(directory))} ({precision})', 'tokens': round(per_step), 'train': train,
        'val': {r['step']: float(r['val/loss']) for r in records if 'val/loss' in r},
        'speed': np.median([r['train/tokens_per_sec'] for r in records if 'train/tokens_per_sec' in r]),
    }


def plot_loss(directories, out):
    """Training and validation loss over tokens; below, the validation loss relative to the first run's. Writes a PNG."""
    runs = [read_run(directory) for directory in directories]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 1), layout='constrained')
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
    top.set(ylabel='loss, nats a token')
    top.legend(title='validation (dots); training is the thin line')
    bottom.set(xlabel='tokens, millions', ylabel=f'% from {first["name"]}')
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(out, dpi=110)
    for run in runs:
        val = f'validation loss {run["val"][max(run["val"])]:.4f} at step {max(run["val"])}, ' if run['val'] else ''
        print(f'{run["name"]}: {val}median {run["speed"]:,.0f} tokens/s')
    print(out)


if __name__ == '__main__':
    one_line_errors()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar='command')
    loss = commands.add_parser('loss', help='draw the losses of runs')
    loss.add_argument('runs', nargs='+', help='checkpoint_dir of each run; the first is the one the others are held against')
    loss.add_argument('--out', default='loss.png', help='the PNG to write')
    arguments = parser.parse_args()
    plot_loss(arguments.runs, arguments.out)
