"""What a disk may do to a file, what a stranger may write into one, and what a reader makes of it."""
import dataclasses
import json
import os
import random
import time

import torch
from safetensors.torch import save_file

from configurator import UserError
from fp8gpt import checkpoint, lora, optim, pretrained, sft
from fp8gpt.hf_families import split, their_config
from helpers import checkpoint_of, gpt_in
from model import GPT, GPTConfig


def damages(raw, cases, seed=0):
    """Yields (what was done, bytes): `cases` cuts, flipped bits and zeroed stretches of a file's bytes."""
    draw = random.Random(seed)
    for _ in range(cases):
        at = draw.randrange(len(raw))
        kind = draw.choice(('cut', 'flip', 'flip at the end', 'zeros'))
        spoilt = bytearray(raw)
        if kind == 'cut':
            del spoilt[at:]
        elif kind == 'zeros':
            length = draw.choice((1, 16, 512, 4096))
            spoilt[at:at + length] = bytes(len(spoilt[at:at + length]))
        else:
            at = at if kind == 'flip' else len(raw) - 1 - at % min(len(raw), 8192)
            spoilt[at] ^= 1 << draw.randrange(8)
        if spoilt != raw:
            yield f'{kind} at {at}', bytes(spoilt)


def survived(path, read, same, cases, seed=0):
    """Damages of a file that `read(path)` takes wrongly: [what was done and what came of it]. It is to say
    them in one line, by a UserError, or to return what is same(it) as from the whole file.

    path: of a file that may be overwritten; it is left whole."""
    with open(path, 'rb') as file:
        raw = file.read()
    wrong = []
    for what, spoilt in [*damages(raw, cases, seed), ('whole again', raw)]:
        with open(f'{path}.new', 'wb') as file:
            file.write(spoilt)
        os.replace(f'{path}.new', path)  # what was mapped before stays as it is
        try:
            if not same(read(path)):
                wrong.append(f'{what}: taken as something else')
        except UserError as error:
            if '\n' in str(error) or what == 'whole again':
                wrong.append(f'{what}: {error}')
        except Exception as error:
            wrong.append(f'{what}: {type(error).__name__}: {error}')
    return wrong


def finite_or_refused(use, *arguments):
    """What is wrong with use(*arguments), or None: it is to return finite values, or raise a UserError of one
    line."""
    try:
        return None if use(*arguments).isfinite().all() else 'taken, and what comes of it is not finite'
    except UserError as error:
        return str(error) if '\n' in str(error) else None
    except Exception as error:
        return f'{type(error).__name__}: {error}'


# --------------------------------------------------------------------------- folders of Hugging Face's format

HOSTILE = [10**9, 2**70, -1, 0, 1.5, 1e-300, float('nan'), float('inf'), 'a word', '', [], [1], {}, {'a': 1},
           None, True, [None] * 3, '../config.json']
MORE_FIELDS = ('rope_scaling', 'rope_parameters', 'quantization_config', 'layer_types', 'sliding_window',
               'use_sliding_window', 'max_window_layers', 'model_type', 'architectures')
NESTED = {
    'rope_scaling': dict(rope_type='llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                         original_max_position_embeddings=32, rope_theta=500.0),
    'quantization_config': dict(quant_method='fp8', fmt='e4m3', weight_block_size=[128, 128]),
}
DTYPES = [torch.int8, torch.int64, torch.bool, torch.float8_e5m2, torch.float8_e4m3fn, torch.complex64,
          torch.float64]
LLAMA = GPTConfig(
    vocab_size=257, block_size=64, n_layer=2, n_head=4, n_kv_head=2, n_embd=64, ffn_dim=96, mlp='swiglu',
    norm='rmsnorm', position='rope', bias=False, tie_embeddings=False)


def hostile_folders(folder, cases, seed=0):
    """Yield (what is wrong with it, the path of a folder): every case replaces a field of config.json, or
    a tensor by one of another dtype, or with NaN, or names a file elsewhere in the index."""
    draw, theirs, weights = random.Random(seed), their_config(LLAMA), GPT(LLAMA).weights()
    tensors = {}
    for own, weight in weights.items():
        tensors |= {name: part.clone() for name, part in split(LLAMA, own, weight.detach()).items()}
    for _ in range(cases):
        value, spoilt, changed, index = draw.choice(HOSTILE), dict(theirs), dict(tensors), None
        kind = draw.choice(['field', 'field', 'nested', 'dtype', 'nan', 'index', 'tied'])
        what = f'{kind}: {value!r}'
        if kind == 'field':
            name = draw.choice([*theirs, *MORE_FIELDS])
            spoilt[name], what = value, f'{name}={value!r}'
        elif kind == 'nested':
            name, inner = draw.choice(list(NESTED.items()))
            key = draw.choice(list(inner))
            spoilt[name], what = {**inner, key: value}, f'{name}: {key}={value!r}'
        elif kind == 'index':
            index = draw.choice([{'weight_map': {'a': '../outside.safetensors'}}, {'weight_map': value},
                                 {'weight_map': {'a': '/etc/passwd', 'b': value}}])
        elif kind == 'tied':
            spoilt['tie_word_embeddings'] = True
        else:
            name, dtype = draw.choice(list(tensors)), draw.choice(DTYPES)
            changed[name] = tensors[name].to(dtype) if kind == 'dtype' else tensors[name] * float('nan')
            what = f'{kind}: {name} {dtype}'
        save_file(changed, f'{folder}/model.safetensors')
        for name, written in (('config', spoilt), ('model.safetensors.index', index or {})):
            with open(f'{folder}/{name}.json', 'w') as file:
                json.dump(written, file)
        yield what, folder


def folders_taken(folder, cases, seed=0):
    """Return what is wrong with how pretrained.source reads hostile folders."""
    def logits(path):
        return gpt_in(path)(torch.arange(8)[None])
    found = ((what, finite_or_refused(logits, path)) for what, path in hostile_folders(folder, cases, seed))
    return [f'{what}: {why}' for what, why in found if why]


# ----------------------------------------------------------------------------------- checkpoints of strangers

def leaves(value, path=()):
    """Yield the path of each entry of nested dicts, dicts among them."""
    for key, inner in value.items():
        yield (*path, key)
        if isinstance(inner, dict):
            yield from leaves(inner, (*path, key))


def replaced(value, path, new):
    """Return nested dicts in which the entry at a path is another."""
    key, *rest = path
    return {**value, key: replaced(value[key], rest, new) if rest else new}


def logits_of(path):
    """The logits of a checkpoint, adapters merged, whose moments an optimizer has taken."""
    state, _ = pretrained.opened(path)
    gpt = GPT(GPTConfig(**state['model_config']), seed=None)
    gpt.load_weights(state['weights'])
    moments = checkpoint.read(path)['optimizer']
    if state['optimizer']:
        optimizer = optim.make_optimizer(gpt, (0.9, 0.95), 0.1)
        checkpoint.load_moments(optim.named_state(optimizer, gpt), moments)
    return gpt(torch.zeros(1, 2, dtype=torch.long))


def checkpoints_taken(folder, cases, seed=0):
    """Return what is wrong with how checkpoints are read, of a model and of adapters on it, in each of which
    one entry is another."""
    small = GPTConfig(vocab_size=64, block_size=8, n_layer=1, n_head=1, n_embd=16)
    whole, path = checkpoint_of(GPT(small), 7), f'{folder}/changed.pt'
    torch.save(whole, f'{folder}/base.pt')
    adapted, spec = GPT(small), lora.Spec(2, 16.0, 'all')
    about = {'base': f'{folder}/base.pt', 'seed': 0, 'checksum': lora.checksum(adapted)}
    lora.add(adapted, spec)
    adapters = checkpoint_of(adapted, 7, lora={**dataclasses.asdict(spec), **about})
    tensors = [torch.zeros(3), torch.full((4, 4), float('nan')), torch.zeros((), dtype=torch.int64)]
    draw, wrong = random.Random(seed), []
    for _ in range(cases):
        state = draw.choice([whole, adapters])
        at = draw.choice([at for at in leaves(state) if state is whole or at[0] in ('lora', 'weights')])
        value = draw.choice([*HOSTILE, *tensors, path])
        torch.save(replaced(state, at, value), path)
        why = finite_or_refused(logits_of, path)
        wrong += [f'{at} = {value!r:.40}: {why}'] * bool(why)
    return wrong


# -------------------------------------------------------------------------------- chat templates of strangers

REFUSED_TEMPLATES = {   # what a stranger writes: what the one line says of it
    '{{ messages.append(1) }}': 'cannot write',
    "{{ ''.__class__.__mro__ }}": 'cannot write',
    "{{ raise_exception('no') }}": 'cannot write a conversation: no$',
    '{% if %}': 'cannot write',
    '{{ messages | length }}': 'does not write',
    '{# {% generation %} #}{% for m in messages %}{{ m.content }}{% endfor %}': 'does not mark the words',
    '{{ messages[-1].content }}': 'does not write all answers',
    '{{ 1/0 }}': 'division by zero',
    '{% for i in range(1000000000) %}{% endfor %}': 'Range too big',
    '{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}': 'recursion',
    '{% if 1 %}' * 500 + '{% endif %}' * 500: 'cannot write',
}
PIECES = [
    *REFUSED_TEMPLATES, '{% break %}', '{{ no.where }}', '{{ messages[9].content }}', '{% include "x" %}',
    '{{ strftime_now("%Y" ~ "%") }}', '{{ strftime_now(7) }}', '\x00', '{{ lipsum(9999) }}', '}}', '{%',
    '{{ messages | sort }}', "{{ namespace(x=messages) }}", '{% set messages = [] %}', '{{ 0 | round(999) }}',
]


def templates_taken(tokenizer, cases, seed=0):
    """Return what is wrong with how chat templates are run in which something stands that a stranger may
    write, or a character is another, or on such messages: each makes an example, or is refused."""
    draw, wrong = random.Random(seed), []
    chat = [*sft.pair('2 + 2?', '4.'), *sft.pair('and then?', '5.')]

    def example(template, messages):
        made = sft.Examples(tokenizer, template, 0).of_row({'messages': messages})
        return torch.zeros(1) if made is None else torch.from_numpy(made[0].astype('int64'))
    for _ in range(cases):
        template, messages = tokenizer.chat_template, chat
        kind = draw.choice(['piece', 'character', 'messages'])
        at = draw.randrange(len(template))
        if kind == 'piece':
            at = draw.choice([0, len(template), template.index('{{')])
            template = template[:at] + draw.choice(PIECES) + template[at:]
        elif kind == 'character':
            template = template[:at] + draw.choice('{}%\'+-x0') + template[at + 1:]
        else:
            value, key = draw.choice(HOSTILE), draw.choice(['role', 'content'])
            changed = [{**chat[0], key: value}, *chat[1:]]
            messages = draw.choice([value, [*chat, value], changed, chat[1:], chat[:1]])
        began, why = time.monotonic(), finite_or_refused(example, template, messages)
        why = why or ('it takes too long' if time.monotonic() - began > 10 else '')
        wrong += [f'{template[:60]!r} {messages!r:.60}: {why}'] * bool(why)
    return wrong
