"""Write files whole or not at all, hold locks, read texts and logs, find checkpoints."""
import fcntl
import glob
import io
import json
import os
import secrets
import socket
import time
import weakref
from contextlib import suppress
from errno import EINVAL, ENOLCK, ENOSYS, EOPNOTSUPP
from itertools import chain, count
from os.path import dirname, exists, isdir, isfile, join, lexists, samefile
from pathlib import Path

from configurator import STARTED, DataError, MachineError, MissingError, say

PACKED = '.gz', '.zst'      # endings of files that are unpacked
SILENT = 600    # seconds after which a requeued run takes a lock that nothing but its file shows to be held


def write(path, fill):
    """Write a file whole, to the disk, or leave the old file and raise DataError, whose errno is the
    system's, or None. fill(file) writes the content, bytes. The file's folder is made where there is none.
    A device, as /dev/null, is not replaced."""
    temporary = temporary_name(path)
    try:
        if lexists(path) and os.lstat(path).st_rdev:
            raise OSError(EINVAL, 'it is a device')
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
        if error.errno not in (EINVAL, EOPNOTSUPP, ENOSYS):
            raise
    finally:
        os.close(folder)


def remove(path):
    """Remove a file, if it exists and can be removed."""
    with suppress(OSError):
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


def lines_of(path, longest=-1):
    """Yield the lines, with their ends, of a text in UTF-8, with or without a byte order mark, which may be
    packed; of a line with more than `longest` characters, pieces of that length. Line ends are as Python
    reads them. Raises DataError for other bytes, and for a NUL, which other encodings have."""
    import pyarrow
    advice = '`iconv -f latin-1 -t utf-8`, or -f utf-16, writes it so, if it is text'
    raw = pyarrow.input_stream(path)    # it detects the compression by the name
    with io.TextIOWrapper(io.BufferedReader(raw), 'utf-8-sig') as file:
        try:
            while part := file.read(2**20) + file.readline(longest):
                if '\0' in part:
                    raise DataError(f'{path} has a NUL, and so is not UTF-8: {advice}')
                text = io.StringIO(part)
                while line := text.readline(longest):
                    yield line
        except UnicodeDecodeError as error:
            at = file.buffer.tell() - len(error.object) + error.start
            raise DataError(f'{path}, byte {at:,}: not UTF-8 ({error.reason}): {advice}') from None


def read_json(path):
    """Return the JSON object in a file; {} where there is none, or no file: a pipe would be waited for.
    Raises OSError for a file that cannot be read, as without permission."""
    value = {}
    with suppress(FileNotFoundError, ValueError, RecursionError):
        if isfile(path):
            with open(path, 'rb') as file:
                value = json.load(file)
    return value if isinstance(value, dict) else {}


def read_log(path):
    """Return the records of a log.jsonl, [] where there is none, or no file: a pipe would be waited for.
    Lines that a kill or a disk damaged are left out."""
    records = []
    for line in Path(path).read_bytes().splitlines() if isfile(path) else ():
        with suppress(ValueError, RecursionError, TypeError, KeyError):     # no JSON, or no record
            record = json.loads(line)
            if type(record['step']) is int and 0 <= record['step'] < 2**63:
                records.append(record)
    return records


class Lock:
    """The lock of a folder's one writer: a file with a line that names its holder.

    The system's flock says whether the holder lives. On a disk without flock the file itself does: its holder
    makes and removes it, and a killed process leaves it behind.

    path: of the file. refusal: a line for a second writer, without its end. waits: whether that one waits. A
    run that SLURM has requeued waits in any case for what is left of its own first start. process_start: once
    the lock is taken, when this process began, by the clock of the disk."""

    def __init__(self, path, refusal, waits=False):
        self.path, self.refusal, self.waits = path, refusal, waits
        self.job = f'SLURM_JOB_ID {os.environ.get("SLURM_JOB_ID")}'
        process = f'host {socket.gethostname()}, process {os.getpid()}'
        self.holder = f'{process}, {self.job}, {secrets.token_hex(8)}'
        self.release, self.is_by_file, self.process_start = None, False, 0.0

    def take(self):
        """Take the lock, unless it is taken. The system drops it when the process ends, however that is.
        Raises DataError where another process holds it for more than a second, since forks of a killed
        process may outlive it so long, and for a file that no Lock has written."""
        started = changed = time.monotonic()
        seen, next_line = None, 0
        while not self.release and not self._try():
            now, found = time.monotonic(), self._look()
            if found != seen:
                seen, changed = found, now
            requeued = 'SLURM_RESTART_COUNT' in os.environ and f'{self.job},' in found[0]
            waits, said = requeued or self.waits, self.refusal
            if self.is_by_file:
                age = max(0, time.time() - found[1])
                said += (f'; {self.path} is of {found[0] or "nobody"}, touched {age:.0f} s ago: remove it if '
                         'that run is dead')
            if requeued and self.is_by_file and now - changed > SILENT:
                say(f'{self.path} has not changed for {SILENT} s: taken over')
                remove(self.path)
            elif waits and now - started >= next_line:
                say(f'waiting: {said}')
                next_line += 60
            elif not waits and now - started > 1:
                raise DataError(said)
            time.sleep(0.2)
        return self

    def _try(self):
        """Try once to take the lock, and return whether this process holds it."""
        try:
            file, is_new = open(self.path, 'x+'), True
        except FileExistsError:
            file, is_new = open(self.path, 'r+', errors='replace'), False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = os.path.samestat(os.fstat(file.fileno()), os.stat(self.path))   # it may just be removed
        except (BlockingIOError, FileNotFoundError):
            taken = False
        except OSError as error:
            if error.errno not in (ENOSYS, ENOLCK, EOPNOTSUPP):
                raise DataError(f'{self.path} cannot be locked ({error.strerror}): take a folder on another '
                                'disk') from error
            taken, self.is_by_file = is_new, True
        if not 'host '.startswith(file.read()[:5]):
            raise DataError(f'{self.path} is no lock of ours: remove it if no other program needs it')
        if not taken:
            file.close()
            return False
        file.truncate(0)
        file.seek(0)
        file.write(self.holder)
        file.flush()
        self.process_start = os.fstat(file.fileno()).st_mtime - (time.monotonic() - STARTED)
        self.release = weakref.finalize(self, _release, file, self.holder)
        return True

    def _look(self):
        """Return (the line that names the holder, when the file was last touched)."""
        with suppress(FileNotFoundError), open(self.path, errors='replace') as file:
            return file.readline(), os.fstat(file.fileno()).st_mtime
        return '', 0.0

    def check(self):
        """Touch the file, a sign of life. Raises MachineError where it names another holder, or is gone."""
        with suppress(OSError):      # a disk that does not answer says nothing
            if self._look()[0] == self.holder:
                return os.utime(self.path)
            raise MachineError(f'{self.path} is not the lock of this run any more: another run writes to '
                               'this folder, so this one stops, and saves nothing')

    __enter__ = take

    def __exit__(self, *error):
        self.release()


def _release(file, holder):
    """Remove a lock's file, unless it names another holder by now, and close it."""
    with suppress(OSError), open(file.name) as now:
        if now.readline() == holder:
            os.remove(file.name)
    file.close()


def set_aside(path, ending, first=''):
    """Rename a file to the first name that is free, of its own with `ending` and then `first`, 2, 3, ...
    Return that name."""
    for number in chain([first], count(2)):
        aside = f'{path}{ending}{number}'
        if not lexists(aside):
            os.rename(path, aside)
            return aside


def is_in(directory, path):
    """Return whether a path is in a directory."""
    return bool(path) and exists(directory) and samefile(dirname(path) or '.', directory)


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
    raise MissingError(f'there is no checkpoint {file}{checkpoints()}')


def checkpoints():
    """Return a clause that names the folders here with checkpoints; '' where there are none."""
    found = sorted(dirname(path) for path in glob.glob('*/latest.pt'))
    return f' (there are checkpoints in {", ".join(found[:5])})' if found else ''
