"""Settings: a script's own scalars, then config files, then flags -> one checked dict.

    config = configure(__file__)          # in a script, below its settings
    globals().update(config)

A setting is a scalar (bool, int, float, str) assigned at the top of the script, above the call of
`configure`; its default is the last such assignment and its help text is the comment behind it, which begins
with what the setting may be:

    grad_clip = 1.0     # >= 0: largest gradient norm; 0 = no clipping      bounds, with commas between
    dtype = 'bf16'      # bf16 | fp32: of activations                       choices; (...) explains one
    every = 'none'      # none | full | >= 1                                choices, or a whole number
    resume = ''         # latest | best | a path                            any text: `a path` is no word

Config files are Python (`name = value`, arithmetic allowed) or flat YAML. Flags: --key=value, --key value,
--flag, --no_flag. Whatever is misspelt, of the wrong type or out of bounds raises SettingError; a misspelt
name is told the nearest setting.

configure also gives the process its manners: see errors.py.
"""
import ast
import dataclasses
import difflib
import math
import operator
import os
import re
import sys
import tokenize

import errors
from errors import (  # noqa: F401
    DataError, MachineError, MissingError, SettingError, UserError, first_line, one_line_errors, told)


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
# Names from other systems -> our setting, and their values -> ours; False says nothing.
TRANSLATED = {
    'auto_batch_size': ('batch_size', {True: 0}),
    'gradient_checkpointing': ('grad_checkpointing', {True: 'full'}),
    'mixed_precision': ('use_fp8', {'fp8': True, 'bf16': False}),
    'use_te': ('fp8_backend', {True: 'auto:te'}),
    'fp8_scenario': ('fp8_recipe', {'default': 'auto', 'mxfp8': 'auto:mxfp8'}),
}
# Names that have one possible value so far: that value is accepted, another is refused with the reason.
FIXED = {
    'use_flash_attn': (True, 'attention always goes through scaled_dot_product_attention, '
                             'which takes flash where it can'),
    'decay_lr': (True, '--lr_schedule=constant is without decay'),
    'dropout': (0.0, 'no model here has dropout; --weight_decay is what holds against overfitting'),
}
# Names from other systems for what is said otherwise here -> how.
OTHERWISE = {
    'eval_iters': 'validation loss is of --eval_tokens tokens, in fixed windows',
    'always_save_checkpoint': 'every --checkpoint_freq steps are saved, and best_model.pt is the best',
    'min_lr': '--min_lr_ratio is its share of max_lr',
    'lr_decay_iters': 'the decay ends with the run, as --max_steps does',
}
CONFIG_FILES = '.py', '.yaml', '.yml'
COMMAND_LINE = 'the command line'
COMPARISONS = {'>=': operator.ge, '>': operator.gt, '<=': operator.le, '<': operator.lt}
BOUNDS = re.compile(r'[<>]=? -?\d[\d_.e]*(, [<>]=? -?\d[\d_.e]*)*')
WORDS = dict.fromkeys(('true', 'on', 'yes', '1'), True) | dict.fromkeys(('false', 'off', 'no', '0'), False)


@dataclasses.dataclass(frozen=True)
class Range:
    """The finite numbers within bounds. text: '>= 0, < 1'."""
    text: str

    @property
    def bounds(self):
        """[(sign, number)], as [('>=', 0.0), ('<', 1.0)]."""
        return [(sign, float(number)) for sign, number in map(str.split, self.text.split(','))]

    def __contains__(self, number):
        return abs(number) < math.inf and all(COMPARISONS[sign](number, end) for sign, end in self.bounds)


@dataclasses.dataclass(frozen=True)
class Choices:
    """Words, and beside them what else may stand there: whole numbers (a Range), any text."""
    words: tuple = ()
    numbers: Range | None = None
    any_text: bool = False

    def __contains__(self, value):
        if self.numbers and str(value).isdecimal():
            return int(value) in self.numbers
        return self.any_text or value in self.words


@dataclasses.dataclass(frozen=True)
class Setting:
    """allowed: the Range or Choices that values are in; None: a number of which the script says nothing."""
    default: bool | int | float | str
    allowed: Range | Choices | None = None

    @classmethod
    def of(cls, default, comment):
        """Of a default and the comment behind it."""
        if isinstance(default, bool):
            return cls(default, Choices((True, False)))
        declared = re.sub(r' *\([^)]*\)', '', comment).split(': ')[0]
        parts = [part.strip() for part in declared.split('|')]
        ranges = [Range(part) for part in parts if BOUNDS.fullmatch(part)]
        if not isinstance(default, str):
            return cls(default, *ranges)
        words = tuple(part for part in parts if re.fullmatch(r'[\w:-]+', part))
        any_text = len(parts) == 1 or len(words) + len(ranges) < len(parts)
        return cls(default, Choices(words, *ranges, any_text=any_text))

    @property
    def switch(self):
        """Whether its name alone switches it on."""
        return isinstance(self.allowed, Choices) and not {True, 'on'}.isdisjoint(self.allowed.words)

    @property
    def wanted(self):
        """What a value has to be, to be read behind the setting's name."""
        kind, allowed = type(self.default), self.allowed
        if kind is str and not allowed.any_text:
            numbers = [f'a whole number {allowed.numbers.text}'] if allowed.numbers else []
            return f'is one of {", ".join([*allowed.words, *numbers])}'
        kinds = {bool: 'true or false', int: 'a whole number', float: 'a number', str: 'text'}
        bounds = f' {allowed.text}' if isinstance(allowed, Range) else ''
        return f'wants {kinds[kind]}{bounds}'


ON_OFF = Setting.of(False, '')


class Config(dict):
    """The settings in force. `given`: the names that config files or flags set, as opposed to defaults.
    `inherited`: those that came from a checkpoint. `theirs`: names of TRANSLATED that were given -> whether
    the script can do so."""

    def __init__(self, settings, groups, layers, theirs):
        """settings: name -> Setting. groups: tuples of names of which a later layer that changes one replaces
        all. layers: dicts, weakest first."""
        self.settings = settings
        self.defaults = defaults = {name: setting.default for name, setting in settings.items()}
        self.theirs = theirs
        self.groups = groups
        self.layers = layers
        super().__init__(defaults)
        self.given = set()
        self.inherited = frozenset()
        for layer in layers:
            for group in groups:
                if any(layer.get(name, self[name]) != self[name] for name in group):
                    self.update((name, defaults[name]) for name in group)
                    self.given.difference_update(group)
            self.update(layer)
            self.given.update(layer)

    def over(self, base, never=()):
        """The same files and flags laid over another run's settings: defaults < base < files < flags.

        base: dict, as saved in a checkpoint; names that this script does not have are dropped, and so are
        those in `never`. Returns (Config, list of lines that tell each difference from base)."""
        base = {ALIASES.get(name, name): value for name, value in base.items()}
        base = {name: _typed(name, value, self.settings[name], 'the checkpoint')
                for name, value in base.items() if name in self.settings and name not in never}
        config = Config(self.settings, self.groups, [base, *self.layers], self.theirs)
        if errors.in_force is self:
            errors.in_force = config
        config.given, config.inherited = set(self.given), frozenset(base)
        changed = [f'{name}: {base[name]!r} in the checkpoint, now {config[name]!r}'
                   for name in base if config[name] != base[name]]
        return config, changed


def configure(script, argv=None, positional=None):
    """Reads a script's settings, config files and flags.

    script: path of the script whose top-level scalars are the settings.
    argv: the words behind the script's name; None takes the process's own and installs the one-line errors.
    positional: name of the setting that a bare word sets (config files, *.py, *.yaml and *.yml, aside).
    Raises SettingError for an unknown name, a wrong type, a value that is not allowed, a bare word too many,
    MissingError for a config file that is not there."""
    own = argv is None
    if own:
        argv = sys.argv[1:]
        one_line_errors()
    defaults, comments, groups, twins = read_script(script)
    settings = _settings(defaults, comments)
    if '--help' in argv or '-h' in argv:
        print((ast.get_docstring(ast.parse(_source(script))) or '') + '\n\nsettings:')
        for name, value in defaults.items():
            print(f'  --{name:<28} {value!r:<16} {comments.get(name, "")}')
        sys.exit(0)
    others = {}
    for twin in twins:
        path = os.path.join(os.path.dirname(os.path.abspath(script)), twin)
        others.update(_settings(*read_script(path)[:2]))
    files, flags, theirs, words, unknown = {}, {}, {}, list(argv), []
    while words:
        word = words.pop(0)
        if word == '--config' and words:
            word = words.pop(0)
        word = word.removeprefix('--config=')
        if word.startswith('-'):
            name, equals, value = word.lstrip('-').partition('=')
            name = name.replace('-', '_')
            if not equals:
                value, name = _value_of_flag(name, words, settings)
            if name in others and name not in settings:
                unknown.append(f'{COMMAND_LINE}: {name} is a setting of {", ".join(twins)}')
            else:
                unknown += _put(flags, (settings, others, theirs), name, value, where=COMMAND_LINE)
        elif word.endswith(CONFIG_FILES):
            one = {}
            for name, value in config_values(word).items():
                unknown += _put(one, (settings, others, theirs), name, value, where=word)
            changed = [f'{name}={one[name]!r}, not {files[name]!r}' for name in one
                       if files.get(name, one[name]) != one[name]]
            if changed and own and os.environ.get('RANK', '0') == '0':
                print(f'{word} comes later, so {", ".join(changed)}')
            files.update(one)
        elif positional and positional not in flags:
            flags[positional] = word
        else:
            raise SettingError(f'what is {word!r}? Settings are --name=value; '
                               'config files end in .py or .yaml')
    if unknown:
        raise SettingError(f'{"; ".join(unknown)}; --help lists what there is')
    config = Config(settings, groups, [files, flags], theirs)
    if own:
        errors.in_force = config
    return config


def declared(script):
    """name -> the Range or Choices that a script's setting may be; None for a number without bounds."""
    return {name: setting.allowed for name, setting in _settings(*read_script(script)[:2]).items()}


def _settings(defaults, comments):
    """name -> Setting."""
    return {name: Setting.of(default, comments.get(name, '')) for name, default in defaults.items()}


def read_script(path):
    """(defaults, comments, groups, twins) of a script: its top-level scalars above the call of configure,
    what is written behind them, `config_groups` (names of which a later layer replaces all at once) and
    `config_twins` (scripts whose settings a config file may hold too). Only assignments are run, so nothing
    of the script itself happens."""
    source = _source(path)
    assignments = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            if getattr(node.value.func, 'id', '') == 'configure':
                break
        elif isinstance(node, ast.Assign):
            assignments.append(node)
    else:
        raise SettingError(f'{path} has no settings: no line `config = configure(__file__)`')
    names = {}
    for node in assignments:
        try:
            exec(compile(ast.Module([node], []), path, 'exec'), {'__builtins__': {}}, names)
        except NameError:
            pass  # `linear = Linear`: not a scalar, so not a setting
    behind = {}
    with open(path, 'rb') as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT and not token.line.lstrip().startswith('#'):
                behind[token.start[0]] = token.string.lstrip('# ')
    comments = {node.targets[0].id: behind[node.end_lineno]
                for node in assignments if node.end_lineno in behind}
    scalars = {name: value for name, value in names.items() if isinstance(value, (bool, int, float, str))}
    return scalars, comments, names.get('config_groups', ()), names.get('config_twins', ())


def _source(path):
    with open(path, encoding='utf-8') as file:
        return file.read()


def config_values(path):
    """name -> value of a config file; configs/x may be config/x. Raises MissingError, or SettingError where
    it is not flat."""
    if path.startswith('configs/') and not os.path.isfile(path):
        path = f'config/{path.removeprefix("configs/")}'
    if not os.path.isfile(path):
        raise MissingError(f'no config file {path}; those here: {", ".join(_configs_here()) or "none"}')
    if path.endswith('.py'):
        values = {}
        try:
            exec(compile(_source(path), path, 'exec'), values)
        except OSError:
            raise
        except Exception as error:  # the file's own
            raise SettingError(f'{path} is no config file: {first_line(error)}') from None
        return {name: value for name, value in values.items() if not name.startswith('_')}
    return _read_yaml(path)


def _read_yaml(path):
    """name -> its value as text, which is read as a flag's is. Raises SettingError for what is not flat."""
    import yaml
    try:
        events = list(yaml.parse(_source(path)))[2:-2]  # without those of the stream and the document
    except (yaml.YAMLError, ValueError) as error:
        raise SettingError(f'{path} is not YAML: {" ".join(str(error).split())}') from None
    scalars = [event for event in events[1:-1] if isinstance(event, yaml.ScalarEvent)]
    if events and not (isinstance(events[0], yaml.MappingStartEvent) and scalars == events[1:-1]):
        raise SettingError(f'{path}: a flat list of `name: value` lines is wanted, without aliases')
    values, lines = {}, {}
    for name, value in zip(scalars[::2], scalars[1::2]):
        line = name.start_mark.line + 1
        if name.value in values:
            first = lines[name.value]
            raise SettingError(f'{path}: {name.value} is given twice, in lines {first} and {line}')
        values[name.value], lines[name.value] = value.value, line
    return values


def _configs_here():
    names = os.listdir('config') if os.path.isdir('config') else ()
    return sorted(f'config/{name}' for name in names if name.endswith(CONFIG_FILES))


def _value_of_flag(name, words, settings):
    """(value, name) of a flag written without '=': the next word, or True, or False for --no_name."""
    target = ALIASES.get(name, name)
    if name.startswith('no_') and name not in settings:
        for positive in (name[3:], 'use_' + name[3:]):
            if any(positive in known for known in (settings, FIXED, ALIASES, TRANSLATED)):
                return False, positive
    setting = settings.get(target)
    if target in TRANSLATED or target in FIXED:
        setting = _theirs(TRANSLATED[target][1]) if target in TRANSLATED else Setting.of(FIXED[target][0], '')
    next_is_value = bool(words) and not words[0].startswith('--')
    if setting and setting.switch:
        if next_is_value and not words[0].endswith(CONFIG_FILES):
            if isinstance(setting.default, str) or words[0].lower() in WORDS:
                return words.pop(0), name
        return True, name
    if not next_is_value:
        if setting:
            raise SettingError(f'--{name} needs a value, as in --{name}={setting.default}')
        return True, name  # unknown: _put says so
    return words.pop(0), name


def _put(layer, known, name, value, where):
    """Checks one setting and puts it into its layer under our name for it. known: the script's settings,
    those that only its twins have, and Config.theirs. Returns [what is wrong with an unknown name]."""
    settings, others, theirs = known
    target = ALIASES.get(name, name)
    if target in TRANSLATED:
        target, values = TRANSLATED[target]
        value = _typed(name, value, _theirs(values), where)
        if value not in values:
            return []
        value = values[value]
        theirs[name] = target in settings or value in (False, 'auto')
    if target in settings:
        value = _typed(target, value, settings[target], where)
        of_flags_the_last_wins = where == COMMAND_LINE
        if layer.get(target, value) != value and not of_flags_the_last_wins:
            raise SettingError(f'{where}: {target} is given twice, as {layer[target]!r} and {value!r}')
        layer[target] = value
    elif target in others:
        _typed(target, value, others[target], where)
    elif target in FIXED:
        only, reason = FIXED[target]
        if _typed(target, value, Setting.of(only, ''), where) != only:
            return [f'{where}: {name}={value} cannot be had: {reason}']
    elif target in OTHERWISE:
        return [f'{where}: {name} is no setting: {OTHERWISE[target]}']
    else:
        near = difflib.get_close_matches(target, [*settings, *ALIASES, *TRANSLATED], 1, 0.5)
        nearest = f'; the nearest is {near[0]}' if near else ''
        return [f'{where}: no setting is called {name!r}{nearest}']
    return []


def _theirs(values):
    """The Setting of a name of TRANSLATED."""
    return ON_OFF if True in values else Setting('', Choices(tuple(values)))


def _typed(name, value, setting, where):
    """value as the type of the setting's default. Raises SettingError where it is not, or is not allowed."""
    try:
        typed = _read(value, setting)
        if setting.allowed is None or typed in setting.allowed:
            return typed
    except (KeyError, TypeError, ValueError, OverflowError):
        pass
    raise SettingError(f'{where}: {name} {setting.wanted}, not {value!r}')


def _read(value, setting):
    """value as the type of the setting's default; text is read as that type. Raises KeyError, TypeError,
    ValueError or OverflowError."""
    kind = type(setting.default)
    if kind is str:
        return _read_text(value, setting.allowed)
    if kind is bool:
        return WORDS[str(value).lower()]
    if isinstance(value, bool):
        raise TypeError
    if kind is float:
        return float(value)
    digits = isinstance(value, str) and value.lstrip('+-').replace('_', '').isdigit()
    if isinstance(value, int) or digits:
        return int(value)  # by way of a float it would lose digits
    if not float(value).is_integer():
        raise ValueError
    return int(float(value))


def _read_text(value, allowed):
    """value as text; what means yes or no is on or off where these are choices. Raises TypeError."""
    switched = {True: 'on', False: 'off'}.get(WORDS.get(str(value).lower()))
    if switched in allowed.words:
        return switched
    if allowed.numbers and isinstance(value, int):
        return str(value)
    if not isinstance(value, str):
        raise TypeError
    return value
