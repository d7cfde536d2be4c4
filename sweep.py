"""Train once at each point of a grid of settings, and report which point ended best.

$ python sweep.py config/quickstart.py --max_lr=1e-3,2e-3 --beta2=0.95,0.99    # 4 runs, in sweeps/quickstart/
$ python sweep.py config/sweep_penalty.yaml --dataset=stdlib     # a W&B sweep file; flags hold for every run
$ python sweep.py config/sweep_penalty.yaml --point=2            # that run alone, as a task of a SLURM array
$ python sweep.py config/sweep_penalty.yaml --report             # what is there: CSV, table, picture; no run

Flags that `--help` does not list are the program's. Commas separate the values of a flag, unless it takes
any text: list such values in a sweep file. The same command again skips what is done and goes on with what
was cut off. Ctrl-C, or SIGTERM, lets the present run save itself first.
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


from fp8gpt import files
from configurator import (
    CONFIG_FILES, Parser, SettingError, UserError, at_least, configure, one_line_errors, read_script,
    read_yaml, with_equals)

HERE = os.path.dirname(os.path.abspath(__file__))
PLACES = {'checkpoint_dir', 'resume', 'overwrite', 'list_checkpoints', 'eval_only'}  # the sweep has its own
KEYS = {'program', 'method', 'parameters', 'command', 'name', 'description', 'project', 'entity', 'metric'}
INTERPRETER = ['${env}', '${interpreter}', 'python', 'python3']     # this Python, whichever of them
MOST = 1000                                # runs of a grid; also the most of a SLURM array
BY_WANDB = 'is for W&B alone: `wandb sweep` and `wandb agent` run it'


def sweep_arguments(words):
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
    """axes: setting -> its values, as texts. words: of every run, the weakest first. name: of its folder."""
    axes: dict
    words: list
    program: str
    name: str


@dataclasses.dataclass
class Point:
    """values: setting -> text. settings: all that its run has. record: what is known of that run: its
    'status' is 'done', 'failed' with a 'why', 'stopped', or 'running', which a kill leaves behind."""
    values: dict
    folder: str
    command: list
    settings: dict
    record: dict

    @property
    def label(self):
        return point_label(self.values)

    @property
    def status(self):
        return self.record.get('status', 'open')

    def note(self, **known):
        """Add to its record, on the disk."""
        self.record |= known
        files.write_json(os.path.join(self.folder, 'point.json'), self.record)


def point_label(values):
    """Return 'max_lr=1e-3,seed=1' of {'max_lr': '1e-3', 'seed': '1'}."""
    return ','.join(f'{name}={value}' for name, value in values.items()) or 'run'


# --------------------------------------------------------------------------------------------------- the grid

def read_grid(words, asked):
    """Return the Grid of a command line. asked: our own arguments. Raises SettingError, MissingError."""
    words = with_equals(words, read_script(os.path.join(HERE, 'train_fp8.py')).settings)
    configs = [word for word in words if word.endswith(CONFIG_FILES) and not word.startswith('-')]
    sweep_files = [word for word in configs if read_sweep(word)]
    stem = os.path.splitext(os.path.basename(configs[0]))[0] if configs else 'sweep'
    grid = Grid({}, [], f'{asked.program}.py', asked.name or stem)
    if len(sweep_files) > 1:
        raise SettingError(f'one sweep file at a time, not {" and ".join(sweep_files)}')
    if sweep_files:
        words.remove(sweep_files[0])
        fill_grid(grid, sweep_files[0])
    for word in words:
        setting, _, value = word.removeprefix('--').partition('=')
        values = [value]
        if ',' in value:
            try:
                configure(os.path.join(HERE, grid.program), [word])     # a text is taken whole
            except SettingError:
                values = value.split(',')
        if setting in PLACES:
            raise SettingError(f'{setting} is the sweep\'s own: a run has its folder in sweeps/{grid.name}')
        if len(values) > 1 or setting in grid.axes:
            grid.axes[setting] = values
        else:
            grid.words.append(word)
    return grid


def read_sweep(path):
    """Return a W&B sweep file as a dict; {} for another file: configs in YAML are flat. Raises
    SettingError."""
    if not path.endswith(('.yaml', '.yml')) or not os.path.isfile(path):
        return {}
    sweep = read_yaml(path)     # values stay texts, as flags are
    nested = isinstance(sweep, dict) and isinstance(sweep.get('parameters'), dict)
    return sweep if nested else {}


def fill_grid(grid, path):
    """Put a W&B sweep file into a Grid. Raises SettingError for what no grid is made of."""
    sweep = read_sweep(path)
    method = sweep.get('method')
    if method != 'grid':
        raise SettingError(f'{path}: method: {method} {BY_WANDB}; method: grid runs here too')
    for key in sweep.keys() - KEYS:
        raise SettingError(f'{path}: {key} {BY_WANDB}; leave it out to run the grid here')
    grid.program = sweep.get('program', grid.program)
    if grid.program not in ('train.py', 'train_fp8.py'):
        raise SettingError(f'program: {grid.program} is neither train.py nor train_fp8.py')
    fixed = []
    for name, said in sweep['parameters'].items():
        said = said if isinstance(said, dict) else {}
        values = said.get('values', [said['value']] if 'value' in said else None)
        if name in PLACES or len(said) != 1 or not isinstance(values, list) or not values:
            raise SettingError(f'{path}: {name} has neither a list of `values:` nor a `value:`, or is the '
                               f'sweep\'s own; a distribution {BY_WANDB}')
        if 'values' in said:
            grid.axes[name] = [str(value) for value in values]
        else:
            fixed.append(f'--{name}={values[0]}')
    command = sweep.get('command', ['${program}', '${args}'])
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        raise SettingError(f'{path}: command: wants a list of words')
    grid.words += expand_command(command, grid.program, fixed)


def expand_command(command, program, fixed):
    """Return the words after the program in a sweep file's command, with W&B's macros filled in. A file runs
    nothing but the program: only INTERPRETER's words stand before its name, only ${args} and flags after it.
    Raises SettingError for every other word."""
    start = next((i for i, word in enumerate(command) if word in ('${program}', program)), None)
    if start is None or '${args}' not in command[start:]:
        raise SettingError(f'command: lacks {"${program}" if start is None else "${args}"}')
    for word in command[:start]:
        if word not in INTERPRETER:
            raise SettingError(f'command: {word} is refused: before ${{program}} may stand '
                               f'{", ".join(INTERPRETER)}')
    words = []
    for word in command[start + 1:]:
        flag = re.sub(r'\$\{envvar:(\w+)\}', lambda match: os.environ.get(match[1], match[1]), word)
        if word == '${args}':
            words += fixed
        elif '${' in flag or not flag.startswith('--'):
            raise SettingError(f'command: {word} is refused: after ${{program}} may stand ${{args}} and '
                               'words that begin with --, as --config=FILE')
        elif flag != '--use_wandb':     # it is for W&B's agent; typed, it holds here too
            words.append(flag)
    return words


def points(grid):
    """Return every Point, checked as far as settings can be without a run. Raises SettingError."""
    runs = math.prod(map(len, grid.axes.values()))
    if runs > MOST:
        raise SettingError(f'the grid has {runs:,} runs; {MOST:,} are the most')
    found, seen = [], {}
    for combination in itertools.product(*grid.axes.values()):
        values = dict(zip(grid.axes, combination))
        folder = os.path.join('sweeps', grid.name, point_label(values).replace('/', '-'))
        flags = [f'--{name}={value}' for name, value in values.items()]
        words = [*grid.words, *flags, f'--checkpoint_dir={folder}', '--resume=auto']    # the last one holds
        script = os.path.join(HERE, grid.program)
        settings = dict(configure(script, words))
        record = files.read_json(os.path.join(folder, 'point.json'))
        one = Point(values, folder, [sys.executable, script, *words], settings, record)
        same = tuple(settings[name] for name in settings if name != 'checkpoint_dir')
        if same in seen:
            raise SettingError(f'{one.label} and {seen[same]} are the same run')
        before = record.get('settings', {})
        for name in before.keys() & settings.keys() - {'run_name'}:
            if before[name] != settings[name]:
                raise SettingError(f'{folder} was run with {name}={before[name]}, now {settings[name]}: '
                                   'another --name, or remove the folder')
        seen[same] = one.label
        found.append(one)
    return found


# --------------------------------------------------------------------------------------------------- the runs

asked_to_stop = []


def train(command):
    """Return (exit code, last line) of a process whose output is printed as it comes. SIGTERM and Ctrl-C are
    handed on to it, and noted."""
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
    """Run a point, to its end unless it is stopped or fails. Raises DataError where another process does."""
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
            if max(run.val, default=-1) >= max(run.train):      # a stopped run does not evaluate
                status = 'done'
        elif not asked_to_stop:
            status, why = 'failed', last.removeprefix('error: ') if code > 0 else f'signal {-code}'
        one.note(status=status, why=why, seconds=seconds)
    print(f'sweep     {one.label}: {status} {why}', flush=True)


def report_sweep(grid, found):
    """Print a table, the best point first; write it as CSV, with hardware and versions, and the picture."""
    import bench
    import plot
    rows, runs = [], []
    for one in found:
        row = {**one.values, 'val loss': None, 'tokens/s': None, 'seconds': one.record.get('seconds'),
               'status': one.status, 'device': None}
        if one.status == 'done':
            run = plot.read_run(one.folder)
            row |= {'val loss': run.val[max(run.val)], 'tokens/s': run.speed, 'device': run.header['device']}
            row |= run.header['versions'] or {}
            runs.append((one.values, run))
        rows.append(row)

    def loss(row):      # a run that did not end, or diverged, comes last
        return math.inf if row['val loss'] is None or math.isnan(row['val loss']) else row['val loss']

    rows.sort(key=loss)
    shown = [*grid.axes, 'val loss', 'tokens/s', 'seconds', 'status']
    print(bench.markdown([{name: row[name] for name in shown} for row in rows]))
    text = io.StringIO()
    writer = csv.DictWriter(text, max(rows, key=len))
    writer.writeheader()
    writer.writerows(rows)
    folder = os.path.join('sweeps', grid.name)
    os.makedirs(folder, exist_ok=True)
    files.write(f'{folder}/results.csv', lambda file: file.write(text.getvalue().encode()))
    print(f'{folder}/results.csv')
    if runs:
        axis = next((name for name, values in grid.axes.items() if len(values) > 1), 'seed')
        plot.plot_sweep(runs, axis, f'{folder}/sweep.png')


def main(words):
    """Do what the command line asks for. Raises UserError where a run failed."""
    asked, words = sweep_arguments(words)
    grid = read_grid(words, asked)
    found = points(grid)
    if asked.count:
        print(len(found))
        return
    if asked.dry_run:
        for number, one in enumerate(found):
            print(f'{number}  {one.label}  {one.status}  {one.folder}')
        return
    if asked.point >= len(found):
        raise SettingError(f'point={asked.point}, but the runs are 0 to {len(found) - 1}')
    chosen = [found[asked.point]] if asked.point >= 0 else found
    for one in chosen:
        if not (asked.report or asked_to_stop or one.status == 'done'):
            take(one)
    if asked_to_stop:
        print('stopped: the same command goes on')
    if asked.point < 0:
        report_sweep(grid, found)
    failed = [f'{one.label}: {one.record["why"]}' for one in chosen if one.status == 'failed']
    if failed:
        raise UserError(f'{len(failed)} of {len(chosen)} runs failed: {"; ".join(failed)}')


if __name__ == '__main__':
    one_line_errors()
    main(sys.argv[1:])
