"""The families of Hugging Face models that are ours too: their names for our settings and modules.

    config = read_config(json)                      # a config.json's dict -> GPTConfig
    kind, family = family_of(config)                # and back: what it is there
    pieces = pieces_of(config, family)              # which of their tensors each weight is made of

Refused is what is in force, not what is merely named: Qwen2.5 ships a sliding_window and does not use it.
"""
import dataclasses
import re

from fp8gpt.checkpoint import weight_shapes
from configurator import SettingError
from model import GPTConfig

MADE_BY = 'hf.py export'


@dataclasses.dataclass(frozen=True)
class Family:
    """architecture: transformers' class. like: what GPTConfig is for all of the family. fields: GPTConfig's
    -> config.json's. missing: what config.json means where it leaves one out. fixed: what it may say besides,
    the default first. body, layers: where modules are. modules: ours -> those that it is made of, one above
    the other. transposed: those that are stored (in, out)."""
    architecture: str
    like: dict
    fields: dict
    missing: dict
    fixed: dict
    body: str
    layers: str
    modules: dict
    transposed: tuple = ()


GPT2 = Family(
    architecture='GPT2LMHeadModel',
    like=dict(mlp='gelu', norm='layernorm', position='learned', bias=True, qk_norm=False),
    fields=dict(
        vocab_size='vocab_size', block_size='n_positions', n_layer='n_layer', n_head='n_head',
        n_embd='n_embd', ffn_dim='n_inner', norm_eps='layer_norm_epsilon',
        tie_embeddings='tie_word_embeddings'),
    missing=dict(n_inner=0, layer_norm_epsilon=1e-5, tie_word_embeddings=True),
    fixed=dict(
        activation_function=('gelu_new', 'gelu_pytorch_tanh'), scale_attn_weights=(True,),
        scale_attn_by_inverse_layer_idx=(False,), add_cross_attention=(False,)),
    body='transformer.',
    layers='h',
    modules={
        'wte': ['wte'],
        'wpe': ['wpe'],
        'ln_1': ['ln_1'],
        'attn.qkv': ['attn.c_attn'],
        'attn.proj': ['attn.c_proj'],
        'ln_2': ['ln_2'],
        'mlp.up': ['mlp.c_fc'],
        'mlp.down': ['mlp.c_proj'],
        'ln_f': ['ln_f'],
        'lm_head': ['lm_head'],
    },
    transposed=('attn.qkv', 'attn.proj', 'mlp.up', 'mlp.down'),
)
LLAMA = Family(
    architecture='LlamaForCausalLM',
    like=dict(mlp='swiglu', norm='rmsnorm', position='rope', qk_norm=False),
    fields=dict(
        vocab_size='vocab_size', block_size='max_position_embeddings', n_layer='num_hidden_layers',
        n_head='num_attention_heads', n_kv_head='num_key_value_heads', n_embd='hidden_size',
        ffn_dim='intermediate_size', head_dim='head_dim', norm_eps='rms_norm_eps',
        tie_embeddings='tie_word_embeddings'),
    missing=dict(num_key_value_heads=0, head_dim=0, rms_norm_eps=1e-6, tie_word_embeddings=False),
    fixed=dict(hidden_act=('silu', 'swish'), partial_rotary_factor=(1.0,)),
    body='model.',
    layers='layers',
    modules={
        'wte': ['embed_tokens'],
        'ln_1': ['input_layernorm'],
        'attn.qkv': ['self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj'],
        'attn.q_norm': ['self_attn.q_norm'],
        'attn.k_norm': ['self_attn.k_norm'],
        'attn.proj': ['self_attn.o_proj'],
        'ln_2': ['post_attention_layernorm'],
        'mlp.gate_up': ['mlp.gate_proj', 'mlp.up_proj'],
        'mlp.down': ['mlp.down_proj'],
        'ln_f': ['norm'],
        'lm_head': ['lm_head'],
    },
)
QWEN2 = dataclasses.replace(
    LLAMA, architecture='Qwen2ForCausalLM', like=dict(LLAMA.like, bias=False, qkv_bias=True))
QWEN3 = dataclasses.replace(
    LLAMA, architecture='Qwen3ForCausalLM', missing=dict(LLAMA.missing, head_dim=128),
    like=dict(LLAMA.like, bias=False, qkv_bias=False, qk_norm=True))
FAMILIES = {'gpt2': GPT2, 'qwen2': QWEN2, 'qwen3': QWEN3, 'llama': LLAMA}
BIASES = 'attention_bias', 'mlp_bias'
ROPE = dict(rope_factor='factor', rope_low='low_freq_factor', rope_high='high_freq_factor',
            rope_original='original_max_position_embeddings')
# masks and tables, in older files
NO_WEIGHT = re.compile(r'.*\.(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)')


def family_of(config):
    """(model_type, Family) that a GPTConfig is exported as. Raises SettingError where there is none."""
    for name, family in FAMILIES.items():
        alike = all(getattr(config, field) == value for field, value in family.like.items())
        whole = config.n_kv_head == config.n_head and config.n_head * config.head_dim == config.n_embd
        if alike and (whole or family is not GPT2):
            return name, family
    fields = [*QWEN3.like, 'n_kv_head', 'head_dim']
    mixture = ', '.join(f'{field}={getattr(config, field)}' for field in fields)
    raise SettingError(f'no architecture of transformers is {mixture}: GPT-2, Llama, Qwen2 and Qwen3 are')


@dataclasses.dataclass(frozen=True)
class Piece:
    """A tensor of theirs. own: the weight of ours of which it is the rows from `start` on; shape: of these
    rows; transposed: whether theirs is (in, out)."""
    name: str
    own: str
    start: int
    shape: tuple
    transposed: bool

    @property
    def module(self):
        return self.name.rpartition('.')[0]

    @property
    def stored_shape(self):
        return self.shape[::-1] if self.transposed else self.shape


def pieces_of(config, family):
    """[Piece] of all weights of a GPTConfig; names are without family.body."""
    heads, shared = (count * config.head_dim for count in (config.n_head, config.n_kv_head))
    parts = {'attn.qkv': [heads, shared, shared], 'mlp.gate_up': [config.ffn_dim] * 2}
    parts |= dict.fromkeys(('wte', 'lm_head'), [config.vocab_size])  # the padding stays here
    found = []
    for own, shape in weight_shapes(config).items():
        place, _, kind = own.rpartition('.')
        layer, module = re.fullmatch(r'(?:h\.(\d+)\.)?(.+)', place).groups()
        names = family.modules[module]
        rows = parts.get(module, shape[:1])
        if len(names) == 1:
            rows = [sum(rows)]
        transposed = module in family.transposed and kind == 'weight'
        start = 0
        for name, count in zip(names, rows):
            name = f'{family.layers}.{layer}.{name}.{kind}' if layer else f'{name}.{kind}'
            found.append(Piece(name, own, start, (count, *shape[1:]), transposed))
            start += count
    return found


# ----------------------------------------------------------------------------------------------------- config

def read_config(theirs):
    """The GPTConfig of a config.json, a dict. Raises SettingError for what is in force there and cannot be
    here, KeyError for what it lacks."""
    kind = theirs.get('model_type')
    if kind not in FAMILIES:
        raise SettingError(f'model_type={kind} is not built: {", ".join(FAMILIES)} are')
    family = FAMILIES[kind]
    for name, allowed in family.fixed.items():
        if theirs.get(name, allowed[0]) not in allowed:
            raise SettingError(f'{name}={theirs[name]} is not built: {allowed[0]} is')
    theirs = family.missing | {name: value for name, value in theirs.items() if value is not None}
    ours = {field: theirs[name] for field, name in family.fields.items()} | family.like
    if family is not GPT2:
        refuse_windows(theirs)
        ours |= read_rope(theirs)
        attention, mlp = (theirs.get(name, False) for name in BIASES)
        if family is LLAMA and attention == mlp:
            ours['bias'] = attention
        elif kind != 'qwen2' and (attention or mlp):
            raise SettingError(f'attention_bias={attention} with mlp_bias={mlp} is not built for {kind}')
    return GPTConfig(**ours)


def refuse_windows(theirs):
    """Raises SettingError where a layer attends to a window only."""
    first = theirs.get('max_window_layers', 0)
    slides = theirs.get('use_sliding_window') and theirs.get('sliding_window')
    there = ['sliding_attention'] * (theirs['num_hidden_layers'] - first) if slides else []
    for kind in theirs.get('layer_types', there):
        if kind != 'full_attention':
            raise SettingError(f'{kind} is not built: full_attention is')


def read_rope(theirs):
    """GPTConfig's fields of RoPE; transformers 5 has them in rope_parameters."""
    rope = theirs.get('rope_parameters') or theirs.get('rope_scaling') or {}
    ours = {'rope_theta': float(rope.get('rope_theta', theirs.get('rope_theta', 10_000.0)))}
    kind = rope.get('rope_type', rope.get('type', 'default'))
    if kind == 'llama3':
        ours |= {field: rope[name] for field, name in ROPE.items()}
        for field in ('rope_factor', 'rope_low', 'rope_high'):
            ours[field] = float(ours[field])
    elif kind != 'default':
        raise SettingError(f'rope_type={kind} is not built: default and llama3 are')
    return ours


def their_config(config, eot, dtype):
    """The config.json of a GPTConfig, a dict. eot: id of its end of text, dtype: 'fp32' | 'bf16'."""
    kind, family = family_of(config)
    theirs = {
        'architectures': [family.architecture],
        'model_type': kind,
        'torch_dtype': {'fp32': 'float32', 'bf16': 'bfloat16'}[dtype],
        'bos_token_id': eot,
        'eos_token_id': eot,
        'made_by': MADE_BY,
    }
    theirs |= {name: getattr(config, field) for field, name in family.fields.items()}
    theirs |= {name: allowed[0] for name, allowed in family.fixed.items()}
    if family is GPT2:
        return theirs | dict.fromkeys(('resid_pdrop', 'embd_pdrop', 'attn_pdrop'), 0.0)
    theirs |= dict.fromkeys(BIASES, config.bias)
    theirs |= {'rope_theta': config.rope_theta, 'use_sliding_window': False}
    if config.rope_factor != 1:
        scaling = {name: getattr(config, field) for field, name in ROPE.items()}
        theirs['rope_scaling'] = {'rope_type': 'llama3', **scaling}
    return theirs
