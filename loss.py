"""The loss of a model's head: cross-entropy and, with penalty_weight, a penalty on each target's logits z.

    z_loss      logsumexp(z)^2, which keeps softmax's sum near 1 (Chowdhery et al. 2022, section 5)
    logit_l2    mean of z^2 over the vocabulary (logit squeezing: Kannan et al. 2018)
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import Function


class Penalty(nn.Module):
    """total: of the targets' penalties since it was last zeroed."""

    def __init__(self, kind, weight, device='cpu'):
        super().__init__()
        self.kind, self.weight = kind, weight
        self.register_buffer('total', torch.zeros((), device=device), persistent=False)

    def forward(self, nats, logits, targets):
        """nats (), with the gradient of nats + weight * penalty: so that every loss told is cross-entropy."""
        each = logits.logsumexp(-1).square() if self.kind == 'z_loss' else logits.square().mean(-1)
        penalty = each.masked_fill(targets == -1, 0).sum()
        self.total += penalty.detach()
        return nats + self.weight * (penalty - penalty.detach())


def head_nats(gpt, h, targets):
    """h (..., n_embd), normed -> the sum of the targets' cross-entropies; of a head that can take them, its
    own. Its gradient is that of gpt.penalty, too."""
    if getattr(gpt.lm_head, 'takes_targets', False):
        return gpt.lm_head(h, targets, gpt.config.vocab_size)
    scores = gpt.lm_head(h)[..., :gpt.config.vocab_size].float()
    nats = F.cross_entropy(scores.flatten(0, -2), targets.flatten(), ignore_index=-1, reduction='sum')
    if gpt.penalty is not None and torch.is_grad_enabled():     # validation goes without
        return gpt.penalty(nats, scores, targets)
    return nats


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
