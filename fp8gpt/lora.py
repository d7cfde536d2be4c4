"""LoRA (Hu et al. 2022): the model is frozen, and small matrices beside its linears are all that trains.

    y = base(x) + alpha / rank * B A x      A (rank, in) as PEFT draws it, B (out, rank) 0 at first

Adapters bear Hugging Face's names (q_proj, c_attn, ...). Where one linear here is several there, each has
its own and adds to its slice of the output. They hang on a linear as its module `lora`, so that its weights
keep their names, in whatever precision they multiply. A checkpoint holds the adapters and names their base.
"""
import dataclasses
import itertools
import math
import os
import zlib

import torch
import torch.nn as nn

from configurator import DataError, SettingError
from fp8gpt import checkpoint, files
from model import GPT, PRESETS, GPTConfig, Linear
from fp8gpt.sft import is_pretrained
from fp8gpt.tokenizer import get_tokenizer


@dataclasses.dataclass(frozen=True)
class Spec:
    """What adapters are added: the settings lora_rank (0: none), lora_alpha, lora_targets."""
    rank: int = 0
    alpha: float = 16.0
    targets: str = 'q_proj,v_proj'

    @classmethod
    def of(cls, settings):
        """From a script's settings, or what start() told of them."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: settings[name if name in settings else f'lora_{name}'] for name in names})

    def chosen(self, config):
        """The names of the adapters, sorted. Raises SettingError for one that the model has not."""
        there = sorted({name for parts in slices(config).values() for name in parts})
        asked = {name.strip() for name in self.targets.split(',')}
        unknown = sorted(asked - {'all', *there})
        if unknown:
            raise SettingError(f'lora_targets: this model has no {", ".join(map(repr, unknown))}; it has '
                               f'{", ".join(there)}; all is every one of them')
        return there if 'all' in asked else sorted(asked)

    def shapes(self, config):
        """[(in_features, out_features)] of a block's adapters."""
        inputs = {name: k for name, k, _ in config.linears()}
        chosen = self.chosen(config) if self.rank else ()
        return [(inputs[f'h.0.{linear}'], rows) for linear, parts in slices(config).items()
                for name, rows in parts.items() if name in chosen]

    def parameters(self, config):
        """The number of the adapters' weights."""
        return config.n_layer * sum(self.rank * (k + n) for k, n in self.shapes(config))


NONE = Spec()


def is_gpt2(config):
    """Whether Hugging Face calls its layers as GPT-2's; else as Llama's."""
    return config.position == 'learned' and config.mlp == 'gelu'


def slices(config):
    """A block's linear -> {the name of a slice of its output: rows}, in order."""
    query, shared = (heads * config.head_dim for heads in (config.n_head, config.n_kv_head))
    width, hidden = config.n_embd, config.ffn_dim
    if is_gpt2(config):
        return {'attn.qkv': {'c_attn': query + 2 * shared}, 'attn.proj': {'c_proj': width},
                'mlp.up': {'c_fc': hidden}, 'mlp.down': {'c_proj': width}}
    up = {'mlp.up': {'up_proj': hidden}}
    if config.mlp == 'swiglu':
        up = {'mlp.gate_up': {'gate_proj': hidden, 'up_proj': hidden}}
    return {'attn.qkv': {'q_proj': query, 'k_proj': shared, 'v_proj': shared},
            'attn.proj': {'o_proj': width}, **up, 'mlp.down': {'down_proj': width}}


# ------------------------------------------------------------------------------------------- beside a linear

class Adapter(nn.Module):
    """scale * B A x: x (..., in) -> (..., out), in x's dtype."""

    def __init__(self, in_features, out_features, spec):
        super().__init__()
        self.scale = spec.alpha / spec.rank
        self.A = Linear(in_features, spec.rank, bias=False)
        self.B = Linear(spec.rank, out_features, bias=False)

    def forward(self, x):
        return self.scale * self.B(self.A(x))


class Adapters(nn.ModuleDict):
    """A linear's. rows: name -> rows of each slice of its output, with an adapter or without."""

    def __init__(self, linear, rows, chosen, spec):
        super().__init__({name: Adapter(linear.in_features, rows[name], spec)
                          for name in rows if name in chosen})
        self.rows = rows

    def slices(self, y):
        """[(y's slice, its adapter or None)]; y: the linear's output, or its weight transposed."""
        parts = y.split(list(self.rows.values()), dim=-1)
        return [(part, self[name] if name in self else None) for name, part in zip(self.rows, parts)]

    def added(self, linear, inputs, y):
        """The linear's forward hook: y with the adapters' shares."""
        parts = [part if adapter is None else part + adapter(*inputs) for part, adapter in self.slices(y)]
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]


@torch.no_grad()
def add(model, spec, seed=0):
    """Freezes a GPT and adds adapters; from then on, model.weights() are theirs. Each draws from a generator
    seeded by its name. Raises SettingError for targets that are not there."""
    chosen = spec.chosen(model.config)
    model.requires_grad_(False)
    for block in model.h:
        for name, rows in slices(model.config).items():
            linear = block.get_submodule(name)
            with model.wte.weight.device:
                adapters = Adapters(linear, rows, chosen, spec)
            if adapters:
                linear.lora = adapters
                adapters.hook = linear.register_forward_hook(adapters.added)
    for name, p in model.weights().items():
        bound = 1 / math.sqrt(p.shape[1]) if name.endswith('A.weight') else 0.0
        generator = torch.Generator().manual_seed(zlib.crc32(f'{seed} {name}'.encode()))
        p.copy_(torch.empty(p.shape).uniform_(-bound, bound, generator=generator))


@torch.no_grad()
def merge(model):
    """Adds the adapters' products to a GPT's weights (not those in FP8 alone), and drops them."""
    for linear in [module for module in model.modules() if hasattr(module, 'lora')]:
        for part, adapter in linear.lora.slices(linear.weight.t()):
            if adapter is not None:
                part += adapter.scale * (adapter.B.weight @ adapter.A.weight).t()
        linear.lora.hook.remove()
        del linear.lora
    model.requires_grad_(True)


def flops_per_token(config, spec, tokens):
    """GPTConfig's; of a frozen model 4 N in the place of 6 N, and 6 for each of the adapters' weights."""
    no_gradients = config.flops_per_token(0) // 3 if spec.rank else 0
    return config.flops_per_token(tokens) - no_gradients + 6 * spec.parameters(config)


# ------------------------------------------------------------------------------------- a run, its checkpoints

def start(model, run):
    """What a script does for lora_rank: adapters, for a resumed run as they were. model: the GPT with its
    base's weights. Returns what a checkpoint tells of them: Spec's fields, 'base' (init_from), 'seed',
    'fingerprint' of the base; None without. Raises SettingError or DataError where a resumed run had
    others."""
    spec = Spec.of(run.config)
    before = run.resumed and (run.resumed.get('lora') or dataclasses.asdict(NONE))
    for name in ('rank', 'alpha', 'targets'):
        now = getattr(spec, name)
        if before and (spec.rank or before['rank']) and now != before[name]:
            raise SettingError(f'lora_{name}={now}, but the checkpoint has lora_{name}={before[name]}: '
                               'leave it out, or start a new run from it with --init_from')
    if not spec.rank:
        return None
    told = {**dataclasses.asdict(spec), 'base': run.config['init_from'], 'seed': run.config['seed'],
            'fingerprint': checkpoint.fingerprint(model)}
    add(model, spec, run.config['seed'])
    if before:
        take(model, run.resumed, told['fingerprint'])
    return told


def take(model, state, found):
    """Copies a checkpoint's adapters into a GPT's. found: its base's fingerprint. Raises DataError where they
    do not fit."""
    lora = state['lora']
    if found != lora['fingerprint']:
        raise DataError(f'the adapters stand on other weights than init_from={lora["base"]} with '
                        f'seed={lora["seed"]} has now: fingerprint {lora["fingerprint"]}, not {found}')
    try:
        model.load_weights(state['weights'])
    except ValueError as error:
        raise DataError(f'the checkpoint\'s adapters do not fit its model: {error}') from None


def base(init_from):
    """What a new run, or adapters, start from, as a checkpoint has it: one, adapters merged, or a Hugging
    Face model, see hf.source; None where weights are random. Raises SettingError for a name of neither,
    MissingError, DataError."""
    if init_from in ('scratch', *PRESETS):
        return None
    if init_from.endswith('.pt'):
        return whole(checkpoint.load(init_from))
    if not is_pretrained(init_from):
        raise SettingError(f'init_from={init_from}: there are scratch, {", ".join(PRESETS)}, checkpoints '
                           '(*.pt), and Hugging Face models: folders, and org/name on the hub; '
                           '--resume=auto goes on with a run')
    import hf  # late: only who starts from such a model needs its packages
    return hf.source(init_from)


def opened(ckpt):
    """(what a tool is to look at, what it says of it): a checkpoint, adapters merged, or a Hugging Face
    model, see hf.source. Raises SettingError, MissingError, DataError, MachineError."""
    if is_pretrained(ckpt):
        return base(ckpt), f'# {ckpt}: a Hugging Face model'
    state = whole(checkpoint.load(ckpt))
    return state, f'# {ckpt}: step {state["step"]}, trained in {state["precision"]["name"]}'


def tokenizer_of(ckpt, state):
    """The tokenizer of what `opened` gave. Raises what get_tokenizer does."""
    if is_pretrained(ckpt):
        return get_tokenizer(ckpt)
    return get_tokenizer(state['tokenizer'], os.path.dirname(ckpt))


def whole(state):
    """A checkpoint with a whole model's weights: itself, or its adapters merged into their base, and then
    without an optimizer's state. Raises MissingError, DataError."""
    lora = state.get('lora')
    if not lora:
        return state
    model, source = GPT(GPTConfig(**state['model_config']), seed=lora['seed']), base(lora['base'])
    if source:
        model.load_weights(source['weights'])
    found = checkpoint.fingerprint(model)
    add(model, Spec.of(lora))
    take(model, state, found)
    merge(model)
    own = {'lora_rank': 0, 'param_dtype': 'fp32'}
    return {**state, 'weights': model.weights(), 'optimizer': {}, 'lora': None, 'fp8_state': {},
            'config': {**state['config'], **own}}


# ------------------------------------------------------------------------------------------- in PEFT's format

WEIGHTS, CONFIG = 'adapter_model.safetensors', 'adapter_config.json'
OTHER_KINDS = 'use_dora', 'use_rslora', 'rank_pattern', 'alpha_pattern', 'modules_to_save'


def peft_names(config, chosen):
    """Our name of an adapter's matrix -> PEFT's."""
    layers, attention = ('transformer.h', 'attn') if is_gpt2(config) else ('model.layers', 'self_attn')
    names = {}
    for linear, rows in slices(config).items():
        part = linear.split('.')[0].replace('attn', attention)
        for i, name, matrix in itertools.product(range(config.n_layer), rows.keys() & set(chosen), 'AB'):
            ours = f'h.{i}.{linear}.lora.{name}.{matrix}.weight'
            names[ours] = f'base_model.model.{layers}.{i}.{part}.{name}.lora_{matrix}.weight'
    return names


def save(state, folder):
    """Writes the adapters of a checkpoint to a folder, as PEFT does."""
    from safetensors.torch import save as as_bytes
    lora, config = state['lora'], GPTConfig(**state['model_config'])
    names = peft_names(config, Spec.of(lora).chosen(config))
    tensors = {names[name]: p.detach().contiguous() for name, p in state['weights'].items()}
    about = {
        'peft_type': 'LORA',
        'task_type': 'CAUSAL_LM',
        'base_model_name_or_path': lora['base'],
        'r': lora['rank'],
        'lora_alpha': lora['alpha'],
        'lora_dropout': 0.0,
        'target_modules': Spec.of(lora).chosen(config),
        'fan_in_fan_out': is_gpt2(config),      # GPT-2's linears there hold W^T
        'bias': 'none',
    }
    os.makedirs(folder, exist_ok=True)
    files.write(os.path.join(folder, WEIGHTS), lambda file: file.write(as_bytes(tensors)))
    files.write_json(os.path.join(folder, CONFIG), about)


def load(model, folder):
    """Adds the adapters in a folder of PEFT's to a GPT and returns their Spec. Raises DataError."""
    from safetensors.torch import load_file
    about = files.read_json(os.path.join(folder, CONFIG))
    odd = [name for name in OTHER_KINDS if about.get(name)]
    if about.get('peft_type') != 'LORA' or odd:
        raise DataError(f'{folder} is no plain LoRA of PEFT\'s: {", ".join(odd) or about.get("peft_type")}')
    tensors = load_file(os.path.join(folder, WEIGHTS))
    there = {name.split('.lora_')[0].rpartition('.')[2] for name in tensors}
    spec = Spec(about['r'], float(about['lora_alpha']), ','.join(sorted(there)))
    ours = {theirs: name for name, theirs in peft_names(model.config, there).items()}
    odd = sorted(tensors.keys() ^ ours.keys())
    if odd:
        raise DataError(f'{folder} is of another model: {len(odd)} names differ, {odd[0]} first')
    add(model, spec)
    model.load_weights({ours[name]: tensor for name, tensor in tensors.items()})
    return spec
