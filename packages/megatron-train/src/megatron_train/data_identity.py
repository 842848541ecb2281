"""Identity of the corpora of a run, independent of their paths, and its comparison.

The record of a run (`megatron_train.run_record`) has it in every checkpoint.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_data.datasets import parse_data_path

from megatron_train.config.data import DataConfig
from megatron_train.errors import TrainError
from megatron_train.saved_values import short_repr

Change = tuple[int, str | Sequence[str]]
"""A change of data: the first sample, and the corpora and weights from there on."""

_ENDS = 1 << 20
"""Bytes at the beginning and end of a file that its fingerprint is computed from."""


def corpora_identity(data: DataConfig) -> dict[str, Any]:
    """Returns the record of training corpora, their weights and the length of a sample.

    Raises:
        OSError: A local corpus cannot be read.
    """
    blend = parse_data_path(
        ["mock"] if data.mock_data else data.data_path or data.train_data_path or ()
    )
    return {
        "data": list(blend.prefixes),
        "weights": None if blend.weights is None else list(blend.weights),
        "content": [_fingerprint(prefix) for prefix in blend.prefixes],
        "split": data.split if data.data_path else None,
        "seq_length": data.seq_length,
    }


def changes_identity(changes: Sequence[Change]) -> list[Any]:
    """Returns the record of changes of the data (--data-path-changes)."""
    blends = [(first, parse_data_path(words)) for first, words in changes]
    return [
        [first, list(blend), [_fingerprint(prefix) for prefix in blend.prefixes]]
        for first, blend in blends
    ]


def _fingerprint(prefix: str) -> str | None:
    """Returns a digest of the sizes and ends of a corpus's files; None for a corpus at a URL.

    It identifies a corpus independent of its path. A corpus at a URL is identified by the URL.
    A change in the middle of a file that keeps its size is not detected, since reading whole files
    would take hours.
    """
    digest = hashlib.sha256()
    files = [Path(f"{prefix}{end}") for end in (".idx", ".bin", "")]
    for path in (path for path in files if path.is_file()):
        with path.open("rb") as file:
            size = file.seek(0, 2)
            digest.update(f"{path.suffix} {size} ".encode())
            for start in (0, max(0, size - _ENDS)):
                file.seek(start)
                digest.update(file.read(_ENDS))
    return None if digest.digest() == hashlib.sha256().digest() else digest.hexdigest()[:16]


def drop_allowed_differences(
    saved: dict[str, Any], current: dict[str, Any], path: Path, consumed_samples: int
) -> None:
    """Removes the paths of equal corpora, and changes of data after the consumed samples.

    Args:
        saved: Part ``data`` of the record in the checkpoint; modified in place.
        current: Part ``data`` of the record of the run that continues; modified in place.
        path: Path of the checkpoint.
        consumed_samples: Samples consumed by the checkpoint.

    Raises:
        TrainError: The record in the checkpoint is damaged.
    """
    known = _sources(current)
    if known is not None and _sources(saved) == known:
        for part in (saved, current):
            part.pop("data", None)
            part.pop("content", None)
    elif saved.get("data") != current.get("data"):  # paths make a clearer message than content
        saved.pop("content", None)
        current.pop("content", None)
    for part in (saved, current):
        part["changes"] = _changes_before(consumed_samples, part.get("changes") or [], path)
    if len(saved["changes"]) == len(current["changes"]) and all(
        map(_same_change, saved["changes"], current["changes"])
    ):
        saved["changes"] = current["changes"]


def _sources(data: Mapping[str, Any]) -> list[Any] | None:
    """Returns the identity of each corpus of a blend: its content, or its path if unknown."""
    paths, content = data.get("data"), data.get("content")
    if not (isinstance(paths, list) and isinstance(content, list) and len(paths) == len(content)):
        return None
    return [known or path for path, known in zip(paths, content, strict=True)]


def _changes_before(consumed_samples: int, changes: Any, path: Path) -> list[Any]:
    """Returns the changes of data before ``consumed_samples``. Older records have no content.

    Raises:
        TrainError: The record is damaged.
    """
    found = []
    for change in changes if isinstance(changes, list) else [changes]:
        match change:
            case [int(first), [list() | tuple(), _], *content] if len(content) <= 1:
                if first < consumed_samples:
                    found.append(change)
            case _:
                raise TrainError(
                    f"{path} is damaged: its record of the run has the invalid change of data "
                    f"{short_repr(change)}"
                )
    return found


def _same_change(saved: Sequence[Any], current: Sequence[Any]) -> bool:
    """Returns whether two changes of data are equal, independent of the corpora's paths."""
    (first, (paths, weights), *content), (then, (others, theirs), *their_content) = saved, current
    if first != then or _listed(weights) != _listed(theirs):
        return False
    if not content or not their_content:
        return list(paths) == list(others)
    known = _sources({"data": list(paths), "content": content[0]})
    return known is not None and known == _sources(
        {"data": list(others), "content": their_content[0]}
    )


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
