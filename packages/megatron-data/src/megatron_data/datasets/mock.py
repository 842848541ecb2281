"""Mock data, to try a configuration without a dataset."""

import numpy as np
from numpy.typing import NDArray


class MockTokens:
    """Megatron's mock data: documents of tokens 1, 2, 3, … that end with the end-of-document token.

    Args:
        vocab_size: Modulus of the tokens.
        eod_id: Last token of every document.
        num_documents: Number of documents. Defaults to 100,000.
        max_length: Lengths are drawn from 1 to `max_length - 1` with seed 0. Defaults to 4096.
    """

    def __init__(
        self, vocab_size: int, eod_id: int, num_documents: int = 100_000, max_length: int = 4096
    ) -> None:
        self.vocab_size = vocab_size
        self.eod_id = eod_id
        self._lengths = np.random.default_rng(0).integers(
            1, max_length, num_documents, dtype=np.int32
        )

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """Length of every document in tokens, int32 `[num_documents]`."""
        return self._lengths

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[np.int64]:
        """Returns the tokens of a document, or `length` of them from `offset` on."""
        total = int(self._lengths[sequence])
        end = total if length is None else offset + length
        tokens = np.arange(offset + 1, end + 1, dtype=np.int64) % self.vocab_size
        if end == total:
            tokens[total - 1 - offset :] = self.eod_id
        return tokens
