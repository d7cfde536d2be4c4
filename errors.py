"""How a script ends where something is wrong.

A user's mistake is a UserError: one line on stderr, exit code 2 for a setting, 1 for data or the machine.
What the system refuses (a file, memory) ends a script likewise. Any other exception is a programmer's, and
keeps its traceback; so does every exception under TRACEBACK=1.
"""
import atexit
import os
import sys
import threading

in_force = {}   # the settings of the process's script: what an error's line speaks of


class UserError(Exception):
    """What the user can put right; its one line says how."""
    exit_code = 1


class SettingError(UserError, ValueError):
    """A setting that is unknown, of the wrong type, out of range, or at odds with another."""
    exit_code = 2


class DataError(UserError, OSError):
    """A file that is damaged, of another kind, or cannot be written."""


class MissingError(DataError, FileNotFoundError):
    """A file or folder that is not there."""


class MachineError(UserError, RuntimeError):
    """What this machine lacks: a GPU, memory, a package."""


def one_line_errors():
    """From here on, an error that is not a programmer's ends the process with one line and no traceback."""
    sys.excepthook = _one_line
    threading.excepthook = _of_a_thread
    atexit.unregister(_let_go)
    atexit.register(_let_go)


def _one_line(kind, error, trace):
    # not sys.stderr: torch.distributed's hook replaces it, and drops what is printed where this one exits
    if issubclass(kind, KeyboardInterrupt):
        print('\ninterrupted', file=sys.__stderr__)
        sys.exit(130)
    line = told(error)
    if os.environ.get('TRACEBACK', '0') != '0' or line is None:
        return sys.__excepthook__(kind, error, trace)
    if line:
        print(f'error: {line}', file=sys.__stderr__)
    sys.exit(getattr(kind, 'exit_code', 1))


def _of_a_thread(arguments):
    line = told(arguments.exc_value)
    if line is None:
        return threading.__excepthook__(arguments)
    print(f'WARNING: {line}', file=sys.__stderr__)


def told(error):
    """The line that an error ends the process with; None for a programmer's, which keeps its traceback, ''
    where nobody reads any more, as behind `| head`."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, BrokenPipeError):
        return ''
    if isinstance(error, OSError) and error.errno:  # the system's, as opposed to a library's
        path = f'{error.filename}: ' if error.filename else ''
        return path + error.strerror
    no_room = isinstance(error, MemoryError) or type(error).__name__ == 'OutOfMemoryError'  # torch's
    if no_room or isinstance(error, RuntimeError) and 'DefaultCPUAllocator' in str(error):
        return f'out of memory ({first_line(error)}){_less_memory()}'
    return None


def first_line(error):
    return (str(error).splitlines() or [''])[0][:300] or type(error).__name__


def _less_memory():
    """Which of the settings in force would take less, a clause."""
    settings = in_force
    remedies = []
    if settings.get('batch_size', 0) > 1:
        remedies.append(f'--batch_size={settings["batch_size"] // 2}')
    if settings.get('grad_checkpointing') == 'none':
        remedies.append('--grad_checkpointing=full')
    if 'max_batch_size' in settings:
        remedies.append('--batch_size=0 (on a GPU, the largest that fits)')
    return f': try {" or ".join(remedies)}' if remedies else ''


def _let_go():
    """At the end, without complaint where nobody reads stdout any more."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, 'w')
