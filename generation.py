"""Text from a model: a cache of keys and values, the choice of a token, the loop.

    for ids in generate(model, idx, max_new_tokens=64):     # ids (B,), one more a row of idx (B, T)
"""
import math

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# for one token's query: cuDNN plans anew, at some 22 ms, for each number of keys
NOT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class KVCache:
    """Keys and values of the tokens seen: `kv` (n_layer, 2, B, n_kv_head, max_tokens, head_dim), of which
    `length` tokens are filled."""

    def __init__(self, config, batch_size, max_tokens, dtype, device):
        shape = (config.n_layer, 2, batch_size, config.n_kv_head, max_tokens, config.head_dim)
        self.kv = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0


def pick(logits, temperature, top_k, top_p, generator):
    """The next tokens, (B, 1), from logits (B, vocab_size); see generate."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits, ids = logits / temperature, None
    if top_k or top_p < 1:
        most = logits.shape[-1]
        logits, ids = logits.topk(min(top_k or most, most))   # likeliest first
        p = logits.softmax(-1)
        logits = logits.masked_fill(p.cumsum(-1) - p >= top_p, -math.inf)
    choice = torch.multinomial(logits.softmax(-1), 1, generator=generator)
    return choice if ids is None else ids.gather(1, choice)


@torch.no_grad()
def generate(gpt, idx, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, seed=0, stops=()):
    """Yields up to max_new_tokens tensors (B,) that continue idx (B, T).

    temperature 0 takes the likeliest token; top_k > 0 draws among the k likeliest, top_p < 1 among the
    fewest that hold p of the probability (Holtzman et al. 2020). Rows that reach one of `stops` repeat the
    first of these, and the generation ends with the last row. Past block_size, the window moves on by half a
    block."""
    most = gpt.config.block_size
    seen = tokens = idx[:, -most:]
    longest = min(most, seen.shape[1] + max_new_tokens)
    cache = KVCache(gpt.config, len(idx), longest, gpt.dtype, idx.device)
    generator = torch.Generator(idx.device).manual_seed(seed)
    done = torch.zeros(len(idx), dtype=torch.bool, device=idx.device)
    ends = torch.tensor(stops, device=idx.device)
    for _ in range(max_new_tokens):
        if cache.length + tokens.shape[1] > most:
            cache = KVCache(gpt.config, len(idx), most, gpt.dtype, idx.device)
            tokens = seen[:, -max(1, most // 2):]
        with sdpa_kernel(NOT_CUDNN):
            logits = gpt(tokens, cache=cache)[:, -1]                             # (B, vocab_size)
        tokens = pick(logits, temperature, top_k, top_p, generator)              # (B, 1)
        if stops:
            tokens = tokens.masked_fill(done[:, None], stops[0])
            done = torch.isin(tokens[:, 0], ends)
        seen = torch.cat([seen, tokens], dim=1)[:, -most:]
        yield tokens[:, 0]
        if stops and done.all():
            return
