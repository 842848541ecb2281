"""Reads files as streams of uncompressed bytes; hashes and counts the stored bytes."""

import bz2
import gzip
import hashlib
import io
import zlib
from pathlib import PurePosixPath
from types import ModuleType
from typing import TYPE_CHECKING, BinaryIO, Protocol, Self

from megatron_data.errors import DataError
from megatron_data.sources.storage import open_file
from megatron_data.sources.wrapped_file import WrappedFile

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

COMPRESSED_SUFFIXES = (".gz", ".bz2", ".zst")
"""Suffixes of compressed files."""

_STEP = 1 << 18
_MAGIC, _SKIPPABLE = b"\x28\xb5\x2f\xfd", 0x184D2A50  # magic numbers of frames of zstandard
_BLOCK_BYTES = 1 << 17  # largest size of a block of zstandard, compressed or not
_BLOCKS = 8  # blocks decompressed together
_REPEATED = 1  # type of a block that repeats one byte


def split_suffix(path: str) -> tuple[str, str]:
    """Returns the suffixes of content and compression of a name, such as `.txt` and `.gz`."""
    name = PurePosixPath(path)
    compression = name.suffix.lower()
    if compression not in COMPRESSED_SUFFIXES:
        return compression, ""
    return PurePosixPath(name.stem).suffix.lower(), compression


class Stream:
    """A file as a stream of uncompressed bytes.

    Args:
        path: Local path or URL; its suffix determines the compression.

    Raises:
        DataError: The file is `.zst` and zstandard is not installed.

    Attributes:
        ended: Whether there is no more to read: the end of the file, or damage.
        damage: Why the rest cannot be decompressed and what to do, or None. All data before the
            damage has been returned.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._compression = split_suffix(path)[1]
        if self._compression == ".zst":
            _zstandard(path)
        self._raw = _Hashed(open_file(path))
        self._file = _decompressor(self._raw, self._compression)
        self.ended = False
        self.damage: str | None = None

    @property
    def stored(self) -> int:
        """Bytes of the file read so far, compressed if the file is."""
        return self._raw.bytes

    def read(self, size: int) -> bytes:
        """Returns `size` bytes; fewer only at the end."""
        parts: list[bytes] = []
        while size > 0 and not self.ended:
            data = self._next(min(size, _STEP))
            self.ended = not data
            parts.append(data)
            size -= len(data)
        return b"".join(parts)

    def skip(self, size: int) -> None:
        """Skips bytes."""
        if not self._compression:
            self._file.seek(size, io.SEEK_CUR)
            return
        while size > 0 and not self.ended:
            size -= len(self.read(min(size, _STEP)))

    def sha256(self) -> str:
        """Reads the rest of the file and returns its digest, of the compressed bytes if it is."""
        while self._raw.read(_STEP):
            pass
        return self._raw.digest.hexdigest()

    def _next(self, size: int) -> bytes:
        try:
            return self._file.read1(size)
        except OSError as error:
            if error.errno is not None:  # an error of the disk, not of the content
                raise
            reason = str(error)
        except (EOFError, zlib.error) as error:
            reason = str(error)
        self.damage = f"it is damaged or truncated ({reason}), the rest is lost; copy it again"
        return b""

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        self._raw.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Reader(Protocol):
    """A decompressor; `read1` reads the file below at most once and returns up to `size` bytes."""

    def read1(self, size: int = ..., /) -> bytes: ...

    def seek(self, offset: int, whence: int = ..., /) -> int: ...

    def close(self) -> None: ...


class _Hashed(WrappedFile):
    """A file that counts and hashes the bytes read."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.bytes = 0
        self.digest = hashlib.sha256()

    def _read(self, size: int) -> bytes:
        data = super()._read(size)
        self.digest.update(data)
        self.bytes += len(data)
        return data


class _Zstandard(io.RawIOBase):
    """Decompresses frames of zstandard; an incomplete last frame is an error.

    The stream reader of the package ends silently at a truncated file, and its other readers
    decompress their whole input at once, which may be 2 MB from a few bytes. So frames are
    decompressed block by block, at most 128 KiB each (RFC 8878, section 3.1.1).
    """

    def __init__(self, raw: io.RawIOBase, path: str) -> None:
        self._module = _zstandard(path)
        self._source = io.BufferedReader(raw, _STEP)
        self._ready = memoryview(b"")
        self._frame = self._module.ZstdDecompressor().decompressobj()
        self._inside = self._checksum = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        view = memoryview(buffer).cast("B")
        while not self._ready and self._fill():
            pass
        size = min(len(view), len(self._ready))
        view[:size], self._ready = self._ready[:size], self._ready[size:]
        return size

    def _fill(self) -> bool:
        """Decompresses the next few blocks; returns False at the end."""
        parts = self._blocks() if self._inside else [self._header()]
        if not any(parts):
            return False
        self._ready = memoryview(b"")  # release the memory of the last blocks first
        try:
            self._ready = memoryview(self._frame.decompress(b"".join(parts)))
        except self._module.ZstdError as error:
            raise EOFError(str(error)) from None
        if not self._inside:
            self._frame = self._module.ZstdDecompressor().decompressobj()
        return True

    def _header(self) -> bytes:
        """Returns the header of the next frame with content; empty at the end of the file."""
        while magic := self._source.read(4):
            if len(magic) < len(_MAGIC):
                raise EOFError("the last frame is incomplete")
            if int.from_bytes(magic, "little") & ~0xF == _SKIPPABLE:
                left = int.from_bytes(self._exactly(4), "little")
                while left:
                    left -= len(self._exactly(min(left, _STEP)))
                continue
            if magic != _MAGIC:
                raise EOFError("a frame of zstandard is expected")
            (descriptor,) = self._exactly(1)
            single, self._checksum = bool(descriptor & 0x20), bool(descriptor & 0x04)
            size = (1 if single else 0, 2, 4, 8)[descriptor >> 6]
            rest = (0 if single else 1) + (0, 1, 2, 4)[descriptor & 0x03] + size
            self._inside = True
            return magic + bytes([descriptor]) + self._exactly(rest)
        return b""

    def _blocks(self) -> list[bytes]:
        """Returns the next few blocks; after the last one of the frame, also its checksum."""
        parts = []
        for _ in range(_BLOCKS):
            header = self._exactly(3)
            described = int.from_bytes(header, "little")
            last, kind, size = described & 1, described >> 1 & 3, described >> 3
            if size > _BLOCK_BYTES:
                raise EOFError(f"a block has {size:,} bytes, more than zstandard allows")
            parts += [header, self._exactly(1 if kind == _REPEATED else size)]
            if last:
                parts.append(self._exactly(4) if self._checksum else b"")
                self._inside = False
                break
        return parts

    def _exactly(self, size: int) -> bytes:
        data = self._source.read(size)
        if len(data) < size:
            raise EOFError("the last frame is incomplete")
        return data


def _decompressor(raw: _Hashed, compression: str) -> _Reader:
    if compression == ".zst":
        return io.BufferedReader(_Zstandard(raw, compression), _STEP)
    buffered = io.BufferedReader(raw, _STEP)
    if compression == ".gz":
        return gzip.GzipFile(fileobj=buffered, mode="rb")
    if compression == ".bz2":
        return bz2.BZ2File(buffered)
    return buffered


def _zstandard(path: str) -> ModuleType:
    try:
        import zstandard
    except ImportError:
        raise DataError(
            f"{path}: a .zst file needs zstandard; pip install 'megatron-data[zstd]'"
        ) from None
    return zstandard
