"""Checks of the counts and lengths in a GGUF file against the size of the file.

The package ``gguf`` trusts every count: a file of 49 bytes that declares a list of 10^12 numbers
keeps its reader busy for days. This module therefore walks the header once, without its content,
before the package reads it.

Format: docs/gguf.md of ggml. All numbers are little-endian.
"""

import math
import os
import struct
from pathlib import Path
from typing import BinaryIO

from megatron_ckpt.errors import CheckpointError
from megatron_ckpt.paths import open_regular

_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # type -> bytes
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4  # GGML_MAX_DIMS
#: Largest number of list elements in a file. Each takes the reader microseconds and a few hundred
#: bytes. A vocabulary of 256,000 tokens has about a million, with types, scores and merges.
_MOST_ELEMENTS = 1 << 21
_LONGEST_NAME = 1 << 16


def check_header(path: Path) -> None:
    """Refuses a GGUF file whose counts, lengths or shapes are impossible for its size.

    Byte order and version are left to the reader, which reports errors in them.

    Raises:
        CheckpointError: Names the first number that is too large, or the file ends within its
            header.
    """
    with os.fdopen(open_regular(path), "rb") as stream:
        _Walk(path, stream).run()


class _Walk:
    """One pass over the header of an open file."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self._path, self._stream = path, stream
        self._size = os.fstat(stream.fileno()).st_size
        self._elements = 0

    def run(self) -> None:
        """Checks the metadata and the descriptions of the tensors."""
        self._skip(4, "the magic number")
        if self._number("<I", "version") & 0xFFFF == 0:
            return  # the other byte order, which the reader refuses
        tensors, keys = self._number("<Q", "tensor count"), self._number("<Q", "metadata count")
        self._bound(tensors, 24, "tensors")
        self._bound(keys, 13, "metadata keys")
        for at in range(keys):
            self._string(f"metadata key {at}", _LONGEST_NAME)
            kind = self._number("<I", f"type of metadata key {at}")
            self._value(kind, f"metadata key {at}", inside=False)
        for at in range(tensors):
            self._tensor(f"tensor {at}")

    def _tensor(self, what: str) -> None:
        self._string(f"name of {what}", _LONGEST_NAME)
        dimensions = self._number("<I", f"dimensions of {what}")
        if dimensions > _MOST_DIMENSIONS:
            raise self._invalid(f"{what} has {dimensions} dims; the limit is {_MOST_DIMENSIONS}")
        shape = [self._number("<Q", f"shape of {what}") for _ in range(dimensions)]
        self._skip(12, f"type and offset of {what}")
        # The densest quantisation has about 256 elements in 50 bytes; 8 per byte is a safe bound.
        if math.prod(max(1, extent) for extent in shape) > 8 * self._size:
            raise self._invalid(f"{what} has shape {shape}, more than {self._size} bytes can hold")

    def _value(self, kind: int, what: str, *, inside: bool) -> None:
        if kind in _SCALARS:
            self._skip(_SCALARS[kind], what)
        elif kind == _STRING:
            self._string(what, self._size)
        elif kind == _ARRAY and not inside:
            self._array(what)
        else:
            raise self._invalid(f"{what} has type {kind}, which is not valid there")

    def _array(self, what: str) -> None:
        kind = self._number("<I", f"type of {what}")
        count = self._number("<Q", f"length of {what}")
        self._bound(count, _SCALARS.get(kind, 8), f"elements of {what}")
        self._elements += count
        if self._elements > _MOST_ELEMENTS:
            raise self._invalid(f"its lists up to {what} have more than {_MOST_ELEMENTS} elements")
        if kind in _SCALARS:
            self._skip(count * _SCALARS[kind], what)
            return
        for _ in range(count):
            self._value(kind, what, inside=True)

    def _string(self, what: str, longest: int) -> None:
        length = self._number("<Q", f"length of {what}")
        if length > longest:
            raise self._invalid(f"{what} has {length} bytes; the limit is {longest}")
        self._skip(length, what)

    def _number(self, form: str, what: str) -> int:
        data = self._stream.read(struct.calcsize(form))
        if len(data) < struct.calcsize(form):
            raise self._invalid(f"it ends within {what}")
        return int(struct.unpack(form, data)[0])

    def _skip(self, count: int, what: str) -> None:
        if self._stream.tell() + count > self._size:
            raise self._invalid(f"it ends within {what}")
        self._stream.seek(count, os.SEEK_CUR)

    def _bound(self, count: int, least: int, what: str) -> None:
        """Refuses more items than fit into the rest of the file at ``least`` bytes each."""
        rest = self._size - self._stream.tell()
        if count * least > rest:
            raise self._invalid(f"it declares {count} {what}, but only {rest} bytes follow")

    def _invalid(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged or not a GGUF file: {reason}")
