"""Parquet files that are damaged, lack columns, or have pages of other kinds."""

import io
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron_data import DataError
from megatron_data.sources.parquet import Parquet
from megatron_data.sources.parquet_checksums import has_page_checksums
from megatron_data.sources.protocol import BrokenChunk

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (b"\x15\x00\x15\x04\x15\x06\x15\x08", True),
        (b"\x15\x00\x15\x04\x15\x06\x2c", False),  # a struct follows: no checksum
        (b"\x15\x00\x15\x80\x03\x15\x81\x82\x03\x15\x02", True),  # numbers of 2 and 3 bytes
        (b"\x15\x00\x15\xfe\x7f\x15\x06\x15", True),
        (b"\x15\x00\x15\x04\x2c\x15", False),
        (b"\x15\x00\x15\x04\x15\x80", False),  # the file ends within a number
        (b"", False),
    ],
)
def test_a_checksum_is_the_fourth_number_of_a_page(header: bytes, found: bool) -> None:
    """Of fields of type i32 in Thrift's compact protocol, each one after the last (0x15)."""
    column = SimpleNamespace(
        dictionary_page_offset=None, data_page_offset=3, path_in_schema="text.list.element"
    )
    group = SimpleNamespace(num_rows=1, num_columns=1, column=lambda number: column)
    metadata = SimpleNamespace(num_row_groups=1, row_group=lambda number: group)
    file = io.BytesIO(b"PAR" + header)
    assert has_page_checksums(file, metadata, ["text"]) == found
    assert has_page_checksums(file, metadata, ["list", "element"])  # no such column


def write(path: Path, columns: dict[str, Sequence[object]], **options: Any) -> Path:
    parquet.write_table(pyarrow.table(columns), path, **options)
    return path


@pytest.mark.parametrize("dictionary", [False, True])
@pytest.mark.parametrize("checksums", [False, True])
def test_page_checksums_of_lists_and_of_columns_without_a_dictionary(
    tmp_path: Path, dictionary: bool, checksums: bool
) -> None:
    path = write(
        tmp_path / "a.parquet",
        {"text": [["a", "b"], ["c"]] * 99},
        use_dictionary=dictionary,
        write_page_checksum=checksums,
    )
    with path.open("rb") as file:
        found = has_page_checksums(file, parquet.read_metadata(path), ["text"])
    assert found == checksums


def test_a_damaged_row_group_is_named_whenever_it_is_read(tmp_path: Path) -> None:
    texts = [f"text {number} of many" for number in range(900)]
    path = write(
        tmp_path / "a.parquet",
        {"text": texts},
        row_group_size=300,
        write_page_checksum=True,
        compression="none",
    )
    source = Parquet(str(path), ["text"])
    whole = list(source.chunks(2000))
    assert (source.record()["rows"], source.record()["page_checksums"]) == (900, True)
    column = parquet.read_metadata(path).row_group(1).column(0)
    data = bytearray(path.read_bytes())
    data[column.dictionary_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(data)
    *good, last = source.chunks(2000)
    rows = sum(chunk.span.units for chunk in good)
    assert 100 < rows <= 300 and good == whole[: len(good)]
    assert isinstance(last, BrokenChunk)
    assert (last.span, last.stored) == ((0, 0, rows + 1, 1), 0)
    assert (last.problem.kind, last.problem.number) == ("damaged", rows + 1)
    assert last.problem.reason.startswith("row group 1 is damaged (")
    assert source.record()["rows"] == rows
    with pytest.raises(DataError, match=r"a\.parquet: .*CRC"):
        source.chunk_at(whole[len(good)].span)


def test_a_missing_column_is_named_unless_columns_are_optional(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a.parquet", {"a": ["x"], "b": ["y"]}))
    (broken,) = Parquet(path, ["a", "c", "d"]).chunks()
    assert isinstance(broken, BrokenChunk)
    assert broken.problem.reason == (
        "no column 'c' (columns here: 'a', 'b'); name the right one with --json-key"
    )
    (chunk,) = Parquet(path, ["a", "c"], optional=True).chunks()
    assert [row.values for row in chunk.rows()] == [{"a": "x"}]
    assert chunk.stored == Path(path).stat().st_size
    (broken,) = Parquet(path, ["c", "d"], optional=True).chunks()
    assert isinstance(broken, BrokenChunk)
    assert broken.problem.reason == "none of the columns 'c', 'd' (columns here: 'a', 'b')"


def test_a_table_without_rows_holds_no_document(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with parquet.ParquetWriter(path, pyarrow.schema([("text", pyarrow.string())])):
        pass
    source = Parquet(str(path), ["text"])
    assert [item for chunk in source.chunks() for item in chunk.items(["text"], None)] == []
    assert source.record()["rows"] == 0
