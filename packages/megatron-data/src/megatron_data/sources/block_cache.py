"""Parts of files in object storage, kept in a folder that several processes share.

A file is read in blocks of equal size. A block is fetched once and lies in the cache under a name
made of the URL, of the size and version of the file, and of the block's number; so a file that is
replaced never meets blocks of the old one.
"""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megatron_data.errors import DataError
from megatron_data.files import local_folder
from megatron_data.lru_cache import LRUCache
from megatron_data.sources.block_folder import (
    LOCK,
    WHOLE,
    BlockFolder,
    adding,
    locked,
    mapped,
    remove_oldest,
    used_map,
)
from megatron_data.sources.remote import RemoteFile

_MAPPED = 16  # blocks that a reader keeps mapped


@dataclass(frozen=True)
class StorageCache:
    """A folder on a local disk for what is read from object storage.

    Raises:
        DataError: a size below 1, or a folder that is a URL or a file.
        PermissionError: a folder that may not be written to.
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
    index_limit_bytes: int = field(
        default=64 << 30,
        metadata={"help": "indices kept at most, and the one that is used", "unit": "bytes"},
    )

    def __post_init__(self) -> None:
        if self.block_bytes < 1 or self.limit_bytes < self.block_bytes:
            raise DataError(
                f"a cache of {self.limit_bytes:,} bytes in blocks of {self.block_bytes:,}; give a "
                "block of at least 1 byte, and room for one"
            )
        local_folder(self.folder)

    def whole(self, file: RemoteFile) -> mmap.mmap | bytes:
        """Returns a whole file, mapped; one process fetches it if it is not there.

        While it does, those that want the same file wait, and those that want others do not. Of
        the files those used longest ago go where there is no more room; a map keeps its file.

        Raises:
            DataError: it cannot be read, or not to its end.
        """
        path = Path(self.folder) / f"{file.key}{WHOLE}"
        found = used_map(path, file.size)
        if found is None:
            with locked(path.with_suffix(LOCK)):
                found = used_map(path, file.size)  # another process may have fetched it meanwhile
                if found is None:
                    with adding(path) as copy:
                        for data in file.stream():
                            copy.write(data)
                        copy.flush()
                        # Mapped before others see it, and may remove it to make room.
                        found = mapped(copy, file.size)
                    remove_oldest(path, self.index_limit_bytes)
        return found

    def blocks(self, file: RemoteFile) -> "Blocks":
        """Returns a reader of parts of a file."""
        return Blocks(self, file)


class Blocks:
    """Bytes of a file in object storage.

    Args:
        cache: where blocks are kept.
        file: as it was when it was opened.
    """

    def __init__(self, cache: StorageCache, file: RemoteFile) -> None:
        self._block_bytes = cache.block_bytes
        self._folder = BlockFolder(Path(cache.folder), cache.limit_bytes)
        self._file = file
        self._mapped: LRUCache[mmap.mmap] = LRUCache(_MAPPED)

    def read(self, begin: int, end: int) -> bytes:
        """Returns the bytes from `begin` to `end`, fewer where the file ends, through the cache.

        Raises:
            DataError: they cannot be read, the transfer breaks off, or the file was replaced.
        """
        end = min(end, self._file.size)
        parts: list[bytes] = []
        while begin < end:
            number, inside = divmod(begin, self._block_bytes)
            block = self._mapped.get(number, partial(self._block, number))
            upto = min(self._length(number), inside + end - begin)
            parts.append(block[inside:upto])
            begin += upto - inside
        return b"".join(parts)

    def stream(self, begin: int, end: int) -> Iterator[bytes]:
        """Returns the bytes from `begin` to `end` piece by piece, past the cache.

        What is read once, from end to end, would only drive out what is read again.

        Raises:
            DataError: they cannot be read, the transfer breaks off, or the file was replaced.
        """
        return self._file.stream(begin, end)

    def _length(self, number: int) -> int:
        return min(self._block_bytes, self._file.size - number * self._block_bytes)

    def _block(self, number: int) -> mmap.mmap:
        """Returns a block out of the cache, fetched if it is not there or not whole."""
        length = self._length(number)
        name = f"{self._file.key}-{length}-{number}"
        found = self._folder.get(name, length)
        if found is not None:
            return found
        begin = number * self._block_bytes
        data = self._file.fetch(begin, begin + length)
        self._file.check_unchanged()  # what is kept must be of this version
        return self._folder.add(name, data)
