"""A folder of blocks that several processes share, with a limit on their total size.

A block is written under a temporary name with a checksum at its end, and renamed when it is
complete. A file in the folder holds the total size of the blocks. A process that adds a block locks
this file and updates the size. Only if the size exceeds the limit, the process lists the folder and
removes the least recently used blocks of all processes. The recorded size may be too large, if a
process was killed or blocks were removed by hand; then the folder is listed early, which corrects
it. It is never too small.
"""

import fcntl
import mmap
import os
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from megatron_data.errors import add_path_to_errors
from megatron_data.files import write_then_rename

_CHECK_BYTES = 4
_SUFFIX = ".block"
WHOLE, LOCK = ".whole", ".lock"
"""Suffixes of complete files and of their locks."""
_COUNT = "blocks.bytes"
_COUNT_BYTES = 8
_SPARE = 16  # fraction of the limit to free at once: 1/16
_ABANDONED = 3600  # seconds after which a temporary file is of a killed process


class BlockFolder:
    """A folder of blocks.

    Args:
        folder: Path; created when the first block is added.
        limit: Largest total size of all blocks in bytes.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit

    def get(self, name: str, length: int) -> mmap.mmap | None:
        """Returns a block of `length` bytes, or None if it is missing or damaged.

        The map is longer than the block by the checksum.
        """
        try:
            with self._path(name).open("rb") as file:
                if os.fstat(file.fileno()).st_size != length + _CHECK_BYTES:
                    return None
                block = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                _use(file)
        except FileNotFoundError:
            return None
        with memoryview(block) as view, view[:length] as data:
            return block if block[length:] == _checksum(data) else None

    def add(self, name: str, data: bytes) -> mmap.mmap:
        """Stores a block, removes others above the limit, and returns what `get` returns."""
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = partial_name(path)
        with add_path_to_errors(path):
            try:
                with partial.open("w+b") as file:
                    _share(file, path.parent)
                    file.write(data)
                    file.write(_checksum(data))
                    file.flush()
                    # Map the block before another process can see and remove it.
                    block = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                with _locked(self._folder / _COUNT) as count:
                    # An existing block of this name, complete or damaged, is in the total size.
                    freed = min(_size(path), len(block))
                    path.unlink(missing_ok=True)
                    _write(count, self._used(count, freed, len(block)))
                    partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
        return block

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"

    def _used(self, count: BinaryIO, freed: int, added: int) -> int:
        """Returns the total size with added blocks; removes blocks above the limit."""
        known = count.read(_COUNT_BYTES)
        used = int.from_bytes(known, "little") - freed + added
        if len(known) == _COUNT_BYTES and 0 <= used <= self._limit:
            return used
        return self._remove_oldest(added) + added

    def _remove_oldest(self, added: int) -> int:
        """Lists the folder, removes blocks above the limit, and returns the remaining size.

        Also removes temporary files of killed processes.
        """
        found: list[tuple[float, int, str]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                try:
                    status = entry.stat()
                except FileNotFoundError:
                    continue  # another process renamed it
                if entry.name.endswith(_SUFFIX) and not entry.name.startswith("."):
                    found.append((status.st_mtime, status.st_size, entry.path))
                elif entry.name.startswith(".") and status.st_mtime < time.time() - _ABANDONED:
                    Path(entry.path).unlink(missing_ok=True)
        used = sum(size for _, size, _ in found)
        if used + added <= self._limit:
            return used
        # Remove more than necessary, so that the next blocks do not list the folder again.
        most = max(self._limit - self._limit // _SPARE - added, 0)
        return _removed(found, used, most)


def used_map(path: Path, size: int) -> mmap.mmap | bytes | None:
    """Returns a memory map of a file of `size` bytes, or None if it is missing or incomplete."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                return None
            _use(file)
            return mapped(file, size)
    except FileNotFoundError:
        return None


def mapped(file: BinaryIO, size: int) -> mmap.mmap | bytes:
    """Returns a memory map of a file, or empty bytes, because an empty file cannot be mapped."""
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""


def remove_oldest(kept: Path, limit: int) -> None:
    """Removes the least recently used complete files, except `kept`, down to a limit."""
    found: list[tuple[float, int, str]] = []
    used = _size(kept)
    for path in kept.parent.glob(f"*{WHOLE}"):
        if path != kept:
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # another process removed it
            found.append((status.st_mtime, status.st_size, os.fspath(path)))
            used += status.st_size
    _removed(found, used, limit)


def _removed(found: list[tuple[float, int, str]], used: int, most: int) -> int:
    """Removes the oldest files until at most `most` bytes are used.

    Skips files that this user may not remove, as in a folder with a sticky bit.

    Args:
        found: Time, size and path of each file.
        used: Total size of the files in bytes.
        most: Limit in bytes.

    Returns:
        The remaining size in bytes.
    """
    for _, size, path in sorted(found):
        if used <= most:
            break
        with suppress(PermissionError):
            Path(path).unlink(missing_ok=True)
            used -= size
            Path(path).with_suffix(LOCK).unlink(missing_ok=True)
    return used


def _use(file: BinaryIO) -> None:
    """Sets the time of use of a file, for eviction; ignored for a file of another user."""
    with suppress(PermissionError):
        os.utime(file.fileno())


def _share(file: BinaryIO, folder: Path, bits: int = 0o644) -> None:
    """Gives a file the permissions of its folder within `bits`, independent of the umask."""
    with suppress(PermissionError):  # another user owns the file and has set them
        os.fchmod(file.fileno(), folder.stat().st_mode & bits)


@contextmanager
def adding(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file of a shared folder; if two processes add it, one of the two remains."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_then_rename(path, partial_name(path)) as file:
        _share(file, path.parent)
        yield file


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Locks a file during the block; the kernel releases the lock when the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        yield


def partial_name(path: Path) -> Path:
    """Returns the temporary name of a file for this thread."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    # Open the file each time, because forked processes share the lock of an open file.
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b", 0) as file:
        _share(file, path.parent, 0o666)
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _write(count: BinaryIO, number: int) -> None:
    count.seek(0)
    count.write(number.to_bytes(_COUNT_BYTES, "little"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _checksum(data: bytes | memoryview) -> bytes:
    return zlib.crc32(data).to_bytes(_CHECK_BYTES, "little")
