"""memory.py's counts against arithmetic by hand and against what a real model saves for backward."""
import dataclasses
import functools
import itertools
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

import fp8
from planning import memory
import model
import resolve
from fp8_linear import RECIPES
from gpus import GPUS
from helpers import compiled, peak_bytes
from model import GPT, MLP, PRESETS, Attention, GPTConfig, Linear, Norm

LLAMA = {'mlp': 'swiglu', 'norm': 'rmsnorm', 'position': 'rope', 'bias': False}
SMALL = {'vocab_size': 500, 'block_size': 256, 'n_layer': 3, 'n_head': 4, 'n_embd': 128}
GPU = {gpu.name: gpu for _, gpu in GPUS}
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
KINDS = {
    'gpt2': {},
    'llama': {'n_kv_head': 2, **LLAMA},
    'small head': {'vocab_size': 64, 'n_layer': 1, 'tie_embeddings': False},
}
CHOICES = {'bf16': fp8.OFF, 'fp8': NATIVE}
FUSED = {'triton': fp8.Choice('native', kernels='triton', reason='a test')}

slow_compiled = pytest.param(True, marks=pytest.mark.slow, id='compiled')
for_modes = pytest.mark.parametrize('compiled', [pytest.param(False, id='eager'), slow_compiled])


def small(**options):
    return GPTConfig(**{**SMALL, **options})


def shaped(config, sequences=32, gpu='H200', **fields):
    """A Shape; grad_checkpointing, fp8_recipe, fp8_kernels and fp8_head as the settings of these names."""
    setting = fields.pop('grad_checkpointing', 'none')
    names = ('recipe', 'kernels', 'head')
    names = {name: fields.pop(f'fp8_{name}') for name in names if f'fp8_{name}' in fields}
    return memory.Shape(
        config,
        sequences,
        gpu=GPU[gpu],
        checkpoint_every=resolve.checkpoint_every(setting),
        choice=fp8.Choice('native', reason='planned', **names),
        **fields,
    )


def in_bf16(config, *args, **fields):
    """component -> bytes of a shaped(...)."""
    return memory.memory(shaped(config, *args, **fields), 'bf16')


# ------------------------------------------------------------------------------------------------- parameters

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
    attention = 1024 * 3072 + 1024 * 1024
    mlp = 1024 * 2 * 2688 + 2688 * 1024
    block = attention + mlp + 2 * 1024
    llama = memory.parameters(PRESETS['h100-350m'])
    assert sum(llama.values()) == 24 * block + 1024 + 50_304 * 1024
    assert sum(llama.values()) == 350_405_632


def test_parameters_are_those_of_a_real_model():
    wrong = []
    for options in OPTIONS:
        config = small(**options)
        real = sum(p.numel() for p in GPT(config).parameters())
        if sum(memory.parameters(config).values()) != real:
            wrong.append(options)
    assert wrong == []


# ------------------------------------------------------------------------------------------ kept for backward

def address(tensor):
    return tensor.untyped_storage().data_ptr()


def measured(config, sequences, choice, compiling):
    """Bytes of the distinct storages that autograd keeps, parameters and RoPE's tables aside; less RMSNorm's
    normalised values, fp32, which a CPU keeps in eager mode where there is a weight, and a GPU does not."""
    raw = gpt = GPT(config, fp8.linear_factory(choice, Linear))
    fp8.State(raw, choice)
    if compiling:  # Inductor's choice of what to keep, without its code
        torch._dynamo.reset()
        gpt = compiled(raw, backend='aot_eager_decomp_partition')
    ours = {address(tensor) for tensor in [*raw.parameters(), *raw.buffers()]}
    kept, normalised = {}, []

    def pack(tensor):
        if address(tensor) not in ours:
            kept[address(tensor)] = tensor
        return tensor

    def on_a_cpu(x, shape, weight=None, eps=None, rms_norm=F.rms_norm):
        if weight is not None:
            normalised.append(4 * x.numel())
        return rms_norm(x, shape, weight, eps)

    used = F.rms_norm if compiled else on_a_cpu
    shape = 2, sequences, config.block_size
    idx, targets = torch.randint(0, config.vocab_size, shape)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        with mock.patch.object(F, 'rms_norm', used), mock.patch.object(model, 'NO_BF16_UNITS', False):
            gpt(idx, targets)
    kept |= {address(tensor): tensor for tensor in raw.buffers() if address(tensor) not in ours}  # its casts
    sizes = [tensor.untyped_storage().nbytes() for tensor in kept.values()]
    return sum(sizes) - sum(normalised)


def counted(config, sequences, choice, compiled):
    kept = memory.kept_for_backward(config, sequences, choice, compiled)
    return kept.casts + sum(sum(part.values()) for part in [*kept.blocks, kept.rest])


def test_what_is_kept_in_eager_mode_is_what_autograd_keeps():
    cases = [(options, fp8.OFF) for options in OPTIONS]
    cases += [(options, choice) for options in KINDS.values() for choice in (NATIVE, FUSED['triton'])]
    cases += [({}, fp8.Choice('emulate', recipe, reason='a test')) for recipe in RECIPES]
    wrong = []
    for options, choice in cases:
        config = small(**{'block_size': 64, **options})
        case = config, 4, choice, False
        if counted(*case) != pytest.approx(measured(*case), rel=0.001):
            wrong.append((options, choice))
    assert wrong == []


def is_kept(options, choice):
    """Whether compiled blocks keep what is counted. Of FP8 copies that is an upper bound, since the compiler
    may recompute them."""
    case = small(**{'n_layer': 2, **options}), 8, choice, True
    modelled, found = counted(*case), measured(*case)
    if choice.on:
        return 0.5 * modelled < found <= 1.02 * modelled
    return modelled == pytest.approx(found, rel=0.01)


def test_what_a_compiled_model_keeps_is_what_autograd_keeps():
    assert is_kept({'n_layer': 1, 'block_size': 64}, NATIVE)


@pytest.mark.slow
def test_what_every_kind_of_compiled_model_keeps_is_what_autograd_keeps():
    cases = [(kind, name) for kind in KINDS for name in CHOICES | FUSED]
    assert [(kind, name) for kind, name in cases if not is_kept(KINDS[kind], (CHOICES | FUSED)[name])] == []


@for_modes
def test_what_an_fp8_head_keeps_is_what_autograd_keeps(compiled):
    choice = fp8.Choice('emulate', head=True, reason='a test')
    case = small(n_layer=1, vocab_size=1000), 8, choice, compiled
    modelled, found = counted(*case), measured(*case)   # the compiler may recompute FP8 copies
    assert 0.8 * modelled < found < 1.01 * modelled
    plain = memory.kept_for_backward(case[0], 8, dataclasses.replace(choice, head=False), compiled)
    kept = memory.kept_for_backward(*case)
    assert kept.rest[memory.LOGITS] <= plain.rest[memory.LOGITS]


# ------------------------------------------------------------------------------------------- another model.py

class HeadNorm(nn.Module):
    """RMSNorm over a head, with or without a weight."""

    def __init__(self, width, weighted):
        super().__init__()
        self.weight = None
        if weighted:
            self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        width = x.shape[-1:]
        return F.rms_norm(x.float(), width, self.weight, 1e-5).to(x.dtype)


class NormedAttention(Attention):
    """Attention with QK-norm (Henry et al. 2020)."""

    def __init__(self, config, linear, name, weighted):
        super().__init__(config, linear, name)
        self.norm_of_q = HeadNorm(self.head_dim, weighted)
        self.norm_of_k = HeadNorm(self.head_dim, weighted)

    def forward(self, x, rope, cache, mask=None):
        sizes = self.n_head, self.n_kv_head, self.n_kv_head
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split(sizes, dim=2)
        q = self.norm_of_q(q)
        k = self.norm_of_k(k)
        if rope is not None:
            q = model.rotate(q, *rope)
            k = model.rotate(k, *rope)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        shared = self.n_kv_head != self.n_head
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        return self.proj(y.transpose(1, 2).reshape(x.shape))


class EverySecondNormed(NormedAttention):
    """Tells its blocks apart by a setting alone."""

    def __init__(self, config, linear, name):
        super().__init__(config, linear, name, weighted=False)
        _, number, _ = name.split('.')
        self.plain = int(number) % 2

    def forward(self, x, rope, cache, mask=None):
        if self.plain:
            return Attention.forward(self, x, rope, cache, mask)
        return super().forward(x, rope, cache, mask)


class RawMLP(MLP):
    """Multiplies with a parameter too, by no linear of the factory's."""

    def __init__(self, config, linear, name):
        super().__init__(config, linear, name)
        width = config.ffn_dim
        self.raw = nn.Parameter(torch.ones(width, width))

    def forward(self, x):
        h = F.gelu(self.up(x), approximate='tanh')
        h = F.relu(h @ self.raw.to(x.dtype))
        return self.down(h.square())


class NormedMLP(MLP):
    def __init__(self, config, linear, name):
        super().__init__(config, linear, name)
        self.norm = Norm(config, config.n_embd)

    def forward(self, x):
        return super().forward(self.norm(x))


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


def test_qk_norm_in_eager_mode_is_followed(changed):
    wrong = []
    for kind, weighted, choice in itertools.product(('gpt2', 'llama'), (False, True), CHOICES.values()):
        changed(Attention=functools.partial(NormedAttention, weighted=weighted))
        case = small(block_size=64, **KINDS[kind]), 8, choice, False
        if counted(*case) != pytest.approx(measured(*case), rel=0.0001):
            wrong.append((kind, weighted, choice))
    assert wrong == []


@pytest.mark.slow
def test_qk_norm_compiled_is_followed(changed):
    for kind, weighted in (('gpt2', False), ('llama', True)):
        changed(Attention=functools.partial(NormedAttention, weighted=weighted))
        case = small(block_size=64, n_layer=2, **KINDS[kind]), 8, fp8.OFF, True
        assert counted(*case) == pytest.approx(measured(*case), rel=0.0001)


@for_modes
def test_qk_norm_by_hand(compiled, changed):
    config = small(block_size=64)
    L, M, C, n_head = 3, 8 * 64, 128, 4
    before = in_bf16(config, 8, compiled=compiled)
    changed(Attention=functools.partial(NormedAttention, weighted=True))
    after = in_bf16(config, 8, compiled=compiled)
    more = {name: after[name] - before[name] for name in after}
    # q and k: for attention in bf16, a number a head, and for the norm in fp32, unless anew from qkv
    of_norm = 0 if compiled else 4 * C
    assert more['activations'] == L * M * 2 * (2 * C + 4 * n_head + of_norm)
    # attention's output lies token by token, as q does: no copy for proj
    assert more['inputs of linears'] == 0
    assert more['fp32 weights'] == L * 4 * 2 * (C // n_head)


def test_blocks_that_differ_are_counted_apart(changed):
    changed(Attention=EverySecondNormed)
    case = small(block_size=64, n_layer=4), 8, fp8.OFF, False
    blocks = memory.kept_for_backward(*case).blocks
    assert blocks[0] == blocks[2]
    assert blocks[1] == blocks[3]
    assert blocks[0] != blocks[1]
    assert counted(*case) == pytest.approx(measured(*case), rel=0.0001)


@for_modes
def test_a_matrix_multiplication_without_a_linear_is_followed(compiled, changed):
    changed(MLP=RawMLP)
    case = small(block_size=64, n_layer=2), 8, fp8.OFF, compiled
    assert counted(*case) == pytest.approx(measured(*case), rel=0.0001)


@for_modes
def test_another_norm_by_hand(compiled, changed):
    M, C = 4 * 192, 128
    case = small(block_size=192), 4, fp8.OFF, compiled
    before = counted(*case)
    norms = memory.parameters(case[0])['norms']
    changed(MLP=NormedMLP)
    of_input = 2 * C if compiled else 4 * C     # in bf16 or fp32; mean and 1/std
    assert counted(*case) == before + 3 * M * (of_input + 8)
    assert memory.parameters(case[0])['norms'] == norms + 3 * 2 * C


# --------------------------------------------------------------------------------------------- all of a GPU's

def test_memory_by_hand():
    P, M = 124_475_904, 32 * 1024
    norms = 2 * (2 * 768 + 8)
    qkv = 2 * 2304
    attention = 2 * 768 + 4 * 12    # its output and log-sum-exp
    gelu_input = 2 * 3072
    of_block = norms + qkv + attention + gelu_input
    inputs = 768 + 0 + 768 + 3072   # of qkv, up, down; proj's is attention's output
    matrices = 12 * (768 * 2304 + 768 * 768 + 2 * 768 * 3072)
    bf16 = in_bf16(PRESETS['gpt2'])
    assert bf16 == {
        'fp32 weights': 4 * P,
        'fp32 gradients': 4 * P,
        'fp32 AdamW moments': 8 * P,
        'activations': M * (12 * of_block + 2 * 768 + 8 + 16),
        'inputs of linears': M * 2 * (12 * inputs + 768),
        'cast weights of linears': 2 * (matrices + 50_304 * 768),
        'logits and their gradient': M * (4 * 50_304 + 8),
        'one recomputed block, beyond the logits': 0,
    }
    in_fp8 = memory.memory(shaped(PRESETS['gpt2']), 'fp8')
    # a byte each, proj's included; the head's stay bf16
    assert in_fp8['inputs of linears'] == M * (12 * (inputs + 768) + 2 * 768)
    assert in_fp8['cast weights of linears'] == matrices + 2 * 50_304 * 768
    assert in_fp8['activations'] == bf16['activations']
    assert sum(in_fp8.values()) < sum(bf16.values())
    eager = in_bf16(PRESETS['gpt2'], compiled=False)
    assert eager['activations'] - bf16['activations'] == M * 25 * 2 * 768
    assert eager['logits and their gradient'] == 12 * M * 50_257


def test_tokens_that_fp8_cannot_take():
    shape = shaped(small(block_size=24), 1)
    assert shape.choice_in('fp8').reason == '1 x 24 tokens are not a multiple of 16'
    assert memory.memory(shape, 'fp8') == memory.memory(shape, 'bf16')


def test_checkpointing_keeps_the_inputs_of_blocks():
    M, C = 32 * 1024, 768
    none = in_bf16(PRESETS['gpt2'])
    full = in_bf16(PRESETS['gpt2'], grad_checkpointing='full')
    third = in_bf16(PRESETS['gpt2'], grad_checkpointing='3')
    assert full['activations'] == M * (12 * 2 * C + 2 * C + 8 + 16)
    assert full['inputs of linears'] == M * 2 * C               # the head's
    assert full['cast weights of linears'] == 2 * 50_304 * C    # the head's
    saving = none['activations'] - full['activations']
    assert none['activations'] - third['activations'] == saving / 3  # 4 of 12 blocks
    assert full['one recomputed block, beyond the logits'] == 0


def test_checkpointing_recomputes_one_block():
    M, C = 32 * 1024, 768
    narrow = in_bf16(GPTConfig(vocab_size=64), grad_checkpointing='full')
    norms = 2 * (2 * C + 8)
    attention = 2 * 3 * C + 2 * C + 48
    gelu_input = 2 * 4 * C
    inputs = 2 * (C + C + 4 * C)
    of_block = M * (norms + attention + gelu_input + inputs) + 2 * 12 * C * C
    logits = M * (4 * 64 + 8)
    assert narrow['one recomputed block, beyond the logits'] == of_block - logits


def test_kernels_of_its_own_keep_casts_of_weights():
    M, C, matrices = 32 * 1024, 768, 12 * 12 * 768 * 768
    plain, fused = (memory.memory(shaped(PRESETS['gpt2'], fp8_kernels=kernels), 'fp8')
                    for kernels in ('inductor', 'triton'))
    assert fused['inputs of linears'] == plain['inputs of linears']
    assert fused['activations'] == plain['activations']
    biases = 12 * 2 * (2304 + 768 + 3072 + 768)
    more = fused['cast weights of linears'] - plain['cast weights of linears']
    assert more == matrices + biases    # a byte each, the layout of forward
    # what a block is given is a sum that is still to be made, but for the first
    full = memory.memory(shaped(PRESETS['gpt2'], fp8_kernels='triton', grad_checkpointing='full'), 'fp8')
    assert full['activations'] == M * ((12 + 11) * 2 * C + 2 * C + 8 + 16)
    assert full['cast weights of linears'] == fused['cast weights of linears']


def test_a_step_of_several_micro_steps_keeps_casts_of_weights():
    """Both layouts, a byte a weight each, whether a block is computed again or not; and scales, biases."""
    matrices = 12 * 12 * 768 * 768
    for recipe, again in (('tensorwise', 'none'), ('rowwise', 'full'), ('blockwise', 'none')):
        shape = shaped(PRESETS['gpt2'], fp8_recipe=recipe, grad_checkpointing=again)
        several = memory.memory(dataclasses.replace(shape, micro_steps=8), 'fp8')
        kept = several['cast weights of linears'] - 2 * 50304 * 768    # the head's, in bf16
        assert 2 * matrices < kept < 2.03 * matrices
        assert several['inputs of linears'] == memory.memory(shape, 'fp8')['inputs of linears']


def test_fewer_bits_by_hand():
    P, C = 124_475_904, 768
    plain = in_bf16(PRESETS['gpt2'])
    fields = {'param_dtype': torch.bfloat16, 'optimizer': 'adamw8bit'}
    low = in_bf16(PRESETS['gpt2'], **fields)
    matrices = 12 * 12 * C * C + 50_304 * C + 1024 * C
    assert low['bf16 weights'] == low['bf16 gradients'] == 2 * P
    assert low['8-bit AdamW moments'] == 2 * matrices + 2 * 4 * matrices // 256 + 8 * (P - matrices)
    assert low['cast weights of linears'] == 0      # they are what is multiplied
    assert low['inputs of linears'] == plain['inputs of linears']


def test_a_loss_in_chunks_by_hand():
    M, C = 32 * 1024, 768
    fields = {'param_dtype': torch.bfloat16, 'loss_chunks': 8}
    chunked = in_bf16(PRESETS['gpt2'], **fields)['logits and their gradient']
    sums = (4 + 2) * 50_304 * C     # of the head's gradient, in fp32, and what that becomes
    assert chunked == M * (4 * 50_304 + 8) // 8 + sums + M * 2 * C


def test_the_peak_in_eager_mode_is_what_is_allocated():
    """All but what is there before: weights."""
    config = small(vocab_size=4000, n_layer=1)
    for chunks in (1, 8):
        gpt = GPT(config, loss_chunks=chunks)
        idx = torch.zeros((8, 256), dtype=torch.long)
        with mock.patch.object(model, 'NO_BF16_UNITS', False):
            found = peak_bytes(lambda: gpt(idx, idx).backward())
        parts = in_bf16(config, 8, compiled=False, loss_chunks=chunks)
        gone = 'fp32 weights', 'fp32 gradients', 'fp32 AdamW moments'
        counted = sum(count for name, count in parts.items() if name not in gone)
        assert found == pytest.approx(counted, rel=0.1)


# The shapes of Meta's and Qwen's config.json files: layers, width, heads, key/value heads, MLP, vocabulary.
FINETUNED = {
    'Llama-3.2-1B': ((16, 2048, 32, 8, 8192, 128_256), 12, 1_235_814_400),
    'Llama-3.2-3B': ((28, 3072, 24, 8, 8192, 128_256), 12, 3_212_749_824),
    'Llama-3.1-8B': ((32, 4096, 32, 8, 14_336, 128_256), 8, 8_030_261_248),
    'Qwen2.5-14B': ((48, 5120, 40, 8, 13_824, 152_064), 4, 14_769_689_600),  # biases aside
}


def test_full_fine_tuning_fits_one_gpu():
    """In 141 GB: bf16 weights and gradients, moments of 8 bits, blocks recomputed, the loss in 4 chunks."""
    for name, (sizes, sequences, parameters) in FINETUNED.items():
        layers, width, heads, kv_heads, ffn, vocabulary = sizes
        config = GPTConfig(
            vocab_size=vocabulary, n_layer=layers, n_head=heads, n_kv_head=kv_heads, n_embd=width,
            ffn_dim=ffn, tie_embeddings=name.startswith('Llama-3.2'), **LLAMA)
        fields = {'param_dtype': torch.bfloat16, 'optimizer': 'adamw8bit', 'loss_chunks': 4}
        shape = shaped(config, sequences, grad_checkpointing='full', **fields)
        parts = memory.memory(shape, 'fp8' if name == 'Qwen2.5-14B' else 'bf16')
        M, P, table = sequences * 1024, parameters, vocabulary * width
        by_hand = 4 * P + (2 + 8 / 256) * P                     # weights and gradients; moments
        by_hand += M * 2 * width * (layers + 3)                 # inputs of blocks, norm, head; its gradient
        by_hand += M * vocabulary * 4 / 4 + (4 + 2) * table   # a chunk's logits; sums of the head's gradient
        total = sum(parts.values())
        again = parts['one recomputed block, beyond the logits']
        assert total - again == pytest.approx(by_hand, rel=0.01), name
        assert total / 1e9 < 141 - memory.MARGIN, name


def test_fits():
    shape = shaped(PRESETS['gpt2-xl'], 1, 'RTX 4090')
    total = sum(memory.memory(shape, 'bf16').values())
    assert total / 1e9 > 24  # 1.56B x 16 bytes are 25 GB already
    assert not memory.fits(shape, 'bf16')
    for left, enough in ((memory.MARGIN + 0.1, True), (memory.MARGIN - 0.1, False)):
        mebibytes = (total + left * 1e9) / 2**20
        exact = dataclasses.replace(shape, gpu=shape.gpu._replace(mebibytes=mebibytes))
        assert memory.fits(exact, 'bf16') == enough
