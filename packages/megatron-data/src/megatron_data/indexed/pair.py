"""The two files of a dataset, on the disk or in object storage."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..sources.block_cache import Blocks, StorageCache, describe
from ..sources.storage import is_url
from .format import TokenType, bin_path, idx_path


class TokenStore(Protocol):
    """A row of tokens: a mapped array, `FileTokens` or `RemoteTokens`."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    def __len__(self) -> int:
        """Number of tokens."""

    def __getitem__(self, part: slice, /) -> NDArray[Any]:
        """A stretch of them."""


class FileTokens:
    """The tokens of a `.bin` on the disk, read by one system call for each stretch.

    Slower than a map where the file is in memory already. But nothing is read that is not asked
    for, where a map reads ahead, and the memory of the process stays what it is.

    Args:
        path: the `.bin`.
        dtype: of a token.
        nbytes: its size.
    """

    def __init__(self, path: Path, dtype: TokenType, nbytes: int) -> None:
        self._file = path.open("rb", buffering=0)
        self._dtype = dtype
        self.nbytes = nbytes

    def __len__(self) -> int:
        return self.nbytes // self._dtype.itemsize

    def __getitem__(self, part: slice) -> NDArray[Any]:
        itemsize = self._dtype.itemsize
        begin, wanted = part.start * itemsize, (part.stop - part.start) * itemsize
        data = os.pread(self._file.fileno(), wanted, begin)
        while len(data) < wanted:  # no more than 2 GiB come at once
            more = os.pread(self._file.fileno(), wanted - len(data), begin + len(data))
            if not more:
                break
            data += more
        return np.frombuffer(data, self._dtype)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RemoteTokens:
    """The tokens of a `.bin` in object storage; what is read is copied out of a cache.

    Args:
        blocks: reads its bytes.
        dtype: of a token.
        nbytes: its size.
    """

    def __init__(self, blocks: Blocks, dtype: TokenType, nbytes: int) -> None:
        self._blocks = blocks
        self._dtype = dtype
        self.nbytes = nbytes

    def __len__(self) -> int:
        return self.nbytes // self._dtype.itemsize

    def __getitem__(self, part: slice) -> NDArray[Any]:
        begin, end = part.start * self._dtype.itemsize, part.stop * self._dtype.itemsize
        return np.frombuffer(self._blocks.read(begin, end), self._dtype)


class Pair(NamedTuple):
    """The two files.

    Attributes:
        idx: path or URL of the `.idx`.
        idx_bytes: all of it.
        data: path or URL of the `.bin`.
        size: bytes of the `.bin`.
        tokens: opens the `.bin` for tokens of a type.
    """

    idx: str
    idx_bytes: mmap.mmap | bytes
    data: str
    size: int
    tokens: Callable[[TokenType], TokenStore]


def open_pair(prefix: str, storage: StorageCache | None, mapped: bool) -> Pair:
    """Open the files at a prefix, which may be a URL if there is a cache for it.

    Args:
        prefix: path or URL without `.bin` or `.idx`.
        storage: the cache for a URL.
        mapped: whether a local `.bin` is mapped into memory.

    Raises:
        DataError: a file is missing, or cannot be read; a URL without a cache.
    """
    if is_url(prefix):
        return _remote(prefix, storage)
    index, data = _existing_pair(prefix)
    size = data.stat().st_size

    def tokens(dtype: TokenType) -> TokenStore:
        if not mapped:
            return FileTokens(data, dtype, size)
        return np.frombuffer(_map(data), dtype, size // dtype.itemsize)

    return Pair(str(index), _map(index), str(data), size, tokens)


def _remote(prefix: str, storage: StorageCache | None) -> Pair:
    if storage is None:
        raise DataError(
            f"{prefix} lies in object storage; megatron-train --object-storage-cache-path FOLDER "
            "and, in Python, storage=StorageCache(FOLDER) read it, the commands of megatron-data "
            "read local copies"
        )
    index, data = f"{prefix}.idx", f"{prefix}.bin"
    copy, found = storage.whole(index, describe(index)), describe(data)

    def tokens(dtype: TokenType) -> TokenStore:
        return RemoteTokens(storage.blocks(data, found), dtype, found.size)

    return Pair(index, _map(copy), data, found.size, tokens)


def _map(path: Path) -> mmap.mmap | bytes:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return b""  # an empty file cannot be mapped
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _existing_pair(prefix: str) -> tuple[Path, Path]:
    index, data = idx_path(prefix), bin_path(prefix)
    missing = [path for path in (index, data) if not path.is_file()]
    if not missing:
        return index, data
    hint = "preprocess the text first"
    if prefix.endswith((".bin", ".idx")):
        hint = f"give the prefix without {prefix[-4:]}: {prefix[:-4]}"
    elif len(missing) == 1:
        hint = "the other one is there: the copy or the preprocessing was cut short"
    elif idx_path(f"{prefix}_text_document").is_file():
        hint = f"did you mean {prefix}_text_document?"
    raise DataError(f"no dataset at {prefix}: {' and '.join(map(str, missing))} missing; {hint}")
