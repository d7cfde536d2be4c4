"""The loss of a model's head: cross-entropy of the targets, whole or in chunks of the tokens."""
import math

import torch
import torch.nn.functional as F
from torch.autograd import Function


def head_nats(gpt, h, targets):
    """h (..., n_embd), normed -> the sum of the targets' cross-entropies; of a head that can take them, its
    own."""
    if getattr(gpt.lm_head, 'takes_targets', False):
        return gpt.lm_head(h, targets, gpt.config.vocab_size)
    scores = gpt.lm_head(h)[..., :gpt.config.vocab_size].float()
    return F.cross_entropy(scores.flatten(0, -2), targets.flatten(), ignore_index=-1, reduction='sum')


class ChunkedNats(Function):
    """head_nats chunk by chunk, of whose logits one chunk's are there at a time: forward computes the
    gradients too, with respect to h and to the head's `weights`, whose sum is fp32 (as Hsu et al. 2024)."""

    @staticmethod
    def forward(ctx, head_nats, gpt, chunks, h, *weights):
        total, of_h, sums = 0, [], [torch.zeros_like(w, dtype=torch.float32) for w in weights]
        for chunk, targets in chunks:
            with torch.enable_grad():
                chunk = chunk.detach().requires_grad_()
                nats = head_nats(gpt, chunk, targets)
            of_chunk, *of_weights = torch.autograd.grad(nats, (chunk, *weights))
            of_h.append(of_chunk)
            for gradient, more in zip(sums, of_weights):
                gradient += more
            total = total + nats.detach()
        ctx.save_for_backward(torch.cat(of_h).view_as(h), *sums)
        ctx.dtypes = [w.dtype for w in weights]
        return total

    @staticmethod
    def backward(ctx, g):
        of_h, *sums = ctx.saved_tensors
        of_weights = [gradient.mul_(g).to(dtype) for gradient, dtype in zip(sums, ctx.dtypes)]
        return None, None, None, of_h * g, *of_weights


def chunked_nats(head_nats, gpt, h, targets):
    """head_nats of gpt.loss_chunks parts of the tokens, one after the other; fewer of less than 16."""
    h, targets = h.flatten(0, -2), targets.flatten()
    rows = 16 * math.ceil(len(h) / gpt.loss_chunks / 16)    # FP8's multiple
    chunks = list(zip(h.split(rows), targets.split(rows)))
    if not torch.is_grad_enabled():
        return sum(head_nats(gpt, *chunk) for chunk in chunks)
    weights = [p for p in gpt.lm_head.parameters() if p.requires_grad]
    return ChunkedNats.apply(head_nats, gpt, chunks, h, *weights)
