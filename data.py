"""Token shards: the file format, the order of batches, and the loader that feeds the training loop.

A shard is llm.c's: 256 little-endian int32 (magic, version, token count), then the tokens. Magic 20240520 with
version 1 holds uint16, 20240801 with version 7 holds uint32. A dataset is a folder of train_*.bin and val_*.bin;
its meta.json tells tokenizer, counts and checksums. Tokens of all shards of a split are one long stream, cut into
windows of block_size (+1: the last target); EOT stands before each document.

The order of windows is a pure function of (seed, position), where position counts the sequences consumed so far:
number `position` is entry position % n of a permutation of all n windows keyed by (seed, position // n), the epoch.
So a run resumes anywhere, on any number of GPUs, and every window comes exactly once an epoch. The permutation is
a Feistel network (Luby & Rackoff 1988) over the next power of four, walked until it lands below n (Black & Rogaway
2002, "cycle walking"): O(1) memory for any n.
"""
import collections
import concurrent.futures
import contextlib
import functools
import glob
import hashlib
import json
import os
import shutil
import time
import zlib

import numpy as np

from configurator import DataError, MissingError, SettingError

HEADER = 256  # int32 words
FORMATS = {(20240520, 1): np.dtype('<u2'), (20240801, 7): np.dtype('<u4')}
PIECE = 2**20  # tokens that are checked at once
LONG = 2e9  # bytes: a check of more is announced
DATASET_ALIASES = {'tinyshakespeare': 'shakespeare'}


def dataset_name(name):
    """fineweb-edu, fineweb_edu -> fineweb_edu; other systems' names -> ours."""
    name = name.replace('-', '_')
    return DATASET_ALIASES.get(name, name)


def dataset_dir(root, dataset, tokenizer):
    """The folder of a dataset's shards: root/<dataset>-<tokenizer>, or `dataset` itself where only that is a folder (a folder
    of texts may have the dataset's name)."""
    prepared = os.path.join(root, f'{dataset_name(dataset)}-{tokenizer}')
    return dataset if os.path.isdir(dataset) and not os.path.isdir(prepared) else prepared


# ----------------------------------------------------------------------------------------------- writing

@contextlib.contextmanager
def stated(what, kind=Exception):
    """Says an error of a library in one line that begins with `what`."""
    try:
        yield
    except kind as error:
        text = getattr(error, 'strerror', None) or str(error).strip() or type(error).__name__
        raise DataError(f'{what}: {text.splitlines()[0][:300]}') from None


def writing(folder):
    return stated(f'cannot write to {folder}; with that put right, the same command goes on from the last finished shard', OSError)


class ShardWriter:
    """Appends documents to <folder>/<split>_NNNNNN.bin; a shard ends at the first document end past shard_tokens.

    A shard under way is called *.bin.part. `state()` is all that is needed to go on from a document end, provided
    that sync() came before; ShardWriter(..., state=that) cuts off whatever was written after it."""

    def __init__(self, folder, split, shard_tokens, vocab_size, state=None):
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.magic, self.version, self.dtype = next((*k, v) for k, v in FORMATS.items() if vocab_size <= 2 ** (8 * v.itemsize))
        state = state or {'shards': [], 'tokens': 0, 'crc32': 0}
        self.shards, self.tokens, self.crc32 = list(state['shards']), state['tokens'], state['crc32']
        self.file = None
        finished = self._part.removesuffix('.part')
        if self.tokens and os.path.exists(finished):  # killed between the end of a shard and the note of it
            os.replace(finished, self._part)
        for name in glob.glob(os.path.join(folder, f'{split}_*.bin')) + glob.glob(os.path.join(folder, f'{split}_*.bin.part')):
            kept = {shard['file'] for shard in self.shards} | ({os.path.basename(self._part)} if self.tokens else set())
            if os.path.basename(name) not in kept:
                os.remove(name)
        if self.tokens:
            self.file = open(self._part, 'r+b')
            self.file.truncate(HEADER * 4 + self.tokens * self.dtype.itemsize)
            self.file.seek(0, os.SEEK_END)

    @property
    def _part(self):
        return os.path.join(self.folder, f'{self.split}_{len(self.shards):06d}.bin.part')

    def add(self, ids):
        """Appends one document's ids, EOT included. Returns True where that ended a shard."""
        if self.file is None:
            self.file = open(self._part, 'wb')
            self.file.write(bytes(HEADER * 4))
        body = ids.astype(self.dtype).tobytes()
        self.file.write(body)
        self.crc32 = zlib.crc32(body, self.crc32)
        self.tokens += len(ids)
        if self.tokens < self.shard_tokens:
            return False
        self.finish_shard()
        return True

    def finish_shard(self):
        """Gives the shard under way its header and its name; nothing where none is under way."""
        if self.file is None:
            return
        header = np.zeros(HEADER, '<i4')
        header[:3] = self.magic, self.version, self.tokens
        self.file.seek(0)
        self.file.write(header.tobytes())
        self.sync()
        self.file.close()
        part, self.file = self._part, None
        os.replace(part, part.removesuffix('.part'))
        self.shards.append({'file': os.path.basename(part).removesuffix('.part'), 'tokens': self.tokens, 'crc32': self.crc32})
        self.tokens = self.crc32 = 0

    def sync(self):
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())

    def state(self):
        return {'shards': self.shards, 'tokens': self.tokens, 'crc32': self.crc32}


def write_json(path, value):
    """Replaces a JSON file in one rename."""
    with open(path + '.part', 'w') as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + '.part', path)


def begin(folder, progress, keep=()):
    """Makes a folder one that is under way: read_meta refuses it until progress.json goes. The shards that are in it go,
    but for the names in keep."""
    os.makedirs(folder, exist_ok=True)
    write_json(os.path.join(folder, 'progress.json'), progress)  # before all else
    for name in sorted(set(os.listdir(folder)) - set(keep), key=lambda name: name.endswith('.bin')):  # last the shards, after what tells of them
        path = os.path.join(folder, name)
        if name.endswith(('.bin', '.part')) or name in ('meta.json', '.checked.json'):
            shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)


# ----------------------------------------------------------------------------------------------- reading

def read_shard(path):
    """Memory-mapped tokens (n,) of one shard. Raises OSError where header and size do not agree."""
    header = np.fromfile(path, '<i4', HEADER)
    dtype = FORMATS.get(tuple(header[:2].tolist()))
    if len(header) < HEADER or dtype is None:
        raise DataError(f'{path} is not a token shard (no known magic and version in its header)')
    size, count = os.path.getsize(path), int(header[2])
    if size != HEADER * 4 + count * dtype.itemsize:
        raise DataError(f'{path} is damaged: {count:,} tokens promised, {(size - HEADER * 4) // dtype.itemsize:,} there')
    return np.memmap(path, dtype, 'r', HEADER * 4, (count,))


def read_meta(folder):
    """meta.json of a dataset folder, {} for a folder of foreign shards. Raises FileNotFoundError where there is no such
    folder, or prepare_data.py has not finished it, OSError where meta.json is damaged."""
    if os.path.exists(os.path.join(folder, 'progress.json')):
        raise MissingError(f'{folder} is half prepared: run prepare_data.py again, it goes on where it stopped')
    if not glob.glob(os.path.join(folder, '*.bin')):
        raise MissingError(f'no shards in {folder}: run `{_command(folder)}`')
    path = os.path.join(folder, 'meta.json')
    if not os.path.exists(path):
        return {}
    meta = read_json(path)
    if not meta:
        raise DataError(f'{path} is damaged: prepare the dataset again with --overwrite')
    return meta


def read_json(path):
    """{} where there is no such file, or no JSON object in it."""
    try:
        with open(path, encoding='utf-8') as file:
            value = json.load(file)
    except (OSError, ValueError):
        value = {}
    return value if isinstance(value, dict) else {}


def _command(folder):
    parent, name = os.path.split(os.path.normpath(folder))
    dataset, _, tokenizer = name.rpartition('-')
    if not dataset:
        return f'python prepare_data.py {folder}'
    return f'python prepare_data.py {dataset} --tokenizer={tokenizer}' + (f' --data_dir={parent or "."}' if parent != 'data' else '')


def read_split(folder, split, meta):
    """({path: memory-mapped tokens} of one split, problems: an OSError each), by headers, sizes and meta.json's list."""
    listed = {os.path.join(folder, shard['file']): shard for shard in meta.get('shards', ()) if f'{split}_' in shard['file']}
    there = {path for path in glob.glob(os.path.join(folder, f'*{split}_*.bin')) if not path.endswith('_mask.bin')}
    shards, problems = {}, []
    for path in sorted(there | listed.keys()):
        try:
            if path not in there:
                raise MissingError(f'{path} is missing: meta.json lists it')
            if 'shards' in meta and path not in listed:
                raise DataError(f'{path} is not one of the shards that meta.json lists')
            shard = read_shard(path)
            if path in listed and len(shard) != listed[path]['tokens']:
                raise DataError(f'{path} is damaged: it has {len(shard):,} tokens, by meta.json {listed[path]["tokens"]:,}')
            shards[path] = shard
        except OSError as error:
            problems.append(error)
    if len({shard.dtype for shard in shards.values()}) > 1:
        problems.append(DataError(f'{folder} has {split} shards of 2-byte and of 4-byte tokens, of two vocabularies'))
    return shards, problems


def pieces(shard):
    """A shard's tokens, some MB at a time, so that a pass over it stays in the cache."""
    for start in range(0, len(shard), PIECE):
        yield np.asarray(shard[start:start + PIECE])


def is_whole(path, sha256):
    """A shard as long as its header says, its file with this SHA-256 in hex (None: unknown)?"""
    with contextlib.suppress(OSError):
        read_shard(path)
        digest = hashlib.sha256()
        for piece in pieces(np.memmap(path, np.uint8, 'r')):
            digest.update(piece)
        return sha256 in (None, digest.hexdigest())
    return False


def find_problems(folder, vocab_size=None, say=None, trust=False):
    """Reads a dataset folder whole -> what is wrong with it, exceptions that name a shard each; [] where all is well.

    Headers, sizes, counts and crc32 are to be meta.json's, ids below vocab_size and below meta.json's; of foreign shards
    only header, size and ids can be checked. A shard found good is noted in .checked.json with its size and time of change;
    with `trust`, it is not read again while these stay. say: called with a line before more than 2 GB are
    read. Raises what read_meta raises."""
    meta, memory = read_meta(folder), os.path.join(folder, '.checked.json')
    limit = min(size for size in (vocab_size, meta.get('vocab_size'), 2**32) if size)
    listed = {shard['file']: shard for shard in meta.get('shards', ())}
    shards, problems, good = {}, [], {}
    for split in ('train', 'val'):
        of_split, wrong = read_split(folder, split, meta)
        shards.update(of_split)
        problems += wrong
        tokens = [shard['tokens'] for file, shard in listed.items() if f'{split}_' in file]
        if tokens and sum(tokens) != (told := meta['splits'][split]['tokens']):
            problems.append(DataError(f'{folder}/meta.json is damaged: {told:,} {split} tokens, {sum(tokens):,} in its list of shards'))
    noted = read_json(memory) if trust else {}
    unread = [path for path in shards if noted.get(os.path.basename(path), {}).get('stamp') != _stamp(path)]
    size = sum(map(os.path.getsize, unread))
    if say and size > LONG:
        say(f'checking {size / 1e9:.1f} GB of {folder}' + ' once; later starts read only what has changed' * trust)
    for path, shard in shards.items():
        file = os.path.basename(path)
        fact = {'stamp': _stamp(path), **_scan(shard)} if path in unread else noted[file]
        if file in listed and fact['crc32'] != listed[file]['crc32']:
            problems.append(DataError(f'{path} is damaged: its crc32 is not the one in meta.json'))
        elif fact['largest'] >= limit:
            problems.append(SettingError(f'{path} has token {fact["largest"]:,}, outside the vocabulary of {limit:,} tokens'))
        else:
            good[file] = fact
    if good != noted:
        with contextlib.suppress(OSError):  # a folder that cannot be written: the next start reads it again
            write_json(memory, good)
    return problems


def _stamp(path):
    stat = os.stat(path)
    return f'{stat.st_size} bytes, changed at {stat.st_mtime_ns} ns'


def _scan(shard):
    """crc32 and largest id (-1: none) in one pass."""
    crc32, largest = 0, -1
    for piece in pieces(shard):
        crc32, largest = zlib.crc32(piece, crc32), max(largest, int(piece.max()))
    return {'crc32': crc32, 'largest': largest}


def check(folder, vocab_size=None, say=None):
    """Before training: are all shards as they were written, their ids below vocab_size? Reads each shard once in its life.

    See find_problems. Raises OSError or ValueError (a token outside the vocabulary) that names the shard, and read_meta's."""
    _refuse(folder, find_problems(folder, vocab_size, say, trust=True))


def verify_shards(folder, say):
    """find_problems, afresh; `say` gets each of them. Returns (shards, tokens). Raises OSError that tells their number, and
    read_meta's, and FileNotFoundError where there is no meta.json that lists the shards."""
    shards = read_meta(folder).get('shards')
    if not shards:
        raise MissingError(f'{folder} has no meta.json that lists its shards: nothing tells what they should be')
    problems = find_problems(folder)
    for problem in problems:
        say(problem)
    if problems:
        raise DataError(f'{len(problems)} problems, the first: {problems[0]}; --overwrite, with the settings of the first time, prepares it again')
    return len(shards), sum(shard['tokens'] for shard in shards)


def _refuse(folder, problems):
    """Raises the first of the problems, and says what to do."""
    if problems:
        more = f' (and {len(problems) - 1} more)' if problems[1:] else ''
        remedy = f'`{_command(folder)} --verify` lists all that is wrong, --overwrite and its first settings prepare it again'
        foreign = 'it has no meta.json: fetch it again, or give the --tokenizer or --vocab_size that it was made for'
        raise type(problems[0])(f'{problems[0]}{more}; ' + (remedy if os.path.exists(os.path.join(folder, 'meta.json')) else foreign))


class TokenData:
    """One split of a dataset, as windows of block_size + 1 tokens.

    folder: as from dataset_dir. split: 'train' | 'val'. Has `tokens`, `n_windows`, `bytes_per_token` (None where unknown).
    Raises FileNotFoundError, OSError for a damaged shard or one that is not as meta.json lists it, ValueError where the
    split has no whole window."""

    def __init__(self, folder, split, block_size):
        self.block_size, meta = block_size, read_meta(folder)
        counts = meta.get('splits', {}).get(split, {})
        self.bytes_per_token = counts['bytes'] / counts['tokens'] if counts else None
        shards, problems = read_split(folder, split, meta)
        _refuse(folder, problems)
        if not shards:
            raise MissingError(f'{folder} has no {split} shards: it wants some called *train_*.bin and some called *val_*.bin')
        self.shards = list(shards.values())
        self.starts = np.cumsum([0] + [len(shard) for shard in self.shards])
        self.tokens = int(self.starts[-1])
        self.n_windows = (self.tokens - 1) // block_size
        self.views = [self._view(shard, start) for shard, start in zip(self.shards, self.starts.tolist())]
        if self.n_windows < 1:
            raise SettingError(f'{folder} has {self.tokens:,} {split} tokens: fewer than one window of block_size={block_size}')

    def window(self, index):
        """Tokens index * block_size ... + block_size inclusive: (block_size + 1,), across shard ends."""
        start, wanted, pieces = index * self.block_size, self.block_size + 1, []
        shard = int(np.searchsorted(self.starts, start, 'right')) - 1
        start -= int(self.starts[shard])
        while wanted > 0:
            pieces.append(self.shards[shard][start:start + wanted])
            wanted -= len(pieces[-1])
            shard, start = shard + 1, 0
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _view(self, shard, start):
        """(index of the first window that begins in this shard, the windows that lie in it whole: (n, block_size + 1))."""
        first = -(-start // self.block_size)
        offset = first * self.block_size - start
        n = max(0, (len(shard) - offset - 1) // self.block_size)
        stride = shard.dtype.itemsize
        tokens = np.asarray(shard)[offset:] if n else np.empty(0, shard.dtype)
        return first, np.lib.stride_tricks.as_strided(tokens, (n, self.block_size + 1), (self.block_size * stride, stride), writeable=False)

    def batch(self, indices):
        """Windows by index -> (len(indices), block_size + 1) in the shards' dtype: one gather for each shard they lie in."""
        out = np.empty((len(indices), self.block_size + 1), self.shards[0].dtype)
        owners = np.searchsorted(self.starts, indices * self.block_size, 'right') - 1
        for owner in np.unique(owners):
            first, view = self.views[owner]
            here = np.flatnonzero(owners == owner)
            whole = here[indices[here] - first < len(view)]
            out[whole] = view[indices[whole] - first]
            for row in np.setdiff1d(here, whole):  # it runs on into the next shard
                out[row] = self.window(int(indices[row]))
        return out


def _mix(x):
    """splitmix64's finaliser (Steele et al. 2014): (n,) uint64 -> (n,) uint64."""
    with np.errstate(over='ignore'):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index, n, seed, epoch):
    """Entries `index` (array of ints below n) of the permutation of range(n) keyed by (seed, epoch)."""
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = _mix(np.array([(seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03 + r) % 2**64 for r in range(1, 5)], np.uint64))
    x = np.array(index, np.uint64)
    walking = np.ones(x.shape, bool)
    while walking.any():
        left, right = x[walking] >> half, x[walking] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        x[walking] = (left << half) | right
        walking = x >= n
    return x.astype(np.int64)


class Loader:
    """Training micro-batches in order, prepared ahead by num_workers threads (0: made when asked for).

    batch_size: sequences per rank and micro-step. position: sequences consumed by all ranks before the first batch.
    `waited`: seconds that next() has blocked so far."""
    ORDER_BLOCK = 4096  # entries of the order that are computed at once: the network costs numpy calls, not arithmetic

    def __init__(self, data, batch_size, seed, position=0, rank=0, world_size=1, device='cpu', num_workers=1):
        self.data, self.seed, self.device = data, seed, device
        self.numbers = position + rank * batch_size + np.arange(batch_size)
        self.stride = world_size * batch_size
        self.block = functools.lru_cache(2)(self._block)
        self.pool = concurrent.futures.ThreadPoolExecutor(num_workers) if num_workers else None
        self.queue = collections.deque(self._submit() for _ in range(2 * num_workers))
        self.waited = 0.0

    def step_targets(self, micro_steps):
        """Number of targets, over all ranks, in the next `micro_steps` micro-steps."""
        return micro_steps * self.stride * self.data.block_size

    def next(self):
        """x, y: (batch_size, block_size) int64 on the device; y is x one token on."""
        start = time.perf_counter()
        if self.pool:
            self.queue.append(self._submit())
            tokens = self.queue.popleft().result()
        else:
            tokens = self._make(self._advance())
        self.waited += time.perf_counter() - start
        tokens = tokens.to(self.device, non_blocking=True).long()  # they travel as they are stored: a quarter of the bytes
        return tokens[:, :-1], tokens[:, 1:]

    def peek(self):
        tokens = self.queue[0].result() if self.pool else self._make(self.numbers)
        tokens = tokens.to(self.device, non_blocking=True).long()
        return tokens[:, :-1], tokens[:, 1:]

    def _advance(self):
        numbers, self.numbers = self.numbers, self.numbers + self.stride
        return numbers

    def _submit(self):
        return self.pool.submit(self._make, self._advance())

    def _block(self, index):
        """Window indices of the sequences index * ORDER_BLOCK ... + ORDER_BLOCK - 1."""
        numbers, n = index * self.ORDER_BLOCK + np.arange(self.ORDER_BLOCK), self.data.n_windows
        epochs = numbers // n
        return np.concatenate([permute(numbers[epochs == e] % n, n, self.seed, int(e)) for e in np.unique(epochs)])

    def _make(self, numbers):
        import torch
        blocks = numbers // self.ORDER_BLOCK
        indices = np.concatenate([self.block(int(b))[numbers[blocks == b] % self.ORDER_BLOCK] for b in np.unique(blocks)])
        tokens = torch.from_numpy(self.data.batch(indices))
        return tokens.pin_memory() if 'cuda' in str(self.device) else tokens


def eval_batches(data, tokens, batch_size, rank=0, world_size=1, device='cpu'):
    """This rank's share of about `tokens` tokens in fixed windows, spread evenly over the split.

    Yields x, y (batch_size, block_size) int64, always of that shape: rows past the end have targets -1."""
    import torch
    n = max(1, min(data.n_windows, tokens // data.block_size))
    mine = (np.arange(rank, n, world_size) * data.n_windows) // n
    for start in range(0, len(mine), batch_size):
        rows = data.batch(mine[start:start + batch_size]).astype(np.int64)
        batch = torch.full((batch_size, data.block_size + 1), -1)
        batch[:len(rows)] = torch.from_numpy(rows)
        batch = batch.to(device)
        yield batch[:, :-1].clamp(min=0), batch[:, 1:]
