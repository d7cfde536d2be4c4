"""Brute force against batches: transformers' GPT-2 scores one ending at a time, without padding, from
tiktoken's own tokens."""
import dataclasses
import importlib
import json
import math

import numpy as np
import pytest
import torch

import checkpoint
import hellaswag
from configurator import MissingError
from conftest import SHARED, run, torchrun
from helpers import checkpoint_of
from model import GPT, Compiled, GPTConfig
from tokenizer import ByteTokenizer, get_tokenizer

BYTES = GPTConfig(vocab_size=257, block_size=512, n_layer=2, n_head=2, n_embd=32)
NOUNS = [
    'a man', 'the boy', 'two women', 'a dog', 'she',
    'the ballerina', 'an old sailor', 'he', 'the crowd', 'nobody',
]
VERBS = [
    'runs away.',
    'lifts the red box over their head and smiles.',
    'is café crème.',
    'sits.',
    'eats [step] quickly while waiting',
]


def made_up(i):
    """Item i: its four endings differ in length and alphabet."""
    return {
        'ind': i,
        'activity_label': f'Label {i % 7}',
        'ctx_a': f'Number {i} stands there, {"very " * (i * 5 % 40)}still.',
        'ctx_b': NOUNS[i % 10] if i % 3 else '',
        'endings': [VERBS[(i + j) % 5] * (1 + i * j % 3) for j in range(4)],
        'label': i * 7 % 4,
    }


def rows(n, only_ctx=False):
    """n made-up items."""
    made = []
    for i in range(n):
        row = made_up(i)
        row['ctx'] = f'{row["ctx_a"]} {row["ctx_b"]}'.strip()
        made.append(without_parts(row) if only_ctx else row)
    return made


def without_parts(row):
    return {name: value for name, value in row.items() if name not in ('ctx_a', 'ctx_b')}


def write(path, items):
    path.write_text(''.join(json.dumps(row) + '\n' for row in items))
    return str(path)


def noisy(config):
    """A model whose weights are far enough from their start to prefer something."""
    model = GPT(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.empty(p.shape).normal_(0, 0.3, generator=generator))
    return model


def as_transformers(ours):
    """The same GPT-2 in transformers."""
    transformers = pytest.importorskip('transformers')
    c = ours.config
    config = transformers.GPT2Config(
        vocab_size=c.vocab_size,
        n_positions=c.block_size,
        n_layer=c.n_layer,
        n_head=c.n_head,
        n_embd=c.n_embd,
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    names = {
        'attn.qkv': 'attn.c_attn',
        'attn.proj': 'attn.c_proj',
        'mlp.up': 'mlp.c_fc',
        'mlp.down': 'mlp.c_proj',
    }
    with torch.no_grad():
        for name, p in ours.weights().items():
            if name.endswith('weight') and any(own in name for own in names):
                p = p.t()  # transformers' Conv1D stores (in, out)
            if name == 'wte.weight':
                p = p[:c.vocab_size]
            for own, other in names.items():
                name = name.replace(own, other)
            theirs.transformer.get_parameter(name).copy_(p)
    return theirs


def score_alone(theirs, start, ids):
    """(log-probability of the tokens ids[start:], their number), of one row without padding."""
    longest = theirs.config.n_positions
    n = min(len(ids) - start, longest)
    ids = torch.tensor(ids)[-(longest + 1):]
    # what predicts the ending's n tokens
    hidden = theirs.transformer(ids[None, :-1]).last_hidden_state[0, -n:]
    logs = theirs.lm_head(hidden).log_softmax(-1)[range(n), ids[-n:]]
    return logs.double().sum().item(), n


@torch.no_grad()
def brute_force(theirs, encode, texts):
    """texts: [(context, four endings)] -> picks (n, 3), one row at a time."""
    picks = []
    for context, endings in texts:
        start = len(encode(context))
        scores = [score_alone(theirs, start, encode(f'{context} {ending}')) for ending in endings]
        total = [s for s, _ in scores]
        per_byte = [s / len(ending.encode()) for s, ending in zip(total, endings)]
        per_token = [s / n for s, n in scores]
        picks.append([np.argmax(values) for values in (total, per_byte, per_token)])
    return np.array(picks)


def compare(model, tokenizer, items, expected, batch_size):
    """Our picks against brute force's; returns how many endings were cut."""
    picked, cut = hellaswag.picks(model, tokenizer, items, 'cpu', batch_size)
    assert (picked == expected).all()
    for column in expected.T:
        used = np.bincount(column, minlength=4)
        assert min(used) > 0, 'a model that always picks the same ending tests nothing'
    assert len({tuple(column) for column in expected.T}) == 3, 'the three figures are to differ'
    return cut


def test_200_items_against_transformers_one_ending_at_a_time(tmp_path):
    source = SHARED / 'data' / 'hellaswag_val.jsonl'
    if not source.exists():
        pytest.skip(f'no {source}')
    tiktoken = pytest.importorskip('tiktoken')
    lines = source.read_text(encoding='utf-8').splitlines()
    # short ActivityNet, long WikiHow
    chosen = [json.loads(line) for line in lines[:185] + lines[-3000::200]]
    texts = [(f'{row["activity_label"]}: {row["ctx"]}', row['endings']) for row in chosen]
    for context, endings in texts:
        text = context + ''.join(endings)
        assert '[' not in text, 'no clean-up needed'
        assert '  ' not in text, 'no clean-up needed'
    model = noisy(GPTConfig(block_size=256, n_layer=2, n_head=2, n_embd=16))
    items, only_ctx = hellaswag.read(write(tmp_path / 'items.jsonl', chosen))
    encode = tiktoken.get_encoding('gpt2').encode
    expected = brute_force(as_transformers(model), encode, texts)
    cut = compare(model, get_tokenizer('gpt2'), items, expected, 2)
    assert len(items) == 200
    assert only_ctx == 200
    assert cut == 0


def byte_text(context, endings):
    """An item as bytes are split: the space at a context's end goes to the endings."""
    start = context.rstrip()
    spaces = context[len(start):]
    return start, [spaces + ending for ending in endings]


@pytest.mark.parametrize('block_size, fewest, most', [(512, 0, 0), (90, 51, 239), (40, 231, 240)])
def test_truncation_keeps_the_ending(tmp_path, block_size, fewest, most):
    """Of the 60 items' 240 rows, some (90) or all (40) are too long; at 40, so are some endings."""
    model = noisy(dataclasses.replace(BYTES, block_size=block_size))
    items, only_ctx = hellaswag.read(write(tmp_path / 'items.jsonl', rows(60)))
    texts = [byte_text(context, endings) for context, endings, _ in items]
    expected = brute_force(as_transformers(model), lambda text: list(text.encode()), texts)
    cut = compare(model, ByteTokenizer(), items, expected, 7)
    assert only_ctx == 0
    assert fewest <= cut <= most


def counts(result):
    """How many items each figure has right, and how many there are."""
    right = [round(result[name] * result['items']) for name in ('acc', 'acc_norm', 'acc_token')]
    return np.array([*right, result['items']])


@pytest.fixture(scope='module')
def bytes_model():
    return noisy(BYTES)


@pytest.fixture
def evaluate(bytes_model, tmp_path):
    """evaluate(...) -> hellaswag.evaluate of 61 items."""
    path = write(tmp_path / 'items.jsonl', rows(61))
    return lambda **kwargs: hellaswag.evaluate(bytes_model, ByteTokenizer(), path, 'cpu', **kwargs)


@pytest.fixture
def shapes(bytes_model):
    """The shapes that the model is called with, as they come."""
    seen = []

    def note(module, args):
        seen.append(tuple(args[0].shape))
    hook = bytes_model.register_forward_pre_hook(note)
    yield seen
    hook.remove()


def test_batch_sizes_change_nothing(evaluate, shapes):
    """Also: the shapes that the model is called with are few, and full whatever is left over."""
    whole = evaluate(batch_size=1)
    assert whole['items'] == 61
    assert whole['note'] == ''
    assert len({whole[name] for name in ('acc', 'acc_norm', 'acc_token')}) > 1
    shapes.clear()
    assert evaluate(batch_size=17) == whole
    assert set(shapes) == {(17, 64), (17, 128), (17, 256), (17, 512)}
    assert evaluate() == whole


def test_ranks_order_and_limit_change_nothing(evaluate, bytes_model, tmp_path):
    whole = evaluate()
    for world_size in (2, 3, 62):  # the last rank of 62 has nothing to do
        parts = [counts(evaluate(rank=rank, world_size=world_size)) for rank in range(world_size)]
        assert (sum(parts) == counts(whole)).all()
        assert parts[-1][-1] == 61 // world_size
    path = write(tmp_path / 'backwards.jsonl', rows(61)[::-1])
    backwards = hellaswag.evaluate(bytes_model, ByteTokenizer(), path, 'cpu')
    assert (counts(backwards) == counts(whole)).all()
    assert evaluate(limit=10)['items'] == 10
    assert evaluate(limit=1000) == whole


def test_a_row_scores_the_same_in_any_company(bytes_model, shapes):
    rng = np.random.default_rng(0)
    sizes = [(2, 1), (65, 64), (66, 3), (300, 299), (513, 20), (40, 7)]
    made = [(rng.integers(0, 257, length).tolist(), n) for length, n in sizes]
    together = hellaswag.score(bytes_model, made, 'cpu', 2)
    # 64 tokens fit in 64: the 65th is only a target
    assert shapes == [(2, 64), (2, 64), (2, 128), (2, 512)]
    for (tokens, n), expected in zip(made, together):
        with torch.no_grad():
            logs = bytes_model(torch.tensor([tokens[:-1]]))[0].double().log_softmax(-1)
        alone = sum(logs[t - 1, tokens[t]].item() for t in range(len(tokens) - n, len(tokens)))
        assert math.isclose(alone, expected, rel_tol=1e-5)
        one = hellaswag.score(bytes_model, [(tokens, n)], 'cpu', 1)[0]
        assert math.isclose(one, expected, rel_tol=1e-6)


def test_a_compiled_model_gives_the_same(tmp_path):
    model = noisy(dataclasses.replace(BYTES, block_size=64))
    path = write(tmp_path / 'items.jsonl', rows(5))
    compiled = Compiled(model, backend='eager')
    found = hellaswag.evaluate(compiled, ByteTokenizer(), path, 'cpu')
    assert found == hellaswag.evaluate(model, ByteTokenizer(), path, 'cpu')


# ------------------------------------------------------------------------------ text

ROW = {
    'activity_label': 'Roof shingle removal',
    'ctx_a': 'A man is sitting on a roof.',
    'ctx_b': 'he',
    'ctx': 'A man is sitting on a roof. he',
    'endings': [
        'is using wrap.',
        ' is ripping  level tiles off. ',
        '[header] How [title] Dry it.',
        'a [step] b',
    ],
    'label': '3',
}


def test_texts():
    """By hand, after lm-evaluation-harness's lm_eval/tasks/hellaswag/utils.py."""
    context, endings, label = hellaswag.render(ROW)
    assert context == 'Roof shingle removal: A man is sitting on a roof. He'
    assert endings == ['is using wrap.', 'is ripping level tiles off.', ' How. Dry it.', 'a b']
    assert label == 3
    marks = '[header] How to dry [title] Open it. [step] Wait [substeps]'
    wikihow = {**ROW, 'activity_label': 'Home', 'ctx_b': '', 'ctx_a': marks}
    assert hellaswag.render(wikihow)[0] == 'Home: How to dry. Open it. Wait '
    only = hellaswag.render(without_parts(ROW))[0]
    assert only == 'Roof shingle removal: A man is sitting on a roof. he'
    assert hellaswag.render({**ROW, 'ctx_b': 'the Man'})[0].endswith('roof. The man')


def test_tokens_are_split_where_the_harness_splits():
    """A space at the context's end goes to the ending; without an EOT in front."""
    assert hellaswag.encode(ByteTokenizer(), 'ab', 'cd') == (list(b'ab cd'), 3)
    assert hellaswag.encode(ByteTokenizer(), 'ab ', 'cd') == (list(b'ab  cd'), 4)
    try:
        gpt2 = get_tokenizer('gpt2')
    except (ImportError, RuntimeError) as error:
        pytest.skip(str(error))
    ids, n = hellaswag.encode(gpt2, 'A man sits on a roof. he', 'starts pulling up roofing.')
    assert gpt2.decode(ids[-n:]) == ' starts pulling up roofing.'
    assert gpt2.decode(ids[:-n]) == 'A man sits on a roof. he'


class Known(torch.nn.Module):
    """A model of which every token's probability is known: é's bytes are e^2 as likely as others."""
    config = BYTES

    def forward(self, idx):
        logits = torch.zeros(*idx.shape, 257)
        logits[..., list('é'.encode())] = 2.0
        return logits


def test_norms():
    """Bytes, not characters, and tokens."""
    endings = ['é' * 3, 'x' * 4, 'x' * 3, 'é' * 8]
    rest = -math.log(2 * math.e**2 + 255)
    logp = 2 + rest
    # with the joining space, which bytes do not count
    sums = np.array([rest + 6 * logp, 5 * rest, 4 * rest, rest + 16 * logp])
    expected = [np.argmax(sums), np.argmax(sums / [6, 4, 3, 16]), np.argmax(sums / [7, 5, 4, 17])]
    assert expected == [2, 3, 3]
    assert np.argmax(sums / [3, 4, 3, 8]) == 1, 'characters would say otherwise'
    picked, _ = hellaswag.picks(Known(), ByteTokenizer(), [('c', endings, 0)], 'cpu', 3)
    assert picked.tolist() == [expected]


def test_summary():
    figures = {'acc': 0.2892, 'acc_norm': 0.3114, 'acc_token': 0.2955}
    line = hellaswag.summary({**figures, 'items': 10042, 'note': ''})
    shown = 'acc 0.2892 ±0.0089 | acc_norm 0.3114 ±0.0091 | acc_token 0.2955 ±0.0089'
    assert line == f'HellaSwag 10,042 items: {shown}'


# ------------------------------------------------------------------------------ the script

@pytest.fixture(scope='module')
def tiny_checkpoint(bytes_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp('checkpoint')
    checkpoint.save(str(folder), checkpoint_of(bytes_model, 7), 1)
    return f'--ckpt={folder}/latest.pt'


def test_the_script(tmp_path, tiny_checkpoint):
    """One process and two ranks print the same figures: those of a bf16 model with the checkpoint's
    weights."""
    path = write(tmp_path / 'items.jsonl', rows(30, only_ctx=True))
    flags = ['hellaswag.py', tiny_checkpoint, f'--data={path}', '--device=cpu', '--limit=20']
    model = noisy(BYTES)
    model.dtype = torch.bfloat16
    expected = hellaswag.summary(hellaswag.evaluate(model, ByteTokenizer(), path, 'cpu', limit=20))
    for done in (run(*flags), torchrun(2, *flags)):
        lines = done.stdout.splitlines()
        assert len(lines) == 3
        assert 'step 7, trained in fp8' in lines[0]
        assert '20 items have only ctx' in lines[1]
        assert lines[2].startswith(f'{expected} | ')
        assert lines[2].endswith(' items/s')


GOOD = json.dumps(rows(1)[0]) + '\n'
FOUR = '"endings": ["a", "b", "c", "d"]'


@pytest.mark.parametrize('content, message', [
    (None, 'python prepare_data.py hellaswag'),
    ('', 'is empty'),
    (GOOD + '{"ctx": "a', 'line 2 is no HellaSwag item'),
    (GOOD + '\n{"ctx": "a", "label": 1, "activity_label": "b"}\n',
     "line 3 is no HellaSwag item (KeyError: 'endings')"),
    ('{"ctx": null, "label": 1, "activity_label": "b", %s}\n' % FOUR, 'line 1 is no'),
    ('{"ctx": "a", "label": "", "activity_label": "b", %s}\n' % FOUR, 'line 1 is no'),
    ('{"ctx": "a", "label": 4, "activity_label": "b", %s}\n' % FOUR, '4 endings, label 4'),
    ('\x80\x00', 'line 1 is no'),
    ('[1]', 'line 1 is no'),
    ('7', 'line 1 is no'),
])
def test_files_that_are_none(tmp_path, content, message):
    path = tmp_path / 'items.jsonl'
    if content is not None:
        path.write_text(content, encoding='latin-1')
    with pytest.raises((FileNotFoundError, RuntimeError)) as refusal:
        hellaswag.read(str(path))
    assert message in str(refusal.value)
    assert str(path) in str(refusal.value)
    assert '\n' not in str(refusal.value)


def test_errors_are_one_line(tmp_path, tiny_checkpoint):
    (tmp_path / 'bad.jsonl').write_text('{"ctx": 1}\n')
    refused = run('hellaswag.py', tiny_checkpoint, f'--data={tmp_path}/bad.jsonl', rc=1)
    assert f'{tmp_path}/bad.jsonl, line 1' in refused.stderr


def test_a_missing_file_is_refused(tmp_path, bytes_model):
    with pytest.raises(MissingError, match='prepare_data.py hellaswag') as refusal:
        hellaswag.evaluate(bytes_model, ByteTokenizer(), f'{tmp_path}/none.jsonl', 'cpu')
    assert refusal.value.exit_code == 1


def test_importing_it_reads_no_command_line(monkeypatch):
    monkeypatch.setattr('sys.argv', ['train.py', '--max_steps=3', '--limit=5', '--help'])
    assert importlib.reload(hellaswag).config['limit'] == 0
