"""Files of JSON lines, in chunks of complete lines."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import orjson

from megatron_data.errors import DataError
from megatron_data.sources.protocol import (
    CHUNK_BYTES,
    BrokenChunk,
    Document,
    Fault,
    Item,
    Row,
    Span,
    UnreadableError,
    check_reread,
    not_utf8,
    too_long,
)
from megatron_data.sources.storage import stat
from megatron_data.sources.streams import Stream

NEWLINE = b"\n"
_STEP = 1 << 18
_TEXT_WANTED = 'every line must be like {"text": "…"}'

Content = TypeVar("Content")
Found = TypeVar("Found")

_JSON_KINDS: dict[type, str] = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


class LinesChunk(NamedTuple):
    """Complete lines of a file.

    Attributes:
        path: The file.
        offset: First byte of the first line in the uncompressed file.
        line: Number of the first line, from 1.
        data: The lines as bytes.
        stored: Bytes of the file read for the lines, compressed if the file is.
    """

    path: str
    offset: int
    line: int
    data: bytes
    stored: int

    @property
    def lines(self) -> int:
        """The number of lines."""
        return self.data.count(NEWLINE) + (not self.data.endswith(NEWLINE))

    @property
    def span(self) -> Span:
        """The range of bytes and lines."""
        return Span(self.offset, len(self.data), self.line, self.lines)

    @property
    def digest(self) -> str:
        """SHA-256 of the lines."""
        return hashlib.sha256(self.data).hexdigest()

    def items(self, keys: Sequence[str], max_bytes: int | None = None) -> Iterator[Item | Fault]:
        """Yields the texts of each object for the keys; skips lines of white space."""
        return self._each(partial(_texts, keys), Item, _TEXT_WANTED, max_bytes)

    def rows(self, max_bytes: int | None = None) -> Iterator[Row | Fault]:
        """Yields each object; skips lines of white space."""
        return self._each(dict, Row, "every line must be an object", max_bytes)

    def _each(
        self,
        read: Callable[[dict[str, Any]], Content],
        made: Callable[[int, int, int, Content], Found],
        wanted: str,
        max_bytes: int | None,
    ) -> Iterator[Found | Fault]:
        end = self.offset
        for number, line in enumerate(self.data.split(NEWLINE), start=self.line):
            offset, end = end, end + len(line) + 1
            try:
                if max_bytes is not None and len(line) > max_bytes:
                    raise too_long(len(line), max_bytes)
                try:
                    content = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    if not line.strip():
                        continue
                    raise _explained(line, error, wanted) from None
                if not isinstance(content, dict):
                    raise UnreadableError("json", f"{_kind(content)}, not an object; {wanted}")
                value = read(content)
            except UnreadableError as error:
                item = Item(number, offset, len(line), [])
                yield self.fault(item, error.kind, error.reason)
            else:
                yield made(number, offset, len(line), value)

    def fault(self, item: Item | Row, kind: str, reason: str) -> Fault:
        """Returns a fault with the file and line of an item."""
        location = f"{self.path}:{item.number}"
        return Fault(location, kind, reason, self.path, item.number, item.offset, item.size)


class JsonLines:
    """A file of JSON lines; its record is complete after all chunks were read.

    Args:
        path: Local path or URL; its suffix determines the compression.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.size = stat(path).size
        self._bytes = self._lines = 0
        self._sha256 = ""

    def chunks(
        self, chunk_bytes: int = CHUNK_BYTES, max_bytes: int | None = None
    ) -> Iterator[LinesChunk | BrokenChunk]:
        """Yields chunks of about `chunk_bytes`; a longer line gives a larger chunk."""
        offset, line, stored, rest = 0, 1, 0, b""
        with Stream(self.path) as stream:
            while rest or not stream.ended:
                data = rest + stream.read(max(chunk_bytes - len(rest), 0))
                whole = stream.ended and stream.damage is None
                end = len(data) if whole else data.rfind(NEWLINE) + 1
                kept, size, rest = data[:end], end, data[end:]
                if not end and not stream.ended:
                    kept, size, rest = _long_line(stream, data, max_bytes)
                read, stored = stream.stored - stored, stream.stored
                if kept:
                    chunk = LinesChunk(self.path, offset, line, kept, read)
                    yield chunk
                    line += chunk.lines
                elif size:
                    yield self._broken(too_long(size, max_bytes or 0), offset, line, size, read)
                    line += 1
                offset += size
                if stream.damage is not None and NEWLINE not in rest:
                    error = UnreadableError("damaged", stream.damage)
                    yield self._broken(error, offset, line, None, 0)
                    break
            self._sha256 = stream.sha256()
            self._bytes, self._lines = stream.stored, line - 1

    def _broken(
        self, error: UnreadableError, offset: int, line: int, size: int | None, stored: int
    ) -> BrokenChunk:
        location = f"{self.path}:{line}"
        fault = Fault(location, error.kind, error.reason, self.path, line, offset, size)
        return BrokenChunk(fault, stored, Span(offset, size or 0, line, 1))

    def chunk_at(self, span: Span, max_bytes: int | None = None) -> LinesChunk:
        """Reads some lines again."""
        check_reread(span.size, max_bytes)
        with Stream(self.path) as stream:
            stream.skip(span.offset)
            data = stream.read(span.size)
        if len(data) != span.size:
            raise DataError(f"{self.path} ends before byte {span.offset + span.size:,}")
        return LinesChunk(self.path, span.offset, span.first, data, span.size)

    def record(self) -> dict[str, Any]:
        """Returns path, stored size, number of lines, and the digest of the stored bytes."""
        return {
            "path": self.path,
            "bytes": self._bytes,
            "lines": self._lines,
            "sha256": self._sha256,
        }


def _long_line(stream: Stream, start: bytes, max_bytes: int | None) -> tuple[bytes, int, bytes]:
    """Reads a line to its end; returns its bytes, its size, and the bytes read after it.

    The bytes of the line are empty if it is larger than `max_bytes`. If damage ends the line, all
    bytes are empty and the size is 0.
    """
    parts, size, end, rest = [start], len(start), 0, b""
    while not stream.ended and not end:
        data = stream.read(_STEP)
        end = data.find(NEWLINE) + 1
        if end:
            data, rest = data[:end], data[end:]
        size += len(data)
        if max_bytes is None or size <= max_bytes + 1:
            parts.append(data)
    if stream.damage is not None and not end:
        return b"", 0, b""
    if max_bytes is not None and size > max_bytes + 1:
        return b"", size, rest
    return b"".join(parts), size, rest


def _texts(keys: Sequence[str], content: dict[str, Any]) -> list[Document]:
    """Returns the text of a line for each key.

    Raises:
        UnreadableError: A key has no text.
    """
    documents = []
    for key in keys:  # strings are handled without a call, because there are many short lines
        value = content.get(key)
        documents.append([value] if type(value) is str else text_of(content, key))
    return documents


def _explained(line: bytes, error: orjson.JSONDecodeError, wanted: str) -> UnreadableError:
    try:
        line.decode()
    except UnicodeDecodeError as wrong:
        return not_utf8(wrong)
    start = line[:40].decode(errors="replace")
    if wanted == _TEXT_WANTED:
        wanted += " (plain text is read from files named .txt)"
    return UnreadableError(
        "json", f"not JSON ({error.msg}, column {error.colno}), {wanted}: {start}"
    )


def text_of(record: dict[str, Any], key: str) -> Document:
    """Returns the text of a key: a string, or a list of strings that are its sentences.

    Raises:
        UnreadableError: The key is missing, or its value is of another type.
    """
    try:
        value = record[key]
    except KeyError:
        present = ", ".join(map(repr, record)) or "none"
        raise UnreadableError(
            "key", f"no key {key!r} (keys here: {present}); name the right one with --json-key"
        ) from None
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return value
    kind = "a list of other values" if isinstance(value, list) else _kind(value)
    raise UnreadableError("type", f"{key!r} holds {kind}, not a string or a list of strings")


def _kind(value: object) -> str:
    """Returns the JSON type of a value with an article; columns of Parquet have other types."""
    inner = value.get("bytes") if isinstance(value, dict) else value  # images of `datasets`
    if isinstance(inner, bytes):
        return "bytes, such as those of an image, which only tokenize-images reads"
    return _JSON_KINDS.get(type(value), f"a {type(value).__name__}")
