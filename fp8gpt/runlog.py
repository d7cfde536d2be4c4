"""Print and log a run: console, log.jsonl in the checkpoint_dir, TensorBoard, W&B."""
import contextlib
import functools
import glob
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import threading
import time
from os.path import basename, exists, isfile, join

import numpy as np
import torch
from tqdm import tqdm

from fp8gpt import files
from configurator import (
    HERE, DataError, MissingError, SettingError, first_line, one_line_errors, printable, say_in_run)
from fp8gpt.distributed import is_rank_0, until_asked
from fp8gpt.gpus import device_name, gpu_of

# ------------------------------------------------------------------------------------------------ the console

DELAY = 1                               # seconds before a bar shows
tqdm.set_lock(threading.RLock())        # tqdm's default lock may start a process


def bar(things, what):
    """Iterate over the things under tqdm's progress bar, which only rank 0 shows, on a terminal's stderr. A
    request to stop ends it: see distributed.until_asked."""
    hidden = None if is_rank_0() else True      # None: hidden where stderr is no terminal
    shown = tqdm(things, what, leave=False, disable=hidden, delay=DELAY, dynamic_ncols=True)
    return until_asked(shown)


def cell_text(value):
    """Return a table's cell: four digits of a number, `least .. most` of a list, a dash for None."""
    if value is None:
        return '-'
    if isinstance(value, list):
        return ' .. '.join(map(cell_text, value))
    if isinstance(value, float):
        return f'{value:,.4g}' if abs(value) < 1e4 else f'{value:,.0f}'
    return printable(value)


def markdown(rows, heading=True):
    """Return rows, dicts, as a Markdown table. A row may lack a column; a dict, such as a curve, is none."""
    columns = list(dict.fromkeys(
        column for row in rows for column, value in row.items() if not isinstance(value, dict)))
    lines = [columns, ['---'] * len(columns)] if heading else []
    lines += [[cell_text(row.get(column)) for column in columns] for row in rows]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


# -------------------------------------------------------------------------------------------------------- log

FIRST = 'train/loss', 'val/loss', 'train/grad_norm', 'train/tokens_per_sec'     # what TensorBoard shows first
NEVER = 10**12     # steps that no run takes: its end is not known yet. optim.OPEN is as much
JOB = 'SLURM_JOB_ID', 'SLURM_RESTART_COUNT', 'SLURM_JOB_NODELIST'


@functools.cache
def versions():
    """Return what produced a result: torch, Python, and the commit when this is first asked, 'a1b2c3d-dirty'
    where tracked files differ from it. The variable FP8GPT_COMMIT names that of a copy of the files."""
    commit = os.environ.get('FP8GPT_COMMIT', '')
    with contextlib.suppress(OSError):  # no git here
        command = ['git', '-C', HERE, 'describe', '--always', '--dirty', '--exclude=*']
        commit = commit or subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return {'torch': str(torch.__version__), 'python': platform.python_version(),
            'commit': commit or 'unknown'}


def open_jsonl(path):
    """Return (write(step, {name: value}), close()) of a log.jsonl. Text stands for NaN and infinity. Each
    record opens the file: an editor or a sync puts another one in its place, which a run may outlive."""
    def write(step, named):
        with open(path, 'a') as file:
            file.write(files.json_text({'step': step, **named}) + '\n')
    return write, lambda: None


def shown(named):
    """Return what of a record TensorBoard and W&B show: its numbers but those of single layers, and a sample
    of text."""
    return {name: value for name, value in named.items()
            if name == 'sample' or isinstance(value, (int, float)) and name.count('/') == 1}


def open_tensorboard(config, precision, records):
    """Return (write(step, {name: value}), close()) of curves for `tensorboard --logdir runs`. records: of the
    log so far, which are written anew in place of earlier curves, since TensorBoard's page shows also what a
    resume abandons. Each run has a folder called after its checkpoint_dir. The names of FIRST begin with
    _main, so that they stand first on the page."""
    from torch.utils.tensorboard import SummaryWriter
    place = f'{config["run_name"]}-{precision}/{os.path.relpath(config["checkpoint_dir"])}'
    folder = 'runs/' + place.replace('..', '%2E%2E')    # no way out of runs/
    old = glob.glob(f'{glob.escape(folder)}/events.out.tfevents.*')
    for path in old:
        os.remove(path)
    writer = SummaryWriter(folder)

    def write(step, named):
        for name, value in shown(named).items():
            add = writer.add_text if name == 'sample' else writer.add_scalar
            add(f'_main/{name.replace("/", "_")}' if name in FIRST else name, value, step)
    for record in records if old else ():   # else they are of another folder's precision
        write(record['step'], record)
    return write, writer.close


def open_wandb(config, precision, records):
    """Return (write(step, {name: value}), close()) of a W&B run. Its id is in checkpoint_dir, so that a
    resumed run continues it. Raises any error of W&B's."""
    import wandb
    path = join(config['checkpoint_dir'], 'wandb.json')
    run = wandb.init(
        project=config['wandb_project'] or os.environ.get('WANDB_PROJECT') or 'llm-fp8',
        name=config['run_name'],
        tags=[precision],
        id=files.read_json(path).get('id') if records else None,
        resume='allow',
        config=dict(config),
        dir=config['checkpoint_dir'],
    )
    one_line_errors()   # again: W&B's own hook would print a traceback before the line
    files.write_json(path, {'id': run.id})
    run.define_metric('*', step_metric='step')  # W&B's own count takes no step twice
    return lambda step, named: run.log({'step': step, **shown(named)}), run.finish


WRITERS = {'use_tensorboard': open_tensorboard, 'use_wandb': open_wandb}


class RunLog:
    """Print and record on rank 0; on other ranks every method is silent. Before `open`, and with eval_only,
    nothing is recorded.

    run: a run.Run. last_step: where the run ends, as far as is known; the loop sets it."""

    def __init__(self, ranks, run):
        self.main, self.world_size = ranks.main, ranks.world_size
        self.run, self.config = run, run.config
        self.gpu = gpu_of(run.device)
        self.writers = {}       # what is written -> (write, close)
        self.first = []     # the lines of intro
        self.last_step = NEVER
        self.lock = None

    def open(self, precision, last_step, lock=None):
        """Open the files. A run resumed in its folder loses the log's records of later steps; any other run's
        log starts empty. last_step: where the run ends. lock: the folder's Lock, on rank 0; else None."""
        config, run = self.config, self.run
        self.last_step, self.lock = last_step, lock
        if config['eval_only'] or not self.main:
            return
        folder, step, records = config['checkpoint_dir'], run.resumed['step'] if run.resumed else 0, []
        path, goes_on = join(folder, 'log.jsonl'), files.is_in(folder, run.resume_path)
        if goes_on:
            records = [record for record in files.read_log(path) if record['step'] <= step]
        elif exists(path) and not config['overwrite']:      # its checkpoints were moved away
            kept = files.set_aside(path, '.', 1)
            self.say(f'log       {path} is of an earlier run: kept as {kept}')
        files.write_text(path, ''.join(json.dumps(record) + '\n' for record in records))
        self.writers['log.jsonl'] = write, _ = open_jsonl(path)
        self._attempt('log.jsonl', write, step, self._header(precision))
        for name in filter(config.get, WRITERS):
            if opened := self._attempt(name, WRITERS[name], config, precision, records):
                self.writers[name] = opened
        if run.device.type == 'cuda':   # what the self-check or a batch that did not fit took is no run's
            torch.cuda.reset_peak_memory_stats(run.device)

    def _header(self, precision):
        return {
            'time': time.time(),
            'config': dict(self.config),
            'precision': precision,
            'intro': self.first,
            'data': self.run.data,
            'device': device_name(self.run.device),
            'host': platform.node(),
            'versions': versions(),
            'revisions': self.run.revisions,
            **{name.lower(): os.environ[name] for name in JOB if name in os.environ},
        }

    def say(self, *lines):
        """Print lines on rank 0."""
        say_in_run(*lines if self.main else ())

    def place(self, step):
        """Return 'step 500/1,000', without the end where that is not known."""
        end = f'/{self.last_step:,.0f}' if self.last_step < NEVER else ''
        return f'step {step:,}{end}'

    def say_at(self, step, text):
        """Print a line about a step."""
        self.say(f'{self.place(step)} | {text}')

    def intro(self, *lines):
        """Print the lines that are new and not empty: the first row of each, all rows in a dry run.
        log.jsonl has all rows of a run's first lines."""
        for line in lines:
            if line and line not in self.first:
                self.first.append(line)
                self.say(line if self.config['dry_run'] else line.splitlines()[0])

    def _attempt(self, name, work, *arguments):
        """Return work(*arguments). If it raises, print a line, once, and return None: a full disk or W&B's
        service must not end the run."""
        try:
            return work(*arguments)
        except Exception as error:
            self.intro(f'WARNING: {name} is not written: {first_line(error)}')

    def scalars(self, step, **values):
        """Record values (`val_loss` is written val/loss) at a step. Raises what Lock.check raises."""
        if self.lock:
            self.lock.check()
        named = {name.replace('_', '/', 1): value for name, value in values.items()}
        for name, (write, _) in self.writers.items():
            self._attempt(name, write, step, named)

    def sample(self, step, text):
        """Print and record a text of the model's."""
        self.say_at(step, f'sample: {text!r}')
        self.scalars(step, sample=text)

    def hellaswag(self, step, result, summary):
        """Print and record what hellaswag.evaluate and hellaswag.accuracy_line return."""
        self.say_at(step, summary)
        self.intro(result['note'])
        self.scalars(step, **{f'hellaswag_{name}': result[name] for name in ('acc', 'acc_norm', 'acc_token')})

    def validation(self, step, loss, bytes_per_token, best, tokens, hours):
        """Print and record an evaluation and, when the loss first reaches target_val_loss, what that took.

        loss: in nats. bytes_per_token: of the text, or None. best: the lowest earlier loss, or None.
        tokens, hours: of the run so far."""
        line, bits_per_byte = f'val loss {loss:.4f}', None
        if bytes_per_token:
            bits_per_byte = loss / math.log(2) / bytes_per_token
            line += f' | {bits_per_byte:.3f} bits per byte'
        self.say_at(step, line)
        self.scalars(step, val_loss=loss, val_bits_per_byte=bits_per_byte)
        target = self.config['target_val_loss']
        if loss <= target and (best is None or best > target):
            self.say(f'target    {target:g} reached at step {step:,}: {tokens:,} tokens, {hours:.2f} hours')
            self.scalars(step, target_val_loss=loss, target_tokens=tokens, target_hours=hours)

    def train_step(self, step, precision, **figures):
        """Print and record a step: each figure is written train/<its name>.

        The line wants epoch, loss, learning_rate, grad_norm, dt_ms, tokens_per_sec (of all ranks), data_wait
        (a share) and skipped (steps so far whose gradients were not finite)."""
        peak, speed = getattr(self.gpu, precision, None), figures['tokens_per_sec']     # peak: in TFLOP/s
        mfu = busy = None
        if peak:
            mfu = speed * self.run.flops_per_token / (peak * 1e12 * self.world_size)
        with contextlib.suppress(Exception):    # a CPU; or no nvidia-ml-py, or no answer of the driver to it
            busy = torch.cuda.utilization(self.run.device)      # percent of the last second
        left = ''
        if 1 < step < self.last_step < NEVER:   # without evaluations and checkpoints
            clock = tqdm.format_interval((self.last_step - step) * figures['dt_ms'] / 1e3).split(':')
            left = f'{"h".join(clock[:2]) if clock[2:] else ":".join(clock)} left'
        parts = [
            f'step {step:,}',
            left,
            f'loss {figures["loss"]:.4f}',
            f'norm {figures["grad_norm"]:.2f}',
            f'{tqdm.format_sizeof(speed)} tok/s',
            f'mfu {mfu:.0%}' if mfu else '',
            f'GPU {busy:.0f}% busy' if busy is not None and busy < 80 else '',
            f'waits for data: {figures["data_wait"]:.0%}' if figures['data_wait'] > 0.05 else '',
            precision.upper(),
            f'skipped: {figures["skipped"]}' if figures['skipped'] else '',
        ]
        self.say(' | '.join(filter(None, parts)))
        on_gpu = self.run.device.type == 'cuda'
        peak_gb = torch.cuda.max_memory_allocated(self.run.device) / 1e9 if on_gpu else None
        figures |= {'mfu': mfu, 'gpu_utilization': busy, 'peak_gb': peak_gb}
        self.scalars(step, precision=precision, **{f'train_{name}': value for name, value in figures.items()})

    def stopped(self, step):
        """Print how to resume a run that was stopped and saved at a step."""
        folder, script = shlex.quote(self.config['checkpoint_dir']), basename(sys.argv[0])
        self.say(f'stopped at step {step}, saved; to go on: python {script} --resume=latest '
                 f'--checkpoint_dir={folder}')

    def done(self, step, precision):
        """Record that the run is finished. Print where its best and last checkpoints are, and how to sample
        from the best."""
        self.scalars(step, finished=True)
        folder, template = self.config['checkpoint_dir'], self.run.dataset.meta.get('template') or ''
        best = files.read_json(join(folder, 'best_model.json'))
        latest, best_model = (shlex.quote(join(folder, name)) for name in ('latest.pt', 'best_model.pt'))
        if best:
            self.say(f'best: {best_model} is step {best["step"]}, val loss {best["best_val_loss"]:.4f}')
        else:
            self.say('WARNING: no validation loss was below the first one, or the best before the resume: '
                     'a lower --max_lr may help')
        chat = ' --chat' if '{{' in template else ''    # a tokenizer's own, in jinja
        self.say(f'done: {latest} is step {step}, in {precision.upper()}',
                 f'next: python sample.py --ckpt {best_model if best else latest}{chat}')

    def close(self):
        """Close the files."""
        for name, (_, close) in self.writers.items():
            self._attempt(name, close)
        if self.lock:
            self.lock.release()


class Clock:
    """Take the time of the steps since the last read; the loop counts them up. What is done in paused(), such
    as an evaluation, does not count."""

    def __init__(self, loader):
        self.loader = loader
        self.restart()

    def restart(self):
        self.since, self.waited, self.steps = time.perf_counter(), self.loader.waited, 0

    @contextlib.contextmanager
    def paused(self):
        """Return a context that does not count. It waits for the device, so that what the steps before have
        left it to do counts as theirs."""
        if str(self.loader.device) != 'cpu':
            torch.accelerator.synchronize()
        start = time.perf_counter()
        yield
        self.since += time.perf_counter() - start

    def read(self, tokens_per_step):
        """Return RunLog.train_step's figures of time, and restart. data_wait: the share of waiting for data.
        The caller has synchronised the device."""
        seconds = max(1e-9, time.perf_counter() - self.since)
        per_step, waited = seconds / max(1, self.steps), self.loader.waited - self.waited
        self.restart()
        return {
            'dt_ms': per_step * 1e3,
            'tokens_per_sec': tokens_per_step / per_step,
            'data_wait': waited / seconds,
        }


# ----------------------------------------------------------------------------------------- reading a log back

class RunCurves:
    """Hold the log of the run in a checkpoint_dir: curves are {step: value}, losses in nats per token.
    finished: whether the log's last record is RunLog.done's; a resume appends others. text: tokens and
    checksum of each shard that the validation losses are of.

    Raises MissingError where there is no log, and SettingError where it has no step yet."""

    def __init__(self, directory):
        path = join(directory, 'log.jsonl')
        if not isfile(path):
            raise MissingError(f'no {path}: name the checkpoint_dir of a run')
        records, last = files.read_log(path), {}
        curve = functools.partial(values_by_step, records)
        self.train, self.val = curve('train/loss'), curve('val/loss')
        self.hellaswag = curve('hellaswag/acc_norm')
        # steps, tokens: rows in one piece, or interp would copy them each time
        self.seen = np.array(sorted(({0: 0.0} | curve('train/tokens')).items())).T.copy()
        self.speeds, milliseconds = curve('train/tokens_per_sec'), curve('train/dt_ms')
        self.peak_gb = max(curve('train/peak_gb').values(), default=None)
        if not self.train:
            raise SettingError(f'{path} holds no training step yet')
        for record in records:
            last |= record
        self.header = {'device': last.get('device')}
        self.header |= {key: last.get(key, {}) for key in ('versions', 'config')}
        self.text = {file: about for file, about in last.get('data', {}).items() if 'val_' in file}
        self.name = f'{os.path.normpath(directory)} ({last.get("precision")})'
        self.last_val, self.last_hellaswag = map(last_of, (self.val, self.hellaswag))
        self.finished = 'finished' in records[-1]
        tail = list(self.train.values())[-max(1, len(self.train) // 10):]
        self.last_train = statistics.fmean(tail)        # over the last tenth
        self.speed = statistics.median(self.speeds.values())
        self.tokens = round(last_of(self.speeds) * last_of(milliseconds) / 1e3)     # of the last step

    def tokens_at(self, step):
        """Return the tokens seen up to a step: those logged, a share of them between two lines, and for steps
        after them their last size."""
        later = max(0, step - self.seen[0, -1])
        return float(np.interp(step, *self.seen)) + later * self.tokens


def last_of(curve):
    """Return the value of a curve's last step, None where there is none."""
    return curve[max(curve)] if curve else None


def values_by_step(records, key):
    """Return {step: value} of a key of a log's records. A value may be NaN, as text. Raises DataError."""
    try:
        return {record['step']: float(record[key]) for record in records if record.get(key) is not None}
    except (TypeError, ValueError) as error:
        raise DataError(f'{key} of a log is no number: {error}') from None
