"""Settings: a script's own scalars, then config files, then flags -> one checked dict.

    config = configure(__file__)          # in a script, below its settings
    globals().update(config)

A setting is a scalar at the top of the script; the comment behind it begins with what it may be: usage.py.

Config files are Python (`name = value`, arithmetic allowed) or flat YAML. Flags: --key=value, --key value,
--flag, --no_flag. Whatever is misspelt, of the wrong type or out of bounds raises SettingError; a misspelt
name is told the nearest setting.

configure also gives the process its manners: see errors.py.
"""
import difflib
import os
import sys

import errors
import usage
from errors import (  # noqa: F401
    DataError, MachineError, MissingError, SettingError, UserError, first_line, one_line_errors, told)
from usage import (  # noqa: F401
    ALIASES, FIXED, OTHERWISE, TRANSLATED, Choices, Range, Setting, read_script, source_of)

CONFIG_FILES = '.py', '.yaml', '.yml'
COMMAND_LINE = 'the command line'
YAML_BYTES, YAML_DEPTH = 2**16, 8     # the longest and deepest YAML file that is read
WORDS = dict.fromkeys(('true', 'on', 'yes', '1'), True) | dict.fromkeys(('false', 'off', 'no', '0'), False)
ON_OFF = Setting.of(False, '')


class Config(dict):
    """The settings in force. `given`: the names that config files or flags set, as opposed to defaults.
    `inherited`: those that came from a checkpoint. `theirs`: names of TRANSLATED that were given -> whether
    the script can do so. `stem`: the last config file's name without its ending, or ''. `words`: the command
    line that was read. `command`: its first word, where the script has several. `beside`: the Config of the
    script whose settings it held, too."""
    stem, words, command, beside = '', (), '', None

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
        config.given, config.inherited, config.stem = set(self.given), frozenset(base), self.stem
        changed = [f'{name}: {base[name]!r} in the checkpoint, now {config[name]!r}'
                   for name in base if config[name] != base[name]]
        return config, changed


def configure(script, argv=None, positional=None, nearby=()):
    """Reads a script's settings, config files and flags.

    script: path of the script whose top-level scalars are the settings.
    argv: the words behind the script's name; None takes the process's own and installs the one-line errors.
    positional: name of the setting that a bare word sets (config files, *.py, *.yaml and *.yml, aside), else
    the first that is required. nearby: more names that a misspelt one may mean.
    Raises SettingError for an unknown name, a wrong type, a value that is not allowed, a bare word too many,
    a required setting that is not given, MissingError for a config file that is not there."""
    own = argv is None
    if own:
        argv = sys.argv[1:]
        one_line_errors()
    words, source, command = list(argv), read_script(script), ''
    if source.commands:
        command = _command(script, source.commands, words)
        source = read_script(script, command)
    beside = [_next_to(script, name) for name in source.beside]
    if '--help' in words or '-h' in words:
        _help(source, beside, words)
    settings, others, rest = _settings(source), {}, []
    for twin in source.twins:
        others.update(_settings(read_script(_next_to(script, twin))))
    if beside:
        words, rest = split(words, source)
    positional = positional or next((name for name in settings if settings[name].required), None)
    files, flags, theirs, unknown, stem = {}, {}, {}, [], ''
    known = settings, others, theirs, [*settings, *nearby, *ALIASES, *TRANSLATED]
    while words:
        word = words.pop(0)
        if word == '--config' and words:
            word = words.pop(0)
        word = word.removeprefix('--config=')
        if word.startswith('-'):
            name, value = _flag(word, words, settings)
            if name in others and name not in settings:
                unknown.append(f'{COMMAND_LINE}: {name} is a setting of {", ".join(source.twins)}')
            else:
                unknown += _put(flags, known, name, value, where=COMMAND_LINE)
        elif word.endswith(CONFIG_FILES):
            unknown += _put_file(files, known, word, tell=own)
            stem = os.path.splitext(os.path.basename(word))[0]
        elif positional and settings[positional].default == ():
            flags[positional] = (*flags.get(positional, ()), word)
        elif positional and positional not in flags:
            flags[positional] = word
        else:
            raise SettingError(f'what is {word!r}? Settings are --name=value; '
                               'config files end in .py or .yaml')
    if unknown:
        raise SettingError(f'{"; ".join(unknown)}; --help lists what there is')
    for name, setting in settings.items():
        if setting.required and not flags.get(name):
            raise SettingError(_what_to_type(script, command, name, setting))
    config = Config(settings, source.groups, [files, flags], theirs)
    config.stem, config.words, config.command = stem, list(argv), command
    for path in beside:
        config.beside = configure(path, rest, nearby=settings)
    if own:
        errors.in_force = config
    return config


def _next_to(script, name):
    return os.path.join(os.path.dirname(os.path.abspath(script)), name)


def _command(script, commands, words):
    """Takes the first of a command line's words; '' where only --help is there. Raises SettingError where it
    is none of the commands."""
    if words and words[0] in commands:
        return words.pop(0)
    if words and words[0] in ('--help', '-h'):
        return ''
    wrong = f', not {words[0]!r}' if words else ''
    raise SettingError(f'type `python {os.path.basename(script)} {"|".join(commands)} ...`{wrong}; '
                       '--help says what each does')


def _what_to_type(script, command, name, setting):
    """What to say where a required setting is not given."""
    placeholder = name.upper()
    given = f'{placeholder} ...' if setting.default == () else f'--{name}={placeholder}'
    line = ' '.join(filter(None, ['python', os.path.basename(script), command, given]))
    return f'type `{line}`; {placeholder}: {setting.required}'


def _help(source, beside, words):
    """Prints what --help does, or of that the lines that hold the word behind it, and exits."""
    word = words[-1] if words[-2:-1] in (['--help'], ['-h']) else ''
    text = usage.text(source)
    if word:
        text = usage.found(word, [source, *map(read_script, beside)])
    if not text:
        raise SettingError(f'no line of --help holds {word!r}')
    print(text)
    sys.exit(0)


def split(words, source):
    """(those of a command line's words that set a Script's settings, the others). --help and what is behind
    it is among the first."""
    settings, own, others, words = _settings(source), [], [], list(words)
    while words:
        if words[0] in ('--help', '-h'):
            return [*own, *words], others
        behind, name = words[1:], ''
        if words[0].startswith('-'):
            name, _ = _flag(words[0], behind, settings)
        taken = len(words) - len(behind) if name in settings else 1
        (own if name in settings else others).extend(words[:taken])
        words = words[taken:]
    return own, others


def spelt(words, source):
    """A command line with each flag as --name=value. source: the Script whose flags they are."""
    settings, words, found = _settings(source), [word for word in words if word != '--config'], []
    while words:
        word = words.pop(0)
        if word.startswith('-'):
            word = '--{}={}'.format(*_flag(word, words, settings))
        found.append(word)
    return found


def declared(script, command=''):
    """name -> the Range or Choices that a script's setting may be; None for a number without bounds."""
    return {name: setting.allowed for name, setting in _settings(read_script(script, command)).items()}


def _settings(source):
    """name -> Setting, of a Script."""
    return {name: Setting.of(default, source.comments.get(name, ''))
            for name, default in source.defaults.items()}


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
            exec(compile(source_of(path), path, 'exec'), values)
        except OSError:
            raise
        except Exception as error:  # the file's own
            raise SettingError(f'{path} is no config file: {first_line(error)}') from None
        return {name: value for name, value in values.items() if not name.startswith('_')}
    return _read_yaml(path)


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
                raise SettingError(f'{path}: line {event.start_mark.line + 1} {wrong}')
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        if wrong:
            raise
        raise SettingError(f'{path} is not YAML: {" ".join(str(error).split())}') from None
    return text


def _read_yaml(path):
    """name -> its value as text, which is read as a flag's is. Raises SettingError for what is not flat."""
    import yaml
    events = list(yaml.parse(yaml_text(path)))[2:-2]  # without those of the stream and the document
    scalars = [event for event in events[1:-1] if isinstance(event, yaml.ScalarEvent)]
    if events and not (isinstance(events[0], yaml.MappingStartEvent) and scalars == events[1:-1]):
        raise SettingError(f'{path}: a flat list of `name: value` lines is wanted')
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


def _flag(word, words, settings):
    """(name, value) of a flag, whose value may be the next of the words: it is taken from them."""
    name, equals, value = word.lstrip('-').partition('=')
    name = name.replace('-', '_')
    return (name, value) if equals else _value_of_flag(name, words, settings)


def _value_of_flag(name, words, settings):
    """(name, value) of a flag written without '=': the next word, or True, or False for --no_name."""
    target = ALIASES.get(name, name)
    if name.startswith('no_') and name not in settings:
        for positive in (name[3:], 'use_' + name[3:]):
            if any(positive in known for known in (settings, FIXED, ALIASES, TRANSLATED)):
                return positive, False
    setting = settings.get(target)
    if target in TRANSLATED or target in FIXED:
        setting = _theirs(TRANSLATED[target][1]) if target in TRANSLATED else Setting.of(FIXED[target][0], '')
    next_is_value = bool(words) and not words[0].startswith('--')
    if setting and setting.switch:
        if next_is_value and not words[0].endswith(CONFIG_FILES):
            if isinstance(setting.default, str) or words[0].lower() in WORDS:
                return name, words.pop(0)
        return name, True
    if not next_is_value:
        if setting:
            raise SettingError(f'--{name} needs a value, as in --{name}={setting.default}')
        return name, True  # unknown: _put says so
    return name, words.pop(0)


def _put_file(files, known, path, tell):
    """Puts a config file's settings over those of earlier ones; with tell, rank 0 says which it changes.
    Returns [what is wrong with an unknown name]."""
    one, unknown = {}, []
    for name, value in config_values(path).items():
        unknown += _put(one, known, name, value, where=path)
    changed = [f'{name}={one[name]!r}, not {files[name]!r}' for name in one
               if files.get(name, one[name]) != one[name]]
    if changed and tell and os.environ.get('RANK', '0') == '0':
        print(f'{path} comes later, so {", ".join(changed)}')
    files.update(one)
    return unknown


def _put(layer, known, name, value, where):
    """Checks one setting and puts it into its layer under our name for it. known: the script's settings,
    those that only its twins have, Config.theirs, and names that a misspelt one may mean. Returns [what is
    wrong with an unknown name]."""
    settings, others, theirs, names = known
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
        near = difflib.get_close_matches(target, names, 1, 0.5)
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
    if kind is tuple:
        return (value,)
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
