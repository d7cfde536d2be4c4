"""Write, find, read and check token shards: datasets by name, their folders, and the file format.

A shard is llm.c's: 256 little-endian int32 (magic, version, token count), then the tokens. Magic 20240520
with version 1 holds uint16, 20240801 with version 7 holds uint32. A dataset is a folder of train_*.bin and
val_*.bin; in names by others, words may stand before these: fineweb_val_000000.bin. Its meta.json holds
tokenizer, counts and checksums. A document begins with what the tokenizer writes before a text, of bytes and
GPT-2 EOT; of other tokenizers, EOT follows it.

Shards of examples for fine-tuning have a mask each, train_000000_mask.bin beside train_000000.bin: the same
header, then a byte a token, of which bit TARGET says that the model is to predict the token, and bit START
that an example begins with it.
"""
import hashlib
import os
import re
import shlex
import zlib
from glob import glob
from os.path import abspath, basename, dirname, exists, getsize, isdir, isfile, join
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fp8gpt import files
from configurator import DataError, MissingError, SettingError
from fp8gpt.files import read_json

HEADER = 256  # int32 words
FORMATS = {(20240520, 1): np.dtype('<u2'), (20240801, 7): np.dtype('<u4')}
NAME = re.compile(r'(train|val)_\d{6}(_mask)?\.bin')    # as ShardWriter calls them; others' may differ
TARGET, START = 1, 2  # bits of a mask
HASHED = 2**26  # bytes of local files whose content is compared, too; of more, names and sizes
LOOKED_AT = 2**20   # tokens of each shard whose ids are compared with the vocabulary
AGAIN = 'prepare the dataset again with --overwrite, or fetch it again'
HELD_OUT = 'validation', 'test'  # names by which users ask for val_*.bin
# endings of a file of examples, which a training script prepares by itself
ROWS = tuple(kind + packed for kind in ('.jsonl', '.json', '.csv', '.tsv', '.parquet')
             for packed in ('', *files.PACKED))
# Where prepare_data.py finds each dataset. hub: its name on the Hugging Face hub; splits: those that the hub
# has, the usual one first.
DATASETS = {
    'fineweb_edu': {
        'hub': 'HuggingFaceFW/fineweb-edu', 'subset': 'sample-10BT', 'val_fraction': 0.0005},
    'fineweb': {
        'hub': 'HuggingFaceFW/fineweb', 'subset': 'sample-10BT', 'val_fraction': 0.0005},
    'openwebtext': {'hub': 'Skylion007/openwebtext', 'val_fraction': 0.0005},
    'shakespeare': {
        'url': 'https://raw.githubusercontent.com/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/'
               'data/tinyshakespeare/input.txt',
        'sha256': '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed',
        'val_fraction': 0.1},
    'stdlib': {'tokenizer': 'byte', 'val_fraction': 0.05},
    'openmathinstruct2': {
        'hub': 'nvidia/OpenMathInstruct-2', 'splits': ('train_1M', 'train_2M', 'train_5M', 'train'),
        'columns': ['problem', 'generated_solution']},
    'hellaswag': {
        'hub': 'Rowan/hellaswag',
        'url': 'https://raw.githubusercontent.com/rowanz/hellaswag/a29ff8e9a04bba4bd6588223785ce105328adc57/'
               'data/hellaswag_val.jsonl',
        'sha256': '0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588'},
}
ALIASES = {row['hub']: name for name, row in DATASETS.items() if 'hub' in row}
ALIASES['tinyshakespeare'] = 'shakespeare'


def has_examples(name):
    """Return whether a dataset that is not prepared yet, or a file of rows, has examples to fine-tune on."""
    return isfile(name) or 'columns' in DATASETS.get(dataset_name(name), ())


def dataset_name(name):
    """Return the name under which a dataset is prepared: fineweb-edu and HuggingFaceFW/fineweb-edu are
    fineweb_edu; org/name of the hub is org--name; rows/chats.jsonl is chats."""
    for ending in ROWS:
        if name.endswith(ending):
            return re.sub(r'[^\w.]', '_', basename(name.removesuffix(ending)))
    if name in ALIASES:
        return ALIASES[name]
    return name.replace('/', '--') if is_of_hub(name) else basename(name).replace('-', '_')


def is_of_hub(name):
    """Return whether a dataset's name is org/name, which no folder here has."""
    return bool(re.fullmatch(r'[\w.-]+/[\w.-]+', name)) and not isdir(dirname(name))


def hash_of_files(paths):
    """Return a hash of each file's name and size, and of its content if they are small."""
    few, hashes = sum(map(getsize, paths)) < HASHED, []
    for path in paths:
        content = hashlib.sha256(Path(path).read_bytes()).hexdigest() if few else ''
        about = repr((basename(path), getsize(path), content))
        hashes.append(hashlib.sha256(about.encode()).hexdigest()[:16])
    return hashes


def dataset_dir(config):
    """Return the folder of a dataset's shards: what prepared_dir says, or `dataset` itself where that is the
    path of a folder (a folder of texts in the working directory may have the dataset's name)."""
    dataset, prepared = config['dataset'], prepared_dir(config)
    return dataset if isdir(dataset) and ('/' in dataset or not isdir(prepared)) else prepared


def prepared_dir(config):
    """Return where prepare_data.py puts a dataset: data_dir/<dataset>[-<split>]-<tokenizer>. A tokenizer's
    folder or org/name counts by its last part."""
    parts = name_of_prepared(config), split_of(config), basename(abspath(config['tokenizer']))
    return join(config['data_dir'], '-'.join(filter(None, parts)))


def name_of_prepared(config):
    """Return dataset_name of settings; of a file of rows, with the template behind it that was asked for."""
    name, template = dataset_name(config['dataset']), config.get('template', 'auto')
    if config['dataset'].endswith(ROWS) and template != 'auto':
        name += f'_{template}'
    return name


def words_to_prepare(config):
    """Return the words, after prepare_data.py, that prepare the dataset which a script's settings name."""
    asked, name, texts = config['dataset'], name_of_prepared(config), []
    if asked.endswith(ROWS):
        texts = [f'--data_files={asked}']
    elif is_of_hub(asked):
        name = asked
    elif name not in DATASETS:
        texts = ['--data_files=YOUR_TEXTS']
    usual = {'tokenizer': 'auto', 'template': 'auto', 'split_name': '', 'data_dir': 'data'}
    flags = [f'--{name}={config[name]}' for name, value in usual.items() if config.get(name, value) != value]
    return [name, *flags, *texts]


def split_of(config):
    """Return the split of a dataset that is prepared, of which any has a held-out part; '' for the only one.
    Raises SettingError for a split_name that the dataset lacks."""
    dataset, split_name = config['dataset'], config['split_name']
    splits = DATASETS.get(dataset_name(dataset), {}).get('splits', ())
    if split_name in ('', *HELD_OUT):
        return splits[0] if splits else ''
    if split_name not in splits and (splits or '/' not in dataset):
        raise SettingError(f'{dataset} has no split {split_name!r}, of {splits}')
    return split_name


def mask_of(file):
    """Return the name of the mask beside a shard."""
    return file.removesuffix('.bin') + '_mask.bin'


def is_mask(file):
    """Return whether a file of that name holds a mask, not tokens."""
    return str(file).endswith('_mask.bin')


def split_of_file(file):
    """Return the split of a shard by the last word of its name before a number: train, val, or ''."""
    match = re.fullmatch(r'(?:.*_)?(train|val)(_\d+)?(_mask)?\.bin', file)
    return match[1] if match else ''


# ------------------------------------------------------------------------------- writing

class ShardWriter:
    """Write documents to <folder>/<split>_NNNNNN.bin, each file whole; a shard ends with the document past
    shard_tokens. The shard under way is held in memory.

    masked: write masks beside the shards. listed: meta.json's shards of a process that was killed; a split's
    last one, if it is not full, is read back as far as it is listed, and continued."""

    def __init__(self, folder, split, shard_tokens, vocab_size, listed=(), masked=False):
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.format, dtype = next(
            (key, dtype) for key, dtype in FORMATS.items() if vocab_size <= 256 ** dtype.itemsize)
        self.dtypes = [dtype, np.dtype('u1')] if masked else [dtype]
        self.shards = [shard for shard in listed if shard['file'].startswith(split)]  # the full ones
        self.begin()
        if self.shards and self.shards[-1]['tokens'] < shard_tokens:
            self.tokens = self.shards.pop()['tokens']
            for body, path in zip(self.bodies, self.paths()):
                body += read_shard(path)[:self.tokens].tobytes()

    def begin(self):
        """Begin a shard."""
        self.tokens, self.bodies = 0, [bytearray() for _ in self.dtypes]

    def paths(self):
        """Return the paths of the shard under way and of its mask."""
        path = join(self.folder, f'{self.split}_{len(self.shards):06d}.bin')
        return [path, mask_of(path)]

    def add(self, document):
        """Append a document's ids (n,), or its ids and mask (n, 2). Return whether that ended a shard."""
        for body, dtype, column in zip(self.bodies, self.dtypes, document.reshape(len(document), -1).T):
            body += column.astype(dtype).tobytes()
        self.tokens += len(document)
        if self.tokens < self.shard_tokens:
            return False
        self.shards = self.save()
        self.begin()
        return True

    def save(self):
        """Write the shard under way, if it has tokens. Return the list of all shards for meta.json."""
        if not self.tokens:
            return self.shards
        header = np.zeros(HEADER, '<i4')
        header[:3] = *self.format, self.tokens
        shard = {'file': basename(self.paths()[0]), 'tokens': self.tokens}
        for name, path, body in zip(['crc32', 'mask_crc32'], self.paths(), self.bodies):
            files.write(path, lambda file: file.writelines([header, body]))
            shard[name] = zlib.crc32(body)
        return [*self.shards, shard]


# ------------------------------------------------------------------------------- reading

def read_shard(path):
    """Return the memory-mapped tokens (n,) of a shard, or bytes (n,) of a mask. Raises DataError where the
    file is missing, or its header and size do not agree."""
    if not isfile(path):
        raise DataError(f'{path} is missing, or no file; {AGAIN}')
    *form, tokens = [*np.fromfile(path, '<i4', 3).tolist(), 0, 0, 0][:3]
    if tuple(form) not in FORMATS:
        raise DataError(f'{path} is not a token shard (no known magic and version in its header; nanoGPT\'s '
                        'files have none): give the texts to prepare_data.py')
    dtype = np.dtype('u1') if is_mask(path) else FORMATS[tuple(form)]
    there = (getsize(path) - HEADER * 4) / dtype.itemsize
    if tokens != there:
        raise DataError(f'{path} is damaged: {tokens:,} tokens promised, {int(there):,} there; {AGAIN}')
    return np.memmap(path, dtype, 'r', HEADER * 4, (tokens,))


class Dataset(NamedTuple):
    """A dataset that has been opened: the folder of its shards, or None where it is not prepared, and what
    read_meta returns for that folder."""
    folder: str | None
    meta: dict


def find_dataset(config):
    """Return the Dataset that a script's settings name. Raises MissingError, with the command that prepares
    it, where there are no shards, and what read_meta raises."""
    folder = dataset_dir(config)
    if not (isdir(folder) and any(name.endswith('.bin') for name in os.listdir(folder))):
        words = shlex.join(words_to_prepare(config))
        raise MissingError(f'no shards in {folder}: run `python prepare_data.py {words}`')
    return Dataset(folder, read_meta(folder))


def read_meta(folder):
    """Return meta.json of a dataset folder, {} where there is none, as of foreign shards. Raises MissingError
    where prepare_data.py has not finished the dataset, DataError where meta.json is damaged, or lacks what
    runs read."""
    path = join(folder, 'meta.json')
    if not exists(path):
        return {}
    meta = read_json(path)
    if 'progress' in meta:
        raise MissingError(f'{folder} is half prepared: run prepare_data.py again, it goes on where it '
                           'stopped')
    for key in 'tokenizer', 'vocab_size', 'splits', 'shards':
        if key not in meta:
            raise DataError(f'{path} is damaged, or another program\'s: it has no {key!r}; {AGAIN}')
    return meta


def listed(meta):
    """Return {file: [its tokens, its crc32]} of all shards and masks in meta.json."""
    found = {}
    for shard in meta.get('shards', ()):
        found[shard['file']] = [shard['tokens'], shard['crc32']]
        if 'mask_crc32' in shard:
            found[mask_of(shard['file'])] = [shard['tokens'], shard['mask_crc32']]
    return found


def read_splits(folder, meta, *splits):
    """Return {file: its tokens or mask, memory-mapped} of splits. Raises DataError where a file is missing,
    damaged or not listed in meta.json, or does not have the length that is listed there, or another format
    than the others."""
    expected, shards = listed(meta), {}
    for file in sorted({*expected, *glob('*.bin', root_dir=folder)}):
        if split_of_file(file) not in splits:
            continue
        shards[file] = read_shard(join(folder, file))
        there, tokens = len(shards[file]), expected.get(file, [0])[0]
        if meta and there != tokens:
            raise DataError(f'{join(folder, file)} is damaged: {there:,} tokens, by meta.json {tokens:,}; '
                            f'{AGAIN}')
    if len({shard.dtype for file, shard in shards.items() if not is_mask(file)}) > 1:   # ids would wrap
        raise DataError(f'{folder}: its shards are of two tokenizers: some hold 2 bytes a token, '
                        'some 4; give each a folder')
    return shards


def check(dataset, vocab_size=2**32):
    """Check that all shards of a Dataset have their length, and begin with ids below vocab_size. Return
    {file: [tokens, crc32]} of shards and masks; of a folder without meta.json, the crc32 is of the first
    LOOKED_AT tokens. Raises DataError or SettingError for the first wrong shard."""
    folder, meta = dataset
    contents = listed(meta)
    for file, shard in read_splits(folder, meta, 'train', 'val').items():
        first = shard[:LOOKED_AT]
        if not meta:
            contents[file] = [len(shard), zlib.crc32(first)]
        if (largest := int(first.max(initial=0))) >= vocab_size:
            raise SettingError(f'{join(folder, file)} has token {largest:,}, outside the vocabulary of '
                               f'{vocab_size:,} tokens: give the --tokenizer that it was made for, or, where '
                               'the model lacks some of its own, widen it by resize_token_embeddings of '
                               'transformers')
    return contents


def verify(folder, meta):
    """Read all shards of meta, a folder's meta.json. Raises DataError for the first whose crc32 is not the
    one that is listed, and what read_splits raises."""
    contents = listed(meta)
    for file, shard in read_splits(folder, meta, 'train', 'val').items():
        if zlib.crc32(shard) != contents[file][1]:
            raise DataError(f'{join(folder, file)} is damaged: its crc32 is not that in meta.json; {AGAIN}')
