"""Lets a checkpoint talk: continues a prompt, in bf16 weights whatever it was trained in.

$ python sample.py --ckpt=checkpoints_fp8/latest.pt --prompt='def main():'
$ python sample.py --ckpt=checkpoints_fp8/best_model.pt --num_samples=10 --max_new_tokens=100
"""
from configurator import MissingError, configure

ckpt = 'checkpoints_fp8/latest.pt'  # the checkpoint
prompt = ''             # text to continue, or FILE:path of it; '' = a new document
num_samples = 1         # >= 1: continuations, generated as one batch; a single one is printed as it comes
max_new_tokens = 200    # >= 0: tokens per sample
temperature = 0.8       # >= 0: 0 = the likeliest token each time
top_k = 200             # >= 0: draw among the k likeliest tokens; 0 = all
top_p = 1.0             # > 0, <= 1: draw among the fewest tokens with this share of the probability; 1 = all
seed = 1337             # >= 0, < 1e18: of the draws
raw = False             # prints control characters as they are; else escaped, as \x1b
device = 'auto'         # auto (cuda, else cpu) | cuda | cpu
config = configure(__file__)
globals().update(config)

# Imported only now: --help and a mistyped setting are answered without waiting for torch.
import os
import re

import torch

import checkpoint
import lora
import parallel
from generation import generate
from model import GPT, GPTConfig
from tokenizer import get_tokenizer

if prompt.startswith('FILE:'):
    path = prompt.removeprefix('FILE:')
    if not os.path.isfile(path):
        raise MissingError(f'there is no prompt file {path}')
    with open(path, encoding='utf-8', errors='replace') as file:
        prompt = file.read()
device = parallel.init(device).device
state = lora.whole(checkpoint.load(ckpt))
tokenizer = get_tokenizer(state['tokenizer'], os.path.dirname(ckpt))
model = GPT(GPTConfig(**state['model_config'])).to(device)
model.load_weights(state['weights'])
for p in model.parameters():
    p.data = p.data.bfloat16()

ids = [tokenizer.start, *tokenizer.encode(prompt).tolist()]
idx = torch.tensor([ids] * num_samples, device=device)      # (num_samples, T)
tokens = generate(
    model,
    idx,
    max_new_tokens,
    temperature=temperature,
    top_k=top_k,
    top_p=top_p,
    seed=seed,
    stops=tokenizer.stops,
)


def shown(text):
    """Text as it may be printed: of what a model writes, a terminal would take some for commands."""
    if raw:
        return text
    return re.sub(r'[\x00-\x08\x0b-\x1f\x7f-\x9f]', lambda match: f'\\x{ord(match[0]):02x}', text)


print(f'# {ckpt}: step {state["step"]}, trained in {state["precision"]["name"]}')
if num_samples == 1:
    print(shown(prompt), end='', flush=True)
    for text in tokenizer.stream(token.item() for token in tokens):
        print(shown(text), end='', flush=True)
    print()
else:
    columns = list(tokens)                                      # max_new_tokens of (num_samples,)
    rows = torch.stack(columns, dim=1).tolist() if columns else [[]] * num_samples
    for number, row in enumerate(rows, 1):
        print(f'--- {number}\n{shown(prompt + tokenizer.decode(row))}')
