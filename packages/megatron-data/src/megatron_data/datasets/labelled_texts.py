"""Texts with labels in tables: TSV, CSV and JSON lines.

The files of GLUE (Wang et al., 2018) are such tables; `TextColumns` selects their columns.
Importing this module does not import numpy.
"""

import csv
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_data.errors import DataError
from megatron_data.files import parse_json, read_text
from megatron_data.sources.urls import is_url, without_scheme

SUFFIXES = (".tsv", ".csv", ".jsonl", ".json")
"""Endings of the names of tables, which select the format."""


@dataclass(frozen=True)
class TextColumns:
    """The columns of a table that hold texts and labels.

    A column is named by the header line of a TSV or CSV file, or by a key of JSON lines. Numbers
    count columns from 0 and stand for a TSV or CSV file without a header line.

    Attributes:
        texts: Column of the text, or of both texts.
        label: Column of the label.

    Raises:
        DataError: There are no texts or more than two, a column is used twice, or numbers and names
            are mixed.
    """

    texts: tuple[str, ...] = ("text",)
    label: str = "label"

    def __post_init__(self) -> None:
        if not 1 <= len(self.texts) <= 2:
            raise DataError(f"{len(self.texts)} columns of texts; give one or two")
        if len({*self.texts, self.label}) < len(self.texts) + 1:
            raise DataError(f"the columns {', '.join(self.all)} have a name twice; give different")
        if len({name.isdecimal() for name in self.all}) > 1:
            raise DataError(
                f"the columns {', '.join(self.all)} mix numbers and names; numbers are for files "
                "without a header line"
            )

    @property
    def all(self) -> tuple[str, ...]:
        """The columns of texts, then that of the label."""
        return (*self.texts, self.label)

    @property
    def are_numbers(self) -> bool:
        """Whether columns are counted, as in a file without a header line."""
        return self.label.isdecimal()


class LabelledText(NamedTuple):
    """A row of a table.

    Attributes:
        texts: One or two texts.
        label: The label.
        location: File and line.
    """

    texts: tuple[str, ...]
    label: str
    location: str


def read_labelled_texts(
    path: str | os.PathLike[str], columns: TextColumns | None = None
) -> list[LabelledText]:
    """Reads the rows of a table of texts with labels.

    In TSV files a quotation mark has no meaning, as in the files of GLUE. In CSV files it encloses
    fields, which may hold commas, newlines and doubled quotation marks (RFC 4180). Labels in JSON
    lines may be strings, integers or booleans. Blank lines are skipped.

    Args:
        path: Path of a local file whose name ends in `.tsv`, `.csv`, `.jsonl` or `.json`.
        columns: Columns of texts and labels. Defaults to `text` and `label`.

    Raises:
        DataError: The file is missing or has another ending, a row lacks a column, a label is
            empty, or there is no row.
    """
    columns = columns or TextColumns()
    name = without_scheme(os.fspath(path))
    if is_url(name) or not name.endswith(SUFFIXES):
        raise DataError(
            f"{name}: labelled texts are read from local files whose names end in "
            f"{', '.join(SUFFIXES)}; copy or rename the file"
        )
    if not Path(name).is_file():
        raise DataError(f"{name} does not exist or is not a file")
    text = read_text(name)
    found = [*(_objects if name.endswith((".jsonl", ".json")) else _table)(name, text, columns)]
    if not found:
        raise DataError(f"{name} has no row; write one text with its label on each line")
    return found


def label_names(rows: Sequence[LabelledText]) -> tuple[str, ...]:
    """Returns the labels of some rows in order: by value if all are integers, else by text."""
    names = {row.label for row in rows}
    if all(name.isascii() and name.removeprefix("-").isdecimal() for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def _table(name: str, text: str, columns: TextColumns) -> Iterator[LabelledText]:
    """Yields the rows of a TSV or CSV file."""
    rows = _fields(name, text)
    if columns.are_numbers:
        indices = [int(column) for column in columns.all]
    else:
        header = next(rows, (0, list[str]()))[1]
        if missing := [column for column in columns.all if column not in header]:
            known = ", ".join(map(repr, header))
            raise DataError(f"{name}: no column {missing[0]!r} in the header line; it has {known}")
        indices = [header.index(column) for column in columns.all]
    for line, fields in rows:
        location = f"{name}:{line}"
        if len(fields) <= max(indices):
            raise DataError(
                f"{location}: the row has {len(fields)} columns, but column {max(indices)} "
                "(counted from 0) is needed"
            )
        *texts, label = (fields[index] for index in indices)
        yield _row(location, texts, label)


def _fields(name: str, text: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the number of the last line and the fields of each row that is not blank."""
    if name.endswith(".tsv"):
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield number, line.rstrip("\r").split("\t")
        return
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    while True:
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(f"{name}:{reader.line_num}: not CSV: {error}") from None
        if any(field.strip() for field in fields):
            yield reader.line_num, fields


def _objects(name: str, text: str, columns: TextColumns) -> Iterator[LabelledText]:
    """Yields the rows of a file of JSON lines."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        location = f"{name}:{number}"
        content = parse_json(line.encode("utf-8", "surrogatepass"), location)
        if not isinstance(content, Mapping):
            raise DataError(f"{location} is not a JSON object")
        if missing := [column for column in columns.all if column not in content]:
            raise DataError(f"{location}: no key {missing[0]!r}; the keys are {_listed(content)}")
        *texts, label = (content[column] for column in columns.all)
        if not all(isinstance(one, str) for one in texts) or not isinstance(label, str | int):
            raise DataError(f"{location}: a text must be a string, and a label a string or integer")
        yield _row(location, texts, str(label))


def _listed(content: Mapping[str, Any]) -> str:
    return ", ".join(repr(key) for key in [*content][:20])


def _row(location: str, texts: Sequence[str], label: str) -> LabelledText:
    if not label.strip():
        raise DataError(f"{location}: the label is empty; give each row a label")
    return LabelledText(tuple(texts), label.strip(), location)
