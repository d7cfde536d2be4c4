"""Shared by the tests: running the scripts as users do, on a small byte dataset.

$ make test                             # lint and the fast tests
$ make test-slow                        # those marked slow: real interpreters, torchrun, Inductor, pip, kills
$ TEST_BF16_UNITS=off make test         # as on a CPU without bf16 units; on: as on one with them
"""
import contextlib
import functools
import gc
import hashlib
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / 'shared'  # real data, where it is there
sys.path.insert(0, str(ROOT))
for number in (signal.SIGINT, signal.SIGHUP):  # a shell's background job ignores the one, nohup the other
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler)
os.environ.setdefault('OMP_NUM_THREADS', '1')  # two workers with more threads would wait for each other
os.environ.setdefault('TIKTOKEN_CACHE_DIR', str(SHARED / 'data' / 'tiktoken_cache'))
os.environ['WANDB_MODE'] = 'disabled'   # whoever is logged in would upload the tests' runs
if os.environ.get('TEST_BF16_UNITS') == 'off':
    os.environ['ONEDNN_MAX_CPU_ISA'] = 'AVX512_CORE'   # before torch is imported: oneDNN asks once

import filelock  # noqa: E402
import tiktoken.registry  # noqa: E402
import tiktoken_ext.openai_public as published  # noqa: E402
import torch  # noqa: E402
from tiktoken._educational import bpe_train  # noqa: E402

import configurator  # noqa: E402
import forked  # noqa: E402
from fp8gpt import distributed  # noqa: E402
from fp8gpt.checkpoint import read  # noqa: E402
from helpers import same_tensors  # noqa: E402

forked.set_bf16_units()

# A model that trains in a second; all its dimensions are FP8's.
TINY = [
    '--tokenizer=byte', '--n_layer=2', '--n_head=4', '--n_embd=64', '--block_size=64', '--batch_size=4',
    '--max_steps=10', '--warmup_steps=2', '--max_lr=3e-3', '--dtype=bf16',   # with or without units for it
    '--eval_tokens=2048', '--log_freq=1', '--eval_freq=1000', '--checkpoint_freq=1000',
]


def checked(done, rc):
    """A finished process: its exit code is asserted and, where that is not 0, one line of error without a
    traceback."""
    assert done.returncode == rc, f'exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}'
    if rc:
        assert 'Traceback' not in done.stderr, done.stderr
        assert done.stderr.count('error: ') == 1, done.stderr
    return done


def environment(**more):
    return {**os.environ, 'OMP_NUM_THREADS': '1', **more}


def run(*words, rc=0, timeout=240, cwd=ROOT, env=None, fork=True, **options):
    """checked `python words...` in the repository. A script runs in a fork (see forked.py), unless it needs a
    Python of its own: fork=False, or options of subprocess.run."""
    words, env = [*map(str, words)], environment(**(env or {}))
    if fork and words[0].endswith('.py') and not options:
        done = forked.finish(words, *forked.start(words, cwd, env), timeout=timeout)
    else:
        options |= {'cwd': cwd, 'env': env, 'capture_output': True, 'text': True, 'timeout': timeout}
        done = subprocess.run([sys.executable, *words], **options)
    return checked(done, rc)


def runner(folder, before, after=''):
    """The path of a script that plays the script its command line names, between two pieces of code."""
    play = "sys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    path = folder / 'runner.py'
    path.write_text(f'import os, runpy, sys\nsys.path.insert(0, os.getcwd())\n{before}\n{play}\n{after}\n')
    return path


# for runner: each rank's number in place of RANK in its words; and a script that says how many graphs it
# compiled, Inductor's code left out, with buckets of DDP that are smaller than a small block
RANK_IN_WORDS = "sys.argv = [word.replace('RANK', os.environ['RANK']) for word in sys.argv]"
COUNTS_GRAPHS = """
import functools, torch
from torch._dynamo.testing import CompileCounterWithBackend
from fp8gpt import distributed
counter, leave = CompileCounterWithBackend('aot_eager'), distributed.leave
DDP = torch.nn.parallel.DistributedDataParallel
DDP.__init__ = functools.partialmethod(DDP.__init__, bucket_cap_mb=0.01)
torch.compile = functools.partial(torch.compile, backend=counter, fullgraph=True)
distributed.leave = lambda error=None: (print(f'{counter.frame_count} graphs', flush=True), leave(error))
"""


@pytest.fixture(autouse=True, scope='session')
def read_once():
    """Let this process parse each script's settings once, not for each of thousands of command lines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configurator, 'read_script', functools.cache(configurator.read_script))
        yield


@contextlib.contextmanager
def typed(*words):
    """Within it, these are the words of the command line; sys.excepthook is put back."""
    argv, hook = sys.argv, sys.excepthook
    sys.argv = [str(ROOT / words[0]), *map(str, words[1:])]
    try:
        yield
    finally:
        sys.argv, sys.excepthook = argv, hook


def refused(*words):
    """Return (exit code, message) of the user's error that ends a script, run inside this process: a tenth of
    a second where a process of its own takes eight under load. Anything else that it raises goes through."""
    with typed(*words):
        try:
            runpy.run_path(sys.argv[0], run_name='__main__')
        except Exception as error:      # not kept: the script's lock on a folder goes with its traceback
            if not hasattr(error, 'exit_code'):
                raise
            code, message = error.exit_code, str(error)
        else:
            pytest.fail(f'{" ".join(map(str, words))} is not refused')
    assert '\n' not in message
    return code, message


def accepted(rows):
    """Return the rows (exit code, what the message holds, words) whose words are not refused so."""
    found = [(*row, *refused(*row[2])) for row in rows]
    return [row for row in found if row[0] != row[3] or row[1] not in row[4]]


@pytest.fixture
def here(capsys):
    """here(script, *words): what a script prints, run in this process, where a test can patch what it calls
    and send it signals."""
    def played(*words):
        handlers = {number: signal.getsignal(number) for number in distributed.StopRequest.signals}
        capsys.readouterr()
        try:
            with typed(*words):
                runpy.run_path(sys.argv[0], run_name='__main__')
        except SystemExit as end:
            assert not end.code, capsys.readouterr()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            gc.collect()            # the lock on the run's folder goes with the script's globals
        return capsys.readouterr().out
    return played


def start_ranks(ranks, *words, cwd=ROOT):
    """Start a script as torchrun does: a process for each rank, here a fork (see forked.start). The ranks
    meet in a store that listens in this process, as in that of torchrun's agent: no port is ever free."""
    store = torch.distributed.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    everywhere = {'WORLD_SIZE': ranks, 'LOCAL_WORLD_SIZE': ranks, 'MASTER_ADDR': '127.0.0.1',
                  'MASTER_PORT': store.port, 'TORCHELASTIC_USE_AGENT_STORE': True}
    words, started = [*map(str, words)], []
    for rank in range(ranks):
        place = {**everywhere, 'RANK': rank, 'LOCAL_RANK': rank}
        env = environment(**{name: str(value) for name, value in place.items()})
        started.append(forked.start(words, cwd, env))
    started[0][0].store = store     # it listens for as long as the processes are held
    return started


def in_ranks(ranks, *words, rc=0, timeout=240, cwd=ROOT):
    """start_ranks to its end: rank 0 with what all say on stderr. All end alike, and without a traceback."""
    started = start_ranks(ranks, *words, cwd=cwd)
    done = [forked.finish(words, *each, timeout=timeout) for each in started]
    done[0].stderr = ''.join(each.stderr for each in done)
    assert [each.returncode for each in done] == [rc] * ranks, done[0].stdout + done[0].stderr
    assert 'Traceback' not in done[0].stderr, done[0].stderr
    return done[0]


def records(directory, key):
    """[(step, value)] of a log.jsonl."""
    with open(pathlib.Path(directory) / 'log.jsonl') as file:
        return [(r['step'], r[key]) for r in map(json.loads, file) if key in r]


def losses(directory, after=0):
    """Step -> training loss, of the steps after one."""
    return {step: loss for step, loss in records(directory, 'train/loss') if step > after}


def equal(a, b):
    """Whether the files of two checkpoints hold the same bits."""
    parts = 'step', 'position', 'best_val_loss', 'weights', 'optimizer'
    a, b = ({part: state[part] for part in parts} for state in map(read, (a, b)))
    return same_tensors(a, b)


def write_tiny_data(parent, text=''):
    """A new folder of shards: 60,000 training tokens in two shards, 5,000 for validation, of text as bytes,
    by default of Python's own."""
    from fp8gpt.files import write_json
    from fp8gpt.shards import ShardWriter
    from fp8gpt.tokenizer import ByteTokenizer
    folder = parent / 'tiny-byte'
    folder.mkdir()
    text = text or pathlib.Path(subprocess.__file__).read_text() * 2
    tokenizer, splits, shards = ByteTokenizer(), {}, []
    for split, piece, size in (('train', text[:60_000], 32_000), ('val', text[60_000:65_000], 10**6)):
        writer = ShardWriter(folder, split, size, tokenizer.vocab_size)
        for start in range(0, len(piece), 1000):
            writer.add(np.concatenate([[tokenizer.eot], tokenizer.encode(piece[start:start + 1000])]))
        made = writer.save()
        shards += made
        n = sum(shard['tokens'] for shard in made)
        splits[split] = {'tokens': n, 'documents': len(piece) // 1000, 'bytes': len(piece.encode())}
    meta = {'tokenizer': 'byte', 'vocab_size': 257, 'eot': 256, 'splits': splits, 'shards': shards}
    write_json(str(folder / 'meta.json'), meta)
    return folder


def hellaswag_items(folder, count):
    """A folder of HellaSwag's validation items, as prepare_data.py leaves it."""
    (folder / 'hellaswag').mkdir()
    row = {'activity_label': 'Running', 'ctx_a': 'A man runs.', 'ctx_b': 'he',
           'endings': ['stops.', 'flies off.', 'is a pan.', 'runs on.']}
    lines = [json.dumps({**row, 'label': i % 4}) + '\n' for i in range(count)]
    (folder / 'hellaswag' / 'hellaswag_val.jsonl').write_text(''.join(lines))
    return folder


@functools.cache
def small_ranks():
    """A byte-pair encoding of 512 tokens, which tiktoken's own trainer makes of the LICENSE."""
    return bpe_train((ROOT / 'LICENSE').read_text(), 512, published.r50k_pat_str, visualise=None)


@pytest.fixture
def small_gpt2(monkeypatch):
    """Within the test, in this process and its forks, 'gpt2' is small_ranks and EOT, which take GPT-2's path.
    Returns tiktoken's Encoding."""
    encoding = tiktoken.Encoding('gpt2', pat_str=published.r50k_pat_str, mergeable_ranks=small_ranks(),
                                 special_tokens={'<|endoftext|>': 512})
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, 'gpt2', encoding)
    return encoding


@pytest.fixture(scope='session')
def of_all_workers(tmp_path_factory):
    """The folder that the workers share."""
    root = tmp_path_factory.getbasetemp()
    return root.parent if 'PYTEST_XDIST_WORKER' in os.environ else root


@pytest.fixture(scope='session')
def tiny_data(of_all_workers):
    """The folder of a tiny dataset."""
    with filelock.FileLock(of_all_workers / 'tiny-data.lock'):
        if not (of_all_workers / 'tiny-byte').exists():
            write_tiny_data(of_all_workers)
    return of_all_workers / 'tiny-byte'


@pytest.fixture(scope='session')
def tiny(tiny_data):
    """The flags of a tiny run, but for its checkpoint_dir."""
    return [*TINY, f'--dataset={tiny_data}']


@pytest.fixture(scope='session')
def one_run(tiny_data, of_all_workers):
    """one_run('train.py', *flags): (checkpoint_dir, stdout) of a tiny run of ten steps that evaluates and
    saves at steps 5 and 10 and keeps all checkpoints. Each command line runs once for all tests and workers,
    so a test must not write to the folder: it resumes into a checkpoint_dir of its own."""
    def made(*words):
        name = hashlib.sha256(' '.join(words).encode()).hexdigest()[:12]
        folder, out = (of_all_workers / f'run-{name}{end}' for end in ('', '.out'))
        with filelock.FileLock(f'{folder}.lock'):
            if not out.exists():
                flags = ['--checkpoint_freq=5', '--eval_freq=5', '--keep_checkpoints=0']
                done = run(words[0], *TINY, *flags, *words[1:], f'--dataset={tiny_data}',
                           f'--checkpoint_dir={folder}')
                out.write_text(done.stdout)
        return folder, out.read_text()
    return made


@pytest.fixture(scope='session')
def chat_folder(tmp_path_factory):
    """The folder of a tokenizer with a chat template, and two tokens that end an answer."""
    from tokenizers_made import CHATML, END, END_OF_TURN, make_tokenizer
    stops = {'eos_token_id': [END, END_OF_TURN]}
    return make_tokenizer(tmp_path_factory.mktemp('made') / 'talker', generation=stops, chat_template=CHATML)
