"""The tokenizers, and what a tokenizer.json says."""
import hashlib
import json
import os
import pathlib
import shutil

import numpy as np
from tokenizers import Tokenizer, models
import pytest

import prepare_data
import transformers
from fp8gpt import tokenizer
from configurator import DataError, MachineError, MissingError, SettingError
from preparing import needs_bpe
from fp8gpt.tokenizer import EOT, get_tokenizer
from tokenizers_made import BEGIN, END, END_OF_TURN, make_tokenizer

TEXT = 'naïve 日本語 🙂 <|endoftext|>\n\tend'


def test_a_byte_is_a_token():
    t = get_tokenizer('byte')
    assert t.encode('é\n').tolist() == [0xC3, 0xA9, 10]
    assert t.decode(t.encode(TEXT)) == TEXT
    assert t.decode([256, 72, 105]) == 'Hi'
    assert (t.eot, t.vocab_size) == (256, 257)
    assert t.encode('a\ud800b').tolist() == list(b'a?b')
    assert t.encode(f'{EOT}a{EOT * 2}', special=True).tolist() == [256, 97, 256, 256]


def test_gpt2_is_tiktokens(small_gpt2):
    gpt2 = get_tokenizer('gpt2')
    assert (gpt2.name, gpt2.eot, gpt2.vocab_size, gpt2.stops) == ('gpt2', 512, 513, (512,))
    ids = gpt2.encode(TEXT)
    assert ids.dtype == np.uint16
    assert ids.tolist() == small_gpt2.encode_ordinary(TEXT)
    assert 512 not in ids                   # <|endoftext|> in a text is text, in a prompt EOT
    assert gpt2.encode(TEXT, special=True).tolist() == small_gpt2.encode(TEXT, allowed_special='all')
    assert gpt2.decode([512, *ids, 513]) == TEXT        # 513 pads a model
    assert gpt2.decode(gpt2.encode('a\ud800b')) == 'a?b'
    with pytest.raises(DataError, match='tiktoken cannot encode a million blanks in a row'):
        gpt2.encode(' ' * 2**20 + 'x')


@needs_bpe
def test_gpt2_has_the_ids_that_were_published():
    gpt2 = get_tokenizer('gpt2')
    assert (gpt2.eot, gpt2.vocab_size) == (50256, 50257)
    assert gpt2.encode('Hello world').tolist() == [15496, 995]


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp('made') / 'small', words=['grosser'],
                          generation={'eos_token_id': [END_OF_TURN, END]})


def test_a_tokenizer_json_is_transformers(made):
    from transformers import AutoTokenizer
    theirs, ours = AutoTokenizer.from_pretrained(made), get_tokenizer(made)
    for text in (TEXT, 'grosser als größe', ' leading', 'trailing \n\n', '', 'a' * 5000):
        ids = ours.encode(text)
        assert ids.tolist() == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids.tolist()) == text
        assert [*ours.prefix, *ids.tolist()] == theirs.encode(text)
    assert (ours.start, ours.eot) == (theirs.bos_token_id, theirs.eos_token_id) == (BEGIN, END)
    assert ours.vocab_size == len(theirs)
    assert ours.stops == (END, END_OF_TURN)
    assert ours.encode('a\ud800b').tolist() == ours.encode('a?b').tolist()
    assert END in ours.encode('a<|end|>b', special=True)
    assert END not in ours.encode('a<|end|>b')      # in a text, special tokens are text


def test_a_vocabulary_with_gaps_reaches_to_its_last_id(tmp_path):
    library = Tokenizer(models.WordLevel({'a': 0, 'b': 5, '<end>': 9}, unk_token='a'))
    library.save(str(tmp_path / 'tokenizer.json'))
    (tmp_path / 'tokenizer_config.json').write_text('{"eos_token": "<end>"}')
    assert get_tokenizer(str(tmp_path)).vocab_size == 10


def test_a_tokenizer_of_another_kind_is_run_or_refused_in_one_line(tmp_path):
    pieces = [('<unk>', 0.0), ('</s>', 0.0), ('a', -1.0), ('ab', -1.5)]
    library = Tokenizer(models.Unigram(pieces, unk_id=0))
    library.enable_truncation(1)        # as a pipeline for short texts left it
    library.enable_padding(length=9, pad_token='<unk>')
    library.save(str(tmp_path / 'tokenizer.json'))
    (tmp_path / 'tokenizer_config.json').write_text('{"eos_token": "</s>"}')
    unigram = get_tokenizer(str(tmp_path))
    assert (unigram.eot, unigram.vocab_size, unigram.encode('aba').tolist()) == (1, 4, [3, 2])
    Tokenizer(models.Unigram(pieces)).save(str(tmp_path / 'tokenizer.json'))        # without unk_id
    with pytest.raises(DataError, match="cannot encode 'abc'"):
        get_tokenizer(str(tmp_path)).encode('abc')
    for model in ({'vocab': {}, 'merges': []}, {'vocab': {'\ud800': 0}, 'merges': []},
                  {'vocab': {'a': 'b'}}, {'vocab': 7}, 'x', {}):
        (tmp_path / 'tokenizer.json').write_text(json.dumps({'version': '1.0', 'model': model}))
        with pytest.raises(DataError, match='is not a valid tokenizer.json|has no vocabulary'):
            get_tokenizer(str(tmp_path))


def test_a_folder_without_a_vocabulary_is_refused(tmp_path):
    """transformers makes a LlamaTokenizer of it that encodes any text to nothing, and saves that."""
    config = {'tokenizer_class': 'LlamaTokenizer', 'bos_token': '<s>', 'eos_token': '</s>'}
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(config))
    with pytest.raises(MissingError, match='has no tokenizer.json'):
        get_tokenizer(str(tmp_path))
    transformers.AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    empty = Tokenizer(models.BPE())
    empty.add_special_tokens(['<s>', '</s>'])
    for text in (tmp_path / 'tokenizer.json').read_text(), empty.to_str():
        (tmp_path / 'tokenizer.json').write_text(text)
        with pytest.raises(DataError, match='tokenizer.json has no vocabulary but added tokens'):
            get_tokenizer(str(tmp_path))


def test_a_tokenizers_files_are_those_of_its_folder(made, tmp_path):
    """Links of the Hugging Face cache lead to its blobs; others, which may lead to any file of the user, are
    refused. What is no file is none."""
    secret, blobs, snapshot = (tmp_path / name for name in ('secret', 'm/blobs', 'm/snapshots/r'))
    secret.write_text('{"key": 1}')
    shutil.copytree(made, blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f'../../blobs/{path.name}')
    copy = tmp_path / 'copy'
    tokenizer.keep_files(get_tokenizer(str(snapshot)).folder, str(copy))
    assert get_tokenizer(str(copy)).name == get_tokenizer(made).name
    assert not any(path.is_symlink() for path in copy.iterdir())
    stranger = tmp_path / 'stranger'
    shutil.copytree(made, stranger)
    for target in secret, 'nowhere':
        (stranger / 'generation_config.json').unlink()
        (stranger / 'generation_config.json').symlink_to(target)
        for refuses in (lambda: get_tokenizer(str(stranger)), lambda: tokenizer.keep_files(stranger, copy)):
            with pytest.raises(DataError, match='generation_config.json is a link: put the file'):
                refuses()
    (stranger / 'generation_config.json').unlink()
    os.mkfifo(stranger / 'generation_config.json')      # it would be waited for
    tokenizer.keep_files(str(stranger), tmp_path / 'other')
    assert not (tmp_path / 'other' / 'generation_config.json').exists()


@pytest.mark.parametrize('made_of, opening', [
    ({}, [BEGIN]), ({'adds_begin': False}, []), ({'adds_begin': False, 'bos_token': '<|turn|>'}, []),
    ({'adds_end': True}, [BEGIN]), ({'prepends': True}, [BEGIN]), ({'eos_token': '<|begin|>'}, [BEGIN]),
    ('gpt2', [512]), ('byte', [256])], ids=str)
def test_a_document_begins_as_a_text_and_ends_by_eot(made_of, opening, small_gpt2, tmp_path):
    one = get_tokenizer(made_of if isinstance(made_of, str) else make_tokenizer(tmp_path, **made_of))
    documents, folder = ['a b', 'a text', 'end'], str(tmp_path)
    rows = [prepare_data.Texts(one, 'text').of_row({'text': text})[0] for text in documents]
    for text, ids in zip(documents, rows):
        ends = [] if opening == [one.eot] else [one.eot]
        assert ids.tolist() == [*opening, *one.encode(text), *ends]
    if one.folder:
        theirs = transformers.AutoTokenizer.from_pretrained(folder)('a b').input_ids
        assert theirs[:len(rows[0]) - 1] == rows[0][:-1].tolist()


def test_a_stream_is_the_whole_text_piece_by_piece(made, small_gpt2):
    for one in map(get_tokenizer, (made, 'byte', 'gpt2')):
        ids = one.encode('ab größe \U0001f642 end').tolist()
        pieces = list(one.stream(iter(ids)))
        assert ''.join(pieces) == 'ab größe \U0001f642 end'
        assert len(pieces) >= len(ids)
        assert pieces[0]


def test_a_stream_holds_bytes_that_are_no_character(tmp_path):
    path = tmp_path / 'made' / 'tokenizer.json'
    known = json.loads(pathlib.Path(make_tokenizer(path.parent, prepends=True), path.name).read_text())
    known['added_tokens'] = known['added_tokens'][:4]       # bytes are no special tokens in Llama 2
    path.write_text(json.dumps(known))
    one = get_tokenizer(str(path.parent))
    euro, word = (one.encode(text).tolist() for text in ('\u20ac', 'a the'))
    # the decoder takes bytes in a row together, so what is cut off changes what was whole
    pieces = [*one.stream([*euro, euro[-3], *word, euro[-3]], word)]
    assert ''.join(pieces) == ' \u20ac\ufffd\ufffd\ufffd a the\ufffd'
    assert pieces[:4] == [' ', '', '', '\u20ac']


def test_bos_and_eos_are_tokenizer_configs_or_else_generation_configs(tmp_path):
    def ends(folder):
        tokenizer = get_tokenizer(folder)
        return tokenizer.start, tokenizer.eot, tokenizer.stops
    folder, generation = tmp_path / 'made', {'bos_token_id': 2, 'eos_token_id': [3, 1]}
    # as Qwen's: its model's bos_token_id is not BOS
    assert ends(make_tokenizer(folder, generation=generation, bos_token=None)) == (END, END, (END, 3))
    assert ends(make_tokenizer(folder, generation=generation)) == (BEGIN, END, (END, 3))
    (folder / 'tokenizer_config.json').unlink()
    assert ends(str(folder)) == (2, 3, (3, 1))
    beyond = [10**6, -1, True]      # of a model with more tokens, or of nothing
    assert ends(make_tokenizer(folder, generation={'eos_token_id': [*beyond, 3]})) == (BEGIN, END, (END, 3))
    closing = "{% for m in messages %}{{ m.content + '</said><|end_of_turn|>' }}{% endfor %}"
    assert ends(make_tokenizer(folder, chat_template=closing)) == (BEGIN, END, (END, 3))
    for odd in 5, {'default': 5}:
        assert get_tokenizer(make_tokenizer(folder, chat_template=odd)).chat_template is None
    (folder / 'tokenizer_config.json').unlink()
    for ids in beyond, None:
        (folder / 'generation_config.json').write_text(json.dumps({'eos_token_id': ids}))
        with pytest.raises(DataError, match='has no EOS token'):
            get_tokenizer(str(folder))


def test_its_identity_is_its_hash_and_finds_its_copy(made, tmp_path):
    name = get_tokenizer(made).name
    assert name == 'sha256:' + hashlib.sha256(pathlib.Path(made, 'tokenizer.json').read_bytes()).hexdigest()
    copy = tmp_path / 'copy'
    copy.mkdir()
    with pytest.raises(MissingError, match='copy/tokenizer.json is missing'):
        get_tokenizer(name, str(copy))
    tokenizer.keep_files(made, str(copy))
    found = get_tokenizer(name, str(copy))
    assert (found.name, found.stops) == (name, get_tokenizer(made).stops)
    more = shutil.copytree(made, tmp_path / 'more')
    (more / 'added_tokens.json').write_text(json.dumps({'<extra>': found.vocab_size}))      # older files'
    tokenizer.keep_files(more, str(copy))
    ids = [get_tokenizer(str(place)).encode('a<extra>', special=True).tolist() for place in (more, copy)]
    assert ids[0] == ids[1] and ids[0][-1] == found.vocab_size
    make_tokenizer(copy, words=['other'])
    with pytest.raises(MissingError, match='or not the sha256:'):
        get_tokenizer(name, str(copy))


def test_a_tokenizer_that_is_missing_is_one_line(made, tmp_path, monkeypatch):
    def offline(*words, **patterns):
        raise ConnectionError

    def cached(name, revision, allow_patterns):
        return made if name == 'some/model' else offline()
    monkeypatch.setattr('huggingface_hub.snapshot_download', cached)
    assert get_tokenizer('some/model').name == get_tokenizer(made).name
    monkeypatch.setattr('tiktoken.get_encoding', offline)
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'tokenizer.json').write_text('{')
    for name, error, said in (
            ('gpt3', SettingError, 'there are gpt2, byte'),
            (str(tmp_path), DataError, 'is not a valid tokenizer.json'),
            (str(tmp_path / 'empty'), MissingError, 'has no tokenizer.json'),
            ('owner/name', MachineError, r'owner/name cannot be fetched \(ConnectionError\).*set HF_TOKEN'),
            ('gpt2', MachineError, 'set TIKTOKEN_CACHE_DIR')):
        with pytest.raises(error, match=said):
            get_tokenizer(name)
