"""Token shards, the check before training, the order of windows, and the batches of both loops; examples to
fine-tune on are packed into windows as a packing written as one would say it does."""
import collections
import contextlib
import itertools
import json
import os
import threading
from unittest import mock

import numpy as np
import pytest
import torch

from fp8gpt import shards
from configurator import DataError, MissingError, SettingError
from fp8gpt.data import Loader, TokenData, eval_batches, permute
from fp8gpt.files import write_json
from helpers import opened
from preparing import llm_c, meta
from fp8gpt.shards import START, TARGET, ShardWriter, check, read_shard, read_splits


def write(folder, split, documents, shard_tokens=10**9, vocab_size=50257):
    """Write shards of arrays of ids (n,), or of ids and mask (n, 2); return what meta.json lists of them."""
    documents = [*map(np.array, documents)]
    writer = ShardWriter(str(folder), split, shard_tokens, vocab_size, masked=documents[0].ndim == 2)
    for document in documents:
        writer.add(document)
    return writer.save()


def dataset(folder, shard_tokens, **splits):
    """Make a folder of shards of the documents of each split, of three bytes a target, and meta.json."""
    folder.mkdir()
    meta = {'tokenizer': 'byte', 'vocab_size': 50257, 'shards': [], 'splits': {}}
    for split, documents in splits.items():
        meta['shards'] += write(folder, split, documents, shard_tokens)
        tokens = np.concatenate(documents)
        targets = int((tokens[:, 1] & TARGET).sum()) if tokens.ndim == 2 else len(tokens)
        meta['splits'][split] = {'tokens': len(tokens), 'bytes': 3 * targets, 'targets': targets}
    write_json(str(folder / 'meta.json'), meta)
    return folder


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
    train = TokenData(opened(tmp_path), 'train', 10)
    assert train.batch([3])[0][0].tolist() == list(range(30, 41))
    assert shards.read_meta(str(tmp_path)) == {}
    assert train.bytes_per_token is None
    write(tmp_path, 'train', [range(70_000, 70_100)], vocab_size=128_256)
    with pytest.raises(DataError, match='of two tokenizers'):   # of Llama's ids 16 bits would be left
        TokenData(opened(tmp_path), 'train', 10)
    np.arange(5000, dtype='<u2').tofile(tmp_path / 'train.bin')
    with pytest.raises(DataError, match="nanoGPT's files have none.: give the texts to prepare_data.py"):
        read_shard(tmp_path / 'train.bin')
    with pytest.raises(MissingError, match=r'has no val shards.*val_\*\.bin'):
        TokenData(opened(tmp_path), 'val', 8)


def test_a_split_is_a_word_of_a_shards_name(tmp_path):
    names = {'train': ['edu_train_01.bin', 'retrieval_train_01.bin', 'train_000002.bin', 'val_train.bin'],
             'val': ['my_val_000001.bin', 'tiny_val.bin', 'val_000000.bin']}
    for name in [*names['train'], *names['val'], 'interval_0.bin', 'xtrain_1.bin', 'mine.bin',
                 'fineweb_val_bytes_000000.bin']:
        (tmp_path / name).write_bytes(llm_c(range(9)))
    for split, files in names.items():
        assert [*read_splits(str(tmp_path), {}, split)] == files
    train, val = (TokenData(opened(tmp_path), split, 8) for split in names)
    assert (train.tokens, val.tokens) == (36, 27)


def test_a_shard_that_is_cut_while_it_is_read_is_one_line(tmp_path):
    """A read past the end of a mapped file would end the process by SIGBUS."""
    write(tmp_path, 'train', [range(50_000)])
    data = TokenData(opened(tmp_path), 'train', 100)
    assert data.batch([400])[0].tolist() == [[*range(40_000, 40_101)]]
    os.truncate(tmp_path / 'train_000000.bin', 20_000)
    with pytest.raises(DataError, match='train_000000.bin was cut short while it was read'):
        data.batch([400])


def test_windows_cross_shards_and_lose_no_token(tmp_path):
    stream = np.arange(1000)
    for block_size, shard_tokens in ((7, 33), (250, 10), (999, 500)):
        folder = tmp_path / f'{block_size}-{shard_tokens}'
        folder.mkdir()
        write(folder, 'train', stream.reshape(-1, 10), shard_tokens)
        train = TokenData(opened(folder), 'train', block_size)
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
            ('openmathinstruct2', 'train_2M',
             'openmathinstruct2 --tokenizer=byte --split_name=train_2M`'),
            ('data/mine', '', 'mine --tokenizer=byte --data_files=YOUR_TEXTS`')):
        with pytest.raises(MissingError, match=f'run `python prepare_data.py {hint}'):
            shards.find_dataset({**config, 'dataset': dataset, 'split_name': split})
    (tmp_path / 'mine').mkdir()     # a folder of texts, until the dataset is prepared
    assert shards.dataset_dir(config) == 'mine'
    (tmp_path / 'data' / 'mine-byte').mkdir(parents=True)
    assert shards.dataset_dir(config) == 'data/mine-byte'
    assert shards.dataset_dir({**config, 'dataset': f'{tmp_path}/mine'}) == f'{tmp_path}/mine'
    write(tmp_path, 'train', [range(50)])
    assert TokenData(opened(tmp_path), 'train', 49).n_windows == 1
    with pytest.raises(SettingError, match='fewer than one window'):
        TokenData(opened(tmp_path), 'train', 50)
    (tmp_path / 'meta.json').write_text('{"progress": {}}')
    with pytest.raises(MissingError, match='half prepared'):
        TokenData(opened(tmp_path), 'train', 8)


def test_the_name_of_a_dataset():
    """Two orgs' datasets of one name have two folders; a file of rows has its stem."""
    for name, known in (('Skylion007/openwebtext', 'openwebtext'), ('Rowan/hellaswag', 'hellaswag'),
                        ('HuggingFaceFW/fineweb-edu', 'fineweb_edu'), ('fineweb-edu', 'fineweb_edu'),
                        ('tinyshakespeare', 'shakespeare'), ('two/wiki-en', 'two--wiki-en'),
                        ('two/openwebtext', 'two--openwebtext'), ('rows/my [chats].jsonl.gz', 'my__chats_')):
        assert shards.dataset_name(name) == known


@pytest.fixture
def prepared(tmp_path):
    """A folder of two train shards and one val shard with their meta.json."""
    ids = np.random.default_rng(0).integers(0, 257, (20, 100))
    return dataset(tmp_path / 'mine-byte', 1000, train=ids[:15], val=ids[15:])


def test_a_check_looks_at_the_first_ids_and_verify_at_all(prepared, monkeypatch):
    """At a run's start, nothing is written, and no more is read than the first ids."""
    before = os.listdir(prepared)
    monkeypatch.setattr(shards, 'LOOKED_AT', 100)
    listed = {shard['file']: [shard['tokens'], shard['crc32']] for shard in meta(prepared)['shards']}
    assert check(opened(prepared), 257) == listed
    with pytest.raises(SettingError, match='outside the vocabulary of 256 .* resize_token_embeddings'):
        check(opened(prepared), 256)
    path = prepared / 'train_000001.bin'
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 128
    path.write_bytes(raw)
    assert check(opened(prepared), 257) == listed and os.listdir(prepared) == before
    with pytest.raises(DataError, match='train_000001.bin is damaged: its crc32 .*--overwrite'):
        shards.verify(str(prepared), meta(prepared))
    (prepared / 'meta.json').unlink()       # as others' shards: a change of the first ids is seen
    contents = check(opened(prepared), 257)
    raw[1024] ^= 1
    path.write_bytes(raw)
    changed = check(opened(prepared), 257)
    assert [file for file in changed if changed[file] != contents[file]] == [path.name]


def test_a_folder_that_cannot_be_read_is_not_taken_for_empty(prepared, monkeypatch):
    monkeypatch.setattr(os, 'listdir', mock.Mock(side_effect=PermissionError))
    config = {'dataset': str(prepared), 'split_name': '', 'tokenizer': 'byte', 'data_dir': 'data'}
    with pytest.raises(PermissionError):
        shards.find_dataset(config)


def test_a_pipe_is_no_file_and_is_not_waited_for(prepared):
    for name, error in (('val_000000.bin', 'is missing, or no file'), ('meta.json', 'meta.json is damaged')):
        (prepared / name).unlink()
        os.mkfifo(prepared / name)
        with pytest.raises(DataError, match=error):
            check(opened(prepared))


def test_a_key_that_meta_json_lacks_is_one_line(prepared):
    whole = meta(prepared)
    for key in 'tokenizer', 'vocab_size', 'splits', 'shards':
        (prepared / 'meta.json').write_text(json.dumps({name: whole[name] for name in whole if name != key}))
        with pytest.raises(DataError, match=f"meta.json is damaged, or another program's: it has no '{key}'"):
            check(opened(prepared))


def test_shards_that_are_not_as_listed_are_refused(prepared, examples):
    """By the check before training and by the loader, a flipped bit by verify."""
    def changed(path, at, value):
        raw = path.read_bytes()
        return raw[:at] + bytes([value]) + raw[at + 1:]
    first, second, other, mask = (f'{name}.bin' for name in (
        'train_000000', 'train_000001', 'x_train_000009', 'train_000000_mask'))
    listed = (prepared / 'meta.json').read_bytes()
    for count in 1000, 1500:
        listed = listed.replace(b'"tokens": %d,' % count, b'"tokens": %d,' % (count - 1))
    for folder, name, spoilt, message in (
            (prepared, second, changed(prepared / second, 1500, 255), f'{second} is damaged: its crc32'),
            (prepared, 'meta.json', listed, '1,000 tokens, by meta.json 999'),
            (prepared, 'meta.json', b'{"shards": ', 'meta.json is damaged'),
            (prepared, 'meta.json', b'[]', 'meta.json is damaged'),
            (prepared, first, None, f'{first} is missing'),
            (prepared, other, llm_c([1, 2]), f'{other} is damaged: 2 tokens, by meta.json 0'),
            (prepared, second, changed(prepared / second, 8, 245), 'damaged: 501 tokens promised, 500 '),
            (examples, mask, changed(examples / mask, 1100, 255), f'{mask} is damaged: its crc32'),
            (examples, mask, (examples / mask).read_bytes()[:-1], f'{mask} is damaged'),
            (examples, mask, None, f'{mask} is missing')):
        whole = {path.name: path.read_bytes() for path in folder.iterdir()}
        (folder / name).write_bytes(spoilt) if spoilt else (folder / name).unlink()
        reads = [lambda folder: check(opened(folder)), lambda folder: TokenData(opened(folder), 'train', 16)]
        if 'crc32' in message:
            reads = [lambda path: shards.verify(path, meta(folder))]
        for read in reads:
            with pytest.raises(DataError, match=message + '.*--overwrite'):
                read(str(folder))
        (folder / other).unlink(missing_ok=True)
        for file, raw in whole.items():
            (folder / file).write_bytes(raw)
    (examples / mask).unlink()
    (examples / 'meta.json').unlink()     # as of others' shards, which may have a mask each or none
    with pytest.raises(DataError, match='some of its train shards have no mask'):
        TokenData(opened(examples), 'train', 16)


def test_the_order_of_an_epoch_is_a_permutation_and_any_is_as_likely():
    for n in (1, 2, 7, 64, 65, 4097):
        orders = [tuple(permute(np.arange(n), n, seed, epoch)) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
        assert all(sorted(order) == list(range(n)) for order in orders)
        assert len(set(orders)) == 3 or n < 64

    def chi_square(counts, expected):   # Pearson's, of len(counts) - 1 degrees of freedom
        return sum((count - expected)**2 / expected for count in counts)
    # a thousand of a hundred thousand, over ten bins: p = 0.001
    assert chi_square(np.histogram(permute(np.arange(1000), 100_000, 3, 0), 10, (0, 100_000))[0], 100) < 27.9
    # the orders of four windows: mean 23, standard deviation sqrt(46); six of them
    seen = collections.Counter(tuple(permute(np.arange(4), 4, seed, 0)) for seed in range(240))
    assert chi_square([seen[order] for order in itertools.permutations(range(4))], 10) < 23 + 6 * 46**0.5


@pytest.fixture
def train(tmp_path):
    """53 windows of 8; a window's first token names it."""
    write(tmp_path, 'train', np.arange(1, 8 * 53 + 2).reshape(-1, 1))
    return TokenData(opened(tmp_path), 'train', 8)


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


def test_threads_pin_memory_for_the_ranks_own_gpu(train, monkeypatch):
    current, found = threading.local(), []      # as CUDA's, each thread's

    @contextlib.contextmanager
    def device(gpu):
        current.gpu = gpu
        yield
        del current.gpu
    monkeypatch.setattr(torch.cuda, 'device', device)
    monkeypatch.setattr(torch.Tensor, 'pin_memory', lambda x: found.append(getattr(current, 'gpu', 'GPU 0')))
    for workers in (0, 2):
        for batch in Loader(train, 3, 5, device='cuda:3', num_workers=workers).queue:
            batch()
    assert set(found) == {'cuda:3'}


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


def test_the_ranks_evaluate_each_target_once_and_in_as_many_batches(train, examples):
    val, wrong = TokenData(opened(examples), 'val', 40), []
    answers = [token for example in VAL for token, bits in example.tolist() if bits & TARGET]
    for data, tokens, windows in (
            (train, 20 * 8, [i * 53 // 20 for i in range(20)]), (train, 10**9, range(53)), (train, 1, [0]),
            (val, 10**6, None)):
        targets = [8 * i + j for i in windows for j in range(2, 10)] if windows else answers
        for world_size, batch_size in itertools.product((1, 3, 8), (1, 2, 7)):
            seen, batches = [], set()
            for rank in range(world_size):
                made = list(eval_batches(data, tokens, batch_size, rank, world_size))
                batches.add(len(made))
                for x, y, _ in made:
                    assert x.shape == y.shape == (batch_size, data.block_size)
                    seen += y[y != -1].tolist()
            if sorted(seen) != targets or len(batches) != 1:
                wrong.append((tokens, world_size, batch_size))
    assert wrong == []
    assert val.bytes_per_token == 3


# ------------------------------------------------------------------------------- examples to fine-tune on

SIZES = 5, 16, 40, 200  # block sizes; examples have 2 to 30 tokens


def conversations(count, seed=0):
    """Ids and masks (n, 2): every id occurs once; a prompt, then targets."""
    rng, found, following = np.random.default_rng(seed), [], 1
    for _ in range(count):
        length = int(rng.integers(2, 30))
        mask = np.where(np.arange(length) < rng.integers(1, length), 0, TARGET)
        mask[0] |= START
        found.append(np.stack([np.arange(following, following + length), mask], 1))
        following += length
    return found


TRAIN, VAL = conversations(200), conversations(20, 1)


@pytest.fixture
def examples(tmp_path):
    """A folder of examples in several shards."""
    return dataset(tmp_path / 'examples', 300, train=TRAIN, val=VAL)


def packed(size):
    """[[ids and mask of each example] of each window] of TRAIN, greedily in order."""
    windows = [[]]
    for example in TRAIN:
        example = example[:size]
        if (example[:, 1] & TARGET).any():
            if sum(map(len, windows[-1])) + len(example) > size:
                windows.append([])
            windows[-1].append(example)
    return windows


def expected_rows(window, T):
    """x, y, examples of a window, token by token."""
    x, y, numbers, at = [0] * T, [-1] * T, [len(window)] * T, 0
    for number, example in enumerate(window):
        for i, (token, _) in enumerate(example.tolist()):
            if at < T:
                x[at], numbers[at] = token, number
                if i + 1 < len(example) and example[i + 1, 1] & TARGET:
                    y[at] = int(example[i + 1, 0])
            at += 1
    return x, y, numbers


def test_a_mask_has_a_shards_header_and_a_byte_a_token(examples):
    raw, tokens = (examples / 'train_000000_mask.bin').read_bytes(), read_shard(examples / 'train_000000.bin')
    assert np.frombuffer(raw[:1024], '<i4')[:3].tolist() == [20240520, 1, len(tokens)]
    assert list(raw[1024:]) == np.concatenate(TRAIN)[:len(tokens), 1].tolist()
    check(opened(examples))


def test_windows_hold_whole_examples_in_file_order(examples):
    for T in SIZES:
        train, wanted = TokenData(opened(examples), 'train', T), packed(T + 1)
        packing = train.packing
        assert packing.targets.tolist() == [
            sum(int((example[:, 1] & TARGET).sum()) for example in window) for window in wanted]
        seen = [bool((example[:T + 1, 1] & TARGET).any()) for example in TRAIN]
        assert packing.left_out == seen.count(False)
        assert packing.cut == sum(there and len(example) > T + 1 for there, example in zip(seen, TRAIN))
        behind = [max(0, len(example) - T - 1) for example in TRAIN]
        assert packing.lost == sum(tokens for there, tokens in zip(seen, behind) if there)
        held = sum(len(example) for window in wanted for example in window)
        assert packing.padding == pytest.approx(1 - held / (len(wanted) * (T + 1)))
        windows = {tuple(rows[0]): rows for rows in (expected_rows(window, T) for window in wanted)}
        for workers in (0, 2):
            loader = Loader(train, 3, 0, num_workers=workers)
            for _ in range(5):
                for found in zip(*(part.tolist() for part in loader.next())):
                    assert found == windows[tuple(found[0])]


def test_the_targets_of_a_step_are_counted_before_it(examples):
    train = TokenData(opened(examples), 'train', 16)
    for world_size, batch_size, position, micro_steps in ((1, 4, 0, 1), (3, 5, 3, 7), (2, 3, 42, 1)):
        ranks = [Loader(train, batch_size, 5, position, rank=rank, world_size=world_size)
                 for rank in range(world_size)]
        for _ in range(5):
            promised = {loader.step_targets(micro_steps) for loader in ranks}
            batches = [loader.next() for loader in ranks for _ in range(micro_steps)]
            assert promised == {sum(int((y != -1).sum()) for _, y, _ in batches)}
