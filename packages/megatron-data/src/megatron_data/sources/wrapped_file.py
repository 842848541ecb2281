"""A binary file that wraps another file, so that subclasses see all data read."""

import io
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class WrappedFile(io.RawIOBase):
    """Wraps a binary file, and closes it; subclasses override `_read`.

    Args:
        file: The wrapped file.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def _read(self, size: int) -> bytes:
        """Returns at most `size` bytes; an empty string at the end."""
        return self._file.read(size)

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        """Reads into a buffer; returns the number of bytes read."""
        view = memoryview(buffer).cast("B")
        data = self._read(len(view))
        view[: len(data)] = data
        return len(data)

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns whether the wrapped file is seekable."""
        return self._file.seekable()

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Moves to another offset; `_read` does not see the skipped data."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Returns the current offset in bytes."""
        return self._file.tell()

    def close(self) -> None:
        """Closes this file and the wrapped file."""
        self._file.close()
        super().close()
