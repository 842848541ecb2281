"""Atomic files, and functions to read and write JSON and text.

An `AtomicFile` is written beside its destination under a temporary name, then flushed to the disk
and renamed. If the process is killed at any time, the destination is either the old file or the
complete new one. The temporary name is always the same, so that the next run overwrites what a
killed run left. A file lock, which the kernel releases with the process, excludes a second writer.
"""

import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import orjson

from megatron_data.errors import DataError, add_path_to_errors
from megatron_data.sources.urls import is_local, is_url, without_scheme

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

BLOCK_BYTES = 1 << 26
"""Size of the blocks that have a digest of their own in a manifest, in bytes."""


def local_path(path: str | os.PathLike[str]) -> str:
    """Returns an output path as text.

    Raises:
        DataError: The path is a URL, which would create folders named after scheme and bucket.
    """
    name = os.fspath(path)
    if is_url(name):
        inner = without_scheme(name)
        instead = f"the path {inner}" if is_local(name) else "a path, and copy the files from there"
        raise DataError(
            f"{name} is a URL, but files are written to local disks only; give {instead}"
        )
    return name


def tokenizer_path(path: str | os.PathLike[str]) -> Path:
    """Returns the path of a tokenizer's file or folder. Accepts `file://` URLs.

    Raises:
        DataError: The path is a URL with another scheme.
    """
    name = without_scheme(os.fspath(path))
    if is_url(name):
        raise DataError(
            f"{name} is a URL, but tokenizers are read from local disks only; copy the files here "
            "and give their path"
        )
    return Path(name)


def local_prefix(prefix: str | os.PathLike[str]) -> str:
    """Returns the prefix of output files as text.

    Raises:
        DataError: The prefix is a URL, or a folder without a file name.
    """
    name = local_path(prefix)
    if name.endswith("/") or Path(name).name in ("", ".."):
        raise DataError(
            f"{name!r} is a folder; add a name for the files, such as {Path(name, 'corpus')}"
        )
    return name


def local_folder(folder: str | os.PathLike[str]) -> Path:
    """Returns an output folder that can be created and written to. Call it before long work.

    Raises:
        DataError: The folder is a URL, or it or one of its parents is a file.
        PermissionError: The folder is not writable.
    """
    path = Path(local_path(folder))
    existing = next(
        candidate for candidate in (path, *path.absolute().parents) if candidate.exists()
    )
    if not existing.is_dir():
        raise DataError(
            f"{path} cannot be a folder, because {existing} is a file; give another path"
        )
    if not os.access(existing, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(existing))
    return path


@contextmanager
def write_then_rename(path: Path, partial: Path) -> Iterator[BinaryIO]:
    """Opens `partial` for writing. Renames it to `path` at the end, or deletes it on failure.

    The file is not flushed to the disk. Callers use a checksum to detect what a crash of the
    machine leaves.
    """
    with add_path_to_errors(path):
        try:
            with partial.open("w+b") as file:
                yield file
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


class Digests:
    """SHA-256 digests of a stream of bytes and of each of its blocks of `BLOCK_BYTES`."""

    def __init__(self) -> None:
        self._whole = hashlib.sha256()
        self._block = hashlib.sha256()
        self._room = BLOCK_BYTES
        self._blocks: list[str] = []

    def update(self, data: memoryview) -> None:
        """Adds bytes."""
        self._whole.update(data)
        while len(data):
            block_data, data = data[: self._room], data[self._room :]
            self._block.update(block_data)
            self._room -= len(block_data)
            if not self._room:
                self._blocks.append(self._block.hexdigest())
                self._block, self._room = hashlib.sha256(), BLOCK_BYTES

    @property
    def sha256(self) -> str:
        """Hexadecimal digest of all bytes."""
        return self._whole.hexdigest()

    @property
    def blocks(self) -> list[str]:
        """Hexadecimal digest of each block. The last block may be shorter."""
        unfinished = self._room < BLOCK_BYTES
        return [*self._blocks, self._block.hexdigest()] if unfinished else list(self._blocks)


class AtomicFile:
    """A binary file that receives its name in `commit`. Computes size and digests while writing.

    Args:
        path: Final path. Its folder is created if it does not exist.

    Raises:
        DataError: The path is a URL, or another process is writing the same file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(local_path(path))
        self.bytes = 0
        self.digests = Digests()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._partial = self.path.with_name(f".{self.path.name}.partial")
        self._file = os.fdopen(self._lock(), "wb", buffering=0)

    def _lock(self) -> int:
        while True:
            descriptor = os.open(self._partial, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Between opening and locking, the previous writer may have renamed the file.
                if os.fstat(descriptor).st_ino == self._partial.stat().st_ino:
                    os.ftruncate(descriptor, 0)
                    return descriptor
            except BlockingIOError:
                os.close(descriptor)
                raise DataError(
                    f"another process is writing {self.path}; wait for it or choose another output"
                ) from None
            except FileNotFoundError:
                pass
            except BaseException:  # release the lock also on an interrupt
                os.close(descriptor)
                raise
            os.close(descriptor)

    def write(self, data: "ReadableBuffer") -> None:
        """Appends the bytes of `data`."""
        whole = memoryview(data)
        if whole.nbytes == 0:
            return  # an empty view cannot be cast
        rest = whole.cast("B")
        self.digests.update(rest)
        self.bytes += len(rest)
        with add_path_to_errors(self.path):
            while len(rest):  # one write call takes at most 2 GiB
                rest = rest[self._file.write(rest) :]

    def commit(self) -> None:
        """Flushes the file to the disk and renames it to its final path."""
        with add_path_to_errors(self.path):
            os.fsync(self._file.fileno())
        self._partial.replace(self.path)
        self._file.close()
        sync_folder(self.path.parent)

    def discard(self) -> None:
        """Deletes the temporary file. Does nothing after `commit`."""
        if not self._file.closed:
            self._partial.unlink(missing_ok=True)
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None and not self._file.closed:
            self.commit()
        else:
            self.discard()


def sync_folder(folder: Path) -> None:
    """Flushes the entries of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with add_path_to_errors(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: str | os.PathLike[str], value: Any, indent: bool = True) -> None:
    """Writes a JSON document atomically, with keys in their order.

    Args:
        path: Path of the file.
        value: A JSON value.
        indent: Writes one line per value. If False, writes one line per key of the top-level
            object. Defaults to True.
    """
    if indent:
        text = orjson.dumps(value, option=orjson.OPT_INDENT_2)
    else:
        rows = (orjson.dumps(key) + b": " + orjson.dumps(part) for key, part in value.items())
        text = b"{\n" + b",\n".join(rows) + b"\n}"
    with AtomicFile(path) as file:
        file.write(text + b"\n")


def read_text(path: str | os.PathLike[str]) -> str:
    """Returns the content of a UTF-8 text file.

    Raises:
        DataError: The file is not UTF-8. The error names the file and the byte.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text (byte {error.start:,}); is it the right file?"
        ) from None


def read_json(path: str | os.PathLike[str]) -> Any:
    """Returns the content of a JSON file.

    Raises:
        DataError: The file is not JSON. The error names the file.
    """
    return parse_json(Path(path).read_bytes(), path)


def parse_json(data: bytes, path: str | os.PathLike[str]) -> Any:
    """Returns the JSON value in `data`, the content of the file `path`; see `read_json`."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path} is not JSON ({error}); is it damaged or truncated?") from None
