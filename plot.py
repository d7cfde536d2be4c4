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


def arguments(words):
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
    arguments(sys.argv[1:])

# Imported only now: --help and a mistyped setting are answered without waiting for torch.
import dataclasses

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
    """One run's log. Losses are in nats a token."""
    name: str        # of its folder, or its path, with its precision
    tokens: int      # per step
    train: dict      # step -> training loss
    val: dict        # step -> validation loss
    hellaswag: dict  # step -> acc_norm
    hours: dict      # step -> of training up to there, without evaluations and checkpoints
    speeds: dict     # step -> tokens/s, behind the first step
    speed: float     # median tokens/s
    header: dict     # device, versions and config


def read_runs(directories):
    """The Run of each checkpoint_dir; folders that are called alike have their whole paths for names."""
    names = [os.path.basename(os.path.normpath(directory)) for directory in directories]
    whole = [directory if names.count(name) > 1 else name for directory, name in zip(directories, names)]
    return [read_run(directory, name) for directory, name in zip(directories, whole)]


def read_run(directory, name=''):
    """The Run whose checkpoint_dir this is. Raises MissingError, or SettingError where there is nothing to
    draw."""
    path = os.path.join(directory, 'log.jsonl')
    if not os.path.isfile(path):
        raise MissingError(f'no {path}: name the checkpoint_dir of a run')
    records, damaged = runlog.read_log(path)
    if damaged:
        print(f'WARNING: {path} has {damaged} damaged lines, which are left out')

    def curve(key):
        return {r['step']: r[key] for r in records if key in r}

    train = {step: float(loss) for step, loss in curve('train/loss').items()}
    timed = [r for r in records if 'train/dt_ms' in r and 'train/tokens_per_sec' in r]
    if not (train and timed):
        raise SettingError(f'{path} holds no training step yet')
    header = next((r for r in reversed(records) if 'config' in r), {})
    precision = next((r['precision'] for r in reversed(records) if 'precision' in r), 'unknown')
    per_step = np.median([r['train/tokens_per_sec'] * r['train/dt_ms'] / 1e3 for r in timed])
    speeds, hours, last, passed = curve('train/tokens_per_sec'), {}, 0, 0.0
    for step, ms in sorted(curve('train/dt_ms').items()):
        passed += (step - last) * ms / 3.6e6
        hours[step], last = passed, step
    return Run(
        name=f'{name} ({precision})',
        tokens=round(per_step),
        train=train,
        val={step: float(loss) for step, loss in curve('val/loss').items()},
        hellaswag=curve('hellaswag/acc_norm'),
        hours=hours,
        speeds={step: speed for step, speed in speeds.items() if step > 1},
        speed=np.median(list(speeds.values())),
        header={key: header.get(key) for key in ('device', 'versions', 'config')},
    )


def finish_figure(figure, out):
    """Adds a grid to all axes and writes the PNG, or what else the name's ending says."""
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    ending = os.path.splitext(out)[1][1:]
    form = ending if ending in figure.canvas.get_supported_filetypes() else 'png'
    files.write(out, lambda file: figure.savefig(file, dpi=110, format=form))


def plot_loss(directories, out, json_out):
    """Losses over steps, tokens and hours; below, their distance from the first run's, the speed and, where a
    run has it, HellaSwag, over tokens. Writes a PNG and, if json_out is given, what the picture shows and
    what produced it."""
    runs = read_runs(directories)
    below = ['distance', 'speed', *(['hellaswag'] if any(run.hellaswag for run in runs) else [])]
    figure, axes = plt.subplot_mosaic(
        [['steps', 'tokens', 'hours'], *([name] * 3 for name in below)],
        figsize=(12, 5 + 2 * len(below)),
        height_ratios=(3, *[1] * len(below)),
        layout='constrained',
    )
    for number, run in enumerate(runs):
        color = COLORS[number % len(COLORS)]
        for unit in 'steps', 'tokens', 'hours':
            draw_losses(axes[unit], run, unit, color)
        draw_distance(axes['distance'], run, runs[0], color)
        draw_figure(axes['speed'], run, run.speeds, color)
        if 'hellaswag' in below:
            draw_figure(axes['hellaswag'], run, run.hellaswag, color)
    axes['steps'].set(xlabel='steps', ylabel='loss, nats a token')
    axes['tokens'].set(xlabel='tokens, millions')
    for unit in 'tokens', 'hours':
        axes[unit].sharey(axes['steps'])
    title = 'validation loss (dots); training loss, smoothed'
    figure.legend(*axes['steps'].get_legend_handles_labels(), title=title, loc='outside upper center')
    axes['hours'].set(xlabel='hours of training')
    axes['distance'].set(ylabel='% from the first')
    axes['speed'].set(ylabel='tokens/s', ylim=(0, None))    # only now: a limit is frozen where it is set
    if 'hellaswag' in below:
        axes['hellaswag'].set(ylabel='HellaSwag acc_norm')
    for name in below[1:]:
        axes[name].sharex(axes[below[0]])
    axes[below[-1]].set(xlabel='tokens, millions')
    finish_figure(figure, out)
    if json_out:
        files.write_json(json_out, {run.name: numbers(run, runs[0]) for run in runs})
    for run in runs:
        print(summary(run))
    print(out)


def smoothed(values):
    """Their running mean over a fiftieth of them, fewer at both ends."""
    width = max(1, len(values) // 50)
    sums = np.cumsum([0.0, *values])
    first = np.maximum(np.arange(len(values)) - width, 0)
    behind = np.minimum(np.arange(len(values)) + width + 1, len(values))
    return (sums[behind] - sums[first]) / (behind - first)


def draw_losses(axes, run, unit, color):
    """Training loss as a line, smoothed, before a faint one as it was; validation loss as dots. unit: of the
    x axis: steps, tokens (millions), hours."""
    def place(steps):
        if unit == 'hours':
            return np.interp(steps, list(run.hours), list(run.hours.values()))
        return np.array(steps) * (run.tokens / 1e6 if unit == 'tokens' else 1)

    steps = sorted(run.train)
    train = [run.train[s] for s in steps]
    axes.plot(place(steps), train, color=color, alpha=0.2, linewidth=0.6)
    axes.plot(place(steps), smoothed(train), color=color, alpha=0.7, linewidth=0.9)
    steps = sorted(run.val)
    last = f', ends at {run.val[steps[-1]]:.4f}' if steps else ''
    val = [run.val[s] for s in steps]
    axes.plot(place(steps), val, 'o-', color=color, markersize=4, label=run.name + last)


def draw_distance(axes, run, first, color):
    """Both losses' distance from the first run's, in %, at the steps that they share."""
    curves = (run.train, first.train, '-', 0.3), (run.val, first.val, 'o-', 1)
    for own, other, style, alpha in curves:
        gap = distances(own, other)
        tokens = np.array(list(gap)) * run.tokens / 1e6
        axes.plot(tokens, list(gap.values()), style, color=color, markersize=4, alpha=alpha, linewidth=0.8)


def draw_figure(axes, run, curve, color):
    """A curve {step: value}."""
    tokens = [step * run.tokens / 1e6 for step in curve]
    values = list(curve.values())
    axes.plot(tokens, values, '.-', color=color, linewidth=0.8, markersize=2)


def distances(own, other):
    """A curve's distance from another one, in %, at the steps that they share."""
    return {step: 100 * (own[step] / other[step] - 1) for step in sorted(own.keys() & other.keys())}


def numbers(run, first):
    """What the picture of a run shows and what produced it, for a JSON."""
    return {
        **run.header,
        'tokens_per_step': run.tokens,
        'median_tokens_per_sec': run.speed,
        'val_loss': run.val,
        'val_loss_percent_from_first': distances(run.val, first.val),
        'train_loss': run.train,
        'hellaswag_acc_norm': run.hellaswag,
    }


def summary(run):
    """A run's line for the console."""
    said = []
    if run.val:
        last = max(run.val)
        said.append(f'validation loss {run.val[last]:.4f} at step {last}')
    said.append(f'median {run.speed:,.0f} tokens/s')
    if run.hellaswag:
        said.append(f'HellaSwag acc_norm {run.hellaswag[max(run.hellaswag)]:.4f}')
    return f'{run.name}: {", ".join(said)}'


def plot_quality(runs, points, out):
    """Validation loss of runs in both precisions, each seed's and their mean; below, FP8's gap with the
    seeds' noise.

    runs: {'bf16': [Run of each seed], 'FP8': the same}. points: step -> quality.compare's row. Writes a
    PNG."""
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 7), sharex=True, height_ratios=(2, 1), layout='constrained')
    tokens = np.array(list(points)) * runs['bf16'][0].tokens / 1e6
    rows = list(points.values())
    last = rows[-1]
    for precision, color in zip(runs, COLORS):
        for run in runs[precision]:
            val = [run.val[step] for step in points]
            top.plot(tokens, val, color=color, alpha=0.4, linewidth=0.8)
        mean = [row[precision] for row in rows]
        label = f'{precision}, ends at {last[precision]:.4f}'
        top.plot(tokens, mean, color=color, linewidth=2.2, label=label)
    top.set(ylabel='validation loss, nats a token')
    top.legend(title=f'mean of {len(runs["bf16"])} seeds (thin: each)')

    gap = [row['gap'] for row in rows]
    bottom.axhline(0, color='gray', linewidth=0.8)
    bottom.plot(tokens, gap, 'o-', color=color, markersize=4, label='FP8 - bf16')
    if last['noise'] is not None:
        noise = np.array([row['noise'] for row in rows])
        band = {'color': 'gray', 'alpha': 0.25, 'linewidth': 0}
        bottom.fill_between(tokens, -noise, noise, label='seed noise, 95%', **band)
    bottom.set(ylabel='gap, % of bf16', xlabel='tokens, millions')
    bottom.legend()
    finish_figure(figure, out)


def plot_sweep(runs, axes, out):
    """Validation loss of runs; below, where it ends, over the first setting that has several values, with a
    line for each combination of the others.

    runs: [({setting: value as text}, Run)]. axes: setting -> its values, of those that have several. Writes a
    PNG."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 8), height_ratios=(3, 2), layout='constrained')
    first, *others = axes or ['seed']
    lines = {}
    for number, (values, run) in enumerate(runs):
        steps = [step for step in sorted(run.val) if step]
        losses = [run.val[step] for step in steps]
        label = ' '.join(f'{name}={values[name]}' for name in axes) or run.name
        tokens = np.array(steps) * run.tokens / 1e6
        color = COLORS[number % len(COLORS)]
        top.plot(tokens, losses, 'o-', color=color, markersize=4, label=f'{label}, ends at {losses[-1]:.4f}')
        line = ' '.join(f'{name}={values[name]}' for name in others)
        lines.setdefault(line, []).append((as_number(values.get(first, '')), losses[-1]))
    for line, ends in lines.items():
        bottom.plot(*zip(*ends), 'o-', label=line or None)
    top.set(xlabel='tokens, millions', ylabel='validation loss, nats a token')
    top.legend(fontsize='small')
    bottom.set(xlabel=first, ylabel='validation loss at the end')
    if others:
        bottom.legend()
    finish_figure(figure, out)
    print(out)


def as_number(text):
    """A float where the text is one, else the text, which matplotlib sets apart as a category."""
    try:
        return float(text)
    except ValueError:
        return text


def heat_map(decibels):
    """A figure of {(layer, 'input' | 'weight' | 'grad'): signal-to-noise ratio in dB}, a row a layer."""
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
    """heat_map of a run's last look at its FP8 tensors. Raises MissingError, SettingError."""
    path = os.path.join(directory, 'log.jsonl')
    if not os.path.isfile(path):
        raise MissingError(f'no {path}: name the checkpoint_dir of a run')
    looks = [record for record in runlog.read_log(path)[0] if 'fp8/sqnr_db' in record]
    if not looks:
        raise SettingError(f'{path} holds no look at FP8 tensors: --fp8_stats_freq says how often')
    decibels = {}
    for name, value in looks[-1].items():
        if name.endswith('_sqnr_db') and name.count('/') == 2:
            _, layer, tensor = name.removesuffix('_sqnr_db').split('/')
            decibels[layer, tensor] = float(value)
    finish_figure(heat_map(decibels), out)
    print(f'step {looks[-1]["step"]}: {len(decibels)} tensors, the lowest {min(decibels.values()):.1f} dB')
    print(out)


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
    mistake = schedule_mistake(schedule)
    steps = np.unique(np.linspace(0, length.last_step - 1, 2000).astype(int))
    rates = [schedule.rate(int(step)) for step in steps]
    whole = f'{length.last_step:,} steps ({length.ended_by})'
    title = f'{config["lr_schedule"]}: {whole}, warm-up {config["warmup_steps"]:,}'

    figure, axes = plt.subplots(figsize=(8, 4), layout='constrained')
    axes.plot(steps, rates, color='red' if mistake else None)
    axes.axhline(config['max_lr'], color='gray', linewidth=0.8, linestyle=':')
    axes.set(xlabel='step', ylabel='learning rate', ylim=(0, None))
    if mistake:
        axes.set_title(mistake, wrap=True, fontsize=10, color='red')
    else:
        axes.set_title(title, wrap=True, fontsize=10, color='black')
    finish_figure(figure, out)
    print(f'{title}: step 0 {rates[0]:.2e}, highest {max(rates):.2e}, last {rates[-1]:.2e}')
    if mistake:
        print(mistake)
    print(out)


def schedule_mistake(schedule):
    """'MISTAKE: ' and why the training scripts would refuse this schedule; '' where they take it."""
    try:
        schedule.check()
    except SettingError as error:
        return f'MISTAKE: {error}'
    return ''


def main(words):
    """Draws the picture that the command line asks for."""
    asked = arguments(words)
    if asked.command == 'lr':
        plot_lr(asked.config, asked.out)
    elif asked.command == 'health':
        plot_health(asked.run, asked.out)
    else:
        plot_loss(asked.runs, asked.out, asked.json)


if __name__ == '__main__':
    main(sys.argv[1:])
