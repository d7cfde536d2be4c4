"""Examples to fine-tune on, packed into windows: against a packing written as one would say it."""
import numpy as np
import pytest

from configurator import UserError
from fp8gpt.data import Loader, TokenData, eval_batches
from fp8gpt.files import write_json
from fp8gpt.shards import START, TARGET, ShardWriter, read_shard, check

SIZES = 5, 16, 40, 200  # block sizes; examples have 2 to 30 tokens


def examples(count, seed=0, longest=30):
    """[(ids, mask)]: every id occurs once; a prompt, then targets."""
    rng, found, following = np.random.default_rng(seed), [], 1
    for _ in range(count):
        length = int(rng.integers(2, longest))
        prompt = int(rng.integers(1, length))
        ids = np.arange(following, following + length)
        mask = np.where(np.arange(length) < prompt, 0, TARGET)
        mask[0] |= START
        found.append((ids, mask))
        following += length
    return found


def write(folder, split, documents, shard_tokens=300):
    """A split in several shards, and what meta.json says of it."""
    writer = ShardWriter(str(folder), split, shard_tokens, 50257, masked=True)
    for ids, mask in documents:
        writer.add(np.stack([ids, mask], 1))
    made = writer.save()
    targets = sum(int((mask & TARGET).sum()) for _, mask in documents)
    tokens = sum(len(ids) for ids, _ in documents)
    return made, {'tokens': tokens, 'documents': len(documents), 'bytes': 3 * targets, 'targets': targets}


@pytest.fixture(scope='module')
def documents():
    return examples(200)


@pytest.fixture
def folder(tmp_path, documents):
    folder = tmp_path / 'mine-byte'
    folder.mkdir()
    parts = {'train': write(folder, 'train', documents), 'val': write(folder, 'val', examples(20, 1))}
    write_json(str(folder / 'meta.json'), {
        'tokenizer': 'byte', 'vocab_size': 50257,
        'shards': parts['train'][0] + parts['val'][0],
        'splits': {split: counts for split, (_, counts) in parts.items()}})
    return folder


def packed(documents, size):
    """[[(ids, mask) of each example] of each window], greedily in order."""
    windows = [[]]
    for ids, mask in documents:
        ids, mask = ids[:size], mask[:size]
        if not (mask & TARGET).any():
            continue
        if sum(len(held) for held, _ in windows[-1]) + len(ids) > size:
            windows.append([])
        windows[-1].append((ids, mask))
    return windows


def expected_rows(window, T):
    """x, y, examples of a window, token by token."""
    x, y, numbers = [0] * T, [-1] * T, [len(window)] * T
    at = 0
    for number, (ids, mask) in enumerate(window):
        for i, token in enumerate(ids):
            if at < T:
                x[at], numbers[at] = int(token), number
                if i + 1 < len(ids) and mask[i + 1] & TARGET:
                    y[at] = int(ids[i + 1])
            at += 1
    return x, y, numbers


def test_windows_hold_whole_examples_in_file_order(folder, documents):
    """What is cut, left out and padded is counted."""
    for T in SIZES:
        train = TokenData(str(folder), 'train', T)
        wanted = packed(documents, T + 1)
        packing = train.packing
        targets = [sum(int((mask & TARGET).sum()) for _, mask in window) for window in wanted]
        assert packing.targets.tolist() == targets
        seen = [bool((mask[:T + 1] & TARGET).any()) for _, mask in documents]
        assert packing.left_out == seen.count(False)
        assert packing.cut == sum(there and len(ids) > T + 1 for there, (ids, _) in zip(seen, documents))
        held = sum(len(ids) for window in wanted for ids, _ in window)
        assert packing.padding == pytest.approx(1 - held / (len(wanted) * (T + 1)))


def test_the_loader_gives_inputs_targets_and_examples(folder, documents):
    for T in SIZES:
        train = TokenData(str(folder), 'train', T)
        windows = {tuple(rows[0]): rows for rows in (expected_rows(w, T) for w in packed(documents, T + 1))}
        for workers in (0, 2):
            loader = Loader(train, 3, 0, num_workers=workers)
            for _ in range(5):
                for found in zip(*(part.tolist() for part in loader.next())):
                    assert found == windows[tuple(found[0])]


def test_the_targets_of_a_step_are_counted_before_it_and_a_run_resumes_anywhere(folder):
    train = TokenData(str(folder), 'train', 16)
    one = Loader(train, 1, 5)
    reference = [one.next()[0][0].tolist() for _ in range(2 * train.n_windows)]
    for world_size, batch_size, position in ((1, 4, 0), (2, 2, 0), (3, 5, 0), (2, 3, 42)):
        ranks = [Loader(train, batch_size, 5, position, rank=rank, world_size=world_size)
                 for rank in range(world_size)]
        rows = []
        for _ in range(5):
            promised = {loader.step_targets(1) for loader in ranks}
            batches = [loader.next() for loader in ranks]
            rows += [row for x, _, _ in batches for row in x.tolist()]
            assert promised == {sum(int((y != -1).sum()) for _, y, _ in batches)}
        assert rows == reference[position:position + len(rows)]
    loader = Loader(train, 2, 0, position=3)
    assert loader.step_targets(7) == sum(int((loader.next()[1] != -1).sum()) for _ in range(7))


def test_validation_has_each_target_once(folder):
    val = TokenData(str(folder), 'val', 40)
    wanted = [int(token) for ids, mask in examples(20, 1) for token, bits in zip(ids, mask) if bits & TARGET]
    for world_size, batch_size in ((1, 1), (1, 4), (2, 1), (3, 1), (3, 4)):
        targets = []
        for rank in range(world_size):
            for x, y, numbers in eval_batches(val, 10**6, batch_size, rank, world_size):
                assert x.shape == y.shape == numbers.shape == (batch_size, 40)
                targets += y[y != -1].tolist()
        assert sorted(targets) == wanted
    assert val.bytes_per_token == 3


def test_a_mask_has_a_shards_header_and_a_byte_a_token_and_damage_is_found(folder, documents):
    path = folder / 'train_000000_mask.bin'
    raw, tokens = path.read_bytes(), read_shard(folder / 'train_000000.bin')
    assert np.frombuffer(raw[:1024], '<i4')[:3].tolist() == [20240520, 1, len(tokens)]
    masks = np.concatenate([mask for _, mask in documents])
    assert np.frombuffer(raw[1024:], np.uint8).tolist() == masks[:len(tokens)].tolist()
    check(str(folder))
    for spoiled, said in ((raw[:1100] + bytes([raw[1100] ^ 1]) + raw[1101:], 'damaged: its crc32'),
                          (raw[:-1], 'damaged'), (None, 'missing')):
        path.unlink() if spoiled is None else path.write_bytes(spoiled)
        with pytest.raises(UserError, match=f'train_000000_mask.bin is {said}'):
            check(str(folder))
    (folder / 'meta.json').unlink()     # as of others' shards, which may have a mask each or none
    with pytest.raises(UserError, match='some of its train shards have no mask'):
        TokenData(str(folder), 'train', 16)
