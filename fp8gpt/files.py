"""Write files whole or not at all, hold locks, read logs, find checkpoints, whatever a kill left."""
import contextlib
import errno
import glob
import json
import os
import re
import secrets
import time
from os.path import dirname, isdir, isfile, join

import filelock

from configurator import DataError, MissingError, printable, say  # noqa: F401  files.printable has callers


def write(path, fill):
    """Write a file whole, to the disk, or leave the old file and raise DataError. fill(file) writes the
    content, bytes. The file's folder is made where there is none."""
    temporary = temporary_name(path)
    try:
        os.makedirs(dirname(path) or '.', exist_ok=True)
        with open(temporary, 'xb') as file:     # x: made anew, through no link
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        rename(temporary, path)
    except (OSError, RuntimeError) as error:
        remove(temporary)
        cause = error.__context__ if isinstance(error, RuntimeError) else error     # torch wraps it
        reason = getattr(cause, 'strerror', None) or 'is the disk full?'
        raise DataError(f'could not write {path} ({reason})') from error


def temporary_name(path):
    """Return a name beside `path` that nothing has yet, and that temporary_names finds after a kill."""
    return f'{path}.fp8gpt-{secrets.token_hex(4)}.tmp'


def temporary_names(path):
    """Return the names that temporary_name has given beside `path`, a glob, to what a kill left."""
    return glob.glob(f'{path}.fp8gpt-{"[0-9a-f]" * 8}.tmp')


def rename(old, new):
    """Rename a file so that a power cut does not undo it: the folder is flushed to the disk, too."""
    os.replace(old, new)
    folder = os.open(dirname(new) or '.', os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot
            raise
    finally:
        os.close(folder)


def remove(path):
    """Remove a file, if it exists and can be removed."""
    with contextlib.suppress(OSError):
        os.remove(path)


def write_text(path, text):
    """Write a text whole or not at all."""
    write(path, lambda file: file.write(text.encode()))


def write_json(path, value):
    """Write a JSON file whole or not at all."""
    write_text(path, json.dumps(value, indent=1))


def read_json(path):
    """Return the JSON object in a file; {} where there is none, or no file: a pipe would be waited for.
    Raises OSError for a file that cannot be read, as without permission."""
    with contextlib.suppress(FileNotFoundError, ValueError, RecursionError):
        if isfile(path):
            with open(path, encoding='utf-8') as file:
                value = json.load(file)
            return value if isinstance(value, dict) else {}
    return {}


def read_log(path):
    """Return the records of a log.jsonl, [] where there is none, or no file: a pipe would be waited for.
    Lines that a kill or a disk damaged are left out."""
    records = []
    if not isfile(path):
        return records
    with open(path, encoding='utf-8', errors='replace') as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
                step = record.get('step') if isinstance(record, dict) else None
                if type(step) is int and 0 <= step < 2**63:
                    records.append(record)
    return records


def lock(path, refusal, waits=False):
    """Hold the lock on a file, which is made where there is none, and return it: a context, to be kept. The
    system drops it when the process ends, however that is. Raises DataError(refusal) where another process
    holds it for more than a second: so long may forks of a killed process outlive it. `waits`: for its end.

    On a disk without flock, the lock is the file itself, with pid and host, which a killed process leaves
    behind. A lock of another host that is_stale is taken over; for any other, the error names the file."""
    try:
        return filelock.FileLock(path).acquire(timeout=1)
    except filelock.Timeout as timeout:
        named = re.search('held by (.*), which', str(timeout))     # of another host, on a disk without flock
    except OSError as error:
        if error.filename:
            raise
        raise DataError(f'{path} cannot be locked ({error.strerror}): take a folder on another disk, or '
                        'mount this one with locks (NFS: local_lock=flock)') from error
    if named and is_stale(path):
        os.remove(path)
        say(f'{path} was left by {named[1]}, whose run is gone: taken over')
        return lock(path, refusal, waits)
    if named:
        refusal += f'; if {named[1]} is gone, remove {path}'
    if not waits:
        raise DataError(refusal)
    say(f'waiting: {refusal}')
    return filelock.FileLock(path).acquire()


def is_stale(path):
    """Return whether the log beside a run's lock says that the run is gone: SLURM has requeued its job since,
    as this one, or neither the lock nor the log has changed for an hour."""
    log = join(dirname(path), 'log.jsonl')
    starts = [record for record in read_log(log) if isinstance(record.get('time'), float)]
    if not starts:
        return False    # a dataset's, or a run that has logged nothing
    with contextlib.suppress(OSError):
        locked, job = os.path.getmtime(path), os.environ.get('SLURM_JOB_ID')
        requeued = job and starts[-1].get('slurm_job_id') == job and (
            starts[-1].get('slurm_restart_count') != os.environ.get('SLURM_RESTART_COUNT'))
        silent = time.time() - max(locked, os.path.getmtime(log))
        return bool(requeued and starts[-1]['time'] > locked) or silent > 3600
    return False


def checkpoint_of(path):
    """Return a checkpoint's path: latest.pt of a folder, any other path itself."""
    return join(path, 'latest.pt') if isdir(path) else path


def checkpoint_file(path):
    """Return checkpoint_of(path). Raises MissingError where there is no such file."""
    path = checkpoint_of(path)
    if not isfile(path):
        raise MissingError(f'there is no checkpoint {path}{checkpoints()}')
    return path


def checkpoints():
    """Return a clause that names the folders here with checkpoints; '' where there are none."""
    found = sorted(dirname(path) for path in glob.glob('*/latest.pt'))
    return f' (there are checkpoints in {", ".join(found[:5])})' if found else ''
