"""A file that grows by whole pieces while a run goes on."""

from pathlib import Path

from megatron_data.errors import add_path_to_errors


class AppendOnlyFile:
    """Append to a file without a buffer, so that what was written outlives this process.

    Args:
        path: of the file; it and its folder are made where they are missing.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("ab", buffering=0)

    def write(self, piece: bytes) -> None:
        """Appends all of a piece, however many calls the system takes for it.

        Raises:
            OSError: the disk is full, for example; names the file, which may end in a part of the
                piece.
        """
        rest = memoryview(piece)
        with add_path_to_errors(self.path):
            while rest:
                rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
