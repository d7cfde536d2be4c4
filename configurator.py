"""Settings: a script's scalars, then config files, then flags -> one checked dict. And errors of one line.

    config = configure(__file__)          # in a script, below its settings
    globals().update(config)

A setting is a scalar assigned at the top of a script, above the call of `configure`. The last such assignment
is its default. The comment behind it begins with what it may be, up to the first colon:

    grad_clip = 1.0     # >= 0: largest gradient norm; 0 = no clipping      bounds, with commas between
    dtype = 'bf16'      # bf16 | fp32: of activations                       choices; (...) explains one
    every = 'none'      # none | full | >= 1                                choices, or a whole number
    resume = ''         # latest | best | a path                            any text: `a path` is no word
    recipe = 'auto'     # auto | RECIPES of fp8gpt/fp8/linear.py            the keys of that dict, too

Config files are Python (`name = value`, arithmetic allowed) or flat YAML. Flags: --key=value, --key value,
--flag, --no_flag. Lists above the call: `config_groups` (names of which a later layer replaces all at once)
and `config_twins` (scripts whose settings a config file may hold, too).

A mistake of the user's is a UserError. It ends the process with one line on stderr and exit code 2 for a
setting, 1 for data or the machine, 3 for memory. Any other exception keeps its traceback; so does each under
TRACEBACK=1.
"""
import argparse
import ast
import atexit
import contextlib
import dataclasses
import difflib
import glob
import math
import operator
import os
import re
import sys
import textwrap
import threading
import typing

# Names that users bring from other systems -> ours.
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
# Names from other systems -> (our setting, their values -> ours, why any other value cannot be had). A value
# that is None here changes nothing.
TRANSLATED = {
    'auto_batch_size': ('batch_size', {True: 0, False: None}, ''),
    'gradient_checkpointing': ('grad_checkpointing', {True: 'full', False: None}, ''),
    'mixed_precision': ('use_fp8', {'fp8': True, 'bf16': False}, ''),
    'use_te': ('fp8_backend', {True: 'auto:te', False: None}, ''),
    'fp8_scenario': ('fp8_recipe', {'default': 'auto', 'mxfp8': 'auto:mxfp8'}, ''),
    'use_flash_attn': ('', {True: None}, 'attention always goes through scaled_dot_product_attention, '
                                         'which takes flash where it can'),
    'decay_lr': ('', {True: None}, '--lr_schedule=constant is without decay'),
    'dropout': ('', {0.0: None}, 'no model here has dropout; --weight_decay holds against overfitting'),
    'eval_iters': ('', {}, 'validation loss is of --eval_tokens tokens, in fixed windows'),
    'always_save_checkpoint': (
        '', {}, 'every --checkpoint_freq steps are saved, and best_model.pt is the best'),
    'min_lr': ('', {}, '--min_lr_ratio is its share of max_lr'),
    'lr_decay_iters': ('', {}, 'the decay ends with the run, as --max_steps does'),
}
CONFIG_FILES = '.py', '.yaml', '.yml'
COMMAND_LINE = 'the command line'
YAML_BYTES, YAML_DEPTH = 2**16, 8     # the longest and deepest YAML file that is read
WORDS = dict.fromkeys(('true', 'on', 'yes', '1'), True) | dict.fromkeys(('false', 'off', 'no', '0'), False)
COMPARISONS = {'>=': operator.ge, '>': operator.gt, '<=': operator.le, '<': operator.lt}
BOUNDS = re.compile(r'[<>]=? -?\d[\d_.e]*(, [<>]=? -?\d[\d_.e]*)*')
OUT_OF_MEMORY = 3   # the exit code


# ----------------------------------------------------------------------------------------------------- errors

class UserError(Exception):
    """A mistake that the user can put right; its one line says how."""
    exit_code = 1


class SettingError(UserError, ValueError):
    """A setting that is unknown, of the wrong type, out of range, or contradicts another."""
    exit_code = 2


class DataError(UserError, OSError):
    """A file that is damaged, of another kind, or cannot be written."""


class MissingError(DataError, FileNotFoundError):
    """A file or folder that is not there."""


class MachineError(UserError, RuntimeError):
    """Something that this machine lacks: a GPU, memory, a package."""


class Parser(argparse.ArgumentParser):
    """argparse's parser, for scripts with commands and for those that hand words on to configure. Its errors
    are SettingErrors."""

    def __init__(self, doc, **options):
        super().__init__(description=doc, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.commands = None

    def add_command(self, name, what):
        """Return the Parser of a command, the first word behind the script's name."""
        self.commands = self.commands or self.add_subparsers(dest='command', required=True)
        return self.commands.add_parser(name, help=what, doc=textwrap.fill(what, 110))

    def add(self, flag, default=None, **options):
        """Add a flag of its default's type; one whose default is False is switched on by its name."""
        if default is False:
            return self.add_argument(flag, action='store_true', **options)
        kind = {} if default is None else {'type': type(default), 'default': default}
        if default not in (None, ''):
            options['help'] += ' (default: %(default)s)'
        return self.add_argument(flag, **kind | options)

    def error(self, message):
        raise SettingError(f'{message}; --help lists what there is')


def at_least(low, kind=int):
    """Return a type for Parser.add: numbers of a kind from `low` on."""
    def number(text):
        with contextlib.suppress(ValueError):
            if low <= kind(text) < math.inf:
                return kind(text)
        name = 'a whole number' if kind is int else 'a number'
        raise argparse.ArgumentTypeError(f'wants {name} >= {low}, not {text!r}')
    return number


def one_line_errors():
    """End the process with one line and no traceback on an error that is not a programmer's."""
    sys.excepthook = _one_line
    threading.excepthook = _of_a_thread
    atexit.unregister(_flush)
    atexit.register(_flush)


def _one_line(kind, error, trace):
    # not sys.stderr: torch.distributed's hook replaces it, and drops what is printed where this one exits
    if issubclass(kind, KeyboardInterrupt):
        print('\ninterrupted', file=sys.__stderr__)
        sys.exit(130)
    line = error_line(error)
    if os.environ.get('TRACEBACK', '0') != '0' or line is None:
        return sys.__excepthook__(kind, error, trace)
    if line:
        bar = '\r\033[K' if sys.__stderr__.isatty() else ''  # erases a progress bar that stands in the line
        print(f'{bar}error: {line}', file=sys.__stderr__)
    code = OUT_OF_MEMORY if out_of_memory(error) else getattr(kind, 'exit_code', 1)
    if int(os.environ.get('WORLD_SIZE', 1)) > 1:
        sys.stdout.flush()
        os._exit(code)      # finalisation would wait for what the other ranks do not send
    sys.exit(code)


def _of_a_thread(arguments):
    line = error_line(arguments.exc_value)
    if line is None:
        return threading.__excepthook__(arguments)
    print(f'WARNING: {line}', file=sys.__stderr__)


def _flush():
    """Flush stdout at the end, without complaint where nobody reads it any more."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, 'w')


def error_line(error):
    """Return the line that an error ends the process with: None for a programmer's, which keeps its
    traceback, '' where nobody reads any more, as in `| head`."""
    if hasattr(error, 'exit_code'):     # a UserError, or one of fp8's own
        return str(error)
    if isinstance(error, BrokenPipeError):
        return ''
    if isinstance(error, OSError) and error.errno:  # the system's, as opposed to a library's
        path = f'{error.filename}: ' if error.filename else ''
        return path + error.strerror
    if isinstance(error, RuntimeError) and re.search('gloo|NCCL', str(error)):
        return 'the connection to another rank is lost: what that rank printed says why'
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
    """One setting: its default and what the comment behind it allows."""
    default: bool | int | float | str
    comment: str = ''
    heading: str = ''       # the comment above its group
    words: tuple = ()       # choices
    bounds: str = ''        # numbers allowed, as '>= 0, < 1'; '' = all
    any_text: bool = False

    @classmethod
    def of(cls, default, comment='', heading='', folder=''):
        """Return the Setting of a default and the comment behind it. folder: of the script."""
        parts = [part.strip() for part in re.sub(r' *\([^)]*\)', '', comment).split(': ')[0].split('|')]
        words, bounds, known = [], '', len(parts) > 1
        for part in parts:
            table = re.fullmatch(r'(\w+) of ([\w/]+\.py)', part)
            if table:
                words += _keys(folder, *table.groups())
            elif BOUNDS.fullmatch(part):
                bounds = part
            elif re.fullmatch(r'[\w:-]+', part):
                words.append(part)
            else:
                known = False
        any_text = isinstance(default, str) and not known
        words = () if isinstance(default, bool) else tuple(words)
        return cls(default, comment, heading, words=words, bounds=bounds, any_text=any_text)

    @property
    def switch(self):
        """Whether its name alone switches it on."""
        return isinstance(self.default, bool) or 'on' in self.words

    @property
    def wanted(self):
        """What its value has to be, to be read after its name."""
        if isinstance(self.default, str) and not self.any_text:
            numbers = [f'a whole number {self.bounds}'] if self.bounds else []
            return f'is one of {", ".join([*self.words, *numbers])}'
        kinds = {bool: 'true or false', int: 'a whole number', float: 'a number', str: 'text'}
        return f'wants {kinds[type(self.default)]} {self.bounds}'.rstrip()

    def read(self, value):
        """Return value as the default's type; text is read as that type. Raises KeyError, TypeError,
        ValueError or OverflowError for a value of another type, or one that is not allowed."""
        kind = type(self.default)
        if kind is bool:
            return WORDS[str(value).lower()]
        if kind is str:
            return self._read_text(value)
        if isinstance(value, bool):
            raise TypeError
        number = float(value) if kind is float else _whole_number(value)
        if not self.within_bounds(number):
            raise ValueError
        return number

    def _read_text(self, value):
        switched = {True: 'on', False: 'off'}.get(WORDS.get(str(value).lower()))
        if switched in self.words:
            return switched
        if self.bounds and str(value).isdecimal() and self.within_bounds(int(value)):
            return str(value)
        if not isinstance(value, str) or not (self.any_text or value in self.words):
            raise ValueError
        return value

    def within_bounds(self, number):
        """Return whether a number is finite and within the bounds."""
        ends = [each.split() for each in self.bounds.split(',')] if self.bounds else []
        return abs(number) < math.inf and all(COMPARISONS[sign](number, float(end)) for sign, end in ends)


def _whole_number(value):
    """Return 1000 for 1000, '1_000' or '1e3', with all digits, of which a float would lose some."""
    if not isinstance(value, float):
        with contextlib.suppress(ValueError):
            return int(value)
    if not float(value).is_integer():
        raise ValueError
    return int(float(value))


def _keys(folder, name, path):
    """Return the keys of a dict literal, read without running its file."""
    for node in ast.parse(source_of(os.path.join(folder, path))).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], 'id', '') == name:
            return [key.value for key in node.value.keys]
    raise LookupError(f'{path} has no {name}')


def _typed(name, value, setting, where):
    """Return value as the type of the setting. Raises SettingError where it is not, or is not allowed."""
    try:
        return setting.read(value)
    except (KeyError, TypeError, ValueError, OverflowError):
        raise SettingError(f'{where}: {name} {setting.wanted}, not {value!r}') from None


class Script(typing.NamedTuple):
    """What a script declares above its call of configure."""
    settings: dict      # name -> Setting
    groups: list        # config_groups
    twins: list         # config_twins
    doc: str


def read_script(path):
    """Return the Script at a path. Only its assignments run."""
    text = source_of(path)
    tree, lines, names, settings, heading = ast.parse(text), text.splitlines(), {}, {}, ''
    folder = os.path.dirname(os.path.realpath(path))     # a link's target: it names other files
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        if 'configure(' in ast.unparse(node.value):
            break
        above = lines[node.lineno - 2]
        if above.startswith('# ') and '---' not in above:
            heading = above.lstrip('# ')
        try:
            exec(compile(ast.Module([node], []), path, 'exec'), {'__builtins__': {}}, names)
        except NameError:
            continue  # `linear = Linear`: not a scalar, so not a setting
        name = node.targets[0].id
        if isinstance(names[name], (bool, int, float, str)):
            comment = lines[node.end_lineno - 1].encode()[node.end_col_offset:].decode().lstrip(' #')
            settings[name] = Setting.of(names[name], comment, heading, folder)
    else:
        raise SettingError(f'{path} has no settings: no line `config = configure(__file__)`')
    groups, twins = (names.get(f'config_{name}', []) for name in ('groups', 'twins'))
    return Script(settings, groups, twins, ast.get_docstring(tree) or '')


def help_text(script):
    """Return all that --help prints of a Script."""
    lines, heading = [script.doc], None
    for name, setting in script.settings.items():
        if setting.heading != heading:
            heading = setting.heading
            lines += ['', heading or 'settings']
        also = ', '.join(theirs for theirs, ours in ALIASES.items() if ours == name)
        comment = setting.comment + f' (also {also})' * bool(also)
        lines.append(_entry(f'--{name} {setting.default!r}', comment))
    if 'max_steps' in script.settings:      # of training, as they are
        lines += ['', 'names from other systems']
        for name, (ours, values, reason) in TRANSLATED.items():
            lines += [_entry(f'--{name} {value}', f'as --{ours}={here}')
                      for value, here in values.items() if here is not None]
            lines += [_entry(f'--{name}', f'no setting: {reason}')] if reason else []
    return '\n'.join([*lines, '', '--name=value, --name value, --flag, --no_flag; config files: .py, .yaml'])


def _entry(setting, comment):
    return textwrap.fill(f'  {setting}'.ljust(36) + '  ' + comment, 110, subsequent_indent=' ' * 38,
                         break_long_words=False, break_on_hyphens=False)


def source_of(path):
    """Return the text of a file."""
    with open(path, encoding='utf-8') as file:
        return file.read()


# ----------------------------------------------------------------------------------------------- config files

def config_values(path):
    """Return {name: value} of a config file; configs/x may be config/x. Raises MissingError, or SettingError
    where it is not flat."""
    if path.startswith('configs/') and not os.path.isfile(path):
        path = f'config/{path.removeprefix("configs/")}'
    if not os.path.isfile(path):
        here = ', '.join(sorted(glob.glob('config/*.py') + glob.glob('config/*.y*ml')))
        raise MissingError(f'no config file {path}; those here: {here or "none"}')
    if not path.endswith('.py'):
        return _read_yaml(path)
    values = {}
    try:
        exec(compile(source_of(path), path, 'exec'), values)
    except OSError:
        raise
    except Exception as error:  # the file's own
        raise SettingError(f'{path} is no config file: {first_line(error)}') from None
    return {name: value for name, value in values.items() if not name.startswith('_')}


def yaml_text(path):
    """Return the text of a YAML file that is safe to load: it has as many nodes as it writes. Raises
    SettingError for what is not YAML, for anchors and aliases, of which ten lines can stand for billions of
    nodes, and for a file whose size or depth would take the reader more than a second."""
    import yaml
    if os.path.getsize(path) > YAML_BYTES:
        raise SettingError(f'{path} is longer than {YAML_BYTES:,} bytes')
    depth, wrong = 0, ''
    try:
        text = source_of(path)
        for event in yaml.parse(text):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if getattr(event, 'anchor', None):
                wrong = 'has an anchor (&) or an alias (*): write the values out'
            elif depth > YAML_DEPTH:
                wrong = f'nests deeper than {YAML_DEPTH} levels'
            if wrong:
                break
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise SettingError(f'{path} is not YAML: {" ".join(str(error).split())}') from None
    if wrong:
        raise SettingError(f'{path}: line {event.start_mark.line + 1} {wrong}')
    return text


def _read_yaml(path):
    """Return {name: its value as text}, which is read as a flag's is. Raises SettingError for what is not
    flat."""
    import yaml
    values, roots = {}, list(yaml.compose_all(yaml_text(path)))
    flat = len(roots) <= 1 and all(isinstance(root, yaml.MappingNode) for root in roots)
    pairs = roots[0].value if roots and flat else []
    if not flat or not all(isinstance(node, yaml.ScalarNode) for pair in pairs for node in pair):
        raise SettingError(f'{path}: a flat list of `name: value` lines is wanted')
    for name, value in pairs:
        if name.value in values:
            line = name.start_mark.line + 1
            raise SettingError(f'{path}: {name.value} is given twice, again in line {line}')
        values[name.value] = value.value
    return values


# -------------------------------------------------------------------------------------------- names and flags

def _setting_of(name, settings):
    """Return the Setting of a name, ours or another system's; None where nobody knows it."""
    name = ALIASES.get(name, name)
    if name not in TRANSLATED:
        return settings.get(name)
    values = tuple(TRANSLATED[name][1])
    if values and not isinstance(values[0], str):
        return Setting(values[0])
    return Setting('', words=values, any_text=not values)


def _flag(word, words, settings):
    """Return (name, value) of a flag, whose value may be the next of the words: it is taken from them."""
    name, equals, value = word.lstrip('-').partition('=')
    name = name.replace('-', '_')
    if equals:
        return name, value
    if name.startswith('no_'):
        for positive in (name[3:], 'use_' + name[3:]):
            if _setting_of(positive, settings):
                return positive, False
    setting = _setting_of(name, settings)
    switch = setting and setting.switch
    if words and not words[0].startswith('--'):
        follows = words[0].lower() in WORDS or isinstance(setting.default, str) if switch else True
        if follows and not (switch and words[0].endswith(CONFIG_FILES)):
            return name, words.pop(0)
    if setting and not switch:
        raise SettingError(f'--{name} needs a value, as in --{name}={setting.default}')
    return name, True


def with_equals(words, settings):
    """Return a command line with each flag as --name=value. settings: those that the flags are of."""
    words, found = [word for word in words if word != '--config'], []
    while words:
        word = words.pop(0)
        if word.startswith('-'):
            word = '--{}={}'.format(*_flag(word, words, settings))
        found.append(word)
    return found


class _Reader:
    """Checks names and values, and puts them into a layer under our names. theirs: see Config. unknown: what
    is wrong with names that are no settings."""

    def __init__(self, script, folder, nearby):
        self.settings, self.twins, self.others = script.settings, script.twins, {}
        for twin in script.twins:
            self.others |= read_script(os.path.join(folder, twin)).settings
        self.names = [*script.settings, *nearby, *ALIASES, *TRANSLATED]     # which a misspelt one may mean
        self.theirs, self.unknown = {}, []

    def put(self, layer, name, value, where):
        """Put a setting from a config file or the command line into a layer."""
        target = ALIASES.get(name, name)
        if target in TRANSLATED:
            ours, values, reason = TRANSLATED[target]
            if values:
                value = _typed(name, value, _setting_of(name, {}), where)
            if not values or value not in values:
                self.unknown.append(f'{where}: {name}={value} cannot be had: {reason}')
                return
            if values[value] is None:
                return
            target, value = ours, values[value]
            self.theirs[name] = target in self.settings or value in (False, 'auto')
        if target in self.settings:
            value = _typed(target, value, self.settings[target], where)
            if where != COMMAND_LINE and layer.get(target, value) != value:     # of flags the last one wins
                raise SettingError(f'{where}: {target} is given twice, as {layer[target]!r} and {value!r}')
            layer[target] = value
        elif target in self.others and name == target and where == COMMAND_LINE:
            self.unknown.append(f'{where}: {name} is a setting of {", ".join(self.twins)}')
        elif target in self.others:
            _typed(target, value, self.others[target], where)
        else:
            near = difflib.get_close_matches(target, self.names, 1, 0.5)
            nearest = f'; the nearest is {near[0]}' if near else ''
            self.unknown.append(f'{where}: no setting is called {name!r}{nearest}')


# ------------------------------------------------------------------------------------------- one checked dict

class Config(dict):
    """The settings of a run. `given`: the names that config files or flags set, as opposed to defaults.
    `inherited`: those that came from a checkpoint. `theirs`: names of TRANSLATED that were given -> whether
    the script can do so. `stem`: the last config file's name without its ending, or ''."""

    def __init__(self, script, layers, theirs, stem=''):
        """layers: dicts, weakest first, of which a later one that changes a name of a group replaces the
        group."""
        self.script, self.layers, self.theirs, self.stem = script, layers, theirs, stem
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
        settings, inherited = self.script.settings, {}
        for name, value in base.items():
            name = ALIASES.get(name, name)
            if name in settings and name not in never:
                inherited[name] = _typed(name, value, settings[name], 'the checkpoint')
        config = Config(self.script, [inherited, *self.layers], self.theirs, self.stem)
        config.given, config.inherited = set(self.given), frozenset(inherited)
        changed = [f'{name}: {value!r} in the checkpoint, now {config[name]!r}'
                   for name, value in inherited.items() if config[name] != value]
        return config, changed


def configure(path, argv=None, positional=None, nearby=()):
    """Return the Config of a script's settings, config files and flags.

    path: of the script. argv: the words after its name; None takes the process's own and installs the
    one-line errors. positional: name of the setting that a bare word sets, config files aside. nearby: more
    names that a misspelt one may mean. Raises SettingError for an unknown name, a wrong type, a value that is
    not allowed, a bare word too many; MissingError for a config file that is not there."""
    if argv is None:
        argv = sys.argv[1:]
        one_line_errors()
    words, script = list(argv), read_script(path)
    if '--help' in words or '-h' in words:
        print(help_text(script))
        sys.exit(0)
    reader = _Reader(script, os.path.dirname(os.path.abspath(path)), nearby)
    files, flags, stem = {}, {}, ''
    while words:
        word = words.pop(0)
        if word == '--config' and words:
            word = words.pop(0)
        word = word.removeprefix('--config=')
        if word.startswith('-'):
            name, value = _flag(word, words, script.settings)
            reader.put(flags, name, value, COMMAND_LINE)
        elif word.endswith(CONFIG_FILES):
            one = {}
            for name, value in config_values(word).items():
                reader.put(one, name, value, where=word)
            files.update(one)
            stem = os.path.splitext(os.path.basename(word))[0]
        elif positional and positional not in flags:
            flags[positional] = word
        else:
            raise SettingError(f'what is {word!r}? Settings are --name=value; '
                               'config files end in .py or .yaml')
    if reader.unknown:
        raise SettingError(f'{"; ".join(reader.unknown)}; --help lists what there is')
    return Config(script, [files, flags], reader.theirs, stem)
