"""What tokenizers have in common that are a `HuggingFaceTokenizer` and something more."""

import os
from collections.abc import Iterator, Sequence

from megatron_data.tokenizers.huggingface import HuggingFaceTokenizer


class WrappedTokenizer:
    """Another tokenizer, but for what a subclass does otherwise.

    Args:
        reference: the tokenizer that is asked.
    """

    def __init__(self, reference: HuggingFaceTokenizer) -> None:
        self.reference = reference

    @property
    def vocab_size(self) -> int:
        """As the reference."""
        return self.reference.vocab_size

    @property
    def eod_id(self) -> int | None:
        """As the reference."""
        return self.reference.eod_id

    @property
    def bos_id(self) -> int | None:
        """As the reference."""
        return self.reference.bos_id

    @property
    def eos_id(self) -> int | None:
        """As the reference."""
        return self.reference.eos_id

    @property
    def pad_id(self) -> int | None:
        """As the reference."""
        return self.reference.pad_id

    @property
    def fingerprint(self) -> str:
        """As the reference."""
        return self.reference.fingerprint

    @property
    def base_fingerprint(self) -> str:
        """As the reference."""
        return self.reference.base_fingerprint

    def token_id(self, token: str) -> int | None:
        """As the reference."""
        return self.reference.token_id(token)

    def token(self, number: int) -> str | None:
        """As the reference."""
        return self.reference.token(number)

    def encode(self, text: str) -> list[int]:
        """As the reference."""
        return self.reference.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """As the reference."""
        return self.reference.encode_batch(texts)

    def split_text(self, text: str) -> Iterator[str]:
        """As the reference."""
        return self.reference.split_text(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """As the reference."""
        return self.reference.decode(tokens)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """As the reference."""
        self.reference.save(folder)
