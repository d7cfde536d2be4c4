"""Print and log a run: console, log.jsonl in the checkpoint_dir, TensorBoard, W&B."""
import contextlib
import functools
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from os.path import basename, exists, join

import torch
from tqdm import tqdm

from fp8gpt import files, lora, shards
from configurator import HERE, MachineError, first_line, one_line_errors, printable, say
from fp8gpt.optim import OPEN, Schedule, moment_bytes, muon_flops
from fp8gpt.distributed import is_rank_0, until_asked
from fp8gpt.run import Length
from fp8gpt.tokenizer import REVISIONS
from model import GPT

# ----------------------------------------------------------------------------------------------- the hardware

def gpu_of(device):
    """Return the row of a torch.device in gpus.py; None where it has none."""
    if device.type != 'cuda':
        return None
    from fp8gpt.gpus import find_gpu    # late: a CPU is not in the table
    return find_gpu(torch.cuda.get_device_name(device))


def device_name(device):
    """Return a GPU's name, or a CPU's with its number of threads."""
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    model = platform.machine()
    with contextlib.suppress(OSError, TypeError), open('/proc/cpuinfo') as file:    # not on every system
        model = re.search('model name.*: (.*)', file.read())[1]
    return f'{device.type.upper()}, {model}, {torch.get_num_threads()} threads'


# ---------------------------------------------------------------------------------------- a run's first lines
# The first row of a line says what matters; a dry run and log.jsonl have the second one too.

MORE = '\n          '


def model_line(c, parameters, weights=''):
    """Return the line about a model. c: GPTConfig. weights: a clause about them."""
    return (f'model     {parameters / 1e6:.2f}M parameters: {c.n_layer} layers x {c.n_embd}, '
            f'{c.n_head} heads{weights}{MORE}{c.mlp}, {c.norm}, {c.position}, '
            f'vocabulary {c.vocab_size} (padded to {c.padded_vocab_size})')


def batch_line(config, length, world_size):
    """Return the line about a step's tokens. length: a run.Length."""
    return (f'batch     {config["batch_size"]} x {config["block_size"]} tokens '
            f'x {length.micro_steps} micro-steps x {world_size} ranks '
            f'= {length.tokens_per_step:,} tokens a step')


def length_line(run, length, model, tokens_per_epoch=0):
    """Return the line about a run's length. model: its GPT, with its adapters, on any device.
    tokens_per_epoch: 0 where it is not known."""
    flops = run.flops_per_token
    per_token = f'{flops / 1e6:,.0f}M FLOPs a token'
    if run.config['optimizer'] == 'muon':
        share = muon_flops(model) / (length.tokens_per_step * flops)
        per_token += f', Muon {share:.1%} more'
    if length.last_step == OPEN:
        return f'run       ended by {length.ended_by}{MORE}{per_token}'
    tokens = length.tokens
    epochs = f' = {tokens / tokens_per_epoch:.2f} epochs' if tokens_per_epoch else ''
    steps = f'{length.last_step:,} step' + 's' * (length.last_step != 1)
    return (f'run       {steps} = {tokens:,} tokens{epochs}, ended by {length.ended_by}'
            f'{MORE}{tokens * flops:.2e} FLOPs, {per_token}')


def few_steps_line(length, tokens_per_epoch):
    """Return a warning where one or two steps read all the data more than once, else ''."""
    epochs = length.last_step * length.tokens_per_step / tokens_per_epoch
    if length.last_step > 2 or epochs <= 1:
        return ''
    share = length.tokens_per_step / tokens_per_epoch
    return (f'WARNING: this trains next to nothing: a step is {share:.2f} times the data. A smaller '
            '--total_batch_size or --batch_size makes more steps of it, --max_steps=100 repeats it')


def packing_lines(train, length):
    """Return the lines about examples to fine-tune on: none where train, a data.TokenData, has none."""
    packing = train.packing
    if not packing:
        return []
    steps = math.ceil(train.n_windows / length.sequences_per_step)
    lines = [f'packed    {len(packing.lengths):,} examples in {train.n_windows:,} windows, '
             f'{packing.padding:.1%} of them padding; {steps:,} steps an epoch']
    if packing.cut or packing.left_out:
        lines.append(f'packed    {packing.cut:,} cut to block_size={train.block_size}, '
                     f'{packing.left_out:,} left out, whose answers all begin later')
    return lines


def device_line(device):
    """Return the line about a device and its peaks."""
    gpu, known = gpu_of(device), 'its peak is not in the table of gpus.py, so no MFU'
    if gpu:
        in_fp8 = f'{gpu.fp8:,} in fp8' if gpu.fp8 else 'no FP8 units'
        known = f'peak {gpu.bf16:,} TFLOP/s in bf16, {in_fp8}'
    return f'device    {device_name(device)}, torch {torch.__version__}{MORE}{known}'


# ------------------------------------------------------------------------------------------------ the console

DELAY = 1                               # seconds before a bar shows
BUSY = 80                               # percent of the time that a GPU works in a good run
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
    return printable(str(value), breaks='')


def markdown(rows, heading=True):
    """Return rows, dicts, as a Markdown table. A row may lack a column."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ['---'] * len(columns)] if heading else []
    lines += [[cell_text(row.get(column)) for column in columns] for row in rows]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


# -------------------------------------------------------------------------------------------------------- log

JOB = 'SLURM_JOB_ID', 'SLURM_RESTART_COUNT', 'SLURM_JOB_NODELIST'


@functools.cache
def versions():
    """Return what produced a result: torch, Python, and the commit when this is first asked, 'a1b2c3d-dirty'
    where tracked files differ from it. The variable COMMIT names that of a copy of the files."""
    commit = os.environ.get('COMMIT', '')
    with contextlib.suppress(OSError):  # no git here
        command = ['git', '-C', HERE, 'describe', '--always', '--dirty', '--exclude=*']
        commit = commit or subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return {'torch': str(torch.__version__), 'python': platform.python_version(),
            'commit': commit or 'unknown'}


def open_jsonl(path):
    """Return (write(step, {name: value}), close()) of a log.jsonl. Text stands for NaN and infinity."""
    file = open(path, 'a', buffering=1)     # a line

    def write(step, named):
        record = {'step': step, **named}
        for name, value in named.items():
            if isinstance(value, float) and not math.isfinite(value):
                record[name] = str(value)
        file.write(json.dumps(record) + '\n')
    return write, file.close


def shown(named):
    """Return what of a record TensorBoard and W&B show: its numbers but those of single layers, and a sample
    of text."""
    return {name: value for name, value in named.items()
            if name == 'sample' or isinstance(value, (int, float)) and name.count('/') == 1}


def open_tensorboard(config, precision, step):
    """Return (write(step, {name: value}), close()) of curves for `tensorboard --logdir runs`. step: that of
    the checkpoint, 0 for a new run, which replaces earlier curves; a resume cuts them after that step. Each
    run has a folder called after its checkpoint_dir."""
    from torch.utils.tensorboard import SummaryWriter
    place = os.path.relpath(config['checkpoint_dir']).replace('..', '%2E%2E')   # no way out of runs/
    folder = f'runs/{config["run_name"]}-{precision}/{place}'
    writer = SummaryWriter(folder, purge_step=step and step + 1)

    def write(step, named):
        for name, value in shown(named).items():
            add = writer.add_text if name == 'sample' else writer.add_scalar
            add(name, value, step)
    return write, writer.close


def open_wandb(config, precision, step):
    """Return (write(step, {name: value}), close()) of a W&B run. Its id is in checkpoint_dir, so that a
    resumed run continues it. Without a network it is written offline."""
    import wandb
    path = join(config['checkpoint_dir'], 'wandb.json')
    options = {
        'project': config['wandb_project'],
        'name': config['run_name'],
        'tags': [precision],
        'id': files.read_json(path).get('id') if step else None,
        'resume': 'allow',
        'config': dict(config),
        'dir': config['checkpoint_dir'],
    }
    try:
        run = wandb.init(**options)
    except wandb.Error as error:  # no key, or no network
        say(f'WARNING: W&B cannot be reached ({first_line(error)}): written offline, for `wandb sync`')
        run = wandb.init(**options, mode='offline')
    one_line_errors()   # again: W&B's own hook would print a traceback before the line
    files.write_json(path, {'id': run.id})
    run.define_metric('*', step_metric='step')  # W&B's own count takes no step twice
    return lambda step, named: run.log({'step': step, **shown(named)}), run.finish


WRITERS = {'use_tensorboard': open_tensorboard, 'use_wandb': open_wandb}


class RunLog:
    """Print and record on rank 0; on other ranks every method is silent. Before `open`, and with eval_only,
    nothing is recorded.

    run: a run.Run. last_step: where the run ends, as far as is known; the loop sets it. Raises MachineError
    where W&B's package is wanted and missing."""

    def __init__(self, ranks, run):
        self.main, self.world_size = ranks.main, ranks.world_size
        self.run, self.config = run, run.config
        if self.config['use_wandb'] and not importlib.util.find_spec('wandb'):
            raise MachineError('use_wandb wants the package: `pip install wandb`')
        self.gpu = gpu_of(run.device)
        self.writers = {}       # what is written -> (write, close)
        self.first = []     # the lines of intro
        self.last_step, self.since = OPEN, None
        self.val_losses = []    # of this process
        self.profiler = None

    def start(self, train, val):
        """Print the first lines of the run, known before anything is computed. train, val: its splits,
        data.TokenData. Raises what Length.of and Schedule.check raise."""
        run, config, spec = self.run, self.config, lora.Spec.of(self.config)
        with torch.device('meta'):
            model = GPT(run.model_config, seed=None, param_dtype=run.param_dtype)
            parameters = sum(p.numel() for p in model.parameters())
            if spec.rank:
                lora.add(model, spec)
        weights = '' if run.source else ', random weights'
        if weights and config['init_from'].startswith('gpt2'):
            weights += f'; OpenAI\'s: --init_from=openai-community/{config["init_from"]}'
        lines = [model_line(run.model_config, parameters, weights)]
        if spec.rank:
            lines.append(f'lora      {spec.parameters(run.model_config):,} parameters train: '
                         f'rank {spec.rank}, alpha {spec.alpha:g}'
                         f'{MORE}{", ".join(spec.chosen(run.model_config))}')
        lines.append(f'data      {run.folder}: {train.tokens:,} training tokens{train.taken}, '
                     f'{val.tokens:,} for validation{val.taken}')
        length = None
        if not config['batch_size']:
            lines.append('batch     the most sequences that fit, by trial')
        elif not config['eval_only']:
            length = Length.of(config, self.world_size, train.tokens_per_epoch, run.resumed)
            Schedule.of(config, length.last_step).check()
            lines += packing_lines(train, length)
            lines.append(batch_line(config, length, self.world_size))
            lines.append(length_line(run, length, model, train.n_windows * train.block_size))
            lines += [length.cut, few_steps_line(length, train.n_windows * train.block_size)]
            if self.world_size > 1 and 'gradient_accumulation_steps' in config.layers[-1]:
                lines.append(f'batch     gradient_accumulation_steps={length.micro_steps} is of each GPU; '
                             f'nanoGPT divides it by {self.world_size}')
        lines.append(device_line(run.device))
        if run.resumed:
            step, precision = run.resumed['step'], run.resumed['precision']['name']
            lines.append(f'resumed   {run.resume_path} at step {step}, in {precision} until now')
            lines += self.resume_lines(length, train.n_windows)
        lines += run.changes
        if config['sharding_mode'] != 'ddp':
            over = f'over {self.world_size} ranks'
            if self.world_size == 1:
                over = 'changes nothing in a single process'
            lines.append(f'sharding  {config["sharding_mode"]} {over}')
        needed = moment_bytes(model, config['optimizer'])
        needed += sum(p.nbytes + 6000 for p in model.weights().values())    # 6 kB: its names, FP8's amaxes
        at_once = 2 + (0 if run.resumed else config['keep_checkpoints'])    # the best, the next, those kept
        disk = config['checkpoint_dir']
        while disk and not exists(disk):
            disk = os.path.dirname(disk)
        free = shutil.disk_usage(disk or '.').free
        if free < at_once * needed and not config['eval_only']:
            lines.append(f'WARNING: {free / 1e9:.2f} GB are free for checkpoints, and one takes about '
                         f'{needed / 1e9:.2f}; {at_once} are there at once')
        if run.compiled and not config['dry_run']:
            lines.append('compile   may take a minute or two')
        self.intro(*lines)

    def resume_lines(self, length, n_windows):
        """Return the lines about what a resumed run counts or measures otherwise than before. length: a
        run.Length, or None."""
        run, before, lines = self.run, self.run.resumed, []
        size = before.get('tokens_per_step')
        if length and size and size != length.tokens_per_step:
            lines.append(f'tokens a step: {size:,} in the checkpoint, now {length.tokens_per_step:,}')
        if before.get('measured_on') not in (None, run.measured_on):
            lines.append('the best loss begins anew: that of before is of other data, block_size or '
                         'eval_tokens')
        part = before['position'] % n_windows / n_windows
        moved = [name for name in ('seed', 'block_size') if name in run.config.inherited
                 and run.config.inherited[name] != run.config[name]]
        if moved and part:
            lines.append(f'{moved[0]} is another at {part:.0%} of an epoch: the rest of it reads about '
                         f'{part * (1 - part):.0%} of the data twice, and as much not at all')
        return lines

    def open(self, precision, last_step):
        """Open the files. A resumed run's log loses the records of later steps, a new run's starts empty.
        last_step: where the run ends."""
        config, resumed = self.config, self.run.resumed
        self.last_step = last_step
        if config['eval_only'] or not self.main:
            return
        path, step, records = join(config['checkpoint_dir'], 'log.jsonl'), 0, []
        if resumed:
            step = resumed['step']
            records = [record for record in files.read_log(path) if record['step'] <= step]
        elif exists(path) and not config['overwrite']:      # its checkpoints were moved away
            kept = next(name for n in itertools.count(1) if not exists(name := f'{path}.{n}'))
            os.rename(path, kept)
            self.say(f'log       {path} is of an earlier run: kept as {kept}')
        files.write_text(path, ''.join(json.dumps(record) + '\n' for record in records))
        self.writers['log.jsonl'] = write, _ = open_jsonl(path)
        self._attempt('log.jsonl', write, step, {
            'time': time.time(),
            'config': dict(config),
            'precision': precision,
            'intro': self.first,
            'data': self.run.data,
            'device': device_name(self.run.device),
            'host': platform.node(),
            'versions': versions(),
            'revisions': REVISIONS,
            **{name.lower(): os.environ[name] for name in JOB if name in os.environ},
        })
        for name in filter(config.get, WRITERS):
            if opened := self._attempt(name, WRITERS[name], config, precision, step):
                self.writers[name] = opened
        steps = int(min(config['profile'], last_step - step - 3))
        if steps > 0:
            schedule = torch.profiler.schedule(wait=2, warmup=1, active=steps, repeat=1)
            self.profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=self._save_profile)
            self.profiler.start()
        elif config['profile']:
            self.say('profile   left out: it begins with the 4th step of a run')

    def _save_profile(self, profiler):
        path = join(self.config['checkpoint_dir'], 'profile.json')
        profiler.export_chrome_trace(path)
        steps = max(1, profiler.step_num - 3)   # a run that is stopped has fewer than asked for
        place = 'device' if self.run.device.type == 'cuda' else 'cpu'
        table = profiler.key_averages().table(sort_by=f'self_{place}_time_total', row_limit=12)
        self.say(*table.strip().splitlines(), f'profile   {path}: {steps} steps, for https://ui.perfetto.dev')

    def after_step(self):
        """Count a training step for the profile."""
        if self.profiler:
            self.profiler.step()

    def say(self, *lines):
        """Print lines on rank 0. A stdout that is closed or full does not end the run."""
        try:
            say(*lines if self.main else ())
        except OSError:
            sys.stdout = open(os.devnull, 'w', errors='replace')

    def place(self, step):
        """Return 'step 500/1,000', without the end where that is not known."""
        end = '' if self.last_step == OPEN else f'/{self.last_step:,.0f}'
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
        """Record values (`val_loss` is written val/loss) at a step."""
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
        self.val_losses.append(loss)
        last = self.val_losses[-4:]
        if len(last) == 4 and last == sorted(set(last)):
            self.say('the validation loss has risen three times in a row: the model may be overfitting, or '
                     f'max_lr be too high; the lowest was {min(self.val_losses):.4f}')
        target = self.config['target_val_loss']
        if loss <= target and (best is None or best > target):
            self.say(f'target    {target:g} reached at step {step:,}: {tokens:,} tokens, {hours:.2f} hours')
            self.scalars(step, target_val_loss=loss, target_tokens=tokens, target_hours=hours)

    def progress(self, step):
        """Return ['50%', '01:30 left'] of a run, the latter by the mean speed since the first line,
        evaluations and checkpoints included."""
        if self.last_step == OPEN:
            return []
        parts, now = [f'{step / self.last_step:.0%}'], time.monotonic()
        self.since = self.since or (step, now)
        first, start = self.since
        if first < step < self.last_step:
            left = (now - start) / (step - first) * (self.last_step - step)
            parts.append(f'{tqdm.format_interval(left)} left')
        return parts

    def train_step(self, step, precision, **figures):
        """Print and record a step: each figure is written train/<its name>.

        The line wants epoch, loss, learning_rate, grad_norm, tokens_per_sec (of all ranks), data_wait (a
        share) and skipped (steps so far whose gradients were not finite)."""
        peak, speed = getattr(self.gpu, precision, None), figures['tokens_per_sec']     # peak: in TFLOP/s
        mfu = busy = None
        if peak:
            mfu = speed * self.run.flops_per_token / (peak * 1e12 * self.world_size)
        with contextlib.suppress(Exception):    # a CPU; or no nvidia-ml-py, or no answer of the driver to it
            busy = torch.cuda.utilization(self.run.device)      # percent of the last second
        parts = [
            self.place(step),
            *self.progress(step),
            f'loss {figures["loss"]:.4f}',
            f'lr {figures["learning_rate"]:.1e}',
            f'norm {figures["grad_norm"]:.2f}',
            f'epoch {figures["epoch"]}' if figures['epoch'] else '',
            f'{speed:,.0f} tok/s',
            f'mfu {mfu:.0%}' if mfu else '',
            precision.upper(),
            f'skipped: {figures["skipped"]}' if figures['skipped'] else '',
        ]
        self.say(' | '.join(filter(None, parts)))
        if figures['data_wait'] > 0.05 and step > 1:
            self.say(f'{figures["data_wait"]:.0%} of the step is waiting for data: raise num_workers, '
                     f'now {self.config["num_workers"]}')
        if busy is not None and busy < BUSY:
            self.say(f'GPU {busy:.0f}% busy')
        figures |= {'mfu': mfu, 'gpu_utilization': busy}
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
        folder = shlex.quote(self.config['checkpoint_dir'])
        latest, best_model = f'{folder}/latest.pt', f'{folder}/best_model.pt'
        best = files.read_json(join(self.config['checkpoint_dir'], 'best_model.json'))
        ckpt = best_model if best.get('step', step) != step else latest
        if best:
            self.say(f'best: {best_model} is step {best["step"]}, val loss {best["best_val_loss"]:.4f}')
        else:
            self.say('WARNING: no validation loss was below that of the start: a lower --max_lr may help')
        template, words = shards.read_meta(self.run.folder).get('template') or '', ''
        if '{{' in template:    # a tokenizer's own, in jinja
            words = ' --chat'
        elif template:
            words = r" --prompt=$'Question:\nYOURS\n\nAnswer:\n'"
        self.say(f'done: {latest} is step {step}, in {precision.upper()}',
                 f'next: python sample.py --ckpt {ckpt}{words}')

    def close(self):
        """Close the files, and end a profile that has not got all its steps."""
        if self.profiler:
            self.profiler.stop()
        for name, (_, close) in self.writers.items():
            self._attempt(name, close)


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
