"""Text <-> token ids: 'gpt2' (tiktoken's byte-pair encoding) and 'byte' (no vocabulary to download).

A tokenizer's name is its identity: shards and checkpoints carry it, so that a model never reads ids it was
not trained on. Each has `name`, `vocab_size` (EOT included), `eot`, `encode`, `decode_bytes` and `decode`.
Workers encode the documents of a corpus, in processes of their own, and by gigatoken where it is installed.
"""
import base64
import collections
import concurrent.futures
import hashlib
import multiprocessing
import os
import signal
import tempfile
import threading

import numpy as np

from configurator import MachineError, SettingError

CHUNK = 2**20  # characters that a worker takes at once: 0.1 s of its work
CHECKED = 1000  # of so many documents one is tokenized by both libraries
RENEWED = 2**28  # characters behind which gigatoken's cache is emptied: it takes up to 6 bytes for each


class ByteTokenizer:
    """A token is a byte of UTF-8; 256 is the end-of-text token."""
    name = 'byte'
    vocab_size = 257
    eot = 256

    def encode(self, text):
        """text -> (n,) uint16 ids."""
        return np.frombuffer(text.encode('utf-8', 'replace'), np.uint8).astype(np.uint16)

    def decode_bytes(self, ids):
        """ids -> bytes; EOT is nothing."""
        return bytes(i for i in ids if i < 256)

    def decode(self, ids):
        """ids -> str; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode('utf-8', 'replace')


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
        self.eot = self.encoding.eot_token

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


TOKENIZERS = {'gpt2': lambda: TiktokenTokenizer('gpt2'), 'byte': ByteTokenizer}


def get_tokenizer(name):
    """Raises SettingError for a name that is not in TOKENIZERS, MachineError where its files are missing."""
    if name not in TOKENIZERS:
        raise SettingError(f'no tokenizer is called {name!r}; there are {", ".join(TOKENIZERS)}')
    return TOKENIZERS[name]()


# ------------------------------------------------------------------------------- documents -> ids

class Gigatoken:
    """tiktoken's ids, found by gigatoken, which remembers words. Its vocabulary is made of tiktoken's.

    The first CHUNK of each process and every CHECKED-th document are held against tiktoken; after a
    difference all processes go on with tiktoken alone. Raises ImportError where gigatoken is missing."""

    def __init__(self, plain):
        import gigatoken
        self.read_vocabulary = gigatoken.Tokenizer.from_tiktoken
        self.plain, self.eot = plain, plain.eot
        tokens = [base64.b64encode(plain.decode_bytes([i])) for i in range(plain.eot)]
        self.vocabulary = b''.join(b'%b %d\n' % (token, i) for i, token in enumerate(tokens))
        self.differs = multiprocessing.Event()
        self.documents = self.characters = 0
        self.renew()

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
        """(text, position) -> (position, ids with EOT before them, hash of the text, its UTF-8 bytes).

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
    """texts -> (ids of all, EOT before each; per text: its end in ids, 64 bits of a hash, its UTF-8 bytes).

    One array travels faster between processes than one for each text."""
    eot = np.array([_tokenizer.eot], _tokenizer.encode('').dtype)
    pieces = [eot[:0]]
    facts = []
    end = 0
    for text in texts:
        ids = _tokenizer.encode(text)
        pieces += [eot, ids]
        end += 1 + len(ids)
        raw = text.encode('utf-8', 'replace')
        digest = hashlib.blake2b(raw, digest_size=8).digest()
        facts.append((end, int.from_bytes(digest, 'big'), len(raw)))
    return np.concatenate(pieces), facts


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
