"""Blocks of files in a folder that several processes share, within a limit together.

A block is written under another name, ends in a checksum, and is renamed when it is whole. Beside
the blocks a file holds how many bytes they have: whoever adds a block locks it and counts on, and
only if that passes the limit is the folder listed, and the blocks used longest ago removed, of all
processes. The number may be too large, where a process was killed or blocks were removed by hand;
then the listing comes early and puts it right. It is never too small.
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
"""What the names of whole files end in, and those of their locks."""
_COUNT = "blocks.bytes"
_COUNT_BYTES = 8
_SPARE = 16  # one part in so many of the limit is made free at once
_ABANDONED = 3600  # seconds after which nobody is still writing a file


class BlockFolder:
    """A folder of blocks.

    Args:
        folder: made when the first block is added.
        limit: bytes of all blocks together.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit

    def get(self, name: str, length: int) -> mmap.mmap | None:
        """Returns a block of so many bytes, or None if it is not there or not what was written.

        The map is longer by the checksum.
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
        """Keeps a block, in place of others if there is no more room, and returns it as `get`."""
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
                    # Mapped before others see it, and may remove it to make room.
                    block = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                with _locked(self._folder / _COUNT) as count:
                    # What is there of that name, whole or damaged, was counted with this size.
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
        """Bytes of all blocks once some were added, after others were removed if need be."""
        known = count.read(_COUNT_BYTES)
        used = int.from_bytes(known, "little") - freed + added
        if len(known) == _COUNT_BYTES and 0 <= used <= self._limit:
            return used
        return self._remove_oldest(added) + added

    def _remove_oldest(self, added: int) -> int:
        """Lists the folder, remove blocks if those added find no room, return the bytes left.

        And remove what processes left that were killed while they wrote.
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
        # More than is needed, so that not every block that follows lists the folder again.
        most = max(self._limit - self._limit // _SPARE - added, 0)
        return _removed(found, used, most)


def used_map(path: Path, size: int) -> mmap.mmap | bytes | None:
    """Returns a whole file of so many bytes, mapped, or None if it is not there or not whole."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                return None
            _use(file)
            return mapped(file, size)
    except FileNotFoundError:
        return None


def mapped(file: BinaryIO, size: int) -> mmap.mmap | bytes:
    """Returns a file of so many bytes in memory; an empty one cannot be mapped."""
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""


def remove_oldest(kept: Path, limit: int) -> None:
    """Removes the whole files used longest ago, but for one, until all fit into a limit."""
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
    """Removes the oldest files, of time, size and path, until `most` bytes are used.

    One that another user wrote may not be ours to remove, as in a folder with a sticky bit.

    Returns:
        How many bytes are used then.
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
    """Note that a file is used now, by which eviction goes; its owner may be another user."""
    with suppress(PermissionError):
        os.utime(file.fileno())


def _share(file: BinaryIO, folder: Path, bits: int = 0o644) -> None:
    """Lets those read a file who may read the folder, and writes a lock, whatever the umask."""
    with suppress(PermissionError):  # it is another user's, who has done so
        os.fchmod(file.fileno(), folder.stat().st_mode & bits)


@contextmanager
def adding(path: Path) -> Iterator[BinaryIO]:
    """Returns a new file of a shared folder; of two processes that add one, either one's stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_then_rename(path, partial_name(path)) as file:
        _share(file, path.parent)
        yield file


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lets one process at a time into the block; the lock ends with its process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        yield


def partial_name(path: Path) -> Path:
    """Returns the name under which this thread writes a file until it is whole."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    # Opened anew each time: processes that were forked share the lock of an open file.
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
