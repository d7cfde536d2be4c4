"""prepare_data.py: where text comes from, what becomes of it, gigatoken, and errors in one line."""
import functools
import hashlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import sysconfig
import types
import threading
import time
import urllib.request
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import prepare_data
from configurator import DataError, MachineError
from conftest import run
from fp8gpt import files, shards
from fp8gpt.tokenizer import ByteTokenizer, get_tokenizer
from hub import Hub, serve
from preparing import (
    BYTES, check, everything, forms, ids_of_documents, jsonl, killed_here, meta, parquet, prepare,
    prepare_here, refused_here, rows_of_file, stopped, texts, written)
from tokenizers_made import make_tokenizer


def of(files, folder, *more):
    """The words that make folder/mine-byte of files."""
    return ['mine', f'--data_files={files}', BYTES, f'--data_dir={folder}', *more]


# ------------------------------------------------------------------------------- what is written

def test_documents_come_back_in_order_with_eot_before_each(tmp_path):
    documents = texts(600)
    documents[3] = ''
    documents[100] = None
    documents[200:230] = documents[:30]     # a text that occurs twice is in one split
    documents[599] = 'x' * 1_500_000
    parquet(tmp_path / 'a.parquet', documents[:250])
    parquet(tmp_path / 'b.parquet', documents[250:])
    flags = ['--num_workers=2', '--shard_tokens=100_000', '--val_fraction=0.1']
    said = prepare_here(*of(tmp_path / '*.parquet', tmp_path, *flags))
    folder = tmp_path / 'mine-byte'
    train, val = check(folder, documents)
    assert 30 < len(val) < 100  # a tenth of 598
    assert f'{len(val)} documents' in said
    facts = meta(folder)
    assert (facts['tokenizer'], facts['vocab_size'], facts['eot']) == ('byte', 257, 256)
    for shard in facts['shards']:
        raw = (folder / shard['file']).read_bytes()[1024:]
        assert (shard['tokens'], shard['crc32']) == (len(raw) // 2, zlib.crc32(raw))
        starts = np.flatnonzero(np.frombuffer(raw, '<u2') == 256)
        assert starts[0] == 0 and starts[-1] < 100_000      # a shard ends with the document past 100,000


def test_gpt2_ids_are_tiktokens(tmp_path, small_gpt2):
    """By gigatoken where it is installed."""
    documents = texts(60) + [
        '<|endoftext|> is text', 'a\ud800b', ' ', ' ' * 5000, "don't I'LL", '\u200b\u3000x', '\r\n\t',
        'a' * 5000, '1234567 \u0663\u0664', '\x00\x1c\x85 y', '\u017f K']
    files = jsonl(tmp_path / 'a.jsonl', documents)
    said = prepare_here('mine', f'--data_files={files}', f'--data_dir={tmp_path}', '--num_workers=2')
    assert ('checked against tiktoken' in said) == bool(importlib.util.find_spec('gigatoken'))
    documents[61] = 'a?b'       # half a surrogate pair
    assert '1 rows hold the text <|endoftext|>, which is taken as text (the first: ' in said
    check(tmp_path / 'mine-gpt2', documents, 512, small_gpt2.decode)
    found = [ids_of_documents(tmp_path / 'mine-gpt2', split, 512) for split in ('train', 'val')]
    ours = [ids.tolist() for documents in found for ids in documents]
    assert sorted(ours) == sorted(map(small_gpt2.encode_ordinary, documents))


def test_a_hash_below_the_share_is_held_out_and_one_document_at_least(tmp_path):
    """The share is of hashes, by hashlib; where none is below it, the lowest of those with no more text than
    the mean is held out, and not one that has most of the text."""
    # the lowest hash of all
    long = min((f'{i} ' + 'word ' * 20_000 for i in range(200)),
               key=lambda each: hashlib.blake2b(each.encode(), digest_size=8).digest())
    for count, typed, share in ((900, [], 0.005), (30, [], 0.005), (30, ['--val_fraction=0.2'], 0.2),
                                (2, ['--val_fraction=0.999'], 0.999)):
        documents = texts(count, words=20)
        if count == 30:
            documents.append(long)
        key = {each: int.from_bytes(hashlib.blake2b(each.encode(), digest_size=8).digest(), 'big')
               for each in documents}
        prepare_here(*of(jsonl(tmp_path / 'a.jsonl', documents), tmp_path, *typed, '--overwrite'))
        train, val = check(tmp_path / 'mine-byte', documents)
        below = [each for each in documents if key[each] < share * 2**64]
        if not below:
            mean = sum(len(each.encode()) for each in documents) / len(documents)
            below = [min((each for each in documents if len(each.encode()) <= mean), key=key.get)]
        assert val == (below if len(below) < len(documents) else [min(documents, key=key.get)])
    alone = parquet(tmp_path / 'alone.parquet', [documents[0], '', documents[0]])
    code, message = refused_here(*of(alone, tmp_path / 'new'))
    assert (code, '3 rows with 1 different texts' in message) == (1, True)
    assert os.listdir(tmp_path / 'new') == []


def test_few_rows_are_held_while_none_is_below_the_share(monkeypatch):
    monkeypatch.setattr(prepare_data, 'MOST', 450)
    counts = {'tokens': 1, 'bytes': 1}
    rows = (prepare_data.Document(None, [0], key, counts, '', counts, '') for key in range(2**62, 2**63))
    facts = {'settings': {'val_fraction': 1e-9, 'shard_tokens': 10**8, 'max_tokens': 0}, 'progress': {}}
    prepare_data.survey(facts | {'source': '', 'template': ''}, rows, [])
    assert next(rows).key == 2**62 + 450 and facts['progress']['held'][1] == 2**62


def test_txt_is_cut_at_the_first_blank_line_past_8192_characters(tmp_path):
    """Of a file that is alone the last tenth is held out: the documents that begin in it."""
    rng = random.Random(0)
    lines_of = ['some words\n', 'größe\r\n', '\n', ' \n', 'é' * 40 + '\n']
    text = ''.join(rng.choice(lines_of) for _ in range(80_000)) + 'end'
    for name in 'a.txt', 'b.txt':
        (tmp_path / name).write_bytes(text.encode())
    pieces, lines = [], []
    for line in re.findall(r'[^\n]*\n|[^\n]+$', text.replace('\r\n', '\n')):
        lines.append(line)
        if not line.strip() and len(''.join(lines)) >= 8192:
            pieces.append(''.join(lines))
            lines = []
    pieces.append(''.join(lines))
    assert len(pieces) > 40
    prepare_here(*of(tmp_path / 'a.txt', tmp_path))
    train, val = ([bytes(ids.tolist()).decode() for ids in ids_of_documents(tmp_path / 'mine-byte', split)]
                  for split in ('train', 'val'))
    assert train + val == pieces
    ends = np.cumsum([len(piece.encode()) for piece in pieces])
    assert len(val) == sum(ends[:-1] >= 0.9 * ends[-1])
    prepare_here(*of(f'{tmp_path}/*.txt', tmp_path, '--val_fraction=0.1', '--overwrite'))
    check(tmp_path / 'mine-byte', pieces * 2)


def test_txt_is_cut_at_the_marks_that_end_a_text(tmp_path):
    """As TinyStories' files have them."""
    stories = ['Once.\nA fox', 'Then', 'a < b\n\n<|end', 'x ' * 3000, 'The end.']
    (tmp_path / 'a.txt').write_text('\n<|endoftext|>\n'.join(stories) + '\n<|endoftext|>\n')
    found = [row['text'] for row in rows_of_file(f'{tmp_path}/a.txt', None)]
    assert [piece.strip('\n') for piece in found] == stories


def test_max_tokens_stops_at_the_first_document_end_past_it(tmp_path):
    """It needs no row past it to be right, and one that it has is held out, whatever comes after it."""
    documents = sorted(texts(300), reverse=True,
                       key=lambda each: hashlib.blake2b(each.encode(), digest_size=8).digest())
    files = jsonl(tmp_path / 'a.jsonl', documents[:90])
    files.write_text(files.read_text() + '{')
    sizes = np.cumsum([1 + len(document.encode()) for document in documents])
    for max_tokens in (sizes[40], sizes[40] + 1):
        flags = [f'--max_tokens={max_tokens}', '--val_fraction=0.1', '--num_workers=2', '--overwrite']
        said = prepare_here(*of(files, tmp_path, *flags))
        assert 'max_tokens: rows after row 4' in said
        check(tmp_path / 'mine-byte', documents[:int(np.searchsorted(sizes, max_tokens)) + 1])


@pytest.mark.parametrize('lost, said', [(0.0, ''), (0.05, 'not write 5.0% of the characters'), (0.2, None)])
def test_text_that_a_tokenizer_cannot_write_is_said_or_refused(tmp_path, monkeypatch, lost, said):
    """Of a BPE without bytes and without an unknown token; past a tenth it is an error."""
    folder = make_tokenizer(tmp_path / 'made')
    tokenizer = get_tokenizer(folder)
    decode = type(tokenizer).decode
    monkeypatch.setattr(type(tokenizer), 'decode', lambda self, ids, special=False: decode(
        self, ids, special).replace('#', ''))
    n = round(100 * lost)
    files = jsonl(tmp_path / 'a.jsonl', [f'{i:03d}' + '#' * n + 'x' * (97 - n) for i in range(60)])
    words = 'mine', f'--data_files={files}', f'--tokenizer={folder}', f'--data_dir={tmp_path}'
    if said is None:
        assert 'the tokenizer cannot write 20% of the characters' in refused_here(*words)[1]
    else:
        assert ('does not write' in (found := prepare_here(*words))) == bool(said) and said in found
    assert prepare_data.lost_characters('Größe ½ A b', 'GRO\u0308ẞe 1\u20442 a') == (1, 12)


def test_binary_columns_of_parquet_are_text(tmp_path):
    raw = pa.array([text.encode() for text in texts(5)] + [b'\xff'], pa.binary())
    pq.write_table(pa.table({'text': raw}), tmp_path / 'a.parquet')
    *found, bad = rows_of_file(str(tmp_path / 'a.parquet'), ['text'])
    assert [row['text'] for row in found] == texts(5) and isinstance(bad, DataError)


def test_a_file_that_is_fetched_again_goes_on_where_the_others_were_read(tmp_path):
    """As an error about a damaged file asks for; an edit of one that was read is refused."""
    for name in 'abc':
        parquet(tmp_path / f'{name}.parquet', texts(100, seed=ord(name)))
    whole = (tmp_path / 'c.parquet').read_bytes()
    (tmp_path / 'c.parquet').write_bytes(whole[:len(whole) // 2])
    words = of(tmp_path / '*.parquet', tmp_path / 'd', '--shard_tokens=20_000', '--num_workers=1')
    assert 'c.parquet cannot be read (' in refused_here(*words)[1]
    (tmp_path / 'c.parquet').write_bytes(whole)
    assert 'going on from its last finished shard' in prepare_here(*words)
    shutil.copytree(tmp_path / 'd', tmp_path / 'mended')
    prepare_here(*words, '--overwrite')
    assert everything(tmp_path / 'd/mine-byte') == everything(tmp_path / 'mended/mine-byte')
    parquet(tmp_path / 'a.parquet', texts(100, seed=5))
    assert 'of other files' in refused_here(*words)[1]
    for name in 'ab':       # no shard is finished, so nothing is read that could have changed
        jsonl(tmp_path / f'{name}.jsonl.gz', texts(500, seed=ord(name)))
    words = of(tmp_path / '*.gz', tmp_path / 'e')
    pack(tmp_path / 'a.jsonl.gz', (tmp_path / 'a.jsonl.gz').read_bytes())
    assert 'b.jsonl.gz cannot be read (' in refused_here(*words)[1]
    pack(tmp_path / 'b.jsonl.gz', (tmp_path / 'b.jsonl.gz').read_bytes())
    assert 'going on' in prepare_here(*words)


def test_gigatoken_starts_anew_where_its_cache_has_grown(small_gpt2, monkeypatch):
    pytest.importorskip('gigatoken')
    encoder = prepare_data.Texts(get_tokenizer('gpt2'), 'text')
    first = encoder.fast
    encoder.of_row({'text': 'a b'})
    assert encoder.fast is first
    monkeypatch.setattr(prepare_data, 'resident', lambda: encoder.most + 1)
    ids, *_ = encoder.of_row({'text': 'a b'})
    assert encoder.fast is not first and ids[1:].tolist() == small_gpt2.encode_ordinary('a b')


@pytest.mark.slow
def test_memory_does_not_follow_the_row_group_and_torch_stays_out(tmp_path):
    text = random.Random(0).randbytes(5_000).hex()
    documents = [f'{i}{text}' for i in range(20_000)]  # 200 MB in one row group
    files = parquet(tmp_path / 'a.parquet', documents, row_group_size=10**9, compression='none')
    code = ('import runpy, sys; sys.argv = sys.argv[1:]; sys.path.insert(0, "."); '
            'runpy.run_path(sys.argv[0], run_name="__main__"); assert "torch" not in sys.modules; '
            'print(open("/proc/self/status").read())')
    words = of(files, tmp_path, '--max_tokens=2e7', '--val_fraction=0.1')
    done = run('-c', code, 'prepare_data.py', *words)
    peak = int(re.search(r'VmHWM:\s+(\d+)', done.stdout)[1])
    assert peak < 250_000  # KB, the interpreter and its libraries included


# ------------------------------------------------------------------------------- where text comes from

def test_files_are_found_at_home_and_under_names_that_look_like_globs(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    for name in 'a[1].txt', 'b,c.txt', 'd.txt', 'e.txt':
        (tmp_path / name).write_text('text')
    for asked, found in (('~/a[1].txt', ['a[1].txt']), (f'{tmp_path}/b,c.txt', ['b,c.txt']),
                         ('~/[de].txt, ~/a[1].txt', ['d.txt', 'e.txt', 'a[1].txt'])):
        assert prepare_data.find_files(asked) == [f'{tmp_path}/{name}' for name in found]
    monkeypatch.chdir(tmp_path)     # once under two words, twice under a word that is typed twice
    assert prepare_data.find_files('[de].txt,*.txt,./d.txt') == ['d.txt', 'e.txt', 'a[1].txt', 'b,c.txt']
    assert prepare_data.find_files('[de].txt,d.txt,[de].txt') == ['d.txt', 'e.txt', 'd.txt', 'e.txt']


def test_every_position_is_where_a_restart_goes_on(tmp_path):
    """In files of seven kinds."""
    documents = texts(12)
    parquet(tmp_path / 'a.parquet', documents[:5], row_group_size=2)
    jsonl(tmp_path / 'b.jsonl', documents[5:9])
    (tmp_path / 'c.json').write_text(json.dumps([{'text': document} for document in documents[9:]]))
    (tmp_path / 'd.py').write_text('import os\n\n\n' * 10_000)
    pack(tmp_path / 'e.csv.zst', CSV.encode())
    (tmp_path / 'f.json').write_text(JSONL)
    pack(tmp_path / 'g.txt.gz', LINES.encode())
    paths = prepare_data.find_files(f'{tmp_path}/*')

    def rows_after(position):
        meta = json.loads(json.dumps({'progress': {'position': position}, 'settings': {}}))
        return list(prepare_data.rows_of(paths, meta, ['text']))
    rows = rows_after(None)
    before = [*documents, 'import os\n\n\n' * 10_000, *ROW_TEXTS, *ROW_TEXTS]
    found = [row['text'] for row, _ in rows]
    assert found[:19] == before and ''.join(found[19:]) == LINES and len(found) > 20
    for done, (_, position) in enumerate(rows, 1):
        assert rows_after(position) == rows[done:]
    path = tmp_path / 'long.jsonl'      # a row that Python's parser refuses for its length is one bad row
    path.write_text('{"text": "one"}\n{"text": ' + '1' * 5000 + '}\n{"text": "two"}')
    assert [type(row) for row in rows_of_file(str(path), None)] == [dict, DataError, dict]
    path = tmp_path / 'mark.jsonl'      # with a byte order mark and an empty line
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": "two"}')
    assert list(rows_of_file(str(path), None)) == [{'text': 'one'}, {'text': 'two'}]


def test_the_standard_library_is_without_its_tests_and_what_is_installed(tmp_path, monkeypatch):
    library = pathlib.Path(sysconfig.get_paths()['stdlib'])
    paths = prepare_data.find_stdlib()
    assert {str(library / name) for name in ('ast.py', 'json/decoder.py', 'email/mime/text.py')} <= set(paths)
    assert not [path for path in paths if re.search('/(site-packages|test|tests|__pycache__)/', path)]
    paths = paths[::40]
    monkeypatch.setattr(prepare_data, 'find_stdlib', lambda: paths)
    prepare_here('stdlib', f'--data_dir={tmp_path}')
    documents = [pathlib.Path(path).read_bytes().decode('utf-8', 'replace') for path in paths]
    check(tmp_path / 'stdlib-byte', documents)


def test_downloads_are_pinned(tmp_path, monkeypatch):
    for name, path in (('hellaswag', 'hellaswag/hellaswag_val.jsonl'), ('shakespeare', 'shakespeare.txt')):
        row = dict(shards.DATASETS[name])
        assert re.search('/[0-9a-f]{40}/', row['url'])
        source = tmp_path / f'{name}.source'
        source.write_text(''.join(f'{line}\n\n' * 1000 for line in range(20)))
        row['url'] = source.as_uri()
        monkeypatch.setitem(shards.DATASETS, name, row)
        code, message = refused_here(name, BYTES, f'--data_dir={tmp_path}')
        assert (code, (tmp_path / path).exists()) == (1, False)
        assert 'arrived with another SHA-256' in message
        row['sha256'] = hashlib.sha256(source.read_bytes()).hexdigest()
        assert ' is ready' in prepare_here(name, BYTES, f'--data_dir={tmp_path}')
        assert (tmp_path / path).read_bytes() == source.read_bytes()
    (tmp_path / 'shakespeare.txt').write_text('another text')
    said = refused_here('shakespeare', BYTES, f'--data_dir={tmp_path}')[1]
    assert 'shakespeare.txt is not the file at' in said
    good, mine = tmp_path / 'hellaswag' / 'hellaswag_val.jsonl', tmp_path / 'mine.jsonl'
    before, flag = good.read_bytes(), f'--data_dir={tmp_path}'
    mine.write_text('größe\n' * 3)
    assert '--overwrite replaces it' in refused_here('hellaswag', f'--data_files={mine}', flag)[1]
    assert good.read_bytes() == before
    prepare_here('hellaswag', f'--data_files={mine}', flag, '--overwrite')
    assert good.read_text() == mine.read_text()


# ------------------------------------------------------------------------------- texts as people have them

TEXT = 'Größe, naïve, 10 €\nanother line\n'
ROW_TEXTS = ['one, "two"', 'Größe\nof a row', 'three']
CSV = 'id,text\n1,"one, ""two"""\n2,"Größe\nof a row"\n\n3,three\n'
JSONL = '\n'.join(json.dumps({'text': text}, ensure_ascii=False) for text in ROW_TEXTS)
LIST = json.dumps([{'text': text} for text in ROW_TEXTS], indent=1)
READ = [    # name, its bytes before compression, the texts of its rows
    ('a.txt', TEXT.encode('utf-8-sig'), [TEXT]),
    ('a.txt.gz', TEXT.encode(), [TEXT]),
    ('a.TXT', TEXT.replace('\n', '\r\n').encode(), [TEXT]),
    ('a.py', TEXT.replace('\n', '\r').encode(), [TEXT]),
    ('a.txt', b'', []),
    ('a.jsonl.zst', JSONL.encode(), ROW_TEXTS),
    ('a.json', LIST.encode('utf-8-sig'), ROW_TEXTS),
    ('a.json.gz', f'\n{JSONL}\n\n'.encode(), ROW_TEXTS),
    ('a.json', JSONL.split('\n')[0].encode(), ROW_TEXTS[:1]),
    ('a.json', b' ', []),
    ('a.csv', CSV.replace('\n', '\r\n').encode('utf-8-sig'), ROW_TEXTS),
    ('a.csv.zst', CSV.encode(), ROW_TEXTS),
    ('a.tsv', b'id\ttext\n1\t"1,5\t\n"\n2\tNA\n', ['1,5\t\n', 'NA']),
    ('a.csv', b'id,text\n1,' + b'x' * 200_000, ['x' * 200_000]),
]


def pack(path, raw):
    """Write bytes to a file, compressed as its name says."""
    form = {'.gz': 'gzip', '.zst': 'zstd'}.get(path.suffix)
    with pa.output_stream(str(path), compression=form) as file:
        file.write(raw)
    return path


@pytest.mark.parametrize('name, raw, expected', READ)
def test_a_file_is_read_as_its_name_says(tmp_path, name, raw, expected):
    rows = rows_of_file(str(pack(tmp_path / name, raw)), None)
    assert [row['text'] for row in rows] == expected


def test_a_line_of_json_that_cannot_be_read_stops_no_other(tmp_path):
    for name in 'a.jsonl', 'a.json':
        (tmp_path / name).write_text('{"text": "one"}\n{"text": \n{"text": "two"}\n')
        first, bad, last = rows_of_file(f'{tmp_path}/{name}', None)
        assert (first, last) == ({'text': 'one'}, {'text': 'two'}) and 'a line is a row' in str(bad)


def test_characters_and_line_ends_between_parts_are_whole(tmp_path):
    for shift, encoding in itertools.product(range(8), ('utf-8', 'utf-8-sig')):     # Python reads 8,192 bytes
        text = 'x' * shift + 'größe, 量化 \U0001f642\r\n\r\n' * 3000
        (tmp_path / 'a.txt').write_bytes(text.encode(encoding))
        assert [*files.lines_of(f'{tmp_path}/a.txt')] == text.replace('\r\n', '\n').splitlines(True)


LINES = ''.join(f'{i}\n' for i in range(20_000))
WORDS = 'größe ' * 20_000
BARE = '量' * 20_000
@pytest.mark.parametrize('text, ends', [(LINES, '\n'), (WORDS, ''), (BARE, ''), ('a\n\n' + LINES, '\n')])
def test_a_txt_without_blank_lines_is_cut_at_line_ends_or_anywhere(tmp_path, text, ends):
    (tmp_path / 'a.txt').write_text(text)
    for piece in 100, 1000, 8192:
        pieces = [row['text'] for row in rows_of_file(f'{tmp_path}/a.txt', None, piece)]
        assert ''.join(pieces) == text
        assert all(8 * piece <= len(each) < 8 * piece + 10 for each in pieces[:-1])
        assert all(each.endswith(ends) for each in pieces[:-1])


def test_a_short_text_gives_train_and_val(tmp_path):
    path = tmp_path / 'a.txt'
    for text in (LINES[:5000], LINES[:5000].replace('\n', ' '), LINES[:4000].replace('1\n', '1\n\n'),
                 LINES[:14_000].replace('1\n', '1\n\n')):
        path.write_text(text)
        prepare_here(*of(path, tmp_path, '--overwrite'))
        splits = meta(tmp_path / 'mine-byte')['splits']
        assert splits['train']['tokens'] > 3000 and 0 < splits['val']['tokens'] < len(text) / 8
    path.write_text(''.join(f'{i:86}\n' for i in range(11)) + 'x' * 43)
    prepare_here(*of(path, tmp_path, '--overwrite'))
    assert meta(tmp_path / 'mine-byte')['splits']['val']['bytes'] == 130     # a document of two lines
    path.write_text('<|endoftext|>'.join(f'{i}' for i in range(999)))       # more marks than text
    prepare_here(*of(path, tmp_path, '--overwrite'))
    assert 250 < meta(tmp_path / 'mine-byte')['splits']['val']['bytes'] < 330      # of 2,887
    path.write_text('hello')
    assert '1 rows with 1 different texts; two are the least' in refused_here(*of(path, tmp_path / 'b'))[1]


# ------------------------------------------------------------------------------- kills and restarts

@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    """A run of two parquet files that nothing disturbed: its flags but for data_dir, the files that it read,
    those that it wrote, and how often it changed what is on disk."""
    folder = tmp_path_factory.mktemp('corpus')
    parts = [parquet(folder / f'{name}.parquet', texts(300, seed)) for seed, name in ((1, 'a'), (2, 'b'))]
    words = ['mine', f'--data_files={folder}/*.parquet', BYTES, '--num_workers=2', '--val_fraction=0.2',
             '--shard_tokens=60_000']
    steps = killed_here(0, *words, f'--data_dir={folder}')
    files = everything(folder / 'mine-byte')
    assert sum(name.startswith('train') for name in files) > 3
    assert sum(name.startswith('val') for name in files) > 1
    return types.SimpleNamespace(words=words, parts=parts, files=files, steps=steps)


def is_half(folder):
    """Whether the next run would take it for half prepared, so that no training begins on it."""
    return 'progress' in meta(folder)


def test_stopped_after_any_step_it_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    """Of examples, which have masks; the first three shards are full."""
    monkeypatch.setattr(os, 'fsync', lambda number: None)   # a step like any other, but no disk to wait for
    rows = [{'prompt': text, 'completion': text[:9]} for text in texts(40)]
    words = ['mine', f'--data_files={written(tmp_path / "a.jsonl", rows)}', BYTES, '--shard_tokens=11_000']
    steps = killed_here(0, *words, f'--data_dir={tmp_path}/whole')
    whole = everything(tmp_path / 'whole' / 'mine-byte')
    assert len(whole) > 3
    for step in range(1, steps + 1, 5):     # of the four that write a file, another each time
        folder = tmp_path / str(step)
        assert killed_here(step, *words, f'--data_dir={folder}') == step
        there = (folder / 'mine-byte' / 'meta.json').exists()
        assert not there or is_half(folder / 'mine-byte') or everything(folder / 'mine-byte') == whole
        prepare_here(*words, f'--data_dir={folder}')
        assert everything(folder / 'mine-byte') == whole, step


def test_overwrite_removes_no_file_that_it_did_not_write(tmp_path):
    words = of(jsonl(tmp_path / 'docs.jsonl', texts(30)), tmp_path)
    prepare_here(*words)
    folder = tmp_path / 'mine-byte'
    (folder / 'notes.tmp').write_text('precious')
    (folder / 'train_000007.bin').write_text('of an earlier one')
    prepare_here(*words, '--overwrite')
    assert (folder / 'notes.tmp').exists() and not (folder / 'train_000007.bin').exists()


@pytest.mark.parametrize('content', ['of the user', '{"settings": {}, "shards": 7}'])
def test_a_meta_json_of_others_is_kept_until_overwrite(tmp_path, content):
    words, folder = of(jsonl(tmp_path / 'docs.jsonl', texts(30)), tmp_path), tmp_path / 'mine-byte'
    folder.mkdir()
    (folder / 'meta.json').write_text(content)
    code, message = refused_here(*words)
    assert (code, 'holds other shards' in message) == (2, True)
    assert (folder / 'meta.json').read_text() == content
    prepare_here(*words, '--overwrite')
    assert meta(folder)['dataset'] == 'mine'


def test_other_settings_are_refused_until_overwrite(tmp_path, undisturbed, monkeypatch):
    """So is an edit of a file that leaves its length; another spelling of its path is the same file."""
    words, folder = [*undisturbed.words, f'--data_dir={tmp_path}'], tmp_path / 'mine-byte'
    killed_here(undisturbed.steps // 2, *words, '--val_fraction=0.5')
    code, message = refused_here(*words)
    assert (code, 'holds other shards (of other val_fraction): ' in message) == (2, True)
    prepare_here(*words, '--overwrite')
    assert everything(folder) == undisturbed.files
    other = [*words, '--max_tokens=300_000']
    code, message = refused_here(*other)
    assert (code, 'of other max_tokens' in message) == (2, True)
    assert 'already prepared' in prepare_here(*words)
    assert everything(folder) == undisturbed.files
    assert 'all shards are as meta.json says' in prepare_here(*words, '--verify')
    (folder / 'meta.json').rename(tmp_path / 'meta.json')
    assert refused_here(*words, '--verify')[0] == 1
    (tmp_path / 'meta.json').rename(folder / 'meta.json')
    assert killed_here(12, *other, '--overwrite') == 12
    assert is_half(folder) and not meta(folder)['shards']   # it would list shards that are gone
    assert 'going on' in prepare_here(*other, '--overwrite')
    assert 300_000 <= sum(counts['tokens'] for counts in meta(folder)['splits'].values()) < 305_000
    path = jsonl(tmp_path / 'docs.jsonl', texts(30))
    prepare_here(*of(path, tmp_path / 'edited'))
    monkeypatch.chdir(tmp_path)
    assert 'already prepared' in prepare_here(*of('./docs.jsonl', tmp_path / 'edited'))
    path.write_text(path.read_text().replace('tensor', 'TENSOR', 1))
    assert 'holds other shards (of other files): ' in refused_here(*of(path, tmp_path / 'edited'))[1]


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_bytes(tmp_path, undisturbed):
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGKILL:
        folder = tmp_path / str(number)
        code, said = stopped(undisturbed.words, folder, number)
        half = is_half(folder / 'mine-byte')      # else it had ended already
        if half and number != signal.SIGKILL:
            assert (code, said.splitlines()[-1]) == (130, 'error: interrupted')
            assert 'Traceback' not in said
        assert ('going on' in prepare_here(*undisturbed.words, f'--data_dir={folder}')) == half
        assert everything(folder / 'mine-byte') == undisturbed.files


def test_columns_are_those_of_any_of_the_first_rows(tmp_path):
    rows = [{'id': 0}, *({'id': i, 'text': text} for i, text in enumerate(texts(40)))]
    said = prepare_here(*of(written(tmp_path / 'a.jsonl', rows), tmp_path))
    assert '1 rows cannot be used and are left out (the first: ' in said
    assert "row 1: no 'text', but id" in said


def test_a_second_command_on_a_folder_is_refused_while_the_first_is_at_work(tmp_path, monkeypatch):
    """One that a training script runs waits."""
    words = of(jsonl(tmp_path / 'docs.jsonl', texts(30)), tmp_path)
    with files.Lock(f'{tmp_path}/.mine-byte.lock', ''):
        assert 'another process is making' in refused_here(*words)[1]
        assert not (tmp_path / 'mine-byte').exists()
    held = threading.Event()

    def hold():
        with files.Lock(f'{tmp_path}/.mine-byte.lock', ''):
            held.set()
            time.sleep(1.5)
    threading.Thread(target=hold).start()
    held.wait()
    monkeypatch.setenv('RANK', '8')     # of a second node with the same folder
    assert 'waiting: another process is making' in prepare_here(*words)
    assert (tmp_path / 'mine-byte' / 'meta.json').exists()


# ------------------------------------------------------------------------------- the hub

@pytest.fixture
def hub(tmp_path):
    """The environment of a process for which Hub is the hub."""
    Hub.files, Hub.sha = {}, 'a' * 40
    server = serve(Hub)
    url, home = f'http://127.0.0.1:{server.server_port}', str(tmp_path / 'hf')
    yield {'HF_ENDPOINT': url, 'HF_HOME': home, 'HF_HUB_OFFLINE': '0', 'no_proxy': '127.0.0.1'}
    server.shutdown()


class Stream:
    """A stream of 200 rows that forgets its position, as that of datasets 5.0.0: its state is empty once
    another was loaded."""
    column_names, start, done, is_loaded = None, 0, 0, False

    def state_dict(self):
        return {'done': 0 if self.is_loaded else self.done}

    def load_state_dict(self, state):
        self.is_loaded = True

    def __iter__(self):
        first = self.start + 1
        for self.done in range(first, 201):
            yield {'text': str(self.done)}


class Resuming(Stream):
    def load_state_dict(self, state):
        self.start = self.done = state['done']


def test_a_stream_goes_on_at_its_position_or_is_refused(monkeypatch):
    """The first start loads no state."""
    library = types.SimpleNamespace(load_dataset=lambda *_, **__: Stream())
    monkeypatch.setitem(sys.modules, 'datasets', library)
    facts = {'source': 'a/b', 'revision': 'c', 'settings': {'subset': None}, 'progress': {'position': None}}
    rows = list(prepare_data.hub_rows(facts, None))
    assert [position[1:] for _, position in rows[62:65]] == [
        [63, {'done': 0}], [64, {'done': 64}], [65, {'done': 64}]]
    facts['progress']['position'] = rows[64][1]
    with pytest.raises(DataError, match='forgets its position'):
        list(prepare_data.hub_rows(facts, None))
    library.load_dataset = lambda *_, **__: Resuming()
    found = [(row['text'], number) for row, (_, number, _) in prepare_data.hub_rows(facts, None)]
    assert found == [(str(number), number) for number in range(66, 201)]


def test_a_dataset_of_the_hub_is_prepared_and_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    api = types.SimpleNamespace(dataset_info=lambda *_, **__: types.SimpleNamespace(sha='c'))
    monkeypatch.setitem(sys.modules, 'huggingface_hub', types.SimpleNamespace(HfApi=lambda: api))
    monkeypatch.setitem(sys.modules, 'datasets', types.SimpleNamespace(
        load_dataset=lambda *_, **__: Resuming()))
    words = ['a/b', BYTES, '--shard_tokens=200', '--num_workers=1']
    steps = killed_here(0, *words, f'--data_dir={tmp_path}/whole')
    killed_here(steps // 2, *words, f'--data_dir={tmp_path}/half')
    assert 'going on from its last finished shard' in prepare_here(*words, f'--data_dir={tmp_path}/half')
    folders = [tmp_path / name / 'a--b-byte' for name in ('whole', 'half')]
    check(folders[1], [str(number) for number in range(1, 201)])
    assert {**everything(folders[0]), 'meta.json': 0} == {**everything(folders[1]), 'meta.json': 0}


@pytest.mark.slow
def test_the_hub_streams_and_restarts(tmp_path, undisturbed, hub):
    first, second = (path.read_bytes() for path in undisturbed.parts)
    readme = b'---\nconfigs:\n- {config_name: default, data_files: data/*}\n' \
             b'- {config_name: sample-10BT, data_files: sample/10BT/*}\n---'
    Hub.files = {
        'README.md': readme, 'data/0.parquet': first,
        'sample/10BT/0.parquet': first, 'sample/10BT/1.parquet': second}
    words = ['fineweb-edu', *undisturbed.words[2:]]
    stopped(words, tmp_path, signal.SIGKILL, **hub)
    Hub.sha = 'b' * 40  # the dataset moves on; a restart stays with what it began with
    prepare(*words, f'--data_dir={tmp_path}', env=hub)
    files = everything(tmp_path / 'fineweb_edu-byte')
    assert {**files, 'meta.json': 0} == {**undisturbed.files, 'meta.json': 0}
    facts = json.loads(files['meta.json'])
    assert (facts['source'], facts['revision']) == ('HuggingFaceFW/fineweb-edu', 'a' * 40)
    assert facts['settings']['subset'] == 'sample-10BT'
    prepare('fineweb-edu', '--subset=default', BYTES, f'--data_dir={tmp_path}/all', env=hub)
    splits = meta(tmp_path / 'all' / 'fineweb_edu-byte')['splits']
    assert sum(counts['documents'] for counts in splits.values()) == 300     # those of data/


@pytest.mark.slow
def test_any_dataset_of_the_hub_by_its_name(tmp_path, hub):
    documents, words = texts(60), ['--subset=default', f'--data_dir={tmp_path}']
    Hub.files = {'train.jsonl': jsonl(tmp_path / 'a', documents, key='body').read_bytes()}
    prepare('someone/some-texts', '--text_column=body', BYTES, *words, env=hub)
    check(tmp_path / 'someone--some-texts-byte', documents)


# ------------------------------------------------------------------------------- workers and gigatoken

def ids_by(encoder, texts):
    """Return the ids of the texts, in order."""
    found = prepare_data.encoded((({'text': text}, ['', i]) for i, text in enumerate(texts)), encoder, 1)
    return [document.ids.tolist() for document in found]


@pytest.mark.slow
def test_a_worker_that_is_killed_is_one_line():
    def documents():
        yield from [({'text': 'x'}, ['', 0])] * 100
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGKILL)
        yield from [({'text': 'x'}, ['', 0])] * 1000
    with pytest.raises(MachineError, match='a worker was killed.*the same command goes on'):
        list(prepare_data.encoded(documents(), prepare_data.Texts(ByteTokenizer(), 'text'), 2))


def test_a_difference_between_gigatoken_and_tiktoken_ends_the_run(small_gpt2, monkeypatch, capfd):
    """A stand-in for the package is wrong on no document, on two that are compared, on one that is not."""
    monkeypatch.setattr(prepare_data, 'CHECKED', 200)
    texts, gpt2, wrong = [f'document {i} of naïve 日本語 🙂' for i in range(400)], get_tokenizer('gpt2'), []

    class Tokenizer:
        @staticmethod
        def from_tiktoken(path, pretokenizer, special_tokens):
            assert (pretokenizer, special_tokens) == ('gpt2', {})
            return Tokenizer()

        def encode(self, text):
            text = text.decode()
            return gpt2.encode(text).astype(np.uint32)[:-1 if text in wrong else None]
    monkeypatch.setitem(sys.modules, 'gigatoken', types.SimpleNamespace(Tokenizer=Tokenizer))
    right = [[512, *gpt2.encode(text).tolist()] for text in texts]
    assert ids_by(prepare_data.Texts(gpt2, 'text'), texts) == right
    for compared in (5, 199):
        wrong[:] = [texts[compared]]
        with pytest.raises(MachineError, match='gigatoken and tiktoken differ'):
            ids_by(prepare_data.Texts(gpt2, 'text'), texts)
    wrong[:] = [texts[150]]
    found = ids_by(prepare_data.Texts(gpt2, 'text'), texts)
    assert [i for i in range(400) if found[i] != right[i]] == [150]
    capfd.readouterr()
    monkeypatch.setitem(sys.modules, 'gigatoken', None)     # not installed
    assert ids_by(prepare_data.Texts(gpt2, 'text'), texts[:1]) == right[:1]
    assert 'gigatoken' not in capfd.readouterr().out


# ------------------------------------------------------------------------------- errors in one line

MINE = f'mine {BYTES} --data_files='
WRONG = [   # command line, exit code, what the message names
    (f'fineweb_ed {BYTES}', 2, ['fineweb_ed', 'fineweb_edu', 'stdlib', '--data_files']),
    (f'{MINE}none*.parquet', 1, ['none*.parquet']),
    (f'{MINE}good.parquet --text_column=body', 2, ['body', 'text, id, url', 'good.parquet']),
    (f'{MINE}flipped.parquet --num_workers=2', 1, ['flipped.parquet']),
    (f'{MINE}broken.jsonl', 1, ['broken.jsonl, row 2: ']),
    (f'{MINE}object.json', 1, ['object.json']),
    (f'{MINE}good.jsonl,other.jsonl', 1, ["other.jsonl, row 1: no 'text', but id, body"]),
    (f'{MINE}latin.txt', 1,
     ['latin.txt, byte 9,005: not UTF-8 (invalid continuation byte): `iconv -f latin-1 -t utf-8`, or -f']),
    (f'{MINE}marks.txt', 1, ['marks.txt has a NUL, and so is not UTF-8: `iconv -f ']),
    (f'{MINE}cut.txt.gz', 1, ['cut.txt.gz cannot be read (where it is cut short', ': Truncated']),
    (f'{MINE}cut.json', 1, ['cut.json cannot be read (', 'line 18 column 9']),
    (f'{MINE}comma.json', 1, ['comma.json cannot be read (', "Expecting ',' delimiter: line 2"]),
    (f'{MINE}data.json', 2, ["data.json has no column 'text', but data: "]),
    (f'{MINE}texts.json', 1, ['a row is {"column": value, ...}']),
    (f'{MINE}short.csv', 1, ['short.csv cannot be read (', 'the row that ends in line 3 has other']),
    (f'{MINE}twice.csv', 1, ['twice.csv cannot be read (', ': its header names a column twice (text, text)']),
    (f'{MINE}twice.parquet', 1, ['twice.parquet cannot be read (', ': its header names a column twice (']),
    (f'{MINE}plain.txt.gz', 1, ['plain.txt.gz cannot be read (', 'zlib inflate failed']),
    (f'{MINE}bytes.parquet', 1, ['bytes.parquet, row 12: ', 'utf-8']),
    (f'{MINE}ahead.jsonl', 1, ['ahead.jsonl, row 3: 5 is not text']),
    (f'{MINE}none.txt', 1, ['none.txt: 0 rows']),
    (f'{MINE}asked.jsonl --template=plain', 1, ['5 rows with 1 different questions']),
    (f'{MINE}latin.txt --encoding=latin-1', 2, ['encoding is no setting: text is read as UTF-8, and `iconv']),
    (f'{MINE}pipe.jsonl', 2, ['pipe.jsonl is no file that ends']),
    (f'{MINE}odd.xml', 2, ['odd.xml', '.parquet', 'Rename other text to .txt']),
    (f'{MINE}good.parquet --subset=x', 2, ['subset']),
    (f'{MINE}good.parquet --template=chat', 2, ['--template=chat']),
    (f'{MINE}good.jsonl --template=plain', 2, ['is for prompts and completions, or messages']),
    (f'{MINE}messages.jsonl', 2, ['has no chat template']),
    (f'{MINE}messages.jsonl --template=plain', 2, ['messages have no plain template']),
    (f'openmathinstruct2 {BYTES} --split_name=train_3M', 2,
     ["no split 'train_3M', of ('train_1M', 'train_2M'"]),
    (f'shakespeare {BYTES}', 1, ['--data_files', 'tinyshakespeare']),
    ('hellaswag', 1, ['--data_files', 'rowanz/hellaswag']),
]


def test_errors_are_one_line_and_leave_nothing(tmp_path, monkeypatch, capsys):
    parquet(tmp_path / 'good.parquet', texts(200), url=['u'] * 200)
    raw = (tmp_path / 'good.parquet').read_bytes()
    start, end = len(raw) // 4, len(raw) // 3
    flipped = bytes(byte ^ 255 for byte in raw[start:end])
    (tmp_path / 'flipped.parquet').write_bytes(raw[:start] + flipped + raw[end:])
    jsonl(tmp_path / 'good.jsonl', texts(20))
    (tmp_path / 'broken.jsonl').write_text('{"text": "one"}\n{"text": \n')
    jsonl(tmp_path / 'other.jsonl', texts(20), key='body')
    (tmp_path / 'object.json').write_text('{"text": "one"}')
    (tmp_path / 'odd.xml').write_text('text\n')
    raw = b'some text' * 1000 + b'\n caf\xe9 \xfc ber \xe4\n\n' * 40
    (tmp_path / 'latin.txt').write_bytes(raw.replace(b'\n caf', b'\n\ncaf', 1))
    (tmp_path / 'marks.txt').write_bytes('text\none\n'.encode('utf-16-le'))
    os.mkfifo(tmp_path / 'pipe.jsonl')
    (tmp_path / 'data.json').write_text('{"data": [{"text": "one"}]}')
    (tmp_path / 'texts.json').write_text('["one", "two"]')
    packed = pack(tmp_path / 'whole.txt.gz', LINES.encode()).read_bytes()
    (tmp_path / 'cut.txt.gz').write_bytes(packed[:len(packed) // 2])
    (tmp_path / 'cut.json').write_text(json.dumps([{'text': 'one'}] * 6, indent=1)[:-12])
    (tmp_path / 'comma.json').write_text('[{"text": "one"}\n{"text": "two"}]')
    (tmp_path / 'short.csv').write_text('id,text\n1,one\ntwo\n')
    (tmp_path / 'twice.csv').write_text('text,text\none,two\n')
    pq.write_table(pa.table([['one'], ['two']], names=['text', 'text']), tmp_path / 'twice.parquet')
    (tmp_path / 'plain.txt.gz').write_text(LINES)
    spoilt = pa.array([b'one'] * 11 + [b'\xff'] + [b'one'] * 7).cast(pa.binary())
    pq.write_table(pa.table({'text': spoilt.view(pa.string())}), tmp_path / 'bytes.parquet')
    rows = [{'text': 'one'}, {'text': 'two'}, {'text': 5}, *[{'text': 'three'}] * 20, {'body': 'four'}]
    written(tmp_path / 'ahead.jsonl', rows)
    (tmp_path / 'none.txt').write_text('')
    written(tmp_path / 'asked.jsonl', [{'prompt': 'Why?', 'completion': f'So {i}'} for i in range(5)])
    written(tmp_path / 'messages.jsonl', forms(5)['messages'])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('https_proxy', 'http://127.0.0.1:9')  # no network
    monkeypatch.setattr(urllib.request, '_opener', None)  # or that of an earlier test knows no proxy
    # the bar, which is shown after a second: a busy machine takes that long
    monkeypatch.setattr(prepare_data, 'tqdm', functools.partial(prepare_data.tqdm, disable=True))
    wrong = []
    for words, expected, parts in WRONG:
        code, message = refused_here(*words.split())
        left = list(tmp_path.glob('data/[!.]*')) or capsys.readouterr().err
        if code != expected or left or not all(part in message for part in parts):
            wrong.append((words, code, message, left))
    assert wrong == []


@pytest.mark.slow
def test_without_a_network_it_is_one_line(tmp_path):
    nowhere = 'http://127.0.0.1:9'
    env = {'HF_ENDPOINT': nowhere, 'HF_HOME': str(tmp_path), 'https_proxy': nowhere, 'HF_HUB_OFFLINE': '0'}
    words = 'fineweb_edu', BYTES, '--num_workers=2', f'--data_dir={tmp_path}/data'
    error = prepare(*words, rc=1, env=env).stderr
    assert '--data_files' in error
    assert len(error.splitlines()) == 1, error
    assert not list(tmp_path.glob('data/[!.]*'))
