"""What benchmarks have in common: the settings that they compare in, and what they leave behind: a table, a
JSON, and a reason where a row cannot be had."""
import dataclasses
import gc
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
import types

import torch

from fp8gpt import files, fp8, lora, measure, parallel, runlog
from fp8gpt.run import Length, Run
from configurator import MachineError, SettingError, UserError, configure
from fp8gpt.runlog import device_name
from model import GPT, Linear, Penalty
from fp8gpt.settle import settle

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


# ------------------------------------------------------------------------------------------- what is compared

@dataclasses.dataclass
class Settings:
    """What train_fp8.py's config files and flags mean here: `words` are they, `files` the config files among
    them, `stem` the first one's name. run: run.Run. tokens: of a micro-batch."""
    words: list
    files: list
    stem: str
    run: Run

    @property
    def config(self):
        return self.run.config

    @property
    def model(self):
        return self.run.window_config

    @property
    def device(self):
        return self.run.device

    @property
    def tokens(self):
        return self.run.batch_size * self.model.block_size

    @property
    def micro_steps(self):
        """Of an optimizer step on one GPU."""
        return Length.of(self.config, 1, tokens_per_epoch=0).micro_steps


def resolved(words, device=None):
    """The run.Run of train_fp8.py's config files and flags; its dataset may be missing."""
    config = configure(os.path.join(ROOT, 'train_fp8.py'), words)
    device = device or parallel.init(config['device']).device
    return Run.of(config, device, data_required=False)


def read_settings(words, adapters=False):
    """The Settings of words. adapters: whether they may be beside the linears. Raises SettingError for what
    cannot be timed."""
    run = resolved(words)
    if run.config['lora_rank'] and not adapters:
        raise SettingError('lora_rank: `python bench.py lora` times adapters, at several ranks')
    of_checkpoint = run.config['init_from'].endswith('.pt')  # a Hugging Face model's weights are not read
    if run.config['dtype'] != 'bf16' or not run.batch_size or of_checkpoint or run.resumed:
        wanted = 'dtype=bf16, a batch_size other than 0, and no checkpoint'
        raise SettingError(f'FP8 against bf16 wants {wanted}')
    names = [word.removeprefix('--config=') for word in words]
    files = [name for name in names if name.endswith(('.py', '.yaml', '.yml'))]
    first = os.path.basename(files[0]) if files else 'flags'
    return Settings(words, files, os.path.splitext(first)[0], run)


def choose(settings, words):
    """settle.settle under these words, as in train_fp8.py. Raises MachineError also where a request would
    end in bf16."""
    settled = settle(resolved(words, settings.device))
    if not settled.choice.on:
        raise MachineError(f'bf16 only: {settled.choice.reason}')
    return settled


def build(settings, choice):
    """A GPT whose linears are in FP8 where the choice says so, with adapters and a penalty where the settings
    have them, on their device."""
    config = settings.config
    model = GPT(
        settings.model,
        linear=fp8.linear_factory(choice, Linear),
        seed=config['seed'],
        checkpoint_every=settings.run.checkpoint_every,
        checkpoint=fp8.checkpointer(choice),
        param_dtype=settings.run.param_dtype,
        loss_chunks=config['loss_chunks'],
    ).to(settings.device)
    if config['penalty_weight']:
        model.penalty = Penalty(config['penalty_weight'], settings.device)
    spec = lora.Spec.of(config)
    if spec.rank:
        lora.add(model, spec)
    return model


def ways(module, settled):
    """Return {'bf16': call, 'FP8': call} of a GPT or a linear, compiled where that helps."""
    if not settled.bf16_compiled:
        return {'bf16': module, 'FP8': module}
    module.compile(dynamic=False)
    return {'bf16': module, 'FP8': module if settled.compiled else measure.in_eager_mode(module)}


@dataclasses.dataclass
class Cell:
    """What one row of a benchmark is measured with."""
    settings: Settings
    arguments: types.SimpleNamespace  # the benchmark's own settings
    asked: dict                       # 'backend' and 'recipe'; one that is not named is left to the settings
    words: list                       # the settings' and those that order backend and recipe


def matrix(settings, arguments):
    """A Cell for each backend and recipe."""
    recipes = fp8.RECIPES if arguments.recipes == 'all' else arguments.recipes.split(',')
    for backend in arguments.backends.split(','):
        for recipe in recipes:
            orders = {'backend': backend, 'recipe': recipe}
            asked = {name: value for name, value in orders.items() if value}
            words = [f'--fp8_{name}={value}' for name, value in asked.items()]
            yield Cell(settings, arguments, asked, [*settings.words, *words])


def speed_verdict(ratio, keep='', spread=(1, 1)):
    """ratio: bf16's time over FP8's; spread: its least and most. fp8_keep=auto promises at most 1.02 of
    bf16's time."""
    verdict = f'{"FP8" if round(ratio, 2) >= 1 else "SLOWER"} x{ratio:.2f}'
    if spread[0] < 1 < spread[1]:
        verdict += ', rounds disagree'
    if keep == 'auto':
        verdict += ', PASS' if 1 / ratio <= 1.02 else ', FAIL'
    return verdict


# -------------------------------------------------------------------------------------- what is left behind

def unused(folder, name):
    """The name, or with a number behind, of which the folder has neither a JSON nor a picture: a result is
    never written over."""
    for number in itertools.count(1):
        free = f'{name}-{number}' if number > 1 else name
        if not any(os.path.exists(os.path.join(folder, f'{free}.{ending}')) for ending in ('json', 'png')):
            return free


def save(name, rows, folder, **facts):
    """Writes rows (dicts) and facts to <folder>/<name>.json with hardware, versions and commit; returns all
    that."""
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    versions = dict(runlog.versions())
    for package in importlib.metadata.distributions():
        if package.name in ('transformer_engine', 'torchao'):
            versions[package.name] = package.version
    result = {
        'bench': name,
        'device': device_name(device),
        'versions': versions,
        **facts,
        'rows': rows,
    }
    files.write_json(os.path.join(folder, f'{name}.json'), result)
    return result


def as_text(value):
    """A table's cell: four digits of a number, `least .. most` of a list, a dash where there is nothing."""
    if value is None:
        return '-'
    if isinstance(value, list):
        return ' .. '.join(as_text(item) for item in value)
    if isinstance(value, float):
        return f'{value:,.4g}' if abs(value) < 1e4 else f'{value:,.0f}'
    return str(value)


def report(name, rows, folder, **facts):
    """Prints rows as a Markdown table, saves them, ends with the saved JSON on one line, but for the curves
    of single `runs`. A row may lack a column. name: unused."""
    result = save(name, rows, folder, **facts)
    table(rows)
    result.pop('runs', None)
    print(json.dumps(result))


def table(rows, heading=True):
    """Prints rows, dicts, as a Markdown table."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ['---'] * len(columns)] if heading else []
    lines += [[as_text(row.get(column)) for column in columns] for row in rows]
    for line in lines:
        print('|', ' | '.join(line), '|', flush=True)


def fill(name, settings, cells, folder, **facts):
    """The rows of cells [(columns, work() -> more columns)], printed and saved as soon as they are there. A
    cell that cannot run has the reason for its verdict, and the next one follows. settings: see
    read_settings."""
    name = unused(folder, f'{name}-{settings.stem}')
    device = device_name(settings.device)
    facts = {'device': device, 'words': settings.words, **facts}
    rows = []
    for columns, work in cells:
        try:
            columns |= work()
        except (UserError, fp8.OptionError, RuntimeError) as error:  # OutOfMemoryError, too
            lines = str(error).splitlines() or [type(error).__name__]
            columns['verdict'] = lines[0]
        table([columns], heading=not rows or columns.keys() != rows[-1].keys())
        rows.append(columns)
        result = save(name, rows, folder, **facts)
        gc.collect()
        torch.compiler.reset()
        torch.cuda.empty_cache()
    print(json.dumps(result))
    return rows


def finish(words, **kwargs):
    """Runs `python words...`; returns what it printed. Raises MachineError with its last line where it
    fails."""
    words = [sys.executable, *words]
    done = subprocess.run(words, capture_output=True, text=True, **kwargs)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ['in silence']
        why = lines[-1].removeprefix('error: ')
        raise MachineError(f'{os.path.basename(words[1])} failed: {why}')
    return done.stdout
