"""What the rest of the package asks of a tokenizer."""

import os
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

CONFIG_FILE = "tokenizer_config.json"
"""Beside `tokenizer.json`: which tokens have a role, and a chat template."""


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token numbers and back.

    Implementations can be pickled: preprocessing sends one to every worker process.
    """

    @property
    def vocab_size(self) -> int:
        """One more than the largest token number, special tokens included."""

    @property
    def eod_id(self) -> int | None:
        """Token that ends a document, or None."""

    @property
    def bos_id(self) -> int | None:
        """Token that begins a text, or None."""

    @property
    def eos_id(self) -> int | None:
        """Token that ends a text, or None; often the same as `eod_id`."""

    @property
    def pad_id(self) -> int | None:
        """Token that fills a batch, or None."""

    @property
    def fingerprint(self) -> str:
        """`sha256:…` of all that decides which numbers a text becomes."""

    def encode(self, text: str) -> list[int]:
        """Token numbers of a text. No special token is added."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts at once."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token numbers, special tokens spelled out."""

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the files from which `load_tokenizer(folder)` makes an equal tokenizer."""


@runtime_checkable
class ExtendedTokenizer(Protocol):
    """A tokenizer that may be another one with special tokens added."""

    @property
    def base_fingerprint(self) -> str:
        """The other's fingerprint; its own where no token was added."""
