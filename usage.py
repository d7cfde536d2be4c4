"""What a script's settings are, as its source says it: read, and told by --help.

A setting is a scalar (bool, int, float, str) assigned at the top of the script, above the call of
`configure`; its default is the last such assignment and its help text is the comment behind it, which begins
with what the setting may be:

    grad_clip = 1.0     # >= 0: largest gradient norm; 0 = no clipping      bounds, with commas between
    dtype = 'bf16'      # bf16 | fp32: of activations                       choices; (...) explains one
    every = 'none'      # none | full | >= 1                                choices, or a whole number
    resume = ''         # latest | best | a path                            any text: `a path` is no word
    out = ''            # required: folder to write                         given, or a word without --out
    runs = ()           # required: their folders                           several words

The comment above a group of settings is its heading. A setting `command`, with choices, is the first word
behind the script's name, and a group under `# pair: what it does` is of the command `pair` alone.
`config_groups` lists names of which a later layer replaces all at once, `config_twins` scripts whose settings
a config file may hold too, `config_beside` those whose settings the command line takes too.
"""
import ast
import dataclasses
import itertools
import math
import operator
import re
import textwrap
import tokenize
import typing

from errors import SettingError

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
COMPARISONS = {'>=': operator.ge, '>': operator.gt, '<=': operator.le, '<': operator.lt}
BOUNDS = re.compile(r'[<>]=? -?\d[\d_.e]*(, [<>]=? -?\d[\d_.e]*)*')
WIDTH = 110         # columns
INDENT = ' ' * 38   # of what is said of a setting
WAYS = '--name=value, --name value, --flag, --no_flag; config files end in .py, .yaml; --help WORD: its lines'


# ------------------------------------------------------------------------------------------ what a setting is

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
    """allowed: the Range or Choices that values are in; None: a number of which the script says nothing.
    required: what has to be given; '' where there is a default."""
    default: bool | int | float | str | tuple
    allowed: Range | Choices | None = None
    required: str = ''

    @classmethod
    def of(cls, default, comment):
        """Of a default and the comment behind it."""
        if isinstance(default, bool):
            return cls(default, Choices((True, False)))
        declared = re.sub(r' *\([^)]*\)', '', comment).split(': ')[0]
        required = comment.partition(': ')[2] if declared == 'required' else ''
        parts = [part.strip() for part in declared.split('|')]
        ranges = [Range(part) for part in parts if BOUNDS.fullmatch(part)]
        if not isinstance(default, (str, tuple)):
            return cls(default, *ranges, required=required)
        words = tuple(part for part in parts if re.fullmatch(r'[\w:-]+', part))
        any_text = len(parts) == 1 or len(words) + len(ranges) < len(parts)
        return cls(default, Choices(words, *ranges, any_text=any_text), required)

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


# ----------------------------------------------------------------------------------------- read from a script

class Script(typing.NamedTuple):
    """What a script declares above its call of configure: the settings' defaults and the comments behind
    them, by name; `config_groups` (names of which a later layer replaces all at once), `config_twins`
    (scripts whose settings a config file may hold too), `config_beside`; the comment above the group that a
    setting is in, by name; command -> what is written above its settings; its docstring. With a command, the
    last two are empty."""
    defaults: dict
    comments: dict
    groups: list
    twins: list
    beside: list
    headings: dict
    commands: dict
    doc: str


def read_script(path, command=''):
    """The Script at this path; with a command, what it declares for that one. Only assignments are run, so
    nothing of the script itself happens."""
    tree = ast.parse(source_of(path))
    calls = [node for node in tree.body if 'configure' in map(_called, ast.walk(node))]
    if not calls:
        raise SettingError(f'{path} has no settings: no line `config = configure(__file__)`')
    above, behind = _comments(path)
    names, defaults, comments, headings, commands, heading = {}, {}, {}, {}, {}, ''
    for node in tree.body[:tree.body.index(calls[0])]:
        if not isinstance(node, ast.Assign):
            continue
        heading = _block(above, node.lineno) or heading
        owner, _, what = heading.partition(': ')
        if owner in commands:
            commands[owner] = what
        if owner in commands and owner != command:
            continue
        try:
            exec(compile(ast.Module([node], []), path, 'exec'), {'__builtins__': {}}, names)
        except NameError:
            continue  # `linear = Linear`: not a scalar, so not a setting
        name, comment = node.targets[0].id, behind.get(node.end_lineno, '')
        if name == 'command':
            commands = dict.fromkeys(Setting.of(names[name], comment).allowed.words, '')
        elif isinstance(names[name], (bool, int, float, str, tuple)):
            defaults[name], comments[name], headings[name] = names[name], comment, heading
    lists = [names.get(f'config_{name}', []) for name in ('groups', 'twins', 'beside')]
    if command:
        return Script(defaults, comments, *lists, headings=headings, commands={}, doc='')
    doc = ast.get_docstring(tree) or ''
    return Script(defaults, comments, *lists, headings=headings, commands=commands, doc=doc)


def _called(node):
    """The name of the function that a node of a syntax tree calls; else None."""
    return getattr(node.func, 'id', None) if isinstance(node, ast.Call) else None


def _comments(path):
    """(those that have a line to themselves, but for rules, those behind code): line -> text."""
    above, behind = {}, {}
    with open(path, 'rb') as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                alone = token.line.startswith('#')
                (above if alone else behind)[token.start[0]] = token.string.lstrip('# ')
    return {line: text for line, text in above.items() if not text.startswith('---')}, behind


def _block(above, line):
    """The comment that ends above a line; '' where there is none."""
    first = line
    while first - 1 in above:
        first -= 1
    return '\n'.join(above[number] for number in range(first, line))


def source_of(path):
    """The text of a file."""
    with open(path, encoding='utf-8') as file:
        return file.read()


# --------------------------------------------------------------------------------------------- told by --help

def text(source):
    """All of it, of a Script."""
    parts = [source.doc] if source.doc else []
    if any(source.commands.values()):
        listed = [entry(name, what.split('\n')[0]) for name, what in source.commands.items()]
        parts.append('\n'.join(['the first word (--help behind it tells its settings)', *listed]))
    for heading, group in itertools.groupby(entries(source), lambda each: each[0]):
        parts.append('\n'.join([f'{heading or "settings"}', *(line for _, line in group)]))
    if not source.commands:
        parts += [f'and the settings of {name}: python {name} --help' for name in source.beside]
    return '\n\n'.join([*parts, WAYS])


def found(word, sources):
    """What there is of some Scripts' settings that holds a word."""
    return '\n'.join(line for source in sources for _, line in entries(source) if word in line)


def entries(source):
    """[(heading, what is said of a setting)]."""
    told = []
    for name, default in source.defaults.items():
        also = ', '.join(theirs for theirs, ours in ALIASES.items() if ours == name)
        said = source.comments[name] + f' (also {also})' * bool(also)
        setting = f'{name.upper()} ...' if default == () else f'--{name} {default!r}'
        told.append((source.headings[name], entry(setting, said)))
    if 'max_steps' in source.defaults:  # of training, as they are
        told += [('names from other systems', line) for line in elsewhere()]
    return told


def elsewhere():
    """Yields what is said of names that are no settings."""
    for name, (ours, values) in TRANSLATED.items():
        for theirs, value in values.items():
            yield entry(f'--{name}' + f' {theirs}' * (theirs is not True), f'as --{ours}={value}')
    for name, (only, reason) in FIXED.items():
        yield entry(f'--{name} {only}', f'changes nothing: {reason}')
    for name, how in OTHERWISE.items():
        yield entry(f'--{name}', f'no setting: {how}')


def entry(setting, said):
    """One of them, in as many lines as it takes."""
    begun = f'  {setting}'.ljust(len(INDENT) - 2) + '  '
    return textwrap.fill(begun + said, WIDTH, subsequent_indent=INDENT,
                         break_long_words=False, break_on_hyphens=False)
