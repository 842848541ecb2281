"""Parallel corpora: text files in which line i of each file is document i."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

import numpy as np

from megatron_data.errors import DataError
from megatron_data.sources.protocol import (
    CHUNK_BYTES,
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
from megatron_data.sources.storage import stat_regular
from megatron_data.sources.streams import Stream

_NEWLINE = b"\n"
_MARK = b"\xef\xbb\xbf"
_STEP = 1 << 18


class ParallelChunk(NamedTuple):
    """The same lines of every file.

    Attributes:
        paths: The files.
        line: Number of the first line, from 1.
        data: The lines of each file as bytes.
        stored: Bytes of the files read for the lines, compressed if the files are.
    """

    paths: tuple[str, ...]
    line: int
    data: tuple[bytes, ...]
    stored: int

    @property
    def span(self) -> Span:
        """The range of lines, without bytes, which differ between the files."""
        return Span(0, 0, self.line, len(_split(self.data[0])))

    @property
    def digest(self) -> str:
        """SHA-256 of the digests of the lines of each file."""
        digest = hashlib.sha256()
        for lines in self.data:
            digest.update(hashlib.sha256(lines).digest())
        return digest.hexdigest()

    def items(self, keys: Sequence[str], max_bytes: int | None = None) -> Iterator[Item | Fault]:
        """Yields for each line its texts in the order of the keys; texts may be empty."""
        rows = zip(*map(_split, self.data), strict=True)
        for number, row in enumerate(rows, start=self.line):
            texts: list[Document] = []
            for path, line in zip(self.paths, row, strict=True):
                try:
                    texts.append([_text(line, number, max_bytes)])
                except UnreadableError as error:
                    location, size = f"{path}:{number}", None if error.kind == "long" else len(line)
                    yield Fault(location, error.kind, error.reason, path, number, None, size)
                    break
            else:
                yield Item(number, None, sum(map(len, row)), texts)

    def fault(self, item: Item | Row, kind: str, reason: str) -> Fault:
        """Returns a fault with the files and line of an item."""
        path = joined(self.paths)
        return Fault(f"{path}:{item.number}", kind, reason, path, item.number, None, item.size)


class ParallelLines:
    """Files in which line i of each is document i; lines end with LF or CR LF only.

    Args:
        paths: One file per key: local paths or URLs, whose suffixes determine the compression.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = tuple(paths)
        self.path = joined(self._paths)
        self.size = sum(stat_regular(path).size for path in self._paths)
        self._lines = 0
        self._files: list[dict[str, Any]] = []

    def chunks(
        self, chunk_bytes: int = CHUNK_BYTES, max_bytes: int | None = None
    ) -> Iterator[ParallelChunk]:
        """Yields chunks of about `chunk_bytes` in all files; a longer line gives a larger chunk.

        Counts the lines of all files before the first chunk. A chunk holds only the beginning of a
        line larger than `max_bytes`, which becomes a fault.

        Raises:
            DataError: The files have different numbers of lines, or one is damaged, after which the
                lines cannot be matched.
        """
        self._lines = self._count()
        with ExitStack() as stack:
            files = [stack.enter_context(_File(path, max_bytes)) for path in self._paths]
            line, before = 1, 0
            while line <= self._lines:
                share = max(chunk_bytes // len(files), 1)
                ahead = min(file.lines_within(share) for file in files)
                count = min(ahead, self._lines - line + 1)
                data = tuple(file.take(count) for file in files)
                stored = sum(file.stream.stored for file in files)
                yield ParallelChunk(self._paths, line, data, stored - before)
                line, before = line + count, stored
            self._files = [
                {"path": file.path, "sha256": file.stream.sha256(), "bytes": file.stream.stored}
                for file in files
            ]

    def chunk_at(self, span: Span, max_bytes: int | None = None) -> ParallelChunk:
        """Reads some lines again."""
        data = []
        for path in self._paths:
            with _File(path, max_bytes) as file:
                file.skip(span.first - 1)
                data.append(file.take(span.units, reread=True))
        return ParallelChunk(self._paths, span.first, tuple(data), 0)

    def record(self) -> dict[str, Any]:
        """Returns the number of lines, and the stored size and digest of each file."""
        return {
            "path": self.path,
            "bytes": sum(file["bytes"] for file in self._files),
            "lines": self._lines,
            "parallel": self._files,
        }

    def _count(self) -> int:
        counts = {path: _count_lines(path) for path in self._paths}
        if len(set(counts.values())) > 1:
            line_counts = ", ".join(f"{path} has {count:,} lines" for path, count in counts.items())
            raise DataError(f"{line_counts}; parallel files need the same number of lines")
        return next(iter(counts.values()))


class _File:
    """Reads lines of a file by their number; truncates lines that are too long.

    Args:
        path: Local path or URL.
        max_bytes: Largest size of a line in bytes; one byte more is kept of a longer line. None for
            no limit.
    """

    def __init__(self, path: str, max_bytes: int | None) -> None:
        self.path = path
        self.stream = Stream(path)
        self._max_line_bytes = max_bytes
        self._open = 0  # bytes read of the current line
        self._rest = b""

    def _read(self, size: int) -> bytes:
        """Returns the next bytes without the excess of lines that are too long."""
        data = self.stream.read(size)
        if self._max_line_bytes is None or self._open + len(data) <= self._max_line_bytes:
            last = data.rfind(_NEWLINE)
            self._open = len(data) - last - 1 if last >= 0 else self._open + len(data)
            return data
        parts = []
        for line in data.split(_NEWLINE):
            parts.append(line[: max(self._max_line_bytes + 1 - self._open, 0)])
            before, self._open = self._open + len(line), 0
        self._open = before
        return _NEWLINE.join(parts)

    def lines_within(self, size: int) -> int:
        """Returns the number of lines that end in the next `size` bytes; at least 1."""
        if len(self._rest) < size:
            self._rest += self._read(size - len(self._rest))
        if self.stream.ended and len(self._rest) <= size:
            return max(len(_split(self._rest)), 1)
        return max(self._rest.count(_NEWLINE, 0, size), 1)

    def take(self, count: int, reread: bool = False) -> bytes:
        """Returns the next lines.

        Raises:
            DataError: The file has fewer lines than before, or `reread` is set and the lines are
                larger than a chunk can be.
        """
        parts, ends, size = [self._rest], self._rest.count(_NEWLINE), len(self._rest)
        while ends < count and not self.stream.ended:
            parts.append(self._read(_STEP))
            ends += parts[-1].count(_NEWLINE)
            size += len(parts[-1])
            if reread:
                check_reread(size, self._max_line_bytes)
        data = b"".join(parts)
        if ends >= count:
            at = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE[0])[count - 1] + 1
            data, self._rest = data[:at], data[at:]
        else:  # the last line has no newline
            self._rest = b""
            if len(_split(data)) != count:
                raise DataError(f"{self.path} has fewer lines than before; it was changed")
        return data

    def skip(self, count: int) -> None:
        """Skips lines from the beginning of the file."""
        while count > 0 and not self.stream.ended:
            data = self._read(_STEP)
            if (ends := data.count(_NEWLINE)) >= count:
                at = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE[0])[count - 1] + 1
                self._rest = data[at:]
            count -= ends

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stream.close()


def joined(paths: Sequence[str]) -> str:
    """Returns a common name of several files."""
    return " + ".join(paths)


def _count_lines(path: str) -> int:
    count, last = 0, _NEWLINE
    with Stream(path) as stream:
        while data := stream.read(_STEP):
            count += data.count(_NEWLINE)
            last = data[-1:]
        if stream.damage is not None:
            raise DataError(f"{path}: {stream.damage}")
    return count + (last != _NEWLINE)


def _split(data: bytes) -> list[bytes]:
    lines = data.split(_NEWLINE)
    return lines if lines[-1] else lines[:-1]


def _text(line: bytes, number: int, max_bytes: int | None) -> str:
    """Returns a line as text, without its line end and without a byte-order mark."""
    if max_bytes is not None and len(line) > max_bytes:
        raise too_long(None, max_bytes)
    line = line.removesuffix(b"\r")
    try:
        return (line.removeprefix(_MARK) if number == 1 else line).decode()
    except UnicodeDecodeError as wrong:
        raise not_utf8(wrong) from None
