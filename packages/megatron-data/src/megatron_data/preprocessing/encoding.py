"""From a chunk of a source to tokens."""

from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..indexed.format import TokenType, choose_dtype
from ..sources.protocol import Chunk, Document
from ..tokenizers.protocol import Tokenizer


class Encoded(NamedTuple):
    """The documents of one chunk under one key.

    Attributes:
        tokens: all tokens, joined.
        lengths: tokens per sequence, int32.
        sequences: sequences per document, int32; 0 where a document has no token.
    """

    tokens: NDArray[np.integer]
    lengths: NDArray[np.int32]
    sequences: NDArray[np.int32]


class Encoder:
    """Tokenizes chunks; what every worker process holds.

    Args:
        tokenizer: any `Tokenizer`.
        keys: JSON keys, each of which becomes a dataset.
        append_eod: end every document that has a token with the end-of-document token.
        dtype: token type; by the vocabulary if None.

    Raises:
        DataError: `append_eod` with a tokenizer that has no such token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        keys: tuple[str, ...],
        append_eod: bool,
        dtype: TokenType | None = None,
    ) -> None:
        if append_eod and tokenizer.eod_id is None:
            raise DataError(
                "--append-eod: this tokenizer has no end-of-document token; name it when loading "
                'the tokenizer, special_tokens={"eod": "…"}'
            )
        self.tokenizer = tokenizer
        self.keys = keys
        self.eod = [tokenizer.eod_id] if append_eod and tokenizer.eod_id is not None else []
        self.dtype = choose_dtype(tokenizer.vocab_size) if dtype is None else dtype

    def __call__(self, chunk: Chunk) -> list[Encoded]:
        """The documents of a chunk, one result per key.

        Raises:
            DataError: a document that cannot be read or tokenized, with file and place.
        """
        return [self._encode(chunk, documents) for documents in chunk.documents(self.keys)]

    def _encode(self, chunk: Chunk, documents: list[Document]) -> Encoded:
        try:
            encoded = self.tokenizer.encode_batch(list(chain.from_iterable(documents)))
        except DataError as error:
            raise DataError(f"{chunk.place}: {error}") from None
        return self._join(encoded, [len(parts) for parts in documents])

    def _join(self, encoded: list[list[int]], parts: list[int]) -> Encoded:
        """Arrays of the encoded texts, of which document i has `parts[i]`."""
        sequences = np.zeros(len(parts), np.int32)
        kept: list[list[int]] = []
        position = 0
        for document, count in enumerate(parts):
            own = [ids for ids in encoded[position : position + count] if ids]
            position += count
            if own:
                own[-1] += self.eod
            sequences[document] = len(own)
            kept += own
        lengths = np.fromiter(map(len, kept), np.int32, len(kept))
        total = int(lengths.sum(dtype=np.int64))
        tokens = np.fromiter(chain.from_iterable(kept), self.dtype, total)
        return Encoded(tokens, lengths, sequences)
