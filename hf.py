"""Writes Hugging Face models: folders of config.json and safetensors, for transformers and PEFT.

$ python hf.py export --ckpt=checkpoints_fp8/latest.pt --out=hf_model       # for AutoModelForCausalLM
$ python hf.py export --ckpt=checkpoints_fp8/latest.pt --out=hf_fp8 --fp8   # in FP8, like Qwen's FP8 releases
$ python hf.py merge --ckpt=checkpoints_fp8/latest.pt --out=merged  # base + adapters in one checkpoint
$ python hf.py save --ckpt=checkpoints_fp8/latest.pt --out=adapter  # a folder that PEFT loads

The other scripts open such folders themselves, but for FP8's, by fp8gpt/pretrained.py.
"""
import sys
from os.path import expanduser

from configurator import DataError, Parser, SettingError, one_line_errors, say


COMMANDS = {
    'export': 'write a checkpoint, adapters merged, as a folder for transformers',
    'merge': 'write base + adapters of a run with lora_rank as one checkpoint, latest.pt in a folder',
    'save': 'write the adapters of a run with lora_rank as a folder for PEFT',
}


def arguments(words):
    """Return the parsed command line. Raises SettingError."""
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest='command', required=True)
    for name, what in COMMANDS.items():
        command = commands.add_parser(name, help=what, doc=what)
        command.add_argument('--ckpt', type=expanduser, default='checkpoints_fp8/latest.pt',
                             help='a .pt file, or its folder')
        command.add_argument('--out', type=expanduser, required=True, help='the folder to write')
        if name == 'export':
            command.add_argument('--dtype', default='fp32', choices=['fp32', 'bf16'], help='fp32 is exact')
            command.add_argument('--fp8', action='store_true', help='linears in FP8, one scale per 128 x 128')
    return parser.parse_args(words)


if __name__ == '__main__':
    one_line_errors()
    asked = arguments(sys.argv[1:])
    from fp8gpt import files
    files.checkpoint_file(asked.ckpt)

# Imported only now: --help and a mistyped setting are answered without waiting for torch.
import contextlib
import glob
import os
import shutil

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file

from fp8gpt import checkpoint, files, lora, pretrained
from fp8gpt.fp8.linear import E4M3, Quantizer
from fp8gpt.hf_families import is_gpt2, split, tensors_of, their_config
from fp8gpt.tokenizer import EOT, is_pretrained, keep_files
from fp8gpt.run import DTYPES
from model import GPTConfig

BLOCK = 128             # rows and columns of a block of an FP8 weight, as in Qwen's releases

# ----------------------------------------------------------------------------------------------------- models

def load(name, **options):
    """Return the GPT of a Hugging Face model, a folder or org/name on the hub. options: see GPT. Raises what
    pretrained.source does."""
    return pretrained.model_of(pretrained.source(name), **options)


@contextlib.contextmanager
def new_folder(path):
    """Yield a folder that is renamed to `path` at the end of the block; an error leaves no folder. Raises
    SettingError where path exists already, DataError where the folder cannot be written."""
    path = os.path.normpath(path)
    if os.path.lexists(path):
        raise SettingError(f'{path} exists already: remove it, or name another folder as --out')
    temporary = files.temporary_name(path)
    for old in files.temporary_names(glob.escape(path)):
        shutil.rmtree(old, ignore_errors=True)
    try:
        os.makedirs(temporary)
        yield temporary
        for file in os.scandir(temporary):  # safetensors writes files that their owner alone can read
            os.chmod(file, os.stat(temporary).st_mode & 0o666)
        os.sync()
        os.rename(temporary, path)
    except (OSError, SafetensorError, UnicodeError) as error:
        raise DataError(f'could not write {path} ({error})') from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def their_tensors(config, weights, dtype, fp8):
    """Return ({transformers' name: tensor}, the linears that are not in FP8) of a model's weights, which are
    taken out of the dict, so that one at a time is in memory twice. fp8: whether linears are to be."""
    quantise_blocks = Quantizer(E4M3, (BLOCK, BLOCK), power_of_two=False, margin=0)
    tensors, plain = {}, ['lm_head']
    for own in [*weights]:
        weight = weights.pop(own).detach()
        parts = split(config, own, weight)
        is_linear = own.startswith('h.') and weight.dim() == 2 and not is_gpt2(config)      # it has Conv1D
        # transformers reads smaller blocks as parts of a larger one; vLLM computes q, k and v as one linear
        smaller = any(size % BLOCK for part in parts.values() for size in part.shape)
        for name, part in parts.items():
            if fp8 and is_linear and not smaller:
                tensors[name], tensors[f'{name}_scale_inv'], *_ = quantise_blocks(part)
                continue
            tensors[name] = part.to(dtype).clone(memory_format=torch.contiguous_format)
            if is_linear:
                plain.append(name.removesuffix('.weight'))
    return tensors, plain


def export(ckpt, out, dtype='fp32', fp8=False):
    """Write a checkpoint, adapters merged, as a new folder for transformers; return a line to print. dtype:
    'fp32', which is exact, or 'bf16'. fp8: whether the linears except the head are stored in FP8. Raises
    SettingError where transformers does not have the model's architecture, MissingError where the tokenizer's
    files are missing, DataError."""
    state = pretrained.with_merged_adapters(checkpoint.read(ckpt))
    config = GPTConfig(**state['model_config'])
    tokenizer = pretrained.tokenizer_of(ckpt, state)
    theirs = their_config(config) | {
        'torch_dtype': str(DTYPES[dtype]).removeprefix('torch.'),
        'bos_token_id': tokenizer.start,
        'eos_token_id': list(tokenizer.stops) if len(tokenizer.stops) > 1 else tokenizer.eot,
        # transformers does not build a model without that row
        'pad_token_id': tokenizer.pad if tokenizer.pad in range(config.vocab_size) else None,
    }
    tensors, plain = their_tensors(config, state['weights'], DTYPES[dtype], fp8)
    line = f'{out}: {theirs["architectures"][0]}, step {state["step"]}, {dtype}'
    if fp8:
        in_fp8 = sum(tensor.dtype == E4M3 for tensor in tensors.values())
        if not in_fp8:
            raise SettingError(f'--fp8 stores linear layers whose sizes are multiples of {BLOCK}, and this '
                               'model has none in transformers: leave it out')
        theirs['quantization_config'] = {
            'quant_method': 'fp8',
            'fmt': 'e4m3',
            'activation_scheme': 'dynamic',
            'weight_block_size': [BLOCK, BLOCK],
            'modules_to_not_convert': plain,
        }
        line += f', {in_fp8} tensors of linears in FP8'
    with new_folder(out) as folder:
        files.write_json(f'{folder}/config.json', theirs)
        write_tokenizer(tokenizer, folder)
        save_torch_state_dict(tensors, folder)
    return line


def save_adapters(state, out, tokenizer):
    """Write the adapters of a checkpoint, and its tokenizer, to a new folder, as PEFT does. Raises as
    new_folder does."""
    about, config = state['lora'], GPTConfig(**state['model_config'])
    parts, tensors = tensors_of(config), {}
    for name, p in state['weights'].items():        # h.0.attn.qkv.lora.q_proj.A.weight
        linear, _, adapter = name.partition('.lora.')
        adapter, matrix, _ = adapter.split('.')
        [theirs] = [part for part in parts[f'{linear}.weight'] if part.endswith(f'.{adapter}.weight')]
        theirs = theirs.removesuffix('weight')
        tensors[f'base_model.model.{theirs}lora_{matrix}.weight'] = p.detach().contiguous()
    settings = {
        'peft_type': 'LORA',
        'task_type': 'CAUSAL_LM',
        'base_model_name_or_path': about['base'],
        'revision': state.get('revisions', {}).get(about['base']),
        'r': about['rank'],
        'lora_alpha': about['alpha'],
        'target_modules': lora.Spec.of(about, prefix='').chosen(config),
        'fan_in_fan_out': is_gpt2(config),      # GPT-2's linears there hold W^T
        'bias': 'none',
    }
    with new_folder(out) as folder:
        save_file(tensors, f'{folder}/adapter_model.safetensors')
        files.write_json(f'{folder}/adapter_config.json', settings)
        write_tokenizer(tokenizer, folder)


# ------------------------------------------------------------------------------------------------- tokenizers

GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

def write_tokenizer(tokenizer, folder):
    """Write the files that AutoTokenizer reads: those of a model's tokenizer, under the class that takes
    tokenizer.json as it is; for byte and gpt2, those of transformers' converter. Raises DataError."""
    path = f'{folder}/tokenizer_config.json'
    if tokenizer.folder is None:
        from transformers.convert_slow_tokenizer import TikTokenConverter

        class Converter(TikTokenConverter):
            def load_tiktoken_bpe(self, ranks):     # they are not in a file here
                return ranks
        ranks = {tokenizer.decode_bytes([i]): i for i in range(tokenizer.eot)}
        converter = Converter(ranks, GPT2_WORDS, extra_special_tokens=[EOT])
        converter.converted().save(f'{folder}/tokenizer.json')
        settings = dict.fromkeys(('bos_token', 'eos_token', 'unk_token'), EOT)      # CTranslate2 wants all
        settings['clean_up_tokenization_spaces'] = False
    else:
        tokenizer.save(folder)
        settings = files.read_json(path)
        # transformers 4, which many a server has, reads neither this list nor this class of transformers 5
        if isinstance(settings.get('extra_special_tokens'), list):
            settings['additional_special_tokens'] = settings.pop('extra_special_tokens')
            files.write_json(path, settings)
    files.write_json(path, {**settings, 'tokenizer_class': 'PreTrainedTokenizerFast'})


if __name__ == '__main__':
    if asked.command == 'export':
        say(export(asked.ckpt, asked.out, asked.dtype, asked.fp8))
    else:
        state = checkpoint.read(asked.ckpt)
        if not state.get('lora'):
            raise SettingError(f'{asked.ckpt} has no adapters: it was not trained with lora_rank')
        if asked.command == 'save':
            save_adapters(state, asked.out, pretrained.tokenizer_of(asked.ckpt, state))
            base = state['lora']['base']
            if not is_pretrained(base):
                say(f'PEFT loads these on a Hugging Face model: export {base} by `python hf.py export` and '
                      'name that folder as base_model_name_or_path in adapter_config.json')
        else:
            merged = pretrained.with_merged_adapters(state)
            with new_folder(asked.out) as folder:
                files.write(f'{folder}/latest.pt', lambda file: torch.save(merged, file))
                keep_files(os.path.dirname(files.checkpoint_of(asked.ckpt)) or '.', folder)
        say(f'{asked.command}d {asked.ckpt}, step {state["step"]}: {asked.out}')
