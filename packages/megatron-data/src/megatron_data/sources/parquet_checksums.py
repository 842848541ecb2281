"""Whether the pages of a Parquet file have checksums.

A page begins with a header in Thrift's compact protocol, whose fields 1 to 3 are integers (the kind
of page, its bytes unpacked and packed) and whose field 4, which may be absent, is the CRC-32 of
what follows. Source: `PageHeader` in apache/parquet-format, `src/main/thrift/parquet.thrift`.
"""

from collections.abc import Sequence
from typing import Any, BinaryIO

_NEXT_INTEGER = 0x15  # a field behind the one before, of type i32
_HEADER_BYTES = 32  # four integers take at most 24


def has_page_checksums(file: BinaryIO, metadata: Any, columns: Sequence[str]) -> bool:
    """Returns whether the first page of every column that is read has a checksum.

    Writers give all pages one or none. A file without rows has no page to lack one.

    Args:
        file: open for reading; its position is kept.
        metadata: `pyarrow.parquet.FileMetaData`.
        columns: names of columns at the top level.
    """
    place = file.tell()
    try:
        return all(_has_checksum(file, start) for start in _first_pages(metadata, columns))
    finally:
        file.seek(place)


def _first_pages(metadata: Any, columns: Sequence[str]) -> list[int]:
    """Returns where the first page of each column lies in the first row group."""
    if not metadata.num_row_groups:
        return []
    group = metadata.row_group(0)
    chunks = [group.column(number) for number in range(group.num_columns)]
    return [
        chunk.dictionary_page_offset or chunk.data_page_offset
        for chunk in chunks
        if chunk.path_in_schema.split(".")[0] in columns
    ]


def _has_checksum(file: BinaryIO, start: int) -> bool:
    file.seek(start)
    header, place = file.read(_HEADER_BYTES), 0
    for _ in range(3):
        if header[place : place + 1] != bytes([_NEXT_INTEGER]):
            return False
        place += 1
        while place < len(header) and header[place] & 0x80:
            place += 1
        place += 1
    return header[place : place + 1] == bytes([_NEXT_INTEGER])
