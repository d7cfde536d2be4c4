"""HellaSwag (Zellers et al. 2019): which of four endings does a checkpoint find likeliest? Chance is 0.25.

$ python hellaswag.py --ckpt=checkpoints_fp8/latest.pt --data=data/hellaswag/hellaswag_val.jsonl
$ torchrun --standalone --nproc_per_node=8 hellaswag.py --ckpt=checkpoints_fp8/best_model.pt  # ranks share the items

Text and tokens are lm-evaluation-harness's, zero-shot: "activity_label: ctx_a Ctx_b" + " " + ending, with no EOT in front.
Each ending has the sum of its tokens' log-probabilities, and the figures are how often the right one has the largest

    acc        sum, as in the harness
    acc_norm   sum per UTF-8 byte of the ending. (The harness's code counts characters, and calls bytes acc_bytes; only
               non-ASCII endings tell them apart, and 181 of the 10,042 items have one.)
    acc_token  mean over its tokens, as in build-nanogpt. Its text, though, is ctx as it stands, without the label: its
               figure (0.2955 for GPT-2 124M) is a near neighbour, not the same
"""
import collections
import json
import os
import re
import time

import numpy as np
import torch
import torch.nn.functional as F

import checkpoint
import parallel
from configurator import MachineError, MissingError, SettingError, configure
from model import GPT, GPTConfig
from tokenizer import get_tokenizer

ckpt = 'checkpoints_fp8/latest.pt'             # the checkpoint; whatever it was trained in, it is evaluated in bf16
data = 'data/hellaswag/hellaswag_val.jsonl'    # one item per line, as prepare_data.py fetches them
limit = 0                                      # items, from the first; 0 = all
batch_size = 16                                # rows (endings) per forward: 16 * 256 tokens * 50257 fp32 logits are 0.8 GB
device = 'auto'                                # auto (cuda, else cpu) | cuda | cpu
config = configure(__file__, None if __name__ == '__main__' else [])  # imported, it leaves the command line alone


def clean(text):
    """The harness's clean-up of WikiHow's marks: ' [title]' ends a sentence, other [tags] go, two spaces become one."""
    return re.sub(r'\[.*?\]', '', text.strip().replace(' [title]', '. ')).replace('  ', ' ')


def render(row):
    """A row of the file -> (context, four endings, label). Where there is only ctx, it stands for ctx_a and ctx_b."""
    context = row['ctx_a'] + ' ' + row['ctx_b'].capitalize() if 'ctx_a' in row else row['ctx']
    endings, label = [clean(ending) for ending in row['endings']], int(row['label'])
    if len(endings) != 4 or label not in range(4):
        raise ValueError(f'{len(endings)} endings, label {label}')
    return clean(row['activity_label'] + ': ' + context), endings, label


def read(path, limit=0):
    """([(context, endings, label)], how many rows had only ctx). Raises FileNotFoundError, or RuntimeError naming the line."""
    if not os.path.isfile(path):
        raise MissingError(f'there is no {path}: `python prepare_data.py hellaswag` fetches it')
    items, only_ctx = [], 0
    with open(path, 'rb') as file:
        for number, line in enumerate(file, 1):
            if not line.strip() or limit and len(items) == limit:
                continue
            try:
                row = json.loads(line)
                items.append(render(row))
                only_ctx += 'ctx_a' not in row
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise MachineError(f'{path}, line {number} is no HellaSwag item ({type(error).__name__}: {error}); it wants JSON '
                                   'with activity_label, ctx_a and ctx_b (or ctx), endings, label') from None
    if not items:
        raise MachineError(f'{path} is empty: `python prepare_data.py hellaswag` fetches it again')
    return items, only_ctx


def encode(tokenizer, context, ending):
    """(tokens of both, how many of them are the ending's), split where the harness splits."""
    ids = tokenizer.encode(context.rstrip()).tolist()
    tail = tokenizer.encode(f'{context} {ending}').tolist()[len(ids):]
    return ids + tail, len(tail)


@torch.no_grad()
def score(model, rows, device, batch_size):
    """rows: [(at most block_size + 1 tokens, n)] -> (len(rows),) float64, the log-probability of each row's last n tokens.

    Every forward is batch_size rows of 64, 128, 256, ... or block_size tokens (the last one is only a target), so that
    torch.compile sees few shapes. A row's own length says which; the padding is behind it, where causality hides it."""
    buckets, scores = collections.defaultdict(list), np.zeros(len(rows))
    for i, (tokens, _) in enumerate(rows):
        buckets[min(max(64, 1 << (len(tokens) - 2).bit_length()), model.config.block_size)].append(i)
    for T, members in sorted(buckets.items()):
        for start in range(0, len(members), batch_size):
            batch = members[start:start + batch_size]
            idx, row, at, targets = np.zeros((batch_size, T), np.int64), [], [], []
            for b, (tokens, n) in enumerate(rows[i] for i in batch):
                end = len(tokens) - 1
                idx[b, :end] = tokens[:-1]
                row, at, targets = row + [b] * n, at + [*range(end - n, end)], targets + tokens[-n:]
            logits = model(torch.from_numpy(idx).to(device))                          # (batch_size, T, vocab_size)
            losses = F.cross_entropy(logits[row, at], torch.tensor(targets, device=device), reduction='none')
            scores[batch] = [-part.sum().item() for part in losses.double().cpu().split([rows[i][1] for i in batch])]
    return scores


def picks(model, tokenizer, items, device, batch_size):
    """((len(items), 3) int: the ending that acc, acc_norm and acc_token pick; how many rows were too long for block_size,
    and lost their first tokens, as in the harness)."""
    most = model.config.block_size + 1
    rows = [encode(tokenizer, context, ending) for context, endings, _ in items for ending in endings]
    cut = sum(len(tokens) > most for tokens, _ in rows)
    rows = [(tokens[-most:], min(n, most - 1)) for tokens, n in rows]
    n_tokens = np.array([n for _, n in rows])
    n_bytes = np.array([len(ending.encode('utf-8', 'replace')) for _, endings, _ in items for ending in endings])
    sums = score(model, rows, device, batch_size)
    return np.stack([sums, sums / n_bytes, sums / n_tokens], 1).reshape(-1, 4, 3).argmax(1), cut


def evaluate(model, tokenizer, path, device, rank=0, world_size=1, batch_size=16, limit=0):
    """{'acc', 'acc_norm', 'acc_token' (see above), 'items', 'note': what to say beside them, or ''}, over all ranks: each
    calls this with its number. model: a GPT, compiled or not; FP8 linears are to be paused (fp8.paused), or else padding
    would take part in their scales. Raises FileNotFoundError, RuntimeError (see read), or ValueError for a setting."""
    if limit < 0 or batch_size < 1:
        raise SettingError('limit is at least 0 (all items), batch_size at least 1')
    items, only_ctx = read(path, limit)
    mine = items[rank::world_size]
    picked, cut = picks(model, tokenizer, mine, device, batch_size)
    right = (picked == np.array([label for _, _, label in mine])[:, None]).sum(0)
    *right, n, cut = parallel.sum_over_ranks(torch.tensor([*right, len(mine), cut], device=device)).tolist()
    notes = [(only_ctx, f'{only_ctx:,} items have only ctx: taken as it is, without the capital letter the harness gives ctx_b'),
             (cut, f'{cut:,} contexts with an ending are longer than block_size: cut on the left')]
    figures = {name: count / max(n, 1) for name, count in zip(('acc', 'acc_norm', 'acc_token'), right)}
    return {**figures, 'items': n, 'note': '; '.join(text for count, text in notes if count)}


def summary(result):
    """The line to print; after ± comes half of a 95% interval, 1.96 sqrt(p (1 - p) / items)."""
    half = lambda p: 1.96 * (p * (1 - p) / result['items']) ** 0.5
    figures = [f'{name} {result[name]:.4f} ±{half(result[name]):.4f}' for name in ('acc', 'acc_norm', 'acc_token')]
    return f'HellaSwag {result["items"]:,} items: {" | ".join(figures)}'


if __name__ == '__main__':
    globals().update(config)
    ranks = parallel.init(device)
    state = checkpoint.load(ckpt)
    model = GPT(GPTConfig(**state['model_config'])).to(ranks.device)  # fp32 parameters, bf16 activations: as in training
    model.load_weights(state['weights'])
    start = time.perf_counter()
    result = evaluate(model, get_tokenizer(state['tokenizer']), data, ranks.device, ranks.rank, ranks.world_size, batch_size, limit)
    seconds = time.perf_counter() - start
    if ranks.main:
        print(f'# {ckpt}: step {state["step"]}, trained in {state["precision"]["name"]}')
        if result['note']:
            print(f'# {result["note"]}')
        print(f'{summary(result)} | {seconds:.1f} s, {result["items"] / seconds:,.1f} items/s')
    parallel.leave()
