"""A tokenizer's files, for transformers' AutoTokenizer: written, and recognised."""
import contextlib
import hashlib
import os

from fp8gpt import files
from fp8gpt.tokenizer import keep_files

EOT = '<|endoftext|>'
GPT2_TOKENS = 'e35a33a0b2250c932ffdafc4c3a3552aef0cc7af7a11e9ebfddf1d2a6517371f'  # SHA-256 of GPT-2's tokens


def identity(folder):
    """The identity of a folder's tokenizer: 'gpt2', 'byte', or its file's hash; '' where there is none."""
    path = os.path.join(folder, 'tokenizer.json')
    if not os.path.isfile(path):
        return ''
    known = {tokens_hash(bpe_file(byte_tokens())): 'byte', GPT2_TOKENS: 'gpt2'}
    with contextlib.suppress(KeyError, TypeError):  # of another kind of tokenizer
        found = tokens_hash(files.read_json(path))
        if found in known:
            return known[found]
    with open(path, 'rb') as file:
        return f'sha256:{hashlib.sha256(file.read()).hexdigest()}'


def tokens_hash(content):
    """SHA-256 of a tokenizer.json's tokens, in order."""
    tokens = content['model']['vocab']
    return hashlib.sha256('\n'.join(sorted(tokens, key=tokens.get)).encode()).hexdigest()


def write_tokenizer(tokenizer, folder):
    """Writes what AutoTokenizer needs: the files of a tokenizer.json, as they are, or what byte's and gpt2's
    would be. Raises DataError."""
    if tokenizer.folder is not None:
        keep_files(tokenizer.folder, folder)
        return
    if tokenizer.name == 'byte':
        content = bpe_file(byte_tokens())
    else:
        content = bpe_file([tokenizer.encoding.decode_single_token_bytes(i) for i in range(tokenizer.eot)])
    files.write_json(os.path.join(folder, 'tokenizer.json'), content)
    settings = {'tokenizer_class': 'PreTrainedTokenizerFast', 'bos_token': EOT, 'eos_token': EOT,
                'clean_up_tokenization_spaces': False}
    files.write_json(os.path.join(folder, 'tokenizer_config.json'), settings)


def byte_tokens():
    return [bytes([i]) for i in range(256)]


def bpe_file(tokens):
    """The tokenizer.json of a byte-pair encoding. tokens: the bytes of each, by id; EOT is the next id. Text
    is cut into words as GPT-2 does it where there is something to merge."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [i for i in range(256) if i not in printable]
    letters = {i: chr(i) for i in printable} | {i: chr(256 + n) for n, i in enumerate(others)}

    def spelt(token):
        return ''.join(letters[i] for i in token)

    ranks = {token: i for i, token in enumerate(tokens)}
    merges = [' '.join(map(spelt, last_pair(token, ranks))) for token in tokens if len(token) > 1]
    vocabulary = {spelt(token): i for token, i in ranks.items()} | {EOT: len(tokens)}
    words = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True}
    special = {'id': len(tokens), 'content': EOT, 'special': True}
    special |= dict.fromkeys(('single_word', 'lstrip', 'rstrip', 'normalized'), False)
    return {
        'version': '1.0',
        'added_tokens': [special],
        'pre_tokenizer': {**words, 'use_regex': bool(merges)},
        'decoder': {**words, 'use_regex': True},
        'model': {'type': 'BPE', 'vocab': vocabulary, 'merges': merges},
    }


def last_pair(token, ranks):
    """The two tokens of which byte-pair encoding makes a token, which is the last that it makes."""
    parts = [bytes([i]) for i in token]
    while len(parts) > 2:
        joined = [ranks.get(a + b, len(ranks)) for a, b in zip(parts, parts[1:])]
        first = joined.index(min(joined))
        parts[first:first + 2] = [parts[first] + parts[first + 1]]
    return parts
