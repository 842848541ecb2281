"""Files of JSON lines, in pieces that end where a line ends."""

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
    """Whole lines of one source.

    Attributes:
        path: the source.
        offset: first byte of the first line, in the unpacked file.
        line: number of the first line, from 1.
        data: the lines as bytes.
        stored: bytes of the file, as it lies, that were read for them.
    """

    path: str
    offset: int
    line: int
    data: bytes
    stored: int

    @property
    def lines(self) -> int:
        """How many lines."""
        return self.data.count(NEWLINE) + (not self.data.endswith(NEWLINE))

    @property
    def span(self) -> Span:
        """Bytes and lines."""
        return Span(self.offset, len(self.data), self.line, self.lines)

    @property
    def digest(self) -> str:
        """SHA-256 of the lines."""
        return hashlib.sha256(self.data).hexdigest()

    def items(self, keys: Sequence[str], max_bytes: int | None = None) -> Iterator[Item | Fault]:
        """Returns the text of every object under each key; lines of white space are passed over."""
        return self._each(partial(_texts, keys), Item, _TEXT_WANTED, max_bytes)

    def rows(self, max_bytes: int | None = None) -> Iterator[Row | Fault]:
        """Every object; lines of white space are passed over."""
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
        """Names the file and the line."""
        place = f"{self.path}:{item.number}"
        return Fault(place, kind, reason, self.path, item.number, item.offset, item.size)


class JsonLines:
    """A file of JSON lines; bytes, lines and digest are complete after all chunks.

    Args:
        path: the file: a local path or a URL, packed if its suffix says so.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.size, self.version = stat(path)
        self._bytes = self._lines = 0
        self._sha256 = ""

    def chunks(
        self, chunk_bytes: int = CHUNK_BYTES, max_bytes: int | None = None
    ) -> Iterator[LinesChunk | BrokenChunk]:
        """Pieces of about `chunk_bytes`; a longer line makes a longer piece."""
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
        place = f"{self.path}:{line}"
        fault = Fault(place, error.kind, error.reason, self.path, line, offset, size)
        return BrokenChunk(fault, stored, Span(offset, size or 0, line, 1))

    def chunk_at(self, span: Span, max_bytes: int | None = None) -> LinesChunk:
        """Reads some lines anew."""
        check_reread(span.size, max_bytes)
        with Stream(self.path) as stream:
            stream.skip(span.offset)
            data = stream.read(span.size)
        if len(data) != span.size:
            raise DataError(f"{self.path} ends before byte {span.offset + span.size:,}")
        return LinesChunk(self.path, span.offset, span.first, data, span.size)

    def record(self) -> dict[str, Any]:
        """Return size, number of lines and digest; of a packed file, size and digest as it lies."""
        return {
            "path": self.path,
            "bytes": self._bytes,
            "lines": self._lines,
            "sha256": self._sha256,
        }


def _long_line(stream: Stream, start: bytes, max_bytes: int | None) -> tuple[bytes, int, bytes]:
    """Reads a line to its end: its bytes, how many they are, and what was read behind it.

    The bytes are left out if they are more than `max_bytes`, and where damage ends the line.
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
    """Returns the text of a line under each key.

    Raises:
        UnreadableError: no text under a key.
    """
    documents = []
    for key in keys:  # a string as a rule, and then no more calls: short lines are many
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
    """The text under a key: a string, or a list of strings that are sentences of one document.

    Raises:
        UnreadableError: the key is absent or holds something else.
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
    kind = "a list of other things" if isinstance(value, list) else _kind(value)
    raise UnreadableError("type", f"{key!r} holds {kind}, not a string or a list of strings")


def _kind(value: object) -> str:
    """Returns what JSON calls this, with its article; columns of Parquet may hold other things."""
    inner = value.get("bytes") if isinstance(value, dict) else value  # as `datasets` keeps images
    if isinstance(inner, bytes):
        return "bytes, such as those of an image, which tokenize-images reads and others do not"
    return _JSON_KINDS.get(type(value), f"a {type(value).__name__}")
