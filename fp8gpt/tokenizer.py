"""Turn text into token ids and back: by GPT-2's byte-pair encoding with tiktoken ('gpt2'), as UTF-8 bytes
('byte'), or by the tokenizer.json of a model, from a folder or, as org/name, from the Hugging Face hub.

Shards and checkpoints record the identity of their tokenizer, so a model never reads ids it was not trained
on. The identity is 'gpt2', 'byte', or 'sha256:...', the hash of tokenizer.json, wherever its folder is. The
files are copied to the shards and to the checkpoints, where get_tokenizer finds them again.

A tokenizer has `name`: its identity; `vocab_size`, EOT included; `eot`: the id that ends a text; `start`: its
BOS, or EOT where it has none; `stops`: all ids that end a generation; `prefix`: the ids that tokenizer.json
puts before any text; `opening`: the ids before a document to train on, which is `prefix`, of bytes and GPT-2
EOT; `closing`: those behind it, EOT unless the next opening is a stop, so that a model learns where a text
ends. `special`: a pattern of the texts of special tokens; `marks`: of those around turns. `pad`, `folder` and
`chat_template`, or None; `encode`, `decode`, `stream`.
"""
import os
import re
from contextlib import suppress
from hashlib import sha256
from os.path import basename, exists, isdir, isfile, join
from pathlib import Path

import numpy as np

from fp8gpt import files
from configurator import (
    DataError, MachineError, MissingError, SettingError, first_line, say_once)

# The files that a tokenizer may have: tokenizer.json is the vocabulary, the others name the special tokens.
NAMING, GENERATION = ('tokenizer_config.json', 'special_tokens_map.json'), 'generation_config.json'
FILES = ['tokenizer.json', 'added_tokens.json', *NAMING, GENERATION, 'chat_template.jinja']
TEMPLATES = 'additional_chat_templates/*.jinja'      # where transformers saves those that have other names
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
    stops = opening = (256,)
    prefix = closing = ()
    folder = chat_template = pad = None
    special, marks = re.compile(re.escape(EOT)), re.compile('(?!)')

    def encode(self, text, special=False):
        """Return the ids (n,) of a text, uint16. special: the text <|endoftext|> is EOT, as in an export."""
        first, *rest = map(self.encode_text, text.split(EOT) if special else [text])
        return np.concatenate([first, *(np.append(self.eot, ids) for ids in rest)]).astype(np.uint16)

    def encode_text(self, text):
        """Return the ids (n,) of a text without special tokens, uint16."""
        return np.frombuffer(text.encode('utf-8', 'replace'), np.uint8).astype(np.uint16)

    def decode_bytes(self, ids):
        """Return the bytes of the ids; EOT has none."""
        return bytes(i for i in ids if i < 256)

    def decode(self, ids, special=False):
        """Return the text of the ids; bytes that are not UTF-8 become U+FFFD. No special token has text."""
        return self.decode_bytes(ids).decode('utf-8', 'replace')

    def stream(self, ids, before=()):
        """Yield the text of each id as it comes, '' until a character is complete. before: the ids of the
        text that they continue; without them, Llama 2's first word loses its space."""
        # tokenizers' DecodeStream fails where bytes of a character are followed by no more of it
        seen, begin, end = [*before], 0, len(before)    # seen[:end] is out; seen[begin:end], its last part

        def rest():
            return self.decode(seen[begin:])[len(self.decode(seen[begin:end])):]
        for i in ids:
            seen.append(i)
            part = rest()
            if part.endswith('\ufffd'):
                part = ''
            if part:
                begin, end = end, len(seen)
            yield part
        yield rest()


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
        self.stops = self.opening = (self.eot,)

    def encode_text(self, text):
        """Return the ids (n,) of a text without special tokens, uint16."""
        try:
            ids = self.encoding.encode_to_numpy(whole_characters(text), disallowed_special=())
        except ValueError:
            raise DataError('tiktoken cannot encode a million blanks in a row: take some out') from None
        return ids.astype(np.uint16)

    def decode_bytes(self, ids):
        """Return the bytes of the ids; EOT has none, nor have ids past it, which pad many a model."""
        return self.encoding.decode_bytes([i for i in ids if i < self.eot])


class PretrainedTokenizer:
    """Run the tokenizer of a model's folder by transformers: ids by tokenizer.json, special tokens and chat
    template by the files beside it. `hf` is transformers' tokenizer, `library` the `tokenizers` one in it.

    transformers' AutoTokenizer may put another pre-tokenizer in place of tokenizer.json's.
    Special tokens in a text are encoded as ordinary text. Raises DataError for damaged files."""
    stream = ByteTokenizer.stream

    def __init__(self, folder):
        os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')  # prepare_data.py has its own processes
        import transformers
        files_of(folder)        # before hours of preparing: keep_files would refuse a link after it
        transformers.logging.set_verbosity_error()
        path = join(folder, 'tokenizer.json')
        try:
            self.hf = transformers.PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # the libraries raise nothing narrower
            raise DataError(f'{path} is not a valid tokenizer.json, or the files beside it do not fit: '
                            f'{first_line(error)}') from None
        self.library = self.hf.backend_tokenizer
        self.library.no_truncation()
        self.library.no_padding()
        self.folder = folder
        self.name = identity_of_folder(folder)
        known = {*self.library.get_vocab().values()}
        if known <= self.hf.added_tokens_decoder.keys():    # a text would have no ids
            raise DataError(f'{path} has no vocabulary but added tokens: put the model\'s own there')
        self.vocab_size = max(known) + 1        # of ids with gaps, too
        template = self.hf.chat_template    # one, or several by name, of which transformers takes `default`
        if isinstance(template, dict):
            template = template.get('default')
        self.chat_template = template if isinstance(template, str) else None
        bos, ends = self._read_ends(known)
        self.eot = ends[0]
        self.start = (bos or ends)[0]
        text = self.library.encode(self.library.id_to_token(self.eot))      # a text that any vocabulary has
        added = [*text.special_tokens_mask, 0]      # by the post-processor of the file
        self.prefix = self.opening = tuple(text.ids[:added.index(0)])
        self._read_turns(ends)
        self.closing = () if {*self.opening} & {*self.stops} else (self.eot,)

    def _read_ends(self, known):
        """Return the ids of BOS, one or none, and of EOS, those in `known`, and set `pad`. Raises DataError
        where there is no EOS."""
        generation, config = (files.read_json(join(self.folder, name))
                              for name in (GENERATION, 'config.json'))
        self.pad = generation.get('pad_token_id', self.hf.pad_token_id)
        ends = _ids(known, self.hf.eos_token_id, generation.get('eos_token_id'), config.get('eos_token_id'))
        if any(isfile(join(self.folder, name)) for name in NAMING):
            bos = self.hf.bos_token_id      # Qwen's model has a bos_token_id, but its texts have no BOS
        else:
            bos = generation.get('bos_token_id')
        if not ends:
            raise DataError(f'{self.folder} has no EOS token: tokenizer_config.json or '
                            'generation_config.json must name one that tokenizer.json has')
        return _ids(known, bos), ends

    def _read_turns(self, ends):
        """Set `stops`: EOS and the token that the chat template writes after an answer, `turn_end`, which may
        be another; `marks`, a pattern of these and of all tokens that it writes around turns; and `special`.
        All of these are special: DeepSeek's <｜User｜> is an ordinary added token, and so is what add_tokens
        adds to a base model."""
        chat, text = [{'role': 'user', 'content': 'Where?'}, {'role': 'assistant', 'content': 'Here.'}], ''
        for messages in [{'role': 'system', 'content': 'Be brief.'}, *chat], chat:      # some refuse it
            with suppress(Exception):    # of any kind, as a stranger has made it
                text += self.hf.apply_chat_template(
                    messages, chat_template=self.chat_template, tokenize=False)
        added = {token.content: token for token in self.hf.added_tokens_decoder.values()}
        if end := _any_of(added).search(text.rpartition('Here.')[2]):
            ends = [*ends, self.library.token_to_id(end[0])]
        self.turn_end = ends[-1] if end else self.eot
        self.stops = tuple(dict.fromkeys(ends))
        around = {*_any_of(added).findall(text), *map(self.library.id_to_token, ends)}
        around -= {'<think>', '</think>'}
        for token in added.values():
            if token.content in around and not token.special:
                token.special = True
                self.library.add_special_tokens([token])
        special = {token.content for token in added.values() if token.special}
        self.special, self.marks = _any_of(special | around), _any_of(around)

    def encode(self, text, special=False):
        """Return the ids (n,) of a text, uint32. special: encode its special tokens as such, which a chat
        needs. Raises DataError for a text that the vocabulary lacks."""
        return np.array(self.encoding(text, special, fast=True).ids, np.uint32)

    def encoding(self, text, special, fast=False):
        """Return the Encoding of a text by the library: its ids and the characters of each. fast: without
        offsets, whose time is quadratic."""
        self.library.encode_special_tokens = not special
        encode = self.library.encode_batch_fast if fast else self.library.encode_batch
        try:
            encoding, = encode([whole_characters(text)], add_special_tokens=False)
        except Exception as error:  # the library raises nothing narrower: a Unigram without unk_id
            raise DataError(f'{self.folder}: its tokenizer.json cannot encode {text!r:.40} ({error})'
                            ) from None
        return encoding

    def decode(self, ids, special=False):
        """Return the text of the ids, with special tokens if `special`."""
        return self.library.decode(list(ids), skip_special_tokens=not special)

    def save(self, folder):
        """Copy the tokenizer's files into a folder, with all stops as eos_token_id in generation_config.json.
        Raises what keep_files does."""
        keep_files(self.folder, folder)
        path = join(folder, GENERATION)
        files.write_json(path, files.read_json(path) | {'eos_token_id': list(self.stops)})


def _ids(known, *values):
    """Return the `known` ids among entries of a config, each None, a number or a list."""
    each = [value if isinstance(value, list) else [value] for value in values]
    return [one for some in each for one in some if type(one) is int and one in known]


def _any_of(texts):
    """Return a pattern of any of these texts, the longest that fits; without texts, of nothing."""
    return re.compile('|'.join(map(re.escape, sorted(filter(None, texts), key=len, reverse=True))) or r'(?!)')


# ------------------------------------------------------------------------------- by name

TOKENIZERS = {'gpt2': TiktokenTokenizer, 'byte': ByteTokenizer}


def identity_of_folder(folder):
    """Return the identity of a folder's tokenizer: 'gpt2', 'byte', or the hash of tokenizer.json; '' where
    the folder has no tokenizer.json."""
    path = join(folder, 'tokenizer.json')
    if not isfile(path):
        return ''
    with suppress(AttributeError, KeyError, TypeError, ValueError):  # of another kind of tokenizer
        found = files.read_json(path)
        ids = found['model']['vocab']
        tokens = sorted(ids.keys() - {EOT}, key=ids.get)
        tokens += [token['content'] for token in found.get('added_tokens', ())
                   if token['content'] not in (EOT, *ids)]
        return KNOWN[sha256('\n'.join(tokens).encode()).hexdigest()]
    return f'sha256:{sha256(Path(path).read_bytes()).hexdigest()}'


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
        return PretrainedTokenizer(folder)
    if not isdir(name) and name.count('/') != 1:
        raise SettingError(f'no tokenizer is called {name!r}; there are {", ".join(TOKENIZERS)}, folders '
                           'with a tokenizer.json, and org/name on the Hugging Face hub')
    found = fetch_files(name, [*FILES, TEMPLATES, 'config.json'])
    known = identity_of_folder(found)
    if not known:
        raise MissingError(f'{name} has no tokenizer.json, the only file of a tokenizer that is read here: '
                           'AutoTokenizer.from_pretrained and save_pretrained of transformers write it')
    return TOKENIZERS[known]() if known in TOKENIZERS else PretrainedTokenizer(found)


def fetch_files(name, patterns):
    """Return the folder of a model: `name` itself, or the cache of org/name on the Hugging Face hub with the
    files of these patterns, of one commit: see REVISIONS. Raises MachineError where the hub cannot be reached
    or refuses."""
    if isdir(name):
        return name
    import huggingface_hub
    try:
        folder = huggingface_hub.snapshot_download(
            name, revision=REVISIONS.get(name), allow_patterns=patterns)
    except (OSError, ValueError) as error:  # no network, no such model, a gated one, a full disk
        raise MachineError(
            f'{name} cannot be fetched ({type(error).__name__}): go online once, name a folder that has its '
            f'files, or, where the model is gated, accept its licence at https://huggingface.co/{name} and '
            'set HF_TOKEN') from error
    commit = basename(folder)       # in the cache: <model>/snapshots/<commit>
    if name not in REVISIONS and re.fullmatch('[0-9a-f]{40}', commit):
        REVISIONS[name] = commit
        say_once(f'# {name} of the hub at revision {commit}')
    return folder


def keep_files(source, target):
    """Copy the tokenizer files of a folder into another, which then does not need the first. Raises what
    files_of raises, and DataError for a full disk."""
    for path in files_of(source):
        name = path.relative_to(source)
        files.write(join(target, name), lambda file: file.write(path.read_bytes()))


def files_of(folder):
    """Return the paths of a folder's tokenizer files. Raises DataError for a link, which may lead to any file
    of the user; those of the Hugging Face cache lead to its blobs."""
    folder = Path(folder)
    paths = [*map(folder.joinpath, FILES), *folder.glob(TEMPLATES)]
    for path in paths:
        if path.is_symlink() and path.resolve().parent != folder.resolve().parent.parent / 'blobs':
            raise DataError(f'{path} is a link: put the file itself there, or remove it')
    return [path for path in paths if path.is_file()]
