"""Tokenizers without a vocabulary file."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_data.errors import DataError
from megatron_data.files import write_json
from megatron_data.tokenizers.text_splitting import SEGMENT_CHARACTERS, split_text

PLAIN_FILE = "megatron_tokenizer.json"
_LONGEST_WORD = 40  # characters of a word in an error

_BETWEEN = re.compile(r"(?=\s)")


class ByteTokenizer:
    """A tokenizer whose tokens are the bytes of the UTF-8 text; 256 ends a document."""

    vocab_size = 257
    eod_id = 256
    eos_id = 256
    bos_id = None
    pad_id = None
    fingerprint = "bytes:257"

    def encode(self, text: str) -> list[int]:
        """Returns the bytes of the text."""
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the bytes of each text."""
        return [self.encode(text) for text in texts]

    def split_text(self, text: str) -> Iterator[str]:
        """Splits a text into segments; every split keeps the tokens."""
        return (
            text[start : start + SEGMENT_CHARACTERS]
            for start in range(0, len(text), SEGMENT_CHARACTERS)
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of bytes, without 256; invalid UTF-8 becomes U+FFFD."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the file from which `load_tokenizer` builds this tokenizer."""
        write_json(Path(folder) / PLAIN_FILE, {"type": "ByteTokenizer"})


def _number(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise DataError(
            f"NullTokenizer reads numbers separated by spaces, got {word[:_LONGEST_WORD]!r}"
        ) from None


class NullTokenizer:
    """Megatron's `NullTokenizer`: reads token ids as text, separated by spaces.

    The end-of-document token has the id `vocab_size`.

    Args:
        vocab_size: Number of token ids without the end-of-document token.
    """

    bos_id = None
    pad_id = None

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise DataError(f"a vocabulary of {vocab_size} tokens; give at least 1")
        self.vocab_size = vocab_size + 1
        self.eod_id = vocab_size
        self.eos_id = vocab_size
        self.fingerprint = f"null:{vocab_size}"

    def encode(self, text: str) -> list[int]:
        """Returns the numbers in the text.

        Raises:
            DataError: A word is not a number below `vocab_size`.
        """
        tokens = [_number(word) for word in text.split()]
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            wrong = max(tokens) if max(tokens) >= self.vocab_size else min(tokens)
            raise DataError(f"token {wrong} is out of range; token ids are 0 to {self.eod_id}")
        return tokens

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the numbers in each text."""
        return [self.encode(text) for text in texts]

    def split_text(self, text: str) -> Iterator[str]:
        """Splits a text into segments between numbers."""
        return split_text(text, SEGMENT_CHARACTERS, _BETWEEN)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the numbers, separated by spaces."""
        return " ".join(str(int(token)) for token in tokens)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the file from which `load_tokenizer` builds this tokenizer."""
        content = {"type": type(self).__name__, "vocab_size": self.eod_id}
        write_json(Path(folder) / PLAIN_FILE, content)
