"""Where text comes from, source by source; and the items of HellaSwag, from a file and from a web server."""
import hashlib
import http.server
import json
import os
import pathlib
import sys
import sysconfig
import types
import urllib.request

import pytest

from fp8gpt import corpus
from configurator import DataError, MissingError, SettingError, UserError
from conftest import ROOT, run
from hub import serve
from preparing import ITEMS, jsonl, llm_c, needs_items, parquet, prepare_here, refused_here, texts


# ------------------------------------------------------------------------------- files

@pytest.fixture
def three(tmp_path):
    """Files of 5, 7 and 1 documents, of three kinds."""
    documents = texts(12)
    parquet(tmp_path / 'a.parquet', documents[:5], row_group_size=2)
    jsonl(tmp_path / 'b.jsonl', documents[5:])
    (tmp_path / 'c.py').write_text('import os\n\n\n' * 10_000)
    return corpus.find_files(f'{tmp_path}/*')


def test_every_position_is_where_a_restart_goes_on(three):
    rows = list(corpus.local_rows(three, ['text'], None))
    assert len(rows) == 13
    assert rows[-1][0] == {'text': 'import os\n\n\n' * 10_000}     # a Python file is one document
    for done, (_, position) in enumerate(rows, 1):
        assert list(corpus.local_rows(three, ['text'], json.loads(json.dumps(position)))) == rows[done:]


def test_rows_without_text_and_a_byte_order_mark_are_left_out(tmp_path):
    (tmp_path / 'a.jsonl').write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": "two"}')
    assert list(corpus.read_jsonl(tmp_path / 'a.jsonl', ['text'])) == [{'text': 'one'}, {'text': 'two'}]
    rows = [({'text': text}, i) for i, text in enumerate(['one', '', None, 'two'])]
    assert list(corpus.texts_of(rows, 'text')) == [('one', 0), ('two', 3)]


def test_files_are_found_once_in_the_order_of_the_patterns(tmp_path, three):
    found = corpus.find_files(f'{three[1]}, {tmp_path}/*.parquet,{tmp_path}/*')
    assert found == [three[1], three[0], three[2]]
    with pytest.raises(MissingError, match='no file matches .*none'):
        corpus.find_files(f'{three[0]},{tmp_path}/none*')
    (tmp_path / 'odd.csv').write_text('')
    with pytest.raises(SettingError, match='odd.csv: what can be read ends in .parquet, .jsonl, .txt, .py'):
        corpus.find_files(f'{tmp_path}/*')


def test_the_standard_library_is_without_its_tests_and_what_is_installed():
    library = pathlib.Path(sysconfig.get_paths()['stdlib'])
    left_out = {'site-packages', 'dist-packages', '__pycache__'}
    left_out |= {'test', 'tests', 'idlelib', 'lib2to3', 'turtledemo'}
    assert corpus.find_stdlib() == sorted(
        str(path) for path in library.rglob('*.py')
        if not left_out & set(path.relative_to(library).parts[:-1]))


def test_sizes_are_rows_where_the_footers_tell_them(tmp_path, three):
    assert corpus.size_of(three[:1], ['text']) == {'documents': 5}
    (tmp_path / 'd.txt').write_text('x' * 99)
    assert corpus.size_of([str(tmp_path / 'd.txt')], ['text']) == {'bytes': 99}
    with pytest.raises(SettingError, match='--text_column is one of text, id'):
        corpus.size_of(three[:1], ['body'])


def test_an_error_of_a_library_is_one_line():
    with pytest.raises(DataError, match='^the file: first$'):
        with corpus.stated('the file'):
            raise RuntimeError('first\nsecond')
    with pytest.raises(DataError, match='^the file: MemoryError$'):
        with corpus.stated('the file'):
            raise MemoryError
    with pytest.raises(KeyError):
        with corpus.stated('the file', OSError):
            raise KeyError


# ------------------------------------------------------------------------------- the hub

class Stream:
    """datasets' stream of ten rows, as far as hub_rows asks for it."""
    column_names = ['text', 'id']
    done = 0

    def __iter__(self):
        while self.done < 10:
            self.done += 1
            yield {'text': f'text {self.done}', 'id': self.done}

    def state_dict(self):
        return {'done': self.done}

    def load_state_dict(self, state):
        self.done = state['done']


def test_a_stream_of_the_hub_keeps_its_revision_and_goes_on_where_it_stopped(monkeypatch):
    asked, newest = [], ['a' * 40]
    datasets = types.SimpleNamespace(
        disable_progress_bars=lambda: None, load_dataset=lambda **words: asked.append(words) or Stream(),
        logging=types.SimpleNamespace(set_verbosity=lambda level: None, CRITICAL=50))
    hub = types.SimpleNamespace(HfApi=lambda: types.SimpleNamespace(
        dataset_info=lambda repository, timeout: types.SimpleNamespace(sha=newest[0])))
    monkeypatch.setitem(sys.modules, 'datasets', datasets)
    monkeypatch.setitem(sys.modules, 'huggingface_hub', hub)
    monkeypatch.setenv('USE_TORCH', '0')
    settings = {'source': 'owner/name', 'subset': 'sample-10BT', 'text_column': 'text'}
    progress = {'revision': None, 'position': None}
    rows, amount = corpus.open_source([], settings, progress)
    rows = list(rows)
    assert amount == {'tokens': 10 * 10**9}
    assert [row['id'] for row, _ in rows] == [*range(1, 11)]
    newest[0] = 'b' * 40
    for done, (_, position) in enumerate(rows, 1):
        progress['position'] = json.loads(json.dumps(position))
        assert list(corpus.open_source([], settings, progress)[0]) == rows[done:]
    assert progress['revision'] == 'a' * 40
    assert all(words == {'path': 'owner/name', 'name': 'sample-10BT', 'split': 'train', 'revision': 'a' * 40,
                         'streaming': True, 'columns': ['text']} for words in asked)
    list(corpus.hub_rows({**settings, 'split': 'train_2M'}, ['id'], progress))
    assert asked[-1]['split'] == 'train_2M'
    with pytest.raises(SettingError, match="no column 'body': --text_column is one of text, id"):
        list(corpus.hub_rows(settings, ['body'], progress))


def test_a_whole_shard_has_its_length_and_its_sum(tmp_path):
    path = tmp_path / 'train_000000.bin'
    assert not corpus.is_whole(path, None)
    path.write_bytes(llm_c([1, 2, 3]))
    assert corpus.is_whole(path, None)
    assert corpus.is_whole(path, hashlib.sha256(path.read_bytes()).hexdigest())
    assert not corpus.is_whole(path, hashlib.sha256(b'').hexdigest())
    path.write_bytes(path.read_bytes()[:-2])
    assert not corpus.is_whole(path, None)


# ------------------------------------------------------------------------------- HellaSwag

SOME = ROOT / 'tests/data/hellaswag.jsonl'
LINES = SOME.read_text(encoding='utf-8').splitlines(keepends=True)
ITEM, OTHER = json.loads(LINES[0]), json.loads(LINES[-1])      # with ctx_a and ctx_b, and with ctx alone


def items(*rows):
    """The lines of a file of items."""
    return ''.join(json.dumps(row) + '\n' for row in rows)


@pytest.mark.slow
def test_no_torch_is_imported_for_hellaswag(tmp_path):
    code = '''
import runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, '.')
runpy.run_path(sys.argv[0], run_name='__main__')
assert 'torch' not in sys.modules
'''
    copy = ['hellaswag', f'--data_files={SOME}', f'--data_dir={tmp_path}']
    assert '20 items' in run('-c', code, 'prepare_data.py', *copy).stdout


def test_hellaswag_is_copied_and_checked(tmp_path):
    from hellaswag import read
    path = tmp_path / 'hellaswag' / 'hellaswag_val.jsonl'
    copy = ['hellaswag', f'--data_files={SOME}', f'--data_dir={tmp_path}']
    said = prepare_here(*copy)
    assert '20 items' in said
    assert f'next: python hellaswag.py --ckpt=checkpoints_fp8/latest.pt --data={path}' in said
    assert len(read(str(path))[0]) == 20
    assert sorted(os.listdir(path.parent)) == ['hellaswag_val.jsonl', 'hellaswag_val.jsonl.json']
    path.write_text(path.read_text().replace('.', ',', 1))
    with pytest.raises(UserError, match='hellaswag_val.jsonl is damaged'):
        read(str(path))
    path.write_text(items(ITEM, {}))
    code, message = refused_here(*copy)
    assert code == 1
    for part in (str(path), 'item 2', '--overwrite'):
        assert part in message
    assert 'already' not in prepare_here(*copy, '--overwrite')


class Web(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        assert self.path == '/rowanz/hellaswag/master/data/hellaswag_val.jsonl'
        self.send_response(200)
        self.end_headers()
        self.wfile.write(SOME.read_bytes())

    def log_message(self, *words):
        pass


def test_hellaswag_is_fetched_once(tmp_path, monkeypatch):
    server = serve(Web)
    monkeypatch.setenv('no_proxy', '127.0.0.1')
    monkeypatch.setattr(urllib.request, '_opener', None)  # that of an earlier test knows other proxies
    real = urllib.request.urlopen
    here = f'http://127.0.0.1:{server.server_port}'

    def urlopen(url, **more):
        return real(url.replace('https://raw.githubusercontent.com', here), **more)
    monkeypatch.setattr(urllib.request, 'urlopen', urlopen)
    path = tmp_path / 'hellaswag' / 'hellaswag_val.jsonl'
    fetch = ['hellaswag', f'--data_dir={tmp_path}']
    assert '20 items' in prepare_here(*fetch)
    assert path.read_bytes() == SOME.read_bytes()
    path.write_text(items(ITEM, OTHER))
    said = prepare_here(*fetch)
    assert 'already there' in said
    assert '2 items' in said
    assert '20 items' in prepare_here(*fetch, '--overwrite')
    assert path.read_bytes() == SOME.read_bytes()
    server.shutdown()


def test_what_is_no_hellaswag_item_is_refused(tmp_path):
    for row in ('{', '[]', {}, {**ITEM, 'endings': ['a', 'b']}, {**ITEM, 'endings': [1, 2, 3, 4]},
                {**ITEM, 'label': 4}, {**ITEM, 'label': None}, {**OTHER, 'ctx': 5}, {**ITEM, 'ctx_b': None},
                {'ctx': 'x', 'endings': list('abcd'), 'label': 0}):
        line = row if isinstance(row, str) else json.dumps(row)
        (tmp_path / 'file.jsonl').write_text(f'{LINES[0]}\n{line}\n{LINES[0]}')
        code, message = refused_here(
            'hellaswag', f'--data_files={tmp_path}/file.jsonl', f'--data_dir={tmp_path}')
        assert code == 1
        assert 'file.jsonl: item 2 is not one of HellaSwag' in message
        assert not (tmp_path / 'hellaswag').exists()


@needs_items
def test_the_real_hellaswag_has_10042_items(tmp_path):
    assert '10,042 items' in prepare_here('hellaswag', f'--data_files={ITEMS}', f'--data_dir={tmp_path}')
