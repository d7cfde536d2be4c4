"""Evaluate a model that trains, on all ranks: each calls these functions, since weights may be sharded."""
import torch

from fp8gpt import data, distributed, runlog
from model import generate


@torch.no_grad()
def validation_loss(model, val_data, tokens, batch_size, ranks):
    """Return the mean cross-entropy, in nats, over about `tokens` tokens of a TokenData in fixed windows."""
    total = torch.zeros(2, dtype=torch.float64, device=ranks.device)  # nats, targets
    batches = data.eval_batches(val_data, tokens, batch_size, **vars(ranks))
    for x, y, examples in runlog.bar(batches, 'validation'):
        nats = model(x, y, n_targets=1, examples=examples)
        total += torch.stack([nats, (y != -1).sum()])
    nats, targets = distributed.sum_over_ranks(total).tolist()
    return nats / targets


def sample_text(model, tokenizer, device, seed):
    """Return 64 tokens of text that the model writes from nothing."""
    idx = torch.full((1, 1), tokenizer.start, device=device)
    tokens = generate(model, idx, 64, temperature=0.8, seed=seed)
    return tokenizer.decode([t.item() for t in runlog.bar(tokens, 'sample')])
