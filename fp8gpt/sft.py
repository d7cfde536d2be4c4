"""Fine-tuning data: prompts and completions, or messages -> tokens with a mask that says which are targets.

    examples = Examples(tokenizer, template, began)
    tokens, raw, n_bytes = examples.document(text)      # what tokenizer.Workers ask for

A conversation is a list of messages, {'role': 'user' | 'assistant' | ..., 'content': text}. A template
makes it the text of an example: ours, PLAIN, or the chat template that comes with a tokenizer, in jinja2's
sandbox, as transformers runs it. What the assistant says is target, with the token that ends it; all else is
not. An example begins with the tokenizer's `start` token; one of a chat template begins as that says.

Each part of an example is tokenized by itself, so that a prompt has the ids that it has in a generation.
"""
import datetime
import glob
import json
import os
import shlex
import subprocess
import sys
import time

import numpy as np

from fp8gpt import shards
from configurator import DataError, MissingError, SettingError, config_values, configure
from fp8gpt.shards import START, TARGET

PLAIN = 'Question:\n{prompt}\n\nAnswer:\n{completion}'
# the columns that a source of examples may have; OpenMathInstruct-2's are the last
COLUMNS = ['messages'], ['prompt', 'completion'], ['problem', 'generated_solution']


def columns_of(names):
    """Those of a source's columns that make examples; [] where it has none."""
    return next((columns for columns in COLUMNS if set(columns) <= set(names)), [])


def conversations(rows, columns):
    """(row, position) -> (its conversation as JSON, position), of the rows in which the assistant says
    something. Raises DataError where a column is missing or holds something else."""
    for row, position in rows:
        missing = [column for column in columns if column not in row]
        if missing:
            raise DataError(f'a row has no {missing[0]!r}: it has {", ".join(row)}')
        messages = row[columns[0]]
        if len(columns) == 2:
            prompt, completion = (row[column] or '' for column in columns)
            messages = [{'role': 'user', 'content': prompt}, {'role': 'assistant', 'content': completion}]
        if not _is_conversation(messages):
            wanted = 'a list of {"role": ..., "content": text}' if len(columns) == 1 else 'text'
            raise DataError(f'{" or ".join(columns)} of a row is not {wanted}')
        if any(_is_answer(message) for message in messages):
            yield json.dumps(messages), position


def _is_conversation(messages):
    return isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get('content'), str) and 'role' in message
        for message in messages)


def _is_answer(message):
    return message['role'] == 'assistant' and bool(message['content'])


def choose_template(asked, columns, tokenizer):
    """The template's text. asked: 'auto' (the chat template for messages, else PLAIN), 'plain' or 'chat'.
    Raises SettingError for one that there is not."""
    of_messages = columns == ['messages']
    if asked == 'plain' and of_messages:
        raise SettingError('messages have no plain template: leave out --template')
    if asked == 'plain' or asked == 'auto' and not of_messages:
        return PLAIN
    if not tokenizer.chat_template:
        model = "an instruct model's tokenizer has one"
        raise SettingError(f'the tokenizer has no chat template: {model}; prompts and completions need none')
    return tokenizer.chat_template


class Examples:
    """Makes examples of conversations. template: as from choose_template. began: seconds since 1970, the time
    that a template is told, so that a restart makes the same bytes."""

    def __init__(self, tokenizer, template, began):
        self.tokenizer = tokenizer
        self.render = None
        if template != PLAIN:
            self.render = chat_renderer(template, tokenizer.special_tokens, began)

    def document(self, text):
        """A conversation as JSON -> (ids and mask (n, 2), the bytes of all before the first answer, by which
        its split is drawn: a prompt with several answers is never in both; UTF-8 bytes of the targets)."""
        messages = json.loads(text)
        parts = self._chat(messages) if self.render else self._plain(*messages)
        tokens = np.concatenate([
            np.stack([ids, np.full_like(ids, TARGET if is_target else 0)], 1) for ids, is_target in parts])
        tokens[0, 1] = START
        answers = [message['role'] == 'assistant' for message in messages]
        n_bytes = sum(len(_utf8(message['content'])) for message in messages if _is_answer(message))
        return tokens, json.dumps(messages[:answers.index(True)]).encode(), n_bytes

    def _plain(self, prompt, completion):
        """[(ids, whether they are targets)]"""
        start, eot = (np.array([token]) for token in (self.tokenizer.start, self.tokenizer.eot))
        before = PLAIN.removesuffix('{completion}').replace('{prompt}', prompt['content'])
        ids = [self.tokenizer.encode(part).astype(int) for part in (before, completion['content'])]
        return [(start, False), (ids[0], False), (ids[1], True), (eot, True)]

    def _chat(self, messages):
        """[(ids, whether they are targets)]. An answer that the template writes otherwise once others follow
        it, as Qwen3's without its reasoning, is no target, since no generation would have it before it."""
        whole = self.render(messages)
        parts, end = [], 0
        for i in range(len(messages)):
            if messages[i]['role'] != 'assistant':
                continue
            before, after = self.render(messages[:i], True), self.render(messages[:i + 1])
            if after.startswith(before) and whole.startswith(after):
                answer = self._ids(whole[len(before):len(after)])
                n = self._answer_length(answer)
                parts += [(self._ids(whole[end:len(before)]), False), (answer[:n], True), (answer[n:], False)]
                end = len(after)
        if not parts:
            raise DataError('the chat template writes no answer behind the prompt that it makes for one')
        if not np.isin(parts[-2][0][-1:], self.tokenizer.stops).any():
            parts.insert(-1, (np.array([self.tokenizer.eot]), True))
        return [*parts, (self._ids(whole[end:]), False)]

    def _ids(self, text):
        return self.tokenizer.encode(text, special=True).astype(int)

    def _answer_length(self, ids):
        """Ids up to the one that ends the answer; what a template writes behind it is no target."""
        ends = np.flatnonzero(np.isin(ids, self.tokenizer.stops))
        return ends[-1] + 1 if len(ends) else len(ids)


def _utf8(text):
    return text.encode('utf-8', 'replace')


def chat_renderer(template, special_tokens, began):
    """render(messages, prompt=False) -> text, of a chat template in jinja2's sandbox, with what transformers
    gives it. prompt: with the header of an answer at the end. Raises DataError where the template is not
    one, or refuses the messages."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message):
        raise TemplateError(message)

    def strftime_now(form):
        return datetime.datetime.fromtimestamp(began).strftime(form)

    def tojson(value, indent=None):  # jinja's own escapes HTML
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=['jinja2.ext.loopcontrols'])
    environment.filters['tojson'] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)

    def render(messages, prompt=False):
        try:
            return environment.from_string(template).render(
                messages=messages, tools=None, documents=None, add_generation_prompt=prompt, **special_tokens)
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(f'the chat template cannot write a conversation: {error}') from None

    return render


# ------------------------------------------------------------------------------- before a run

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def is_pretrained(init_from):
    """Whether that is a Hugging Face model: a folder, or org/name on the hub, and no checkpoint."""
    on_the_hub = init_from.count('/') == 1 and not init_from.endswith('.pt') and not os.path.exists(init_from)
    return os.path.isdir(init_from) or on_the_hub


def ready(script, config):
    """The settings of a training script's run; one that starts from a Hugging Face model takes, where its
    user names none, the config file for that model and the model's tokenizer, and has its examples prepared.
    Each is said. A run that is resumed has them all. Raises what configure does; ends the process where
    preparing fails."""
    if not is_pretrained(config['init_from']) or config['resume'] not in ('', 'auto'):
        return config
    files, flags = config.layers
    if not files:
        path = config_for(config['init_from'], config['lora_rank'])
        _say(f'settings  {os.path.relpath(path)}, as no config file is named')
        config = configure(script, [path, *sys.argv[1:]])
    if 'tokenizer' not in config.given:
        config['tokenizer'] = config['init_from']
        config.given.add('tokenizer')
    prepare_examples(config)
    return config


def config_for(init_from, lora_rank):
    """The path of the file in config/ that fine-tunes this model, whole or by adapters, or of the one for
    any."""
    for path in sorted(glob.glob(os.path.join(HERE, 'config', 'finetune_*.py'))):
        settings = config_values(path)
        if settings['init_from'] == init_from and bool(settings.get('lora_rank')) == bool(lora_rank):
            return path
    return os.path.join(HERE, 'config', 'finetune.py')


def prepare_examples(config):
    """Runs prepare_data.py for a dataset of examples that is not there; one process on each machine does, the
    others wait."""
    names = 'dataset', 'tokenizer', 'split_name', 'data_dir'
    dataset, tokenizer, split, root = (config[name] for name in names)
    if not shards.DATASETS.get(shards.dataset_name(dataset), {}).get('splits'):
        return
    folder = shards.dataset_dir(root, dataset, tokenizer, split)
    if _is_prepared(folder, tokenizer):
        return
    words = [dataset, f'--tokenizer={tokenizer}', f'--split_name={split}', f'--data_dir={root}']
    if int(os.environ.get('LOCAL_RANK', 0)):
        print(f'rank {os.environ["RANK"]} waits for {folder}', flush=True)
        while not _is_prepared(folder, tokenizer):
            time.sleep(1)
        return
    command = shlex.join(['python', 'prepare_data.py', *words])
    print(f'data      {folder} is not prepared yet; `{command}`:', flush=True)
    done = subprocess.run([sys.executable, os.path.join(HERE, 'prepare_data.py'), *words])
    if done.returncode:
        raise SystemExit(done.returncode)


def _is_prepared(folder, tokenizer):
    try:
        return bool(shards.read_meta(folder, tokenizer))
    except MissingError:
        return False


def _say(line):
    if int(os.environ.get('RANK', 0)) == 0:
        print(line, flush=True)
