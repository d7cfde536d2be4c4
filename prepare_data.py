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

A row of parquet or JSON is a document; a txt file is cut at blank lines. BOS, or EOT where the tokenizer has
none, stands before each document. Rows with messages, or prompt and completion, or other columns of
sft.COLUMNS, are examples to fine-tune on: sft.py turns them into tokens and masks.
Documents keep their order: the loader permutes them. A hash of a document's text decides its split, so a text
that occurs twice is never in both splits.

At the end of each shard, the shard of the other split that is under way is written too, and progress.json
holds the stream's position. After a kill at any moment, the same command goes on from the last finished shard
and writes the same bytes.
"""
from configurator import DataError, MachineError, MissingError, SettingError, configure

dataset = ''           # fineweb_edu | fineweb | openwebtext | shakespeare | stdlib | hellaswag | org/name
data_files = ''        # parquet, jsonl, json, txt, py: globs with commas between, for a dataset of any name
text_column = 'text'   # column (parquet) or key (JSON) that holds a document
subset = ''            # part of a dataset on the hub; empty: its usual one (fineweb_edu: sample-10BT)
split_name = ''        # of a dataset on the hub; empty: train, of openmathinstruct2 train_1M
template = 'auto'      # auto (chat for messages, else plain) | plain | chat: what makes an example a text
tokenizer = 'auto'     # auto (gpt2, byte for stdlib) | gpt2 | byte | a folder or org/name
data_dir = 'data'      # shards go to <data_dir>/<dataset>[-<split>]-<tokenizer>
max_tokens = 0         # >= 0: stop at the first document end at or past so many, in both splits; 0: all
shard_tokens = 10**8   # >= 1, <= 2e9: tokens after which a shard ends; held in memory, 400 MB of uint16
val_fraction = 0.0     # >= 0, < 1: share of documents for validation; 0: the dataset's own, at least 20 or 5%
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
import dataclasses
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from glob import glob
from os.path import basename, dirname, exists, getsize, join, splitext

import numpy as np
from tqdm import tqdm

from fp8gpt import files, sft, shards
from fp8gpt.shards import DATASETS
from fp8gpt.tokenizer import TOKENIZERS, get_tokenizer, keep_files

CHUNK = 64  # documents that a worker takes at once
CHECKED = 1000  # of so many documents one is tokenized by gigatoken and by tiktoken
RENEWED = 2**16  # documents after which gigatoken's cache is emptied: it has no bound of its own
LONGEST = 2**19  # characters of a text for gigatoken: tiktoken cuts a long text where it must
LEAST = 20  # documents for validation, or a twentieth of all if that is less
NAMING = 'data_dir', 'dataset', 'tokenizer', 'split_name'  # the settings that make the folder's name
ENDINGS = '.parquet', '.jsonl', '.json', '.txt', '.py'
NOT_STDLIB = {'site-packages', 'dist-packages', 'test', 'tests', 'idlelib', 'lib2to3', 'turtledemo'}


@contextlib.contextmanager
def stated(what):
    """Raise an error of a library as a DataError of one line that begins with `what`."""
    try:
        yield
    except Exception as error:
        raise DataError(f'{what}: {" ".join(str(error).split())[:300]}') from error


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
            rows = json.load(file) if ending == '.json' else map(json.loads, filter(str.strip, file))
            yield from map(dict, rows)
    else:
        document = bytearray()
        with open(path, 'rb') as file:
            for line in file:
                is_end = ending == '.txt' and len(document) >= 2**13 and not line.strip()
                document += line
                if is_end:
                    yield {'text': document.decode('utf-8', 'replace')}
                    document.clear()
        yield {'text': document.decode('utf-8', 'replace')}


def local_rows(paths, columns, position):
    """Yield (row, position after it) of local files. A position is [number of the file, rows of the file that
    are done], or None for the start."""
    first, done = position or (0, 0)
    for number, path in enumerate(paths[first:], first):
        rows = itertools.islice(rows_of_file(path, columns), done, None)
        while True:
            with stated(f'{path}, row {done + 1}'):
                row = next(rows, None)
            if row is None:
                break
            done += 1
            yield row, [number, done]
        done = 0


def hub_rows(settings, columns, progress):
    """Yield (row, position after it) of a dataset on the hub, from progress['position'] on. columns: those to
    fetch; None: all. An empty progress['revision'] is set to the newest, so that a restart reads the same
    revision. Raises DataError."""
    repository = settings['source']
    os.environ['USE_TORCH'] = '0'  # or `datasets` imports torch, to make torch datasets of its streams
    remedy = "go online, or give its files as --data_files='folder/*.parquet' (and TIKTOKEN_CACHE_DIR)"
    with stated(f'could not stream {repository}; {remedy}'):
        import datasets
        import huggingface_hub
        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        if not progress['revision']:
            progress['revision'] = huggingface_hub.HfApi().dataset_info(repository, timeout=30).sha
        stream = datasets.load_dataset(
            repository, settings['subset'], split=settings.get('split', 'train'), streaming=True,
            revision=progress['revision'])
        if columns:
            stream = stream.select_columns(columns)
        if progress['position']:
            stream.load_state_dict(progress['position'])
    with stated('the stream from the hub broke off; the same command goes on from the last finished shard'):
        for row in stream:
            yield row, stream.state_dict()


def values_of(rows, columns, paths):
    """Yield (values of the columns, position) of each (row, position). Raises SettingError where a row has no
    such column, or something else than text or messages in it. paths: of local files, for errors."""
    for row, position in rows:
        for column in columns:
            kind, what, remedy = str, 'text', ': --text_column names another column'
            if [column] in sft.COLUMNS:
                kind, what, remedy = list, 'list', ''
            if not isinstance(row.get(column, 0), (kind, type(None))):
                where = f'{paths[position[0]]}, row {position[1]}' if paths else 'a row'
                raise SettingError(f'{where} has no {what} {column!r}, but {", ".join(row)}{remedy}')
        yield [row[column] for column in columns], position


def find_files(patterns):
    """Return the paths that match the globs, which commas separate. Raises MissingError where there are none,
    SettingError for a file of another kind."""
    paths = {}  # a file that two patterns match counts once
    for pattern in patterns.split(','):
        found = sorted(glob(os.path.expanduser(pattern.strip()), recursive=True))
        if not found:
            raise MissingError(f'no file matches {pattern!r} (all of a folder: folder/*.parquet)')
        paths.update(dict.fromkeys(found))
    for path in paths:
        if splitext(path)[1] not in ENDINGS:
            raise SettingError(f'{path}: files end in one of {", ".join(ENDINGS)}')
    return list(paths)


def find_stdlib():
    """Return the paths of Python's own source, without its tests and what is installed beside it."""
    library = dirname(os.__file__)
    paths = sorted(glob('**/*.py', root_dir=library, recursive=True))
    return [join(library, path) for path in paths if not NOT_STDLIB & set(path.split(os.sep))]


def store(path, known, source=''):
    """Store at `path` a copy of the file `source`, or the file at the URL of a row of DATASETS. Raises
    DataError where it cannot be read, or does not have the row's SHA-256."""
    with stated(f'could not download {known["url"]}; go online, or give the file as --data_files'):
        with open(source, 'rb') if source else urllib.request.urlopen(known['url'], timeout=60) as file:
            body = file.read()
    if not source and hashlib.sha256(body).hexdigest() != known['sha256']:
        raise DataError(f'{known["url"]} arrived with another SHA-256: run the same command again')
    files.write(path, lambda file: file.write(body))


# ------------------------------------------------------------------------------- texts -> ids

class Texts:
    """Make documents of texts, with GPT-2's ids by gigatoken where it is installed: it caches words.

    Its vocabulary is made from tiktoken's. In each process the first 100 documents and every CHECKED-th are
    compared with tiktoken's ids; a difference ends the run."""

    def __init__(self, tokenizer):
        self.tokenizer, self.fast, self.documents = tokenizer, None, 0
        if tokenizer.name == 'gpt2':
            try:
                self.renew()
                print('tokenized by gigatoken, checked against tiktoken', flush=True)
            except ImportError:
                print('tokenized by tiktoken; `pip install gigatoken` makes it faster', flush=True)

    def renew(self):
        """Make gigatoken's tokenizer, with an empty cache."""
        import gigatoken
        tokens = [base64.b64encode(self.tokenizer.decode_bytes([i])) for i in range(self.tokenizer.eot)]
        with tempfile.NamedTemporaryFile() as file:
            file.writelines(b'%b %d\n' % (token, i) for i, token in enumerate(tokens))
            file.flush()
            self.fast = gigatoken.Tokenizer.from_tiktoken(file.name, 'gpt2', {})

    def document(self, text):
        """Return a text's ids (n,) with BOS or EOT before them, the bytes whose hash decides the split, and
        the number of bytes that the ids stand for; None where there is no text."""
        if not text:
            return None
        raw = text.encode('utf-8', 'replace')
        is_fast = self.fast and len(text) <= LONGEST
        ids = self.checked(text, raw) if is_fast else self.tokenizer.encode(text)
        start = np.array([self.tokenizer.start], ids.dtype)
        return np.concatenate([start, ids]), raw, len(raw)

    def checked(self, text, raw):
        """Return gigatoken's ids (n,) of a text, which raw is the UTF-8 of. Raises MachineError where
        tiktoken's differ."""
        self.documents += 1
        if self.documents % RENEWED == 0:
            self.renew()
        ids = self.fast.encode(raw).astype(np.uint16)
        is_checked = self.documents <= 100 or self.documents % CHECKED == 0
        if is_checked and not np.array_equal(ids, self.tokenizer.encode(text)):
            raise MachineError('gigatoken and tiktoken differ: `pip uninstall gigatoken`, remove the '
                               'half-prepared folder, and run the same command again')
        return ids


def worker_pool(encoder, count, paths=()):
    """Return an executor whose `count` processes make documents by `encoder`. They are forked at once, so
    they share the vocabulary's memory. paths: of local files, for errors."""
    fork = multiprocessing.get_context('fork')
    pool = concurrent.futures.ProcessPoolExecutor(count, fork, start_worker, (encoder, paths))
    pool.submit(os.getpid)  # the first job starts all workers
    return pool


def start_worker(*encoder_and_paths):
    """Keep what encode_chunk needs, leave Ctrl-C to the parent, and end with the parent."""
    global _encoder, _paths
    _encoder, _paths = encoder_and_paths
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def encode_chunk(chunk):
    """Return [(position, ids, hash that decides the split, bytes)] of the (values, position); ids are None
    where there is nothing in them. Raises DataError, which names the row, for one that cannot be a document.
    """
    documents = []
    for values, position in chunk:
        try:
            document = _encoder.document(*values)
        except DataError as error:
            where = f'{_paths[position[0]]}, row {position[1]}: ' if _paths else ''
            raise DataError(f'{where}{error}') from None
        tokens, raw, n_bytes = document or (None, b'', 0)
        key = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), 'big')
        documents.append((position, tokens, key, n_bytes))
    return documents


def encoded(values, pool, count):
    """Yield the documents of encode_chunk of each (values, position), in order.

    Every document carries its position, since the stream is ahead by the 2 * count chunks that the pool holds
    at most. Raises DataError for a row that cannot be a document, MachineError where a worker was killed."""
    queue = collections.deque()
    try:
        while True:
            while len(queue) <= 2 * count and (chunk := list(itertools.islice(values, CHUNK))):
                queue.append(pool.submit(encode_chunk, chunk))
            if not queue:
                return
            yield from queue.popleft().result()
    except concurrent.futures.BrokenExecutor:
        remedy = 'the same command goes on; --num_workers=1 takes least'
        raise MachineError(f'a worker was killed (out of memory?): {remedy}') from None


# ------------------------------------------------------------------------------- documents -> shards

@dataclasses.dataclass
class Job:
    """Hold what is known of a dataset to make. settings: all that its bytes depend on. columns: the columns
    of its rows that are read. template: how an example to fine-tune on becomes a text, '' for other text.
    progress: the content of progress.json."""
    folder: str
    settings: dict
    tokenizer: object
    paths: list  # of local files; empty for a dataset on the hub
    progress: dict
    columns: list = None
    template: str = ''

    def start(self, threshold):
        """Set progress to nothing done. threshold: documents with a hash below it are validation."""
        self.progress |= {
            'settings': self.settings, 'threshold': threshold, 'position': None,
            'lowest': [],  # hashes
            'splits': {'train': {}, 'val': {}},  # counts
            'empty': 0,  # rows
            'shards': {}}

    def rows(self):
        """Yield (row, position after it) of the rows that are not done."""
        if self.paths:
            return local_rows(self.paths, self.columns, self.progress['position'])
        return hub_rows(self.settings, self.columns, self.progress)


def write_documents(job, documents):
    """Write documents up to the stream's end or max_tokens, and progress.json at each shard's end. Return the
    list of shards for meta.json, and all documents, if they are of local files and end no shard; else []."""
    progress, settings, folder = job.progress, job.settings, job.folder
    first = list(itertools.islice(documents, 1))  # a source that cannot be read leaves no folder
    noted = join(folder, 'progress.json')
    if not progress['shards']:
        files.write_json(noted, progress)  # before all else: from now on shards.read_meta refuses the folder
        for pattern in ('meta.json', '.checked.json', '*.tmp', '*.bin'):  # the shards after their list
            for name in glob(pattern, root_dir=folder):
                os.remove(join(folder, name))
    counts = {split: collections.Counter(before) for split, before in progress['splits'].items()}
    writers = {
        split: shards.ShardWriter(folder, split, settings['shard_tokens'], job.tokenizer.vocab_size,
                                  progress['shards'].get(split, ()), masked=bool(job.template))
        for split in counts}
    progress['splits'] = counts
    tokens, most = sum(each['tokens'] for each in counts.values()), settings['max_tokens'] or math.inf
    kept, keeps = [], job.paths and not progress['shards']      # a stream's positions take a KB each
    with tqdm(desc=basename(folder), initial=tokens, total=most, unit=' tokens', unit_scale=True) as bar:
        for document in itertools.chain(first, documents):
            if tokens >= most:
                break
            if keeps:
                kept.append(document)
            position, ids, key, n_bytes = document
            if ids is None:
                progress['empty'] += 1
                continue
            progress['lowest'] = sorted({*progress['lowest'], key})[:LEAST + 1]
            split = 'val' if key < progress['threshold'] else 'train'
            counts[split].update(tokens=len(ids), documents=1, bytes=n_bytes)
            if job.template:
                counts[split]['targets'] += int(np.count_nonzero(ids[:, 1] & shards.TARGET))
            tokens += len(ids)
            if writers[split].add(ids):
                progress['position'] = position
                progress['shards'] = {split: writer.save() for split, writer in writers.items()}
                files.write_json(noted, progress)
                kept, keeps = [], False
            bar.update(len(ids))
    return [shard for writer in writers.values() for shard in writer.save()], kept


def tokenize(job, workers, least):
    """Write the shards of a job and return the list of them. least: documents for validation, or a twentieth
    of all. Raises MachineError for fewer than two documents."""
    if job.template:
        encoder = sft.Examples(job.tokenizer, job.template, job.progress['began'])
    else:
        encoder = Texts(job.tokenizer)
    pool = worker_pool(encoder, workers, job.paths)
    kept = []  # of local files, so that a small set is not tokenized twice
    while True:
        documents = kept or encoded(values_of(job.rows(), job.columns, job.paths), pool, workers)
        listed, kept = write_documents(job, iter(documents))
        train, val = (counts['documents'] for counts in job.progress['splits'].values())
        lowest = job.progress['lowest']
        wanted = max(1, min(least, math.ceil((train + val) / 20), len(lowest) - 1))
        if train and val >= wanted:
            pool.shutdown()
            return listed
        if len(lowest) < 2:
            why = 'one is to train on, another to validate'
            if job.progress['empty']:
                why = empty_rows(job)
            raise MachineError(f'{job.settings["source"]} has fewer than two documents that differ: {why}')
        # A second pass takes the documents with the lowest hashes for validation.
        job.start(lowest[wanted] if train else lowest[-1])


def empty_rows(job):
    """Return a clause that says how many rows are left out."""
    what = 'text of the role assistant' if job.template else 'text'
    return f'{job.progress["empty"]:,} rows are left out, which have no {what}'


# ------------------------------------------------------------------------------- what is asked for

def new_job(config, name, known):
    """Return the Job for the settings. Raises SettingError, MissingError for files, DataError where there is
    no network."""
    asked, column, patterns = (config[key] for key in ('dataset', 'text_column', 'data_files'))
    hub = '' if patterns else known.get('hub', asked if '/' in asked else '')
    if not name or not (known or hub or patterns):
        others = f'{", ".join(DATASETS)}, org/name of the hub, and any name with --data_files=...'
        raise SettingError(f'no dataset is called {asked!r}: there are {others}')
    if config['subset'] and not hub:
        raise SettingError(f'{asked} has no use for --subset')
    split = shards.split_of(asked, config['split_name'])
    tokenizer = get_tokenizer(config['tokenizer'])
    paths = find_files(patterns) if patterns else find_stdlib() if name == 'stdlib' else []
    sizes = repr([(path, getsize(path)) for path in paths])
    python = f'standard library of Python {sys.version.split()[0]}'
    settings = {
        'source': patterns or hub or known.get('url', python),
        'files': hashlib.sha256(sizes.encode()).hexdigest()[:16],
        'subset': (config['subset'] or known.get('subset')) if hub else None,
        'text_column': column,
        'tokenizer': tokenizer.name,
        'max_tokens': config['max_tokens'],
        'val_fraction': config['val_fraction'] or known.get('val_fraction', 0.005),
        'shard_tokens': config['shard_tokens'],
    }
    if split:
        settings['split'] = split
    if 'url' in known and not patterns:
        paths = [join(config['data_dir'], f'{name}.txt')]
        if not exists(paths[0]):
            store(paths[0], known)
    progress = {'revision': None, 'began': time.time()}
    job = Job(shards.prepared_dir(**config), settings, tokenizer, paths, progress)
    job.start(int(settings['val_fraction'] * 2**64))
    names = known.get('columns', [column])
    if paths or not known or 'text_column' in config.given:
        for row, _ in itertools.islice(job.rows(), 1):
            names = list(row)
    wants_text = 'text_column' in config.given or config['template'] == 'auto'
    examples = [] if wants_text and column in names else sft.columns_of(names)
    job.columns = examples or [column]
    if not examples and column not in names:
        forms = '; '.join(' and '.join(columns) for columns in sft.COLUMNS)
        raise SettingError(f'{settings["source"]} has the columns {", ".join(names)}. Examples have {forms}; '
                           f'of plain text, --text_column names the column, now {column!r}')
    if examples:
        job.template = sft.choose_template(config['template'], job.columns, tokenizer)
        template = hashlib.sha256(job.template.encode()).hexdigest()[:16]
        settings.update(columns=job.columns, template=template)
    elif config['template'] != 'auto':
        raise SettingError(f'--template={config["template"]} is for prompts and completions, or messages: '
                           f'{settings["source"]} has none')
    return job


def is_finished(job, overwrite):
    """Return whether the job's folder holds its shards already. Where an unfinished run left a part of them,
    set the job's progress to it. Raises SettingError where the folder holds other shards, whole or not."""
    folder = job.folder
    progress = files.read_json(join(folder, 'progress.json'))  # of an unfinished run
    meta = files.read_json(join(folder, 'meta.json'))
    there = (progress or meta).get('settings', {})
    changes = ', '.join(f'{key} {there.get(key)!r} -> {value!r}'
                        for key, value in job.settings.items() if there.get(key) != value)
    if progress.keys() == job.progress.keys() and not changes:
        job.progress = progress
        print(f'{folder} is half prepared: going on from its last finished shard')
    elif not overwrite and changes and (there or glob('*.bin', root_dir=folder)):
        others = f'{folder} holds other shards ({changes})'
        raise SettingError(f'{others}: prepare_data.py with --overwrite replaces them, another --data_dir '
                           'keeps them')
    return bool(meta) and not (progress or overwrite)


def prepare(config, name, known):
    """Make the shards and meta.json of a dataset, and print what they hold."""
    job = new_job(config, name, known)
    if config['split_name'] in shards.HELD_OUT:
        print(f'{config["dataset"]} has no split {config["split_name"]!r}: the part of '
              f'{job.settings.get("split", "it")} that is held out replaces it, as val_*.bin')
    lock = join(config['data_dir'], f'.{basename(job.folder)}.lock')
    with files.lock(lock, f'another process is making {job.folder}: let it end, or make it elsewhere'):
        if is_finished(job, config['overwrite']):
            print(f'{job.folder} is already prepared; prepare_data.py with --overwrite prepares it again')
        else:
            make(job, config, name)
    if job.template:
        plain, own = 'Question:, Answer:', f'the chat template of {config["tokenizer"]}'
        print(f'examples of {" and ".join(job.columns)}, by {plain if job.template == sft.PLAIN else own}')
    show_documents(job, config['show'])
    words = [f'--{key}={config[key]}' for key in NAMING if config[key]]
    if job.template:    # of the model whose tokenizer this is
        words.append(f'--init_from={"MODEL" if config["tokenizer"] in TOKENIZERS else config["tokenizer"]}')
    print(f'{job.folder} is ready; next: {shlex.join(["python", "train_fp8.py", *words])}')


def show_documents(job, count):
    """Print the first documents to train on, decoded, with the targets of examples in >>> and <<<."""
    if not count:
        return
    path = join(job.folder, 'train_000000.bin')
    tokens = shards.read_shard(path)[:10**6]
    mask = shards.read_shard(shards.mask_of(path))[:10**6] if job.template else 0 * tokens
    begins = mask & shards.START if job.template else tokens == job.tokenizer.start
    ends = [*np.flatnonzero(begins)[:count + 1], len(tokens)]
    for number, (begin, end) in enumerate(zip(ends[:count], ends[1:]), 1):
        print(f'--- {number}')
        for target, places in itertools.groupby(range(begin, end), lambda i: mask[i] & shards.TARGET):
            text = job.tokenizer.decode(tokens[list(places)].tolist(), special=True)
            text = ''.join(c if c.isprintable() or c == '\n' else repr(c)[1:-1] for c in text)
            print(f'>>>{text}<<<' if target else text, end='')
        print()


def make(job, config, name):
    """Write the shards of a job and meta.json, and remove progress.json: then the folder is a dataset."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    workers = config['num_workers'] or (1 if config['tokenizer'] == 'byte' else cores)
    listed = tokenize(job, workers, 1 if config['val_fraction'] else LEAST)
    if job.tokenizer.folder:
        keep_files(job.tokenizer.folder, job.folder)
    files.write_json(join(job.folder, 'meta.json'), {
        'dataset': name,
        'tokenizer': job.tokenizer.name,
        'vocab_size': job.tokenizer.vocab_size,
        'eot': job.tokenizer.eot,
        'source': job.settings['source'],
        'revision': job.progress['revision'],
        'splits': job.progress['splits'],
        'shards': listed,
        'settings': job.settings,
        'template': job.template,
    })
    os.remove(join(job.folder, 'progress.json'))
    for split, counts in job.progress['splits'].items():
        print(f'{split:5} ' + ', '.join(f'{n:,} {unit}' for unit, n in counts.items()))
    if job.progress['empty']:
        print(empty_rows(job))


def main(config):
    """Prepare what the settings, as configure returns them, ask for. Raises UserErrors."""
    name = shards.dataset_name(config['dataset'])
    known = DATASETS.get(name, {})
    if config['tokenizer'] == 'auto':
        config['tokenizer'] = known.get('tokenizer', 'gpt2')
    if name == 'hellaswag':
        path = join(config['data_dir'], 'hellaswag', 'hellaswag_val.jsonl')
        if config['data_files'] or config['overwrite'] or not exists(path):
            store(path, known, config['data_files'])
        print(f'{path} is ready; next: python hellaswag.py --data={path} --ckpt=checkpoints_fp8/latest.pt')
    elif config['verify']:
        folder = shards.dataset_dir(**config)
        shards.check(folder, trust=False)
        print(f'{folder}: all shards are as meta.json says')
    else:
        prepare(config, name, known)


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    code = 0
    try:
        main(config)
    except KeyboardInterrupt:
        code = 1
        print('error: stopped; the same command goes on from the last finished shard', file=sys.stderr)
    except Exception as error:
        code = getattr(error, 'exit_code', 1)
        with contextlib.suppress(SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
    sys.stdout.flush()
    if code or 'datasets' in sys.modules:
        os._exit(code)  # the interpreter's end waits for killed workers, and aborts where pyarrow reads ahead
