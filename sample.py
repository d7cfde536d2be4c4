"""Continues a prompt with a model, or chats with it. Weights are bf16, whatever precision trained them.

$ python sample.py --ckpt=checkpoints_fp8/latest.pt --prompt='def main():'
$ python sample.py --ckpt=checkpoints_fp8/best_model.pt --num_samples=10 --max_new_tokens=100
$ python sample.py --ckpt=Qwen/Qwen3-0.6B --chat    # each line is a turn; Ctrl-C ends an answer, Ctrl-D all
"""
import os

from configurator import MissingError, SettingError, configure, printable, say

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
device = 'auto'         # auto (cuda, else cpu) | cuda | cpu
config = configure(__file__)
globals().update(config)

from fp8gpt.files import lines_of
from fp8gpt.tokenizer import check_exists, is_pretrained

if system and not chat:
    raise SettingError('--system belongs to --chat')
if chat and num_samples > 1:
    raise SettingError(f'num_samples={num_samples}: a chat has one answer to a turn')
if prompt.startswith('FILE:'):
    path = os.path.expanduser(prompt.removeprefix('FILE:'))
    if not os.path.isfile(path):
        raise MissingError(f'there is no prompt file {path}')
    prompt = ''.join(lines_of(path))
check_exists(ckpt)

# Imported only now: --help and a mistake in the settings are answered without waiting for torch.
import contextlib
import sys
import time

import torch

from fp8gpt import distributed, pretrained
from model import generate

device = distributed.init(device).device
state, about = pretrained.opened(ckpt)
say(about)
suggested = [f'{name}={value}' for name, value in pretrained.generation_of(ckpt).items()
             if not name.startswith(('_', 'transformers', 'output_', 'use_')) and not name.endswith('_id')]
if suggested:
    say(f'# not taken from generation_config.json: {" ".join(suggested)}')
tokenizer = pretrained.tokenizer_of(ckpt, state)
if chat and not tokenizer.chat_template:
    raise SettingError(f'{ckpt}: its tokenizer has no chat template, which --chat needs; '
                       '--prompt works without one')
model = pretrained.model_of(state, device, tokenizer.vocab_size, param_dtype=torch.bfloat16)
longest = model.config.block_size


def shown(text):
    """Return a text as it is printed: its control characters escaped, unless raw."""
    return text if raw else printable(text, keep=r'[\t\n]')


def continued(ids, count, turn=0):
    """Yield up to `count` tokens that continue the ids of a text, tensors (num_samples,). Each turn of a chat
    draws by another seed. Raises SettingError for a token that the model lacks."""
    if max(ids) >= model.config.vocab_size:
        word = tokenizer.decode([max(ids)], special=True)
        raise SettingError(f'the model has no weights for the token {word!r}: leave it out')
    idx = torch.tensor([ids] * num_samples, device=device)      # (num_samples, T)
    return generate(
        model,
        idx,
        count,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed + turn,
        stops=tokenizer.stops,
    )


def until_stop(tokens, found):
    """Yield the tokens before the first stop, which is put into the list `found`."""
    for token in tokens:
        if token in tokenizer.stops:
            found.append(token)
            return
        yield token


def answer(messages):
    """Print the answer to a chat's messages, token by token, and return it. Ctrl-C ends it. Raises
    SettingError for a chat that is longer than the model reads."""
    ids, text, stop = examples.prompt(messages).tolist(), '', []
    if len(ids) >= longest:
        raise SettingError(f'the chat has {len(ids)} tokens, and the model reads {longest}: begin a new one')
    count = min(max_new_tokens, longest - len(ids))
    tokens = continued(ids, count, turn=(len(messages) - 1) // 2)
    with contextlib.suppress(KeyboardInterrupt):
        for part in tokenizer.stream(until_stop((token.item() for token in tokens), stop)):
            print(shown(part), end='', flush=True)
            text += part
        if not stop:
            print(f'\n# the answer is cut after {count} tokens', end='')
    print()
    return text


if chat and 'system' not in config.given:
    system = state['config'].get('system', '')
    if system:
        print(f'# --system={shown(system)!r}: the most frequent of the training chats')
if chat and state['config'].get('is_plain'):
    say('# its examples were learned without the chat template, as '
        r"--prompt=$'Question:\nYOURS\n\nAnswer:\n' writes them")
if chat:        # the user's turns are the prompt, where there is one, and the lines of the input
    from fp8gpt import sft
    examples = sft.Examples(tokenizer, tokenizer.chat_template, time.time())
    messages = [{'role': 'system', 'content': system}] if system else []
    marker = '> ' if sys.stdin.isatty() else ''
    if marker:
        print('# a line is a turn; Ctrl-C ends an answer, and at the prompt the chat')
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        line = prompt or input(marker)
        while True:
            if special := tokenizer.special.search(line):
                say(f'# {special[0]} is a token of the template, which no line may hold: type it without')
            elif line.strip():
                messages.append({'role': 'user', 'content': line})
                messages.append({'role': 'assistant', 'content': answer(messages)})
            line = input(marker)
else:
    opening = tokenizer.prefix if is_pretrained(ckpt) else tokenizer.opening
    # as in transformers, the text of a special token is that token here
    ids = [*opening, *tokenizer.encode(prompt, special=True).tolist()] or [tokenizer.eot]
    if len(ids) > longest:
        print(f'# the prompt has {len(ids)} tokens, and the model reads the last {longest}')
    columns = (tokens.tolist() for tokens in continued(ids, max_new_tokens))   # each of num_samples
    rows = [(column[0] for column in columns)]
    if num_samples > 1:
        rows = [*zip(*columns)] or [()] * num_samples
    for number, row in enumerate(rows, 1):
        print(f'--- {number}\n' * (num_samples > 1) + shown(prompt), end='', flush=True)
        for part in tokenizer.stream(until_stop(row, []), ids):
            print(shown(part), end='', flush=True)
        print()
