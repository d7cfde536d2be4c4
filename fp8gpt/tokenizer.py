"""Turn text into token ids and back: by GPT-2's byte-pair encoding with tiktoken ('gpt2'), as UTF-8 bytes
('byte'), or by the tokenizer.json of a model, from a folder or, as org/name, from the Hugging Face hub.

Shards and checkpoints record the identity of their tokenizer, so a model never reads ids it was not trained
on. The identity is 'gpt2', 'byte', or 'sha256:...', the hash of tokenizer.json, wherever its folder is. The
files are copied to the shards and to the checkpoints, where get_tokenizer finds them again.

A tokenizer has `name`: its identity; `vocab_size`, EOT included; `eot`: the id that ends a text; `start`: the
id that begins one (BOS, or EOT where there is no BOS); `stops`: all ids that end a generation; `prefix`: the
ids that tokenizer.json puts before any text; `folder` and `chat_template`, or None; `encode`, `decode`,
`stream`.
"""
import codecs
import contextlib
import hashlib
import os
import pathlib
import re
from os.path import basename, exists, isdir, isfile, join

import numpy as np

from fp8gpt import files
from configurator import RENAMED, DataError, MachineError, MissingError, SettingError, say

# The files that a tokenizer may have: tokenizer.json is the vocabulary, the others name the special tokens.
FILES = ['tokenizer.json', 'tokenizer_config.json', 'generation_config.json', 'chat_template.jinja']
EOT = '<|endoftext|>'
REVISIONS = {}      # org/name of the hub -> its commit that this process reads: the newest, or a checkpoint's
KNOWN = {               # SHA-256 of a vocabulary in order of its ids, without EOT -> the tokenizer's identity
    '6f4b22994511341556e0afed07c5c1642aff87bc6fdf4ff2a611f5c1f33f7865': 'byte',
    '3a1f1c010d179f036be1992bc14b861e326341438633869c694dc4dccfe153d3': 'gpt2',
}


def is_pretrained(init_from):
    """Return whether that is a Hugging Face model: a folder, or org/name on the hub, and no checkpoint."""
    if isdir(init_from):
        return not isfile(join(init_from, 'latest.pt'))
    on_hub = re.fullmatch(r'\w[\w.-]*/[\w.-]+', init_from) and not init_from.endswith('.pt')
    return bool(on_hub) and not exists(init_from)


def check_exists(model):
    """Raise MissingError for the path of a checkpoint that does not exist; a Hugging Face model is not
    asked for."""
    if not is_pretrained(model):
        files.checkpoint_file(model)


def whole_characters(text):
    """Return a text with '?' for each half of a surrogate pair, which broken JSON escapes leave."""
    return text.encode('utf-8', 'replace').decode()


class ByteTokenizer:
    """Take each byte of UTF-8 for a token; 256 is the end-of-text token."""
    name = 'byte'
    vocab_size = 257
    eot = start = 256
    stops = (256,)
    prefix = ()
    folder = chat_template = None

    def encode(self, text):
        """Return the ids (n,) of a text, uint16."""
        return np.frombuffer(text.encode('utf-8', 'replace'), np.uint8).astype(np.uint16)

    def decode_bytes(self, ids):
        """Return the bytes of the ids; EOT has none."""
        return bytes(i for i in ids if i < 256)

    def decode(self, ids, special=False):
        """Return the text of the ids; bytes that are not UTF-8 become U+FFFD. No special token has text."""
        return self.decode_bytes(ids).decode('utf-8', 'replace')

    def stream(self, ids):
        """Yield the text of each id as it comes, '' until a character is complete."""
        utf8 = codecs.getincrementaldecoder('utf-8')('replace')
        for i in ids:
            yield utf8.decode(self.decode_bytes([i]))
        yield utf8.decode(b'', final=True)


class TiktokenTokenizer(ByteTokenizer):
    """Run GPT-2's byte-pair encoding. Special tokens in a text are encoded as ordinary text.

    Raises MachineError where tiktoken can neither find nor download the files of the encoding."""
    name = 'gpt2'

    def __init__(self):
        import tiktoken
        try:
            self.encoding = tiktoken.get_encoding(self.name)
        except (OSError, ValueError) as error:  # requests' errors are OSErrors; ValueError: a damaged cache
            raise MachineError(f"tiktoken could not load '{self.name}' ({type(error).__name__}): go online "
                               'once, or set TIKTOKEN_CACHE_DIR to a folder that has its files') from error
        self.vocab_size = self.encoding.n_vocab
        self.eot = self.start = self.encoding.eot_token
        self.stops = (self.eot,)

    def encode(self, text):
        """Return the ids (n,) of a text, uint16."""
        text = whole_characters(text)
        try:
            return self.encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)
        except ValueError:  # a million spaces in a row are too many for tiktoken's regex
            half = len(text) // 2
            return np.concatenate([self.encode(text[:half]), self.encode(text[half:])])

    def decode_bytes(self, ids):
        """Return the bytes of the ids; EOT has none."""
        return self.encoding.decode_bytes([i for i in ids if i != self.eot])


class JsonTokenizer:
    """Run the tokenizer.json of a folder by the `tokenizers` library. tokenizer_config.json names BOS
    and EOT; without that file, generation_config.json does.

    Special tokens in a text are encoded as ordinary text. Raises DataError for damaged files."""

    def __init__(self, folder):
        os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')  # prepare_data.py has its own processes
        import tokenizers
        files_of(folder)        # before hours of preparing: keep_files would refuse them after it
        path = join(folder, 'tokenizer.json')
        try:
            self.library = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # the library raises nothing narrower
            raise DataError(f'{path} is not a valid tokenizer.json: {error}') from None
        self.folder = folder
        self.name = identity_of_folder(folder)
        # where ids have gaps, the vocabulary's size is less
        self.vocab_size = max(self.library.get_vocab().values(), default=-1) + 1
        self.prefix = tuple(self.library.encode('').ids)  # the post-processor of the file adds them

        config, generation = (files.read_json(join(folder, name)) for name in FILES[1:3])
        self.special_tokens = {}
        for name, token in config.items():
            text = token.get('content') if isinstance(token, dict) else token
            if name.endswith('_token') and isinstance(text, str):
                self.special_tokens[name] = text
        bos, eot = (_ids(self.library.token_to_id(self.special_tokens.get(name, '')))
                    for name in ('bos_token', 'eos_token'))
        ends = _ids(generation.get('eos_token_id'))
        eot += ends
        if not config:  # else config decides: Qwen's model has a bos_token_id, but its texts have no BOS
            bos = _ids(generation.get('bos_token_id'))
        if not eot:
            raise DataError(f'{folder} has no EOS token: tokenizer_config.json or generation_config.json '
                            'must name one that tokenizer.json has')
        self.eot = eot[0]
        self.start = (bos or eot)[0]
        self.stops = tuple(dict.fromkeys([self.eot, *ends]))

        template = config.get('chat_template')  # the text of a Jinja template, or several, by name
        if isinstance(template, list):
            named = (each for each in template if isinstance(each, dict))
            template = next((each.get('template') for each in named if each.get('name') == 'default'), None)
        self.chat_template = template if isinstance(template, str) else None
        path = pathlib.Path(folder, 'chat_template.jinja')
        if path.is_file():
            try:
                self.chat_template = path.read_text('utf-8')
            except UnicodeDecodeError as error:
                raise DataError(f'{path} is not UTF-8 ({error.reason})') from None

    def encode(self, text, special=False):
        """Return the ids (n,) of a text, uint32. special: encode its special tokens as such, which a chat
        needs. Raises DataError for a text that the vocabulary lacks."""
        self.library.encode_special_tokens = not special
        # fast: without offsets, whose time is quadratic
        try:
            encoding, = self.library.encode_batch_fast([whole_characters(text)], add_special_tokens=False)
        except Exception as error:  # the library raises nothing narrower: a Unigram without unk_id
            raise DataError(f'{self.folder}: its tokenizer.json cannot encode {text!r:.40} ({error})'
                            ) from None
        return np.array(encoding.ids, np.uint32)

    def decode(self, ids, special=False):
        """Return the text of the ids, with special tokens if `special`."""
        return self.library.decode(list(ids), skip_special_tokens=not special)

    def stream(self, ids):
        """Yield the text of each id as it comes, '' until a character is complete."""
        from tokenizers.decoders import DecodeStream
        stream = DecodeStream(skip_special_tokens=True)
        for i in ids:
            yield stream.step(self.library, i) or ''


def _ids(value):
    """Return [ids] of an entry of a config: None, a number or a list."""
    values = value if isinstance(value, list) else [value]
    return [value for value in values if isinstance(value, int)]


# ------------------------------------------------------------------------------- by name

TOKENIZERS = {'gpt2': TiktokenTokenizer, 'byte': ByteTokenizer}


def identity_of_folder(folder):
    """Return the identity of a folder's tokenizer: 'gpt2', 'byte', or the hash of tokenizer.json; '' where
    the folder has no tokenizer.json."""
    path = join(folder, 'tokenizer.json')
    if not isfile(path):
        return ''
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):  # of another kind of tokenizer
        ids = files.read_json(path)['model']['vocab']
        tokens = sorted(ids.keys() - {EOT}, key=ids.get)
        return KNOWN[hashlib.sha256('\n'.join(tokens).encode()).hexdigest()]
    return f'sha256:{hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()}'


def identity(name):
    """Return the identity of the tokenizer that get_tokenizer(name) returns; raises what that raises."""
    return name if name in TOKENIZERS else get_tokenizer(name).name


def get_tokenizer(name, folder=''):
    """Return the tokenizer of a name: gpt2, byte, a folder with a tokenizer.json, org/name on the Hugging
    Face hub, or an identity, whose files keep_files has copied to `folder`.

    Raises SettingError for another name, MissingError or MachineError where files are missing."""
    if name in TOKENIZERS:
        return TOKENIZERS[name]()
    if name.startswith('sha256:'):
        if identity_of_folder(folder) != name:
            path = join(folder, 'tokenizer.json')
            raise MissingError(f'{path} is missing, or not the {name[:19]}... that was used: copy it there')
        return JsonTokenizer(folder)
    found = name
    if not isdir(found):
        if name.count('/') != 1:
            raise SettingError(f'no tokenizer is called {name!r}; there are {", ".join(TOKENIZERS)}, folders '
                               'with a tokenizer.json, and org/name on the Hugging Face hub')
        found = fetch_files(name, FILES)
    known = identity_of_folder(found)
    if not known:
        raise MissingError(f'{name} has no tokenizer.json')
    return TOKENIZERS[known]() if known in TOKENIZERS else JsonTokenizer(found)


def fetch_files(name, patterns):
    """Return the folder of a model: `name` itself, or the cache of org/name on the Hugging Face hub with the
    files of these patterns, of one commit: see REVISIONS. Raises MachineError where the hub cannot be reached
    or refuses."""
    if isdir(name):
        return name
    import huggingface_hub
    problems, earlier = [], [theirs for theirs, now in RENAMED.items() if now == name]
    for each in (name, *earlier):       # the cache may have it under either
        try:
            folder = huggingface_hub.snapshot_download(
                each, revision=REVISIONS.get(name), allow_patterns=patterns)
        except (OSError, ValueError) as error:  # no network, no such model, a gated one, a full disk
            problems.append(error)
            continue
        commit = basename(folder)       # in the cache: <model>/snapshots/<commit>
        if name not in REVISIONS and re.fullmatch('[0-9a-f]{40}', commit):
            REVISIONS[name] = commit
            if os.environ.get('RANK', '0') == '0':
                say(f'# {name} of the hub at revision {commit}')
        return folder
    raise MachineError(
        f'{name} cannot be fetched ({type(problems[0]).__name__}): go online once, name a folder that has '
        f'its files, or, where the model is gated, accept its licence at https://huggingface.co/{name} and '
        'set HF_TOKEN') from problems[0]


def keep_files(source, target):
    """Copy the tokenizer files of a folder into another, which then does not need the first. Raises what
    files_of raises, and DataError for a full disk."""
    for path in files_of(source):
        files.write(join(target, path.name), lambda file: file.write(path.read_bytes()))


def files_of(folder):
    """Return the paths of a folder's tokenizer files. Raises DataError for one that is no regular file inside
    the folder: a stranger's link may lead to any file of the user. Those of the Hugging Face cache lead from
    <model>/snapshots/<revision> to <model>/blobs."""
    folder = pathlib.Path(folder).resolve()
    paths = [path for path in folder.iterdir() if path.name in FILES]
    for path in paths:
        real, places = path.resolve(), {folder, folder.parent.parent / 'blobs'}
        if not (real.is_file() and places & {*real.parents}):
            raise DataError(f'{path} is no file of that folder: put the file itself there, or remove it')
    return paths
