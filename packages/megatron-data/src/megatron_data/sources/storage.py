"""Where a corpus lies: local paths, and URLs that fsspec opens."""

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from ..errors import DataError

_MAGIC = frozenset("*?[")
_VERSIONS = ("ETag", "etag", "md5Hash", "blob_id", "mtime", "LastModified", "created")


class Stat(NamedTuple):
    """Size of a file in bytes, and what changes with its content: a time or a tag."""

    size: int
    version: str


def is_url(path: str) -> bool:
    """Whether fsspec opens this path."""
    return "://" in path


def expand(path: str) -> list[str]:
    """Return the files and folders that a pattern matches, sorted; other paths as they are.

    Raises:
        DataError: nothing matches.
    """
    if not _MAGIC & set(path) or exists(path):
        return [path]
    if is_url(path):
        system, inner = _file_system(path)
        found = [str(system.unstrip_protocol(name)) for name in system.glob(inner)]
    else:
        found = glob.glob(path, recursive=True)  # noqa: PTH207
    if not found:
        raise DataError(f"no file matches {path}")
    return sorted(found, key=os.fsencode)


def exists(path: str) -> bool:
    """Whether there is a file or a folder."""
    if is_url(path):
        system, inner = _file_system(path)
        return bool(system.exists(inner))
    return os.path.exists(path)  # noqa: PTH110


def is_folder(path: str) -> bool:
    """Whether this is a folder."""
    if is_url(path):
        system, inner = _file_system(path)
        return bool(system.isdir(inner))
    return os.path.isdir(path)  # noqa: PTH112


def stat(path: str) -> Stat:
    """Size and version of a file.

    Raises:
        DataError: there is none.
    """
    missing = f"no input file or folder at {path}"
    try:
        if not is_url(path):
            found = os.stat(path)  # noqa: PTH116
            return Stat(found.st_size, str(found.st_mtime_ns))
        system, inner = _file_system(path)
        info: dict[str, Any] = system.info(inner)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(missing) from None
    if info.get("type") == "directory":
        raise DataError(missing)
    tags = (info.get(name) for name in _VERSIONS)
    return Stat(int(info["size"] or 0), str(next(filter(None, tags), "")))


def open_file(path: str) -> BinaryIO:
    """Open a file for reading bytes, at its beginning."""
    if not is_url(path):
        return Path(path).open("rb")
    system, inner = _file_system(path)
    return cast(BinaryIO, system.open(inner, "rb"))


def read_range(url: str, begin: int, end: int) -> bytes:
    """Return bytes of a file at a URL, fewer where it ends or the transfer does.

    Whatever goes wrong is raised as fsspec's file system raises it.
    """
    system, inner = _file_system(url)
    return bytes(system.cat_file(inner, start=begin, end=end))


def files_below(folder: str) -> list[str]:
    """Every file in a folder and below, in the order of `LC_ALL=C sort`.

    Names that begin with a dot are passed over; links to folders are not followed.
    """
    if not is_url(folder):
        return sorted(_walk(folder), key=os.fsencode)
    system, inner = _file_system(folder)
    start = len(inner.rstrip("/")) + 1
    names = [
        str(system.unstrip_protocol(name))
        for name in system.find(inner)
        if not any(part.startswith(".") for part in name[start:].split("/"))
    ]
    return sorted(names, key=os.fsencode)


def relative(path: str, folder: str) -> str:
    """Return the name of a file below a folder."""
    if is_url(path):
        return path[len(folder.rstrip("/")) + 1 :]
    return os.path.relpath(path, folder)


def _walk(folder: str) -> Iterator[str]:
    for place, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(place, name) for name in names if not name.startswith("."))  # noqa: PTH118


def _refuse(error: OSError) -> None:
    raise error


def _file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it."""
    try:
        import fsspec
    except ImportError:
        raise DataError(f"{url}: a URL needs fsspec; pip install 'megatron-data[remote]'") from None
    try:
        system, inner = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # no package for it, or no such protocol
        raise DataError(f"{url}: fsspec cannot open it: {error}") from None
    return system, str(inner)
