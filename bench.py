"""Compare FP8 with bf16: speed, memory and losses.

$ python bench.py pair config/gpt2_fp8.py --recipes=tensorwise,delayed  # training steps
$ python bench.py lora config/gpt2_fp8.py --lora_targets=all            # training steps with adapters
$ python bench.py quality config/quickstart.py --steps=300 --seeds=3    # losses of whole runs

They take train_fp8.py's config files and flags too; each prints a table and writes a JSON with
hardware, versions and commit into runs/bench, which git ignores. `quality` ends with exit code 1 where FP8 is
worse (FAIL), and with 4 where it is neither that nor as good (PASS).
"""
import os
import sys
from os.path import expanduser

from configurator import (
    HERE, MachineError, Parser, SettingError, UserError, at_least, configure, first_line, one_line_errors,
    say)

WARMUP = 3      # steps that are not timed: they compile
ENDS = 'max_tokens', 'num_epochs', 'max_hours'      # of a run, which would not take as many steps as others
NO_OTHER_END = [f'--{name}=0' for name in ENDS]
STEPS = {'steps': (10, f'timed, after {WARMUP} that are not')}
AXES = {'backend': 'fp8_backend', 'recipe': 'fp8_recipe', 'rank': 'lora_rank'}     # column -> setting
MATRIX = {f'{axis}s': ('', "commas between; '' = as the settings say") for axis in ('backend', 'recipe')}
# command -> what it measures, and its flags: name -> (default, meaning)
COMMANDS = {
    'pair': ('training steps in bf16 and in FP8: a row for each backend and recipe', STEPS | MATRIX),
    'lora': ('training steps with adapters, in bf16 and in FP8', STEPS | {
        'ranks': ('0,8,16,32', 'a row for each; 0: full training')}),
    'quality': ('whole runs of train_fp8.py in bf16 and in FP8: validation loss decides', MATRIX | {
        'steps': (300, 'of each run'),
        'seeds': (3, 'runs in each precision: choose the number once, before you look'),
        'out': ('', "folder that keeps the runs; '' = runs/quality-<config>")}),
}


def bench_arguments(words):
    """Return the command line: `command`, its own flags, and `words`, those of train_fp8.py. Raises
    SettingError."""
    if words[:1] == ['gemm']:
        raise SettingError('gemm: single multiplications are not timed here: `python bench.py pair` with the '
                           'same flags times whole training steps')
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest='command', required=True)
    for name, (what, flags) in COMMANDS.items():
        command = commands.add_parser(name, help=what, doc=what)
        command.add_argument('--results', type=expanduser, default='runs/bench',
                             help='folder of JSONs, none is overwritten')
        for flag, (default, meaning) in flags.items():
            kind = at_least(1) if isinstance(default, int) else expanduser
            command.add_argument(f'--{flag}', type=kind, default=default,
                                 help=f'{meaning} (default: {default!r})')
    asked, asked.words = parser.parse_known_args(words)
    configure('train_fp8.py', asked.words)
    return asked


if __name__ == '__main__':
    one_line_errors()
    bench_arguments(sys.argv[1:])

# Imported only now: --help and a mistyped setting are answered without waiting for torch.
import contextlib
import functools
import itertools
import math
import statistics
import subprocess
import tempfile

from fp8gpt import distributed, files, fp8, pretrained, runlog
from fp8gpt.gpus import device_name
from fp8gpt.run import preview
from fp8gpt.selfcheck import choose_precision
from plan import WORTH


# --------------------------------------------------------------------------------- what is compared with what

def compared_run(words):
    """Return the run.Run of train_fp8.py's config files and flags, whose dataset may be missing. Raises
    SettingError for settings in which bf16 and FP8 cannot be compared."""
    config = pretrained.fine_tuning('train_fp8.py', configure('train_fp8.py', words))
    run = preview(config, distributed.init(config['device']).device)
    of_checkpoint = run.config['init_from'].endswith('.pt')     # a Hugging Face model's weights are not read
    on_a_gpu_in_fp32 = run.config['dtype'] != 'bf16' and run.device.type != 'cpu'
    if on_a_gpu_in_fp32 or not run.batch_size or of_checkpoint or run.resumed:
        raise SettingError('to compare FP8 with bf16, set dtype=bf16 and a batch_size, and no checkpoint')
    return run


def settled_as(words):
    """Return (run.Run, fp8.Choice) of these words, as in the training scripts. Raises MachineError where the
    run would not train in FP8."""
    run = compared_run(words)
    choice, _ = choose_precision(run)
    if not choice.on:
        raise MachineError(f'{run.config["dtype"]} only: {choice.reason}')
    return run, choice


def matrix(arguments):
    """Yield (the columns that flags name, as {'recipe': 'rowwise'}, the words with these settings) for each
    combination."""
    values = {axis: text.split(',') for axis in AXES if (text := getattr(arguments, f'{axis}s', ''))}
    for combination in itertools.product(*values.values()):
        columns = dict(zip(values, combination))
        yield columns, [*arguments.words, *(f'--{AXES[axis]}={value}' for axis, value in columns.items())]


def gain(times):
    """Return the last columns of a row: the time without FP8 over FP8's, of {precision: seconds}, and a
    verdict."""
    without, in_fp8 = times.values()
    ratio = without / in_fp8
    said = 'FP8'
    if round(ratio, 2) < 1:
        said = 'SLOWER'
    elif round(ratio, 2) < WORTH:
        said = 'train in bf16:'
    return {'ratio': ratio, 'verdict': f'{said} x{ratio:.2f}'}


# --------------------------------------------------------------------------------------- runs of train_fp8.py

@functools.cache        # bf16's runs are those of each row of `quality`
def whole_run(words, folder):
    """Train and return the run's runlog.RunCurves. words: a tuple. Raises MachineError where the script fails
    or is stopped."""
    command = [sys.executable, f'{HERE}/train_fp8.py', *words]
    done = subprocess.run([*command, f'--checkpoint_dir={folder}', '--overwrite'])
    if done.returncode:
        raise MachineError('train_fp8.py failed: its own message says why')
    curves = runlog.RunCurves(folder)
    if not curves.finished:
        raise MachineError(f'{folder} was stopped')
    return curves


def bench_steps(arguments, words):
    """Yield a row of `pair` or `lora`: what the logs of train_fp8.py say of the same steps from the same
    weights in bf16 and in FP8."""
    run, choice = settled_as(words)
    steps = WARMUP + arguments.steps
    words = [*words, f'--max_steps={steps}', *NO_OTHER_END, '--log_freq=1', '--sample_freq=0',
             '--hellaswag_freq=0', f'--eval_tokens={run.batch_size * run.config["block_size"]}',
             f'--checkpoint_freq={steps}', '--keep_checkpoints=1']
    row, times = {'backend': choice.backend, 'recipe': choice.recipe}, {}
    for precision, flags in (run.config['dtype'], ['--fp8_backend=off']), ('FP8', []):
        with tempfile.TemporaryDirectory(dir=arguments.results) as folder:
            curves = whole_run((*words, *flags), folder)
        row |= {f'{precision} loss': curves.train[steps], f'{precision} GB': curves.peak_gb}
        speed = statistics.median(curves.speeds[step] for step in range(WARMUP + 1, steps + 1))
        row[f'{precision} tokens/s'], times[precision] = speed, 1 / speed
    row['loss difference, %'] = 100 * (row['FP8 loss'] / row[f'{run.config["dtype"]} loss'] - 1)
    yield row | gain(times)


# ---------------------------------------------------------------------------------------------------- quality

PASSES, WARNS = 0.5, 2      # % that FP8's validation loss must be shown not to be worse by
# Student's t, two-sided 95%, for 1, 2, ... degrees of freedom; t95 has the others
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


class Undecided(UserError):
    """Reports that FP8 was not shown to be as good, nor to be worse by 2%."""
    exit_code = 4


def t95(freedom):
    """Return Student's t, two-sided 95%; beyond the table by Fisher's series in 1 / freedom."""
    if freedom <= len(T95):
        return T95[freedom - 1]
    return 1.95996 + 2.37227 / freedom + 2.82250 / freedom**2 + 2.55585 / freedom**3


def compare(bf16, eight):
    """Return (the mean over seeds of FP8 - bf16 in % of bf16, its 95% interval by Student's t), from a value
    per seed in each precision. The interval is None with one seed."""
    gaps = [100 * (f / b - 1) for b, f in zip(bf16, eight)]
    gap = statistics.fmean(gaps)
    if len(gaps) == 1 or not math.isfinite(gap):
        return gap, None
    noise = t95(len(gaps) - 1) * statistics.stdev(gaps) / len(gaps)**0.5
    return gap, [gap - noise, gap + noise]


def loss_verdict(gap, interval):
    """Return the verdict on a compared validation loss. PASS, WARN: all of the interval is under their limit,
    which an FP8 that is worse by the limit passes once in 40 times. FAIL: all of it is over PASS's limit."""
    if not math.isfinite(gap):
        return 'FAIL'
    if interval is None:
        return 'INCONCLUSIVE, one seed'
    low, high = interval
    if high < PASSES:
        return 'PASS'
    if low > PASSES:
        return 'WARN, worse by 0.5% to 2%' if high < WARNS else 'FAIL'
    return 'WARN, not more than 2% worse' if high < WARNS else 'INCONCLUSIVE'


def bench_quality(arguments, words):
    """Train with each seed in both precisions, and yield the row that compares them."""
    run, choice = settled_as(words)
    config = run.config
    out = arguments.out or f'runs/quality-{config.stem or "flags"}'
    cases = {'bf16': [*arguments.words, '--fp8_backend=off'],   # the losses of train.py, bit for bit
             f'{config["fp8_backend"]}-{config["fp8_recipe"]}': words}
    found = []
    for label, its_words in cases.items():
        its_words = ['--keep_checkpoints=1', *its_words, f'--max_steps={arguments.steps}', *NO_OTHER_END]
        found.append([whole_run((*its_words, f'--seed={seed}'), os.path.join(out, f'{label}-{seed}'))
                      for seed in range(1337, 1337 + arguments.seeds)])
    losses = [[run.last_val for run in runs] for runs in found]
    gap, interval = compare(*losses)
    row = {'recipe': choice.recipe, 'seeds': arguments.seeds}
    first = found[0][0]
    row['curve'] = {        # tokens -> gap and 95%
        round(first.tokens_at(step)): compare(*([run.val[step] for run in runs] for runs in found))
        for step in first.val}
    row['bf16 validation loss'], row['FP8 validation loss'] = map(statistics.fmean, losses)
    row |= {'gap, %': gap, '95%': interval}
    row['training loss gap, %'] = compare(*([run.last_train for run in runs] for runs in found))[0]
    if all(run.hellaswag for run in itertools.chain(*found)):
        bf16, eight = (statistics.fmean(run.last_hellaswag for run in runs) for runs in found)
        row['HellaSwag gap, points'] = 100 * (eight - bf16)
    yield row | {'verdict': loss_verdict(gap, interval)}


def check_verdicts(rows):
    """Raise MachineError where a row of `quality` says FAIL or why it has no runs, and Undecided where one is
    not PASS."""
    verdicts = [row['verdict'] for row in rows if row['verdict'] != 'PASS']
    for verdict in verdicts:
        if not verdict.startswith(('WARN', 'INCONCLUSIVE')):
            raise MachineError(verdict.replace('FAIL', 'FAIL: validation loss in FP8 is worse'))
    if verdicts:
        raise Undecided(f'validation loss: {verdicts[0]}')


# ------------------------------------------------------------------------------------------------------- rows

# command -> generator of the rows that some words make
BENCHES = {'pair': bench_steps, 'lora': bench_steps, 'quality': bench_quality}


def report_rows(benches, path, about):
    """Return the rows of all of [(columns, generator of rows)]. Print each as soon as it is measured, and
    write all to a JSON, with what is `about` them. If FP8 cannot run, or memory is full, the reason is the
    row's verdict."""
    rows = []

    def report(row):
        heading = not rows or row.keys() != rows[-1].keys()
        rows.append(row)
        files.write_json(path, about | {'rows': rows})
        print(runlog.markdown([row], heading), flush=True)

    for columns, bench in benches:
        try:
            for row in bench:
                report(columns | row)
        except (fp8.OptionError, RuntimeError) as error:    # MachineError, DeviceError, OutOfMemoryError, too
            report(columns | {'verdict': first_line(error)})
    return rows


def main(words):
    """Run one benchmark and write its figures."""
    arguments = bench_arguments(words)
    run = compared_run(arguments.words)
    os.makedirs(arguments.results, exist_ok=True)
    start = os.path.join(arguments.results, f'{arguments.command}-{run.config.stem or "flags"}')
    for number in itertools.count(1):
        path = start + f'-{number}' * (number > 1) + '.json'
        with contextlib.suppress(FileExistsError), open(path, 'x'):     # taken: another may run at once
            break
    say(f'results   {path}')
    for name, flag in {'max_steps': 'steps', **dict.fromkeys(ENDS, 'steps'), 'seed': 'seeds'}.items():
        if name in run.config.typed and flag in vars(arguments):
            say(f'          {name} is not used: --{flag} decides')
    about = {'device': device_name(run.device), 'versions': runlog.versions(),
             'words': arguments.words, 'data': run.folder}
    bench = BENCHES[arguments.command]
    benches = [(columns, bench(arguments, words)) for columns, words in matrix(arguments)]
    try:
        rows = report_rows(benches, path, about)
    finally:
        if not os.path.getsize(path):       # nothing was measured
            os.remove(path)
    if arguments.command == 'quality':
        check_verdicts(rows)
    elif not any('ratio' in row for row in rows):
        raise MachineError('nothing was measured: the verdicts say why')


if __name__ == '__main__':
    main(sys.argv[1:])
