"""Turn text into token shards in data/<dataset>-<tokenizer>/, which train.py and train_fp8.py read.

    python prepare_data.py stdlib                        # Python's own source: no download, seconds
    python prepare_data.py shakespeare                   # 1 MB from GitHub
    python prepare_data.py fineweb_edu --max_tokens=1e9  # from the Hugging Face hub; so is openwebtext
    python prepare_data.py HuggingFaceTB/cosmopedia --subset=stories    # any dataset of the hub
    python prepare_data.py mine --data_files='texts/*.jsonl' --text_column=body
    python prepare_data.py fineweb_edu --verify          # are all shards as they were written?
    python prepare_data.py hellaswag                     # the items for hellaswag.py
    python prepare_data.py openmathinstruct2 --tokenizer=meta-llama/Llama-3.2-1B    # to fine-tune on
    python prepare_data.py chats --data_files='chats/*.jsonl' --tokenizer=FOLDER

A row of parquet or JSON is a document; a txt file is cut at the first blank line past each 8 KiB. BOS, or EOT
where the tokenizer has none, stands before each document. Rows with messages, or prompt and completion, or
other columns of sft.COLUMNS, are examples to fine-tune on: sft.py turns them into tokens and masks. Documents
keep their order: the loader permutes them. A hash of a document's text decides its split, so a text that
occurs twice is never in both splits.

At the end of each shard, the shard of the other split that is under way is written too, and meta.json holds
the stream's position. After a kill at any moment, the same command goes on from the last finished shard and
writes the same bytes.
"""
from configurator import (
    DataError, MachineError, MissingError, SettingError, configure, first_line, printable, say, with_home)

dataset = ''           # fineweb_edu | fineweb | openwebtext | shakespeare | stdlib | hellaswag | org/name
data_files = ''        # parquet, jsonl, json, txt, py: globs with commas between, for a dataset of any name
text_column = 'text'   # column (parquet) or key (JSON) that holds a document
subset = ''            # part of a dataset on the hub, or default; empty: default (fineweb_edu: sample-10BT)
split_name = ''        # of a dataset on the hub; empty: train, of openmathinstruct2 train_1M
template = 'auto'      # auto (chat for messages, else plain) | plain | chat: what makes an example a text
tokenizer = 'auto'     # auto (gpt2, byte for stdlib) | gpt2 | byte | a folder or org/name
data_dir = 'data'      # shards go to <data_dir>/<dataset>[-<split>]-<tokenizer>
max_tokens = 0         # >= 0: stop at the first document end at or past so many, in both splits; 0: all
shard_tokens = 10**8   # >= 1, <= 2e9: tokens after which a shard ends; held in memory, 400 MB of uint16
val_fraction = 0.0     # >= 0, < 1: share for validation; 0: the dataset's or 0.005; at least 20 rows or 5%
num_workers = 0        # >= 0, <= 1024: tokenizing processes; 0: one per CPU core (for bytes one is enough)
verify = False         # read the shards again and compare them with meta.json
overwrite = False      # redo a dataset that is prepared already
show = 0               # >= 0: documents to print as they will be read, targets of examples in >>> and <<<
# imported, it leaves the command line alone
config = configure(__file__, None if __name__ == '__main__' else [], positional='dataset')

# Imported only now: --help and a mistyped setting are answered at once.
import base64
import collections
import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import math
import mmap
import multiprocessing
import os
import pathlib
import re
import shlex
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from glob import escape, glob
from os.path import basename, dirname, exists, getsize, join, splitext

import numpy as np
from tqdm import tqdm

from fp8gpt import files, sft, shards
from fp8gpt.shards import DATASETS
from fp8gpt.tokenizer import REVISIONS, TOKENIZERS, get_tokenizer, keep_files

CHUNK = 64  # documents that a worker takes at once
CHECKED = 1000  # of so many documents one is tokenized by gigatoken and by tiktoken
LONGEST = 2**19  # characters of a text for gigatoken: tiktoken cuts a million spaces
HASHED = 2**26  # bytes of local files whose content is compared, too; of more, names and sizes
LEAST = 20  # documents for validation, or a twentieth of all if that is less
LEFT_OUT = '{:,} rows are left out, which have no text (in chats: of the role assistant)'
ENDINGS = '.parquet', '.jsonl', '.json', '.txt', '.py'
NOT_STDLIB = {'site-packages', 'dist-packages', 'test', 'tests', 'idlelib', 'lib2to3', 'turtledemo'}


@contextlib.contextmanager
def stated(what):
    """Raise an error of a library as a DataError of one line that begins with `what`."""
    try:
        yield
    except Exception as error:
        raise DataError(f'{what}: {first_line(error)}') from error


# ------------------------------------------------------------------------------- where texts come from

def rows_of_file(path, columns):
    """Yield the rows of a file, dicts. columns: those to read of a parquet file; None: all. A document of a
    txt file ends at the first blank line past 8 KiB; a py file is one document."""
    ending = splitext(path)[1]
    if ending == '.parquet':
        import pyarrow.parquet as pq
        # One thread and few rows at a time take 90 MB for a row group of 1.5 GB. Pre-buffered, the default,
        # it would be held whole.
        file = pq.ParquetFile(path, buffer_size=2**16, pre_buffer=False)
        for batch in file.iter_batches(16, columns=columns, use_threads=False):
            yield from batch.to_pylist()
    elif ending in ('.json', '.jsonl'):
        with open(path, encoding='utf-8-sig') as file:  # -sig: a byte order mark is no text
            for row in json.load(file) if ending == '.json' else map(row_of_line, filter(str.strip, file)):
                if not isinstance(row, dict):
                    raise ValueError('a row is {"column": value, ...}; a list of all rows is a .json file')
                yield row
    elif getsize(path):
        pattern = rb'(?s).{8191,}?\n[^\S\n]*\n|.+' if ending == '.txt' else rb'(?s).+'
        with open(path, 'rb') as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
            for document in re.finditer(pattern, raw):
                yield {'text': document[0].decode('utf-8', 'replace')}


def row_of_line(line):
    """Return what a line of a jsonl file holds. Raises ValueError."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f'{error.msg} at character {error.pos + 1}: each line is one row, in JSON') from None


def rows_of(paths, meta, columns):
    """Yield (row, position after it) from meta's position on, of local files, or, without paths, of the hub.
    columns: those to read; None: all.

    A position in files is [path, rows of it that are done, number of the file]; None is the start. Raises
    DataError for a row that cannot be read or lacks one of the columns."""
    if not paths:
        yield from hub_rows(meta, columns)
        return
    _, done, start = meta['progress']['position'] or ('', 0, 0)
    for number, path in enumerate(paths[start:], start):
        try:
            for row in itertools.islice(rows_of_file(path, columns), done, None):
                for column in columns or ():
                    if column not in row:
                        raise ValueError(f'no {column!r}, but {", ".join(row)}')
                done += 1
                yield row, [path, done, number]
        except Exception as error:
            raise DataError(f'{path}, row {done + 1}: {first_line(error)}') from error
        done = 0


def hub_rows(meta, columns):
    """Yield what rows_of does, of a dataset on the hub. A position is [state of the stream, rows after it].
    An empty meta['revision'] is set to the newest, so that a restart reads the same revision."""
    repository, settings = meta['source'], meta['settings']
    os.environ['USE_TORCH'] = '0'  # or `datasets` imports torch, to make torch datasets of its streams
    with stated(f'could not stream {repository}; go online, or give its files as '
                "--data_files='folder/*.parquet' (and TIKTOKEN_CACHE_DIR)"):
        import datasets
        import huggingface_hub
        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        if not meta['revision']:
            meta['revision'] = huggingface_hub.HfApi().dataset_info(repository, timeout=30).sha
            say(f'# {repository} of the hub at revision {meta["revision"]}')
        stream = datasets.load_dataset(
            repository, settings['subset'], split=settings.get('split', 'train'), streaming=True,
            revision=meta['revision'])
        stream = stream.select_columns(columns) if columns else stream
        state, done = meta['progress']['position'] or (stream.state_dict(), 0)
        stream.load_state_dict(state)
    with stated('the stream from the hub broke off; the same command goes on from the last finished shard'):
        for number, row in enumerate(itertools.islice(stream, done, None)):
            if number % CHUNK == 0:     # a state takes a KB
                state = stream.state_dict()
            yield row, [state, number % CHUNK]


def find_files(patterns):
    """Return the files of these paths and globs, with commas between; what exists is a path, whatever its
    name. Raises MissingError where there are none, SettingError for a file of another kind."""
    paths = {}      # in order
    for pattern in [patterns] if exists(patterns) else patterns.split(','):
        pattern = with_home(pattern.strip())
        found = [pattern] if exists(pattern) else sorted(glob(pattern, recursive=True))
        if not found:
            raise MissingError(f'no file matches {pattern!r} (all of a folder: folder/*.parquet)')
        paths.update(dict.fromkeys(found))
    for path in paths:
        if not os.path.isfile(path):    # a stranger's FIFO would never end
            raise SettingError(f'{path} is no file')
        if not path.endswith(ENDINGS):
            raise SettingError(f'{path}: files end in one of {", ".join(ENDINGS)}')
    return list(paths)


def sha256(raw):
    """Return the SHA-256 of bytes, in hex."""
    return hashlib.sha256(raw).hexdigest()


def find_stdlib():
    """Return the paths of Python's own source, without its tests and what is installed beside it."""
    library = dirname(os.__file__)
    paths = sorted(glob('**/*.py', root_dir=library, recursive=True))
    return [join(library, path) for path in paths if not NOT_STDLIB & set(path.split(os.sep))]


def store(path, known, source=''):
    """Store at `path` a copy of the file `source`, or the file at the URL of a row of DATASETS. Raises
    DataError where it cannot be read, or does not have the row's SHA-256."""
    if source:
        with stated(f'could not read {source}'):
            body = pathlib.Path(source).read_bytes()
    else:
        with stated(f'could not download {known["url"]}; go online, or give the file as --data_files'):
            with urllib.request.urlopen(known['url'], timeout=60) as answer:
                body = answer.read()
        if sha256(body) != known['sha256']:
            raise DataError(f'{known["url"]} arrived with another SHA-256: run the same command again')
    files.write(path, lambda file: file.write(body))


# ------------------------------------------------------------------------------- texts -> ids

class Texts:
    """Make documents of texts, with GPT-2's ids by gigatoken where it is installed. Its vocabulary is made
    from tiktoken's; each process compares its first 100 documents, and every CHECKED-th, with tiktoken's."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.fast = None
        self.documents = 0
        if tokenizer.name != 'gpt2':
            return
        try:
            import gigatoken
        except ImportError:
            print('tokenized by tiktoken; `pip install gigatoken` makes it faster', flush=True)
            return
        with tempfile.NamedTemporaryFile() as file:
            file.writelines(b'%b %d\n' % (base64.b64encode(tokenizer.decode_bytes([i])), i)
                            for i in range(tokenizer.eot))
            file.flush()
            self.fast = gigatoken.Tokenizer.from_tiktoken(file.name, 'gpt2', {})
        print('tokenized by gigatoken, checked against tiktoken', flush=True)

    def document(self, text):
        """Return a text's ids (n,) with BOS or EOT before them, the bytes whose hash decides the split, what
        meta.json counts beside its tokens, and ''; None where there is no text. Raises DataError for what is
        not text, MachineError where gigatoken is wrong."""
        if text in (None, ''):
            return None
        if not isinstance(text, str):
            raise DataError(f'{text!r:.40} is not text: --text_column names another column')
        raw = text.encode('utf-8', 'replace')
        self.documents += 1
        if not self.fast or len(text) > LONGEST:
            ids = self.tokenizer.encode(text)
        else:
            ids = self.fast.encode(raw).astype(np.uint16)
            is_checked = self.documents <= 100 or self.documents % CHECKED == 0
            if is_checked and not np.array_equal(ids, self.tokenizer.encode(text)):
                raise MachineError('gigatoken and tiktoken differ: `pip uninstall gigatoken`, remove the '
                                   'half-prepared folder, and run the same command again')
        return np.append(ids.dtype.type(self.tokenizer.start), ids), raw, {'bytes': len(raw)}, ''


def start_worker():
    """Leave Ctrl-C to the parent, and end with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def encode_chunk(chunk):
    """Return [(position, ids, hash that decides the split, counts, system message)] of the (values,
    position), without ids where there is nothing in the values. Raises DataError, which names the row, for
    one that cannot be a document."""
    documents = []
    for values, position in chunk:
        try:
            ids, raw, counts, system = _encoder.document(*values) or ((), b'', {}, '')
        except DataError as error:
            where = '{}, row {}'.format(*position[:2]) if isinstance(position[0], str) else 'a row'
            raise DataError(f'{where}: {error}') from None
        key = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), 'big')
        documents.append((position, ids, key, counts, system))
    return documents


def encoded(values, encoder, count):
    """Yield the documents of encode_chunk of each (values, position), in order, by `count` processes.

    Every document carries its position, since the stream is ahead by the 2 * count chunks that the pool holds
    at most. Raises DataError for a row that cannot be a document, MachineError where a worker was killed."""
    global _encoder
    _encoder = encoder      # forked processes share the vocabulary's memory
    pool = concurrent.futures.ProcessPoolExecutor(count, multiprocessing.get_context('fork'), start_worker)
    pool.submit(os.getpid)  # forks all of them, before a library that reads rows starts threads
    queue = collections.deque()
    try:
        while True:
            while len(queue) <= 2 * count and (chunk := list(itertools.islice(values, CHUNK))):
                queue.append(pool.submit(encode_chunk, chunk))
            if not queue:
                return
            yield from queue.popleft().result()
    except concurrent.futures.BrokenExecutor:
        raise MachineError('a worker was killed (out of memory?): the same command goes on; --num_workers=1 '
                           'takes least') from None


def counted(documents, tokens, most, bar):
    """Yield documents up to the first end at or past `most` tokens. tokens: those of an earlier run."""
    for document in documents:
        if tokens >= most:
            return
        yield document
        tokens += len(document[1])
        bar.update(len(document[1]))


# ------------------------------------------------------------------------------- what is asked for

def describe(config, name, known, tokenizer):
    """Return (paths of local files, none for the hub; the content of meta.json before the first document).
    Its `settings` are all that the bytes depend on, and `progress` is there until the dataset is whole.
    Raises SettingError, MissingError for files, DataError where there is no network."""
    asked, column, patterns = (config[key] for key in ('dataset', 'text_column', 'data_files'))
    hub = '' if patterns else known.get('hub', asked if '/' in asked else '')
    if not name or not (known or hub or patterns):
        raise SettingError(f'no dataset is called {asked!r}: there are {", ".join(DATASETS)}, org/name of '
                           'the hub, and any name with --data_files=...')
    subset = config['subset'] or known.get('subset')
    if config['subset'] not in ('', 'default') and not hub:
        raise SettingError(f'{asked} has no use for --subset')
    paths, source = [], hub or known.get('url', f'standard library of Python {sys.version.split()[0]}')
    if patterns:
        paths, source = find_files(patterns), 'local files'
    elif name == 'stdlib':
        paths = find_stdlib()
    few = sum(map(getsize, paths)) < HASHED
    contents = [(basename(path), getsize(path), sha256(pathlib.Path(path).read_bytes()) if few else '')
                for path in paths]
    settings = {
        'source': source,
        'files': sha256(repr(contents).encode())[:16],
        'subset': subset if hub and subset != 'default' else None,  # None: the hub's default
        'text_column': column,
        'tokenizer': tokenizer.name,
        'max_tokens': config['max_tokens'],
        'val_fraction': config['val_fraction'] or known.get('val_fraction', 0.005),
        'shard_tokens': config['shard_tokens'],
    }
    if split := shards.split_of(config):
        settings['split'] = split
    if source == known.get('url'):
        paths = [join(config['data_dir'], f'{name}.txt')]
        if not exists(paths[0]):
            store(paths[0], known)
        if sha256(pathlib.Path(paths[0]).read_bytes()) != known['sha256']:
            raise DataError(f'{paths[0]} is not the file at {known["url"]}: move it away, or name it as '
                            '--data_files')
    meta = {
        'dataset': name,
        'tokenizer': tokenizer.name,
        'vocab_size': tokenizer.vocab_size,
        'eot': tokenizer.eot,
        'source': patterns or source,
        'revision': None,
        'tokenizer_revision': REVISIONS.get(config['tokenizer']),
        'splits': {'train': {}, 'val': {}},  # counts
        'shards': [],
        'settings': settings,
        'template': '',  # of examples
        'system': '',  # the most frequent system message
        # threshold: documents with a hash below it are for validation; empty: rows
        'progress': {'position': None, 'threshold': 0, 'empty': 0, 'began': time.time()},
    }
    names = known.get('columns', [column])
    if paths or not known or 'text_column' in config.given:
        names, _ = next(rows_of(paths, meta, None), (names, None))
    examples = next((columns for columns in sft.COLUMNS if set(columns) <= set(names)), None)
    is_text = column in names and ('text_column' in config.given or config['template'] == 'auto')
    if examples and not is_text:
        meta['template'] = template = sft.choose_template(config['template'], examples, tokenizer)
        settings |= {'columns': examples, 'template': sha256(template.encode())[:16]}
    elif column not in names:
        raise SettingError(
            f'{meta["source"]} has the columns {", ".join(names)}. Examples have {sft.FORMS}; of plain '
            f'text, --text_column names the column, now {column!r}')
    elif config['template'] != 'auto':
        raise SettingError(f'--template={config["template"]} is for prompts and completions, or messages: '
                           f'{meta["source"]} has none')
    elif examples:
        say(f'{column!r} is read as plain text; --template=chat makes examples of the messages beside it')
    return paths, meta


# ------------------------------------------------------------------------------- documents -> shards

def survey(meta, documents, least):
    """Set the threshold, documents with a hash below which are for validation, and the most frequent system
    message, which may be none. Return all documents.

    Those of the first shard, and 20 * LEAST at least, are held in memory to see what val_fraction would take;
    if that is less, the threshold takes `least` of them or a twentieth. Raises MachineError where fewer than
    two differ."""
    first = []
    tokens = 0
    for document in documents:
        first.append(document)
        tokens += len(document[1])
        if tokens >= meta['settings']['shard_tokens'] and len(first) >= 20 * LEAST:
            break
    found = [(key, system) for _, ids, key, _, system in first if len(ids)]
    keys = sorted({key for key, _ in found})
    if len(keys) < 2:
        raise MachineError(f'{meta["source"]} has fewer than two documents that differ (of chats: in their '
                           'questions): ' + LEFT_OUT.format(len(first) - len(found)))
    enough = keys[min(least, math.ceil(len(keys) / 20))]
    share = int(meta['settings']['val_fraction'] * 2**64)
    meta['progress']['threshold'] = min(max(share, enough), keys[-1])
    meta['system'] = collections.Counter(system for _, system in found).most_common(1)[0][0]
    return itertools.chain(first, documents)


def make(config, folder, paths, meta, tokenizer):
    """Write the shards, and meta.json at each shard's end; without `progress`, it is a dataset."""
    path = join(folder, 'meta.json')
    settings, progress, template = (meta[key] for key in ('settings', 'progress', 'template'))
    counts = meta['splits'] = {split: collections.Counter(each) for split, each in meta['splits'].items()}
    tokens = sum(each['tokens'] for each in counts.values())
    most = config['max_tokens'] or math.inf
    encoder = sft.Examples(tokenizer, template, progress['began']) if template else Texts(tokenizer)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    workers = config['num_workers'] or (1 if config['tokenizer'] == 'byte' else cores)
    columns = settings.get('columns', [settings['text_column']])
    values = (([row[column] for column in columns], position)
              for row, position in rows_of(paths, meta, columns))
    for old in files.temporary_names(join(escape(folder), '*')):    # of one that was killed
        os.remove(old)
    # the bar is shown only after a second, so that an early error has its line for itself
    with tqdm(initial=tokens, total=most, unit=' tokens', unit_scale=True, delay=1) as bar:
        documents = counted(encoded(values, encoder, workers), tokens, most, bar)
        if not meta['shards']:
            # a source that cannot be read leaves no folder
            documents = survey(meta, documents, 1 if config['val_fraction'] else LEAST)
            files.write_json(path, meta)  # before all else: from now on shards.read_meta refuses the folder
            for old in filter(shards.NAME.fullmatch, os.listdir(folder)):
                os.remove(join(folder, old))
        form = settings['shard_tokens'], tokenizer.vocab_size, meta['shards'], bool(template)
        writers = {split: shards.ShardWriter(folder, split, *form) for split in counts}

        def save():
            """Write the shards under way and meta.json."""
            meta['shards'] = [shard for writer in writers.values() for shard in writer.save()]
            files.write_json(path, meta)
        for position, ids, key, more, _ in documents:
            if not len(ids):
                progress['empty'] += 1
                continue
            split = 'val' if key < progress['threshold'] else 'train'
            counts[split].update(tokens=len(ids), documents=1, **more)
            if writers[split].add(ids):
                progress['position'] = position
                save()
    if tokenizer.folder:
        keep_files(tokenizer.folder, folder)
    del meta['progress']
    save()
    for split, each in counts.items():
        line = ', '.join(f'{n:,} {unit}' for unit, n in each.items())
        print(f'{split:5} {line}{" (bytes: of the targets)" * bool(template)}')
    if progress['empty']:
        print(LEFT_OUT.format(progress['empty']))


def show_documents(folder, meta, tokenizer, count):
    """Print the first documents to train on, decoded, with the targets of examples in >>> and <<<."""
    path = join(folder, 'train_000000.bin')
    tokens = shards.read_shard(path)[:10**6]
    mask = (tokens == tokenizer.start) * shards.START
    if meta['template']:
        mask = shards.read_shard(shards.mask_of(path))[:10**6]
    documents = np.split(np.arange(len(tokens)), np.flatnonzero(mask & shards.START))[1:count + 1]
    for number, places in enumerate(documents, 1):
        print(f'--- {number}')
        for is_target, part in itertools.groupby(places, lambda i: mask[i] & shards.TARGET):
            text = printable(tokenizer.decode(tokens[list(part)].tolist(), special=True))
            print(f'>>>{text}<<<' if is_target else text, end='')
        print()


def prepare(config, name, known):
    """Make the shards and meta.json of a dataset, unless they are there. Raises SettingError where other
    shards are there, whole or not."""
    asked, folder = config['tokenizer'], shards.prepared_dir(config)
    tokenizer = get_tokenizer(asked)
    paths, meta = describe(config, name, known, tokenizer)
    settings = meta['settings']
    if config['split_name'] in shards.HELD_OUT:
        say(f'{config["dataset"]} has no split {config["split_name"]!r}: the part of '
            f'{settings.get("split", "it")} that is held out replaces it, as val_*.bin')
    lock = join(config['data_dir'], f'.{basename(folder)}.lock')
    waits = 'RANK' in os.environ    # run by a training script: another node's does the same
    refusal = f'another process is making {folder}: let it end, or make it elsewhere'
    is_new = not exists(config['data_dir'])

    def tidy():
        """Remove the lock's file, and the folder that was made for it where it has stayed empty."""
        files.remove(lock)
        with contextlib.suppress(OSError):
            if is_new:
                os.rmdir(config['data_dir'])
    with files.lock(lock, refusal, waits), contextlib.ExitStack() as leaving:
        leaving.callback(tidy)
        there = files.read_json(join(folder, 'meta.json'))
        before = there.get('settings', {})
        changes = ', '.join('files changed' if key == 'files' else f'{key} {before.get(key)!r} -> {value!r}'
                            for key, value in settings.items() if before.get(key) != value)
        if changes and not config['overwrite'] and (there or glob('*.bin', root_dir=folder)):
            raise SettingError(f'{folder} holds other shards ({changes}): prepare_data.py with --overwrite '
                               'replaces them, another --data_dir keeps them')
        theirs = [name for name in glob('*.bin', root_dir=folder) if not shards.NAME.fullmatch(name)]
        if theirs:
            raise SettingError(f'{folder} holds {theirs[0]}, which prepare_data.py has not written: move it, '
                               'or name another --data_dir')
        is_half = 'progress' in there and not changes
        if is_half:
            meta = there
            say(f'{folder} is half prepared: going on from its last finished shard')
        if is_half or config['overwrite'] or not there:
            make(config, folder, paths, meta, tokenizer)
        else:
            say(f'{folder} is already prepared; prepare_data.py with --overwrite prepares it again')
    words = [f'--dataset={config["dataset"]}', *shards.naming_flags(config)]
    if asked == 'byte' and not meta['template']:
        words.insert(0, f'config/{"shakespeare_cpu" if name == "shakespeare" else "quickstart"}.py')
    if meta['template']:    # of the model whose tokenizer this is
        by = 'Question:, Answer:'
        if meta['template'] != sft.PLAIN:
            by = f'the chat template of {asked}'
            if sft.Examples(tokenizer, meta['template'], 0).rewrites_answers():
                by += ', which rewrites all answers but the last: that one alone is a target'
        say(f'examples of {" and ".join(settings["columns"])}, by {by}')
        words.append(f'--init_from={"MODEL" if asked in TOKENIZERS else asked}')
    if config['show']:
        show_documents(folder, meta, tokenizer, config['show'])
    words.append(f'--checkpoint_dir=checkpoints_{name}')
    say(f'{folder} is ready; to train on it: {shlex.join(["python", "train_fp8.py", *words])}')


def main(config):
    """Prepare what the settings, as configure returns them, ask for. Raises UserErrors."""
    name = shards.dataset_name(config['dataset'])
    known = DATASETS.get(name, {})
    if config['tokenizer'] == 'auto':
        config['tokenizer'] = known.get('tokenizer', 'gpt2')
    if name == 'hellaswag':
        path, given = join(config['data_dir'], 'hellaswag', 'hellaswag_val.jsonl'), config['data_files']
        with stated(f'{given} holds no HellaSwag items'):
            for number, row in enumerate(rows_of_file(given, None) if given else (), 1):
                if not {'endings', 'label', 'activity_label'} <= row.keys():
                    raise ValueError(f'row {number} is none')
        if exists(path) and given and not config['overwrite']:
            raise SettingError(f'{path} is there: --overwrite replaces it by {given}')
        if config['overwrite'] or not exists(path):
            store(path, known, given)
        say(f'{path} is ready; next: python hellaswag.py --data={path} --ckpt=checkpoints_fp8/latest.pt')
    elif config['verify']:
        folder, _ = shards.find_dataset(config)
        shards.check(folder, trust=False)
        say(f'{folder}: all shards are as meta.json says')
    else:
        prepare(config, name, known)


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    code = 0
    try:
        main(config)
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt):
            error = MachineError('stopped; the same command goes on from the last finished shard')
        code = getattr(error, 'exit_code', 1)
        with contextlib.suppress(SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
    sys.stdout.flush()
    if code or 'datasets' in sys.modules:
        os._exit(code)  # the interpreter's end waits for killed workers, and aborts where pyarrow reads ahead
