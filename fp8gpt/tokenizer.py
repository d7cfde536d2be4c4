"""Text <-> token ids: 'gpt2' (tiktoken's byte-pair encoding), 'byte' (no vocabulary to download), and what a
model's tokenizer.json says, from a folder or, as org/name, from the Hugging Face hub.

A tokenizer's name is its identity: shards and checkpoints carry it, so that a model never reads ids it was
not trained on. A tokenizer.json's is its hash, 'sha256:...': the same wherever its folder lies. A copy of
the files lies beside shards and beside checkpoints, where get_tokenizer finds them again.

Each tokenizer has `name`, `vocab_size` (EOT included), `eot`: the id that ends a text, `start`: the id that
begins one (BOS, or EOT where there is none), `stops`: all ids that end a generation, `prefix`: the ids that a
model's makers put before any text, and `encode`, `decode`, `stream`.
"""
import codecs
import hashlib
import os
import re

import numpy as np

from fp8gpt import files
from configurator import DataError, MachineError, MissingError, SettingError

# All that a tokenizer may consist of; tokenizer.json is the vocabulary, the others tell the special tokens.
FILES = ['tokenizer.json', 'tokenizer_config.json', 'generation_config.json', 'config.json',
         'chat_template.jinja']


def is_pretrained(init_from):
    """Return whether that is a Hugging Face model: a folder, or org/name on the hub, and no checkpoint."""
    on_the_hub = init_from.count('/') == 1 and not init_from.endswith('.pt') and not os.path.exists(init_from)
    return os.path.isdir(init_from) or on_the_hub


class ByteTokenizer:
    """A token is a byte of UTF-8; 256 is the end-of-text token."""
    name = 'byte'
    vocab_size = 257
    eot = start = 256
    stops = (256,)
    prefix = ()
    folder = chat_template = None

    def encode(self, text):
        """text -> (n,) uint16 ids."""
        return np.frombuffer(text.encode('utf-8', 'replace'), np.uint8).astype(np.uint16)

    def decode_bytes(self, ids):
        """ids -> bytes; EOT is nothing."""
        return bytes(i for i in ids if i < 256)

    def decode(self, ids):
        """ids -> str; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode('utf-8', 'replace')

    def stream(self, ids):
        """Yields text for each of the ids, '' while a character is not whole."""
        utf8 = codecs.getincrementaldecoder('utf-8')('replace')
        for i in ids:
            yield utf8.decode(self.decode_bytes([i]))
        yield utf8.decode(b'', final=True)


class TiktokenTokenizer(ByteTokenizer):
    """GPT-2's byte-pair encoding. Special tokens in a text are ordinary text.

    Raises MachineError where tiktoken can neither find nor download the encoding's files."""

    def __init__(self, name):
        import tiktoken
        try:
            self.encoding = tiktoken.get_encoding(name)
        except (OSError, ValueError) as error:  # requests' errors are OSErrors; ValueError: a damaged cache
            kind = type(error).__name__
            remedy = 'go online once, or set TIKTOKEN_CACHE_DIR to a folder that holds its files'
            raise MachineError(f"tiktoken could not load '{name}' ({kind}): {remedy}") from error
        self.name = name
        self.vocab_size = self.encoding.n_vocab
        self.eot = self.start = self.encoding.eot_token
        self.stops = (self.eot,)

    def encode(self, text):
        try:
            ids = self.encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:  # half of a surrogate pair, as broken JSON escapes leave behind
            return self.encode(text.encode('utf-8', 'replace').decode())
        except ValueError:  # a million spaces in a row are too many for tiktoken's regex
            half = len(text) // 2
            return np.concatenate([self.encode(text[:half]), self.encode(text[half:])])
        return ids.astype(np.uint16)

    def decode_bytes(self, ids):
        return self.encoding.decode_bytes([i for i in ids if i != self.eot])


class JsonTokenizer:
    """What the tokenizer.json of a folder says, by the `tokenizers` library, and the special tokens of the
    files beside it: tokenizer_config.json says which are BOS and EOT, or else the configs' ids.

    Special tokens in a text are ordinary text. Raises DataError for files that are damaged."""

    def __init__(self, folder):
        os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')  # processes are this file's business
        import tokenizers
        self.folder = folder
        path = os.path.join(folder, 'tokenizer.json')
        try:
            self.library = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # it raises nothing narrower
            raise DataError(f'{path} is no tokenizer.json: {error}') from None
        self.name = _sha256(path)
        self.vocab_size = max(self.library.get_vocab().values()) + 1  # where ids have gaps, its size is less
        self.dtype = np.uint16 if self.vocab_size <= 2**16 else np.uint32
        self.prefix = tuple(self.library.encode('').ids)  # the file's post-processor adds them

        self.config, generation, model = (
            files.read_json(os.path.join(folder, f'{name}.json'))
            for name in ('tokenizer_config', 'generation_config', 'config'))
        ends = _ids(generation.get('eos_token_id'))
        eot = self._special('eos_token') + ends + _ids(model.get('eos_token_id'))
        bos = _ids(generation.get('bos_token_id')) + _ids(model.get('bos_token_id'))
        if self.config:  # it tells what the others may not: Qwen's model has a bos_token_id, its texts no BOS
            bos = self._special('bos_token')
        if not eot:
            raise DataError(f'{folder} has no EOS token: tokenizer_config.json, generation_config.json '
                            'or config.json is to name one that tokenizer.json has')
        self.eot = eot[0]
        self.start = (bos or eot)[0]
        self.stops = tuple(dict.fromkeys([self.eot, *ends]))

    def _special(self, name):
        """[id] of a special token of tokenizer_config.json; [] where it has none."""
        token = self.special_tokens.get(name, '')
        return _ids(self.library.token_to_id(token))

    @property
    def special_tokens(self):
        """name -> text, as {'bos_token': '<s>'}."""
        tokens = {name: value for name, value in self.config.items() if name.endswith('_token')}
        tokens = {name: value.get('content') if isinstance(value, dict) else value
                  for name, value in tokens.items()}
        return {name: value for name, value in tokens.items() if isinstance(value, str)}

    @property
    def chat_template(self):
        """Jinja's text; None where there is none."""
        path = os.path.join(self.folder, 'chat_template.jinja')
        if os.path.isfile(path):
            with open(path, encoding='utf-8') as file:
                return file.read()
        template = self.config.get('chat_template')
        if isinstance(template, list):  # several, by name
            template = {each['name']: each['template'] for each in template}.get('default')
        return template

    def encode(self, text, special=False):
        """text -> (n,) ids, of uint16 or uint32. special: its special tokens are those, as in a chat."""
        self.library.encode_special_tokens = not special
        text = text.encode('utf-8', 'replace').decode()  # half of a surrogate pair is no text
        return np.array(self.library.encode(text, add_special_tokens=False).ids, self.dtype)

    def decode(self, ids):
        return self.library.decode(list(ids), skip_special_tokens=True)

    def stream(self, ids):
        from tokenizers.decoders import DecodeStream
        stream = DecodeStream(skip_special_tokens=True)
        for i in ids:
            yield stream.step(self.library, i) or ''


def _ids(value):
    """[ids] of what a config holds: None, a number or a list."""
    values = value if isinstance(value, list) else [value]
    return [value for value in values if isinstance(value, int)]


def identity(name):
    """The identity of the tokenizer that get_tokenizer(name) gives; raises what that raises."""
    return name if name in TOKENIZERS else get_tokenizer(name).name


def _sha256(path):
    """The identity of the tokenizer that a tokenizer.json describes."""
    with open(path, 'rb') as file:
        return f'sha256:{hashlib.sha256(file.read()).hexdigest()}'


TOKENIZERS = {'gpt2': lambda: TiktokenTokenizer('gpt2'), 'byte': ByteTokenizer}


def get_tokenizer(name, folder=''):
    """The tokenizer of a name of TOKENIZERS, of a folder with a tokenizer.json, or that file; of an org/name
    on the Hugging Face hub; or of an identity, whose files keep_files left in `folder`.

    Raises SettingError for another name, MissingError or MachineError where files are missing."""
    if name in TOKENIZERS:
        return TOKENIZERS[name]()
    if name.startswith('sha256:'):
        path = os.path.join(folder, 'tokenizer.json')
        if not os.path.isfile(path) or _sha256(path) != name:
            raise MissingError(f'{path} is not there, or not the {name[:19]}... that was used: copy it there')
        return JsonTokenizer(folder)
    found = os.path.expanduser(name.removesuffix('tokenizer.json')) or '.'
    if not os.path.isdir(found):
        if not re.fullmatch(r'[\w.-]+/[\w.-]+', name):
            raise SettingError(f'no tokenizer is called {name!r}; there are {", ".join(TOKENIZERS)}, folders '
                               'with a tokenizer.json, and org/name on the Hugging Face hub')
        found = _fetch(name)
    if not os.path.isfile(os.path.join(found, 'tokenizer.json')):
        raise MissingError(f'{name} has no tokenizer.json')
    return JsonTokenizer(found)


def _fetch(repository):
    """The local folder of a hub repository's tokenizer files. Raises MachineError."""
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError
    try:
        return huggingface_hub.snapshot_download(repository, allow_patterns=FILES)
    except GatedRepoError:
        page = f'https://huggingface.co/{repository}'
        remedy = f'accept its licence at {page}, then set HF_TOKEN'
        raise MachineError(f'{repository} is gated: {remedy}') from None
    except Exception as error:  # of several libraries
        kind = type(error).__name__
        remedy = 'go online, give a folder that holds its tokenizer.json or, for a private one, set HF_TOKEN'
        raise MachineError(f'could not fetch the tokenizer of {repository} ({kind}): {remedy}') from None


def keep_files(source, target):
    """Copies the tokenizer files that a folder has into another, which then needs the first no more. Raises
    DataError."""
    for name in FILES:
        path = os.path.join(source, name)
        if os.path.isfile(path) and os.path.realpath(source) != os.path.realpath(target):
            with open(path, 'rb') as file:
                body = file.read()
            files.write(os.path.join(target, name), lambda file: file.write(body))
