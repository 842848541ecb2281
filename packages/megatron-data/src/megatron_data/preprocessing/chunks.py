"""Reading JSON-lines sources in pieces that end where a line ends."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from ..errors import DataError

CHUNK_BYTES = 1 << 20


class Chunk(NamedTuple):
    """Whole lines of one source.

    Attributes:
        path: the source.
        line: number of the first line, from 1.
        data: the lines as bytes.
    """

    path: str
    line: int
    data: bytes


class Record(NamedTuple):
    """One JSON object of a source: its line number, from 1, and its content."""

    line: int
    content: dict[str, Any]


@dataclass
class Source:
    """An input file; bytes, lines and digest are complete once it was read to the end."""

    path: str
    bytes: int = 0
    lines: int = 0
    sha256: str = ""
    size: int = field(init=False)

    def __post_init__(self) -> None:
        path = Path(self.path)
        if path.is_dir():
            raise DataError(f"{path} is a folder; give files of JSON lines, such as {path}/*.jsonl")
        if not path.is_file():
            raise DataError(f"no input file at {path}")
        self.size = path.stat().st_size
        if self.size == 0:
            raise DataError(f"{path} is empty; a corpus has one JSON object on every line")

    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        """Pieces of about `chunk_bytes`; a longer line makes a longer piece."""
        digest = hashlib.sha256()
        self.bytes = self.lines = 0
        with Path(self.path).open("rb") as file:
            while data := file.read(chunk_bytes):
                if not data.endswith(b"\n"):
                    data += file.readline()
                digest.update(data)
                yield Chunk(self.path, self.lines + 1, data)
                self.bytes += len(data)
                self.lines += data.count(b"\n") + (not data.endswith(b"\n"))
        self.sha256 = digest.hexdigest()


def open_sources(paths: Iterable[str | os.PathLike[str]]) -> list[Source]:
    """Check that every input is there and holds something, before any work begins.

    Raises:
        DataError: no input, a missing file, or an empty one.
    """
    sources = [Source(os.fspath(path)) for path in paths]
    if not sources:
        raise DataError("no input file given")
    return sources


def parse(chunk: Chunk) -> Iterator[Record]:
    """The JSON objects of a chunk; lines of nothing but white space are passed over.

    Raises:
        DataError: a line that is not UTF-8, not JSON or not an object, with file and line.
    """
    for number, line in enumerate(chunk.data.split(b"\n"), start=chunk.line):
        try:
            content = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            if not line.strip():
                continue
            raise DataError(_explain(chunk.path, number, line, error)) from None
        if not isinstance(content, dict):
            raise DataError(
                f"{chunk.path}:{number}: a JSON {type(content).__name__}, not an object; "
                'every line must be like {"text": "…"}'
            )
        yield Record(number, content)


def _explain(path: str, number: int, line: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        line.decode()
    except UnicodeDecodeError as wrong:
        return (
            f"{path}:{number}: byte {wrong.start} of the line, 0x{line[wrong.start]:02x}, "
            "is not UTF-8; convert the file"
        )
    start = line[:40].decode(errors="replace")
    wanted = 'every line must be like {"text": "…"}'
    return f"{path}:{number}: not JSON ({error.msg}, column {error.colno}), {wanted}: {start}"


def texts_of(path: str, record: Record, key: str) -> list[str]:
    """The text under a key: a string, or a list of strings that are sentences of one document.

    Raises:
        DataError: the key is absent or holds something else, with file and line.
    """
    try:
        value = record.content[key]
    except KeyError:
        present = ", ".join(map(repr, record.content)) or "none"
        raise DataError(
            f"{path}:{record.line}: no key {key!r} (keys here: {present}); name the right one "
            "with --json-keys"
        ) from None
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return value
    raise DataError(
        f"{path}:{record.line}: {key!r} holds a {type(value).__name__}, not a string or a list "
        "of strings"
    )


def read_texts(paths: Sequence[str | os.PathLike[str]], key: str = "text") -> Iterator[str]:
    """Every text under `key`, in the order of the files.

    Raises:
        DataError: a missing or empty file, or a line that cannot be read, with its number.
    """
    for source in open_sources(paths):
        for chunk in source.chunks():
            for record in parse(chunk):
                yield from texts_of(chunk.path, record, key)
