"""Text <-> token ids: 'gpt2' (tiktoken's byte-pair encoding) and 'byte' (no vocabulary to download).

A tokenizer's name is its identity: shards and checkpoints carry it, so that a model never reads ids it was not
trained on. Each has `name`, `vocab_size` (EOT included), `eot`, `encode`, `decode_bytes` and `decode`.
"""
import numpy as np

from configurator import MachineError, SettingError


class ByteTokenizer:
    """A token is a byte of UTF-8; 256 is the end-of-text token."""
    name, vocab_size, eot = 'byte', 257, 256

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

    Raises RuntimeError where tiktoken can neither find nor download the encoding's files."""

    def __init__(self, name):
        import tiktoken
        try:
            self.encoding = tiktoken.get_encoding(name)
        except (OSError, ValueError) as error:  # requests' errors are OSErrors; ValueError: a damaged cache
            raise MachineError(f"tiktoken could not load '{name}' ({type(error).__name__}): go online once, or set "
                               f'TIKTOKEN_CACHE_DIR to a folder that holds its files') from error
        self.name, self.vocab_size, self.eot = name, self.encoding.n_vocab, self.encoding.eot_token

    def encode(self, text):
        try:
            ids = self.encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:  # half of a surrogate pair, as broken JSON escapes leave behind
            ids = self.encoding.encode_to_numpy(text.encode('utf-8', 'replace').decode(), disallowed_special=())
        except ValueError:  # a million spaces in a row are too many for tiktoken's regex
            half = len(text) // 2
            return np.concatenate([self.encode(text[:half]), self.encode(text[half:])])
        return ids.astype(np.uint16)

    def decode_bytes(self, ids):
        return self.encoding.decode_bytes([i for i in ids if i != self.eot])


TOKENIZERS = {'gpt2': lambda: TiktokenTokenizer('gpt2'), 'byte': ByteTokenizer}


def get_tokenizer(name):
    """Raises ValueError for a name that is not in TOKENIZERS."""
    if name not in TOKENIZERS:
        raise SettingError(f'no tokenizer is called {name!r}; there are {", ".join(TOKENIZERS)}')
    return TOKENIZERS[name]()
