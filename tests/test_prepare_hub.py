"""prepare_data.py against a hub that this file serves itself: streams, token shards; then --verify and HellaSwag."""
import hashlib
import http.server
import json
import os
import pathlib
import re
import sys
import threading
import urllib.parse
import zlib

import numpy as np
import pytest

from conftest import ROOT, SHARED, run
from test_prepare_data import BYTES, corpus, drive, everything, meta, needs_bpe, prepare, texts  # noqa: F401 (corpus is a fixture)

# ------------------------------------------------------------------------------------------------ the hub, without it

class Hub(http.server.BaseHTTPRequestHandler):
    """As much of huggingface.co as `datasets` and hf_hub_download ask for one dataset, whatever its name: `files`, path -> bytes."""
    files, sha = {}, 'a' * 40
    broken, fetched = {}, []  # path -> what is sent in place of a file, b'' for nothing; paths of shards in the order of their fetching

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        kind, _, rest = re.sub(r'^(/api)?/datasets/[^/]+/[^/]+/?', '', path).partition('/')
        revision, _, rest = rest.partition('/')
        if kind == 'resolve' and self.broken.get(rest, b'x') and rest in self.files:
            raw, headers = self.broken.get(rest, self.files[rest]), {'ETag': f'"{rest.replace("/", "-")}"', 'X-Repo-Commit': revision, 'Accept-Ranges': 'bytes'}
            if rest.endswith('.bin'):
                headers['ETag'] = f'"{hashlib.sha256(self.files[rest]).hexdigest()}"'
                self.fetched.extend([f'{revision[0]} {rest}'] * (self.command == 'GET'))
            if wanted := re.match(r'bytes=(\d+)-(\d*)', self.headers.get('Range') or ''):
                first, last = int(wanted[1]), min(int(wanted[2] or len(raw)), len(raw) - 1)
                self.answer(206, raw[first:last + 1], {**headers, 'Content-Range': f'bytes {first}-{last}/{len(raw)}'})
            else:
                self.answer(200, raw, headers)
        elif kind in ('', 'revision'):
            siblings = [{'rfilename': name} for name in self.files]
            if 'blobs=true' in self.path.lower():
                siblings = [{'rfilename': name, 'size': len(raw), **({'lfs': {'sha256': hashlib.sha256(raw).hexdigest(), 'size': len(raw), 'pointerSize': 1}}
                             if name.endswith('.bin') else {})} for name, raw in self.files.items()]
            self.answer(200, {'id': 'owner/name', 'sha': revision or self.sha, 'tags': [], 'siblings': siblings})
        elif kind in ('tree', 'paths-info'):
            asked = json.loads(body)['paths'] if body[:1] == b'{' else urllib.parse.parse_qs(body.decode()).get('paths', [])
            entries = {}
            for name, raw in self.files.items():
                for folder in map(str, list(pathlib.PurePosixPath(name).parents)[:-1]):
                    entries[folder] = {'type': 'directory', 'path': folder, 'oid': self.sha}
                entries[name] = {'type': 'file', 'path': name, 'oid': self.sha, 'size': len(raw)}
            inside = [entry for name, entry in entries.items()
                      if (name in asked if kind == 'paths-info' else name.rpartition('/')[0] == rest
                          or 'recursive=true' in self.path.lower() and name.startswith(rest))]
            self.answer(200, inside)
        else:
            self.answer(404, {}, {'X-Error-Code': 'EntryNotFound'})

    do_HEAD = do_POST = do_GET

    def answer(self, status, body, headers={}):
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {**headers, 'Content-Length': str(len(raw))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(raw)

    def log_message(self, *words):
        pass


@pytest.fixture
def hub(tmp_path):
    """The environment in which Hub is the hub."""
    Hub.files, Hub.sha, Hub.broken, Hub.fetched = {}, 'a' * 40, {}, []
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield {'HF_ENDPOINT': f'http://127.0.0.1:{server.server_port}', 'HF_HOME': str(tmp_path / 'hf'), 'HF_HUB_OFFLINE': '0', 'no_proxy': '127.0.0.1'}
    server.shutdown()


def test_the_hub_streams_restarts_and_imports_no_torch(tmp_path, corpus, hub):
    words, undisturbed, _, _ = corpus
    folder = pathlib.Path(words[1].removeprefix('--data_files=')).parent
    part = ['- config_name: {}', '  data_files:', '  - {{split: train, path: {}}}']
    Hub.files = {'README.md': '\n'.join(['---', 'configs:', *part, *part, '---']).format('default', 'data/*.parquet', 'sample-10BT', 'sample/10BT/*.parquet').encode(),
                 'data/0.parquet': (folder / 'a.parquet').read_bytes(),
                 'sample/10BT/0.parquet': (folder / 'a.parquet').read_bytes(), 'sample/10BT/1.parquet': (folder / 'b.parquet').read_bytes()}
    words = ['fineweb-edu', *words[2:]]
    assert drive(words, tmp_path, kill_at=40, **hub) is None
    Hub.sha = 'b' * 40  # the dataset moves on; a restart stays with what it began with
    assert drive(words, tmp_path, **hub)[1] == 'False'
    files = everything(tmp_path / 'fineweb_edu-byte')
    assert {**files, 'meta.json': 0} == {**undisturbed, 'meta.json': 0}
    facts = json.loads(files['meta.json'])
    assert (facts['source'], facts['subset'], facts['revision']) == ('HuggingFaceFW/fineweb-edu', 'sample-10BT', 'a' * 40)
    error = prepare('fineweb_edu', BYTES, f'--data_dir={tmp_path}/other', '--text_column=body', rc=2, env=hub).stderr
    assert 'text' in error and 'id' in error and not (tmp_path / 'other').exists()


# ------------------------------------------------------------------------------------------------ token shards from the hub

def llm_c(ids, magic=20240520):
    """A shard by the format's definition."""
    return np.array([magic, 1, len(ids)] + [0] * 253, '<i4').tobytes() + np.array(ids, '<u2').tobytes()


@pytest.fixture(scope='module')
def pretokenized():
    """(files of a hub's dataset with a val and three train shards, as llm.c writes them: cut anywhere; the train texts; the val texts)."""
    import tiktoken
    encoding, files, splits = tiktoken.get_encoding('gpt2'), {'README.md': b'shards'}, {}
    for split, count, seed, cuts in (('train', 120, 1, 3), ('val', 40, 2, 1)):
        splits[split] = texts(count, seed)
        ids = [i for text in splits[split] for i in (50256, *encoding.encode_ordinary(text))]
        for number, piece in enumerate(np.array_split(ids, cuts)):
            files[f'{split}/fineweb_{split}_{number + (split == "train"):06d}.bin'] = llm_c(piece)
    return files, splits['train'], splits['val']


@needs_bpe
def test_token_shards_come_from_the_hub_and_are_counted(tmp_path, hub, pretokenized):
    from data import TokenData, check
    Hub.files, train, val = pretokenized
    done = prepare('fineweb', '--pretokenized', f'--data_dir={tmp_path}', env=hub)
    folder = tmp_path / 'fineweb-gpt2'
    assert 'next: python train_fp8.py --dataset=fineweb' in done.stdout and not (folder / 'fetched.part').exists()
    facts = meta(folder)
    assert (facts['source'], facts['revision'], facts['tokenizer'], facts['vocab_size'], facts['eot']) == ('kjj0/fineweb10B-gpt2', 'a' * 40, 'gpt2', 50257, 50256)
    for split, documents in (('train', train), ('val', val)):
        ids = TokenData(str(folder), split, 8).shards
        assert facts['splits'][split] == {'tokens': sum(map(len, ids)), 'documents': len(documents), 'bytes': sum(len(d.encode()) for d in documents)}
    assert {name: raw for path, raw in Hub.files.items() if (name := os.path.basename(path)).endswith('.bin')} == {p.name: p.read_bytes() for p in folder.glob('*.bin')}
    for shard in facts['shards']:
        assert shard['crc32'] == zlib.crc32((folder / shard['file']).read_bytes()[1024:])
    check(str(folder))
    assert 'already prepared' in prepare('fineweb', '--pretokenized', f'--data_dir={tmp_path}', env=hub).stdout
    assert '4 shards' in prepare('fineweb', '--verify', f'--data_dir={tmp_path}').stdout


@needs_bpe
def test_max_tokens_and_overwrite_fetch_what_is_not_there(tmp_path, hub, pretokenized):
    Hub.files = pretokenized[0]
    words = ['mine', '--pretokenized=someone/shards', f'--data_dir={tmp_path}']
    first = np.frombuffer(Hub.files['train/fineweb_train_000001.bin'][:12], '<i4')[2]
    folder = tmp_path / 'mine-gpt2'
    for max_tokens, expected in ((1, 1), (first, 1), (first + 1, 2)):
        prepare(*words, f'--max_tokens={max_tokens}', '--overwrite', env=hub)
        assert sorted(p.name for p in folder.glob('*.bin')) == [f'fineweb_train_{i + 1:06d}.bin' for i in range(expected)] + ['fineweb_val_000000.bin']
    assert [name.rpartition('_')[2] for name in Hub.fetched] == ['000000.bin', '000001.bin', '000002.bin']  # each once
    damaged = folder / 'fineweb_train_000001.bin'
    damaged.write_bytes(damaged.read_bytes()[:-1] + b'x')
    assert 'holds other shards' in prepare(*words, rc=2, env=hub).stderr
    prepare(*words, '--max_tokens=1', '--overwrite', env=hub)
    assert Hub.fetched[3:] == ['a train/fineweb_train_000001.bin'] and len(list(folder.glob('*.bin'))) == 2
    assert damaged.read_bytes() == Hub.files['train/fineweb_train_000001.bin']


@needs_bpe
def test_fetching_goes_on_at_the_revision_it_began_with(tmp_path, hub, pretokenized):
    Hub.files, words = pretokenized[0], ['fineweb_edu', '--pretokenized', f'--data_dir={tmp_path}']
    folder = tmp_path / 'fineweb_edu-gpt2'
    last = list(Hub.files)[3]
    for sent, parts in ((b'', ['could not fetch', 'goes on']), (Hub.files[last][:-1] + b'x', ['arrived damaged', 'goes on'])):
        Hub.broken = {last: sent}
        error = prepare(*words, rc=1, env=hub).stderr
        assert all(part in error for part in [os.path.basename(last), *parts]), error
        assert sorted(p.name for p in folder.glob('*.bin')) == ['fineweb_train_000001.bin', 'fineweb_train_000002.bin', 'fineweb_val_000000.bin']
        assert not (folder / 'meta.json').exists() and 'half prepared' in prepare(*words[:1], '--verify', words[2], rc=1).stderr
        Hub.sha, Hub.broken = 'b' * 40, {}
    assert 'going on' in prepare(*words, env=hub).stdout
    assert Hub.fetched == [f'a {name}' for name in ['val/fineweb_val_000000.bin', *list(Hub.files)[1:3], last, last]]
    assert meta(folder)['revision'] == 'a' * 40 and meta(folder)['source'] == 'kjj0/finewebedu10B-gpt2'


@needs_bpe
@pytest.mark.parametrize('words, files, parts', [
    ([], {'x_train_000001.bin': llm_c([50257]), 'x_val_000000.bin': llm_c([1])}, ['x_train_000001.bin', '50,257']),
    ([], {'x_train_000001.bin': llm_c([1]), 'x_val_000000.bin': llm_c([1], magic=1)}, ['x_val_000000.bin', "llm.c's format"]),
    ([], {'x_train_000001.bin': llm_c([1]), 'y.bin': b''}, ['no shards', 'val_000000.bin']),
    (['nowhere'], {}, ['--dataset=FOLDER']),
])
def test_what_cannot_be_fetched_says_why(tmp_path, hub, words, files, parts):
    Hub.files = files
    env = {**hub, 'HF_ENDPOINT': 'http://127.0.0.1:9'} if words else hub
    error = prepare('mine', '--pretokenized=someone/shards', f'--data_dir={tmp_path}/data', rc=1, env=env).stderr
    assert all(part in error for part in ['someone/shards', *parts]) and not list(tmp_path.glob('data/*/meta.json')), error


def test_shards_of_others_do_not_stay_among_new_ones(tmp_path, corpus):
    words, undisturbed, _, _ = corpus
    folder = tmp_path / 'mine-byte'
    (folder / 'fetched.part').mkdir(parents=True)
    for name in ('fineweb_train_000001.bin', 'fineweb_val_000000.bin'):
        (folder / name).write_bytes(llm_c([1, 2]))
    assert '--overwrite' in prepare(*words, f'--data_dir={tmp_path}', rc=2).stderr
    prepare(*words, '--overwrite', f'--data_dir={tmp_path}')
    assert everything(folder) == undisturbed


# ------------------------------------------------------------------------------------------------ --verify

@pytest.mark.parametrize('spoil, parts', [
    (lambda raw: raw[:1500] + bytes([raw[1500] ^ 1]) + raw[1501:], ['crc32']),
    (lambda raw: raw[:-2], ['damaged', 'promised']),
    (lambda raw: llm_c(np.frombuffer(raw[1024:-2], '<u2')), ['by meta.json']),
    (lambda raw: raw[:4] + b'\7' + raw[5:], ['not a token shard']),
    (lambda raw: None, ['missing'])])
def test_verify_finds_what_is_wrong(tmp_path, corpus, spoil, parts):
    folder = tmp_path / 'mine-byte'
    folder.mkdir()
    for name, raw in corpus[1].items():
        (folder / name).write_bytes(raw)
    verify = ['mine', '--verify', BYTES, f'--data_dir={tmp_path}']
    done = prepare(*verify, '--num_workers=2').stdout  # what prepared it, with --verify behind it, is welcome
    counts = [counts['tokens'] for counts in meta(folder)['splits'].values()]
    assert f'{len(corpus[1]) - 1} shards, {sum(counts):,} tokens: all as meta.json says' in done
    path = folder / 'train_000001.bin'
    raw = spoil(path.read_bytes())
    path.write_bytes(raw) if raw else path.unlink()
    (folder / 'val_000099.bin').write_bytes(llm_c([1]))
    done = run('prepare_data.py', *verify, rc=1)
    first, lines = done.stdout.splitlines()[0], sorted(done.stdout.splitlines())
    assert len(lines) == 2 and str(path) in lines[0] and all(part in lines[0] for part in parts) and 'val_000099.bin' in lines[1]
    assert '2 problems' in done.stderr and first in done.stderr and '--overwrite' in done.stderr


def test_verify_compares_totals_and_wants_something_to_compare_with(tmp_path, corpus):
    folder = tmp_path / 'mine-byte'
    folder.mkdir()
    for name, raw in corpus[1].items():
        (folder / name).write_bytes(raw)
    facts = meta(folder)
    facts['splits']['val']['tokens'] += 1
    facts['vocab_size'] = 100  # bytes go beyond
    (folder / 'meta.json').write_text(json.dumps(facts))
    lines = prepare('mine', '--verify', BYTES, f'--data_dir={tmp_path}', rc=1).stdout.splitlines()
    assert 'val tokens' in lines[0] and all('outside the vocabulary of 100' in line for line in lines[1:]) and len(lines) == len(corpus[1])
    (folder / 'meta.json').write_text('{"split')
    assert 'meta.json is damaged' in prepare('mine', '--verify', BYTES, f'--data_dir={tmp_path}', rc=1).stderr
    (folder / 'meta.json').unlink()
    assert 'no meta.json' in prepare('mine', '--verify', BYTES, f'--data_dir={tmp_path}', rc=1).stderr
    assert 'no shards in' in prepare('other', '--verify', BYTES, f'--data_dir={tmp_path}', rc=1).stderr


# ------------------------------------------------------------------------------------------------ HellaSwag

ITEM = {'activity_label': 'Baking', 'ctx_a': 'She takes eggs.', 'ctx_b': 'she', 'ctx': 'She takes eggs. she', 'endings': ['a', 'b', 'c', 'd'], 'label': 3}
OTHER = {key: value for key, value in ITEM.items() if not key.startswith('ctx_')} | {'label': '0'}


def items(*rows):
    return ''.join((row if isinstance(row, str) else json.dumps(row)) + '\n' for row in rows)


def test_hellaswag_is_copied_fetched_and_checked(tmp_path):
    from hellaswag import read
    (tmp_path / 'file.jsonl').write_text(items(ITEM, OTHER))
    path = tmp_path / 'hellaswag' / 'hellaswag_val.jsonl'
    copy = ['hellaswag', f'--data_files={tmp_path}/file.jsonl', f'--data_dir={tmp_path}']
    done = prepare(*copy).stdout
    assert '2 items' in done and f'next: python hellaswag.py --ckpt=checkpoints_fp8/latest.pt --data={path}' in done
    assert len(read(str(path))[0]) == 2 and [p.name for p in path.parent.iterdir()] == ['hellaswag_val.jsonl']

    class Web(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            assert self.path == '/rowanz/hellaswag/master/data/hellaswag_val.jsonl'
            self.send_response(200)
            self.end_headers()
            self.wfile.write(items(ITEM, ITEM, OTHER).encode())

        def log_message(self, *words):
            pass
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Web)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    code = ("import runpy, sys, urllib.request as web; sys.path.insert(0, '.'); real, sys.argv = web.urlopen, sys.argv[1:];"
            f"web.urlopen = lambda url, **more: real(url.replace('https://raw.githubusercontent.com', 'http://127.0.0.1:{server.server_port}'), **more);"
            "runpy.run_path(sys.argv[0], run_name='__main__'); assert 'torch' not in sys.modules")
    fetch = ['-c', code, 'prepare_data.py', 'hellaswag', f'--data_dir={tmp_path}']
    done = run(*fetch).stdout
    assert 'already there' in done and '2 items' in done
    assert '3 items' in run(*fetch, '--overwrite', env={'no_proxy': '127.0.0.1'}).stdout and path.read_text() == items(ITEM, ITEM, OTHER)
    server.shutdown()
    path.write_text(items(ITEM, {}))
    error = prepare(*copy, rc=1).stderr
    assert str(path) in error and 'item 2' in error and '--overwrite' in error
    assert 'already' not in prepare(*copy, '--overwrite').stdout


@pytest.mark.parametrize('row', ['{', '[]', {}, {**ITEM, 'endings': ['a', 'b']}, {**ITEM, 'endings': [1, 2, 3, 4]}, {**ITEM, 'label': 4}, {**ITEM, 'label': None},
                                 {**OTHER, 'ctx': 5}, {**ITEM, 'ctx_b': None}, {'ctx': 'x', 'endings': list('abcd'), 'label': 0}])
def test_what_is_no_hellaswag_item_is_refused(tmp_path, row, monkeypatch):
    """In this process: a process for each would take seconds."""
    import runpy
    monkeypatch.setattr(sys, 'argv', ['prepare_data.py', 'hellaswag', f'--data_files={tmp_path}/file.jsonl', f'--data_dir={tmp_path}'])
    monkeypatch.setattr(sys, 'excepthook', sys.excepthook)
    (tmp_path / 'file.jsonl').write_text(items(ITEM, '', row, ITEM))
    with pytest.raises(OSError, match='file.jsonl: item 2 is not one of HellaSwag'):
        runpy.run_path(str(ROOT / 'prepare_data.py'), run_name='__main__')
    assert not (tmp_path / 'hellaswag').exists()


@pytest.mark.skipif(not (SHARED / 'data' / 'hellaswag_val.jsonl').exists(), reason='the HellaSwag items of shared/data are not here')
def test_the_real_hellaswag_has_10042_items(tmp_path):
    assert '10,042 items' in prepare('hellaswag', f'--data_files={SHARED}/data/hellaswag_val.jsonl', f'--data_dir={tmp_path}').stdout
