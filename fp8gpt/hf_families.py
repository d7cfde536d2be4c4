"""The families of Hugging Face models that GPT implements: their settings and the names of their tensors.

    config = read_config(json)                      # the dict of a config.json -> GPTConfig
    json = their_config(config)                     # and back
    parts = split(config, name, weight)             # a weight of a GPT -> {name in transformers: view of it}

read_config refuses a feature that a model uses and GPT lacks. A feature that config.json names and does not
use, like Qwen2.5's sliding_window, is accepted.
"""
import re
from typing import NamedTuple

import torch

from configurator import SettingError
from fp8gpt.checkpoint import weight_shapes
from model import GPTConfig


class Family(NamedTuple):
    """One model_type of transformers. like: the fields of GPTConfig that all of its models share. fields:
    GPTConfig's name of a field -> config.json's. missing: the value of a field that config.json leaves out.
    fixed: other fields of config.json -> the values that GPT implements, the default first."""
    like: dict
    fields: dict
    missing: dict
    fixed: dict


GPT2 = Family(
    like=dict(mlp='gelu', norm='layernorm', position='learned', bias=True),
    fields=dict(
        vocab_size='vocab_size',
        block_size='n_positions',
        n_layer='n_layer',
        n_head='n_head',
        n_embd='n_embd',
        ffn_dim='n_inner',
        norm_eps='layer_norm_epsilon',
        tie_embeddings='tie_word_embeddings',
    ),
    missing=dict(n_positions=1024, n_inner=0, layer_norm_epsilon=1e-5, tie_word_embeddings=True),
    fixed=dict(
        activation_function=('gelu_new', 'gelu_pytorch_tanh'),
        scale_attn_weights=(True,),
        scale_attn_by_inverse_layer_idx=(False,),
        is_causal=(True,),
    ),
)
LLAMA = Family(
    like=dict(mlp='swiglu', norm='rmsnorm', position='rope'),
    fields=dict(
        vocab_size='vocab_size',
        block_size='max_position_embeddings',
        n_layer='num_hidden_layers',
        n_head='num_attention_heads',
        n_kv_head='num_key_value_heads',
        n_embd='hidden_size',
        ffn_dim='intermediate_size',
        head_dim='head_dim',
        norm_eps='rms_norm_eps',
        bias='attention_bias',
        tie_embeddings='tie_word_embeddings',
    ),
    missing=dict(
        max_position_embeddings=2048,
        num_key_value_heads=0,
        head_dim=0,
        rms_norm_eps=1e-6,
        attention_bias=False,
        tie_word_embeddings=False,
        rope_theta=1e4,
    ),
    fixed=dict(hidden_act=('silu', 'swish'), partial_rotary_factor=(1.0,), is_causal=(True,)),
)
QWEN2 = LLAMA._replace(
    like=dict(LLAMA.like, bias=False, qkv_bias=True),
    missing=dict(LLAMA.missing, max_position_embeddings=32768),
)
QWEN3 = LLAMA._replace(
    like=dict(LLAMA.like, bias=False, qk_norm=True),
    missing=dict(QWEN2.missing, head_dim=128),
)
MISTRAL = LLAMA._replace(  # written as Llama, which has the same tensors and arithmetic
    like=dict(LLAMA.like, bias=False),
    missing=dict(LLAMA.missing, max_position_embeddings=131072, num_key_value_heads=8),
)
FAMILIES = {'gpt2': GPT2, 'qwen2': QWEN2, 'qwen3': QWEN3, 'llama': LLAMA, 'mistral': MISTRAL}
ROPE = dict(rope_factor='factor', rope_low='low_freq_factor', rope_high='high_freq_factor',
            rope_original='original_max_position_embeddings')

# a GPT's module, by its name in the block -> transformers' module, where the name is another
GPT2_NAMES = {
    'wte': 'transformer.wte',
    'wpe': 'transformer.wpe',
    'ln_f': 'transformer.ln_f',
    'attn.qkv': 'attn.c_attn',
    'attn.proj': 'attn.c_proj',
    'mlp.up': 'mlp.c_fc',
    'mlp.down': 'mlp.c_proj',
}
LLAMA_NAMES = {
    'wte': 'model.embed_tokens',
    'ln_f': 'model.norm',
    'ln_1': 'input_layernorm',
    'attn.q_norm': 'self_attn.q_norm',
    'attn.k_norm': 'self_attn.k_norm',
    'attn.proj': 'self_attn.o_proj',
    'ln_2': 'post_attention_layernorm',
    'mlp.up': 'mlp.up_proj',
    'mlp.down': 'mlp.down_proj',
}


def is_gpt2(config):
    """Return whether transformers names a GPT's tensors as GPT-2's; otherwise it names them as Llama's."""
    return config.position == 'learned' and config.mlp == 'gelu'


def parts_of(config, module, rows):
    """Return {module of transformers: rows of its weight} for a GPT's module with so many rows.

    Where one of our modules holds several of theirs, their rows follow each other in this order. The names
    are Llama's even for a mixture that transformers lacks: adapters have them."""
    if is_gpt2(config):
        return {GPT2_NAMES.get(module, module): rows}
    if module == 'attn.qkv':
        shared = config.n_kv_head * config.head_dim
        return {'self_attn.q_proj': rows - 2 * shared, 'self_attn.k_proj': shared, 'self_attn.v_proj': shared}
    if module == 'mlp.gate_up':
        return {'mlp.gate_proj': config.ffn_dim, 'mlp.up_proj': config.ffn_dim}
    return {LLAMA_NAMES.get(module, module): rows}


def split(config, name, weight):
    """Return {name of a tensor of transformers: its part of a GPT's weight, a view}, in the order of the
    rows, without those that pad the vocabulary. Linears in blocks of GPT-2 are (in, out) in transformers."""
    layer, module, kind = re.fullmatch(r'(?:h\.(\d+)\.)?(.+)\.(\w+)', name).groups()
    if module in ('wte', 'lm_head'):
        weight = weight[:config.vocab_size]
    rows = parts_of(config, module, len(weight))
    parts, place = weight.split([*rows.values()]), ''
    if layer:
        place = f'transformer.h.{layer}.' if is_gpt2(config) else f'model.layers.{layer}.'
        if is_gpt2(config) and weight.dim() == 2:
            parts = [part.t() for part in parts]
    return {f'{place}{theirs}.{kind}': part for theirs, part in zip(rows, parts)}


def tensors_of(config):
    """Return {name of a GPT's weight: its parts by `split`, on the device meta}."""
    return {name: split(config, name, torch.empty(shape, device='meta'))
            for name, shape in weight_shapes(config).items()}


# ----------------------------------------------------------------------------------------------------- config

def read_config(theirs):
    """Return the GPTConfig of a config.json, a dict. Raises SettingError for a feature that the model uses
    and GPT lacks, KeyError for a field that is missing."""
    kind = theirs.get('model_type')
    if kind not in FAMILIES:
        raise SettingError(f'model_type={kind} is not built: {", ".join(FAMILIES)} are')
    family = FAMILIES[kind]
    # as in transformers 5, rope_scaling replaces rope_parameters; fields outside are used where it has none
    rope = theirs.get('rope_scaling') or theirs.get('rope_parameters') or {}
    given = family.missing | {name: value for name, value in (theirs | rope).items() if value is not None}
    if quantised := theirs.get('quantization_config') or theirs.get('quantization'):    # MLX's
        raise SettingError(f'quantised weights ({quantised!r:.60}) are not read: name the bf16 release')
    for name, allowed in family.fixed.items():
        value = given.get(name, allowed[0])
        if value not in allowed:
            raise SettingError(f'{name}={value} is not built: {allowed[0]} is')
    ours = {field: given[name] for field, name in family.fields.items()} | family.like
    if family is GPT2:
        return GPTConfig(**ours)
    if family is LLAMA and given.get('mlp_bias', False) != ours['bias']:
        raise SettingError('biases of attention alone, or of the MLP alone, are not built: both or none are')
    slides = given.get('use_sliding_window') and ours['n_layer'] > given.get('max_window_layers', 0)
    check_attention(theirs, slides or family is MISTRAL, ours['block_size'])
    if 'full_attention' in rope or 'sliding_attention' in rope:
        raise SettingError('rope_parameters of each layer type are not built: one for all layers is')
    scaling = rope.get('rope_type', rope.get('type', 'default'))
    if scaling not in ('default', 'llama3'):
        raise SettingError(f'rope_type={scaling} is not built: default and llama3 are')
    if scaling == 'llama3':
        given.setdefault(ROPE['rope_original'], ours['block_size'])
        ours |= {field: given[name] for field, name in ROPE.items()}
    return GPTConfig(**ours, rope_theta=given['rope_theta'])


def check_attention(theirs, slides, longest):
    """Raise SettingError unless each layer of a config.json, a dict, looks at all tokens before, in a window
    of `longest` tokens. slides: whether a sliding_window counts that no layer_types name."""
    attention, window = {*(theirs.get('layer_types') or ())}, theirs.get('sliding_window', 4096)
    if slides:
        attention.add('sliding_attention')
    if window is None or window >= longest:
        attention.discard('sliding_attention')
    for name in attention - {'full_attention'}:
        raise SettingError(f'{name} (sliding_window={window}) is not built: full_attention is')


def their_config(config):
    """Return the config.json of a GPTConfig, a dict without special tokens and dtype. Raises SettingError
    where transformers does not have such an architecture, or config.json does not hold a field."""
    kind, family = next((each for each in FAMILIES.items() if each[1].like.items() <= vars(config).items()),
                        ('llama', LLAMA))
    architecture = f'{kind.title()}ForCausalLM' if kind != 'gpt2' else 'GPT2LMHeadModel'
    theirs = {'architectures': [architecture], 'model_type': kind}
    theirs |= {name: getattr(config, field) for field, name in family.fields.items()}
    theirs |= {name: allowed[0] for name, allowed in family.fixed.items()}
    if family is GPT2:
        theirs |= dict.fromkeys(('resid_pdrop', 'embd_pdrop', 'attn_pdrop'), 0.0)
        theirs['n_ctx'] = config.block_size     # llama.cpp's converter asks for it
    else:
        theirs |= {'mlp_bias': config.bias, 'rope_theta': config.rope_theta}
    if config.rope_factor != 1:
        theirs['rope_scaling'] = {'rope_type': 'llama3'} | {
            name: getattr(config, field) for field, name in ROPE.items()}
    back = read_config(theirs)
    for name, value in sorted(vars(config).items() - vars(back).items()):
        raise SettingError(f'{name}={value} cannot be exported: {architecture} of transformers would '
                           f'be read without it, and no other of {", ".join(FAMILIES)} is like it')
    return theirs
