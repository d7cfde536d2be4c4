"""Pictures of runs, from their log.jsonl.

$ python plot.py loss checkpoints checkpoints_fp8 --out=docs/loss.png  # curves; distances from the first
$ python plot.py health checkpoints_fp8 --out=health.png               # each FP8 layer, at the last look
$ python plot.py lr config/gpt2_fp8.py --out=lr.png                    # the schedule of a config or of flags
$ python plot.py lr --warmup_steps=2000 --max_steps=1760 --max_lr=3e-3 # ... and what is wrong with it
"""
import os
import sys

from configurator import MissingError, Parser, SettingError, configure, one_line_errors

HERE = os.path.dirname(os.path.abspath(__file__))


def plot_arguments(words):
    """The command line; for `lr` with train_fp8.py's settings as `config`. Raises SettingError."""
    parser = Parser(__doc__)
    loss = parser.add_command('loss', 'draw the losses of runs')
    loss.add_argument('runs', nargs='+', help='checkpoint_dirs; the others are compared with the first')
    loss.add('--out', 'loss.png', help='the PNG to write')
    loss.add('--json', '', help='a JSON to write: the numbers, with hardware, versions and settings')
    health = parser.add_command('health', 'draw the signal-to-noise ratio of each FP8 layer')
    health.add_argument('run', help='its checkpoint_dir')
    health.add('--out', 'health.png', help='the PNG to write')
    lr = parser.add_command('lr', "draw the learning-rate schedule of train_fp8.py's config file and flags")
    lr.add('--out', 'lr.png', help='the PNG to write')
    asked, rest = parser.parse_known_args(words)
    if asked.command == 'lr':
        asked.config = configure(os.path.join(HERE, 'train_fp8.py'), rest, nearby=vars(asked))
    elif rest:
        parser.error(f'what is {rest[0]!r}?')
    return asked


if __name__ == '__main__':
    one_line_errors()
    plot_arguments(sys.argv[1:])

# Imported only now: --help and a mistyped setting are answered without waiting for torch.
import dataclasses
import statistics

import matplotlib
import numpy as np
import torch

matplotlib.use('Agg')
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from fp8gpt import files, optim, runlog
from fp8gpt.run import Length, training_data
from fp8gpt.run import Run as TrainingRun

COLORS = plt.rcParams['axes.prop_cycle'].by_key()['color']


@dataclasses.dataclass
class Run:
    """One run's log. Losses are in nats per token; each curve is {step: value}."""
    name: str           # of its folder, or its path, with its precision
    tokens: int         # per step
    train: dict
    val: dict
    hellaswag: dict     # acc_norm
    hours: dict         # of training up to there, without evaluations and checkpoints
    speeds: dict        # tokens/s, after the first step
    speed: float        # median tokens/s
    header: dict        # device, versions and config


def read_records(directory):
    """Return the records of a checkpoint_dir's log.jsonl. Raises MissingError."""
    path = os.path.join(directory, 'log.jsonl')
    if not os.path.isfile(path):
        raise MissingError(f'no {path}: name the checkpoint_dir of a run')
    records, damaged = runlog.read_log(path)
    if damaged:
        print(f'WARNING: {path} has {damaged} damaged lines, which are left out')
    return records


def read_run(directory, name=''):
    """Return the Run of a checkpoint_dir. Raises MissingError, or SettingError where it has no step yet."""
    records = read_records(directory)

    def curve(key):
        return {r['step']: float(r[key]) for r in records if key in r}

    def last(key, default):
        return next((r[key] for r in reversed(records) if key in r), default)

    train, speeds, milliseconds = curve('train/loss'), curve('train/tokens_per_sec'), curve('train/dt_ms')
    if not train:
        raise SettingError(f'{directory}/log.jsonl holds no training step yet')
    hours, before, passed = {}, 0, 0.0
    for step, ms in sorted(milliseconds.items()):
        passed += (step - before) * ms / 3.6e6
        hours[step], before = passed, step
    return Run(
        name=f'{name or os.path.normpath(directory)} ({last("precision", "unknown")})',
        tokens=round(statistics.median(speeds[step] * milliseconds[step] / 1e3 for step in speeds)),
        train=train,
        val=curve('val/loss'),
        hellaswag=curve('hellaswag/acc_norm'),
        hours=hours,
        speeds={step: speed for step, speed in speeds.items() if step > 1},
        speed=statistics.median(speeds.values()),
        header={key: last(key, None) for key in ('device', 'versions', 'config')},
    )


def finish_figure(figure, out):
    """Add a grid to all axes and write the picture as the name's ending says, or else a PNG."""
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    ending = os.path.splitext(out)[1][1:]
    form = ending if ending in figure.canvas.get_supported_filetypes() else 'png'
    files.write(out, lambda file: figure.savefig(file, dpi=110, format=form))
    plt.close(figure)
    print(out)


def distances(curve, first):
    """Return a curve's distance from another one, in %, at the steps that they share."""
    return {step: 100 * (curve[step] / first[step] - 1) for step in sorted(curve.keys() & first.keys())}


def draw(axes, run, curve, style='-', **options):
    """Draw a curve over millions of tokens."""
    axes.plot(np.array(list(curve)) * run.tokens / 1e6, list(curve.values()), style, **options)


def plot_loss(directories, out, json_out):
    """Draw losses over tokens and hours, their distance from the first run's, and the speed. Write a picture
    and, if json_out is given, what the picture shows and what produced it."""
    names = [os.path.basename(os.path.normpath(directory)) for directory in directories]
    runs = [read_run(directory, name if names.count(name) == 1 else directory)
            for directory, name in zip(directories, names)]
    figure, axes = plt.subplot_mosaic(
        [['loss', 'hours'], ['distance'] * 2, ['speed'] * 2],
        figsize=(12, 9), height_ratios=(3, 1, 1), layout='constrained')
    found = {}
    for number, run in enumerate(runs):
        color = COLORS[number % len(COLORS)]
        width = max(1, len(run.train) // 25)        # training loss: a mean over 1/25 of the steps
        means = np.convolve(list(run.train.values()), np.ones(width) / width, 'valid')
        smooth = dict(zip(list(run.train)[width - 1:], means))
        last = f': validation loss {run.val[max(run.val)]:.4f} at step {max(run.val)}' if run.val else ''
        for curve, style in ((smooth, '-'), (run.val, 'o-')):
            label = {'label': run.name + last} if style == 'o-' else {'alpha': 0.6, 'linewidth': 0.9}
            draw(axes['loss'], run, curve, style, color=color, markersize=4, **label)
            hours = np.interp(list(curve), list(run.hours), list(run.hours.values()))
            axes['hours'].plot(hours, list(curve.values()), style, color=color, markersize=4)
        draw(axes['distance'], run, distances(run.train, runs[0].train), color=color, alpha=0.3)
        draw(axes['distance'], run, distances(run.val, runs[0].val), 'o-', color=color, markersize=4)
        draw(axes['speed'], run, run.speeds, color=color, linewidth=0.8)
        found[run.name] = {
            **run.header,
            'tokens_per_step': run.tokens,
            'median_tokens_per_sec': run.speed,
            'val_loss': run.val,
            'val_loss_percent_from_first': distances(run.val, runs[0].val),
            'train_loss': run.train,
            'hellaswag_acc_norm': run.hellaswag,
        }
        accuracy = f', HellaSwag acc_norm {run.hellaswag[max(run.hellaswag)]:.4f}' if run.hellaswag else ''
        print(f'{run.name}{last}, median {run.speed:,.0f} tokens/s{accuracy}')
    axes['loss'].set(xlabel='tokens, millions', ylabel='loss, nats per token')
    axes['loss'].legend(title='validation loss (dots); training loss, smoothed')
    axes['hours'].set(xlabel='hours of training')
    axes['hours'].sharey(axes['loss'])
    axes['distance'].set(ylabel='% from the first')
    axes['speed'].set(ylabel='tokens/s', ylim=(0, None), xlabel='tokens, millions')
    axes['speed'].sharex(axes['distance'])
    finish_figure(figure, out)
    if json_out:
        files.write_json(json_out, found)


def plot_sweep(runs, axis, out):
    """Draw where the validation loss of runs ends, over a setting that has several values, with a line for
    each combination of the others.

    runs: [({setting: value as text}, Run)]. axis: the name of that setting."""
    figure, axes = plt.subplots(figsize=(8, 5), layout='constrained')
    lines = {}
    for values, run in runs:
        others = ' '.join(f'{name}={value}' for name, value in values.items() if name != axis)
        lines.setdefault(others, []).append((values.get(axis, ''), run.val[max(run.val)]))
    for label, ends in lines.items():
        axes.plot(*zip(*ends), 'o-', label=label or axis)
    axes.set(xlabel=axis, ylabel='validation loss at the end, nats per token')
    axes.legend()
    finish_figure(figure, out)


def heat_map(decibels):
    """Return a figure of {(layer, 'input' | 'weight' | 'grad'): signal-to-noise ratio in dB}."""
    layers = list(dict.fromkeys(layer for layer, _ in decibels))
    tensors = list(dict.fromkeys(tensor for _, tensor in decibels))
    values = [[decibels.get((layer, tensor), np.nan) for tensor in tensors] for layer in layers]
    figure = Figure(figsize=(4, 1 + 0.2 * len(layers)), layout='constrained')  # pyplot would keep each one
    axes = figure.subplots()
    image = axes.imshow(np.array(values, dtype=float), aspect='auto', vmin=10, vmax=35, cmap='RdYlGn')
    axes.set_xticks(range(len(tensors)), tensors)
    axes.set_yticks(range(len(layers)), layers, fontsize=7)
    figure.colorbar(image, label='SQNR, dB (31.5: e4m3, 25.5: e5m2, of normal values)')
    return figure


def plot_health(directory, out):
    """Draw heat_map of a run's last look at its FP8 tensors. Raises MissingError, SettingError."""
    looks = [record for record in read_records(directory) if 'fp8/sqnr_db' in record]
    if not looks:
        raise SettingError(f'{directory} has no look at FP8 tensors: --fp8_stats_freq says how often')
    decibels = {}
    for name, value in looks[-1].items():
        if name.endswith('_sqnr_db') and name.count('/') == 2:
            _, layer, tensor = name.removesuffix('_sqnr_db').split('/')
            decibels[layer, tensor] = float(value)
    finish_figure(heat_map(decibels), out)
    print(f'step {looks[-1]["step"]}: {len(decibels)} tensors, the lowest {min(decibels.values()):.1f} dB')


def plot_lr(config, out):
    """The learning rate over the steps, by optim.Schedule itself, on one GPU. Writes a PNG. A schedule that
    the training scripts would refuse is drawn in red, with the reason. config: train_fp8.py's settings."""
    run = TrainingRun.of(config, torch.device('cuda'), data_required=False)
    config = run.config
    config['batch_size'] = config['batch_size'] or 1  # of an automatic one only the targets are known
    train = training_data(run)
    length = Length.of(config, 1, train.tokens_per_epoch if train else 0)
    if length.last_step == optim.OPEN:
        raise SettingError(f'how many steps {length.ended_by} allows, a run measures: --max_steps=N draws N')
    schedule = optim.Schedule.of(config, length.last_step)
    mistake = ''
    try:
        schedule.check()
    except SettingError as error:
        mistake = f'MISTAKE: {error}'
    steps = np.unique(np.linspace(0, length.last_step - 1, 2000).astype(int))
    rates = [schedule.rate(int(step)) for step in steps]
    whole = f'{length.last_step:,} steps ({length.ended_by})'
    title = f'{config["lr_schedule"]}: {whole}, warm-up {config["warmup_steps"]:,}'
    color = 'red' if mistake else 'black'
    figure, axes = plt.subplots(figsize=(8, 4), layout='constrained')
    axes.plot(steps, rates, color=color)
    axes.set(xlabel='step', ylabel='learning rate', ylim=(0, None))
    axes.set_title(mistake or title, wrap=True, fontsize=10, color=color)
    finish_figure(figure, out)
    print(f'{title}: step 0 {rates[0]:.2e}, highest {max(rates):.2e}, last {rates[-1]:.2e}')
    if mistake:
        print(mistake)


def main(words):
    """Draws the picture that the command line asks for."""
    asked = plot_arguments(words)
    if asked.command == 'lr':
        plot_lr(asked.config, asked.out)
    elif asked.command == 'health':
        plot_health(asked.run, asked.out)
    else:
        plot_loss(asked.runs, asked.out, asked.json)


if __name__ == '__main__':
    main(sys.argv[1:])
