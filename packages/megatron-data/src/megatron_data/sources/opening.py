"""Opens the sources of the paths that a user gives."""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megatron_data.errors import DataError
from megatron_data.sources.json_lines import JsonLines
from megatron_data.sources.parallel_lines import ParallelLines
from megatron_data.sources.parquet import Parquet
from megatron_data.sources.protocol import MAX_DOCUMENT_BYTES, Fault, Source
from megatron_data.sources.storage import expand_pattern, is_folder, list_files, stat_regular
from megatron_data.sources.streams import split_suffix
from megatron_data.sources.text_files import TextFile, TextFiles
from megatron_data.sources.urls import check_untrusted_path

TEXT = ".txt"
LINES = ".jsonl"
TABLE = ".parquet"

_OTHER_ENTRIES = 10_000  # allowed files and folders besides the texts of a recorded folder
_MAX_ENTRIES = 1 << 22

_log = logging.getLogger("megatron_data")


def open_sources(
    paths: Iterable[str | os.PathLike[str]], keys: Sequence[str], rows: bool = False
) -> list[Source]:
    """Opens all inputs and checks that each exists and is not empty, before any work begins.

    A `.txt` file is one document, a `.parquet` file has one document per row, and any other file
    has JSON lines. Text files and JSON lines may be compressed (`.gz`, `.bz2`, `.zst`). A folder
    stands for the `.txt` files below it, sorted, and then its `.jsonl` and `.parquet` files; names
    that begin with a dot are ignored, and a warning names other files. A glob pattern (`*`, `?`,
    `[…]`, `**`) stands for its matches, sorted. fsspec opens paths with `://`.

    Args:
        paths: Files, folders, patterns and URLs, in the order of the corpus.
        keys: JSON keys or columns to read. The text of a text file is used for any key.
        rows: Whether complete objects are read, each with some of the keys.

    Raises:
        DataError: There is no input, an input is missing or empty, text files are given with
            several keys or with `rows`, or a required extra is not installed.
    """
    return _fitting(find_sources(paths, keys, rows), keys, rows)


def _fitting(sources: list[Source], keys: Sequence[str], rows: bool) -> list[Source]:
    """Checks that the keys fit the kinds of the sources, and returns the sources."""
    for source in sources:
        if isinstance(source, TextFiles) and rows:
            raise DataError(
                f"{source.path}: a text file has no objects; give JSON lines or Parquet with "
                f"some of {', '.join(keys)}"
            )
        if isinstance(source, TextFiles) and len(keys) > 1:
            raise DataError(
                f"{source.path}: a text file has one text; --json-keys {' '.join(keys)} needs "
                "JSON lines"
            )
    return sources


def find_sources(
    paths: Iterable[str | os.PathLike[str]], keys: Sequence[str], rows: bool = False
) -> list[Source]:
    """Opens sources like `open_sources`, but accepts text files with any keys.

    Raises:
        DataError: As in `open_sources`, except for the keys.
    """
    found = (path for given in paths for path in expand_pattern(os.fspath(given)))
    sources = [source for path in found for source in _sources_at(path, keys, rows)]
    if not sources:
        raise DataError("no input file given")
    return sources


def open_parallel(paths: Iterable[str | os.PathLike[str]], keys: Sequence[str]) -> Source:
    """Opens a parallel corpus and checks its files, before any work begins.

    Args:
        paths: One text file per key, in the same order; compressed files and URLs are allowed.
        keys: Names of the texts, such as languages.

    Raises:
        DataError: The numbers of files and keys differ, there are fewer than two, or a file is
            missing or is a folder.
    """
    files = [os.fspath(path) for path in paths]
    if len(files) != len(keys) or len(files) < 2:
        raise DataError(
            f"--parallel: {len(files)} in --input ({', '.join(files)}), {len(keys)} in --json-keys "
            f"({', '.join(keys)}); give at least two files and a key for each, such as --input "
            "news.en news.de --json-keys en de"
        )
    for path in files:
        if is_folder(path):
            raise DataError(f"{path} is a folder; --parallel reads a text file for each key")
    return ParallelLines(files)


def reopen(record: dict[str, Any], allow_http: bool = False) -> Source:
    """Opens a source that a manifest records.

    Args:
        record: The record of the source. Its paths are not patterns. The listing of a folder stops
            above the recorded number of files, so that a manifest cannot cause a walk of the disk.
        allow_http: Whether the paths may be URLs of web servers.

    Raises:
        DataError: The source does not exist any more, is of another kind now, or has a path that
            a manifest may not name.
    """
    keys = record["json_keys"]
    if "parallel" in record:
        files = [check_untrusted_path(file["path"], allow_http) for file in record["parallel"]]
        return open_parallel(files, keys)
    path = check_untrusted_path(record["path"], allow_http)
    rows = record.get("objects", False)
    most = None
    if is_folder(path):
        if "files" not in record:
            raise DataError(f"{path} is a folder; the source was a file")
        most = min(2 * int(record["files"]), _MAX_ENTRIES) + _OTHER_ENTRIES
    for opened in _fitting(_sources_at(path, keys, rows, most), keys, rows):
        if opened.path == path and ("files" in record) == ("files" in opened.record()):
            return opened
    raise DataError(f"{path} is another kind of input now")


def read_texts(
    paths: Sequence[str | os.PathLike[str]],
    key: str = "text",
    max_document_bytes: int | None = MAX_DOCUMENT_BYTES,
) -> Iterator[str]:
    """Yields the texts of inputs in order; see `preprocess` for the kinds of inputs.

    Args:
        paths: JSON lines, `.txt` and `.parquet` files, folders of them, glob patterns and URLs.
        key: JSON key or column that holds the text.
        max_document_bytes: Largest size of a document in its source in bytes; None for no limit.

    Raises:
        DataError: An input is missing, empty or cannot be read; the error names file and location.
    """
    for source in open_sources(paths, (key,)):
        for chunk in source.chunks(max_bytes=max_document_bytes):
            for item in chunk.items((key,), max_document_bytes):
                if isinstance(item, Fault):
                    raise DataError(str(item))
                yield from item.texts[0]


def _sources_at(
    path: str, keys: Sequence[str], rows: bool, most: int | None = None
) -> list[Source]:
    if is_folder(path):
        return _sources_in(path, keys, rows, most)
    if not stat_regular(path).size:
        raise DataError(f"{path} is empty; a corpus has one JSON object on every line, or is text")
    kind, compression = split_suffix(path)
    if kind == TABLE and not compression:
        return [Parquet(path, keys, optional=rows)]
    return [TextFile(path) if kind == TEXT else JsonLines(path)]


def _sources_in(folder: str, keys: Sequence[str], rows: bool, most: int | None) -> list[Source]:
    files = list_files(folder, most)
    kinds = {path: _kind(path) for path in files}
    texts = [path for path in files if kinds[path] == TEXT]
    tables = [path for path in files if kinds[path] in (LINES, TABLE)]
    ignored = [path for path in files if not kinds[path]]
    if not texts and not tables:
        held = _first_of(ignored) if ignored else "nothing"
        raise DataError(
            f"no {TEXT}, {LINES} or {TABLE} file in {folder}, which holds {held}; a file of JSON "
            "lines with another name must be given itself"
        )
    if ignored:
        _log.warning("ignored %s: not %s, %s or %s", _first_of(ignored), TEXT, LINES, TABLE)
    sources: list[Source] = [TextFiles(folder, texts)] if texts else []
    return sources + [source for path in tables for source in _sources_at(path, keys, rows)]


def _kind(path: str) -> str:
    """Returns the kind of a file in a folder by its name, or "" if it is ignored."""
    kind, compression = split_suffix(path)
    return kind if kind in (TEXT, LINES) or (kind == TABLE and not compression) else ""


def _first_of(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1:,} more"
