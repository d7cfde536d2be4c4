"""LoRA (Hu et al. 2022): the model is frozen; small matrices added to its linears are all that trains.

    y = base(x) + alpha / rank * B A x      A (rank, in) as PEFT draws it, B (out, rank) 0 at first

Adapters have Hugging Face's names (q_proj, c_attn, ...). Where one linear of GPT is several linears there,
each of those has an adapter, which adds to its slice of the output. Adapters are the submodule `lora` of a
linear, so that its weights keep their names. A checkpoint holds the adapters and names their base.
"""
import dataclasses
import math
import os
import zlib
from typing import NamedTuple

import torch
import torch.nn as nn

from configurator import DataError, SettingError, say_once
from fp8gpt.distributed import whole
from fp8gpt.hf_families import parts_of
from fp8gpt.tokenizer import get_tokenizer
from model import Linear


@dataclasses.dataclass(frozen=True)
class Spec:
    """The settings of adapters: lora_rank (0: no adapters), lora_alpha, lora_targets."""
    rank: int = 0
    alpha: float = 16.0
    targets: str = 'q_proj,v_proj'

    @classmethod
    def of(cls, settings, prefix='lora_'):
        """Return the Spec of a script's settings, or, with prefix '', of a checkpoint's 'lora'."""
        return cls(*(settings[prefix + field.name] for field in dataclasses.fields(cls)))

    def chosen(self, config):
        """Return the adapters' names, sorted. Raises SettingError for a name that the model lacks."""
        there = {name for _, _, rows in slices(config) for name in rows}
        asked = {name.strip() for name in self.targets.split(',')}
        if unknown := sorted(asked - {'all', *there}):
            raise SettingError(f'lora_targets: this model has no {", ".join(map(repr, unknown))}; it has '
                               f'{", ".join(sorted(there))}; all is every one of them')
        return sorted(there if 'all' in asked else asked)

    def parameters(self, config):
        """Return the number of the adapters' weights."""
        chosen = self.chosen(config)
        return config.n_layer * sum(self.rank * (k + n) for _, k, rows in slices(config)
                                    for name, n in rows.items() if name in chosen)


def slices(config):
    """Return [(linear of a block, its in_features, {name of a slice of its output: rows})], in order."""
    return [(linear, k, {theirs.split('.')[-1]: rows for theirs, rows in parts_of(config, linear, n).items()})
            for linear, (k, n, _) in config.block_linears().items()]


# ------------------------------------------------------------------------------------------- beside a linear

class Matrix(NamedTuple):
    """Holds what Linear.plain asks of a module."""
    weight: torch.Tensor
    bias: None = None


class Adapters(nn.ModuleDict):
    """The adapters of one linear: {name: A, B}. rows: {name: rows of each slice of the linear's output}, of
    which `chosen` have an adapter."""

    def __init__(self, linear, rows, chosen, spec):
        super().__init__({name: nn.ModuleDict({
            'A': Linear(linear.in_features, spec.rank, bias=False),
            'B': Linear(spec.rank, n, bias=False),
        }) for name, n in rows.items() if name in chosen})
        self.rows, self.scale = rows, spec.alpha / spec.rank

    def added(self, linear, inputs, y):
        """Return y plus the adapters' outputs; this is the linear's forward hook. All its adapters are one
        pair of matrices: A's below each other, B's along a diagonal, zeros where a slice has no adapter."""
        blocks = [self[name]['B'].weight if name in self else y.new_zeros(n, 0)
                  for name, n in self.rows.items()]
        down = Linear.plain(Matrix(torch.cat([adapter['A'].weight for adapter in self.values()])), *inputs)
        return y + Linear.plain(Matrix(self.scale * torch.block_diag(*blocks)), down)


@torch.no_grad()
def add(model, spec, seed=0):
    """Freeze a GPT and add adapters; from then on, model.weights() are the adapters' weights. Each is drawn
    by a generator that is seeded by its name. Raises SettingError for targets that the model lacks."""
    chosen = spec.chosen(model.config)
    model.requires_grad_(False)
    for block in model.h:
        for name, _, rows in slices(model.config):
            linear = block.get_submodule(name)
            with model.wte.weight.device:
                adapters = Adapters(linear, rows, chosen, spec)
            if adapters:
                linear.lora = adapters
                linear.register_forward_hook(adapters.added)
    for name, p in model.weights().items():
        bound = 1 / math.sqrt(p.shape[1]) if name.endswith('A.weight') else 0.0
        generator = torch.Generator().manual_seed(zlib.crc32(f'{seed} {name}'.encode()))
        p.copy_(torch.empty(p.shape).uniform_(-bound, bound, generator=generator))


@torch.no_grad()
def merge(model):
    """Return a GPT's weights, which must exist in fp32 or bf16, with the adapters' products added to them in
    place. The model has no further use: it would add its adapters once more."""
    for linear in model.modules():
        if hasattr(linear, 'lora'):
            adapters = linear.lora
            for name, part in zip(adapters.rows, linear.weight.split([*adapters.rows.values()])):
                if name in adapters:
                    part += adapters.scale * (adapters[name]['B'].weight @ adapters[name]['A'].weight)
    return {name: p for name, p in model.named_parameters() if '.lora.' not in name}


def flops_per_token(config, spec, tokens):
    """Return GPTConfig.flops_per_token with 4 instead of 6 FLOPs for each frozen weight, and 6 for each
    weight of the adapters."""
    return config.flops_per_token(tokens) - config.flops_per_token(0) // 3 + 6 * spec.parameters(config)


# ------------------------------------------------------------------------------------- a run, its checkpoints

def checksum(model):
    """Return a checksum of a GPT's token embedding, cast to bf16, which a run's param_dtype may be."""
    values = whole(model.wte.weight.detach()).bfloat16().cpu()
    return zlib.crc32(values.view(torch.int16).numpy())


def start(model, run):
    """Add the adapters of a script's settings, or a resumed run's, to a GPT with its base's weights. Return
    the 'lora' entry of a checkpoint: Spec's fields, 'base' (init_from; of files, the absolute path), 'seed',
    'checksum' of the base's token embedding. Raises DataError where a resumed run had another base."""
    if run.resumed:
        return add_saved(model, run.resumed)
    spec, base = Spec.of(run.config), run.config['init_from']
    if run.source and os.path.exists(base):     # no preset, no model of the hub
        base = os.path.abspath(base)
    about = {**dataclasses.asdict(spec), 'base': base, 'seed': run.config['seed'],
             'checksum': checksum(model)}
    if run.of_examples and run.tokenizer.startswith('sha256:'):
        say_untrained(model, run)
    add(model, spec, about['seed'])
    return about


def say_untrained(model, run):
    """Say that the token that ends an answer has an embedding that was never trained, which adapters do not
    train: of nearly zeros, as Llama 3's base model has it, or, by resize_token_embeddings, the mean of all
    others, as each token has that was added with it."""
    tokenizer = get_tokenizer(run.tokenizer, run.folder)
    end = tokenizer.eot if run.config['is_plain'] else tokenizer.turn_end
    rows = whole(model.wte.weight.detach())[:model.config.vocab_size]
    norms = rows.norm(dim=1, dtype=torch.float32)
    products = torch.cat([part.float() @ rows[end].float() for part in rows.split(8192)])
    is_alike = products > 0.9999 * norms * norms[end]
    is_alike[end] = False
    mean = rows.mean(0, dtype=torch.float32)
    is_mean = torch.cosine_similarity(rows[end].float(), mean, 0) > 0.999
    if norms[end] < norms.median() / 4 or is_alike.any() or is_mean:
        say_once(f'WARNING: {tokenizer.library.id_to_token(end)} ends an answer, but the model never learned '
                 'it, and adapters do not train it: start from an instruct model, or without --lora_rank')


def add_saved(model, state):
    """Add a checkpoint's adapters to a GPT with their base's weights. Return its 'lora' entry. Raises
    DataError where the GPT has another token embedding; older files hold no checksum of it."""
    about = state['lora']
    if about.get('checksum') not in (None, checksum(model)):
        raise DataError(f'the adapters were trained on other weights than init_from={about["base"]} with '
                        f'seed={about["seed"]} has now: put those back')
    add(model, Spec.of(about, prefix=''))
    model.load_weights(state['weights'])
    return about
