"""From the paths a user gives to sources: which kind each of them is."""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megatron_data.errors import DataError
from megatron_data.sources.json_lines import JsonLines
from megatron_data.sources.parallel_lines import ParallelLines
from megatron_data.sources.parquet import Parquet
from megatron_data.sources.protocol import MAX_DOCUMENT_BYTES, Fault, Source
from megatron_data.sources.storage import expand_pattern, is_folder, list_files, stat
from megatron_data.sources.streams import split_suffix
from megatron_data.sources.text_files import TextFile, TextFiles
from megatron_data.sources.urls import check_untrusted_path

TEXT = ".txt"
LINES = ".jsonl"
TABLE = ".parquet"

_OTHERS = 10_000  # files and folders beside the texts of a folder that a manifest names
_MOST = 1 << 22

_log = logging.getLogger("megatron_data")


def open_sources(
    paths: Iterable[str | os.PathLike[str]], keys: Sequence[str], rows: bool = False
) -> list[Source]:
    """Checks that every input is there and holds something, before any work begins.

    A file whose name ends in `.txt` is one document, one in `.parquet` holds a document in each
    row; any other holds JSON lines. Texts and lines may be packed (`.gz`, `.bz2`, `.zst`). A
    folder stands for the `.txt` files in it and below, sorted, and then for its `.jsonl` and
    `.parquet` files; names that begin with a dot are passed over, and a warning tells how many
    other files were left out. A pattern (`*`, `?`, `[…]`, `**`) stands for what it matches,
    sorted. A path with `://` is opened by fsspec.

    Args:
        paths: files, folders, patterns and URLs, in the order of the corpus.
        keys: JSON keys or columns that will be read. A text file has one text, which stands for
            any key.
        rows: whole objects will be read, each with some of the keys.

    Raises:
        DataError: no input; one that is missing, or empty; text files with several keys, or where
            objects are wanted; a kind that needs an extra which is not installed.
    """
    return _fitting(find_sources(paths, keys, rows), keys, rows)


def _fitting(sources: list[Source], keys: Sequence[str], rows: bool) -> list[Source]:
    """Sources that hold what is asked of them."""
    for source in sources:
        if isinstance(source, TextFiles) and rows:
            raise DataError(
                f"{source.path}: a text file holds no objects; give JSON lines or Parquet with "
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
    """`open_sources` of text files, too, whatever the keys.

    Raises:
        DataError: as there.
    """
    found = (path for given in paths for path in expand_pattern(os.fspath(given)))
    sources = [source for path in found for source in _sources_at(path, keys, rows)]
    if not sources:
        raise DataError("no input file given")
    return sources


def open_parallel(paths: Iterable[str | os.PathLike[str]], keys: Sequence[str]) -> Source:
    """Checks the files of a parallel corpus, before any work begins.

    Args:
        paths: a text file for each key, in their order; packed ones and URLs, too.
        keys: names of the texts, such as the languages.

    Raises:
        DataError: more or fewer files than keys, only one, one that is missing, or a folder.
    """
    files = [os.fspath(path) for path in paths]
    if len(files) != len(keys) or len(files) < 2:
        raise DataError(
            f"--parallel: {len(files)} in --input ({', '.join(files)}), {len(keys)} in --json-keys "
            f"({', '.join(keys)}); give two files or more and a key for each, such as --input "
            "news.en news.de --json-keys en de"
        )
    for path in files:
        if is_folder(path):
            raise DataError(f"{path} is a folder; --parallel reads a text file for each key")
    return ParallelLines(files)


def reopen(record: dict[str, Any], allow_http: bool = False) -> Source:
    """Opens the source that a manifest has a record of.

    Args:
        record: of the source; its names are not patterns. A folder is listed only as far as its
            number of files there goes: data that names the root does not have the disk walked.
        allow_http: whether they may be those of web servers.

    Raises:
        DataError: it is not there any more, or is another kind of input now, or has a name that
            data may not give.
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
        most = min(2 * int(record["files"]), _MOST) + _OTHERS
    for opened in _fitting(_sources_at(path, keys, rows, most), keys, rows):
        if opened.path == path and ("files" in record) == ("files" in opened.record()):
            return opened
    raise DataError(f"{path} is another kind of input now")


def read_texts(
    paths: Sequence[str | os.PathLike[str]],
    key: str = "text",
    max_document_bytes: int | None = MAX_DOCUMENT_BYTES,
) -> Iterator[str]:
    """Every text of files and folders, in their order; see `preprocess` for what they may be.

    Args:
        paths: JSON lines, `.txt` and `.parquet` files, folders of them, patterns and URLs.
        key: JSON key or column that holds the text.
        max_document_bytes: bytes that a document may have in its source; None for no limit.

    Raises:
        DataError: a missing or empty input, or one that cannot be read, with file and place.
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
    if not stat(path).size:
        raise DataError(f"{path} is empty; a corpus has one JSON object on every line, or is text")
    kind, packed = split_suffix(path)
    if kind == TABLE and not packed:
        return [Parquet(path, keys, optional=rows)]
    return [TextFile(path) if kind == TEXT else JsonLines(path)]


def _sources_in(folder: str, keys: Sequence[str], rows: bool, most: int | None) -> list[Source]:
    files = list_files(folder, most)
    kinds = {path: _kind(path) for path in files}
    texts = [path for path in files if kinds[path] == TEXT]
    tables = [path for path in files if kinds[path] in (LINES, TABLE)]
    others = [path for path in files if not kinds[path]]
    if not texts and not tables:
        held = _first_of(others) if others else "nothing"
        raise DataError(
            f"no {TEXT}, {LINES} or {TABLE} file in {folder}, which holds {held}; a file of JSON "
            "lines may have any name when it is given itself"
        )
    if others:
        _log.warning("left out %s, neither %s, %s nor %s", _first_of(others), TEXT, LINES, TABLE)
    sources: list[Source] = [TextFiles(folder, texts)] if texts else []
    return sources + [source for path in tables for source in _sources_at(path, keys, rows)]


def _kind(path: str) -> str:
    """Returns what a folder's file is by its name, nothing if it is passed over."""
    kind, packed = split_suffix(path)
    return kind if kind in (TEXT, LINES) or (kind == TABLE and not packed) else ""


def _first_of(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1:,} more"
