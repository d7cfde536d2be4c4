"""prepare_data.py as users run it, on small local files; documents are read back by the shard format's definition."""
import json
import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import ROOT, SHARED, run

SAMPLE = SHARED / 'data' / 'fineweb_edu_sample'
needs_sample = pytest.mark.skipif(not SAMPLE.exists(), reason='the FineWeb-Edu sample of shared/data is not here')
needs_bpe = pytest.mark.skipif(not os.path.isdir(os.environ['TIKTOKEN_CACHE_DIR']), reason="GPT-2's BPE files are not here: set TIKTOKEN_CACHE_DIR")
BYTES = '--tokenizer=byte'


def texts(count, seed=0, words=300):
    """Documents that differ, from a few bytes to a few KB, with text beyond ASCII."""
    rng = random.Random(seed)
    words_of = ['tensor', 'scale', 'größe', '量化', 'amax\n\n', 'e4m3', '\U0001f642']
    return [f'{i} ' + ' '.join(rng.choices(words_of, k=rng.randrange(words))) for i in range(count)]


def parquet(path, documents, row_group_size=50, compression='snappy', **columns):
    table = pa.table({'text': pa.array(documents, pa.string()), 'id': list(range(len(documents))), **columns})
    pq.write_table(table, path, row_group_size=row_group_size, compression=compression)
    return path


def jsonl(path, documents, key='text'):
    path.write_text(''.join(json.dumps({'id': i, key: document}) + '\n' for i, document in enumerate(documents)))
    return path


def prepare(*words, **kwargs):
    return run('prepare_data.py', *words, **kwargs)


def meta(folder):
    return json.loads((folder / 'meta.json').read_text())


def tokens(folder, split):
    """All tokens of a split's shards, one after another."""
    shards = [path.read_bytes() for path in sorted(folder.glob(f'{split}_*.bin'))]
    for raw in shards:
        magic, version, count = np.frombuffer(raw[:12], '<i4')
        assert (magic, version, len(raw)) == (20240520, 1, 1024 + 2 * count)
    return np.concatenate([np.frombuffer(raw[1024:], '<u2') for raw in shards])


def documents(folder, split, eot=256, decode=lambda ids: bytes(ids.tolist()).decode()):
    ids = tokens(folder, split)
    assert ids[0] == eot
    return [decode(piece) for piece in np.split(ids, np.flatnonzero(ids == eot))[1:] for piece in [piece[1:]]]


def everything(folder):
    """name -> bytes of all files of a prepared folder, and no leftovers among them."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert 'meta.json' in files and all(re.fullmatch(r'(train|val)_\d{6}\.bin|meta\.json', name) for name in files), sorted(files)
    return files


def processes(mark, patience=3):
    """/proc folders of the processes that have `mark` in their environment, once they have had a moment to end."""
    while True:
        alive = []
        for path in pathlib.Path('/proc').glob('[0-9]*'):
            try:
                if mark.encode() in (path / 'environ').read_bytes():
                    alive.append(path)
            except OSError:  # not ours, or gone
                pass
        if not alive or patience <= 0:
            return alive
        time.sleep(0.1)
        patience -= 0.1


def check(folder, corpus, eot=256, decode=lambda ids: bytes(ids.tolist()).decode()):
    """The folder holds exactly the corpus, in its order, and meta.json counts it right."""
    train, val = (documents(folder, split, eot, decode) for split in ('train', 'val'))
    assert train and val and not set(train) & set(val)
    corpus = [document for document in corpus if document]
    assert train == [d for d in corpus if d not in set(val)] and val == [d for d in corpus if d in set(val)]
    for split, docs in (('train', train), ('val', val)):
        assert meta(folder)['splits'][split] == {
            'tokens': len(tokens(folder, split)), 'documents': len(docs), 'bytes': sum(len(d.encode()) for d in docs)}
    return train, val


# ------------------------------------------------------------------------------------------------ what is written

@pytest.mark.parametrize('workers', [1, 2])
def test_documents_come_back_in_order_with_eot_before_each(tmp_path, workers):
    corpus = texts(600)
    corpus[3], corpus[100], corpus[599] = '', None, 'x' * 1_500_000  # empty, null, and longer than a chunk
    parquet(tmp_path / 'a.parquet', corpus[:250])
    parquet(tmp_path / 'b.parquet', corpus[250:])
    done = prepare('mine', f'--data_files={tmp_path}/*.parquet', BYTES, f'--data_dir={tmp_path}', f'--num_workers={workers}',
                   '--shard_tokens=100_000', '--val_fraction=0.1')
    folder = tmp_path / 'mine-byte'
    train, val = check(folder, corpus)
    assert 30 < len(val) < 100  # a tenth of 598
    facts = meta(folder)
    assert (facts['tokenizer'], facts['vocab_size'], facts['eot'], facts['documents']) == ('byte', 257, 256, 598)
    for shard in facts['shards']:
        raw = (folder / shard['file']).read_bytes()[1024:]
        assert shard['tokens'] == len(raw) // 2 and shard['crc32'] == zlib.crc32(raw)
    for name in sorted(shard['file'] for shard in facts['shards'] if shard['file'].startswith('train'))[:-1]:
        ids = np.frombuffer((folder / name).read_bytes()[1024:], '<u2')
        last = len(ids) - np.flatnonzero(ids == 256)[-1]
        assert len(ids) - last < 100_000 <= len(ids) and ids[0] == 256  # ends with the document that crosses 100,000
    for part in (f'{facts["splits"]["train"]["tokens"]:,} tokens', str(folder), 'tokens/s', 'next: python train_fp8.py --dataset=mine'):
        assert part in done.stdout


@needs_bpe
def test_gpt2_ids_are_tiktokens(tmp_path):
    import tiktoken
    corpus = texts(60) + ['<|endoftext|> is text', '\ud800 half a surrogate pair', ' ' * 1_000_000 + 'x']
    jsonl(tmp_path / 'a.jsonl', corpus)
    prepare('mine', f'--data_files={tmp_path}/a.jsonl', f'--data_dir={tmp_path}', '--num_workers=2', '--val_fraction=0.2')
    folder, encoding = tmp_path / 'mine-gpt2', tiktoken.get_encoding('gpt2')
    corpus[61] = '? half a surrogate pair'
    check(folder, corpus, 50256, encoding.decode)
    reference = [[50256, *encoding.encode_ordinary(document)] for document in corpus[:62]]
    ours = [[50256, *piece[1:].tolist()] for split in ('train', 'val') for ids in [tokens(folder, split)]
            for piece in np.split(ids, np.flatnonzero(ids == 50256))[1:]]
    assert sorted(reference) == sorted(ids for ids in ours if len(ids) < 900_000)


def test_a_text_that_occurs_twice_is_in_one_split(tmp_path):
    corpus = texts(150) + texts(150) + texts(80)
    jsonl(tmp_path / 'a.jsonl', corpus, key='body')
    prepare('mine', f'--data_files={tmp_path}/a.jsonl', '--text_column=body', BYTES, f'--data_dir={tmp_path}', '--val_fraction=0.3')
    train, val = check(tmp_path / 'mine-byte', corpus)
    assert len(val) > 60


@pytest.mark.parametrize('count, fraction', [(30, 1e-9), (2, 0.999), (2, 1e-9)])
def test_both_splits_have_a_document(tmp_path, count, fraction):
    corpus = texts(count, words=20)
    parquet(tmp_path / 'a.parquet', corpus)
    prepare('mine', f'--data_files={tmp_path}/a.parquet', BYTES, f'--data_dir={tmp_path}', f'--val_fraction={fraction}')
    train, val = check(tmp_path / 'mine-byte', corpus)
    assert len(val) == 1
    alone = parquet(tmp_path / 'alone.parquet', [corpus[0], '', corpus[0]])
    error = prepare('alone', f'--data_files={alone}', BYTES, f'--data_dir={tmp_path}', f'--val_fraction={fraction}', rc=1).stderr
    assert 'two documents that differ' in error and not (tmp_path / 'alone-byte').exists()


def test_txt_is_cut_at_the_first_blank_line_past_8_kib(tmp_path):
    rng = random.Random(0)
    text = ''.join(rng.choice(['some words\n', 'größe\r\n', '\n', ' \n', 'é' * 40 + '\n']) for _ in range(20_000)) + 'end'
    (tmp_path / 'a.txt').write_bytes(text.encode())
    prepare('mine', f'--data_files={tmp_path}/a.txt', BYTES, f'--data_dir={tmp_path}', '--val_fraction=0.1')
    pieces, lines = [], []
    for line in re.findall(r'[^\n]*\n|[^\n]+$', text):
        lines.append(line)
        if not line.strip() and len(''.join(lines[:-1]).encode()) >= 8192:
            pieces, lines = pieces + [''.join(lines)], []
    pieces.append(''.join(lines))
    assert len(pieces) > 20 and ''.join(pieces) == text
    check(tmp_path / 'mine-byte', pieces)


def test_known_names_keep_their_settings_with_local_files(tmp_path):
    jsonl(tmp_path / 'a.jsonl', texts(50))
    for name, folder, fraction in (('fineweb-edu', 'fineweb_edu', 0.0005), ('tinyshakespeare', 'shakespeare', 0.1)):
        prepare(name, f'--data_files={tmp_path}/a.jsonl', BYTES, f'--data_dir={tmp_path}')
        facts = meta(tmp_path / f'{folder}-byte')
        assert (facts['dataset'], facts['val_fraction'], facts['revision'], facts['subset']) == (folder, fraction, None, None)


def test_max_tokens_stops_at_the_first_document_end_past_it(tmp_path):
    corpus = texts(300)
    parquet(tmp_path / 'a.parquet', corpus)
    prepare('mine', f'--data_files={tmp_path}/a.parquet', BYTES, f'--data_dir={tmp_path}', '--max_tokens=1e5', '--val_fraction=0.1', '--num_workers=2')
    sizes = np.cumsum([1 + len(document.encode()) for document in corpus])
    check(tmp_path / 'mine-byte', corpus[:int(np.searchsorted(sizes, 100_000)) + 1])


def test_the_standard_library_comes_back(tmp_path):
    started = time.time()
    done = prepare('stdlib', f'--data_dir={tmp_path}', env={'TIKTOKEN_CACHE_DIR': str(tmp_path / 'none')})
    assert time.time() - started < 20 and 'next: python train_fp8.py' in done.stdout
    library = pathlib.Path(sysconfig.get_paths()['stdlib'])
    left_out = {'site-packages', 'dist-packages', 'test', 'tests', 'idlelib', 'lib2to3', 'turtledemo', '__pycache__'}
    paths = sorted(str(path) for path in library.rglob('*.py') if not left_out & set(path.relative_to(library).parts[:-1]))
    check(tmp_path / 'stdlib-byte', [open(path, 'rb').read().decode('utf-8', 'replace') for path in paths])
    assert 8e6 < sum(counts['bytes'] for counts in meta(tmp_path / 'stdlib-byte')['splits'].values()) < 15e6


@needs_sample
@needs_bpe
def test_memory_and_count_on_the_fineweb_edu_sample(tmp_path):
    peak, finished = 0, threading.Event()

    def watch():
        nonlocal peak
        while not finished.wait(0.05):
            resident = []
            for path in processes(f'PREPARE_MARK={tmp_path}', patience=0):
                try:
                    resident += map(int, re.findall(r'VmRSS:\s+(\d+)', (path / 'status').read_text()))
                except OSError:
                    pass
            peak = max(peak, sum(resident))
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        prepare('fineweb_edu', f'--data_files={SAMPLE}/*.parquet', f'--data_dir={tmp_path}', '--num_workers=2', env={'PREPARE_MARK': str(tmp_path)})
    finally:
        finished.set()
        thread.join()
    splits = meta(tmp_path / 'fineweb_edu-gpt2')['splits']
    assert splits['train']['tokens'] + splits['val']['tokens'] == 27_687_456 + 12_704
    assert 50e3 < peak < 1.5e6  # KB, all processes together


def test_memory_does_not_follow_the_row_group(tmp_path):
    text = random.Random(0).randbytes(5_000).hex()
    parquet(tmp_path / 'a.parquet', [f'{i}{text}' for i in range(20_000)], row_group_size=10**9, compression='none')  # 200 MB in one row group
    code = ("import runpy, sys; sys.argv = sys.argv[1:]; sys.path.insert(0, '.'); runpy.run_path(sys.argv[0], run_name='__main__');"
            "print(open('/proc/self/status').read())")
    done = run('-c', code, 'prepare_data.py', 'mine', f'--data_files={tmp_path}/a.parquet', BYTES, f'--data_dir={tmp_path}', '--max_tokens=2e7', '--val_fraction=0.1')
    assert int(re.search(r'VmHWM:\s+(\d+)', done.stdout)[1]) < 250_000  # KB, the interpreter and its libraries included


# ------------------------------------------------------------------------------------------------ restarts

# prepare_data.py in a process that kills itself with -9 right after the n-th step that changes what is on disk, and says
# how many there were and whether torch came in.
DRIVER = """
import os, runpy, signal, sys
left = int(sys.argv[1])
def counted(function):
    def call(*args, **kwargs):
        global left
        result = function(*args, **kwargs)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return call
for name in ('replace', 'fsync', 'remove', 'makedirs'):
    setattr(os, name, counted(getattr(os, name)))
sys.argv = sys.argv[2:]
sys.path.insert(0, '.')
runpy.run_path(sys.argv[0], run_name='__main__')
print('steps', -left, 'torch' in sys.modules)
"""


def drive(words, folder, kill_at=0, **env):
    """Runs the driver with its output in `folder`: None where it was killed, else [steps, torch]. No process of it is left."""
    mark = f'PREPARE_MARK={folder}'
    folder.mkdir(exist_ok=True)
    with open(folder / 'output', 'w+') as output:  # a file: a pipe would wait for orphans
        code = subprocess.run([sys.executable, '-c', DRIVER, str(kill_at), 'prepare_data.py', *words, f'--data_dir={folder}'], cwd=ROOT,
                              stdout=output, stderr=output, env={**os.environ, 'PREPARE_MARK': str(folder), **env}).returncode
        output.seek(0)
        said = output.read()
    orphans = processes(mark)
    for path in orphans:
        os.kill(int(path.name), signal.SIGKILL)
    assert not orphans and code in (0, -9), said
    return said.split()[-2:] if code == 0 else None


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    """Flags for two parquet files with many short shards, the files of an undisturbed run, and its number of steps."""
    folder = tmp_path_factory.mktemp('corpus')
    parquet(folder / 'a.parquet', texts(300, 1))
    parquet(folder / 'b.parquet', texts(300, 2))
    words = ['mine', f'--data_files={folder}/*.parquet', BYTES, '--num_workers=2', '--shard_tokens=60_000', '--val_fraction=0.2']
    steps, torch = drive(words, folder)
    files = everything(folder / 'mine-byte')
    assert sum(name.startswith('train') for name in files) > 4 and sum(name.startswith('val') for name in files) > 1
    return words, files, int(steps), torch


def test_torch_is_not_imported(corpus):
    assert corpus[3] == 'False'


@pytest.mark.parametrize('moments', ['first', 'middle', 'last'])
def test_killed_and_restarted_it_ends_with_the_same_bytes(tmp_path, corpus, moments):
    words, undisturbed, steps, _ = corpus
    middle = steps // 2
    for step in {'first': (1, 3, 5), 'middle': range(middle, middle + 5), 'last': range(steps - 5, steps)}[moments]:
        folder = tmp_path / str(step)
        assert drive(words, folder, kill_at=step) is None
        with_meta = (folder / 'mine-byte' / 'meta.json').exists()
        assert not with_meta or (folder / 'mine-byte' / 'progress.json').exists()  # data.py takes it for half prepared
        drive(words, folder)
        assert everything(folder / 'mine-byte') == undisturbed, step


def test_killed_again_and_again_it_still_ends_with_the_same_bytes(tmp_path, corpus):
    words, undisturbed, _, _ = corpus
    runs = 0
    while drive(words, tmp_path, kill_at=13 + runs % 3) is None:
        runs += 1
        assert runs < 40
    assert runs > 3 and everything(tmp_path / 'mine-byte') == undisturbed
    assert 'already prepared' in prepare(*words, f'--data_dir={tmp_path}').stdout


def test_other_settings_start_afresh_or_are_refused(tmp_path, corpus):
    words, undisturbed, steps, _ = corpus
    assert drive([*words[:-1], '--val_fraction=0.5'], tmp_path, kill_at=steps // 2) is None
    done = prepare(*words, f'--data_dir={tmp_path}')
    assert 'val_fraction 0.5 -> 0.2' in done.stdout and 'starting afresh' in done.stdout
    assert everything(tmp_path / 'mine-byte') == undisturbed
    other = [*words, '--max_tokens=300_000']
    assert 'max_tokens 0 -> 300000' in prepare(*other, f'--data_dir={tmp_path}', rc=2).stderr
    assert everything(tmp_path / 'mine-byte') == undisturbed
    assert drive([*other, '--overwrite'], tmp_path, kill_at=12) is None
    assert not (tmp_path / 'mine-byte' / 'meta.json').exists()  # it would tell of shards that are gone
    assert 'going on' in prepare(*other, f'--data_dir={tmp_path}').stdout
    assert 300_000 <= sum(counts['tokens'] for counts in meta(tmp_path / 'mine-byte')['splits'].values()) < 305_000


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_one_line_and_it_goes_on(tmp_path, corpus, number):
    words, undisturbed, _, _ = corpus
    started = subprocess.Popen([sys.executable, 'prepare_data.py', *words, f'--data_dir={tmp_path}'], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ, 'PREPARE_MARK': str(tmp_path)})
    while started.poll() is None and len(list(tmp_path.glob('mine-byte/*.bin'))) < 2:
        time.sleep(0.005)
    os.killpg(started.pid, number)  # to the workers too, as a terminal and a job scheduler do
    error = started.communicate()[1]
    assert not processes(f'PREPARE_MARK={tmp_path}')
    if started.returncode:  # else it had ended already
        assert started.returncode == 1 and error.splitlines()[-1].startswith('error: stopped') and 'goes on' in error and 'Traceback' not in error
    assert ('going on' in prepare(*words, f'--data_dir={tmp_path}').stdout) == bool(started.returncode)
    assert everything(tmp_path / 'mine-byte') == undisturbed


# ------------------------------------------------------------------------------------------------ errors in one line

def wrong_files(folder):
    """Makes the files that the table below needs."""
    parquet(folder / 'good.parquet', texts(200), url=['u'] * 200)
    raw = (folder / 'good.parquet').read_bytes()
    (folder / 'short.parquet').write_bytes(raw[:len(raw) // 2])
    (folder / 'flipped.parquet').write_bytes(raw[:len(raw) // 4] + bytes(b ^ 255 for b in raw[len(raw) // 4:len(raw) // 3]) + raw[len(raw) // 3:])
    jsonl(folder / 'good.jsonl', texts(20))
    (folder / 'broken.jsonl').write_text('{"text": "one"}\n{"text": \n')
    (folder / 'odd.csv').write_text('text\n')
    (folder / 'empty.jsonl').write_text('\n')


@pytest.mark.parametrize('words, rc, parts', [
    (['fineweb_ed'], 2, ['fineweb_ed', 'fineweb_edu', 'openwebtext', 'shakespeare', 'stdlib', '--data_files']),
    ([], 2, ['fineweb_edu']),
    (['mine', '--data_files={}/none*.parquet'], 1, ['none*.parquet']),
    (['mine', '--data_files={}/good.parquet', '--text_column=body'], 2, ['body', 'text, id, url', 'good.parquet']),
    (['mine', '--data_files={}/good.jsonl', '--text_column=body'], 2, ['body', 'id, text']),
    (['mine', '--data_files={}/good.parquet', '--text_column=id'], 2, ["'id' holds int"]),
    (['mine', '--data_files={}/good.parquet,{}/short.parquet'], 1, ['short.parquet']),
    (['mine', '--data_files={}/flipped.parquet'], 1, ['flipped.parquet']),
    (['mine', '--data_files={}/broken.jsonl'], 1, ['broken.jsonl', 'line 2']),
    (['mine', '--data_files={}/odd.csv'], 2, ['odd.csv', '.parquet']),
    (['mine', '--data_files={}/good.parquet', '--val_fraction=1.5'], 2, ['val_fraction']),
    (['mine', '--data_files={}/good.parquet', '--subset=x'], 2, ['subset']),
    (['mine', '--data_files={}/good.parquet', '--tokenizer=gpt3'], 2, ['gpt3', 'gpt2']),
    (['fineweb_edu'], 1, ['--data_files', 'TIKTOKEN_CACHE_DIR']),
    (['shakespeare'], 1, ['--data_files', 'tinyshakespeare']),
    (['hellaswag'], 1, ['--data_files', 'rowanz/hellaswag']),
    (['hellaswag', '--data_files={}/empty.jsonl'], 1, ['empty.jsonl', 'item 1 is not']),
    (['hellaswag', '--verify'], 2, ['--verify']),
    (['hellaswag', '--max_tokens=5'], 2, ['--max_tokens']),
    (['openwebtext', '--pretokenized'], 2, ['owner/name', 'fineweb_edu and fineweb']),
    (['fineweb', '--pretokenized=kjj0'], 2, ['owner/name']),
    (['fineweb', '--pretokenized', '--tokenizer=byte'], 2, ['GPT-2']),
    (['fineweb', '--pretokenized', '--val_fraction=0.1'], 2, ['fineweb --pretokenized has no use for --val_fraction']),
])
def test_errors_are_one_line_and_leave_nothing(tmp_path, words, rc, parts):
    (tmp_path / 'files').mkdir()
    wrong_files(tmp_path / 'files')
    nowhere = 'http://127.0.0.1:9'
    words = [word.replace('{}', str(tmp_path / 'files')) for word in words]
    if 'hellaswag' not in words and not any(word.startswith('--pretokenized') for word in words):  # these would refuse the flags
        words += ['--num_workers=2', *[BYTES] * (not any(word.startswith('--tokenizer') for word in words))]
    error = prepare(*words, f'--data_dir={tmp_path}/data', rc=rc,
                    env={'HF_ENDPOINT': nowhere, 'HF_HOME': str(tmp_path), 'https_proxy': nowhere, 'HF_HUB_OFFLINE': '0'}).stderr
    assert all(part in error for part in parts) and len(error.splitlines()) == 1, error
    assert not (tmp_path / 'data').exists()


def test_no_vocabulary_says_where_it_would_be_taken_from(tmp_path):
    jsonl(tmp_path / 'a.jsonl', texts(20))
    env = {'TIKTOKEN_CACHE_DIR': str(tmp_path / 'none'), 'https_proxy': 'http://127.0.0.1:9'}
    assert 'TIKTOKEN_CACHE_DIR' in prepare('mine', f'--data_files={tmp_path}/a.jsonl', f'--data_dir={tmp_path}', rc=1, env=env).stderr


@pytest.mark.parametrize('limit', [200, 20_000, 100_000])  # bytes a file may have: not a note's, some documents', not a shard's
def test_a_full_disk_is_one_line_and_it_goes_on(tmp_path, corpus, limit):
    words, undisturbed, _, _ = corpus
    error = prepare(*words, f'--data_dir={tmp_path}', rc=1, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))).stderr
    assert 'cannot write' in error and 'goes on' in error and str(tmp_path) in error
    prepare(*words, f'--data_dir={tmp_path}')
    assert everything(tmp_path / 'mine-byte') == undisturbed
