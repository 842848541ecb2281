"""What makes the sequences of datasets of a chunk of a source, whatever they hold."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_data.indexed.format import TokenType
from megatron_data.sources.protocol import Chunk, Fault
from megatron_data.tokenizers.protocol import Tokenizer


class Output(NamedTuple):
    """One of the datasets that are made of the same documents.

    Attributes:
        suffix: what its name adds to the prefix of all.
        dtype: token type.
        required_content: what a document needs to have tokens, such as "text under 'body'".
        multimodal: whether its sequences have modes.
        values: how many values its tokens have, from 0; None if that is the vocabulary.
        skip_reasons: what the encoder counted of documents that it left out, by name,
            each with its words.
    """

    suffix: str
    dtype: TokenType
    required_content: str
    multimodal: bool = False
    values: int | None = None
    skip_reasons: tuple[tuple[str, str], ...] = ()


class EncodedDocuments(NamedTuple):
    """The documents of one chunk in one dataset.

    Attributes:
        tokens: all tokens, joined.
        lengths: tokens per sequence, int32.
        sequences: sequences per document, int32; 0 where a document has no token.
        modes: of every sequence, int8; None where the dataset has none.
    """

    tokens: NDArray[np.integer]
    lengths: NDArray[np.int32]
    sequences: NDArray[np.int32]
    modes: NDArray[np.int8] | None = None

    @property
    def arrays(self) -> list[NDArray[np.integer]]:
        """Those there are, in this order."""
        return [array for array in self if array is not None]


class EncodedChunk(NamedTuple):
    """What one chunk became.

    Attributes:
        outputs: its documents in each dataset; the number of documents is that of every one.
        faults: what is no document, in the order of the source.
        refused: which of the source's documents the encoder alone refused, from 0.
        tallies: whatever the encoder counts, by name; summed over all chunks at the end.
        external_version: what `ChunkEncoder.external_version` said of the chunk.
    """

    outputs: list[EncodedDocuments]
    faults: list[Fault]
    refused: list[int]
    tallies: Mapping[str, int]
    external_version: str = ""


class ChunkEncoder(Protocol):
    """Makes documents of datasets of chunks; every worker process holds one, so it is pickled."""

    @property
    def tokenizer(self) -> Tokenizer:
        """What its tokens come from."""

    @property
    def outputs(self) -> tuple[Output, ...]:
        """The datasets; none of them takes its name before all are whole."""

    @property
    def max_document_bytes(self) -> int | None:
        """Bytes that a document may have in its source; None for no limit."""

    @property
    def chunk_bytes(self) -> tuple[int, int]:
        """The least and the most that a chunk should have, so that what it becomes is bounded."""

    @property
    def job(self) -> dict[str, Any]:
        """What decides what a document becomes, plain values of JSON."""

    @property
    def reader_options(self) -> dict[str, Any]:
        """How documents are told apart in a chunk, for `trace`; stands beside every source."""

    def options(self, output: int) -> dict[str, Any]:
        """Returns what the manifest of a dataset says of how it was made."""

    def external_version(self, chunk: Chunk) -> str:
        """Returns what changes with other files that a chunk names; nothing if it names none."""

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        """Returns the documents of a chunk."""
