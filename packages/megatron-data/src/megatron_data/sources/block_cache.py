"""Caches blocks of files in object storage in a folder that several processes share.

A file is read in blocks of equal size. The name of a cached block contains a digest of the URL,
size and version of the file, and the number of the block. So a replaced file never uses blocks of
the old one.
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

_MAPPED = 16  # blocks mapped at a time by a reader


@dataclass(frozen=True)
class StorageCache:
    """A cache on a local disk for data from object storage.

    Raises:
        DataError: A size is below 1, or the folder is a URL or a file.
        PermissionError: The folder is not writable.
    """

    folder: str = field(
        metadata={
            "help": "folder that caches data read from object storage",
            "flag": "--object-storage-cache-path",
        }
    )
    block_bytes: int = field(
        default=4 << 20, metadata={"help": "size of a cached block", "unit": "bytes"}
    )
    limit_bytes: int = field(
        default=64 << 30,
        metadata={"help": "largest size of all blocks, without indices", "unit": "bytes"},
    )
    index_limit_bytes: int = field(
        default=64 << 30,
        metadata={"help": "largest size of all indices, except the one in use", "unit": "bytes"},
    )

    def __post_init__(self) -> None:
        if self.block_bytes < 1 or self.limit_bytes < self.block_bytes:
            raise DataError(
                f"block_bytes={self.block_bytes:,} and limit_bytes={self.limit_bytes:,}; give a "
                "block size of at least 1 and a limit of at least one block"
            )
        local_folder(self.folder)

    def map_file(self, file: RemoteFile) -> mmap.mmap | bytes:
        """Returns a memory map of a complete file; fetches the file if it is not cached.

        One process fetches a file while other processes that need it wait. The least recently used
        files are removed above the limit; maps of removed files stay valid.

        Raises:
            DataError: The file cannot be read completely.
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
                        # Map the file before another process can see and remove it.
                        found = mapped(copy, file.size)
                    remove_oldest(path, self.index_limit_bytes)
        return found

    def block_reader(self, file: RemoteFile) -> "BlockReader":
        """Returns a reader of ranges of a file."""
        return BlockReader(self, file)


class BlockReader:
    """Reads ranges of a file in object storage.

    Args:
        cache: The cache of its blocks.
        file: The file.
    """

    def __init__(self, cache: StorageCache, file: RemoteFile) -> None:
        self._block_bytes = cache.block_bytes
        self._folder = BlockFolder(Path(cache.folder), cache.limit_bytes)
        self._file = file
        self._mapped: LRUCache[mmap.mmap] = LRUCache(_MAPPED)

    def read(self, begin: int, end: int) -> bytes:
        """Returns the bytes from `begin` to `end` with the cache; fewer at the end of the file.

        Raises:
            DataError: The range cannot be read, or the file was replaced.
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
        """Yields the bytes from `begin` to `end` in blocks, without the cache.

        Data that is read only once would displace data that is read again.

        Raises:
            DataError: The range cannot be read, or the file was replaced.
        """
        return self._file.stream(begin, end)

    def _length(self, number: int) -> int:
        return min(self._block_bytes, self._file.size - number * self._block_bytes)

    def _block(self, number: int) -> mmap.mmap:
        """Returns a cached block; fetches it if it is missing or damaged."""
        length = self._length(number)
        name = f"{self._file.key}-{length}-{number}"
        found = self._folder.get(name, length)
        if found is not None:
            return found
        begin = number * self._block_bytes
        data = self._file.fetch(begin, begin + length)
        self._file.check_unchanged()  # cached data must be of this version
        return self._folder.add(name, data)
