"""Access to files: local paths, and URLs that fsspec opens."""

import glob
import os
import stat as modes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

from megatron_data.errors import DataError
from megatron_data.sources.failures import (
    NotRegularFileError,
    missing_error,
    storage_errors,
    wrap_file,
)
from megatron_data.sources.urls import check_scheme, is_local, is_url

_MAGIC = frozenset("*?[")
_VERSIONS = (
    *("ETag", "etag", "md5Hash", "blob_id", "Content-MD5"),
    *("mtime", "LastModified", "Last-Modified", "created"),
)


class Stat(NamedTuple):
    """Size of a file in bytes, and its version: a time or tag that changes with the content."""

    size: int
    version: str


def expand_pattern(path: str) -> list[str]:
    """Returns the sorted matches of a glob pattern; returns other paths unchanged.

    Raises:
        DataError: Nothing matches.
    """
    if not _MAGIC & set(path) or exists(path):
        return [path]
    if is_url(path):
        with _system(path) as (system, inner):
            found = [str(system.unstrip_protocol(name)) for name in system.glob(inner)]
    else:
        found = glob.glob(path, recursive=True)  # noqa: PTH207
    if not found:
        raise DataError(f"no file matches {path}")
    return sorted(found, key=os.fsencode)


def exists(path: str) -> bool:
    """Returns whether a path is a file or folder."""
    if is_url(path):
        with _system(path) as (system, inner):
            return bool(system.exists(inner))
    return os.path.exists(path)  # noqa: PTH110


def is_folder(path: str) -> bool:
    """Returns whether a path is a folder."""
    if is_url(path):
        with _system(path) as (system, inner):
            return bool(system.isdir(inner))
    return os.path.isdir(path)  # noqa: PTH112


def stat(path: str, fresh: bool = False) -> Stat:
    """Returns size and version of a file.

    Args:
        path: Path or URL of the file.
        fresh: Whether to ignore cached listings of the storage.

    Raises:
        MissingError: The file does not exist.
        DataError: The storage cannot be reached, or denies access.
    """
    if not is_url(path):
        try:
            found = os.stat(path)  # noqa: PTH116
        except (FileNotFoundError, NotADirectoryError):
            raise missing_error(path) from None
        return Stat(found.st_size, str(found.st_mtime_ns))
    with _system(path) as (system, inner):
        if fresh:
            system.invalidate_cache(inner)
        info: dict[str, Any] = system.info(inner)
    if info.get("type") == "directory":
        raise missing_error(path)
    tags = (info.get(name) for name in _VERSIONS)
    return Stat(int(info["size"] or 0), str(next(filter(None, tags), "")))


def stat_regular(path: str) -> Stat:
    """Returns size and version of a file that is read more than once.

    Raises:
        MissingError: The file does not exist.
        NotRegularFileError: The path is a device or a pipe.
        DataError: The storage cannot be reached, or denies access.
    """
    found = stat(path)
    if not is_url(path) and not modes.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116
        raise _not_regular(path)
    return found


def open_file(path: str) -> BinaryIO:
    """Opens a file for reading bytes.

    Raises:
        MissingError: A URL does not exist; also raised while reading.
        NotRegularFileError: The path is a device or a pipe, which may never end.
        DataError: The storage cannot be reached or denies access; also raised while reading.
        OSError: A local file cannot be opened.
    """
    if not is_url(path):
        return _open_regular(path)
    with _system(path) as (system, inner):
        if is_local(path):
            return _open_regular(inner)
        return wrap_file(system.open(inner, "rb"), path)


def read_range(url: str, begin: int, end: int) -> bytes:
    """Returns bytes of a file at a URL; fewer if the file or the transfer ends early.

    Errors of fsspec's file system are raised unchanged.
    """
    system, inner = _file_system(url)
    return bytes(system.cat_file(inner, start=begin, end=end))


def list_files(folder: str, most: int | None = None) -> list[str]:
    """Returns all files below a folder, in the order of `LC_ALL=C sort`.

    Names that begin with a dot are ignored, and links to folders are not followed.

    Args:
        folder: Path or URL.
        most: Largest number of files and folders; None for no limit.

    Raises:
        DataError: The folder holds more; the listing stops early.
    """
    if is_url(folder) and most is None:
        return sorted(_find(folder), key=os.fsencode)
    names, seen = [], 0
    for folders, files in _walk_url(folder) if is_url(folder) else _walk(folder):
        seen += len(folders) + len(files)
        if most is not None and seen > most:
            raise DataError(f"{folder} holds more than {most:,} files and folders")
        names += files
    return sorted(names, key=os.fsencode)


def relative_path(path: str, folder: str) -> str:
    """Returns the path of a file relative to a folder."""
    if is_url(path):
        return path[len(folder.rstrip("/")) + 1 :]
    return os.path.relpath(path, folder)


def _find(url: str) -> list[str]:
    """Lists all files below a URL in one call, which is faster than folder by folder."""
    with _system(url) as (system, inner):
        start = len(inner.rstrip("/")) + 1
        return [
            str(system.unstrip_protocol(name))
            for name in system.find(inner)
            if not any(part.startswith(".") for part in name[start:].split("/"))
        ]


def _walk(folder: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yields the names of the folders and the paths of the files of each folder below a folder."""
    for parent, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files = [os.path.join(parent, name) for name in names if not name.startswith(".")]  # noqa: PTH118
        yield folders, files


def _walk_url(url: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yields what `_walk` yields, for a URL."""
    with _system(url) as (system, inner):
        for parent, folders, names in system.walk(inner):
            folders[:] = [name for name in folders if not name.startswith(".")]
            shown = [f"{parent.rstrip('/')}/{name}" for name in names if not name.startswith(".")]
            yield list(folders), [str(system.unstrip_protocol(name)) for name in shown]


def _open_regular(path: str) -> BinaryIO:
    file = open(path, "rb", opener=_open_nonblocking)  # noqa: SIM115 - the caller closes it
    if not modes.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise _not_regular(path)
    return file


def _open_nonblocking(path: str, flags: int) -> int:
    """Opens a file without blocking on a pipe; regular files are not affected."""
    return os.open(path, flags | os.O_NONBLOCK)


def _refuse(error: OSError) -> None:
    raise error


@contextmanager
def _system(url: str) -> Iterator[tuple[Any, str]]:
    """Yields fsspec's file system of a URL and the path in it; converts errors in the block."""
    with storage_errors(url):
        yield _file_system(url)


def _file_system(url: str) -> tuple[Any, str]:
    """Returns fsspec's file system of a URL and the path in it."""
    check_scheme(url)
    try:
        import fsspec
    except ImportError:
        raise DataError(f"{url}: a URL needs fsspec; pip install 'megatron-data[remote]'") from None
    try:
        system, inner = fsspec.core.url_to_fs(url)
    except ImportError as error:  # the message of fsspec names the missing package
        raise DataError(
            f"{url}: {url.partition('://')[0]}:// needs a driver of fsspec: {error}"
        ) from None
    except ValueError as error:
        raise DataError(f"{url}: fsspec cannot open it: {error}") from None
    return system, str(inner)


def _not_regular(path: str) -> NotRegularFileError:
    return NotRegularFileError(
        f"{path} is a device or a pipe; write its content to a file and give that file"
    )
