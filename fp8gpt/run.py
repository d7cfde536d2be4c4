"""Resolve a run's settings once, for the training scripts and for each tool that reads their settings.

    source = open_source(configure(__file__))       # the checkpoint or model that the run starts from
    dataset = shards.find_dataset(source.config)
    run = Run.of(source, dataset, device)           # architecture, dtype, compile
    globals().update(run.settings)                  # in a script: from here on, each global is what runs
    length = run.length(world_size, tokens_per_epoch)
    log.intro(*run.early_lines())                   # and, once the model is there, *run.first_lines(...)

Nothing is printed here, no model is built, and nothing of FP8 is imported.
"""
import copy
import dataclasses
import fractions
import math
import os
import shutil
from typing import NamedTuple

import torch

from fp8gpt import checkpoint, data, files, gpus, lora, optim, pretrained, sft, shards
from configurator import Config, MissingError, SettingError
from fp8gpt.distributed import once_a_node
from model import PRESETS, GPTConfig, lacks_bf16_units
from fp8gpt.tokenizer import REVISIONS, TOKENIZERS, get_tokenizer, identity

# What the weights and the optimizer's state of a checkpoint decide, for a run that resumes from it.
KEPT_BY_RESUME = 'init_from', 'optimizer', 'param_dtype', 'lora_rank', 'lora_alpha', 'lora_targets'
BY_NAME = 'auto', 'latest', 'best'     # a resume that names no file
NEVER_INHERITED = 'checkpoint_dir', 'resume', 'overwrite', 'list_checkpoints', 'dry_run', 'eval_only'
MAY_DIFFER = 'checkpoint_dir', 'data_dir', 'dataset', 'tokenizer', 'resume', 'device'     # between ranks
LIMITS = 'max_steps', 'max_tokens', 'num_epochs', 'max_hours'   # of a run's length
NOTHING_SEEN = {'step': 0, 'tokens': 0, 'position': 0}   # what a new run counts from, as a checkpoint has it
ELSEWHERE = '--checkpoint_dir=ANOTHER'
DTYPES = {'bf16': torch.bfloat16, 'fp32': torch.float32}


@dataclasses.dataclass
class Run:
    """A run as it is known before its model is built.

    config: the settings as a checkpoint keeps them, with vocabulary and architecture filled in; its
    block_size is the run's, model_config's the longest that the model reads. tokenizer: its identity.
    source, resumed, resume_path: as in Source. notes: lines for the log about replaced settings and shards
    from elsewhere. data: of each shard its tokens and crc32, see shards.check."""
    config: Config
    model_config: GPTConfig
    device: torch.device
    dataset: shards.Dataset
    tokenizer: str
    compiled: bool
    source: dict | None
    resumed: dict | None
    resume_path: str | None
    notes: list
    data: dict

    @classmethod
    def of(cls, source, dataset, device, trains=True):
        """Return the Run from a Source on a shards.Dataset, on a torch.device.

        trains: whether the run reads the dataset, which is checked then. Raises SettingError where settings,
        source and dataset contradict each other, DataError for a damaged shard, MachineError for a tokenizer
        that cannot be loaded."""
        config, resumed = copy.copy(source.config), source.resumed
        base, meta = resumed or source.model, dataset.meta
        notes = replace_requests(config, device)
        tokenizer = meta.get('tokenizer') or identity(config['tokenizer'])
        model_config = architecture(config, vocabulary(config, dataset, base), base)
        checked_shards = {}
        if trains:
            notes += check_data(config, dataset, tokenizer, base)
            checked_shards = once_a_node(shards.check, dataset, model_config.vocab_size)
        if trains and not resumed:
            check_adapters(config)
        config.update(
            dataclasses.asdict(model_config),
            block_size=window(config, model_config, base),
            system=meta.get('system', ''),
            is_plain=meta.get('template') == sft.PLAIN,
            run_name=config['run_name'] or config.stem or 'gpt',
        )
        compiled = {'on': True, 'off': False}.get(config['compile_model'], device.type == 'cuda')
        run = cls(config, model_config, device, dataset, tokenizer, compiled=compiled, source=source.model,
                  resumed=resumed, resume_path=source.resume_path, notes=notes, data=checked_shards)
        if resumed:
            fit_to_data(run)
        return run

    @property
    def folder(self):
        """The folder of the dataset's shards; None where it is not prepared."""
        return self.dataset.folder

    @property
    def of_examples(self):
        """Return whether the dataset holds examples, as far as its name says before it is prepared."""
        if self.dataset.meta:
            return bool(self.dataset.meta.get('template'))
        return shards.has_examples(self.config['dataset'])

    @property
    def settings(self):
        """Every setting with the value that runs."""
        compile_model = 'on' if self.compiled else 'off'
        return self.config | {'device': str(self.device), 'compile_model': compile_model}

    @property
    def measured_on(self):
        """Return what the validation loss is of."""
        return {
            'val': {file: about for file, about in self.data.items() if 'val_' in file},
            'block_size': self.config['block_size'],
            'eval_tokens': self.config['eval_tokens'],
        }

    @property
    def changes(self):
        """Return the lines for the log about settings that are not the checkpoint's, and the notes."""
        return self.config.changes + self.notes

    def decisive(self):
        """Return {name: value} of what decides the result, and must be the same on all ranks: settings but
        paths and the device, shards, the checkpoint that the run resumes from."""
        return {
            **{name: value for name, value in self.config.items() if name not in MAY_DIFFER},
            'resumed step': self.resumed and self.resumed['step'],
            'checkpoint (crc32)': self.resume_path and checkpoint.crc32(self.resume_path),
            **REVISIONS,
            **self.data,    # tokens and crc32 of each shard
        }

    @property
    def batch_size(self):
        """Sequences of a micro-batch on one GPU; 0 where they are still to be found."""
        return self.config['batch_size']

    @property
    def window_config(self):
        """model_config with the run's block_size: for what is planned and timed."""
        return dataclasses.replace(self.model_config, block_size=self.config['block_size'])

    @property
    def compute_dtype(self):
        """The torch.dtype of activations."""
        return DTYPES[self.config['dtype']]

    @property
    def param_dtype(self):
        """The torch.dtype of weights and gradients."""
        return DTYPES[self.config['param_dtype']]

    @property
    def flops_per_token(self):
        """FLOPs of forward and backward, for sequences of block_size."""
        tokens = self.config['block_size']
        if not self.config['lora_rank']:
            return self.model_config.flops_per_token(tokens)
        return lora.flops_per_token(self.model_config, lora.Spec.of(self.config), tokens)

    @property
    def revisions(self):
        """The commit of each model of the hub that this run has read, by its name there."""
        return dict(REVISIONS)

    def replays(self, gpus, micro_steps):
        """Return whether CUDA graphs replay micro-steps: of what is compiled and not sharded, all but those
        in which DDP reduces gradients."""
        config, is_sharded = self.config, gpus > 1 and self.config['sharding_mode'] != 'ddp'
        return bool(self.compiled and self.device.type == 'cuda' and config['cuda_graphs']
                    and not is_sharded and (gpus == 1 or micro_steps > 1))

    def length(self, world_size, tokens_per_epoch):
        """Return the Length of the run, None until batch_size is found. Raises what Length.of and
        Schedule.check raise."""
        if not self.batch_size:
            return None
        length = Length.of(self.config, world_size, tokens_per_epoch, self.resumed)
        length.schedule.check()
        return length

    def early_lines(self):
        """Return the lines for the log that need no model: which one it is, on which device."""
        weights = '' if self.source else ', random weights'
        return [model_line(self.model_config, weights), gpus.device_line(self.device)]

    def first_lines(self, model, length, train, val, world_size):
        """Return the lines for the log about the run, '' among them, once its model is there. model: a GPT,
        with its adapters. length: a Length. train, val: the splits, data.TokenData."""
        config = self.config
        lines = [f'data      {self.folder}: {train.tokens:,} tokens, {val.tokens:,} for validation']
        resumed = self.resumed
        if resumed:
            precision = resumed['precision']['name']
            lines.append(f'resumed   {self.resume_path} at step {resumed["step"]}, in {precision} until now')
        lines += self.changes
        if config['eval_only']:
            return lines
        size = resumed and resumed.get('tokens_per_step')
        if size and size != length.tokens_per_step:
            lines.append(f'tokens a step: {size:,} in the checkpoint, now {length.tokens_per_step:,}')
        if resumed and length.last_step != optim.OPEN:
            lines.append(length.schedule.jump(resumed['step'], resumed.get('learning_rate')))
        return [*lines, packing_line(train), batch_line(config, length, world_size),
                length_line(self, length, train.tokens_per_epoch), length.cut, disk_line(self, model)]

    @property
    def checkpoint_every(self):
        """grad_checkpointing as GPT takes it: 0 none, 1 every block, k every k-th."""
        setting = self.config['grad_checkpointing']
        return int({'none': 0, 'full': 1}.get(setting, setting))


class Source(NamedTuple):
    """Holds what a run starts from. config: the settings, over those of a checkpoint that the run resumes
    from. resumed, resume_path: that checkpoint and its path, or None. model: the checkpoint or Hugging Face
    model whose weights the model starts with, see pretrained.base, or None; it is `resumed` too, unless that
    holds adapters alone."""
    config: Config
    resumed: dict | None
    resume_path: str | None
    model: dict | None


def open_source(config):
    """Return the Source of a script's settings. Raises what checkpoint.find, checkpoint.read, over_checkpoint
    and pretrained.base raise, and SettingError where a resume by name meets another dataset."""
    path = once_a_node(checkpoint.find, config['resume'], config['checkpoint_dir'])
    if not path:
        return Source(config, None, None, pretrained.base(config['init_from'], bool(config['lora_rank'])))
    resumed = checkpoint.read(path)
    checkpoint.check_name(path, resumed['step'])
    REVISIONS.update(resumed.get('revisions', {}))
    config = over_checkpoint(config, resumed, path)
    check_same_data(config, path)
    model = pretrained.base_of_adapters(resumed) if resumed.get('lora') else resumed
    return Source(config, resumed, path, model)


def preview(config, device):
    """Return the Run of settings that are not trained with: the dataset may be missing, and is not read."""
    source = open_source(config)
    return Run.of(source, dataset_if_any(source.config), device, trains=False)


def over_checkpoint(config, resumed, path):
    """Return the settings over those of the checkpoint at `path`. Raises SettingError for one that the
    checkpoint decides."""
    if not resumed['optimizer']:
        raise SettingError(f'{path} has no optimizer state to resume from: '
                           f'--init_from={path} starts a new run with its weights')
    config = config.over(resumed['config'], NEVER_INHERITED)
    for name in KEPT_BY_RESUME:
        saved = config.saved.get(name, config.defaults[name])       # as this version calls it
        if config[name] != saved:
            raise SettingError(f'{name}={config[name]}, but the checkpoint has {name}={saved}: leave it '
                               f'out, or start anew from its weights, --init_from={path} {ELSEWHERE}')
    config['batch_size'] = config['batch_size'] or config.saved.get('batch_size', 0)    # a search's
    for name, value in (resumed.get('fp8_choice') or {}).items():
        # nobody would see a resumed run change, by a config file's `auto:delayed` either
        in_file = str(config.files.get(name, 'auto'))
        if not config.get('use_fp8') or name in config.typed or not in_file.startswith('auto'):
            break   # a typed backend has recipes, and a typed recipe kernels, of its own
        config[name] = config.saved[name] = value       # no difference from the checkpoint
    return config


def check_same_data(config, path):
    """Raise SettingError where a resume by name would train the run at `path` on another dataset: one that a
    config file names, or the script's default, and nobody typed."""
    untyped = {'dataset', 'split_name', 'tokenizer'} & config.saved.keys() - config.typed.keys()
    trained_on = shards.dataset_dir(config | {name: config.saved[name] for name in untyped})
    asked_for = shards.dataset_dir(config)
    if config['resume'] in BY_NAME and trained_on != asked_for:
        raise SettingError(f'{path} is of a run on {trained_on}, not {asked_for}: {ELSEWHERE} trains '
                           'elsewhere; typed, --dataset, --split_name and --tokenizer take that run on to '
                           'other data')


def check_adapters(config):
    """Raise SettingError where adapters' settings were typed, and a rank neither typed nor given, and where
    overwrite would remove the model that adapters need."""
    typed, model_path = config.typed.keys(), files.checkpoint_of(config['init_from'])
    if not config['lora_rank']:
        if 'lora_rank' not in typed and {'lora_alpha', 'lora_targets'} & typed:
            raise SettingError('lora_alpha and lora_targets are of adapters: type --lora_rank, too')
    elif (config['overwrite'] and os.path.isfile(model_path)
            and files.is_in(config['checkpoint_dir'], model_path)):
        raise SettingError(f'overwrite would remove {model_path}, which adapters need: {ELSEWHERE}')


def fit_to_data(run):
    """Count the position of the checkpoint that a run resumes from in windows of the data that is there, and
    drop a best loss that was measured otherwise. Notes say so."""
    resumed, block_size = run.resumed, run.config['block_size']
    saved_size = resumed['config'].get('block_size', block_size)
    if saved_size != block_size:    # its FP8 scales are of gradients over other numbers of tokens
        resumed['position'] = resumed['position'] * saved_size // block_size
        resumed['fp8_state'] = None
    if resumed.get('measured_on') not in (None, run.measured_on):
        resumed['best_val_loss'] = None
        run.notes.append('the best loss begins anew: it was of other data, block_size or eval_tokens')
    if run.data != (resumed.get('data') or run.data):
        resumed['position'] = 0
        run.notes.append(
            'WARNING: this is not the data that the run was trained on until now: losses before and after do '
            'not compare, texts that it was trained on may be in validation now, and epochs count from here '
            'on')


def replace_requests(config, device):
    """Replace requests that cannot be met here. Return a line about each."""
    lines = []
    if not config['batch_size'] and device.type != 'cuda':
        config['batch_size'] = config.defaults['batch_size']
        lines.append(f'batch_size={config["batch_size"]}: the largest that fits is looked for on CUDA alone')
    if config['dtype'] == 'bf16' and 'dtype' not in config.given:
        if lacks_bf16_units(device):
            config['dtype'] = 'fp32'
            lines.append('dtype=fp32: there are no bf16 units here, and bf16 would be slower')
    return lines


# ----------------------------------------------------------------------------------- dataset and architecture

def dataset_if_any(config):
    """Return the shards.Dataset of settings; Dataset(None, {}) where it is not prepared."""
    try:
        return shards.find_dataset(config)
    except MissingError:
        return shards.Dataset(None, {})


def check_data(config, dataset, tokenizer, base):
    """Raise SettingError where the dataset does not fit the model. Return a line, in a list, where it has no
    meta.json. base: the checkpoint or Hugging Face model that the run starts from, or None. One that came
    without a tokenizer fits any."""
    folder, meta = dataset
    template = meta.get('template')
    prepared_by = 'plain' if template == sft.PLAIN else template and 'chat'
    if config['template'] not in ('auto', prepared_by):
        raise SettingError(f'{folder} was prepared by another template, or as texts: leave out --template, '
                           'or prepare it again with --overwrite')
    typed = config.typed.get('tokenizer')
    # one of the hub is not fetched for this
    if typed and (typed in TOKENIZERS or os.path.isdir(typed)) and identity(typed) != tokenizer:
        raise SettingError(f'{folder} is tokenized with {tokenizer}, not {typed}: leave out --tokenizer')
    if base and base['tokenizer'] not in (tokenizer, ''):
        raise SettingError(f'{folder} is tokenized with {tokenizer}, '
                           f'the checkpoint with {base["tokenizer"]}')
    nobody_named_a_model = config['init_from'] == 'scratch' and 'init_from' not in config.given
    if nobody_named_a_model and not base and any(map(shards.is_mask, os.listdir(folder))):
        raise SettingError(f'{folder} has examples to fine-tune on, and init_from names no model: type '
                           '--init_from=MODEL, or --init_from=scratch for random weights')
    return [] if meta else [f'WARNING: {folder} has no meta.json: its shards are taken for {tokenizer} '
                            'tokens, by their headers and sizes alone']


def vocabulary(config, dataset, base):
    """Return the model's number of tokens: base's, plan.py's setting, the dataset's or the tokenizer's. A
    token that the model lacks and no text has is no matter: shards.check sees those that the dataset has."""
    size = base['model_config']['vocab_size'] if base else config.get('vocab_size')
    size = size or dataset.meta.get('vocab_size')
    if not size and not dataset.folder and config['tokenizer'] == 'gpt2':
        size = GPTConfig.vocab_size     # known without its files
    return size or get_tokenizer(config['tokenizer']).vocab_size


def architecture(config, vocab_size, base):
    """Return the GPTConfig: that of `base` (see check_data), else the preset's and the settings'. Raises
    SettingError where a given setting contradicts base's: 0, which stands for 'derived', does not."""
    names = [field.name for field in dataclasses.fields(GPTConfig) if field.name in config]
    fields = {name: config[name] for name in names}
    given = {name: config[name] for name in names if name in config.files | config.typed}
    if base:
        base_config = GPTConfig(**base['model_config'])
        may_differ = 'block_size' if base_config.position == 'rope' else ''     # see window
        for name, value in given.items():
            base_value = getattr(base_config, name)
            derived = name == 'ffn_dim' and not value
            if value != base_value and not derived and name != may_differ:
                raise SettingError(f'{name}={value}, but the checkpoint has {name}={base_value}: '
                                   f'leave it out, or start a run of another model, {ELSEWHERE}')
        return base_config
    if config['init_from'] in PRESETS:
        fields = dataclasses.asdict(PRESETS[config['init_from']])
    if 'n_embd' in given:       # 0 = derived anew
        fields |= {'ffn_dim': 0, 'head_dim': 0}
    if 'n_head' in given:
        fields |= {'n_kv_head': 0, 'head_dim': 0}
    return GPTConfig(**fields | given | {'vocab_size': vocab_size})


def window(config, model_config, base):
    """Return block_size as it runs, in tokens: the setting, or else what base's run read, or the default.
    Learned positions are all trained, of a model with RoPE any part. Raises SettingError where that is longer
    than the model reads."""
    longest, wanted = model_config.block_size, config['block_size']
    if model_config.position == 'learned':
        return longest
    if 'block_size' not in config.given:
        saved = base['config'] if base else {}
        return min(saved.get('block_size', wanted), longest)
    if wanted > longest:
        raise SettingError(f'block_size={wanted}, but the model reads {longest} tokens at most')
    return wanted


def tokens_per_epoch(run):
    """Return the tokens of a pass over the training split where the run's length depends on them; else 0.
    Raises MissingError."""
    config = run.config
    if not config['num_epochs'] and any(config[name] for name in LIMITS):
        return 0
    return data.TokenData(shards.find_dataset(config), 'train', config['block_size']).tokens_per_epoch


# ------------------------------------------------------------------------------------------- batch and length

@dataclasses.dataclass(frozen=True)
class Length:
    """The length of a run. micro_steps: of an optimizer step, per rank. ended_by: the limit that ends the
    run, as 'max_steps=10'. tokens: of the whole run. cut: a line about a warm-up that was too long for the
    run, or ''. fitted: {name: value} of settings as they fit the run."""
    micro_steps: int
    sequences_per_step: int
    tokens_per_step: int
    last_step: int
    ended_by: str
    tokens: int
    schedule: optim.Schedule
    cut: str
    fitted: dict

    @classmethod
    def of(cls, config, world_size, tokens_per_epoch, resumed=None):
        """Return the Length of a run whose batch_size is known. resumed: the checkpoint that it resumes from,
        whose tokens count, whatever a step was then. tokens_per_epoch: 0 where it does not matter.

        warmup_steps is made to fit the run where nobody typed one, and eval_freq to be an epoch at most, or
        10 steps if an epoch is shorter, where nobody chose one. Raises SettingError where a target does not
        divide, or the end is passed already."""
        steps = micro_steps(config, config['batch_size'], world_size)
        sequences = steps * config['batch_size'] * world_size
        tokens = sequences * config['block_size']
        resumed = resumed or NOTHING_SEEN
        last_step, ended_by = find_end(config, tokens, tokens_per_epoch, resumed)
        done, seen = resumed['step'], resumed['tokens']
        hours = config['max_hours']     # a run that this same limit ended may be a little past it
        passed = 0 < hours < resumed.get('hours', 0) and hours != config.saved.get('max_hours')
        if (done > last_step or passed) and not config['eval_only']:
            raise SettingError(f'{ended_by} is passed already: the run is at step {done:,}, with {seen:,} '
                               'tokens; give more, or take what is there')
        # a default is for long runs, a config file's warm-up for the length that the file gives
        shortened = 'warmup_steps' in config.files and not config.typed.keys().isdisjoint(LIMITS)
        is_shorter = shortened or 'warmup_steps' not in config.given
        schedule = optim.Schedule.of(config, last_step)
        cut = schedule.fit(config, is_shorter)
        fitted = {'warmup_steps': schedule.warmup_steps, 'eval_freq': config['eval_freq']}
        if 'eval_freq' not in config.given and tokens_per_epoch:
            fitted['eval_freq'] = min(config['eval_freq'], max(10, tokens_per_epoch // tokens))
        return cls(steps, sequences, tokens, last_step, ended_by=ended_by, schedule=schedule, cut=cut,
                   tokens=seen + (last_step - done) * tokens, fitted=fitted)


def micro_steps(config, batch_size, world_size):
    """Return the micro-steps of an optimizer step: gradient_accumulation_steps, or as many as make
    total_batch_size tokens or target_effective_batch_size sequences. Raises SettingError, with the nearest
    that divides, where a target does not divide, and where two of the three disagree."""
    block_size, accumulation = config['block_size'], config['gradient_accumulation_steps']
    by_sequences = config['target_effective_batch_size'] * block_size
    target = config['total_batch_size'] or by_sequences     # tokens of a step
    if not target:
        return accumulation or 1
    micro_tokens = batch_size * block_size * world_size     # of a micro-step of all ranks
    steps = target // micro_tokens
    if by_sequences not in (0, target) or accumulation not in (0, steps):
        raise SettingError(f'a step of {target:,} tokens is {target / block_size:g} sequences, in {steps} '
                           'micro-steps: give one of total_batch_size, target_effective_batch_size and '
                           'gradient_accumulation_steps')
    if target % micro_tokens:
        nearest = max(1, round(target / micro_tokens)) * micro_tokens
        raise SettingError(f'a step of {target:,} tokens is no multiple of {micro_tokens:,} (batch_size '
                           f'{batch_size} x block_size {block_size} x {world_size} ranks); the nearest is '
                           f'--total_batch_size={nearest}, {nearest // block_size} sequences')
    return steps


def find_end(config, tokens_per_step, tokens_per_epoch, resumed=NOTHING_SEEN):
    """Return (the last step, the limits that end the run). The first limit reached does; none set is one
    epoch. Under max_hours the steps are not known beforehand: alone, it leaves the last step optim.OPEN.
    resumed: see Length.of. Raises SettingError for max_tokens that are less than a step's."""
    limits = {name: config[name] for name in LIMITS if config[name]} or {'num_epochs': 1}
    max_tokens, epochs = config['max_tokens'], fractions.Fraction(str(limits.get('num_epochs', 0)))
    if 0 < max_tokens < tokens_per_step:
        raise SettingError(f'max_tokens={max_tokens} is less than one step of {tokens_per_step} tokens: give '
                           'more, or smaller steps')
    tokens_read = resumed['position'] * config['block_size']    # of this dataset
    tokens_left = epochs * tokens_per_epoch - tokens_read
    ends = {
        'max_steps': config['max_steps'],
        'max_tokens': resumed['step'] + (max_tokens - resumed['tokens']) // tokens_per_step,
        'num_epochs': max(1, resumed['step'] + math.ceil(tokens_left / tokens_per_step)),
        'max_hours': optim.OPEN,
    }
    first = min(limits, key=ends.get)
    ended_by = [name for name in limits if name in (first, 'max_hours')]
    return ends[first], ' or '.join(f'{name}={limits[name]:.15g}' for name in ended_by)


# ---------------------------------------------------------------------------------------- a run's first lines
# The first row of a line says what matters; a dry run and log.jsonl have the second one too.

MORE = '\n          '


def model_line(c, weights=''):
    """Return the line about a model. c: GPTConfig. weights: a clause about them."""
    return (f'model     {c.count_parameters() / 1e6:.2f}M parameters: {c.n_layer} layers x {c.n_embd}, '
            f'{c.n_head} heads{weights}{MORE}{c.mlp}, {c.norm}, {c.position}, '
            f'vocabulary {c.vocab_size} (padded to {c.padded_vocab_size})')


def batch_line(config, length, world_size):
    """Return the line about a step's tokens. length: a Length."""
    # in an order that says whose micro-steps they are: nanoGPT's count those of all GPUs together
    return (f'batch     {world_size} ranks x {length.micro_steps} micro-steps x {config["batch_size"]} x '
            f'{config["block_size"]} tokens = {length.tokens_per_step:,} tokens a step')


def length_line(run, length, tokens_per_epoch=0):
    """Return the line about a run's length. tokens_per_epoch: 0 where it is not known."""
    flops = run.flops_per_token
    per_token = f'{flops / 1e6:,.0f}M FLOPs a token'
    if length.last_step == optim.OPEN:
        return f'run       until {length.ended_by}{MORE}{per_token}'
    tokens = length.tokens
    epochs = f' = {tokens / tokens_per_epoch:.2f} epochs' if tokens_per_epoch else ''
    return (f'run       {length.last_step:,} steps = {tokens:,} tokens{epochs}, by {length.ended_by}'
            f'{MORE}{tokens * flops:.2e} FLOPs, {per_token}')


def packing_line(train):
    """Return the line about the examples that a data.TokenData packs and cuts; '' where it has none."""
    packing = train.packing
    if not packing:
        return ''
    return (f'packed    {len(packing.lengths):,} examples in {train.n_windows:,} windows, '
            f'{packing.padding:.1%} padding{MORE}longer than block_size={train.block_size}: {packing.cut:,} '
            f'cut, by {packing.lost / train.tokens:.1%} of all tokens, {packing.left_out:,} left out')


def disk_line(run, model):
    """Return a warning where the disk of checkpoint_dir has too little space for the checkpoints, else ''."""
    config = run.config
    weights = sum(p.nbytes for p in model.weights().values())
    needed = weights + optim.moment_bytes(model, config['optimizer'])
    at_once = 2 + (0 if run.resumed else config['keep_checkpoints'])    # the best, the next, those kept
    free = shutil.disk_usage(files.nearest_folder(config['checkpoint_dir'])).free
    if free >= at_once * needed:
        return ''
    return (f'WARNING: {free / 1e9:.2f} GB are free for checkpoints, and one takes about '
            f'{needed / 1e9:.2f}; {at_once} are there at once')
