"""The two files of a dataset, on a local disk or in object storage."""

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import DataError
from megatron_data.indexed.format import TokenType, bin_path, idx_path
from megatron_data.sources.block_cache import BlockReader, StorageCache
from megatron_data.sources.failures import MissingError
from megatron_data.sources.remote import RemoteFile
from megatron_data.sources.storage import exists
from megatron_data.sources.urls import is_local, is_url, without_scheme

_BLOCK_BYTES = 4 << 20  # per block of a scan
_USUAL_ENDS = ("_text_document", "_text_sentence", "_conversation", "_image_text")


class TokenArray(Protocol):
    """A sequence of tokens that supports slicing: an array or a `TokenStore`."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    def __len__(self) -> int:
        """Returns the number of tokens."""

    def __getitem__(self, part: slice, /) -> NDArray[Any]:
        """Returns a slice of the tokens."""


class TokenStore(TokenArray, Protocol):
    """The tokens of a `.bin`: `MappedTokens`, `FileTokens` or `RemoteTokens`."""

    def scan(self, begin: int, end: int) -> Iterator[NDArray[Any]]:
        """Yields the tokens `[begin, end)` in blocks, in constant memory."""

    def close(self) -> None:
        """Closes the file."""


class MappedTokens:
    """The tokens of a local `.bin`, mapped into memory.

    Args:
        path: Path of the `.bin`.
        dtype: Token type.
        nbytes: Size of the file in bytes.

    Attributes:
        array: All tokens.
    """

    def __init__(self, path: Path, dtype: TokenType, nbytes: int) -> None:
        self._map = _map(path)
        self.array = np.frombuffer(self._map, dtype, nbytes // dtype.itemsize)
        self.nbytes = nbytes

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, part: slice) -> NDArray[Any]:
        return self.array[part]

    def scan(self, begin: int, end: int) -> Iterator[NDArray[Any]]:
        """Yields blocks of the array, and releases the pages of the map that were read."""
        return _scan_map(self._map, self.array, begin, end)

    def close(self) -> None:
        """Releases the map. Views keep it alive."""
        self._map, self.array = b"", self.array[:0].copy()


class FileTokens:
    """The tokens of a local `.bin`, read by one system call per slice.

    This is slower than a memory map if the file is in the page cache. But only requested bytes are
    read, where a map reads ahead, and the memory of the process does not grow.

    Args:
        path: Path of the `.bin`.
        dtype: Token type.
        nbytes: Size of the file in bytes.
    """

    def __init__(self, path: Path, dtype: TokenType, nbytes: int) -> None:
        self._file = path.open("rb", buffering=0)
        self._dtype = dtype
        self.nbytes = nbytes

    def __len__(self) -> int:
        return self.nbytes // self._dtype.itemsize

    def __getitem__(self, part: slice) -> NDArray[Any]:
        itemsize = self._dtype.itemsize
        begin, size = part.start * itemsize, (part.stop - part.start) * itemsize
        data = os.pread(self._file.fileno(), size, begin)
        while len(data) < size:  # one call returns at most 2 GiB
            rest = os.pread(self._file.fileno(), size - len(data), begin + len(data))
            if not rest:
                break
            data += rest
        return np.frombuffer(data, self._dtype)

    def scan(self, begin: int, end: int) -> Iterator[NDArray[Any]]:
        """Yields blocks of the file, each read by one system call.

        Raises:
            DataError: The file was truncated since it was opened.
        """
        for start, stop in _blocks(begin, end, self._dtype.itemsize):
            tokens = self[start:stop]
            if len(tokens) < stop - start:
                raise DataError(f"{self._file.name} was truncated while it was read")
            yield tokens

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class RemoteTokens:
    """The tokens of a `.bin` in object storage, copied from a local cache.

    Args:
        blocks: Reads the bytes of the file.
        dtype: Token type.
        nbytes: Size of the file in bytes.
    """

    def __init__(self, blocks: BlockReader, dtype: TokenType, nbytes: int) -> None:
        self._blocks = blocks
        self._dtype = dtype
        self.nbytes = nbytes

    def __len__(self) -> int:
        return self.nbytes // self._dtype.itemsize

    def __getitem__(self, part: slice) -> NDArray[Any]:
        begin, end = part.start * self._dtype.itemsize, part.stop * self._dtype.itemsize
        return np.frombuffer(self._blocks.read(begin, end), self._dtype)

    def scan(self, begin: int, end: int) -> Iterator[NDArray[Any]]:
        """Yields blocks that are streamed from the storage without the cache.

        Raises:
            DataError: The file cannot be read, or was replaced.
        """
        itemsize = self._dtype.itemsize
        for data in self._blocks.stream(begin * itemsize, end * itemsize):
            yield np.frombuffer(data, self._dtype)

    def close(self) -> None:
        """Does nothing, because no file is open."""


class DatasetFiles(NamedTuple):
    """The two files of a dataset.

    Attributes:
        idx: Path or URL of the `.idx`.
        idx_bytes: Content of the `.idx`.
        data: Path or URL of the `.bin`.
        size: Size of the `.bin` in bytes.
        tokens: Function that opens the `.bin` for a token type.
    """

    idx: str
    idx_bytes: mmap.mmap | bytes
    data: str
    size: int
    tokens: Callable[[TokenType], TokenStore]


def open_files(prefix: str, storage: StorageCache | None, mapped: bool) -> DatasetFiles:
    """Opens the files at a prefix.

    Args:
        prefix: Path or URL without `.bin` or `.idx`.
        storage: Cache for a URL. Without a cache, a `file://` URL is opened as its path.
        mapped: Whether a local `.bin` is mapped into memory.

    Raises:
        DataError: A file is missing or cannot be read, or `prefix` is a URL and `storage` is None.
    """
    if is_local(prefix) and (storage is None or not is_url(prefix)):
        return _local(without_scheme(prefix), mapped)
    return _remote(prefix, storage)


def _local(prefix: str, mapped: bool) -> DatasetFiles:
    index, data = _existing_pair(prefix)
    size = data.stat().st_size

    def tokens(dtype: TokenType) -> TokenStore:
        return (MappedTokens if mapped else FileTokens)(data, dtype, size)

    return DatasetFiles(str(index), _map(index), str(data), size, tokens)


def _remote(prefix: str, storage: StorageCache | None) -> DatasetFiles:
    if storage is None:
        raise DataError(
            f"{prefix} is a URL and needs a local cache folder; give "
            "--object-storage-cache-path FOLDER or, in Python, storage=StorageCache(FOLDER)"
        )
    names = [f"{prefix}.idx", f"{prefix}.bin"]
    files = [_find(name) for name in names]
    index, data = files
    if index is None or data is None:
        missing = [name for name, file in zip(names, files, strict=True) if file is None]
        raise _no_dataset(prefix, missing)

    def tokens(dtype: TokenType) -> TokenStore:
        return RemoteTokens(storage.block_reader(data), dtype, data.size)

    return DatasetFiles(index.url, storage.map_file(index), data.url, data.size, tokens)


def _find(url: str) -> RemoteFile | None:
    try:
        return RemoteFile.open(url)
    except MissingError:
        return None


def _map(path: Path) -> mmap.mmap | bytes:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return b""  # an empty file cannot be mapped
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _scan_map(
    mapped: mmap.mmap | bytes, array: NDArray[Any], begin: int, end: int
) -> Iterator[NDArray[Any]]:
    for start, stop in _blocks(begin, end, array.itemsize):
        yield array[start:stop]
        if isinstance(mapped, mmap.mmap):
            first = start * array.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
            mapped.madvise(mmap.MADV_DONTNEED, first, stop * array.itemsize - first)


def _blocks(begin: int, end: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Yields the begin and end of each block of a scan, in tokens."""
    step = _BLOCK_BYTES // itemsize
    return ((start, min(start + step, end)) for start in range(begin, end, step))


def _existing_pair(prefix: str) -> tuple[Path, Path]:
    index, data = idx_path(prefix), bin_path(prefix)
    missing = [str(path) for path in (index, data) if not path.is_file()]
    if missing:
        raise _no_dataset(prefix, missing)
    return index, data


def _reads_as_number(prefix: str) -> bool:
    try:
        float(prefix)
    except ValueError:
        return False
    return True


def _no_dataset(prefix: str, missing: Sequence[str]) -> DataError:
    hint = "preprocess the text first"
    if prefix.endswith((".bin", ".idx")):
        hint = f"give the prefix without {prefix[-4:]}: {prefix[:-4]}"
    elif _reads_as_number(prefix):
        hint = f"if {prefix} is a weight, give WEIGHT PREFIX pairs; otherwise give prefixes only"
    elif len(missing) == 1:
        hint = "the other file exists: the copy or the preprocessing was interrupted"
    elif prefix.endswith("_loss"):
        hint = (
            "this is the prefix of a loss mask, which megatron-data tokenize-conversations writes "
            "beside the tokens; give the prefix of the tokens, NAME_conversation"
        )
    else:
        if exists(prefix):
            return DataError(
                f"{prefix} is not the prefix of a dataset; if it is text, tokenize it with "
                "megatron-data preprocess and give the prefix of the output"
            )
        candidates = [prefix + end for end in _USUAL_ENDS if exists(f"{prefix}{end}.idx")]
        if candidates:
            hint = f"did you mean {candidates[0]}?"
    return DataError(f"no dataset at {prefix}: {' and '.join(missing)} missing; {hint}")
