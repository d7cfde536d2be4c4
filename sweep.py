"""Train once at each point of a grid of settings, and print which point ended best.

$ python sweep.py config/quickstart.py --max_lr=1e-2,2e-2 --beta2=0.95,0.99              # 4 runs, in turn
$ python sweep.py config/quickstart.py --max_lr=1e-2,2e-2 --beta2=0.95,0.99 --dry_run    # lists them
$ python sweep.py config/quickstart.py --max_lr=1e-2,2e-2 --beta2=0.95,0.99 --point=2    # trains one of them

Flags that `--help` does not list are settings of train_fp8.py. Commas separate the values of a flag, unless
the setting takes any text. Each run has a folder in sweeps/quickstart/, named by the values that differ. The
same command again skips finished runs and resumes those that were cut off. Of --point, the one that ends last
makes the table. Ctrl-C and SIGTERM let the present run save itself first.
"""
import itertools
import math
import os
import signal
import subprocess
import sys

from fp8gpt import files, shards
from configurator import (
    HERE, Parser, SettingError, UserError, at_least, configure, one_line_errors, read_script, read_words,
    say, with_other_names)

SCRIPT = 'train_fp8.py'
FITTED = {'batch_size', 'warmup_steps', 'decay_share', 'eval_freq'}     # which a run may set to what fits it
PLACES = {'checkpoint_dir', 'resume', 'overwrite', 'list_checkpoints', 'eval_only'}  # which the sweep sets


def read_grid(words):
    """Return {config file, or flag: the words that stand for it in one run and another}. Of two flags of one
    name the last one counts. Raises SettingError."""
    grid, given = {}, dict.fromkeys(PLACES)
    for name, text in read_words(words, with_other_names(read_script(SCRIPT))):
        word = text if name == 'config' else f'--{name}={text}'
        name, is_flag, texts = word.partition('=')
        values = [word]
        try:
            configure(SCRIPT, values)       # a setting that takes any text keeps its commas
        except SettingError as error:
            if word.endswith(('.yaml', '.yml')):
                raise SettingError(f'{error}; if it is a sweep file of W&B: `wandb sweep {word}`, then '
                                   '`sbatch --export=SWEEP_ID=... slurm/sweep.sbatch`') from None
            if not is_flag:
                raise
            values = [f'{name}={text}' for text in texts.split(',')]
        for ours in configure(SCRIPT, values[:1]).typed:
            if given.setdefault(ours, name) != name:
                raise SettingError(f'leave out {name}: the sweep sets {ours}, or another flag does')
        grid[name] = values
    return grid


def points(words, name):
    """Return [(checkpoint_dir, {setting: its value, where runs differ}, words)] of all runs, whose settings
    are checked. name: of the folder in sweeps/. Raises SettingError."""
    grid, found = read_grid(words).values(), []
    for words in itertools.product(*grid):
        settings = configure(SCRIPT, words)
        values = dict(word[2:].split('=') for word, each in zip(words, grid) if len(each) > 1)
        label = ','.join(map('='.join, values.items())) or 'run'
        folder = f'sweeps/{name or settings.stem or "sweep"}/{label}'
        found.append((folder, values, [*words, f'--checkpoint_dir={folder}', '--resume=auto']))
    return found


def train(words):
    """Return the exit code of train_fp8.py. On Ctrl-C and SIGTERM it saves its run first."""
    process = subprocess.Popen([sys.executable, f'{HERE}/{SCRIPT}', *words])
    try:
        return process.wait()
    finally:
        process.terminate()     # does nothing to a process that has ended
        process.wait()


def result_of(folder, words=()):
    """Return the last validation loss and bits per byte of a finished run; two empty texts for any other.
    Raises SettingError where the words, if there are any, have other numbers than the run had."""
    record, last = {}, {}
    for record in files.read_log(f'{folder}/log.jsonl'):
        last |= record
    if 'finished' not in record:    # a resume appends records to the one that says so
        return ['', '']
    settings = configure(SCRIPT, words) if words else {}
    for name in settings.keys() - FITTED:
        before, value = last.get('config', {}).get(name, settings[name]), settings[name]
        if type(value) in (int, float) and before != value:
            raise SettingError(f'{folder} was trained with {name}={before}, not {value}: give another --name')
    if words and os.path.isdir(place := shards.dataset_dir(settings)):
        there = {file: [*about] for file, about in shards.listed(shards.read_meta(place)).items()}
        if there and last.get('data', there) != there:
            raise SettingError(f'{folder} was trained on other data than is in {place}: give another --name')
    return [last.get(f'val/{name}') or '' for name in ('loss', 'bits_per_byte')]


def report_sweep(found):
    """Print the table of all runs, the best first, and write it to results.csv."""
    rows = [[*values.values(), *result_of(folder)] for folder, values, _ in found]
    # by bits per byte, since tokens of two tokenizers do not compare; no loss, or NaN: last
    rows.sort(key=lambda row: min(math.inf, float(row[-1] or row[-2] or 'inf')))
    folder, values, _ = found[0]
    lines = [','.join(map(str, row)) for row in ([*values, 'val loss', 'bits per byte'], *rows)]
    files.write_text(f'{os.path.dirname(folder)}/results.csv', '\n'.join(lines) + '\n')
    say(*lines)


def main(words):
    """Do what the command line asks for. Raises SettingError, and UserError where a run failed."""
    parser = Parser(__doc__)
    parser.add_argument('--name', help='the runs are in sweeps/<name>; not given: as the config file')
    parser.add_argument('--point', type=at_least(-1), default=-1,
                        help='the only run to take, counted from 0 as --dry_run lists them; -1 = all')
    parser.add_argument('--dry_run', action='store_true', help='list the runs')
    asked, words = parser.parse_known_args(words)
    found = points(words, asked.name)
    if asked.dry_run:
        return say(*(folder for folder, *_ in found))
    chosen = found if asked.point < 0 else found[asked.point:][:1]
    if not chosen:
        raise SettingError(f'point={asked.point}, but the runs are 0 to {len(found) - 1}')
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    failed = []
    for folder, _, words in chosen:
        if any(result_of(folder, words)):
            say(f'finished  {folder}: skipped')
        elif train(words):
            failed.append(folder)
    if asked.point < 0 or all(any(result_of(folder)) for folder, *_ in found):
        report_sweep(found)
    if failed:
        raise UserError(f'{len(failed)} of {len(chosen)} runs failed: {" ".join(failed)}')


if __name__ == '__main__':
    one_line_errors()
    main(sys.argv[1:])
