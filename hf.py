"""Hugging Face models in and out: folders of config.json and safetensors, as transformers has them.

$ python hf.py export --ckpt=checkpoints_fp8/latest.pt --out=hf_model       # for AutoModelForCausalLM
$ python hf.py export --ckpt=checkpoints_fp8/latest.pt --out=hf_fp8 --fp8   # as Qwen's FP8 releases
$ python hf.py merge --ckpt=checkpoints/latest.pt --out=merged.pt   # base + adapters: a checkpoint as any
$ python hf.py save --ckpt=checkpoints/latest.pt --out=adapter      # a folder that PEFT loads

    model = hf.load('hf_model')                     # a GPT; of the hub: hf.load('openai-community/gpt2')
    source = hf.source('Qwen/Qwen3-0.6B')           # architecture now, weights when they are asked for

What a config.json says is taken over or refused by name (fp8gpt/hf_families.py), and so is every tensor: none
is left out, none is made up.
"""
import sys

from configurator import DataError, MachineError, MissingError, Parser, SettingError, one_line_errors


def arguments(words):
    """The command line. Raises SettingError."""
    parser = Parser(__doc__)
    export = parser.add_command('export', 'write a checkpoint as a folder for transformers')
    export.add('--ckpt', 'checkpoints_fp8/latest.pt', help='the checkpoint')
    export.add('--out', required=True, help='the folder to write')
    export.add('--dtype', 'fp32', choices=['fp32', 'bf16'], help='of weights; fp32 is exact')
    export.add('--fp8', False, help='linears in FP8, with a scale for each 128 x 128')
    for name, what in (('merge', 'write base + adapters as a checkpoint'),
                       ('save', 'write adapters as a folder for PEFT')):
        command = parser.add_command(name, what)
        command.add('--ckpt', 'checkpoints/latest.pt', help='a checkpoint of a run with lora_rank')
        command.add('--out', required=True, help='the checkpoint or folder to write')
    return parser.parse_args(words)


if __name__ == '__main__':
    one_line_errors()
    arguments(sys.argv[1:])

# Imported only now: --help and a mistyped setting are answered without waiting for torch.
import collections.abc
import contextlib
import dataclasses
import functools
import os
import shutil

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fp8gpt import checkpoint, files
from fp8gpt.hf_families import (
    FAMILIES, MADE_BY, NO_WEIGHT, family_of, pieces_of, read_config, their_config)
from fp8gpt.hf_tokens import identity, write_tokenizer
from fp8gpt.tokenizer import get_tokenizer, keep_files
from model import GPT, GPTConfig, Linear

DTYPES = {'fp32': torch.float32, 'bf16': torch.bfloat16}
SMALL_FILES = ['*.json', '*.jinja']
WEIGHTS = ['model*.safetensors', 'model.safetensors.index.json']
SHARD = 5e9             # bytes of a file of weights, at most
BLOCK = 128             # rows and columns of a block of an FP8 weight
E4M3 = torch.float8_e4m3fn


# --------------------------------------------------------------------------------------------------------- in

def load(name, linear=Linear, dtype=torch.bfloat16):
    """The GPT of a folder or a hub repository, org/name; linear, dtype: see GPT. Peak memory: its weights and
    one tensor. Raises SettingError for a model that cannot be had here, MissingError, DataError,
    MachineError."""
    found = source(name)
    gpt = GPT(GPTConfig(**found['model_config']), linear, dtype, seed=None)
    gpt.load_weights(found['weights'])
    return gpt


def source(name):
    """What a run starts from, as a checkpoint has it: 'model_config', 'tokenizer' (its identity, '' where the
    folder has none), 'config', of which a model has none, and 'weights', which are fetched and read when they
    are asked for. Raises as load does."""
    folder = fetch(name, SMALL_FILES)
    path = os.path.join(folder, 'config.json')
    if not os.path.isfile(path):
        raise MissingError(f'{name} is no Hugging Face model: it has no config.json')
    theirs = files.read_json(path)
    try:
        config, blocks = read_config(theirs), read_quantisation(theirs)
    except SettingError as error:
        raise SettingError(f'{name}: {error}') from None
    except (KeyError, TypeError) as error:
        raise DataError(f'{path} is not whole ({error})') from None
    weights = Weights(name, config, FAMILIES[theirs['model_type']], blocks)
    fields = dataclasses.asdict(config)
    return {'model_config': fields, 'tokenizer': identity(folder), 'config': {}, 'weights': weights}


def read_quantisation(theirs):
    """(rows, columns) of the blocks of FP8 weights; None where none are. Raises SettingError for others."""
    found = theirs.get('quantization_config')
    if not found:
        return None
    method, block = found.get('quant_method'), found.get('weight_block_size')
    if method != 'fp8' or found.get('fmt', 'e4m3') != 'e4m3' or not block:
        raise SettingError(f'quant_method={method}, weight_block_size={block} is not built: '
                           'fp8 in blocks, of e4m3, is')
    return tuple(block)


def fetch(name, patterns):
    """The folder of a model: itself, or what the hub has of an org/name, files by patterns, in its cache.
    Raises MachineError, one line, where the hub cannot be reached or refuses."""
    if os.path.isdir(name):
        return name
    try:
        from huggingface_hub import snapshot_download
        return snapshot_download(name, allow_patterns=patterns)
    except ImportError:
        raise MachineError('huggingface_hub is missing: `pip install huggingface_hub`') from None
    except (OSError, ValueError) as error:  # no network, no such name, a full disk, a refusal
        answers = [getattr(each, 'response', None) for each in (error, error.__cause__)]
        status = next((answer.status_code for answer in answers if answer is not None), type(error).__name__)
    remedy = 'go online once, or name a folder that holds its files'
    if status in (401, 403):
        remedy = f'accept the licence at https://huggingface.co/{name}, and set HF_TOKEN'
    if status == 404:
        remedy = 'the hub has none of that name'
    raise MachineError(f'{name} is no folder and cannot be fetched ({status}): {remedy}')


class Weights(collections.abc.Mapping):
    """name -> a GPT's weight, put together of safetensors' mapped files when it is asked for."""

    def __init__(self, name, config, family, blocks):
        self.name, self.family, self.blocks = name, family, blocks
        self.shapes = checkpoint.weight_shapes(config)
        self.pieces = collections.defaultdict(list)
        for piece in pieces_of(config, family):
            self.pieces[piece.own].append(piece)

    def __iter__(self):
        return iter(self.shapes)

    def __len__(self):
        return len(self.shapes)

    def __getitem__(self, own):
        parts = [self.read(piece) for piece in self.pieces[own]]
        missing = self.shapes[own][0] - sum(len(part) for part in parts)
        if missing:  # rows that pad the vocabulary
            parts.append(parts[0].new_zeros(missing, *self.shapes[own][1:]))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def read(self, piece):
        file, name = self.tensors[piece.name]
        tensor = file.get_tensor(name)
        if tensor.dtype == E4M3:
            file, name = self.tensors[f'{piece.name}_scale_inv']
            tensor = dequantised(tensor, file.get_tensor(name), self.blocks)
        return tensor.t() if piece.transposed else tensor

    @functools.cached_property
    def tensors(self):
        """their name, without family.body -> (open file, name in it). Raises DataError where those are not
        the model's, by name and shape."""
        folder = fetch(self.name, WEIGHTS)
        found = {}
        for path in weight_files(folder):
            try:
                file = safe_open(path, framework='pt')
            except (SafetensorError, OSError) as error:
                raise DataError(f'{path} cannot be read ({str(error)[:100]})') from None
            found |= {name.removeprefix(self.family.body): (file, name) for name in file.keys()}
        wanted = {piece.name: piece.stored_shape for own in self.pieces.values() for piece in own}
        in_fp8 = [name for name, (file, stored) in found.items()
                  if file.get_slice(stored).get_dtype() == 'F8_E4M3' and name in wanted]
        rows, columns = self.blocks or (BLOCK, BLOCK)
        for name in in_fp8:
            N, K = wanted[name]
            wanted[f'{name}_scale_inv'] = -(-N // rows), -(-K // columns)
        optional = {'lm_head.weight', *filter(NO_WEIGHT.fullmatch, found)}  # a tied head is the embedding
        odd = sorted(wanted.keys() - found.keys() | found.keys() - wanted.keys() - optional)
        if odd:
            raise DataError(f'{self.name}: {len(odd)} tensors are missing or too many, {odd[0]} first')
        for name, shape in wanted.items():
            file, stored = found[name]
            there = tuple(file.get_slice(stored).get_shape())
            if there != shape:
                raise DataError(f'{self.name}: {stored} is {there}, by its config.json {shape}')
        return found


def weight_files(folder):
    """Paths of a folder's safetensors. Raises MissingError."""
    index = os.path.join(folder, 'model.safetensors.index.json')
    names = ['model.safetensors']
    if os.path.isfile(index):
        names = sorted(set(files.read_json(index).get('weight_map', {}).values()))
    paths = [os.path.join(folder, name) for name in names]
    for path in paths:
        if not os.path.isfile(path):
            raise MissingError(f'there is no {path}: safetensors are what is read')
    return paths


def dequantised(weight, scale_inv, block):
    """fp32 of an FP8 weight (N, K), of which each `block` (rows, columns) has an entry in scale_inv."""
    scales = scale_inv.float()
    for dim, size in enumerate(block):
        scales = scales.repeat_interleave(size, dim).narrow(dim, 0, weight.shape[dim])
    return weight.float() * scales


# -------------------------------------------------------------------------------------------------------- out

def export(ckpt, out, dtype='fp32', fp8=False):
    """Writes a checkpoint to the folder `out`, for transformers; returns the line that says so. dtype:
    'fp32', which is exact, or 'bf16'. fp8: its linears in FP8, but the head. The folder is whole or not
    there, and an earlier export is replaced. Raises SettingError where no architecture of transformers is the
    model's, for adapters, and for a folder that holds something else; MissingError where the tokenizer's
    files are gone; DataError."""
    state = checkpoint.load(ckpt)
    if state.get('lora'):
        merged = os.path.join(os.path.dirname(ckpt), 'merged.pt')
        raise SettingError(f'{ckpt} holds adapters alone: merge them with their base, `python hf.py merge '
                           f'--ckpt={ckpt} --out={merged}`, and export that')
    config = GPTConfig(**state['model_config'])
    tokenizer = get_tokenizer(state['tokenizer'], os.path.dirname(ckpt))
    kind, family = family_of(config)
    if fp8 and family.transposed:
        raise SettingError(f'--fp8 is of linear layers, and {family.architecture} has none: leave it out')
    out = os.path.normpath(out)
    with files.alone(out), contextlib.ExitStack() as at_end:
        if os.path.exists(out) and not replaceable(out):
            raise SettingError(f'{out} is there, and no export: --out names another folder')
        temporary, old = f'{out}.tmp', f'{out}.old'
        for leftover in (temporary, old):
            shutil.rmtree(leftover, ignore_errors=True)
            at_end.callback(shutil.rmtree, leftover, ignore_errors=True)
        os.makedirs(temporary)
        write_tokenizer(tokenizer, temporary)
        theirs = their_config(config, tokenizer.eot, dtype) | {'bos_token_id': tokenizer.start}
        pieces = pieces_of(config, family)
        in_fp8 = {piece.name for piece in pieces if fp8 and can_be_fp8(piece)}
        if fp8:
            theirs['quantization_config'] = quantisation(pieces, in_fp8, family)
        try:
            write_weights(temporary, state['weights'], (pieces, in_fp8, family.body), DTYPES[dtype])
        except (OSError, SafetensorError) as error:
            raise DataError(f'could not write {out} ({error})') from None
        files.write_json(os.path.join(temporary, 'config.json'), theirs)
        generation = os.path.join(temporary, 'generation_config.json')
        if not os.path.exists(generation):  # a tokenizer.json's makers may have told more
            ends = {'bos_token_id': tokenizer.start, 'eos_token_id': tokenizer.eot}
            files.write_json(generation, ends)
        os.sync()
        if os.path.exists(out):
            os.rename(out, old)
        os.rename(temporary, out)
    numbers = f'{dtype}, {len(in_fp8)} tensors of linears in FP8' if fp8 else dtype
    note = ''
    if kind == 'qwen2' and state['tokenizer'] == 'gpt2':
        note = '; its tokenizer by PreTrainedTokenizerFast: AutoTokenizer cuts words as Qwen2 does'
    return f'{out}: {family.architecture}, step {state["step"]}, {numbers}{note}'


def replaceable(out):
    """Whether a folder is empty, or an earlier export."""
    if not os.path.isdir(out):
        return False
    made_by = files.read_json(os.path.join(out, 'config.json')).get('made_by')
    return not os.listdir(out) or made_by == MADE_BY


def can_be_fp8(piece):
    """Whether a tensor is a linear's, in whole blocks: transformers takes parts of one for smaller blocks."""
    inside = piece.own.startswith('h.') and piece.own.endswith('.weight') and len(piece.shape) == 2
    return inside and not any(size % BLOCK for size in piece.shape)


def quantisation(pieces, in_fp8, family):
    """config.json's quantization_config."""
    others = [family.body + piece.module for piece in pieces
              if piece.own.startswith('h.') and len(piece.shape) == 2 and piece.name not in in_fp8]
    return {
        'quant_method': 'fp8',
        'fmt': 'e4m3',
        'activation_scheme': 'dynamic',
        'weight_block_size': [BLOCK, BLOCK],
        'modules_to_not_convert': ['lm_head', *others],
    }


def quantised(weight):
    """(FP8 data (N, K), fp32 scale_inv (N / BLOCK, K / BLOCK)) of a weight (N, K)."""
    N, K = weight.shape
    blocks = weight.float().view(N // BLOCK, BLOCK, K // BLOCK, BLOCK)
    amax = blocks.abs().amax((1, 3), keepdim=True)
    scale_inv = torch.where(amax > 0, amax / torch.finfo(E4M3).max, 1.0)
    return (blocks / scale_inv).to(E4M3).view(N, K), scale_inv[:, 0, :, 0].contiguous()


def write_weights(folder, weights, layout, dtype):
    """Writes safetensors of at most SHARD bytes, and their index where there are several. layout: (Pieces,
    names of those in FP8, where the others' names begin)."""
    pieces, in_fp8, body = layout
    shards, room = [], 0
    for piece in pieces:
        size = torch.Size(piece.shape).numel() * (1 if piece.name in in_fp8 else dtype.itemsize)
        if size > room:
            shards.append([])
            room = SHARD
        shards[-1].append(piece)
        room -= size
    index, total = {}, 0
    for number, shard in enumerate(shards, 1):
        tensors = {}
        for piece in shard:
            rows = weights[piece.own].detach().narrow(0, piece.start, piece.shape[0])
            name = piece.name if piece.own.startswith('lm_head') else body + piece.name
            if piece.name in in_fp8:
                tensors[name], tensors[f'{name}_scale_inv'] = quantised(rows)
            else:
                tensors[name] = (rows.t() if piece.transposed else rows).to(dtype).contiguous()
        file = 'model.safetensors'
        if len(shards) > 1:
            file = f'model-{number:05d}-of-{len(shards):05d}.safetensors'
        save_file(tensors, os.path.join(folder, file), metadata={'format': 'pt'})
        index |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        whole = {'metadata': {'total_size': total}, 'weight_map': index}
        files.write_json(os.path.join(folder, 'model.safetensors.index.json'), whole)


def of_adapters(command, ckpt, out):
    """Merge or save the adapters of a checkpoint; return the line that says so. Raises SettingError,
    MissingError, DataError."""
    from fp8gpt import lora     # late: it imports this file
    state = checkpoint.load(ckpt)
    if not state.get('lora'):
        raise SettingError(f'{ckpt} has no adapters: it was not trained with lora_rank')
    if command == 'save':
        lora.save(state, out)
    else:
        merged = lora.whole(state)
        files.write(out, lambda file: torch.save(merged, file))
        keep_files(os.path.dirname(ckpt) or '.', os.path.dirname(out) or '.')
    return f'{command}d {ckpt}, step {state["step"]}: {out}'


if __name__ == '__main__':
    asked = arguments(sys.argv[1:])
    if asked.command == 'export':
        print(export(asked.ckpt, asked.out, asked.dtype, asked.fp8))
    else:
        print(of_adapters(asked.command, asked.ckpt, asked.out))
