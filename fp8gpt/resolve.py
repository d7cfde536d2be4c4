"""What a run's settings mean, asked once, by the loops and by every tool that speaks of a run.

    config = configure(__file__)                       # what is asked for
    run = resolve.run(config, device)                  # what it means: checkpoint, dataset, architecture, ...
    globals().update(run.settings)                     # in a script: from here on, a global is what runs
    length = resolve.length(config, block_size, world_size, tokens_per_epoch)

No model is built here, and nothing of FP8 is known.
"""
import dataclasses
import math
import os

import torch

from fp8gpt import checkpoint, data, gpus, lora, optim, shards
from configurator import Config, MissingError, SettingError
from model import PRESETS, GPTConfig
from fp8gpt.tokenizer import get_tokenizer, identity

# what a resume cannot change
OF_MOMENTS = 'optimizer', 'param_dtype', 'lora_rank', 'lora_alpha', 'lora_targets'
NEVER_INHERITED = ('checkpoint_dir', 'resume', 'overwrite', 'list_checkpoints', 'dry_run', 'eval_only')
DERIVED = ('vocab_size', 'n_kv_head', 'ffn_dim')    # 0 leaves them open
UNKNOWN = ''             # the tokenizer of a Hugging Face model that comes without one
DTYPES = {'bf16': torch.bfloat16, 'fp32': torch.float32}


@dataclasses.dataclass
class Run:
    """config: the settings as a checkpoint keeps them: as asked for, with vocabulary and architecture filled
    in; its block_size is the run's, model_config's the longest that the model reads. folder: of the dataset's
    shards, None where it is not prepared (and may be missing). tokenizer: its identity. source: the
    checkpoint or Hugging Face model whose weights the model starts with, see lora.base, or None; resumed: the
    checkpoint that the run goes on from, or None: the same, unless it holds adapters alone. changes: lines
    that tell how the settings differ from that checkpoint's, and of foreign shards."""
    config: Config
    model_config: GPTConfig
    device: torch.device
    folder: str | None
    tokenizer: str
    compiled: bool
    source: dict | None
    resumed: dict | None
    resume_path: str | None
    changes: list

    @property
    def settings(self):
        """Every setting as it runs."""
        compile_model = 'on' if self.compiled else 'off'
        return {**self.config, 'device': str(self.device), 'compile_model': compile_model}

    @property
    def batch_size(self):
        return self.config['batch_size']

    @property
    def window_config(self):
        """model_config as if the model read no more than the run's window: for what is planned and timed."""
        return dataclasses.replace(self.model_config, block_size=self.config['block_size'])

    @property
    def compute_dtype(self):
        """Of activations."""
        return DTYPES[self.config['dtype']]

    @property
    def param_dtype(self):
        """Of weights and gradients."""
        return DTYPES[self.config['param_dtype']]

    @property
    def flops_per_token(self):
        """Forward and backward, for sequences of block_size."""
        spec = lora.Spec.of(self.config)
        return lora.flops_per_token(self.model_config, spec, self.config['block_size'])

    @property
    def checkpoint_every(self):
        """See GPT."""
        return checkpoint_every(self.config['grad_checkpointing'])


def run(config, device, data_required=True):
    """The Run that a script's settings mean on a device, a torch.device.

    data_required: whether the dataset must be there; else its vocabulary is the tokenizer's. Raises
    SettingError, MissingError or DataError for a checkpoint or dataset, MachineError for a vocabulary that
    cannot be loaded."""
    moments = not config['eval_only']
    resume_path = checkpoint.find(config['resume'], config['checkpoint_dir'], moments)
    resumed = checkpoint.load(resume_path, moments) if resume_path else None
    changes = []
    if resumed:
        config, changes = config.over(resumed['config'], NEVER_INHERITED)
        if not resumed['optimizer']:
            raise SettingError(f'{resume_path} has no optimizer state to go on with: '
                               f'--init_from={resume_path} starts a new run with its weights')
        if config['init_from'] != resumed['config']['init_from']:
            raise SettingError(f'resume={config["resume"]} goes on from that checkpoint, not from '
                               f'init_from={config["init_from"]}: leave one of the two out')
        for name in OF_MOMENTS:
            before = resumed['config'].get(name, config.defaults[name])
            if config[name] != before:
                raise SettingError(f'{name}={config[name]}, but the checkpoint has {name}={before}: leave it '
                                   f'out, or start anew from its weights, --init_from={resume_path}')
    changes += replaced(config, device)
    check(config, device)
    source = resumed
    if not resumed or resumed.get('lora'):
        source = lora.base(config['init_from'])
    folder, meta = dataset(config, data_required)
    untyped = config['init_from'] == 'scratch' and 'init_from' not in config.given
    if folder and untyped and not resumed and any(map(shards.is_mask, os.listdir(folder))):
        raise SettingError(f'{folder} has examples to fine-tune on, and init_from names no model: type '
                           '--init_from=MODEL, or --init_from=scratch for random weights')
    tokenizer = meta.get('tokenizer') or identity(config['tokenizer'])
    if folder and not meta:
        taken = f'its shards are taken for {tokenizer} tokens, by their headers and sizes alone'
        changes.append(f'WARNING: {folder} has no meta.json: {taken}')
    before = resumed or source
    if data_required and before and before['tokenizer'] not in (tokenizer, UNKNOWN):
        raise SettingError(f'{folder} is tokenized with {tokenizer}, '
                           f'the checkpoint with {before["tokenizer"]}')
    if data_required or not before:
        config['vocab_size'] = vocabulary(config, folder, meta, before)
    model_config = architecture(config, before)
    window = window_of(config, model_config, before)
    if resumed:
        recount(resumed, window)
    config.update(dataclasses.asdict(model_config), block_size=window)
    config['run_name'] = config['run_name'] or config.stem or 'gpt'
    compiled = config['compile_model'] == 'on'
    if config['compile_model'] == 'auto':
        compiled = device.type == 'cuda'
    return Run(config, model_config, device, folder, tokenizer, compiled=compiled,
               source=source, resumed=resumed, resume_path=resume_path, changes=changes)


def replaced(config, device):
    """Lines that tell which requests, in other systems' words, come to something else here. The settings
    become that."""
    lines = [f'left out  {name}: this script trains in bf16, train_fp8.py in FP8'
             for name, is_here in config.theirs.items() if not is_here]
    if 'auto_batch_size' in config.theirs and not config['batch_size'] and device.type != 'cuda':
        config['batch_size'] = config.defaults['batch_size']
        lines.append(f'batch_size={config["batch_size"]}: auto_batch_size looks for what fits a GPU, '
                     'and here is none')
    if config['split_name'] in shards.HELD_OUT and not config['eval_only']:
        lines.append(f'split_name={config["split_name"]}: what is held out of the usual split, of which '
                     'validation loss is; training takes the rest')
    return lines


def check(config, device):
    """Raises SettingError for what cannot be on this device, or not yet, whatever the dataset."""
    if not config['batch_size'] and device.type != 'cuda':
        raise SettingError('batch_size=0 looks for what fits the memory of a GPU; here is none, '
                           'so name a batch_size')


def dataset(config, required):
    """(folder of the shards, its meta.json); (None, {}) where it is not prepared and need not be."""
    folder = shards.dataset_dir(
        config['data_dir'], config['dataset'], config['tokenizer'], config['split_name'])
    try:
        return folder, shards.read_meta(folder, config['tokenizer'])
    except MissingError:
        if required:
            raise
        return None, {}


def vocabulary(config, folder, meta, source=None):
    """Return the model's number of tokens: the setting, or else that of the model that the run starts from
    (source), the dataset's, or the tokenizer's. Raises SettingError where it is too small for the dataset."""
    needed = meta.get('vocab_size')
    if not needed and not folder and config['tokenizer'] == 'gpt2':
        needed = GPTConfig.vocab_size  # known without its files
    needed = needed or get_tokenizer(config['tokenizer']).vocab_size
    asked = config['vocab_size'] or (source['model_config']['vocab_size'] if source else needed)
    if folder and asked < needed:
        raise SettingError(f'vocab_size={asked}, but {folder} has {needed} tokens')
    return asked


def architecture(config, source=None):
    """The GPTConfig: a checkpoint's (source), which no setting may contradict, or a preset's and the
    settings'."""
    given = config.given | {'vocab_size'}
    if source:
        return fixed_config(config, given, source['model_config'])
    return make_config(config, given, PRESETS.get(config['init_from']))


def make_config(settings, given, preset=None):
    """The GPTConfig of a new model. settings: dict with GPTConfig fields. given: names that the user set, as
    opposed to defaults. preset: a GPTConfig whose fields hold where the user gave none."""
    names = [field.name for field in dataclasses.fields(GPTConfig)]
    fields = {name: settings[name] for name in names if name in settings}
    if not preset:
        return GPTConfig(**fields)
    chosen = {name: value for name, value in fields.items() if name in given}
    fields = {**dataclasses.asdict(preset), **chosen}
    bases = ('ffn_dim', 'n_embd'), ('n_kv_head', 'n_head'), ('head_dim', 'n_embd'), ('head_dim', 'n_head')
    for derived, base in bases:
        if base in chosen and derived not in chosen:
            fields[derived] = 0
    return GPTConfig(**fields)


def fixed_config(settings, given, fixed):
    """The GPTConfig of a checkpoint's dict of fields, `fixed`. Raises SettingError where a given setting
    contradicts it; 0 that stands for 'derived' contradicts nothing, nor does a window, see window_of."""
    fields = dataclasses.asdict(GPTConfig(**fixed))
    if fields['position'] == 'rope':
        del fields['block_size']
    for name, value in fields.items():
        asked = settings.get(name, value)
        derived = asked == 0 and name in DERIVED
        if name in given and asked != value and not derived:
            raise SettingError(f'{name}={asked}, but the checkpoint has {name}={value}: '
                               'leave it out, or start a new run')
    return GPTConfig(**fixed)


def window_of(config, model_config, source):
    """block_size as it runs: tokens of a sequence. Learned positions are trained all, of a model with RoPE
    any part: the setting, or else what the source's run read, or the default. Raises SettingError where that
    is longer than the model reads."""
    longest = model_config.block_size
    asked = config['block_size']
    if 'block_size' not in config.given | config.inherited:
        saved = source['config'] if source else {}
        asked = min(saved.get('block_size', asked), longest)
    if model_config.position == 'learned':
        return longest
    if asked > longest:
        raise SettingError(f'block_size={asked}, but the model reads {longest} tokens at most')
    return asked


def recount(resumed, window):
    """A checkpoint's position, which counts windows, in windows of another length. Delayed scaling's scales
    go: they are of gradients that were divided by other numbers of tokens."""
    before = resumed['config'].get('block_size', window)
    if before != window:
        resumed['position'] = resumed['position'] * before // window
        resumed['fp8_state'] = None


def checkpoint_every(setting):
    """grad_checkpointing as a number: none is 0, full 1, k is k: every k-th block."""
    return int({'none': 0, 'full': 1}.get(setting, setting))


# ------------------------------------------------------------------------------------------- batch and length

@dataclasses.dataclass(frozen=True)
class Length:
    """micro_steps: of an optimizer step, per rank. ended_by: the limit that ends the run, as
    'max_steps=10'."""
    micro_steps: int
    sequences_per_step: int
    tokens_per_step: int
    last_step: int
    ended_by: str


def length(config, block_size, world_size, tokens_per_epoch):
    """The Length of a run whose batch_size is settled. The setting warmup_steps, where nobody chose it,
    becomes a tenth of the run at most. Raises SettingError where a target does not divide."""
    micro_steps = micro_steps_of(config, config['batch_size'], block_size, world_size)
    sequences = micro_steps * config['batch_size'] * world_size
    limits = {name: config[name] for name in ('max_steps', 'max_tokens', 'num_epochs', 'max_hours')}
    last_step, ended_by = run_length(sequences * block_size, tokens_per_epoch, **limits)
    if 'warmup_steps' not in config.given | config.inherited:  # the default's is for long runs
        config['warmup_steps'] = min(config['warmup_steps'], max(1, last_step // 10))
    return Length(micro_steps, sequences, sequences * block_size, last_step, ended_by)


def micro_steps_of(config, batch_size, block_size, world_size):
    """accumulation, as the settings want it."""
    names = 'total_batch_size', 'gradient_accumulation_steps', 'target_effective_batch_size'
    return accumulation(batch_size, block_size, world_size, **{name: config[name] for name in names})


def accumulation(batch_size, block_size, world_size,
                 total_batch_size=0, gradient_accumulation_steps=0, target_effective_batch_size=0):
    """Micro-steps per optimizer step.

    total_batch_size: tokens per step; target_effective_batch_size: the same in sequences; both 0: batch_size
    x block_size x GPUs x gradient_accumulation_steps, of which 0 = 1. Raises SettingError, with the nearest
    that divides, where a target does not divide, and where two of the three disagree."""
    if target_effective_batch_size and total_batch_size not in (0, target_effective_batch_size * block_size):
        raise SettingError(f'target_effective_batch_size={target_effective_batch_size} sequences '
                           f'of {block_size} are not total_batch_size={total_batch_size} tokens: '
                           'give one of the two')
    name, target, unit = 'total_batch_size', total_batch_size, f'block_size {block_size} x '
    micro = batch_size * block_size * world_size
    if target_effective_batch_size:
        name, target, unit = 'target_effective_batch_size', target_effective_batch_size, ''
        micro = batch_size * world_size
    if not target:
        return gradient_accumulation_steps or 1
    steps, rest = divmod(target, micro)
    if rest:
        nearest = max(1, round(target / micro)) * micro
        raise SettingError(f'{name}={target} is not a multiple of {micro} (batch_size {batch_size} x {unit}'
                           f'{world_size} ranks); the nearest is {nearest}')
    if gradient_accumulation_steps not in (0, steps):
        raise SettingError(f'{name}={target} means {steps} micro-steps, gradient_accumulation_steps says '
                           f'{gradient_accumulation_steps}: give one of the two')
    return steps


def run_length(tokens_per_step, tokens_per_epoch,
               max_steps=0, max_tokens=0, num_epochs=0.0, max_hours=0.0):
    """(last step, what ends the run). 0 = unset; the first reached ends the run; none set: one epoch. Of
    max_hours the steps are not known beforehand: alone, it leaves the last step optim.OPEN. Raises
    SettingError for max_tokens that are less than a step's."""
    if 0 < max_tokens < tokens_per_step:
        raise SettingError(f'max_tokens={max_tokens} is less than one step of {tokens_per_step} tokens: give '
                           'more, or smaller steps')
    clock = f'max_hours={max_hours:g}'
    if not (max_steps or max_tokens or num_epochs):
        if max_hours:
            return optim.OPEN, clock
        num_epochs = 1
    given = {'max_steps': max_steps, 'max_tokens': max_tokens, 'num_epochs': num_epochs}
    given = {name: value for name, value in given.items() if value}
    ends = {'max_steps': max_steps, 'max_tokens': max_tokens // tokens_per_step,
            'num_epochs': math.ceil(num_epochs * tokens_per_epoch / tokens_per_step)}
    first, ended_by = min((max(1, ends[name]), f'{name}={value:g}') for name, value in given.items())
    return first, f'{ended_by} or {clock}' if max_hours else ended_by


def training_data(run):
    """The training split, a data.TokenData, where the run's length depends on it; else None. Raises
    MissingError."""
    config = run.config
    others = config['max_steps'] or config['max_tokens'] or config['max_hours']
    if not config['num_epochs'] and others:
        return None
    folder, _ = dataset(config, required=True)
    return data.TokenData(folder, 'train', config['block_size'])


def step_sequences(config):
    """Sequences of an optimizer step, over all ranks, as the settings say; 0 where they leave it open."""
    return config['target_effective_batch_size'] or config['total_batch_size'] // config['block_size']


def batch_sizes(config, world_size):
    """The sequences of a micro-batch that batch_size=0 may mean, ascending: up to max_batch_size, and the
    step's divide by them and the ranks."""
    wanted = step_sequences(config)
    return [size for size in range(1, config['max_batch_size'] + 1) if wanted % (size * world_size) == 0]


# ----------------------------------------------------------------------------------------------- what is said
# Each of these says in its first row what matters, and in a second one the rest.

MORE = '\n          '


def model_line(c, parameters, weights=''):
    """c: GPTConfig. parameters: their number. weights: a clause about them."""
    return (f'model     {parameters / 1e6:.2f}M parameters: {c.n_layer} layers x {c.n_embd}, '
            f'{c.n_head} heads{weights}{MORE}{c.mlp}, {c.norm}, {c.position}, '
            f'vocabulary {c.vocab_size} (padded to {c.padded_vocab_size})')


def batch_line(config, length, world_size):
    return (f'batch     {config["batch_size"]} x {config["block_size"]} tokens '
            f'x {length.micro_steps} micro-steps x {world_size} ranks '
            f'= {length.tokens_per_step:,} tokens a step')


def lora_line(run):
    """Of a run with adapters."""
    spec = lora.Spec.of(run.config)
    return (f'lora      {spec.parameters(run.model_config):,} parameters train: rank {spec.rank}, '
            f'alpha {spec.alpha:g}{MORE}{", ".join(spec.chosen(run.model_config))}')


def fragmentation_line(config):
    """What to say where empty_cache_freq is set."""
    return (f'memory    the cache of freed blocks is emptied every {config["empty_cache_freq"]} steps{MORE}'
            'PYTORCH_ALLOC_CONF=expandable_segments:True in the environment is the better cure')


def run_line(flops, length, tokens_per_epoch=0):
    """flops: per token. tokens_per_epoch: 0 where it is not known."""
    per_token = f'{flops / 1e6:,.0f}M FLOPs a token'
    if length.last_step == optim.OPEN:
        return f'run       ended by {length.ended_by}{MORE}{per_token}'
    tokens = length.last_step * length.tokens_per_step
    epochs = f'{tokens / tokens_per_epoch:.2f} epochs, ' if tokens_per_epoch else ''
    return (f'run       {length.last_step:,} steps = {tokens:,} tokens, ended by {length.ended_by}'
            f'{MORE}{epochs}{tokens * flops:.2e} FLOPs, {per_token}')


def packing_lines(train, length):
    """train: a data.TokenData with examples to fine-tune on."""
    packing = train.packing
    steps = math.ceil(train.n_windows / length.sequences_per_step)
    lines = [f'packed    {len(packing.lengths):,} examples in {train.n_windows:,} windows, '
             f'{packing.padding:.1%} of them padding; {steps:,} steps an epoch']
    if packing.cut:
        lines.append(f'packed    {packing.cut:,} cut to fit')
    if packing.left_out:
        lines.append(f'packed    {packing.left_out:,} left out: they have no target in a window')
    return lines


def intro(run, world_size, splits):
    """The first lines of a run, before anything is computed. splits: its training and validation
    data.TokenData. Raises what length raises."""
    config, (train, val) = run.config, splits
    parameters = sum(map(math.prod, checkpoint.weight_shapes(run.model_config).values()))
    weights = '' if run.source else ', random weights'
    lines = [model_line(run.model_config, parameters, weights)]
    lines += [lora_line(run)] if config['lora_rank'] else []
    lines.append(f'data      {run.folder}: {train.tokens:,} training tokens, {val.tokens:,} for validation')
    if not config['batch_size']:
        lines.append('batch     the most sequences that fit, by trial')
    elif not config['eval_only']:
        lines += batch_lines(run, world_size, train)
    lines.append(gpus.device_line(run.device))
    lines += [fragmentation_line(config)] if config['empty_cache_freq'] else []
    if run.resumed:
        precision = run.resumed['precision']['name']
        lines.append(f'resumed   {run.resume_path} at step {run.resumed["step"]}, in {precision} until now')
    lines += run.changes
    if run.compiled and not config['dry_run']:
        lines.append('compile   may take a minute or two')
    return lines


def batch_lines(run, world_size, train):
    """Those about batch and length, of a run whose batch_size is known; train: its data.TokenData."""
    config = run.config
    steps = length(config, config['block_size'], world_size, train.tokens_per_epoch)
    lines = packing_lines(train, steps) if train.packing else []
    lines.append(batch_line(config, steps, world_size))
    lines.append(run_line(run.flops_per_token, steps, train.n_windows * train.block_size))
    left = steps.last_step - (run.resumed['step'] if run.resumed else 0)
    if not config['max_hours']:
        tokens = left * steps.tokens_per_step
        lines += gpus.patience_lines(tokens * run.flops_per_token / world_size, run.device)
    return lines
