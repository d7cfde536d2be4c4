"""Continues a prompt with a model, or chats with it. Weights are bf16, whatever precision trained them.

$ python sample.py --ckpt=checkpoints_fp8/latest.pt --prompt='def main():'
$ python sample.py --ckpt=checkpoints_fp8/best_model.pt --num_samples=10 --max_new_tokens=100
$ python sample.py --ckpt=Qwen/Qwen3-0.6B --chat                # a line of input is a turn; Ctrl-D ends it
"""
import os

from configurator import MissingError, SettingError, configure, printable, say, with_home

ckpt = 'checkpoints_fp8/latest.pt'  # a checkpoint, or a Hugging Face model: a folder, or org/name
prompt = ''             # text to continue, or FILE:path of it; '' = a new document; in a chat, the first turn
chat = False            # by the chat template of the model's tokenizer
system = ''             # first message of a chat; not given: the most frequent of the training chats
num_samples = 1         # >= 1: continuations, generated as one batch; a single one is printed as it comes
max_new_tokens = 200    # >= 0: tokens per sample, or per answer
temperature = 0.8       # >= 0: 0 = the likeliest token each time
top_k = 200             # >= 0: draw among the k likeliest tokens; 0 = all
top_p = 1.0             # > 0, <= 1: draw among the fewest tokens with this share of the probability; 1 = all
seed = 1337             # >= 0, < 1e18: of the draws
raw = False             # prints control characters as they are; else escaped, as \x1b
device = 'auto'         # auto (cuda, else cpu) | cuda | mps (Apple's, untested) | cpu
config = configure(__file__)
globals().update(config)

from fp8gpt.files import text_of
from fp8gpt.tokenizer import check_exists

if system and not chat:
    raise SettingError('--system belongs to --chat')
if chat and num_samples > 1:
    raise SettingError(f'num_samples={num_samples}: a chat has one answer to a turn')
if prompt.startswith('FILE:'):
    path = with_home(prompt.removeprefix('FILE:'))
    if not os.path.isfile(path):
        raise MissingError(f'there is no prompt file {path}')
    prompt = ''.join(text_of(path))
check_exists(ckpt)

# Imported only now: --help and a mistake in the settings are answered without waiting for torch.
import contextlib
import itertools
import sys
import time

import torch

from fp8gpt import distributed, pretrained
from model import generate

device = distributed.init(device).device
state, about = pretrained.opened(ckpt)
tokenizer = pretrained.tokenizer_of(ckpt, state)
if chat and not tokenizer.chat_template:
    raise SettingError(f'{ckpt}: its tokenizer has no chat template, which --chat needs; '
                       '--prompt works without one')
model = pretrained.model_of(state, device, param_dtype=torch.bfloat16)
shown = str if raw else printable


def continued(ids):
    """Yield the tokens that continue the ids of a text, tensors (num_samples,)."""
    idx = torch.tensor([ids] * num_samples, device=device)      # (num_samples, T)
    return generate(
        model,
        idx,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stops=tokenizer.stops,
    )


def print_answer(ids):
    """Print the text that continues the ids of a text, token by token, and return it."""
    tokens = (token.item() for token in continued(ids))
    text = ''
    for part in tokenizer.stream(itertools.takewhile(lambda token: token not in tokenizer.stops, tokens)):
        print(shown(part), end='', flush=True)
        text += part
    print()
    return text


say(about)
if chat and 'system' not in config.given:
    system = state['config'].get('system', '')
    if system:
        print(f'# --system={shown(system)!r}: the most frequent of the training chats')
ids = [tokenizer.start, *tokenizer.encode(prompt).tolist()]
if chat:        # the user's turns are the prompt, where there is one, and the lines of the input
    from fp8gpt import sft
    examples = sft.Examples(tokenizer, tokenizer.chat_template, time.time())
    messages = [{'role': 'system', 'content': system}] if system else []
    marker = '> ' if sys.stdin.isatty() else ''
    with contextlib.suppress(EOFError):
        turn = prompt or input(marker)
        while True:
            messages.append({'role': 'user', 'content': turn})
            ids = examples.prompt(messages).tolist()
            if len(ids) > model.config.block_size:
                print(f'# the chat has {len(ids)} tokens, and the model reads the last '
                      f'{model.config.block_size}')
            answer = print_answer(ids)
            messages.append({'role': 'assistant', 'content': answer})
            turn = input(marker)
elif num_samples == 1:
    print(shown(prompt), end='', flush=True)
    print_answer(ids)
else:
    columns = [tokens.tolist() for tokens in continued(ids)]    # max_new_tokens of num_samples
    for number, row in enumerate(zip(*columns), 1):
        print(f'--- {number}\n{shown(prompt + tokenizer.decode(row))}')
