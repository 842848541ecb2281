"""Digests of files by blocks, computed while bytes pass, checked for the blocks that are read."""

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

#: Bytes of a file that share one digest (the last block is shorter).
BLOCK_SIZE = 64 << 20
#: The digest: xxh3 of 128 bits. It finds damage; it is no defence against someone who forges.
ALGORITHM = "xxh3_128"


def digest(data: bytes | bytearray | memoryview) -> str:
    """Digest of one block, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


@dataclass(frozen=True)
class FileRecord:
    """What the manifest says of a file: its size in bytes and the digest of each block."""

    size: int
    blocks: tuple[str, ...]


class BlockWriter:
    """Writes to an open descriptor and digests what passes, block by block."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._hash = xxhash.xxh3_128()
        self._blocks: list[str] = []
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        """Appends ``data`` (one-dimensional, of bytes)."""
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
        """Returns size and digests of all that was written."""
        last = (self._hash.hexdigest(),) if self.size % BLOCK_SIZE else ()
        return FileRecord(self.size, (*self._blocks, *last))


def write_file(path: Path, data: bytes) -> FileRecord:
    """Writes a new file, synced, and returns its record."""
    with create_file(path) as descriptor:
        writer = BlockWriter(descriptor)
        writer.write(data)
    return writer.record()


def copy_file(source: Path, path: Path) -> FileRecord:
    """Copies a file to a new one, synced, and returns its record."""
    with os.fdopen(open_regular(source), "rb") as stream, create_file(path) as descriptor:
        writer = BlockWriter(descriptor)
        while part := stream.read(BLOCK_SIZE):
            writer.write(part)
    return writer.record()


class BlockReader:
    """Reads ranges of a file; each block that a range touches is checked before it is given out.

    Args:
        folder: of the checkpoint.
        name: of the file in it.
        record: what the manifest says of it.
        verify: compare digests; without it only the size is checked.

    Raises:
        CheckpointError: no regular file of the folder (`megatron_ckpt.paths`).
        CorruptCheckpointError: it has another size.
    """

    def __init__(self, folder: Path, name: str, record: FileRecord, *, verify: bool = True) -> None:
        self.path, self.record, self.verify = folder / name, record, verify
        self._kept: tuple[int, memoryview] = (-1, memoryview(b""))
        # Reused: memory that is new for every block costs more than the reading.
        self._buffer = self._scratch = bytearray()
        self._descriptor = open_file(folder, name)
        size = os.fstat(self._descriptor).st_size
        if size != record.size:
            self.close()
            raise CorruptCheckpointError(
                f"{self.path} has {size} bytes, the manifest says {record.size}: the file is torn"
            )

    def read_into(self, buffer: bytearray | memoryview, start: int) -> None:
        """Fills ``buffer`` with the bytes that begin at ``start``."""
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
        """Returns ``length`` bytes from ``start``, to be used before the next call.

        Within a block nothing is copied; `bytes_left_in_block` tells how far that reaches.
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
        """Bytes from ``start`` to the end of its block."""
        return BLOCK_SIZE - start % BLOCK_SIZE

    def block(self, index: int) -> memoryview:
        """Returns one checked block, to be used before the next call.

        The last one read is kept, so ranges in order cost one read.
        """
        if self._kept[0] != index:
            size = min(BLOCK_SIZE, self.record.size - index * BLOCK_SIZE)
            if not self._buffer:
                self._buffer = bytearray(min(BLOCK_SIZE, self.record.size))
            self._kept = (-1, memoryview(b""))
            data = memoryview(self._buffer)[:size]
            self._fill(data, index * BLOCK_SIZE)
            if digest(data) != self.record.blocks[index]:
                raise CorruptCheckpointError(
                    f"{self.path}: bytes {index * BLOCK_SIZE} to {index * BLOCK_SIZE + size} "
                    "changed since they were written (digest differs): load another iteration"
                )
            self._kept = (index, data)
        return self._kept[1]

    def check(self, progress: Callable[[int], object] = lambda count: None) -> None:
        """Checks every block; ``progress`` is given the bytes of each."""
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
