"""The metrics file of a run: one JSON object per line, appended during the run.

Floats are written with Python's shortest exact representation, so that two runs can be compared
bit by bit. The key ``kind`` is ``train`` (a step, with its losses by name), ``log`` (the losses of
a log line, over all steps since the previous one), ``validation`` or ``event``. A run that resumes
appends an event ``start`` with the step that it continues from. Earlier records of later steps
belong to lost work; `read_records` leaves them out.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatron_train.errors import TrainError
from megatron_train.metrics.append_only_file import AppendOnlyFile
from megatron_train.saved_values import MAX_INTEGER, short_repr

FILE_NAME = "metrics.jsonl"
_MOST = 1e100
"""Largest number in a record; arithmetic on several larger ones may overflow."""
_KINDS = ("train", "validation", "event", "log")


class RecordWriter:
    """Appends records to a metrics file; after a kill every line is complete or removed."""

    def __init__(self, path: Path) -> None:
        _drop_torn_line(path)
        self._file = AppendOnlyFile(path)

    def write(self, record: dict[str, Any]) -> None:
        """Appends one record.

        Raises:
            OSError: The record cannot be written, for example because the disk is full. The message
                names the file.
        """
        self._file.write((json.dumps(record) + "\n").encode())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Records:
    """The records of a run without lost work, in the order of their steps."""

    train: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    events: list[dict[str, Any]]
    log: list[dict[str, Any]] = field(default_factory=list)


def read_records(path: Path) -> Records:
    """Reads a metrics file without the steps that a later start has repeated.

    An unfinished last line is ignored.

    Raises:
        TrainError: Another line is not a record.
    """
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _KINDS}
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TrainError(f"{path}, line {number}: not a metrics record") from error
        if (wrong := _record_error(record)) is not None:
            raise TrainError(f"{path}, line {number}: not a metrics record: {wrong}")
        found[record["kind"]].append(record)
        if record.get("event") == "start":
            iteration = record["iteration"]
            for name in ("train", "log", "validation"):
                found[name] = [r for r in found[name] if r["iteration"] <= iteration]
    return Records(*(found[kind] for kind in _KINDS))


def _record_error(record: Any) -> str | None:
    """Returns a description of the error in a record, or None if the record is valid."""
    if not isinstance(record, dict) or record.get("kind") not in _KINDS:
        return f"expected an object with a known 'kind', got {short_repr(record)}"
    iteration = record.get("iteration")
    if type(iteration) is not int or not 0 <= iteration <= MAX_INTEGER:
        return f"'iteration' is {short_repr(iteration)}"
    event = record["kind"] == "event"
    if event and not isinstance(record.get("event"), str):
        return f"'event' is {short_repr(record.get('event'))}"
    for name, value in record.items():
        if isinstance(value, str) and (event or name == "kind"):
            continue
        if value is not None and not _is_number(value):
            return f"{short_repr(name)} is {short_repr(value)}"
    return None


def _is_number(value: object) -> bool:
    """Returns whether a value is a number that charts can show."""
    return isinstance(value, int | float) and abs(value) <= _MOST


def _drop_torn_line(path: Path) -> None:
    """Removes an unfinished last line, which a killed run has left."""
    if not path.exists():
        return
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
