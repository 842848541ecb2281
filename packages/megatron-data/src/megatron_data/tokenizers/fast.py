"""The same tokens, much faster: gigatoken, checked against the `tokenizers` library as it goes."""

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
"""Long texts are left out of the check where it has read this many characters, and one in 200."""

_log = logging.getLogger("megatron_data")


class MismatchError(RuntimeError):
    """gigatoken gave a text other tokens than the `tokenizers` library."""


class FastTokenizer(WrappedTokenizer):
    """A `HuggingFaceTokenizer` whose batches gigatoken encodes (the extra `fast`).

    The first 200 texts that a process encodes, and every 500th after them, are encoded by the
    `tokenizers` library too, as long as these are no more than 200,000 characters and one in
    200 of all. `preprocess` begins anew without gigatoken, and says so, at the first
    text whose tokens differ.

    Args:
        reference: the tokenizer that decides.

    Raises:
        DataError: gigatoken is not installed, or does not know this kind of tokenizer.
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
        # The library raises whatever it stumbles over in a definition it does not know.
        except Exception as error:  # noqa: BLE001
            reason = " ".join(str(error).split())
            raise DataError(f"gigatoken does not know this tokenizer: {reason}") from None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts.

        Raises:
            MismatchError: a text whose tokens differ.
        """
        tokens, lengths = self.encode_joined(texts)
        ends = np.cumsum(lengths)
        return [
            tokens[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)
        ]

    def encode_joined(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Returns the tokens of many texts, joined, and how many each has.

        Raises:
            MismatchError: a text whose tokens differ.
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
        """Compares a sample with the reference; which it is depends on what came before."""
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
                    f"gigatoken gives other tokens than the tokenizers library: {texts[at][:60]!r}"
                )

    def _sample(self, texts: int) -> Iterator[int]:
        """Returns which of the next texts are checked; only these are looked at one by one."""
        first = min(max(CHECKED_FIRST - self._seen, 0), texts)
        regular = range(-self._seen % CHECKED_EVERY, texts, CHECKED_EVERY)
        return chain(range(first), (at for at in regular if at >= first))

    def __reduce__(self) -> tuple[type["FastTokenizer"], tuple[HuggingFaceTokenizer]]:
        return type(self), (self.reference,)


def fast_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Returns the same tokens by gigatoken; where it cannot, the tokenizer itself, with a warning.

    Args:
        tokenizer: any; gigatoken knows byte-level and SentencePiece-like BPE.

    Raises:
        DataError: gigatoken is not installed.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        _log.warning("gigatoken is not used: it knows no %s", type(tokenizer).__name__)
        return tokenizer
    try:
        return FastTokenizer(tokenizer)
    except DataError as error:
        if "not installed" in str(error):
            raise
        _log.warning("%s; the tokenizers library is used", error)
        return tokenizer
