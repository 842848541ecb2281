"""Base class of tokenizers that extend a `HuggingFaceTokenizer`."""

import os
from collections.abc import Iterator, Sequence

from megatron_data.tokenizers.huggingface import HuggingFaceTokenizer


class WrappedTokenizer:
    """Delegates every method to another tokenizer; subclasses override some.

    Args:
        reference: The tokenizer to delegate to.
    """

    def __init__(self, reference: HuggingFaceTokenizer) -> None:
        self.reference = reference

    @property
    def vocab_size(self) -> int:
        """The value of the reference."""
        return self.reference.vocab_size

    @property
    def eod_id(self) -> int | None:
        """The value of the reference."""
        return self.reference.eod_id

    @property
    def bos_id(self) -> int | None:
        """The value of the reference."""
        return self.reference.bos_id

    @property
    def eos_id(self) -> int | None:
        """The value of the reference."""
        return self.reference.eos_id

    @property
    def pad_id(self) -> int | None:
        """The value of the reference."""
        return self.reference.pad_id

    @property
    def fingerprint(self) -> str:
        """The value of the reference."""
        return self.reference.fingerprint

    @property
    def base_fingerprint(self) -> str:
        """The value of the reference."""
        return self.reference.base_fingerprint

    def token_id(self, token: str) -> int | None:
        """Calls the reference."""
        return self.reference.token_id(token)

    def token(self, number: int) -> str | None:
        """Calls the reference."""
        return self.reference.token(number)

    def encode(self, text: str) -> list[int]:
        """Calls the reference."""
        return self.reference.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Calls the reference."""
        return self.reference.encode_batch(texts)

    def split_text(self, text: str) -> Iterator[str]:
        """Calls the reference."""
        return self.reference.split_text(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Calls the reference."""
        return self.reference.decode(tokens)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Calls the reference."""
        self.reference.save(folder)
