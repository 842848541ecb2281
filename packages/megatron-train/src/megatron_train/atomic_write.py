"""Atomic replacement of files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_data.errors import add_path_to_errors


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yields the path of a temporary file that replaces ``path`` when the block ends.

    After an error the temporary file is removed and ``path`` is unchanged.

    Raises:
        OSError: Writing failed, for example because the disk is full. The error names ``path`` if
            the system names no file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with add_path_to_errors(path):
            yield temporary
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
