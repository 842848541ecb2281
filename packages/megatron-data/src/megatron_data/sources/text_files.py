"""Plain text files, each of which is one document."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DataError
from .protocol import CHUNK_BYTES, Document

MOST_FILES = 1000
"""Files in one piece at most: empty ones add nothing to its size."""

_MARK = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class TextChunk(NamedTuple):
    """Whole text files.

    Attributes:
        files: path and content of each.
    """

    files: tuple[tuple[str, bytes], ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(len(data) for _, data in self.files)

    @property
    def place(self) -> str:
        """The first file and the last."""
        first, last = self.files[0][0], self.files[-1][0]
        return first if first == last else f"{first} to {last}"

    def documents(self, keys: Sequence[str]) -> list[list[Document]]:
        """Return the files as documents of one text each, whatever the key.

        Raises:
            DataError: a file that is not UTF-8, with the byte.
        """
        texts = [[_decoded(path, data)] for path, data in self.files]
        return [texts for _ in keys]


class TextFiles:
    """The text files of a folder, or one file; bytes and digest are complete after all chunks.

    Args:
        path: the file, or the folder.
        files: paths of the files in the order of the corpus.
    """

    def __init__(self, path: str, files: Sequence[str]) -> None:
        self.path = path
        self._files = files
        self.size = sum(os.path.getsize(file) for file in files)  # noqa: PTH202
        self._bytes = 0
        self._sha256 = ""

    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[TextChunk]:
        """Files together up to about `chunk_bytes`; a longer one makes a longer piece."""
        digest = hashlib.sha256()
        self._bytes = size = 0
        together: list[tuple[str, bytes]] = []
        for path in self._files:
            data = Path(path).read_bytes()
            digest.update(self._digest_of(path, data))
            self._bytes += len(data)
            together.append((path, data))
            size += len(data)
            if size >= chunk_bytes or len(together) == MOST_FILES:
                yield TextChunk(tuple(together))
                together, size = [], 0
        if together:
            yield TextChunk(tuple(together))
        self._sha256 = digest.hexdigest()

    def record(self) -> dict[str, Any]:
        """Return number, size and digest of the files."""
        return {
            "path": self.path,
            "files": len(self._files),
            "bytes": self._bytes,
            "sha256": self._sha256,
        }

    def _digest_of(self, path: str, data: bytes) -> bytes:
        """Return what a file adds to the digest: itself, or its line of `sha256sum` in a folder."""
        if path == self.path:
            return data
        name = os.fsencode(os.path.relpath(path, self.path))
        return hashlib.sha256(data).hexdigest().encode() + b"  " + name + b"\n"


def _decoded(path: str, data: bytes) -> str:
    """Return the text of a file without its byte-order mark."""
    skipped = len(_MARK) if data.startswith(_MARK) else 0
    try:
        return data[skipped:].decode()
    except UnicodeDecodeError as wrong:
        at = skipped + wrong.start
        guess = "UTF-16" if data.startswith(_UTF16) else "LATIN1"
        raise DataError(
            f"{path}: byte {at:,}, 0x{data[at]:02x}, is not UTF-8; convert the file, such as with "
            f"iconv -f {guess} -t UTF-8"
        ) from None
