"""Token shards: the file format, the order of batches, and the loader that feeds the training loop.

A shard is llm.c's: 256 little-endian int32 (magic, version, token count), then the tokens. Magic 20240520
with version 1 holds uint16, 20240801 with version 7 holds uint32. A dataset is a folder of train_*.bin and
val_*.bin; its meta.json tells tokenizer, counts and checksums. Tokens of all shards of a split are one long
stream, cut into windows of block_size (+1: the last target); EOT stands before each document.

The order of windows is a pure function of (seed, position), where position counts the sequences consumed so
far: number `position` is entry position % n of a permutation of all n windows keyed by (seed, position // n),
the epoch. So a run resumes anywhere, on any number of GPUs, and every window comes exactly once an epoch.
The permutation is a Feistel network (Luby & Rackoff 1988) over the next power of four, walked until it
lands below n (Black & Rogaway 2002, "cycle walking"): O(1) memory for any n.
"""
import bisect
import collections
import concurrent.futures
import contextlib
import functools
import os
import time
import zlib
from glob import glob
from os.path import basename, exists, isdir, isfile, join

import numpy as np

import files
from configurator import DataError, MissingError, SettingError
from files import read_json, write_json

HEADER = 256  # int32 words
FORMATS = {(20240520, 1): np.dtype('<u2'), (20240801, 7): np.dtype('<u4')}
PIECE = 2**20  # tokens that are checked at once
LONG = 2e9  # bytes: a check of more is announced
ORDER_BLOCK = 4096  # entries of the order that are computed at once: numpy's calls cost, not the sums
DATASET_ALIASES = {'tinyshakespeare': 'shakespeare'}
KNOWN = 'fineweb_edu', 'fineweb', 'openwebtext', 'shakespeare', 'stdlib'  # others take one's own files


def dataset_name(name):
    """fineweb-edu, fineweb_edu -> fineweb_edu; other systems' names -> ours."""
    name = name.replace('-', '_')
    return DATASET_ALIASES.get(name, name)


def dataset_dir(root, dataset, tokenizer):
    """The folder of a dataset's shards: root/<dataset>-<tokenizer>, or `dataset` itself where only that
    is a folder (a folder of texts may have the dataset's name)."""
    prepared = join(root, f'{dataset_name(dataset)}-{tokenizer}')
    return dataset if isdir(dataset) and not isdir(prepared) else prepared


# ------------------------------------------------------------------------------- writing

class ShardWriter:
    """Appends documents to <folder>/<split>_NNNNNN.bin; a shard ends with the document past shard_tokens.

    A shard under way is called *.bin.part. state() is all that is needed to go on from a document end,
    if sync() came before; ShardWriter(..., state=that) cuts off whatever was written after it."""

    def __init__(self, folder, split, shard_tokens, vocab_size, state=None):
        self.folder = folder
        self.split = split
        self.shard_tokens = shard_tokens
        self.format, self.dtype = next(
            (key, dtype) for key, dtype in FORMATS.items() if vocab_size <= 256 ** dtype.itemsize)
        state = state or {'shards': [], 'tokens': 0, 'crc32': 0}
        self.shards = list(state['shards'])  # those that are whole
        self.tokens = state['tokens']  # of the shard under way
        self.crc32 = state['crc32']
        self.file = None
        kept = {shard['file'] for shard in self.shards}
        if self.tokens:
            kept.add(basename(self._path('.bin.part')))
            self._reopen()
        for ending in ('bin', 'bin.part'):
            for name in set(glob(f'{split}_*.{ending}', root_dir=folder)) - kept:
                os.remove(join(folder, name))

    def _path(self, ending='.bin'):
        """Of the shard under way: '.bin.part' until it is whole, '.bin' from then on."""
        return join(self.folder, f'{self.split}_{len(self.shards):06d}{ending}')

    def _reopen(self):
        """Opens the shard under way at the end of its first `tokens` tokens."""
        if exists(self._path()):  # killed between the end of a shard and the note of it
            os.replace(self._path(), self._path('.bin.part'))
        self.file = open(self._path('.bin.part'), 'r+b')
        self.file.truncate(HEADER * 4 + self.tokens * self.dtype.itemsize)
        self.file.seek(0, os.SEEK_END)

    def add(self, ids):
        """Appends one document's ids, EOT included. Returns True where that ended a shard."""
        if self.file is None:
            self.file = open(self._path('.bin.part'), 'wb')
            self.file.write(bytes(HEADER * 4))
        body = ids.astype(self.dtype).tobytes()
        self.file.write(body)
        self.crc32 = zlib.crc32(body, self.crc32)
        self.tokens += len(ids)
        full = self.tokens >= self.shard_tokens
        if full:
            self.finish_shard()
        return full

    def finish_shard(self):
        """Gives the shard under way its header and its name; nothing where none is under way."""
        if self.file is None:
            return
        header = np.zeros(HEADER, '<i4')
        header[:3] = *self.format, self.tokens
        self.file.seek(0)
        self.file.write(header.tobytes())
        self.sync()
        self.file.close()
        self.file = None
        files.rename(self._path('.bin.part'), self._path())
        self.shards.append({'file': basename(self._path()), 'tokens': self.tokens, 'crc32': self.crc32})
        self.tokens = self.crc32 = 0

    def sync(self):
        """Returns once all that was added is on the disk."""
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())

    def state(self):
        return {'shards': self.shards, 'tokens': self.tokens, 'crc32': self.crc32}


# ------------------------------------------------------------------------------- reading

def read_shard(path):
    """Memory-mapped tokens (n,) of a shard. Raises DataError where header and size do not agree."""
    if not isfile(path):  # a pipe would be waited for
        raise DataError(f'{path} is no file, so no token shard')
    try:
        header = np.fromfile(path, '<i4', HEADER)
    except OSError as error:
        raise DataError(str(error)) from None
    dtype = FORMATS.get(tuple(header[:2].tolist()))
    if len(header) < HEADER or dtype is None:
        raise DataError(f'{path} is not a token shard (no known magic and version in its header)')
    count = int(header[2])
    body = os.path.getsize(path) - HEADER * 4  # bytes
    if body != count * dtype.itemsize:
        raise DataError(f'{path} is damaged: {count:,} tokens promised, {body // dtype.itemsize:,} there')
    return np.memmap(path, dtype, 'r', HEADER * 4, (count,))


def read_meta(folder):
    """meta.json of a dataset folder, {} for a folder of foreign shards. Raises MissingError where there is
    no such folder, or prepare_data.py has not finished it, DataError where meta.json is damaged."""
    if exists(join(folder, 'progress.json')):
        remedy = 'run prepare_data.py again, it goes on where it stopped'
        raise MissingError(f'{folder} is half prepared: {remedy}')
    if not glob('*.bin', root_dir=folder):
        raise MissingError(f'no shards in {folder}: run `{_command(folder)}`')
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


def _command(folder, own=' --data_files=YOUR_TEXTS'):
    """What prepares a folder. own: what it takes where no dataset is known by that name."""
    parent, name = os.path.split(os.path.normpath(folder))
    dataset, _, tokenizer = name.rpartition('-') if '-' in name else (name, '', 'gpt2')
    root = '' if parent == 'data' else f' --data_dir={parent or "."}'
    files = '' if dataset in KNOWN else own
    return f'python prepare_data.py {dataset} --tokenizer={tokenizer}{root}{files}'


def _listed(meta, split=''):
    """file name -> its entry in meta.json's list of shards, for a split or for all."""
    return {shard['file']: shard for shard in meta.get('shards', ()) if f'{split}_' in shard['file']}


def read_split(folder, split, meta):
    """({file name: tokens, memory-mapped} of a split, [DataError of a file that is not as it should be])."""
    listed = _listed(meta, split)
    there = set(glob(f'*{split}_*.bin', root_dir=folder)) - set(glob('*_mask.bin', root_dir=folder))
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
    if len({shard.dtype for shard in shards.values()}) > 1:
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
        tokens = sum(shard['tokens'] for shard in _listed(meta, split).values())
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
    _refuse(folder, find_problems(folder, vocab_size, say, trust=True))


def _refuse(folder, problems):
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


class TokenData:
    """One split of a dataset, as windows of block_size + 1 tokens.

    folder: as from dataset_dir. split: 'train' | 'val'. Has `tokens`, `n_windows`, `bytes_per_token`
    (None: unknown). Raises MissingError, DataError for a damaged shard or one that is not as meta.json
    lists it, SettingError where the split has no whole window."""

    def __init__(self, folder, split, block_size):
        meta = read_meta(folder)
        shards, problems = read_split(folder, split, meta)
        _refuse(folder, problems)
        if not shards:
            wanted = 'it wants some called *train_*.bin and some called *val_*.bin'
            raise MissingError(f'{folder} has no {split} shards: {wanted}')
        self.shards = [np.asarray(shard) for shard in shards.values()]
        self.starts = np.cumsum([0, *map(len, self.shards)]).tolist()  # in the stream; last, its end
        self.tokens = self.starts[-1]
        self.block_size = block_size
        self.n_windows = (self.tokens - 1) // block_size
        counts = meta.get('splits', {}).get(split)
        self.bytes_per_token = counts['bytes'] / counts['tokens'] if counts else None
        if self.n_windows < 1:
            too_few = f'fewer than one window of block_size={block_size}'
            raise SettingError(f'{folder} has {self.tokens:,} {split} tokens: {too_few}')

    def batch(self, indices):
        """Windows by index -> (len(indices), block_size + 1) in the shards' dtype. Window i is tokens
        i * block_size ... (i + 1) * block_size inclusive, across shard ends."""
        out = np.empty((len(indices), self.block_size + 1), self.shards[0].dtype)
        for row, index in zip(out, indices):
            start = int(index) * self.block_size
            shard = bisect.bisect_right(self.starts, start) - 1
            start -= self.starts[shard]
            while len(row):  # once, but for a window that runs on into the next shard
                part = self.shards[shard][start:start + len(row)]
                row[:len(part)] = part
                row = row[len(part):]
                shard += 1
                start = 0
        return out


def _mix(x):
    """splitmix64's finaliser (Steele et al. 2014): (n,) uint64 -> (n,) uint64."""
    with np.errstate(over='ignore'):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index, n, seed, epoch):
    """Entries `index` (array of ints below n) of the permutation of range(n) keyed by (seed, epoch)."""
    bits = max(1, ((n - 1).bit_length() + 1) // 2)
    half = np.uint64(bits)
    mask = np.uint64(2**bits - 1)
    key = seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03
    round_keys = _mix(np.array([(key + r) % 2**64 for r in range(1, 5)], np.uint64))
    x = np.array(index, np.uint64)
    walking = np.ones(x.shape, bool)
    while walking.any():
        left = x[walking] >> half
        right = x[walking] & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right + round_key) & mask)
        x[walking] = (left << half) | right
        walking = x >= n
    return x.astype(np.int64)


class Loader:
    """Training micro-batches in order, prepared ahead by num_workers threads (0: made when asked for).

    data: TokenData. batch_size: sequences per rank and micro-step. position: sequences consumed by all
    ranks before the first batch. `waited`: seconds that next() has blocked so far."""

    def __init__(self, data, batch_size, seed, position=0, rank=0, world_size=1, device='cpu', num_workers=1):
        self.data = data
        self.batch_size = batch_size
        self.seed = seed
        self.device = device
        self.stride = world_size * batch_size  # sequences of a micro-step, over all ranks
        self.first = position + rank * batch_size  # number of the next sequence to ask for
        self.order = functools.lru_cache(4)(self._order)
        self.waited = 0.0
        self.pool = concurrent.futures.ThreadPoolExecutor(num_workers) if num_workers else None
        self.queue = collections.deque()  # functions that return micro-batches, the next one first
        for _ in range(2 * num_workers or 1):
            self._ask()

    def step_targets(self, micro_steps):
        """Number of targets, over all ranks, in the next `micro_steps` micro-steps."""
        return micro_steps * self.stride * self.data.block_size

    def next(self):
        """x, y: (batch_size, block_size) int64 on the device; y is x one token on."""
        start = time.perf_counter()
        self._ask()
        tokens = self.queue.popleft()()
        self.waited += time.perf_counter() - start
        return self._to_device(tokens)

    def peek(self):
        """What next() will return; position, prefetching and `waited` stay as they are."""
        return self._to_device(self.queue[0]())

    def _ask(self):
        make = functools.partial(self._make, self.first)
        self.queue.append(self.pool.submit(make).result if self.pool else make)
        self.first += self.stride

    def _make(self, first):
        """(batch_size, block_size + 1) tokens from sequence number `first` on, as they are stored."""
        import torch
        indices = [self._window(number) for number in range(first, first + self.batch_size)]
        tokens = torch.from_numpy(self.data.batch(indices))
        return tokens.pin_memory() if 'cuda' in str(self.device) else tokens

    def _to_device(self, tokens):
        tokens = tokens.to(self.device, non_blocking=True).long()  # they travel as stored: in 2 bytes
        return tokens[:, :-1], tokens[:, 1:]

    def _window(self, number):
        """The index of sequence `number`'s window."""
        epoch, entry = divmod(number, self.data.n_windows)
        return self.order(epoch, entry // ORDER_BLOCK)[entry % ORDER_BLOCK]

    def _order(self, epoch, block):
        """The windows of ORDER_BLOCK sequences of an epoch; fewer at its end."""
        n = self.data.n_windows
        entries = np.arange(block * ORDER_BLOCK, min(n, (block + 1) * ORDER_BLOCK))
        return permute(entries, n, self.seed, epoch)


def eval_batches(data, tokens, batch_size, rank=0, world_size=1, device='cpu'):
    """This rank's share of about `tokens` tokens in fixed windows, spread evenly over the split.

    Yields x, y (batch_size, block_size) int64, always of that shape: rows past the end have targets -1."""
    import torch
    n = max(1, min(data.n_windows, tokens // data.block_size))
    mine = [i * data.n_windows // n for i in range(rank, n, world_size)]
    for start in range(0, len(mine), batch_size):
        rows = data.batch(mine[start:start + batch_size])
        batch = torch.full((batch_size, data.block_size + 1), -1)
        batch[:len(rows)] = torch.from_numpy(rows.astype(np.int64))
        batch = batch.to(device)
        yield batch[:, :-1].clamp(min=0), batch[:, 1:]
