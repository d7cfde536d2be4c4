"""What goes wrong, on purpose and at random: `make drill`, at most ten minutes on two cores.

$ python tests/drill.py                 # all; another --seed draws other cases
$ python tests/drill.py --only=files --cases=50

    training    runs of train_fp8.py, stopped or killed at any moment and resumed: the weights and the best
                validation loss of an undisturbed one
    preparing   prepare_data.py, killed likewise: the same bytes
    files       a checkpoint, a shard, meta.json, log.jsonl with flipped bits and cuts: reported, or harmless
    folders     Hugging Face models with wrong fields, dtypes, NaN, names of files elsewhere: likewise

A case is clean, or it is a traceback, a hang, or something taken that is not what it was. The last line says
how many were tried and how many were clean; the exit code is 1 where one was not, or fewer ran than declared.
"""
import concurrent.futures
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zlib

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1])]
os.environ['OMP_NUM_THREADS'] = '1'

from configurator import configure  # noqa: E402

only = 'all'    # all | training | preparing | files | folders
cases = 0       # >= 0: of each part; 0 = as declared below
seed = 0        # >= 0: of what is drawn
config = configure(__file__, None if __name__ == '__main__' else [])
globals().update(config)

import torch  # noqa: E402

from fp8gpt import checkpoint  # noqa: E402
from fp8gpt import data  # noqa: E402
import forked  # noqa: E402
from fp8gpt import runlog  # noqa: E402
from conftest import ROOT, TINY, environment, write_tiny_data  # noqa: E402
from damage import folders_taken, survived  # noqa: E402
from preparing import BYTES, everything, parquet, texts  # noqa: E402
from fp8gpt.shards import check  # noqa: E402

DECLARED = {'training': 30, 'preparing': 30, 'files': 2000, 'folders': 1000}
PATIENCE = 120      # seconds after which a case hangs
KILLED = -9


def played(words, kill_after=None):
    """The CompletedProcess of a script in a fork; None where it hangs. kill_after: seconds."""
    process, streams = forked.start([*map(str, words)], ROOT, environment())
    if kill_after is not None:
        process.join(kill_after)
        process.kill()
    try:
        return forked.finish(words, process, streams, PATIENCE)
    except subprocess.TimeoutExpired:
        return None


def trouble(done, codes=(0,)):
    """Why an ended process is not clean, or ''."""
    if done is None:
        return 'hangs'
    if 'Traceback' in done.stderr:
        return done.stderr.strip().splitlines()[-1]
    if done.returncode not in codes:
        return f'exit code {done.returncode}: {(done.stderr.strip() or done.stdout.strip())[-300:]}'
    errors = done.stderr.count('error: ')
    return '' if errors == bool(done.returncode) else f'{errors} lines of error: {done.stderr[-300:]}'


def killed_until_done(words, draw, longest, most):
    """Runs the words, killed after a random time again and again until a run ends by itself: ([why a run was
    not clean], kills). longest: seconds; most: kills, after which it is left alone."""
    wrong, kills = [], 0
    while True:
        left_alone = kills >= most
        done = played(words, None if left_alone else draw.uniform(0, longest))
        if done is not None and done.returncode == KILLED:
            kills += 1
            why = 'a traceback' if 'Traceback' in done.stderr else ''
        else:
            why = trouble(done)
        wrong += [why] if why else []
        if why or done.returncode == 0:
            return wrong, kills


# -------------------------------------------------------------------------------------------------- the parts

def stopped(words, folder, draw):
    """Starts a run, asks it to stop by a file STOP in its folder after some of 30 steps: ([why it was not
    clean], whether it was in time to be stopped)."""
    process, streams = forked.start([*map(str, words)], ROOT, environment())
    after, deadline = draw.randint(1, 15), time.monotonic() + PATIENCE
    while len(losses_in(folder)) < after and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.005)
    (folder / 'STOP').touch()
    in_time = process.is_alive() and len(losses_in(folder)) < 25
    done = forked.finish(words, process, streams, PATIENCE)
    if not trouble(done) and in_time and not re.search('stopped at step|asked to stop', done.stdout):
        return ['STOP was ignored'], in_time
    return [trouble(done)] if trouble(done) else [], in_time


def losses_in(folder):
    """Training losses in a run's log, which may be being written."""
    log = folder / 'log.jsonl'
    return runlog.read_log(log) if log.exists() else []


def drill_training(cases, draw, folder):
    """A stop and kills of training, at rates that rise so high that the best loss is an early one."""
    words = ['train_fp8.py', *TINY, f'--dataset={write_tiny_data(folder)}', '--fp8_backend=native',
             '--fp8_recipe=delayed', '--max_steps=30', '--checkpoint_freq=1', '--eval_freq=3',
             '--max_lr=1', '--warmup_steps=30', '--grad_clip=0', '--resume=auto']
    started = time.time()
    alone = played([*words, f'--checkpoint_dir={folder}/alone'])
    longest, wrong, tried = time.time() - started, [trouble(alone)] if trouble(alone) else [], 0
    expected, best = (checkpoint.load(f'{folder}/alone/{name}.pt') for name in ('latest', 'best_model'))
    if best['step'] > 15:
        wrong.append(f'step {best["step"]} is best: few kills after it would show that it is lost')
    while tried < cases and not wrong:
        run = folder / f'killed-{tried}'
        command = [*words, f'--checkpoint_dir={run}']
        wrong, in_time = stopped(command, run, draw)
        found, kills = killed_until_done(command, draw, longest, min(8, cases - tried - 1))
        tried, wrong = tried + kills + in_time, wrong + found
        if not wrong:
            latest, found = (checkpoint.load(f'{run}/{name}.pt') for name in ('latest', 'best_model'))
            if not same_tensors(latest['weights'], expected['weights']):
                wrong.append(f'other weights after {kills} kills')
            losses = [state['best_val_loss'] for state in (latest, found)]
            if [found['step'], *losses] != [best['step'], *[best['best_val_loss']] * 2]:
                wrong.append(f'step {found["step"]} is best, of {losses}, not {best["step"]}')
        shutil.rmtree(run, ignore_errors=True)
    return tried, wrong


def same_tensors(a, b):
    """Whether two dicts, nested or not, hold the same names, tensors and values."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_tensors(a[name], b[name]) for name in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


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
        run = folder / f'killed-{tried}'
        found, kills = killed_until_done([*words, f'--data_dir={run}'], draw, longest, min(8, cases - tried))
        tried, wrong = tried + kills, wrong + found
        if not found and everything(run / 'mine-byte') != expected:
            wrong.append(f'other bytes after {kills} kills')
        shutil.rmtree(run, ignore_errors=True)
    return tried, wrong


def drill_files(cases, draw, folder):
    """Damages of what is read: told in one line, or without effect."""
    shards = pathlib.Path(write_tiny_data(folder))
    words = ['train.py', *TINY, f'--dataset={shards}', '--n_layer=1', f'--checkpoint_dir={folder}/run']
    wrong = [why for why in [trouble(played(words))] if why]
    saved = f'{folder}/run/latest.pt'
    state = checkpoint.load(saved)

    def same_state(found):
        return same_tensors(found, state)

    def tokens_read():
        crc = 0
        for tokens in data.TokenData(str(shards), 'train', 64).shards:
            crc = zlib.crc32(tokens.tobytes(), crc)
        return crc

    def checked(path):
        (shards / '.checked.json').unlink(missing_ok=True)
        check(str(shards), 257, lambda line: None)
        return tokens_read()
    tokens = tokens_read()

    records = runlog.read_log(f'{folder}/run/log.jsonl')

    def told_records(path):
        """Steps of the records that are left of a log, which has no checksum: a digit may have flipped."""
        return [record['step'] for record in runlog.read_log(path)]

    each = cases // 4
    shard = next(iter(sorted(shards.glob('train_*.bin'))))
    parts = [
        (saved, checkpoint.load, same_state),
        (str(shard), checked, lambda found: found == tokens),
        (str(shards / 'meta.json'), checked, lambda found: found == tokens),
        (f'{folder}/run/log.jsonl', told_records, lambda found: len(found) <= len(records)),
    ]
    for path, read, same in parts:
        found = survived(path, read, same, each, seed=draw.random())
        wrong += [f'{os.path.basename(path)}: {what}' for what in found]
    return each * 4, wrong


def drill_folders(cases, draw, folder):
    """Folders in Hugging Face's format, as a stranger may write them."""
    return cases, folders_taken(str(folder), cases, seed=draw.random())


PARTS = {'training': drill_training, 'preparing': drill_preparing, 'files': drill_files,
         'folders': drill_folders}


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
            print(f'{name:<10} {tried:>5} tried, {clean:>5} clean, {took:.0f} s', flush=True)
            result[name] = {'tried': tried, 'clean': clean}
            failed |= clean < (cases or DECLARED[name])
    print(json.dumps(result))
    sys.exit(failed)


if __name__ == '__main__':
    main()
