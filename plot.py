"""Draw pictures of runs from their log.jsonl, and of learning-rate schedules.

$ python plot.py loss checkpoints checkpoints_fp8 --out=docs/loss.png  # curves, and distances from the first
$ python plot.py lr config/gpt2_fp8.py --max_steps=4000                # the schedule of a config and of flags
"""
import sys
from os.path import expanduser

from configurator import Parser, SettingError, configure, one_line_errors, say


COMMANDS = {
    'loss': 'draw the losses of runs',
    'lr': "draw the learning-rate schedule of train_fp8.py's config file and flags",
}
ELSEWHERE = {'gap', 'formats'}      # scripts beside the pictures in docs/


def plot_arguments(words):
    """Return the command line; for `lr` with train_fp8.py's settings as `config`. Raises SettingError."""
    for name in ELSEWHERE & {*words[:1]}:
        raise SettingError(f'plot.py draws no {name}: docs/fp8_{name}.py does, and says how at its top')
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest='command', required=True)
    for name, what in COMMANDS.items():
        command = commands.add_parser(name, help=what, doc=what)
        command.add_argument('--out', type=expanduser, default=f'runs/{name}.png',
                             help='.png, .pdf or .svg to write')
        if name == 'loss':
            command.add_argument('runs', nargs='+', help='checkpoint_dirs; the first is compared with each')
            command.add_argument('--json', type=expanduser,
                                 help='a JSON to write: the numbers, with hardware, versions and settings')
    asked, rest = parser.parse_known_args(words)
    if asked.command == 'lr':
        asked.config = configure('train_fp8.py', rest)
    elif rest:
        parser.error(f'what is {rest[0]!r}?')
    if not asked.out.endswith(('.png', '.pdf', '.svg')):
        parser.error(f'--out={asked.out} ends in none of .png, .pdf, .svg')
    return asked


if __name__ == '__main__':
    one_line_errors()
    asked = plot_arguments(sys.argv[1:])

# Imported only now: --help and a mistyped setting are answered without waiting for torch.
import matplotlib
import torch

matplotlib.use('Agg')
matplotlib.rcParams['figure.constrained_layout.use'] = True
import matplotlib.pyplot as plt

from fp8gpt import files, optim, runlog
from fp8gpt.run import Length, preview, tokens_per_epoch


def finish_figure(figure, out):
    """Add a grid to all axes and write the figure, in the format that the name's end says."""
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    files.write(out, lambda file: figure.savefig(file, format=out[-3:]))
    plt.close(figure)
    say(out)


def say_run(run, ended, first):
    """Print how a runlog.RunCurves ended, and which settings and text are not those of the first run."""
    accuracy = f', HellaSwag acc_norm {run.last_hellaswag:.4f}' if run.hellaswag else ''
    say(f'{run.name}{ended}, median {run.speed:,.0f} tokens/s{accuracy}')
    if run.text != first.text:
        say('  measured on other data than the first, by the shards\' checksums: their losses do not compare')
    config, first = (each.header['config'] for each in (run, first))
    unlike = [f'{name}={value}' for name, value in config.items()
              if value != first.get(name, value) and name not in ('checkpoint_dir', 'resume')]
    if unlike:
        say(f'  unlike the first: {", ".join(unlike)}')


def percent_from(first, first_run, curve, run):
    """Return step -> distance in % of a curve, step -> loss, of a runlog.RunCurves from that of the first
    run, where that has a loss at the same tokens."""
    then = {round(first_run.tokens_at(step)): loss for step, loss in first.items()}
    return {step: 100 * (loss / then[tokens] - 1) for step, loss in curve.items()
            if then.get(tokens := round(run.tokens_at(step)))}


def plot_loss(directories, out, json_out):
    """Draw losses over tokens, and their distance from the first run's. Write a picture and, if json_out is
    given, its numbers with what produced them."""
    runs = [runlog.RunCurves(directory) for directory in directories]
    figure, (losses, distances) = plt.subplots(2, figsize=(8, 7), height_ratios=(3, 1), sharex=True)
    found, first = {}, runs[0]
    for number, run in enumerate(runs):
        ended = f': validation loss {run.last_val:.4f} at step {max(run.val)}' if run.val else ''
        far = percent_from(first.val, first, run.val, run)
        dots = {'marker': 'o', 'label': run.name + ended}
        for axes, values, look in (
                (losses, run.train, {'alpha': 0.4}), (losses, run.val, dots), (distances, far, dots),
                (distances, percent_from(first.train, first, run.train, run), {'alpha': 0.4})):
            tokens = [run.tokens_at(step) / 1e6 for step in values]
            axes.plot(tokens, [*values.values()], color=f'C{number}', markersize=4, **look)
        found[run.name] = {
            **run.header,
            'tokens_per_step': run.tokens,
            'median_tokens_per_sec': run.speed,
            'val_loss': run.val,
            'val_loss_percent_from_first': far,
            'train_loss': run.train,
            'hellaswag_acc_norm': run.hellaswag,
        }
        say_run(run, ended, first)
    losses.set(ylabel='loss, nats per token')
    losses.legend(title='dots: validation loss; pale: training loss')
    distances.set(xlabel='tokens, millions', ylabel='% from the first')
    finish_figure(figure, out)
    if json_out:
        files.write_json(json_out, found)


def plot_lr(config, out):
    """Draw the learning rate over the steps of a run on one GPU. config: train_fp8.py's settings. Raises
    SettingError where max_hours alone ends the run, and for a schedule that the training scripts refuse."""
    run = preview(config, torch.device('cuda'))
    config = run.config
    config['batch_size'] = config['batch_size'] or 1    # of an automatic one only the targets are known
    length = Length.of(config, 1, tokens_per_epoch(run))
    if length.last_step == optim.OPEN:
        raise SettingError(f'how many steps {length.ended_by} allows, a run measures: --max_steps=N draws N')
    length.schedule.check()
    title = (f'{config["lr_schedule"]}: {length.last_step:,} steps ({length.ended_by}), '
             f'warm-up {length.schedule.warmup_steps:,}')
    steps = sorted({(length.last_step - 1) * i // 1999 for i in range(2000)})
    rates = [*map(length.schedule.rate, steps)]
    figure, axes = plt.subplots(figsize=(8, 4))
    axes.plot(steps, rates)
    axes.set(xlabel='step', ylabel='learning rate', ylim=(0, None))
    axes.set_title(title, wrap=True)
    finish_figure(figure, out)
    say(f'{title}: step 0 {rates[0]:.2e}, highest {max(rates):.2e}, last {rates[-1]:.2e}')


if __name__ == '__main__':
    if asked.command == 'lr':
        plot_lr(asked.config, asked.out)
    else:
        plot_loss(asked.runs, asked.out, asked.json)
