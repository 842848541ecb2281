r"""Layout of the `.idx` file and the rules that go with it.

A dataset is two files. `PREFIX.bin` is the tokens of all sequences, one after the other, without
a header. `PREFIX.idx`, little-endian, says where each sequence and each document begins:

    offset  type          field
    0       9 bytes       magic, b"MMIDIDX\x00\x00"
    9       uint64        version, 1
    17      uint8         code of the token type
    18      uint64        S, number of sequences
    26      uint64        D, number of document bounds, the leading 0 included
    34      int32[S]      sequence lengths in tokens
            int64[S]      sequence pointers: first byte of each sequence in the .bin
            int64[D]      document bounds: number of the first sequence, and S at the end
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
    """`PREFIX.bin`: the suffix is appended, dots in the prefix are kept."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    """`PREFIX.idx`: the suffix is appended, dots in the prefix are kept."""
    return Path(f"{os.fspath(prefix)}.idx")


def choose_dtype(vocab_size: int) -> TokenType:
    """Token type for a vocabulary: uint16 below 65,500 entries, int32 from there on.

    This is the rule of Megatron's `preprocess_data.py`, kept so that files come out equal. One
    of Megatron's loading paths assumes uint16 up to 65,536 entries instead and decodes the
    vocabularies in between wrongly; readers here take the type from the file, never from the
    vocabulary.
    """
    return DTYPES[8] if vocab_size < 65_500 else DTYPES[4]


@dataclass(frozen=True)
class Header:
    """The first 34 bytes of an `.idx` file.

    Attributes:
        dtype: token type, one of `DTYPES`.
        sequences: number of sequences, S.
        bounds: number of document bounds, D (documents + 1).
    """

    dtype: TokenType
    sequences: int
    bounds: int

    def pack(self) -> bytes:
        """Returns the header as bytes."""
        code = next((code for code, dtype in DTYPES.items() if dtype == self.dtype), None)
        if code is None:
            known = ", ".join(str(dtype) for dtype in DTYPES.values())
            raise DataError(f"an indexed dataset cannot hold {self.dtype}; choose one of {known}")
        return HEADER.pack(MAGIC, VERSION, code, self.sequences, self.bounds)

    @classmethod
    def unpack(cls, data: bytes, path: Path | str) -> "Header":
        """Reads a header, naming `path` in the error if it is not one.

        Raises:
            DataError: too short, foreign magic, unknown version or token type.
        """
        if data.startswith(OLD_MAGIC):
            raise DataError(
                f"{path} is in the format Megatron used before 2020 (TNTIDX); "
                "preprocess the text again"
            )
        if len(data) < HEADER.size:
            raise DataError(
                f"{path} has {len(data)} bytes, an index has at least {HEADER.size}; "
                "it was cut short"
            )
        magic, version, code, sequences, bounds = HEADER.unpack(data[: HEADER.size])
        if magic != MAGIC:
            raise DataError(f"{path} is not the index of an indexed dataset: it begins {magic!r}")
        if version != VERSION:
            raise DataError(f"{path} has version {version}, this package reads {VERSION}")
        if code not in DTYPES:
            raise DataError(
                f"{path} names token type {code}, known are {min(DTYPES)} to {max(DTYPES)}; "
                "it is damaged or from a newer writer"
            )
        return cls(DTYPES[code], sequences, bounds)

    def index_bytes(self, multimodal: bool) -> int:
        """Size of the whole `.idx` file."""
        return HEADER.size + 12 * self.sequences + 8 * self.bounds + self.sequences * multimodal
