"""Refuses outputs that already exist."""

import os
from collections.abc import Iterable
from pathlib import Path

from megatron_data.errors import DataError
from megatron_data.indexed.format import idx_path
from megatron_data.preprocessing.manifest import manifest_path


def refuse_existing(prefixes: Iterable[str]) -> None:
    """Raises an error if a dataset exists at one of the prefixes.

    A `.bin` file alone is not a dataset: a killed run leaves it.

    Raises:
        DataError: An index or a manifest of one of the prefixes exists.
    """
    for prefix in prefixes:
        for path in (idx_path(prefix), manifest_path(prefix)):
            refuse_file(path)


def refuse_file(path: str | os.PathLike[str]) -> None:
    """Raises an error if a path is a file or a folder that is not empty.

    Raises:
        DataError: It exists.
    """
    output = Path(path)
    if output.is_dir() and any(output.iterdir()):
        raise DataError(
            f"{output} exists and is not empty; give another output, or --overwrite to replace "
            "its content"
        )
    if output.exists() and not output.is_dir():
        raise DataError(f"{output} exists; give another output, or --overwrite to replace it")
