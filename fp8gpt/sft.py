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
from contextlib import suppress
from os.path import dirname, isfile, join

import numpy as np

from configurator import HERE, DataError, MissingError, SettingError, first_line, say
from fp8gpt import files, shards
from fp8gpt.shards import START, TARGET
from fp8gpt.tokenizer import identity_of_folder, whole_characters

PLAIN = 'Question:\n{prompt}\n\nAnswer:\n{completion}'
# the columns that make an example: the first ones that a row has count; MORE may be beside
COLUMNS = (
    ['messages'],
    ['conversations'],      # ShareGPT's
    ['prompt', 'completion'],
    ['instruction', 'output'],      # Alpaca's
    ['question', 'answer'],
    ['problem', 'generated_solution'],
)
# other systems' ways to say what is learned of a row or a message; here it is `weight`, 0 or 1
FLAGS = 'label', 'loss_weight', 'train', 'training', 'loss'
CALLS = 'tools', 'tool_calls', 'function_call'
MORE = 'input', 'system', *CALLS, *FLAGS
FORMS = ('messages (role, content); conversations (from, value); prompt and completion; question and answer; '
         'or instruction, input and output')
ROLES = {role: role for role in ('system', 'user', 'assistant')} | {'human': 'user', 'gpt': 'assistant'}
MARKED = re.compile(r'{%-?\s*generation\s*-?%}')     # marks the targets in a template
NOW = re.compile(r'''strftime_now\((["'])(.*?)\1\)''')
THOUGHT = '</think>'    # ends what many templates remove from answers that are not the last
THOUGHTS = 'reasoning_content', 'reasoning', 'thinking'     # keys that have it beside the content
ENDLESS = ('have answers that the template ends by no token, so a model does not learn to stop: name a '
           '--tokenizer whose tokens the template writes')
UNWRITTEN = 'have words, as thoughts, that the chat template does not write'
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
    """Return the messages of a row, a dict with `columns`, one of COLUMNS, and any of MORE. Raises DataError
    where it is no conversation, has tools, or says otherwise than by `weight` what is to be learned."""
    refuse_calls_and_flags(row)
    if len(columns) > 1:
        prompt, answer = (as_text(row.get(column)) for column in columns)
        messages = pair('\n\n'.join(filter(None, (prompt, as_text(row.get('input'))))), answer)
    else:
        entries = row.get(columns[0]) or []
        if not isinstance(entries, list):
            raise DataError(f'it has none of the messages of: {FORMS}')
        messages = [*map(message_of, entries)]
    system = as_text(row.get('system'))
    if not (system and messages):
        return messages
    has_one = messages[0]['role'] == 'system'
    if has_one and messages[0]['content'] != system:
        raise DataError('its column system and its system message differ')
    return [{'role': 'system', 'content': system}, *messages[has_one:]]


def refuse_calls_and_flags(entry):
    """Raise DataError where a row or a message has an entry of CALLS or FLAGS that is not empty."""
    for name in CALLS:
        if entry.get(name) not in (None, '', [], '[]', 'null'):
            raise DataError(f'it has {name}, and calls of tools are not learned here: write them into the '
                            'text of messages, or train them by TRL')
    for name in FLAGS:
        if entry.get(name) not in (None, ''):
            raise DataError(f'it has {name}={entry[name]!r:.40}: `weight` of a message, 0 or 1, says what is '
                            'learned; `datasets.map` makes it')


def pair(prompt, completion):
    """Return the messages of a prompt and its completion."""
    return [{'role': 'user', 'content': prompt}, {'role': 'assistant', 'content': completion or ''}]


def as_text(value):
    """Return a text, of None ''. Raises DataError for anything else."""
    if value is None or isinstance(value, str):
        return value or ''
    raise DataError(f'{value!r:.40} is no text')


def message_of(entry):
    """Return a message of an entry in OpenAI's or ShareGPT's form: its role and content, and what else it
    has, such as a weight, for the template. Raises DataError where it is none."""
    if not isinstance(entry, dict):
        raise DataError(f'{entry!r:.40} is none of the messages of: {FORMS}')
    refuse_calls_and_flags(entry)
    entry = {name: value for name, value in entry.items() if value is not None}     # parquet's nulls
    role = str(entry.pop('role', entry.pop('from', None))).lower()
    if role not in ROLES:
        raise DataError(f'{role!r:.40} is no role; those are {", ".join(ROLES)}')
    content = entry.pop('content', entry.pop('value', None))
    if content is None and role not in ('assistant', 'gpt'):
        raise DataError('one of its messages has no content')
    if entry.get('weight', 1) not in (0, 1):
        raise DataError(f'it has weight={entry["weight"]!r:.40}, which is neither 0 nor 1')
    return {**entry, 'role': ROLES[role], 'content': as_text(content)}


# ------------------------------------------------------------------------------- messages -> tokens

class Examples:
    """Makes examples of conversations. template: as from choose_template. began: the time that a template may
    write, in seconds since 1970; a restart passes the same, so that the shards have the same bytes. columns:
    of the rows, one of COLUMNS.

    A chat of a user's `a</s>b` and an answer `c`, by a template that ends each turn by the token </s>:

        whole       U:a</s>b</s>A:c</s>             what the template writes; all offsets are in this text
        shape       U:aT</s>Tb</s>A:W0WcW</s>       what it writes of the same messages with marks, T around
                                                    tokens that a message spells out, W0W and W around answers
        pieces      U:a, </s>, b</s>A:c</s>         tokenized one by one, the second as text, not as a token
        clean       U:a....b</s>A:c</s>             where only the template's own tokens are found
        written     [(14, 15)]                      the words of each answer to be learned: c
        learned     [(14, 15, 19)]                  its beginning, the end of its words, the end of its turn
        mask        targets are the tokens within, c and </s>
        header      A:                              what the template writes before each answer
        opening     A:                              the header's first special token, or all of it without one
    """

    def __init__(self, tokenizer, template, began, columns=('messages',)):
        self.tokenizer, self.columns, self.template = tokenizer, columns, ''
        if template == PLAIN:
            return
        self.special, self.marks = tokenizer.special, tokenizer.marks
        now = datetime.datetime.fromtimestamp(began)
        self.template = NOW.sub(lambda call: repr(now.strftime(call[2])), template)
        self.marks_answers = bool(MARKED.search(template))
        self.header = self.opening = ''
        with suppress(DataError):    # of a template that wants other messages
            chat = pair('a', '')[:1]
            question, prompt = self.render(chat), self.render(chat, True)
            # what it adds to a question as the prompt of an answer, maybe before its last blanks
            same = len(os.path.commonprefix([question, prompt]))
            if prompt.endswith(question[same:]):
                self.header = prompt[same:].removesuffix(question[same:])
                self.opening = (self.special.search(self.header) or [self.header])[0]

    def of_row(self, row):
        """Return what `document` does of a row, a dict. Raises what conversation and document do."""
        return self.document(conversation(row, self.columns))

    def document(self, messages):
        """Return (ids and mask (n, 2), uint32; the bytes whose hash decides the split; counts; the system
        message or '') of an example; None where no word of the assistant is to be learned. `counts` has the
        targets and their UTF-8 bytes; `notes`: what is to be said of the row; `text`: what the ids decode to.

        The split depends on all messages but the assistant's, so all answers to the same questions are in the
        same split; where nothing is asked, on all. Raises DataError for messages that cannot be used."""
        if not any(map(is_target, messages)):
            return None
        if self.template:   # a header's line end and an answer's may be one token, by which no prompt ends
            messages = [{**each, 'content': each['content'].lstrip('\n')} if is_target(each) else each
                        for each in messages]
        make = self._chat if self.template else self._plain
        ids, mask, n_bytes, notes, text = make(messages)
        mask[0] = START     # no target: in a window, another example stands before it
        asked = [each for each in messages if each['role'] != 'assistant']
        is_asked = any(each['content'].strip() for each in asked if each['role'] != 'system')
        questions = json.dumps(asked if is_asked else messages, default=str)
        counts = {'bytes': n_bytes, 'targets': int(np.count_nonzero(mask & TARGET)), 'notes': notes,
                  'text': text}
        system = messages[0]['content'] if messages[0]['role'] == 'system' else ''
        return np.stack([ids, mask], 1).astype(np.uint32), questions.encode(), counts, system

    def _plain(self, messages):
        """Return (ids, mask, bytes of the targets, notes, text). Prompt and completion are tokenized each by
        itself, so that a prompt has the same ids as in a generation."""
        *system, prompt, completion = [message['content'] for message in messages]
        asked = '\n\n'.join([*system, PLAIN.format(prompt=prompt, completion='')])
        prompt_ids = [*self.tokenizer.opening, *self.tokenizer.encode(asked)]
        answer_ids = [*self.tokenizer.encode(completion), self.tokenizer.eot]
        mask = np.repeat([0, TARGET], [len(prompt_ids), len(answer_ids)])
        text, n_bytes = asked + completion, len(completion.encode('utf-8', 'replace'))
        return np.array([*prompt_ids, *answer_ids]), mask, n_bytes, special_in(text, self.tokenizer), text

    def _chat(self, messages):
        """Return (ids, mask, bytes of the targets, notes, text without special tokens)."""
        pieces, written, generated = self._pieces(messages)
        whole = ''.join(pieces)
        clean = ''.join('.' * len(piece) if i % 2 else piece for i, piece in enumerate(pieces))
        learned = self._answers(messages, (whole, clean, generated), written)
        ids, offsets = self._tokenized(pieces)
        mask, n_bytes, n_marked = self._mask(offsets, learned, clean, generated)
        if not n_marked:
            raise DataError('the chat template does not mark the words of the assistant')
        if learned[-1][-1] == len(whole) and ids[-1] not in self.tokenizer.stops:
            ids, mask = np.append(ids, self.tokenizer.eot), np.append(mask, TARGET)
        notes = {
            ENDLESS: np.isin(ids[mask == TARGET], self.tokenizer.stops).sum() < n_marked,
            'have answers that do not begin as the last one, with a thought or without, and are not learned':
                len(learned) < len(written),
            UNWRITTEN: any(
                words not in whole for message in messages
                for words in (whole_characters(message['content'].strip()), thought_of(message))),
        }
        notes = [note for note, is_so in notes.items() if is_so]
        return ids, mask, n_bytes, notes, self.special.sub('', whole)

    def _mask(self, offsets, learned, clean, generated):
        """Return (the mask (n,) of tokens with these offsets (n, 2), bytes of the targets, how many answers
        have some). learned: as from _answers. An answer is learned as it is, or its words that the template
        marks as generated, the last of them to the end of the turn."""
        mask, n_bytes, n_marked = np.zeros(len(offsets), int), 0, 0
        for start, end, turn_end in learned:
            spans = [(start, end)]
            if self.marks_answers:
                spans = [(max(start, first), min(end, to)) for first, to in generated]
                spans = [span for span in spans if clean[slice(*span)].strip()]
            if spans:
                spans[-1] = spans[-1][0], turn_end
                n_marked += 1
            for start, end in spans:
                chosen = (offsets[:, 1] > start) & (offsets[:, 0] < end)
                first = offsets[chosen.argmax(), 0]
                if first < start and self.special.match(clean, first):      # Phi-3's has the blanks behind it
                    chosen[chosen.argmax()] = False
                mask[chosen] = TARGET
                n_bytes += len(self.special.sub('', clean[start:end]).encode())
        return mask, n_bytes, n_marked

    def prompt(self, messages):
        """Return the ids (n,) of messages and the header of an answer to them."""
        pieces, *_ = self._pieces(messages, prompt=True)
        return self._tokenized(pieces)[0]

    def render(self, messages, prompt=False):
        """Return the text of messages. prompt: whether it ends with the header of an answer."""
        return self._rendered(messages, prompt)[0]

    def _rendered(self, messages, prompt):
        """Return (text, [(start, end)] of what the template marks as generated). Raises DataError where the
        template refuses the messages."""
        from transformers.utils.chat_template_utils import render_jinja_template
        try:
            [text], marked = render_jinja_template(
                [messages],
                chat_template=self.template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=self.marks_answers,
                **self.tokenizer.hf.special_tokens_map,
            )
        except Exception as error:  # as a stranger has made it: TemplateError, RecursionError, TypeError, ...
            raise DataError('the chat template cannot write a conversation: '
                            f'{first_line(error):.200}') from None
        return whole_characters(text), marked[0] if marked else []

    def _pieces(self, messages, prompt=False):
        """Return (pieces, written, what the template marks as generated), see the class; written is [] for a
        prompt. The assistant may write tokens that stand around no turn, such as <think>: they are no text.
        Raises DataError for a template that does not write all answers, or not as they are."""
        whole, generated = self._rendered(messages, prompt)
        if {TEXT, WORDS} & {*whole}:
            raise DataError('it holds U+FDD0 or U+FDD1, which are no characters')
        marked, wanted = [], []
        for message in messages:
            pattern = self.marks if message['role'] == 'assistant' else self.special
            if is_target(message) and not prompt:
                wanted.append(str(len(wanted)))
                message = marked_answer(message, f'{WORDS}{wanted[-1]}{WORDS}', WORDS)
            marked.append(message | {'content': pattern.sub(rf'{TEXT}\g<0>{TEXT}', message['content'])})
        shape, _ = self._rendered(marked, prompt)
        texts = shape.split(WORDS)
        numbers = texts[1::3]
        del texts[1::3]     # a text, the words of an answer, a text, ...
        pieces = ''.join(texts).split(TEXT)
        if ''.join(pieces) != whole or not all(map(self.special.fullmatch, pieces[1::2])):
            raise DataError('the chat template takes an answer or the text of a special token apart')
        if len(texts) != 2 * len(numbers) + 1 or {*numbers} != {*wanted}:
            raise DataError('the chat template does not write all answers of the assistant')
        ends = [*itertools.accumulate(len(text.replace(TEXT, '')) for text in texts)]
        indices = [2 * numbers.index(i) for i in wanted]    # where the template writes an answer first
        return pieces, [(ends[index], ends[index + 1]) for index in indices], generated

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
        """Return `learned`, see the class. texts: whole, clean, what the template marks as generated. An
        answer whose thoughts the template removes is learned only where it removes those of all, and one with
        a thought, or without, only where the last one has one, too."""
        whole, clean, generated = texts
        full, bare, earlier_end = [], [], 0
        last_words = '' if is_target(messages[-1]) else messages[-1]['content'].strip()
        after = whole.rfind(last_words, written[-1][1])
        limits = [*(start for start, _ in written[1:]), after if after >= 0 else len(whole)]
        for message, (start, end), limit in zip(filter(is_target, messages), written, limits):
            # to the stop, if the template writes one, or to the end of what it marks and of the text's blanks
            stop = self.marks.search(clean, end, limit)
            if stop and self.tokenizer.library.token_to_id(stop[0]) in self.tokenizer.stops:
                turn_end = stop.end()
            else:
                turn_end = max([end, *(to for first, to in generated if first < end)])
                turn_end = turn_end if whole[turn_end:].strip() else len(whole)
            content = message['content'].strip()
            if content and whole.endswith(content, earlier_end, end):   # with its thoughts
                start = end - len(content)
            begin = self._beginning(clean, earlier_end, start)
            text = whole[begin:end]
            # some templates write an empty thought, or a word, before the last answer alone
            first_words = THOUGHT in text or whole[begin:start].strip()
            (bare if lacks_thought(message, text) else full).append(((begin, end, turn_end), first_words))
            earlier_end = end
        learned = full or bare
        return [answer for answer, first_words in learned if first_words == learned[-1][1]]

    def _beginning(self, clean, earlier_end, start):
        """Return where an answer begins in `clean`, whose words begin at `start`: behind the header, which is
        behind `earlier_end`. A header may go on, as by <think> or a date, where the text has a line end."""
        if not self.header:
            return earlier_end + len(clean[earlier_end:start].rstrip(' '))
        begin = clean.rfind(self.opening, earlier_end, start)
        if begin < 0:
            return start
        shared = os.path.commonprefix([self.header, clean[begin:start]])
        begin += len(shared)
        return begin if shared == self.header else start - len(clean[begin:start].lstrip('\n'))


def special_in(text, tokenizer):
    """Return what is to be said of a text without a template, which may hold the text of a special token."""
    match = tokenizer.marks.search(text)
    remedy = ': a chat is to be in `messages`' * bool(match)
    match = match or tokenizer.special.search(text)
    return [f'hold the text {match[0]}, which is taken as text{remedy}'] if match else []


def is_target(message):
    """Return whether a message is an answer to be learned: with words, and without OpenAI's weight of 0."""
    return message['role'] == 'assistant' and message.get('weight') != 0 and words_of(message) != ''


def words_of(message):
    """Return the words of an answer, which are what stands behind its thoughts."""
    return message['content'].rpartition(THOUGHT)[2].strip()


def thought_of(message):
    """Return the thought of an answer, which stands in its content or in a key of its own; '' without one."""
    within = message['content'].rpartition(THOUGHT)[0].rpartition('<think>')[2]
    thoughts = [each for each in (within, *map(message.get, THOUGHTS)) if each and isinstance(each, str)]
    return whole_characters(thoughts[0].strip()) if thoughts else ''


def lacks_thought(message, text):
    """Return whether an answer has a thought that `text`, what the template writes of the answer, lacks."""
    thought = thought_of(message)
    is_written = THOUGHT in text or thought and thought in text
    return bool(thought or THOUGHT in message['content']) and not is_written


def marked_answer(message, begin, end):
    """Return a message with two marks around its words, which are the end of its content."""
    words = words_of(message)
    thoughts, _, spaces = message['content'].rpartition(words)
    return {**message, 'content': f'{thoughts}{begin}{words}{end}{spaces}'}


# ------------------------------------------------------------------------------- before a run

def ready(config):
    """Prepare the examples that a run fine-tunes on, and return its settings. A run that starts from a
    checkpoint takes the tokenizer beside it; one that resumes has its examples already. Ends the process
    where preparing fails."""
    resume, checkpoints = config['resume'], glob.glob('*.pt', root_dir=config['checkpoint_dir'])
    if not resume or resume == 'auto' and not checkpoints:
        path = files.checkpoint_of(config['init_from'])
        beside = dirname(path) or '.'
        if 'tokenizer' not in config.given and isfile(path) and identity_of_folder(beside):
            config['tokenizer'] = beside
            config.given.add('tokenizer')
        prepare_examples(config)
    return config


def prepare_examples(config):
    """Run prepare_data.py for a dataset of examples that is not prepared yet, or for a file of rows, with
    `overwrite` anew where its shards are of another content. One process on each machine prepares; the others
    wait. Raises MissingError where there is no such file, and SettingError for shards of another content."""
    dataset, name = config['dataset'], shards.name_of_prepared(config)
    of_file = dataset.endswith(shards.ROWS)
    if not of_file and 'splits' not in shards.DATASETS.get(name, {}):
        return
    folder = shards.dataset_dir(config)
    if of_file and not isfile(dataset):
        raise MissingError(f'dataset={dataset}: there is no such file')
    words = ['prepare_data.py', *shards.words_to_prepare(config)]
    hashes = shards.hash_of_files([dataset]) if of_file else None
    if _is_prepared(folder) and not _is_prepared(folder, hashes):
        if not config['overwrite']:
            raise SettingError(f'{folder} was made of another {dataset}, before an edit or elsewhere: '
                               '--overwrite makes it anew, and the run, too')
        words.append('--overwrite')
    command = shlex.join(['python', *words])
    if os.environ.get('WORLD_SIZE', '1') != '1' and int(os.environ.get('LOCAL_RANK', 0)):
        while not _is_prepared(folder, hashes):
            time.sleep(1)
    elif not _is_prepared(folder, hashes):
        if config['dry_run']:
            say(f'data      {folder} is not prepared, and --dry_run writes nothing: `{command}` prepares it')
            raise SystemExit
        say(f'data      {folder} is prepared by', f'          {command}')
        done = subprocess.run([sys.executable, join(HERE, words[0]), *words[1:]])
        if done.returncode:
            raise SystemExit(done.returncode)
    if of_file:     # so that a resume finds it after the file is edited or gone
        config['dataset'] = folder


def _is_prepared(folder, hashes=None):
    """Return whether a folder holds a dataset that prepare_data.py has finished; with hashes, of those files.
    """
    try:
        meta = shards.read_meta(folder)
        return bool(meta) and hashes in (None, meta['settings'].get('files'))
    except MissingError:
        return False
