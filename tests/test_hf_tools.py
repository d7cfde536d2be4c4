"""A Hugging Face model where a checkpoint may be: evaluated, sampled, chatted with, diagnosed; and exported
again with its tokenizer. Against transformers, on a tiny random Llama."""
import io
import itertools
import json
import pathlib
import re
import shutil
import sys

import pytest
import torch

from fp8gpt import data, pretrained, sft
import hellaswag
import hf
from conftest import ROOT, accepted, hellaswag_items, refused, run
from helpers import gpt_in, opened
from model import generate
from test_finetune import save_llama
from test_hf import change_config
from fp8gpt.tokenizer import get_tokenizer
from preparing import prepare_here
from tokenizers_made import BEGIN, CHATML, END, END_OF_TURN, make_tokenizer

transformers = pytest.importorskip('transformers')

LONGEST = 256
TOLD = '# not taken from generation_config.json: temperature=0.6\n'
GREEDY = ['--temperature=0', '--device=cpu']
RUN = ['--block_size=32', '--batch_size=2', '--max_steps=2', '--warmup_steps=1', '--max_lr=1e-3',
       '--eval_tokens=256', '--log_freq=1', '--eval_freq=1000', '--dtype=bf16']


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A Llama with a tokenizer that has a chat template and two ends."""
    folder = tmp_path_factory.mktemp('models') / 'talker'
    generation = {'eos_token_id': [END, END_OF_TURN], 'temperature': 0.6, 'output_attentions': False,
                  'use_cache': True}
    fields = {'max_position_embeddings': LONGEST, 'initializer_range': 0.15}
    save_llama(folder, fields, generation=generation, chat_template=CHATML)
    return folder


@pytest.fixture(scope='module')
def prepared(folder, tmp_path_factory):
    """(data_dir, flags that name a dataset of that tokenizer in it)."""
    root = tmp_path_factory.mktemp('prepared')
    (root / 'a.txt').write_text('\n\n'.join(f'The number {i} comes before {i + 1}.' for i in range(1000)))
    prepare_here('counted', f'--data_files={root}/a.txt', f'--tokenizer={folder}', '--val_fraction=0.1',
                 f'--data_dir={root}')
    return root, ['--dataset=counted', f'--tokenizer={folder}', f'--data_dir={root}']


@pytest.fixture(scope='module')
def tuned(folder, prepared, tmp_path_factory):
    """checkpoint_dirs of runs that start from the model: all weights, and adapters."""
    _, words = prepared
    found = {}
    for name, more in (('whole', []), ('adapters', ['--lora_rank=2'])):
        found[name] = tmp_path_factory.mktemp(name)
        run('train.py', *RUN, *words, f'--init_from={folder}', *more, f'--checkpoint_dir={found[name]}')
    return found


def continued(path, ids, count):
    """Return (ids, text) that a checkpoint or model continues ids with, greedily, in bf16."""
    state, _ = pretrained.opened(str(path))
    tokenizer = pretrained.tokenizer_of(str(path), state)
    model = pretrained.model_of(state, vocab_size=tokenizer.vocab_size, param_dtype=torch.bfloat16)
    tokens = (token.item() for token in generate(model, torch.tensor([ids]), count, temperature=0))
    found = list(itertools.takewhile(lambda token: token not in tokenizer.stops, tokens))
    return found, ''.join(tokenizer.stream(found))


def shown(text):
    """Return a text as sample.py prints it."""
    return re.sub(r'[\x00-\x08\x0b-\x1f\x7f-\x9f]', lambda match: f'\\x{ord(match[0]):02x}', text) + '\n'


def test_a_model_is_evaluated_and_diagnosed_without_training(folder, prepared, tmp_path):
    root, words = prepared
    items = hellaswag_items(root, 4) / 'hellaswag' / 'hellaswag_val.jsonl'
    words = [*words, '--eval_only', f'--init_from={folder}', '--block_size=32', '--batch_size=2',
             '--eval_tokens=320', f'--checkpoint_dir={tmp_path}/none']
    out = run('train.py', *words).stdout
    tokenizer, model = get_tokenizer(str(folder)), gpt_in(folder)
    windows = data.TokenData(opened(root / 'counted-talker'), 'val', 32)
    with torch.no_grad():
        losses = [model(x, y).item() for x, y, _ in data.eval_batches(windows, 320, 1)]
    assert float(re.search(r'val loss (\S+)', out)[1]) == pytest.approx(sum(losses) / 10, abs=1e-3)
    summary = hellaswag.accuracy_line(hellaswag.evaluate(model, tokenizer, str(items), 'cpu'))
    assert summary.startswith('HellaSwag 4 items: ') and summary in out
    assert not (tmp_path / 'none').exists()
    words = f'--ckpt={folder}', f'--data={items}'
    out = run('hellaswag.py', *words, '--device=cpu').stdout
    assert out.startswith(f'# {folder}: a Hugging Face model\n{summary}')
    out = run('diagnose.py', f'--ckpt={folder}', '--fp8_keep=mlp.down').stdout
    assert out.startswith(f'# {folder}: a Hugging Face model\nFP8 Training Enabled: 6 of 9 linears, ')


def test_a_model_and_a_tuned_checkpoint_write_to_the_models_length(folder, tuned, here):
    path = tuned['whole'] / 'latest.pt'
    ids = [BEGIN, *get_tokenizer(str(folder)).encode('The sum').tolist()]
    for ckpt, about in ((path, 'step 2, trained in bf16'), (folder, 'a Hugging Face model')):
        found, text = continued(ckpt, ids, 100)
        said = here('sample.py', f'--ckpt={ckpt}', '--prompt=The sum', '--max_new_tokens=100', *GREEDY)
        assert said == f'# {ckpt}: {about}\n{TOLD}The sum{shown(text)}'
    assert len(found) > 32


@pytest.mark.parametrize('made_of', [
    {}, {'adds_begin': False, 'bos_token': None}, {'adds_begin': False}, {'prepends': True},
    {'prepends': True, 'adds_begin': False}], ids=str)
def test_a_prompt_goes_on_as_in_transformers(made_of, here, tmp_path):
    """Alone and as two samples, up to the first stop, with the space before its first word."""
    save_llama(tmp_path, {'initializer_range': 0.3}, **made_of)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for prompt in (ROOT / 'LICENSE').read_text().split():
        ids = theirs(prompt, return_tensors='pt').input_ids
        found = model.generate(ids, do_sample=False, max_new_tokens=3)[0]
        if theirs.convert_ids_to_tokens(found)[ids.shape[1]][0] in '\u2581\u0120':       # a space
            break
    config = {'eos_token_id': [END, int(found[-1])]}
    (tmp_path / 'generation_config.json').write_text(json.dumps(config))
    said = shown(theirs.decode(found[:-1], skip_special_tokens=True))
    words = 'sample.py', f'--ckpt={tmp_path}', f'--prompt={prompt}', *GREEDY
    one, two = (here(*words, f'--num_samples={n}').partition('\n')[2] for n in (1, 2))
    assert (one, two) == (said, f'--- 1\n{said}--- 2\n{said}')


def test_a_prompt_holds_special_tokens_and_a_line_says_what_is_cut(folder, here, monkeypatch):
    prompt, ids = '<|turn|>user\n' + 'a sum ' * 300, []
    monkeypatch.setattr('model.generate', lambda _, idx, *__, **___: ids.append(idx.tolist()) or iter(()))
    said = here('sample.py', f'--ckpt={folder}', f'--prompt={prompt}')
    [[found]] = ids
    assert found == transformers.AutoTokenizer.from_pretrained(folder)(prompt).input_ids
    assert f'# the prompt has {len(found)} tokens, and the model reads the last 256\n' in said


def test_a_generation_config_is_printed_and_not_taken(folder, here, tmp_path):
    """But for its tokens, which end an answer: see test_tokenizer.py."""
    words = 'sample.py', f'--ckpt={folder}', '--prompt=The', '--max_new_tokens=9'
    said = here(*words)
    assert said.startswith(f'# {folder}: a Hugging Face model\n{TOLD}The')
    assert here(*words, '--temperature=0.8', '--top_k=200', '--top_p=1') == said
    assert here(*words, '--temperature=0.6') != said


def test_what_is_refused_in_one_line(folder, tuned, tmp_path):
    shutil.copytree(folder, tmp_path / 'base')
    change_config(tmp_path / 'base', 'tokenizer_config', chat_template=None)
    shutil.copy(tuned['whole'] / 'latest.pt', tmp_path)
    run('hf.py', 'save', f'--ckpt={tuned["adapters"]}/latest.pt', f'--out={tmp_path}/peft')
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / 'peft').chat_template == CHATML
    shutil.copytree(folder, tmp_path / 'beside')
    shutil.copy(tmp_path / 'peft/adapter_config.json', tmp_path / 'beside')
    make_tokenizer(tmp_path / 'base', words=[f'word{i}' for i in range(40)])
    flags = [f'--ckpt={tmp_path}/latest.pt', f'--out={tmp_path}/out']
    rows = (
        (2, ['sample.py', f'--ckpt={tmp_path}/peft'], f"holds adapters in PEFT's format, of {folder}: merge"),
        (2, ['sample.py', f'--ckpt={tmp_path}/beside'], f"adapters in PEFT's format, of {folder}"),
        (1, ['sample.py', f'--ckpt={folder}/config.json'], 'a Hugging Face model is named by its folder'),
        (2, ['sample.py', '--system=Be brief.'], '--system belongs to --chat'),
        (2, ['sample.py', '--chat', '--num_samples=2'], 'num_samples=2: a chat has one answer to a turn'),
        (2, ['sample.py', f'--ckpt={tmp_path}/base', '--chat'], 'base: its tokenizer has no chat template'),
        (2, ['sample.py', f'--ckpt={tmp_path}/base', '--prompt=word39'],
         "the model has no weights for the token 'word39': leave it out"),
        (1, ['hf.py', 'export', *flags], f'{tmp_path}/tokenizer.json is missing'),
        (1, ['hf.py', 'export', f'--ckpt={folder}', flags[1]], f'there is no checkpoint {folder}/latest.pt'),
        (2, ['hf.py', 'save', *flags], 'has no adapters: it was not trained with lora_rank'),
    )
    assert accepted((code, message, words) for code, words, message in rows) == []
    assert not (tmp_path / 'out').exists()


@pytest.fixture
def chatted(here, monkeypatch):
    """chatted(path, turns, *flags): what is said to that, in six tokens a turn at most."""
    def said_to(path, turns, *flags):
        monkeypatch.setattr(sys, 'stdin', io.StringIO('\n'.join(turns)))
        words = f'--ckpt={path}', '--chat', '--max_new_tokens=6', *GREEDY, *flags
        return here('sample.py', *words).partition(TOLD)[2]
    return said_to


CUT = '# the answer is cut after 6 tokens\n'


def answered(folder, path, messages):
    """(ids, text) that continue a conversation, rendered by transformers with a folder's tokenizer."""
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)['input_ids']
    return continued(path, ids, 6)


def test_a_chat_remembers_its_turns(folder, tuned, chatted):
    turns = 'What is 2 + 2?', 'And then?'
    for path, system in (folder, 'Be brief.'), (tuned['whole'] / 'latest.pt', ''):
        messages, wanted = [{'role': 'system', 'content': system}] if system else [], ''
        for turn in turns:
            messages.append({'role': 'user', 'content': turn})
            _, text = answered(folder, path, messages)
            messages.append({'role': 'assistant', 'content': text})
            wanted += shown(text) + CUT
        assert chatted(path, turns, f'--system={system}') == wanted
    assert chatted(path, turns[1:], f'--prompt={turns[0]}') == wanted


def test_a_chat_that_the_model_cannot_read_whole_is_refused(folder, chatted, monkeypatch):
    """Before, an answer ends where the model's length does."""
    line, tokenizer = '2 ' * 100, get_tokenizer(str(folder))
    ids = sft.Examples(tokenizer, CHATML, 0).prompt([{'role': 'user', 'content': line}])
    said = chatted(folder, [line], '--max_new_tokens=200')
    assert said.endswith(f'# the answer is cut after {LONGEST - len(ids)} tokens\n')
    monkeypatch.setattr(sys, 'stdin', io.StringIO(f'{line}\nmore\n'))
    code, said = refused('sample.py', f'--ckpt={folder}', '--chat', '--max_new_tokens=200', *GREEDY)
    assert code == 2 and re.search(rf'the chat has \d+ tokens, and the model reads {LONGEST}: begin', said)


def test_an_answer_ends_at_the_models_stop(folder, tmp_path, chatted):
    found, _ = answered(folder, folder, [{'role': 'user', 'content': 'Go!'}])
    shutil.copytree(folder, tmp_path / 'ends')
    change_config(tmp_path / 'ends', 'generation_config', eos_token_id=[END, found[2]])
    text = ''.join(get_tokenizer(str(folder)).stream(found[:found.index(found[2])]))
    assert chatted(tmp_path / 'ends', ['Go!']) == shown(text)


def test_a_chats_interrupts_special_tokens_and_draws(folder, chatted, monkeypatch):
    prompts, seeds = [], []

    def interrupted(model, idx, *numbers, seed, **how):
        prompts.append(get_tokenizer(str(folder)).decode(idx[0].tolist(), special=True))
        seeds.append(seed)
        yield from torch.tensor([[400], [END]][:2 if len(seeds) == 2 else 1])
        raise KeyboardInterrupt
    monkeypatch.setattr('model.generate', interrupted)
    said = get_tokenizer(str(folder)).decode([400])
    lines = chatted(folder, ['One', 'a <|end|> b', '', ' ', 'Two', 'Three'], '--seed=7').splitlines()
    assert lines == [said, '# <|end|> is a token of the template, which no line may hold: type it without',
                     said, said]
    assert seeds == [7, 8, 9]
    assert prompts[1].count(f'\n{said}<|end_of_turn|>') == 1 and '<|end|>' not in prompts[2]
    monkeypatch.setattr('builtins.input', lambda marker: (_ for _ in ()).throw(KeyboardInterrupt))
    assert chatted(folder, [], '--prompt=Hi').splitlines() == [said]


def test_an_export_has_the_tokenizer(folder, tuned, tmp_path):
    """A checkpoint goes back as the model that it came from, but for its weights."""
    out = tmp_path / 'out'
    run('hf.py', 'export', f'--ckpt={tuned["whole"]}/latest.pt', f'--out={out}')
    before, after = (transformers.AutoTokenizer.from_pretrained(path) for path in (folder, out))
    ours = get_tokenizer(str(folder))
    for text in ('The number 7\n\tis größe.', '<|turn|>user\nGo!<|end_of_turn|>'):
        assert after(text)['input_ids'] == before(text)['input_ids']
        assert after(text)['input_ids'][1:] == ours.encode(text, special=True).tolist()
    turn = [{'role': 'user', 'content': 'Go!'}]
    assert after.apply_chat_template(turn) == before.apply_chat_template(turn)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert theirs.generation_config.eos_token_id == [END, END_OF_TURN]
    assert theirs.generation_config.temperature == 0.6
    assert (theirs.config.bos_token_id, theirs.config.eos_token_id) == (BEGIN, [END, END_OF_TURN])
    assert theirs.config.max_position_embeddings == LONGEST
    assert pretrained.source(str(out))['tokenizer'] == ours.name


def test_an_exports_tokenizer_gives_the_ids_of_the_training(tmp_path):
    """Also where its class, read by AutoTokenizer, replaces the pre-tokenizer of tokenizer.json; and what
    ends a turn ends a generation, where the model's EOS is another."""
    config = {'tokenizer_class': 'GPT2Tokenizer', 'chat_template': CHATML}
    base = pathlib.Path(make_tokenizer(tmp_path / 'base', **config))
    made = json.loads((base / 'tokenizer.json').read_text())
    digits = {'type': 'Digits', 'individual_digits': True}
    made['pre_tokenizer'] = {'type': 'Sequence', 'pretokenizers': [digits, made['pre_tokenizer']]}
    (base / 'tokenizer.json').write_text(json.dumps(made))
    ours, text = get_tokenizer(str(base)), '2026 2026, it is 10 to 12'
    assert transformers.AutoTokenizer.from_pretrained(base).encode(text)[1:] != ours.encode(text).tolist()
    hf.write_tokenizer(ours, str(tmp_path / 'out'))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'out')
    assert theirs.encode(text)[1:] == ours.encode(text).tolist()
    generation = json.loads((tmp_path / 'out/generation_config.json').read_text())
    assert generation['eos_token_id'] == [END, END_OF_TURN]


def test_an_exports_tokenizer_is_read_by_transformers_4(tmp_path):
    """That has no class TokenizersBackend, and no list of extra_special_tokens, as transformers 5 saves."""
    base = make_tokenizer(tmp_path / 'base', chat_template=CHATML, words=['<extra>'])
    theirs = transformers.AutoTokenizer.from_pretrained(base, extra_special_tokens=['<extra>'])
    for name in 'TokenizersBackend', 'PreTrainedTokenizerFast':
        saved, out = tmp_path / f'saved_{name}', tmp_path / f'out_{name}'
        theirs.save_pretrained(saved)
        config = json.loads((saved / 'tokenizer_config.json').read_text())
        assert config['extra_special_tokens'] == ['<extra>']
        (saved / 'tokenizer_config.json').write_text(json.dumps(config | {'tokenizer_class': name}))
        hf.write_tokenizer(get_tokenizer(str(saved)), str(out))
        config = json.loads((out / 'tokenizer_config.json').read_text())
        assert config['tokenizer_class'] == 'PreTrainedTokenizerFast'
        assert 'extra_special_tokens' not in config
        again = transformers.AutoTokenizer.from_pretrained(out)
        assert again.extra_special_tokens == theirs.extra_special_tokens
        assert again('a <extra> b') == theirs('a <extra> b')


def test_adapters_are_exported_merged(tuned, tmp_path):
    path = tuned['adapters'] / 'latest.pt'
    run('hf.py', 'export', f'--ckpt={path}', f'--out={tmp_path}/out')
    found, wanted = gpt_in(tmp_path / 'out').weights(), pretrained.opened(str(path))[0]['weights']
    assert all(torch.equal(p, wanted[name]) for name, p in found.items() if name.startswith('h.'))
