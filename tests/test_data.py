"""Token shards, the check before training, the order of windows, and the batches of both loops."""
import collections
import itertools
import json
import os

import numpy as np
import pytest
import torch

from fp8gpt import shards
from configurator import DataError, MissingError, SettingError
from fp8gpt.data import Loader, TokenData, eval_batches, permute
from fp8gpt.files import write_json
from preparing import llm_c
from fp8gpt.shards import ShardWriter, check, read_shard


def write(folder, split, documents, shard_tokens=10**9, vocab_size=50257):
    writer = ShardWriter(folder, split, shard_tokens, vocab_size)
    for ids in documents:
        writer.add(np.array(ids))
    return writer.save()


def test_a_shard_has_the_layout_of_llm_c(tmp_path):
    cases = [('a', 50257, '<u2', [20240520, 1]), ('b', 2**16, '<u2', [20240520, 1]),
             ('c', 2**16 + 1, '<u4', [20240801, 7]), ('d', 128_256, '<u4', [20240801, 7])]
    for name, vocab_size, dtype, magic_and_version in cases:
        ids = [vocab_size - 1, 1, 2, 0]
        write(tmp_path, f'{name}_val', [ids[:3], ids[3:]], vocab_size=vocab_size)
        raw = (tmp_path / f'{name}_val_000000.bin').read_bytes()
        header = np.frombuffer(raw[:1024], '<i4')  # read by the format's definition, not by shards.py
        assert header.tolist() == [*magic_and_version, 4, *[0] * 253]
        assert np.frombuffer(raw[1024:], dtype).tolist() == ids
        assert read_shard(tmp_path / f'{name}_val_000000.bin').tolist() == ids


def test_a_shard_of_others_is_read_without_meta_json(tmp_path):
    (tmp_path / 'edu_fineweb_train_000001.bin').write_bytes(llm_c(range(100)))
    train = TokenData(str(tmp_path), 'train', 10)
    assert train.batch([3])[0][0].tolist() == list(range(30, 41))
    assert shards.read_meta(str(tmp_path)) == {}
    assert train.bytes_per_token is None
    with pytest.raises(MissingError, match=r'has no val shards.*val_\*\.bin'):
        TokenData(str(tmp_path), 'val', 8)


def test_windows_cross_shards_and_lose_no_token(tmp_path):
    stream = np.arange(1000)
    for block_size, shard_tokens in ((7, 33), (250, 10), (999, 500)):
        folder = tmp_path / f'{block_size}-{shard_tokens}'
        folder.mkdir()
        write(folder, 'train', stream.reshape(-1, 10), shard_tokens)
        train = TokenData(str(folder), 'train', block_size)
        assert len(train.shards) == np.ceil(1000 / np.ceil(shard_tokens / 10) / 10)
        assert train.n_windows == 999 // block_size
        order = np.random.default_rng(0).permutation(train.n_windows)
        expected = [stream[i * block_size:(i + 1) * block_size + 1].tolist() for i in order]
        assert train.batch(order)[0].tolist() == expected


def test_a_folder_without_data_names_the_command_that_prepares_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'data').mkdir()
    config = {'dataset': 'mine', 'tokenizer': 'byte', 'split_name': '', 'data_dir': 'data'}
    for dataset, split, hint in (
            ('fineweb-edu', '', 'fineweb_edu --tokenizer=byte --data_dir=data`'),
            ('openmathinstruct2', 'train_2M',
             'openmathinstruct2 --tokenizer=byte --split_name=train_2M --data_dir=data`'),
            ('someone/texts', '', 'someone/texts --tokenizer=byte --data_dir=data`'),
            ('data/mine', '', 'mine --tokenizer=byte --data_dir=data --data_files=YOUR_TEXTS`'),
            ('mine', '', 'mine --tokenizer=byte --data_dir=data --data_files=YOUR_TEXTS`')):
        with pytest.raises(MissingError, match=f'run `python prepare_data.py {hint}'):
            shards.find_dataset({**config, 'dataset': dataset, 'split_name': split})
    (tmp_path / 'mine').mkdir()     # a folder of texts, until the dataset is prepared
    assert shards.dataset_dir(config) == 'mine'
    (tmp_path / 'data' / 'mine-byte').mkdir(parents=True)
    assert shards.dataset_dir(config) == 'data/mine-byte'
    assert shards.dataset_dir({**config, 'dataset': f'{tmp_path}/mine'}) == f'{tmp_path}/mine'
    write(tmp_path, 'train', [range(50)])
    assert TokenData(str(tmp_path), 'train', 49).n_windows == 1
    with pytest.raises(SettingError, match='fewer than one window'):
        TokenData(str(tmp_path), 'train', 50)
    (tmp_path / 'meta.json').write_text('{"progress": {}}')
    with pytest.raises(MissingError, match='half prepared'):
        TokenData(str(tmp_path), 'train', 8)


@pytest.fixture
def prepared(tmp_path):
    """A folder of two train shards and one val shard with their meta.json."""
    folder = tmp_path / 'mine-byte'
    folder.mkdir()
    train, val = (
        write(folder, split, np.random.default_rng(0).integers(0, 257, (n, 100)), 1000, 257)
        for split, n in (('train', 15), ('val', 5)))
    write_json(str(folder / 'meta.json'), {
        'tokenizer': 'byte', 'vocab_size': 257, 'shards': train + val,
        'splits': {'train': {'tokens': 1500, 'bytes': 1500}, 'val': {'tokens': 500, 'bytes': 500}}})
    return folder


def test_shards_are_read_once_and_again_when_they_change(prepared, monkeypatch):
    reads, crc32 = [], shards.zlib.crc32
    monkeypatch.setattr(shards.zlib, 'crc32', lambda shard: reads.append(len(shard)) or crc32(shard))
    changed = (prepared / 'train_000001.bin').stat().st_mtime_ns
    for change, trust, read in ((0, True, 2000), (0, True, 0), (10**9, True, 500), (0, False, 2000)):
        changed += change
        os.utime(prepared / 'train_000001.bin', ns=(0, changed))
        reads.clear()
        check(str(prepared), 257, trust)
        assert sum(reads) == read
    for text in ('', 'text', '[]', '{"train_000000.bin": [1, 2, 3, 4]}'):    # the last: another version's
        (prepared / '.checked.json').write_text(text)
        check(str(prepared))
    (prepared / '.checked.json').unlink()
    (prepared / '.checked.json').mkdir()        # cannot be written
    check(str(prepared))
    with pytest.raises(SettingError, match='has token 256, outside the vocabulary of 256 tokens'):
        check(str(prepared), 256)


def test_shards_that_are_not_as_listed_are_refused(prepared):
    """By the check before training; all but a flipped bit by the loader, too."""
    whole = {path.name: path.read_bytes() for path in prepared.iterdir()}
    meta = json.loads(whole['meta.json'])
    meta['shards'][0]['tokens'] = 999
    first, second, other = ('train_000000.bin', 'train_000001.bin', 'x_train_000009.bin')
    flipped = whole[second][:1500] + bytes([whole[second][1500] ^ 1]) + whole[second][1501:]
    for name, spoilt, message in (
            (second, flipped, f'{second} is damaged: its crc32'),
            ('meta.json', json.dumps(meta).encode(), '1,000 tokens, by meta.json 999'),
            ('meta.json', b'{"shards": ', 'meta.json is damaged'),
            ('meta.json', b'[]', 'meta.json is damaged'),
            (first, None, f'{first} is missing'),
            (other, llm_c([1, 2]), f'{other} is damaged: 2 tokens, by meta.json 0'),
            (second, whole[second][:8] + b'\xf5' + whole[second][9:], 'damaged: 501 tokens promised, 500 ')):
        (prepared / name).write_bytes(spoilt) if spoilt else (prepared / name).unlink()
        for read in [lambda: TokenData(str(prepared), 'train', 8)] * (spoilt != flipped) + [
                lambda: check(str(prepared))]:
            with pytest.raises(DataError, match=message + '.*--overwrite'):
                read()
        (prepared / other).unlink(missing_ok=True)
        for name, raw in whole.items():
            (prepared / name).write_bytes(raw)


def test_the_orders_of_four_windows_are_equally_likely():
    """Pearson's chi-square of 23 degrees of freedom: mean 23, standard deviation sqrt(46); six of them."""
    counts = collections.Counter(tuple(permute(np.arange(4), 4, seed, 0)) for seed in range(240))
    chi_square = sum((counts[order] - 10)**2 / 10 for order in itertools.permutations(range(4)))
    assert chi_square < 23 + 6 * 46**0.5


def test_the_order_of_an_epoch_is_a_permutation():
    for n in (1, 2, 7, 64, 65, 4097):
        orders = [tuple(permute(np.arange(n), n, seed, epoch)) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
        assert all(sorted(order) == list(range(n)) for order in orders)
        if n >= 64:
            assert len(set(orders)) == 3
    # A thousand of a hundred thousand: uniform over ten bins?
    first = permute(np.arange(1000), 100_000, 3, 0)
    counts = np.histogram(first, 10, (0, 100_000))[0]
    assert ((counts - 100) ** 2 / 100).sum() < 27.9  # chi-squared, 9 degrees of freedom, p = 0.001


@pytest.fixture
def train(tmp_path):
    """53 windows of 8; a window's first token names it."""
    write(tmp_path, 'train', np.arange(1, 8 * 53 + 2).reshape(-1, 1))
    return TokenData(str(tmp_path), 'train', 8)


def named(x):
    """The windows that the rows of x are."""
    return [int(row[0] - 1) // 8 for row in x]


def consumed(train, world_size, batch_size, micro_steps, position=0, workers=0):
    """Windows in the order in which a run of `world_size` ranks consumes them."""
    loaders = [
        Loader(train, batch_size, 5, position, rank=rank, world_size=world_size, num_workers=workers)
        for rank in range(world_size)]
    order = []
    for _ in range(micro_steps):
        for loader in loaders:
            order += named(loader.next()[0])
    return order


def test_the_order_is_the_same_for_any_number_of_ranks_and_resumes_anywhere(train):
    reference = consumed(train, 1, 1, 160)
    for epoch in (reference[:53], reference[53:106], reference[106:159]):
        assert sorted(epoch) == list(range(53))
    assert reference[:53] != reference[53:106]
    for world_size, batch_size in ((1, 4), (4, 1), (2, 5)):
        micro_steps = 160 // (world_size * batch_size)
        expected = reference[:world_size * batch_size * micro_steps]
        for workers in (0, 3):
            assert consumed(train, world_size, batch_size, micro_steps, workers=workers) == expected
    assert consumed(train, 2, 3, 10, position=42) == reference[42:102]


def test_peek_is_the_next_batch_and_consumes_nothing(train):
    for workers in (0, 2):
        loader = Loader(train, 3, 5, position=7, num_workers=workers)
        order = []
        for _ in range(20):  # beyond an epoch
            before = loader.waited, list(loader.queue), loader.first, loader.position
            x, y, _ = loader.peek()
            assert before == (loader.waited, list(loader.queue), loader.first, loader.position)
            following = loader.next()
            assert loader.waited > before[0]
            assert torch.equal(following[0], x) and torch.equal(following[1], y)
            assert torch.equal(y, x + 1)    # targets are inputs, one token on
            order += named(x)
        assert order == consumed(train, 1, 3, 20, position=7)
        assert loader.step_targets(4) == 4 * 3 * 8


def test_the_ranks_evaluate_each_window_once_and_in_as_many_batches(train):
    wrong = []
    for tokens, windows in ((20 * 8, [i * 53 // 20 for i in range(20)]), (10**9, range(53)), (1, [0])):
        for world_size, batch_size in itertools.product((1, 3, 8), (1, 2, 7)):
            seen, batches = [], set()
            for rank in range(world_size):
                made = list(eval_batches(train, tokens, batch_size, rank, world_size))
                batches.add(len(made))
                for x, y, _ in made:
                    assert x.shape == y.shape == (batch_size, 8)
                    real = (y != -1).all(1)
                    assert (y[~real] == -1).all()           # a row past the end has no target at all
                    assert torch.equal(y[real], x[real] + 1)
                    seen += named(x[real])
            if sorted(seen) != list(windows) or len(batches) != 1:
                wrong.append((tokens, world_size, batch_size))
    assert wrong == []
