"""Turn prompts and completions, or messages, into tokens with a mask that says which are targets.

    examples = Examples(tokenizer, template, began)
    tokens, raw, n_bytes, system = examples.document(messages)      # in the workers of prepare_data.py

A conversation is a list of messages, {'role': 'user' | 'assistant' | ..., 'content': text}. A template makes
the text of an example: PLAIN, or the chat template that comes with a tokenizer, in jinja2's sandbox, as
transformers runs it. The assistant's words and the token that ends them are targets; nothing else is. An
example begins with the tokenizer's `start` token; a chat template writes its own.

Each part of an example is tokenized by itself, so that a prompt has the same ids as in a generation.
"""
import contextlib
import datetime
import glob
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from os.path import dirname, exists, isfile, join, relpath

import numpy as np

from configurator import HERE, DataError, MissingError, SettingError, configure, say
from fp8gpt import files, shards
from fp8gpt.shards import START, TARGET
from fp8gpt.tokenizer import identity_of_folder, is_pretrained

SECONDS, MEMORY, CHARACTERS = 10, 2**30, 10**8   # most that a chat template takes for a conversation
MANY = 32       # messages, above which no prefix of a conversation is rendered for each answer
PLAIN = 'Question:\n{prompt}\n\nAnswer:\n{completion}'
# the columns that a source of examples may have: ShareGPT's, Alpaca's, OpenMathInstruct-2's among them
COLUMNS = (['messages'], ['conversations'], ['prompt', 'completion'], ['instruction', 'input', 'output'],
           ['instruction', 'output'], ['problem', 'generated_solution'])
FORMS = ('messages (role, content); conversations (from, value); prompt and completion; or instruction, '
         'input and output')
SHAREGPT = {'human': 'user', 'gpt': 'assistant'}
ROLES = 'system', 'developer', 'user', 'assistant', 'tool', 'function', 'ipython'


def choose_template(asked, columns, tokenizer):
    """Return the text of a template. asked: 'auto' (the chat template for messages, else PLAIN), 'plain' or
    'chat'. Raises SettingError where there is no such template."""
    if asked != 'chat' and len(columns) > 1:
        return PLAIN
    if asked == 'plain':
        raise SettingError('messages have no plain template: leave out --template')
    if not tokenizer.chat_template:
        raise SettingError('the tokenizer has no chat template: name an instruct model\'s as --tokenizer')
    return tokenizer.chat_template


def pair(*texts):
    """Return the messages of a prompt, which may have several parts, and its completion, which is the last
    text; any may be None."""
    *prompt, completion = texts
    prompt = '\n\n'.join(filter(None, prompt))
    return [{'role': 'user', 'content': prompt}, {'role': 'assistant', 'content': completion or ''}]


def message_of(entry):
    """Return a message of a conversation, which may be in ShareGPT's form, {'from': ..., 'value': text}. Keys
    of other messages, which parquet adds with None, would make templates write of tools."""
    if 'from' in entry:
        return {'role': SHAREGPT.get(entry['from'], entry['from']), 'content': entry['value']}
    return {key: value for key, value in entry.items() if value is not None}


class Examples:
    """Make examples of conversations. template: as from choose_template. began: the time that a template may
    write, in seconds since 1970; a restart passes the same, so that the shards have the same bytes."""

    def __init__(self, tokenizer, template, began):
        self.tokenizer = tokenizer
        self.render = None
        if template != PLAIN:
            self.render = chat_renderer(template, tokenizer.special_tokens, began)

    def document(self, *values):
        """Return (ids and mask (n, 2), the bytes whose hash decides the split, the targets and their UTF-8
        bytes, counted, the system message or '') of an example; None where the assistant says nothing.
        values: of one of COLUMNS.

        The split depends on all messages but the assistant's, so all answers to the same questions are in the
        same split. Raises DataError for other messages."""
        try:
            messages, = values if len(values) == 1 else [pair(*values)]
            messages = [message_of(entry) for entry in messages or ()]
            roles, texts = [[message[key] for message in messages] for key in ('role', 'content')]
            answers = [text for role, text in zip(roles, texts) if role == 'assistant']
            ''.join(texts)      # a TypeError where one is no text
        except KeyError as error:
            raise DataError(f'one of its messages has no {error.args[0]}; tool calls are not read') from None
        except (TypeError, AttributeError):
            raise DataError(f'it has no texts, or none of the messages of: {FORMS}') from None
        for role in roles:
            if role not in ROLES:
                raise DataError(f'{role!r:.40} is no role; those are {", ".join(ROLES)}')
        if not any(answers):
            return None
        parts = self._chat(messages) if self.render else self._plain(*texts)
        tokens = np.concatenate([ids for ids, _ in parts])
        mask = np.repeat([TARGET * is_target for _, is_target in parts], [len(ids) for ids, _ in parts])
        mask[0] = START
        questions = json.dumps([each for each in messages if each['role'] != 'assistant'])
        n_bytes = sum(len(self.tokenizer.decode(ids).encode()) for ids, is_target in parts if is_target)
        counts = {'bytes': n_bytes, 'targets': int(np.count_nonzero(mask & TARGET))}
        system = texts[0] if roles[0] == 'system' else ''
        return np.stack([tokens, mask], 1).astype(np.uint32), questions.encode(), counts, system

    def _plain(self, prompt, completion):
        """Return [(ids, whether they are targets)]."""
        return [
            ([self.tokenizer.start], False),
            (self.tokenizer.encode(PLAIN.format(prompt=prompt, completion='')), False),
            (self.tokenizer.encode(completion), True),
            ([self.tokenizer.eot], True),
        ]

    def _chat(self, messages):
        """Return [(ids, whether they are targets)]. An answer ends with its last stop token. Some templates
        rewrite an answer once other messages follow: Qwen3's removes its reasoning. Such an answer is no
        target, because no generation would see that prompt before it."""
        whole = self.render(messages)
        parts, end = [], 0
        for start, stop in self._answers(messages, whole):
            answer = self._ids(whole[start:stop])
            stops = np.flatnonzero(np.isin(answer, self.tokenizer.stops))
            n = stops[-1] + 1 if len(stops) else len(answer)
            parts += [(self._ids(whole[end:start]), False), (answer[:n], True), (answer[n:], False)]
            end = stop
        if not parts:
            raise DataError('the chat template does not write an answer after its own prompt')
        if not np.isin(parts[-2][0][-1:], self.tokenizer.stops).any():
            parts.insert(-1, ([self.tokenizer.eot], True))
        return [*parts, (self._ids(whole[end:]), False)]

    def rewrites_answers(self):
        """Return whether the template writes an answer otherwise once other messages follow it."""
        chat = [*pair('Where?', 'Here.'), *pair('When?', 'Now.')]
        try:
            return len(self._answers(chat, self.render(chat))) < 2
        except DataError:       # it wants other messages
            return False

    def _answers(self, messages, whole):
        """Return [(start, end)] in `whole`, the text of messages, of the answers that follow their prompt."""
        found = self._answers_of_turns(messages, whole) if len(messages) > MANY else []
        if found:
            return found
        for i, message in enumerate(messages):
            if message['role'] == 'assistant':
                before, after = self.render(messages[:i], True), self.render(messages[:i + 1])
                if after.startswith(before) and whole.startswith(after):
                    found.append((len(before), len(after)))
        return found

    def _answers_of_turns(self, messages, whole):
        """Return what _answers does in time that is linear in the number of messages: each is rendered after
        the turn before it alone. Return [] where these texts do not make `whole`."""
        first = [message['role'] for message in messages].index('assistant')
        head, turn, found = messages[:messages[0]['role'] == 'system'], first - 1, []
        try:
            end = len(self.render(messages[:first]))
            for i in range(first, len(messages)):
                context = [*head, *messages[turn:i]]
                before, after = self.render(context), self.render([*context, messages[i]])
                prompt, added = self.render(context, True), after[len(before):]
                if not after.startswith(before) or not whole.startswith(added, end):
                    return []
                if messages[i]['role'] != 'assistant':
                    turn = i
                elif after.startswith(prompt):
                    found.append((end + len(prompt) - len(before), end + len(added)))
                end += len(added)
        except DataError:       # of a template that wants the whole conversation
            return []
        return found if end == len(whole) else []

    def _ids(self, text):
        """Return the ids (n,) of a part of a chat, in which special tokens are such."""
        return self.tokenizer.encode(text, special=True)


@contextlib.contextmanager
def within_limits(refusal):
    """A context, of a process's main thread, in which every error becomes a DataError that begins with
    `refusal`; it is an error to take more than SECONDS and, on Linux, more than MEMORY more bytes."""
    def ring(number, frame):
        raise TimeoutError(f'it takes more than {SECONDS} s')
    before, limits = signal.signal(signal.SIGALRM, ring), resource.getrlimit(resource.RLIMIT_AS)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    if sys.platform == 'linux':
        with open('/proc/self/statm') as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        most = [taken + MEMORY, *(limit for limit in limits if limit != resource.RLIM_INFINITY)]
        resource.setrlimit(resource.RLIMIT_AS, (min(most), limits[1]))
    try:
        yield
    except MemoryError:
        raise DataError(f'{refusal}: it takes too much memory') from None
    except Exception as error:  # as a stranger has made it: RecursionError, SyntaxError, ...
        raise DataError(f'{refusal}: {str(error):.200}') from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def chat_renderer(template, special_tokens, began):
    """Return render(messages, prompt=False) -> text, which runs a chat template in jinja2's sandbox with the
    same variables and functions as transformers. transformers' own renderer writes today's date, so shards
    would differ after a restart. prompt: whether the text ends with the header of an answer. Raises DataError
    where the template is not valid; render does where it refuses the messages, or goes on without end."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

    class Environment(ImmutableSandboxedEnvironment):
        """The sandbox without powers and products of texts: no signal ends 9 ** 9 ** 9."""
        intercepted_binops = frozenset(['*', '**'])

        def call_binop(self, context, operator, left, right):
            """Return left * right of two numbers."""
            numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
            if operator == '**' or not numbers:
                raise SecurityError('a template may multiply numbers alone')
            return left * right

    def raise_exception(message):
        """Refuse the messages, as a template asks for."""
        raise TemplateError(message)

    def strftime_now(form):
        """Return the time at which preparing began."""
        return datetime.datetime.fromtimestamp(began).strftime(form)

    def tojson(value, indent=None):
        """Return a value as JSON; jinja's own filter escapes HTML."""
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=['jinja2.ext.loopcontrols'], optimized=False)
    environment.filters['tojson'] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    with within_limits('the chat template is not valid'):
        compiled = environment.from_string(template)

    def render(messages, prompt=False):
        """Return the text of messages."""
        with within_limits('the chat template cannot write a conversation'):
            text = compiled.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=prompt,
                **special_tokens,
            )
        if len(text) > CHARACTERS:
            raise DataError(f'the chat template writes {len(text):,} characters of a conversation')
        return text

    return render


# ------------------------------------------------------------------------------- before a run

LOW_LR = 5e-5           # adapters begin at zero: they usually take 2e-4


def ready(script, config):
    """Return the settings of a training script's run. A run that starts from a Hugging Face model takes,
    where its user names none, a config file for fine-tuning and the model's tokenizer; one that starts from a
    checkpoint takes the tokenizer beside it. Both have their examples prepared. A resumed run has them all.
    Raises what configure does; ends the process where preparing fails."""
    resume, checkpoints = config['resume'], glob.glob('*.pt', root_dir=config['checkpoint_dir'])
    if not resume or resume == 'auto' and not checkpoints:
        tokenizer = config['init_from']
        if not is_pretrained(tokenizer):
            path = files.checkpoint_of(tokenizer)
            if '/' in tokenizer and not exists(path):   # or a tokenizer would be missed first
                raise MissingError(f'init_from={tokenizer}: there is no such folder or checkpoint')
            beside = dirname(path) or '.'
            tokenizer = beside if isfile(path) and identity_of_folder(beside) else ''
        elif not config.layers[0]:
            name = 'finetune_lora.py' if config['lora_rank'] else 'finetune.py'
            path = join(HERE, 'config', name)
            _say(f'settings  {relpath(path)}, as no config file is named')
            config = configure(script, [path, *sys.argv[1:]])
        if tokenizer and 'tokenizer' not in config.given:
            config['tokenizer'] = tokenizer
            config.given.add('tokenizer')
        of_examples = prepare_examples(config)
        if of_examples and not (config['lora_rank'] or config.layers[0] or 'max_lr' in config.given):
            _say(f'settings  max_lr={config["max_lr"]:g} is for pre-training: config/finetune.py, as a word '
                 'of this command, has what fine-tuning takes')
    if config['lora_rank'] and config['max_lr'] < LOW_LR:
        _say(f'lora      max_lr={config["max_lr"]:g} is low for adapters: 2e-4 is usual')
    return config


def prepare_examples(config):
    """Run prepare_data.py for a dataset of examples that is not prepared yet, or for a file of rows; return
    whether it is one of these. One process on each machine prepares; the others wait. Raises SettingError for
    a file whose name cannot be a dataset's."""
    dataset, name = config['dataset'], shards.dataset_name(config['dataset'])
    of_file = dataset.endswith(shards.ROWS)
    if of_file and (name in shards.DATASETS or not re.fullmatch(r'[\w.-]+', name)):
        raise SettingError(f'dataset={dataset}: rename the file, as {name!r} cannot name a dataset')
    if not of_file and 'splits' not in shards.DATASETS.get(name, {}):
        return False
    folder = shards.dataset_dir(config)
    if of_file and not (isfile(dataset) or _is_prepared(folder)):
        raise MissingError(f'dataset={dataset}: there is no such file')
    if int(os.environ.get('LOCAL_RANK', 0)):
        while not _is_prepared(folder):
            time.sleep(1)
    elif isfile(dataset) or not _is_prepared(folder):   # a file that has changed since is refused
        words = [name if of_file else dataset, *shards.naming_flags(config)]
        words += [f'--data_files={dataset}'] * of_file
        command = shlex.join(['python', 'prepare_data.py', *words])
        say(f'data      {folder} is prepared by `{command}`:')
        done = subprocess.run([sys.executable, join(HERE, 'prepare_data.py'), *words])
        if done.returncode:
            raise SystemExit(done.returncode)
    return True


def _is_prepared(folder):
    """Return whether a folder holds a dataset that prepare_data.py has finished."""
    try:
        return bool(shards.read_meta(folder))
    except MissingError:
        return False


def _say(line):
    """Print a line on rank 0."""
    if int(os.environ.get('RANK', 0)) == 0:
        say(line)
