"""What the tests of prepare_data.py share: corpora, runs, and prepared folders read by the shard format's
definition."""
import contextlib
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import prepare_data
from configurator import UserError, configure
from conftest import ROOT, run

BYTES = '--tokenizer=byte'
needs_bpe = pytest.mark.skipif(
    not os.path.isdir(os.environ['TIKTOKEN_CACHE_DIR']),
    reason="wants GPT-2's vocabulary: TIKTOKEN_CACHE_DIR=a folder with tiktoken's files")


# ------------------------------------------------------------------------------- corpora

def texts(count, seed=0, words=300):
    """Documents that differ, from a few bytes to a few KB, with text beyond ASCII."""
    rng = random.Random(seed)
    words_of = ['tensor', 'scale', 'größe', '量化', 'amax\n\n', 'e4m3', '\U0001f642']
    return [f'{i} ' + ' '.join(rng.choices(words_of, k=rng.randrange(words))) for i in range(count)]


def parquet(path, documents, row_group_size=50, compression='snappy', **columns):
    text = pa.array(documents, pa.string())
    table = pa.table({'text': text, 'id': list(range(len(documents))), **columns})
    pq.write_table(table, path, row_group_size=row_group_size, compression=compression)
    return path


def jsonl(path, documents, key='text'):
    rows = [json.dumps({'id': i, key: document}) for i, document in enumerate(documents)]
    path.write_text(''.join(row + '\n' for row in rows))
    return path


def forms(count):
    """The forms of examples that people have -> rows, which mean the same conversations."""
    asked = [(f'Add {i}', f'to {i}.', f'{2 * i}') for i in range(count)]
    return {
        'messages': [{'messages': [
            {'role': 'user', 'content': f'{ask}\n\n{more}', 'tool_calls': None},
            {'role': 'assistant', 'content': say}]} for ask, more, say in asked],
        'sharegpt': [{'id': 'x', 'conversations': [
            {'from': 'human', 'value': f'{ask}\n\n{more}'},
            {'from': 'gpt', 'value': say}]} for ask, more, say in asked],
        'pairs': [{'prompt': f'{ask}\n\n{more}', 'completion': say} for ask, more, say in asked],
        'alpaca': [
            {'instruction': ask, 'input': more, 'output': say, 'text': ask} for ask, more, say in asked],
    }


def written(path, rows):
    """Write rows in the format of a path's ending, and return the path."""
    if path.suffix == '.parquet':
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows) if path.suffix == '.json' else '\n'.join(map(json.dumps, rows)))
    return path


def llm_c(ids, magic=20240520):
    """The bytes of a shard by the format's definition."""
    return np.array([magic, 1, len(ids)] + [0] * 253, '<i4').tobytes() + np.array(ids, '<u2').tobytes()


# ------------------------------------------------------------------------------- runs

def prepare(*words, **kwargs):
    """As users run it: a process."""
    return run('prepare_data.py', *words, fork=False, **kwargs)


def prepare_here(*words):
    """What prepare_data.main prints, in this process: a tenth of the time."""
    config = configure(str(ROOT / 'prepare_data.py'), [str(word) for word in words], 'dataset')
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        prepare_data.main(config)
    return printed.getvalue()


def refused_here(*words):
    """(exit code, message) of the UserError that ends prepare_here."""
    with pytest.raises(UserError) as refusal:
        prepare_here(*words)
    assert '\n' not in str(refusal.value)
    return refusal.value.exit_code, str(refusal.value)


def rows_of_file(path, columns, piece=prepare_data.PIECE):
    """The rows of a file, an iterator."""
    return prepare_data.ROWS_OF[prepare_data.kind_of(path)](path, columns, piece)


class Killed(BaseException):
    """What no code but a test's catches."""


def killed_here(step, *words):
    """prepare_here that ends right after the step-th change of what is on disk (0: not), without a word.
    Returns how many there were."""
    changes = 0

    def counted(function):
        def call(*args, **kwargs):
            nonlocal changes
            result = function(*args, **kwargs)
            if not step or changes < step:      # else it is tidying up
                changes += 1
                if changes == step:
                    raise Killed
            return result
        return call
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        for name in ('replace', 'fsync', 'remove', 'makedirs'):
            patch.setattr(os, name, counted(getattr(os, name)))
        with contextlib.redirect_stderr(io.StringIO()):
            prepare_here(*words)
    return changes


def stopped(words, folder, number, **env):
    """Start prepare_data.py as a process and send it a signal once there are two shards. Return (exit code,
    what it printed). A worker that outlived it would hold the pipe, until subprocess.TimeoutExpired."""
    command = [sys.executable, 'prepare_data.py', *words, f'--data_dir={folder}']
    started = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, **env}, start_new_session=True)
    while started.poll() is None and len(list(folder.glob('*/*.bin'))) < 2:
        time.sleep(0.005)
    if number == signal.SIGKILL:
        started.kill()      # the parent alone
    elif started.poll() is None:
        os.killpg(started.pid, number)  # the workers too, as a terminal and a job scheduler do
    try:
        said, _ = started.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        raise
    return started.returncode, said


# ------------------------------------------------------------------------------- prepared folders

def meta(folder):
    return json.loads((folder / 'meta.json').read_text())


def tokens(folder, split):
    """All tokens of a split's shards, one after another."""
    found = []
    for path in sorted(folder.glob(f'{split}_*.bin')):
        raw = path.read_bytes()
        assert raw[:12] == np.array([20240520, 1, len(raw) // 2 - 512], '<i4').tobytes()
        found.append(np.frombuffer(raw[1024:], '<u2'))
    return np.concatenate(found)


def ids_of_documents(folder, split, eot=256):
    """The ids of each document, without its EOT."""
    ids = tokens(folder, split)
    assert ids[0] == eot
    return [piece[1:] for piece in np.split(ids, np.flatnonzero(ids == eot))[1:]]


def everything(folder):
    """name -> bytes of all files of a prepared folder, and no leftovers among them."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    odd = [name for name in files if not re.fullmatch(r'(train|val)_\d{6}(_mask)?\.bin|meta\.json', name)]
    assert 'meta.json' in files and not odd, sorted(files)
    return files


def check(folder, corpus, eot=256, decode=lambda ids: bytes(ids.tolist()).decode()):
    """The folder holds exactly the corpus, in its order, and meta.json counts it right. Returns the texts of
    train and val."""
    train, val = ([decode(ids) for ids in ids_of_documents(folder, split, eot)] for split in ('train', 'val'))
    held_out = set(val)
    assert train and val and not set(train) & held_out
    corpus = [document for document in corpus if document]
    assert train == [document for document in corpus if document not in held_out]
    assert val == [document for document in corpus if document in held_out]
    for split, documents in (('train', train), ('val', val)):
        assert meta(folder)['splits'][split] == {
            'tokens': len(tokens(folder, split)),
            'documents': len(documents),
            'bytes': sum(len(document.encode()) for document in documents)}
    return train, val
