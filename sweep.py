"""Trains once at each point of a grid of settings, and tells which point ended best.

$ python sweep.py config/quickstart.py --max_lr=1e-3,2e-3 --beta2=0.95,0.99    # 4 runs, in sweeps/quickstart/
$ python sweep.py config/sweep_penalty.yaml --dataset=stdlib     # a W&B sweep file; flags hold for every run
$ python sweep.py config/sweep_penalty.yaml --point=2            # that run alone, as a task of a SLURM array
$ python sweep.py config/sweep_penalty.yaml --report             # what is there: CSV, table, picture; no run

Flags that are none of `--help`'s are the program's. Commas part the values of a flag, unless it takes
the whole as it is, as any text: such values are listed in a sweep file. The same command again leaves out
what is done and goes on with what was cut off. Ctrl-C, or SIGTERM, lets the run under way save itself first.
"""
import csv
import dataclasses
import io
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import time

import yaml

from fp8gpt import files
from configurator import (
    CONFIG_FILES, Parser, SettingError, UserError, at_least, configure, one_line_errors, read_script,
    with_equals, yaml_text)

HERE = os.path.dirname(os.path.abspath(__file__))
PLACES = {'checkpoint_dir', 'resume', 'overwrite', 'list_checkpoints', 'eval_only'}  # the sweep has its own
KEYS = {'program', 'method', 'parameters', 'command', 'name', 'description', 'project', 'entity', 'metric'}
COMMAND = ['${env}', '${interpreter}', '${program}', '${args}']     # W&B's, where a file has none
INTERPRETER = ['${env}', '${interpreter}', 'python', 'python3']     # this Python, whichever of them
MOST = 1000                                # runs of a grid; also the most of a SLURM array
BY_WANDB = 'is for W&B alone: `wandb sweep` and `wandb agent` run it'


def arguments(words):
    """Return (the command line's own arguments, the words of the program). Raises SettingError."""
    parser = Parser(__doc__)
    parser.add('--program', 'train_fp8', choices=['train_fp8', 'train'],
               help='what runs; a sweep file names its own')
    parser.add('--name', '', help="the runs lie in sweeps/<name>; '' = as the first config file")
    parser.add('--point', -1, type=at_least(-1), help='the number of the only run to take, from 0; -1 = all')
    parser.add('--count', False, help='print how many runs there are')
    parser.add('--dry_run', False, help='list them')
    parser.add('--report', False, help='report those that are done')
    return parser.parse_known_args(words)


@dataclasses.dataclass
class Grid:
    """axes: setting -> its values, as texts. command: what runs, in W&B's macros. name: of its folder. fixed:
    flags of a sweep file's single values; typed: words of the command line, stronger than the file's. note: a
    line to print before the first run."""
    axes: dict
    command: list
    program: str
    name: str
    fixed: tuple = ()
    typed: tuple = ()
    note: str = ''


@dataclasses.dataclass
class Point:
    """values: setting -> text. settings: all that its run has. record: what is known of that: 'status' is
    'done', 'failed' with a 'why', 'stopped', or 'running', which a kill leaves behind."""
    values: dict
    folder: str
    command: list
    settings: dict
    record: dict

    @property
    def label(self):
        return label(self.values)

    @property
    def status(self):
        return self.record.get('status', 'open')

    def note(self, **known):
        """Adds to its record, on the disk."""
        self.record |= known
        files.write_json(os.path.join(self.folder, 'point.json'), self.record)


def label(values):
    """{'max_lr': '1e-3', 'seed': '1'} -> 'max_lr=1e-3,seed=1'."""
    return ','.join(f'{name}={value}' for name, value in values.items()) or 'run'


# --------------------------------------------------------------------------------------------------- the grid

def read_grid(words, asked):
    """The Grid of a command line; asked: our own arguments. Raises SettingError, MissingError."""
    words = with_equals(words, read_script(os.path.join(HERE, 'train_fp8.py')).settings)
    configs = [word for word in words if word.endswith(CONFIG_FILES) and not word.startswith('-')]
    sweep_files = [word for word in configs if sweep_of(word)]
    stem = os.path.splitext(os.path.basename(configs[0]))[0] if configs else 'sweep'
    grid = Grid({}, COMMAND, f'{asked.program}.py', asked.name or stem)
    if len(sweep_files) > 1:
        raise SettingError(f'one sweep file at a time, not {" and ".join(sweep_files)}')
    if sweep_files:
        grid = from_file(sweep_files[0], grid)
    check_program(grid.program)
    more = []
    for word in words:
        setting, _, value = word.removeprefix('--').partition('=')
        parts = values_of(word, grid.program)
        if setting in PLACES:
            raise SettingError(f'{setting} is the sweep\'s own: a run has its folder in sweeps/{grid.name}')
        if len(parts) > 1 or setting in grid.axes:
            grid.axes[setting] = parts
        elif word not in sweep_files:
            more.append(word)
    return dataclasses.replace(grid, typed=tuple(more))


def check_program(program):
    """Raises SettingError for what does not train."""
    if program not in ('train.py', 'train_fp8.py'):
        raise SettingError(f'program: {program} is neither train.py nor train_fp8.py')


def sweep_of(path):
    """What a W&B sweep file says; {} for another file: configs in YAML are flat. Raises SettingError."""
    if not path.endswith(('.yaml', '.yml')) or not os.path.isfile(path):
        return {}
    try:
        said = yaml.load(yaml_text(path), Loader=yaml.BaseLoader)   # values stay texts, as flags are
    except yaml.YAMLError as error:
        raise SettingError(f'{path} is not YAML: {" ".join(str(error).split())}') from None
    nested = isinstance(said, dict) and isinstance(said.get('parameters'), dict)
    return said if nested else {}


def from_file(path, grid):
    """The Grid of a W&B sweep file; grid: what holds where it says nothing. Raises SettingError for what no
    grid is made of."""
    sweep = sweep_of(path)
    method = sweep.get('method')
    if method != 'grid':
        raise SettingError(f'{path}: method: {method} {BY_WANDB}; method: grid runs here too')
    odd = sorted(sweep.keys() - KEYS)
    if odd:
        raise SettingError(f'{path}: {odd[0]} {BY_WANDB}; leave it out to run the grid here')
    parameters = {name: listed(path, name, said) for name, said in sweep['parameters'].items()}
    axes = {name: values for name, values in parameters.items() if 'values' in sweep['parameters'][name]}
    fixed = [f'--{name}={values[0]}' for name, values in parameters.items() if name not in axes]
    command, note = sweep.get('command', COMMAND), ''
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        raise SettingError(f'{path}: command: wants a list of words')
    if '--use_wandb' in command:
        command.remove('--use_wandb')
        note = 'left out  --use_wandb of the sweep file: it is for `wandb agent`; type it to have it here'
    return Grid(axes, command, sweep.get('program', grid.program), grid.name, fixed=tuple(fixed), note=note)


def listed(path, name, said):
    """The values of a sweep file's parameter, as texts. Raises SettingError."""
    values = None
    if isinstance(said, dict) and said.keys() in ({'value'}, {'values'}):
        values = said.get('values', [said.get('value')])
    if name in PLACES or not isinstance(values, list) or not values:
        raise SettingError(f'{path}: {name} has neither a list of `values:` nor a `value:`, or is the '
                           f'sweep\'s own; a distribution {BY_WANDB}')
    return [str(value) for value in values]


def values_of(word, program):
    """['--max_lr=1e-3,2e-3'] -> ['1e-3', '2e-3']; of a value that the setting takes whole, that one alone."""
    _, _, value = word.partition('=')
    if ',' not in value:
        return [value]
    try:
        configure(os.path.join(HERE, program), [word])
    except SettingError:
        return value.split(',')
    return [value]


def points(grid):
    """Every Point, checked as far as settings can be without a run. Raises SettingError."""
    runs = math.prod(map(len, grid.axes.values()))
    if runs > MOST:
        raise SettingError(f'the grid has {runs:,} runs; {MOST:,} are the most')
    names, found = list(grid.axes), []
    for combination in itertools.product(*grid.axes.values()):
        values = dict(zip(names, combination))
        folder = os.path.join('sweeps', grid.name, label(values).replace('/', '-'))
        flags = [f'--{name}={value}' for name, value in values.items()]
        places = [f'--checkpoint_dir={folder}', '--resume=auto']
        words = [*expand(grid), *grid.typed, *flags, *places]      # of flags, the last one holds
        script = os.path.join(HERE, grid.program)
        command, settings = [sys.executable, script, *words], dict(configure(script, words))
        record = files.read_json(os.path.join(folder, 'point.json'))
        found.append(Point(values, folder, command, settings, record))
    for number, one in enumerate(found):
        check(one, found[:number])
    return found


def expand(grid):
    """Return the words behind the program in a sweep file's command, with W&B's macros filled in. A file runs
    nothing but the program: only INTERPRETER's words stand before its name, only ${args} and flags after it.
    Raises SettingError for every other word."""
    start = next((i for i, word in enumerate(grid.command) if word in ('${program}', grid.program)), None)
    if start is None or '${args}' not in grid.command[start:]:
        raise SettingError(f'command: lacks {"${program}" if start is None else "${args}"}')
    for word in grid.command[:start]:
        if word not in INTERPRETER:
            raise SettingError(f'command: {word} is refused: before ${{program}} may stand '
                               f'{", ".join(INTERPRETER)}')
    words = []
    for word in grid.command[start + 1:]:
        if word == '${args}':
            words += grid.fixed
            continue
        flag = re.sub(r'\$\{envvar:(\w+)\}', lambda match: os.environ.get(match[1], match[1]), word)
        if '${' in flag:
            raise SettingError(f'command: {word} {BY_WANDB}; after ${{program}} may stand ${{args}}')
        if not word.startswith('--'):
            raise SettingError(f'command: {word} is refused: after ${{program}} may stand ${{args}} and '
                               'words that begin with --, as --config=FILE')
        words.append(flag)
    return words


def check(one, earlier):
    """Raises SettingError for a point that is in the grid twice, or was begun with other settings."""
    for other in earlier:
        if other.settings | {'checkpoint_dir': ''} == one.settings | {'checkpoint_dir': ''}:
            raise SettingError(f'{one.label} and {other.label} are the same run')
    before = one.record.get('settings', {})
    for name in before.keys() & one.settings.keys() - {'run_name'}:
        if before[name] != one.settings[name]:
            raise SettingError(f'{one.folder} was run with {name}={before[name]}, now {one.settings[name]}: '
                               'another --name, or remove the folder')


# --------------------------------------------------------------------------------------------------- the runs

asked_to_stop = []


def train(command):
    """(exit code, last line) of a process whose output is printed as it comes. SIGTERM and Ctrl-C are handed
    on to it, and noted."""
    def hand_on(number, frame):
        asked_to_stop.append(number)
        process.terminate()
    last = ''
    streams = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT}
    process = subprocess.Popen(command, text=True, errors='replace', **streams)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, hand_on)
    with process:
        for line in process.stdout:
            print(line, end='', flush=True)
            last = line.strip() or last
    return process.returncode, last


def take(one):
    """Runs a point, to its end unless it is stopped or fails. Raises DataError where another process does."""
    import plot
    os.makedirs(one.folder, exist_ok=True)
    busy = f'another process runs {one.folder}: let it end'
    with files.lock(os.path.join(one.folder, 'point.lock'), busy):
        one.note(settings=one.settings, status='running')
        began = time.monotonic()
        code, last = train(one.command)
        seconds = one.record.get('seconds', 0) + time.monotonic() - began
        status, why = 'stopped', ''
        if code == 0:
            run = plot.read_run(one.folder)
            ended = max(run.val, default=-1) >= max(run.train)     # a stopped run does not evaluate
            status = 'done' if ended else 'stopped'
        elif not asked_to_stop:
            status, why = 'failed', last.removeprefix('error: ') if code > 0 else f'signal {-code}'
        one.note(status=status, why=why, seconds=seconds)


def take_all(open_points):
    """Runs the points that are not done. Raises UserError where the first of several would not start."""
    if len(open_points) > 1:
        code, last = train([*open_points[0].command, '--dry_run'])
        if code:
            raise UserError(f'nothing was run, {open_points[0].label} cannot: {last.removeprefix("error: ")}')
    for number, one in enumerate(open_points, 1):
        if asked_to_stop:
            break
        print(f'sweep     run {number} of {len(open_points)}: {one.label}', flush=True)
        take(one)
        print(f'sweep     {one.label}: {one.status} {one.record["why"]}', flush=True)


# -------------------------------------------------------------------------------------------- what they found

def row(one, run):
    """What is told of a point; run: its plot.Run, None where it is not done."""
    seconds = one.record.get('seconds')
    return {
        **one.values,
        'val loss': run and run.val[max(run.val)],
        'tokens/s': run and float(run.speed),
        'seconds': seconds and round(seconds),
        'status': one.status,
    }


def tell(grid, found):
    """Prints a table, the best point first; writes it as CSV, with hardware and versions, and the picture."""
    import plot
    from fp8gpt.bench_rows import table
    runs = {one.label: plot.read_run(one.folder, one.label) for one in found if one.status == 'done'}
    rows = {one.label: row(one, runs.get(one.label)) for one in found}
    best_first = sorted(rows, key=lambda name: loss_of(rows[name]))
    table([rows[name] for name in best_first])
    lines = []
    for name in best_first:
        header = runs[name].header if name in runs else {}
        lines.append({**rows[name], 'device': header.get('device'), **(header.get('versions') or {})})
    text = io.StringIO()
    columns = max(lines, key=len)
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(lines)
    folder = os.path.join('sweeps', grid.name)
    os.makedirs(folder, exist_ok=True)
    results = os.path.join(folder, 'results.csv')
    files.write(results, lambda file: file.write(text.getvalue().encode()))
    print(results)
    if runs:
        axes = {name: values for name, values in grid.axes.items() if len(values) > 1}
        drawn = [(one.values, runs[one.label]) for one in found if one.status == 'done']
        plot.plot_sweep(drawn, axes, os.path.join(folder, 'sweep.png'))


def loss_of(row):
    """By which rows are sorted: what did not end, or diverged, comes last."""
    loss = row['val loss']
    return math.inf if loss is None or math.isnan(loss) else loss


def main(words):
    """Does what the command line asks for. Raises UserError where a run failed."""
    asked, words = arguments(words)
    grid = read_grid(words, asked)
    found = points(grid)
    if asked.count:
        print(len(found))
        return
    if asked.dry_run:
        for number, one in enumerate(found):
            print(f'{number}  {one.label}  {one.status}  {one.folder}')
        return
    chosen = found
    if asked.point >= len(found):
        raise SettingError(f'point={asked.point}, but the runs are 0 to {len(found) - 1}')
    if asked.point >= 0:
        chosen = [found[asked.point]]
    if not asked.report:
        if grid.note:
            print(grid.note)
        take_all([one for one in chosen if one.status != 'done'])
    if asked_to_stop:
        print('stopped: the same command goes on')
    if asked.point < 0:
        tell(grid, found)
    failed = [one for one in chosen if one.status == 'failed']
    if failed:
        whys = '; '.join(f'{one.label}: {one.record["why"]}' for one in failed)
        raise UserError(f'{len(failed)} of {len(chosen)} runs failed: {whys}')


if __name__ == '__main__':
    one_line_errors()
    main(sys.argv[1:])
