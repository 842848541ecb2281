"""File operations that reach the disk. All bytes of a checkpoint are written through here."""

import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ATTEMPTS = 8  # to make a folder that no other process takes for a leftover


@contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """Names ``path`` in a failed system call that names no file, as a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


@contextmanager
def create_file(path: Path) -> Iterator[int]:
    """Creates ``path``, which may not exist, yield its descriptor, and sync it at the end.

    Raises:
        OSError: a call failed; ``filename`` is ``path`` where the system names none, as when a
            write finds the disk full.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with add_path_to_errors(path):
            yield descriptor
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Writes all of ``data``, however many calls the system takes for it."""
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
    """Gives ``path`` new content at once: readers see all of the old or all of the new."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with create_file(temporary) as descriptor:
        write_all(descriptor, data)
    temporary.replace(path)
    sync_directory(path.parent)


@contextmanager
def create_folder(target: Path) -> Iterator[Path]:
    """Yields a temporary folder beside ``target`` that gets its name at the end, all synced.

    After an error it is removed. One that a killed process left is removed by the next call for the
    same ``target``: a folder that is still being written is held by a lock that dies with its
    holder.

    Args:
        target: may be missing, or an empty folder.
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
    except BaseException:  # also Ctrl-C: nothing half-written stays
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        if held is not None:
            os.close(held)


def _make_locked(target: Path) -> tuple[Path, int | None]:
    """Makes a temporary folder; return it and a descriptor that holds its lock.

    Another call may take a folder for a leftover before its lock is held; then the next is made.
    The descriptor is None on a file system without locks, where no call removes leftovers.
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
    """Returns a descriptor that holds the lock of a folder, None where another process does."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None  # gone meanwhile, or no folder of ours
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def rename(source: Path, target: Path) -> None:
    """Renames within one directory and makes it durable."""
    source.rename(target)
    sync_directory(target.parent)


def read_into(descriptor: int, buffer: bytearray | memoryview, start: int) -> bool:
    """Fills ``buffer`` from byte ``start`` of a file; return False where the file is too short."""
    rest = memoryview(buffer)
    while rest:
        count = os.preadv(descriptor, [rest], start)
        if count == 0:
            return False
        rest, start = rest[count:], start + count
    return True
