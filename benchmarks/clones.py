"""Others' models, counted from clones of their repositories: `bench.py kernels --peers=nanoGPT,nanochat`.

They are built by their own code and compiled whole, as their training scripts do it, where ours is compiled
piece by piece. A layer is half of what two more layers take: nanochat's come in two kinds, in turn.
"""
import ast
import contextlib
import dataclasses
import importlib.util
import io
import os
import sys
import types
from typing import Callable, NamedTuple
from unittest import mock

import torch
import torch.nn as nn
from torch._subclasses import FakeTensorMode

from benchmarks import kernels
from configurator import MissingError, SettingError

cross_entropy = nn.functional.cross_entropy


class Peer(NamedTuple):
    """A row. build(folder, model.GPTConfig) -> their model on the meta device."""
    name: str
    folder: str
    build: Callable
    autocast: bool


# ---------------------------------------------------------------------------------------------- their models

def sizes(config):
    """What all call by the same name. No vocabulary has to be padded, or logits cut off."""
    names = 'n_layer', 'n_head', 'n_embd'
    return {name: getattr(config, name) for name in names} | {'vocab_size': config.padded_vocab_size}


def nanogpt(folder, config):
    """model.py's GPT."""
    spec = importlib.util.spec_from_file_location('nanogpt', os.path.join(folder, 'model.py'))
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    return theirs.GPT(theirs.GPTConfig(block_size=config.block_size, bias=config.bias, **sizes(config)))


def nanochat(folder, config):
    """nanochat/gpt.py's GPT. The package `kernels`, from which it takes FlashAttention 3, is stood in for."""
    flash = types.SimpleNamespace(flash_attn_func=flash_attention)
    package = types.SimpleNamespace(flash_attn_interface=flash)
    hub = types.SimpleNamespace(get_kernel=lambda name: package, has_kernel=lambda name: True)
    sys.modules['kernels'] = hub
    sys.path.insert(0, folder)
    theirs = importlib.import_module('nanochat.gpt')
    model = theirs.GPT(theirs.GPTConfig(
        sequence_len=config.block_size, n_kv_head=config.n_kv_head, **sizes(config)))
    model.init_weights()  # casts embeddings
    return model


def nanochat_fp8(folder, config):
    """The same with the linears in FP8 that scripts/base_train.py --fp8 converts."""
    model = nanochat(folder, config)
    convert = importlib.import_module('nanochat.fp8').convert_to_float8_training
    return convert(model, module_filter_fn=filter_of(os.path.join(folder, 'scripts', 'base_train.py')))


def filter_of(script):
    """fp8_module_filter(module, name) of a script, which trains when it is imported."""
    with open(script) as file:
        nodes = ast.walk(ast.parse(file.read()))
    [found] = [node for node in nodes if getattr(node, 'name', '') == 'fp8_module_filter']
    names = {'nn': nn}
    exec(compile(ast.Module([found], []), script, 'exec'), names)
    return names['fp8_module_filter']


PEERS = {  # a file that tells a clone -> (row, build, autocast)
    'model.py': [('nanoGPT bf16', nanogpt, True)],
    'nanochat/gpt.py': [('nanochat bf16', nanochat, False), ('nanochat fp8', nanochat_fp8, False)],
}


def find(folders):
    """The Peers of folders, joined by commas. Raises MissingError, SettingError for other folders."""
    found = []
    for folder in filter(None, folders.split(',')):
        if not os.path.isdir(folder):
            raise MissingError(f'{folder} is not there: --peers wants folders of clones, joined by commas')
        known = [file for file in PEERS if os.path.exists(os.path.join(folder, file))]
        if not known:
            files = ' nor '.join(PEERS)
            raise SettingError(f'{folder} is no clone that --peers knows: it has neither {files}')
        for name, build, autocast in PEERS[known[0]]:
            found.append(Peer(name, os.path.abspath(folder), build, autocast))
    return found


# -------------------------------------------------------------------------------------------------- counting

def attention(q, k, v, attn_mask=None, dropout_p=0, is_causal=False, enable_gqa=False):
    """torch.nn.functional's, by the library call that ours is counted with."""
    return kernels.Cudnn.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)


def flash_attention(q, k, v, causal=False, window_size=None):
    """FlashAttention 3's interface to the same; q, k, v: (B, T, H, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def loss_in_fp32(logits, *arguments, **kwargs):
    """cross_entropy as a GPU's autocast has it; a CPU's, under which the model is traced, leaves out the
    cast."""
    return cross_entropy(logits.float(), *arguments, **kwargs)


def code_of_peer(peer, config, sequences):
    """[forward, backward], pretended.Generated, of the whole model."""
    def step(model, idx, targets):
        with torch.autocast('cpu', torch.bfloat16, enabled=peer.autocast):
            return model(idx, targets)

    with torch.device('meta'), contextlib.redirect_stdout(io.StringIO()):
        model = peer.build(peer.folder, config)
    stand_ins = {'scaled_dot_product_attention': attention, 'cross_entropy': loss_in_fp32}
    with FakeTensorMode(allow_non_fake_inputs=True), mock.patch.multiple(nn.functional, **stand_ins):
        shape = sequences, config.block_size
        idx, targets = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
        return kernels.code_of_piece(step, model, [idx, targets])


def counted(peers, settings):
    """(name, figures) of Peers, after pretended.pretend. Raises SettingError for a clone whose code is not
    of the shape that is known."""
    config, sequences = settings.model, settings.config['batch_size']
    few = min(4 - config.n_layer % 2, config.n_layer)   # below three, nanochat's middle layer is its last
    for peer in peers:
        totals = []
        try:
            for depth in (few, few + 2):
                code = code_of_peer(peer, dataclasses.replace(config, n_layer=depth), sequences)
                totals.append(kernels.total(code))
        except Exception as error:
            why = str(error).partition('\n')[0]
            raise SettingError(f'{peer.folder}: {peer.name} cannot be counted, its code is not of the shape '
                               f'that is known: {type(error).__name__}: {why}') from error
        shallow, deep = totals
        layer = (deep - shallow) / 2
        yield peer.name, kernels.figures(layer, shallow - few * layer, config.n_layer)
