"""Files that are replaced when their new content is whole."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_data.errors import add_path_to_errors


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yields the name of a file beside ``path`` that takes its place when the block ends.

    After an error it is removed, and what was at ``path`` stays.

    Raises:
        OSError: the disk is full, for example; names ``path`` where the system names no file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with add_path_to_errors(path):
            yield temporary
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
