"""Fast encoding with gigatoken, compared with the `tokenizers` library on a sample of the texts."""

import logging
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import DataError
from megatron_data.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_data.tokenizers.protocol import Tokenizer
from megatron_data.tokenizers.threads import may_use_threads
from megatron_data.tokenizers.wrapped import WrappedTokenizer

CHECKED_FIRST = 200
CHECKED_EVERY = 500
CHECKED_CHARACTERS = 200_000
CHECKED_SHARE = 200
"""The check stops at `CHECKED_CHARACTERS` plus one in `CHECKED_SHARE` of all characters."""

_log = logging.getLogger("megatron_data")


class MismatchError(RuntimeError):
    """Raised when gigatoken and the `tokenizers` library give different tokens for a text."""


class FastTokenizer(WrappedTokenizer):
    """A `HuggingFaceTokenizer` whose batches gigatoken encodes (the extra `fast`).

    The first 200 texts that a process encodes, and every 500th text after them, are also encoded
    by the `tokenizers` library, up to 200,000 characters plus one in 200 of all. If the tokens of
    a text differ, `preprocess` starts again without gigatoken and logs a warning.

    Args:
        reference: The tokenizer to compare with.

    Raises:
        DataError: gigatoken is not installed, or does not support this kind of tokenizer.
    """

    def __init__(self, reference: HuggingFaceTokenizer) -> None:
        try:
            import gigatoken
        except ImportError:
            raise DataError(
                "gigatoken is not installed; pip install 'megatron-data[fast]'"
            ) from None
        super().__init__(reference)
        self._seen = self._characters = self._checked = 0
        try:
            self._fast: Any = gigatoken.Tokenizer.from_json(reference.definition)
        # The library raises exceptions of any type for definitions that it does not support.
        except Exception as error:  # noqa: BLE001
            reason = " ".join(str(error).split())
            raise DataError(f"gigatoken does not support this tokenizer: {reason}") from None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of several texts.

        Raises:
            MismatchError: The tokens of a text differ from those of the reference.
        """
        tokens, lengths = self.encode_joined(texts)
        ends = np.cumsum(lengths)
        return [
            tokens[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)
        ]

    def encode_joined(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Returns the concatenated tokens of several texts, and the number of tokens of each.

        Raises:
            MismatchError: The tokens of a text differ from those of the reference.
        """
        if not texts:
            return np.empty(0, np.uint32), np.empty(0, np.int64)
        layout = self._fast.encode_batch(list(texts), parallel=may_use_threads()).layout
        offsets = np.asarray(layout.offsets.data)
        tokens = np.asarray(layout.content.data)
        self._check(texts, tokens, offsets)
        return tokens[offsets[0] : offsets[-1]], np.diff(offsets)

    def _check(
        self, texts: Sequence[str], tokens: NDArray[np.uint32], offsets: NDArray[np.int64]
    ) -> None:
        """Compares a sample of the texts with the reference; counts the texts of all calls."""
        self._characters += sum(map(len, texts))
        allowed = CHECKED_CHARACTERS + self._characters // CHECKED_SHARE
        chosen: list[int] = []
        for at in self._sample(len(texts)):
            if self._checked >= allowed:
                break
            self._checked += len(texts[at])
            chosen.append(at)
        self._seen += len(texts)
        wanted = self.reference.encode_batch([texts[at] for at in chosen])
        for at, ids in zip(chosen, wanted, strict=True):
            if tokens[offsets[at] : offsets[at + 1]].tolist() != ids:
                raise MismatchError(
                    "gigatoken and the tokenizers library give different tokens for "
                    f"{texts[at][:60]!r}"
                )

    def _sample(self, texts: int) -> Iterator[int]:
        """Returns the indices of the texts to check."""
        first = min(max(CHECKED_FIRST - self._seen, 0), texts)
        regular = range(-self._seen % CHECKED_EVERY, texts, CHECKED_EVERY)
        return chain(range(first), (at for at in regular if at >= first))

    def __reduce__(self) -> tuple[type["FastTokenizer"], tuple[HuggingFaceTokenizer]]:
        return type(self), (self.reference,)


def fast_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Returns a `FastTokenizer`, or the given tokenizer with a warning if it is not supported.

    Args:
        tokenizer: Any tokenizer. gigatoken supports byte-level and SentencePiece-like BPE.

    Raises:
        DataError: gigatoken is not installed.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        _log.warning("gigatoken is not used: it does not support %s", type(tokenizer).__name__)
        return tokenizer
    try:
        return FastTokenizer(tokenizer)
    except DataError as error:
        if "not installed" in str(error):
            raise
        _log.warning("%s; the tokenizers library is used", error)
        return tokenizer
