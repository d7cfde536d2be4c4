"""prepare_data.py on small local files: what it writes, what it takes, and errors in one line."""
import json
import pathlib
import random
import re
import runpy
import sys
import urllib.request
import zlib

import numpy as np
import pytest

from fp8gpt import corpus
from conftest import ROOT, run
from preparing import (
    BYTES, SAMPLE, check, everything, ids_of_documents, jsonl, meta, needs_bpe, needs_sample, parquet,
    prepare, prepare_here, refused_here, texts)


def of(files, folder, *more):
    """The words that make folder/mine-byte of files."""
    return ['mine', f'--data_files={files}', BYTES, f'--data_dir={folder}', *more]


# ------------------------------------------------------------------------------- what is written

@pytest.mark.parametrize('workers', [1, 2])
def test_documents_come_back_in_order_with_eot_before_each(tmp_path, workers):
    documents = texts(600)
    documents[3] = ''
    documents[100] = None
    documents[599] = 'x' * 1_500_000  # longer than a chunk
    parquet(tmp_path / 'a.parquet', documents[:250])
    parquet(tmp_path / 'b.parquet', documents[250:])
    flags = [f'--num_workers={workers}', '--shard_tokens=100_000', '--val_fraction=0.1']
    said = prepare_here(*of(tmp_path / '*.parquet', tmp_path, *flags))
    folder = tmp_path / 'mine-byte'
    train, val = check(folder, documents)
    assert 30 < len(val) < 100  # a tenth of 598
    facts = meta(folder)
    assert (facts['tokenizer'], facts['vocab_size'], facts['eot']) == ('byte', 257, 256)
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
    assert '\nnext: python train' in said


def test_gpt2_ids_are_tiktokens(tmp_path, small_gpt2):
    documents = texts(60) + ['<|endoftext|> is text', '\ud800 half a surrogate pair']
    files = jsonl(tmp_path / 'a.jsonl', documents)
    flags = ['--num_workers=2', '--val_fraction=0.2']
    prepare_here('mine', f'--data_files={files}', f'--data_dir={tmp_path}', *flags)
    folder = tmp_path / 'mine-gpt2'
    documents[61] = '? half a surrogate pair'
    check(folder, documents, 512, small_gpt2.decode)
    reference = [small_gpt2.encode_ordinary(document) for document in documents]
    ours = [ids.tolist() for split in ('train', 'val') for ids in ids_of_documents(folder, split, 512)]
    assert sorted(ours) == sorted(reference)


def test_rows_of_fineweb_edu_are_prepared_under_its_name(tmp_path, small_gpt2):
    rows = [json.loads(line) for line in (ROOT / 'tests/data/fineweb_edu.jsonl').read_text().splitlines()]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name not in ('text', 'id')}
    files = parquet(tmp_path / 'a.parquet', [row['text'] for row in rows], **columns)
    prepare_here('fineweb-edu', f'--data_files={files}', f'--data_dir={tmp_path}')
    folder = tmp_path / 'fineweb_edu-gpt2'
    check(folder, [row['text'] for row in rows], 512, small_gpt2.decode)
    facts = meta(folder)
    assert (facts['dataset'], facts['val_fraction']) == ('fineweb_edu', 0.0005)
    assert facts['revision'] is facts['subset'] is None
    said = prepare_here('tinyshakespeare', f'--data_files={files}', BYTES, f'--data_dir={tmp_path}')
    facts = meta(tmp_path / 'shakespeare-byte')
    assert (facts['dataset'], facts['val_fraction']) == ('shakespeare', 0.1)
    assert 'shakespeare-byte' in said


def test_a_text_that_occurs_twice_is_in_one_split(tmp_path):
    documents = texts(150) + texts(150) + texts(80)
    files = jsonl(tmp_path / 'a.jsonl', documents, key='body')
    prepare_here(*of(files, tmp_path, '--text_column=body', '--val_fraction=0.3'))
    train, val = check(tmp_path / 'mine-byte', documents)
    assert len(val) > 60


def test_both_splits_have_a_document(tmp_path):
    for count, fraction in ((30, 1e-9), (2, 0.999), (2, 1e-9)):
        documents = texts(count, words=20)
        files = parquet(tmp_path / 'a.parquet', documents)
        prepare_here(*of(files, tmp_path, f'--val_fraction={fraction}', '--overwrite'))
        train, val = check(tmp_path / 'mine-byte', documents)
        assert len(val) == 1
        alone = parquet(tmp_path / 'alone.parquet', [documents[0], '', documents[0]])
        code, message = refused_here('alone', *of(alone, tmp_path, f'--val_fraction={fraction}')[1:])
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


def test_max_tokens_stops_at_the_first_document_end_past_it(tmp_path):
    documents = texts(300)
    files = parquet(tmp_path / 'a.parquet', documents)
    sizes = np.cumsum([1 + len(document.encode()) for document in documents])
    for max_tokens in (100_000, sizes[40], sizes[40] + 1):
        flags = [f'--max_tokens={max_tokens}', '--val_fraction=0.1', '--num_workers=2', '--overwrite']
        prepare_here(*of(files, tmp_path, *flags))
        check(tmp_path / 'mine-byte', documents[:int(np.searchsorted(sizes, max_tokens)) + 1])


def test_stdlib_is_pythons_own_source_in_bytes(tmp_path, monkeypatch):
    paths = corpus.find_stdlib()[::40]
    monkeypatch.setattr(corpus, 'find_stdlib', lambda: paths)
    said = prepare_here('stdlib', f'--data_dir={tmp_path}')
    assert f'next: python train_fp8.py config/quickstart.py --data_dir={tmp_path}' in said
    documents = [pathlib.Path(path).read_bytes().decode('utf-8', 'replace') for path in paths]
    check(tmp_path / 'stdlib-byte', documents)


@needs_sample
@needs_bpe
@pytest.mark.slow
def test_the_fineweb_edu_sample_has_its_count_of_tokens(tmp_path):
    prepare('fineweb_edu', f'--data_files={SAMPLE}/*.parquet', f'--data_dir={tmp_path}', '--num_workers=2')
    splits = meta(tmp_path / 'fineweb_edu-gpt2')['splits']
    assert splits['train']['tokens'] + splits['val']['tokens'] == 27_687_456 + 12_704


@pytest.mark.slow
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
    documents = texts(100)
    files = jsonl(tmp_path / 'a.jsonl', documents)
    others = jsonl(tmp_path / 'b.jsonl', documents[:50], key='body')
    first = of(files, tmp_path / 'first', '--val_fraction=0.3')
    prepare_here(*first)
    prepare_here(*of(others, tmp_path / 'second', '--text_column=body', '--shard_tokens=9000'))
    check(tmp_path / 'first' / 'mine-byte', documents)
    check(tmp_path / 'second' / 'mine-byte', documents[:50])
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


MINE = f'mine {BYTES} --data_files={{}}/'
WRONG = [   # command line, exit code, what the message names
    (f'fineweb_ed {BYTES}', 2, ['fineweb_ed', 'fineweb_edu', 'stdlib', '--data_files']),
    (BYTES, 2, ['fineweb_edu']),
    (f'{MINE}none*.parquet', 1, ['none*.parquet']),
    (f'{MINE}good.parquet --text_column=body', 2, ['body', 'text, id, url', 'good.parquet']),
    (f'{MINE}good.jsonl --text_column=body', 2, ['body', 'id, text']),
    (f'{MINE}good.parquet --text_column=id', 2, ["'id' holds int"]),
    (f'{MINE}good.parquet --text_column=id --num_workers=2', 2, ["'id' holds int"]),
    (f'{MINE}flipped.parquet --num_workers=2', 1, ['flipped.parquet']),
    (f'{MINE}good.parquet,{{}}/short.parquet', 1, ['short.parquet']),
    (f'{MINE}broken.jsonl', 1, ['broken.jsonl', 'line 2']),
    (f'{MINE}odd.csv', 2, ['odd.csv', '.parquet']),
    (f'{MINE}good.parquet --val_fraction=1.5', 2, ['val_fraction']),
    (f'{MINE}good.parquet --subset=x', 2, ['subset']),
    (f'{MINE}good.parquet --template=chat', 2, ['--template=chat']),
    ('mine --data_files={}/good.parquet --tokenizer=gpt3', 2, ['gpt3', 'gpt2']),
    (f'shakespeare {BYTES}', 1, ['--data_files', 'tinyshakespeare']),
    ('hellaswag', 1, ['--data_files', 'rowanz/hellaswag']),
    ('hellaswag --data_files={}/empty.jsonl', 1, ['empty.jsonl', 'item 1 is not']),
    ('hellaswag --verify', 2, ['--verify']),
    ('hellaswag --max_tokens=5', 2, ['--max_tokens']),
    ('openwebtext --pretokenized', 2, ['owner/name', 'fineweb_edu and fineweb']),
    ('fineweb --pretokenized=kjj0', 2, ['owner/name']),
    ('fineweb --pretokenized --tokenizer=byte', 2, ['GPT-2']),
    ('fineweb --pretokenized --val_fraction=0.1', 2, ['has no use for --val_fraction']),
]


def test_errors_are_one_line_and_leave_nothing(tmp_path, wrong_files, monkeypatch, capsys):
    monkeypatch.setenv('https_proxy', 'http://127.0.0.1:9')  # no network
    monkeypatch.setattr(urllib.request, '_opener', None)  # or that of an earlier test knows no proxy
    wrong = []
    for words, expected, parts in WRONG:
        words = words.replace('{}', str(wrong_files)).split()
        code, message = refused_here(*words, f'--data_dir={tmp_path}/data')
        left = (tmp_path / 'data').exists() or capsys.readouterr().err
        if code != expected or left or not all(part in message for part in parts):
            wrong.append((words, code, message, left))
    assert wrong == []


def test_no_vocabulary_says_where_it_would_be_taken_from(tmp_path, monkeypatch):
    def offline(name):
        raise ConnectionError
    monkeypatch.setattr('tiktoken.get_encoding', offline)
    files = jsonl(tmp_path / 'a.jsonl', texts(20))
    code, message = refused_here('mine', f'--data_files={files}', f'--data_dir={tmp_path}')
    assert code == 1
    assert 'TIKTOKEN_CACHE_DIR' in message


@pytest.mark.slow
def test_errors_beside_worker_processes_are_one_line(tmp_path, wrong_files):
    nowhere = 'http://127.0.0.1:9'
    env = {'HF_ENDPOINT': nowhere, 'HF_HOME': str(tmp_path), 'https_proxy': nowhere, 'HF_HUB_OFFLINE': '0'}
    for words, parts in ((['mine', f'--data_files={wrong_files}/flipped.parquet'], ['flipped.parquet']),
                         (['fineweb_edu'], ['--data_files', 'TIKTOKEN_CACHE_DIR'])):
        words += [BYTES, '--num_workers=2', f'--data_dir={tmp_path}/data']
        error = prepare(*words, rc=1, env=env).stderr
        for part in parts:
            assert part in error
        assert len(error.splitlines()) == 1, error
        assert not (tmp_path / 'data').exists()
