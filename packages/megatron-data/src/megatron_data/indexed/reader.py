"""Reads an indexed dataset through a memory map, by system calls or from object storage."""

import os
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import DataError
from megatron_data.indexed.dataset_files import DatasetFiles, MappedTokens, TokenArray, open_files
from megatron_data.indexed.format import HEADER, Header, TokenType
from megatron_data.sources.block_cache import StorageCache

_CHECKED = 1 << 20  # sequences per step of a check


class IndexedDataset:
    """The sequences of a `.bin`/`.idx` pair.

    The constructor reads only the header. `check` reads the whole index, which takes 13 ns of CPU
    per sequence; the functions that build datasets call it. With a memory map, returned arrays are
    read-only views: nothing is copied, and the map exists until the dataset is closed and the last
    view is deleted.

    Args:
        prefix: Path of the dataset without `.bin` or `.idx`, or a URL that fsspec opens. The index
            of a URL is downloaded whole, and tokens are read in blocks through a cache.
        storage: Cache for a URL.
        mmap: Maps a local `.bin` into memory. If False, each read is a system call that returns a
            copy. Defaults to True.

    Raises:
        DataError: A file is missing, empty or damaged, the two files do not match, or a URL cannot
            be read or has no cache.
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
        # The array of a map, because slicing it directly is several times faster.
        self._tokens: TokenArray = (
            self._store.array if isinstance(self._store, MappedTokens) else self._store
        )

    def _check_ends(self, files: DatasetFiles) -> None:
        """Checks the ends of the index and the size of the `.bin`; `check` reads everything."""
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
                f"bytes, but the .bin has {files.size:,}; one of them is truncated or belongs to "
                "another dataset"
            )

    @property
    def dtype(self) -> TokenType:
        """Token type."""
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
        """Mode of every sequence, int8 `[S]`, or None if the dataset is not multimodal."""
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
        """All tokens of a memory-mapped dataset in the order of the file.

        `scan` reads the tokens of every dataset.

        Raises:
            DataError: The dataset is closed or not memory-mapped.
        """
        tokens = self._tokens
        if not isinstance(tokens, np.ndarray):
            raise DataError(f"{self.prefix} is not memory-mapped; read its tokens with scan()")
        return self._open(tokens)

    def scan(self, begin: int = 0, end: int | None = None) -> Iterator[NDArray[Any]]:
        """Yields the tokens `[begin, end)` in the order of the file, in blocks of a few MiB.

        Memory is constant for files of any size. Pages of a map are released after reading. The
        blocks of a URL are prefetched without the cache.

        Args:
            begin: Index of the first token. Defaults to 0.
            end: Index after the last token. Defaults to the number of tokens.

        Raises:
            IndexError: The dataset has fewer tokens.
            DataError: The dataset is closed, or a URL cannot be read or was replaced.
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
        """Returns the tokens of a sequence, or `length` of them from `offset` on.

        Raises:
            IndexError: There is no such sequence, or the range exceeds it.
            DataError: The dataset is closed, or its index points outside the `.bin`.
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
        """Returns the tokens of all sequences before each of `sequences`, which are 0 to S."""
        pointers = self.sequence_pointers
        before = np.full(sequences.shape, len(self._tokens), np.int64)
        inner = sequences < len(pointers)
        before[inner] = pointers[sequences[inner]] // self._dtype.itemsize
        return before

    def document(self, document: int) -> NDArray[Any]:
        """Returns the tokens of a document, which are those of its sequences.

        Raises:
            IndexError: There is no such document.
            DataError: The dataset is closed, or its index points outside the `.bin`.
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
        """Checks every length, pointer and document bound. The constructor checks only the ends.

        Raises:
            DataError: The index is damaged. The error names the first fault.
        """
        lengths, before = self.sequence_lengths, 0
        for start in range(0, len(lengths), _CHECKED):
            block = lengths[start : start + _CHECKED]
            if (shortest := int(block.min())) < 0:
                where = start + int(block.argmin())
                raise self._damaged(where, f"sequence {where} has length {shortest}")
            sizes = block.astype(np.int64) * self._dtype.itemsize
            ends = np.cumsum(sizes) + before
            wrong = np.flatnonzero(self._pointers[start : start + len(block)] != ends - sizes)
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
        """Returns an error that names the file, the document of a sequence, and the remedy."""
        if sequence is not None:
            document = int(np.searchsorted(self._bounds, sequence, side="right")) - 1
            what += f" (document {min(max(document, 0), self.num_documents - 1)})"
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
        """Closes both files. Existing views stay valid; new reads raise `DataError`."""
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
        """Pickles the arguments, so that worker processes open the files themselves."""
        return type(self), (self.prefix, self._storage, self._mmap)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self):,} sequences, {self._dtype}"
        return f"IndexedDataset({self.prefix!r}: {state})"


def _is_multimodal(header: Header, size: int, index: str) -> bool:
    """Returns whether the index holds modes, which follows from its size."""
    plain, multimodal = header.index_bytes(False), header.index_bytes(True)
    if size not in (plain, multimodal):
        raise DataError(
            f"{index} has {size:,} bytes, but its header ({header.sequences:,} sequences, "
            f"{header.bounds:,} document bounds) requires {plain:,}; it is damaged or truncated"
        )
    return size != plain
