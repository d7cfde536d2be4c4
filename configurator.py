"""Settings: a script's scalars, then config files, then flags -> one checked dict. Errors of one line.

    config = configure(__file__)          # in a script, below its settings
    globals().update(config)

A setting is a scalar assigned at the top of a script, above the call of `configure`. The last such assignment
is its default. The comment after it begins with the allowed values, up to the first colon:

    grad_clip = 1.0     # >= 0: largest gradient norm; 0 = no clipping      bounds, separated by commas
    dtype = 'bf16'      # bf16 | fp32: of activations                       choices; (...) explains one
    every = 'none'      # none | full | >= 1                                choices, or a whole number
    resume = ''         # latest | best | a path                            any text: `a path` is no word
    recipe = 'auto'     # auto | Recipe of fp8gpt/fp8/linear.py             and the keys of each Recipe there

Config files are Python (`name = value`, arithmetic allowed) or flat YAML. Flags: --key=value, --key value,
--flag, --no_flag. Two lists may stand above the call: `config_groups` (names that a later layer replaces
together) and `config_twins` (scripts whose settings a config file may hold, too).

A mistake of the user is a UserError. It ends the process with one line on stderr and exit code 2 for a
setting, 1 for data or the machine, 3 for memory. Any other exception keeps its traceback. TRACEBACK=1 shows
all tracebacks.
"""
import argparse
import difflib
import os
import pathlib
import re
import runpy
import sys
import time
from collections import namedtuple

if sys.version_info < (3, 10) or sys.platform == 'win32':   # Windows has no fork and not all of the signals
    sys.exit(f'error: Python 3.10 or newer on Linux is wanted, not {sys.version.split()[0]} on '
             f'{sys.platform}; Windows has Linux as WSL: `wsl --install`, then the same in its shell')

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
    'dropout': {'0.0': None, 'off': None},      # no layer drops out here
    # nanoGPT's, which ask for what is so: the learning rate falls, AdamW's beta1 is 0.9
    'decay_lr': {'on': None},
    'always_save_checkpoint': {'off': None},
    'backend': {'nccl': None, 'gloo': None},
    'beta1': {'0.9': None},
    'use_flash_attn': {'on': None},     # scaled_dot_product_attention uses it where it can
    'config': {},       # any file
}
TEXTS = 'prompt', 'system'      # what they begin with names no folder
STARTED = time.monotonic()      # about when the process began: scripts import this file first
HERE = str(pathlib.Path(__file__).resolve().parent)
ON_OFF = dict.fromkeys('true on yes 1'.split(), 'on') | dict.fromkeys('false off no 0'.split(), 'off')
SCALARS = str, int, float, os.PathLike
KINDS = {bool: 'true or false', int: 'a whole number', float: 'a number', str: 'a name or a path'}
# Names that were settings -> what to do instead.
GONE = {
    'encoding': 'text is read as UTF-8, and `iconv -f latin-1 -t utf-8` writes it so',
    'profile': 'docs/fp8.md has six lines with torch.profiler',
    'lr_decay_iters': 'the learning rate falls until the end of the run',
    'eval_iters': '--eval_tokens says how many tokens an evaluation reads',
    # nanoGPT's, of sample.py
    'out_dir': '--ckpt=FOLDER, or --ckpt=FOLDER/step_000100.pt, names the model',
    'init_from': '--ckpt=FOLDER, or --ckpt=a model of Hugging Face, names the model',
}
HELP = """
Type a setting as --name=value, --name value, --flag or --no_flag, or put it into a config file, .py or
.yaml. Names from other systems, as learning_rate and max_iters, are taken: ALIASES in configurator.py."""


# ----------------------------------------------------------------------------------------------------- errors

class UserError(Exception):
    """A mistake that the user can correct; its one line says how."""
    exit_code = 1


class SettingError(UserError, ValueError, argparse.ArgumentTypeError):
    """A setting that is unknown, of the wrong type, out of range, or contradicts another."""
    exit_code = 2


class DataError(UserError, OSError):
    """A file that is damaged, of another kind, or cannot be written."""


class MissingError(DataError, FileNotFoundError):
    """A file or folder that does not exist."""


class MachineError(UserError, RuntimeError):
    """Something that this machine lacks: a GPU, memory, a package."""


class Parser(argparse.ArgumentParser):
    """argparse's parser with a script's docstring as its help. It raises SettingError."""

    def __init__(self, doc, **options):
        super().__init__(description=doc, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message):
        raise SettingError(f'{message}; --help lists what there is')


def at_least(low, kind=int):
    """Return a type for Parser.add_argument: finite numbers of a kind that are not below `low`."""
    return Setting(kind(low), bounds=[f'>= {low}']).read


def one_line_errors():
    """Make the process end with one line and no traceback on an error that is not a programmer's, and escape
    what its terminal cannot show. A closed stdin, stdout or stderr becomes /dev/null, since the next file
    that is opened would take its place."""
    sys.excepthook = _end_in_one_line
    for name, mode in ('stdin', 'r'), ('stdout', 'w'), ('stderr', 'w'):
        stream = getattr(sys, name) or open(os.devnull, mode)
        setattr(sys, name, stream)
        if hasattr(stream, 'reconfigure'):      # a notebook's has none
            stream.reconfigure(errors='backslashreplace')


def _end_in_one_line(kind, error, trace):
    if issubclass(kind, BrokenPipeError):
        os._exit(1)     # `| head` has read enough
    line, code = error_line(error)
    if line is None or os.environ.get('TRACEBACK'):
        return sys.__excepthook__(kind, error, trace)
    # not sys.stderr: torch.distributed's hook replaces it, and drops what is printed where this one exits
    print('error:', printable(line), file=sys.__stderr__)
    if 'WORLD_SIZE' in os.environ:      # one of several ranks
        sys.stdout.flush()
        os._exit(code)      # finalisation would wait for messages that the other ranks do not send
    sys.exit(code)


def error_line(error):
    """Return (the line with which an error ends the process, the exit code). The line is None for a
    programmer's error, which keeps its traceback."""
    text = str(error)
    if hasattr(error, 'exit_code'):     # a UserError, or an exception of fp8gpt.fp8
        return text, error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 'interrupted', 130
    if isinstance(error, OSError) and error.errno:  # raised by the system, not by a library
        return text, 1
    if isinstance(error, ModuleNotFoundError):
        return f'{text}: `. .venv/bin/activate`, `make install` or `pip install -r requirements.txt`', 1
    if isinstance(error, RuntimeError) and ('gloo' in text or 'NCCL' in text):
        return 'the connection to another rank is lost: what that rank printed says why', 1
    # torch's own error, and those of CUDA's allocations of a context, a library's handle or a kernel
    if re.search('MemoryError|out of memory|CUDA.*_ALLOC_FAILED|DefaultCPUAllocator', repr(error)):
        return (f'out of memory ({first_line(error)}): in training, halve --batch_size, which changes no '
                'loss where --total_batch_size is set; then --grad_checkpointing=full, --loss_chunks=8; '
                'in sample.py, lower --num_samples'), 3
    return None, 1


def first_line(error):
    """Return the first line of an exception's text, at most 300 characters of it."""
    return str(error).partition('\n')[0][:300] or type(error).__name__


def printable(text, keep=r'\t|\n {10}'):
    """Return a text as one line that may be printed: a terminal takes some control characters for commands,
    and cannot take surrogates, which stand for bytes that are not UTF-8. keep: a regular expression of what
    is not escaped; the default keeps the deeply indented rows of the lines that a run prints."""
    return re.sub(rf'(?!{keep})[\x00-\x1f\x7f-\x9f\ud800-\udfff]', lambda it: ascii(it[0])[1:-1], f'{text}')


def say(*lines):
    """Print lines at once, as printable shows them."""
    for line in lines:
        print(printable(line), flush=True)


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


# --------------------------------------------------------------------------------------- a script's settings

class Setting(namedtuple('Setting', 'default words bounds', defaults=[{}, []])):
    """One setting: its default; words, {choice: value that it stands for}, where {} is any text; bounds of
    numbers, as ['>= 0', '< 1']."""

    @classmethod
    def of(cls, default, comment):
        """Return the Setting of a default and the comment after it."""
        if isinstance(default, bool):
            return cls(default, {'on': True, 'off': False})
        allowed = re.sub(r' *\([^)]*\)', '', comment).split(': ')[0]
        bounds = re.findall(r'[<>]=? [\d_.e]+', allowed)
        is_list = re.fullmatch(r'[\w:-]+( \| ([\w:-]+|>= \d+))+', allowed)
        words = {word: word for word in allowed.split(' | ') if is_list and word not in bounds}
        return cls(default, words, bounds)

    def read(self, value, where=''):
        """Return a value, or its text, as the default's type: as an int, '1000', '1_000' and '1e3' are 1000.
        Raises SettingError, whose line begins with `where`, for another type or what is not allowed."""
        text, default = str(value), self.default
        word = ON_OFF.get(text.lower(), text)
        if word in self.words:
            return self.words[word]
        is_text = isinstance(default, str) and isinstance(value, SCALARS) and not self.words
        if is_text and (text or not default):
            return text
        kind = float if isinstance(default, float) else int
        try:
            number = kind(text) if text.replace('_', '').isdecimal() else float(text)
            fits = abs(number) < 1e308 and all(eval(f'{number} {bound}') for bound in self.bounds)
            if fits and number == kind(number) and (self.bounds or not self.words):
                return type(default)(kind(number))
        except ValueError:      # of int and float
            pass
        wanted = f'{KINDS[type(default)]} {", ".join(self.bounds)}'.rstrip()
        if self.words:
            wanted = f'one of {", ".join([*self.words, *self.bounds])}'
        raise SettingError(f'{where}wants {wanted}, not {value!r:.100}')


# What a script declares above its call of configure: {name: Setting}, config_groups and config_twins; help is
# the source text up to there.
Script = namedtuple('Script', 'settings groups twins help')


def read_script(path):
    """Return the Script at a path, from this folder on. Nothing of it runs but the values of its settings."""
    def recipes(match):     # their names, read without running the file
        return ' | '.join(re.findall(r"'(\w+)': Recipe\(", pathlib.Path(HERE, match[1]).read_text('utf-8')))
    head = pathlib.Path(HERE, path).read_text('utf-8').partition('\nconfig = configure(')[0]
    head = re.sub(r'Recipe of (\S+)', recipes, head)
    settings, names = {}, {'config_groups': [], 'config_twins': []}
    assigned = r"""^(\w+) = (['"\d-].*?|\[.*\]|True|False)(?: +# (.*))?$"""
    for name, value, comment in re.findall(assigned, head, re.M):
        names[name] = eval(value, names)
        if isinstance(names[name], SCALARS):
            settings[name] = Setting.of(names[name], comment)
    return Script(settings, names['config_groups'], names['config_twins'], head.replace('"""', ''))


def with_other_names(script):
    """Return {name: Setting} of the settings of a Script and its twins, also under their names in other
    systems."""
    known = dict(script.settings)
    for twin in script.twins:
        known = read_script(twin).settings | known
    aliases = {theirs: known[ours] for theirs, ours in ALIASES.items() if ours in known}
    return known | aliases | {theirs: Setting('', words) for theirs, words in TRANSLATED.items()
                              if ALIASES.get(theirs) in (None, *known)}


# ----------------------------------------------------------------------------------------------- config files

def config_values(path, known):
    """Return {name: value} of a config file, None for YAML's null. A .py config's modules,
    functions and classes are left out, but for those with a name in `known`. Raises MissingError, or
    SettingError for a file that does not run or is not flat."""
    path = os.path.expanduser(path)
    path = path.replace('configs/', 'config/', not os.path.exists(path))    # the folder's name elsewhere
    if not os.path.isfile(path):
        raise MissingError(f'no config file {path}; those of this project are in {HERE}/config')
    try:
        if path.endswith('.py'):
            return {name: value for name, value in runpy.run_path(path).items()
                    if name in known or not name.startswith('_') and not hasattr(value, '__name__')}
        import yaml
        values = yaml.load(pathlib.Path(path).read_text('utf-8'), yaml.BaseLoader) or {}
        if not all(isinstance(text, str) for text in values.values()):
            raise TypeError('the value of a setting is no list and no mapping')
        return {name: None if text.lower() in ('', '~', 'null') else text for name, text in values.items()}
    except (Exception, SystemExit) as error:    # the file's own, and PyYAML's
        what = ' '.join(str(error).split())
        raise SettingError(f'{path} is no config file ({type(error).__name__}): {what:.200}') from None


# ----------------------------------------------------------------------------------------------- command line

def read_words(words, known):
    """Yield (name, value) of each flag of a command line, and ('config', word) of any other word. known: what
    with_other_names returns. Raises SettingError for a flag that lacks its value."""
    words = [*words]
    while words:
        word = words.pop(0)
        name, equals, value = word.partition('=')
        name = name.lstrip('-').replace('-', '_')
        choices = known[name].words if name in known else {'on': True}      # an unknown flag stands alone
        after = words[0] if words else '--'
        is_choice = ON_OFF.get(after.lower(), after) in choices
        if not word.startswith('-'):
            yield 'config', word
        elif equals:
            yield name, value
        elif name.startswith('no_'):
            yield name[3:] if name[3:] in known else f'use_{name[3:]}', 'False'
        elif not after.startswith('--') and ('on' not in choices or is_choice):
            yield name, words.pop(0)
        elif 'on' in choices:
            yield name, 'on'
        else:
            raise SettingError(f'--{name} needs a value')


# ------------------------------------------------------------------------------------------- one checked dict

class Config(dict):
    """The settings of a run: a script's defaults, over them a checkpoint's, those of config files, flags.

    saved, files, typed: {name: value} of the checkpoint, the config files, the flags. One of the latter two
    that changes a name of a group replaces the group. given: the names in any of the three. stem: the last
    config file's name without ending, or ''."""

    def __init__(self, script, files, typed, stem='', saved=()):
        self.script, self.files, self.typed, self.stem, self.saved = script, files, typed, stem, dict(saved)
        self.defaults = {name: setting.default for name, setting in script.settings.items()}
        self.given = {*saved, *files, *typed}
        super().__init__(self.defaults | self.saved)
        for layer in files, typed:
            for group in script.groups:
                if any(layer.get(name, self[name]) != self[name] for name in group):
                    self.update((name, self.defaults[name]) for name in group)
            self.update(layer)

    def over(self, saved, never=()):
        """Return the Config of the same files and flags over a checkpoint's settings, a dict. Names that this
        script does not have, and those in `never`, are dropped. Raises SettingError for another type."""
        settings = self.script.settings
        saved = {name: settings[name].read(value, f'the checkpoint: {name} ')
                 for name, value in saved.items() if name in settings and name not in never}
        return Config(self.script, self.files, self.typed, self.stem, saved)

    @property
    def changes(self):
        """Return a line about each difference from the checkpoint."""
        return [f'{name}: {value!r} in the checkpoint, now {self[name]!r}'
                for name, value in self.saved.items() if self[name] != value]


def configure(path, argv=None, positional=None):
    """Return the Config of a script's settings, config files and flags.

    path: of the script, from this folder on. argv: the words after its name; None takes the process's own and
    installs the one-line errors. positional: name of the setting that a bare word sets, config files aside.
    Raises SettingError for an unknown name, a wrong type, a value that is not allowed, a bare word too many;
    MissingError for a config file that does not exist."""
    if argv is None:
        argv = sys.argv[1:]
        one_line_errors()
        # else OpenMP's threads spin while they wait: 2.6 times a step's time on busy cores (docs/log.md)
        os.environ.setdefault('GOMP_SPINCOUNT', '10000')
    script = read_script(path)
    if '--help' in argv or '-h' in argv:
        print(script.help, HELP)
        raise SystemExit
    known, files, typed, stem = with_other_names(script), {}, {}, ''

    def put(name, value, layer=typed, where='the command line'):
        ours = ALIASES.get(name, name)
        if name == 'lr_decay_iters' and str(value) == str({**files, **typed}.get('max_steps')):
            return      # until the end of the run, as it falls here
        if name in GONE and ours not in known:
            raise SettingError(f'{where}: {name} is no setting: {GONE[name]}')
        if ours not in known or name == 'config':
            nearest = *difflib.get_close_matches(name, known, 1, 0.5), 'in --help'
            raise SettingError(f'{where}: no setting is called {name!r}; the nearest is {nearest[0]}')
        if isinstance(value, str) and name not in TEXTS:
            value = os.path.expanduser(value)
        for each in name, ours:     # of another system's name, its value first
            if value is None:       # as of null and of `--no_te`, which change nothing
                return
            value = known[each].read(value, f'{where}: {name} ')
        if ours in script.settings:
            layer[ours] = value
        elif layer is typed and value not in (False, 'auto'):   # which ask for nothing of a twin
            raise SettingError(f'{ours} is a setting of {", ".join(script.twins)}')

    for name, word in read_words(argv, known):
        if name != 'config':
            put(name, word)
        elif word.endswith(('.py', '.yaml', '.yml')):
            for each in config_values(word, known).items():
                put(*each, files, word)
            stem = pathlib.Path(word).stem
        elif positional and positional not in typed:
            put(positional, word)
        else:
            raise SettingError(f'what is {word!r}? Settings are --name=value, config files .py or .yaml')
    return Config(script, files, typed, stem)
