"""Finds out whether the pages of a Parquet file have checksums.

A page begins with a header in Thrift's compact protocol. Its fields 1 to 3 are integers (type of
the page, uncompressed and compressed size). Field 4 is optional: the CRC-32 of the data after the
header. Source: `PageHeader` in apache/parquet-format, `src/main/thrift/parquet.thrift`.
"""

from collections.abc import Sequence
from typing import Any, BinaryIO

_NEXT_INTEGER = 0x15  # header of the next field, of type i32
_HEADER_BYTES = 32  # four integers take at most 24


def has_page_checksums(file: BinaryIO, metadata: Any, columns: Sequence[str]) -> bool:
    """Returns whether the first page of each given column has a checksum.

    Writers add checksums to all pages or to none. Returns True for a file without rows.

    Args:
        file: The file, open for reading; its offset is restored.
        metadata: Metadata of the file, a `pyarrow.parquet.FileMetaData`.
        columns: Names of top-level columns.
    """
    offset = file.tell()
    try:
        return all(_has_checksum(file, start) for start in _first_pages(metadata, columns))
    finally:
        file.seek(offset)


def _first_pages(metadata: Any, columns: Sequence[str]) -> list[int]:
    """Returns the offset of the first page of each column in the first row group with rows."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    group = next((group for group in groups if group.num_rows), None)
    if group is None:
        return []
    chunks = [group.column(number) for number in range(group.num_columns)]
    return [
        chunk.dictionary_page_offset or chunk.data_page_offset
        for chunk in chunks
        if chunk.path_in_schema.split(".")[0] in columns
    ]


def _has_checksum(file: BinaryIO, start: int) -> bool:
    file.seek(start)
    header, at = file.read(_HEADER_BYTES), 0
    for _ in range(3):
        if header[at : at + 1] != bytes([_NEXT_INTEGER]):
            return False
        at += 1
        while at < len(header) and header[at] & 0x80:
            at += 1
        at += 1
    return header[at : at + 1] == bytes([_NEXT_INTEGER])
