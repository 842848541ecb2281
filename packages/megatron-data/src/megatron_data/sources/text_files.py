"""Text files, each of which is one document."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megatron_data.errors import DataError
from megatron_data.sources.protocol import (
    CHUNK_BYTES,
    Fault,
    Item,
    Row,
    Span,
    UnreadableError,
    check_reread,
    too_long,
)
from megatron_data.sources.storage import relative_path, stat
from megatron_data.sources.streams import Stream

MOST_FILES = 1000
"""Largest number of files of a chunk, because empty files do not add to its size."""

_MARK = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class TextChunk(NamedTuple):
    """Complete text files.

    Attributes:
        first: Number of the first file in the source, from 1.
        files: Path of each file with its content or a fault.
        stored: Bytes of the files, compressed if they are.
    """

    first: int
    files: tuple[tuple[str, bytes | Fault], ...]
    stored: int

    @property
    def span(self) -> Span:
        """The range of files."""
        return Span(0, 0, self.first, len(self.files))

    @property
    def digest(self) -> str:
        """SHA-256 of the digests of the files."""
        digest = hashlib.sha256()
        for _, data in self.files:
            content = data.reason.encode() if isinstance(data, Fault) else data
            digest.update(hashlib.sha256(content).digest())
        return digest.hexdigest()

    def items(self, keys: Sequence[str], max_bytes: int | None = None) -> Iterator[Item | Fault]:
        """Yields each file as a document, with the same text for every key."""
        for number, (path, data) in enumerate(self.files, start=self.first):
            if isinstance(data, Fault):
                yield data
                continue
            try:
                texts = [[_decoded(data)] for _ in keys]
            except UnreadableError as error:
                yield _fault(path, error, len(data))
            else:
                yield Item(number, None, len(data), texts)

    def fault(self, item: Item | Row, kind: str, reason: str) -> Fault:
        """Returns a fault with the file of an item."""
        path = self.files[item.number - self.first][0]
        return _fault(path, UnreadableError(kind, reason), item.size)


class TextFiles:
    """The text files of a folder, or one file; its record is complete after all chunks were read.

    Args:
        path: The file or folder.
        files: Paths of the files in the order of the corpus.
    """

    def __init__(self, path: str, files: Sequence[str]) -> None:
        self.path = path
        self.files = files
        self.size = sum(stat(file).size for file in files)
        self._bytes = 0
        self._sha256 = ""

    def chunks(
        self, chunk_bytes: int = CHUNK_BYTES, max_bytes: int | None = None
    ) -> Iterator[TextChunk]:
        """Yields chunks of about `chunk_bytes`; a larger file gives a larger chunk."""
        digest = hashlib.sha256()
        self._bytes = size = stored = 0
        group: list[tuple[str, bytes | Fault]] = []
        for number, path in enumerate(self.files, start=1):
            with Stream(path) as stream:
                data = _content(stream, max_bytes)
                digest.update(self._digest_of(path, stream.sha256()))
                self._bytes += stream.stored
                stored += stream.stored
            group.append((path, data))
            size += 0 if isinstance(data, Fault) else len(data)
            if size >= chunk_bytes or len(group) == MOST_FILES or number == len(self.files):
                yield TextChunk(number - len(group) + 1, tuple(group), stored)
                group, size, stored = [], 0, 0
        self._sha256 = digest.hexdigest()

    def chunk_at(self, span: Span, max_bytes: int | None = None) -> TextChunk:
        """Reads some files again."""
        files = self.files[span.first - 1 :][: span.units]
        if len(files) != span.units:
            raise DataError(
                f"{self.path} has {len(self.files):,} files, fewer than before; it was changed"
            )
        content = []
        size = 0
        for path in files:
            with Stream(path) as stream:
                data = _content(stream, max_bytes)
            size += 0 if isinstance(data, Fault) else len(data)
            check_reread(size, max_bytes)
            content.append((path, data))
        return TextChunk(span.first, tuple(content), 0)

    def record(self) -> dict[str, Any]:
        """Returns the number of files, and their stored size and digest."""
        return {
            "path": self.path,
            "files": len(self.files),
            "bytes": self._bytes,
            "sha256": self._sha256,
        }

    def _digest_of(self, path: str, sha256: str) -> bytes:
        """Returns the data of a file in the digest: its line of `sha256sum` in the folder."""
        return sha256.encode() + b"  " + os.fsencode(relative_path(path, self.path)) + b"\n"


class TextFile(TextFiles):
    """A single text file; the digest is that of the file."""

    def __init__(self, path: str) -> None:
        super().__init__(path, (path,))
        self._own = ""

    def _digest_of(self, path: str, sha256: str) -> bytes:
        self._own = sha256
        return b""

    def record(self) -> dict[str, Any]:
        """Returns the stored size and digest of the file."""
        return super().record() | {"sha256": self._own}


def _content(stream: Stream, max_bytes: int | None) -> bytes | Fault:
    """Reads a file and returns its content or a fault; holds at most `max_bytes` in memory."""
    parts: list[bytes] = []
    size = 0
    while not stream.ended:
        data = stream.read(1 << 20)
        size += len(data)
        if max_bytes is None or size <= max_bytes:
            parts.append(data)
    if stream.damage is not None:
        return _fault(stream.path, UnreadableError("damaged", stream.damage), None)
    if max_bytes is not None and size > max_bytes:
        return _fault(stream.path, too_long(size, max_bytes), size)
    return b"".join(parts)


def _fault(path: str, error: UnreadableError, size: int | None) -> Fault:
    return Fault(path, error.kind, error.reason, path, None, 0, size)


def _decoded(data: bytes) -> str:
    """Decodes the text of a file, without its byte-order mark."""
    skipped = len(_MARK) if data.startswith(_MARK) else 0
    try:
        return data[skipped:].decode()
    except UnicodeDecodeError as wrong:
        at = skipped + wrong.start
        guess = "UTF-16" if data.startswith(_UTF16) else "LATIN1"
        raise UnreadableError(
            "encoding",
            f"byte {at:,}, 0x{data[at]:02x}, is not UTF-8; convert the file, such as with "
            f"iconv -f {guess} -t UTF-8",
        ) from None
