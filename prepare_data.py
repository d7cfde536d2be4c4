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

A row of parquet, JSON or CSV is a document. A txt file is cut at each <|endoftext|>, at the first blank line
past each 8,192 characters, and at line ends where 65,536 have no blank line. Text is UTF-8, JSON one list or
a row a line, and CSV begins with names; text of each kind may be packed (.gz, .zst). What the tokenizer
writes before a text stands before each document, and EOT behind it, unless that is EOT. A name or glob that
is typed twice in --data_files is read twice.

Rows with messages, or prompt and completion, or other columns of sft.COLUMNS, are examples to fine-tune on:
sft.py turns them into tokens and masks. Documents keep their order: the loader permutes them. A hash of a
document's text decides its split, so a text that occurs twice is never in both splits; of a txt file that is
alone, the last tenth is for validation.

At the end of each shard, the shard of the other split that is under way is written too, and meta.json holds
the stream's position. After a kill at any moment, the same command goes on from the last finished shard and
writes the same bytes.
"""
from configurator import (
    DataError, MachineError, MissingError, SettingError, configure, error_line, first_line, printable, say)

dataset = ''           # fineweb_edu | fineweb | openwebtext | shakespeare | stdlib | hellaswag | org/name
data_files = ''        # parquet, jsonl, json, csv, tsv, txt, py: globs with commas between; any dataset name
text_column = 'text'   # column (parquet, CSV) or key (JSON) that holds a document
subset = ''            # part of a dataset on the hub, or default; empty: default (fineweb_edu: sample-10BT)
split_name = ''        # of a dataset on the hub; empty: train, of openmathinstruct2 train_1M
template = 'auto'      # auto (chat for messages, else plain) | plain | chat: what makes an example a text
tokenizer = 'auto'     # auto (gpt2, byte for stdlib) | gpt2 | byte | a folder or org/name
data_dir = 'data'      # shards go to <data_dir>/<dataset>[-<split>]-<tokenizer>
max_tokens = 0         # >= 0: stop at the first document end at or past so many, in both splits; 0: all
shard_tokens = 10**8   # >= 1, <= 1e9: tokens after which a shard ends; held in memory, 400 MB of uint16
val_fraction = 0.0     # >= 0, < 1: share for validation; 0: 0.005 of texts, 0.05 of examples, 0.1 of one .txt
num_workers = 0        # >= 0, <= 1024: tokenizing processes; 0: one per CPU core (for bytes one is enough)
verify = False         # read the shards again and compare them with meta.json
overwrite = False      # redo a dataset that is prepared already
show = 0               # >= 0: documents to print first as they will be read, targets in >>> and <<<
# imported, it leaves the command line alone
config = configure(__file__, None if __name__ == '__main__' else [], positional='dataset')

# Imported only now: --help and a mistyped setting are answered at once.
import base64
import csv
import gc
import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import unicodedata
from collections import Counter, deque, namedtuple
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from glob import escape, glob
from hashlib import blake2b, sha256
from itertools import chain, groupby, islice
from os.path import abspath, basename, dirname, exists, expanduser, getsize, isfile, join, splitext
from pathlib import Path

import numpy as np
from tqdm import tqdm

from fp8gpt import files, sft, shards
from fp8gpt.shards import DATASETS
from fp8gpt.tokenizer import EOT, REVISIONS, get_tokenizer

CHUNK = 64  # documents that a worker takes at once
CHECKED, CHECKED_FIRST = 1000, 20     # of so many documents one is compared with its text, and the first ones
CACHE = 2**28   # bytes that gigatoken's cache takes before it starts anew
LONG = 2**15    # bytes of a document after which the cache's size is looked at, too
FEWEST = 400    # rows that are read before it is said that too many cannot be used
MOST = 2**16    # rows that are held while none is found whose hash is below val_fraction
PIECE = 8192    # characters of a txt file, past which a blank line ends a document; past 8 times so many any
BLOCK = 2**26   # bytes of CSV that are parsed at once: no row is longer
REFUSED = 'cannot be used and are left out'
NO_TEXT = 'are left out, which have no text to learn'
NOT_STDLIB = {'site-packages', 'dist-packages', 'test', 'tests', 'idlelib', 'lib2to3', 'turtledemo'}


@contextmanager
def stated(what):
    """Raise an error of a library as a DataError of one line that begins with `what`."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f'{what}: {first_line(error)}') from error


# ------------------------------------------------------------------------------- where texts come from

def find_files(patterns):
    """Return the files of these names and globs, with commas between. What exists is a name, whatever
    brackets or commas it has. A file comes twice where one of the names or globs is typed twice, and once
    where several match it. Raises MissingError where there are none, SettingError for another kind."""
    paths, typed = [], []
    for pattern in [patterns] if exists(expanduser(patterns)) else patterns.split(','):
        pattern = expanduser(pattern.strip())
        typed.append(pattern)
        found = [pattern] if exists(pattern) else sorted(glob(pattern, recursive=True))
        if not found:
            raise MissingError(f'no file matches {pattern!r} (all of a folder: folder/*.txt)')
        times = Counter(map(abspath, paths))
        paths += [path for path in found if times[abspath(path)] < typed.count(pattern)]
    for path in paths:
        if not isfile(path) or kind_of(path) not in ROWS_OF:     # a FIFO would never end
            raise SettingError(f'{path} is no file that ends in one of {", ".join(ROWS_OF)}; .gz or .zst may '
                               'follow (all of a folder: folder/*.txt). Rename other text to .txt, JSON '
                               'lines to .jsonl; save the text of other formats')
    return paths


def kind_of(path):
    """Return the ending of a file's name, without that of its compression; .txt where it has none."""
    return splitext(path.removesuffix('.gz').removesuffix('.zst'))[1].lower() or '.txt'


def rows_of_parquet(path, columns, _):
    """Yield the rows of a parquet file, of those columns that it has; where it has none, of all."""
    import pyarrow.parquet as pq
    # One thread and few rows at a time take 90 MB for a row group of 1.5 GB. Pre-buffered, the default, it
    # would be held whole.
    file = pq.ParquetFile(path, buffer_size=2**16, pre_buffer=False)
    names, errors = file.schema_arrow.names, 'strict' if columns else 'replace'     # as of pictures
    check_names(names)
    names = [name for name in names if name in (columns or ())] or names
    for batch in file.iter_batches(16, columns=names, use_threads=False):
        for row in zip(*batch.columns):     # one by one: one that is not UTF-8 is left out
            try:
                row = {name: value.as_py() for name, value in zip(names, row)}
                yield {name: value.decode(errors=errors) if isinstance(value, bytes) else value
                       for name, value in row.items()}
            except UnicodeDecodeError as error:
                yield DataError(error)


def check_names(names):
    """Raise ValueError where two columns have a name, since rows would lose one of them."""
    if len({*names}) < len(names):
        raise ValueError(f'its header names a column twice ({", ".join(names):.300}): rename one')


def rows_of_csv(path, *_):
    """Yield the rows of CSV, each column as text. The first row names the columns. Raises ValueError for a
    row that has not as many fields, and csv.Error."""
    csv.field_size_limit(BLOCK)
    delimiter = '\t' if kind_of(path) == '.tsv' else ','
    rows = csv.DictReader(files.lines_of(path), delimiter=delimiter, strict=True)
    check_names(rows.fieldnames or ())
    for row in rows:
        if None in row or None in row.values():
            raise ValueError(f'the row that ends in line {rows.line_num} has other fields than the header')
        yield row


def rows_of_json(path, *_):
    """Yield the rows of JSON: one a line, or a list of them, which may take several lines."""
    lines = filter(str.strip, files.lines_of(path))
    for line in lines:
        if line.lstrip().startswith('['):
            yield from json.loads(line + ''.join(lines))
            return
        try:
            yield json.loads(line)
        except (ValueError, RecursionError) as error:
            yield DataError(f'a line is a row, and this one is no JSON ({first_line(error)})')


def rows_of_py(path, *_):
    """Yield a whole file as one row."""
    if text := ''.join(files.lines_of(path)):
        yield {'text': text}


def rows_of_txt(path, _, piece):
    """Yield the documents of a text. A document ends at the mark EOT, without the line ends around it; past
    `piece` characters at the first blank line; past 8 times so many at a line's end."""
    text, is_marked = '', False
    for line in files.lines_of(path, 8 * piece):
        for number, part in enumerate(line.split(EOT)):
            if number:      # a mark stands before this part
                yield from [{'text': text.rstrip('\n')}] * bool(text)
                text, is_marked = '', True
            if is_marked and not text:
                part = part.lstrip('\n')
            text += part
            if len(text) >= piece and (len(text) >= 8 * piece or not part.strip()):
                yield {'text': text}
                text, is_marked = '', False
    yield from [{'text': text}] * bool(text)


# Each yields, of (path, columns, piece), a file's rows: dicts, or a DataError in place of one that cannot be
# read. columns: those to read of a parquet file; None: all. piece: as PIECE.
ROWS_OF = {
    '.parquet': rows_of_parquet, '.csv': rows_of_csv, '.tsv': rows_of_csv, '.txt': rows_of_txt,
    '.json': rows_of_json, '.jsonl': rows_of_json, '.py': rows_of_py}


def is_one_text(paths):
    """Return whether the paths are one txt file, whose last tenth is for validation."""
    return len(paths) == 1 and kind_of(paths[0]) == '.txt'


def rows_of(paths, meta, columns):
    """Yield (row, position after it) from meta's position on, of local files, or, without paths, of the hub.
    In place of a row that cannot be read there is a DataError. Where the rest cannot be read, a DataError
    with the position None is the last. columns: those to read; None: all.

    A position begins with the file, or the repository, and the number of its rows that are done."""
    try:
        yield from file_rows(paths, meta, columns) if paths else hub_rows(meta, columns)
    except DataError as error:
        yield error, None


def file_rows(paths, meta, columns):
    """Yield what rows_of does, of local files. A position is [path, rows of it that are done, its number]."""
    _, done, start = meta['progress']['position'] or ('', 0, 0)
    # of a short text, too, a document begins in the last tenth, which is for validation
    piece = min(PIECE, getsize(paths[0]) // 100 + 1) if is_one_text(paths) else PIECE
    for number, path in enumerate(paths[start:], start):
        with stated(f'{path} cannot be read (where it is cut short or damaged, fetch or write it again)'):
            for row in islice(ROWS_OF[kind_of(path)](path, columns, piece), done, None):
                done += 1
                if not isinstance(row, (dict, DataError)):
                    row = DataError('a row is {"column": value, ...}')
                yield row, [path, done, number]
        done = 0


def hub_rows(meta, columns):
    """Yield what rows_of does, of a dataset on the hub. A position is [its name, rows that are done, the
    stream's state after the last whole CHUNK of them]. An empty meta['revision'] is set to the newest, so
    that a restart reads the same revision."""
    repository, settings, position = meta['source'], meta['settings'], meta['progress']['position']
    # USE_TORCH: or `datasets` imports torch, to make torch datasets of its streams
    os.environ.update(USE_TORCH='0', HF_DATASETS_DISABLE_PROGRESS_BARS='1', DATASETS_VERBOSITY='critical')
    with stated(f'could not stream {repository}; go online and run the same command again, or give its files '
                "as --data_files='folder/*.parquet' (and TIKTOKEN_CACHE_DIR)"):
        import datasets
        import huggingface_hub
        if not meta['revision']:
            meta['revision'] = huggingface_hub.HfApi().dataset_info(repository, timeout=30).sha
        stream = datasets.load_dataset(
            repository, settings['subset'], split=settings.get('split') or 'train', streaming=True,
            revision=meta['revision'])
        if columns and stream.column_names:
            stream = stream.select_columns([name for name in stream.column_names if name in columns])
        _, done, state = position or ('', 0, stream.state_dict())
        if position:    # a first start loads none: see the error below
            stream.load_state_dict(state)
        for number, row in enumerate(islice(stream, done % CHUNK, None), done + 1):
            if number % CHUNK == 0:     # a state takes a KB
                before, state = state, stream.state_dict()
                if state == before:
                    raise ValueError('this version of `datasets` forgets its position: install another')
            yield row, [repository, number, state]


def find_stdlib():
    """Return the paths of Python's own source, without its tests and what is installed beside it."""
    library = dirname(os.__file__)
    paths = sorted(glob('**/*.py', root_dir=library, recursive=True))
    return [join(library, path) for path in paths if NOT_STDLIB.isdisjoint(path.split(os.sep))]


def fetch(path, known):
    """Store at `path` the file at the URL of a row of DATASETS. Raises DataError where it cannot be fetched,
    or does not have the row's SHA-256."""
    import urllib.request       # takes longer than most imports, and few runs want it
    with stated(f'could not download {known["url"]}; go online, or give the file as --data_files (to '
                'make, as DATA_FILES)'):
        with urllib.request.urlopen(known['url'], timeout=60) as answer:
            body = answer.read()
    if sha256(body).hexdigest() != known['sha256']:
        raise DataError(f'{known["url"]} arrived with another SHA-256: run the same command again')
    files.write(path, lambda file: file.write(body))


# ------------------------------------------------------------------------------- texts -> ids

def resident():
    """Return the bytes of this process that are in memory; 0 where there is no /proc."""
    with suppress(OSError):
        return int(Path('/proc/self/statm').read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE')
    return 0


class Texts:
    """Make documents of texts, with GPT-2's ids by gigatoken where it is installed. Its vocabulary is made
    from tiktoken's; each process compares its first 20 documents, and every CHECKED-th, with tiktoken's."""

    def __init__(self, tokenizer, column):
        self.tokenizer, self.columns = tokenizer, [column]
        self.fast, self.documents = None, 0
        if tokenizer.name == 'gpt2':
            with suppress(ImportError):
                self.make_fast()
                say('tokenized by gigatoken, checked against tiktoken')

    def make_fast(self):
        """Make gigatoken's tokenizer, which keeps every word that it has seen (0.10.0)."""
        import gigatoken
        with tempfile.NamedTemporaryFile() as file:
            words = self.tokenizer.encoding.decode_tokens_bytes(range(self.tokenizer.eot))
            file.writelines(b'%b %d\n' % (base64.b64encode(word), i) for i, word in enumerate(words))
            file.flush()
            self.fast = gigatoken.Tokenizer.from_tiktoken(file.name, 'gpt2', {})
        self.most = resident() + CACHE

    def of_row(self, row):
        """Return a text's ids (n,) between the tokenizer's opening and closing; the bytes whose hash decides
        the split; what meta.json counts beside its tokens, with notes and the text; and ''. None where there
        is no text. Raises DataError for what is not text, MachineError where gigatoken is wrong."""
        text = row[self.columns[0]]
        if text in (None, ''):
            return None
        if not isinstance(text, str):
            raise DataError(f'{text!r:.40} is not text: --text_column names another column')
        raw, notes = text.encode('utf-8', 'replace'), sft.special_in(text, self.tokenizer)
        self.documents += 1
        if not self.fast:
            ids = self.tokenizer.encode(text)
        else:
            ids = self.fast.encode(raw).astype(np.uint16)
            checked = is_checked(self.documents)
            if (checked or len(raw) > LONG) and resident() > self.most:
                self.make_fast()
            if checked and not np.array_equal(ids, self.tokenizer.encode(text)):
                raise MachineError('gigatoken and tiktoken differ: `pip uninstall gigatoken`, remove the '
                                   'half-prepared folder, and run the same command again')
        ids = [self.tokenizer.opening, ids, self.tokenizer.closing]
        ids = np.concatenate(ids, dtype=ids[1].dtype, casting='unsafe')
        return ids, raw, {'bytes': len(raw), 'notes': notes, 'text': text}, ''


def is_checked(number):
    """Return whether the ids of a document, of which that is the number, are compared with its text."""
    return number <= CHECKED_FIRST or number % CHECKED == 0


def start_worker():
    """Leave Ctrl-C to the parent, and end with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


# What becomes of a row. position: after it. ids: (n,), or of an example ids and mask (n, 2); none where the
# row is left out. key: the hash that decides its split. counts: what meta.json counts of its split. system:
# its system message. tally: what is counted of all rows; a note, which is to be said of the row, counts as 1.
# place: where the row is, and why it is left out.
Document = namedtuple('Document', 'position ids key counts system tally place')


def encode_chunk(chunk):
    """Return the Documents of what rows_of yields. An error that ends the rows ends the documents, too."""
    return [encode(row, position) if position else row for row, position in chunk]


def encode(row, position):
    """Return the Document of a row, a dict or a DataError."""
    place = f'{position[0]}, row {position[1]}'
    try:
        if isinstance(row, DataError):
            raise row
        for column in _encoder.columns:
            if column not in row:
                raise DataError(f'no {column!r}, but {", ".join(row):.300}')
        ids, raw, counts, system = _encoder.of_row(row) or ((), b'', {'notes': [NO_TEXT]}, '')
    except DataError as error:
        ids, raw, counts, system = (), b'', {'notes': [REFUSED]}, ''
        place += f': {error}'
    text, notes = counts.pop('text', ''), dict.fromkeys(counts.pop('notes'), 1)
    counts = {'tokens': len(ids), 'documents': 1, **counts}
    tally = {'rows': 1, **counts, **notes}
    if text and _encoder.tokenizer.folder and is_checked(position[1]):
        decoded = _encoder.tokenizer.decode(ids.reshape(len(ids), -1)[:, 0].tolist())
        tally['lost'], tally['compared'] = lost_characters(text, decoded)
    key = int.from_bytes(blake2b(raw, digest_size=8).digest(), 'big')
    return Document(position, ids, key, counts, system=system, tally=tally, place=place)


def encoded(rows, encoder, count):
    """Yield the Document of each (row, position), in order, by `count` processes, which hold 2 * count chunks
    of rows at most. Raises the DataError that ends the rows, MachineError where a worker was killed."""
    global _encoder
    _encoder = encoder      # forked processes share the vocabulary's memory,
    gc.freeze()             # which the collector has no need to walk through
    pool = ProcessPoolExecutor(count, multiprocessing.get_context('fork'), start_worker)
    pool.submit(os.getpid)  # forks all of them, before a library that reads rows starts threads
    queue = deque()
    try:
        while True:
            while len(queue) <= 2 * count and (chunk := list(islice(rows, CHUNK))):
                queue.append(pool.submit(encode_chunk, chunk))
            if not queue:
                return
            for document in queue.popleft().result():
                if isinstance(document, DataError):     # only now: what was read ahead may not be needed
                    raise document
                yield document
    except BrokenExecutor:
        raise MachineError('a worker was killed (out of memory?): the same command goes on; --num_workers=1 '
                           'takes least') from None


# ------------------------------------------------------------------------------- what is asked for

def find_source(config, name, known):
    """Return (paths of local files, where the texts come from). Without paths, that is a name on the hub; the
    file at a URL is fetched if it is not there. Raises SettingError for what is no dataset, DataError where
    another file is in the place of that at a URL."""
    asked, patterns = config['dataset'], config['data_files']
    if name and patterns:
        return find_files(patterns), 'local files'
    if name == 'stdlib':
        return find_stdlib(), f'standard library of Python {sys.version.split()[0]}'
    if 'url' in known:
        path = join(config['data_dir'], f'{name}.txt')
        if not exists(path):
            fetch(path, known)
        if sha256(Path(path).read_bytes()).hexdigest() != known['sha256']:
            raise DataError(f'{path} is not the file at {known["url"]}: move it away, or name it as '
                            '--data_files')
        return [path], known['url']
    if known or '/' in asked:
        return [], known.get('hub', asked)
    raise SettingError(f'no dataset is called {asked!r}: there are {", ".join(DATASETS)}, org/name of the '
                       'hub, and any name with --data_files=...')


def describe(config, name, known, tokenizer):
    """Return (paths of local files, none for the hub; the content of meta.json before the first document).
    `progress` is there until the dataset is whole. Raises what find_source and choose_columns do, and
    SettingError for a subset of what has none."""
    paths, source = find_source(config, name, known)
    subset = config['subset'] or known.get('subset')
    if paths and config['subset'] not in ('', 'default'):
        raise SettingError(f'{config["dataset"]} has no use for --subset')
    meta = {
        'dataset': name,
        'tokenizer': tokenizer.name,
        'vocab_size': tokenizer.vocab_size,
        'eot': tokenizer.eot,
        'source': config['data_files'] or source,
        'revision': None,
        'tokenizer_revision': REVISIONS.get(config['tokenizer']),
        'splits': {'train': {}, 'val': {}},  # counts
        'shards': [],
        'settings': {   # all that the bytes depend on; choose_columns adds some
            'source': source,
            'files': shards.hash_of_files(paths),
            'subset': None if paths or subset == 'default' else subset,     # None: the hub's default
            'tokenizer': tokenizer.name,
            'eot': 'behind each document' if tokenizer.closing else None,
            'split': shards.split_of(config) or None,
            **{name: config[name] for name in ('text_column', 'max_tokens', 'shard_tokens')},
        },
        'template': '',  # of examples
        'system': '',  # the most frequent system message
        # began: the time that a template may write; places: of the first row of each note
        'progress': {'position': None, 'began': time.time(), 'tally': {}, 'places': {}},
    }
    choose_columns(config, known, meta, paths, tokenizer)
    usual = 0.1 if is_one_text(paths) else 0.05 if meta['template'] else 0.005
    meta['settings']['val_fraction'] = config['val_fraction'] or known.get('val_fraction', usual)
    return paths, meta


def choose_columns(config, known, meta, paths, tokenizer):
    """Decide by the rows' columns whether they are texts or examples, for which meta gets the columns and the
    template: examples are rows that have no text, and with a model's tokenizer, or a template that is asked
    for, also rows that have one. Raises SettingError where they are neither."""
    column, template, is_typed = config['text_column'], config['template'], 'text_column' in config.given
    names = known.get('columns', [column])
    if paths or not known or is_typed:
        first = islice(rows_of(paths, meta, None), CHUNK)
        names = [*{name: 0 for row, _ in first if isinstance(row, dict) for name in row}] or names
    examples, used = sft.columns_of(names), {column}
    if examples and not (column in names and (is_typed or not tokenizer.folder and template == 'auto')):
        meta['template'] = sft.choose_template(template, examples, tokenizer)
        digest = sha256(meta['template'].encode()).hexdigest()
        meta['settings'] |= {'columns': examples, 'template': digest[:16]}
        used = {*examples, *sft.MORE} - ({'input'} if len(examples) == 1 else set())
    elif column not in names:
        raise SettingError(f'{meta["source"]} has no column {column!r}, but {", ".join(names):.300}: '
                           '--text_column names that of plain text. Columns of examples are to be called '
                           f'{sft.FORMS}')
    elif template != 'auto':
        raise SettingError(f'--template={template} is for prompts and completions, or messages: '
                           f'{meta["source"]} has none')
    if unused := sorted({*names} - used):
        say(f'columns that are not used: {", ".join(unused)}')


# ------------------------------------------------------------------------------- documents -> shards

def count_row(progress, document):
    """Count a row in progress, and what is to be said of it."""
    progress['tally'].update(document.tally)
    progress['places'] = dict.fromkeys(document.tally, document.place) | progress['places']


def check(source, progress):
    """Raise DataError where more than one in twenty of the rows so far cannot be used, or the tokenizer loses
    more than a tenth of the text that was compared."""
    tally = progress['tally']
    if tally[REFUSED] * 20 > tally['rows']:
        raise DataError(f'{source}: {tally[REFUSED]:,} of {tally["rows"]:,} rows cannot be used, more than '
                        f'one in twenty, so mend or remove them: {progress["places"][REFUSED]}')
    if tally['lost'] * 10 > tally['compared']:
        raise DataError(f'{source}: the tokenizer cannot write {tally["lost"] / tally["compared"]:.0%} of '
                        'the characters that were compared: name a --tokenizer for this text')


def lost_characters(text, decoded):
    """Return (how many characters of a text are not in what its ids decode to, how many there are), but for
    blanks, and forms that a tokenizer may normalize."""
    before, after = (Counter(''.join(unicodedata.normalize('NFKD', each).casefold().split()))
                     for each in (text, decoded))
    return (before - after).total(), before.total()


def survey(meta, documents, paths):
    """Set what decides a document's split, and the most frequent system message, which may be none. Return
    all documents. Raises what check does, and MachineError where fewer than two documents differ."""
    settings, first, seen = meta['settings'], [], {'tally': Counter(), 'places': {}}
    sizes, systems = Counter(), Counter()       # bytes of each hash; how often a system message is there
    share = lowest = int(settings['val_fraction'] * 2**64)
    most = min(settings['shard_tokens'], settings['max_tokens'] or math.inf)
    for document in documents:
        first.append(document)
        count_row(seen, document)
        if len(document.ids):
            sizes[document.key] += document.counts['bytes']
            systems[document.system] += 1
            lowest = min(lowest, document.key)
        if (seen['tally']['tokens'] >= most or len(first) >= MOST
                or len(first) >= FEWEST and lowest < share):
            break
    check(meta['source'], seen)
    if len(sizes) < 2:
        raise MachineError(f'{meta["source"]}: {len(first):,} rows with {len(sizes)} different '
                           f'{"questions" if meta["template"] else "texts"}; two are the least, since one is '
                           'for validation')
    if lowest == share:     # one is held out, which has no more text than the mean
        lowest = min(key for key in sizes if sizes[key] * len(sizes) <= sizes.total())
    held = min(share, max(sizes)), lowest, 2**64
    if is_one_text(paths) and not settings['max_tokens']:   # its last part is, and one document at least
        ends = np.cumsum([len(row['text'].encode()) for row, _ in file_rows(paths, meta, None)])
        held = 0, 0, int(min(ends[-1] * (1 - settings['val_fraction']), ends[-2]))
    meta['progress']['held'] = held
    meta['system'] = systems.most_common(1)[0][0]
    return chain(first, documents)


def make(config, folder, paths, meta, tokenizer):
    """Write the shards, and meta.json at each shard's end; without `progress`, it is a dataset."""
    for old in files.temporary_names(join(escape(folder), '*')):    # of one that was killed
        os.remove(old)
    progress = meta['progress']
    progress['tally'] = Counter(progress['tally'])
    meta['splits'] = {split: Counter(counts) for split, counts in meta['splits'].items()}
    documents = encode_rows(config, paths, meta, tokenizer)
    if not meta['shards']:
        # a source that cannot be read leaves no folder
        documents = survey(meta, documents, paths)
        save_shards(folder, meta, {})       # shards.read_meta refuses the folder from now on
        for old in filter(shards.NAME.fullmatch, os.listdir(folder)):
            os.remove(join(folder, old))
    form = config['shard_tokens'], tokenizer.vocab_size, meta['shards'], bool(meta['template'])
    writers = {split: shards.ShardWriter(folder, split, *form) for split in meta['splits']}
    last = write_documents(folder, meta, documents, writers)
    if 0 < config['max_tokens'] <= progress['tally']['tokens']:
        say(f'max_tokens: rows after row {last[1]:,} of {last[0]} are not read')
        if paths:
            names = ', '.join(paths[last[2] + 1:]) or 'none'
            say(f'{last[2] + 1:,} of {len(paths):,} files are read; not read: {names:.2000}')
    if tokenizer.folder:
        tokenizer.save(folder)
    del meta['progress']
    save_shards(folder, meta, writers)
    shards.verify(folder, meta)
    print_counts(meta, progress)


def write_documents(folder, meta, documents, writers):
    """Add each document to its split's writer, and save where that ends a shard, up to the first document end
    at or past max_tokens. Return the last position. Raises what check does."""
    progress, most = meta['progress'], meta['settings']['max_tokens'] or math.inf
    position, tally, (below, lowest, held_from) = progress['position'], progress['tally'], progress['held']
    # the bar is shown only after a second, so that an early error has its line for itself
    bar = tqdm(initial=tally['tokens'], total=most, unit=' tokens', unit_scale=True, delay=1)
    for document in documents:
        if tally['tokens'] >= most:
            break
        position = document.position
        is_held = document.key < below or document.key == lowest or tally['bytes'] >= held_from
        count_row(progress, document)
        if not len(document.ids):
            continue
        split = 'val' if is_held else 'train'
        meta['splits'][split].update(document.counts)
        bar.update(len(document.ids))
        if writers[split].add(document.ids):
            progress['position'] = position
            save_shards(folder, meta, writers)
    bar.close()
    check(meta['source'], progress)
    return position


def encode_rows(config, paths, meta, tokenizer):
    """Return an iterator over the documents of all rows, from meta's position on."""
    settings, template, workers = meta['settings'], meta['template'], config['num_workers']
    columns = settings.get('columns', [settings['text_column']])
    if template:
        encoder = sft.Examples(tokenizer, template, meta['progress']['began'], columns)
    else:
        encoder = Texts(tokenizer, *columns)
    if not workers:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
        workers = 1 if tokenizer.name == 'byte' else cores
    return encoded(rows_of(paths, meta, [*columns, *sft.MORE]), encoder, workers)


def print_counts(meta, progress):
    """Print what each split holds, and what is to be said of rows, as that they are in none."""
    for split, counts in meta['splits'].items():
        print(f'{split:5}', ', '.join(f'{n:,} {unit}' for unit, n in counts.items()))
    tally = progress['tally']
    if tally['lost']:
        share = tally['lost'] / tally['compared']
        print(f'the tokenizer does not write {share:.1%} of the characters that were compared')
    for note in tally:
        if ' ' in note:
            print(f'{tally[note]:,} rows {note} (the first: {progress["places"][note]})')


def save_shards(folder, meta, writers):
    """Write the shards under way, then meta.json, which lists them."""
    meta['shards'] = [shard for writer in writers.values() for shard in writer.save()]
    files.write_json(join(folder, 'meta.json'), meta)


def show_documents(config, paths, meta, tokenizer):
    """Print the first documents of the source, decoded, with the targets of examples in >>> and <<<."""
    documents = encode_rows(config, paths, meta, tokenizer)
    found = (document.ids for document in documents if len(document.ids))
    for number, ids in enumerate(islice(found, config['show']), 1):
        print(f'--- {number}')
        tokens, mask = ids.T if meta['template'] else (ids, 0 * ids)
        pairs = zip(tokens.tolist(), mask & shards.TARGET)
        for is_target, run in groupby(pairs, lambda pair: pair[1]):
            text = printable(tokenizer.decode([token for token, _ in run], special=True), keep=r'[\t\n]')
            print(f'>>>{text}<<<' if is_target else text, end='')
        print()


def prepare(config, name, known):
    """Make the shards and meta.json of a dataset, unless they are there. Raises SettingError where other
    shards are there, whole or not."""
    folder, tokenizer = shards.prepared_dir(config), get_tokenizer(config['tokenizer'])
    paths, meta = describe(config, name, known, tokenizer)
    if config['show']:
        show_documents(config, paths, meta, tokenizer)
    os.makedirs(config['data_dir'], exist_ok=True)
    lock = join(config['data_dir'], f'.{basename(folder)}.lock')
    refusal = f'another process is making {folder}: let it end, or make it elsewhere'
    with files.Lock(lock, refusal, waits='RANK' in os.environ):     # as another node's run does the same
        there = find_earlier(config, folder, meta['settings'])
        half = there.get('progress')
        if half and half.keys() >= meta['progress'].keys():     # else another version of this began it
            meta = there
            say(f'{folder} is half prepared: going on from its last finished shard')
        if there and not half and not config['overwrite']:
            say(f'{folder} is already prepared; prepare_data.py with --overwrite prepares it again')
        else:
            make(config, folder, paths, meta, tokenizer)
    if template := meta['template']:
        by = 'Question:, Answer:' if template == sft.PLAIN else f'the chat template of {config["tokenizer"]}'
        say(f'examples of {" and ".join(meta["settings"]["columns"])}, by {by}')
    say(f'{folder} is ready')


def find_earlier(config, folder, settings):
    """Return the meta.json that a folder has from an earlier run with these settings, {} where there is none.
    Raises SettingError where the folder holds other shards."""
    path = join(folder, 'meta.json')
    there = files.read_json(path)
    before, half = there.get('settings', {}), there.get('progress')
    if half and settings['files']:      # those that are not read yet may be new
        count = half['position'][2] + 1 if half['position'] else 0
        if before['files'][:count] == settings['files'][:count]:
            before['files'] = settings['files']
    changes = [name for name in settings if before.get(name) != settings[name]]
    if changes and not config['overwrite'] and (exists(path) or glob('*.bin', root_dir=folder)):
        raise SettingError(f'{folder} holds other shards (of other {", ".join(changes)}): prepare_data.py '
                           'with --overwrite replaces them, another --data_dir keeps them')
    return {} if changes else there


def prepare_hellaswag(config, known):
    """Store HellaSwag's items where hellaswag.py looks for them: those of --data_files, their jsonl, or
    fetched. Raises SettingError where a file is there that --data_files would replace."""
    path, given = join(config['data_dir'], 'hellaswag', 'hellaswag_val.jsonl'), config['data_files']
    if exists(path) and not config['overwrite']:
        if given:
            raise SettingError(f'{path} is there: --overwrite replaces it by {given}')
    elif given:
        files.write_text(path, ''.join(files.lines_of(given)))
    else:
        fetch(path, known)
    say(f'{path} is ready; next: python hellaswag.py --data={path} --ckpt=checkpoints_fp8/latest.pt')


def main(config):
    """Prepare what the settings, as configure returns them, ask for. Raises UserErrors."""
    name = shards.dataset_name(config['dataset'])
    known = DATASETS.get(name, {})
    if config['tokenizer'] == 'auto':
        config['tokenizer'] = known.get('tokenizer', 'gpt2')
    if name == 'hellaswag':
        prepare_hellaswag(config, known)
    elif config['verify']:
        folder, meta = shards.find_dataset(config)
        if not meta:
            raise DataError(f'{folder} has no meta.json, by which its shards could be verified')
        shards.verify(folder, meta)
        say(f'{folder}: all shards are as meta.json says')
    else:
        prepare(config, name, known)


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    code = 0
    try:
        main(config)
    except (Exception, KeyboardInterrupt) as error:
        _, code = error_line(error)
        with suppress(SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
    sys.stdout.flush()
    if code or 'datasets' in sys.modules:
        os._exit(code)  # the interpreter's end waits for killed workers, and aborts where pyarrow reads ahead
