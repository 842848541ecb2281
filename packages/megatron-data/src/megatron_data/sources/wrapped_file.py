"""A file that is read by way of another object, which sees all that is read."""

import io
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class WrappedFile(io.RawIOBase):
    """Bytes of a file, which is closed with it; subclasses see them in `_read`.

    Args:
        file: that is read.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def _read(self, size: int) -> bytes:
        """Returns the next bytes, at most `size`; none at the end."""
        return self._file.read(size)

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        """Fills a buffer, or less of it at the end; returns the bytes read."""
        view = memoryview(buffer).cast("B")
        data = self._read(len(view))
        view[: len(data)] = data
        return len(data)

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """If the file is."""
        return self._file.seekable()

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Goes elsewhere in the file; what is passed over is not seen."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Returns where the file stands, in bytes."""
        return self._file.tell()

    def close(self) -> None:
        """Closes the file, too."""
        self._file.close()
        super().close()
