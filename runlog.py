"""What a run says: the console line, log.jsonl beside the checkpoints, TensorBoard; GPUs' peaks and MFU."""
import contextlib
import functools
import itertools
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from typing import NamedTuple

import torch

import files
from configurator import MachineError, first_line, told


# ------------------------------------------------------------------------------------------------------- GPUs

class Gpu(NamedTuple):
    """Dense TFLOP/s in bf16 and FP8 (None: no FP8 units), summed in fp32, and TB/s of memory, as the data
    sheets have them; MiB of memory, as nvidia-smi has it: a data sheet's 80 GB are 81,559 MiB, 85.5 GB. Then
    GB/s to other GPUs, both directions together: NVLink, Infinity Fabric, or PCIe."""
    name: str
    bf16: float
    fp8: float | None
    bandwidth: float
    mebibytes: int
    link: int

    @property
    def memory(self):
        """GB of 10^9 bytes. torch sees some hundred MB less: memory.MARGIN is for that too."""
        return self.mebibytes * 2**20 / 1e9


# The first pattern found in a lower-case name decides. Where a sheet gives TFLOP/s with sparsity, half.
GPUS = [(re.compile(r'(?<![a-z0-9])' + pattern), Gpu(*row)) for pattern, *row in (
    ('gh200', 'GH200', 989, 1979, 4.0, 97_871, 900),
    ('h200.*nvl', 'H200 NVL', 835, 1671, 4.8, 143_771, 900),
    ('h200', 'H200', 989, 1979, 4.8, 143_771, 900),
    ('h100.*pcie', 'H100 PCIe', 756, 1513, 2.0, 81_559, 600),
    ('h100.*nvl', 'H100 NVL', 835, 1671, 3.9, 95_830, 600),
    ('h100', 'H100 SXM', 989, 1979, 3.35, 81_559, 900),
    ('h800', 'H800', 989, 1979, 3.35, 81_559, 400),
    # NVIDIA has no sheet of it on its site; these are its resellers'
    (r'h20\b(?! 3e)', 'H20', 148, 296, 4.0, 97_871, 900),
    # nvidia.com/en-us/data-center/gb200-nvl72, a 72nd of the rack
    (r'gb200\b', 'GB200', 2500, 5000, 8.0, 189_471, 1800),
    # nvidia.com/en-us/data-center/hgx, an eighth of the board
    (r'b300\b', 'B300', 2250, 4500, 8.0, 275_040, 1800),
    ('b200', 'B200', 2250, 4500, 8.0, 183_359, 1800),
    # NVIDIA Blackwell Architecture Technical Brief, an eighth of HGX B100; memory: its 192 GB
    (r'b100\b', 'B100', 1750, 3500, 8.0, 183_105, 1800),
    ('a100.*40', 'A100 40GB', 312, None, 1.555, 40_960, 600),
    ('a100', 'A100 80GB', 312, None, 2.039, 81_920, 600),
    # nvidia.com/en-us/data-center/l4, l40 and l40s
    (r'l4\b', 'L4', 121, 242.5, 0.3, 23_034, 64),
    (r'l40\b', 'L40', 181, 362, 0.864, 46_068, 64),
    ('l40s', 'L40S', 362, 733, 0.864, 46_068, 64),
    # NVIDIA Ada GPU Architecture whitepapers, of RTX 6000 Ada and of GeForce
    ('(rtx ?)?6000 ?ada', 'RTX 6000 Ada', 364, 728.5, 0.96, 49_140, 64),
    (r'(rtx)?4090(?! d\b|.*laptop)', 'RTX 4090', 165, 330, 1.008, 24_564, 64),
    # images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf
    (r'(rtx)?5090(?! d\b|.*laptop)', 'RTX 5090', 209.5, 419, 1.792, 32_607, 128),
    # Data sheets of the editions: fp32 at 120, 110 (Max-Q) and 126 TFLOP/s, of which bf16 is 4 times as much
    (r'rtx ?pro ?6000\b.*server', 'RTX PRO 6000 Server', 480, 960, 1.597, 97_887, 128),
    (r'rtx ?pro ?6000\b.*max q', 'RTX PRO 6000 Max-Q', 439, 878, 1.792, 97_887, 128),
    (r'rtx ?pro ?6000\b', 'RTX PRO 6000', 504, 1008, 1.792, 97_887, 128),
    # amd.com/en/products/accelerators/instinct/mi300/mi300x; memory: its 192 GB. Its FP8 is e4m3fnuz, which
    # no backend here trains in: none is counted on.
    (r'mi300x\b', 'MI300X', 1307, None, 5.3, 183_105, 896))]


def find_gpu(name):
    """The row of a GPU's name, as a device or a user writes it; None where there is none."""
    name = re.sub('[-_ ]+', ' ', name.lower())
    return next((gpu for pattern, gpu in GPUS if pattern.search(name)), None)


def gpu_of(device):
    """The row of a torch.device; None where it is not in the table."""
    return find_gpu(torch.cuda.get_device_name(device)) if device.type == 'cuda' else None


def peak_flops(gpu, precision):
    """FLOP/s of a row, or None, in 'bf16' or 'fp8'; None where there is none."""
    tera = gpu and {'bf16': gpu.bf16, 'fp8': gpu.fp8}.get(precision)
    return tera * 1e12 if tera else None


def device_name(device):
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    model = platform.machine()
    if os.path.exists('/proc/cpuinfo'):
        with open('/proc/cpuinfo') as file:
            models = (line.split(':')[1].strip() for line in file if line.startswith('model name'))
            model = next(models, model)
    return f'{device.type.upper()}, {model}, {torch.get_num_threads()} threads'


def device_line(device, precision):
    """The device and its peak in that precision."""
    peak = peak_flops(gpu_of(device), precision)
    known = f'its {precision} peak is not in the table, so no MFU'
    if peak:
        known = f'peak {peak / 1e12:,.0f} TFLOP/s in {precision}'
    return f'device    {device_name(device)}, torch {torch.__version__}; {known}'


# -------------------------------------------------------------------------------------------------------- log

JOB = 'SLURM_JOB_ID', 'SLURM_JOB_NODELIST'
NOT_FINITE = 'nan', 'inf', '-inf'  # as JSON has them here


@functools.cache
def versions():
    """What produced a result: torch, Python, and the commit when this is first asked, 'a1b2c3d-dirty' where
    tracked files differ from it."""
    commit = ''
    with contextlib.suppress(OSError):  # no git here
        here = os.path.dirname(os.path.abspath(__file__))
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

    def scalars(self, step, named):
        for name, value in named.items():
            self.writer.add_scalar(name, value, step)

    def text(self, step, name, text):
        self.writer.add_text(name, f'```\n{text}\n```', step)

    def picture(self, step, name, draw):
        self.writer.add_figure(name, draw(), step)

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
    resumed_step: lines behind that step are an abandoned future and are cut, and so are those of its
    evaluations that come again; None starts the file anew. last_step: where the run ends. With eval_only,
    nothing is recorded."""

    def __init__(self, ranks, config, precision, resumed_step=None, last_step=None):
        self.main, self.writers, self.file, self.said = ranks.main, [], None, set()
        self.checkpoint_freq, self.missed = config['checkpoint_freq'], None
        self.gpu, self.world_size = gpu_of(ranks.device), ranks.world_size
        self.target, self.price = config['target_val_loss'], config['usd_per_gpu_hour']
        if not self.main or config['eval_only']:
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
            'device': device_name(ranks.device),
            'host': platform.node(),
            **{name.lower(): os.environ[name] for name in JOB if name in os.environ},
            'versions': versions(),
        })
        for kind, wanted in ((TensorBoard, 'use_tensorboard'), (WeightsAndBiases, 'use_wandb')):
            if config[wanted]:
                self.writers.append(kind(config, precision, resumed_step or 0))

    def say(self, *lines):
        if self.main:
            for line in lines:
                try:
                    print(line, flush=True)
                except OSError:  # nobody reads any more, or it has no room: log.jsonl goes on
                    sys.stdout = open(os.devnull, 'w')

    def say_once(self, line):
        """Says a line, unless it is empty or said before."""
        if line and line not in self.said:
            self.said.add(line)
            self.say(line)

    def _record(self, record):
        finite = {name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
                  for name, value in record.items()}
        try:
            self.file.write(json.dumps(finite) + '\n')
            self.file.flush()
        except OSError as error:  # a full disk must not end the run: the checkpoint decides that
            checkpoint = record['step'] // self.checkpoint_freq
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
                why = told(error) or first_line(error)
                self.say(f'WARNING: {writer.name} is not written any more: {why}')
                self.writers.remove(writer)

    def reached(self, step, val_loss, best, tokens, hours):
        """Says and records what it took to reach target_val_loss, where val_loss is the first that does.
        best: the least of those before, or None. tokens, hours: of the run so far."""
        before = best is not None and best <= self.target
        if not step or not val_loss <= self.target or before:
            return
        figures = {'val_loss': val_loss, 'tokens': tokens, 'hours': hours}
        line = f'target    {self.target:g} reached at step {step:,}: {tokens:,} tokens, {hours:.2f} hours'
        if self.price:
            figures['usd'] = hours * self.world_size * self.price
            line += f', {figures["usd"]:,.2f} USD at {self.price:g} per GPU-hour'
        self.say(line)
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
        self.say(f'step {step:5d} | sample: {text!r}')
        self._record({'step': step, 'sample': text})
        self._write('text', step, 'sample', text)

    def train_step(self, step, precision, flops_per_token, **figures):
        """The console line and its record: each figure is written train/<its name>.

        The line wants epoch, loss, learning_rate, grad_norm, dt_ms (of a step), tokens_per_sec (of all ranks)
        and skipped (steps so far whose gradients were not finite)."""
        peak = peak_flops(self.gpu, precision)
        of = figures
        of['mfu'] = of['tokens_per_sec'] * flops_per_token / (peak * self.world_size) if peak else None
        mfu = f'{of["mfu"]:.1%}' if peak else 'n/a'
        line = (f'step {step:5d} | epoch {of["epoch"]} | loss: {of["loss"]:.6f} | '
                f'lr: {of["learning_rate"]:.2e} | norm: {of["grad_norm"]:.4f} | dt: {of["dt_ms"]:.2f}ms | '
                f'tok/sec: {of["tokens_per_sec"]:.0f} | mfu: {mfu} | {precision.upper()}')
        if of['skipped']:
            line += f' | skipped: {of["skipped"]}'
        self.say(line)
        self.scalars(step, precision=precision, **{f'train_{name}': value for name, value in figures.items()})

    def close(self):
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
