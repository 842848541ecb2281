"""Parts of files in object storage, kept in a folder that several processes share.

A file is read in blocks of equal size. A block is fetched once and lies in the cache under a name
made of the URL, of the size and version of the file, and of the block's number; so a file that is
replaced never meets blocks of the old one. Blocks are written under another name, end in a
checksum, and are renamed when they are whole. Whoever adds one removes the blocks used longest ago,
of all processes, while there are more than the limit allows.
"""

import hashlib
import mmap
import os
import threading
import time
import zlib
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

from ..errors import DataError
from ..files import renamed
from ..recent import Recent
from .storage import Stat, read_range, stat

_ATTEMPTS = 3
_PAUSE = 0.5  # seconds before the second attempt, twice as long before the third
_CHECK_BYTES = 4
_MAPPED = 16  # blocks that a reader keeps mapped
_SUFFIX = ".block"
_ABANDONED = 3600  # seconds after which nobody is still writing a block


@dataclass(frozen=True)
class StorageCache:
    """A folder on a local disk for what is read from object storage.

    Raises:
        DataError: a size below 1.
    """

    folder: str = field(
        metadata={
            "help": "folder that keeps what was read from object storage",
            "flag": "--object-storage-cache-path",
        }
    )
    block_bytes: int = field(
        default=4 << 20, metadata={"help": "what is fetched at once", "unit": "bytes"}
    )
    limit_bytes: int = field(
        default=64 << 30,
        metadata={"help": "blocks kept at most; indices come on top", "unit": "bytes"},
    )

    def __post_init__(self) -> None:
        if self.block_bytes < 1 or self.limit_bytes < self.block_bytes:
            raise DataError(
                f"a cache of {self.limit_bytes:,} bytes in blocks of {self.block_bytes:,}; give a "
                "block of at least 1 byte, and room for one"
            )

    def whole(self, url: str, found: Stat) -> Path:
        """Return a local copy of a whole file, which is fetched if it is not there.

        Raises:
            DataError: it cannot be read, or not to its end.
        """
        path = Path(self.folder) / f"{_name(url, found)}.whole"
        if not path.is_file() or path.stat().st_size != found.size:
            data = fetch(url, 0, found.size)
            with _adding(path) as file:
                file.write(data)
        return path

    def blocks(self, url: str, found: Stat) -> "Blocks":
        """Return a reader of parts of a file."""
        return Blocks(self, url, found)


class Blocks:
    """Bytes of a file in object storage, read through the cache.

    Args:
        cache: where blocks are kept.
        url: the file.
        found: its size and version when it was opened.
    """

    def __init__(self, cache: StorageCache, url: str, found: Stat) -> None:
        self._cache = cache
        self._url = url
        self._size = found.size
        self._prefix = Path(cache.folder) / _name(url, found)
        self._mapped: Recent[mmap.mmap] = Recent(_MAPPED)

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` to `end`, fewer where the file ends.

        Raises:
            DataError: they cannot be read, or the transfer breaks off.
        """
        end = min(end, self._size)
        parts: list[bytes] = []
        while begin < end:
            number, inside = divmod(begin, self._cache.block_bytes)
            block = self._mapped.get(number, partial(self._block, number))
            upto = min(self._length(number), inside + end - begin)
            parts.append(block[inside:upto])
            begin += upto - inside
        return b"".join(parts)

    def _length(self, number: int) -> int:
        return min(self._cache.block_bytes, self._size - number * self._cache.block_bytes)

    def _block(self, number: int) -> mmap.mmap:
        """A block out of the cache, fetched if it is not there or not whole."""
        length = self._length(number)
        path = self._prefix.with_name(f"{self._prefix.name}-{length}-{number}{_SUFFIX}")
        found = _map_whole(path, length)
        if found is None:
            begin = number * self._cache.block_bytes
            data = fetch(self._url, begin, begin + length)
            with _adding(path) as file:
                file.write(data)
                file.write(_checksum(data))
                file.flush()
                # Mapped before others see it, and may remove it to make room.
                found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            _evict(self._cache, path)
        return found


def describe(url: str) -> Stat:
    """Size and version of a file in object storage.

    Raises:
        DataError: there is none, or the storage cannot be reached.
    """
    try:
        return stat(url)
    except DataError:
        raise
    except Exception as error:  # noqa: BLE001 - each of fsspec's backends has exceptions of its own
        raise DataError(f"{url} cannot be opened: {type(error).__name__}: {error}") from None


def fetch(url: str, begin: int, end: int) -> bytes:
    """Read a range of a file in object storage, again where a transfer breaks off.

    Raises:
        DataError: it cannot be read; with URL, range and reason.
    """
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE * 2 ** (attempt - 1))
        try:
            data = read_range(url, begin, end)
        except FileNotFoundError:
            raise DataError(f"{url} is gone; it was there when it was opened") from None
        except Exception as error:  # noqa: BLE001 - each of fsspec's backends has exceptions of its own
            problem = f"{type(error).__name__}: {error}"
            continue
        if len(data) == end - begin:
            return data
        problem = f"{len(data):,} of {end - begin:,} bytes came"
    raise DataError(
        f"{url}: bytes {begin:,} to {end:,} could not be read in {_ATTEMPTS} attempts: {problem}"
    )


def _name(url: str, found: Stat) -> str:
    described = "\0".join((url, str(found.size), found.version))
    return hashlib.sha256(described.encode()).hexdigest()[:32]


def _checksum(data: bytes | memoryview) -> bytes:
    return zlib.crc32(data).to_bytes(_CHECK_BYTES, "little")


def _map_whole(path: Path, length: int) -> mmap.mmap | None:
    """A block as it lies in the cache, or None if it is not there or not what was written."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != length + _CHECK_BYTES:
                return None
            block = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            os.utime(file.fileno())  # used now: eviction goes by this time
    except FileNotFoundError:
        return None
    with memoryview(block) as view, view[:length] as data:
        return block if block[length:] == _checksum(data) else None


def _adding(path: Path) -> AbstractContextManager[BinaryIO]:
    """A new file of the cache; of two processes that add one, either one's stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return renamed(path, path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}"))


def _evict(cache: StorageCache, keep: Path) -> None:
    """Remove the blocks used longest ago until the rest is within the limit.

    And what processes left that were killed while they wrote.
    """
    found: list[tuple[float, int, str]] = []
    with os.scandir(cache.folder) as entries:
        for entry in entries:
            try:
                status = entry.stat()
            except FileNotFoundError:
                continue  # another process was faster
            if entry.name.endswith(_SUFFIX):
                found.append((status.st_mtime, status.st_size, entry.path))
            elif entry.name.startswith(".") and status.st_mtime < time.time() - _ABANDONED:
                Path(entry.path).unlink(missing_ok=True)
    used = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if used <= cache.limit_bytes:
            return
        if path != os.fspath(keep):
            Path(path).unlink(missing_ok=True)
            used -= size
