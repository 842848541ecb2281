"""Tokenizers that need no vocabulary file."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_data.errors import DataError
from megatron_data.files import write_json
from megatron_data.tokenizers.text_splitting import split_text

PLAIN_FILE = "megatron_tokenizer.json"
SEGMENT_CHARACTERS = 1 << 18
"""Characters of the pieces of a longer text."""

_BETWEEN = re.compile(r"(?=\s)")


class ByteTokenizer:
    """Every byte of the UTF-8 text is a token; 256 ends a document."""

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
        """Returns the bytes of every text."""
        return [self.encode(text) for text in texts]

    def split_text(self, text: str) -> Iterator[str]:
        """Cuts a text anywhere."""
        return (
            text[start : start + SEGMENT_CHARACTERS]
            for start in range(0, len(text), SEGMENT_CHARACTERS)
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of bytes; 256 is left out, bytes that are not UTF-8 become U+FFFD."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the file by which `load_tokenizer` knows this tokenizer."""
        write_json(Path(folder) / PLAIN_FILE, {"type": "ByteTokenizer"})


class NullTokenizer:
    """Text that already is token numbers, separated by spaces; the end of a document comes last.

    Megatron's tokenizer of the same name: `vocab_size` numbers plus one for the end of a
    document, whose number is `vocab_size`.

    Args:
        vocab_size: how many numbers there are without the end of a document.
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
            DataError: a word that is not a number below `vocab_size`.
        """
        try:
            tokens = [int(word) for word in text.split()]
        except ValueError as error:
            raise DataError(f"NullTokenizer reads numbers separated by spaces: {error}") from None
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            wrong = max(tokens) if max(tokens) >= self.vocab_size else min(tokens)
            raise DataError(f"token {wrong} is not in 0 to {self.vocab_size - 1}")
        return tokens

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the numbers in every text."""
        return [self.encode(text) for text in texts]

    def split_text(self, text: str) -> Iterator[str]:
        """Cuts a text between numbers."""
        return split_text(text, SEGMENT_CHARACTERS, _BETWEEN)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the numbers, separated by spaces."""
        return " ".join(str(int(token)) for token in tokens)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the file by which `load_tokenizer` knows this tokenizer."""
        content = {"type": type(self).__name__, "vocab_size": self.eod_id}
        write_json(Path(folder) / PLAIN_FILE, content)
