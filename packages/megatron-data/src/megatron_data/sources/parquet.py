"""Parquet files: one document per row, with a column for each key."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import orjson

from megatron_data.errors import DataError
from megatron_data.sources.json_lines import text_of
from megatron_data.sources.parquet_checksums import has_page_checksums
from megatron_data.sources.protocol import (
    CHUNK_BYTES,
    BrokenChunk,
    Fault,
    Item,
    Row,
    Span,
    UnreadableError,
    too_long,
)
from megatron_data.sources.storage import open_file, stat
from megatron_data.sources.streams import Stream
from megatron_data.sources.urls import is_url

_REREAD_ROWS = 1024


class RowsChunk(NamedTuple):
    """Some rows of a file.

    Attributes:
        path: The file.
        row: Number of the first row, from 1.
        table: The requested columns, a `pyarrow.Table`.
        stored: Share of the bytes of the file.
    """

    path: str
    row: int
    table: Any
    stored: int

    @property
    def span(self) -> Span:
        """The range of rows."""
        return Span(0, 0, self.row, self.table.num_rows)

    @property
    def digest(self) -> str:
        """SHA-256 of the values."""
        digest = hashlib.sha256()
        for column in self.table.columns:
            for value in _values(column):
                digest.update(repr(value).encode(errors="backslashreplace") + b"\0")
        return digest.hexdigest()

    def items(self, keys: Sequence[str], max_bytes: int | None = None) -> Iterator[Item | Fault]:
        """Yields the texts of each row for the keys."""
        return self._items(keys, max_bytes, None)

    def pairs(self, keys: Sequence[str], max_bytes: int | None = None) -> Iterator[Item | Fault]:
        """Yields the text of each row with its image, which is a path or bytes.

        Bytes are in a binary column, or in the field `bytes` of a struct, which may also have the
        field `path`, as the library `datasets` writes images.
        """
        return self._items(keys, max_bytes, keys[-1])

    def _items(
        self, keys: Sequence[str], max_bytes: int | None, image_key: str | None
    ) -> Iterator[Item | Fault]:
        for number, row in enumerate(_values(self.table), start=self.row):
            item = Item(number, None, 0, [])
            try:
                if isinstance(row, UnicodeDecodeError):
                    raise _not_utf8(row)
                image = None
                if image_key is not None and image_key in row:
                    image, row[image_key] = _image_in(row[image_key])
                texts = [text_of(row, key) for key in keys]
                size = sum(len(part.encode()) for text in texts for part in text)
                if max_bytes is not None and size > max_bytes:
                    raise too_long(size, max_bytes)
            except UnreadableError as error:
                yield self.fault(item, error.kind, error.reason)
            else:
                yield Item(number, None, size, texts, image)

    def rows(self, max_bytes: int | None = None) -> Iterator[Row | Fault]:
        """Yields each row without nulls, including those in its lists and structs."""
        for number, row in enumerate(_values(self.table), start=self.row):
            if isinstance(row, UnicodeDecodeError):
                error = _not_utf8(row)
                yield self.fault(Row(number, None, 0, {}), error.kind, error.reason)
                continue
            values = _without_null(row)
            size = len(orjson.dumps(values, default=repr))
            if max_bytes is not None and size > max_bytes:
                error = too_long(size, max_bytes)
                yield self.fault(Row(number, None, size, values), error.kind, error.reason)
            else:
                yield Row(number, None, size, values)

    def fault(self, item: Item | Row, kind: str, reason: str) -> Fault:
        """Returns a fault with the file and row of an item."""
        location = f"{self.path}, row {item.number}"
        return Fault(location, kind, reason, self.path, item.number, None, item.size or None)


class Parquet:
    """A Parquet file; its record is complete after all chunks were read.

    Args:
        path: Local path or URL.
        keys: Columns to read.
        optional: Whether the file may lack some of the columns, but not all.

    Raises:
        DataError: pyarrow is not installed.
    """

    def __init__(self, path: str, keys: Sequence[str], optional: bool = False) -> None:
        self.path = path
        self._keys = list(keys)
        self._optional = optional
        self.size, self.version = stat(path)
        self._rows = 0
        self._page_checksums: bool | None = None
        self._sha256: str | None = None
        _pyarrow(path)

    def chunks(
        self, chunk_bytes: int = CHUNK_BYTES, max_bytes: int | None = None
    ) -> Iterator[RowsChunk | BrokenChunk]:
        """Yields chunks of about `chunk_bytes`, by the uncompressed size in the metadata."""
        arrow = _pyarrow(self.path)
        row = 1
        with open_file(self.path) as raw:
            try:
                file = arrow.parquet.ParquetFile(raw, page_checksum_verification=True)
                columns = self._columns(file.schema_arrow.names)
                self._page_checksums = has_page_checksums(raw, file.metadata, columns)
                rows = file.metadata.num_rows
                at_once = _rows_at_once(file.metadata, chunk_bytes)
                for batch in file.iter_batches(at_once, columns=columns):
                    table = arrow.Table.from_batches([batch])
                    yield RowsChunk(self.path, row, table, self.size * len(batch) // max(rows, 1))
                    row += len(batch)
            # UnicodeDecodeError: a name of a column in the footer is not UTF-8.
            except (arrow.ArrowException, UnicodeDecodeError, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                yield self._broken(row, "damaged", self._damage(arrow, row, error))
            except UnreadableError as error:
                yield self._broken(row, error.kind, error.reason)
        self._rows = row - 1
        if not is_url(self.path):  # a URL would be fetched a second time
            with Stream(self.path) as stream:
                self._sha256 = stream.sha256()

    def _columns(self, names: Sequence[str]) -> list[str]:
        """Returns the keys that are columns of the file.

        Raises:
            UnreadableError: A key is missing, or all keys are if they are optional.
        """
        found = [key for key in self._keys if key in names]
        missing = [key for key in self._keys if key not in found]
        if not missing or (self._optional and found):
            return found
        present = ", ".join(map(repr, names)) or "none"
        if self._optional:
            wanted = ", ".join(map(repr, self._keys))
            raise UnreadableError("key", f"none of the columns {wanted} (columns here: {present})")
        raise UnreadableError(
            "key",
            f"no column {missing[0]!r} (columns here: {present}); name the right one with "
            "--json-key",
        )

    def _damage(self, arrow: Any, row: int, error: Exception) -> str:
        """Returns a message with the first row group that cannot be read, from a row on."""
        try:
            with open_file(self.path) as raw:
                file = arrow.parquet.ParquetFile(raw, page_checksum_verification=True)
                columns = self._columns(file.schema_arrow.names)
                group = _first_damaged(arrow, file, columns, row)
        except (arrow.ArrowException, UnicodeDecodeError, OSError, UnreadableError):
            group = None
        if group is None:
            return f"it is not a Parquet file, or damaged from here on ({error}); copy it again"
        return f"row group {group} is damaged ({error}); copy the file again"

    def _broken(self, row: int, kind: str, reason: str) -> BrokenChunk:
        fault = Fault(f"{self.path}, row {row}", kind, " ".join(reason.split()), self.path, row)
        return BrokenChunk(fault, 0, Span(0, 0, row, 1))

    def chunk_at(self, span: Span, max_bytes: int | None = None) -> RowsChunk:
        """Reads some rows again."""
        arrow = _pyarrow(self.path)
        last = span.first - 1 + span.units
        seen, batches = 0, []
        with open_file(self.path) as raw:
            try:
                file = arrow.parquet.ParquetFile(raw, page_checksum_verification=True)
                columns = self._columns(file.schema_arrow.names)
                for batch in file.iter_batches(_REREAD_ROWS, columns=columns):
                    start = max(span.first - 1 - seen, 0)
                    if start < len(batch) and seen < last:
                        batches.append(batch.slice(start, min(last - seen, len(batch)) - start))
                    seen += len(batch)
                    if seen >= last:
                        break
            except (arrow.ArrowException, OSError, UnreadableError) as error:
                raise DataError(f"{self.path}: {error}") from None
        if seen < last:
            raise DataError(f"{self.path} has {seen:,} rows, fewer than before; it was changed")
        return RowsChunk(self.path, span.first, arrow.Table.from_batches(batches), 0)

    def record(self) -> dict[str, Any]:
        """Returns size, rows, digest (for a URL the version), and whether pages have checksums."""
        proof = {"version": self.version} if is_url(self.path) else {"sha256": self._sha256}
        return {
            "path": self.path,
            "bytes": self.size,
            "rows": self._rows,
            **proof,
            "page_checksums": self._page_checksums,
        }


def _first_damaged(arrow: Any, file: Any, columns: Sequence[str], row: int) -> int | None:
    """Returns the first row group that cannot be read, starting at the group of a row (from 1)."""
    end = 0
    for group in range(file.num_row_groups):
        end += file.metadata.row_group(group).num_rows
        if end < row:
            continue
        try:
            file.read_row_group(group, columns=list(columns))
        except (arrow.ArrowException, OSError):
            return group
    return None


def _values(rows: Any) -> list[Any]:
    """Returns the rows of a table or column; a row with text that is not UTF-8 is an error."""
    try:
        found: list[Any] = rows.to_pylist()
    except UnicodeDecodeError:
        found = []
        for number in range(len(rows)):
            try:
                found += rows.slice(number, 1).to_pylist()
            except UnicodeDecodeError as wrong:
                found.append(wrong)
    return found


def _image_in(value: Any) -> tuple[bytes | None, Any]:
    """Returns the bytes of an image and its path ("" if unknown), or None and the value."""
    match value:
        case bytes():
            return value, ""
        case {"bytes": bytes(data), **more}:
            path = more.get("path")
            return data, path if isinstance(path, str) else ""
        case {"bytes": None, "path": str(path)}:
            return None, path
    return None, value


def _not_utf8(wrong: UnicodeDecodeError) -> UnreadableError:
    what = f"byte {wrong.start} of a text, 0x{wrong.object[wrong.start]:02x}, is not UTF-8"
    return UnreadableError("encoding", f"{what}; convert the column, or declare it as binary")


def _rows_at_once(metadata: Any, chunk_bytes: int) -> int:
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    unpacked = sum(int(group.total_byte_size) for group in groups)
    return max(1, chunk_bytes * int(metadata.num_rows) // max(unpacked, 1))


def _without_null(value: Any) -> Any:
    """Removes nulls from dictionaries and lists, because structs of tables have every field."""
    if isinstance(value, dict):
        return {key: _without_null(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_null(part) for part in value]
    return value


def _pyarrow(path: str) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"{path}: a Parquet file needs pyarrow; pip install 'megatron-data[parquet]'"
        ) from None
    return pa
