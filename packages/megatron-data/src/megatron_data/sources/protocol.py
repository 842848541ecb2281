"""What a source of documents is, whatever its kind."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

CHUNK_BYTES = 1 << 20
"""Size at which a source is cut into pieces; a longer document makes a longer piece."""

Document: TypeAlias = list[str]
"""The sentences of a document; one string where nobody told sentences apart."""


class Chunk(Protocol):
    """Whole documents of one source as the bytes read, so that another process can parse them."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def place(self) -> str:
        """Where the chunk stands, for errors about all of it."""

    def documents(self, keys: Sequence[str]) -> list[list[Document]]:
        """Return the documents under each key, in the order of the source.

        Raises:
            DataError: one that cannot be read, with file and place.
        """


class Source(Protocol):
    """One input as it was given.

    Attributes:
        path: as given.
        size: bytes that there were when it was opened.
    """

    path: str
    size: int

    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        """Return pieces of about `chunk_bytes`, read as they are asked for."""

    def record(self) -> dict[str, Any]:
        """Return what the manifest says of it; complete once all chunks were read."""
