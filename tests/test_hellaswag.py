"""Brute force against batches: the model scores one ending at a time, without padding, from tiktoken's own
tokens. (test_model.py holds the model to transformers' GPT-2.)"""
import dataclasses
import json
import math

import numpy as np
import pytest
import torch

import hellaswag
from configurator import UserError
from conftest import ROOT, in_ranks, run
from helpers import Waits, checkpoint_of, with_noise
from fp8gpt import checkpoint, distributed
from model import GPT, GPTConfig
from preparing import written
from fp8gpt.tokenizer import ByteTokenizer, get_tokenizer
from tokenizers_made import BEGIN, make_tokenizer

BYTES = GPTConfig(vocab_size=257, block_size=512, n_layer=2, n_head=2, n_embd=32)
PATH = ROOT / 'tests/data/hellaswag.jsonl'
ITEMS = [json.loads(line) for line in PATH.read_text().splitlines()]     # 20


def noisy(config):
    """A model whose weights are far enough from their start to prefer something."""
    return with_noise(GPT(config, dtype=torch.float32), std=0.3)


@torch.no_grad()
def picks(model, encode, context, endings):
    """The endings that brute force picks by sum, per byte and per token: a row each, without padding."""
    start, longest, scores = len(encode(context)), model.config.block_size, []
    for ending in endings:
        ids = encode(f'{context} {ending}')
        n = min(len(ids) - start, longest)
        ids = torch.tensor(ids)[-(longest + 1):]
        logs = model(ids[None, :-1])[0, -n:].log_softmax(-1)[range(n), ids[-n:]]
        total = logs.double().sum().item()
        scores.append([total, total / len(ending.encode()), total / n])
    return np.argmax(scores, 0)


def compare(model, tokenizer, encode, texts, batch_size):
    """Assert that our figures are those of brute force's picks; return how many endings were cut.

    texts: [(context, four endings)] of ITEMS."""
    expected = np.array([picks(model, encode, *text) for text in texts])        # (20, 3)
    result = hellaswag.evaluate(model, tokenizer, str(PATH), 'cpu', batch_size=batch_size)
    labels = [int(row['label']) for row in ITEMS]
    figures = (expected == np.array(labels)[:, None]).mean(0)
    assert [result[name] for name in hellaswag.FIGURES] == figures.tolist()
    for column in expected.T:
        assert min(np.bincount(column, minlength=4)) > 0, 'the model always picks the same endings'
    assert len({tuple(column) for column in expected.T}) == 3, 'the three figures are to differ'
    return int(result['note'].split()[0]) if result['note'] else 0


def test_items_are_scored_as_one_ending_at_a_time(small_gpt2):
    """None of these items has marks to remove."""
    model = noisy(GPTConfig(vocab_size=513, block_size=256, n_layer=2, n_head=2, n_embd=16))
    texts = []
    for row in ITEMS:
        context = f'{row["ctx_a"]} {row["ctx_b"].capitalize()}' if 'ctx_a' in row else row['ctx']
        texts.append((f'{row["activity_label"]}: {context}'.rstrip(), row['endings']))
    assert compare(model, get_tokenizer('gpt2'), small_gpt2.encode, texts, 2) == 0


def test_truncation_keeps_the_ending():
    """Of the 80 rows some (120) or all (40) are too long; at 40, so are some endings. As bytes are split, the
    space at a context's end goes to the endings."""
    texts = []
    for context, endings, _ in hellaswag.read_items(str(PATH)):
        start = context.rstrip()
        texts.append((start, [context[len(start):] + ending for ending in endings]))
    for block_size, fewest, most in ((120, 20, 60), (40, 80, 80)):
        model = noisy(dataclasses.replace(BYTES, block_size=block_size))
        cut = compare(model, ByteTokenizer(), lambda text: list(text.encode()), texts, 7)
        assert fewest <= cut <= most


@pytest.fixture(scope='module')
def bytes_model():
    return noisy(BYTES)


def test_batch_sizes_and_order_change_nothing_and_shapes_are_few(bytes_model, tmp_path):
    def evaluate(path, **kwargs):
        return hellaswag.evaluate(bytes_model, ByteTokenizer(), str(path), 'cpu', **kwargs)
    whole, shapes = evaluate(PATH, batch_size=1), []
    assert (whole['items'], whole['note']) == (20, '')
    hook = bytes_model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    assert evaluate(written(tmp_path / 'reversed.jsonl', ITEMS[::-1]), batch_size=17) == whole
    hook.remove()
    assert set(shapes) == {(17, 128), (17, 256)}     # full, whatever is left over
    assert evaluate(PATH, limit=10) == evaluate(written(tmp_path / 'ten.jsonl', ITEMS[:10]))


def test_a_model_whose_scores_are_nan_has_no_accuracy():
    """NaN would be the largest score, and the first ending right as often as by chance."""
    broken = noisy(BYTES)
    torch.nn.init.constant_(broken.ln_f.weight, math.nan)
    result = hellaswag.evaluate(broken, ByteTokenizer(), str(PATH), 'cpu')
    assert all(math.isnan(result[figure]) for figure in hellaswag.FIGURES)


def test_a_sum_per_byte_counts_bytes(monkeypatch, tmp_path):
    """-3.6 over 6 bytes is above -2.1 over 3, and over 3 characters below it."""
    monkeypatch.setattr(hellaswag, 'score', lambda *_, **__: np.array([-2.1, -3.6, -9.0, -9.0]))
    row = {'activity_label': 'a', 'ctx': 'b', 'label': 1, 'endings': ['aaa', 'äää', 'c', 'd']}
    path = written(tmp_path / 'a.jsonl', [row])
    result = hellaswag.evaluate(noisy(BYTES), ByteTokenizer(), str(path), 'cpu')
    assert [result[name] for name in hellaswag.FIGURES] == [0.0, 1.0, 1.0]     # as bytes, tokens: 4 and 7


def test_ranks_share_the_rows_in_as_many_forwards(bytes_model):
    """Each score is made on one rank."""
    texts = [hellaswag.encode(ByteTokenizer(), context, ending)
             for context, endings, _ in map(hellaswag.render, ITEMS[:5]) for ending in endings]
    whole = hellaswag.score(bytes_model, texts, 'cpu', 3)
    assert (whole < 0).all()
    for world_size in (2, 9):
        calls = []
        hook = bytes_model.register_forward_pre_hook(lambda *_: calls.append(1))
        parts = [hellaswag.score(bytes_model, texts, 'cpu', 3, rank, world_size)
                 for rank in range(world_size)]
        hook.remove()
        assert len(calls) == world_size * -(-7 // world_size)       # 20 rows are 7 batches
        assert np.count_nonzero(parts) == 20
        np.testing.assert_allclose(np.sum(parts, 0), whole)


def test_a_gpu_is_waited_for_at_the_end_alone(bytes_model, monkeypatch):
    monkeypatch.setattr(distributed.StopRequest, 'latest', None)
    texts = [(list(range(20, 40)), n) for n in (3, 5, 9)]
    with Waits() as waits:
        hellaswag.score(bytes_model, texts, 'cpu', 2)
    assert waits.found == ['cpu', 'numpy']


ROW = {
    'activity_label': 'Roof shingle removal', 'ctx_a': 'A man is sitting on a roof.', 'ctx_b': 'he',
    'ctx': 'A man is sitting on a roof. he', 'label': '3',
    'endings': ['is using wrap.', ' is ripping  level tiles off. ', '[header] How [title] Dry it.',
                'a [step] b']}


def test_an_item_is_rendered_as_the_harness_renders_it():
    """By hand, after lm-evaluation-harness's lm_eval/tasks/hellaswag/utils.py."""
    context, endings, label = hellaswag.render(ROW)
    assert context == 'Roof shingle removal: A man is sitting on a roof. He'
    assert endings == ['is using wrap.', 'is ripping level tiles off.', ' How. Dry it.', 'a b']
    assert label == 3
    marks = '[header] How to dry [title] Open it. [step] Wait [substeps]'
    wikihow = {**ROW, 'activity_label': 'Home', 'ctx_b': '', 'ctx_a': marks}
    assert hellaswag.render(wikihow)[0] == 'Home: How to dry. Open it. Wait '
    del wikihow['ctx_a']
    wikihow['ctx'] = 'Open it. then'        # the only text of some rows
    assert hellaswag.render(wikihow)[0] == 'Home: Open it. then'
    assert hellaswag.render({**ROW, 'ctx_b': 'the Man'})[0].endswith('roof. The man')


def test_tokens_are_split_where_the_harness_splits(small_gpt2, tmp_path):
    """A space at the context's end goes to the ending. No EOT stands before the context, but a prefix that
    tokenizer.json adds does."""
    assert hellaswag.encode(ByteTokenizer(), 'ab ', 'cd') == (list(b'ab  cd'), 4)
    gpt2 = get_tokenizer('gpt2')
    ids, n = hellaswag.encode(gpt2, 'A man sits on a roof. he', 'starts pulling up roofing.')
    assert gpt2.decode(ids[-n:]) == ' starts pulling up roofing.'
    assert gpt2.decode(ids[:-n]) == 'A man sits on a roof. he'
    begins = get_tokenizer(make_tokenizer(tmp_path / 'begin'))
    whole = begins.encode('a context and an end').tolist()
    n = len(whole) - len(begins.encode('a context'))
    assert hellaswag.encode(begins, 'a context', 'and an end') == ([BEGIN, *whole], n)
    bare = get_tokenizer(make_tokenizer(tmp_path / 'bare', adds_begin=False))
    assert hellaswag.encode(bare, 'a context', 'and an end') == (whole, n)
    for adds_begin in True, False:      # an ending that joins the context, and the harness fails
        joins = get_tokenizer(make_tokenizer(tmp_path / f'joins {adds_begin}', adds_begin, words=['a b c']))
        whole = joins.encode('a b c').tolist()
        assert len(whole) == 1 < len(joins.encode('a b'))
        assert hellaswag.encode(joins, 'a b', 'c') == ([BEGIN, *whole], 1)


def test_the_script(tmp_path, bytes_model):
    """One process and two ranks print the same figures: those of a bf16 model with the checkpoint's
    weights."""
    checkpoint.save(str(tmp_path), checkpoint_of(bytes_model, 7), 1)
    flags = [f'--ckpt={tmp_path}/latest.pt', f'--data={PATH}', '--device=cpu', '--hellaswag_items=7']
    model = noisy(BYTES)
    model.dtype = torch.bfloat16
    result = hellaswag.evaluate(model, ByteTokenizer(), str(PATH), 'cpu', limit=7)
    figures = ((name, result[name], 1.96 * (result[name] * (1 - result[name]) / 7)**0.5)    # 95%
               for name in hellaswag.FIGURES)
    expected = 'HellaSwag 7 items: ' + ' | '.join(f'{name} {p:.4f} ±{half:.4f}' for name, p, half in figures)
    for done in (run('hellaswag.py', *flags), in_ranks(2, 'hellaswag.py', *flags)):
        lines = done.stdout.splitlines()
        assert len(lines) == 2
        assert 'step 7, trained in fp8' in lines[0]
        assert lines[1].startswith(f'{expected} | ')
        assert lines[1].endswith(' items/s')


def test_a_file_without_items_is_refused_in_one_line(tmp_path):
    good = json.dumps(ITEMS[0]) + '\n'
    four = '"activity_label": "b", "endings": ["a", "b", "c", "d"]'
    path, wrong = tmp_path / 'items.jsonl', []
    for content, message in (
            (None, 'python prepare_data.py hellaswag'),
            ('', 'is empty'),
            (good + '{"ctx": "a', 'line 2 is not a HellaSwag item'),
            (good + '{"ctx": "a", "label": 1, "activity_label": "b"}\n', 'line 2 is not'),
            ('{"ctx": null, "label": 1, %s}\n' % four, 'line 1 is not'),
            ('{"ctx": "a", "label": 4, %s}\n' % four, '4 endings, label 4'),
            *(('{"ctx": "a", "label": %s, %s}\n' % (label, four), 'line 1 is not')
              for label in ('2.7', 'true', '1e400', '[]')),
            ('{"ctx": "a", "label": 1, "activity_label": "b", "endings": "abcd"}\n', 'line 1 is not'),
            ('[' * 100_000, 'line 1 is not'),
            ('\x80\x00' * 999, 'line 1 is not'), ('[1]', 'line 1 is not')):
        if content is not None:
            path.write_text(content, encoding='latin-1')
        with pytest.raises(UserError) as refusal:
            hellaswag.evaluate(None, None, str(path), 'cpu')
        said = str(refusal.value)
        if message not in said or str(path) not in said or '\n' in said or len(said) > 500:
            wrong.append((content, said))
    assert wrong == []
    path.write_text(f'{good}\n{good}\n')
    assert len(hellaswag.read_items(path, 2)) == 2      # blank lines are no items
