"""Text -> token shards in data/<dataset>-<tokenizer>/, which train.py and train_fp8.py read.

    python prepare_data.py stdlib                              # Python's own source: no download, seconds
    python prepare_data.py shakespeare                         # 1 MB from GitHub
    python prepare_data.py fineweb_edu --max_tokens=1e9        # streamed from the Hugging Face hub, as openwebtext is
    python prepare_data.py mine --data_files='texts/*.jsonl' --text_column=body
    python prepare_data.py fineweb_edu --pretokenized          # the hub's GPT-2 token shards as they are: no tokenizing
    python prepare_data.py fineweb_edu --verify                # are all shards as they were written?
    python prepare_data.py hellaswag                           # the items for hellaswag.py

A row of parquet or jsonl is a document; a txt file is cut at blank lines. EOT stands before each document. Documents
keep their order: the loader permutes. A document is validation where a hash of its text says so, so that a text that
occurs twice is never in both splits.

A shard ends at a document's end, so all that a restart needs there is the stream's position and the writers' state:
progress.json. Killed at any moment, the same command goes on from the last finished shard, to the same bytes.
"""
import collections
import concurrent.futures
import contextlib
import glob
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import threading
import time
import urllib.request
import zlib

import numpy as np
from tqdm import tqdm

from configurator import DataError, MachineError, MissingError, SettingError, configure
from data import (ShardWriter, begin, dataset_dir, dataset_name, is_whole, pieces, read_json, read_shard, stated, verify_shards,
                  write_json, writing)
from tokenizer import get_tokenizer

dataset = ''                   # fineweb_edu | fineweb | openwebtext | shakespeare | stdlib | hellaswag, any name with --data_files
data_files = ''                # parquet, jsonl, txt, py files: globs with commas between, read in place of the dataset's own
text_column = 'text'           # column (parquet) or key (jsonl) that holds a document
subset = ''                    # part of a dataset on the hub; empty: its usual one (fineweb_edu: sample-10BT)
tokenizer = 'auto'             # gpt2 | byte; auto: gpt2, byte for stdlib
data_dir = 'data'              # shards go to <data_dir>/<dataset>-<tokenizer>
max_tokens = 0                 # stop at the first document end at or past so many, both splits, EOTs included; 0: all
shard_tokens = 100_000_000     # a shard ends at the first document end at or past so many: 200 MB of uint16
val_fraction = 0.0             # share of documents for validation; 0: the dataset's own (0.0005; small ones more)
num_workers = 0                # tokenizing processes; 0: one per CPU core (for bytes one is enough)
pretokenized = 'auto'          # take token shards from the hub: owner/name of a dataset there; on: known ones (fineweb*); auto, off: no
verify = False                 # read the shards again and compare them with meta.json
overwrite = False              # redo a dataset that is prepared already
config = configure(__file__, positional='dataset')
globals().update(config)

DATASETS = {
    'fineweb_edu': {'hub': 'HuggingFaceFW/fineweb-edu', 'subset': 'sample-10BT', 'val_fraction': 0.0005, 'shards': 'kjj0/finewebedu10B-gpt2'},
    'fineweb': {'hub': 'HuggingFaceFW/fineweb', 'subset': 'sample-10BT', 'val_fraction': 0.0005, 'shards': 'kjj0/fineweb10B-gpt2'},
    'openwebtext': {'hub': 'Skylion007/openwebtext', 'val_fraction': 0.0005},
    'shakespeare': {'url': 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt', 'val_fraction': 0.1},
    'stdlib': {'tokenizer': 'byte', 'val_fraction': 0.05},
    'hellaswag': {'url': 'https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl'},
}
NOT_STDLIB = {'site-packages', 'dist-packages', 'test', 'tests', 'idlelib', 'lib2to3', 'turtledemo', '__pycache__'}
CHUNK = 2**20                  # characters that go to a worker at once: 0.1 s of its work


# ------------------------------------------------------------------- where text comes from: rows and their positions

def read_parquet(path):
    import pyarrow.parquet as pq
    # In one thread and few rows at a time: 90 MB for a row group of 1.5 GB. Pre-buffered, the default, it is held whole.
    file = pq.ParquetFile(path, buffer_size=2**16, pre_buffer=False)
    for batch in file.iter_batches(16, columns=[text_column], use_threads=False):
        yield from batch.to_pylist()


def read_jsonl(path):
    with open(path, encoding='utf-8-sig') as file:  # -sig: a byte order mark is no text
        for number, line in enumerate(file, 1):
            if line.strip():
                with stated(f'line {number}'):
                    row = dict(json.loads(line))
                yield row


def read_txt(path, document_bytes=2**13):
    """A document ends at the first blank line past document_bytes."""
    with open(path, 'rb') as file:
        document = bytearray()
        for line in file:
            cut = len(document) >= document_bytes and not line.strip()
            document += line
            if cut:
                yield {text_column: document.decode('utf-8', 'replace')}
                document.clear()
        yield {text_column: document.decode('utf-8', 'replace')}


READERS = {'.parquet': read_parquet, '.jsonl': read_jsonl, '.txt': read_txt, '.py': lambda path: read_txt(path, float('inf'))}


def find_files(patterns):
    """Globs with commas between -> paths. Raises FileNotFoundError, or ValueError for an ending not in READERS."""
    paths = {}
    for pattern in patterns.split(','):
        found = sorted(path for path in glob.glob(os.path.expanduser(pattern.strip()), recursive=True) if os.path.isfile(path))
        if not found:
            raise MissingError(f'no file matches {pattern.strip()!r} (all of a folder: folder/*.parquet)')
        paths.update(dict.fromkeys(found))
    if other := [path for path in paths if os.path.splitext(path)[1] not in READERS]:
        raise SettingError(f'{other[0]}: what can be read ends in {", ".join(READERS)}')
    return list(paths)


def find_stdlib():
    paths = []
    for folder, folders, names in os.walk(os.path.dirname(os.__file__)):
        folders[:] = set(folders) - NOT_STDLIB
        paths += [os.path.join(folder, name) for name in names if name.endswith('.py')]
    return sorted(paths)


def download(url, path, again=False, check=len):
    """Stores what a URL holds, unless the file is there, once check(its bytes) has raised nothing. Returns the path."""
    if again or not os.path.exists(path):
        with stated(f'could not download {url}; go online, or give the file as --data_files'):
            body = urllib.request.urlopen(url, timeout=60).read()
        with stated(f'could not make {path} of {url}'):
            check(body)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path + '.part', 'wb') as file:
                file.write(body)
            os.replace(path + '.part', path)  # a file under its name is whole
    return path


def measure(paths):
    """How much there is, as {unit: amount}. Damaged parquet files and missing columns show here, before the work."""
    if not all(path.endswith('.parquet') for path in paths):
        return {'bytes': sum(map(os.path.getsize, paths))}
    import pyarrow.parquet as pq
    rows = 0
    for path in paths:
        with stated(f'{path} is damaged, or no parquet file'):
            footer = pq.ParquetFile(path)
        if text_column not in (columns := footer.schema_arrow.names):
            raise SettingError(f'{path} has no column {text_column!r}: --text_column is one of {", ".join(columns)}')
        rows += footer.metadata.num_rows
    return {'documents': rows}


def local_rows(paths, position):
    """Yields (row, position behind it). position: [number of the file, rows of it that are done]."""
    first, done = position or (0, 0)
    for file in range(first, len(paths)):
        with stated(paths[file]):
            for row in itertools.islice(READERS[os.path.splitext(paths[file])[1]](paths[file]), done, None):
                done += 1
                yield row, [file, done]
        done = 0


def hub_rows(repository, part, progress):
    """The same for a dataset on the hub. Its newest revision goes into progress, so that a restart reads the same one."""
    os.environ['USE_TORCH'] = '0'  # or `datasets` imports torch, to make torch datasets of its streams
    with stated(f"could not stream {repository}; go online, or give its files as --data_files='folder/*.parquet' (and TIKTOKEN_CACHE_DIR)"):
        import datasets
        import huggingface_hub
        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        progress['revision'] = progress['revision'] or huggingface_hub.HfApi().dataset_info(repository, timeout=30).sha
        wanted = {'path': repository, 'name': part, 'split': 'train', 'streaming': True, 'revision': progress['revision']}
        stream = datasets.load_dataset(**wanted, columns=[text_column])
        columns = stream.column_names or datasets.load_dataset(**wanted).column_names
    if text_column not in columns:
        raise SettingError(f'{repository} has no column {text_column!r}: --text_column is one of {", ".join(columns)}')
    if progress['position']:
        stream.load_state_dict(progress['position'])
    with stated('the stream from the hub broke off; the same command goes on from the last finished shard'):
        for row in stream:
            yield row, stream.state_dict()


# ---------------------------------------------------------------------------------- documents -> ids, in processes

def read_chunks(rows):
    """Yields (texts, positions, size) for some CHUNK characters of documents at a time; no texts at the end.

    Every document carries its position: the stream itself is ahead of what is written by all that workers hold."""
    texts = True
    while texts:
        texts, positions, size = [], [], 0
        for row, position in rows:
            if text_column not in row:
                raise SettingError(f'a row has no {text_column!r}: --text_column is one of {", ".join(row)}')
            if not isinstance(text := row[text_column], (str, type(None))):
                raise SettingError(f'{text_column!r} holds {type(text).__name__}, not text: --text_column names another')
            texts.append(text or '')
            positions.append(position)
            size += len(texts[-1]) + 1  # so that empty documents fill a chunk, too
            if size >= CHUNK:
                break
        yield texts, positions, size


def encode_chunk(texts):
    """texts -> (ids of all, EOT before each; per text: its end in ids, hash, UTF-8 bytes). An empty text has no ids."""
    eot = np.array([encoder.eot], encoder.encode('').dtype)
    pieces, facts, end = [eot[:0]], [], 0
    for text in texts:
        if text:
            pieces += [eot, encoder.encode(text)]
            end += 1 + len(pieces[-1])
        raw = text.encode('utf-8', 'replace')
        facts.append((end, int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), 'big'), len(raw)))
    return np.concatenate(pieces), facts


def encode_documents(pool, workers, chunks):
    """Yields (position, ids, hash, UTF-8 bytes) of each document that has text, in order.

    What workers hold is bounded in characters, so that memory does not grow with the corpus."""
    queue, waiting = collections.deque(), 0
    for texts, positions, size in chunks:
        queue.append((positions, size, pool.submit(encode_chunk, texts)))
        waiting += size
        while queue and (waiting > 2 * workers * CHUNK or not texts):  # no texts: the end
            positions, size, future = queue.popleft()
            waiting -= size
            (ids, facts), start = future.result(), 0
            for position, (end, key, size) in zip(positions, facts):
                if end > start:
                    yield position, ids[start:end], key, size
                start = end


def start_worker():
    """Ctrl-C is the parent's business; where the parent is gone, the worker goes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


# ------------------------------------------------------------------------------------------------ ids -> shards

def total(splits, unit):
    return sum(counts[unit] for counts in splits.values())


def fresh(settings, threshold=0, revision=None):
    """The state of a run that begins. threshold: documents with a hash below it are validation."""
    return {'settings': settings, 'revision': revision, 'threshold': threshold, 'position': None, 'writers': {},
            'hashes': [2**64, -1], 'splits': {split: {'tokens': 0, 'documents': 0, 'bytes': 0} for split in ('train', 'val')}}


def write_shards(documents, folder, progress, amount):
    """Writes documents up to the stream's end or max_tokens, and progress.json at each shard's end. Returns the writers.

    progress is kept up to date. amount: of 'tokens', 'documents' or 'bytes', for the time left; {}: unknown."""
    splits, hashes, path = progress['splits'], progress['hashes'], os.path.join(folder, 'progress.json')
    first = list(itertools.islice(documents, 1))  # what cannot be read says so before anything is written
    with writing(folder):
        if not progress['writers']:
            begin(folder, progress)
        writers = {split: ShardWriter(folder, split, shard_tokens, encoder.vocab_size, progress['writers'].get(split)) for split in splits}
    tokens = total(splits, 'tokens')
    with tqdm(desc=os.path.basename(folder), initial=tokens, unit=' tokens', unit_scale=True,
              mininterval=0.5 if sys.stderr.isatty() else 10) as bar:
        for position, ids, key, size in itertools.chain(first, documents):
            if max_tokens and tokens >= max_tokens:
                break
            split = 'val' if key < progress['threshold'] else 'train'
            hashes[:] = min(key, hashes[0]), max(key, hashes[1])
            for unit, more in (('tokens', len(ids)), ('documents', 1), ('bytes', size)):
                splits[split][unit] += more
            tokens += len(ids)
            with writing(folder):
                if writers[split].add(ids):
                    for writer in writers.values():
                        writer.sync()
                    progress.update(position=position, writers={name: writer.state() for name, writer in writers.items()})
                    write_json(path, progress)
            for unit, all_of_it in amount.items():
                bar.total = int(all_of_it * tokens / total(splits, unit))
            bar.update(len(ids))
        bar.total = tokens
    return writers


def tokenize(paths, folder, progress, workers):
    """Text -> shards, from local files or else from where the settings say. Returns meta.json's list of shards."""
    source, part = progress['settings']['source'], progress['settings']['subset']
    pool = concurrent.futures.ThreadPoolExecutor(1)
    if workers > 1:  # forked before any library has threads, they start at once and share the vocabulary's memory
        pool = concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context('fork'), start_worker)
    pool.submit(os.getpid)  # the first job starts all workers
    try:
        while True:
            if paths or '://' in source:
                paths = paths or [download(source, folder.rpartition('-')[0] + '.txt')]
                rows, amount = local_rows(paths, progress['position']), measure(paths)
            else:
                rows, billions = hub_rows(source, part, progress), re.search(r'(\d+)BT', part or '')
                amount = {'tokens': int(billions[1]) * 10**9} if billions else {}
            with contextlib.closing(rows):  # now, not at the interpreter's end, where pyarrow's threads would hang it
                documents = encode_documents(pool, workers, read_chunks(rows))
                writers = write_shards(documents, folder, progress, {'tokens': max_tokens} if max_tokens else amount)
            splits, (low, high) = progress['splits'], progress['hashes']
            if all(counts['documents'] for counts in splits.values()):
                break
            if low >= high:
                begin(folder, progress)
                os.remove(os.path.join(folder, 'progress.json'))
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
                raise MachineError(f'{source} has fewer than two documents that differ: one is to train on, another to validate')
            # Every document fell on one side of the threshold: a second pass, with the lowest or the highest hash on the other.
            progress.update(fresh(progress['settings'], high if splits['val']['documents'] else low + 1, progress['revision']))
        with writing(folder):
            for writer in writers.values():
                writer.finish_shard()
        return [shard for writer in writers.values() for shard in writer.shards]
    except concurrent.futures.BrokenExecutor:
        raise MachineError('a worker was killed (out of memory?): the same command goes on; --num_workers=1 takes least') from None
    finally:
        pool.shutdown(cancel_futures=True)


def fetch_shards(repository, folder, progress):
    """All val shards of a dataset on the hub, and train shards up to max_tokens. Returns meta.json's list of them.

    A shard has its name when it is whole; one that is there and is whole is not fetched again. Raises OSError."""
    with stated(f'could not list the files of {repository}; go online, or copy its shards into a folder and train with --dataset=FOLDER'):
        import huggingface_hub.utils
        huggingface_hub.utils.disable_progress_bars()
        info = huggingface_hub.HfApi().dataset_info(repository, revision=progress['revision'], files_metadata=True, timeout=30)
    files = sorted(info.siblings, key=lambda file: file.rfilename)
    train, val = ([file for file in files if re.search(split + r'_\d+\.bin$', file.rfilename)] for split in ('train', 'val'))
    if not (train and val):
        raise DataError(f'{repository} has no shards *train_000001.bin and *val_000000.bin, as llm.c writes them')
    ends = np.cumsum([(file.size - 1024) // 2 for file in train])
    wanted = {os.path.basename(file.rfilename): file for file in val + train[:np.searchsorted(ends, max_tokens or np.inf) + 1]}
    progress['revision'], shards, staging = info.sha, [], os.path.join(folder, 'fetched.part')
    with writing(folder):
        begin(folder, progress, [*wanted, 'fetched.part'])
    lengths = np.array([len(encoder.decode_bytes([i])) for i in range(encoder.vocab_size)])  # in UTF-8; EOT has none
    for name, file in tqdm(wanted.items(), os.path.basename(folder), unit=' shards'):
        path, sha256, counts = os.path.join(folder, name), file.lfs and file.lfs.sha256, 0
        with stated(f'could not fetch {name} of {repository}; the same command goes on from there'):
            if not is_whole(path, sha256):
                part = huggingface_hub.hf_hub_download(repository, file.rfilename, repo_type='dataset', revision=info.sha, local_dir=staging)
                if not is_whole(part, sha256):
                    shutil.rmtree(staging)
                    raise DataError("it is no shard of llm.c's format, or arrived damaged")
                os.replace(part, path)
            for piece in pieces(read_shard(path)):
                if piece.max() >= encoder.vocab_size:
                    raise DataError(f'it has token {piece.max():,}, GPT-2 only {encoder.vocab_size:,} tokens')
                counts += np.bincount(piece, minlength=encoder.vocab_size)
        shards.append({'file': name, 'tokens': int(counts.sum()), 'crc32': zlib.crc32(read_shard(path))})
        for unit, more in (('tokens', counts.sum()), ('documents', counts[encoder.eot]), ('bytes', counts @ lengths)):
            progress['splits']['val' if file in val else 'train'][unit] += int(more)
    shutil.rmtree(staging, ignore_errors=True)
    return shards


def count_items(body):
    """How many HellaSwag items lines of bytes are. Raises OSError for one that hellaswag.py refuses (it takes torch, so is not asked)."""
    lines = [line for line in body.splitlines() if line.strip()] or [b'{}']  # without a line, the first item is not one
    for number, line in enumerate(lines, 1):
        with stated(f'item {number} is not one of HellaSwag'):
            row = json.loads(line)
            texts = [row['activity_label'], *([row['ctx_a'], row['ctx_b']] if 'ctx_a' in row else [row['ctx']]), *row['endings']]
            if len(row['endings']) != 4 or int(row['label']) not in range(4) or not all(isinstance(text, str) for text in texts):
                raise ValueError(f'{len(row["endings"])} endings, label {row["label"]!r}, or something else than text')
    return len(lines)


def main():
    """From settings to shards, meta.json and the summary. Raises what configurator turns into one line."""
    global encoder
    started, name = time.time(), dataset_name(dataset)
    known = DATASETS.get(name, {})
    kind = known.get('tokenizer', 'gpt2') if tokenizer == 'auto' else tokenizer
    if verify and name != 'hellaswag':
        shards, tokens = verify_shards(dataset_dir(data_dir, dataset, kind), print)
        print(f'{shards} shards, {tokens:,} tokens: all as meta.json says ({time.time() - started:.1f} s)')
        return
    hub = known.get('hub') if not data_files else None
    repository = {'auto': '', 'off': '', 'on': known.get('shards', 'none')}.get(pretokenized, pretokenized)
    useful = ({'data_files'} if name == 'hellaswag' else {'pretokenized', 'tokenizer', 'max_tokens'} if repository
              else config.keys() - ({'subset'} if not hub else set()))
    if useless := config.given - useful - {'dataset', 'data_dir', 'overwrite'}:
        raise SettingError(f'{dataset}{" --pretokenized" * bool(repository)} has no use for --{min(useless)}')
    if name == 'hellaswag':
        path = os.path.join(data_dir, name, 'hellaswag_val.jsonl')
        url = 'file://' + urllib.request.pathname2url(os.path.abspath(find_files(data_files)[0])) if data_files else known['url']
        note = ' is already there (--overwrite fetches it again)' if os.path.exists(path) and not overwrite else ''
        with open(download(url, path, overwrite, count_items), 'rb') as file, stated(path + note):
            print(f'{path}{note}: {count_items(file.read()):,} items')
        print('next: python hellaswag.py --ckpt=checkpoints_fp8/latest.pt' + f' --data={path}' * (data_dir != 'data'))
        return
    if not (known or (data_files or repository) and re.fullmatch(r'[\w.]+', name)):
        raise SettingError(f'no dataset is called {dataset!r}: there are {", ".join(DATASETS)}, and any name with --data_files=...')
    if max_tokens < 0 or num_workers < 0 or not 0 <= val_fraction < 1 or not 1 <= shard_tokens <= 2e9:
        raise SettingError('max_tokens and num_workers are 0 or more, val_fraction is 0 to 1, shard_tokens 1 to 2e9')
    if repository and (kind != 'gpt2' or '/' not in repository):
        raise SettingError(f'--pretokenized=owner/name takes GPT-2 shards of a dataset on the hub; without owner/name, of what is known for '
                         + ' and '.join(name for name, row in DATASETS.items() if 'shards' in row))
    with stated(f'{name} needs a vocabulary' + ', and where there is no network --data_files' * bool(hub and not repository), RuntimeError):
        encoder = get_tokenizer(kind)
    paths = find_files(data_files) if data_files else find_stdlib() if name == 'stdlib' else []
    settings = {'source': repository, 'tokenizer': kind, 'max_tokens': max_tokens} if repository else {
        'source': data_files or hub or known.get('url') or f'standard library of Python {sys.version.split()[0]}',
        'files': hashlib.sha256(repr([(path, os.path.getsize(path)) for path in paths]).encode()).hexdigest()[:16],
        'subset': hub and (subset or known.get('subset')), 'text_column': text_column, 'tokenizer': kind, 'max_tokens': max_tokens,
        'val_fraction': val_fraction or known.get('val_fraction', 0.005), 'shard_tokens': shard_tokens}

    # What is there already? progress.json: an unfinished run. meta.json without it: a finished one.
    folder = os.path.join(data_dir, f'{name}-{kind}')
    progress, meta = (read_json(os.path.join(folder, file)) for file in ('progress.json', 'meta.json'))
    there = (progress or meta).get('settings', {})
    changes = ', '.join(f'{key} {there.get(key)!r} -> {value!r}' for key, value in settings.items() if there.get(key) != value)
    if progress:
        print(f'{folder} is half prepared' + (f' with other settings ({changes}): starting afresh' if changes else
                                              ': going on' + f' from {total(progress["splits"], "tokens"):,} tokens' * (not repository)))
    elif meta and not changes and not overwrite:
        print(f'{folder} is already prepared; --overwrite redoes it')
        return
    elif not overwrite and (meta or glob.glob(os.path.join(folder, '*.bin'))):
        raise SettingError(f'{folder} holds other shards ({changes}): --overwrite replaces them, another --data_dir keeps them')
    if changes or not progress:
        progress = fresh(settings, int(settings.get('val_fraction', 0) * 2**64))
    before = total(progress['splits'], 'tokens')
    cores = os.sched_getaffinity(0) if hasattr(os, 'sched_getaffinity') else range(os.cpu_count())
    workers = num_workers or (1 if kind == 'byte' or repository else len(cores))
    shards = fetch_shards(repository, folder, progress) if repository else tokenize(paths, folder, progress, workers)
    splits = progress['splits']
    with writing(folder):
        write_json(os.path.join(folder, 'meta.json'), {
            'dataset': name, 'tokenizer': kind, 'vocab_size': encoder.vocab_size, 'eot': encoder.eot,
            'source': settings['source'], 'revision': progress['revision'], 'subset': settings.get('subset'),
            'val_fraction': settings.get('val_fraction'), 'documents': total(splits, 'documents'), 'splits': splits,
            'shards': shards, 'settings': settings})
        os.remove(os.path.join(folder, 'progress.json'))

    for split, counts in splits.items():
        n = sum(f'{split}_' in shard['file'] for shard in shards)
        print(f'{split:5} {counts["tokens"]:,} tokens, {counts["documents"]:,} documents, {n} shards')
    seconds, unit = time.time() - started, 1e9 if sys.platform == 'darwin' else 1e6  # ru_maxrss is in bytes there, else in KB
    own, worker = (resource.getrusage(who).ru_maxrss / unit for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(f'{folder}: {seconds:.1f} s, {(total(splits, "tokens") - before) / seconds:,.0f} tokens/s, peak memory {own:.2f} GB'
          + f' + {workers} x {worker:.2f}' * (workers > 1))
    flags = f' --tokenizer={kind}' * (kind != 'gpt2') + f' --data_dir={data_dir}' * (data_dir != 'data')
    print('next: python train_fp8.py ' + ('config/quickstart.py' if folder == 'data/stdlib-byte' else f'--dataset={name}{flags}'))


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        main()
    except KeyboardInterrupt:
        raise MachineError('stopped; the same command goes on from the last finished shard') from None
