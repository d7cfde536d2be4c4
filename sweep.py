"""Train once at each point of a grid of settings, and report which point ended best.

$ python sweep.py config/quickstart.py --max_lr=1e-2,2e-2 --beta2=0.95,0.99    # 4 runs, in sweeps/quickstart/
$ python sweep.py config/sweep_penalty.yaml --dataset=stdlib     # a W&B sweep file; flags hold for every run
$ python sweep.py config/sweep_penalty.yaml --point=2            # that run alone, as a task of a SLURM array

Flags that `--help` does not list are settings of the training script. Commas separate the values of a flag,
unless it takes any text: list such values in a sweep file. The same command again skips finished runs and
resumes those that were cut off. Ctrl-C and SIGTERM let the present run save itself first.
"""
import contextlib
import csv
import dataclasses
import io
import itertools
import math
import os
import pathlib
import signal
import subprocess
import sys

from fp8gpt import files
from configurator import (
    ALIASES, HERE, TRANSLATED, MissingError, Parser, SettingError, UserError, at_least, configure,
    one_line_errors, read_script, read_yaml, say, say_in_run, with_equals, with_home, with_other_names)

PLACES = {'checkpoint_dir', 'resume', 'overwrite', 'list_checkpoints', 'eval_only'}  # which the sweep sets
KEYS = {'program', 'method', 'parameters', 'command', 'name', 'description', 'project', 'entity', 'metric'}
CONFIGS = f'{HERE}/config/'      # .py files that a sweep file may name
MOST = 1000     # runs of a sweep; each is checked before the first one starts
# what a sweep file's command may hold besides flags; sys.executable and the program run here
COMMAND = '${env}', '${interpreter}', 'python', 'python3', '${program}', '${args}', 'train.py', 'train_fp8.py'
BY_WANDB = 'is for W&B alone: `wandb sweep` and `wandb agent` run it'


@dataclasses.dataclass
class Point:
    """Hold one training run. values: setting -> text, where it differs from others. folder: its
    checkpoint_dir. command: words that start it. settings: all that decides its result."""
    values: dict
    folder: str
    command: list
    settings: dict

    @property
    def result(self):
        """Return the runlog.RunCurves of a finished run, else None."""
        from fp8gpt import runlog   # late: it imports torch
        with contextlib.suppress(MissingError, SettingError):   # no log, no step yet
            run = runlog.RunCurves(self.folder)
            return run if run.finished else None


# --------------------------------------------------------------------------------------------------- the grid

def read_grid(words):
    """Return (the script that trains, the words of every run, {setting: its values, as texts}). words: config
    files, and flags with `=`. Raises SettingError."""
    program, shared, axes = 'train_fp8.py', [], {}
    for word in sorted(words, key=lambda word: word.startswith('-')):       # files first: flags win
        sweep = read_yaml(word) if word.endswith(('.yaml', '.yml')) and os.path.isfile(word) else None
        if isinstance(sweep, dict) and isinstance(sweep.get('parameters'), dict):   # configs are flat
            program, flags, grid = read_sweep(word, sweep)
            shared += flags
            axes |= grid
            continue
        setting, _, value = word.removeprefix('--').partition('=')
        values = [value]
        if ',' in value:
            try:
                configure(program, [word])      # a setting that takes any text
            except SettingError:
                values = value.split(',')
        if setting in PLACES:
            raise SettingError(f'leave out {setting}: the sweep sets it, for each run a folder in sweeps/')
        if len(values) > 1 or setting in axes:
            axes[setting] = values
        else:
            shared.append(word)
    return program, shared, axes


def read_sweep(path, sweep):
    """Return what read_grid does of a W&B sweep file, a dict of texts. No word of the file is run; of its
    command, only flags are taken. Raises SettingError for a file that is not a grid."""
    method, program = sweep.get('method', 'grid'), sweep.get('program', 'train_fp8.py')
    if method != 'grid':
        raise SettingError(f'{path}: method: {method} {BY_WANDB}; method: grid runs here too')
    for key in sweep.keys() - KEYS:
        raise SettingError(f'{path}: {key} {BY_WANDB}; leave it out to run the grid here')
    metric = sweep.get('metric')
    if isinstance(metric, dict) and metric.get('goal') == 'maximize':
        raise SettingError(f'{path}: metric: {metric.get("name")} {BY_WANDB}; here the lowest validation '
                           'loss is the best: leave it out')
    if program not in ('train.py', 'train_fp8.py'):
        raise SettingError(f'program: {program} is neither train.py nor train_fp8.py')
    words, axes = flags_of_command(path, sweep.get('command') or []), {}
    for name, given in sweep['parameters'].items():
        given = given if isinstance(given, dict) else {}
        values = [given['value']] if 'value' in given else given.get('values')
        is_list = isinstance(values, list) and (values == [None] or {*map(type, values)} == {str})
        if name in PLACES or not is_list:
            raise SettingError(f'{path}: {name} has neither a list of `values:`, each a number or a text, '
                               f'nor a `value:`, or the sweep sets it; a distribution {BY_WANDB}')
        if len(values) > 1:
            axes[name] = values
        elif values[0] is not None:
            words.append(f'--{name}={values[0]}')
    for word in [*words, *(f'--{name}={value}' for name, values in axes.items() for value in values)]:
        config = os.path.realpath(with_home(word.removeprefix('--config=')))
        if config.endswith('.py') and word.startswith('--config=') and not config.startswith(CONFIGS):
            raise SettingError(f'{path}: {word} would run Python, and a sweep file may be a stranger\'s: '
                               'type that file on the command line, or name a .yaml')
    return program, words, axes


def flags_of_command(path, command):
    """Return the flags of a sweep file's command that are settings here. Raises SettingError for a word that
    is no flag and not in COMMAND."""
    flags = []
    for word in map(str, command if isinstance(command, list) else [command]):
        if word.startswith('--'):
            setting, _, value = word.removeprefix('--').partition('=')
            if setting not in {*PLACES, 'use_wandb'} and '${' not in value:     # those are W&B's agent's
                flags.append(word)
        elif word not in COMMAND:
            raise SettingError(f'{path}: command: {word} is refused: it may have {", ".join(COMMAND)} and '
                               'words that begin with --, as --config=FILE')
    return flags


def refuse_two_names(shared, axes):
    """Raise SettingError where a setting stands in the grid under two names, or beside it: one value would be
    lost. shared, axes: as from read_grid."""
    flags = {word.removeprefix('--').partition('=')[0] for word in shared} - TRANSLATED.keys()
    for one, other in itertools.product(axes, [*axes, *sorted(flags)]):
        if one != other and ALIASES.get(one, one) == ALIASES.get(other, other):
            raise SettingError(f'{one} and {other} are one setting: leave one of them out')


def points(words, name=None):
    """Return every Point, whose settings are checked. name: of the folder in sweeps/; None = as the first
    config file. Raises SettingError."""
    words = with_equals(words, with_other_names(read_script('train_fp8.py').settings))
    program, shared, axes = read_grid(words)
    config = next((word for word in words if not word.startswith('-')), 'sweep')
    name = name or pathlib.Path(config).stem
    if os.path.normpath(name).startswith(('..', '/')):
        raise SettingError(f'--name={name} names a folder outside of sweeps/')
    refuse_two_names(shared, axes)
    runs = math.prod(map(len, axes.values()))
    if runs > MOST:
        raise SettingError(f'that makes {runs:,} runs, more than {MOST:,}: give fewer values')
    found = []
    for combination in itertools.product(*axes.values()):
        values = dict(zip(axes, combination))
        pairs = [f'{setting}={value}' for setting, value in values.items()]
        folder = os.path.join('sweeps', name, ','.join(pairs).replace('/', '-') or 'run')
        # of two flags for a setting the last one counts
        flags = [*shared, *(f'--{pair}' for pair in pairs), f'--checkpoint_dir={folder}', '--resume=auto']
        if folder in [point.folder for point in found]:
            raise SettingError(f'two runs would share {folder}: leave one of the values out, or rename it')
        settings, before = configure(program, flags), files.read_json(f'{folder}/point.json')
        for setting in before.keys() & settings.keys():
            if before[setting] != settings[setting]:
                raise SettingError(f'{folder} was run with {setting}={before[setting]}, now '
                                   f'{settings[setting]}: another --name, or remove the folder')
        found.append(Point(values, folder, [sys.executable, f'{HERE}/{program}', *flags], settings))
    return found


# --------------------------------------------------------------------------------------------------- the runs

def train(command):
    """Return the exit code of a training process. On Ctrl-C and SIGTERM the process saves its run first."""
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise


def report_sweep(found):
    """Print a table, the best point first, and write it as CSV, with hardware and versions. Draw the curves
    of the finished runs."""
    import plot
    from fp8gpt import runlog
    rows = []
    for point in found:
        run = point.result
        row = point.values | {'val loss': run and run.last_val}
        if run:
            row |= {'bits per byte': run.last_bits, 'tokens/s': run.speed}
            row |= {'device': run.header['device'], **run.header['versions']}
        rows.append((row, point.folder))
    # by bits per byte, since tokens of two tokenizers do not compare; no loss, or NaN: last
    rows.sort(key=lambda pair: min(math.inf, pair[0].get('bits per byte') or pair[0]['val loss'] or math.inf))
    finished = [folder for row, folder in rows if row['val loss']]
    rows = [row for row, _ in rows]
    say_in_run(*runlog.markdown(rows).splitlines())
    results, text = f'{os.path.dirname(found[0].folder)}/results', io.StringIO()
    writer = csv.DictWriter(text, max(rows, key=len))
    writer.writeheader()
    writer.writerows(rows)
    files.write_text(f'{results}.csv', text.getvalue())
    say_in_run(f'{results}.csv')
    if finished:
        plot.plot_loss(finished, f'{results}.png', None)


def main(words):
    """Do what the command line asks for. Raises SettingError, and UserError where a run failed."""
    parser = Parser(__doc__)
    parser.add_argument('--name', help='the runs lie in sweeps/<name>; not given: as the first config file')
    parser.add_argument('--point', type=at_least(-1), default=-1, help='the only run to take; -1 = all')
    parser.add_argument('--dry_run', action='store_true', help='list the runs')
    asked, words = parser.parse_known_args(words)
    found = points(words, asked.name)
    if asked.dry_run:
        say(*(f'{number}  {point.folder}' for number, point in enumerate(found)))
        return
    failed, chosen = [], found[asked.point:][:1] if asked.point >= 0 else found
    if not chosen:
        raise SettingError(f'point={asked.point}, but the runs are 0 to {len(found) - 1}')
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for point in chosen:
        if not point.result:
            say_in_run(f'run       {point.folder}')
            files.write_json(f'{point.folder}/point.json', point.settings)
            if train(point.command):
                failed.append(point.folder)
    if asked.point < 0:
        report_sweep(found)
    if failed:
        raise UserError(f'{len(failed)} of {len(chosen)} runs failed: {" ".join(failed)}')


if __name__ == '__main__':
    one_line_errors()
    main(sys.argv[1:])
