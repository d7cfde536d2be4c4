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
from configurator import MachineError, MissingError, configure

ckpt = 'checkpoints_fp8/latest.pt'  # a checkpoint, or a Hugging Face model; evaluated in bf16
data = 'data/hellaswag/hellaswag_val.jsonl'     # one item per line, as prepare_data.py fetches them
limit = 0               # >= 0: items, from the first; 0 = all
batch_size = 16         # >= 1: rows (endings) per forward: 16 * 256 tokens * 50257 fp32 logits are 0.8 GB
device = 'auto'         # auto (cuda, else cpu) | cuda | cpu
# imported, it leaves the command line alone
config = configure(__file__, None if __name__ == '__main__' else [])

# Imported only now: --help and a mistyped setting are answered without waiting for torch.
import collections
import json
import os
import re
import time

import numpy as np
import torch
import torch.nn.functional as F

from fp8gpt import distributed, lora, runlog
from model import GPT, GPTConfig

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
    endings, label = [clean(ending) for ending in row['endings']], int(row['label'])
    if len(endings) != 4 or label not in range(4):
        raise ValueError(f'{len(endings)} endings, label {label}')
    return clean(row['activity_label'] + ': ' + context), endings, label


def read_items(path, limit=0):
    """Return [(context, endings, label)] of the first `limit` items; 0: of all. Raises MissingError, or
    MachineError that names the line."""
    if not os.path.isfile(path):
        raise MissingError(f'there is no {path}: `python prepare_data.py hellaswag` fetches it')
    items = []
    with open(path, 'rb') as file:
        lines = file.readlines()
    for number, line in enumerate(lines, 1):
        if not line.strip() or limit and len(items) == limit:
            continue
        try:
            items.append(render(json.loads(line)))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise MachineError(f'{path}, line {number} is not a HellaSwag item ({error!r}); '
                               '`python prepare_data.py hellaswag --overwrite` fetches them again') from None
    if not items:
        raise MachineError(f'{path} is empty: fetch it by `python prepare_data.py hellaswag --overwrite`')
    return items


def encode(tokenizer, context, ending):
    """Return (tokens of context and ending, number of the ending's tokens), split where the harness splits
    them."""
    ids = tokenizer.encode(context.rstrip()).tolist()
    tail = tokenizer.encode(f'{context} {ending}').tolist()[len(ids):]
    return [*tokenizer.prefix, *ids, *tail], len(tail)


# ------------------------------------------------------------------------------ scores

@torch.no_grad()
def score(model, rows, device, batch_size):
    """Return the log-probability of each row's last n tokens, (len(rows),) float64.

    rows: [(at most block_size + 1 tokens, n)]. Every forward takes batch_size rows of 64, 128, 256, ... or
    block_size tokens, so that torch.compile sees few shapes; the last token of a row is only a target.
    Padding follows the row, where causal attention hides it. Every rank makes the same number of forwards,
    because ranks may share the weights."""
    buckets = collections.defaultdict(list)
    for i, (tokens, _) in enumerate(rows):
        power = 1 << (len(tokens) - 2).bit_length()
        buckets[min(max(64, power), model.config.block_size)].append(i)
    scores = np.zeros(len(rows))
    forwards = []
    for T in sorted({min(64 << n, model.config.block_size) for n in range(32)}):
        most = -distributed.smallest_of_ranks(-len(buckets[T]))
        forwards += [(T, start) for start in range(0, most, batch_size)]
    for T, start in runlog.bar(forwards, 'HellaSwag'):
        batch = buckets[T][start:start + batch_size]            # empty where other ranks have more
        idx = torch.zeros((batch_size, T), dtype=torch.long)
        targets = torch.full((batch_size, T), -1)               # where the endings' tokens are predicted
        for b, i in enumerate(batch):
            tokens, n = torch.tensor(rows[i][0]), rows[i][1]
            end = len(tokens) - 1
            idx[b, :end] = tokens[:-1]
            targets[b, end - n:end] = tokens[-n:]
        logits = model(idx.to(device))                          # (batch_size, T, vocab_size)
        row, at = torch.nonzero(targets != -1, as_tuple=True)
        right = targets[row, at].to(device)                     # (tokens of all the endings,)
        losses = F.cross_entropy(logits[row, at], right, reduction='none').double().cpu()
        sums = torch.zeros(batch_size, dtype=torch.double).index_add(0, row, losses)
        scores[batch] = -sums[:len(batch)]
    return scores


def picks(model, tokenizer, items, device, batch_size):
    """Return the endings that acc, acc_norm and acc_token pick, (len(items), 3) int, and the number of rows
    that were longer than block_size and lost their first tokens, as in the harness."""
    longest, cut = model.config.block_size + 1, 0
    rows, n_bytes = [], []
    for context, endings, _ in items:
        for ending in endings:
            tokens, n = encode(tokenizer, context, ending)
            cut += len(tokens) > longest
            rows.append((tokens[-longest:], min(n, longest - 1)))
            n_bytes.append(len(ending.encode('utf-8', 'replace')))
    sums = score(model, rows, device, batch_size)               # (4 len(items),)
    n_tokens = np.array([n for _, n in rows])
    values = np.stack([sums, sums / np.array(n_bytes), sums / n_tokens], 1)
    return values.reshape(-1, 4, 3).argmax(1), cut


# ------------------------------------------------------------------------------ figures

def evaluate(model, tokenizer, path, device, rank=0, world_size=1, batch_size=16, limit=0):
    """Return {'acc', 'acc_norm', 'acc_token', 'items', 'note': a line to print with them, or ''} over all
    ranks; each calls this with its number.

    model: a GPT, compiled or not; FP8 linears must be paused (fp8.paused), else padding changes their scales.
    path: the file of items. Raises MissingError and MachineError (see read_items)."""
    items = read_items(path, limit)
    mine = items[rank::world_size]
    picked, cut = picks(model, tokenizer, mine, device, batch_size)
    labels = np.array([label for _, _, label in mine])
    right = (picked == labels[:, None]).sum(0)                  # (3,)
    counts = torch.tensor([*right, len(mine), cut], device=device)
    *right, n, cut = distributed.sum_over_ranks(counts).tolist()
    note = f'{cut:,} contexts with an ending are longer than block_size: cut on the left' if cut else ''
    figures = {name: count / max(n, 1) for name, count in zip(FIGURES, right)}
    return {**figures, 'items': n, 'note': note}


def summary(result):
    """Return the line to print; after ± stands half of a 95% interval, 1.96 sqrt(p (1 - p) / items)."""
    figures = []
    for name in FIGURES:
        p = result[name]
        half = 1.96 * (p * (1 - p) / result['items']) ** 0.5
        figures.append(f'{name} {p:.4f} ±{half:.4f}')
    return f'HellaSwag {result["items"]:,} items: {" | ".join(figures)}'


if __name__ == '__main__':
    ranks = distributed.init(config['device'])
    state, about = lora.opened(config['ckpt'])
    # fp32 parameters, bf16 activations: as in training
    model = GPT(GPTConfig(**state['model_config']), seed=None).to(ranks.device)
    model.load_weights(state['weights'])
    start = time.perf_counter()
    result = evaluate(
        model,
        lora.tokenizer_of(config['ckpt'], state),
        config['data'],
        ranks.device,
        rank=ranks.rank,
        world_size=ranks.world_size,
        batch_size=config['batch_size'],
        limit=config['limit'],
    )
    seconds = time.perf_counter() - start
    if ranks.main:
        print(about)
        if result['note']:
            print(f'# {result["note"]}')
        rate = result['items'] / seconds
        print(f'{summary(result)} | {seconds:.1f} s, {rate:,.1f} items/s')
    distributed.leave()
