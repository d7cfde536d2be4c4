"""Opens any model: a checkpoint, adapters merged into their base, or a Hugging Face model; and its tokenizer.

    state, line = opened('checkpoints_fp8/latest.pt')   # or a folder of transformers, or org/name on the hub
    model = model_of(state)                             # a GPT
    tokenizer = tokenizer_of('checkpoints_fp8/latest.pt', state)

Every field of a config.json that changes the model is used or refused by name (hf_families.py), and so is
every tensor. Each weight of a Hugging Face model is read when it is used.
"""
import dataclasses
import functools
import glob
import math
import os
import re

import torch
from safetensors import SafetensorError, safe_open

from configurator import HERE, Config, DataError, MissingError, SettingError, configure, say_once
from fp8gpt import checkpoint, files
from fp8gpt.hf_families import FAMILIES, is_gpt2, read_config, split, tensors_of
from fp8gpt.tokenizer import (
    GENERATION, REVISIONS, fetch_files, get_tokenizer, identity_of_folder, is_pretrained)
from model import GPT, PRESETS, GPTConfig

SMALL_FILES = ['*.json', '*.jinja']
WEIGHTS = 'model.safetensors'
INDEX = f'{WEIGHTS}.index.json'         # names the files where WEIGHTS is not there, as in transformers
WEIGHT_DTYPES = 'F32', 'BF16', 'F16'
NO_WEIGHT = re.compile(r'.*\.(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)')  # tables in older files


def fine_tuning(script, config):
    """Return the settings of a training script, Config, with what a run that starts anew from a Hugging Face
    model takes: the model's tokenizer, unless it is given, and, where no config file is named, the one for
    fine-tuning, which is printed. Raises what configure does, and for a name that is no model's."""
    name, resume = config['init_from'], config['resume']
    begun = resume and (resume != 'auto' or glob.glob('*.pt', root_dir=config['checkpoint_dir']))
    if begun or is_built_here(name):
        return config
    if not config.files:
        path = os.path.join(HERE, 'config', 'finetune_lora.py' if config['lora_rank'] else 'finetune.py')
        say_once(f'settings  {os.path.relpath(path)}, as no config file is named')
        named = configure(script, [path])
        config = Config(config.script, named.files, config.typed, named.stem)
    if 'tokenizer' not in config.given:
        config['tokenizer'] = name
        config.given.add('tokenizer')
    return config


def opened(ckpt):
    """Return a model and a line about it: a checkpoint, its adapters merged, or what `source` returns for a
    Hugging Face model. Raises SettingError, MissingError, DataError, MachineError."""
    if is_pretrained(ckpt):
        return source(ckpt), f'# {ckpt}: a Hugging Face model'
    state = with_merged_adapters(checkpoint.read(ckpt))
    return state, f'# {ckpt}: step {state["step"]}, trained in {state["precision"]["name"]}'


def model_of(state, device='cpu', vocab_size=math.inf, **options):
    """Return the GPT of a model that `opened` returned, on a device, with its weights. vocab_size: its
    tokenizer's, so that what a model has beyond it counts as padding and is never drawn. options: GPT's."""
    gpt = GPT(GPTConfig(**state['model_config']), seed=None, **options).to(device)
    gpt.load_weights(state['weights'])
    gpt.config = dataclasses.replace(gpt.config, vocab_size=min(vocab_size, gpt.config.vocab_size))
    return gpt


def tokenizer_of(ckpt, state):
    """Return the tokenizer of a model that `opened` returned. Raises what get_tokenizer does."""
    if is_pretrained(ckpt):
        return get_tokenizer(ckpt)
    return get_tokenizer(state['tokenizer'], os.path.dirname(files.checkpoint_of(ckpt)))


def generation_of(ckpt):
    """Return the content of the generation_config.json of a model, {} where it has none."""
    folder = os.path.dirname(files.checkpoint_of(ckpt))
    if is_pretrained(ckpt):
        folder = fetch_files(ckpt, SMALL_FILES)
    return files.read_json(os.path.join(folder, GENERATION))


def base(init_from, adapters=False):
    """Return the model that a new run, or adapters, start from: a checkpoint, its adapters merged, or what
    `source` returns for a Hugging Face model; None for random weights. adapters: whether it is the base of
    adapters. Raises SettingError for any other name and for adapters on adapters, and what `opened` raises.
    """
    if init_from in ('scratch', *PRESETS):
        return None
    if not is_built_here(init_from):
        return source(init_from)
    state = checkpoint.read(init_from)
    if adapters and state.get('lora'):
        raise SettingError(f'{init_from} holds adapters, and adapters train beside a whole model: first '
                           f'`python hf.py merge --ckpt={init_from} --out=merged`, then --init_from=merged/'
                           'latest.pt; adapters that were trained on it want that file in its place')
    return with_merged_adapters(state)


def is_built_here(init_from):
    """Return whether that is scratch, a preset or a checkpoint, not a Hugging Face model. Raises SettingError
    for any other name, MissingError where the checkpoint is not there."""
    if init_from in ('scratch', *PRESETS):
        return True
    if is_pretrained(init_from):
        return False
    if '/' in init_from and not os.path.exists(init_from):
        raise MissingError(f'init_from={init_from}: there is no such folder or checkpoint')
    if not files.checkpoint_of(init_from).endswith('.pt'):
        raise SettingError(f'init_from={init_from}: there are scratch, {", ".join(PRESETS)}, checkpoints '
                           '(*.pt), and Hugging Face models: folders, and org/name on the hub; '
                           '--resume=auto goes on with a run')
    return bool(files.checkpoint_file(init_from))


def base_of_adapters(state):
    """Return what `base` returns for the base of a checkpoint's adapters. Raises MissingError where it is not
    there, DataError where it has another config than the checkpoint, and what `base` raises."""
    name = state['lora']['base']
    if is_pretrained(name) and not os.path.isdir(name):
        say_once(f'# the base of the adapters is {name}, on the hub')
    elif name not in ('scratch', *PRESETS) and not os.path.exists(name):
        raise MissingError(f'the base of the adapters, {name}, is not there: put it back, or a link')
    start = base(name, adapters=True)
    if start and start['model_config'] != state['model_config']:
        raise DataError(f'{name} has another architecture now than when the adapters were trained on it: put '
                        'that model back')
    return start


def with_merged_adapters(state):
    """Return a checkpoint with the weights of a whole model: the checkpoint itself, or its adapters merged
    into their base, without the state of an optimizer. Raises what base raises, and DataError for another
    base."""
    about = state.get('lora')
    if not about:
        return state
    from fp8gpt import lora     # late: most checkpoints have no adapters
    REVISIONS.update(state.get('revisions', {}))
    start = base_of_adapters(state)
    model = GPT(GPTConfig(**state['model_config']), seed=about['seed'])
    if start:
        model.load_weights(start['weights'])
    lora.add_saved(model, state)
    return {
        **state,
        'weights': lora.merge(model),
        'optimizer': {},
        'lora': None,
        'fp8_state': {},
        'config': {**state['config'], 'lora_rank': 0, 'param_dtype': 'fp32'},
    }


# ----------------------------------------------------------------------------------------------- Hugging Face

def source(name):
    """Return a Hugging Face model, of a folder or of org/name on the hub, as a dict with a checkpoint's keys:
    'model_config', 'tokenizer' (its identity, '' where the folder has none), 'config', which is empty, and
    'weights', a Weights. Raises SettingError for an architecture that GPT does not have, MissingError,
    DataError, MachineError."""
    folder = fetch_files(name, SMALL_FILES)
    path = os.path.join(folder, 'config.json')
    adapters = files.read_json(os.path.join(folder, 'adapter_config.json'))
    if adapters:    # transformers adds them to the base, though the folder may hold the base's files, too
        raise SettingError(f'{name} holds adapters in PEFT\'s format, of '
                           f'{adapters.get("base_model_name_or_path")}: merge them by PEFT '
                           '(merge_and_unload, save_pretrained), and name that folder')
    if not os.path.isfile(path):
        raise MissingError(f'{name} is no Hugging Face model: it has no config.json{files.checkpoints()}')
    theirs = files.read_json(path)
    if not theirs:
        raise DataError(f'{path} holds no JSON object: fetch or write it again')
    try:
        config = read_config(theirs)
        shapes = checkpoint.weight_shapes(config)
    except SettingError as error:
        raise SettingError(f'{name}: {error}') from None
    except Exception as error:      # of any kind, as a stranger's file has it
        raise DataError(f'{path} describes no model that can be read ({error!r:.100})') from None
    positions = FAMILIES[theirs['model_type']].fields['block_size']
    if theirs.get(positions) is None:
        say_once(f'# {name}: config.json has no {positions}: it is {config.block_size:,}, as in transformers')
    return {
        'model_config': dataclasses.asdict(config),
        'tokenizer': identity_of_folder(folder),
        'config': {},
        'weights': Weights(name, config, shapes),
    }


class Weights:
    """Maps a GPT's names to its weights, in fp32. Each is read from memory-mapped safetensors files when it
    is used, so the peak memory of a GPT that loads them is the GPT and one tensor. config: the GPTConfig by
    config.json. shapes: {name: shape} of the GPT's weights."""

    def __init__(self, name, config, shapes):
        self.name, self.config, self.shapes = name, config, shapes
        if os.path.isdir(name):
            self.tensors  # noqa: B018  opened before a model is built that they do not hold

    def keys(self):
        return self.shapes.keys()

    def __getitem__(self, own):
        weight = torch.zeros(self.shapes[own])      # as the rows that pad the vocabulary stay
        for name, part in split(self.config, own, weight).items():
            tensor = self.tensors[name][:]
            if not tensor.isfinite().all():
                raise DataError(f'{self.name}: {name} holds NaN or infinity')
            part.copy_(tensor)
        return weight

    @functools.cached_property
    def tensors(self):
        """Return {name in transformers: slice of an open file}. Raises MissingError without files, DataError
        where names, shapes or dtypes are not the model's."""
        folder, listed = fetch_files(self.name, [WEIGHTS]), [WEIGHTS]
        if not os.path.isfile(os.path.join(folder, WEIGHTS)):
            listed = self.listed(os.path.join(folder, INDEX))
            fetch_files(self.name, [glob.escape(file) for file in listed])
        found, body = {}, 'transformer.' if is_gpt2(self.config) else 'model.'
        for file in listed:
            path = os.path.join(folder, file)
            if not os.path.isfile(path):
                raise MissingError(f'{path} is not there, though {INDEX} names it: put it there')
            try:
                opened_file = safe_open(path, framework='pt')
            except (SafetensorError, OSError) as error:
                raise DataError(f'{path} cannot be read ({str(error)[:100]}): fetch it again, '
                                'after a git clone by `git lfs pull`') from None
            for stored in opened_file.keys():   # OpenAI's file of GPT-2 leaves the body's name out
                name = stored if stored.startswith(('lm_head.', body)) else body + stored
                if not NO_WEIGHT.fullmatch(name):
                    found[name] = opened_file.get_slice(stored)
        self.check(found)
        return found

    def listed(self, index):
        """Return the files that an index names. Raises MissingError where there is none or it names none."""
        weight_map = files.read_json(index).get('weight_map')
        if not weight_map or not isinstance(weight_map, dict):
            raise MissingError(f'{self.name} has no {WEIGHTS}, and no {INDEX} that names other files: '
                               "transformers' from_pretrained and save_pretrained write it from others")
        return sorted({*map(str, weight_map.values())})

    def check(self, found):
        """Raise DataError unless `found`, as `tensors` returns it, holds the model's tensors. A head that is
        stored although it is the embedding is taken out of it."""
        parts = tensors_of(self.config)
        wanted = {name: tuple(part.shape) for own in parts.values() for name, part in own.items()}
        head, [embedding] = 'lm_head.weight', parts['wte.weight']
        if head not in wanted and {head, embedding} <= found.keys():
            second = found.pop(head)[:].float()
            if not torch.equal(second, found[embedding][:].float()):
                raise DataError(f'{self.name}: {head} is not {embedding}, though config.json says '
                                'tie_word_embeddings: write false there')
        shapes = {name: tuple(tensor.get_shape()) for name, tensor in found.items()}
        if odd := sorted(dict(wanted.items() ^ shapes.items())):
            there, asked = (each.get(odd[0], 'missing') for each in (shapes, wanted))
            raise DataError(f'{self.name}: {len(odd)} tensors are not those of its config.json; the first, '
                            f'{odd[0]}, is {there} in the files, {asked} by config.json: load the model by '
                            'transformers, and save_pretrained writes what is read here')
        for name, tensor in found.items():
            if (dtype := tensor.get_dtype()) not in WEIGHT_DTYPES:
                raise DataError(f'{self.name}: {name} is {dtype}: {", ".join(WEIGHT_DTYPES)} are read')
