"""What goes wrong, on purpose and at random: `make drill`, at most ten minutes on two cores.

$ python tests/drill.py                 # all; another --seed draws other cases
$ python tests/drill.py --only=settings --cases=50

    training    runs of train_fp8.py, killed at any moment and resumed: the weights of an undisturbed one
    preparing   prepare_data.py, killed likewise: the same bytes
    files       a checkpoint, a shard, meta.json, log.jsonl with bits flipped, cut, zeroed: told, or no harm
    settings    each setting in its declared range and beyond: taken as it is, or refused in one line

A case is clean, or it is a traceback, a hang, or something taken that is not what it was. The last line says
how many were tried and how many were clean; the exit code is 1 where one was not, or fewer ran than declared.
"""
import concurrent.futures
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[1])]
os.environ['OMP_NUM_THREADS'] = '1'

from configurator import Choices, configure, declared, read_script  # noqa: E402

only = 'all'    # all | training | preparing | files | settings
cases = 0       # >= 0: of each part; 0 = as declared below
seed = 0        # >= 0: of what is drawn
globals().update(configure(__file__, None if __name__ == '__main__' else []))

import torch  # noqa: E402

import checkpoint  # noqa: E402
import data  # noqa: E402
import forked  # noqa: E402
import runlog  # noqa: E402
from conftest import ROOT, TINY, environment, refused, write_tiny_data  # noqa: E402
from damage import survived  # noqa: E402
from preparing import BYTES, everything, parquet, texts  # noqa: E402
from shards import check  # noqa: E402

DECLARED = {'training': 30, 'preparing': 30, 'files': 2000, 'settings': 500}
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

def drill_training(cases, draw, folder):
    """Kills of training."""
    words = ['train_fp8.py', *TINY, f'--dataset={write_tiny_data(folder)}', '--fp8_backend=native',
             '--fp8_recipe=delayed', '--max_steps=30', '--checkpoint_freq=1', '--eval_freq=3',
             '--resume=auto']
    started = time.time()
    alone = played([*words, f'--checkpoint_dir={folder}/alone'])
    longest, wrong, tried = time.time() - started, [trouble(alone)] if trouble(alone) else [], 0
    expected = checkpoint.load(f'{folder}/alone/latest.pt')['weights']
    while tried < cases and not wrong:
        run = f'{folder}/killed-{tried}'
        found, kills = killed_until_done(
            [*words, f'--checkpoint_dir={run}'], draw, longest, min(8, cases - tried))
        tried, wrong = tried + kills, wrong + found
        if not found:
            weights = checkpoint.load(f'{run}/latest.pt')['weights']
            if not all(torch.equal(w, weights[name]) for name, w in expected.items()):
                wrong.append(f'other weights after {kills} kills')
        shutil.rmtree(run, ignore_errors=True)
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
        return all(torch.equal(w, found['weights'][name]) for name, w in state['weights'].items())

    tokens = data.TokenData(str(shards), 'train', 64).tokens

    def checked(path):
        (shards / '.checked.json').unlink(missing_ok=True)
        check(str(shards), 257, lambda line: None)
        return data.TokenData(str(shards), 'train', 64).tokens

    records = runlog.read_log(f'{folder}/run/log.jsonl')[0]

    def told_records(path):
        """Steps of the records that are left of a log, which has no checksum: a digit may have flipped."""
        return [record['step'] for record in runlog.read_log(path)[0]]

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
    return each * len(parts), wrong


def draws(allowed, default, draw):
    """(a value in what is allowed, a value beyond; None where there is none)."""
    if isinstance(allowed, Choices):
        words = [str(word) for word in allowed.words] or [str(default)]
        return draw.choice(words), None if allowed.any_text else draw.choice(['nonsense', '-7', 'nan'])
    (sign, low), *rest = allowed.bounds
    high = rest[0][1] if rest else low + 64
    inside = draw.uniform(low, high)
    if isinstance(default, int):
        top = int(high) - bool(rest and rest[0][0] == '<')
        inside = min(max(round(inside), int(low) + (sign == '>')), top)
    beyond = [low - 1, float('nan'), 'x', *([high + 1] if rest else [])]
    return inside, draw.choice(beyond)


def in_range(words):
    """Why a case is not clean, or ''. Settings that are right by themselves may contradict each other."""
    return trouble(played(words), codes=(0, 1, 2))


def beyond_range(words):
    """Likewise, in this process: nothing of the script but its settings runs."""
    try:
        code, _ = refused(*words)
    except BaseException as error:
        return f'{type(error).__name__}: {error}'
    return '' if code == 2 else f'exit code {code}'


def drill_settings(cases, draw, folder):
    """Settings of train_fp8.py in their range and beyond it, through the script's dry run."""
    shards = write_tiny_data(folder)
    script = str(ROOT / 'train_fp8.py')
    defaults, allowed, jobs = read_script(script)[0], declared(script), []
    names = sorted(allowed.keys() - {'dry_run', 'list_checkpoints', 'resume', 'checkpoint_dir', 'dataset'})
    while len(jobs) < cases:
        name = names[len(jobs) // 2 % len(names)]
        values = draws(allowed[name], defaults[name], draw)
        value, code = values[len(jobs) % 2], len(jobs) % 2      # code: whether it is to be refused
        if value is None:
            value, code = values[0], 0
        words = ['train_fp8.py', *TINY, f'--dataset={shards}', f'--checkpoint_dir={folder}/none',
                 '--dry_run', f'--{name}={value}']
        jobs.append((words, code))
    inside, beyond = ([words for words, code in jobs if code == wanted] for wanted in (0, 1))
    found = [*map(in_range, inside), *map(beyond_range, beyond)]
    wrong = [f'{words[-1]}: {why}' for words, why in zip([*inside, *beyond], found) if why]
    if os.path.exists(f'{folder}/none'):
        wrong.append('a dry run wrote something')
    return len(jobs), wrong


PARTS = {'training': drill_training, 'settings': drill_settings, 'preparing': drill_preparing,
         'files': drill_files}


def drilled(name):
    """(cases tried, [why one was not clean], seconds) of a part."""
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        draw = random.Random(f'{seed} {name}')
        tried, wrong = PARTS[name](cases or DECLARED[name], draw, pathlib.Path(folder))
    return tried, wrong, time.time() - started


def main():
    names, result, failed = [only] if only != 'all' else list(PARTS), {}, False
    # not threads: a refused case is this process's __main__ for a moment, and a fork would take it for its
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
