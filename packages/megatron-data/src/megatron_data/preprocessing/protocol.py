"""The interface of an encoder, which turns source chunks into documents of datasets."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_data.indexed.format import TokenType
from megatron_data.sources.protocol import Chunk, Fault
from megatron_data.tokenizers.protocol import Tokenizer


class Output(NamedTuple):
    """One of the datasets that an encoder writes for the same documents.

    Attributes:
        suffix: Suffix of its prefix.
        dtype: Token type.
        required_content: What a document needs to have tokens, such as "text under 'body'".
        multimodal: Whether its sequences have modes.
        values: Number of distinct values, from 0, or None for token ids of the vocabulary.
        skip_reasons: Names of tallies that count skipped documents, each with its description.
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
        tokens: All tokens, concatenated.
        lengths: Tokens per sequence, int32.
        sequences: Sequences per document, int32; 0 for a document without tokens.
        modes: Mode of each sequence, int8; None if the dataset has no modes.
    """

    tokens: NDArray[np.integer]
    lengths: NDArray[np.int32]
    sequences: NDArray[np.int32]
    modes: NDArray[np.int8] | None = None

    @property
    def arrays(self) -> list[NDArray[np.integer]]:
        """The arrays that are not None, in the order of the attributes."""
        return [array for array in self if array is not None]


class EncodedChunk(NamedTuple):
    """The result of encoding one chunk.

    Attributes:
        outputs: Its documents in each dataset; every dataset has the same number of documents.
        faults: Faults in the order of the source.
        refused: Indices of the documents that the source read and the encoder refused.
        tallies: Counters of the encoder by name, which are summed over all chunks.
        external_version: The result of `ChunkEncoder.external_version` for the chunk.
    """

    outputs: list[EncodedDocuments]
    faults: list[Fault]
    refused: list[int]
    tallies: Mapping[str, int]
    external_version: str = ""


class ChunkEncoder(Protocol):
    """Encodes source chunks as documents; it is pickled for each worker process."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""

    @property
    def outputs(self) -> tuple[Output, ...]:
        """The datasets to write; none appears under its name before all are complete."""

    @property
    def max_document_bytes(self) -> int | None:
        """Largest size of a document in its source in bytes; None for no limit."""

    @property
    def chunk_bytes(self) -> tuple[int, int]:
        """Smallest and largest size of a source chunk in bytes, which bounds the memory."""

    @property
    def job(self) -> dict[str, Any]:
        """JSON values that determine the encoding of a document; a resumed run compares them."""

    @property
    def reader_options(self) -> dict[str, Any]:
        """How documents are read from a chunk, for `trace`; stored with each source."""

    def options(self, output: int) -> dict[str, Any]:
        """Returns the options that the manifest of a dataset records."""

    def external_version(self, chunk: Chunk) -> str:
        """Returns a digest of the versions of files that a chunk names; empty if it names none."""

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        """Encodes the documents of a chunk."""
