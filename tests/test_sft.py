"""Examples to fine-tune on: templates and masks, against transformers; prepare_data.py on prompts, chats."""
import io
import itertools
import json
import os
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import transformers

import prepare_data
from fp8gpt import sft
from configurator import DataError, MissingError, SettingError
from conftest import TINY, in_ranks, losses, run, write_tiny_data
from damage import REFUSED_TEMPLATES
from fp8gpt.data import TokenData
from helpers import opened
from preparing import forms, meta, prepare, prepare_here, refused_here, written
from fp8gpt.shards import START, TARGET, check, read_shard
from fp8gpt.tokenizer import ByteTokenizer, get_tokenizer
from tokenizers_made import BEGIN, CHATML, END, END_OF_TURN, make_tokenizer

CHAT = [
    {'role': 'system', 'content': 'Be brief.'},
    {'role': 'user', 'content': 'What is 2 + 2?'},
    {'role': 'assistant', 'content': 'It is 4.'},
    {'role': 'user', 'content': 'And in words, größe?\n'},
    {'role': 'assistant', 'content': 'Four, \U0001f642.'}]
def turns(said, before='', header="{{ '<|turn|>' + ROLE + '\\n' }}"):
    """A template that writes `said`, which is Jinja for a message m, between a header and <|end_of_turn|>."""
    return (f"{before}{{% for m in messages %}}{header.replace('ROLE', 'm.role')}{said}"
            f"{{{{ '<|end_of_turn|>\\n' }}}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{header.replace('ROLE', repr('assistant'))}{{% endif %}}")


LAYOUTS = {     # as models' makers have them: a chat template
    'qwen2.5': turns(
        '{{ m.content }}',
        before="{% if messages[0].role != 'system' %}{{ '<|turn|>system\\nHelp.<|end_of_turn|>\\n' }}"
               "{% endif %}"),
    'llama3': turns(
        '{{ m.content | trim }}',
        before="{{ bos_token }}{% set today = strftime_now('%d %b %Y') %}",
        header="{{ '<|turn|>' + ROLE + ' ' + today + '\\n\\n' }}"),
    # it writes the thoughts of the last answer alone, and empty ones where that has none
    'qwen3': turns(
        "{% set parts = m.content.split('</think>') %}{% if m.role == 'assistant' and loop.last %}"
        "{{ '<think>\\n' + (parts[0].split('<think>')[-1].strip('\\n') if parts | length > 1 else '') }}"
        "{{ '\\n</think>\\n\\n' }}{% endif %}{{ parts[-1].lstrip('\\n') }}"),
    # its prompt opens a thought, and no answer in the text has one
    'r1': turns("{{ m.content.split('</think>')[-1] }}").replace(
        "'assistant' + '\\n'", "'assistant' + '\\n<think>\\n'"),
    'generation': turns(
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}"),
    # the system message stands in the last turn of the user, and roles alternate
    'mistral': (
        "{% set chat = messages %}"
        "{% if messages[0].role == 'system' %}{% set chat = messages[1:] %}{% endif %}"
        "{{ bos_token }}{% for m in chat %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}{{ '[INST] ' }}"
        "{% if loop.revindex <= 2 and chat != messages %}{{ messages[0].content + '\\n\\n' }}{% endif %}"
        "{{ m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"),
}
THOUGHT = '<think>\nLet me see.\n</think>\n\n'
CHATS = {
    'one': CHAT[1:3],
    'three': [*CHAT[1:], *sft.pair('And 3?', ' Three.\n')],
    'system': CHAT,
    'first': [{'role': 'assistant', 'content': 'Welcome.'}, *CHAT[1:3]],
    'open': CHAT[:4],
    'two answers': [*CHAT[1:3], {'role': 'assistant', 'content': 'a'}],
    'two questions': [CHAT[1], *CHAT[1:3]],
    'thoughts': [*sft.pair('a?', THOUGHT + 'a'), *sft.pair('b?', THOUGHT + 'b')],
    'empty': [*sft.pair('a?', ''), *sft.pair('b?', 'b')],
    'separators': sft.pair('a\u2028b', 'c\u2028d'),
    'same words': sft.pair('assistant', 'assistant'),
    'special': sft.pair('a<|end_of_turn|>\n<|turn|>assistant\nb', 'c'),
    'weights': [*sft.pair('a?', 'bad'), *sft.pair('b?', 'good')],
    'parts of a mark': [*sft.pair('end', 'of'), *sft.pair('turn', 'end')],
}
CHATS['weights'][1]['weight'] = 0
BEGAN = 1_700_000_000
ANSWERS = {     # of layout and chat: the targets, without stops, where they are not the answers as they are
    ('llama3', 'three'): ['It is 4.', 'Four, \U0001f642.', 'Three.'],
    ('qwen3', 'thoughts'): [THOUGHT + 'b'],
    ('r1', 'thoughts'): ['a', 'b'],
}
REFUSED = {('mistral', name): 'roles must alternate' for name in ('first', 'two answers', 'two questions')}


def example(tokenizer, template, messages):
    """(ids, mask) as lists."""
    tokens, *_ = sft.Examples(tokenizer, template, BEGAN).document(messages)
    return tokens[:, 0].tolist(), tokens[:, 1].tolist()


def targets(tokenizer, ids, mask):
    """The text of each run of targets."""
    runs = itertools.groupby(zip(ids, mask), lambda pair: pair[1] & TARGET)
    return [tokenizer.decode([token for token, _ in run], special=True)
            for is_target, run in runs if is_target]


# ------------------------------------------------------------------------------- templates and masks

def test_a_plain_example_bit_for_bit(chat_folder):
    ids, mask = example(ByteTokenizer(), sft.PLAIN, sft.pair('2 + 2?', '4.'))
    assert ids == [256, *b'Question:\n2 + 2?\n\nAnswer:\n', *b'4.', 256]
    assert mask == [START, *[0] * 26, TARGET, TARGET, TARGET]
    ids, mask = example(get_tokenizer(chat_folder), sft.PLAIN, sft.pair('<|end|>', 'a<|end|>b'))
    assert (ids[0], ids.index(END), mask[-1]) == (BEGIN, len(ids) - 1, TARGET)  # a text has no special tokens
    ids, mask = example(ByteTokenizer(), sft.PLAIN, [CHAT[0], *sft.pair('c', 'd')])
    assert bytes(ids[1:-1]).decode() == 'Be brief.\n\nQuestion:\nc\n\nAnswer:\nd'
    assert sum(bits & TARGET for bits in mask) == 2


@pytest.mark.parametrize('prepends', [False, True])
@pytest.mark.parametrize('layout', LAYOUTS)
def test_chats_have_transformers_ids_and_the_answers_as_targets(tmp_path, monkeypatch, layout, prepends):
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import chat_template_utils
    real = chat_template_utils.datetime

    class Then(real):
        @classmethod
        def now(cls):
            return real.fromtimestamp(BEGAN)
    monkeypatch.setattr(chat_template_utils, 'datetime', Then)
    folder = make_tokenizer(tmp_path / 'made', prepends=prepends, chat_template=LAYOUTS[layout])
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(folder), get_tokenizer(folder)
    for name, chat in CHATS.items():
        if why := REFUSED.get((layout, name)):
            with pytest.raises(DataError, match=why):
                example(ours, LAYOUTS[layout], chat)
            continue
        ids, mask = example(ours, LAYOUTS[layout], chat)
        words = sft.Examples(ours, LAYOUTS[layout], BEGAN).document(chat)[2]['text']
        # this one's byte tokens are special, which no model's are
        assert prepends or prepare_data.lost_characters(words, ours.decode(ids))[0] == 0
        if name != 'special':
            assert ids == theirs.apply_chat_template(chat, return_dict=False)
        elif not prepends:      # else each part of it begins with a space
            assert ids == theirs.apply_chat_template(chat, return_dict=False, sanitize_control_tokens=True)
        said = [each['content'] for each in chat if each['role'] == 'assistant' and each.get('weight') != 0]
        said = ANSWERS.get((layout, name), [*filter(None, said)])
        if layout == 'qwen3' and name not in ('thoughts', 'open'):     # the others have no empty thought
            said = ['<think>\n\n</think>\n\n' + said[-1]]
        stop = '<|end|>' if layout == 'mistral' else '<|end_of_turn|>'
        found = [text.strip(' \n') for text in targets(ours, ids, mask)]
        assert found == [text.lstrip(' ') + stop for text in said]


def test_a_thought_between_special_tokens_is_learned(tmp_path):
    tags = ['<think>', '</think>']
    folder = make_tokenizer(tmp_path / 'made', chat_template=LAYOUTS['qwen3'], additional_special_tokens=tags)
    ids, mask = example(get_tokenizer(folder), LAYOUTS['qwen3'], CHATS['thoughts'])
    assert targets(get_tokenizer(folder), ids, mask) == [THOUGHT + 'b<|end_of_turn|>']
    apart = CHATML.replace("message['content']", "message['content'].split('<|turn|>')[0]")
    with pytest.raises(DataError, match='takes .* apart'):
        example(get_tokenizer(folder), apart, sft.pair('a <|turn|> b', 'c'))


def test_a_header_is_no_target_though_its_token_takes_the_blanks_behind_it(tmp_path):
    """Phi-3's <|assistant|> does: the blanks of its header and those that an answer begins with."""
    template = turns('{{ m.content }}', header="{{ '<|' + ROLE + '|>\\n' }}")
    folder = make_tokenizer(tmp_path, chat_template=template)
    made = json.loads((tmp_path / 'tokenizer.json').read_text())
    first, added = len(made['model']['vocab']), made['added_tokens']
    for i, text in enumerate(('<|user|>', '<|assistant|>'), start=first):
        added.append({**added[0], 'id': i, 'content': text, 'rstrip': True})
    (tmp_path / 'tokenizer.json').write_text(json.dumps(made))
    tokenizer, theirs = get_tokenizer(folder), transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    for chat in sft.pair('a', ' \n b'), sft.pair('a', 'b'), [*sft.pair('a', ' b \n'), *sft.pair('c', '\td')]:
        ids, mask = example(tokenizer, template, chat)
        assert ids == theirs.apply_chat_template(chat, return_dict=False)
        assert targets(tokenizer, ids, mask) == [
            each['content'].lstrip() + '<|end_of_turn|>' for each in chat if each['role'] == 'assistant']


def test_what_a_template_marks_in_parts_is_what_transformers_marks(tmp_path):
    mark = '{{% generation %}}{{{{ {} }}}}{{% endgeneration %}}'.format
    template = turns(
        "{% if m.role == 'assistant' %}{% if m.reasoning_content %}" + mark("m.reasoning_content + '|'")
        + '{% endif %}' + mark('m.content') + '{% else %}{{ m.content }}{% endif %}')
    folder = make_tokenizer(tmp_path, chat_template=template)
    tokenizer, theirs = get_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for chat in [CHAT[1], {**CHAT[2], 'reasoning_content': 'Let me see.'}], CHAT:
        both = theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = example(tokenizer, template, chat)
        assert ids == both['input_ids']
        marked = both['assistant_masks']
        stops = [i == END_OF_TURN and before for i, before in zip(ids, [0, *marked])]
        assert [bool(bits & TARGET) for bits in mask] == [bool(pair) for pair in map(sum, zip(marked, stops))]


def test_the_text_of_a_special_token_is_text_in_a_message(tmp_path):
    """As transformers sanitizes it; it counts as the bytes of an answer."""
    said = 'a<|end_of_turn|>\n<|turn|>user\nb'
    folder = make_tokenizer(tmp_path, chat_template=CHATML)
    tokenizer, theirs = get_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    chat = [{'role': 'system', 'content': said}, *sft.pair(said, said + 'c')]
    rows, _, counts, _ = sft.Examples(tokenizer, CHATML, BEGAN).document(chat)
    ids, mask = rows.T.tolist()
    assert ids == theirs.apply_chat_template(chat, return_dict=False, sanitize_control_tokens=True)
    assert targets(tokenizer, ids, mask) == [said + 'c<|end_of_turn|>']
    assert counts['bytes'] == len(said) + 1


def test_of_named_templates_default_writes_a_chat(tmp_path):
    """As in transformers; from tokenizer_config.json, and from the files that transformers saves it in."""
    named = {'default': '\n ' + CHATML + ' \n\n', 'rag': 'x', 'tool_use': '{{ tools }}'}
    folder = make_tokenizer(tmp_path / 'made', chat_template=[
        {'name': name, 'template': text} for name, text in named.items()])
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    theirs.save_pretrained(tmp_path / 'saved')
    assert (tmp_path / 'saved/additional_chat_templates/tool_use.jinja').exists()
    get_tokenizer(str(tmp_path / 'saved')).save(str(tmp_path / 'kept'))
    for place in folder, tmp_path / 'saved', tmp_path / 'kept':
        tokenizer = get_tokenizer(str(place))
        made = sft.Examples(tokenizer, tokenizer.chat_template, BEGAN)
        assert transformers.AutoTokenizer.from_pretrained(place).chat_template == theirs.chat_template
        ids, mask = made.document(CHAT)[0].T.tolist()
        assert ids == theirs.apply_chat_template(CHAT, return_dict=False)
        assert targets(tokenizer, ids, mask)[-1].endswith('.<|end_of_turn|>')
        ids = theirs.apply_chat_template(CHAT[:2], add_generation_prompt=True, return_dict=False)
        assert made.prompt(CHAT[:2]).tolist() == ids


def test_what_a_template_leaves_out_is_said(chat_folder):
    thought = [CHAT[1], {**CHAT[2], 'reasoning_content': 'Let me see.'}]
    mute = CHATML.replace('in messages', "in messages if message.role != 'system'")
    for template, messages, said in (
        (CHATML, CHAT, False),
        (CHATML, CHATS['thoughts'], False),
        (CHATML, thought, True),
        (CHATML.replace("+ '<|end", "+ (message.reasoning_content or '') + '<|end"), thought, False),
        (LAYOUTS['r1'], CHATS['thoughts'], True),
        (mute, CHAT, True),
    ):
        made = sft.Examples(get_tokenizer(chat_folder), template, BEGAN)
        assert made.document(messages)[2]['notes'][-1:] == [sft.UNWRITTEN] * said


def test_answers_begin_as_a_prompt_ends_and_all_alike(chat_folder):
    """A header and an answer's line ends may be one token; Qwen3's last answer alone has an empty thought."""
    tokenizer = get_tokenizer(chat_folder)
    made = sft.Examples(tokenizer, CHATML, BEGAN)
    (bare, _, _, _), (rows, _, counts, _) = (
        made.document(sft.pair('a', answer)) for answer in ('b', '\n\nb'))
    assert rows.tolist() == bare.tolist()
    assert counts['notes'] == []
    assert rows[:, 0].tolist()[:len(made.prompt(sft.pair('a', 'b')[:1]))] == made.prompt(
        sft.pair('a', 'b')[:1]).tolist()
    note = 'have answers that do not begin as the last one, with a thought or without, and are not learned'
    for chat, found in (CHAT, [note]), (CHAT[:3], []), (CHAT[:4], []):
        assert sft.Examples(tokenizer, LAYOUTS['qwen3'], BEGAN).document(chat)[2]['notes'] == found
    said = "{% if loop.last and m.role == 'assistant' %}{{ 'Final: ' }}{% endif %}{{ m.content }}"
    rows, _, counts, _ = sft.Examples(tokenizer, turns(said), BEGAN).document(CHAT)
    assert targets(tokenizer, *rows.T.tolist()) == ['Final: Four, \U0001f642.<|end_of_turn|>']
    assert counts['notes'] == [note]
    dated = turns('{{ m.content }}', header="{{ '<|turn|>' + ROLE + (' 1 May' if DATED else '') + '\\n' }}")
    head, tail = dated.split('{% if add')
    dated = head.replace('DATED', 'loop.last') + '{% if add' + tail.replace('DATED', 'true')
    assert targets(tokenizer, *example(tokenizer, dated, CHAT)) == [
        'It is 4.<|end_of_turn|>', 'Four, \U0001f642.<|end_of_turn|>']


def test_an_answer_without_a_stop_gets_the_end_of_text(chat_folder):
    bare = CHATML.replace("+ '<|end_of_turn|>\\n'", "+ '\\n'")
    ids, mask = example(get_tokenizer(chat_folder), bare, CHAT[1:3])
    assert (ids[-1], mask[-1]) == (END, TARGET)
    assert targets(get_tokenizer(chat_folder), ids, mask) == ['It is 4.\n<|end|>']
    words = '{% for m in messages %}{{ m.content }}{% endfor %}'
    ids, mask = example(get_tokenizer(chat_folder), words, [{'role': 'assistant', 'content': 'Welcome'}])
    assert mask == [START, *[TARGET] * (len(ids) - 1)]      # nothing of its own stands before the first
    once = bare.replace('{% if add', '{{ eos_token }}{% if add')       # one stop, at the end of the chat
    tokenizer, last = get_tokenizer(chat_folder), 'Four, \U0001f642.\n<|end|>'
    for template, chat, wanted, notes in (
            (once, CHAT[1:], ['It is 4.', last], [sft.ENDLESS]),
            (once, CHAT[1:4], ['It is 4.'], [sft.ENDLESS]),
            (bare, CHAT[1:], ['It is 4.', last], [sft.ENDLESS]), (bare, CHAT[3:], [last], [])):
        rows, _, counts, _ = sft.Examples(tokenizer, template, BEGAN).document(chat)
        assert targets(tokenizer, *rows.T.tolist()) == wanted
        assert counts['notes'] == notes     # one answer without a stop is enough


def test_an_end_of_turn_is_learned_as_a_token_or_its_lack_is_said(tmp_path):
    """<|im_end|> is an ordinary added token, as of add_tokens, or in no vocabulary. So is what begins a turn,
    and in a message both are text."""
    template = CHATML.replace('<|end_of_turn|>', '<|im_end|>').replace('<|turn|>', '<|im_start|>')
    folder = make_tokenizer(tmp_path, chat_template=template, words=['<|im_start|>', '<|im_end|>'])
    path = tmp_path / 'tokenizer.json'
    known = path.read_text()
    assert json.loads(known)['added_tokens'][-1]['special'] is False
    chat = [*sft.pair('a <|im_end|> <|im_start|>b', 'c'), *sft.pair('d', 'e')]
    tokenizer = get_tokenizer(folder)
    made = sft.Examples(tokenizer, template, BEGAN)
    rows, _, counts, _ = made.document(chat)
    assert targets(tokenizer, *rows.T.tolist()) == ['c<|im_end|>', 'e<|im_end|>']
    begin, end = map(tokenizer.library.token_to_id, ('<|im_start|>', '<|im_end|>'))
    assert [rows[:, 0].tolist().count(i) for i in (begin, end)] == [4, 4] and end in tokenizer.stops
    assert counts['notes'] == []
    path.write_text(known.replace('"<|im_end|>"', '"<|other|>"'))
    made = sft.Examples(get_tokenizer(folder), template, BEGAN)
    assert made.document(chat[2:])[2]['notes'] == [sft.ENDLESS]


def test_a_token_before_system_messages_alone_is_text_in_a_message(tmp_path):
    """Phi-3's and Zephyr's <|system|>, as a special token and as one of add_tokens."""
    template = turns('{{ m.content }}', header="{{ '<|' + ROLE + '|>\\n' }}")
    chat = [CHAT[0], *sft.pair('a <|system|> b', 'c <|system|> d')]
    tags = ['<|system|>', '<|user|>', '<|assistant|>']
    for place, kinds in ('words', {'words': tags}), ('special', {'additional_special_tokens': tags}):
        tokenizer = get_tokenizer(make_tokenizer(tmp_path / place, chat_template=template, **kinds))
        ids, mask = example(tokenizer, template, chat)
        assert ids.count(tokenizer.library.token_to_id('<|system|>')) == 1
        assert targets(tokenizer, ids, mask) == ['c <|system|> d<|end_of_turn|>']


def test_a_weight_says_what_is_learned_and_any_other_flag_refuses_the_row(chat_folder):
    made = sft.Examples(get_tokenizer(chat_folder), CHATML, BEGAN)
    chat = [*CHAT[1:4], {**CHAT[4], 'weight': 0}]
    rows, *_ = made.of_row({'messages': chat})
    assert targets(made.tokenizer, *rows.T.tolist()) == ['It is 4.<|end_of_turn|>']
    assert made.of_row({'messages': [CHAT[1], {**CHAT[2], 'weight': 0.0}]}) is None
    for name in sft.FLAGS:
        for row in ({'messages': [CHAT[1], {**CHAT[2], name: False}]}, {'messages': CHAT, name: 'true'}):
            with pytest.raises(DataError, match=f'it has {name}=.*: `weight` of a message, 0 or 1, says'):
                made.of_row(row)
        made.of_row({'messages': [CHAT[1], {**CHAT[2], name: None}], name: None})       # parquet's
    for weight in 0.5, '0', 2:
        with pytest.raises(DataError, match='which is neither 0 nor 1'):
            made.of_row({'messages': [CHAT[1], {**CHAT[2], 'weight': weight}]})


def test_rows_with_tools_or_calls_are_refused_by_name():
    call = [{'type': 'function', 'function': {'name': 'f', 'arguments': {}}}]
    for row in ({'messages': CHAT, 'tools': call}, {'messages': CHAT, 'tools': '[{"name": "f"}]'},
                {'messages': [CHAT[1], {**CHAT[2], 'tool_calls': call}]},
                {'messages': [CHAT[1], {'role': 'assistant', 'content': None, 'function_call': call[0]}]}):
        with pytest.raises(DataError, match='calls of tools are not learned here: write them into the text'):
            sft.conversation(row, ['messages'])
    for none in None, '', [], '[]', 'null':
        row = {'messages': [CHAT[1], {**CHAT[2], 'tool_calls': none}], 'tools': none}
        assert [each['content'] for each in sft.conversation(row, ['messages'])] == [
            CHAT[1]['content'], CHAT[2]['content']]
    with pytest.raises(DataError, match="'tool' is no role; those are system, user, assistant, human, gpt"):
        sft.conversation({'messages': [CHAT[1], {'role': 'tool', 'content': 'sunny'}]}, ['messages'])


def test_a_template_that_reaches_out_or_fails_is_one_line(chat_folder):
    for template, said in REFUSED_TEMPLATES.items():
        with pytest.raises(DataError, match=said):
            example(get_tokenizer(chat_folder), template, CHAT)


def test_the_forms_of_messages_say_the_same():
    """OpenAI's and ShareGPT's, pairs of texts; nulls are parquet's."""
    ask, answer = {'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}
    system, alpaca = {'role': 'system', 'content': 's'}, ['instruction', 'output']
    thought = {**answer, 'thinking': 'hm'}
    share = [{'from': 'human', 'value': 'a'}, {'from': 'gpt', 'value': 'b', 'weight': None}]
    full = {'instruction': 'a', 'output': 'b', 'input': 'x', 'system': 's'}
    for row, columns, wanted in (
        ({'messages': [ask, answer]}, ['messages'], [ask, answer]),
        ({'conversations': share}, ['conversations'], [ask, answer]),
        ({'conversations': share, 'system': 's'}, ['conversations'], [system, ask, answer]),
        ({'messages': [system, ask, answer], 'system': 's'}, ['messages'], [system, ask, answer]),
        ({'messages': [ask, thought]}, ['messages'], [ask, thought]),
        ({'prompt': 'a', 'completion': 'b'}, ['prompt', 'completion'], [ask, answer]),
        ({'question': 'a', 'answer': 'b'}, ['question', 'answer'], [ask, answer]),      # GSM8K's
        ({'problem': 'a', 'generated_solution': 'b'}, ['problem', 'generated_solution'], [ask, answer]),
        ({'instruction': 'a', 'output': 'b', 'input': None}, alpaca, [ask, answer]),
        (full, alpaca, [system, *sft.pair('a\n\nx', 'b')]),
        ({'prompt': 'a', 'completion': None}, ['prompt', 'completion'], sft.pair('a', '')),
    ):
        assert (sft.columns_of(row), sft.conversation(row, columns)) == (columns, wanted)
    for row, columns, why in (
        ({'messages': [system, ask, answer], 'system': 'another'}, ['messages'], 'system message differ'),
        (full | {'system': 1}, alpaca, '1 is no text'),
        ({'prompt': 'a', 'completion': 4}, ['prompt', 'completion'], '4 is no text'),
        ({'prompt': [ask], 'completion': [answer]}, ['prompt', 'completion'], 'is no text'),    # TRL's
        ({'messages': json.dumps(share)}, ['messages'], 'it has none of the messages of'),
        ({'conversations': ['a', 'b']}, ['conversations'], "'a' is none of the messages of"),
        ({'messages': [{'content': 'a'}]}, ['messages'], "'none' is no role"),
        ({'messages': [{'role': 'user', 'content': None}]}, ['messages'], 'its messages has no content'),
        ({'messages': [{'role': [], 'content': 'a'}]}, ['messages'], 'is no role'),
        ({'messages': [{'role': 'user', 'content': [{'type': 'image'}]}]}, ['messages'], 'is no text'),
    ):
        with pytest.raises(DataError, match=why):
            sft.conversation(row, columns)
    assert sft.columns_of(['query', 'response', 'text']) == ()


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
    folder = tmp_path / 'openmathinstruct2-train_1M-byte'
    wanted = {sft.PLAIN.format(prompt=row['problem'], completion=row['generated_solution']): row
              for row in rows}
    check(opened(folder))
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


def test_texts_that_answer_no_question_are_split_by_themselves(tmp_path):
    path = written(tmp_path / 'a.jsonl', [{'prompt': ' ', 'completion': f'tale {i % 30}'} for i in range(60)])
    prepare_here('mine', f'--data_files={path}', '--tokenizer=byte', '--val_fraction=0.3',
                 f'--data_dir={tmp_path}')
    train, val = ({ids.tobytes() for ids, _ in stored(tmp_path / 'mine-byte', split)}
                  for split in ('train', 'val'))
    assert len(train) + len(val) == 30 and len(val) > 2 and not train & val


def test_the_forms_that_people_have_make_the_same_examples(tmp_path, chat_folder):
    """Known by their columns, even beside a text where a template is asked for; else a text beside them is
    text, and so is a typed column."""
    words = f'--tokenizer={chat_folder}', '--template=chat', '--num_workers=1', '--overwrite'
    kinds = ('messages', 'jsonl'), ('messages', 'json'), *((name, 'parquet') for name in forms(1))
    for name, kind in (*kinds, ('alpaca', 'json')):
        path, folder = tmp_path / f'{name}.{kind}', tmp_path / f'{name}-talker'
        written(path, forms(30)[name])
        prepare_here(name, f'--data_files={path}', *words, f'--data_dir={tmp_path}')
        tokenizer = get_tokenizer(meta(folder)['tokenizer'], str(folder))
        found = [ids.tolist() for split in ('train', 'val') for ids, _ in stored(folder, split)]
        wanted = [sft.pair(f'Add {i}\n\nto {i}.', f'{2 * i}') for i in range(30)]
        assert sorted(found) == sorted(example(tokenizer, CHATML, chat)[0] for chat in wanted)
    words = f'--data_files={tmp_path}/alpaca.json', '--tokenizer=byte', f'--data_dir={tmp_path}'
    for name, typed in (('typed', ['--text_column=instruction']), ('beside', [])):
        prepare_here(name, *words, *typed)
        assert not meta(tmp_path / f'{name}-byte')['template']
    said = prepare_here(name, *words, '--template=plain', '--overwrite')
    assert 'examples of instruction and output' in said


def test_columns_that_no_example_holds_are_named(tmp_path, chat_folder):
    beside = {'input': 'a', 'history': [], 'tools': [], 'system': 's', 'score': 1}
    for name, columns in (('messages', 'history, input, score'), ('pairs', 'history, score')):
        path = written(tmp_path / f'{name}.jsonl', [row | beside for row in forms(30)[name]])
        said = prepare_here(name, f'--data_files={path}', f'--tokenizer={chat_folder}',
                            f'--data_dir={tmp_path}', '--num_workers=1')
        assert f'columns that are not used: {columns}\n' in said


def test_rows_without_an_answer_are_counted_and_other_rows_named(tmp_path):
    refusing = "{% if 'no' in messages[0].content %}{{ raise_exception('not this') }}{% endif %}"
    chat = f'--tokenizer={make_tokenizer(tmp_path / "talker", chat_template=refusing + CHATML)}'
    path, good = tmp_path / 'a.jsonl', [{'messages': sft.pair(f'{i}?', 'yes')} for i in range(9)]
    words = f'--data_files={path}', chat, f'--data_dir={tmp_path}', '--template=chat', '--num_workers=1'
    mute = [{'messages': sft.pair(f'{i}?', answer)} for i in range(7) for answer in ('', None)]
    mute += [{'messages': [{'role': 'user', 'content': 'x'}]}] * 7
    said = f'21 rows are left out, which have no text to learn (the first: {path}, row 10)'
    written(path, good + mute)
    assert said in prepare_here('mine', *words)
    written(path, mute)
    assert '21 rows with 0 different questions' in refused_here('none', *words)[1]
    for row, message in (
        ({'messages': sft.pair('no', 'x')}, 'the chat template cannot write a conversation: not this'),
        ({'conversations': [{'from': 'gpt', 'value': 'y'}]}, "no 'messages', but conversations"),
    ):
        written(path, [*good[:3], row])
        said = refused_here('mixed', *words)[1]
        assert '1 of 4 rows cannot be used, more than one in twenty, so mend or remove them: ' in said
        assert f'{path}, row 4: {message}' in said
    written(path, [*good, row, *({'messages': sft.pair(f'{i}?', 'yes')} for i in range(20, 30))])
    said = prepare_here('mostly', *words)
    assert f"1 rows cannot be used and are left out (the first: {path}, row 10: no 'messages'" in said
    counts = meta(tmp_path / 'mostly-talker')['splits']
    assert sum(split['documents'] for split in counts.values()) == 19
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
        assert f'--- 1\n{form.format(first)}--- 2\n{form.format(second)}' in said
        assert f', by {name}\n{tmp_path}' in said
        assert (first, second) == ('0', '1')
    before = sorted(tmp_path.glob('mine-byte/*'))
    written(path, [{'prompt': f'Say {i}', 'completion': 'no'} for i in range(30)])
    said = prepare('mine', *words, '--tokenizer=byte', rc=2).stdout     # it would hold other shards
    assert 'Question:\nSay 0\n\nAnswer:\n>>>no<<<' in said
    assert sorted(tmp_path.glob('mine-byte/*')) == before


# ------------------------------------------------------------------------------- training on it

def test_one_process_of_each_machine_prepares_examples(tmp_path, monkeypatch, capsys):
    """Ranks 8 and 9 are the second machine's: 8 prepares, and 9 waits for it. One alone does, whatever
    LOCAL_RANK was left."""
    done, ready, commands = SimpleNamespace(returncode=0), [], []
    monkeypatch.setattr(sft, '_is_prepared', lambda *folder: bool(ready))
    monkeypatch.setattr(sft.time, 'sleep', ready.append)
    monkeypatch.setattr(sft.subprocess, 'run', lambda words: commands.append(words) or done)
    for world_size, local_rank, expected in ('16', '0', (1, 0)), ('16', '1', (1, 1)), ('1', 'left', (2, 0)):
        ready.clear()
        monkeypatch.setenv('WORLD_SIZE', world_size)
        monkeypatch.setenv('LOCAL_RANK', local_rank)
        sft.prepare_examples({'dataset': 'openmathinstruct2', 'tokenizer': 'byte', 'split_name': 'train_1M',
                              'data_dir': str(tmp_path), 'dry_run': False})
        assert (len(commands), len(ready)) == expected
    monkeypatch.setenv('LOCAL_RANK', '0')
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'rows').mkdir()
    path, config = 'rows/mine.jsonl', {
        'tokenizer': 'byte', 'split_name': '', 'data_dir': str(tmp_path), 'dry_run': False}
    ready.clear()
    for content in b'', b'edited':
        (tmp_path / path).write_bytes(content)
        os.utime(path, (0, len(content)))
        asked = {**config, 'dataset': path}
        with pytest.raises(SystemExit):
            sft.prepare_examples({**asked, 'dry_run': True})
        assert '--dry_run writes nothing: `python prepare_data.py mine --' in capsys.readouterr().out
        sft.prepare_examples(asked)
        assert commands[-1][2:] == [
            'mine', '--tokenizer=byte', f'--data_dir={tmp_path}', f'--data_files={path}']
        assert asked['dataset'] == f'{tmp_path}/mine-byte'    # what a resume finds, whatever the file is
    monkeypatch.setattr(sft, '_is_prepared', lambda folder, hashes=None: not hashes)     # before an edit
    with pytest.raises(SettingError, match='--overwrite makes it anew, and the run, too'):
        sft.prepare_examples({**config, 'dataset': path, 'overwrite': False})
    sft.prepare_examples({**config, 'dataset': path, 'overwrite': True})
    assert commands[-1][-1] == '--overwrite'
    monkeypatch.setattr(sft, '_is_prepared', lambda *folder: False)
    asked = {**config, 'dataset': path, 'template': 'chat'}     # the usual one stays
    sft.prepare_examples(asked)
    assert commands[-1][2:5] == ['mine_chat', '--tokenizer=byte', '--template=chat']
    assert asked['dataset'] == f'{tmp_path}/mine_chat-byte'
    with pytest.raises(MissingError, match='there is no such file'):
        sft.prepare_examples({**config, 'dataset': 'rows/*.jsonl'})


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
    words, root, said = trained
    packing = TokenData(opened(root / 'mine-talker'), 'train', 64).packing
    assert (f'packed    {len(packing.lengths)} examples in {len(packing.targets)} windows, '
            f'{packing.padding:.1%} padding\n') in said
    again = [word for word in words if 'init_from' not in word]
    run(*again, f'--checkpoint_dir={root}/resumed', f'--resume={root}/one/step_000004.pt')
    assert losses(root / 'resumed') == losses(root / 'one', after=4)
    in_ranks(2, *words, '--batch_size=1', f'--checkpoint_dir={root}/two')
    assert losses(root / 'two') == pytest.approx(losses(root / 'one'), rel=1e-4)


@pytest.mark.slow
def test_a_file_of_rows_trains_a_checkpoint_and_a_new_model(trained, tmp_path):
    words, root, _ = trained
    path = written(tmp_path / 'pairs.jsonl', forms(200)['pairs'])
    more = [f'--data_dir={tmp_path}', f'--checkpoint_dir={tmp_path}/c', '--max_steps=2', '--warmup_steps=1']
    for words in (['--init_from', root / 'one', f'--dataset={root}/a.jsonl'],
                  ['--init_from=scratch', '--tokenizer=byte', f'--dataset={path}', *MODEL, '--overwrite']):
        said = run('train.py', *words, *more, '--dtype=fp32').stdout
        assert 'latest.pt is step 2' in said and ' is ready\n' in said
        goes_on = run('train.py', *words, *more, '--resume=auto', '--max_steps=3').stdout
        assert 'latest.pt is step 3' in goes_on
    assert {path.name for path in tmp_path.glob('*-*')} == {'a-one', 'pairs-byte'}


def test_a_template_that_made_no_shard_is_refused(trained, tmp_path):
    words, _, _ = trained
    more = f'--checkpoint_dir={tmp_path}/c', '--dry_run'
    assert 'leave out --template, or prepare' in run(*words, '--template=plain', *more, rc=2).stderr
    run(*words, '--template=chat', *more)
    of_texts = ['train.py', f'--dataset={write_tiny_data(tmp_path)}', *TINY, *more, '--template=chat']
    assert 'by another template, or as texts: leave out' in run(*of_texts, rc=2).stderr


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
