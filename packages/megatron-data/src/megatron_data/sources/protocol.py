"""What a source of documents is, whatever its kind."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from megatron_data.errors import DataError

LARGEST_CHUNK = 1 << 24
"""Most bytes of whole documents that preprocessing reads together."""

CHUNK_BYTES = 1 << 20
"""Size at which a source is cut into pieces; a longer document makes a longer piece."""

MAX_DOCUMENT_BYTES = 32 << 20
"""Bytes that a document may have in its source unless the user says otherwise.

A tokenizer that cannot cut a text takes some 125 bytes of memory for each byte of it, which makes
4 GiB; and a megabyte of a compressed file may hold a line of a gigabyte.
"""

Document: TypeAlias = list[str]
"""The sentences of a document; one string where nobody told sentences apart."""


class Fault(NamedTuple):
    """Something that cannot be made a document.

    Attributes:
        place: where, as an error begins: the file and its line or row.
        kind: one of `KINDS`.
        reason: what is wrong with it and what to do.
        path: the file.
        number: its line or row, from 1; None where that is unknown.
        offset: its first byte in the file (unpacked, if it is compressed), or None.
        size: its bytes, or None where that is unknown.
    """

    place: str
    kind: str
    reason: str
    path: str
    number: int | None = None
    offset: int | None = None
    size: int | None = None

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


KINDS = {
    "encoding": "not UTF-8",
    "json": "not a JSON object",
    "key": "without the key",
    "type": "no text under the key",
    "message": "without a conversation",
    "template": "refused by the chat template",
    "long": "longer than asked for",
    "image": "without an image",
    "tokens": "refused by the tokenizer",
    "damaged": "damaged from there to the end of the file",
}


class UnreadableError(Exception):
    """Raised while one document is read; a chunk makes a `Fault` of it."""

    def __init__(self, kind: str, reason: str) -> None:
        self.kind, self.reason = kind, reason
        super().__init__(reason)


class Item(NamedTuple):
    """One document as it was read.

    Attributes:
        number: its line, row or file, from 1.
        offset: its first byte in the file, or None where files have no lines.
        size: its bytes there.
        texts: its text under each key.
        image: the image file that goes with it, where its source holds the bytes.
    """

    number: int
    offset: int | None
    size: int
    texts: list[Document]
    image: bytes | None = None


class Row(NamedTuple):
    """One JSON object, or row of a table, as it was read.

    Attributes:
        number: its line or row, from 1.
        offset: its first byte in the file, or None where files have no lines.
        size: its bytes there, or as JSON.
        values: by key or column; a row lacks what is null in it.
    """

    number: int
    offset: int | None
    size: int
    values: dict[str, Any]


class Span(NamedTuple):
    """The part of a source that a chunk holds.

    Attributes:
        offset: its first byte (unpacked, if the file is compressed); 0 where bytes do not count.
        size: bytes of it.
        first: its first line, row or file, from 1.
        units: how many of them it has.
    """

    offset: int
    size: int
    first: int
    units: int


class Chunk(Protocol):
    """Whole documents of one source as the bytes read, so that another process can parse them.

    Attributes:
        stored: bytes of the file, as it lies, that were read for it: what progress counts.
    """

    @property
    def stored(self) -> int:
        """Bytes of the file as it lies."""

    @property
    def span(self) -> Span:
        """Which part of the source this is."""

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the content."""

    def items(self, keys: Sequence[str], max_bytes: int | None) -> Iterator[Item | Fault]:
        """Returns the documents, and in their place what cannot be one.

        Args:
            keys: under which the texts are looked up; a document has all of them.
            max_bytes: bytes that a document may have; None for no limit.
        """

    def fault(self, item: Item | Row, kind: str, reason: str) -> Fault:
        """Returns what to say about an item that turned out to be none."""


@runtime_checkable
class SupportsImagePairs(Protocol):
    """A chunk that may hold images beside its texts, and not only their paths."""

    def pairs(self, keys: Sequence[str], max_bytes: int | None) -> Iterator[Item | Fault]:
        """Returns the items; the one under the last key may be the bytes of an image.

        Args:
            keys: of the text, and of the image.
            max_bytes: bytes that the texts of an item may have; None for no limit.
        """


@runtime_checkable
class SupportsRows(Protocol):
    """A chunk of whole objects, of which more than texts can be read."""

    def rows(self, max_bytes: int | None) -> Iterator[Row | Fault]:
        """Returns the objects, and in their place what is none.

        Args:
            max_bytes: bytes that one may have; None for no limit.
        """


class Source(Protocol):
    """One input as it was given.

    Attributes:
        path: as given.
        size: bytes that there were when it was opened.
        version: changes when the input does: sizes, and the times or tags of the storage.
    """

    path: str
    size: int
    version: str

    def chunks(
        self, chunk_bytes: int = CHUNK_BYTES, max_bytes: int | None = None
    ) -> Iterator[Chunk]:
        """Returns pieces of about `chunk_bytes`, read as they are asked for.

        Args:
            chunk_bytes: size at which to cut; a longer document makes a longer piece.
            max_bytes: bytes a document may have; a longer one is named, and not kept in memory.
        """

    def chunk_at(self, span: Span, max_bytes: int | None = None) -> Chunk:
        """Reads one piece anew.

        Raises:
            DataError: it is not there any more, or larger than pieces are.
        """

    def record(self) -> dict[str, Any]:
        """Returns what the manifest says of it; complete once all chunks were read."""


class BrokenChunk(NamedTuple):
    """What stands where a file cannot be read any further, or a document is too long to be kept."""

    problem: Fault
    stored: int
    span: Span

    @property
    def digest(self) -> str:
        """Nothing to be compared."""
        return ""

    def items(self, keys: Sequence[str], max_bytes: int | None) -> Iterator[Item | Fault]:
        """Returns the fault alone."""
        yield self.problem

    def rows(self, max_bytes: int | None) -> Iterator[Row | Fault]:
        """Returns the fault alone."""
        yield self.problem

    def fault(self, item: Item | Row, kind: str, reason: str) -> Fault:
        """Returns the fault; there is no item."""
        return self.problem


def not_utf8(wrong: UnicodeDecodeError) -> UnreadableError:
    """Returns the refusal of a line that cannot be decoded."""
    what = f"byte {wrong.start} of the line, 0x{wrong.object[wrong.start]:02x}, is not UTF-8"
    return UnreadableError("encoding", f"{what}; convert the file")


def too_long(size: int | None, max_bytes: int) -> UnreadableError:
    """Returns the refusal of a document of more bytes than asked for, so many if that is known."""
    what = "a document of" if size is None else f"a document of {size:,} bytes,"
    return UnreadableError("long", f"{what} more than --max-document-bytes {max_bytes:,}")


def check_reread(size: int, max_bytes: int | None) -> None:
    """Refuses to read a piece anew that is larger than any that sources are cut into.

    Args:
        size: bytes that a manifest says it has, or that were read of it.
        max_bytes: bytes that one document may have; None for no limit.

    Raises:
        DataError: it is.
    """
    if max_bytes is not None and size > LARGEST_CHUNK + max_bytes:
        raise DataError(
            f"a piece of {size:,} bytes or more, where documents have at most {max_bytes:,} "
            "(--max-document-bytes); give a larger limit to read it"
        )
