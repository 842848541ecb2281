r"""Layout of the `.idx` file.

A dataset consists of two files. `PREFIX.bin` holds the tokens of all sequences, concatenated,
without a header. `PREFIX.idx` holds the beginning of each sequence and document, in little-endian:

    offset  type          field
    0       9 bytes       magic, b"MMIDIDX\x00\x00"
    9       uint64        version, 1
    17      uint8         code of the token type
    18      uint64        S, number of sequences
    26      uint64        D, number of document bounds, the leading 0 included
    34      int32[S]      sequence lengths in tokens
            int64[S]      sequence pointers: first byte of each sequence in the .bin
            int64[D]      document bounds: index of each first sequence, and S at the end
            int8[S]       modes, only in multimodal datasets (0 text, 1 image bytes)
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from megatron_data.errors import DataError

TokenType: TypeAlias = np.dtype[Any]

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
LARGEST_LENGTH = 2**31 - 1

DTYPES: dict[int, TokenType] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    """Returns `PREFIX.bin`. The suffix is appended; dots in the prefix are kept."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    """Returns `PREFIX.idx`. The suffix is appended; dots in the prefix are kept."""
    return Path(f"{os.fspath(prefix)}.idx")


def choose_dtype(vocab_size: int) -> TokenType:
    """Returns the token type for a vocabulary: uint16 below 65,500 entries, otherwise int32.

    This is the rule of Megatron's `preprocess_data.py`, so that files are equal. One of Megatron's
    loading paths assumes uint16 up to 65,536 entries and misreads the vocabularies in between. The
    readers of this package take the token type from the file.
    """
    return DTYPES[8] if vocab_size < 65_500 else DTYPES[4]


@dataclass(frozen=True)
class Header:
    """The first 34 bytes of an `.idx` file.

    Attributes:
        dtype: Token type, one of `DTYPES`.
        sequences: Number of sequences, S.
        bounds: Number of document bounds, D (documents + 1).
    """

    dtype: TokenType
    sequences: int
    bounds: int

    def pack(self) -> bytes:
        """Returns the header as bytes.

        Raises:
            DataError: The format does not support the token type.
        """
        code = next((code for code, dtype in DTYPES.items() if dtype == self.dtype), None)
        if code is None:
            known = ", ".join(str(dtype) for dtype in DTYPES.values())
            raise DataError(f"an indexed dataset cannot hold {self.dtype}; choose one of {known}")
        return HEADER.pack(MAGIC, VERSION, code, self.sequences, self.bounds)

    @classmethod
    def unpack(cls, data: bytes, path: Path | str) -> "Header":
        """Returns the header that `data` begins with. Errors name `path`.

        Raises:
            DataError: `data` is too short, or its magic, version or token type is unknown.
        """
        if data.startswith(OLD_MAGIC):
            raise DataError(
                f"{path} is in the format Megatron used before 2020 (TNTIDX); "
                "preprocess the text again"
            )
        if len(data) < HEADER.size:
            raise DataError(
                f"{path} has {len(data)} bytes, but an index has at least {HEADER.size}; "
                "it is truncated"
            )
        magic, version, code, sequences, bounds = HEADER.unpack(data[: HEADER.size])
        if magic != MAGIC:
            raise DataError(
                f"{path} is not the index of an indexed dataset: it begins with {magic!r}"
            )
        if version != VERSION:
            raise DataError(f"{path} has version {version}; this package reads version {VERSION}")
        if code not in DTYPES:
            raise DataError(
                f"{path} has token type {code}, but types are {min(DTYPES)} to {max(DTYPES)}; "
                "it is damaged or from a newer writer"
            )
        return cls(DTYPES[code], sequences, bounds)

    def index_bytes(self, multimodal: bool) -> int:
        """Returns the size of the whole `.idx` file in bytes."""
        return HEADER.size + 12 * self.sequences + 8 * self.bounds + self.sequences * multimodal
