"""Encodes the texts of a chunk as tokens."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import DataError
from megatron_data.indexed.format import TokenType, choose_dtype
from megatron_data.preprocessing.batches import AT_ONCE, batch_items, encode_or_fault
from megatron_data.preprocessing.protocol import EncodedChunk, EncodedDocuments, Output
from megatron_data.preprocessing.sentences import SentenceSplitter
from megatron_data.sources.protocol import LARGEST_CHUNK, Chunk, Document, Fault, Item
from megatron_data.tokenizers.fast import FastTokenizer
from megatron_data.tokenizers.protocol import Tokenizer

SMALLEST_CHUNK = 1 << 20


@runtime_checkable
class SupportsSplitting(Protocol):
    """A tokenizer that can split a text without changing its tokens."""

    def split_text(self, text: str) -> Iterator[str]:
        """Splits a text into segments whose concatenated tokens are those of the text."""


@runtime_checkable
class SupportsJoinedTokens(Protocol):
    """A tokenizer that returns the tokens of several texts as one array."""

    def encode_joined(self, texts: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Returns the concatenated tokens, and the number of tokens of each text."""


class TextEncoder:
    """Encodes texts; each key gives a dataset whose sequences are the texts or their sentences.

    Args:
        tokenizer: The tokenizer.
        keys: JSON keys; each gives a dataset.
        append_eod: Whether to end every document that has tokens with the end-of-document token.
        max_document_bytes: Largest size of a document in its source in bytes; None for no limit.
        splitter: Splits texts into sentences, which are the sequences of their document. A text
            that is several strings in its source is taken as split already.
        dtype: Token type. Defaults to the smallest for the vocabulary.

    Raises:
        DataError: `append_eod` is set and the tokenizer has no end-of-document token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        keys: tuple[str, ...],
        append_eod: bool,
        max_document_bytes: int | None = None,
        splitter: SentenceSplitter | None = None,
        dtype: TokenType | None = None,
    ) -> None:
        if append_eod and tokenizer.eod_id is None:
            raise DataError(
                "--append-eod: this tokenizer has no end-of-document token; set it when loading "
                'the tokenizer, special_tokens={"eod": "…"}'
            )
        self.tokenizer = tokenizer
        self.keys = keys
        self.max_document_bytes = max_document_bytes
        self.splitter = splitter
        self.eod = [tokenizer.eod_id] if append_eod and tokenizer.eod_id is not None else []
        self.dtype = choose_dtype(tokenizer.vocab_size) if dtype is None else dtype

    @property
    def outputs(self) -> tuple[Output, ...]:
        """One dataset per key."""
        level = "document" if self.splitter is None else "sentence"
        return tuple(
            Output(f"_{key}_{level}", self.dtype, f"text under {key!r}") for key in self.keys
        )

    @property
    def chunk_bytes(self) -> tuple[int, int]:
        """1 to 16 MiB; tokens take about as many bytes as their text."""
        return SMALLEST_CHUNK, LARGEST_CHUNK

    @property
    def job(self) -> dict[str, Any]:
        """The values that determine the tokens of a text."""
        return {
            "tokenizer": self.tokenizer.fingerprint,
            "json keys": list(self.keys),
            "end of document": self.eod,
            "sentences": None if self.splitter is None else self.splitter.record,
            "token type": str(self.dtype),
            "max document bytes": self.max_document_bytes,
            "gigatoken": isinstance(self.tokenizer, FastTokenizer),
        }

    @property
    def reader_options(self) -> dict[str, Any]:
        """The keys, and the limit of the size of a document."""
        return {"json_keys": list(self.keys), "max_document_bytes": self.max_document_bytes}

    def options(self, output: int) -> dict[str, Any]:
        """Returns the key, and the options of end-of-document tokens and sentences."""
        return {
            "json_key": self.keys[output],
            "append_eod": bool(self.eod),
            "sentences": None if self.splitter is None else self.splitter.record,
        }

    def external_version(self, chunk: Chunk) -> str:
        """Returns "": texts name no other files."""
        return ""

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        """Encodes the documents of a chunk for every key."""
        parts: list[list[EncodedDocuments]] = [[] for _ in self.keys]
        faults: list[Fault] = []
        refused: list[int] = []
        read = 0
        for found in batch_items(chunk.items(self.keys, self.max_document_bytes)):
            if isinstance(found, Fault):
                faults.append(found)
                continue
            for items, encoded in encode_or_fault(chunk, found, self._encode):
                if isinstance(encoded, Fault):
                    faults.append(encoded)
                    refused.append(read)
                else:
                    for key, part in zip(parts, encoded, strict=True):
                        key.append(part)
                read += len(items)
        return EncodedChunk([self._joined(part) for part in parts], faults, refused, {})

    def _encode(self, items: list[Item]) -> list[EncodedDocuments]:
        encoded = []
        for number in range(len(self.keys)):
            documents = [item.texts[number] for item in items]
            if self.splitter is not None:
                documents = [_split(self.splitter, document) for document in documents]
            encoded.append(self._encode_key(documents))
        return encoded

    def _encode_key(self, documents: list[list[str]]) -> EncodedDocuments:
        texts = list(chain.from_iterable(documents))
        counts = [len(parts) for parts in documents]
        if isinstance(self.tokenizer, SupportsJoinedTokens):
            return self._end(*self.tokenizer.encode_joined(texts), counts)
        if isinstance(self.tokenizer, SupportsSplitting) and any(
            len(text) > AT_ONCE for text in texts
        ):
            encoded = [self._encode_cut(self.tokenizer, text) for text in texts]
        else:
            encoded = list(self.tokenizer.encode_batch(texts))
        return self._join(encoded, counts)

    def _encode_cut(self, tokenizer: SupportsSplitting, text: str) -> Sequence[int]:
        """Encodes a text in segments, with their tokens as arrays to save memory."""
        arrays: list[NDArray[np.integer]] = []
        for some in _filled(tokenizer.split_text(text)):
            ids = list(chain.from_iterable(self.tokenizer.encode_batch(some)))
            arrays.append(np.array(ids, self.dtype))
        joined: Sequence[int] = np.concatenate(arrays) if arrays else []  # type: ignore[assignment]
        return joined

    def _join(self, encoded: list[Sequence[int]], parts: list[int]) -> EncodedDocuments:
        """Builds the arrays of encoded texts; document i has `parts[i]` of them."""
        sequences = np.zeros(len(parts), np.int32)
        kept: list[Sequence[int]] = []
        lengths: list[int] = []
        position = 0
        for document, count in enumerate(parts):
            own = [ids for ids in encoded[position : position + count] if len(ids)]
            position += count
            kept += own
            lengths += map(len, own)
            if own and self.eod:
                kept.append(self.eod)
                lengths[-1] += 1
            sequences[document] = len(own)
        return EncodedDocuments(
            self._flat(kept, sum(lengths)), np.array(lengths, np.int32), sequences
        )

    def _end(
        self, tokens: NDArray[Any], sizes: NDArray[np.int64], parts: list[int]
    ) -> EncodedDocuments:
        """Builds the arrays from concatenated tokens: drops empty texts and adds end tokens."""
        kept = sizes > 0
        document_of = np.repeat(np.arange(len(parts)), parts)[kept]
        sequences = np.bincount(document_of, minlength=len(parts)).astype(np.int32)
        lengths = sizes[kept].astype(np.int32)
        if self.eod and len(lengths):
            last = np.append(document_of[1:] != document_of[:-1], True)
            tokens = np.insert(tokens, np.cumsum(lengths)[last], self.eod[0])
            lengths[last] += 1
        return EncodedDocuments(tokens.astype(self.dtype), lengths, sequences)

    def _flat(self, kept: list[Sequence[int]], total: int) -> NDArray[np.integer]:
        if any(isinstance(ids, np.ndarray) for ids in kept):
            return np.concatenate([np.asarray(ids, self.dtype) for ids in kept])
        return np.fromiter(chain.from_iterable(kept), self.dtype, total)

    def _joined(self, parts: list[EncodedDocuments]) -> EncodedDocuments:
        if not parts:
            empty = np.empty(0, np.int32)
            return EncodedDocuments(np.empty(0, self.dtype), empty, empty)
        if len(parts) == 1:
            return parts[0]
        return EncodedDocuments(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.sequences for part in parts]),
        )


def _split(splitter: SentenceSplitter, document: Document) -> Document:
    """Returns the sentences of a document; a document of several strings is split already."""
    return splitter.split(document[0]) if len(document) == 1 else document


def _filled(segments: Iterator[str]) -> Iterator[list[str]]:
    """Groups segments up to about `AT_ONCE` characters."""
    some: list[str] = []
    size = 0
    for segment in segments:
        some.append(segment)
        size += len(segment)
        if size >= AT_ONCE:
            yield some
            some, size = [], 0
    if some:
        yield some
