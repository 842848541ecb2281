"""The interface of sources and of source chunks."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from megatron_data.errors import DataError

LARGEST_CHUNK = 1 << 24
"""Largest size of a source chunk of preprocessing in bytes, unless one document is larger."""

CHUNK_BYTES = 1 << 20
"""Default size of a source chunk in bytes; a larger document gives a larger chunk."""

MAX_DOCUMENT_BYTES = 32 << 20
"""Default limit of the size of a document in its source, in bytes.

A tokenizer that cannot split a text needs about 125 bytes of memory per byte of it, which is 4 GiB
at this limit. Without a limit, a megabyte of a compressed file could expand to a line of a
gigabyte.
"""

Document: TypeAlias = list[str]
"""The sentences of a document; a single string if it is not split."""


class Fault(NamedTuple):
    """An invalid document in a source.

    Attributes:
        location: The file and the line or row, with which an error message starts.
        kind: One of `KINDS`.
        reason: What is wrong and what to do.
        path: The file.
        number: Its line or row, from 1; None if unknown.
        offset: Its first byte in the uncompressed file, or None.
        size: Its size in bytes, or None if unknown.
    """

    location: str
    kind: str
    reason: str
    path: str
    number: int | None = None
    offset: int | None = None
    size: int | None = None

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}"


KINDS = {  # descriptions in the output of commands and in the quarantine file
    "encoding": "not UTF-8",
    "json": "not a JSON object",
    "key": "without the key",
    "type": "not text under the key",
    "message": "without a conversation",
    "template": "refused by the chat template",
    "long": "larger than the limit",
    "image": "without an image",
    "tokens": "refused by the tokenizer",
    "damaged": "damaged up to the end of the file",
}


class UnreadableError(Exception):
    """Raised for one invalid document; a chunk converts it to a `Fault`."""

    def __init__(self, kind: str, reason: str) -> None:
        self.kind, self.reason = kind, reason
        super().__init__(reason)


class Item(NamedTuple):
    """One document.

    Attributes:
        number: Its line, row or file, from 1.
        offset: Its first byte in the file, or None if the file has no lines.
        size: Its size in the file in bytes.
        texts: Its text for each key.
        image: The bytes of its image, if the source holds them.
    """

    number: int
    offset: int | None
    size: int
    texts: list[Document]
    image: bytes | None = None


class Row(NamedTuple):
    """One JSON object, or one row of a table.

    Attributes:
        number: Its line or row, from 1.
        offset: Its first byte in the file, or None if the file has no lines.
        size: Its size in bytes, in the file or as JSON.
        values: Values by key or column, without nulls of a table.
    """

    number: int
    offset: int | None
    size: int
    values: dict[str, Any]


class Span(NamedTuple):
    """The range of a source that a chunk holds.

    Attributes:
        offset: First byte in the uncompressed file; 0 for sources that are not indexed by bytes.
        size: Size in bytes; 0 for such sources.
        first: First line, row or file, from 1.
        units: Number of lines, rows or files.
    """

    offset: int
    size: int
    first: int
    units: int


class Chunk(Protocol):
    """Complete documents of a source as raw bytes, which another process parses.

    Attributes:
        stored: Bytes of the file read for it (compressed if the file is), for the progress bar.
    """

    @property
    def stored(self) -> int:
        """Bytes of the file read for this chunk, compressed if the file is."""

    @property
    def span(self) -> Span:
        """The range of the source."""

    @property
    def digest(self) -> str:
        """SHA-256 of the content, in hexadecimal digits."""

    def items(self, keys: Sequence[str], max_bytes: int | None) -> Iterator[Item | Fault]:
        """Yields the documents in order, with a fault for each invalid one.

        Args:
            keys: Keys of the texts; a document must have all of them.
            max_bytes: Largest size of a document in bytes; None for no limit.
        """

    def fault(self, item: Item | Row, kind: str, reason: str) -> Fault:
        """Returns a fault for an item of this chunk."""


@runtime_checkable
class SupportsImagePairs(Protocol):
    """A chunk that may hold the bytes of images, and not only their paths."""

    def pairs(self, keys: Sequence[str], max_bytes: int | None) -> Iterator[Item | Fault]:
        """Yields the items; the value of the last key may be the bytes of an image.

        Args:
            keys: Keys of the text and of the image.
            max_bytes: Largest size of the texts of an item in bytes; None for no limit.
        """


@runtime_checkable
class SupportsRows(Protocol):
    """A chunk of complete JSON objects or rows."""

    def rows(self, max_bytes: int | None) -> Iterator[Row | Fault]:
        """Yields the objects in order, with a fault for each invalid one.

        Args:
            max_bytes: Largest size of an object in bytes; None for no limit.
        """


class Source(Protocol):
    """One input.

    Attributes:
        path: The path as given.
        size: Size in bytes when it was opened.
    """

    path: str
    size: int

    def chunks(
        self, chunk_bytes: int = CHUNK_BYTES, max_bytes: int | None = None
    ) -> Iterator[Chunk]:
        """Yields chunks of about `chunk_bytes`, read lazily.

        Args:
            chunk_bytes: Size of a chunk in bytes; a larger document gives a larger chunk.
            max_bytes: Largest size of a document in bytes. A larger one becomes a fault and is not
                held in memory.
        """

    def chunk_at(self, span: Span, max_bytes: int | None = None) -> Chunk:
        """Reads one chunk again.

        Raises:
            DataError: It does not exist any more, or is larger than a chunk can be.
        """

    def record(self) -> dict[str, Any]:
        """Returns the record for the manifest; complete after all chunks were read."""


class BrokenChunk(NamedTuple):
    """A chunk with a single fault: a damaged rest of a file, or a document that is too large."""

    problem: Fault
    stored: int
    span: Span

    @property
    def digest(self) -> str:
        """An empty string, because there is no content."""
        return ""

    def items(self, keys: Sequence[str], max_bytes: int | None) -> Iterator[Item | Fault]:
        """Yields the fault."""
        yield self.problem

    def rows(self, max_bytes: int | None) -> Iterator[Row | Fault]:
        """Yields the fault."""
        yield self.problem

    def fault(self, item: Item | Row, kind: str, reason: str) -> Fault:
        """Returns the fault, because there are no items."""
        return self.problem


def not_utf8(wrong: UnicodeDecodeError) -> UnreadableError:
    """Returns the error for a line that is not UTF-8."""
    what = f"byte {wrong.start} of the line, 0x{wrong.object[wrong.start]:02x}, is not UTF-8"
    return UnreadableError("encoding", f"{what}; convert the file")


def too_long(size: int | None, max_bytes: int) -> UnreadableError:
    """Returns the error for a document above the limit; `size` is None if unknown."""
    what = "a document of" if size is None else f"a document of {size:,} bytes,"
    return UnreadableError("long", f"{what} more than --max-document-bytes {max_bytes:,}")


def check_reread(size: int, max_bytes: int | None) -> None:
    """Raises an error if a chunk to read again is larger than any chunk of preprocessing.

    Args:
        size: Size of the chunk in the manifest, or bytes read so far.
        max_bytes: Largest size of a document in bytes; None for no limit.

    Raises:
        DataError: The chunk is too large.
    """
    if max_bytes is not None and size > LARGEST_CHUNK + max_bytes:
        raise DataError(
            f"a chunk of {size:,} bytes or more, but documents have at most {max_bytes:,} "
            "(--max-document-bytes); give a larger limit"
        )
