"""memory.py's counts against arithmetic by hand and against what a real model saves for backward."""
import functools
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fp8
import memory
import model
import resolve
import runlog
from fp8_linear import RECIPES
from memory import Shape
from model import GPT, MLP, PRESETS, Attention, GPTConfig, Linear, Norm, rotate

LLAMA = {'mlp': 'swiglu', 'norm': 'rmsnorm', 'position': 'rope', 'bias': False}
SMALL = {'vocab_size': 500, 'block_size': 256, 'n_layer': 3, 'n_head': 4, 'n_embd': 128}
GPU = {gpu.name: gpu for _, gpu in runlog.GPUS}
NATIVE = fp8.Choice('native', reason='a test')
OPTIONS = [
    {},
    LLAMA,
    {'mlp': 'swiglu', 'bias': True},
    {'bias': False},
    {'tie_embeddings': False},
    {'n_kv_head': 2},
    {'n_kv_head': 1, 'ffn_dim': 352, **LLAMA},
    {'norm': 'rmsnorm', 'bias': True},
    {'position': 'rope', 'tie_embeddings': False, 'vocab_size': 512},
]


def shaped(config, sequences=32, gpu='H200', **fields):
    """A Shape; grad_checkpointing and fp8_recipe as the settings of these names."""
    every = resolve.checkpoint_every(fields.pop('grad_checkpointing', 'none'))
    choice = fp8.Choice('native', fields.pop('fp8_recipe', 'tensorwise'), reason='planned')
    return Shape(config, sequences, gpu=GPU[gpu], checkpoint_every=every, choice=choice, **fields)


# -------------------------------------------------------------------------------------------------- parameters

def test_parameters_by_hand():
    kinds = memory.parameters(PRESETS['gpt2'])
    padding = 47 * 768  # the rows that pad 50,257 to 50,304
    assert sum(kinds.values()) == 124_439_808 + padding  # OpenAI's count
    assert kinds == {
        'embeddings': 50_304 * 768 + 1024 * 768,
        'attention': 12 * (768 * 2304 + 2304 + 768 * 768 + 768),
        'MLP': 12 * (768 * 3072 + 3072 + 3072 * 768 + 768),
        'norms': 25 * 2 * 768,
        'head': 0,
    }
    block = 1024 * 3072 + 1024 * 1024 + 1024 * 2 * 2688 + 2688 * 1024 + 2 * 1024
    llama = sum(memory.parameters(PRESETS['h100-350m']).values())
    assert llama == 24 * block + 1024 + 50_304 * 1024
    assert llama == 350_405_632


@pytest.mark.parametrize('options', OPTIONS, ids=str)
def test_parameters_are_those_of_a_real_model(options):
    config = GPTConfig(**{**SMALL, **options})
    assert sum(memory.parameters(config).values()) == sum(p.numel() for p in GPT(config).parameters())


# ------------------------------------------------------------------------------------------- kept for backward

def measured(config, sequences, choice, compiled):
    """Bytes of the distinct storages that autograd keeps, parameters and RoPE's tables aside; less RMSNorm's
    normalised values, fp32, which a CPU keeps in eager mode where there is a weight, and a GPU does not."""
    raw = GPT(config, fp8.linear_factory(choice, Linear))
    gpt = raw
    if compiled:  # Inductor's choice of what to keep, without its code
        torch._dynamo.reset()
        gpt = torch.compile(raw, backend='aot_eager_decomp_partition')
    ours = {p.untyped_storage().data_ptr() for p in [*raw.parameters(), *raw.buffers()]}
    kept, normalised = {}, []

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in ours:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def rms_norm(x, shape, weight=None, eps=None, original=F.rms_norm):
        if weight is not None:
            normalised.append(4 * x.numel())
        return original(x, shape, weight, eps)

    idx, targets = torch.randint(0, config.vocab_size, (2, sequences, config.block_size))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with mock.patch.object(F, 'rms_norm', F.rms_norm if compiled else rms_norm):
            gpt(idx, targets)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) - sum(normalised)


def counted(config, sequences, choice, compiled):
    blocks, rest = memory.kept_for_backward(config, sequences, choice, compiled)
    return sum(sum(part.values()) for part in [*blocks, rest])


@pytest.mark.parametrize('options', OPTIONS, ids=str)
@pytest.mark.parametrize('choice', [fp8.OFF, NATIVE], ids=['bf16', 'fp8'])
def test_what_is_kept_in_eager_mode_is_what_autograd_keeps(options, choice):
    config = GPTConfig(**{**SMALL, 'block_size': 64, **options})
    found = measured(config, 4, choice, compiled=False)
    assert counted(config, 4, choice, compiled=False) == pytest.approx(found, rel=0.001)


WIDE = {
    'gpt2': {},
    'llama': {'n_kv_head': 2, **LLAMA},
    'small head': {'vocab_size': 64, 'n_layer': 1, 'tie_embeddings': False},
}


@pytest.mark.parametrize('options', WIDE.values(), ids=WIDE)
@pytest.mark.parametrize('choice', [fp8.OFF, NATIVE], ids=['bf16', 'fp8'])
@pytest.mark.parametrize('compiled', [False, True], ids=['eager', 'compiled'])
def test_what_is_kept_for_backward_is_what_autograd_keeps(options, choice, compiled):
    config = GPTConfig(**{**SMALL, **options})
    modelled = counted(config, 8, choice, compiled)
    found = measured(config, 8, choice, compiled)
    if choice.on and compiled:  # the compiler may recompute FP8 copies: the model is an upper bound
        assert 0.5 * modelled < found
        assert found <= 1.02 * modelled
    else:
        assert modelled == pytest.approx(found, rel=0.01)


@pytest.mark.parametrize('recipe', RECIPES)
def test_every_recipe_can_be_counted(recipe):
    config = GPTConfig(**SMALL)
    choice = fp8.Choice('emulate', recipe, reason='a test')
    found = measured(config, 1, choice, compiled=False)
    assert counted(config, 1, choice, compiled=False) == pytest.approx(found, rel=0.001)


# ------------------------------------------------------------------------------------------ another model.py

class HeadNorm(nn.Module):
    """RMSNorm over a head, with or without a weight."""

    def __init__(self, width, weighted):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width)) if weighted else None

    def forward(self, x):
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, 1e-5).to(x.dtype)


class NormedAttention(Attention):
    """Attention with QK-norm (Henry et al. 2020)."""

    def __init__(self, config, linear, name, weighted):
        super().__init__(config, linear, name)
        self.q_norm = HeadNorm(self.head_dim, weighted)
        self.k_norm = HeadNorm(self.head_dim, weighted)

    def forward(self, x, rope, cache):
        B, T, C = x.shape
        heads = self.qkv(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        q, k, v = heads.split([self.n_head, self.n_kv_head, self.n_kv_head], dim=1)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        shared = self.n_kv_head != self.n_head
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


@pytest.fixture
def changed(monkeypatch):
    """changed(name=class) puts another class into model.py."""
    def forget():
        memory.parameters.cache_clear()
        memory.kept_for_backward.cache_clear()

    def changed(**classes):
        for name, new in classes.items():
            monkeypatch.setattr(model, name, new)
        forget()
    yield changed
    forget()


def small(**options):
    return GPTConfig(**{**SMALL, 'n_layer': 2, 'block_size': 64, **options})


@pytest.mark.parametrize('options', [{}, {'n_kv_head': 2, **LLAMA}], ids=['gpt2', 'llama'])
@pytest.mark.parametrize('weighted', [False, True], ids=['plain', 'weighted'])
@pytest.mark.parametrize('choice', [fp8.OFF, NATIVE], ids=['bf16', 'fp8'])
def test_qk_norm_in_eager_mode_is_followed(options, weighted, choice, changed):
    changed(Attention=functools.partial(NormedAttention, weighted=weighted))
    found = measured(small(**options), 8, choice, compiled=False)
    assert counted(small(**options), 8, choice, compiled=False) == pytest.approx(found, rel=0.0001)


@pytest.mark.parametrize('options, weighted', [({}, False), ({'n_kv_head': 2, **LLAMA}, True)],
                         ids=['gpt2, plain', 'llama, weighted'])
def test_qk_norm_compiled_is_followed(options, weighted, changed):
    changed(Attention=functools.partial(NormedAttention, weighted=weighted))
    found = measured(small(**options), 8, fp8.OFF, compiled=True)
    assert counted(small(**options), 8, fp8.OFF, compiled=True) == pytest.approx(found, rel=0.0001)


@pytest.mark.parametrize('compiled', [False, True], ids=['eager', 'compiled'])
def test_qk_norm_by_hand(compiled, changed):
    config, M, C, n_head = small(), 8 * 64, 128, 4
    before = memory.memory(shaped(config, 8, compiled=compiled), 'bf16')
    changed(Attention=functools.partial(NormedAttention, weighted=True))
    after = memory.memory(shaped(config, 8, compiled=compiled), 'bf16')
    # q and k: in bf16 for attention, a number a head; their inputs in fp32 unless computed again from qkv's
    in_fp32 = 0 if compiled else 4 * C
    assert after['activations'] - before['activations'] == 2 * M * 2 * (in_fp32 + 2 * C + 4 * n_head)
    # attention's output lies head by head, as q: a copy for proj
    assert after['inputs of linears'] - before['inputs of linears'] == 2 * M * 2 * C
    assert after['fp32 weights'] - before['fp32 weights'] == 2 * 4 * 2 * (C // n_head)


class EverySecondNormed(NormedAttention):
    """Tells its blocks apart by a setting alone."""

    def __init__(self, config, linear, name):
        super().__init__(config, linear, name, weighted=False)
        self.plain = int(name.split('.')[1]) % 2

    def forward(self, x, rope, cache):
        if self.plain:
            return Attention.forward(self, x, rope, cache)
        return super().forward(x, rope, cache)


def test_blocks_that_differ_are_counted_apart(changed):
    changed(Attention=EverySecondNormed)
    blocks, _ = memory.kept_for_backward(small(n_layer=4), 8, fp8.OFF, False)
    assert blocks[0] == blocks[2]
    assert blocks[1] == blocks[3]
    assert blocks[0] != blocks[1]
    found = measured(small(n_layer=4), 8, fp8.OFF, compiled=False)
    assert counted(small(n_layer=4), 8, fp8.OFF, compiled=False) == pytest.approx(found, rel=0.0001)


class RawMLP(MLP):
    """An MLP that multiplies with a parameter, by no linear of the factory's."""

    def __init__(self, config, linear, name):
        super().__init__(config, linear, name)
        self.raw = nn.Parameter(torch.ones(config.ffn_dim, config.ffn_dim))

    def forward(self, x):
        h = F.gelu(self.up(x), approximate='tanh')
        return self.down(F.relu(h @ self.raw.to(x.dtype)).square())


@pytest.mark.parametrize('compiled', [False, True], ids=['eager', 'compiled'])
def test_another_mlp_is_followed(compiled, changed):
    changed(MLP=RawMLP)
    found = measured(small(), 8, fp8.OFF, compiled)
    assert counted(small(), 8, fp8.OFF, compiled) == pytest.approx(found, rel=0.0001)


class NormedMLP(MLP):
    def __init__(self, config, linear, name):
        super().__init__(config, linear, name)
        self.norm = Norm(config, config.n_embd)

    def forward(self, x):
        return super().forward(self.norm(x))


def test_another_norm_by_hand(changed):
    config, M, C = GPTConfig(**{**SMALL, 'block_size': 192}), 4 * 192, 128
    before = {compiled: counted(config, 4, fp8.OFF, compiled) for compiled in (False, True)}
    norms = memory.parameters(config)['norms']
    changed(MLP=NormedMLP)
    assert memory.parameters(config)['norms'] == norms + 3 * 2 * C
    # its input, in fp32 or as bf16, mean and 1/std
    assert counted(config, 4, fp8.OFF, compiled=False) == before[False] + 3 * M * (4 * C + 8)
    assert counted(config, 4, fp8.OFF, compiled=True) == before[True] + 3 * M * (2 * C + 8)


# ---------------------------------------------------------------------------------------------- all of a GPU's

def test_memory_by_hand():
    P, M = 124_475_904, 32 * 1024
    shape = shaped(PRESETS['gpt2'])
    norms, qkv, attention, gelu_input = 2 * (2 * 768 + 8), 2 * 2304, 2 * 768 + 4 * 12, 2 * 3072
    of_block = norms + qkv + attention + gelu_input     # attention's output and log-sum-exp
    inputs = 768 + 0 + 768 + 3072                       # of qkv, up, down; proj's is attention's output
    matrices = 12 * (768 * 2304 + 768 * 768 + 2 * 768 * 3072)
    in_bf16 = memory.memory(shape, 'bf16')
    assert in_bf16 == {
        'fp32 weights': 4 * P,
        'fp32 gradients': 4 * P,
        'fp32 AdamW moments': 8 * P,
        'activations': M * (12 * of_block + 2 * 768 + 8 + 16),
        'inputs of linears': M * 2 * (12 * inputs + 768),
        'cast weights of linears': 2 * (matrices + 50_304 * 768),
        'logits and their gradient': M * (4 * 50_304 + 8),
        'one recomputed block, beyond the logits': 0,
    }
    in_fp8 = memory.memory(shape, 'fp8')
    # a byte each, proj's included; the head's stay bf16
    assert in_fp8['inputs of linears'] == M * (12 * (inputs + 768) + 2 * 768)
    assert in_fp8['cast weights of linears'] == matrices + 2 * 50_304 * 768
    assert in_fp8['activations'] == in_bf16['activations']
    assert sum(in_fp8.values()) < sum(in_bf16.values())
    eager = memory.memory(shaped(PRESETS['gpt2'], compiled=False), 'bf16')
    assert eager['activations'] - in_bf16['activations'] == M * 25 * 2 * 768
    assert eager['logits and their gradient'] == 12 * M * 50_257


def test_tokens_that_fp8_cannot_take():
    shape = shaped(GPTConfig(**{**SMALL, 'block_size': 24}), 1)
    assert shape.choice_in('fp8').reason == '1 x 24 tokens are not a multiple of 16'
    assert memory.memory(shape, 'fp8') == memory.memory(shape, 'bf16')


def test_checkpointing_keeps_the_inputs_of_blocks():
    M, C = 32 * 1024, 768
    none, full, third = (memory.memory(shaped(PRESETS['gpt2'], grad_checkpointing=setting), 'bf16')
                         for setting in ('none', 'full', '3'))
    assert full['activations'] == M * (12 * 2 * C + 2 * C + 8 + 16)
    assert full['inputs of linears'] == M * 2 * C               # the head's
    assert full['cast weights of linears'] == 2 * 50_304 * C    # the head's
    saving = none['activations'] - full['activations']
    assert none['activations'] - third['activations'] == saving / 3  # 4 of 12 blocks
    assert full['one recomputed block, beyond the logits'] == 0

    narrow = memory.memory(shaped(GPTConfig(vocab_size=64), grad_checkpointing='full'), 'bf16')
    activations = 2 * (2 * C + 8) + 2 * 3 * C + 2 * C + 48 + 2 * 4 * C
    of_block = M * (activations + 2 * (C + C + 4 * C)) + 2 * 12 * C * C
    assert narrow['one recomputed block, beyond the logits'] == of_block - M * (4 * 64 + 8)


@pytest.mark.parametrize('wrong', ['0', 'some', '-1'])
def test_checkpointing_is_none_full_or_a_number(wrong):
    with pytest.raises(ValueError, match='none, full or k'):
        shaped(PRESETS['gpt2'], grad_checkpointing=wrong)


def test_fits():
    shape = shaped(PRESETS['gpt2-xl'], 1, 'RTX 4090')  # 1.56B x 16 bytes are 25 GB already
    assert sum(memory.memory(shape, 'bf16').values()) / 1e9 > 24
    assert not memory.fits(shape, 'bf16')
    assert memory.fits(shaped(PRESETS['gpt2-xl'], 1, 'H100 SXM'), 'bf16')
