"""Text -> token shards in data/<dataset>-<tokenizer>/, which train.py and train_fp8.py read.

    python prepare_data.py stdlib                        # Python's own source: no download, seconds
    python prepare_data.py shakespeare                   # 1 MB from GitHub
    python prepare_data.py fineweb_edu --max_tokens=1e9  # from the Hugging Face hub; so is openwebtext
    python prepare_data.py mine --data_files='texts/*.jsonl' --text_column=body
    python prepare_data.py fineweb_edu --pretokenized    # the hub's GPT-2 token shards as they are
    python prepare_data.py fineweb_edu --verify          # are all shards as they were written?
    python prepare_data.py hellaswag                     # the items for hellaswag.py
    python prepare_data.py openmathinstruct2 --tokenizer=meta-llama/Llama-3.2-1B    # to fine-tune on
    python prepare_data.py chats --data_files='chats/*.jsonl' --tokenizer=FOLDER

A row of parquet or jsonl is a document; a txt file is cut at blank lines. BOS, or EOT where the tokenizer has
none, stands before each document. Rows with prompt and completion, or messages, are examples to fine-tune on:
sft.py says what becomes of them.
Documents keep their order: the loader permutes. A document is validation where a hash of its text says so: a
text that occurs twice is never in both splits.

A shard ends at a document's end, so all that a restart needs there is the stream's position and the writers'
state: progress.json. Killed at any moment, the same command goes on from the last finished shard, to the same
bytes.
"""
from configurator import DataError, MachineError, MissingError, SettingError, configure

dataset = ''           # fineweb_edu | fineweb | openwebtext | shakespeare | stdlib | hellaswag | own name
data_files = ''        # parquet, jsonl, txt, py: globs with commas between, in place of the dataset's own
text_column = 'text'   # column (parquet) or key (jsonl) that holds a document
subset = ''            # part of a dataset on the hub; empty: its usual one (fineweb_edu: sample-10BT)
split_name = ''        # of openmathinstruct2: train_1M (if empty), train_2M, train_5M or train
template = 'auto'      # auto (chat for messages, else plain) | plain | chat: what makes an example a text
tokenizer = 'auto'     # auto (gpt2, byte for stdlib) | gpt2 | byte | a folder or org/name
data_dir = 'data'      # shards go to <data_dir>/<dataset>[-<split>]-<tokenizer>
max_tokens = 0         # >= 0: stop at the first document end at or past so many, in both splits; 0: all
shard_tokens = 10**8   # >= 1, <= 2e9: tokens after which a shard ends with the document: 200 MB of uint16
val_fraction = 0.0     # >= 0, < 1: share of documents for validation; 0: the dataset's own (mostly 0.0005)
num_workers = 0        # >= 0, <= 1024: tokenizing processes; 0: one per CPU core (for bytes one is enough)
pretokenized = 'auto'  # auto (none) | off | on (known ones: fineweb*) | owner/name: the hub's token shards
verify = False         # read the shards again and compare them with meta.json
overwrite = False      # redo a dataset that is prepared already
# imported, it leaves the command line alone
config = configure(__file__, None if __name__ == '__main__' else [], positional='dataset')

# Imported only now: --help and a mistyped setting are answered at once.
import contextlib
import dataclasses
import hashlib
import itertools
import os
import re
import resource
import shlex
import shutil
import signal
import sys
import time
import types
from glob import glob
from os.path import basename, getsize, isdir, join

import numpy as np
from tqdm import tqdm

from fp8gpt import corpus, files, sft, shards
from fp8gpt.corpus import DATASETS, stated
from fp8gpt.tokenizer import Workers, get_tokenizer, keep_files


@dataclasses.dataclass
class Job:
    """A dataset to make. settings: all that its bytes depend on. template: of examples to fine-tune on, ''
    for other text. progress: as progress.json holds it."""
    folder: str
    settings: dict
    encoder: object  # the tokenizer
    paths: list      # of local files
    workers: int     # tokenizing processes
    template: str = ''
    progress: dict = None

    def start(self, threshold, revision=None):
        """Sets progress to nothing done. threshold: documents with a hash below it are validation."""
        splits = {split: {'tokens': 0, 'documents': 0, 'bytes': 0} for split in ('train', 'val')}
        self.progress = {
            'settings': self.settings, 'revision': revision, 'threshold': threshold, 'position': None,
            'writers': {}, 'hashes': [2**64, -1], 'splits': splits,
            'began': (self.progress or {}).get('began', time.time())}

    def count(self, split, **more):
        """Adds tokens=, documents= and bytes= to what is done of a split."""
        for unit, n in more.items():
            counts = self.progress['splits'][split]
            counts[unit] = counts.get(unit, 0) + int(n)

    def total(self, unit):
        """What is done of both splits."""
        return sum(counts[unit] for counts in self.progress['splits'].values())

    def writing(self):
        """The context of all that writes to the folder: states an OSError as a DataError."""
        remedy = 'with that put right, the same command goes on from the last finished shard'
        return stated(f'cannot write to {self.folder}; {remedy}', OSError)

    def claim(self, keep=()):
        """Makes the folder one that is under way: shards.read_meta refuses it until progress.json goes.
        Shards that are in it go, but for the names in keep."""
        os.makedirs(self.folder, exist_ok=True)
        files.write_json(join(self.folder, 'progress.json'), self.progress)  # before all else
        for pattern in ('meta.json', '.checked.json*', '*.part', '*.tmp', '*.bin'):  # shards after their list
            for name in set(glob(pattern, root_dir=self.folder)) - set(keep):
                path = join(self.folder, name)
                remove = shutil.rmtree if isdir(path) else os.remove
                remove(path)

    def open_writers(self):
        """{split: shards.ShardWriter} where the progress stands; claims the folder where nothing is done."""
        states = self.progress['writers']
        if not states:
            self.claim()
        size, vocab_size = self.settings['shard_tokens'], self.encoder.vocab_size
        return {split: shards.ShardWriter(self.folder, split, size, vocab_size, states.get(split),
                                          masked=bool(self.template))
                for split in self.progress['splits']}

    def save(self, position, writers):
        """progress.json, behind the document at that position of the stream: a restart begins there."""
        for writer in writers.values():
            writer.sync()
        self.progress['position'] = position
        self.progress['writers'] = {split: writer.state() for split, writer in writers.items()}
        files.write_json(join(self.folder, 'progress.json'), self.progress)


# ------------------------------------------------------------------------------- text -> shards

def write_shards(job, documents, amount):
    """Writes documents up to the stream's end or max_tokens, and progress.json at each shard's end. Returns
    meta.json's list of shards. amount: {'tokens', 'documents' or 'bytes': how many}, for the time left."""
    progress = job.progress
    max_tokens = job.settings['max_tokens']
    if max_tokens:
        amount = {'tokens': max_tokens}
    first = list(itertools.islice(documents, 1))  # what cannot be read says so before anything is written
    with job.writing():
        writers = job.open_writers()
    tokens = job.total('tokens')
    pause = 0.5 if sys.stderr.isatty() else 10  # seconds between two states of the bar
    with tqdm(desc=basename(job.folder), initial=tokens,
              unit=' tokens', unit_scale=True, mininterval=pause) as bar:
        for position, document, key, n_bytes in itertools.chain(first, documents):
            if max_tokens and tokens >= max_tokens:
                break
            split = 'val' if key < progress['threshold'] else 'train'
            low, high = progress['hashes']
            progress['hashes'] = [min(key, low), max(key, high)]
            job.count(split, tokens=len(document), documents=1, bytes=n_bytes)
            if job.template:
                job.count(split, targets=np.count_nonzero(document[:, 1] & shards.TARGET))
            tokens += len(document)
            with job.writing():
                if writers[split].add(document):
                    job.save(position, writers)
            for unit, whole in amount.items():
                bar.total = int(whole * tokens / job.total(unit))
            bar.update(len(document))
        bar.total = tokens
    with job.writing():
        for writer in writers.values():
            writer.finish_shard()
    return [shard for writer in writers.values() for shard in writer.shards]


def tokenize(job):
    """Text -> shards. Returns meta.json's list of them."""
    source = job.settings['source']
    if '://' in source and not job.paths:
        name = basename(job.folder).partition('-')[0]
        job.paths = [corpus.download(source, join(os.path.dirname(job.folder), f'{name}.txt'))]
    encoder, read = job.encoder, corpus.texts_of
    columns = job.settings['text_column']
    if job.template:
        encoder = sft.Examples(encoder, job.template, job.progress['began'])
        read, columns = sft.conversations, job.settings['columns']
    with Workers(encoder, job.workers) as workers:
        while True:
            rows, amount = corpus.open_source(job.paths, job.settings, job.progress)
            documents = workers.encode(read(rows, columns))
            with contextlib.closing(rows):  # at the interpreter's end, pyarrow's threads would hang it
                listed = write_shards(job, documents, amount)
            val = job.progress['splits']['val']['documents']
            if 0 < val < job.total('documents'):
                return listed
            low, high = job.progress['hashes']
            if low >= high:
                give_up(job)
            # Every document is on one side of the threshold. A second pass puts the one with the lowest or
            # the highest hash on the other.
            job.start(high if val else low + 1, job.progress['revision'])


def give_up(job):
    """Leaves nothing of the job, and raises MachineError."""
    job.claim()
    os.remove(join(job.folder, 'progress.json'))
    with contextlib.suppress(OSError):  # there may be files of the user's
        os.rmdir(job.folder)
    why = 'one is to train on, another to validate'
    raise MachineError(f'{job.settings["source"]} has fewer than two documents that differ: {why}')


# ------------------------------------------------------------------------------- what is asked for

def resolved(config):
    """The settings as attributes, with what they mean: `name` of the dataset, `known`: its row of DATASETS,
    `hub` and `repository`: of its text and of its token shards on the hub, empty where not used; `tokenizer`
    is no longer auto."""
    asked = types.SimpleNamespace(**config)
    asked.name = shards.dataset_name(asked.dataset)
    asked.known = DATASETS.get(asked.name, {})
    asked.hub = None if asked.data_files else asked.known.get('hub')
    if asked.tokenizer == 'auto':
        asked.tokenizer = asked.known.get('tokenizer', 'gpt2')
    repositories = {'auto': '', 'off': '', 'on': asked.known.get('shards', 'none')}
    asked.repository = repositories.get(asked.pretokenized, asked.pretokenized)
    return asked


def refuse_useless(config, asked):
    """Raises SettingError for a flag that would be without effect."""
    if asked.name == 'hellaswag':
        useful = {'data_files'}
    elif asked.repository:
        useful = {'pretokenized', 'tokenizer', 'max_tokens'}
    elif asked.hub:
        useful = config.keys()
    else:
        useful = config.keys() - {'subset'}
    if 'splits' not in asked.known:
        useful = useful - {'split_name'}
    if useless := config.given - useful - {'dataset', 'data_dir', 'overwrite'}:
        how = ' --pretokenized' if asked.repository else ''
        raise SettingError(f'{asked.dataset}{how} has no use for --{min(useless)}')


def refuse_wrong(asked):
    """Raises SettingError for a dataset that is not known, or shards that cannot be had of it."""
    own = (asked.data_files or asked.repository) and re.fullmatch(r'[\w.]+', asked.name)
    if not (asked.known or own):
        known = f'there are {", ".join(DATASETS)}, and any name with --data_files=...'
        raise SettingError(f'no dataset is called {asked.dataset!r}: {known}')
    splits = asked.known.get('splits', ())
    if asked.split_name not in ('', *splits, *shards.HELD_OUT):
        of = f'{asked.dataset} has no split {asked.split_name!r}'
        raise SettingError(f'{of}: there are {", ".join(splits)}, and the held-out part of each as val_*.bin')
    if asked.repository and (asked.tokenizer != 'gpt2' or '/' not in asked.repository):
        known = ' and '.join(name for name, row in DATASETS.items() if 'shards' in row)
        raise SettingError(
            '--pretokenized=owner/name takes GPT-2 shards of a dataset on the hub; '
            f'without owner/name, of what is known for {known}')


def settings_of(asked, paths, encoder):
    """All that the bytes of a dataset of text depend on. paths: of the local files that it is made of."""
    if asked.repository:
        return {'source': asked.repository, 'tokenizer': encoder.name, 'max_tokens': asked.max_tokens}
    known = asked.known
    python = f'standard library of Python {sys.version.split()[0]}'
    sizes = repr([(path, getsize(path)) for path in paths])
    return {
        'source': asked.data_files or asked.hub or known.get('url') or python,
        'files': hashlib.sha256(sizes.encode()).hexdigest()[:16],
        'subset': asked.hub and (asked.subset or known.get('subset')),
        'text_column': asked.text_column,
        'tokenizer': encoder.name,
        'max_tokens': asked.max_tokens,
        'val_fraction': asked.val_fraction or known.get('val_fraction', 0.005),
        'shard_tokens': asked.shard_tokens,
    }


def new_job(asked):
    """The Job that is asked for, not begun. Raises SettingError, MissingError for files, DataError where
    there is no vocabulary."""
    refuse_wrong(asked)
    offline = ', and where there is no network --data_files' if asked.hub and not asked.repository else ''
    with stated(f'{asked.name} needs a vocabulary{offline}', RuntimeError):
        encoder = get_tokenizer(asked.tokenizer)
    paths = []
    if asked.data_files:
        paths = corpus.find_files(asked.data_files)
    elif asked.name == 'stdlib':
        paths = corpus.find_stdlib()
    workers = asked.num_workers
    if not workers:
        all_cores = os.sched_getaffinity(0) if hasattr(os, 'sched_getaffinity') else range(os.cpu_count())
        workers = 1 if asked.tokenizer == 'byte' or asked.repository else len(all_cores)
    folder = shards.prepared_dir(asked.data_dir, asked.name, asked.tokenizer, asked.split_name)
    job = Job(folder, settings_of(asked, paths, encoder), encoder, paths, workers)
    make_examples(job, asked)
    return job


def make_examples(job, asked):
    """Sets the job's template where its source has examples to fine-tune on; refuses --template elsewhere."""
    columns = asked.known.get('columns', [])
    if job.paths and not columns:
        there = corpus.columns_of(job.paths[0])
        columns = [] if asked.text_column in there else sft.columns_of(there)
    if columns:
        job.template = sft.choose_template(asked.template, columns, job.encoder)
        told = hashlib.sha256(job.template.encode()).hexdigest()[:16]
        split = shards.split_of(asked.name, asked.split_name)
        job.settings |= {'columns': columns, 'split': split, 'template': told}
    elif asked.template != 'auto':
        raise SettingError(f'--template={asked.template} is for prompts and completions, or messages: '
                           f'{job.settings["source"]} has none')


def take_up(job, overwrite):
    """Sets the job's progress to what its folder holds of it, or none. False where there is nothing to do.
    Raises SettingError where the folder holds other shards."""
    folder, settings = job.folder, job.settings
    progress = files.read_json(join(folder, 'progress.json'))  # of an unfinished run
    meta = files.read_json(join(folder, 'meta.json'))  # without it: of a finished one
    there = (progress or meta).get('settings', {})
    changes = ', '.join(f'{key} {there.get(key)!r} -> {value!r}'
                        for key, value in settings.items() if there.get(key) != value)
    job.start(int(settings.get('val_fraction', 0) * 2**64))
    if progress and changes:
        print(f'{folder} is half prepared with other settings ({changes}): starting afresh')
    elif progress:
        job.progress = progress
        tokens = f' from {job.total("tokens"):,} tokens' if 'shard_tokens' in settings else ''
        print(f'{folder} is half prepared: going on{tokens}')
    elif not overwrite:
        if meta and not changes:
            print(f'{folder} is already prepared; --overwrite redoes it')
            return False
        if meta or glob('*.bin', root_dir=folder):
            others = f'{folder} holds other shards ({changes})'
            raise SettingError(f'{others}: --overwrite replaces them, another --data_dir keeps them')
    return True


def finish(job, name, listed):
    """meta.json, and no progress.json any more: from now on the folder is a dataset."""
    meta = {
        'dataset': name,
        'tokenizer': job.encoder.name,
        'vocab_size': job.encoder.vocab_size,
        'eot': job.encoder.eot,
        'source': job.settings['source'],
        'revision': job.progress['revision'],
        'subset': job.settings.get('subset'),
        'val_fraction': job.settings.get('val_fraction'),
        'documents': job.total('documents'),
        'splits': job.progress['splits'],
        'shards': listed,
        'settings': job.settings,
    }
    if job.template:
        meta['template'] = job.template
    with job.writing():
        if job.encoder.folder:
            keep_files(job.encoder.folder, job.folder)
        files.write_json(join(job.folder, 'meta.json'), meta)
        os.remove(join(job.folder, 'progress.json'))


def summarize(job, listed, seconds, tokens):
    """Prints what is there now, and what it took. tokens: those of this run."""
    for split, counts in job.progress['splits'].items():
        n = sum(f'{split}_' in shard['file'] for shard in listed)
        targets = f'{counts["targets"]:,} of them targets, ' if job.template else ''
        documents = f'{counts["documents"]:,} documents'
        print(f'{split:5} {counts["tokens"]:,} tokens, {targets}{documents}, {n} shards')
    unit = 1e9 if sys.platform == 'darwin' else 1e6  # ru_maxrss is in bytes there, else in KB
    memory = f'{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit:.2f} GB'
    if job.workers > 1:
        worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / unit
        memory += f' + {job.workers} x {worker:.2f}'
    print(f'{job.folder}: {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s, peak memory {memory}')


def check_again(asked):
    """--verify: prints what is wrong with the folder, or that all is well. Raises DataError where something
    is wrong, MissingError where no meta.json lists the shards, and what shards.read_meta raises."""
    started = time.time()
    folder = shards.dataset_dir(asked.data_dir, asked.dataset, asked.tokenizer, asked.split_name)
    listed = shards.read_meta(folder).get('shards')
    if not listed:
        lacks = 'no meta.json that lists its shards: nothing tells what they should be'
        raise MissingError(f'{folder} has {lacks}')
    problems = shards.find_problems(folder)
    for problem in problems:
        print(problem)
    if problems:
        remedy = '--overwrite, with the settings of the first time, prepares it again'
        raise DataError(f'{len(problems)} problems, the first: {problems[0]}; {remedy}')
    tokens = sum(shard['tokens'] for shard in listed)
    print(f'{len(listed)} shards, {tokens:,} tokens: all as meta.json says ({time.time() - started:.1f} s)')

CONFIGS = {     # dataset and tokenizer -> the config file that trains on them
    ('stdlib', 'byte'): 'config/quickstart.py',
    ('shakespeare', 'byte'): 'config/shakespeare_cpu.py',
    ('fineweb_edu', 'gpt2'): 'config/gpt2_fp8.py',
    ('openwebtext', 'gpt2'): 'config/openwebtext_fp8.py',
}


def main(config):
    """From settings, as configure returns them, to shards, meta.json and the summary. Raises UserErrors."""
    asked = resolved(config)
    if asked.verify and asked.name != 'hellaswag':
        check_again(asked)
        return
    refuse_useless(config, asked)
    make = corpus.prepare_hellaswag if asked.name == 'hellaswag' else prepare
    make(asked)


def prepare(asked):
    """From text or token shards to shards, meta.json and the summary."""
    started = time.time()
    job = new_job(asked)
    if asked.split_name in shards.HELD_OUT:
        print(f'{asked.hub or asked.dataset} has no split {asked.split_name!r}: what is held out of '
              f'{job.settings["split"]} stands for it, as val_*.bin')
    with files.alone(job.folder):
        if take_up(job, asked.overwrite):
            before = job.total('tokens')
            listed = corpus.fetch_shards(job) if asked.repository else tokenize(job)
            finish(job, asked.name, listed)
            summarize(job, listed, time.time() - started, job.total('tokens') - before)
    print(f'next: {shlex.join(["python", "train_fp8.py", *next_words(asked, examples=bool(job.template))])}')


def next_words(asked, examples):
    """Return the words of train_fp8.py that train on what was prepared: a config file of the dataset, where
    there is one, and what differs from train_fp8.py's defaults. examples: whether they are to fine-tune
    on."""
    name, tokenizer = asked.name, asked.tokenizer
    words = [CONFIGS[name, tokenizer]] if (name, tokenizer) in CONFIGS else []
    if not words:
        words = ['config/finetune.py'] * examples + [f'--dataset={name}', f'--tokenizer={tokenizer}']
    if examples:
        words.append(f'--init_from={"scratch" if tokenizer in ("gpt2", "byte") else tokenizer}')
    if asked.split_name not in ('', *shards.HELD_OUT):
        words.append(f'--split_name={asked.split_name}')
    return words + [f'--data_dir={asked.data_dir}'] * (asked.data_dir != 'data')


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        main(config)
    except KeyboardInterrupt:
        raise MachineError('stopped; the same command goes on from the last finished shard') from None
