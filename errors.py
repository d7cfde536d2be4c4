"""How a script ends where something is wrong.

A user's mistake is a UserError: one line on stderr, exit code 2 for a setting, 1 for data or the machine.
What the system refuses (a file, memory) ends a script likewise, with 3 where that is memory. Any other
exception is a programmer's, and keeps its traceback; so does every exception under TRACEBACK=1.
"""
import atexit
import contextlib
import os
import re
import shlex
import sys
import threading

in_force = {}   # the settings of the process's script: what an error's line speaks of


class UserError(Exception):
    """What the user can put right; its one line says how."""
    exit_code = 1


OUT_OF_MEMORY = 3   # the exit code: the same again, with a smaller batch, may go on


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
        bar = '\r\033[K' if sys.__stderr__.isatty() else ''  # one that stands in the line goes
        print(f'{bar}error: {line}', file=sys.__stderr__)
    if out_of_memory(error):
        _leave_ranks(OUT_OF_MEMORY)
    sys.exit(getattr(kind, 'exit_code', 1))


def _leave_ranks(code):
    """Ends the process, among other ranks without finalisation, which would wait for what they do not
    send."""
    if int(os.environ.get('WORLD_SIZE', 1)) == 1:
        sys.exit(code)
    sys.stdout.flush()
    os._exit(code)


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
    if out_of_memory(error):
        return f'out of memory ({first_line(error)}){_less_memory()}'
    return None


def out_of_memory(error):
    """Whether that is what an exception says."""
    no_room = isinstance(error, MemoryError) or type(error).__name__ == 'OutOfMemoryError'  # torch's
    return no_room or isinstance(error, RuntimeError) and 'DefaultCPUAllocator' in str(error)


def first_line(error):
    return (str(error).splitlines() or [''])[0][:300] or type(error).__name__


def _less_memory():
    """The command by which a training under the settings in force goes on in less memory, a clause."""
    if 'resume' not in in_force:
        return ''
    saved = os.path.exists(os.path.join(in_force['checkpoint_dir'], 'latest.pt'))
    flags = _smaller_batch() if in_force['batch_size'] > 1 else _less_per_sequence()
    if not in_force['eval_only'] and (saved or not in_force['resume']):
        flags.append('--resume=auto')
    return f'; to go on with less: {command(*flags)}'


def _smaller_batch():
    """Flags for half the sequences in a micro-batch, or the next number that divides them, and as many in a
    step."""
    size = in_force['batch_size']
    smaller = next(part for part in range(size // 2, 0, -1) if size % part == 0)
    flags = [f'--batch_size={smaller}']
    if not (in_force['total_batch_size'] or in_force['target_effective_batch_size']):
        micro_steps = max(1, in_force['gradient_accumulation_steps']) * size // smaller
        flags.append(f'--gradient_accumulation_steps={micro_steps}')
    return flags


def _less_per_sequence():
    """Flags for where a micro-batch is one sequence already."""
    return ['--grad_checkpointing=full', f'--loss_chunks={min(1024, 8 * in_force["loss_chunks"])}']


def command(*flags):
    """The command that started this process, flags behind it: sbatch's, torchrun's or python's."""
    if 'TRAIN_SBATCH' in os.environ:  # as slurm/train.sbatch says
        return shlex.join([*shlex.split(os.environ['TRAIN_SBATCH']), *flags])
    return shlex.join([*(_torchrun() or ['python']), *sys.argv, *flags])


def _torchrun():
    """torchrun's own words, as its process has them, or else as the environment of this one tells; [] for a
    process by itself."""
    here = os.environ
    if 'RANK' not in here:
        return []
    words = []
    with contextlib.suppress(OSError), open(f'/proc/{os.getppid()}/cmdline') as file:
        words = file.read().split('\0')
    if sys.argv[0] in words:
        words = words[:words.index(sys.argv[0])]
        starts = [i for i, word in enumerate(words) if re.search('torchrun$|torch.distributed.run$', word)]
        if starts:
            return ['torchrun', *words[starts[0] + 1:]]
    nodes, ranks = here.get('GROUP_WORLD_SIZE', '1'), f'--nproc_per_node={here["LOCAL_WORLD_SIZE"]}'
    if nodes == '1':
        return ['torchrun', '--standalone', ranks]
    return ['torchrun', f'--nnodes={nodes}', ranks, '--rdzv_backend=c10d',
            f'--rdzv_endpoint={here["MASTER_ADDR"]}:29400']


def _let_go():
    """At the end, without complaint where nobody reads stdout any more."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, 'w')
