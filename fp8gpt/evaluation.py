"""Evaluate a model that trains, on all ranks: each calls these functions, since weights may be sharded."""
import torch

from configurator import MachineError
from fp8gpt import data, distributed, runlog
from model import generate


@torch.no_grad()
def validation_loss(model, val_data, tokens, batch_size, ranks):
    """Return the mean cross-entropy, in nats, over about `tokens` tokens of a TokenData in fixed windows."""
    dtype = torch.float32 if ranks.device.type == 'mps' else torch.float64     # Apple's GPUs have no float64
    total = torch.zeros(2, dtype=dtype, device=ranks.device)    # nats, targets
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


@torch.no_grad()
def check_causality(model, block_size, device):
    """Raise MachineError where a GPT's last token changes the logits of tokens before it: attention of torch
    2.10 did so on Apple GPUs, in bf16 (pytorch/pytorch#195910). It is tried with 64 and block_size tokens."""
    for tokens in min(64, block_size), block_size:
        idx = torch.randint(model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
        logits = model(idx.to(device))
        idx[0, -1] = (idx[0, -1] + 1) % model.config.vocab_size
        if not torch.equal(model(idx.to(device))[:, :-1], logits[:, :-1]):
            raise MachineError(f'on {device}, attention of torch {torch.__version__} sees later tokens '
                               '(pytorch/pytorch#195910): install another version, or try --dtype=fp32')
