import os
import signal

import pytest

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
