"""Where text comes from: local files, the standard library, a URL, the Hugging Face hub.

Each source yields rows (dicts, a document in one column of each) with the position behind them, which is
all that a restart needs to go on there. What others made of text is here too: token shards of the hub,
and the items of HellaSwag.
"""
import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import urllib.request
import zlib
from glob import glob

import numpy as np
from tqdm import tqdm

from fp8gpt import files, shards
from configurator import DataError, MissingError, SettingError

NOT_STDLIB = {
    'site-packages', 'dist-packages', '__pycache__',
    'test', 'tests', 'idlelib', 'lib2to3', 'turtledemo'}


GITHUB = 'https://raw.githubusercontent.com'
DATASETS = {
    'fineweb_edu': {
        'hub': 'HuggingFaceFW/fineweb-edu', 'subset': 'sample-10BT', 'val_fraction': 0.0005,
        'shards': 'kjj0/finewebedu10B-gpt2'},
    'fineweb': {
        'hub': 'HuggingFaceFW/fineweb', 'subset': 'sample-10BT', 'val_fraction': 0.0005,
        'shards': 'kjj0/fineweb10B-gpt2'},
    'openwebtext': {'hub': 'Skylion007/openwebtext', 'val_fraction': 0.0005},
    'shakespeare': {
        'url': f'{GITHUB}/karpathy/char-rnn/master/data/tinyshakespeare/input.txt',
        'val_fraction': 0.1},
    'stdlib': {'tokenizer': 'byte', 'val_fraction': 0.05},
    'openmathinstruct2': {
        'hub': 'nvidia/OpenMathInstruct-2', 'splits': ('train_1M', 'train_2M', 'train_5M', 'train'),
        'columns': ['problem', 'generated_solution']},
    'hellaswag': {'url': f'{GITHUB}/rowanz/hellaswag/master/data/hellaswag_val.jsonl'},
}


@contextlib.contextmanager
def stated(what, kind=Exception):
    """Says an error of a library in one line that begins with `what`: as a DataError."""
    try:
        yield
    except kind as error:
        text = getattr(error, 'strerror', None) or str(error).strip() or type(error).__name__
        raise DataError(f'{what}: {text.splitlines()[0][:300]}') from None


# ------------------------------------------------------------------------------- files

def read_parquet(path, columns):
    """Yields rows of those columns."""
    import pyarrow.parquet as pq
    # One thread and few rows at a time take 90 MB for a row group of 1.5 GB. Pre-buffered, the default, it
    # would be held whole.
    file = pq.ParquetFile(path, buffer_size=2**16, pre_buffer=False)
    for batch in file.iter_batches(16, columns=columns, use_threads=False):
        yield from batch.to_pylist()


def read_jsonl(path, columns):
    """Yields rows of all keys, so that an error can name those that there are."""
    with open(path, encoding='utf-8-sig') as file:  # -sig: a byte order mark is no text
        for number, line in enumerate(file, 1):
            if line.strip():
                with stated(f'line {number}'):
                    row = dict(json.loads(line))
                yield row


def read_txt(path, columns, document_bytes=2**13):
    """A document ends at the first blank line past document_bytes."""
    column, = columns
    document = bytearray()
    with open(path, 'rb') as file:
        for line in file:
            cut = len(document) >= document_bytes and not line.strip()
            document += line
            if cut:
                yield {column: document.decode('utf-8', 'replace')}
                document.clear()
    yield {column: document.decode('utf-8', 'replace')}


def read_py(path, columns):
    """A file is a document."""
    return read_txt(path, columns, float('inf'))


READERS = {'.parquet': read_parquet, '.jsonl': read_jsonl, '.txt': read_txt, '.py': read_py}


def reader_of(path):
    """None where the ending is not in READERS."""
    return READERS.get(os.path.splitext(path)[1])


def find_files(patterns):
    """Globs with commas between -> paths. Raises MissingError, SettingError for an ending not in READERS."""
    paths = []
    for pattern in map(str.strip, patterns.split(',')):
        pattern = os.path.expanduser(pattern)
        matches = [pattern] if os.path.isfile(pattern) else glob(pattern, recursive=True)
        found = sorted(filter(os.path.isfile, matches))
        if not found:
            raise MissingError(f'no file matches {pattern!r} (all of a folder: folder/*.parquet)')
        paths += found
    for path in paths:
        if not reader_of(path):
            raise SettingError(f'{path}: what can be read ends in {", ".join(READERS)}')
    return list(dict.fromkeys(paths))  # a file that two patterns match counts once


def find_stdlib():
    """Paths of Python's own source, without its tests and what is installed beside it."""
    paths = []
    for folder, folders, names in os.walk(os.path.dirname(os.__file__)):
        folders[:] = set(folders) - NOT_STDLIB
        paths += [os.path.join(folder, name) for name in names if name.endswith('.py')]
    return sorted(paths)


def download(url, path, again=False, check=len):
    """Stores what a URL holds, unless the file is there, once check(its bytes) has raised nothing.

    Returns the path. Raises DataError."""
    if os.path.exists(path) and not again:
        return path
    with stated(f'could not download {url}; go online, or give the file as --data_files'):
        body = urllib.request.urlopen(url, timeout=60).read()
    with stated(f'could not make {path} of {url}'):
        check(body)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        files.write(path, lambda file: file.write(body))
    return path


def columns_of(path):
    """The columns of a parquet file, or of a jsonl file's first row; [] of text. Raises DataError."""
    with stated(path):
        if path.endswith('.parquet'):
            import pyarrow.parquet as pq
            return pq.ParquetFile(path).schema_arrow.names
        first = itertools.islice(read_jsonl(path, []) if path.endswith('.jsonl') else [], 1)
        return [name for row in first for name in row]


def size_of(paths, columns):
    """How much there is, as {unit: amount}. Raises, before the work, DataError for a damaged parquet file and
    SettingError for one that lacks a column."""
    if not all(path.endswith('.parquet') for path in paths):
        return {'bytes': sum(map(os.path.getsize, paths))}
    import pyarrow.parquet as pq
    rows = 0
    for path in paths:
        with stated(f'{path} is damaged, or no parquet file'):
            footer = pq.ParquetFile(path)
        _want(columns, footer.schema_arrow.names, path)
        rows += footer.metadata.num_rows
    return {'documents': rows}


def _want(columns, there, source):
    for column in columns:
        if column not in there:
            one_of = f'--text_column is one of {", ".join(there)}'
            raise SettingError(f'{source} has no column {column!r}: {one_of}')


# ------------------------------------------------------------------------------- rows and their positions

def local_rows(paths, columns, position):
    """Yields (row, position behind it). position: [number of the file, rows of it that are done], or None."""
    first, done = position or (0, 0)
    for number, path in enumerate(paths[first:], first):
        with stated(path):
            rows = reader_of(path)(path, columns)
            for row in itertools.islice(rows, done, None):
                done += 1
                yield row, [number, done]
        done = 0


def hub_rows(settings, columns, progress):
    """The same for a dataset on the hub, from progress['position']. An empty progress['revision'] is set to
    the newest, so that a restart reads the same one. Raises DataError, or SettingError for a column."""
    repository, split = settings['source'], settings.get('split', 'train')
    os.environ['USE_TORCH'] = '0'  # or `datasets` imports torch, to make torch datasets of its streams
    remedy = "go online, or give its files as --data_files='folder/*.parquet' (and TIKTOKEN_CACHE_DIR)"
    with stated(f'could not stream {repository}; {remedy}'):
        import datasets
        import huggingface_hub
        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        if not progress['revision']:
            progress['revision'] = huggingface_hub.HfApi().dataset_info(repository, timeout=30).sha
        wanted = {'path': repository, 'name': settings['subset'], 'split': split,
                  'revision': progress['revision']}
        stream = datasets.load_dataset(**wanted, streaming=True, columns=columns)
        there = stream.column_names
        if not there:
            there = datasets.load_dataset(**wanted, streaming=True).column_names
    _want(columns, there, repository)
    if progress['position']:
        stream.load_state_dict(progress['position'])
    with stated('the stream from the hub broke off; the same command goes on from the last finished shard'):
        for row in stream:
            yield row, stream.state_dict()


def open_source(paths, settings, progress):
    """(rows with their positions, {unit: how much there is}) from where the progress stands: of files or,
    where paths is empty, of the dataset on the hub that the settings name."""
    columns = settings.get('columns') or [settings['text_column']]
    if paths:
        return local_rows(paths, columns, progress['position']), size_of(paths, columns)
    billions = re.search(r'(\d+)BT', settings['subset'] or '')
    amount = {'tokens': int(billions[1]) * 10**9} if billions else {}
    return hub_rows(settings, columns, progress), amount


def texts_of(rows, column):
    """(row, position) -> (text, position) of the rows that have text. Raises SettingError where the column is
    missing or holds something else."""
    for row, position in rows:
        if column not in row:
            raise SettingError(f'a row has no {column!r}: --text_column is one of {", ".join(row)}')
        text = row[column]
        if not isinstance(text, (str, type(None))):
            kind = type(text).__name__
            raise SettingError(f'{column!r} holds {kind}, not text: --text_column names another')
        if text:
            yield text, position


# ------------------------------------------------------------------------------- token shards on the hub

def hub_shards(repository, max_tokens, progress):
    """The shards of a dataset on the hub, as llm.c writes them: {name: file with rfilename, size, lfs}. All
    val shards, and train shards up to max_tokens (0: all). The revision as for hub_rows. Raises DataError."""
    remedy = 'go online, or copy its shards into a folder and train with --dataset=FOLDER'
    with stated(f'could not list the files of {repository}; {remedy}'):
        import huggingface_hub.utils
        huggingface_hub.utils.disable_progress_bars()
        info = huggingface_hub.HfApi().dataset_info(
            repository, revision=progress['revision'], files_metadata=True, timeout=30)
    progress['revision'] = info.sha
    files = sorted(info.siblings, key=lambda file: file.rfilename)
    train = [file for file in files if re.search(r'train_\d+\.bin$', file.rfilename)]
    val = [file for file in files if re.search(r'val_\d+\.bin$', file.rfilename)]
    if not (train and val):
        wanted = '*train_000001.bin and *val_000000.bin, as llm.c writes them'
        raise DataError(f'{repository} has no shards {wanted}')
    ends = np.cumsum([(file.size - 4 * shards.HEADER) // 2 for file in train])  # in tokens, of 2 bytes
    last = np.searchsorted(ends, max_tokens or np.inf)
    return {os.path.basename(file.rfilename): file for file in val + train[:last + 1]}


def fetch_shard(repository, revision, file, path):
    """One of hub_shards' files -> path, unless it is there whole: on its way it is in fetched.part beside it.
    Raises DataError for what is no shard, huggingface_hub's errors."""
    import huggingface_hub
    sha256 = file.lfs and file.lfs.sha256
    if is_whole(path, sha256):
        return
    staging = os.path.join(os.path.dirname(path), 'fetched.part')
    part = huggingface_hub.HfApi().hf_hub_download(
        repository, file.rfilename, repo_type='dataset', revision=revision, local_dir=staging)
    if not is_whole(part, sha256):
        shutil.rmtree(staging)
        raise DataError("it is no shard of llm.c's format, or arrived damaged")
    os.replace(part, path)


def is_whole(path, sha256):
    """A shard as long as its header says, its file with this SHA-256 in hex (None: unknown)?"""
    with contextlib.suppress(OSError):
        shards.read_shard(path)
        digest = hashlib.sha256()
        for piece in shards.pieces(np.memmap(path, np.uint8, 'r')):
            digest.update(piece)
        return sha256 in (None, digest.hexdigest())
    return False


def count_ids(path, vocab_size):
    """(vocab_size,): how often a shard has each id. Raises DataError for an id beyond."""
    counts = np.zeros(vocab_size, int)
    for piece in shards.pieces(shards.read_shard(path)):
        if piece.max() >= vocab_size:
            raise DataError(f'it has token {piece.max():,}, GPT-2 only {vocab_size:,} tokens')
        counts += np.bincount(piece, minlength=vocab_size)
    return counts


def fetch_shards(job):
    """Token shards of the hub -> the folder, but for those that are there whole. Returns meta.json's list."""
    repository, vocab_size = job.settings['source'], job.encoder.vocab_size
    theirs = hub_shards(repository, job.settings['max_tokens'], job.progress)
    with job.writing():
        job.claim(keep=[*theirs, 'fetched.part'])
    lengths = [len(job.encoder.decode_bytes([i])) for i in range(vocab_size)]  # in UTF-8; EOT has none
    listed = []
    for name, file in tqdm(theirs.items(), os.path.basename(job.folder), unit=' shards'):
        path = os.path.join(job.folder, name)
        with stated(f'could not fetch {name} of {repository}; the same command goes on from there'):
            fetch_shard(repository, job.progress['revision'], file, path)
            counts = count_ids(path, vocab_size)
        tokens = counts.sum()
        split = 'val' if re.search(r'val_\d+\.bin$', name) else 'train'
        job.count(split, tokens=tokens, documents=counts[job.encoder.eot], bytes=counts @ lengths)
        crc32 = zlib.crc32(shards.read_shard(path))
        listed.append({'file': name, 'tokens': int(tokens), 'crc32': crc32})
    shutil.rmtree(os.path.join(job.folder, 'fetched.part'), ignore_errors=True)
    return listed


# ------------------------------------------------------------------------------- HellaSwag

def count_items(body):
    """How many HellaSwag items lines of bytes are. Raises DataError for one that hellaswag.py refuses (it
    needs torch, so is not asked)."""
    lines = [line for line in body.splitlines() if line.strip()]
    for number, line in enumerate(lines or [b'{}'], 1):  # without a line, the first item is not one
        with stated(f'item {number} is not one of HellaSwag'):
            row = json.loads(line)
            endings, label = row['endings'], row['label']
            context = [row['ctx_a'], row['ctx_b']] if 'ctx_a' in row else [row['ctx']]
            texts = [row['activity_label'], *context, *endings]
            complete = len(endings) == 4 and int(label) in range(4)
            if not (complete and all(isinstance(text, str) for text in texts)):
                raise ValueError(f'{len(endings)} endings, label {label!r}, or something else than text')
    return len(lines)


def prepare_hellaswag(asked):
    """Fetches or copies the items, unless they are there, and counts them."""
    path = os.path.join(asked.data_dir, 'hellaswag', 'hellaswag_val.jsonl')
    url = asked.known['url']
    if asked.data_files:
        url = 'file://' + urllib.request.pathname2url(os.path.abspath(find_files(asked.data_files)[0]))
    there = os.path.exists(path) and not asked.overwrite
    note = ' is already there (--overwrite fetches it again)' if there else ''
    with files.alone(os.path.dirname(path)):
        download(url, path, asked.overwrite, count_items)
        with open(path, 'rb') as file, stated(path + note):
            body = file.read()
            print(f'{path}{note}: {count_items(body):,} items')
        if not there:
            files.write_json(f'{path}.json', {'crc32': zlib.crc32(body)})
    flag = '' if asked.data_dir == 'data' else f' --data={path}'
    print(f'next: python hellaswag.py --ckpt=checkpoints_fp8/latest.pt{flag}')
