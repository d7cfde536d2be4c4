"""What goes wrong, on purpose and at random: `make drill`, six minutes on two cores.

$ python tests/drill.py                 # all; another --seed draws other cases
$ python tests/drill.py --only=files --cases=50

    training     runs of train_fp8.py that evaluate, test and write samples; killed, or asked to stop by
                 SIGTERM or a file STOP, at any moment, and resumed: weights and log of an undisturbed one
    ranks        the same on two ranks, whose state is gathered; ranks with unlike flags
    disk         runs on a disk of up to 4 MB with TensorBoard, and W&B where it is installed, resumed on a
                 larger one: likewise; for who may mount a file system
    preparing    prepare_data.py, killed: the same bytes
    files        a checkpoint, token shards, meta.json, log.jsonl with flipped bits and cuts: reported, or
                 harmless
    checkpoints  checkpoints and adapters of which one entry is another: reported, or finite logits
    folders      Hugging Face models with wrong fields, dtypes, NaN, names of files elsewhere: likewise
    templates    chat templates and messages that strangers may write: reported, or an example

A case is clean, or it is a traceback, a hang, or something taken that is not what it was. The last line says
how many were tried and how many were clean; the exit code is 1 where one was not, or fewer ran than declared.
"""
import concurrent.futures
import contextlib
import functools
import importlib.util
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1])]
os.environ['OMP_NUM_THREADS'] = '1'
os.environ['WANDB_MODE'] = 'offline'

from configurator import configure  # noqa: E402

only = 'all'  # all | training | ranks | disk | preparing | files | checkpoints | folders | templates
cases = 0       # >= 0: of each part; 0 = as declared below
seed = 0        # >= 0: of what is drawn
config = configure(__file__, None if __name__ == '__main__' else [])
globals().update(config)

import forked  # noqa: E402
from fp8gpt import checkpoint, data, files  # noqa: E402
from conftest import ROOT, RANK_IN_WORDS, TINY, hellaswag_items, records, runner  # noqa: E402
from conftest import start_ranks, write_tiny_data  # noqa: E402
from damage import checkpoints_taken, folders_taken, survived, templates_taken  # noqa: E402
from preparing import BYTES, everything, parquet, texts  # noqa: E402
from fp8gpt.shards import check  # noqa: E402
from fp8gpt.tokenizer import get_tokenizer  # noqa: E402
from helpers import opened, same_tensors  # noqa: E402
from tokenizers_made import CHATML, make_tokenizer  # noqa: E402

DECLARED = {'training': 30, 'ranks': 10, 'disk': 8, 'preparing': 30, 'files': 2400,
            'checkpoints': 1000, 'folders': 1000, 'templates': 500}
PATIENCE = 120      # seconds after which a case hangs
WAYS = 'kill', 'SIGTERM', 'STOP'
KILLED = -signal.SIGKILL, -signal.SIGTERM       # the second: before Python has set a handler
EARLY = 128 + signal.SIGTERM                    # SIGTERM before the first step


def ended(words, started):
    """The CompletedProcess of what start_ranks returned; None where it hangs. As under torchrun, the first
    rank that fails ends the others, and is the one that is reported."""
    processes, deadline = [process for process, _ in started], time.monotonic() + PATIENCE
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode for process in processes):
            break
        time.sleep(0.02)
    first = next((number for number, process in enumerate(processes) if process.exitcode), 0)
    hangs = time.monotonic() > deadline
    for process in processes:
        process.kill()
    words = [*map(str, words)]
    done = [forked.finish(words, *each, PATIENCE) for each in started]
    return None if hangs else done[first]


def played(words, ranks=1, cwd=ROOT):
    """The CompletedProcess of a script; None where it hangs."""
    return ended(words, start_ranks(ranks, *words, cwd=cwd))


def trouble(done, codes=(0,)):
    """Why an ended process is not clean, or ''."""
    if done is None:
        return 'hangs'
    if 'Traceback' in done.stderr:
        return done.stderr.strip().splitlines()[-1]
    if done.returncode not in codes:
        return f'exit code {done.returncode}: {(done.stderr.strip() or done.stdout.strip())[-300:]}'
    errors = done.stderr.count('error: ')
    return '' if errors == (done.returncode > 0) else f'{errors} lines of error: {done.stderr[-300:]}'


# ------------------------------------------------------------------------------------ runs that are disturbed

def disturbed(words, folder, draw, longest, ranks):
    """Start a run, and kill it or ask it to stop at a random moment. Return (whether that came before its
    end, why it was not clean or '')."""
    before, started = len(losses_in(folder)), start_ranks(ranks, *words)
    way, wait, after = draw.choice(WAYS), draw.uniform(0, longest), draw.randint(1, 10)
    if draw.random() < 0.5:         # after some steps; else at any time, most often before the first
        while len(losses_in(folder)) < before + after and started[0][0].is_alive():
            time.sleep(0.01)
    else:
        started[0][0].join(wait)
    in_time, steps = started[0][0].is_alive(), len(losses_in(folder))
    if in_time and way == 'STOP' and folder.is_dir():
        (folder / 'STOP').touch()
    elif in_time:
        for process, _ in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL if way == 'kill' else signal.SIGTERM)
            time.sleep(draw.uniform(0, 0.05))
    done = ended(words, started)
    why = trouble(done, (0, EARLY, *KILLED))
    under_way = before < steps < 0.8 * STEPS       # else it may not have begun to listen, or be at its end
    heard = done and re.search('stopped at step|asked to stop', done.stdout)    # the latter alone at step 0
    if not why and done.returncode == 0 and in_time and under_way and not heard:
        why = f'{way} was ignored'
    return in_time, why


STEPS = 30
RUN = [*TINY, f'--max_steps={STEPS}', '--checkpoint_freq=1', '--eval_freq=3', '--sample_freq=5',
       '--hellaswag_freq=4', '--max_lr=1', '--warmup_steps=30', '--grad_clip=0', '--resume=auto']
LOGGED = 'train/loss', 'val/loss', 'hellaswag/acc', 'sample'


def drill_runs(words, cases, draw, folder, ranks=1):
    """Disturb runs at rates that rise so high that the best loss is an early one: each is to end as an
    undisturbed one does."""
    words = [*words, *RUN, f'--dataset={write_tiny_data(folder)}', f'--data_dir={hellaswag_items(folder, 6)}']
    started = time.time()
    alone = played([*words, f'--checkpoint_dir={folder}/alone'], ranks=ranks)
    longest, wrong, tried = time.time() - started, [trouble(alone)] if trouble(alone) else [], 0
    while tried < cases and not wrong:
        run = folder / f'disturbed-{tried}'
        command, before = [*words, f'--checkpoint_dir={run}'], tried
        for _ in range(min(8, cases - tried)):
            in_time, why = disturbed(command, run, draw, longest, ranks)
            tried, wrong = tried + in_time, wrong + [why] * bool(why)
            if wrong or not in_time:
                break
        last = trouble(played(command, ranks=ranks))
        wrong += [last] if last else unlike(run, folder / 'alone')
        wrong = [f'{why}, after {tried - before} disturbances' for why in wrong]
        shutil.rmtree(run)
    return tried, wrong


def unlike(run, alone):
    """In what a run differs from an undisturbed one: a list."""
    wrong = []
    for name in 'latest', 'best_model':
        found, expected = (checkpoint.read(f'{folder}/{name}.pt') for folder in (run, alone))
        if not all(same_tensors(found[key], expected[key]) for key in ('weights', 'step', 'best_val_loss')):
            wrong.append(f'another {name}.pt, of step {found["step"]}')
    return wrong + [f'another {key} in the log' for key in LOGGED
                    if dict(records(run, key)) != dict(records(alone, key))]


def losses_in(folder):
    """Training losses in a run's log, which may be being written."""
    return files.read_log(folder / 'log.jsonl')


def drill_training(cases, draw, folder):
    """Disturb runs in FP8 with delayed scaling."""
    return drill_runs(['train_fp8.py', '--fp8_backend=native', '--fp8_recipe=delayed'], cases, draw, folder)


def drill_ranks(cases, draw, folder):
    """Disturb runs on two ranks whose state is sharded; and start one whose ranks differ."""
    words = [ROOT / 'train.py', '--sharding_mode=fsdp_full']
    tried, wrong = drill_runs(words, cases, draw, folder, ranks=2)
    word = draw.choice(['--seed=RANK', '--max_lr=1e-RANK', '--min_lr_ratio=0.RANK', '--beta2=0.9RANK'])
    words = [runner(folder, RANK_IN_WORDS), 'train.py', *RUN, f'--dataset={folder}/tiny-byte', word]
    done = played([*words, f'--checkpoint_dir={folder}/unlike'], ranks=2)
    if trouble(done, (2,)) or 'rank 0 has' not in done.stderr:
        wrong.append(f'ranks with {word} are not refused')
    return tried, wrong


def drill_disk(cases, draw, folder):
    """Runs on a small disk: each ends, or says in one line that it is full, and goes on elsewhere."""
    small, wrong, tried = folder / 'small', [], 0
    small.mkdir()
    words = [ROOT / 'train_fp8.py', '--fp8_backend=native', *RUN, f'--dataset={write_tiny_data(folder)}',
             f'--data_dir={hellaswag_items(folder, 6)}', '--use_tensorboard', '--checkpoint_dir=run']
    words += ['--use_wandb'] * bool(importlib.util.find_spec('wandb'))
    (folder / 'alone').mkdir()
    wrong += filter(None, [trouble(played(words, cwd=folder / 'alone'))])
    for number in range(cases):
        size, large = draw.choice([16, 64, 256, 1000, 2000, 4000]), folder / f'large-{number}'
        subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size}k', 'none', small], check=True)
        try:
            why = trouble(played(words, cwd=small), (0, 1))
            shutil.copytree(small, large)
        finally:
            subprocess.run(['umount', small], check=True)
        why = why or trouble(played(words, cwd=large))
        found = [why] if why else unlike(large / 'run', folder / 'alone' / 'run')
        wrong += [f'{size} KiB: {why}' for why in found]
        tried += 1
    return tried, wrong


def drill_preparing(cases, draw, folder):
    """Kills of preparing."""
    parquet(folder / 'a.parquet', texts(3000, 1))
    words = ['prepare_data.py', 'mine', f'--data_files={folder}/*.parquet', BYTES, '--num_workers=2',
             '--shard_tokens=60_000', '--val_fraction=0.2']
    started = time.time()
    alone = played([*words, f'--data_dir={folder}/alone'])
    longest, wrong, tried = time.time() - started, [trouble(alone)] if trouble(alone) else [], 0
    expected = everything(folder / 'alone' / 'mine-byte')
    while tried < cases and not wrong:
        run, kills, code = folder / f'killed-{tried}', 0, None
        while code != 0 and not wrong:
            started = start_ranks(1, *words, f'--data_dir={run}')
            if kills < min(8, cases - tried):
                started[0][0].join(draw.uniform(0, longest))
                started[0][0].kill()
            done = ended(words, started)
            code, why = done and done.returncode, trouble(done, (0, *KILLED))
            kills, wrong = kills + (code != 0), [why] if why else []
        tried += kills
        if not wrong and everything(run / 'mine-byte') != expected:
            wrong.append(f'other bytes after {kills} kills')
        shutil.rmtree(run, ignore_errors=True)
    return tried, wrong


def drill_files(cases, draw, folder):
    """Damages of what is read: told in one line, or without effect."""
    shards = pathlib.Path(write_tiny_data(folder))
    words = ['train.py', *TINY, f'--dataset={shards}', '--n_layer=1', f'--checkpoint_dir={folder}/run']
    wrong = [why for why in [trouble(played(words))] if why]
    saved, log = f'{folder}/run/latest.pt', f'{folder}/run/log.jsonl'

    def tokens_read(path):
        check(opened(shards))
        return b''.join(tokens.tobytes() for tokens in data.TokenData(opened(shards), 'train', 64).shards)

    def steps_read(path):   # a log has no checksum: a digit may have flipped
        return [record['step'] for record in files.read_log(path)]

    reads = {saved: checkpoint.read, str(min(shards.glob('train_*.bin'))): tokens_read,
             str(shards / 'meta.json'): tokens_read, log: steps_read}
    each = cases // len(reads)
    for path, read in reads.items():
        same = functools.partial(same_tensors, read(path))
        if path == log:
            same = functools.partial(lambda whole, found: len(found) <= len(whole), read(path))
        found = survived(path, read, same, each, seed=draw.random())
        wrong += [f'{os.path.basename(path)}: {what}' for what in found]
    return each * len(reads), wrong


def drill_checkpoints(cases, draw, folder):
    """Checkpoints and adapters with an entry that a run would not write."""
    return cases, checkpoints_taken(str(folder), cases, seed=draw.random())


def drill_templates(cases, draw, folder):
    """Chat templates and messages, as strangers may write them."""
    made = make_tokenizer(folder / 'talker', chat_template=CHATML)
    return cases, templates_taken(get_tokenizer(made), cases, seed=draw.random())


def drill_folders(cases, draw, folder):
    """Folders in Hugging Face's format, as a stranger may write them."""
    return cases, folders_taken(str(folder), cases, seed=draw.random())


PARTS = {name: globals()[f'drill_{name}'] for name in DECLARED}


def drilled(name):
    """(cases tried, [why one was not clean], seconds) of a part."""
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        draw = random.Random(f'{seed} {name}')
        tried, wrong = PARTS[name](cases or DECLARED[name], draw, pathlib.Path(folder))
    return tried, wrong, time.time() - started


def main():
    names, result, failed = [only] if only != 'all' else list(PARTS), {}, False
    with concurrent.futures.ProcessPoolExecutor(2) as pool:
        parts = pool.map(drilled, names)
        for name, (tried, wrong, took) in zip(names, parts):
            for line in wrong:
                print(f'{name}: {line}')
            clean = tried - len(wrong)
            print(f'{name:<11} {tried:>5} tried, {clean:>5} clean, {took:.0f} s', flush=True)
            result[name] = {'tried': tried, 'clean': clean}
            failed |= clean < (cases or DECLARED[name])
    print(json.dumps(result))
    sys.exit(failed)


if __name__ == '__main__':
    main()
