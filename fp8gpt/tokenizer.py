"""Text <-> token ids: 'gpt2' (tiktoken's byte-pair encoding), 'byte' (no vocabulary to download), and what a
model's tokenizer.json says, from a folder or, as org/name, from the Hugging Face hub.

A tokenizer's name is its identity: shards and checkpoints carry it, so that a model never reads ids it was
not trained on. A tokenizer.json's is its hash, 'sha256:...': the same wherever its folder lies. A copy of
the files lies beside shards and beside checkpoints, where get_tokenizer finds them again.

Each tokenizer has `name`, `vocab_size` (EOT included), `eot`: what ends a text, `start`: what begins one
(BOS, or EOT where there is none), `stops`: all ids that end a generation, `prefix`: what a model's makers
put before any text, and `encode`, `decode`, `stream`. Workers encode the documents of a corpus, in processes
of their own, and GPT-2's by gigatoken where it is installed.
"""
import base64
import codecs
import collections
import concurrent.futures
import hashlib
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import threading

import numpy as np

from fp8gpt import files
from configurator import DataError, MachineError, MissingError, SettingError

# All that a tokenizer may consist of; tokenizer.json is the vocabulary, the others tell the special tokens.
FILES = ['tokenizer.json', 'tokenizer_config.json', 'generation_config.json', 'config.json',
         'chat_template.jinja']
CHUNK = 2**20  # characters that a worker takes at once: 0.1 s of its work
CHECKED = 1000  # of so many documents one is tokenized by both libraries
RENEWED = 2**28  # characters behind which gigatoken's cache is emptied: it takes up to 6 bytes for each


class ByteTokenizer:
    """A token is a byte of UTF-8; 256 is the end-of-text token."""
    name = 'byte'
    vocab_size = 257
    eot = start = 256
    stops = (256,)
    prefix = ()
    folder = chat_template = None

    def document(self, text):
        """text -> (its ids (n,) behind `start`, the bytes that its split is drawn by, how many bytes ids
        stand for)."""
        ids = self.encode(text)
        tokens = np.empty(1 + len(ids), ids.dtype)
        tokens[0], tokens[1:] = self.start, ids
        raw = text.encode('utf-8', 'replace')
        return tokens, raw, len(raw)

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

    document = ByteTokenizer.document

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
                files.write(os.path.join(target, name), lambda out, file=file: shutil.copyfileobj(file, out))


# ------------------------------------------------------------------------------- documents -> ids

class Gigatoken:
    """tiktoken's ids, found by gigatoken, which remembers words. Its vocabulary is made of tiktoken's.

    The first CHUNK of each process and every CHECKED-th document are held against tiktoken; after a
    difference all processes go on with tiktoken alone. Raises ImportError where gigatoken is missing."""

    def __init__(self, plain):
        import gigatoken
        self.read_vocabulary = gigatoken.Tokenizer.from_tiktoken
        self.plain, self.start = plain, plain.start
        tokens = [base64.b64encode(plain.decode_bytes([i])) for i in range(plain.eot)]
        self.vocabulary = b''.join(b'%b %d\n' % (token, i) for i, token in enumerate(tokens))
        self.differs = multiprocessing.Event()
        self.documents = self.characters = 0
        self.renew()

    document = ByteTokenizer.document

    def renew(self):
        """Empties the cache, which has no bound of its own."""
        self.fast = None  # first, so that there are never two
        with tempfile.NamedTemporaryFile() as file:
            file.write(self.vocabulary)
            file.flush()
            self.fast = self.read_vocabulary(file.name, 'gpt2', {})

    def encode(self, text):
        """text -> (n,) uint16 ids."""
        # tiktoken cuts what is longer where it must, and so does what agrees with it
        if self.differs.is_set() or not 0 < len(text) <= CHUNK // 2:
            return self.plain.encode(text)
        try:
            ids = self.fast.encode(text).astype(np.uint16)
        except TypeError:  # half of a surrogate pair
            return self.plain.encode(text)
        self.documents += 1
        before, self.characters = self.characters, self.characters + len(text)
        if before // RENEWED < self.characters // RENEWED:
            self.renew()
        if before >= CHUNK and self.documents % CHECKED:
            return ids
        wanted = self.plain.encode(text)
        if not np.array_equal(ids, wanted):
            self.differs.set()
        return wanted


def fastest(tokenizer):
    """A tokenizer of the same ids for a corpus; says which library finds them."""
    if not isinstance(tokenizer, TiktokenTokenizer):
        return tokenizer
    library = 'gigatoken, checked against tiktoken'
    try:
        tokenizer = Gigatoken(tokenizer)
    except ImportError:
        library = 'tiktoken; `pip install gigatoken` makes it faster'
    except Exception as error:  # a version of it that is made otherwise
        library = f'tiktoken; gigatoken fails: {str(error) or type(error).__name__}'
    print(f'tokenized by {library}', flush=True)
    return tokenizer


class Workers:
    """`count` processes that encode documents; a count of 1 is a thread of this process.

    Forked when this is made, which is to be before any library has threads: they start at once and share
    the vocabulary's memory. As a context, they are gone at its end."""

    def __init__(self, tokenizer, count):
        tokenizer = fastest(tokenizer)
        self.differs = getattr(tokenizer, 'differs', None)
        self.capacity = 2 * count * CHUNK  # characters
        if count > 1:
            fork = multiprocessing.get_context('fork')
            self.pool = concurrent.futures.ProcessPoolExecutor(count, fork, _start_process, (tokenizer,))
        else:
            self.pool = concurrent.futures.ThreadPoolExecutor(1, '', _take, (tokenizer,))
        self.pool.submit(os.getpid)  # the first job starts all workers

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.pool.shutdown(cancel_futures=True)

    def encode(self, documents):
        """(text, position) -> (position, tokens, hash that its split is drawn by, bytes): see `document`.

        In order. Every document carries its position: the stream itself is ahead by all that workers
        hold, which is bounded in characters, so that memory does not grow with the corpus. Raises
        MachineError where a worker was killed."""
        queue = collections.deque()
        held = 0  # characters in the queue
        try:
            for texts, positions, size in _chunks(documents):
                queue.append((positions, size, self.pool.submit(_encode_chunk, texts)))
                held += size
                while queue and (held > self.capacity or not texts):  # no texts: the end
                    positions, size, encoded = queue.popleft()
                    held -= size
                    ids, facts = encoded.result()
                    self._say_difference()
                    start = 0
                    for position, (end, key, n_bytes) in zip(positions, facts):
                        yield position, ids[start:end], key, n_bytes
                        start = end
        except concurrent.futures.BrokenExecutor:
            remedy = 'the same command goes on; --num_workers=1 takes least'
            raise MachineError(f'a worker was killed (out of memory?): {remedy}') from None


    def _say_difference(self):
        """Once, that gigatoken is not to be trusted."""
        if self.differs and self.differs.is_set():
            print('WARNING: gigatoken and tiktoken differ: tiktoken goes on alone; what is done may differ, '
                  'too: `pip uninstall gigatoken` and --overwrite make it anew', flush=True)
            self.differs = None


def _chunks(documents):
    """Yields (texts, positions, characters) for some CHUNK characters at a time; no texts at the end."""
    documents = iter(documents)
    texts = True
    while texts:
        texts, positions, size = [], [], 0
        for text, position in documents:
            texts.append(text)
            positions.append(position)
            size += len(text)
            if size >= CHUNK:
                break
        yield texts, positions, size


def _encode_chunk(texts):
    """texts -> (tokens of all; per text: its end in them, 64 bits of a hash, its bytes). See `document`.

    One array travels faster between processes than one for each text."""
    pieces, facts = [], []
    end = 0
    for text in texts:
        tokens, raw, n_bytes = _tokenizer.document(text)
        pieces.append(tokens)
        end += len(tokens)
        digest = hashlib.blake2b(raw, digest_size=8).digest()
        facts.append((end, int.from_bytes(digest, 'big'), n_bytes))
    return np.concatenate(pieces) if pieces else [], facts


def _take(tokenizer):
    """Hands a worker its tokenizer, once: a vocabulary is too large to travel with each chunk."""
    global _tokenizer
    _tokenizer = tokenizer


def _start_process(tokenizer):
    """Ctrl-C is the parent's business; where the parent is gone, the process goes."""
    _take(tokenizer)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()


def _leave_with(parent):
    parent.join()
    os._exit(1)
