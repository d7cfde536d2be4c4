import os
import re
import signal
import sys
import types

import numpy as np
import pytest

import tokenizer
from configurator import MachineError, SettingError
from tokenizer import ByteTokenizer, Workers, get_tokenizer

TEXT = 'naïve 日本語 🙂 <|endoftext|>\n\tend'


def test_bytes():
    t = get_tokenizer('byte')
    assert t.encode('é\n').tolist() == [0xC3, 0xA9, 10]
    assert t.decode(t.encode(TEXT)) == TEXT
    assert t.decode([256, 72, 105]) == 'Hi'
    assert t.eot == 256
    assert t.vocab_size == 257
    assert t.encode('a\ud800b').tolist() == list(b'a?b')


def test_gpt2_is_tiktokens():
    if not os.path.isdir(os.environ['TIKTOKEN_CACHE_DIR']):
        pytest.skip('no TIKTOKEN_CACHE_DIR with GPT-2\'s files')
    import tiktoken
    t = get_tokenizer('gpt2')
    assert t.encode(TEXT).tolist() == tiktoken.get_encoding('gpt2').encode_ordinary(TEXT)
    assert t.decode(t.encode(TEXT)) == TEXT
    assert (t.eot, t.vocab_size) == (50256, 50257)
    assert t.encode('Hello world').tolist() == [15496, 995]  # as published for GPT-2
    assert t.decode(t.encode('a\ud800b')) == 'a?b'


def test_unknown_name():
    with pytest.raises(SettingError, match='there are gpt2, byte'):
        get_tokenizer('gpt3')


@pytest.mark.parametrize('count', [1, 2])
def test_workers_encode_in_order_with_the_positions(count):
    texts = ['one', 'größe', 'x' * 2**20, 'two' * 1000, 'one']  # the third is a chunk of its own
    with Workers(ByteTokenizer(), count) as workers:
        documents = list(workers.encode((text, [0, i]) for i, text in enumerate(texts)))
    positions, ids, keys, sizes = zip(*documents)
    assert positions == tuple([0, i] for i in range(5))
    assert [i.tolist() for i in ids] == [[256, *text.encode()] for text in texts]
    assert sizes == tuple(len(text.encode()) for text in texts)
    assert keys[0] == keys[4]
    assert len(set(keys)) == 4


def test_a_worker_that_is_killed_is_one_line():
    def documents():
        yield 'x' * 2**20, 0
        for pid in workers.pool._processes:
            os.kill(pid, signal.SIGKILL)
        for i in range(10):
            yield 'x' * 2**20, i

    with Workers(ByteTokenizer(), 2) as workers:
        with pytest.raises(MachineError, match='a worker was killed.*the same command goes on'):
            list(workers.encode(documents()))


# ------------------------------------------------------------------------------------------------- gigatoken

@pytest.fixture
def gpt2():
    if not os.path.isdir(os.environ['TIKTOKEN_CACHE_DIR']):
        pytest.skip("no TIKTOKEN_CACHE_DIR with GPT-2's files")
    return get_tokenizer('gpt2')


@pytest.fixture
def gigatoken(gpt2, monkeypatch):
    """A stand-in for the package: made, the vocabularies it was given; asked, the texts. It is wrong on the
    texts in `wrong`."""
    fake = types.SimpleNamespace(made=[], asked=[], wrong=[])

    class Tokenizer:
        @staticmethod
        def from_tiktoken(path, pretokenizer, special_tokens):
            assert (pretokenizer, special_tokens) == ('gpt2', {})
            with open(path, 'rb') as file:
                fake.made.append(file.read())
            return Tokenizer()

        def encode(self, text):
            fake.asked.append(text)
            right = gpt2.encode(text).astype(np.uint32)
            return right[:-1] if text in fake.wrong else right
    fake.Tokenizer = Tokenizer
    monkeypatch.setitem(sys.modules, 'gigatoken', fake)
    monkeypatch.setattr(tokenizer, 'CHUNK', 100)
    monkeypatch.setattr(tokenizer, 'CHECKED', 10)
    return fake


def encoded(gpt2, texts, count=1):
    with Workers(gpt2, count) as workers:
        return [ids[1:].tolist() for _, ids, _, _ in workers.encode((text, 0) for text in texts)]


TEXTS = [f'document {i} of {TEXT}' for i in range(40)]


@pytest.mark.parametrize('count', [1, 2])
def test_gigatoken_is_taken_where_it_is_installed(gpt2, gigatoken, capsys, count):
    assert encoded(gpt2, TEXTS, count) == [gpt2.encode(text).tolist() for text in TEXTS]
    assert capsys.readouterr().out == 'tokenized by gigatoken, checked against tiktoken\n'


def test_gigatokens_vocabulary_is_tiktokens(gpt2, gigatoken):
    encoded(gpt2, TEXTS)
    lines = gigatoken.made[0].splitlines()
    assert (lines[0], lines[-1]) == (b'IQ== 0', b'IGdhemVk 50255')
    assert len(lines) == 50256


@pytest.mark.parametrize('wrong', [0, 19], ids=['first chunk', 'every tenth'])
@pytest.mark.parametrize('count', [1, 2])
def test_a_difference_ends_gigatoken(gpt2, gigatoken, capsys, wrong, count):
    """With more processes each counts its own documents, so that the twentieth may not be a tenth."""
    gigatoken.wrong = TEXTS[wrong:] if count == 2 else [TEXTS[wrong]]
    found = encoded(gpt2, TEXTS * 4, count)
    assert capsys.readouterr().out.count('WARNING: gigatoken and tiktoken differ') == 1
    assert found[-40:] == [gpt2.encode(text).tolist() for text in TEXTS]
    if count == 1:
        assert gigatoken.asked == TEXTS[:wrong + 1]


def test_what_is_not_checked_is_gigatokens(gpt2, gigatoken):
    gigatoken.wrong = [TEXTS[17]]
    found = encoded(gpt2, TEXTS)
    differs = [found[i] != gpt2.encode(text).tolist() for i, text in enumerate(TEXTS)]
    assert [i for i, one in enumerate(differs) if one] == [17]


def test_gigatokens_cache_is_emptied(gpt2, gigatoken, monkeypatch):
    monkeypatch.setattr(tokenizer, 'RENEWED', sum(map(len, TEXTS)) // 4)
    encoded(gpt2, TEXTS)
    assert len(gigatoken.made) == 5
    assert len(set(gigatoken.made)) == 1


@pytest.mark.parametrize('package, reason', [
    (None, 'makes it faster'), (types.SimpleNamespace(), 'gigatoken fails: .* has no attribute')])
def test_without_gigatoken_tiktoken_runs(gpt2, monkeypatch, capsys, package, reason):
    monkeypatch.setitem(sys.modules, 'gigatoken', package)
    assert encoded(gpt2, TEXTS[:1]) == [gpt2.encode(TEXTS[0]).tolist()]
    assert re.match(f'tokenized by tiktoken; .*{reason}', capsys.readouterr().out)


@pytest.mark.parametrize('text', [
    '', ' ', TEXT, ' ' * 5000, "don't I'LL", '\u200b\u3000x', '\r\n\t', 'a' * 5000, '1234567 \u0663\u0664',
    '\x00\x1c\x85 y', 'a\ud800b', '\u017f K', ' ' * 2**20])
def test_gigatoken_itself_agrees(gpt2, text):
    pytest.importorskip('gigatoken', reason='gigatoken is not installed')
    fast = tokenizer.Gigatoken(gpt2)
    fast.characters = tokenizer.CHUNK  # past what is checked
    assert fast.encode(text).tolist() == gpt2.encode(text).tolist()
