"""Refusing outputs that would take the place of older ones."""

import os
from collections.abc import Iterable
from pathlib import Path

from megatron_data.errors import DataError
from megatron_data.indexed.format import idx_path
from megatron_data.preprocessing.manifest import manifest_path


def refuse_existing(prefixes: Iterable[str]) -> None:
    """Refuses to write where a dataset is.

    A `.bin` alone is none: it is what a killed run leaves.

    Raises:
        DataError: an index or a manifest of one of the prefixes exists.
    """
    for prefix in prefixes:
        for path in (idx_path(prefix), manifest_path(prefix)):
            refuse_file(path)


def refuse_file(path: str | os.PathLike[str]) -> None:
    """Refuses to write where a file, or a folder with something in it, is.

    Raises:
        DataError: it exists.
    """
    place = Path(path)
    if place.is_dir() and any(place.iterdir()):
        raise DataError(
            f"{place} exists and is not empty; name another output, or give --overwrite to "
            "replace what it holds"
        )
    if place.exists() and not place.is_dir():
        raise DataError(f"{place} exists; name another output, or give --overwrite to replace it")
