"""Token shards: where they lie, the file format, written and read, and the checks before they are used.

A shard is llm.c's: 256 little-endian int32 (magic, version, token count), then the tokens. Magic 20240520
with version 1 holds uint16, 20240801 with version 7 holds uint32. A dataset is a folder of train_*.bin and
val_*.bin; its meta.json tells tokenizer, counts and checksums. A document begins with BOS, or with EOT where
the tokenizer has none.

Shards of examples for fine-tuning have a mask each, train_000000_mask.bin beside train_000000.bin: the same
header, then a byte a token, of which bit TARGET says that the model is to predict the token, and bit START
that an example begins with it.
"""
import contextlib
import os
import re
import zlib
from glob import glob
from os.path import abspath, basename, exists, expanduser, isdir, isfile, join

import numpy as np

from fp8gpt import files
from configurator import DataError, MissingError, SettingError
from fp8gpt.files import read_json, write_json

HEADER = 256  # int32 words
FORMATS = {(20240520, 1): np.dtype('<u2'), (20240801, 7): np.dtype('<u4')}
TARGET, START = 1, 2  # bits of a mask
CRCS = {'': 'crc32', '_mask': 'mask_crc32'}  # kind of file -> key of its checksum in meta.json
PIECE = 2**20  # tokens that are checked at once
LONG = 2e9  # bytes: a check of more is announced
DATASET_ALIASES = {'tinyshakespeare': 'shakespeare', 'nvidia/OpenMathInstruct_2': 'openmathinstruct2'}
SPLITS = {'openmathinstruct2': 'train_1M'}  # datasets that the hub has in several sizes: the usual one
HELD_OUT = 'validation', 'test'  # names by which users ask for val_*.bin
# others take one's own files
KNOWN = 'fineweb_edu', 'fineweb', 'openwebtext', 'shakespeare', 'stdlib', 'openmathinstruct2'


def dataset_name(name):
    """fineweb-edu, fineweb_edu -> fineweb_edu; other systems' names -> ours."""
    name = name.replace('-', '_')
    return DATASET_ALIASES.get(name, name)


def dataset_dir(root, dataset, tokenizer, split_name=''):
    """The folder of a dataset's shards: root/<dataset>[-<split>]-<tokenizer>, or `dataset` itself where only
    that is a folder (a folder of texts may have the dataset's name)."""
    prepared = prepared_dir(root, dataset, tokenizer, split_name)
    return dataset if isdir(dataset) and not isdir(prepared) else prepared


def prepared_dir(root, dataset, tokenizer, split_name=''):
    """Where prepare_data.py puts a dataset."""
    parts = dataset_name(dataset), split_of(dataset, split_name), tokenizer_name(tokenizer)
    return join(root, '-'.join(filter(None, parts)))


def split_of(dataset, split_name):
    """The split of a dataset that is prepared, of which any has a held-out part; '' for one that has no
    choice of them. Raises SettingError for a split_name of such a one."""
    usual = SPLITS.get(dataset_name(dataset), '')
    if split_name in ('', *HELD_OUT):
        return usual
    if not usual:
        raise SettingError(f'{dataset} has no splits to choose from: leave out split_name={split_name}')
    return split_name


def tokenizer_name(tokenizer):
    """What a tokenizer is called in a folder's name: meta-llama/Llama-3.2-1B is Llama-3.2-1B."""
    return basename(abspath(expanduser(tokenizer.removesuffix('tokenizer.json'))))


def mask_of(file):
    """The name of the mask beside a shard."""
    return file.removesuffix('.bin') + '_mask.bin'


# ------------------------------------------------------------------------------- writing

class ShardWriter:
    """Appends documents to <folder>/<split>_NNNNNN.bin; a shard ends with the document past shard_tokens.

    masked: with masks beside the shards. A shard under way is called *.bin.part. state() is all that is
    needed to go on from a document end, if sync() came before; ShardWriter(..., state=that) cuts off
    whatever was written after it."""

    def __init__(self, folder, split, shard_tokens, vocab_size, state=None, masked=False):
        self.folder = folder
        self.split = split
        self.shard_tokens = shard_tokens
        self.format, dtype = next(
            (key, dtype) for key, dtype in FORMATS.items() if vocab_size <= 256 ** dtype.itemsize)
        self.dtypes = {'': dtype, '_mask': np.dtype(np.uint8)} if masked else {'': dtype}
        state = state or {'shards': [], 'tokens': 0, **self._no_crcs()}
        self.shards = list(state['shards'])  # those that are whole
        self.tokens = state['tokens']  # of the shard under way
        self.crcs = {key: state[key] for key in self._no_crcs()}
        self.files = {}
        kept = {name for shard in self.shards for name in (shard['file'], mask_of(shard['file']))}
        if self.tokens:
            kept |= {basename(self._path(kind, '.bin.part')) for kind in self.dtypes}
            self._reopen()
        for ending in ('bin', 'bin.part'):
            for name in set(glob(f'{split}_*.{ending}', root_dir=folder)) - kept:
                os.remove(join(folder, name))

    def _no_crcs(self):
        return {CRCS[kind]: 0 for kind in self.dtypes}

    def _path(self, kind, ending='.bin'):
        """Of the shard under way, or of its mask: '.bin.part' until it is whole, '.bin' from then on."""
        return join(self.folder, f'{self.split}_{len(self.shards):06d}{kind}{ending}')

    def _reopen(self):
        """Opens the shard under way at the end of its first `tokens` tokens."""
        for kind, dtype in self.dtypes.items():
            part = self._path(kind, '.bin.part')
            if exists(self._path(kind)):  # killed between the end of a shard and the note of it
                os.replace(self._path(kind), part)
            self.files[kind] = open(part, 'r+b')
            self.files[kind].truncate(HEADER * 4 + self.tokens * dtype.itemsize)
            self.files[kind].seek(0, os.SEEK_END)

    def add(self, document):
        """Appends a document's ids (n,), what stands before it included, or its ids and mask (n, 2). Returns
        True where that ended a shard."""
        columns = [document] if document.ndim == 1 else document.T
        for (kind, dtype), column in zip(self.dtypes.items(), columns):
            if kind not in self.files:
                self.files[kind] = open(self._path(kind, '.bin.part'), 'wb')
                self.files[kind].write(bytes(HEADER * 4))
            body = column.astype(dtype).tobytes()
            self.files[kind].write(body)
            self.crcs[CRCS[kind]] = zlib.crc32(body, self.crcs[CRCS[kind]])
        self.tokens += len(document)
        full = self.tokens >= self.shard_tokens
        if full:
            self.finish_shard()
        return full

    def finish_shard(self):
        """Gives the shard under way its header and its name; nothing where none is under way."""
        if not self.files:
            return
        header = np.zeros(HEADER, '<i4')
        header[:3] = *self.format, self.tokens
        for file in self.files.values():
            file.seek(0)
            file.write(header.tobytes())
        self.sync()
        for kind, file in self.files.items():
            file.close()
            files.rename(self._path(kind, '.bin.part'), self._path(kind))
        self.shards.append({'file': basename(self._path('')), 'tokens': self.tokens, **self.crcs})
        self.files = {}
        self.tokens, self.crcs = 0, self._no_crcs()

    def sync(self):
        """Returns once all that was added is on the disk."""
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())

    def state(self):
        return {'shards': self.shards, 'tokens': self.tokens, **self.crcs}


# ------------------------------------------------------------------------------- reading

def read_shard(path):
    """Memory-mapped tokens (n,) of a shard, or bytes (n,) of a mask. Raises DataError where header and size
    do not agree."""
    if not isfile(path):  # a pipe would be waited for
        raise DataError(f'{path} is no file, so no token shard')
    try:
        header = np.fromfile(path, '<i4', HEADER)
    except OSError as error:
        raise DataError(str(error)) from None
    dtype = FORMATS.get(tuple(header[:2].tolist()))
    if len(header) < HEADER or dtype is None:
        raise DataError(f'{path} is not a token shard (no known magic and version in its header)')
    if is_mask(path):
        dtype = np.dtype(np.uint8)
    count = int(header[2])
    body = os.path.getsize(path) - HEADER * 4  # bytes
    if body != count * dtype.itemsize:
        raise DataError(f'{path} is damaged: {count:,} tokens promised, {body // dtype.itemsize:,} there')
    return np.memmap(path, dtype, 'r', HEADER * 4, (count,))


def is_mask(file):
    return str(file).endswith('_mask.bin')


def read_meta(folder, tokenizer=''):
    """meta.json of a dataset folder, {} for a folder of foreign shards. tokenizer: as prepare_data.py is to
    be told, where that is not what the folder's name says. Raises MissingError where there is no such folder,
    or prepare_data.py has not finished it, DataError where meta.json is damaged."""
    if exists(join(folder, 'progress.json')):
        remedy = 'run prepare_data.py again, it goes on where it stopped'
        raise MissingError(f'{folder} is half prepared: {remedy}')
    if not glob('*.bin', root_dir=folder):
        raise MissingError(f'no shards in {folder}: run `{_command(folder, tokenizer=tokenizer)}`')
    path = join(folder, 'meta.json')
    meta = read_json(path)
    if exists(path) and not _is_meta(meta):
        raise DataError(f'{path} is damaged: prepare the dataset again with --overwrite')
    return meta


def _is_meta(meta):
    """Whether what is asked of a meta.json is in it, as prepare_data.py writes it."""
    facts = [(meta.get('tokenizer', ''), str), (meta.get('vocab_size', 0), int)]
    shards, splits = meta.get('shards', ()), meta.get('splits', {})
    try:
        for split in ('train', 'val') if shards else splits:
            facts += [(splits[split]['tokens'], int), (splits[split]['bytes'], int)]
        for shard in shards:
            facts += [(shard['file'], str), (shard['tokens'], int), (shard['crc32'], int)]
    except (LookupError, TypeError):
        return False
    return bool(meta) and all(type(value) is kind for value, kind in facts)


def _command(folder, own=' --data_files=YOUR_TEXTS', tokenizer=''):
    """What prepares a folder. own: what it takes where no dataset is known by that name. tokenizer: see
    read_meta."""
    parent, name = os.path.split(os.path.normpath(folder))
    dataset, split, named = re.fullmatch(r'([^-]*)(?:-(train\w*))?(?:-(.*))?', name).groups()
    split_name = f' --split_name={split}' if split else ''
    root = '' if parent == 'data' else f' --data_dir={parent or "."}'
    files = '' if dataset in KNOWN else own
    chosen = f' --tokenizer={tokenizer or named or "gpt2"}'
    return f'python prepare_data.py {dataset}{chosen}{split_name}{root}{files}'


def _listed(meta, split=''):
    """file name -> its entry in meta.json's list of shards, for a split or for all; masks have their own."""
    listed = {}
    for shard in meta.get('shards', ()):
        if f'{split}_' in shard['file']:
            listed[shard['file']] = shard
            if 'mask_crc32' in shard:
                listed[mask_of(shard['file'])] = {**shard, 'crc32': shard['mask_crc32']}
    return listed


def read_split(folder, split, meta):
    """({file name: tokens, or bytes of a mask, memory-mapped} of a split, [DataError of a file that is not as
    it should be])."""
    listed = _listed(meta, split)
    there = set(glob(f'*{split}_*.bin', root_dir=folder))
    shards, problems = {}, []
    for file in sorted(there | listed.keys()):
        path = join(folder, file)
        try:
            if file not in there:
                raise MissingError(f'{path} is missing: meta.json lists it')
            if 'shards' in meta and file not in listed:
                raise DataError(f'{path} is not one of the shards that meta.json lists')
            shard = read_shard(path)
            told = listed[file]['tokens'] if listed else len(shard)
            if len(shard) != told:
                raise DataError(f'{path} is damaged: it has {len(shard):,} tokens, by meta.json {told:,}')
            shards[file] = shard
        except DataError as error:
            problems.append(error)
    if len({shard.dtype for file, shard in shards.items() if not is_mask(file)}) > 1:
        both = 'of 2-byte and of 4-byte tokens, of two vocabularies'
        problems.append(DataError(f'{folder} has {split} shards {both}'))
    return shards, problems


def pieces(shard):
    """A shard's tokens, some MB at a time, so that a pass over it stays in the cache."""
    for start in range(0, len(shard), PIECE):
        yield np.asarray(shard[start:start + PIECE])


def find_problems(folder, vocab_size=None, say=None, trust=False):
    """Reads a dataset folder whole -> what is wrong with it: UserErrors that name a shard each.

    Headers, sizes, counts and crc32 are to be meta.json's (DataError), ids below vocab_size and meta.json's
    (SettingError); of foreign shards only header, size and ids can be checked. A shard found good is noted
    in .checked.json with its size and time of change; with `trust`, it is not read again while these stay.
    say: called with a line before more than 2 GB are read. Raises what read_meta raises."""
    meta = read_meta(folder)
    shards, problems = {}, []
    for split in ('train', 'val'):
        of_split, wrong = read_split(folder, split, meta)
        shards |= of_split
        problems += wrong
        listed = _listed(meta, split)
        tokens = sum(shard['tokens'] for file, shard in listed.items() if not is_mask(file))
        if tokens and tokens != (told := meta['splits'][split]['tokens']):
            totals = f'{told:,} {split} tokens, {tokens:,} in its list of shards'
            problems.append(DataError(f'{folder}/meta.json is damaged: {totals}'))

    notes = join(folder, '.checked.json')
    noted = read_json(notes) if trust else {}
    types = {'stamp': str, 'crc32': int, 'largest': int}
    noted = {file: fact for file, fact in noted.items()
             if isinstance(fact, dict) and {key: type(value) for key, value in fact.items()} == types}
    stats = {file: os.stat(join(folder, file)) for file in shards}
    stamps = {file: f'{stat.st_size} bytes, changed at {stat.st_mtime_ns} ns' for file, stat in stats.items()}
    unread = [file for file in shards if noted.get(file, {}).get('stamp') != stamps[file]]
    size = sum(stats[file].st_size for file in unread)
    if say and size > LONG:
        say(f'checking {size / 1e9:.1f} GB of {folder} once; later starts read only what has changed')

    limit = min(size for size in (vocab_size, meta.get('vocab_size'), 2**32) if size)
    listed = _listed(meta)
    good = {}
    for file, shard in shards.items():
        path = join(folder, file)
        fact = {'stamp': stamps[file], **_scan(shard)} if file in unread else noted[file]
        if file in listed and fact['crc32'] != listed[file]['crc32']:
            problems.append(DataError(f'{path} is damaged: its crc32 is not the one in meta.json'))
        elif fact['largest'] >= limit:
            outside = f'token {fact["largest"]:,}, outside the vocabulary of {limit:,} tokens'
            problems.append(SettingError(f'{path} has {outside}'))
        else:
            good[file] = fact
    if good != noted:
        with contextlib.suppress(OSError):  # a folder that cannot be written is read again next time
            write_json(notes, good)
    return problems


def _scan(shard):
    """crc32 and largest id (-1: none) in one pass."""
    crc32, largest = 0, -1
    for piece in pieces(shard):
        crc32 = zlib.crc32(piece, crc32)
        largest = max(largest, int(piece.max()))
    return {'crc32': crc32, 'largest': largest}


def check(folder, vocab_size=None, say=None):
    """Before training: are all shards as they were written, their ids below vocab_size? Reads a shard once
    in its life. Raises what read_meta raises, and the first of find_problems."""
    refuse(folder, find_problems(folder, vocab_size, say, trust=True))


def refuse(folder, problems):
    """Raises the first of the problems, and says what to do."""
    if not problems:
        return
    more = f' (and {len(problems) - 1} more)' if problems[1:] else ''
    if exists(join(folder, 'meta.json')):
        verify = f'`{_command(folder, own="")} --verify` lists all that is wrong'
        remedy = f'{verify}, --overwrite and its first settings prepare it again'
    else:
        made_for = 'give the --tokenizer or --vocab_size that it was made for'
        remedy = f'it has no meta.json: fetch it again, or {made_for}'
    raise type(problems[0])(f'{problems[0]}{more}; {remedy}')
