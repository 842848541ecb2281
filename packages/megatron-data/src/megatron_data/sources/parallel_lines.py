"""Parallel corpora: text files in which equal lines are one document in several languages."""

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
from megatron_data.sources.storage import stat
from megatron_data.sources.streams import Stream

_NEWLINE = b"\n"
_MARK = b"\xef\xbb\xbf"
_STEP = 1 << 18


class ParallelChunk(NamedTuple):
    """The same lines of every file.

    Attributes:
        paths: the files.
        line: number of the first line, from 1.
        data: the lines of each file as bytes.
        stored: bytes of the files, as they lie, that were read for them.
    """

    paths: tuple[str, ...]
    line: int
    data: tuple[bytes, ...]
    stored: int

    @property
    def span(self) -> Span:
        """The lines; the bytes differ from file to file."""
        return Span(0, 0, self.line, len(_split(self.data[0])))

    @property
    def digest(self) -> str:
        """SHA-256 of the digests of each file's lines."""
        digest = hashlib.sha256()
        for lines in self.data:
            digest.update(hashlib.sha256(lines).digest())
        return digest.hexdigest()

    def items(self, keys: Sequence[str], max_bytes: int | None = None) -> Iterator[Item | Fault]:
        """Line after line its text in each file, in the order of the keys; empty ones, too."""
        rows = zip(*map(_split, self.data), strict=True)
        for number, row in enumerate(rows, start=self.line):
            texts: list[Document] = []
            for path, line in zip(self.paths, row, strict=True):
                try:
                    texts.append([_text(line, number, max_bytes)])
                except UnreadableError as error:
                    place, size = f"{path}:{number}", None if error.kind == "long" else len(line)
                    yield Fault(place, error.kind, error.reason, path, number, None, size)
                    break
            else:
                yield Item(number, None, sum(map(len, row)), texts)

    def fault(self, item: Item | Row, kind: str, reason: str) -> Fault:
        """Names the files and the line."""
        path = joined(self.paths)
        return Fault(f"{path}:{item.number}", kind, reason, path, item.number, None, item.size)


class ParallelLines:
    """Files of which line i of each is document i; a line ends in LF or CR LF and nothing else.

    Args:
        paths: the files, one for each key: local paths or URLs, packed if their suffix says so.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = tuple(paths)
        self.path = joined(self._paths)
        found = [stat(path) for path in self._paths]
        self.size = sum(file.size for file in found)
        self.version = " ".join(file.version for file in found)
        self._lines = 0
        self._files: list[dict[str, Any]] = []

    def chunks(
        self, chunk_bytes: int = CHUNK_BYTES, max_bytes: int | None = None
    ) -> Iterator[ParallelChunk]:
        """Pieces of about `chunk_bytes` in all files together; a longer line makes a longer piece.

        The lines of all files are counted before the first piece. Of a line of more than
        `max_bytes` bytes the beginning stands in the piece, which names it.

        Raises:
            DataError: files of unequal numbers of lines, or one that is damaged: beyond the damage
                nobody knows which lines belong together.
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
        """Reads some lines anew."""
        data = []
        for path in self._paths:
            with _File(path, max_bytes) as file:
                file.skip(span.first - 1)
                data.append(file.take(span.units, reread=True))
        return ParallelChunk(self._paths, span.first, tuple(data), 0)

    def record(self) -> dict[str, Any]:
        """Returns number of lines, and size and digest of each file as it lies."""
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
            raise DataError(
                f"{line_counts}; line i of each is one document, so they must be as many"
            )
        return next(iter(counts.values()))


class _File:
    """Lines of one file, taken by their number; of those that are too long, the beginning.

    Args:
        path: local path or URL.
        max_bytes: bytes that a line may have; of a longer one, one more is kept. None for no limit.
    """

    def __init__(self, path: str, max_bytes: int | None) -> None:
        self.path = path
        self.stream = Stream(path)
        self._max_line_bytes = max_bytes
        self._open = 0  # bytes of the line that is being read
        self._rest = b""

    def _read(self, size: int) -> bytes:
        """Returns the next bytes without those that are too many."""
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
        """Returns how many lines end in the next `size` bytes; at least 1."""
        if len(self._rest) < size:
            self._rest += self._read(size - len(self._rest))
        if self.stream.ended and len(self._rest) <= size:
            return max(len(_split(self._rest)), 1)
        return max(self._rest.count(_NEWLINE, 0, size), 1)

    def take(self, count: int, reread: bool = False) -> bytes:
        """Returns the next lines.

        Raises:
            DataError: the file ends before; it had as many. Or `reread` and they are more than a
                piece holds.
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
        else:  # the last line lacks its newline
            self._rest = b""
            if len(_split(data)) != count:
                raise DataError(f"{self.path} has fewer lines than it had; it was changed")
        return data

    def skip(self, count: int) -> None:
        """Passes over lines from the beginning of the file."""
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
    """Returns what files that belong together are called."""
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
    """Returns a line as text, without its end, and without the byte-order mark of the file."""
    if max_bytes is not None and len(line) > max_bytes:
        raise too_long(None, max_bytes)
    line = line.removesuffix(b"\r")
    try:
        return (line.removeprefix(_MARK) if number == 1 else line).decode()
    except UnicodeDecodeError as wrong:
        raise not_utf8(wrong) from None
