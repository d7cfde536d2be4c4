"""prepare_data.py against a hub that the test serves itself: streams and token shards."""
import functools
import json
import os
import zlib

import numpy as np
import pytest

from hub import Hub, serve
from preparing import (
    BYTES, drive, everything, llm_c, meta, prepare, prepare_here, refused_here, texts,
    undisturbed_run)
from fp8gpt.shards import check, read_shard


@pytest.fixture
def hub(tmp_path):
    """The environment of a process for which Hub is the hub."""
    Hub.reset()
    server = serve(Hub)
    url = f'http://127.0.0.1:{server.server_port}'
    home = str(tmp_path / 'hf')
    yield {'HF_ENDPOINT': url, 'HF_HOME': home, 'HF_HUB_OFFLINE': '0', 'no_proxy': '127.0.0.1'}
    server.shutdown()


@pytest.fixture
def hub_here(hub, monkeypatch, small_gpt2):
    """Hub is the hub of this process, too: huggingface_hub reads the environment only when it is imported.
    Called with a URL, that is."""
    import huggingface_hub
    monkeypatch.setenv('no_proxy', '127.0.0.1')
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', False)
    api = huggingface_hub.HfApi

    def go_to(url):
        monkeypatch.setattr('huggingface_hub.HfApi', functools.partial(api, endpoint=url))
    go_to(hub['HF_ENDPOINT'])
    return go_to


@pytest.mark.slow
def test_the_hub_streams_restarts_and_imports_no_torch(tmp_path, tmp_path_factory, hub):
    undisturbed = undisturbed_run(tmp_path_factory.mktemp('corpus'))
    first, second = (path.read_bytes() for path in undisturbed.parts)
    readme = '''---
configs:
- config_name: default
  data_files:
  - {split: train, path: data/*.parquet}
- config_name: sample-10BT
  data_files:
  - {split: train, path: sample/10BT/*.parquet}
---'''
    Hub.files = {
        'README.md': readme.encode(), 'data/0.parquet': first,
        'sample/10BT/0.parquet': first, 'sample/10BT/1.parquet': second}
    words = ['fineweb-edu', *undisturbed.words[2:]]
    assert drive(words, tmp_path, kill_at=40, **hub) is None
    Hub.sha = 'b' * 40  # the dataset moves on; a restart stays with what it began with
    assert drive(words, tmp_path, **hub)[1] == 'False'
    files = everything(tmp_path / 'fineweb_edu-byte')
    assert {**files, 'meta.json': 0} == {**undisturbed.files, 'meta.json': 0}
    facts = json.loads(files['meta.json'])
    assert facts['source'] == 'HuggingFaceFW/fineweb-edu'
    assert facts['subset'] == 'sample-10BT'
    assert facts['revision'] == 'a' * 40
    words = ['fineweb_edu', BYTES, f'--data_dir={tmp_path}/other', '--text_column=body']
    error = prepare(*words, rc=2, env=hub).stderr
    assert 'text' in error
    assert 'id' in error
    assert not (tmp_path / 'other').exists()


# ------------------------------------------------------------------------------- token shards from the hub

@pytest.fixture
def pretokenized(small_gpt2):
    """(files of a hub's dataset with a val and three train shards, as llm.c writes them: cut anywhere; the
    train texts; the val texts)."""
    files = {'README.md': b'shards'}
    train, val = texts(120, 1), texts(40, 2)
    for split, documents, cuts, number in (('train', train, 3, 1), ('val', val, 1, 0)):
        ids = [i for text in documents for i in (512, *small_gpt2.encode_ordinary(text))]
        for piece in np.array_split(ids, cuts):
            files[f'{split}/fineweb_{split}_{number:06d}.bin'] = llm_c(piece)
            number += 1
    return files, train, val


def shards_in(folder):
    return sorted(path.name for path in folder.glob('*.bin'))


def test_token_shards_come_from_the_hub_and_are_counted(tmp_path, hub_here, pretokenized):
    Hub.files, train, val = pretokenized
    words = ['fineweb', '--pretokenized', f'--data_dir={tmp_path}']
    assert '\nnext: python train' in prepare_here(*words)
    folder = tmp_path / 'fineweb-gpt2'
    assert not (folder / 'fetched.part').exists()
    facts = meta(folder)
    assert facts['source'] == 'kjj0/fineweb10B-gpt2'
    assert facts['revision'] == 'a' * 40
    assert (facts['tokenizer'], facts['vocab_size'], facts['eot']) == ('gpt2', 513, 512)
    for split, documents in (('train', train), ('val', val)):
        shards = [read_shard(path) for path in folder.glob(f'*{split}_*.bin')]
        assert facts['splits'][split] == {
            'tokens': sum(map(len, shards)),
            'documents': len(documents),
            'bytes': sum(len(document.encode()) for document in documents)}
    served = {os.path.basename(path): raw for path, raw in Hub.files.items() if path.endswith('.bin')}
    assert served == {path.name: path.read_bytes() for path in folder.glob('*.bin')}
    for shard in facts['shards']:
        assert shard['crc32'] == zlib.crc32((folder / shard['file']).read_bytes()[1024:])
    check(str(folder))
    assert 'already prepared' in prepare_here(*words)
    assert '4 shards' in prepare_here('fineweb', '--verify', f'--data_dir={tmp_path}')


def test_max_tokens_and_overwrite_fetch_what_is_not_there(tmp_path, hub_here, pretokenized):
    Hub.files = pretokenized[0]
    words = ['mine', '--pretokenized=someone/shards', f'--data_dir={tmp_path}']
    first = np.frombuffer(Hub.files['train/fineweb_train_000001.bin'][:12], '<i4')[2]
    folder = tmp_path / 'mine-gpt2'
    for max_tokens, count in ((1, 1), (first, 1), (first + 1, 2)):
        prepare_here(*words, f'--max_tokens={max_tokens}', '--overwrite')
        train = [f'fineweb_train_{number:06d}.bin' for number in range(1, count + 1)]
        assert shards_in(folder) == [*train, 'fineweb_val_000000.bin']
    numbers = [name.rpartition('_')[2] for name in Hub.fetched]
    assert numbers == ['000000.bin', '000001.bin', '000002.bin']  # each once
    damaged = folder / 'fineweb_train_000001.bin'
    damaged.write_bytes(damaged.read_bytes()[:-1] + b'x')
    code, message = refused_here(*words)
    assert code == 2
    assert 'holds other shards' in message
    prepare_here(*words, '--max_tokens=1', '--overwrite')
    assert Hub.fetched[3:] == ['a train/fineweb_train_000001.bin']
    assert len(shards_in(folder)) == 2
    assert damaged.read_bytes() == Hub.files['train/fineweb_train_000001.bin']


def test_fetching_goes_on_at_the_revision_it_began_with(tmp_path, hub_here, pretokenized):
    Hub.files = pretokenized[0]
    words = ['fineweb_edu', '--pretokenized', f'--data_dir={tmp_path}']
    folder = tmp_path / 'fineweb_edu-gpt2'
    *others, last = list(Hub.files)[1:4]
    damaged = Hub.files[last][:-1] + b'x'
    for sent, why in ((b'', 'could not fetch'), (damaged, 'arrived damaged')):
        Hub.broken = {last: sent}
        code, message = refused_here(*words)
        assert code == 1
        for part in (os.path.basename(last), why, 'goes on'):
            assert part in message
        assert shards_in(folder) == [
            'fineweb_train_000001.bin', 'fineweb_train_000002.bin', 'fineweb_val_000000.bin']
        assert not (folder / 'meta.json').exists()
        code, message = refused_here('fineweb_edu', '--verify', f'--data_dir={tmp_path}')
        assert code == 1
        assert 'half prepared' in message
        Hub.sha = 'b' * 40
        Hub.broken = {}
    assert 'going on' in prepare_here(*words)
    fetched = ['val/fineweb_val_000000.bin', *others, last, last]
    assert Hub.fetched == [f'a {name}' for name in fetched]
    assert meta(folder)['revision'] == 'a' * 40
    assert meta(folder)['source'] == 'kjj0/finewebedu10B-gpt2'


def test_what_cannot_be_fetched_says_why(tmp_path, hub_here):
    one = llm_c([1])
    for files, parts in (
            ({'x_train_000001.bin': llm_c([513]), 'x_val_000000.bin': one},
             ['x_train_000001.bin', 'token 513']),
            ({'x_train_000001.bin': one, 'x_val_000000.bin': llm_c([1], magic=1)},
             ['x_val_000000.bin', "llm.c's format"]),
            ({'x_train_000001.bin': one, 'y.bin': b''}, ['no shards', 'val_000000.bin']),
            (None, ['--dataset=FOLDER'])):
        if files is None:
            hub_here('http://127.0.0.1:9')  # nobody
        else:
            Hub.files = files
        words = ['--pretokenized=someone/shards', f'--data_dir={tmp_path}/data', '--overwrite']
        code, message = refused_here('mine', *words)
        assert code == 1
        for part in ('someone/shards', *parts):
            assert part in message
        assert not list(tmp_path.glob('data/*/meta.json'))
