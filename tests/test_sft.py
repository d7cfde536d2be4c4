"""Examples to fine-tune on: templates and masks, against transformers; prepare_data.py on prompts, chats."""
import io
import itertools
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fp8gpt import sft
from configurator import DataError, SettingError
from conftest import in_ranks, losses, run
from damage import REFUSED_TEMPLATES
from fp8gpt.data import TokenData
from preparing import forms, meta, prepare_here, refused_here, written
from fp8gpt.shards import START, TARGET, check, read_shard
from fp8gpt.tokenizer import ByteTokenizer, get_tokenizer
from tokenizers_made import BEGIN, CHATML, END, make_tokenizer

CHAT = [
    {'role': 'system', 'content': 'Be brief.'},
    {'role': 'user', 'content': 'What is 2 + 2?'},
    {'role': 'assistant', 'content': 'It is 4.'},
    {'role': 'user', 'content': 'And in words, größe?\n'},
    {'role': 'assistant', 'content': 'Four, \U0001f642.'}]
# as Llama 3's is laid out: BOS, headers, what is said without the space around it, the date
HEADERS = (
    "{{- bos_token }}{%- set today = strftime_now('%d %b %Y') %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}{{- raise_exception('no tools here') }}{%- endif %}"
    "{{- '<|turn|>' + message['role'] + ' ' + today + '\\n\\n' }}"
    "{{- message['content'] | trim + '<|end_of_turn|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|turn|>assistant ' + today + '\\n\\n' }}{%- endif %}")
BEGAN = 1_700_000_000


def example(tokenizer, template, messages):
    """(ids, mask) as lists."""
    tokens, *_ = sft.Examples(tokenizer, template, BEGAN).document(messages)
    return tokens[:, 0].tolist(), tokens[:, 1].tolist()


# ------------------------------------------------------------------------------- templates and masks

def test_a_plain_example_bit_for_bit(chat_folder):
    ids, mask = example(ByteTokenizer(), sft.PLAIN, sft.pair('2 + 2?', '4.'))
    assert ids == [256, *b'Question:\n2 + 2?\n\nAnswer:\n', *b'4.', 256]
    assert mask == [START, *[0] * 26, TARGET, TARGET, TARGET]
    ids, mask = example(get_tokenizer(chat_folder), sft.PLAIN, sft.pair('<|end|>', 'a<|end|>b'))
    assert (ids[0], ids.index(END), mask[-1]) == (BEGIN, len(ids) - 1, TARGET)  # a text has no special tokens


def test_chats_have_transformers_ids_and_targets(chat_folder, monkeypatch):
    """Its own way to tell the assistant's tokens is a mark in the template, which other templates lack."""
    from transformers import AutoTokenizer
    from transformers.utils import chat_template_utils
    real = chat_template_utils.datetime

    class Then(real):
        @classmethod
        def now(cls):
            return real.fromtimestamp(BEGAN)
    monkeypatch.setattr(chat_template_utils, 'datetime', Then)
    theirs, ours = AutoTokenizer.from_pretrained(chat_folder), get_tokenizer(chat_folder)
    for template, messages in itertools.product(
        (CHATML, HEADERS), (CHAT, CHAT[1:3], CHAT[:4], sft.pair('a', 'b'))
    ):
        wanted = theirs.apply_chat_template(messages, chat_template=template, return_dict=False)
        assert example(ours, template, messages)[0] == wanted
    said = "{{ message['content'] + '<|end_of_turn|>' }}"
    marked = (
        "{% for message in messages %}{{ '<|turn|>' + message['role'] + '\\n' }}"
        "{% if message['role'] == 'assistant' %}{% generation %}" + said + "{% endgeneration %}"
        "{% else %}" + said + "{% endif %}{{ '\\n' }}{% endfor %}")
    wanted = theirs.apply_chat_template(
        CHAT, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = example(ours, CHATML, CHAT)
    assert ids == wanted['input_ids']
    assert [bits & TARGET for bits in mask] == wanted['assistant_masks']
    assert [i for i, bits in enumerate(mask) if bits & START] == [0]


def test_a_turn_that_is_written_otherwise_later_is_no_target(chat_folder):
    """As Qwen3's, which loses its reasoning once another follows."""
    forgetful = CHATML.replace(
        "message['content']",
        "(message['content'][:2] if message.role == 'assistant' and not loop.last else message['content'])")
    tokenizer = get_tokenizer(chat_folder)
    ids, mask = example(tokenizer, forgetful, CHAT)
    said = tokenizer.decode([token for token, bits in zip(ids, mask) if bits & TARGET])
    assert said == CHAT[-1]['content']
    made = sft.Examples(tokenizer, forgetful, BEGAN)
    assert made.document(CHAT)[2]['bytes'] == len(said.encode())     # bits per byte are of the targets alone
    assert made.rewrites_answers() and not sft.Examples(tokenizer, CHATML, BEGAN).rewrites_answers()
    bare = CHATML.replace("+ '<|end_of_turn|>\\n'", "+ '\\n'")     # no stop ends an answer: it gets the EOT
    ids, mask = example(get_tokenizer(chat_folder), bare, CHAT[1:3])
    assert (ids[-1], mask[-1]) == (END, TARGET)


def test_a_long_chat_is_rendered_in_linear_time_with_the_same_targets(chat_folder, monkeypatch):
    rendered, real = [], sft.chat_renderer

    def counted(*given):
        render = real(*given)
        return lambda some, *prompt: rendered.append(len(some)) or render(some, *prompt)
    monkeypatch.setattr(sft, 'chat_renderer', counted)
    alternating = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ bos_token if loop.first }}{{ '[' ~ m.content ~ ']' if m.role == 'user' else m.content }}"
        "{% endfor %}")
    numbered = CHATML.replace("message['content']", "(loop.index ~ message['content'])")
    chat = [message for i in range(60) for message in sft.pair(f'{i}?', f' {i}!\n')]
    for template, messages, is_linear in (
        (CHATML, [CHAT[0], *chat, chat[0]], True), (HEADERS, [CHAT[0], *chat], True),
        (alternating, chat, True), (numbered, chat, False),
    ):
        found = []
        for many in (10**9, 0):
            monkeypatch.setattr(sft, 'MANY', many)
            rendered.clear()
            found.append(example(get_tokenizer(chat_folder), template, messages))
        assert found[0] == found[1]
        assert (sum(rendered) < 12 * len(messages)) == is_linear


def test_a_template_that_reaches_out_or_fails_is_one_line(chat_folder, monkeypatch):
    monkeypatch.setattr(sft, 'CHARACTERS', 10**5)
    for template, said in REFUSED_TEMPLATES.items():
        monkeypatch.setattr(sft, 'SECONDS', 1 if 'more than 1 s' in said else 100)  # on a slow machine, too
        with pytest.raises(DataError, match=said):
            example(get_tokenizer(chat_folder), template, CHAT)


# ------------------------------------------------------------------------------- prepare_data.py

def stored(folder, split):
    """[(ids, mask)] of each example, by the definition of the format."""
    found = []
    for path in sorted(folder.glob(f'{split}_??????.bin')):
        ids, mask = read_shard(path), read_shard(path.with_name(f'{path.stem}_mask.bin'))
        starts = np.flatnonzero(mask & START)[1:]
        found += zip(np.split(ids, starts), np.split(mask, starts))
    return found


def test_prompts_and_completions_are_prepared(tmp_path):
    """Each prompt has two answers. A split that users know as held out is that of the usual split."""
    rows = [{'problem': f'Problem {i}, größe', 'generated_solution': f'answer {k} to {i}'}
            for k in range(2) for i in range(60)]
    path, tokenizer, prompts = written(tmp_path / 'a.jsonl', rows), ByteTokenizer(), {}
    said = prepare_here('nvidia/OpenMathInstruct-2', f'--data_files={path}', '--tokenizer=byte',
                        '--val_fraction=0.2', '--shard_tokens=2000', '--split_name=validation',
                        f'--data_dir={tmp_path}')
    assert "has no split 'validation': the part of train_1M that is held out replaces it" in said
    folder = tmp_path / 'openmathinstruct2-train_1M-byte'
    wanted = {sft.PLAIN.format(prompt=row['problem'], completion=row['generated_solution']): row
              for row in rows}
    check(str(folder))
    for split in ('train', 'val'):
        texts = [tokenizer.decode(ids.tolist()) for ids, _ in stored(folder, split)]
        assert texts == [text for text in wanted if text in set(texts)]  # in file order
        prompts[split] = [wanted[text]['problem'] for text in texts]
        answers = [wanted[text]['generated_solution'].encode() for text in texts]
        for (ids, mask), answer in zip(stored(folder, split), answers):
            assert ids[mask & TARGET != 0].tolist() == [*answer, 256]
        counts, n_bytes = meta(folder)['splits'][split], sum(map(len, answers))
        assert (counts['targets'], counts['bytes']) == (n_bytes + len(answers), n_bytes)
        assert f'{counts["targets"]:,} targets' in said
    assert not set(prompts['train']) & set(prompts['val'])
    assert len(prompts['train'] + prompts['val']) == len(rows)
    assert meta(folder)['template'] == sft.PLAIN


def test_the_forms_that_people_have_make_the_same_examples(tmp_path, chat_folder):
    """Known by their columns, even beside a text where a template is asked for; else a text beside them is
    text, and so is a typed column."""
    words = f'--tokenizer={chat_folder}', '--template=chat', '--num_workers=1', '--overwrite'
    for (name, rows), kind in itertools.product(forms(30).items(), ('jsonl', 'json', 'parquet')):
        path, folder = written(tmp_path / f'{name}.{kind}', rows), tmp_path / f'{name}-talker'
        prepare_here(name, f'--data_files={path}', *words, f'--data_dir={tmp_path}')
        tokenizer = get_tokenizer(meta(folder)['tokenizer'], str(folder))
        found = [ids.tolist() for split in ('train', 'val') for ids, _ in stored(folder, split)]
        wanted = [sft.pair(f'Add {i}\n\nto {i}.', f'{2 * i}') for i in range(30)]
        assert sorted(found) == sorted(example(tokenizer, CHATML, chat)[0] for chat in wanted)
    for name, typed in (('typed', ['--text_column=instruction']), ('beside', [])):
        words = f'--data_files={tmp_path}/alpaca.json', '--tokenizer=byte', f'--data_dir={tmp_path}'
        prepare_here(name, *words, *typed)
        assert not meta(tmp_path / f'{name}-byte')['template']


def test_rows_without_an_answer_are_counted_and_other_rows_named(tmp_path):
    refusing = "{% if 'no' in messages[0].content %}{{ raise_exception('not this') }}{% endif %}"
    chat = f'--tokenizer={make_tokenizer(tmp_path / "talker", chat_template=refusing + CHATML)}'
    path, good = tmp_path / 'a.jsonl', [{'messages': sft.pair(f'{i}?', 'yes')} for i in range(9)]
    words = f'--data_files={path}', chat, f'--data_dir={tmp_path}', '--template=chat', '--num_workers=1'
    mute = [{'messages': sft.pair(f'{i}?', answer)} for i in range(7) for answer in ('', None)]
    mute += [{'messages': [{'role': 'user', 'content': 'x'}, {'role': 'tool', 'content': 'y'}]}] * 7
    said = '21 rows are left out, which have no text'
    written(path, good + mute)
    assert said in prepare_here('mine', *words)
    written(path, mute)
    assert said in refused_here('none', *words)[1]
    unknown = f': it has no texts, or none of the messages of: {sft.FORMS}'
    for row, message in (
        ({'question': 'a'}, ": no 'messages', but question"),
        ({'messages': sft.pair('no', 'x')}, ': the chat template cannot write a conversation: not this'),
        ({'messages': 'hello'}, unknown),
        ({'messages': [{'role': 'user', 'content': None}]}, ': one of its messages has no content; tool'),
        ({'messages': [1]}, unknown),
        ({'messages': [*sft.pair('a', 'b'), {'role': 'bot', 'content': ''}]}, ": 'bot' is no role; those"),
        ({'conversations': [{'from': 'chatgpt', 'value': 'y'}]}, ": no 'messages', but conversations"),
    ):
        written(path, [*good[:3], row])
        assert f'{path}, row 4{message}' in refused_here('mixed', *words)[1]
    written(path, [{'question': 'a', 'reply': 'b'}])
    code, said = refused_here('other', *words)
    assert code == 2 and "no column 'text', but question, reply: " in said and sft.FORMS in said


def test_show_marks_the_targets_and_escapes_what_a_terminal_obeys(tmp_path, chat_folder):
    rows = [{'messages': sft.pair(f'\x1b[2J{i}?', 'y\u00e9s')} for i in range(30)]
    path = written(tmp_path / 'a.jsonl', rows)
    words = f'--data_files={path}', f'--data_dir={tmp_path}', '--num_workers=1', '--show=2'
    for tokenizer, name, form in (
            (chat_folder, f'the chat template of {chat_folder}',
             '<|turn|>user\n\\x1b[2J{}?<|end_of_turn|>\n<|turn|>assistant\n>>>y\u00e9s<|end_of_turn|><<<\n\n'),
            ('byte', 'Question:, Answer:', 'Question:\n\\x1b[2J{}?\n\nAnswer:\n>>>y\u00e9s<<<\n')):
        if tokenizer == 'byte':
            written(path, [{'prompt': f'\x1b[2J{i}?', 'completion': 'y\u00e9s'} for i in range(30)])
        said = prepare_here('mine', *words, f'--tokenizer={tokenizer}')
        first, second = re.findall(r'2J(\d+)\?', said)
        assert f', by {name}\n--- 1\n{form.format(first)}--- 2\n{form.format(second)}{tmp_path}' in said


# ------------------------------------------------------------------------------- training on it

def test_one_process_of_each_machine_prepares_examples(tmp_path, monkeypatch):
    """Ranks 8 and 9 are the second machine's: 8 prepares, and 9 waits for it."""
    done, ready, commands = SimpleNamespace(returncode=0), [], []
    monkeypatch.setattr(sft, '_is_prepared', lambda *folder: bool(ready))
    monkeypatch.setattr(sft.time, 'sleep', ready.append)
    monkeypatch.setattr(sft.subprocess, 'run', lambda words: commands.append(words) or done)
    for rank, local_rank, expected in (8, 0, (1, 0)), (9, 1, (1, 1)):
        monkeypatch.setenv('RANK', str(rank))
        monkeypatch.setenv('LOCAL_RANK', str(local_rank))
        sft.prepare_examples({'dataset': 'openmathinstruct2', 'tokenizer': 'byte', 'split_name': 'train_1M',
                              'data_dir': str(tmp_path)})
        assert (len(commands), len(ready)) == expected
    monkeypatch.setenv('LOCAL_RANK', '0')
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'rows').mkdir()
    path, config = 'rows/mine.jsonl', {'tokenizer': 'byte', 'split_name': '', 'data_dir': str(tmp_path)}
    (tmp_path / path).touch()
    for number in (1, 2):       # each time, since the file may have changed
        sft.prepare_examples({**config, 'dataset': path})
        assert commands[number][2:] == [
            'mine', '--tokenizer=byte', f'--data_dir={tmp_path}', f'--data_files={path}']
    for name in ('hellaswag.jsonl', 'a,b.jsonl', '*.jsonl'):
        with pytest.raises(SettingError, match='rename the file'):
            sft.prepare_examples({**config, 'dataset': name})


MODEL = ['--n_layer=1', '--n_head=2', '--n_embd=32', '--block_size=64', '--batch_size=2', '--max_steps=8',
         '--warmup_steps=2', '--eval_tokens=512', '--log_freq=1', '--eval_freq=1000', '--checkpoint_freq=4',
         '--keep_checkpoints=0', '--dtype=fp32']


@pytest.fixture(scope='module')
def trained(tmp_path_factory, chat_folder):
    """(flags of a run on chats, its folder, what it said)."""
    root = tmp_path_factory.mktemp('trained')
    rows = [{'messages': [*CHAT[:i % 3], *sft.pair(f'{i} + 1', f'{i + 1}')]} for i in range(150)]
    written(root / 'a.jsonl', rows)      # two thirds with a system message
    prepare_here('mine', f'--data_files={root}/a.jsonl', f'--tokenizer={chat_folder}', '--val_fraction=0.1',
              f'--data_dir={root}')
    words = ['train.py', *MODEL, '--init_from=scratch', '--dataset=mine', f'--tokenizer={chat_folder}',
             f'--data_dir={root}']
    return words, root, run(*words, f'--checkpoint_dir={root}/one').stdout


def test_ranks_and_resumes_make_the_same_steps(trained):
    """A resume does not need init_from again, though examples need a model to start from."""
    words, root, said = trained
    packing = TokenData(f'{root}/mine-talker', 'train', 64).packing
    steps = -(-len(packing.targets) // 2)
    assert (f'packed    {len(packing.lengths)} examples in {len(packing.targets)} windows, '
            f'{packing.padding:.1%} of them padding; {steps} steps an epoch') in said
    again = [word for word in words if 'init_from' not in word]
    run(*again, f'--checkpoint_dir={root}/resumed', f'--resume={root}/one/step_000004.pt')
    assert losses(root / 'resumed') == losses(root / 'one', after=4)
    in_ranks(2, *words, '--batch_size=1', f'--checkpoint_dir={root}/two')
    assert losses(root / 'two') == pytest.approx(losses(root / 'one'), rel=1e-4)


@pytest.mark.slow
def test_a_file_of_rows_trains_a_checkpoint_and_a_new_model(trained, tmp_path):
    """A checkpoint's tokenizer lies beside it."""
    words, root, _ = trained
    path = written(tmp_path / 'pairs.jsonl', forms(200)['pairs'])
    more = [f'--data_dir={tmp_path}', f'--checkpoint_dir={tmp_path}/c', '--max_steps=2', '--warmup_steps=1']
    for words in (['--init_from', root / 'one', f'--dataset={root}/a.jsonl'],
                  ['--init_from=scratch', '--tokenizer=byte', f'--dataset={path}', *MODEL, '--overwrite']):
        assert 'latest.pt is step 2' in run('train.py', *words, *more, '--dtype=fp32').stdout
        goes_on = run('train.py', *words, *more, '--resume=auto', '--max_steps=3').stdout
        assert 'latest.pt is step 3' in goes_on
    assert (tmp_path / 'a-one').is_dir() and (tmp_path / 'pairs-byte').is_dir()


def test_a_chat_begins_with_the_training_chats_system_message(trained, here, monkeypatch, chat_folder):
    """The most frequent one, unless the user types another or none; rendered as transformers does."""
    from transformers import AutoTokenizer
    theirs, (_, root, _) = AutoTokenizer.from_pretrained(chat_folder), trained
    turn, line = {'role': 'user', 'content': '1 + 1'}, '# --system=\'Be brief.\': the most frequent'
    for asked, messages in ([], [CHAT[0], turn]), (['--system='], [turn]), (['--system=a'], [
            {'role': 'system', 'content': 'a'}, turn]):
        ids = []
        monkeypatch.setattr('model.generate', lambda _, idx, *__, **___: ids.append(idx.tolist()) or iter(()))
        monkeypatch.setattr(sys, 'stdin', io.StringIO())
        said = here('sample.py', f'--ckpt={root}/one', '--chat', '--prompt=1 + 1', *asked)
        assert ids == [[theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)]]
        assert (line in said) == (not asked)
