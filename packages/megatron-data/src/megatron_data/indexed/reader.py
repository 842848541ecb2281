"""Reading an indexed dataset, through a memory map or from object storage."""

import os
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import DataError
from megatron_data.indexed.dataset_files import DatasetFiles, MappedTokens, TokenArray, open_files
from megatron_data.indexed.format import HEADER, Header, TokenType
from megatron_data.sources.block_cache import StorageCache

_CHECKED = 1 << 20  # sequences that are checked at once


class IndexedDataset:
    """The sequences of a `.bin`/`.idx` pair, mapped into memory.

    Opening reads the header only; `check` reads the whole index, which takes 13 ns of CPU for each
    sequence and is what the builders of datasets do. Arrays handed out are read-only views of the
    map: nothing is copied, and the map lives until the dataset is closed and the last view is gone.

    Args:
        prefix: path of the pair without `.bin` or `.idx`, or a URL that fsspec opens. Of a URL the
            index is fetched whole, tokens are read in blocks through a cache.
        storage: the cache for a URL.
        mmap: map a local `.bin` into memory. Otherwise stretches of it are read as they are asked
            for, and arrays handed out are copies.

    Raises:
        DataError: a file is missing or empty, damaged, or the two do not belong together; a URL
            without a cache, or one that cannot be read.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        storage: StorageCache | None = None,
        mmap: bool = True,
    ) -> None:
        self.prefix = os.fspath(prefix)
        self._storage = storage
        self._mmap = mmap
        self._closed = False
        files = open_files(self.prefix, storage, mmap)
        buffer = files.idx_bytes
        header = Header.unpack(bytes(buffer[: HEADER.size]), files.idx)
        multimodal = _is_multimodal(header, len(buffer), files.idx)
        self._dtype = header.dtype
        self._itemsize = header.dtype.itemsize

        offset = HEADER.size
        self._lengths = np.frombuffer(buffer, "<i4", header.sequences, offset)
        offset += self._lengths.nbytes
        self._pointers = np.frombuffer(buffer, "<i8", header.sequences, offset)
        offset += self._pointers.nbytes
        self._bounds = np.frombuffer(buffer, "<i8", header.bounds, offset)
        offset += self._bounds.nbytes
        self._modes = np.frombuffer(buffer, "i1", header.sequences, offset) if multimodal else None
        self._check_ends(files)
        self._store = files.tokens(header.dtype)
        # Of a map the array itself, which is sliced in a fraction of the time.
        self._tokens: TokenArray = (
            self._store.array if isinstance(self._store, MappedTokens) else self._store
        )

    def _check_ends(self, files: DatasetFiles) -> None:
        """Returns the cheap checks of opening; `check` does the thorough ones."""
        if len(self._bounds) == 0 or self._bounds[0] != 0 or self._bounds[-1] != len(self):
            raise DataError(
                f"{files.idx} is damaged: its document bounds do not run from 0 to {len(self)}; "
                "preprocess the text again"
            )
        expected = 0
        if len(self):
            expected = int(self._pointers[-1]) + int(self._lengths[-1]) * self._dtype.itemsize
        if files.size != expected:
            raise DataError(
                f"{files.idx} does not match {files.data}: the index describes {expected:,} "
                f"bytes, the .bin has {files.size:,}; one of them is cut short or belongs to "
                "another dataset"
            )

    @property
    def dtype(self) -> TokenType:
        """Token type, as the index names it."""
        return self._dtype

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """Length of every sequence in tokens, int32 `[S]`."""
        return self._open(self._lengths)

    @property
    def sequence_pointers(self) -> NDArray[np.int64]:
        """First byte of every sequence in the `.bin`, int64 `[S]`."""
        return self._open(self._pointers)

    @property
    def document_indices(self) -> NDArray[np.int64]:
        """First sequence of every document and S at the end, int64 `[num_documents + 1]`."""
        return self._open(self._bounds)

    @property
    def sequence_modes(self) -> NDArray[np.int8] | None:
        """Mode of every sequence, int8 `[S]`, or None where the dataset has one mode only."""
        return None if self._modes is None else self._open(self._modes)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self._bounds) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self._tokens)

    @property
    def tokens(self) -> NDArray[Any]:
        """All tokens in the order of the file, of a mapped dataset; `scan` reads any.

        Raises:
            DataError: the dataset is closed, or not mapped.
        """
        tokens = self._tokens
        if not isinstance(tokens, np.ndarray):
            raise DataError(f"{self.prefix} is read in parts, not mapped; read them with scan()")
        return self._open(tokens)

    def scan(self, begin: int = 0, end: int | None = None) -> Iterator[NDArray[Any]]:
        """Returns the tokens from `begin` to `end` in the order of the file, in blocks of some MiB.

        However large the file is, the memory of the process stays flat: what was read of a map is
        let go, and of a URL a few blocks are fetched ahead, past the cache.

        Args:
            begin: number of the first token.
            end: number of the one after the last; None for all.

        Raises:
            IndexError: the dataset has fewer tokens.
            DataError: the dataset is closed; a URL that cannot be read, or was replaced meanwhile.
        """
        self._open(self._lengths)
        end = self.num_tokens if end is None else end
        if not 0 <= begin <= end <= self.num_tokens:
            raise IndexError(f"tokens {begin} to {end} of {self.num_tokens} in {self.prefix}")
        return self._store.scan(begin, end)

    def __len__(self) -> int:
        """Returns the number of sequences."""
        return len(self._lengths)

    def __getitem__(self, sequence: int) -> NDArray[Any]:
        return self.get(sequence)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Tokens of a sequence, or `length` of them from `offset` on.

        Raises:
            IndexError: no such sequence, or the range leaves it.
            DataError: the dataset is closed, or its index points outside the `.bin`.
        """
        try:
            whole, pointer = self._lengths.item(sequence), self._pointers.item(sequence)
        except IndexError:
            count = len(self.sequence_lengths)
            raise IndexError(f"sequence {sequence} of {count} in {self.prefix}") from None
        if length is None:
            length = whole - offset
        if offset < 0 or length < 0 or offset + length > whole:
            raise IndexError(
                f"tokens {offset} to {offset + length} of sequence {sequence}, which has {whole}, "
                f"in {self.prefix}"
            )
        return self._slice(pointer, offset, length)

    def tokens_before(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of all sequences with a smaller number, for numbers up to S itself."""
        pointers = self.sequence_pointers
        before = np.full(sequences.shape, len(self._tokens), np.int64)
        inner = sequences < len(pointers)
        before[inner] = pointers[sequences[inner]] // self._dtype.itemsize
        return before

    def document(self, document: int) -> NDArray[Any]:
        """Tokens of a document: its sequences joined.

        Raises:
            IndexError: no such document.
            DataError: the dataset is closed, or its index points outside the `.bin`.
        """
        if not -self.num_documents <= document < self.num_documents:
            raise IndexError(f"document {document} of {self.num_documents} in {self.prefix}")
        document %= self.num_documents
        first, last = int(self._bounds[document]), int(self._bounds[document + 1])
        if first == last:
            return self._open(np.empty(0, self._dtype))
        length = int(self._lengths[first:last].sum(dtype=np.int64))
        return self._slice(int(self._pointers[first]), 0, length)

    def check(self) -> None:
        """Checks every length, pointer and bound; opening checks only the ends.

        Raises:
            DataError: the first thing found wrong, with its place.
        """
        lengths, before = self.sequence_lengths, 0
        for start in range(0, len(lengths), _CHECKED):
            some = lengths[start : start + _CHECKED]
            if (shortest := int(some.min())) < 0:
                where = start + int(some.argmin())
                raise self._damaged(where, f"sequence {where} has length {shortest}")
            sizes = some.astype(np.int64) * self._dtype.itemsize
            ends = np.cumsum(sizes) + before
            wrong = np.flatnonzero(self._pointers[start : start + len(some)] != ends - sizes)
            if len(wrong):
                where = start + int(wrong[0])
                what = f"the pointer of sequence {where} is not the sum of the lengths before it"
                raise self._damaged(where, what)
            before = int(ends[-1])
        for start in range(0, len(self._bounds), _CHECKED):
            bounds = self._bounds[start : start + _CHECKED + 1]
            backwards = np.flatnonzero(bounds[1:] < bounds[:-1])
            if len(backwards):
                raise self._damaged(
                    None, f"document {start + int(backwards[0])} ends before it begins"
                )

    def _damaged(self, sequence: int | None, what: str) -> DataError:
        """Names the file, the document of a sequence, and what to do."""
        if sequence is not None:
            within = int(np.searchsorted(self._bounds, sequence, side="right")) - 1
            what += f" (document {min(max(within, 0), self.num_documents - 1)})"
        return DataError(
            f"{self.prefix}.idx is damaged: {what}; copy it again, or preprocess the text again"
        )

    def _slice(self, pointer: int, offset: int, length: int) -> NDArray[Any]:
        start, inside = divmod(pointer, self._itemsize)
        start += offset
        if not inside and pointer >= 0:
            tokens = self._tokens[start : start + length]
            if len(tokens) == length:
                return tokens
        self._open(self._lengths)
        raise DataError(
            f"{self.prefix}.idx is damaged: it points to byte {pointer:,} of a .bin of "
            f"{self._tokens.nbytes:,} bytes; run `megatron-data verify {self.prefix}`"
        )

    def _open(self, array: NDArray[Any]) -> NDArray[Any]:
        if self._closed:
            raise DataError(f"{self.prefix} is closed")
        return array

    def close(self) -> None:
        """Lets go of both files. Views handed out before stay valid; new reads are refused."""
        self._closed = True
        self._lengths = self._lengths[:0].copy()
        self._pointers = self._pointers[:0].copy()
        self._bounds = np.zeros(1, np.int64)
        self._modes = None
        self._store.close()
        self._tokens = np.empty(0, self._dtype)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[type["IndexedDataset"], tuple[str, StorageCache | None, bool]]:
        """Loader processes open the files anew."""
        return type(self), (self.prefix, self._storage, self._mmap)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self):,} sequences, {self._dtype}"
        return f"IndexedDataset({self.prefix!r}: {state})"


def _is_multimodal(header: Header, size: int, index: str) -> bool:
    """Returns whether the index holds modes, which only its size tells."""
    plain, multimodal = header.index_bytes(False), header.index_bytes(True)
    if size not in (plain, multimodal):
        raise DataError(
            f"{index} has {size:,} bytes but its header ({header.sequences:,} sequences, "
            f"{header.bounds:,} document bounds) asks for {plain:,}; it is damaged or cut short"
        )
    return size != plain
