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
import copy
import datetime
import glob
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import time
from os.path import dirname, isfile, join

import numpy as np

from configurator import (
    HERE, DataError, MissingError, SettingError, first_line, say, say_once)
from fp8gpt import files, shards
from fp8gpt.shards import START, TARGET
from fp8gpt.tokenizer import identity_of_folder, whole_characters

PLAIN = 'Question:\n{prompt}\n\nAnswer:\n{completion}'
# the columns that make an example: the first ones that a row has count; MORE may be beside
COLUMNS = (
    ['messages'],
    ['conversations'],      # ShareGPT's
    ['conversation'],       # LMSYS-Chat's
    ['prompt', 'completion'],
    ['prompt', 'response'],
    ['instruction', 'output'],      # Alpaca's
    ['instruction', 'response'],    # Dolly's
    ['question', 'answer'],     # GSM8K's
    ['question', 'response'],   # OpenOrca's
    ['query', 'response'],      # MetaMathQA's
    ['problem', 'generated_solution'],
    ['problem', 'solution'],    # MATH's
    ['inputs', 'targets'],      # FLAN's
    ['input', 'output'],
    ['input', 'target'],        # Firefly's
)
MORE = 'input', 'context', 'system', 'system_prompt', 'history', 'tools', 'label'
FORMS = ('messages (role, content); conversations (from, value, or texts in turn); prompt and completion; '
         'question and answer; or instruction, input and output')
ROLES = {role: role for role in ('system', 'developer', 'user', 'assistant', 'tool', 'function', 'ipython')}
ROLES |= dict.fromkeys(('gpt', 'bot', 'model', 'chatgpt', 'bing', 'bard', 'claude', 'ai'), 'assistant')
ROLES |= {'human': 'user', 'prompter': 'user', 'observation': 'tool', 'tool_response': 'tool'}
CALLS = 'function_call', 'tool_call'     # roles of a call alone, ShareGPT's and ms-swift's
ROLES |= dict.fromkeys(CALLS, 'assistant')
MARKED = re.compile(r'{%-?\s*generation\s*-?%}')     # marks the targets in a template
NOW = re.compile(r'''strftime_now\((["'])(.*?)\1\)''')
CALL_FORMS = [*itertools.product(('', None), (False, True))]
THOUGHT = '</think>'    # ends what many templates remove from answers that are not the last
THOUGHTS = 'reasoning_content', 'reasoning', 'thinking'     # keys that have it beside the content
# flags of an answer: OpenAI's, LLaMA-Factory's, axolotl's, ms-swift's
FLAGS = 'weight', 'loss_weight', 'train', 'training', 'loss'
OTHER_FLAG = f'have a flag ({", ".join(FLAGS)}) that is neither 0 nor 1, which is taken for 1'
READ = {'role', 'content', 'tool_calls', 'id', 'name', 'tool_call_id', *FLAGS, *THOUGHTS}
ENDLESS = ('have answers that the template ends by no token, so a model does not learn to stop: name a '
           '--tokenizer whose tokens the template writes')
NO_JSON = 'have calls whose arguments are no JSON, as they may be cut off, and are learned as they are'
TEXT, WORDS = '\ufdd0', '\ufdd1'      # marks: they are no characters, and in no text


def columns_of(names):
    """Return the first of COLUMNS that are all among these names, or ()."""
    return next((columns for columns in COLUMNS if {*columns} <= {*names}), ())


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
    if len(columns) > 1:
        messages = of_pair(row, columns)
    else:
        value = row.get(columns[0])
        entries = [] if value is None else from_json(value)     # CSV has them as JSON
        if not isinstance(entries, list):
            raise DataError(f'it has none of the messages of: {FORMS}')
        messages = joined(in_turn(entries))
    return with_system(messages, row), tools_of(row)


def of_pair(row, columns):
    """Return the messages of a row whose two columns hold a prompt and its answer, or the messages of each.
    Raises DataError where they are neither."""
    prompt, answer = (messages_in(row.get(column)) for column in columns)
    if are_messages(prompt) and not isinstance(answer, list):       # Nemotron's, whose answer is a text
        answer = [{'role': 'assistant', 'content': answer}]
    if isinstance(prompt, list) and isinstance(answer, list):       # TRL's conversational pairs
        return joined(answer, of_prompt(prompt))
    beside = [row.get(name) for name in ('input', 'context') if name not in columns]
    prompt = '\n\n'.join(filter(None, map(as_text, (prompt, *beside))))
    history = from_json(row.get('history')) or []
    if not (is_list_of(history, list) and all(len(turn) == 2 for turn in history)):
        raise DataError('its history is no list of [prompt, answer]')
    turns = [*history, (prompt, row.get(columns[1]))]       # a text of JSON, too, as it is
    return [message for turn in turns for message in pair(*map(as_text, turn))]


def with_system(messages, row):
    """Return messages with a row's system message before them, unless they begin with one. Raises DataError
    where its column system has another; OpenOrca's system_prompt may differ."""
    system = as_text(row.get('system') or '')
    if messages and messages[0]['role'] == 'system':
        if system not in ('', messages[0]['content']):
            raise DataError('its column system and its system message differ')
        return messages
    system = system or as_text(row.get('system_prompt'))
    return [{'role': 'system', 'content': system}, *messages] if system and messages else messages


def tools_of(row):
    """Return the tools of a row in OpenAI's form, or None. LLaMA-Factory's are functions without a wrapper;
    those of OpenAI's Responses have the type beside the name. Raises DataError where they are none."""
    # nulls are parquet's in objects, and the user's in JSON text
    tools = from_json(without_nulls(row.get('tools'))) or []
    if not is_list_of(tools, dict):
        raise DataError('its tools are no list of objects')
    wrapped = []
    for tool in tools:
        if 'name' in tool and 'function' not in tool:
            function = {key: value for key, value in tool.items() if key != 'type'}
            tool = {'type': 'function', 'function': function}
        wrapped.append(tool)
    return wrapped or None


def pair(prompt, completion):
    """Return the messages of a prompt and its completion."""
    return [{'role': 'user', 'content': prompt}, {'role': 'assistant', 'content': completion or ''}]


def as_text(value):
    """Return a text, of None ''. Raises DataError for anything else."""
    if value is None or isinstance(value, str):
        return value or ''
    raise DataError(f'{value!r:.40} is no text')


def from_json(value):
    """Return the object, list or null that a text holds as JSON; anything else as it is."""
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except ValueError:
            return value
        return found if found is None or isinstance(found, (dict, list)) else value
    return value


def messages_in(value):
    """Return the messages that a text holds as JSON, as a text of CSV does; anything else as it is."""
    found = from_json(value)
    return found if are_messages(found) else value


def are_messages(value):
    """Return whether a value is a list of messages in OpenAI's form."""
    return is_list_of(value, dict) and value != [] and all(
        {'role', 'content'} <= each.keys() for each in value)


def is_list_of(value, kind):
    """Return whether a value is a list whose entries are of a kind, a type."""
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def without_nulls(value):
    """Return a value of JSON without the keys whose value is null, which parquet adds to each object."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def in_turn(entries):
    """Return the entries of a conversation; texts, as LIMA's, are the user's and the assistant's in turn."""
    if is_list_of(entries, str):
        return [{'role': role, 'content': text}
                for role, text in zip(itertools.cycle(('user', 'assistant')), entries)]
    return entries


def messages_of(entry):
    """Return the messages of an entry of a conversation: one, or two of a pair, as Capybara has them."""
    columns = columns_of(entry) if isinstance(entry, dict) and not {'role', 'from'} & entry.keys() else ()
    return conversation(entry, columns)[0] if len(columns) > 1 else [message_of(entry)]


def joined(entries, before=()):
    """Return the messages `before` and those of the entries of a conversation. A call alone belongs to the
    answer before it."""
    messages = [*before]
    for entry in entries:
        found, last = messages_of(entry), messages[-1] if messages else {}
        is_call = str(entry.get('role') or entry.get('from')).lower() in CALLS
        calls = is_call and found[0].get('tool_calls')
        if calls and last.get('role') == 'assistant' and flags_of(last) == flags_of(found[0]):
            last['tool_calls'] = [*last.get('tool_calls', ()), *calls]
        else:
            messages += found
    return messages


def of_prompt(entries):
    """Return the messages of a prompt, whose answers are not to be learned unless a flag says so."""
    return [{'weight': 0, **each} if each['role'] == 'assistant' and not flags_of(each) else each
            for each in joined(entries)]


def message_of(entry):
    """Return a message with role, content and, of calls, tool_calls, of an entry in OpenAI's or ShareGPT's
    form. Raises DataError where it is none."""
    if not isinstance(entry, dict):
        raise DataError(f'{entry!r:.40} is none of the messages of: {FORMS}')
    entry = without_nulls(entry)
    said = str(entry.pop('role', entry.pop('from', None))).lower()
    role = ROLES.get(said)
    if not role:
        lacks = said == 'none' and f'one of its messages has no role, but {", ".join(entry):.100}'
        raise DataError(lacks or f'{said!r:.40} is no role; those are {", ".join(ROLES)}')
    content = entry.pop('content', entry.pop('value', None))
    if said in CALLS:
        entry['tool_calls'], content = content, ''
    calls = []
    for key in ('tool_calls', 'function_call'):
        found = from_json(entry.pop(key, None)) or []
        calls += found if isinstance(found, list) else [found]
    if content is None and not calls and role != 'assistant':
        raise DataError('one of its messages has no content')
    if isinstance(content, list):
        content = ''.join(map(text_of_part, content))
    message = {**entry, 'role': role, 'content': as_text(content)}
    if calls:
        message['tool_calls'] = [call_of(call) for call in calls]
    return message


def text_of_part(part):
    """Return the text of a part of a content: a text, OpenAI's {'type': 'text', 'text': text} or
    LLaMA-Factory's {'type': 'text', 'value': text}. Raises DataError for another part, as a thought."""
    if isinstance(part, dict) and part.get('type', 'text') in ('text', 'input_text', 'output_text'):
        part = part.get('text', part.get('value'))
    if not isinstance(part, str):
        raise DataError('one of its messages has parts that are no text')
    return part


def call_of(call):
    """Return a tool call as templates expect it, {'function': {'name': ..., 'arguments': an object}, ...}.
    Raises DataError where it is none."""
    is_wrapped = isinstance(call, dict) and 'function' in call
    wrapped = call if is_wrapped else {'type': 'function', 'function': call}
    function = wrapped['function']
    if not (isinstance(function, dict) and isinstance(function.get('name'), str)):
        raise DataError(f'{call!r:.40} is no tool call')
    others = ', '.join(sorted(function.keys() - {'name', 'type', 'id', 'call_id'}))
    if others and 'arguments' not in function:
        raise DataError(f'a tool call has {others:.100}, but no arguments')
    arguments = from_json(function.get('arguments'))
    if arguments in (None, ''):     # what some write for none
        arguments = {}
    return {**wrapped, 'function': {**function, 'arguments': arguments}}


# ------------------------------------------------------------------------------- messages -> tokens

class Examples:
    """Make examples of conversations. template: as from choose_template. began: the time that a template may
    write, in seconds since 1970; a restart passes the same, so that the shards have the same bytes. columns:
    of the rows, one of COLUMNS."""

    def __init__(self, tokenizer, template, began, columns=('messages',)):
        self.tokenizer, self.columns, self.template = tokenizer, columns, ''
        if template == PLAIN:
            return
        self.special, self.marks = tokenizer.special, tokenizer.marks
        now = datetime.datetime.fromtimestamp(began)
        self.template = NOW.sub(lambda call: repr(now.strftime(call[2])), template)
        self.marks_answers = bool(MARKED.search(template))
        self.header, self.opening, self.call_form = '', '', CALL_FORMS[0]
        with contextlib.suppress(DataError):    # of a template that wants other messages
            chat = pair('a', '')
            question, prompt = self.render(chat[:1]), self.render(chat[:1], True)
            # what it adds to a question as the prompt of an answer, maybe before its last blanks
            same = len(os.path.commonprefix([question, prompt]))
            if prompt.endswith(question[same:]):
                self.header = prompt[same:].removesuffix(question[same:])
            function = {'name': WORDS, 'arguments': {'a': 'b'}}
            chat[1]['tool_calls'] = [{'id': 'ninelette', 'type': 'function', 'function': function}]
            call = self._call(chat)
            opening = self.header or call.removeprefix(question).partition(WORDS)[0]
            self.opening = (self.special.search(opening) or [opening])[0]

    def _call(self, chat):
        """Return the text of a chat that ends with a call, and set the form of calls, see in_form, to the
        first in which the template writes the call, and its arguments as JSON, not as Python has them; ''
        where there is none."""
        for self.call_form in CALL_FORMS:
            with contextlib.suppress(DataError):
                text = self.render(chat)
                if WORDS in text and "{'a'" not in text:
                    return text
        self.call_form = CALL_FORMS[0]
        return ''

    def of_row(self, row):
        """Return what `document` does of a row, a dict. Raises what conversation and document do."""
        label = str(row.get('label')).lower()
        if label == 'false':
            return (), b'', {'notes': ['are left out, whose label is false']}, ''
        first = messages_in(row.get(self.columns[0]))
        if not self.template and isinstance(first, list) and isinstance([*first, None][0], dict):
            raise DataError('its prompt is a list of messages, which --template=chat takes')
        document = self.document(*conversation(row, self.columns))
        if document and label not in ('true', 'none'):
            document[2]['notes'].append('have a label that is neither true nor false, which is not used')
        return document

    def document(self, messages, tools=None):
        """Return (ids and mask (n, 2); the bytes whose hash decides the split; counts; the system message or
        '') of an example; None where no word of the assistant is to be learned. `counts` has the targets and
        their UTF-8 bytes, and `notes`: what is to be said of the row.

        The split depends on all messages but the assistant's, so all answers to the same questions are in the
        same split; where nothing is asked, on all. Raises DataError for messages that cannot be used."""
        if not any(map(is_target, messages)):
            return None
        ids, mask, n_bytes, notes = self._chat(messages, tools) if self.template else self._plain(messages)
        mask[0] = START     # no target: in a window, another example stands before it
        asked = [each for each in messages if each['role'] != 'assistant']
        is_asked = any(each['content'].strip() for each in asked if each['role'] != 'system')
        questions = json.dumps(asked if is_asked else messages, default=str)
        counts = {'bytes': n_bytes, 'targets': int(np.count_nonzero(mask & TARGET)), 'notes': notes}
        system = messages[0]['content'] if messages[0]['role'] == 'system' else ''
        return np.stack([ids, mask], 1).astype(np.uint32), questions.encode(), counts, system

    def _plain(self, messages):
        """Return (ids, mask, bytes of the targets, notes). Prompt and completion are tokenized each by
        itself, so that a prompt has the same ids as in a generation."""
        contents = [message['content'] for message in messages]
        first = len(contents) % 2       # 1: there is a system message
        turns = zip(contents[first::2], contents[first + 1::2])
        texts = [PLAIN.format(prompt=question, completion=answer) for question, answer in turns]
        completion = contents[-1]
        before = '\n\n'.join([*contents[:first], *texts]).removesuffix(completion)
        known = [*self.tokenizer.opening, *self.tokenizer.encode(before)]
        answer = [*self.tokenizer.encode(completion), self.tokenizer.eot]
        mask = np.repeat([0, TARGET], [len(known), len(answer)])
        notes = special_in(before + completion, self.tokenizer)
        return np.array([*known, *answer]), mask, len(completion.encode('utf-8', 'replace')), notes

    def _chat(self, messages, tools):
        """Return (ids, mask, bytes of the targets, notes)."""
        pieces, written, generated = self._pieces(messages, tools)
        whole = ''.join(pieces)
        clean = ''.join('.' * len(piece) if i % 2 else piece for i, piece in enumerate(pieces))
        learned = self._answers(messages, (whole, clean, generated), written)
        ids, offsets = self._tokenized(pieces)
        mask, n_bytes, n_marked = self._mask(offsets, learned, clean, generated)
        if not n_marked:
            raise DataError('the chat template does not mark the words of the assistant')
        last = learned[-1][-1]
        if last == len(whole) and ids[-1] not in self.tokenizer.stops:
            ids, mask = np.append(ids, self.tokenizer.eot), np.append(mask, TARGET)
        are_removed = len(learned) < len(written)
        n_stops = np.isin(ids[mask == TARGET], self.tokenizer.stops).sum()
        notes = {
            'have answers whose thoughts the template removes, which are no targets': are_removed,
            'have answers that the template does not mark, which are no targets': n_marked < len(learned),
            ENDLESS: n_stops < n_marked,
            'hold the text of a special token, which is taken as text': len(pieces) > 1,
            f'have answers that do not begin by {self.header!r}, which the template writes before each '
            'answer of a chat':
                not all(clean[:start].endswith(self.header) for start, *_ in learned),
            **self._notes(messages, tools, whole, are_removed),
        }
        return ids, mask, n_bytes, [note for note, is_so in notes.items() if is_so]

    def _mask(self, offsets, learned, clean, generated):
        """Return (the mask (n,) of tokens with these offsets (n, 2), bytes of the targets, how many answers
        have some). learned: as from _answers. An answer is learned as it is, or its words that the template
        marks as generated, the last of them to the end of the turn."""
        mask, n_bytes, n_marked = np.zeros(len(offsets), int), 0, 0
        for start, end, last in learned:
            spans = [(start, end)]
            if self.marks_answers:
                spans = [(max(start, first), min(end, to)) for first, to in generated]
                spans = [span for span in spans if clean[slice(*span)].strip()]
            if spans:
                spans[-1] = spans[-1][0], last
                n_marked += 1
            for start, end in spans:
                chosen = (offsets[:, 1] > start) & (offsets[:, 0] < end)
                first = offsets[chosen.argmax(), 0]
                if first < start and self.special.match(clean, first):      # Phi-3's has the blanks behind it
                    chosen[chosen.argmax()] = False
                mask[chosen] = TARGET
                n_bytes += len(self.special.sub('', clean[start:end]).encode())
        return mask, n_bytes, n_marked

    def _notes(self, messages, tools, whole, are_removed):
        """Return {what may be said of messages and tools: whether it is so}: what their text `whole` lacks,
        keys that neither this nor the template reads, flags and calls that are not as they should be.
        are_removed: whether it is said already that the assistant's thoughts are."""
        shown = [message for message in messages if not (are_removed and message['role'] == 'assistant')]
        calls = itertools.chain(*(message.get('tool_calls', ()) for message in messages))
        is_same = False
        with contextlib.suppress(DataError):    # of a template that wants tools
            is_same = tools and self.render(messages) == whole
        return {
            'have thoughts or other messages that the chat template does not write as they are':
                any(words_beside_answer(message) not in whole for message in shown),
            'have tools that the chat template does not write': is_same,
            **{f'have messages with {key:.40}, which is not read':
                not re.search(rf'\b{re.escape(key)}\b', self.template)
               for key in sorted({*itertools.chain(*messages)} - READ)},
            OTHER_FLAG: any(flag not in (0, 1) for message in messages for flag in flags_of(message)),
            NO_JSON: any(isinstance(call['function']['arguments'], str) for call in calls),
        }

    def prompt(self, messages):
        """Return the ids (n,) of messages and the header of an answer to them."""
        pieces, *_ = self._pieces(messages, None, prompt=True)
        return self._tokenized(pieces)[0]

    def render(self, messages, prompt=False):
        """Return the text of messages. prompt: whether it ends with the header of an answer."""
        return self._rendered(messages, None, prompt)[0]

    def _rendered(self, messages, tools, prompt):
        """Return (text, [(start, end)] of what the template marks as generated). Raises DataError where the
        template refuses the messages."""
        from transformers.utils.chat_template_utils import render_jinja_template
        try:
            [text], marked = render_jinja_template(
                [[in_form(message, *self.call_form) for message in messages]],
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

    def _pieces(self, messages, tools, prompt=False):
        """Return (pieces, spans, what the template marks as generated) of the text of messages. The second,
        fourth, ... piece is the text of a special token inside a message or a tool, which would make a turn
        of its own; the assistant may write those that stand around no turn, as <think>. The spans, (start,
        end) in the text, are of the words of each answer to be learned, none if `prompt`. The template shows
        both by where it writes marks."""
        whole, generated = self._rendered(messages, tools, prompt)
        if {TEXT, WORDS} & {*whole}:
            raise DataError('it holds U+FDD0 or U+FDD1, which are no characters')
        marked, wanted = [], []
        for message in messages:
            pattern = self.marks if message['role'] == 'assistant' else self.special
            if is_target(message) and not prompt:
                wanted.append(str(len(wanted)))
                message = marked_answer(message, f'{WORDS}{wanted[-1]}{WORDS}', WORDS)
            marked.append({**marked_text(message, pattern), 'role': message['role']})
        shape, _ = self._rendered(marked, marked_text(tools, self.special), prompt)
        parts = shape.split(WORDS)
        numbers = parts[1::3]
        del parts[1::3]     # a text, the words of an answer, a text, ...
        pieces = ''.join(parts).split(TEXT)
        if ''.join(pieces) != whole or not all(map(self.special.fullmatch, pieces[1::2])):
            raise DataError('the chat template takes an answer or the text of a special token apart')
        if len(parts) != 2 * len(numbers) + 1 or {*numbers} != {*wanted}:
            raise DataError('the chat template does not write all answers of the assistant')
        ends = [*itertools.accumulate(len(part.replace(TEXT, '')) for part in parts)]
        places = [2 * numbers.index(i) for i in wanted]     # a result may have the name of its call, too
        return pieces, [(ends[place], ends[place + 1]) for place in places], generated

    def _tokenized(self, pieces):
        """Return (ids (n,), the characters of each (n, 2)) of a text in pieces, as from _pieces."""
        ids, offsets, start = [], [], 0
        for i, text in enumerate(pieces):
            encoding = self.tokenizer.encoding(text, i % 2 == 0)
            ids += encoding.ids
            offsets.append(np.array(encoding.offsets, int).reshape(-1, 2) + start)
            start += len(text)
        return np.array(ids, np.uint32), np.concatenate(offsets)

    def _answers(self, messages, texts, written):
        """Return [(start, end of the words, end of the turn)] in the text of messages of each answer to be
        learned, whose words it has at `written`. texts: that text, the same without special tokens that are
        text, what the template marks as generated. An answer whose thoughts the template removes is learned
        only where it removes those of all. Raises DataError where a call is not whole."""
        whole, clean, generated = texts
        full, bare, before = [], [], 0
        last_words = '' if is_target(messages[-1]) else messages[-1]['content'].strip()
        after = whole.rfind(last_words, written[-1][1])
        limits = [*(start for start, _ in written[1:]), after if after >= 0 else len(whole)]
        for message, (start, end), limit in zip(filter(is_target, messages), written, limits):
            # to the stop, if the template writes one, or to the end of what it marks and of the text's blanks
            stop = self.marks.search(clean, end, limit)
            if stop and self.tokenizer.library.token_to_id(stop[0]) in self.tokenizer.stops:
                last = stop.end()
            else:
                stop, last = None, max([end, *(to for first, to in generated if first < end)])
                last = last if whole[last:].strip() else len(whole)
            check_calls(message, whole[start:last], has_end=stop or generated)
            content = message['content'].strip()
            if content and whole.endswith(content, before, end):      # with its thoughts
                start = end - len(content)
            start = self._beginning(clean, before, start, is_call=not words_of(message))
            (bare if lacks_thought(message, whole[start:end]) else full).append((start, end, last))
            before = end
        return full or bare

    def _beginning(self, clean, before, start, is_call):
        """Return where an answer begins in the text `clean`, whose words, or the name of whose call, begin at
        `start`: behind the header, which is behind `before`. A header may go on, as by <think>, where the
        text does not. Raises DataError where the beginning of a call is not to be seen."""
        if not (self.header or is_call):
            return before + len(clean[before:start].rstrip(' '))
        begin = clean.rfind(self.opening or TEXT, before, start)
        if begin >= 0:
            return begin + len(os.path.commonprefix([self.header, clean[begin:start]]))
        if not self.header:
            raise DataError('the chat template does not show where a call begins')
        return start


def special_in(text, tokenizer):
    """Return what is to be said of a text without a template, which may hold the text of a special token."""
    found = tokenizer.special.search(text)
    if not found:
        return []
    turn = tokenizer.marks.search(text)
    remedy = ': a chat is to be in `messages`' * bool(turn)
    return [f'hold the text {(turn or found)[0]}, which is taken as text{remedy}']


def check_calls(message, text, has_end):
    """Raise DataError unless the text of an answer holds all of its calls and, if there are any, has an end.
    """
    calls = message.get('tool_calls', ())
    if not all(call['function']['name'] in text for call in calls):
        raise DataError('the chat template does not write the calls of the assistant')
    if calls and not has_end:
        raise DataError('the chat template writes no stop after the calls of the assistant')


def is_target(message):
    """Return whether a message is an answer to be learned: with words or calls, and no weight of 0, as OpenAI
    has it, no loss_weight of 0, as LLaMA-Factory has it, or `train`, `training` or `loss` false, as axolotl
    and ms-swift have it."""
    return message['role'] == 'assistant' and 0 not in flags_of(message) and bool(
        words_of(message) or message.get('tool_calls'))


def flags_of(message):
    """Return what a message has of FLAGS: 0, 1, or another value. They may be texts: CSV has no others."""
    values = {'0': 0, '0.0': 0, 'false': 0, '1': 1, '1.0': 1, 'true': 1}
    return [values.get(str(message[name]).lower(), message[name]) for name in FLAGS if name in message]


def words_of(message):
    """Return the words of an answer, which are what stands behind its thoughts."""
    return message['content'].rpartition(THOUGHT)[2].strip()


def words_beside_answer(message):
    """Return the words of a message that are to stand in a chat's text beside those of an answer: a thought,
    or what another than the assistant says."""
    words = message['content']
    if message['role'] == 'assistant':
        thoughts = words.rpartition(THOUGHT)[0].rpartition('<think>')[2], *map(message.get, THOUGHTS)
        words = next((each for each in thoughts if each and isinstance(each, str)), '')
    return whole_characters(words.strip())


def lacks_thought(message, text):
    """Return whether an answer has a thought that `text`, what the template writes of the answer, lacks."""
    thought = words_beside_answer(message)
    is_written = THOUGHT in text or thought and thought in text
    return bool(thought or THOUGHT in message['content']) and not is_written


def marked_answer(message, begin, end):
    """Return a message with two marks around its words, which are the end of its content, or, where it has
    none, around the name of its first tool call."""
    if words := words_of(message):
        thoughts, _, spaces = message['content'].rpartition(words)
        return {**message, 'content': f'{thoughts}{begin}{words}{end}{spaces}'}
    first, *more = message['tool_calls']
    function = {**first['function'], 'name': f'{begin}{first["function"]["name"]}{end}'}
    return {**message, 'tool_calls': [{**first, 'function': function}, *more]}


def in_form(message, nothing, is_text):
    """Return a message with its calls in a form, of which a template writes one or more. nothing: what stands
    for no words beside them, '' or None. is_text: whether arguments are JSON text, not an object."""
    if not message.get('tool_calls'):
        return message
    message = {**message, 'content': message['content'] or nothing}
    if is_text:
        message = copy.deepcopy(message)
        for function in (call['function'] for call in message['tool_calls']):
            if not isinstance(function['arguments'], str):
                function['arguments'] = json.dumps(function['arguments'], ensure_ascii=False)
    return message


def marked_text(value, pattern):
    """Return a value of JSON with marks around what a pattern fits in its texts."""
    if isinstance(value, dict):
        return {key: marked_text(each, pattern) for key, each in value.items()}
    if isinstance(value, list):
        return [marked_text(each, pattern) for each in value]
    return pattern.sub(rf'{TEXT}\g<0>{TEXT}', value) if isinstance(value, str) else value


# ------------------------------------------------------------------------------- before a run

LOW_LR = 5e-5           # adapters begin at zero: they usually take 2e-4


def ready(config):
    """Return the settings of a run. One that starts from a checkpoint takes the tokenizer beside it; a new
    one has its examples prepared; a resumed one has them all. Ends the process where preparing fails."""
    resume, checkpoints = config['resume'], glob.glob('*.pt', root_dir=config['checkpoint_dir'])
    if not resume or resume == 'auto' and not checkpoints:
        path = files.checkpoint_of(config['init_from'])
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
    whether it is one of these. One process on each machine prepares; the others wait."""
    dataset, name = config['dataset'], shards.name_of_prepared(config)
    of_file = dataset.endswith(shards.ROWS)
    if not of_file and 'splits' not in shards.DATASETS.get(name, {}):
        return False
    folder = shards.dataset_dir(config)
    if of_file and not isfile(dataset):
        raise MissingError(f'dataset={dataset}: there is no such file')
    if os.environ.get('WORLD_SIZE', '1') != '1' and int(os.environ.get('LOCAL_RANK', 0)):
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
        done = subprocess.run([sys.executable, join(HERE, 'prepare_data.py'), *words],
                              env=os.environ | {shards.BEFORE_TRAINING: '1'})
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
