"""A file that a run appends complete records to."""

from pathlib import Path

from megatron_data.errors import add_path_to_errors


class AppendOnlyFile:
    """Appends to a file without a buffer, so that written data survives a kill of the process.

    Args:
        path: Path of the file. The file and its folder are created if they are missing.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("ab", buffering=0)

    def write(self, data: bytes) -> None:
        """Appends all bytes of ``data``, with several system calls if necessary.

        Raises:
            OSError: The data cannot be written, for example because the disk is full. The message
                names the file, which may end in a part of ``data``.
        """
        rest = memoryview(data)
        with add_path_to_errors(self.path):
            while rest:
                rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
