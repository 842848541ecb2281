"""From the paths a user gives to sources: which kind each of them is."""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ..errors import DataError
from .json_lines import JsonLines
from .protocol import Source
from .text_files import TextFiles

TEXT = ".txt"
LINES = ".jsonl"

_log = logging.getLogger("megatron_data")


def open_sources(paths: Iterable[str | os.PathLike[str]], keys: Sequence[str]) -> list[Source]:
    """Check that every input is there and holds something, before any work begins.

    A file whose name ends in `.txt` is one document; any other holds JSON lines. A folder stands
    for the `.txt` files in it and below, sorted, and then for its `.jsonl` files; names that begin
    with a dot are passed over, and a warning tells how many other files were left out.

    Args:
        paths: files and folders, in the order of the corpus.
        keys: JSON keys that will be read. A text file has one text, which stands for any key.

    Raises:
        DataError: no input; one that is missing, or empty; text files with several keys.
    """
    sources = [source for path in paths for source in _sources_at(os.fspath(path))]
    if not sources:
        raise DataError("no input file given")
    if len(keys) > 1:
        for source in sources:
            if isinstance(source, TextFiles):
                raise DataError(
                    f"{source.path}: a text file has one text; --json-keys {' '.join(keys)} needs "
                    "JSON lines"
                )
    return sources


def read_texts(paths: Sequence[str | os.PathLike[str]], key: str = "text") -> Iterator[str]:
    """Every text of files and folders, in their order; see `preprocess` for what they may be.

    Args:
        paths: JSON lines, `.txt` files, and folders of either.
        key: JSON key that holds the text.

    Raises:
        DataError: a missing or empty input, or one that cannot be read, with file and place.
    """
    for source in open_sources(paths, (key,)):
        for chunk in source.chunks():
            (documents,) = chunk.documents((key,))
            for document in documents:
                yield from document


def _sources_at(path: str) -> list[Source]:
    if os.path.isdir(path):  # noqa: PTH112
        return _sources_in(path)
    if not os.path.isfile(path):  # noqa: PTH113
        raise DataError(f"no input file or folder at {path}")
    if not os.path.getsize(path):  # noqa: PTH202
        raise DataError(f"{path} is empty; a corpus has one JSON object on every line, or is text")
    return [TextFiles(path, (path,)) if _suffix(path) == TEXT else JsonLines(path)]


def _sources_in(folder: str) -> list[Source]:
    files = sorted(_files_below(folder), key=os.fsencode)
    texts = [path for path in files if _suffix(path) == TEXT]
    lines = [path for path in files if _suffix(path) == LINES]
    others = [path for path in files if _suffix(path) not in (TEXT, LINES)]
    if not texts and not lines:
        held = _first_of(others) if others else "nothing"
        raise DataError(
            f"no {TEXT} or {LINES} file in {folder}, which holds {held}; a file of JSON lines may "
            "have any name when it is given itself"
        )
    if others:
        _log.warning("left out %s, neither %s nor %s", _first_of(others), TEXT, LINES)
    sources: list[Source] = [TextFiles(folder, texts)] if texts else []
    return sources + [source for path in lines for source in _sources_at(path)]


def _first_of(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1:,} more"


def _files_below(folder: str) -> Iterator[str]:
    """Every file in a folder and below, unsorted; links to folders are not followed."""
    for place, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(place, name) for name in names if not name.startswith("."))  # noqa: PTH118


def _refuse(error: OSError) -> None:
    raise error


def _suffix(path: str) -> str:
    return Path(path).suffix.lower()
