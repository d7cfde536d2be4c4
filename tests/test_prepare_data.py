"""prepare_data.py on small local files: what it writes, what it takes, and errors in one line."""
import contextlib
import pathlib
import random
import re
import runpy
import shlex
import sys
import sysconfig
import threading
import time
import urllib.request
import zlib

import numpy as np
import pytest

from conftest import ROOT, run
from preparing import (
    BYTES, SAMPLE, check, everything, ids_of_documents, jsonl, meta, needs_bpe, needs_sample, parquet,
    prepare, prepare_here, processes, refused_here, texts)


def of(files, folder, *more):
    """The words that make folder/mine-byte of files."""
    return ['mine', f'--data_files={files}', BYTES, f'--data_dir={folder}', *more]


# ------------------------------------------------------------------------------- what is written

@pytest.mark.parametrize('workers', [1, 2])
def test_documents_come_back_in_order_with_eot_before_each(tmp_path, workers):
    corpus = texts(600)
    corpus[3] = ''
    corpus[100] = None
    corpus[599] = 'x' * 1_500_000  # longer than a chunk
    parquet(tmp_path / 'a.parquet', corpus[:250])
    parquet(tmp_path / 'b.parquet', corpus[250:])
    flags = [f'--num_workers={workers}', '--shard_tokens=100_000', '--val_fraction=0.1']
    words = of(tmp_path / '*.parquet', tmp_path, *flags)
    said = prepare_here(*words) if workers == 1 else prepare(*words).stdout
    folder = tmp_path / 'mine-byte'
    train, val = check(folder, corpus)
    assert 30 < len(val) < 100  # a tenth of 598
    facts = meta(folder)
    assert facts['tokenizer'] == 'byte'
    assert facts['vocab_size'] == 257
    assert facts['eot'] == 256
    assert facts['documents'] == 598
    for shard in facts['shards']:
        raw = (folder / shard['file']).read_bytes()[1024:]
        assert shard['tokens'] == len(raw) // 2
        assert shard['crc32'] == zlib.crc32(raw)
    for name in sorted(shard['file'] for shard in facts['shards'] if 'train' in shard['file'])[:-1]:
        ids = np.frombuffer((folder / name).read_bytes()[1024:], '<u2')
        last = len(ids) - np.flatnonzero(ids == 256)[-1]
        assert len(ids) - last < 100_000 <= len(ids)
        assert ids[0] == 256  # ends with the document that crosses 100,000
    assert f'{facts["splits"]["train"]["tokens"]:,} tokens' in said
    assert str(folder) in said
    assert 'tokens/s' in said
    words = next_words(said)
    assert words == ['train_fp8.py', '--dataset=mine', '--tokenizer=byte', f'--data_dir={tmp_path}']
    small = ['--n_layer=1', '--n_head=2', '--n_embd=32', '--block_size=64', '--batch_size=4',
             '--max_steps=20', '--warmup_steps=0', '--eval_tokens=1024']
    assert 'done: ' in run(*words, *small, f'--checkpoint_dir={tmp_path}/trained').stdout


def next_words(said):
    """The command that the line `next:` names, after `python`."""
    line = next(line for line in said.splitlines() if line.startswith('next: python '))
    return shlex.split(line)[2:]


@needs_bpe
def test_gpt2_ids_are_tiktokens(tmp_path):
    import tiktoken
    corpus = texts(60) + ['<|endoftext|> is text', '\ud800 half a surrogate pair', ' ' * 1_000_000 + 'x']
    files = jsonl(tmp_path / 'a.jsonl', corpus)
    flags = ['--num_workers=2', '--val_fraction=0.2']
    prepare('mine', f'--data_files={files}', f'--data_dir={tmp_path}', *flags)
    folder = tmp_path / 'mine-gpt2'
    encoding = tiktoken.get_encoding('gpt2')
    corpus[61] = '? half a surrogate pair'
    check(folder, corpus, 50256, encoding.decode)
    reference = [encoding.encode_ordinary(document) for document in corpus[:62]]
    ours = [ids.tolist() for split in ('train', 'val') for ids in ids_of_documents(folder, split, 50256)]
    assert sorted(ids for ids in ours if len(ids) < 900_000) == sorted(reference)


def test_a_text_that_occurs_twice_is_in_one_split(tmp_path):
    corpus = texts(150) + texts(150) + texts(80)
    files = jsonl(tmp_path / 'a.jsonl', corpus, key='body')
    prepare_here(*of(files, tmp_path, '--text_column=body', '--val_fraction=0.3'))
    train, val = check(tmp_path / 'mine-byte', corpus)
    assert len(val) > 60


@pytest.mark.parametrize('count, fraction', [(30, 1e-9), (2, 0.999), (2, 1e-9)])
def test_both_splits_have_a_document(tmp_path, count, fraction):
    corpus = texts(count, words=20)
    files = parquet(tmp_path / 'a.parquet', corpus)
    prepare_here(*of(files, tmp_path, f'--val_fraction={fraction}'))
    train, val = check(tmp_path / 'mine-byte', corpus)
    assert len(val) == 1
    alone = parquet(tmp_path / 'alone.parquet', [corpus[0], '', corpus[0]])
    words = ['alone', *of(alone, tmp_path, f'--val_fraction={fraction}')[1:]]
    code, message = refused_here(*words)
    assert code == 1
    assert 'two documents that differ' in message
    assert not (tmp_path / 'alone-byte').exists()


def test_txt_is_cut_at_the_first_blank_line_past_8_kib(tmp_path):
    rng = random.Random(0)
    lines_of = ['some words\n', 'größe\r\n', '\n', ' \n', 'é' * 40 + '\n']
    text = ''.join(rng.choice(lines_of) for _ in range(20_000)) + 'end'
    (tmp_path / 'a.txt').write_bytes(text.encode())
    prepare_here(*of(tmp_path / 'a.txt', tmp_path, '--val_fraction=0.1'))
    pieces, lines = [], []
    for line in re.findall(r'[^\n]*\n|[^\n]+$', text):
        lines.append(line)
        if not line.strip() and len(''.join(lines[:-1]).encode()) >= 8192:
            pieces.append(''.join(lines))
            lines = []
    pieces.append(''.join(lines))
    assert len(pieces) > 20
    assert ''.join(pieces) == text
    check(tmp_path / 'mine-byte', pieces)


@pytest.mark.parametrize('name, known_as, fraction', [
    ('fineweb-edu', 'fineweb_edu', 0.0005), ('tinyshakespeare', 'shakespeare', 0.1)])
def test_known_names_keep_their_settings_with_local_files(tmp_path, name, known_as, fraction):
    files = jsonl(tmp_path / 'a.jsonl', texts(50))
    prepare_here(name, f'--data_files={files}', BYTES, f'--data_dir={tmp_path}')
    facts = meta(tmp_path / f'{known_as}-byte')
    assert facts['dataset'] == known_as
    assert facts['val_fraction'] == fraction
    assert facts['revision'] is None
    assert facts['subset'] is None


@pytest.mark.parametrize('workers', [1, 2])
def test_max_tokens_stops_at_the_first_document_end_past_it(tmp_path, workers):
    corpus = texts(300)
    files = parquet(tmp_path / 'a.parquet', corpus)
    flags = ['--max_tokens=1e5', '--val_fraction=0.1', f'--num_workers={workers}']
    prepare_here(*of(files, tmp_path, *flags))
    sizes = np.cumsum([1 + len(document.encode()) for document in corpus])
    check(tmp_path / 'mine-byte', corpus[:int(np.searchsorted(sizes, 100_000)) + 1])


def test_the_standard_library_comes_back(tmp_path):
    started = time.time()
    done = prepare('stdlib', f'--data_dir={tmp_path}', env={'TIKTOKEN_CACHE_DIR': str(tmp_path / 'none')})
    assert time.time() - started < 20
    words = ['train_fp8.py', '--dataset=stdlib', '--tokenizer=byte', f'--data_dir={tmp_path}']
    assert next_words(done.stdout) == words
    library = pathlib.Path(sysconfig.get_paths()['stdlib'])
    left_out = {'site-packages', 'dist-packages', '__pycache__'}
    left_out |= {'test', 'tests', 'idlelib', 'lib2to3', 'turtledemo'}
    paths = sorted(
        str(path) for path in library.rglob('*.py')
        if not left_out & set(path.relative_to(library).parts[:-1]))
    corpus = [pathlib.Path(path).read_bytes().decode('utf-8', 'replace') for path in paths]
    check(tmp_path / 'stdlib-byte', corpus)
    splits = meta(tmp_path / 'stdlib-byte')['splits']
    assert 8e6 < splits['train']['bytes'] + splits['val']['bytes'] < 15e6


def resident(mark):
    """KB of memory of all processes with that mark, together."""
    sizes = []
    for path in processes(mark, patience=0):
        with contextlib.suppress(OSError):  # it has just ended
            sizes += map(int, re.findall(r'VmRSS:\s+(\d+)', (path / 'status').read_text()))
    return sum(sizes)


@needs_sample
@needs_bpe
def test_memory_and_count_on_the_fineweb_edu_sample(tmp_path):
    seen = []
    finished = threading.Event()

    def watch():
        while not finished.wait(0.1):
            seen.append(resident(f'PREPARE_MARK={tmp_path}'))
    thread = threading.Thread(target=watch)
    thread.start()
    files = f'--data_files={SAMPLE}/*.parquet'
    mark = {'PREPARE_MARK': str(tmp_path)}
    try:
        prepare('fineweb_edu', files, f'--data_dir={tmp_path}', '--num_workers=2', env=mark)
    finally:
        finished.set()
        thread.join()
    splits = meta(tmp_path / 'fineweb_edu-gpt2')['splits']
    assert splits['train']['tokens'] + splits['val']['tokens'] == 27_687_456 + 12_704
    assert 50e3 < max(seen) < 1.5e6


def test_memory_does_not_follow_the_row_group(tmp_path):
    text = random.Random(0).randbytes(5_000).hex()
    documents = [f'{i}{text}' for i in range(20_000)]  # 200 MB in one row group
    files = parquet(tmp_path / 'a.parquet', documents, row_group_size=10**9, compression='none')
    code = '''
import runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, '.')
runpy.run_path(sys.argv[0], run_name='__main__')
print(open('/proc/self/status').read())
'''
    words = of(files, tmp_path, '--max_tokens=2e7', '--val_fraction=0.1')
    done = run('-c', code, 'prepare_data.py', *words)
    peak = int(re.search(r'VmHWM:\s+(\d+)', done.stdout)[1])
    assert peak < 250_000  # KB, the interpreter and its libraries included


# ------------------------------------------------------------------------------- in another program

def test_imported_it_leaves_the_command_line_alone(monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['pytest', '--nonsense'])
    hook = sys.excepthook
    names = runpy.run_path(str(ROOT / 'prepare_data.py'), run_name='imported')
    assert names['config'] == names['config'].defaults
    assert sys.excepthook is hook


def test_one_process_prepares_one_dataset_after_another(tmp_path):
    corpus = texts(100)
    files = jsonl(tmp_path / 'a.jsonl', corpus)
    others = jsonl(tmp_path / 'b.jsonl', corpus[:50], key='body')
    first = of(files, tmp_path / 'first', '--val_fraction=0.3')
    prepare_here(*first)
    prepare_here(*of(others, tmp_path / 'second', '--text_column=body', '--shard_tokens=9000'))
    check(tmp_path / 'first' / 'mine-byte', corpus)
    check(tmp_path / 'second' / 'mine-byte', corpus[:50])
    assert len(meta(tmp_path / 'first' / 'mine-byte')['shards']) == 2
    assert len(meta(tmp_path / 'second' / 'mine-byte')['shards']) > 3
    before = everything(tmp_path / 'first' / 'mine-byte')
    again = prepare_here(*first)
    assert 'already prepared' in again
    assert '\nnext: python train' in again
    prepare_here(*first, '--overwrite')
    assert everything(tmp_path / 'first' / 'mine-byte') == before


# ------------------------------------------------------------------------------- errors in one line

@pytest.fixture(scope='module')
def wrong_files(tmp_path_factory):
    """A folder with the files that the tables below need."""
    folder = tmp_path_factory.mktemp('files')
    parquet(folder / 'good.parquet', texts(200), url=['u'] * 200)
    raw = (folder / 'good.parquet').read_bytes()
    start, end = len(raw) // 4, len(raw) // 3
    flipped = bytes(byte ^ 255 for byte in raw[start:end])
    (folder / 'short.parquet').write_bytes(raw[:len(raw) // 2])
    (folder / 'flipped.parquet').write_bytes(raw[:start] + flipped + raw[end:])
    jsonl(folder / 'good.jsonl', texts(20))
    (folder / 'broken.jsonl').write_text('{"text": "one"}\n{"text": \n')
    (folder / 'odd.csv').write_text('text\n')
    (folder / 'empty.jsonl').write_text('\n')
    return folder


@pytest.mark.parametrize('words, expected, parts', [
    (['fineweb_ed', BYTES], 2,
     ['fineweb_ed', 'fineweb_edu', 'openwebtext', 'shakespeare', 'stdlib', '--data_files']),
    ([BYTES], 2, ['fineweb_edu']),
    (['mine', '--data_files={}/none*.parquet', BYTES], 1, ['none*.parquet']),
    (['mine', '--data_files={}/good.parquet', BYTES, '--text_column=body'], 2,
     ['body', 'text, id, url', 'good.parquet']),
    (['mine', '--data_files={}/good.jsonl', BYTES, '--text_column=body'], 2, ['body', 'id, text']),
    (['mine', '--data_files={}/good.parquet', BYTES, '--text_column=id'], 2, ["'id' holds int"]),
    (['mine', '--data_files={}/good.parquet,{}/short.parquet', BYTES], 1, ['short.parquet']),
    (['mine', '--data_files={}/broken.jsonl', BYTES], 1, ['broken.jsonl', 'line 2']),
    (['mine', '--data_files={}/odd.csv', BYTES], 2, ['odd.csv', '.parquet']),
    (['mine', '--data_files={}/good.parquet', BYTES, '--val_fraction=1.5'], 2, ['val_fraction']),
    (['mine', '--data_files={}/good.parquet', BYTES, '--subset=x'], 2, ['subset']),
    (['mine', '--data_files={}/good.parquet', '--tokenizer=gpt3'], 2, ['gpt3', 'gpt2']),
    (['shakespeare', BYTES], 1, ['--data_files', 'tinyshakespeare']),
    (['hellaswag'], 1, ['--data_files', 'rowanz/hellaswag']),
    (['hellaswag', '--data_files={}/empty.jsonl'], 1, ['empty.jsonl', 'item 1 is not']),
    (['hellaswag', '--verify'], 2, ['--verify']),
    (['hellaswag', '--max_tokens=5'], 2, ['--max_tokens']),
    (['openwebtext', '--pretokenized'], 2, ['owner/name', 'fineweb_edu and fineweb']),
    (['fineweb', '--pretokenized=kjj0'], 2, ['owner/name']),
    (['fineweb', '--pretokenized', '--tokenizer=byte'], 2, ['GPT-2']),
    (['fineweb', '--pretokenized', '--val_fraction=0.1'], 2,
     ['fineweb --pretokenized has no use for --val_fraction']),
])
def test_errors_are_one_line_and_leave_nothing(
        tmp_path, wrong_files, words, expected, parts, monkeypatch, capsys):
    monkeypatch.setenv('https_proxy', 'http://127.0.0.1:9')  # no network
    monkeypatch.setattr(urllib.request, '_opener', None)  # or that of an earlier test knows no proxy
    words = [word.replace('{}', str(wrong_files)) for word in words]
    code, message = refused_here(*words, f'--data_dir={tmp_path}/data')
    assert code == expected
    for part in parts:
        assert part in message
    assert capsys.readouterr().err == ''
    assert not (tmp_path / 'data').exists()


@pytest.mark.parametrize('words, rc, parts', [
    (['mine', '--data_files={}/flipped.parquet'], 1, ['flipped.parquet']),
    (['mine', '--data_files={}/good.parquet', '--text_column=id'], 2, ["'id' holds int"]),
    (['fineweb_edu'], 1, ['--data_files', 'TIKTOKEN_CACHE_DIR']),
])
def test_errors_beside_worker_processes_are_one_line(tmp_path, wrong_files, words, rc, parts):
    nowhere = 'http://127.0.0.1:9'
    env = {'HF_ENDPOINT': nowhere, 'HF_HOME': str(tmp_path), 'https_proxy': nowhere, 'HF_HUB_OFFLINE': '0'}
    words = [word.replace('{}', str(wrong_files)) for word in words]
    words += [BYTES, '--num_workers=2', f'--data_dir={tmp_path}/data']
    error = prepare(*words, rc=rc, env=env).stderr
    for part in parts:
        assert part in error
    assert len(error.splitlines()) == 1, error
    assert not (tmp_path / 'data').exists()


def test_no_vocabulary_says_where_it_would_be_taken_from(tmp_path):
    files = jsonl(tmp_path / 'a.jsonl', texts(20))
    env = {'TIKTOKEN_CACHE_DIR': str(tmp_path / 'none'), 'https_proxy': 'http://127.0.0.1:9'}
    error = prepare('mine', f'--data_files={files}', f'--data_dir={tmp_path}', rc=1, env=env).stderr
    assert 'TIKTOKEN_CACHE_DIR' in error
