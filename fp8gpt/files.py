"""Write files whole or not at all, hold locks, read texts and logs, find checkpoints."""
import codecs
import contextlib
import errno
import glob
import io
import itertools
import json
import os
import re
import secrets
import time
from os.path import dirname, exists, isdir, isfile, join, lexists, samefile

import filelock

from configurator import (  # noqa: F401  files.printable has callers
    DataError, MissingError, first_line, printable, say)

PACKED = '.gz', '.zst'      # endings of files that open_bytes unpacks
PART = 2**20    # bytes that text_of decodes at once
# UTF-32 before UTF-16, whose mark begins it
MARKS = {codecs.BOM_UTF32_LE: 'utf-32', codecs.BOM_UTF32_BE: 'utf-32', codecs.BOM_UTF16_LE: 'utf-16',
         codecs.BOM_UTF16_BE: 'utf-16', codecs.BOM_UTF8: 'utf-8-sig'}


def write(path, fill):
    """Write a file whole, to the disk, or leave the old file and raise DataError, whose errno is the
    system's, or None. fill(file) writes the content, bytes. The file's folder is made where there is none.
    A device, as /dev/null, is not replaced."""
    temporary = temporary_name(path)
    try:
        if lexists(path) and os.lstat(path).st_rdev:
            raise OSError(errno.EINVAL, 'it is a device')
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
        problem = DataError(f'could not write {path} ({reason})')
        problem.errno = getattr(cause, 'errno', None)
        raise problem from error


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
        # some network and FUSE file systems cannot
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
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


def json_text(value, indent=None):
    """Return a value as JSON, in which text stands for NaN and infinity."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=str), indent=indent)


def write_json(path, value):
    """Write a JSON file whole or not at all."""
    write_text(path, json_text(value, indent=1))


def open_bytes(path):
    """Open a file to read its bytes; those of a .gz or .zst file are unpacked."""
    if not path.endswith(PACKED):
        return open(path, 'rb')
    import pyarrow
    return pyarrow.input_stream(path)   # it detects the compression by the name


def marked_codec(path):
    """Return the codec of a file's byte order mark, which drops the mark; '' where there is none. Raises
    DataError for a file that cannot be read, as one that is not packed as its name says."""
    try:
        with open_bytes(path) as file:
            head = file.read(4)
    except OSError as error:
        raise DataError(f'{path} cannot be read ({first_line(error)}): fetch or write it again') from error
    return next((MARKS[mark] for mark in MARKS if head.startswith(mark)), '')


def text_of(path, encoding=''):
    """Yield the text of a file in parts, with line ends as Python reads them. A byte order mark decides the
    encoding and is dropped; without one the file is in `encoding`, or UTF-8.

    Raises DataError for bytes that are no such text, and for a NUL, which UTF-16 without a mark has after
    each letter. The error counts bytes from 0."""
    at, codec = 0, marked_codec(path) or encoding or 'utf-8'
    decoder = codecs.getincrementaldecoder(codec)()
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    with open_bytes(path) as file:
        while True:
            raw = file.read(PART)
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as error:     # its object begins with the bytes that were held back
                raise not_text(path, at + len(raw) - len(error.object), codec, error) from None
            if '\0' in text:
                start = raw.find(b'\0')
                raise not_text(path, at, codec, UnicodeDecodeError(codec, raw, start, start + 1, 'a NUL'))
            yield newlines.decode(text, final=not raw)
            if not raw:
                return
            at += len(raw)


def lines_of(text):
    """Yield the lines, with their ends, of a text that comes in parts."""
    rest = ''
    for part in text:
        *lines, rest = (rest + part).split('\n')
        for line in lines:
            yield line + '\n'
    if rest:
        yield rest


def not_text(path, at, codec, error):
    """Return the DataError for a UnicodeDecodeError in the bytes of a file from `at` on, with a guess at
    their encoding. Where letters outside ASCII were right before the error, the encoding is right."""
    import charset_normalizer
    raw, block = error.object, error.start // 4096 * 4096
    guess = charset_normalizer.from_bytes(raw[block:block + 4096]).best()
    is_other = guess and guess.encoding.replace('_', '-') not in (codec, 'ascii')
    looks = f'; it looks like {guess.encoding}' if is_other else ''
    if not raw[:error.start].isascii() or len(raw) < 8:
        looks = ', though the text before it is (damaged there?)'
    return DataError(f'{path}, byte {at + error.start:,}: not {codec} ({error.reason}){looks}: save it as '
                     'UTF-8, or give prepare_data.py its encoding, such as --encoding=latin-1')


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


def set_aside(path, ending, first=''):
    """Rename a file to the first name that is free, of its own with `ending` and then `first`, 2, 3, ...
    Return that name."""
    names = (f'{path}{ending}{number}' for number in itertools.chain([first], itertools.count(2)))
    aside = next(name for name in names if not lexists(name))
    os.rename(path, aside)
    return aside


def is_in(directory, path):
    """Return whether a path is in a directory."""
    return bool(path) and samefile(dirname(path) or '.', directory)


def nearest_folder(path):
    """Return a path, or the nearest above it that exists: where it would be made."""
    while path and not exists(path):
        path = dirname(path)
    return path or '.'


def checkpoint_of(path):
    """Return a checkpoint's path: latest.pt of a folder, any other path itself."""
    return join(path, 'latest.pt') if isdir(path) else path


def checkpoint_file(path):
    """Return checkpoint_of(path). Raises MissingError where there is no such file."""
    file = checkpoint_of(path)
    if isfile(file):
        return file
    is_theirs = isfile(join(path, 'config.json'))
    others = f'; {path} is a model that transformers loads as it is' if is_theirs else checkpoints()
    raise MissingError(f'there is no checkpoint {file}{others}')


def checkpoints():
    """Return a clause that names the folders here with checkpoints; '' where there are none."""
    found = sorted(dirname(path) for path in glob.glob('*/latest.pt'))
    return f' (there are checkpoints in {", ".join(found[:5])})' if found else ''
