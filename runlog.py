"""What a run says: the console line, log.jsonl beside the checkpoints, TensorBoard, MFU."""
import contextlib
import json
import math
import os
import platform
import subprocess
import time

import torch


def device_name(device):
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    model = platform.machine()
    if os.path.exists('/proc/cpuinfo'):
        with open('/proc/cpuinfo') as file:
            model = next((line.split(':')[1].strip() for line in file if line.startswith('model name')), model)
    return f'{device.type.upper()}, {model}, {torch.get_num_threads()} threads'


def versions():
    """What produced a result: torch, Python, commit."""
    commit = ''
    with contextlib.suppress(OSError):  # no git here
        here = os.path.dirname(os.path.abspath(__file__))
        commit = subprocess.run(['git', '-C', here, 'rev-parse', '--short', 'HEAD'], capture_output=True, text=True).stdout.strip()
    return {'torch': str(torch.__version__), 'python': platform.python_version(), 'commit': commit or 'unknown'}


def duration(seconds):
    """3700 -> '1 h 1 min'."""
    minutes = round(seconds / 60)
    return f'{seconds:.0f} s' if seconds < 100 else f'{minutes} min' if minutes < 100 else f'{minutes // 60} h {minutes % 60} min'


class RunLog:
    """Rank 0's log; on other ranks every method is silent. resumed_step: lines behind that step are an abandoned future
    and are cut; None starts the file anew."""

    def __init__(self, ranks, checkpoint_dir, tensorboard_dir, resumed_step, header):
        self.main, self.writer, self.file, self.said = ranks.main, None, None, set()
        self.world_size = ranks.world_size
        if not self.main:
            return
        path, kept = os.path.join(checkpoint_dir, 'log.jsonl'), []
        if resumed_step is not None and os.path.exists(path):
            with open(path) as file:
                records = [json.loads(line) for line in file if line.endswith('\n')]
            # an evaluation at the resumed step comes again, a training step does not
            kept = [r for r in records if r['step'] < resumed_step or r['step'] == resumed_step and 'train/loss' in r]
        with open(path + '.tmp', 'w') as file:
            file.writelines(json.dumps(record) + '\n' for record in kept)
        os.replace(path + '.tmp', path)
        self.file = open(path, 'a')
        self._record({'step': resumed_step or 0, 'time': time.time(), **header})
        if tensorboard_dir:
            from torch.utils.tensorboard import SummaryWriter
            self.writer = SummaryWriter(tensorboard_dir, purge_step=resumed_step)

    def say(self, *lines):
        if self.main:
            for line in lines:
                print(line, flush=True)

    def say_once(self, line):
        """Says a line, unless it is empty or said before."""
        if line and line not in self.said:
            self.said.add(line)
            self.say(line)

    def _record(self, record):
        finite = {k: v if not isinstance(v, float) or math.isfinite(v) else str(v) for k, v in record.items()}
        try:
            self.file.write(json.dumps(finite) + '\n')
            self.file.flush()
        except OSError as error:  # a full disk must not end the run: the checkpoint decides that
            print(f'log.jsonl was not written: {error}', flush=True)

    def scalars(self, step, **values):
        """Records values (`val_loss` is written val/loss) at a step."""
        if not self.main:
            return
        named = {name.replace('_', '/', 1): value for name, value in values.items()}
        self._record({'step': step, **named})
        if self.writer:
            for name, value in named.items():
                if isinstance(value, (int, float)):
                    self.writer.add_scalar(name, value, step)

    def train_step(self, step, epoch, loss, lr, norm, seconds, tokens, flops_per_token, peak, precision, data_wait, skipped):
        """The console line and its record. seconds and tokens (over all ranks): of one step; peak: FLOP/s of one GPU or
        None; data_wait: share of the step; skipped: steps skipped so far because their gradients were not finite."""
        mfu = tokens / seconds * flops_per_token / (peak * self.world_size) if peak else None
        self.say(f'step {step:5d} | epoch {epoch} | loss: {loss:.6f} | lr: {lr:.2e} | norm: {norm:.4f} | dt: {seconds * 1e3:.2f}ms | '
                 f'tok/sec: {tokens / seconds:.0f} | mfu: {f"{mfu:.1%}" if mfu else "n/a"} | {precision.upper()}'
                 + (f' | skipped: {skipped}' if skipped else ''))
        self.scalars(step, train_loss=loss, train_learning_rate=lr, train_grad_norm=norm, train_dt_ms=seconds * 1e3,
                     train_tokens_per_sec=tokens / seconds, train_mfu=mfu, train_data_wait=data_wait, train_skipped=skipped,
                     train_epoch=epoch, precision=precision)

    def close(self):
        for stream in (self.file, self.writer):
            if stream:
                stream.close()


class Clock:
    """Seconds per step and the share of them spent waiting for data, between logged steps; what lies between stop() and
    start(), such as an evaluation, does not count."""

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
