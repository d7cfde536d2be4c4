import collections
import json
import os
import shutil
import time

import numpy as np
import pytest
import torch

import shards
from configurator import DataError, MissingError, SettingError, UserError
from data import Loader, TokenData, eval_batches, permute
from files import write_json
from shards import ShardWriter, check, read_shard


def write(folder, split, documents, shard_tokens=10**9, vocab_size=50257):
    writer = ShardWriter(folder, split, shard_tokens, vocab_size)
    for ids in documents:
        writer.add(np.array(ids))
    writer.finish_shard()
    return writer


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_layout_is_llm_c(tmp_path):
    write(tmp_path, 'train', [[50256, 1, 2], [50256, 65535]])
    raw = (tmp_path / 'train_000000.bin').read_bytes()
    header = np.frombuffer(raw[:1024], '<i4')  # read by the format's definition, not by data.py
    assert header[:4].tolist() == [20240520, 1, 5, 0]
    assert np.frombuffer(raw[1024:], '<u2').tolist() == [50256, 1, 2, 50256, 65535]
    write(tmp_path, 'val', [[100_000, 3]], vocab_size=128_256)
    raw = (tmp_path / 'val_000000.bin').read_bytes()
    assert np.frombuffer(raw[:12], '<i4').tolist() == [20240801, 7, 2]
    assert np.frombuffer(raw[1024:], '<u4').tolist() == [100_000, 3]


def test_a_foreign_llm_c_shard_is_read(tmp_path):
    header = np.zeros(256, '<i4')
    header[:3] = 20240520, 1, 100
    (tmp_path / 'edu_fineweb_train_000001.bin').write_bytes(
        header.tobytes() + np.arange(100, dtype='<u2').tobytes())
    train = TokenData(str(tmp_path), 'train', 10)
    assert train.batch([3])[0].tolist() == list(range(30, 41))
    assert shards.read_meta(str(tmp_path)) == {}
    assert train.bytes_per_token is None


def test_windows_cross_shards_and_lose_no_token(tmp_path):
    stream = np.arange(1000) % 60000
    write(tmp_path, 'train', stream.reshape(-1, 10), shard_tokens=33)  # shards far shorter than a window
    train = TokenData(str(tmp_path), 'train', 96)
    assert len(train.shards) == 25
    assert train.n_windows == 999 // 96
    for i in range(train.n_windows):
        assert train.batch([i])[0].tolist() == stream[i * 96:i * 96 + 97].tolist()
    for block_size, shard_tokens in ((96, 33), (7, 33), (10, 300), (250, 10), (999, 500)):
        folder = tmp_path / f'{block_size}-{shard_tokens}'
        folder.mkdir()
        write(folder, 'train', stream.reshape(-1, 10), shard_tokens)
        train = TokenData(str(folder), 'train', block_size)
        order = np.random.default_rng(0).permutation(train.n_windows)
        expected = [stream[i * block_size:(i + 1) * block_size + 1].tolist() for i in order]
        assert train.batch(order).tolist() == expected
        assert train.batch(order[:1]).tolist() == expected[:1]


@pytest.mark.parametrize(
    'spoil, message',
    [
        (lambda raw: raw[:-2], 'damaged: 50 tokens promised, 49 there'),
        (lambda raw: b'\0' * 8 + raw[8:], 'not a token shard'),
        (lambda raw: raw[:100], 'not a token shard'),
    ],
)
def test_damaged_shards_are_named(tmp_path, spoil, message):
    write(tmp_path, 'train', [range(50)])
    path = tmp_path / 'train_000000.bin'
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        read_shard(str(path))


def test_a_folder_of_texts_does_not_stand_in_for_the_dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'mine').mkdir()
    assert shards.dataset_dir('data', 'mine', 'byte') == 'mine'
    (tmp_path / 'data' / 'mine-byte').mkdir(parents=True)
    assert shards.dataset_dir('data', 'mine', 'byte') == 'data/mine-byte'
    assert shards.dataset_dir('data', str(tmp_path / 'mine'), 'byte') == str(tmp_path / 'mine')


def test_the_hint_where_data_is_missing_is_a_command_that_works(tmp_path, monkeypatch):
    import prepare_data
    assert {*shards.KNOWN, 'hellaswag'} == prepare_data.DATASETS.keys()
    monkeypatch.chdir(tmp_path)
    for dataset, hint in (('stdlib', 'stdlib --tokenizer=byte`'),
                          ('mine', 'mine --tokenizer=byte --data_files=YOUR_TEXTS`')):
        with pytest.raises(MissingError, match=f'run `python prepare_data.py {hint}'):
            shards.read_meta(shards.dataset_dir('data', dataset, 'byte'))


def test_missing_and_half_prepared_folders(tmp_path):
    with pytest.raises(MissingError, match='prepare_data.py fineweb_edu --tokenizer=gpt2'):
        TokenData(shards.dataset_dir(str(tmp_path), 'fineweb-edu', 'gpt2'), 'train', 8)
    write(tmp_path, 'train', [range(50)])
    with pytest.raises(SettingError, match='fewer than one window'):
        TokenData(str(tmp_path), 'train', 50)
    (tmp_path / 'progress.json').write_text('{}')
    with pytest.raises(MissingError, match='half prepared'):
        TokenData(str(tmp_path), 'train', 8)


# ------------------------------------------------------------------------------- the check before training

def foreign(path, ids):
    header = np.zeros(256, '<i4')
    header[:3] = 20240520, 1, len(ids)
    path.write_bytes(header.tobytes() + np.array(ids, '<u2').tobytes())


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """A folder of two train shards and one val shard with their meta.json; each is more than is checked
    at once."""
    monkeypatch.setattr(shards, 'PIECE', 300)
    folder = tmp_path / 'mine-byte'
    folder.mkdir()
    train, val = (
        write(folder, split, np.random.default_rng(0).integers(0, 257, (n, 100)), 1000, 257)
        for split, n in (('train', 15), ('val', 5))
    )
    write_json(str(folder / 'meta.json'), {
        'tokenizer': 'byte', 'vocab_size': 257, 'shards': train.shards + val.shards,
        'splits': {'train': {'tokens': 1500, 'bytes': 1500}, 'val': {'tokens': 500, 'bytes': 500}}})
    return folder


@pytest.fixture
def reads(monkeypatch):
    """The tokens that have been read for their crc32 so far, a list."""
    reads, crc32 = [], shards.zlib.crc32
    monkeypatch.setattr(
        shards.zlib, 'crc32', lambda piece, start=0: reads.append(len(piece)) or crc32(piece, start)
    )
    return reads


def flip(path, at=1500):
    raw, changed = bytearray(path.read_bytes()), path.stat().st_mtime_ns
    raw[at] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(0, changed + 10**9))  # the file system's clock may tick slower than this test


def test_shards_are_read_once_and_again_when_they_change(prepared, reads):
    assert shards.check(str(prepared)) is None
    assert sum(reads) == 2000
    shards.check(str(prepared))
    shards.check(str(prepared), 300)
    assert sum(reads) == 2000
    train = prepared / 'train_000001.bin'
    os.utime(train, ns=(0, train.stat().st_mtime_ns + 1))
    shards.check(str(prepared))
    assert sum(reads) == 2500
    assert shards.find_problems(str(prepared)) == []
    assert sum(reads) == 4500  # --verify trusts no note


def test_a_flipped_byte_is_found_until_it_is_mended(prepared, reads):
    flip(prepared / 'train_000001.bin')
    command = 'prepare_data.py mine --tokenizer=byte --data_dir=.* --verify`'
    damaged = f'train_000001.bin is damaged: its crc32 .*{command}.*--overwrite'
    for _ in range(2):  # it is not noted as good
        with pytest.raises(DataError, match=damaged):
            shards.check(str(prepared))
    assert sum(reads) == 2000 + 500
    flip(prepared / 'train_000001.bin')
    shards.check(str(prepared))
    shards.check(str(prepared))
    assert sum(reads) == 2000 + 500 + 500
    flip(prepared / 'train_000001.bin')
    flip(prepared / 'val_000000.bin')
    with pytest.raises(DataError, match=r'train_000001.bin .*\(and 1 more\)'):
        shards.check(str(prepared))


def test_meta_json_is_compared_with_the_notes_too(prepared, reads):
    shards.check(str(prepared))
    meta = shards.read_meta(str(prepared))
    meta['shards'][2]['crc32'] ^= 1
    write_json(str(prepared / 'meta.json'), meta)
    with pytest.raises(DataError, match='val_000000.bin'):
        shards.check(str(prepared))
    assert sum(reads) == 2000


@pytest.mark.parametrize('note', ['', '[]', '{"train_000000.bin": {}}', None])
def test_damaged_notes_and_a_folder_that_cannot_be_written_only_cost_time(prepared, reads, note, monkeypatch):
    if note is None:  # root may write everywhere, so the mode of the folder would not do
        def refuse(*words):
            raise PermissionError('read-only')
        monkeypatch.setattr(shards, 'write_json', refuse)
    else:
        (prepared / '.checked.json').write_text(note)
    shards.check(str(prepared))
    shards.check(str(prepared))
    assert sum(reads) == (4000 if note is None else 2000)


def test_tokens_outside_the_vocabulary_are_refused_by_name(prepared, tmp_path, reads):
    outside = 'train_000000.bin has token 256, outside the vocabulary of 256 tokens'
    with pytest.raises(SettingError, match=outside):
        shards.check(str(prepared), 256)
    folder = tmp_path / 'foreign'
    folder.mkdir()
    foreign(folder / 'x_train_000000.bin', [7, 8, 9] * 100)
    foreign(folder / 'x_val_000000.bin', [1, 2] * 50 + [300] + [3] * 50)
    shards.check(str(folder))
    shards.check(str(folder), 301)
    outside = 'x_val_000000.bin has token 300, outside the vocabulary of 257 tokens; it has no meta.json'
    with pytest.raises(SettingError, match=outside):
        shards.check(str(folder), 257)


def test_a_long_check_is_announced(prepared, monkeypatch):
    said = []
    shards.check(str(prepared), say=said.append)
    assert said == []
    (prepared / '.checked.json').unlink()
    monkeypatch.setattr(shards, 'LONG', 4000)  # bytes; the shards have 4,000 and their headers
    shards.check(str(prepared), say=said.append)
    shards.check(str(prepared), say=said.append)
    assert len(said) == 1
    assert '0.0 GB' in said[0]
    assert str(prepared) in said[0]


def test_the_check_reads_some_hundred_megabytes_a_second(tmp_path):
    write(tmp_path, 'train', [np.arange(10**7) % 50257] * 5)
    started = time.perf_counter()
    shards.check(str(tmp_path), 50257)
    assert 100e6 / (time.perf_counter() - started) > 200e6  # bytes; some GB/s where nothing else runs


@pytest.mark.parametrize(
    'change, message',
    [
        (lambda folder, meta: meta['shards'][0].update(tokens=999), '1,000 tokens, by meta.json 999'),
        (lambda folder, meta: (folder / 'train_000000.bin').unlink(), 'train_000000.bin is missing'),
        (lambda folder, meta: foreign(folder / 'x_train_000009.bin', [1, 2]),
         'x_train_000009.bin is not one of the shards'),
        (lambda folder, meta: flip(folder / 'train_000001.bin', 8),
         'damaged: 501 tokens promised, 500 there'),
    ],
)
def test_shards_that_are_not_as_listed_are_refused_at_once(prepared, reads, change, message):
    meta = shards.read_meta(str(prepared))
    change(prepared, meta)
    write_json(str(prepared / 'meta.json'), meta)
    with pytest.raises(DataError, match=message + '.*--verify'):
        TokenData(str(prepared), 'train', 8)
    assert not reads
    with pytest.raises(DataError, match=message + '.*--verify'):
        shards.check(str(prepared))


def test_a_split_that_is_not_there_is_one_line(tmp_path):
    foreign(tmp_path / 'fineweb_train_000001.bin', range(100))
    TokenData(str(tmp_path), 'train', 8)
    with pytest.raises(MissingError, match=r'has no val shards.*val_\*\.bin'):
        TokenData(str(tmp_path), 'val', 8)
    write(tmp_path, 'train', [[100_000] * 20], vocab_size=128_256)
    with pytest.raises(DataError, match='2-byte and of 4-byte'):
        TokenData(str(tmp_path), 'train', 8)
    (tmp_path / 'meta.json').write_text('{')
    with pytest.raises(DataError, match='meta.json is damaged'):
        TokenData(str(tmp_path), 'train', 8)


@pytest.mark.parametrize('n', [1, 2, 3, 7, 64, 65, 1000, 4097])
def test_permutation_is_one(n):
    seen = [tuple(permute(np.arange(n), n, seed, epoch)) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert all(sorted(order) == list(range(n)) for order in seen)
    if n >= 64:
        assert len(set(seen)) == 3
        shift = np.diff(seen[0])
        assert collections.Counter(shift.tolist()).most_common(1)[0][1] < n / 8  # no stride


def test_permutation_spreads_evenly():
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


def test_order_is_the_same_for_any_split_and_resumes_anywhere(train):
    reference = consumed(train, 1, 1, 160)
    for world_size, batch_size in ((1, 4), (2, 2), (4, 1), (2, 5), (8, 4)):
        micro_steps = 160 // (world_size * batch_size)
        expected = reference[:world_size * batch_size * micro_steps]
        for workers in (0, 3):
            assert consumed(train, world_size, batch_size, micro_steps, workers=workers) == expected
    assert consumed(train, 2, 3, 10, position=42) == reference[42:102]


@pytest.mark.parametrize('workers', [0, 2])
def test_peek_is_the_next_batch_and_consumes_nothing(train, workers):
    loader = Loader(train, 3, 5, position=7, num_workers=workers)
    order = []
    for _ in range(20):  # beyond an epoch
        x, y, _ = loader.peek()
        again = loader.peek()
        assert torch.equal(again[0], x)
        assert torch.equal(again[1], y)
        following = loader.next()
        assert torch.equal(following[0], x)
        assert torch.equal(following[1], y)
        order += named(x)
    assert order == consumed(train, 1, 3, 20, position=7)


@pytest.mark.parametrize('workers', [0, 2])
def test_peek_does_not_wait_or_prefetch_on_the_runs_account(train, workers):
    loader = Loader(train, 3, 5, num_workers=workers)
    loader.next()
    waited = loader.waited
    assert waited > 0
    queue, first = list(loader.queue), loader.first
    loader.peek()
    loader.peek()
    assert loader.waited == waited
    assert list(loader.queue) == queue
    assert loader.first == first


def test_each_window_once_an_epoch(train):
    order = consumed(train, 2, 1, 80)
    for epoch in (order[:53], order[53:106], order[106:159]):
        assert sorted(epoch) == list(range(53))
    assert order[:53] != order[53:106]


def test_targets_are_inputs_one_on(train):
    loader = Loader(train, 3, 0)
    x, y, examples = loader.next()
    assert examples is None
    assert x.shape == y.shape == (3, 8)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(y, x + 1)
    assert loader.step_targets(4) == 4 * 3 * 8


@pytest.mark.parametrize('world_size, batch_size', [(1, 1), (1, 4), (3, 4), (8, 7)])
def test_eval_windows_are_fixed_and_complete(train, world_size, batch_size):
    seen = []
    for rank in range(world_size):
        for x, y, _ in eval_batches(train, 20 * 8, batch_size, rank, world_size):
            assert x.shape == (batch_size, 8)
            seen += [int(row[0]) - 1 for row, target in zip(x, y) if target[0] >= 0]
    assert sorted(seen) == [(i * 53) // 20 * 8 for i in range(20)]


def test_writer_resumes_where_its_state_was_taken(tmp_path):
    documents = [np.random.default_rng(i).integers(0, 60000, 40) for i in range(30)]
    whole, broken = tmp_path / 'whole', tmp_path / 'broken'
    whole.mkdir()
    broken.mkdir()
    expected = write(whole, 'train', documents, shard_tokens=300).shards
    writer = ShardWriter(broken, 'train', 300, 50257)
    for ids in documents[:11]:
        writer.add(ids)
    writer.sync()
    state = writer.state() | {'shards': list(writer.shards)}
    for ids in documents[3:25]:  # what a killed run wrote after its last commit
        writer.add(ids)
    writer.sync()
    writer = ShardWriter(broken, 'train', 300, 50257, state)
    for ids in documents[11:]:
        writer.add(ids)
    writer.finish_shard()
    assert writer.shards == expected
    assert contents(broken) == contents(whole)


# ------------------------------------------------------------------------------- what files may hold

def keys(value, path=()):
    """Paths to all that nested dicts and lists hold."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        if isinstance(item, (dict, list)):
            yield from keys(item, (*path, key))


def test_a_damaged_meta_or_note_is_told_in_one_line_or_read_again(tiny_data, tmp_path):
    folder = tmp_path / 'copy-byte'
    shutil.copytree(tiny_data, folder)
    check(str(folder))
    said = set()
    for name in ('meta.json', '.checked.json'):
        whole = json.loads((folder / name).read_text())
        texts = ['', 'text', '[]', '"a"', '[' * 10**5]
        for path in keys(whole):
            of_their_type = [-1] if name == 'meta.json' else []  # a note has no checksum of its own
            for value in (None, 'a', [1], {'a': 1}, ..., *of_their_type):
                made = json.loads(json.dumps(whole))
                inner = made
                for key in path[:-1]:
                    inner = inner[key]
                if value is ...:
                    del inner[path[-1]]
                else:
                    inner[path[-1]] = value
                texts.append(json.dumps(made))
        for text in texts:
            (folder / name).write_text(text)
            try:
                check(str(folder))
                TokenData(str(folder), 'train', 64)
            except UserError as error:
                assert name == 'meta.json'
                assert '\n' not in str(error)
                said.add(str(error))
        (folder / name).write_text(json.dumps(whole))
    assert any('meta.json is damaged' in line for line in said)


def test_a_pipe_among_the_shards_is_not_waited_for(tiny_data, tmp_path):
    folder = tmp_path / 'copy-byte'
    shutil.copytree(tiny_data, folder)
    os.mkfifo(folder / 'train_000002.bin')
    (folder / 'meta.json').unlink()
    with pytest.raises(UserError, match='train_000002.bin is no file'):
        TokenData(str(folder), 'train', 64)
    os.mkfifo(folder / 'meta.json')
    with pytest.raises(UserError, match='meta.json is damaged'):
        TokenData(str(folder), 'train', 64)
