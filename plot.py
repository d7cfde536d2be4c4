"""Pictures of runs, from their log.jsonl.

$ python plot.py loss checkpoints checkpoints_fp8 --out=docs/loss.png   # curves, and each run's distance from the first
$ python plot.py lr config/gpt2_fp8.py --out=lr.png                     # the schedule of a config, or of flags alone
$ python plot.py lr --warmup_steps=2000 --max_steps=1760 --max_lr=3e-3  # ... and what is wrong with it
"""
import argparse
import json
import os

import matplotlib
import numpy as np

matplotlib.use('Agg')
import matplotlib.pyplot as plt

import data
import optim
import plan
from configurator import one_line_errors


def read_run(directory):
    """One run's log: {'name', 'tokens': tokens per step, 'train': {step: loss}, 'val': {step: loss}, 'hellaswag': {step:
    acc_norm}, 'speeds': {step: tokens/s}, 'speed': their median, 'header': device, versions and config}.
    Raises FileNotFoundError, or ValueError where there is nothing to draw."""
    path = os.path.join(directory, 'log.jsonl')
    if not os.path.exists(path):
        raise FileNotFoundError(f'no {path}: name the checkpoint_dir of a run')
    with open(path) as file:
        records = [json.loads(line) for line in file if line.endswith('\n')]
    train = {r['step']: float(r['train/loss']) for r in records if 'train/loss' in r}
    if not train:
        raise ValueError(f'{path} holds no training step yet')
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
