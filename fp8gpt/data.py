"""Feed the training loop from the token shards of shards.py: the order of batches, and the loader.

Tokens of all shards of a split are one long stream, cut into windows of block_size (+1: the last target).
Where shards have masks, for fine-tuning, windows hold whole examples: see Packing.

The order of windows is a pure function of (seed, position), where position counts the sequences consumed so
far: number `position` is entry position % n of a permutation of all n windows keyed by (seed, position // n),
the epoch. So a run resumes anywhere, on any number of GPUs, and every window comes exactly once an epoch.
The permutation is a Feistel network (Luby & Rackoff 1988) over the next power of four, walked until it
lands below n (Black & Rogaway 2002, "cycle walking"): O(1) memory for any n.
"""
import bisect
import functools
import os
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from configurator import DataError, MissingError, SettingError
from fp8gpt.shards import AGAIN, START, TARGET, is_mask, read_splits


class TokenData:
    """Read one split of a dataset as windows of block_size + 1 tokens.

    dataset: a shards.Dataset. split: 'train' | 'val'. Has `tokens`, `n_windows`, `tokens_per_epoch`,
    `packing` (None where shards have no masks), `bytes_per_token` (of masked shards: per target; None:
    unknown). Raises MissingError, DataError as read_splits does, SettingError where the split has no whole
    window."""

    def __init__(self, dataset, split, block_size):
        folder, meta = dataset
        files = read_splits(folder, meta, split)
        self.shards = [shard for file, shard in files.items() if not is_mask(file)]
        self.masks = [mask for file, mask in files.items() if is_mask(file)]
        if not self.shards:
            raise MissingError(f'{folder} has no {split} shards: it wants some called train_*.bin or '
                               'x_train_*.bin, and some called val_*.bin or x_val_*.bin')
        if self.masks and [*map(len, self.masks)] != [*map(len, self.shards)]:
            raise DataError(f'{folder}: some of its {split} shards have no mask as long as they are')
        self.starts = np.cumsum([0, *map(len, self.shards)]).tolist()  # in the stream; last, its end
        self.tokens = self.starts[-1]
        self.block_size = block_size
        self.n_windows, unit = (self.tokens - 1) // block_size, 'tokens'
        self.packing = None
        if self.masks:
            self.packing = Packing(self.masks, self.starts, block_size + 1)
            self.n_windows, unit = len(self.packing.targets), 'targets'
        self.tokens_per_epoch = self.n_windows * block_size     # padding included
        counts = meta.get('splits', {}).get(split)
        self.bytes_per_token = counts['bytes'] / counts[unit] if counts else None
        if self.n_windows < 1:
            if self.masks:
                raise SettingError(f'{folder}: no {split} example has a target within its first '
                                   f'block_size={block_size} tokens: a larger --max_seq_length reads more')
            raise SettingError(f'{folder} has {self.tokens:,} {split} tokens: fewer than one window of '
                               f'block_size={block_size}: prepare more text, or lower --block_size')

    def batch(self, indices):
        """Return [windows by index, (len(indices), block_size + 1) tokens in the shards' dtype], and as a
        second tensor their masks where shards have masks.

        Without masks, window i is tokens i * block_size ... (i + 1) * block_size inclusive, across the ends
        of shards. With masks it is the examples that are packed into it, then zeros, which the mask begins as
        an example of their own."""
        import torch
        found = []
        for shards in filter(None, (self.shards, self.masks)):
            windows = np.zeros((len(indices), self.block_size + 1), shards[0].dtype)
            for window, index in zip(windows, indices):
                end = self._fill(window, int(index), shards)
                window[end:end + 1] = START if shards is self.masks else 0
            found.append(torch.from_numpy(windows))
        return found

    def _fill(self, window, index, shards):
        """Read a window of the tokens, or of the masks. Return the end of its last example."""
        spans = [(index * self.block_size, len(window))]
        if self.packing:
            spans = self.packing.spans(index)
        end = 0
        for start, length in spans:
            shard = bisect.bisect_right(self.starts, start) - 1
            start -= self.starts[shard]
            last = end + length
            while end < last:  # once, but for a window that runs on into the next shard
                part = shards[shard]
                if os.stat(part.filename).st_size < part.offset + part.nbytes:      # else SIGBUS
                    raise DataError(f'{part.filename} was cut short while it was read; {AGAIN}')
                part = part[start:start + last - end]
                window[end:end + len(part)] = part
                end += len(part)
                shard += 1
                start = 0
        return end


class Packing:
    """Assign examples to windows: as many whole examples as fit, in file order. An example longer than a
    window is cut at its end (`cut` counts them, `lost` their tokens), or left out where no target remains
    (`left_out`).

    masks: one array a shard, which hold whole examples. offsets: of the shards in the stream, in tokens.
    size: tokens of a window. Has `targets` (n_windows,) and `padding`: the share of the windows that holds no
    example; takes 28 bytes an example."""

    def __init__(self, masks, offsets, size):
        examples = np.hstack([examples_in(mask, size, offset) for mask, offset in zip(masks, offsets)])
        kept = examples[2] > 0
        self.left_out = int((~kept).sum())
        self.starts, lengths, targets = examples[:, kept]
        self.cut = int((lengths > size).sum())
        self.lost = int((lengths - size).clip(0).sum())
        self.lengths = np.minimum(lengths, size).astype(np.int32)

        ends = np.append(0, np.cumsum(self.lengths))
        following = np.searchsorted(ends, ends + size, 'right') - 1  # the first example of the next window
        first = [0]
        while first[-1] < len(self.lengths):
            first.append(int(following[first[-1]]))
        self.first = np.array(first)
        self.targets = np.diff(np.append(0, np.cumsum(targets))[self.first])
        self.padding = 1 - int(ends[-1]) / max(1, len(self.targets) * size)

    def spans(self, window):
        """Yield (start in the stream, length) of each example of a window."""
        part = slice(*self.first[window:window + 2])
        return zip(self.starts[part].tolist(), self.lengths[part].tolist())


def examples_in(mask, size, offset):
    """Return starts, lengths and targets among the first `size` tokens of a shard's examples, (3, n). offset:
    of the shard in the stream, in tokens."""
    starts = np.flatnonzero(mask & START)
    ends = np.append(starts[1:], len(mask))
    bounds = np.stack([starts, np.minimum(ends, starts + size)], axis=1).ravel()
    targets = np.append(mask & TARGET, np.uint8(0))     # as reduceat takes no bound past the end
    counts = np.add.reduceat(targets, bounds, dtype=np.int32)[::2]      # between starts, not after stops
    return np.stack([starts + offset, ends - starts, counts])


MIN_BITS = 4    # of a half: with fewer, the orders of a handful of windows are not equally likely


def _mix(x):
    """Apply splitmix64's finaliser (Steele et al. 2014): (n,) uint64 -> (n,) uint64."""
    with np.errstate(over='ignore'):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index, n, seed, epoch):
    """Return the entries `index` (array of ints below n) of the permutation of range(n) keyed by
    (seed, epoch)."""
    bits = max(MIN_BITS, ((n - 1).bit_length() + 1) // 2)
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
    """Give training micro-batches in order, prepared ahead by num_workers threads (0: made when asked for).

    data: TokenData. batch_size: sequences per rank and micro-step. position: sequences consumed by all
    ranks before the first batch. `waited`: seconds that next() has blocked so far."""

    def __init__(self, data, batch_size, seed, position=0, rank=0, world_size=1, device='cpu', num_workers=1):
        self.data = data
        self.batch_size = batch_size
        self.seed = seed
        self.device = device
        self.stride = world_size * batch_size  # sequences of a micro-step, over all ranks
        self.position = position  # sequences consumed by all ranks
        self.first = position + rank * batch_size  # number of the next sequence to ask for
        self.waited = 0.0
        self.pool = ThreadPoolExecutor(num_workers) if num_workers else None
        self.queue = deque()  # functions that return micro-batches, the next one first
        for _ in range(2 * num_workers or 1):
            self._ask()

    def step_targets(self, micro_steps):
        """Return the number of targets, over all ranks, in the next `micro_steps` micro-steps."""
        sequences = micro_steps * self.stride
        if not self.data.packing:
            return sequences * self.data.block_size
        windows = self._windows(self.position, self.position + sequences)
        return int(self.data.packing.targets[windows].sum())

    def next(self):
        """Return x, y, examples: each (batch_size, block_size) int64 on the device. y is the token after each
        of x, -1 where that is no target. examples: the number of each token's example within its window,
        padding being the last; None where the data have no masks."""
        start = time.perf_counter()
        self._ask()
        batch = self.queue.popleft()()
        self.position += self.stride
        self.waited += time.perf_counter() - start
        return inputs_and_targets(batch, self.device)

    def peek(self):
        """Return the batch that next() will return; position, prefetching and `waited` do not change."""
        return inputs_and_targets(self.queue[0](), self.device)

    def _ask(self):
        """Queue the making of one more batch."""
        make = functools.partial(self._make, self.first)
        self.queue.append(self.pool.submit(make).result if self.pool else make)
        self.first += self.stride

    def _make(self, first):
        """Return [tokens, and their masks where there are any] from sequence number `first` on, as stored."""
        batch = self.data.batch(self._windows(first, first + self.batch_size))
        if 'cuda' not in str(self.device):
            return batch
        import torch
        with torch.cuda.device(self.device):    # a thread's own is GPU 0, where CUDA would make a context
            return [tensor.pin_memory() for tensor in batch]

    def _windows(self, first, last):
        """Return the indices (last - first,) of the windows of sequences number first ... last - 1."""
        n = self.data.n_windows
        epochs, entries = np.divmod(np.arange(first, last), n)
        parts = [permute(entries[epochs == epoch], n, self.seed, int(epoch)) for epoch in np.unique(epochs)]
        return np.concatenate(parts)


def inputs_and_targets(batch, device):
    """Return x, y, examples (see Loader.next) on the device. batch: [tokens (B, T + 1) as stored], and their
    masks (B, T + 1) uint8 where there are any."""
    if 'cuda' in str(device):   # they travel as stored: in 2 bytes a token, and in 1 of its mask
        tokens, *masks = [tensor.to(device, non_blocking=True) for tensor in batch]
    else:
        tokens, *masks = [tensor.int().to(device) for tensor in batch]
    x, y = tokens[:, :-1].long(), tokens[:, 1:].long()
    if not masks:
        return x, y, None
    y = y.masked_fill(masks[0][:, 1:] & TARGET == 0, -1)
    examples = (masks[0][:, :-1] & START != 0).long().cumsum(1) - 1
    return x, y, examples


def eval_batches(data, tokens, batch_size, rank=0, world_size=1, device='cpu'):
    """Yield this rank's share of about `tokens` tokens in fixed windows, spread evenly over the split.

    Each is x, y, examples as Loader.next returns them, (batch_size, block_size). All ranks yield the same
    number: rows past the end have targets -1."""
    n = max(1, min(data.n_windows, tokens // data.block_size))
    mine = [i * data.n_windows // n for i in range(rank, n, world_size)]
    most = -(-n // world_size)
    for start in range(0, most, batch_size):
        windows = mine[start:start + batch_size]
        real = len(windows)
        windows += [0] * (batch_size - real)
        x, y, examples = inputs_and_targets(data.batch(windows), device)
        y[real:] = -1
        yield x, y, examples
