"""Settings: a script's scalars, then config files, then flags -> one checked dict. Errors of one line.

    config = configure(__file__)          # in a script, below its settings
    globals().update(config)

A setting is a scalar assigned at the top of a script, above the call of `configure`. The last such assignment
is its default. The comment after it begins with the allowed values, up to the first colon:

    grad_clip = 1.0     # >= 0: largest gradient norm; 0 = no clipping      bounds, separated by commas
    dtype = 'bf16'      # bf16 | fp32: of activations                       choices; (...) explains one
    every = 'none'      # none | full | >= 1                                choices, or a whole number
    resume = ''         # latest | best | a path                            any text: `a path` is no word
    recipe = 'auto'     # auto | RECIPES of fp8gpt/fp8/linear.py            also the keys of that dict

Config files are Python (`name = value`, arithmetic allowed) or flat YAML. Flags: --key=value, --key value,
--flag, --no_flag. Two lists may stand above the call: `config_groups` (names that a later layer replaces
together) and `config_twins` (scripts whose settings a config file may hold, too).

A mistake of the user is a UserError. It ends the process with one line on stderr and exit code 2 for a
setting, 1 for data or the machine, 3 for memory. Any other exception keeps its traceback. TRACEBACK=1 shows
all tracebacks.
"""
import sys


def _quiet(kind, error, trace, hook=sys.excepthook):
    """End at Ctrl-C without a traceback, while the imports below take their time."""
    if kind is KeyboardInterrupt:
        sys.exit(130)
    hook(kind, error, trace)


sys.excepthook = _quiet
import argparse
import ast
import contextlib
import dataclasses
import decimal
import difflib
import glob
import io
import math
import os
import pathlib
import re
import runpy
import textwrap
import threading
import time
import types
import typing

if sys.version_info < (3, 10):
    sys.exit(f'error: Python 3.10 or newer is wanted; this is {sys.version.split()[0]}')
if sys.platform == 'win32':     # it has no fork and not all of the signals
    sys.exit('error: Linux is wanted, and Windows has it as WSL: `wsl --install`, then the same in its shell')

# Names from other systems -> our names.
ALIASES = {
    'learning_rate': 'max_lr',
    'max_grad_norm': 'grad_clip',
    'max_seq_length': 'block_size',
    'model_name': 'init_from',
    'dataset_name': 'dataset',
    'compile': 'compile_model',
    'auto_batch_size': 'batch_size',
    'gradient_checkpointing': 'grad_checkpointing',
    'mixed_precision': 'use_fp8',
    'use_te': 'fp8_backend',
    'fp8_scenario': 'fp8_recipe',
    'total_steps': 'max_steps',
    'wandb_run_name': 'run_name',
    # nanoGPT's
    'out_dir': 'checkpoint_dir',
    'eval_interval': 'eval_freq',
    'log_interval': 'log_freq',
    'max_iters': 'max_steps',
    'warmup_iters': 'warmup_steps',
    'wandb_log': 'use_wandb',
    'start': 'prompt',
}
# Names from other systems whose values differ, too: {their value: ours}, where 'on' and 'off' are true and
# false, too, and None changes nothing.
TRANSLATED = {
    'auto_batch_size': {'on': 0, 'off': None},
    'gradient_checkpointing': {'on': 'full', 'off': None},
    'mixed_precision': {'fp8': True, 'bf16': False},
    'use_te': {'on': 'auto:te', 'off': None},
    'fp8_scenario': {'default': 'auto', 'mxfp8': 'auto:mxfp8'},
    'use_flash_attn': {'on': None},     # scaled_dot_product_attention uses it where it can
}
TEXTS = 'prompt', 'system'      # what they begin with names no folder
STARTED = time.monotonic()      # about when the process began: scripts import this file first
HERE = os.path.dirname(os.path.realpath(__file__))
WORDS = dict.fromkeys(('true', 'on', 'yes', '1'), 'on') | dict.fromkeys(('false', 'off', 'no', '0'), 'off')
BOUNDS = re.compile(r'[<>]=? -?\d[\d_.e]*(, [<>]=? -?\d[\d_.e]*)*')


# ----------------------------------------------------------------------------------------------------- errors

class UserError(Exception):
    """A mistake that the user can correct; its one line says how."""
    exit_code = 1


class SettingError(UserError, ValueError):
    """A setting that is unknown, of the wrong type, out of range, or contradicts another."""
    exit_code = 2


class DataError(UserError, OSError):
    """A file that is damaged, of another kind, or cannot be written."""


class MissingError(DataError, FileNotFoundError):
    """A file or folder that does not exist."""


class MachineError(UserError, RuntimeError):
    """Something that this machine lacks: a GPU, memory, a package."""


class Parser(argparse.ArgumentParser):
    """argparse's parser, for scripts with commands and for scripts that pass words on to configure. It raises
    SettingError."""

    def __init__(self, doc, **options):
        super().__init__(description=doc, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.commands = None

    def add_command(self, name, what):
        """Add a command, the first word after the script's name, and return its Parser."""
        self.commands = self.commands or self.add_subparsers(dest='command', required=True)
        return self.commands.add_parser(name, help=what, doc=what)

    def parse_known_args(self, args=None, namespace=None):
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([*map(with_home, words)], namespace)

    def error(self, message):
        raise SettingError(f'{message}; --help lists what there is')


def at_least(low, kind=int):
    """Return a type for Parser.add_argument: finite numbers of a kind that are not below `low`."""
    return Setting(kind(low), bounds=f'>= {low}').read


def one_line_errors():
    """Make the process end with one line and no traceback on an error that is not a programmer's. What its
    terminal cannot show is escaped, and what cannot be read from it is replaced; a closed one is empty."""
    sys.excepthook, threading.excepthook = _end_in_one_line, _one_line_of_thread
    for name, mode, errors in (('stdin', 'r', 'replace'), ('stdout', 'w', 'backslashreplace'),
                               ('stderr', 'w', 'backslashreplace')):
        if getattr(sys, name) is None:      # started with <&- or >&-
            stream = open(os.devnull, mode, errors=errors)
            setattr(sys, name, stream)
            setattr(sys, f'__{name}__', stream)
        elif isinstance(getattr(sys, name), io.TextIOWrapper):
            getattr(sys, name).reconfigure(errors=errors)


def _end_in_one_line(kind, error, trace):
    # not sys.stderr: torch.distributed's hook replaces it, and drops what is printed where this one exits
    if issubclass(kind, KeyboardInterrupt):
        print('\ninterrupted', file=sys.__stderr__)
        sys.exit(130)
    if issubclass(kind, BrokenPipeError):
        os._exit(1)     # `| head` has read enough
    line, code = error_line(error)
    if os.environ.get('TRACEBACK', '0') != '0' or line is None:
        return sys.__excepthook__(kind, error, trace)
    bar = '\r\033[K' if sys.__stderr__.isatty() else ''  # erases a progress bar in the line
    print(f'{bar}error: {printable(line, breaks="")}', file=sys.__stderr__)
    if os.environ.get('WORLD_SIZE', '1') != '1':
        sys.stdout.flush()
        os._exit(code)      # finalisation would wait for messages that the other ranks do not send
    sys.exit(code)


def _one_line_of_thread(args):
    """Print a line on an error that ends a thread, such as TensorBoard's on a full disk."""
    line, _ = error_line(args.exc_value)
    if line is None:
        return threading.__excepthook__(args)
    print(f'WARNING: a thread has ended: {printable(line, breaks="")}', file=sys.__stderr__)


def error_line(error):
    """Return (the line with which an error ends the process, the exit code). The line is None for a
    programmer's error, which keeps its traceback."""
    if hasattr(error, 'exit_code'):     # a UserError, or an exception of fp8gpt.fp8
        return str(error), error.exit_code
    text = first_line(error)
    if re.search("can't start new thread|Too many open files|Resource temporarily unavailable", text):
        return f'{text}: raise the limits that `ulimit -u` and `ulimit -n` print, or lower --num_workers', 1
    if isinstance(error, OSError) and error.errno:  # raised by the system, not by a library
        path = f'{error.filename}: ' if error.filename else ''
        return path + error.strerror, 1
    if isinstance(error, RuntimeError) and re.search('gloo|NCCL', str(error)):
        return 'the connection to another rank is lost: what that rank printed says why', 1
    if isinstance(error, ModuleNotFoundError):
        return (f'this Python has no {error.name}: `. .venv/bin/activate` first, or `make install`, or '
                '`pip install -r requirements.txt`'), 1
    if re.search(r"InvalidCxxCompiler|C\+\+ compile error|find C compiler|Command '\['\S*cc'", text):
        return (f'torch.compile finds no compiler that works ({text}): install gcc, g++ and the headers of '
                'Python, as python3-dev, or give --compile_model=off'), 1
    # CUDA's own allocations, of a context, a library's handle or a kernel, fail by other errors than torch's
    full = re.search('DefaultCPUAllocator|CUDA.*(out of memory|_ALLOC_FAILED)', str(error))
    of_torch = full or type(error).__name__ == 'OutOfMemoryError'
    if isinstance(error, MemoryError) or isinstance(error, RuntimeError) and of_torch:
        return (f'out of memory ({text}): in training, halve --batch_size, which changes no '
                'loss where --total_batch_size is set; then --grad_checkpointing=full, --loss_chunks=8; '
                'in sample.py, lower --num_samples'), 3
    return None, 1


def printable(text, breaks='\n'):
    """Return a text as it may be printed: a terminal takes some control characters for commands, and cannot
    take surrogates, which stand for bytes that are not UTF-8. breaks: '' where the text is to be one line."""
    unprintable = r'[\x00-\x08\x0a-\x1f\x7f-\x9f\ud800-\udfff]'

    def escaped(match):
        return match[0] if match[0] in breaks else match[0].encode('unicode_escape').decode()
    return re.sub(unprintable, escaped, text)


def say(*lines):
    """Print lines at once, as printable shows them. A line may have rows, of which each after the first
    begins with a space: what a stranger's name puts on a line of its own is escaped."""
    for line in lines:
        print('\n '.join(printable(row, breaks='') for row in str(line).split('\n ')), flush=True)


def say_in_run(*lines):
    """Print lines. A stdout that is closed or full does not end the run."""
    try:
        say(*lines)
    except OSError:
        sys.stdout = open(os.devnull, 'w', errors='replace')


def say_once(*lines):
    """Print lines as say does, on rank 0 of a run alone."""
    if os.environ.get('RANK', '0') == '0':
        say(*lines)


def first_line(error):
    """Return the first line of an exception's text, at most 300 characters of it."""
    text = str(error).partition(' Of the allocated memory')[0]      # torch's goes on about its allocator
    return (text.splitlines() or [''])[0][:300] or type(error).__name__


# --------------------------------------------------------------------------------------- a script's settings

@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting: its default and what the comment after it allows."""
    default: bool | int | float | str
    words: tuple = ()       # choices; () = any text
    bounds: str = ''        # numbers allowed, as '>= 0, < 1'; '' = all

    @classmethod
    def of(cls, default, comment):
        """Return the Setting of a default and its comment."""
        parts = re.sub(r' *\([^)]*\)', '', comment).split(': ')[0].split('|')
        words, bounds, is_list = [], '', len(parts) > 1
        for part in map(str.strip, parts):
            table = re.fullmatch(r'(\w+) of ([\w/]+\.py)', part)
            if table:       # its keys, read without running the file
                tree = ast.parse(pathlib.Path(HERE, table[2]).read_text('utf-8'))
                words += [key.value for node in tree.body if ast.unparse(node).startswith(f'{table[1]} = {{')
                          for key in node.value.keys]
            elif BOUNDS.fullmatch(part):
                bounds = part
            else:
                words.append(part)
                is_list = is_list and re.fullmatch(r'[\w:-]+', part)
        return cls(default, tuple(words) if is_list else (), bounds)

    @property
    def wanted(self):
        """Return a clause about the allowed values, to be read after the setting's name."""
        if isinstance(self.default, str) and not self.words:
            return 'wants a name or a path'
        if isinstance(self.default, str):
            return f'is one of {", ".join([*self.words, self.bounds]).removesuffix(", ")}'
        kinds = {bool: 'true or false', int: 'a whole number', float: 'a number'}
        return f'wants {kinds[type(self.default)]} {self.bounds}'.rstrip()

    def read(self, value):
        """Return a value, or its text, as the default's type. Raises argparse.ArgumentTypeError for one of
        another type, or one that is not allowed."""
        try:
            text, kind, found = str(value), type(self.default), None
        except ValueError:      # Python writes no integer of over 4,300 digits
            raise argparse.ArgumentTypeError(f'{self.wanted}, not one of thousands of digits') from None
        on_off = WORDS.get(text.lower())
        if kind is bool:
            found = {'on': True, 'off': False}.get(on_off)
        elif kind is not str:
            found = self.number(text)
        elif on_off in self.words:
            found = on_off
        elif not isinstance(value, (str, int, float, os.PathLike)):
            pass        # a list of a .py config
        elif text in self.words or not self.words and (text or not self.default):
            found = text
        elif self.bounds and text.isdecimal() and self.number(text) is not None:
            found = text
        if found is None:
            raise argparse.ArgumentTypeError(f'{self.wanted}, not {value!r:.100}')
        return found

    def number(self, text):
        """Return a text as a finite number within the bounds: a float where the default is one, else an int,
        as 1000 for '1000', '1_000' and '1e3'. Return None for other texts."""
        with contextlib.suppress(ValueError):
            number = float(text)
            if not isinstance(self.default, float):
                if not number.is_integer():
                    return None
                number = int(decimal.Decimal(text))     # a float would lose digits of a long one
            bounds = filter(None, self.bounds.split(','))
            most = math.inf if isinstance(number, float) else 2**63
            if abs(number) < most and all(eval(f'{number} {bound}') for bound in bounds):
                return number


def with_home(word):
    """Return a path, or a flag with one, with the home directory in place of a leading ~: shells replace it
    in a word of its own alone."""
    return re.sub('(--[^=]*=|^)~(?=/|$)', lambda match: match[1] + os.path.expanduser('~'), word, count=1)


def _typed(setting, value, where, name):
    """Return a value as a Setting reads it. Raises SettingError, which says where the value stands."""
    if isinstance(value, str) and name not in TEXTS:
        value = with_home(value)
    try:
        return setting.read(value)
    except argparse.ArgumentTypeError as error:
        raise SettingError(f'{where}: {name} {error}') from None


class Script(typing.NamedTuple):
    """The settings and lists that a script declares above its call of configure."""
    settings: dict      # name -> Setting
    groups: list        # config_groups
    twins: list         # config_twins
    help: list          # lines: the script's docstring, its settings as they stand in the source


def read_script(path):
    """Return the Script at a path, from this folder on. Only its assignments run."""
    text = pathlib.Path(HERE, path).read_text('utf-8')
    tree, lines, names, settings, page = ast.parse(text), text.splitlines(), {}, {}, {}
    for node in tree.body:
        if not isinstance(node, ast.Assign):
            continue
        if 'configure(' in ast.unparse(node.value):
            break
        try:
            exec(compile(ast.Module([node], []), path, 'exec'), {'__builtins__': {}}, names)
        except NameError:
            continue  # `linear = Linear`, `os.environ[...] = ...`: not a scalar, so not a setting
        name = node.targets[0].id
        if isinstance(names[name], (int, float, str)):
            heading, line = lines[node.lineno - 2], lines[node.end_lineno - 1]
            comment = line.encode()[node.end_col_offset:].decode().lstrip(' #')
            settings[name] = Setting.of(names[name], comment)
            if heading.startswith('# '):
                page.setdefault(heading, heading)
            page[name] = line
    page = [ast.get_docstring(tree) or '', '', *page.values()]
    return Script(settings, names.get('config_groups', []), names.get('config_twins', []), page)


def with_other_names(settings):
    """Return {name: Setting} of settings and of their names in other systems."""
    aliases = {theirs: settings[ours] for theirs, ours in ALIASES.items() if ours in settings}
    translated = {theirs: Setting('', tuple(values)) for theirs, values in TRANSLATED.items()}
    return settings | aliases | translated


HELP = """
Type a setting as --name=value, --name value, --flag or --no_flag, or put it into a config file, .py or .yaml.
Names from other systems:"""


def print_help(script):
    """Print what --help does of a Script, and end the process."""
    also = [f'--{theirs} sets --{ours}' for theirs, ours in ALIASES.items() if ours in script.settings]
    also = textwrap.fill('; '.join(also), 110, break_on_hyphens=False)
    print(*script.help, HELP, also or 'none', sep='\n')
    sys.exit(0)


# ----------------------------------------------------------------------------------------------- config files

def config_values(path, known):
    """Return {name: value} of a config file. A .py config's modules and functions are none, but under a name
    in `known`. Raises MissingError, or SettingError where it is not flat."""
    path = with_home(path)
    if path.startswith('configs/') and not os.path.exists(path):    # the folder's name elsewhere
        path = path.replace('configs', 'config', 1)
    if not os.path.isfile(path):
        there = ', '.join(sorted(glob.glob('config/*')))
        raise MissingError(f'no config file {path}' + (
            f'; those here: {there}' if there else f', nor any other here: `cd {HERE}` first'))
    if path.endswith('.py'):
        try:
            values = runpy.run_path(path)
        except SystemExit:
            raise SettingError(f'{path} is no config file: it calls exit') from None
        except Exception as error:  # the file's own
            raise SettingError(f'{path} is no config file: {first_line(error)}') from None
        tools = types.ModuleType, typing.Callable
        values = {name: value for name, value in values.items()
                  if name in known or not name.startswith('_') and not isinstance(value, tools)}
    else:
        values = read_yaml(path) or {}
        if not isinstance(values, dict) or not all(
                isinstance(name, str) and isinstance(text, str | None) for name, text in values.items()):
            raise SettingError(f'{path}: a flat list of `name: value` lines is wanted')
    names = {}
    for name in values.keys() - TRANSLATED.keys():      # those may ask for nothing
        other = names.setdefault(ALIASES.get(name, name), name)
        if other != name:
            both = ' and '.join(sorted((name, other)))
            raise SettingError(f'{path}: {both} are one setting: leave one of them out')
    return values


def read_yaml(path):
    """Return what a YAML file holds, with all scalars but null as text: flags are text, too. Raises
    SettingError for a file that is not YAML."""
    import yaml

    class Loader(yaml.BaseLoader):      # of two values of a name, PyYAML's takes the last
        def compose_node(self, parent, index):
            if self.check_event(yaml.AliasEvent):       # eight levels of them are a billion values
                raise yaml.YAMLError(f'write *{self.peek_event().anchor} out')
            return super().compose_node(parent, index)

        def construct_mapping(self, node, deep=False):
            names = set()
            for name, _ in node.value:
                if name.value in names:
                    raise yaml.YAMLError(f'{name.value} stands there twice')
                names.add(name.value)
            return super().construct_mapping(node, deep)

        def construct_scalar(self, node):
            is_null = node.style is None and node.value.lower() in ('', '~', 'null')
            return None if is_null else super().construct_scalar(node)

    try:
        return yaml.load(pathlib.Path(path).read_text('utf-8'), Loader)
    except Exception as error:      # PyYAML's own, and what Python raises on exotic text
        raise SettingError(f'{path} is not YAML: {" ".join(str(error).split())[:200]}') from None


# ----------------------------------------------------------------------------------------------- command line

def with_equals(words, known):
    """Return a command line with each flag as --name=value. known: what with_other_names returns."""
    words, found = [word.removeprefix('--config=') for word in words], []
    while words:
        word = words.pop(0)
        if word == '--config':
            if not words or words[0].startswith('-'):   # as with an empty variable of a shell
                raise SettingError('--config needs a file')
            continue
        if word.startswith('-'):
            name, equals, value = word.lstrip('-').partition('=')
            name = name.replace('-', '_')
            word = f'--{name}={value}' if equals else _flag(name, words, known)
        found.append(word)
    return found


def _flag(name, words, known):
    """Return --name=value for a flag without =. Its value may be the next of the words, which is then taken
    from them."""
    for positive in (name[3:], f'use_{name[3:]}'):
        if name.startswith('no_') and positive in known:
            return f'--{positive}=False'
    setting, values = known.get(name), ()
    if setting and (isinstance(setting.default, bool) or 'on' in setting.words):
        values = {*WORDS, *setting.words}
    if words and not words[0].startswith('--') and (not values or words[0].lower() in values):
        return f'--{name}={words.pop(0)}'
    if setting and not values:
        raise SettingError(f'--{name} needs a value')
    return f'--{name}=True'


# ------------------------------------------------------------------------------------------- one checked dict

class Config(dict):
    """The settings of a run: a script's defaults, over them a checkpoint's, those of config files, flags.

    layers: [config files, flags]; one that changes a name of a group replaces the group. typed: the flags.
    given: the names that the layers set. inherited: {name: value} of the checkpoint. chosen: the names that
    have more than a default. stem: the last config file's name without ending, or ''."""

    def __init__(self, script, layers, stem='', inherited=None):
        self.script, self.layers, self.stem, self.inherited = script, layers, stem, inherited or {}
        self.typed = layers[-1]
        self.defaults = {name: setting.default for name, setting in script.settings.items()}
        self.given = set()
        super().__init__(self.defaults | self.inherited)
        for layer in layers:
            for group in script.groups:
                if any(layer.get(name, self[name]) != self[name] for name in group):
                    self.update((name, self.defaults[name]) for name in group)
                    self.given.difference_update(group)
            self.update(layer)
            self.given.update(layer)

    def over(self, saved, never=(), place='the checkpoint'):
        """Return the Config of the same files and flags over a checkpoint's settings, a dict. Names that this
        script does not have, and those in `never`, are dropped. Raises SettingError for another type, which
        names the place."""
        settings = self.script.settings
        inherited = {name: _typed(settings[name], value, place, name)
                     for name, value in saved.items() if name in settings and name not in never}
        return Config(self.script, self.layers, self.stem, inherited)

    @property
    def chosen(self):
        return self.given | self.inherited.keys()

    @property
    def changes(self):
        """Return a line about each difference from the checkpoint."""
        return [f'{name}: {value!r} in the checkpoint, now {self[name]!r}'
                for name, value in self.inherited.items() if self[name] != value]


def nearest(name, names):
    """Return the clause that tells the most similar of names, or ''."""
    near = difflib.get_close_matches(name, names, 1, 0.5)
    return f'; the nearest is {near[0]}' if near else ''


def start_process():
    """Set what a script's process has before torch is imported: errors of one line, and OpenMP's threads that
    do not spin for milliseconds while they wait: on busy cores, a training step took 2.6 times as long
    (docs/log.md)."""
    one_line_errors()
    os.environ.setdefault('GOMP_SPINCOUNT', '10000')


def settings_of_twins(script):
    """Return {name: default} of the settings of a Script and its twins, under all of their names."""
    settings = {}
    for twin in script.twins:
        settings |= read_script(twin).settings
    return with_other_names(settings | script.settings)


def configure(path, argv=None, positional=None, nearby=()):
    """Return the Config of a script's settings, config files and flags.

    path: of the script, from this folder on. argv: the words after its name; None takes the process's own and
    installs the one-line errors. positional: name of the setting that a bare word sets, config files aside.
    nearby: more names that a misspelt one may mean. Raises SettingError for an unknown name, a wrong type, a
    value that is not allowed, a bare word too many; MissingError for a config file that does not exist."""
    if argv is None:
        argv = sys.argv[1:]
        start_process()
    script = read_script(path)
    if '--help' in argv or '-h' in argv:
        print_help(script)
    known, files, flags, unknown, stem = settings_of_twins(script), {}, {}, [], ''

    def put(name, value, layer=flags, where='the command line'):
        """Put a value into a layer under our name, or note that it cannot be set. None, which is YAML's null,
        takes an earlier file's value away."""
        if name in TRANSLATED and value is not None:
            value = TRANSLATED[name][_typed(known[name], value, where, name)]
            if value is None:
                return
        name = ALIASES.get(name, name)
        if name not in known:
            unknown.append(f'{where}: no setting is called {name!r}{nearest(name, [*known, *nearby])}')
        elif value is None:
            layer.pop(name, None)
        else:
            value = _typed(known[name], value, where, name)
            if name in script.settings:
                layer[name] = value
            elif layer is flags and value not in (False, 'auto'):   # which ask for nothing of a twin
                unknown.append(f'{where}: {name} is a setting of {", ".join(script.twins)}')

    for word in with_equals(argv, known):
        if word.startswith('-'):
            put(*word.removeprefix('--').split('=', 1))
        elif word.endswith(('.py', '.yaml', '.yml')):
            for name, value in config_values(word, known).items():
                put(name, value, files, word)
            stem = pathlib.Path(word).stem
        elif positional and positional not in flags:
            put(positional, word)
        else:
            raise SettingError(f'what is {word!r}? Settings are --name=value; '
                               'config files end in .py or .yaml')
    if unknown:
        raise SettingError(f'{"; ".join(unknown[:5])}; --help lists what there is')
    return Config(script, [files, flags], stem)


sys.excepthook, = _quiet.__defaults__   # one_line_errors, called by a script's first lines, sets another
