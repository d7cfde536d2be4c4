"""The model: GPT-2, Llama 3, Qwen2.5, Qwen3 and their like from one class, described by rows of a table.

    model = GPT(PRESETS['gpt2'])                    # random weights
    logits = model(idx)                             # (B, T) int64 -> (B, T, vocab_size) float32
    loss = model(idx, targets)                      # scalar, mean over the targets that are not -1
    for ids in generate(model, idx, 64):            # ids (B,): one more token of each row of idx

Every matrix multiplication with a weight goes through a factory, linear(in_features, out_features, bias=,
name=), so that another module (fp8gpt/fp8) can stand in for Linear without this file knowing; parameters keep
the same names. Its attribute `norm`, if it has one, makes another class of AddNorm: with it and `linear_then`
kernels join a norm, an activation or the split into heads to FP8's casts. Parameters are fp32, or bf16. The
embedding's output has the compute dtype, a linear casts its weight to its input's dtype, norms compute in
fp32: so no autocast is needed.
"""
import contextlib
import dataclasses
import functools
import math
import zlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from configurator import SettingError

CHOICES = {'mlp': ('gelu', 'swiglu'), 'norm': ('layernorm', 'rmsnorm'), 'position': ('learned', 'rope')}
# Nothing random happens in a block; a generator's state, which CUDA graphs do not let it read, is not kept.
recompute = functools.partial(checkpoint, preserve_rng_state=False)


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Raises SettingError for a field of another type or out of range, and where the numbers do not fit
    together. The defaults are GPT-2 124M."""
    vocab_size: int = 50257
    block_size: int = 1024        # longest sequence that it reads, tokens; a run's may be shorter, with rope
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int = 0            # key/value heads, shared by groups of query heads; 0 = n_head
    n_embd: int = 768
    ffn_dim: int = 0              # hidden width of the MLP; 0 = 4 * n_embd
    mlp: str = 'gelu'             # gelu (tanh form, as GPT-2) | swiglu
    norm: str = 'layernorm'       # layernorm | rmsnorm
    position: str = 'learned'     # learned | rope
    bias: bool = True             # in linears and layer norms
    tie_embeddings: bool = True   # the output head is the token embedding
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0  # base of RoPE's wavelengths
    rope_factor: float = 1.0      # Llama 3's scaling: long wavelengths become so many times longer; 1 = none
    rope_low: float = 1.0         # that is: wavelengths that fit into rope_original at most so many times
    rope_high: float = 4.0        # wavelengths that fit at least so many times stay; others are in between
    rope_original: int = 8192     # tokens that the model read before it was scaled
    head_dim: int = 0             # width of a head; 0 = n_embd / n_head
    qkv_bias: bool = False        # in attn.qkv, even where bias is not (Qwen2)
    qk_norm: bool = False         # norms of each head's query and key, before RoPE (Qwen3)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if field.type in (int, float):      # 0 only where it stands for another number
                wanted = 'a whole number above 0' if field.type is int else 'a number above 0'
                fits = type(value) in (int, field.type) and (0 < value < 2**40 or value == field.default)
            else:
                choices = CHOICES.get(name, (False, True))
                wanted = f'one of {", ".join(map(str, choices))}'
                fits = value in choices
            if not fits:
                raise SettingError(f'{name} is {wanted}, not {value!r:.100}')
        derived = 0 if self.n_embd % self.n_head else self.n_embd // self.n_head
        vars(self).update(      # an assignment raises, as the class is frozen
            n_kv_head=self.n_kv_head or self.n_head,
            ffn_dim=self.ffn_dim or 4 * self.n_embd,
            head_dim=self.head_dim or derived,
        )
        if not self.head_dim or self.n_head % self.n_kv_head:
            raise SettingError(f'n_embd={self.n_embd} must be a multiple of n_head={self.n_head}, '
                               f'and n_head a multiple of n_kv_head={self.n_kv_head}')
        if self.n_layer > 1024 or self.head_dim > 4096:     # modules and RoPE's tables cost memory at once
            raise SettingError('n_layer goes up to 1024 and head_dim up to 4096, not '
                               f'{self.n_layer} and {self.head_dim}')
        if self.position == 'rope' and self.head_dim % 2:
            raise SettingError(f'rope needs an even head width, not {self.head_dim}')

    @property
    def padded_vocab_size(self):
        """Return the rows of the embedding and the head: a multiple of 64, which GPU matrix units want."""
        return -(-self.vocab_size // 64) * 64

    def block_linears(self):
        """Return {name: (in_features, out_features, has a bias)} of a block's linears, in forward's order."""
        C, heads, bias = self.n_embd, self.n_head * self.head_dim, self.bias
        qkv = heads + 2 * self.n_kv_head * self.head_dim
        up, width = ('gate_up', 2 * self.ffn_dim) if self.mlp == 'swiglu' else ('up', self.ffn_dim)
        return {
            'attn.qkv': (C, qkv, bias or self.qkv_bias),
            'attn.proj': (heads, C, bias),
            f'mlp.{up}': (C, width, bias),
            'mlp.down': (self.ffn_dim, C, bias),
        }

    def linears(self):
        """Return [(name, in_features, out_features)] in the order in which GPT asks its factory for them."""
        block = self.block_linears().items()
        layers = [(f'h.{i}.{name}', k, n) for i in range(self.n_layer) for name, (k, n, _) in block]
        return [*layers, ('lm_head', self.n_embd, self.padded_vocab_size)]

    def flops_per_token(self, tokens):
        """Return the FLOPs of forward and backward for sequences of `tokens`: 6 N + 12 L H T (Chowdhery et
        al. 2022, appendix B). N counts the linears' weights without the head's padding; H is the width of all
        heads."""
        n = sum(k * n for _, k, n in self.linears())
        n -= (self.padded_vocab_size - self.vocab_size) * self.n_embd
        return 6 * n + 12 * self.n_layer * self.n_head * self.head_dim * tokens

    def count_parameters(self):
        """Return the number of a GPT's parameters, counted without memory."""
        with torch.device('meta'):
            return sum(p.numel() for p in GPT(self, seed=None).parameters())


LLAMA_LIKE = dict(mlp='swiglu', norm='rmsnorm', position='rope', bias=False)
LLAMA3 = dict(LLAMA_LIKE, vocab_size=128_256, block_size=131_072, rope_theta=5e5, rope_factor=32.0)
QWEN25 = dict(LLAMA_LIKE, vocab_size=151_936, block_size=32_768, norm_eps=1e-6, rope_theta=1e6, qkv_bias=True)
QWEN25_7B = dict(QWEN25, vocab_size=152_064, block_size=131_072, tie_embeddings=False)
QWEN3 = dict(QWEN25, block_size=40_960, head_dim=128, qkv_bias=False, qk_norm=True)
QWEN3_8B = dict(QWEN3, tie_embeddings=False)
SMOLLM2 = dict(LLAMA_LIKE, vocab_size=49_152, block_size=8192, rope_theta=1e5)
SIZES = 'n_layer', 'n_head', 'n_kv_head', 'n_embd', 'ffn_dim'
ROWS = {                # family, then SIZES
    'gpt2':          ({}, 12, 12, 12, 768, 3072),           # 124M
    'gpt2-medium':   ({}, 24, 16, 16, 1024, 4096),          # 355M
    'gpt2-large':    ({}, 36, 20, 20, 1280, 5120),          # 774M
    'gpt2-xl':       ({}, 48, 25, 25, 1600, 6400),          # 1.56B
    # 350M: ffn_dim is 2.6 * n_embd, about SwiGLU's usual 8/3, in whole 128s for block-scaled FP8
    'h100-350m':     (LLAMA_LIKE, 24, 16, 16, 1024, 2688),
    'llama-3.2-1b':  (LLAMA3, 16, 32, 8, 2048, 8192),
    'llama-3.2-3b':  (LLAMA3, 28, 24, 8, 3072, 8192),
    'llama-3.1-8b':  (dict(LLAMA3, rope_factor=8.0, tie_embeddings=False), 32, 32, 8, 4096, 14_336),
    'qwen2.5-0.5b':  (QWEN25, 24, 14, 2, 896, 4864),
    'qwen2.5-1.5b':  (dict(QWEN25, block_size=131_072), 28, 12, 2, 1536, 8960),
    'qwen2.5-3b':    (QWEN25, 36, 16, 2, 2048, 11_008),
    'qwen2.5-7b':    (QWEN25_7B, 28, 28, 4, 3584, 18_944),
    'qwen2.5-14b':   (dict(QWEN25_7B, norm_eps=1e-5), 48, 40, 8, 5120, 13_824),
    'qwen3-0.6b':    (QWEN3, 28, 16, 8, 1024, 3072),
    'qwen3-1.7b':    (QWEN3, 28, 16, 8, 2048, 6144),
    'qwen3-4b':      (QWEN3, 36, 32, 8, 2560, 9728),
    'qwen3-8b':      (QWEN3_8B, 36, 32, 8, 4096, 12_288),
    'qwen3-14b':     (QWEN3_8B, 40, 40, 8, 5120, 17_408),
    'smollm2-135m':  (SMOLLM2, 30, 9, 3, 576, 1536),
    'smollm2-360m':  (SMOLLM2, 32, 15, 5, 960, 2560),
    'smollm2-1.7b':  (dict(SMOLLM2, rope_theta=1.3e5), 24, 32, 32, 2048, 8192),
}
PRESETS = {name: GPTConfig(**family, **dict(zip(SIZES, sizes))) for name, (family, *sizes) in ROWS.items()}


# torch reports bf16 units of x86 alone; on other CPUs, such as a laptop's, fp32 is faster too
NO_BF16_UNITS = not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def lacks_bf16_units(device):
    """Return whether a torch.device has no bf16 units, so that fp32 is faster: many CPUs, and GPUs before
    sm_80. A GPU that is not here, as plan.py's, has them."""
    if device.type == 'cuda' and torch.cuda.is_available():
        return torch.cuda.get_device_capability(device) < (8, 0)
    return device.type == 'cpu' and NO_BF16_UNITS


class Linear(nn.Linear):
    """nn.Linear in its input's dtype. Every FP8 linear is compared with it, and computes as it does in
    evaluation."""

    def __init__(self, in_features, out_features, bias=True, name=''):
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self):
        pass  # GPT.init_weights sets every parameter by its name

    @staticmethod
    def plain(module, x):
        """Return y = x W^T + b in x's dtype. A CPU without bf16 units multiplies bf16 values in fp32: the
        sums are alike, and it takes a third of the time."""
        computed_in = torch.float32 if x.is_cpu and NO_BF16_UNITS else x.dtype
        parameters = module.weight, module.bias
        weight, bias = (None if p is None else p.to(x.dtype).to(computed_in) for p in parameters)
        return F.linear(x.to(computed_in), weight, bias).to(x.dtype)

    def forward(self, x):
        return self.plain(self, x)


class Norm(nn.Module):
    """LayerNorm, or RMSNorm (Zhang & Sennrich 2019), over a last dimension of `width`, computed in fp32."""

    def __init__(self, config, width):
        super().__init__()
        self.eps, self.rms = config.norm_eps, config.norm == 'rmsnorm'
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if config.bias and not self.rms else None

    def forward(self, x):
        shape, weight = self.weight.shape, self.weight.float()
        if self.rms:
            return F.rms_norm(x.float(), shape, weight, self.eps).to(x.dtype)
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), shape, weight, bias, self.eps).to(x.dtype)


class AddNorm(Norm):
    """A Norm of the residual stream, which first adds the output of the branch before it."""

    def forward(self, x, delta=None):
        """Return x + delta and its norm; x, delta (B, T, n_embd)."""
        if delta is not None:
            x = x + delta
        return x, super().forward(x)


def linear_then(linear, x, function, kernel):
    """Return function(linear(x)). A linear with a method `then` does both, by FP8's kernel of that name (see
    fp8gpt/fp8/kernels), and may return an object that only such a linear can take."""
    if hasattr(linear, 'then'):
        return linear.then(x, function, kernel)
    return function(linear(x))


def gelu(a):
    """Return GELU in the tanh form, as GPT-2 has it (Hendrycks & Gimpel 2016)."""
    return F.gelu(a, approximate='tanh')


def swiglu(gate_up):
    """Return silu(gate) * up of gate | up, which lie side by side (Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class Attention(nn.Module):
    """Causal self-attention. With n_kv_head < n_head, query heads share keys and values (Ainslie et al.
    2023). make(name) returns a linear of GPTConfig.block_linears."""

    def __init__(self, config, make):
        super().__init__()
        self.counts, self.head_dim = (config.n_head, config.n_kv_head, config.n_kv_head), config.head_dim
        self.qkv, self.proj = make('attn.qkv'), make('attn.proj')
        self.q_norm, self.k_norm = (
            Norm(config, config.head_dim) if config.qk_norm else nn.Identity() for _ in 'qk')

    def split(self, qkv):
        """Return views q, k, v (B, T, heads, head_dim) of qkv (B, T, width)."""
        return qkv.unflatten(-1, (-1, self.head_dim)).split(self.counts, dim=2)

    def forward(self, x, rope, cache, mask=None):
        """Return the branch's output for x (B, T, n_embd). rope: cos and sin, or None. cache: the block's
        keys and values and the number of tokens in them, or None. mask: of examples_mask; None: each token
        looks at all tokens before it."""
        q, k, v = linear_then(self.qkv, x, self.split, 'heads')             # (B, T, heads, head_dim)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))                    # (B, heads, T, head_dim)
        causal, shared = mask is None, k.shape[1] < q.shape[1]
        if cache is not None:
            keys, values, past = cache
            end = past + q.shape[2]
            keys[:, :, past:end], values[:, :, past:end] = k, v
            k, v = keys[:, :, :end], values[:, :, :end]
            causal = past == 0      # one new token looks at all keys; several begin an empty cache
        if shared and q.is_cuda and q.dtype == torch.float32:   # there, only math's kernels take shared heads
            times, shared = q.shape[1] // k.shape[1], False
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        if isinstance(mask, BlockMask):
            y = flex_attention(q, k, v, block_mask=mask, enable_gqa=shared)
        else:
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=shared)
        return self.proj(y.transpose(1, 2).flatten(2))


def examples_mask(examples, compiled):
    """Return the mask by which a token looks at the tokens before it in its own example (B, T):
    FlexAttention's blocks (Dong et al. 2024) where torch.compile makes a GPU kernel of them, else bool (B, 1,
    T, T)."""
    if compiled and examples.is_cuda:
        return block_mask(examples)
    B, T = examples.shape
    return create_mask(within(examples), B, None, T, T, device=examples.device)


def within(examples):
    """Return FlexAttention's function that says whether token q of row b looks at token k."""
    def looks_at(b, head, q, k):
        return (q >= k) & (examples[b, q] == examples[b, k])
    return looks_at


SIDE = 128      # tokens of a block of FlexAttention's masks


def block_mask(examples):
    """Return what create_block_mask makes of within(examples), without its (B, T, T) values. Examples (B, T)
    are numbered in order, so first and last tokens tell which blocks see any, or all, of each other."""
    B, T = examples.shape
    numbers = F.pad(examples, (0, -T % SIDE), value=T)      # an example behind all others
    first = numbers[:, None, ::SIDE]
    last = numbers[:, None, SIDE - 1::SIDE]
    some = (first[..., None] <= last[..., None, :]).tril()      # (B, 1, blocks of queries, blocks of keys)
    whole = (last[..., None] == first[..., None, :]).tril(-1)
    counts_and_places = []
    for blocks in (some & ~whole).int(), whole.int():
        places = blocks.argsort(dim=-1, descending=True, stable=True)
        counts_and_places += blocks.sum(-1, dtype=torch.int32), places.int()
    return BlockMask.from_kv_blocks(
        *counts_and_places,
        BLOCK_SIZE=SIDE,
        mask_mod=within(examples),
        seq_lengths=(T, T),
    )


def rope_tables(config, tokens):
    """Return cos and sin of RoPE's angles, each (tokens, 1, head_dim / 2)."""
    frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2, device='cpu') / config.head_dim)
    if config.rope_factor != 1:
        times = config.rope_original / (2 * math.pi / frequencies)  # that a wavelength fits into it
        kept = ((times - config.rope_low) / (config.rope_high - config.rope_low)).clamp(0, 1)
        frequencies = (1 - kept) * frequencies / config.rope_factor + kept * frequencies
    angles = torch.outer(torch.arange(tokens, device='cpu').float(), frequencies)[:, None]
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """Apply RoPE (Su et al. 2021) to x (B, T, heads, head_dim), with halves paired as in Llama. cos, sin: (T,
    1, half) or (B, T, 1, half)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Embedding(nn.Embedding):
    """nn.Embedding without initial values: to draw them on the device meta, torch imports torch._dynamo."""

    def reset_parameters(self):
        pass  # GPT.init_weights sets every parameter by its name


class MLP(nn.Module):
    """An MLP with GELU, or with SwiGLU, whose gate and up projections are one linear. make: see Attention."""

    def __init__(self, config, make):
        super().__init__()
        self.swiglu = config.mlp == 'swiglu'
        if self.swiglu:
            self.gate_up = make('mlp.gate_up')
        else:
            self.up = make('mlp.up')
        self.down = make('mlp.down')

    def forward(self, x):
        if self.swiglu:
            return self.down(linear_then(self.gate_up, x, swiglu, 'swiglu'))
        return self.down(linear_then(self.up, x, gelu, 'gelu'))


class Block(nn.Module):
    """A transformer block. It takes and returns the residual stream in two parts, x and delta, which is still
    to be added: so that an addition, the norm after it and FP8's cast can be one kernel."""

    def __init__(self, config, linear, name):
        super().__init__()
        norm, shapes = linear.norm(AddNorm) if hasattr(linear, 'norm') else AddNorm, config.block_linears()

        def make(part):
            k, n, bias = shapes[part]
            return linear(k, n, bias=bias, name=f'{name}.{part}')
        self.ln_1 = norm(config, config.n_embd)
        self.attn = Attention(config, make)
        self.ln_2 = norm(config, config.n_embd)
        self.mlp = MLP(config, make)

    def forward(self, x, delta, rope, cache, mask=None):
        """Return x and delta; x (B, T, n_embd), delta the same or None. rope, cache, mask: Attention's."""
        x, h = self.ln_1(x, delta)
        delta = self.attn(h, rope, cache, mask)
        x, h = self.ln_2(x, delta)
        return x, self.mlp(h)


class Penalty(nn.Module):
    """Adds z-loss to the gradient: logsumexp(z)^2 of each target's logits z, which keeps softmax's sum near 1
    (Chowdhery et al. 2022, section 5). `total` is the sum since it was last zeroed."""

    def __init__(self, weight, device='cpu'):
        super().__init__()
        self.weight = weight
        self.register_buffer('total', torch.zeros((), device=device), persistent=False)

    def forward(self, nats, logits, targets):
        """Return nats (), whose gradient is that of nats + weight * penalty. So every loss printed is a
        cross-entropy."""
        penalty = logits.logsumexp(-1).square().masked_fill(targets == -1, 0).sum()
        self.total += penalty.detach()
        return nats + self.weight * (penalty - penalty.detach())


LONGEST_ROW = 51_200    # logits that the registers of a program of fp8gpt/loss.py hold


def takes_kernel(logits):
    """Return whether fp8gpt/loss.py's kernel serves logits (M, V): in code that is compiled for a GPU."""
    if not (logits.is_cuda and torch.compiler.is_compiling()) or logits.shape[1] > LONGEST_ROW:
        return False
    from fp8gpt.loss import launches    # late: not every machine has Triton
    return launches(logits.device)


class HeadNats(torch.autograd.Function):
    """Computes the sum of cross-entropies in nats of h (M, C), a head's weight (V, C) and targets (M,), -1
    where there is none. padding (V,), -inf from vocab_size on, is added to each token's logits. Forward
    computes the gradients, too, but for the factor g of backward: a row of logits that it has summed is in
    registers or in cache, so compiled code moves 4 bytes a logit instead of 6."""

    @staticmethod
    def forward(ctx, h, weight, targets, padding, vocab_size):
        w = weight.to(h.dtype)
        share = F.linear(h, w)                                                          # logits (M, V)
        if takes_kernel(share):
            from fp8gpt.loss import nats_in_place
            nats = padding.new_empty(len(h))                                            # fp32
            nats_in_place(share, targets, nats, vocab_size)
        else:
            log_p, targets = (share.float() + padding).log_softmax(1), targets[:, None]
            keep, one_hot = targets != -1, torch.arange(len(w), device=h.device) == targets
            nats = -log_p.gather(1, targets.clamp(min=0)).masked_fill(~keep, 0)
            share = ((log_p.exp() - one_hot.float()) * keep).to(h.dtype)                # dlogits / g
        dh = share @ w                                                                  # (M, V) (V, C)
        dw = share.t() @ h if ctx.needs_input_grad[1] else None                         # (V, M) (M, C)
        ctx.save_for_backward(dh, dw)
        ctx.weight_dtype = weight.dtype
        return nats.sum()

    @staticmethod
    def backward(ctx, g):
        dh, dw = ctx.saved_tensors
        return dh * g, None if dw is None else dw.to(ctx.weight_dtype) * g, None, None, None


class ChunkedNats(torch.autograd.Function):
    """Computes GPT.head_nats chunk by chunk, so that only one chunk's logits exist at a time. Forward
    computes the gradients too, of h and of the head's `weights`, summed in fp32 (as Hsu et al. 2024)."""

    @staticmethod
    def forward(ctx, gpt, chunks, h, *weights):
        total, of_h, sums = 0, [], []
        for chunk, targets in chunks:
            with torch.enable_grad():
                chunk = chunk.detach().requires_grad_()
                nats = gpt.head_nats(chunk, targets)
            of_chunk, *of_weights = torch.autograd.grad(nats, (chunk, *weights))
            of_h.append(of_chunk)
            for gradient, more in zip(sums, of_weights):
                gradient += more
            sums = sums or [gradient.float() for gradient in of_weights]
            total = total + nats.detach()
        ctx.save_for_backward(torch.cat(of_h).view_as(h), *sums)
        ctx.dtypes = [w.dtype for w in weights]
        return total

    @staticmethod
    def backward(ctx, g):
        of_h, *sums = ctx.saved_tensors
        of_weights = [(gradient * g).to(dtype) for gradient, dtype in zip(sums, ctx.dtypes)]
        return None, None, of_h * g, *of_weights


def chunked_nats(gpt, h, targets):
    """Return head_nats in gpt.loss_chunks parts of the tokens, one after the other; in fewer parts where
    these would be below 16 tokens."""
    h, targets = h.flatten(0, -2), targets.flatten()
    rows = 16 * math.ceil(len(h) / gpt.loss_chunks / 16)    # FP8's multiple
    chunks = list(zip(h.split(rows), targets.split(rows)))
    if not torch.is_grad_enabled():
        return sum(gpt.head_nats(*chunk) for chunk in chunks)
    weights = [p for p in gpt.lm_head.parameters() if p.requires_grad]
    return ChunkedNats.apply(gpt, chunks, h, *weights)


class GPT(nn.Module):
    """A GPT of GPTConfig `config`, whose linears a factory `linear` makes.

    dtype: of the activations. seed: of the initial weights; with None, load_weights must give all of them.
    checkpoint_every: of every so many blocks, the first drops its activations and recomputes them in backward
    (Chen et al. 2016); 0: none does. checkpoint: what recomputes instead of torch.utils.checkpoint's.
    param_dtype: of the parameters. loss_chunks: the number of parts of the tokens, of which only one part's
    logits exist at a time."""

    def __init__(self, config, linear=Linear, dtype=torch.bfloat16, seed=0,
                 checkpoint_every=0, checkpoint=None, param_dtype=torch.float32, loss_chunks=1):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.checkpoint_every, self.checkpoint = checkpoint_every, checkpoint or recompute
        self.compiled = False
        self.loss_chunks, self.penalty = loss_chunks, None     # a Penalty, where a run has one
        self.wte = Embedding(config.padded_vocab_size, config.n_embd)
        if config.position == 'learned':
            self.wpe = Embedding(config.block_size, config.n_embd)
        else:
            self.make_rope(min(config.block_size, 8192))
        self.h = nn.ModuleList(Block(config, linear, f'h.{i}') for i in range(config.n_layer))
        self.ln_f = AddNorm(config, config.n_embd)
        self.lm_head = linear(config.n_embd, config.padded_vocab_size, bias=False, name='lm_head')
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        for p in self.parameters():
            p.data = p.data.to(param_dtype)
        if seed is not None:
            self.init_weights(seed)

    def _apply(self, fn, recurse=True):
        """Apply fn to all tensors, as every cast and move of a module does; the compute dtype follows, so
        that model.float() computes in fp32."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        super()._apply(fn, recurse)
        if self.config.position == 'rope':      # in fp32 in every model; to_empty gives no values
            self.make_rope(len(self.rope_cos))
        return self

    def make_rope(self, tokens):
        """Make RoPE's tables for sequences of so many tokens; few sequences reach the end of a long model."""
        for name, table in zip(('rope_cos', 'rope_sin'), rope_tables(self.config, tokens)):
            self.register_buffer(name, table.to(self.wte.weight.device), persistent=False)

    @torch.no_grad()
    def init_weights(self, seed):
        """Initialise as GPT-2: N(0, 0.02), over sqrt(2 n_layer) for what writes to the residual stream,
        biases 0.

        Each parameter draws from its own generator, seeded by its name: so neither the order of construction
        nor the factory changes a value."""
        for name, p in self.named_parameters():
            if p.dim() < 2:
                p.fill_(0.0 if name.endswith('bias') else 1.0)
                continue
            std = 0.02
            if name.endswith(('proj.weight', 'down.weight')):
                std /= math.sqrt(2 * self.config.n_layer)
            generator = torch.Generator().manual_seed(zlib.crc32(f'{seed} {name}'.encode()))
            p.copy_(torch.empty(p.shape).normal_(0.0, std, generator=generator))

    def compile(self, **options):
        """Put each block, the embedding, and the head with its loss under torch.compile, as graphs of their
        own.

        All blocks but the first, which has nothing to add, share one graph, so start-up takes seconds for any
        depth, and DDP reduces a block's gradients while the next one's are computed. options:
        torch.compile's."""
        options = {'dynamic': False, **options}
        self.compiled = True
        # all blocks run the same code: beyond the limit, Dynamo would run new shapes in eager mode in silence
        torch._dynamo.config.recompile_limit = 64
        for module in (*self.h, self.ln_f):
            module.compile(**options)
        for name in ('embed', 'head', 'head_nats'):
            setattr(self, name, torch.compile(getattr(self, name), **options))

    @contextlib.contextmanager
    def eager(self):
        """Run uncompiled inside the context: for sampling, whose shapes change, and for hooks on single
        linears."""
        if not self.compiled:
            yield
            return
        self.compiled = False
        try:
            with torch.compiler.set_stance('force_eager'):
                yield
        finally:
            self.compiled = True

    def embed(self, idx, past, examples=None):
        """Return x (B, T, n_embd) in the compute dtype, and rope, (cos, sin) or None, of idx (B, T), which
        `past` tokens precede."""
        at = slice(past, past + idx.shape[1])
        if examples is not None:    # the position of each token in its example, (B, T)
            examples = examples.contiguous()
            at = torch.arange(idx.shape[1], device=idx.device) - torch.searchsorted(examples, examples)
        x, rope = self.wte(idx), None
        if self.config.position == 'learned':
            x = x + self.wpe.weight[at]
        else:
            rope = self.rope_cos[at], self.rope_sin[at]
        return x.to(self.dtype), rope

    def head(self, x, delta, targets=None):
        """Return the logits (B, T, vocab_size), fp32, of what the last block returns; with targets, its
        head_nats."""
        _, h = self.ln_f(x, delta)
        if targets is not None:
            return self.head_nats(h, targets)
        return self.lm_head(h)[..., :self.config.vocab_size].float()    # the padding ends here

    def head_nats(self, h, targets):
        """Return the sum of the targets' cross-entropies, of normed h (..., n_embd). A head that takes
        targets computes them itself, unless a penalty wants the logits. The gradient includes the penalty's.
        """
        vocab_size, padded = self.config.vocab_size, self.config.padded_vocab_size
        if self.penalty is None and getattr(self.lm_head, 'takes_targets', False):
            return self.lm_head(h, targets, vocab_size)
        # Not scores[..., :vocab_size]: torch.compile would load parts of rows of 50,304 2 bytes at a time. A
        # mask's backward pass copies all of them, and of filled ones torch.compile keeps fp32 copies.
        padding = torch.where(torch.arange(padded, device=h.device) < vocab_size, 0.0, -math.inf)
        if self.compiled and self.penalty is None and torch.is_grad_enabled():
            h, targets = h.flatten(0, -2), targets.flatten()
            return HeadNats.apply(h, self.lm_head.weight, targets, padding, vocab_size)
        scores = self.lm_head(h).float()
        scores += padding
        nats = F.cross_entropy(scores.flatten(0, -2), targets.flatten(), ignore_index=-1, reduction='sum')
        if self.penalty is not None and torch.is_grad_enabled():     # validation goes without
            return self.penalty(nats, scores, targets)
        return nats

    def forward(self, idx, targets=None, n_targets=None, examples=None, cache=None, past=0):
        """Return logits (B, T, vocab_size), fp32, of idx (B, T) int64; with targets, the loss, a scalar.

        targets (B, T), -1 where there is none: the loss is the sum of their cross-entropies in nats over
        n_targets, by default the number of targets here. examples (B, T): the number of each token's example
        in its window, ascending from 0; attention and positions keep within an example. cache: keys and
        values (n_layer, 2, B, n_kv_head, length, head_dim) of `past` tokens, which idx continues; T must be 1
        if there are any. The logits are then the last token's alone, (B, 1, vocab_size). Raises ValueError
        for more than block_size tokens."""
        end = past + idx.shape[1]
        if end > self.config.block_size:
            raise ValueError(f'{end} tokens, but block_size is {self.config.block_size}')
        if self.config.position == 'rope' and end > len(self.rope_cos):
            self.make_rope(min(self.config.block_size, 2 * end))
        x, rope = self.embed(idx, past, examples)
        delta, mask = None, None if examples is None else examples_mask(examples, self.compiled)
        for i, block in enumerate(self.h):
            inputs = rope, None if cache is None else (*cache[i], past), mask
            if self.checkpoint_every and i % self.checkpoint_every == 0 and torch.is_grad_enabled():
                x = x if delta is None else x + delta           # one tensor to keep, not two
                x, delta = self.checkpoint(block, x, None, *inputs, use_reentrant=False)
            else:
                x, delta = block(x, delta, *inputs)
        if cache is not None:
            x, delta = x[:, -1:], delta[:, -1:]
        if targets is None:
            return self.head(x, delta)
        if n_targets is None:
            n_targets = (targets != -1).sum()
        if self.loss_chunks == 1:
            return self.head(x, delta, targets) / n_targets
        _, h = self.ln_f(x, delta)
        return chunked_nats(self, h, targets) / n_targets

    def weights(self):
        """Return name -> parameter that trains, a tied one once. A checkpoint holds these, the same for every
        factory."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def load_weights(self, weights):
        """Copy name -> tensor into the parameters. Raises SettingError where names or shapes differ."""
        own = self.weights()
        odd = sorted(own.keys() ^ weights.keys())
        if odd:
            raise SettingError(f'these weights are another model\'s: {len(odd)} names differ, {odd[0]} first')
        for name, p in own.items():
            tensor = weights[name]  # once: it may be read from a file only now
            if tensor.shape != p.shape:
                raise SettingError(f'these weights are another model\'s: {name} is of another shape')
            p.copy_(tensor)


# -------------------------------------------------------------------------------------------------- sampling

# for one token's query: cuDNN plans anew, at some 22 ms, for each number of keys
NOT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def pick(logits, temperature, top_k, top_p, generators):
    """Return the next tokens, (B, 1), of logits (B, vocab_size), by a generator a row; see generate."""
    if not logits.max().isfinite():     # CUDA would end the process in an assertion of multinomial's
        raise SettingError('the model computes NaN or infinity, as one does whose training diverged: take an '
                           'earlier checkpoint')
    if temperature < 1e-30:     # the quotients would be infinite
        return logits.argmax(-1, keepdim=True)
    logits, ids = logits / temperature, None
    if top_k or top_p < 1:
        most = logits.shape[-1]
        logits, ids = logits.topk(min(top_k or most, most))   # likeliest first
        p = logits.softmax(-1)
        logits = logits.masked_fill(p.cumsum(-1) - p >= top_p, -math.inf)
    choice = torch.stack([torch.multinomial(row, 1, generator=generator)
                          for row, generator in zip(logits.softmax(-1), generators)])
    return choice if ids is None else ids.gather(1, choice)


def generate(gpt, idx, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, seed=0, stops=()):
    """Yield up to max_new_tokens tensors (B,) that continue idx (B, T).

    temperature 0 takes the likeliest token; top_k > 0 draws among the k likeliest, top_p < 1 among the fewest
    that hold p of the probability (Holtzman et al. 2020). Row i draws by seed + i, as a single row with that
    seed does. Rows that reach one of `stops` repeat the first of these, and generation ends with the last
    row. Past block_size, the window moves on by half a block. Raises SettingError for logits of NaN."""
    c, most, past = gpt.config, gpt.config.block_size, 0
    seen = tokens = idx[:, -most:]
    length = min(most, seen.shape[1] + max_new_tokens)
    shape = c.n_layer, 2, len(idx), c.n_kv_head, length, c.head_dim     # 2: keys and values
    cache = torch.empty(shape, dtype=gpt.dtype, device=idx.device)
    generators = [torch.Generator(idx.device).manual_seed(seed + row) for row in range(len(idx))]
    done = idx[:, 0] < 0        # none yet
    ends = torch.tensor(stops or [-1], device=idx.device)
    for _ in range(max_new_tokens):
        if past + tokens.shape[1] > most:
            past, tokens = 0, seen[:, -(most // 2):]
        with torch.no_grad(), gpt.eager(), sdpa_kernel(NOT_CUDNN):
            logits = gpt(tokens, cache=cache, past=past)[:, -1]                  # (B, vocab_size)
        past += tokens.shape[1]
        tokens = pick(logits, temperature, top_k, top_p, generators)             # (B, 1)
        tokens = tokens.masked_fill(done[:, None], ends[0])
        done = torch.isin(tokens[:, 0], ends)
        seen = torch.cat([seen, tokens], dim=1)[:, -most:]
        yield tokens[:, 0]
        if done.all():
            return
