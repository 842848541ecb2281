"""File operations that reach the disk. All bytes of a checkpoint are written by these functions."""

import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ATTEMPTS = 8  # to create a folder that no other process mistakes for a leftover


@contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """Adds ``path`` to errors of system calls that name no file, such as a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


@contextmanager
def create_file(path: Path) -> Iterator[int]:
    """Creates ``path``, which must not exist, yields its descriptor, and syncs it at the end.

    Raises:
        OSError: A call failed. ``filename`` is ``path`` if the system names no file, for example if
            a write finds the disk full.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with add_path_to_errors(path):
            yield descriptor
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Writes all of ``data``, with as many system calls as necessary."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with add_path_to_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Makes the names in a directory and in all directories below it durable."""
    for below, _, _ in os.walk(path, topdown=False):
        sync_directory(Path(below))


def replace_file(path: Path, data: bytes) -> None:
    """Replaces the content of ``path`` atomically: readers see the old or the new content."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with create_file(temporary) as descriptor:
        write_all(descriptor, data)
    temporary.replace(path)
    sync_directory(path.parent)


@contextmanager
def create_folder(target: Path) -> Iterator[Path]:
    """Yields a temporary folder that is synced and renamed to ``target`` at the end.

    After an error the temporary folder is removed. Folders that killed processes left are removed
    by the next call with the same ``target``. A folder that is being written is protected by a
    lock, which the kernel releases when its process ends.

    Args:
        target: The path of the folder. It must not exist or must be empty.
    """
    ours = re.compile(re.escape(target.name) + r"\.tmp-[0-9a-f]{12}")
    siblings = target.parent.iterdir() if target.parent.is_dir() else ()
    for leftover in [path for path in siblings if ours.fullmatch(path.name)]:
        descriptor = _lock_folder(leftover)
        if descriptor is not None:
            shutil.rmtree(leftover, ignore_errors=True)
            os.close(descriptor)
    temporary, held = _make_locked(target)
    try:
        yield temporary
        sync_tree(temporary)
        if target.exists():
            target.rmdir()
        rename(temporary, target)
    except BaseException:  # also Ctrl-C, so that nothing incomplete is left
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        if held is not None:
            os.close(held)


def _make_locked(target: Path) -> tuple[Path, int | None]:
    """Creates a temporary folder, and returns it and a descriptor that holds its lock.

    If another call mistakes the folder for a leftover before it is locked, the next folder is
    tried. The descriptor is None on a file system without locks, where no call removes leftovers.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        temporary = target.with_name(f"{target.name}.tmp-{uuid.uuid4().hex[:12]}")
        temporary.mkdir(parents=True)
        held = _lock_folder(temporary)
        if held is not None:
            if temporary.exists() and os.path.samestat(os.fstat(held), temporary.lstat()):
                return temporary, held
            os.close(held)
        if attempt < _ATTEMPTS:
            shutil.rmtree(temporary, ignore_errors=True)
    return temporary, None


def _lock_folder(folder: Path) -> int | None:
    """Returns a descriptor that holds the lock of a folder; None if another process holds it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None  # removed in the meantime, or not a folder
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def rename(source: Path, target: Path) -> None:
    """Renames a path within one directory and makes the new name durable."""
    source.rename(target)
    sync_directory(target.parent)


def read_into(descriptor: int, buffer: bytearray | memoryview, start: int) -> bool:
    """Fills ``buffer`` from byte ``start`` of a file and returns False if the file is too short."""
    rest = memoryview(buffer)
    while rest:
        count = os.preadv(descriptor, [rest], start)
        if count == 0:
            return False
        rest, start = rest[count:], start + count
    return True
