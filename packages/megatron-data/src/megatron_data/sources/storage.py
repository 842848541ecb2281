"""Where a corpus lies: local paths, and URLs that fsspec opens."""

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
    """Size of a file in bytes, and what changes with its content: a time or a tag."""

    size: int
    version: str


def expand_pattern(path: str) -> list[str]:
    """Returns the files and folders that a pattern matches, sorted; other paths as they are.

    Raises:
        DataError: nothing matches.
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
    """Returns whether there is a file or a folder."""
    if is_url(path):
        with _system(path) as (system, inner):
            return bool(system.exists(inner))
    return os.path.exists(path)  # noqa: PTH110


def is_folder(path: str) -> bool:
    """Returns whether this is a folder."""
    if is_url(path):
        with _system(path) as (system, inner):
            return bool(system.isdir(inner))
    return os.path.isdir(path)  # noqa: PTH112


def stat(path: str, fresh: bool = False) -> Stat:
    """Size and version of a file.

    Args:
        path: the file, or its URL.
        fresh: ask the storage, whatever a listing said before.

    Raises:
        MissingError: there is none.
        DataError: the storage cannot be reached, or refuses.
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


def open_file(path: str) -> BinaryIO:
    """Opens a file for reading bytes, at its beginning.

    Raises:
        MissingError: nothing is at a URL; also while it is read.
        NotRegularFileError: a device or a pipe, which may never end.
        DataError: a storage that cannot be reached, or refuses; also while it is read.
        OSError: a file on the disk cannot be opened.
    """
    if not is_url(path):
        return _open_regular(path)
    with _system(path) as (system, inner):
        if is_local(path):
            return _open_regular(inner)
        return wrap_file(system.open(inner, "rb"), path)


def read_range(url: str, begin: int, end: int) -> bytes:
    """Returns bytes of a file at a URL, fewer where it ends or the transfer does.

    Whatever goes wrong is raised as fsspec's file system raises it.
    """
    system, inner = _file_system(url)
    return bytes(system.cat_file(inner, start=begin, end=end))


def list_files(folder: str, most: int | None = None) -> list[str]:
    """Every file in a folder and below, in the order of `LC_ALL=C sort`.

    Names that begin with a dot are passed over; links to folders are not followed.

    Args:
        folder: path or URL.
        most: files and folders that it may hold; None for any number.

    Raises:
        DataError: it holds more, which is found out before all of them are listed.
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
    """Returns the name of a file below a folder."""
    if is_url(path):
        return path[len(folder.rstrip("/")) + 1 :]
    return os.path.relpath(path, folder)


def _find(url: str) -> list[str]:
    """Every file below a URL, which storages list faster than folder by folder."""
    with _system(url) as (system, inner):
        start = len(inner.rstrip("/")) + 1
        return [
            str(system.unstrip_protocol(name))
            for name in system.find(inner)
            if not any(part.startswith(".") for part in name[start:].split("/"))
        ]


def _walk(folder: str) -> Iterator[tuple[list[str], list[str]]]:
    """Names of the folders, and paths of the files, of a folder and of each below."""
    for place, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files = [os.path.join(place, name) for name in names if not name.startswith(".")]  # noqa: PTH118
        yield folders, files


def _walk_url(url: str) -> Iterator[tuple[list[str], list[str]]]:
    """`_walk` of a URL."""
    with _system(url) as (system, inner):
        for place, folders, names in system.walk(inner):
            folders[:] = [name for name in folders if not name.startswith(".")]
            shown = [f"{place.rstrip('/')}/{name}" for name in names if not name.startswith(".")]
            yield list(folders), [str(system.unstrip_protocol(name)) for name in shown]


def _open_regular(path: str) -> BinaryIO:
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - the caller closes it
    if not modes.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise NotRegularFileError(f"{path} is a device or a pipe; give a regular file")
    return file


def _without_waiting(path: str, flags: int) -> int:
    """Opens a pipe without waiting for its other end; regular files do not care."""
    return os.open(path, flags | os.O_NONBLOCK)


def _refuse(error: OSError) -> None:
    raise error


@contextmanager
def _system(url: str) -> Iterator[tuple[Any, str]]:
    """Fsspec's file system of a URL and the path in it; what fails is told in one line."""
    with storage_errors(url):
        yield _file_system(url)


def _file_system(url: str) -> tuple[Any, str]:
    """Returns fsspec's file system of a URL, and the path in it."""
    check_scheme(url)
    try:
        import fsspec
    except ImportError:
        raise DataError(f"{url}: a URL needs fsspec; pip install 'megatron-data[remote]'") from None
    try:
        system, inner = fsspec.core.url_to_fs(url)
    except ImportError as error:  # fsspec knows the protocol and names the package for it
        raise DataError(
            f"{url}: fsspec has no driver for {url.partition('://')[0]}:// ({error})"
        ) from None
    except ValueError as error:
        raise DataError(f"{url}: fsspec cannot open it: {error}") from None
    return system, str(inner)
