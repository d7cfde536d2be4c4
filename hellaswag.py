"""HellaSwag (Zellers et al. 2019): which of four endings is likeliest to a checkpoint? Chance is 0.25.

$ python hellaswag.py --ckpt=checkpoints_fp8/latest.pt --data=data/hellaswag/hellaswag_val.jsonl
$ python hellaswag.py --ckpt=meta-llama/Llama-3.2-1B       # of the hub; or a folder
$ torchrun --standalone --nproc_per_node=8 hellaswag.py    # ranks share the items

Text and tokens are lm-evaluation-harness's, zero-shot: "activity_label: ctx_a Ctx_b" + " " + ending,
with nothing before it but the tokens that tokenizer.json itself adds (Llama's BOS). The score of an ending is
the sum of its tokens' log-probabilities. Each figure is the share of items whose right ending has the largest

    acc        sum, as in the harness
    acc_norm   sum per UTF-8 byte of the ending. (The harness's code counts characters, and calls
               bytes acc_bytes; only non-ASCII endings tell them apart, and 181 of the 10,042 items
               have one.)
    acc_token  mean over its tokens, as in build-nanogpt. Its text, though, is ctx as it stands,
               without the label: its figure (0.2955 for GPT-2 124M) is close to this one, not equal
"""
from configurator import MachineError, MissingError, configure, say

ckpt = 'checkpoints_fp8/latest.pt'  # a checkpoint, or a Hugging Face model; evaluated in bf16
data = 'data/hellaswag/hellaswag_val.jsonl'     # one item per line, as prepare_data.py fetches them
hellaswag_items = 10_042    # >= 1: how many, from the first; 10,042 is all
batch_size = 16         # >= 1: rows (endings) per forward: 16 * 256 tokens * 50257 fp32 logits are 0.8 GB
device = 'auto'         # auto (cuda, else cpu) | cuda | cpu
# imported, it leaves the command line alone
config = configure(__file__, None if __name__ == '__main__' else [])

if __name__ == '__main__':
    from fp8gpt.tokenizer import check_exists
    check_exists(config['ckpt'])

# Imported only now: --help and a mistyped setting are answered without waiting for torch.
import itertools
import json
import math
import os
import re
import time

import numpy as np
import torch
import torch.nn.functional as F

from fp8gpt import distributed, pretrained, runlog

FIGURES = ('acc', 'acc_norm', 'acc_token')


# ------------------------------------------------------------------------------ text

def clean(text):
    """Return a text without WikiHow's marks, as the harness does: ' [title]' becomes the end of a sentence,
    other [tags] are removed, two spaces become one."""
    text = text.strip().replace(' [title]', '. ')
    return re.sub(r'\[.*?\]', '', text).replace('  ', ' ')


def render(row):
    """Return (context, four endings, label) of a row of the file. A row without ctx_a and ctx_b has ctx,
    which is taken as it is; the harness begins ctx_b with a capital letter."""
    context = row['ctx_a'] + ' ' + row['ctx_b'].capitalize() if 'ctx_a' in row else row['ctx']
    endings, label = [clean(ending) for ending in row['endings']], str(row['label'])    # the hub has a text
    if not isinstance(row['endings'], list) or len(endings) != 4 or label not in ('0', '1', '2', '3'):
        raise ValueError(f'{len(endings)} endings, label {label}')
    return clean(row['activity_label'] + ': ' + context), endings, int(label)


def read_items(path, limit=None):
    """Return [(context, endings, label)] of the first `limit` items; None: of all. Raises MissingError, or
    MachineError that names the line."""
    if not os.path.isfile(path):
        raise MissingError(f'there is no {path}: `python prepare_data.py hellaswag` fetches it')
    items = []
    with open(path, 'rb') as file:
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        for number, line in itertools.islice(lines, limit):
            try:
                items.append(render(json.loads(line)))
            except Exception as error:      # of any kind, as a stranger's file has it
                raise MachineError(f'{path}, line {number} is not a HellaSwag item ({error!r:.200}); '
                                   '`python prepare_data.py hellaswag --overwrite` fetches them') from None
    if not items:
        raise MachineError(f'{path} is empty: fetch it by `python prepare_data.py hellaswag --overwrite`')
    return items


def encode(tokenizer, context, ending):
    """Return (tokens of context and ending, number of the ending's tokens, 1 at least), split where the
    harness splits them. An ending that joins the context's last tokens, so that the harness fails, begins
    with the first token that is another. One token at least stands before it."""
    ids, whole = (tokenizer.encode(text).tolist() for text in (context.rstrip(), f'{context} {ending}'))
    if len(whole) > len(ids):
        whole[:len(ids)] = ids
    n = max(1, len(whole) - len(os.path.commonprefix([ids, whole])))
    tokens = [*tokenizer.prefix, *whole]
    return [tokenizer.start, *tokens] if n == len(tokens) else tokens, n


# ------------------------------------------------------------------------------ scores

@torch.no_grad()
def score(model, rows, device, batch_size, rank=0, world_size=1):
    """Return the log-probability of each row's last n tokens, (len(rows),) fp32, on every rank.

    rows: [(at most block_size + 1 tokens, n)], the same on every rank; the last token of a row is only a
    target. Every forward takes batch_size rows of 64, 128, 256, ... or block_size tokens, so that
    torch.compile sees few shapes. Padding follows the row, where causal attention hides it. Every rank makes
    the same number of forwards, because ranks may share the weights."""
    lengths = np.array([len(tokens) - 1 for tokens, _ in rows])
    by_length = np.argsort(lengths, kind='stable')
    scores = torch.zeros(len(rows), device=device)
    most = math.ceil(len(rows) / batch_size / world_size)
    for number in runlog.bar(range(rank, most * world_size, world_size), 'HellaSwag'):
        batch = by_length[number * batch_size:(number + 1) * batch_size]  # empty past the end
        longest = int(lengths[batch].max(initial=1))
        T = min(max(64, 1 << (longest - 1).bit_length()), model.config.block_size)
        whole = np.zeros((batch_size, T + 1), np.int64)
        for row, i in zip(whole, batch):
            row[:lengths[i] + 1] = rows[i][0]
        # one copy, targets too, and none for which the host waits
        whole = torch.from_numpy(whole).to(device, non_blocking='cuda' in str(device))
        logits = model(whole[:, :-1])                           # (batch_size, T, vocab_size)
        for row, targets, i in zip(logits, whole[:, 1:], batch):
            scored = slice(lengths[i] - rows[i][1], lengths[i])
            scores[i] = -F.cross_entropy(row[scored], targets[scored], reduction='none').sum()
    return distributed.sum_over_ranks(scores).cpu().numpy()


def evaluate(model, tokenizer, path, device, rank=0, world_size=1, batch_size=16, limit=None):
    """Return {'acc', 'acc_norm', 'acc_token', 'items', 'note': a line to print with them, or ''}, the same on
    every rank; each calls this with its number. A row that is longer than block_size loses its first tokens,
    as in the harness.

    model: a GPT, compiled or not; FP8 linears must be paused (fp8.paused), else padding changes their scales.
    path: the file of items. Raises MissingError and MachineError (see read_items)."""
    items = read_items(path, limit)
    longest = model.config.block_size + 1
    pairs = [(context, ending) for context, endings, _ in items for ending in endings]
    whole = [encode(tokenizer, *pair) for pair in pairs]
    rows = [(tokens[-longest:], min(n, longest - 1)) for tokens, n in whole]
    sums = score(model, rows, device, batch_size, rank=rank, world_size=world_size)     # (4 len(items),)
    n_bytes = np.array([len(ending.encode('utf-8', 'replace')) for _, ending in pairs])
    n_tokens = np.array([n for _, n in rows])
    values = np.stack([sums, sums / n_bytes, sums / n_tokens], 1).reshape(-1, 4, 3)
    labels = np.array([label for _, _, label in items])
    right = (values.argmax(1) == labels[:, None]).mean(0)       # (3,)
    right[np.isnan(values).any((0, 1))] = math.nan      # of which argmax takes the first for the largest
    cut = sum(len(tokens) > longest for tokens, _ in whole)
    note = f'{cut:,} contexts with an ending are longer than block_size: cut on the left' if cut else ''
    return {**dict(zip(FIGURES, right.tolist())), 'items': len(items), 'note': note}


def accuracy_line(result):
    """Return the line to print; after ± stands half of a 95% interval, 1.96 sqrt(p (1 - p) / items)."""
    figures = []
    for name in FIGURES:
        p = result[name]
        half = 1.96 * (p * (1 - p) / result['items']) ** 0.5
        figures.append(f'{name} {p:.4f} ±{half:.4f}')
    return f'HellaSwag {result["items"]:,} items: {" | ".join(figures)}'


if __name__ == '__main__':
    ranks = distributed.init(config['device'])
    state, about = pretrained.opened(config['ckpt'])
    # fp32 parameters, bf16 activations: as in training
    model = pretrained.model_of(state, ranks.device)
    start = time.perf_counter()
    result = evaluate(
        model,
        pretrained.tokenizer_of(config['ckpt'], state),
        config['data'],
        batch_size=config['batch_size'],
        limit=config['hellaswag_items'],
        **vars(ranks),
    )
    seconds = time.perf_counter() - start
    if ranks.main:
        say(about)
        if result['note']:
            print(f'# {result["note"]}')
        rate = result['items'] / seconds
        print(f'{accuracy_line(result)} | {seconds:.1f} s, {rate:,.1f} items/s')
    distributed.leave()
