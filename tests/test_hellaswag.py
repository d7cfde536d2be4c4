"""Brute force against batches: transformers' GPT-2 scores one ending at a time, without padding, from tiktoken's own tokens."""
import dataclasses
import importlib
import json
import math

import numpy as np
import pytest
import torch

import checkpoint
import hellaswag
from conftest import SHARED, run, torchrun
from model import GPT, GPTConfig
from tokenizer import ByteTokenizer, get_tokenizer

BYTES = GPTConfig(vocab_size=257, block_size=512, n_layer=2, n_head=2, n_embd=32)
NOUNS = 'a man, the boy, two women, a dog, she, the ballerina, an old sailor, he, the crowd, nobody'.split(', ')
VERBS = 'runs away. | lifts the red box over their head and smiles. | is café crème. | sits. | eats [step] quickly while waiting'.split(' | ')


def rows(n, only_ctx=False):
    """n made-up items whose endings differ in length and alphabet."""
    made = []
    for i in range(n):
        row = {'ind': i, 'activity_label': f'Label {i % 7}', 'ctx_a': f'Number {i} stands there, ' + 'very ' * (i * 5 % 40) + 'still.',
               'ctx_b': NOUNS[i % 10] if i % 3 else '', 'endings': [VERBS[(i + j) % 5] * (1 + i * j % 3) for j in range(4)], 'label': i * 7 % 4}
        row['ctx'] = f'{row["ctx_a"]} {row["ctx_b"]}'.strip()
        made.append({name: value for name, value in row.items() if not only_ctx or name not in ('ctx_a', 'ctx_b')})
    return made


def write(path, items):
    path.write_text(''.join(json.dumps(row) + '\n' for row in items))
    return str(path)


def noisy(config):
    model, generator = GPT(config, dtype=torch.float32), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.empty(p.shape).normal_(0, 0.3, generator=generator))
    return model


def as_transformers(ours):
    """The same GPT-2 in transformers."""
    transformers = pytest.importorskip('transformers')
    c = ours.config
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=c.vocab_size, n_positions=c.block_size, n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd)).eval()
    names = {'attn.qkv': 'attn.c_attn', 'attn.proj': 'attn.c_proj', 'mlp.up': 'mlp.c_fc', 'mlp.down': 'mlp.c_proj'}
    with torch.no_grad():
        for name, p in ours.weights().items():
            turned = any(own in name for own in names) and name.endswith('weight')  # transformers' Conv1D stores (in, out)
            for own, other in names.items():
                name = name.replace(own, other)
            theirs.transformer.get_parameter(name).copy_(p.t() if turned else p[:c.vocab_size] if name == 'wte.weight' else p)
    return theirs


@torch.no_grad()
def brute_force(theirs, encode, texts):
    """texts: [(context, four endings)] -> (picks (n, 3), sums (n, 4)), one row at a time."""
    longest, picks, sums = theirs.config.n_positions, [], []
    for context, endings in texts:
        start, scores = len(encode(context)), []
        for ending in endings:
            ids = torch.tensor(encode(context + ' ' + ending))
            n = min(len(ids) - start, longest)
            ids = ids[-(longest + 1):]
            hidden = theirs.transformer(ids[None, :-1]).last_hidden_state[0, -n:]     # predicts the ending's n tokens
            scores.append((theirs.lm_head(hidden).log_softmax(-1)[range(n), ids[-n:]].double().sum().item(), n))
        total = [s for s, _ in scores]
        per_byte = [s / len(ending.encode()) for s, ending in zip(total, endings)]
        per_token = [s / n for s, n in scores]
        picks.append([max(range(4), key=values.__getitem__) for values in (total, per_byte, per_token)])
        sums.append(total)
    return np.array(picks), sums


def compare(model, tokenizer, encode, items, texts, batch_size):
    """Our picks against brute force; returns (picks, endings cut)."""
    expected, sums = brute_force(as_transformers(model), encode, texts)
    picked, cut = hellaswag.picks(model, tokenizer, items, 'cpu', batch_size)
    assert (picked == expected).all()
    for column in expected.T:
        assert min(np.bincount(column, minlength=4)) > 0, 'a model that always picks the same ending tests nothing'
    assert len({tuple(column) for column in expected.T}) == 3, 'the three figures are to differ'
    return picked, cut


def test_200_items_against_transformers_one_ending_at_a_time(tmp_path):
    source = SHARED / 'data' / 'hellaswag_val.jsonl'
    if not source.exists():
        pytest.skip(f'no {source}')
    tiktoken = pytest.importorskip('tiktoken')
    lines = source.read_text(encoding='utf-8').splitlines()
    chosen = [json.loads(line) for line in lines[:185] + lines[-3000::200]]  # short ActivityNet, long WikiHow
    texts = [(f'{row["activity_label"]}: {row["ctx"]}', row['endings']) for row in chosen]
    assert not any(mark in context + ''.join(endings) for context, endings in texts for mark in ('[', '  ')), 'no clean-up needed'
    model = noisy(GPTConfig(block_size=256, n_layer=2, n_head=2, n_embd=16))
    path = write(tmp_path / 'items.jsonl', chosen)
    items, only_ctx = hellaswag.read(path)
    picked, cut = compare(model, get_tokenizer('gpt2'), tiktoken.get_encoding('gpt2').encode, items, texts, 2)
    assert (len(items), only_ctx, cut) == (200, 200, 0)


def byte_texts(items):
    return [(context.rstrip(), [' ' * (len(context) - len(context.rstrip())) + ending for ending in endings]) for context, endings, _ in items]


@pytest.mark.parametrize('block_size', [512, 90, 40])
def test_truncation_keeps_the_ending(tmp_path, block_size):
    """Of the 60 items' 240 rows, some (90) or all (40) are too long; at 40, so are some endings."""
    model = noisy(dataclasses.replace(BYTES, block_size=block_size))
    items, only_ctx = hellaswag.read(write(tmp_path / 'items.jsonl', rows(60)))
    picked, cut = compare(model, ByteTokenizer(), lambda text: list(text.encode()), items, byte_texts(items), 7)
    assert only_ctx == 0 and (cut == 0 if block_size == 512 else 50 < cut < 240 if block_size == 90 else cut > 230)


def counts(result):
    return np.array([round(result[name] * result['items']) for name in ('acc', 'acc_norm', 'acc_token')] + [result['items']])


def test_ranks_and_batch_sizes_change_nothing(tmp_path):
    """Also: the shapes that the model is called with are few, and full whatever is left over."""
    model, shapes, path = noisy(BYTES), set(), write(tmp_path / 'items.jsonl', rows(61))
    model.register_forward_pre_hook(lambda module, args: shapes.add(tuple(args[0].shape)))
    call = lambda **kwargs: hellaswag.evaluate(model, ByteTokenizer(), path, 'cpu', **kwargs)
    whole = call(batch_size=1)
    assert whole['items'] == 61 and whole['note'] == '' and len({whole[name] for name in ('acc', 'acc_norm', 'acc_token')}) > 1
    shapes.clear()
    assert call(batch_size=17) == whole and shapes == {(17, 64), (17, 128), (17, 256), (17, 512)}
    for world_size in (2, 3, 62):  # the last rank of 62 has nothing to do
        parts = [counts(call(rank=rank, world_size=world_size)) for rank in range(world_size)]
        assert (sum(parts) == counts(whole)).all() and parts[-1][-1] == 61 // world_size
    backwards = hellaswag.evaluate(model, ByteTokenizer(), write(tmp_path / 'backwards.jsonl', rows(61)[::-1]), 'cpu')
    assert (counts(backwards) == counts(whole)).all()
    assert call(limit=10)['items'] == 10 and call(limit=1000) == whole


def test_a_row_scores_the_same_in_any_company():
    model, rng = noisy(BYTES), np.random.default_rng(0)
    made = [(rng.integers(0, 257, length).tolist(), n) for length, n in ((2, 1), (65, 64), (66, 3), (300, 299), (513, 20), (40, 7))]
    shapes = []
    hook = model.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    together = hellaswag.score(model, made, 'cpu', 2)
    hook.remove()
    assert shapes == [(2, 64), (2, 64), (2, 128), (2, 512)]  # 64 tokens fit in 64: the 65th is only a target
    for row, expected in zip(made, together):
        tokens, n = row
        with torch.no_grad():
            logs = model(torch.tensor([tokens[:-1]]))[0].double().log_softmax(-1)
        assert math.isclose(sum(logs[t - 1, tokens[t]].item() for t in range(len(tokens) - n, len(tokens))), expected, rel_tol=1e-5)
        assert math.isclose(hellaswag.score(model, [row], 'cpu', 1)[0], expected, rel_tol=1e-6)


def test_a_compiled_model_gives_the_same(tmp_path):
    model, path = noisy(dataclasses.replace(BYTES, block_size=64)), write(tmp_path / 'items.jsonl', rows(5))
    compiled = torch.compile(model, backend='eager')
    assert hellaswag.evaluate(compiled, ByteTokenizer(), path, 'cpu') == hellaswag.evaluate(model, ByteTokenizer(), path, 'cpu')


def test_texts():
    """By hand, after lm-evaluation-harness's lm_eval/tasks/hellaswag/utils.py."""
    row = {'activity_label': 'Roof shingle removal', 'ctx_a': 'A man is sitting on a roof.', 'ctx_b': 'he', 'ctx': 'A man is sitting on a roof. he',
           'endings': ['is using wrap.', ' is ripping  level tiles off. ', '[header] How [title] Dry it.', 'a [step] b'], 'label': '3'}
    assert hellaswag.render(row) == ('Roof shingle removal: A man is sitting on a roof. He',
                                     ['is using wrap.', 'is ripping level tiles off.', ' How. Dry it.', 'a b'], 3)
    wikihow = {**row, 'activity_label': 'Home', 'ctx_b': '', 'ctx_a': '[header] How to dry [title] Open it. [step] Wait [substeps]'}
    assert hellaswag.render(wikihow)[0] == 'Home: How to dry. Open it. Wait '
    only = {name: value for name, value in row.items() if name not in ('ctx_a', 'ctx_b')}
    assert hellaswag.render(only)[0] == 'Roof shingle removal: A man is sitting on a roof. he'
    assert hellaswag.render({**row, 'ctx_b': 'the Man'})[0].endswith('roof. The man')


def test_tokens_are_split_where_the_harness_splits():
    """A space at the context's end goes to the ending; without an EOT in front."""
    assert hellaswag.encode(ByteTokenizer(), 'ab', 'cd') == (list(b'ab cd'), 3)
    assert hellaswag.encode(ByteTokenizer(), 'ab ', 'cd') == (list(b'ab  cd'), 4)
    try:
        gpt2 = get_tokenizer('gpt2')
    except (ImportError, RuntimeError) as error:
        pytest.skip(str(error))
    ids, n = hellaswag.encode(gpt2, 'A man sits on a roof. he', 'starts pulling up roofing.')
    assert gpt2.decode(ids[-n:]) == ' starts pulling up roofing.' and gpt2.decode(ids[:-n]) == 'A man sits on a roof. he'


def test_norms():
    """Bytes, not characters, and tokens: a model of which every token's probability is known."""
    class Known(torch.nn.Module):
        config = BYTES

        def forward(self, idx):
            logits = torch.zeros(*idx.shape, 257)
            logits[..., list('é'.encode())] = 2.0
            return logits
    endings = ['é' * 3, 'x' * 4, 'x' * 3, 'é' * 8]
    logp, rest = 2 - math.log(2 * math.e**2 + 255), -math.log(2 * math.e**2 + 255)
    sums = [rest + 6 * logp, 5 * rest, 4 * rest, rest + 16 * logp]  # with the joining space, which bytes do not count
    norms = [6, 4, 3, 16], [7, 5, 4, 17]
    expected = [np.argmax(sums), *(np.argmax(np.array(sums) / norm) for norm in norms)]
    assert expected == [2, 3, 3] and np.argmax(np.array(sums) / [3, 4, 3, 8]) == 1, 'characters would say otherwise'
    assert hellaswag.picks(Known(), ByteTokenizer(), [('c', endings, 0)], 'cpu', 3)[0].tolist() == [expected]


def test_summary():
    line = hellaswag.summary({'acc': 0.2892, 'acc_norm': 0.3114, 'acc_token': 0.2955, 'items': 10042, 'note': ''})
    assert line == 'HellaSwag 10,042 items: acc 0.2892 ±0.0089 | acc_norm 0.3114 ±0.0091 | acc_token 0.2955 ±0.0089'


@pytest.fixture(scope='module')
def tiny_checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp('checkpoint')
    state = {'step': 7, 'weights': noisy(BYTES).weights(), 'model_config': dataclasses.asdict(BYTES), 'tokenizer': 'byte', 'precision': {'name': 'fp8'}}
    checkpoint.save(str(folder), state, 1)
    return f'--ckpt={folder}/latest.pt'


def test_the_script(tmp_path, tiny_checkpoint):
    """One process and two ranks print the same figures: those of a bf16 model with the checkpoint's weights."""
    path = write(tmp_path / 'items.jsonl', rows(30, only_ctx=True))
    flags = ['hellaswag.py', tiny_checkpoint, f'--data={path}', '--device=cpu', '--limit=20']
    model = noisy(BYTES)
    model.dtype = torch.bfloat16
    expected = hellaswag.summary(hellaswag.evaluate(model, ByteTokenizer(), path, 'cpu', limit=20))
    for lines in (run(*flags).stdout.splitlines(), torchrun(2, *flags).stdout.splitlines()):
        assert len(lines) == 3 and 'step 7, trained in fp8' in lines[0] and '20 items have only ctx' in lines[1]
        assert lines[2].startswith(f'{expected} | ') and lines[2].endswith(' items/s')


@pytest.mark.parametrize('content, message', [
    (None, 'python prepare_data.py hellaswag'),
    ('', 'is empty'),
    ('GOOD\n{"ctx": "a', 'line 2 is no HellaSwag item'),
    ('GOOD\n\n{"ctx": "a", "label": 1, "activity_label": "b"}\n', "line 3 is no HellaSwag item (KeyError: 'endings')"),
    ('{"ctx": null, "label": 1, "activity_label": "b", "endings": ["a", "b", "c", "d"]}\n', 'line 1 is no'),
    ('{"ctx": "a", "label": "", "activity_label": "b", "endings": ["a", "b", "c", "d"]}\n', 'line 1 is no'),
    ('{"ctx": "a", "label": 4, "activity_label": "b", "endings": ["a", "b", "c", "d"]}\n', '4 endings, label 4'),
    ('\x80\x00', 'line 1 is no'),
    ('[1]', 'line 1 is no'),
    ('7', 'line 1 is no'),
])
def test_files_that_are_none(tmp_path, content, message):
    path = tmp_path / 'items.jsonl'
    if content is not None:
        path.write_text(content.replace('GOOD', json.dumps(rows(1)[0])), encoding='latin-1')
    with pytest.raises((FileNotFoundError, RuntimeError)) as refusal:
        hellaswag.read(str(path))
    assert message in str(refusal.value) and str(path) in str(refusal.value) and '\n' not in str(refusal.value)


def test_errors_are_one_line(tmp_path, tiny_checkpoint):
    (tmp_path / 'bad.jsonl').write_text('{"ctx": 1}\n')
    assert f'{tmp_path}/bad.jsonl, line 1' in run('hellaswag.py', tiny_checkpoint, f'--data={tmp_path}/bad.jsonl', rc=1).stderr
    assert 'prepare_data.py hellaswag' in run('hellaswag.py', tiny_checkpoint, f'--data={tmp_path}/none.jsonl', rc=1).stderr


def test_importing_it_reads_no_command_line(monkeypatch):
    monkeypatch.setattr('sys.argv', ['train.py', '--max_steps=3', '--limit=5', '--help'])
    assert importlib.reload(hellaswag).config['limit'] == 0
