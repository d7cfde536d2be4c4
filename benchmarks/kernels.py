"""What a GPU is asked to do in a micro-step, counted without one: `bench.py kernels`.

A cast pays for itself where the multiplication it speeds up saves more time than its bytes take. So the
figures are bytes and calls: what Inductor's Triton kernels read and write, how many are launched, and how
many calls of libraries (matrix multiplications, attention) stand between them.

`bench.py traffic` counts blocks of several widths, and leaves roofline.py their bytes per token and feature.
"""
import contextlib
import dataclasses
import json

import numpy as np
import torch
import torch.nn as nn
from torch._subclasses import FakeTensorMode

import fp8
import model
from fp8_kernels.block import fuse
from planning import roofline
from benchmarks import pretended
from benchmarks.rows import save, table, unused
from configurator import SettingError
from fp8_kernels.kept import Keeper
from model import GPT, PIECES, PRESETS, Linear, rope_tables


class Unset(GPT):
    """A GPT of tensors without data."""

    def init_weights(self, seed):
        pass


class Piece(nn.Module):
    """One of model.PIECES, of a model or a block, as a module of its own."""

    def __init__(self, function, of):
        super().__init__()
        self.function, self.of = function, of

    def forward(self, *inputs):
        return self.function(self.of, *inputs)


class Cudnn:
    """torch.nn.functional as model.py sees it, with the attention that a Hopper GPU takes: it shares keys and
    values itself."""

    def __getattr__(self, name):
        return getattr(nn.functional, name)

    @staticmethod
    def scaled_dot_product_attention(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False):
        attention = torch.ops.aten._scaled_dot_product_cudnn_attention
        return attention(q, k, v, attn_bias=attn_mask, compute_log_sumexp=True, is_causal=is_causal)[0]


def code_of_piece(function, module, inputs):
    """pretended.generate of a piece on fake inputs, its parameters and buffers being inputs too; they may be
    on the meta device."""
    piece = Piece(function, module)
    parameters, buffers = dict(piece.named_parameters()), dict(piece.named_buffers())

    def run(weights, rest):
        state = dict(zip(parameters, weights)) | dict(zip(buffers, rest[len(inputs):]))
        return torch.func.functional_call(piece, state, tuple(rest[:len(inputs)]), tie_weights=True)
    weights = [torch.empty_like(p, device='cpu').requires_grad_() for p in parameters.values()]
    rest = [torch.empty_like(b, device='cpu') for b in buffers.values()]
    return pretended.generate(run, weights, [*inputs, *rest])


def code_of_model(config, sequences, choice, only=None, micro_steps=1):
    """{piece: [forward, backward]}, pretended.Generated, of a GPT by an fp8.Choice. The block stands for each
    of the model's. only: that piece alone. Those of fp8_kernels/ find weights that are cast already; so do
    all in a step of several micro-steps."""
    config, fused = dataclasses.replace(config, n_layer=1), choice.kernels == 'triton'
    shape, model.F = (sequences, config.block_size), Cudnn()
    model.NO_BF16_UNITS = False  # what is counted is a GPU's, though traced on a CPU
    with FakeTensorMode(allow_non_fake_inputs=True):
        gpt = Unset(config, fp8.linear_factory(choice, Linear))
        idx, targets = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
        x = torch.zeros(*shape, config.n_embd, dtype=torch.bfloat16, requires_grad=True)
        stream, rope = [x], ()
        keeper = Keeper(gpt, always=fuse(gpt) if fused else ())
        keeper.new_step(micro_steps)
        keeper.refresh(gpt, ())
        if fused:
            stream = [x, x.detach().requires_grad_()]
        if config.position == 'rope':
            rope = rope_tables(config, config.block_size)

        def embed(gpt, idx):
            return PIECES['embed'](gpt, idx, 0)[0]

        def block(module, *inputs):
            stream, rope = inputs[:1 + fused], inputs[1 + fused:]
            return PIECES['block'](module, stream if fused else stream[0], rope or None, None)
        pieces = {
            'embedding': (embed, gpt, [idx]),
            'block': (block, gpt.h[0], [*stream, *rope]),
            'head and loss': (PIECES['nats'], gpt, [x, targets]),
        }
        return {name: code_of_piece(*piece) for name, piece in pieces.items() if only in (None, name)}


def choice_of(settings, backend, recipe, kernels):
    """The fp8.Choice of these names. Raises SettingError for those that there are not."""
    named = {'recipe': recipe, 'backend': backend, 'kernels': kernels}
    asked = dataclasses.replace(fp8.Options.of(settings.config), **named)
    fp8.check_names(asked)
    choice = fp8.Choice.of(asked, backend, 'counted')
    fp8.check_kernels(choice, backend)
    return choice


def choices(settings, arguments):
    """(name, fp8.Choice) of each row: every backend and recipe, and, unless the settings name one kind of
    kernels, those of fp8_kernels/ where there are some."""
    asked = settings.config['fp8_kernels']
    for backend in arguments.backends.split(','):
        for recipe in arguments.recipes.split(','):
            name = recipe if backend == 'native' else f'{backend} {recipe}'
            yield name, choice_of(settings, backend, recipe, asked)
            with contextlib.suppress(SettingError):
                if asked == 'auto':
                    yield f'{name} triton', choice_of(settings, backend, recipe, 'triton')


def total(graphs):
    """Gigabytes, Triton launches and library calls of Generated code, as an array."""
    calls = [call for graph in graphs for call in graph.calls]
    kinds = [call.kind for call in calls]
    gigabytes = sum(call.bytes for call in calls if call.kind == 'triton') / 1e9
    return np.array([gigabytes, kinds.count('triton'), kinds.count('library')])


def figures(layer, rest, n_layer):
    """Of a micro-step, by the totals of a layer and of what is around the layers."""
    gb, launches, calls = n_layer * layer + rest
    return {
        'gb_per_layer': round(layer[0], 4),
        'gb': round(gb, 3),
        'triton_launches': round(launches),
        'library_calls': round(calls),
    }


def counted(settings, arguments):
    """(name, figures) of bf16, and of each backend and recipe of `bench.py kernels`."""
    pretended.pretend(arguments.gpu)
    config, sequences = settings.model, settings.config['batch_size']
    bf16 = {name: total(code) for name, code in code_of_model(config, sequences, fp8.OFF).items()}
    yield 'bf16', figures(bf16['block'], bf16['embedding'] + bf16['head and loss'], config.n_layer)
    for name, choice in choices(settings, arguments):
        pieces = dict(bf16)
        for piece in ['block', 'head and loss'] if choice.head else ['block']:
            pieces[piece] = total(code_of_model(config, sequences, choice, only=piece)[piece])
        yield name, figures(pieces['block'], pieces['embedding'] + pieces['head and loss'], config.n_layer)


def report(settings, arguments):
    """Prints what is counted: a table, and {name: figures} as JSON on the last line; saves it."""
    found, name = {}, unused(arguments.results, f'kernels-{settings.stem}')
    facts = {'words': settings.words, 'gpu': arguments.gpu}
    for recipe, row in counted(settings, arguments):
        found[recipe] = row
        save(name, found, arguments.results, **facts)
    table([{'recipe': recipe, **row} for recipe, row in found.items()])
    print(json.dumps(found))


# ------------------------------------------------------------------------------------- bytes for roofline.py

SMALL = 1e6     # bytes: launches below move next to nothing at the sizes of PROBES
PROBES = [  # what differs from a preset, sequences: enough to tell apart what bytes are in proportion to
    (dict(), 32),
    (dict(n_embd=1536, ffn_dim=6144, head_dim=0), 16),
    (dict(n_kv_head=4), 16),
    (dict(ffn_dim=2048), 16),
]


def fitted(names, elements, counts):
    """What roofline.counted takes: a row of numbers for one piece. elements: roofline.sizes of each probe;
    counts: the bytes of each of its launches."""
    totals = torch.tensor([sum(count) for count in counts], dtype=torch.float64)
    sizes = torch.tensor([[each[name] for name in names] for each in elements], dtype=torch.float64)
    relative = sizes / totals[:, None]
    units = relative.abs().amax(0)
    fit = torch.linalg.lstsq(relative / units, torch.ones(len(totals), 1).double()).solution[:, 0] / units
    middle = sorted(range(len(counts)), key=lambda i: len(counts[i]))[len(counts) // 2]
    row = {name: round(value, 3) for name, value in zip(names, fit.tolist())}
    small = sum(count < SMALL for count in counts[middle])
    return row | {'launches': len(counts[middle]), 'small': small}


def fit(preset, choice):
    """piece -> its row, see fitted, of a kind of block; those outside of it in bf16 alone, and the head where
    it is in FP8."""
    elements, counts, only = [], [], 'block' if choice.on else None
    if choice.head:
        only = 'head and loss'
    for changes, sequences in PROBES:
        config = dataclasses.replace(PRESETS[preset], **changes)
        elements.append(roofline.sizes(config, sequences * config.block_size))
        pieces = code_of_model(config, sequences, choice, only=only)
        counts.append({piece: [call.bytes for graph in graphs for call in graph.calls
                               if call.kind == 'triton'] for piece, graphs in pieces.items()})
    return {piece: fitted(roofline.PIECES[piece], elements, [each[piece] for each in counts])
            for piece in counts[0]}


def write_traffic(settings, arguments):
    """Counts the recipes that are asked for, and bf16 for an H200, with every kind of block; into
    roofline.COUNTS."""
    pretended.pretend(arguments.gpu)
    asked = dict(choices(settings, arguments))
    if arguments.gpu == 'h200':
        asked['bf16'] = fp8.OFF
        asked['fp8_head'] = fp8.Choice('native', head=True, reason='counted')
    found = roofline.counts()
    for kind, preset in roofline.LIKE.items():
        for name, choice in asked.items():
            found.setdefault(kind, {})[name] = row = fit(preset, choice)
            with open(roofline.COUNTS, 'w') as file:
                json.dump(found, file, indent=1)
            print(f'{kind}, {name}: {row}', flush=True)
