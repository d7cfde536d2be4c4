"""What a run says: the console line, log.jsonl beside the checkpoints, TensorBoard, Weights & Biases."""
import contextlib
import functools
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import threading
import time

import torch
from tqdm import tqdm

from fp8gpt import files
from configurator import MachineError, error_line, first_line
from fp8gpt.gpus import Utilization, device_name, gpu_of, peak_flops
from fp8gpt.optim import OPEN
from fp8gpt.sharding import is_rank_0

# ------------------------------------------------------------------------------------------------ the console

COLUMNS = 100                           # of a line of progress
DELAY = 1                               # seconds before a bar shows
BUSY = 80                               # percent of the time that a GPU works in a good run
tqdm.set_lock(threading.RLock())        # its own is for processes, and may start one


def bar(things=None, what='', **options):
    """The things, under tqdm's bar until they are through: on a terminal's stderr alone, of rank 0, where
    they take longer than DELAY."""
    hidden = None if is_rank_0() else True      # None: where stderr is no terminal
    return tqdm(things, what, leave=False, disable=hidden, delay=DELAY, dynamic_ncols=True, **options)


def say(line):
    """Prints a line above the bar."""
    try:
        tqdm.write(line)
        sys.stdout.flush()
    except OSError:  # nobody reads any more, or it has no room: log.jsonl goes on
        sys.stdout = open(os.devnull, 'w')


# -------------------------------------------------------------------------------------------------------- log

JOB = 'SLURM_JOB_ID', 'SLURM_JOB_NODELIST'
NOT_FINITE = 'nan', 'inf', '-inf'  # as JSON has them here


@functools.cache
def versions():
    """What produced a result: torch, Python, and the commit when this is first asked, 'a1b2c3d-dirty' where
    tracked files differ from it."""
    commit = ''
    with contextlib.suppress(OSError):  # no git here
        here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        command = ['git', '-C', here, 'describe', '--always', '--dirty', '--exclude=*']
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return {'torch': str(torch.__version__), 'python': platform.python_version(),
            'commit': commit or 'unknown'}


def duration(seconds):
    """3700 -> '1 h 1 min'."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f'{seconds:.0f} s'
    return f'{minutes} min' if minutes < 100 else f'{minutes // 60} h {minutes % 60} min'


def amount(number):
    """3443 -> '3,443', 1234567 -> '1.23M'."""
    return f'{number:,.0f}' if number < 1e6 else f'{number / 1e6:.2f}M'


def run_folder(name, checkpoint_dir):
    """The folder `name`, or with a number behind where that is another run's, which is told by its
    checkpoint_dir: a resumed run finds its own again."""
    owner = os.path.abspath(checkpoint_dir)
    for number in itertools.count(1):
        folder = f'{name}-{number}' if number > 1 else name
        mark = os.path.join(folder, 'checkpoint_dir')
        if not os.path.exists(folder):
            os.makedirs(folder)
            with open(mark, 'w') as file:
                file.write(owner)
        if os.path.exists(mark):
            with open(mark) as file:
                if file.read() == owner:
                    return folder


def read_log(path):
    """(records of a log.jsonl, how many of its lines are damaged and left out). A last line that a kill cut
    short is no damage."""
    records, damaged = [], 0
    with open(path, encoding='utf-8', errors='replace') as file:
        for line in file:
            if not line.endswith('\n'):
                break
            record = None
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
            if _is_record(record):
                records.append(record)
            else:
                damaged += 1
    return records, damaged


def _is_record(record):
    if not isinstance(record, dict) or type(record.get('step')) is not int:
        return False
    figures = [value for name, value in record.items() if '/' in name]
    return all(isinstance(value, (int, float, type(None))) or value in NOT_FINITE for value in figures)


class TensorBoard:
    """Curves and texts for `tensorboard --logdir runs`. step: from which on earlier ones are cut."""
    name = 'TensorBoard'

    def __init__(self, config, precision, step):
        from torch.utils.tensorboard import SummaryWriter
        folder = run_folder(f'runs/{config["run_name"]}-{precision}', config['checkpoint_dir'])
        self.writer = SummaryWriter(folder, purge_step=step)
        self.text(step, 'config', '\n'.join(f'{name} = {value!r}' for name, value in config.items()))

    @staticmethod
    def tag(name):
        """TensorBoard sorts by name, and losses are looked at first: what is no train/ or val/ stands behind
        them."""
        return name if name.startswith(('train/', 'val/')) else f'watch/{name}'

    def scalars(self, step, named):
        for name, value in named.items():
            self.writer.add_scalar(self.tag(name), value, step)

    def text(self, step, name, text):
        self.writer.add_text(name, f'```\n{text}\n```', step)

    def picture(self, step, name, draw):
        self.writer.add_figure(self.tag(name), draw(), step)

    def close(self):
        self.writer.close()


class WeightsAndBiases:
    """The same in a W&B run, which a resumed run goes on in: its id is in checkpoint_dir. Without network it
    is written offline. Raises MachineError where wandb is not installed."""
    name = 'Weights & Biases'

    def __init__(self, config, precision, step):
        try:
            import wandb
        except ImportError:
            raise MachineError('use_wandb wants the package: `pip install wandb`') from None
        path = os.path.join(config['checkpoint_dir'], 'wandb.json')
        kept = files.read_json(path) if step else {}
        options = {
            'project': config['wandb_project'],
            'name': f'{config["run_name"]}-{precision}',
            'id': kept.get('id'),
            'resume': 'allow',
            'config': dict(config),
            'dir': config['checkpoint_dir'],
        }
        try:
            self.run = wandb.init(**options)
        except wandb.Error as error:  # no key, or no network
            print(f'WARNING: W&B cannot be reached ({first_line(error)}): written offline, for `wandb sync`')
            self.run = wandb.init(**options, mode='offline')
        files.write_json(path, {'id': self.run.id})
        self.run.define_metric('*', step_metric='step')  # W&B's own count takes no step twice

    def scalars(self, step, named):
        self.run.log({'step': step, **named})

    def text(self, step, name, text):
        self.run.log({'step': step, name: text})

    def picture(self, step, name, draw):
        import wandb
        self.run.log({'step': step, name: wandb.Image(draw())})

    def close(self):
        self.run.finish()


class RunLog:
    """Rank 0's log; on other ranks every method is silent. config: the run's settings, which name the places.
    Until `open` it only speaks; with eval_only, nothing is recorded."""

    def __init__(self, ranks, config):
        self.main, self.writers, self.file, self.said = ranks.main, [], None, set()
        self.config, self.missed, self.first = config, None, []
        self.device, self.world_size = ranks.device, ranks.world_size
        self.gpu, self.utilization = gpu_of(ranks.device), Utilization(ranks.device)
        self.target = config['target_val_loss']
        self.last_step, self.bar, self.since = None, None, None

    def open(self, precision, resumed_step=None, last_step=None):
        """Opens the files. resumed_step: lines behind that step are an abandoned future and are cut, and so
        are those of its evaluations that come again; None starts the file anew. last_step: where the run
        ends."""
        config = self.config
        if config['eval_only']:
            return
        self.last_step = last_step
        if not self.main:
            return
        path, kept = os.path.join(config['checkpoint_dir'], 'log.jsonl'), []
        if resumed_step is not None and os.path.isfile(path):
            records, damaged = read_log(path)
            if damaged:
                self.say(f'WARNING: {path} had {damaged} damaged lines, which are dropped')
            stays = ['train/loss', 'target/hours']  # an evaluation that comes again tells no target again
            for figure, freq in (('val/loss', 'eval_freq'), ('hellaswag/acc', 'hellaswag_freq')):
                again = config[freq] and resumed_step % config[freq] == 0 or resumed_step == last_step
                stays += [] if again else [figure]
            kept = [r for r in records if r['step'] < resumed_step
                    or r['step'] == resumed_step and any(figure in r for figure in stays)]
        lines = ''.join(json.dumps(record) + '\n' for record in kept)
        files.write(path, lambda file: file.write(lines.encode()))
        self.file = open(path, 'a')
        self._record({
            'step': resumed_step or 0,
            'time': time.time(),
            'config': dict(config),
            'precision': precision,
            'intro': self.first,
            'device': device_name(self.device),
            'host': platform.node(),
            **{name.lower(): os.environ[name] for name in JOB if name in os.environ},
            'versions': versions(),
        })
        for kind, wanted in ((TensorBoard, 'use_tensorboard'), (WeightsAndBiases, 'use_wandb')):
            if config[wanted]:
                self.writers.append(kind(config, precision, resumed_step or 0))

    def say(self, *lines):
        for line in lines if self.main else ():
            say(line)

    def place(self, step):
        """'step 500/1,000', without the end where that is not known."""
        known = self.last_step and self.last_step != OPEN
        return f'step {step:,}' + (f'/{self.last_step:,.0f}' if known else '')

    def say_at(self, step, text):
        """Says something of a step."""
        self.say(f'{self.place(step)} | {text}')

    def say_once(self, line):
        """Says a line, unless it is empty or said before."""
        if line and line not in self.said:
            self.said.add(line)
            self.say(line)

    def intro(self, *lines):
        """Says what is new of a run's first lines: of each its first row, all in a dry run. log.jsonl has
        them whole."""
        whole = self.config['dry_run']
        for line in lines:
            if line and line not in self.first:
                self.first.append(line)
                self.say(line if whole else line.splitlines()[0])

    def _record(self, record):
        finite = {name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
                  for name, value in record.items()}
        try:
            self.file.write(json.dumps(finite) + '\n')
            self.file.flush()
        except OSError as error:  # a full disk must not end the run: the checkpoint decides that
            checkpoint = record['step'] // self.config['checkpoint_freq']
            if self.missed != checkpoint:
                self.say(f'WARNING: log.jsonl was not written: {error.strerror}')
            self.missed = checkpoint

    def scalars(self, step, **values):
        """Records values (`val_loss` is written val/loss) at a step."""
        if not self.file:
            return
        named = {name.replace('_', '/', 1): value for name, value in values.items()}
        self._record({'step': step, **named})
        numbers = {name: value for name, value in named.items()  # without those of single layers
                   if isinstance(value, (int, float)) and name.count('/') == 1}
        self._write('scalars', step, numbers)

    def picture(self, step, name, draw):
        """A figure of matplotlib's, draw(), where anything shows figures."""
        self._write('picture', step, name, draw)

    def _write(self, method, *values):
        """Calls the writers; one that fails is left out from then on, since no log ends a run."""
        for writer in list(self.writers):
            try:
                getattr(writer, method)(*values)
            except Exception as error:
                why = error_line(error) or first_line(error)
                self.say(f'WARNING: {writer.name} is not written any more: {why}')
                self.writers.remove(writer)

    def reached(self, step, val_loss, best, tokens, hours):
        """Says and records what it took to reach target_val_loss, where val_loss is the first that does.
        best: the least of those before, or None. tokens, hours: of the run so far."""
        before = best is not None and best <= self.target
        if not step or not val_loss <= self.target or before:
            return
        figures = {'val_loss': val_loss, 'tokens': tokens, 'hours': hours}
        self.say(f'target    {self.target:g} reached at step {step:,}: {tokens:,} tokens, {hours:.2f} hours')
        self.scalars(step, **{f'target_{name}': value for name, value in figures.items()})

    def verdict(self, best):
        """[A line that says whether target_val_loss was reached]; [] where there is none. best: the least
        validation loss, or None."""
        if not self.target:
            return []
        reached = best is not None and best <= self.target
        least = f'{best:.4f}' if best is not None else 'not a number'
        was = 'was' if reached else 'was not'
        return [f'target    target_val_loss={self.target:g} {was} reached: the lowest is {least}']

    def sample(self, step, text):
        """Says and records a text of the model's."""
        if not self.main:
            return
        self.say_at(step, f'sample: {text!r}')
        self._record({'step': step, 'sample': text})
        self._write('text', step, 'sample', text)

    def validation(self, step, loss, bits_per_byte):
        """The console line of an evaluation and its record. bits_per_byte: or None."""
        line = f'val loss {loss:.4f}'
        if bits_per_byte:
            line += f' | {bits_per_byte:.3f} bits per byte'
        self.say_at(step, line)
        self.scalars(step, val_loss=loss, val_bits_per_byte=bits_per_byte)

    def after_step(self, step, last_step):
        """Once a step: moves the bar. last_step: where the run ends, as far as is known."""
        self.last_step = last_step
        if not self.main:
            return
        self.utilization.look()
        if self.bar is None:
            self.bar = bar(what='training', initial=step - 1)
        self.bar.total = None if last_step == OPEN else round(last_step)
        self.bar.update(step - self.bar.n)

    def progress(self, step):
        """['50%', '1 min left'] of a run, the latter by the mean speed since the first line, evaluations and
        checkpoints included."""
        if self.last_step == OPEN:
            return []
        parts, now = [f'{step / self.last_step:.0%}'], time.monotonic()
        self.since = self.since or (step, now)
        first, start = self.since
        if first < step < self.last_step:
            parts.append(f'{duration((now - start) / (step - first) * (self.last_step - step))} left')
        return parts

    def train_step(self, step, precision, flops_per_token, **figures):
        """The console line and its record: each figure is written train/<its name>.

        The line wants epoch, loss, learning_rate, grad_norm, tokens_per_sec (of all ranks), data_wait (a
        share) and skipped (steps so far whose gradients were not finite)."""
        peak, of = peak_flops(self.gpu, precision), figures
        of['mfu'] = of['tokens_per_sec'] * flops_per_token / (peak * self.world_size) if peak else None
        busy = self.utilization.mean()
        if busy is not None:
            of['gpu_utilization'] = busy
        start = [self.place(step), *self.progress(step), f'loss {of["loss"]:.4f}']
        aside = [f'lr {of["learning_rate"]:.1e}', f'norm {of["grad_norm"]:.2f}']
        aside += [f'epoch {of["epoch"]}'] if of['epoch'] else []
        rest = [f'{amount(of["tokens_per_sec"])} tok/s']
        rest += [f'mfu {of["mfu"]:.0%}'] if peak else []
        rest.append(precision.upper())
        rest += [f'skipped: {of["skipped"]}'] if of['skipped'] else []
        while aside and len(' | '.join([*start, *aside, *rest])) > COLUMNS:
            aside.pop(0)  # log.jsonl has it
        self.say(' | '.join([*start, *aside, *rest]))
        if of['data_wait'] > 0.05 and step > 1:
            self.say(f'{of["data_wait"]:.0%} of the step is waiting for data: raise num_workers, '
                     f'now {self.config["num_workers"]}')
        if busy is not None and busy < BUSY:
            self.say(f'GPU {busy:.0f}% busy')
        self.scalars(step, precision=precision, **{f'train_{name}': value for name, value in figures.items()})

    def close(self):
        if self.bar is not None:
            self.bar.close()
        self._write('close')
        with contextlib.suppress(OSError):  # of a full disk it was told
            if self.file:
                self.file.close()


class Clock:
    """Seconds per step and the share of them spent waiting for data, between logged steps; what lies between
    stop() and start(), such as an evaluation, does not count."""

    def __init__(self, loader):
        self.loader, self.seconds, self.waited, self.steps = loader, 0.0, 0.0, 0
        self.start()

    def start(self):
        self.since, self.waited_at = time.perf_counter(), self.loader.waited

    def stop(self):
        self.seconds += time.perf_counter() - self.since
        self.waited += self.loader.waited - self.waited_at

    def read(self):
        """(seconds a step, share of waiting) since the last read; the caller has synchronised the device."""
        self.stop()
        result = self.seconds / max(1, self.steps), self.waited / max(1e-9, self.seconds)
        self.seconds, self.waited, self.steps = 0.0, 0.0, 0
        self.start()
        return result
