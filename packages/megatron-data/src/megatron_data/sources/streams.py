"""The bytes of a file, unpacked, hashed and counted as they are read."""

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
_MAGIC, _SKIPPABLE = b"\x28\xb5\x2f\xfd", 0x184D2A50  # what a frame of zstandard begins with
_BLOCK_BYTES = 1 << 17  # of a block of zstandard, unpacked or not
_BLOCKS = 8  # that are unpacked together
_REPEATED = 1  # the kind of a block that is one byte, and how often


def split_suffix(path: str) -> tuple[str, str]:
    """Returns what kind of content a name promises, and how it is packed: `.txt`, `.gz`."""
    name = PurePosixPath(path)
    packed = name.suffix.lower()
    if packed not in COMPRESSED_SUFFIXES:
        return packed, ""
    return PurePosixPath(name.stem).suffix.lower(), packed


class Stream:
    """A file as a stream of unpacked bytes.

    Args:
        path: a local path or a URL; its suffix says how it is packed.

    Raises:
        DataError: `.zst` without the package for it.

    Attributes:
        ended: there is no more to read: the end, or damage.
        damage: why it cannot be unpacked any further, and what to do; else None. All that could
            be unpacked has been returned before.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._packed = split_suffix(path)[1]
        if self._packed == ".zst":
            _zstandard(path)
        self._raw = _Hashed(open_file(path))
        self._file = _unpacked(self._raw, self._packed)
        self.ended = False
        self.damage: str | None = None

    @property
    def stored(self) -> int:
        """Bytes read of the file as it lies."""
        return self._raw.bytes

    def read(self, size: int) -> bytes:
        """Returns `size` bytes, fewer only where it ends."""
        parts: list[bytes] = []
        while size > 0 and not self.ended:
            data = self._next(min(size, _STEP))
            self.ended = not data
            parts.append(data)
            size -= len(data)
        return b"".join(parts)

    def skip(self, size: int) -> None:
        """Passes over bytes."""
        if not self._packed:
            self._file.seek(size, io.SEEK_CUR)
            return
        while size > 0 and not self.ended:
            size -= len(self.read(min(size, _STEP)))

    def sha256(self) -> str:
        """Reads what is left, and returns the digest of the file as it lies."""
        while self._raw.read(_STEP):
            pass
        return self._raw.digest.hexdigest()

    def _next(self, size: int) -> bytes:
        try:
            return self._file.read1(size)
        except OSError as error:
            if error.errno is not None:  # the disk, not the content
                raise
            reason = str(error)
        except (EOFError, zlib.error) as error:
            reason = str(error)
        self.damage = f"it is damaged or cut short ({reason}), the rest is lost; copy it again"
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
    """What unpacks: one read of what lies below gives up to `size` bytes."""

    def read1(self, size: int = ..., /) -> bytes: ...

    def seek(self, offset: int, whence: int = ..., /) -> int: ...

    def close(self) -> None: ...


class _Hashed(WrappedFile):
    """A file that counts and hashes what is read of it."""

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
    """Frames of zstandard, one after the other; a last one that is not whole is an error.

    The stream reader of the package ends in silence where a file was cut short, and its other
    readers make all at once of what they are given, which may be 2 MB of a few bytes. So the frame
    is given block by block, of which each makes 128 KiB at most (RFC 8878, section 3.1.1).
    """

    def __init__(self, raw: io.RawIOBase, path: str) -> None:
        self._module = _zstandard(path)
        self._packed = io.BufferedReader(raw, _STEP)
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
        """Unpacks a little more; False at the end."""
        parts = self._blocks() if self._inside else [self._header()]
        if not any(parts):
            return False
        self._ready = memoryview(b"")  # let go of the last before the next
        try:
            self._ready = memoryview(self._frame.decompress(b"".join(parts)))
        except self._module.ZstdError as error:
            raise EOFError(str(error)) from None
        if not self._inside:
            self._frame = self._module.ZstdDecompressor().decompressobj()
        return True

    def _header(self) -> bytes:
        """Returns the header of the next frame with contents; empty at the end of the file."""
        while magic := self._packed.read(4):
            if len(magic) < len(_MAGIC):
                raise EOFError("the last frame is not whole")
            if int.from_bytes(magic, "little") & ~0xF == _SKIPPABLE:
                left = int.from_bytes(self._exactly(4), "little")
                while left:
                    left -= len(self._exactly(min(left, _STEP)))
                continue
            if magic != _MAGIC:
                raise EOFError("no frame of zstandard begins where one should")
            (descriptor,) = self._exactly(1)
            single, self._checksum = bool(descriptor & 0x20), bool(descriptor & 0x04)
            size = (1 if single else 0, 2, 4, 8)[descriptor >> 6]
            rest = (0 if single else 1) + (0, 1, 2, 4)[descriptor & 0x03] + size
            self._inside = True
            return magic + bytes([descriptor]) + self._exactly(rest)
        return b""

    def _blocks(self) -> list[bytes]:
        """Returns the next few blocks, and behind the last one of the frame its checksum."""
        parts = []
        for _ in range(_BLOCKS):
            header = self._exactly(3)
            described = int.from_bytes(header, "little")
            last, kind, size = described & 1, described >> 1 & 3, described >> 3
            if size > _BLOCK_BYTES:
                raise EOFError(f"a block of {size:,} bytes, more than a frame may have")
            parts += [header, self._exactly(1 if kind == _REPEATED else size)]
            if last:
                parts.append(self._exactly(4) if self._checksum else b"")
                self._inside = False
                break
        return parts

    def _exactly(self, size: int) -> bytes:
        data = self._packed.read(size)
        if len(data) < size:
            raise EOFError("the last frame is not whole")
        return data


def _unpacked(raw: _Hashed, packed: str) -> _Reader:
    if packed == ".zst":
        return io.BufferedReader(_Zstandard(raw, packed), _STEP)
    buffered = io.BufferedReader(raw, _STEP)
    if packed == ".gz":
        return gzip.GzipFile(fileobj=buffered, mode="rb")
    if packed == ".bz2":
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
