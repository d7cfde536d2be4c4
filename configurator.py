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
import argparse
import ast
import contextlib
import dataclasses
import difflib
import glob
import math
import os
import re
import sys
import textwrap
import threading
import typing

if sys.version_info < (3, 10):
    sys.exit(f'error: Python 3.10 or newer is wanted; this is {sys.version.split()[0]}')

# Names from other systems -> our names.
ALIASES = {
    'learning_rate': 'max_lr',
    'max_grad_norm': 'grad_clip',
    'max_seq_length': 'block_size',
    'model_name': 'init_from',
    'dataset_name': 'dataset',
    'compile': 'compile_model',
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
# Names from other systems -> (our setting, {their value: ours}); 'on' and 'off' are true and false, too. None
# changes nothing.
TRANSLATED = {
    'auto_batch_size': ('batch_size', {'on': 0, 'off': None}),
    'gradient_checkpointing': ('grad_checkpointing', {'on': 'full', 'off': None}),
    'mixed_precision': ('use_fp8', {'fp8': True, 'bf16': False}),
    'use_te': ('fp8_backend', {'on': 'auto:te', 'off': None}),
    'fp8_scenario': ('fp8_recipe', {'default': 'auto', 'mxfp8': 'auto:mxfp8'}),
    'use_flash_attn': ('', {'on': None}),       # scaled_dot_product_attention uses it where it can
}
# Models of the Hugging Face hub whose earlier names users bring -> their names there.
RENAMED = {f'meta-llama/Meta-{name}': f'meta-llama/{name}' for name in (
    'Llama-3.1-8B', 'Llama-3.1-8B-Instruct', 'Llama-3.1-70B', 'Llama-3.1-70B-Instruct')}
HERE = os.path.dirname(os.path.realpath(__file__))
CONFIG_FILES = '.py', '.yaml', '.yml'
COMMAND_LINE = 'the command line'
WORDS = dict.fromkeys(('true', 'on', 'yes', '1'), True) | dict.fromkeys(('false', 'off', 'no', '0'), False)
BOUNDS = re.compile(r'[<>]=? -?\d[\d_.e]*(, [<>]=? -?\d[\d_.e]*)*')
OUT_OF_MEMORY = 3   # the exit code


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

    def error(self, message):
        raise SettingError(f'{message}; --help lists what there is')


def at_least(low, kind=int):
    """Return a type for Parser.add: finite numbers of a kind that are not below `low`."""
    def number(text):
        with contextlib.suppress(ValueError):
            if low <= kind(text) < math.inf:
                return kind(text)
        name = 'a whole number' if kind is int else 'a number'
        raise argparse.ArgumentTypeError(f'wants {name} >= {low}, not {text!r}')
    return number


def one_line_errors():
    """Make the process end with one line and no traceback on an error that is not a programmer's."""
    sys.excepthook, threading.excepthook = _end_in_one_line, _one_line_of_thread


def _end_in_one_line(kind, error, trace):
    # not sys.stderr: torch.distributed's hook replaces it, and drops what is printed where this one exits
    if issubclass(kind, KeyboardInterrupt):
        print('\ninterrupted', file=sys.__stderr__)
        sys.exit(130)
    if issubclass(kind, BrokenPipeError):
        os._exit(1)     # `| head` has read enough
    line = error_line(error)
    if os.environ.get('TRACEBACK', '0') != '0' or line is None:
        return sys.__excepthook__(kind, error, trace)
    bar = '\r\033[K' if sys.__stderr__.isatty() else ''  # erases a progress bar in the line
    print(f'{bar}error: {line}', file=sys.__stderr__)
    code = OUT_OF_MEMORY if out_of_memory(error) else getattr(kind, 'exit_code', 1)
    if int(os.environ.get('WORLD_SIZE', 1)) > 1:
        sys.stdout.flush()
        os._exit(code)      # finalisation would wait for messages that the other ranks do not send
    sys.exit(code)


def _one_line_of_thread(args):
    """Print a line on an error that ends a thread, such as TensorBoard's on a full disk."""
    line = error_line(args.exc_value)
    if line:
        print(f'WARNING: a thread has ended: {line}', file=sys.__stderr__)
    else:
        threading.__excepthook__(args)


def error_line(error):
    """Return the line with which an error ends the process: None for a programmer's error, which keeps its
    traceback."""
    if hasattr(error, 'exit_code'):     # a UserError, or an exception of fp8gpt.fp8
        return str(error)
    if isinstance(error, OSError) and error.errno:  # raised by the system, not by a library
        path = f'{error.filename}: ' if error.filename else ''
        return path + error.strerror
    if isinstance(error, RuntimeError) and re.search('gloo|NCCL', str(error)):
        return 'the connection to another rank is lost: what that rank printed says why'
    if isinstance(error, ModuleNotFoundError):
        return (f'this Python has no {error.name}: `. .venv/bin/activate` first, or `make install`, or '
                '`pip install -r requirements.txt`')
    if out_of_memory(error):
        return (f'out of memory ({first_line(error)}): in training, halve --batch_size, which changes no '
                'loss where --total_batch_size is set; then --grad_checkpointing=full, --loss_chunks=8')
    return None


def out_of_memory(error):
    """Return whether an exception says that memory is full."""
    no_room = isinstance(error, MemoryError) or type(error).__name__ == 'OutOfMemoryError'  # torch's
    return no_room or isinstance(error, RuntimeError) and 'DefaultCPUAllocator' in str(error)


def first_line(error):
    """Return the first line of an exception's text, at most 300 characters of it."""
    return (str(error).splitlines() or [''])[0][:300] or type(error).__name__


# --------------------------------------------------------------------------------------- a script's settings

@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting: its default and what the comment after it allows."""
    default: bool | int | float | str
    words: tuple = ()       # choices
    bounds: str = ''        # numbers allowed, as '>= 0, < 1'; '' = all
    any_text: bool = False

    @classmethod
    def of(cls, default, comment):
        """Return the Setting of a default and its comment."""
        parts = re.sub(r' *\([^)]*\)', '', comment).split(': ')[0].split('|')
        words, bounds, any_text = [], '', isinstance(default, str) and len(parts) == 1
        for part in map(str.strip, parts):
            table = re.fullmatch(r'(\w+) of ([\w/]+\.py)', part)
            if table:
                words += _keys(os.path.join(HERE, table[2]), table[1])
            elif BOUNDS.fullmatch(part):
                bounds = part
            elif re.fullmatch(r'[\w:-]+', part):
                words.append(part)
            else:
                any_text = isinstance(default, str)
        return cls(default, tuple(words), bounds, any_text)

    @property
    def wanted(self):
        """Return a clause about the allowed values, to be read after the setting's name."""
        if isinstance(self.default, str):
            return f'is one of {", ".join([*self.words, self.bounds]).removesuffix(", ")}'
        kinds = {bool: 'true or false', int: 'a whole number', float: 'a number'}
        return f'wants {kinds[type(self.default)]} {self.bounds}'.rstrip()

    def read(self, value):
        """Return a value, or its text, as the default's type. Raises KeyError or ValueError for a value of
        another type, or one that is not allowed."""
        text, kind = str(value), type(self.default)
        if kind is bool:
            return WORDS[text.lower()]
        if kind is not str:
            number = float(text) if kind is float else _whole_number(text)
            if not self.within_bounds(number):
                raise ValueError
            return number
        switched = {True: 'on', False: 'off'}.get(WORDS.get(text.lower()))
        if switched in self.words:
            return switched
        counts = self.bounds and text.isdecimal() and self.within_bounds(int(text))
        if not (self.any_text or text in self.words or counts):
            raise ValueError
        return text if os.path.exists(text) else RENAMED.get(text, text)

    def within_bounds(self, number):
        """Return whether a number is finite and within the bounds."""
        bounds = filter(None, self.bounds.split(','))
        return abs(number) < math.inf and all(eval(f'{number} {bound}') for bound in bounds)


def _whole_number(text):
    """Return 1000 for '1000', '1_000' or '1e3', with all digits, some of which a float would lose."""
    try:
        return int(text)
    except ValueError:
        if not float(text).is_integer():
            raise
        return int(float(text))


def _keys(path, name):
    """Return the keys of the dict literal called `name`, read without running its file."""
    for node in ast.parse(source_of(path)).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return [key.value for key in node.value.keys]


def _typed(name, value, setting, where):
    """Return value as the type of the setting. Raises SettingError where it is not, or is not allowed."""
    try:
        return setting.read(value)
    except (KeyError, ValueError):
        raise SettingError(f'{where}: {name} {setting.wanted}, not {value!r}') from None


class Script(typing.NamedTuple):
    """The settings and lists that a script declares above its call of configure."""
    settings: dict      # name -> Setting
    groups: list        # config_groups
    twins: list         # config_twins
    help: list          # lines: the script's docstring, its settings as they stand in the source


def read_script(path):
    """Return the Script at a path, from this folder on. Only its assignments run."""
    text = source_of(os.path.join(HERE, path))
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
    groups, twins = (names.get(f'config_{name}', []) for name in ('groups', 'twins'))
    return Script(settings, groups, twins, [ast.get_docstring(tree) or '', '', *page.values()])


HELP = """
Type a setting as --name=value, --name value, --flag or --no_flag, or put it into a config file, .py or .yaml.
Names from other systems:"""


def help_text(script):
    """Return all that --help prints of a Script."""
    sets = ALIASES | {theirs: ours for theirs, (ours, _) in TRANSLATED.items()}
    also = [f'--{theirs} sets --{ours}' for theirs, ours in sets.items() if ours in script.settings]
    also = textwrap.fill('; '.join(also), 110, break_on_hyphens=False)
    return '\n'.join([*script.help, HELP, also or 'none'])


def source_of(path):
    """Return the text of a file."""
    with open(path, encoding='utf-8') as file:
        return file.read()


# ----------------------------------------------------------------------------------------------- config files

def config_values(path):
    """Return {name: value} of a config file. Raises MissingError, or SettingError where it is not flat."""
    if path.startswith('configs/') and not os.path.exists(path):    # the folder's name elsewhere
        path = path.replace('configs', 'config', 1)
    if not os.path.isfile(path):
        raise MissingError(f'no config file {path}; those here: {", ".join(sorted(glob.glob("config/*")))}')
    if not path.endswith('.py'):
        values = read_yaml(path) or {}
        if not isinstance(values, dict) or not all(isinstance(text, str) for text in values.values()):
            raise SettingError(f'{path}: a flat list of `name: value` lines is wanted')
        return values
    values = {}
    try:
        exec(compile(source_of(path), path, 'exec'), values)
    except Exception as error:  # the file's own
        raise SettingError(f'{path} is no config file: {first_line(error)}') from None
    return {name: value for name, value in values.items() if not name.startswith('_')}


def read_yaml(path):
    """Return what a YAML file holds, with all scalars as text: flags are text, too. Raises SettingError for a
    file that is not YAML."""
    import yaml

    class Loader(yaml.BaseLoader):      # of two values of a name, PyYAML's takes the last
        def construct_mapping(self, node, deep=False):
            names = [name.value for name, _ in node.value]
            for name in names:
                if names.count(name) > 1:
                    raise yaml.YAMLError(f'{name} stands there twice')
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(source_of(path), Loader)
    except Exception as error:      # PyYAML's own, and what Python raises on exotic text
        raise SettingError(f'{path} is not YAML: {" ".join(str(error).split())[:200]}') from None


# -------------------------------------------------------------------------------------------- names and flags

def _setting_of(name, settings):
    """Return the Setting of a name, ours or another system's; None for an unknown name."""
    if name in TRANSLATED:
        return Setting('', tuple(TRANSLATED[name][1]))
    return settings.get(ALIASES.get(name, name))


def with_equals(words, settings):
    """Return a command line with each flag as --name=value. settings: those of the script."""
    words, found = [word.removeprefix('--config=') for word in words if word != '--config'], []
    while words:
        word = words.pop(0)
        if word.startswith('-'):
            name, equals, value = word.lstrip('-').partition('=')
            name = name.replace('-', '_')
            word = f'--{name}={value}' if equals else _flag(name, words, settings)
        found.append(word)
    return found


def _flag(name, words, settings):
    """Return --name=value for a flag without =. Its value may be the next of the words, which is then taken
    from them."""
    for positive in (name[3:], f'use_{name[3:]}'):
        if name.startswith('no_') and _setting_of(positive, settings):
            return f'--{positive}=False'
    setting = _setting_of(name, settings)
    switch = setting and (isinstance(setting.default, bool) or 'on' in setting.words)
    values = {*WORDS, *setting.words} if switch else ()
    if words and not words[0].startswith('--') and (not values or words[0].lower() in values):
        return f'--{name}={words.pop(0)}'
    if setting and not values:
        raise SettingError(f'--{name} needs a value')
    return f'--{name}=True'


# ------------------------------------------------------------------------------------------- one checked dict

class Config(dict):
    """The settings of a run. `given`: the names that config files or flags set, as opposed to defaults.
    `inherited`: the names that came from a checkpoint. `stem`: the last config file's name without ending, or
    ''."""

    def __init__(self, script, layers, stem=''):
        """layers: dicts, weakest first. A layer that changes a name of a group replaces the group."""
        self.script, self.layers, self.stem = script, layers, stem
        self.defaults = defaults = {name: setting.default for name, setting in script.settings.items()}
        super().__init__(defaults)
        self.given, self.inherited = set(), frozenset()
        for layer in layers:
            for group in script.groups:
                if any(layer.get(name, self[name]) != self[name] for name in group):
                    self.update((name, defaults[name]) for name in group)
                    self.given.difference_update(group)
            self.update(layer)
            self.given.update(layer)

    def over(self, base, never=()):
        """Lay the same files and flags over another run's settings: defaults < base < files < flags.

        base: dict, as saved in a checkpoint; names that this script does not have are dropped, and so are
        those in `never`. Returns (Config, a line about each difference from base)."""
        settings = self.script.settings
        inherited = {name: _typed(name, value, settings[name], 'the checkpoint')
                     for name, value in base.items() if name in settings and name not in never}
        config = Config(self.script, [inherited, *self.layers], self.stem)
        config.given, config.inherited = set(self.given), frozenset(inherited)
        changed = [f'{name}: {value!r} in the checkpoint, now {config[name]!r}'
                   for name, value in inherited.items() if config[name] != value]
        return config, changed


def configure(path, argv=None, positional=None, nearby=()):
    """Return the Config of a script's settings, config files and flags.

    path: of the script, from this folder on. argv: the words after its name; None takes the process's own and
    installs the one-line errors. positional: name of the setting that a bare word sets, config files aside.
    nearby: more names that a misspelt one may mean. Raises SettingError for an unknown name, a wrong type, a
    value that is not allowed, a bare word too many; MissingError for a config file that does not exist."""
    if argv is None:
        argv = sys.argv[1:]
        one_line_errors()
    script = read_script(path)
    if '--help' in argv or '-h' in argv:
        print(help_text(script))
        sys.exit(0)
    given, stem = [], ''    # given: (a config file or the command line, name, value)
    for word in with_equals(argv, script.settings):
        if word.startswith('-'):
            name, _, value = word.lstrip('-').partition('=')
            given.append((COMMAND_LINE, name, value))
        elif word.endswith(CONFIG_FILES):
            given += [(word, *item) for item in config_values(word).items()]
            stem = os.path.splitext(os.path.basename(word))[0]
        elif positional and (COMMAND_LINE, positional) not in [each[:2] for each in given]:
            given.append((COMMAND_LINE, positional, word))
        else:
            raise SettingError(f'what is {word!r}? Settings are --name=value; '
                               'config files end in .py or .yaml')
    settings, others = script.settings, {}
    for twin in script.twins:
        others |= read_script(twin).settings
    files, flags, unknown = {}, {}, []
    for where, name, value in given:
        name = ALIASES.get(name, name)
        if name in TRANSLATED:
            theirs = _typed(name, value, _setting_of(name, settings), where)
            name, value = TRANSLATED[name][0], TRANSLATED[name][1][theirs]
            if value is None:
                continue
        if name in settings:
            layer = flags if where == COMMAND_LINE else files
            layer[name] = _typed(name, value, settings[name], where)
        elif name in others and where == COMMAND_LINE and value not in (False, 'auto'):
            unknown.append(f'{where}: {name} is a setting of {", ".join(script.twins)}')
        elif name in others:    # a flag of these values asks for nothing of a twin
            _typed(name, value, others[name], where)
        else:
            near = difflib.get_close_matches(name, [*settings, *nearby, *ALIASES, *TRANSLATED], 1, 0.5)
            nearest = f'; the nearest is {near[0]}' if near else ''
            unknown.append(f'{where}: no setting is called {name!r}{nearest}')
    if unknown:
        raise SettingError(f'{"; ".join(unknown)}; --help lists what there is')
    return Config(script, [files, flags], stem)
