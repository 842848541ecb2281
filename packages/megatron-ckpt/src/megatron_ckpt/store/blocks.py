"""Digests of files by blocks, computed while writing and checked for the blocks that are read."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash

from megatron_ckpt.errors import CorruptCheckpointError
from megatron_ckpt.paths import open_file, open_regular
from megatron_ckpt.store.durable import create_file, read_into, write_all

#: Bytes of a block, which has one digest. The last block of a file may be shorter.
BLOCK_SIZE = 64 << 20
#: The digest: xxh3 with 128 bits. It detects damage but not forgery.
ALGORITHM = "xxh3_128"


def digest(data: bytes | bytearray | memoryview) -> str:
    """Returns the digest of one block, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


@dataclass(frozen=True)
class FileRecord:
    """The size in bytes and the digests of the blocks of a file, as stored in the manifest."""

    size: int
    blocks: tuple[str, ...]


class BlockWriter:
    """Writes to an open descriptor and computes the digests of the blocks."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._hash = xxhash.xxh3_128()
        self._blocks: list[str] = []
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        """Appends ``data``, a one-dimensional buffer of bytes."""
        rest = memoryview(data)
        while rest:
            part = rest[: BLOCK_SIZE - self.size % BLOCK_SIZE]
            write_all(self._descriptor, part)
            self._hash.update(part)
            self.size += len(part)
            if self.size % BLOCK_SIZE == 0:
                self._blocks.append(self._hash.hexdigest())
                self._hash.reset()
            rest = rest[len(part) :]

    def record(self) -> FileRecord:
        """Returns the size and the digests of everything written."""
        last = (self._hash.hexdigest(),) if self.size % BLOCK_SIZE else ()
        return FileRecord(self.size, (*self._blocks, *last))


def write_file(path: Path, data: bytes) -> FileRecord:
    """Writes and syncs a new file, and returns its record."""
    with create_file(path) as descriptor:
        writer = BlockWriter(descriptor)
        writer.write(data)
    return writer.record()


def copy_file(source: Path, path: Path) -> FileRecord:
    """Copies a file to a new, synced file, and returns its record."""
    with os.fdopen(open_regular(source), "rb") as stream, create_file(path) as descriptor:
        writer = BlockWriter(descriptor)
        while part := stream.read(BLOCK_SIZE):
            writer.write(part)
    return writer.record()


class BlockReader:
    """Reads ranges of a file. Blocks are checked before their bytes are returned.

    Args:
        folder: The directory of the checkpoint.
        name: The name of the file in it.
        record: The record of the file in the manifest.
        verify: Whether to compare digests. If False, only the size is checked. Defaults to True.

    Raises:
        CheckpointError: The file is not a regular file in the folder (`megatron_ckpt.paths`).
        CorruptCheckpointError: The size of the file differs from the record.
    """

    def __init__(self, folder: Path, name: str, record: FileRecord, *, verify: bool = True) -> None:
        self.path, self.record, self.verify = folder / name, record, verify
        self._cached_block: tuple[int, memoryview] = (-1, memoryview(b""))
        # Reused, because a new allocation for every block takes longer than reading it.
        self._buffer = self._scratch = bytearray()
        self._descriptor = open_file(folder, name)
        size = os.fstat(self._descriptor).st_size
        if size != record.size:
            self.close()
            raise CorruptCheckpointError(
                f"{self.path} is torn: it has {size} bytes instead of {record.size} in the manifest"
            )

    def read_into(self, buffer: bytearray | memoryview, start: int) -> None:
        """Fills ``buffer`` with the bytes from ``start``."""
        rest = memoryview(buffer)
        if not self.verify:
            self._fill(rest, start)
            return
        while rest:
            index, within = divmod(start, BLOCK_SIZE)
            part = self.block(index)[within : within + len(rest)]
            rest[: len(part)] = part
            rest, start = rest[len(part) :], start + len(part)

    def view(self, start: int, length: int) -> memoryview:
        """Returns ``length`` bytes from ``start``. The buffer is valid until the next call.

        Ranges within one block are not copied; see `bytes_left_in_block`.
        """
        if self.verify and length <= self.bytes_left_in_block(start):
            within = start % BLOCK_SIZE
            return self.block(start // BLOCK_SIZE)[within : within + length]
        if len(self._scratch) < length:
            self._scratch = bytearray(length)
        part = memoryview(self._scratch)[:length]
        self.read_into(part, start)
        return part

    def bytes_left_in_block(self, start: int) -> int:
        """Returns the number of bytes from ``start`` to the end of its block."""
        return BLOCK_SIZE - start % BLOCK_SIZE

    def block(self, index: int) -> memoryview:
        """Returns one checked block. The buffer is valid until the next call.

        The last block is cached, so consecutive ranges within a block are read once.
        """
        if self._cached_block[0] != index:
            size = min(BLOCK_SIZE, self.record.size - index * BLOCK_SIZE)
            if not self._buffer:
                self._buffer = bytearray(min(BLOCK_SIZE, self.record.size))
            self._cached_block = (-1, memoryview(b""))
            data = memoryview(self._buffer)[:size]
            self._fill(data, index * BLOCK_SIZE)
            if digest(data) != self.record.blocks[index]:
                raise CorruptCheckpointError(
                    f"{self.path}: bytes {index * BLOCK_SIZE} to {index * BLOCK_SIZE + size} "
                    "changed since they were written (digest differs); load another iteration"
                )
            self._cached_block = (index, data)
        return self._cached_block[1]

    def check(self, progress: Callable[[int], object] = lambda count: None) -> None:
        """Checks every block; ``progress`` is called with the bytes of each."""
        for index in range(len(self.record.blocks)):
            progress(len(self.block(index)))

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)

    def _fill(self, buffer: memoryview, start: int) -> None:
        if not read_into(self._descriptor, buffer, start):
            raise CorruptCheckpointError(f"{self.path} became shorter while it was read")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
