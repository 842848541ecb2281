"""Files of JSON lines, in pieces that end where a line ends."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from ..errors import DataError
from .protocol import CHUNK_BYTES, Document

NEWLINE = b"\n"


class LinesChunk(NamedTuple):
    """Whole lines of one source.

    Attributes:
        path: the source.
        line: number of the first line, from 1.
        data: the lines as bytes.
    """

    path: str
    line: int
    data: bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.data)

    @property
    def place(self) -> str:
        """The file, its first line and its last."""
        return f"{self.path}, lines {self.line} to {self.line + self.data.count(NEWLINE)}"

    def documents(self, keys: Sequence[str]) -> list[list[Document]]:
        """Return the texts of every object under each key.

        Raises:
            DataError: a line that cannot be read, with file and line.
        """
        records = list(parse(self))
        return [[_texts_of(self.path, record, key) for record in records] for key in keys]


class Record(NamedTuple):
    """One JSON object of a source: its line number, from 1, and its content."""

    line: int
    content: dict[str, Any]


class JsonLines:
    """A file of JSON lines; bytes, lines and digest are complete after all chunks.

    Args:
        path: the file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.size = os.path.getsize(path)  # noqa: PTH202
        self._bytes = self._lines = 0
        self._sha256 = ""

    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[LinesChunk]:
        """Pieces of about `chunk_bytes`; a longer line makes a longer piece."""
        digest = hashlib.sha256()
        self._bytes = self._lines = 0
        with Path(self.path).open("rb") as file:
            while data := file.read(chunk_bytes):
                if not data.endswith(NEWLINE):
                    data += file.readline()
                digest.update(data)
                yield LinesChunk(self.path, self._lines + 1, data)
                self._bytes += len(data)
                self._lines += data.count(NEWLINE) + (not data.endswith(NEWLINE))
        self._sha256 = digest.hexdigest()

    def record(self) -> dict[str, Any]:
        """Return size, number of lines and digest."""
        return {
            "path": self.path,
            "bytes": self._bytes,
            "lines": self._lines,
            "sha256": self._sha256,
        }


def parse(chunk: LinesChunk) -> Iterator[Record]:
    """The JSON objects of a chunk; lines of nothing but white space are passed over.

    Raises:
        DataError: a line that is not UTF-8, not JSON or not an object, with file and line.
    """
    for number, line in enumerate(chunk.data.split(NEWLINE), start=chunk.line):
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
    wanted = 'every line must be like {"text": "…"} (plain text is read from files named .txt)'
    return f"{path}:{number}: not JSON ({error.msg}, column {error.colno}), {wanted}: {start}"


def _texts_of(path: str, record: Record, key: str) -> list[str]:
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
