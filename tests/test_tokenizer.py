import os

import pytest

from tokenizer import get_tokenizer

TEXT = 'naïve 日本語 🙂 <|endoftext|>\n\tend'


def test_bytes():
    t = get_tokenizer('byte')
    assert t.encode('é\n').tolist() == [0xC3, 0xA9, 10] and t.decode(t.encode(TEXT)) == TEXT
    assert t.decode([256, 72, 105]) == 'Hi' and t.eot == 256 and t.vocab_size == 257
    assert t.encode('a\ud800b').tolist() == list(b'a?b')


def test_gpt2_is_tiktokens():
    if not os.path.isdir(os.environ['TIKTOKEN_CACHE_DIR']):
        pytest.skip('no TIKTOKEN_CACHE_DIR with GPT-2\'s files')
    import tiktoken
    t = get_tokenizer('gpt2')
    assert t.encode(TEXT).tolist() == tiktoken.get_encoding('gpt2').encode_ordinary(TEXT)
    assert t.decode(t.encode(TEXT)) == TEXT and (t.eot, t.vocab_size) == (50256, 50257)
    assert t.encode('Hello world').tolist() == [15496, 995]  # as published for GPT-2
    assert t.decode(t.encode('a\ud800b')) == 'a?b'


def test_unknown_name():
    with pytest.raises(ValueError, match='there are gpt2, byte'):
        get_tokenizer('gpt3')
