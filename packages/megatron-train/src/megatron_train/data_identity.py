"""What the corpora of a run are known by, wherever they lie, and how two records of them compare.

The record of a run (`megatron_train.run_record`) keeps it in every checkpoint.
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
"""A first sample, and the corpora and weights that it and later ones are from."""

_ENDS = 1 << 20
"""Bytes at the beginning and at the end of a file that its fingerprint is made from."""


def corpora_identity(data: DataConfig) -> dict[str, Any]:
    """Returns what is recorded of the training corpora, their shares and the length of a sample.

    Raises:
        OSError: a corpus on the disk cannot be read.
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
    """Returns what is recorded of changes of the data from a sample on."""
    blends = [(first, parse_data_path(words)) for first, words in changes]
    return [
        [first, list(blend), [_fingerprint(prefix) for prefix in blend.prefixes]]
        for first, blend in blends
    ]


def _fingerprint(prefix: str) -> str | None:
    """Digest of the sizes and ends of the files of a corpus; None for one at a URL.

    A corpus is known by it wherever it lies; one at a URL is known by its URL. A corpus of the same
    sizes that was changed in its middle alone passes: reading all of it would take hours.
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
    """Drops the paths of equal corpora, and the changes of data that lie ahead.

    Args:
        saved: the data's part of the record in a checkpoint; changed in place.
        current: that of the run that continues; changed in place.
        path: of the checkpoint.
        consumed_samples: by the checkpoint.

    Raises:
        TrainError: the record in the checkpoint is damaged.
    """
    known = _sources(current)
    if known is not None and _sources(saved) == known:
        for part in (saved, current):
            part.pop("data", None)
            part.pop("content", None)
    elif saved.get("data") != current.get("data"):  # then the paths say it better
        saved.pop("content", None)
        current.pop("content", None)
    for part in (saved, current):
        part["changes"] = _changes_before(consumed_samples, part.get("changes") or [], path)
    if len(saved["changes"]) == len(current["changes"]) and all(
        map(_same_change, saved["changes"], current["changes"])
    ):
        saved["changes"] = current["changes"]


def _sources(data: Mapping[str, Any]) -> list[Any] | None:
    """Returns what each corpus of a blend is known by: its content, or its path without one."""
    paths, content = data.get("data"), data.get("content")
    if not (isinstance(paths, list) and isinstance(content, list) and len(paths) == len(content)):
        return None
    return [known or path for path, known in zip(paths, content, strict=True)]


def _changes_before(consumed_samples: int, changes: Any, path: Path) -> list[Any]:
    """Returns the changes of data that are not ahead; those of older records have no content.

    Raises:
        TrainError: the record is damaged.
    """
    found = []
    for change in changes if isinstance(changes, list) else [changes]:
        match change:
            case [int(first), [list() | tuple(), _], *content] if len(content) <= 1:
                if first < consumed_samples:
                    found.append(change)
            case _:
                raise TrainError(
                    f"{path} is damaged: its record of the run has the change of data "
                    f"{short_repr(change)}"
                )
    return found


def _same_change(saved: Sequence[Any], current: Sequence[Any]) -> bool:
    """Returns whether two changes of data mean the same, wherever their corpora lie."""
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
