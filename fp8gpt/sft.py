"""Turn prompts and completions, or messages, into tokens with a mask that says which are targets.

    examples = Examples(tokenizer, template, began)
    tokens, raw, counts, system = examples.document(messages)       # in the workers of prepare_data.py
    ids = examples.prompt(messages)                                 # in sample.py --chat

A conversation is a list of messages, {'role': 'user' | 'assistant' | ..., 'content': text}. A template makes
its text: PLAIN, or the chat template that comes with a tokenizer, by transformers' own renderer. The whole
text is tokenized once, so that the ids are those of transformers' apply_chat_template; the text of a special
token inside a message stays text. The assistant's words and the token that ends them are targets; nothing
else is. An example of PLAIN begins as a document does; a chat template writes its own beginning.
"""
import contextlib
import datetime
import glob
import json
import os
import re
import shlex
import subprocess
import sys
import time
from os.path import dirname, exists, isfile, join

import numpy as np

from configurator import (
    HERE, DataError, MissingError, SettingError, first_line, say, say_once)
from fp8gpt import files, shards
from fp8gpt.shards import START, TARGET
from fp8gpt.tokenizer import identity_of_folder, is_pretrained, whole_characters

PLAIN = 'Question:\n{prompt}\n\nAnswer:\n{completion}'
# the columns that make an example: ShareGPT's, Alpaca's, OpenMathInstruct-2's among them; MORE may be beside
COLUMNS = (['messages'], ['conversations'], ['prompt', 'completion'], ['instruction', 'output'],
           ['problem', 'generated_solution'])
MORE = 'input', 'system', 'history', 'tools', 'label'
FORMS = ('messages (role, content); conversations (from, value); prompt and completion; or instruction, '
         'input and output')
ROLES = {role: role for role in ('system', 'developer', 'user', 'assistant', 'tool', 'function', 'ipython')}
ROLES |= dict.fromkeys(('gpt', 'bot', 'model', 'chatgpt', 'bing', 'bard', 'claude', 'ai'), 'assistant')
ROLES |= {'human': 'user', 'prompter': 'user', 'observation': 'tool', 'tool_response': 'tool',
          'function_call': 'assistant', 'tool_call': 'assistant'}
MARKED = re.compile(r'{%-?\s*generation\s*-?%}')     # marks the targets in a template
NOW = re.compile(r'''strftime_now\((["'])(.*?)\1\)''')
THOUGHT = '</think>'    # ends what many templates remove from answers that are not the last
THOUGHTS = 'reasoning_content', 'reasoning', 'thinking'     # keys that have it beside the content
MARK = '\ufdd0'         # no character: it is in no text


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


# ------------------------------------------------------------------------------- rows -> messages

def conversation(row, columns):
    """Return (messages, tools or None) of a row, a dict with `columns`, one of COLUMNS, and any of MORE.
    Raises DataError where it is no conversation."""
    first, *answer = (row.get(column) for column in columns)
    if answer and isinstance(first, list) and isinstance(answer[0], list):      # TRL's conversational pairs
        first, answer = [*first, *answer[0]], ()
    if answer:
        prompt = '\n\n'.join(filter(None, map(as_text, (first, row.get('input')))))
        history = from_json(row.get('history')) or []
        turns = history if isinstance(history, list) else [history]
        if not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
            raise DataError('its history is no list of [prompt, answer]')
        turns = [*turns, (prompt, *answer)]
        messages = [message for turn in turns for message in pair(*map(as_text, turn))]
    elif isinstance(entries := from_json(first), list) or first is None:        # CSV has them as JSON
        messages = [message_of(entry) for entry in entries or ()]
    else:
        raise DataError(f'it has none of the messages of: {FORMS}')
    system, tools = as_text(row.get('system')), from_json(row.get('tools'))
    if system and messages and messages[0]['role'] != 'system':
        messages.insert(0, {'role': 'system', 'content': system})
    elif system and messages and messages[0]['content'] != system:
        raise DataError('its column system and its system message differ')
    return messages, without_nulls(tools) or None


def pair(prompt, completion):
    """Return the messages of a prompt and its completion."""
    return [{'role': 'user', 'content': prompt}, {'role': 'assistant', 'content': completion or ''}]


def as_text(value):
    """Return a text, of None ''. Raises DataError for anything else."""
    if value is None or isinstance(value, str):
        return value or ''
    raise DataError(f'{value!r:.40} is no text')


def from_json(value):
    """Return the object or list that a text holds as JSON; anything else as it is."""
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except ValueError:
            return value
        return found if isinstance(found, (dict, list)) else value
    return value


def without_nulls(value):
    """Return a value of JSON without the keys whose value is null, which parquet adds to each object."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def message_of(entry):
    """Return a message with role, content and, of calls, tool_calls, of an entry in OpenAI's or ShareGPT's
    form. Raises DataError where it is none."""
    if not isinstance(entry, dict):
        raise DataError(f'{entry!r:.40} is none of the messages of: {FORMS}')
    entry = without_nulls(entry)
    said = entry.pop('role', entry.pop('from', None))
    role = ROLES.get(str(said).lower())
    if not role:
        raise DataError(f'{said!r:.40} is no role; those are {", ".join(ROLES)}')
    content, calls = entry.pop('content', entry.pop('value', None)), entry.pop('tool_calls', None) or []
    if said in ('function_call', 'tool_call'):
        calls, content = from_json(content), ''
    calls = calls if isinstance(calls, list) else [calls]
    calls += [entry.pop('function_call')] if 'function_call' in entry else []
    if content is None and not calls and role != 'assistant':
        raise DataError('one of its messages has no content')
    if isinstance(content, list):
        parts = [part.get('text') if isinstance(part, dict) else part for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise DataError('one of its messages has parts that are no text')
        content = ''.join(parts)
    message = {**entry, 'role': role, 'content': as_text(content)}
    if calls:
        message['tool_calls'] = [call_of(call) for call in calls]
    return message


def call_of(call):
    """Return a tool call as templates expect it, {'function': {'name': ..., 'arguments': an object}, ...}.
    Raises DataError where it is none."""
    if isinstance(call, dict):
        call = call if 'function' in call else {'type': 'function', 'function': call}
        if isinstance(call['function'], dict) and isinstance(call['function'].get('name'), str):
            arguments = from_json(call['function'].get('arguments', {}))
            return {**call, 'function': {**call['function'], 'arguments': arguments}}
    raise DataError(f'{call!r:.40} is no tool call')


# ------------------------------------------------------------------------------- messages -> tokens

class Examples:
    """Make examples of conversations. template: as from choose_template. began: the time that a template may
    write, in seconds since 1970; a restart passes the same, so that the shards have the same bytes. columns:
    of the rows, one of COLUMNS."""

    def __init__(self, tokenizer, template, began, columns=('messages',)):
        self.tokenizer, self.columns, self.template = tokenizer, columns, ''
        if template != PLAIN:
            now = datetime.datetime.fromtimestamp(began)
            self.template = NOW.sub(lambda call: repr(now.strftime(call[2])), template)
            self.stops = [tokenizer.library.id_to_token(i) for i in tokenizer.stops]
            self.marks_answers = bool(MARKED.search(template))
            self.header, self.marks = self._habits()

    def of_row(self, row):
        """Return what `document` does of a row, a dict. Raises what conversation and document do."""
        label = row.get('label')
        if str(label).lower() == 'false':
            return (), b'', {'notes': ['are left out, whose label is false']}, ''
        if not self.template and isinstance(row.get(self.columns[0]), list):
            raise DataError('its prompt is a list of messages, which --template=chat takes')
        document = self.document(*conversation(row, self.columns))
        if document and str(label).lower() not in ('true', 'none'):
            document[2]['notes'].append('have a label that is neither true nor false, which is not used')
        return document

    def document(self, messages, tools=None):
        """Return (ids and mask (n, 2); the bytes whose hash decides the split; counts; the system message or
        '') of an example; None where no word of the assistant is to be learned. `counts` has the targets and
        their UTF-8 bytes, and `notes`: what is to be said of the row.

        The split depends on all messages but the assistant's, so all answers to the same questions are in the
        same split. Raises DataError for messages that cannot be used."""
        if not any(map(is_target, messages)):
            return None
        ids, mask, n_bytes, notes = self._chat(messages, tools) if self.template else self._plain(messages)
        mask[0] = START     # no target: in a window, another example stands before it
        questions = json.dumps([each for each in messages if each['role'] != 'assistant'], default=str)
        counts = {'bytes': n_bytes, 'targets': int(np.count_nonzero(mask & TARGET)), 'notes': notes}
        system = messages[0]['content'] if messages[0]['role'] == 'system' else ''
        return np.stack([ids, mask], 1).astype(np.uint32), questions.encode(), counts, system

    def _plain(self, messages):
        """Return (ids, mask, bytes of the targets, notes). Prompt and completion are tokenized each by
        itself, so that a prompt has the same ids as in a generation."""
        *before, prompt, completion = [message['content'] for message in messages]
        system, turns = before[:len(before) % 2], iter(before[len(before) % 2:])
        earlier = [PLAIN.format(prompt=question, completion=answer) for question, answer in zip(turns, turns)]
        text = '\n\n'.join([*system, *earlier, PLAIN.format(prompt=prompt, completion='')])
        known = [*self.tokenizer.opening, *self.tokenizer.encode(text)]
        answer = [*self.tokenizer.encode(completion), self.tokenizer.eot]
        mask = np.repeat([0, TARGET], [len(known), len(answer)])
        return np.array([*known, *answer]), mask, len(completion.encode('utf-8', 'replace')), []

    def _chat(self, messages, tools):
        """Return (ids, mask, bytes of the targets, notes)."""
        whole, generated = self._rendered(messages, tools)
        ids, offsets, notes = self._tokenized(messages, tools, whole)
        if self.marks_answers:
            spans = self._generated(messages, whole, generated)
        else:
            spans = self._answers(messages, tools, whole)
        mask, n_bytes = np.zeros(len(ids), np.int64), 0
        for start, end in spans:        # to the stop that ends the turn, if the template writes one
            found = self.marks.search(whole, end)
            stops = found and found[0] in self.stops
            last = found.start() if stops else end
            mask[(offsets[:, 1] > start) & (offsets[:, 0] < (found.end() if stops else end))] = TARGET
            n_bytes += len(self.tokenizer.special.sub('', whole[start:last]).encode())
        if not stops and not whole[end:].strip():
            ids, mask = np.append(ids, self.tokenizer.eot), np.append(mask, TARGET)
        if len(spans) < sum(map(is_target, messages)):
            why = 'that the template does not mark' if self.marks_answers else (
                'whose thoughts the template removes')
            notes.append(f'have answers {why}, which are no targets')
        elif not all(words_beside_answer(message) in whole for message in messages):
            notes.append('have thoughts or other messages that the chat template does not write as they are')
        if tools and not all(name in whole for name in names_of(tools)):
            notes.append('have tools that the chat template does not write')
        return ids, mask, n_bytes, notes

    def prompt(self, messages):
        """Return the ids (n,) of messages and the header of an answer to them."""
        whole, _ = self._rendered(messages, None, prompt=True)
        return self._tokenized(messages, None, whole, prompt=True)[0]

    def render(self, messages, prompt=False):
        """Return the text of messages. prompt: whether it ends with the header of an answer."""
        return self._rendered(messages, None, prompt)[0]

    def _rendered(self, messages, tools, prompt=False):
        """Return (text, [(start, end)] of what the template marks as generated). Raises DataError where the
        template refuses the messages."""
        from transformers.utils.chat_template_utils import render_jinja_template
        try:
            [text], marked = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self.template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=self.marks_answers,
                **self.tokenizer.hf.special_tokens_map,
            )
        except Exception as error:  # as a stranger has made it: TemplateError, RecursionError, TypeError, ...
            raise DataError('the chat template cannot write a conversation: '
                            f'{first_line(error):.200}') from None
        return whole_characters(text), marked[0] if marked else []

    def _tokenized(self, messages, tools, whole, prompt=False):
        """Return (ids (n,), the characters of each (n, 2), notes) of the whole text of messages. The text of
        a special token inside a message is tokenized by itself, as text, or it would make a turn of its own.
        The assistant may write those that stand around no turn, as <think>."""
        special, parts, notes = self.tokenizer.special, [(whole, True)], []
        if MARK in whole:
            raise DataError('it holds U+FDD0, which is no character')
        marked = [{**message, 'content': special.sub(
            lambda found, role=message['role']: found[0] if role == 'assistant' and not self.marks.match(
                found[0]) else MARK + found[0] + MARK, message['content'])}
            for message in messages]
        if marked != messages:
            pieces = self._rendered(marked, tools, prompt)[0].split(MARK)
            if ''.join(pieces) != whole or not all(map(special.fullmatch, pieces[1::2])):
                raise DataError('the chat template takes the text of a special token apart')
            parts = [(text, i % 2 == 0) for i, text in enumerate(pieces)]
            notes = ['hold the text of a special token, which is taken as text']
        ids, offsets, start = [], [], 0
        for text, is_special in parts:
            found, places = self.tokenizer.encode_with_offsets(text, is_special)
            ids.append(found)
            offsets.append(places + start)
            start += len(text)
        return np.concatenate(ids), np.concatenate(offsets), notes

    def _habits(self):
        """Return what the template adds to a question as the prompt of an answer, '' where it wants other
        messages, and a pattern of the special tokens that it writes around turns."""
        header, marks, chat = '', set(self.stops), pair('a', 'b')
        with contextlib.suppress(DataError):
            question, prompt = self.render(chat[:1]), self.render(chat[:1], True)
            header = prompt[len(question):] if prompt.startswith(question) else ''
            marks.update({*self.tokenizer.special.findall(self.render(chat))} - {'<think>', THOUGHT})
        return header, re.compile('|'.join(map(re.escape, sorted(marks, key=len, reverse=True))))

    def _generated(self, messages, whole, generated):
        """Return what _answers does, of a template that marks what is generated."""
        answers = [message for message in messages if message['role'] == 'assistant']
        spans = [span for message, span in zip(answers, generated) if is_target(message)]
        if len(answers) == len(generated):
            for message, (start, _) in zip(filter(is_target, answers), spans):
                check_calls(message, whole[start:])
        else:       # as where it marks the end of the text by itself
            if not all(map(is_target, answers)):
                raise DataError(f'the chat template marks {len(generated)} answers of {len(answers)}')
            spans = [span for span in generated if self.marks.sub('', whole[slice(*span)]).strip()]
        if not spans or not all(self.marks.sub('', whole[start:end]).strip() for start, end in spans):
            raise DataError('the chat template does not mark the words of the assistant')
        at_end = re.compile(rf'(?:\s|{self.marks.pattern})*$')      # the stop, which not all of them mark
        return [(start, start + at_end.search(whole[start:end]).start()) for start, end in spans]

    def _answers(self, messages, tools, whole):
        """Return [(start, end of the words)] in `whole`, the text of messages, of each answer to be learned.
        Rendered with stand-ins for the answers' words, the template shows where it writes them. An answer
        whose thoughts it removes is learned only where it removes those of all."""
        stand_ins, changed = [], list(messages)
        for i, message in enumerate(messages):
            if is_target(message):
                name, words = f'Qz{i}answer{i}zQ', message['content'].rpartition(THOUGHT)[2].strip()
                stand_ins.append((i, name, words or message['tool_calls'][0]['function']['name']))
                changed[i] = with_stand_in(message, words, name)
        shape, _ = self._rendered(changed, tools)
        spans, bare, at, place = [], [], 0, 0   # at: in whole, place: in shape
        for i, name, words in stand_ins:
            found = shape.find(name, place)
            before = shape[place:found]
            start = at + len(before)
            if found < 0 or whole[at:start + len(words)] != before + words:
                raise DataError(f'the chat template does not write {words!r:.40} of the assistant')
            check_calls(messages[i], whole[start:])
            shape = shape.replace(name, words)      # a result may have the name of its call
            place, first, at = found + len(words), at, start + len(words)
            content = messages[i]['content'].strip()
            if content and whole.endswith(content, first, at):      # with its thoughts
                start = at - len(content)
            opening = (self.marks.search(self.header) or [self.header])[0]
            begin = whole.rfind(opening or MARK, first, start)
            if begin >= 0:      # a prompt may go on, as by <think>, where the whole does not
                start = begin + len(os.path.commonprefix([self.header, whole[begin:start]]))
            elif not self.header:
                start = first + len(whole[first:start].rstrip(' '))
            spans.append((start, at))
            thinks = THOUGHT in messages[i]['content'] or words_beside_answer(messages[i])
            bare.append(bool(thinks) and THOUGHT not in whole[start:at])
        if whole[at:] != shape[place:]:
            raise DataError('the chat template writes the answers in another order')
        return spans if all(bare) else [span for span, is_bare in zip(spans, bare) if not is_bare]


def is_target(message):
    """Return whether a message is an answer to be learned: with words or calls, and no weight of 0, as OpenAI
    has it, or `train`, `training` or `loss` false, as axolotl and ms-swift have it."""
    is_off = any(message.get(key, 1) == 0 for key in ('weight', 'train', 'training', 'loss'))
    return message['role'] == 'assistant' and not is_off and bool(
        message['content'].rpartition(THOUGHT)[2].strip() or message.get('tool_calls'))


def words_beside_answer(message):
    """Return the words of a message that are to stand in a chat's text beside those of an answer: a thought,
    or what another than the assistant says."""
    content = message['content']
    if message['role'] == 'assistant':
        beside = [message.get(key) for key in THOUGHTS]
        content = content.rpartition(THOUGHT)[0].rpartition('<think>')[2]
        content = next((words for words in (content, *beside) if words and isinstance(words, str)), '')
    return whole_characters(content.strip())


def check_calls(message, text):
    """Raise DataError unless the names of a message's calls stand in the text of its answer."""
    if not all(name in text for name in names_of(message.get('tool_calls', ()))):
        raise DataError('the chat template does not write the calls of the assistant')


def with_stand_in(message, words, name):
    """Return a message in which `name` stands for its words, which are the end of its content, or, where it
    has none, for the name of its first tool call."""
    if words:
        content = message['content'].rstrip()
        spaces = message['content'][len(content):]
        return {**message, 'content': content[:len(content) - len(words)] + name + spaces}
    first, *more = message['tool_calls']
    return {**message, 'tool_calls': [{**first, 'function': {**first['function'], 'name': name}}, *more]}


def names_of(tools):
    """Return the names of the functions that tools have."""
    functions = [tool.get('function', tool) for tool in tools if isinstance(tool, dict)]
    names = [function.get('name') for function in functions if isinstance(function, dict)]
    return [name for name in names if isinstance(name, str)]


# ------------------------------------------------------------------------------- before a run

LOW_LR = 5e-5           # adapters begin at zero: they usually take 2e-4


def ready(config):
    """Return the settings of a run. One that starts from a checkpoint takes the tokenizer beside it; a new
    one has its examples prepared; a resumed one has them all. Raises MissingError where there is no such
    checkpoint; ends the process where preparing fails."""
    resume, checkpoints = config['resume'], glob.glob('*.pt', root_dir=config['checkpoint_dir'])
    if not resume or resume == 'auto' and not checkpoints:
        name = config['init_from']
        if not is_pretrained(name):
            path = files.checkpoint_of(name)
            if '/' in name and not exists(path):   # or a tokenizer would be missed first
                raise MissingError(f'init_from={name}: there is no such folder or checkpoint')
            beside = dirname(path) or '.'
            if 'tokenizer' not in config.given and isfile(path) and identity_of_folder(beside):
                config['tokenizer'] = beside
                config.given.add('tokenizer')
        of_examples = prepare_examples(config)
        if of_examples and not (config['lora_rank'] or config.layers[0] or 'max_lr' in config.given):
            say_once(f'settings  max_lr={config["max_lr"]:g} is for pre-training: config/finetune.py, as a '
                     'word of this command, has what fine-tuning takes')
    if config['lora_rank'] and config['max_lr'] < LOW_LR:
        say_once(f'lora      max_lr={config["max_lr"]:g} is low for adapters: 2e-4 is usual')
    return config


def prepare_examples(config):
    """Run prepare_data.py for a dataset of examples that is not prepared yet, or for a file of rows; return
    whether it is one of these. One process on each machine prepares; the others wait. Raises SettingError for
    a file whose name cannot be a dataset's."""
    dataset, name = config['dataset'], shards.dataset_name(config['dataset'])
    of_file = dataset.endswith(shards.ROWS)
    if of_file and not re.fullmatch(r'[\w.-]+', name):
        raise SettingError(f'dataset={dataset}: rename the file, as {name!r} cannot name a dataset')
    if not of_file and 'splits' not in shards.DATASETS.get(name, {}):
        return False
    folder = shards.dataset_dir(config)
    if of_file and not isfile(dataset):
        raise MissingError(f'dataset={dataset}: there is no such file')
    if int(os.environ.get('LOCAL_RANK', 0)):
        while not _is_prepared(folder):
            time.sleep(1)
    elif not _is_prepared(folder):
        words = [name if of_file else dataset, *shards.naming_flags(config)]
        words += [f'--data_files={dataset}'] * of_file
        command = shlex.join(['python', 'prepare_data.py', *words])
        if config['dry_run']:
            say(f'data      {folder} is not prepared, and --dry_run writes nothing: `{command}` prepares it')
            raise SystemExit
        say(f'data      {folder} is prepared by `{command}`:')
        done = subprocess.run([sys.executable, join(HERE, 'prepare_data.py'), *words])
        if done.returncode:
            raise SystemExit(done.returncode)
    if of_file:     # so that a resume finds it after the file is edited or gone
        config['dataset'] = folder
    return True


def _is_prepared(folder):
    """Return whether a folder holds a dataset that prepare_data.py has finished."""
    try:
        return bool(shards.read_meta(folder))
    except MissingError:
        return False
