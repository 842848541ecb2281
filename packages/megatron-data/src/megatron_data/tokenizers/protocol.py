"""The interface of a tokenizer."""

import os
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

CONFIG_FILE = "tokenizer_config.json"
"""The file beside `tokenizer.json` that names special tokens and holds a chat template."""


@runtime_checkable
class Tokenizer(Protocol):
    """Converts text to token ids and back.

    Implementations must be picklable, because preprocessing sends one to each worker process.
    """

    @property
    def vocab_size(self) -> int:
        """The largest token id plus one, including special tokens."""

    @property
    def eod_id(self) -> int | None:
        """The end-of-document token, or None."""

    @property
    def bos_id(self) -> int | None:
        """The beginning-of-text token, or None."""

    @property
    def eos_id(self) -> int | None:
        """The end-of-text token, or None; often equal to `eod_id`."""

    @property
    def pad_id(self) -> int | None:
        """The padding token, or None."""

    @property
    def fingerprint(self) -> str:
        """`sha256:…` of everything that determines the token ids of a text."""

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, without added special tokens."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of several texts."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of token ids, with special tokens spelled out."""

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the files from which `load_tokenizer(folder)` builds an equal tokenizer."""


@runtime_checkable
class ExtendedTokenizer(Protocol):
    """A tokenizer that may extend another tokenizer with special tokens."""

    @property
    def base_fingerprint(self) -> str:
        """The fingerprint of the extended tokenizer; its own if no token was added."""
