"""Files that appear whole or not at all.

An `AtomicFile` is written beside its destination under a temporary name, then flushed to the
disk and renamed. Whatever kills the process, the destination is either the old file or the
whole new one. The temporary name is always the same, so that a killed run leaves no litter for
ever: the next run takes the name over. A lock that the kernel releases with the process keeps
two writers apart.
"""

import fcntl
import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import orjson

from .errors import DataError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_BLOCK = 1 << 22


class AtomicFile:
    """A binary file that takes its name only in `commit`; digest and size are kept as it grows.

    Args:
        path: the final name. Its folder is made if it is absent.

    Raises:
        DataError: another process is writing the same file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.bytes = 0
        self._digest = hashlib.sha256()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._partial = self.path.with_name(f".{self.path.name}.partial")
        self._file = os.fdopen(self._lock(), "wb", buffering=0)

    def _lock(self) -> int:
        while True:
            descriptor = os.open(self._partial, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Between opening and locking, the previous writer may have renamed the file.
                if os.fstat(descriptor).st_ino == self._partial.stat().st_ino:
                    os.ftruncate(descriptor, 0)
                    return descriptor
            except BlockingIOError:
                os.close(descriptor)
                raise DataError(
                    f"another process is writing {self.path}; wait for it or choose another output"
                ) from None
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def write(self, data: "ReadableBuffer") -> None:
        """Append the bytes of `data`."""
        whole = memoryview(data)
        if whole.nbytes == 0:
            return  # and an empty view cannot be cast
        rest = whole.cast("B")
        self._digest.update(rest)
        self.bytes += len(rest)
        while len(rest):  # one write call takes at most 2 GiB
            rest = rest[self._file.write(rest) :]

    @property
    def sha256(self) -> str:
        """Hexadecimal digest of what has been written so far."""
        return self._digest.hexdigest()

    def commit(self) -> None:
        """Make the file durable and give it its name."""
        os.fsync(self._file.fileno())
        self._partial.replace(self.path)
        self._file.close()
        sync_folder(self.path.parent)

    def discard(self) -> None:
        """Forget the file. Does nothing after `commit`."""
        if not self._file.closed:
            self._partial.unlink(missing_ok=True)
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and not self._file.closed:
            self.commit()
        else:
            self.discard()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write a JSON document atomically: indented, keys in the order given."""
    with AtomicFile(path) as file:
        file.write(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON document; a file that is not JSON is a `DataError` that names it."""
    try:
        return orjson.loads(Path(path).read_bytes())
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path} is not JSON ({error}); was it damaged or cut short?") from None


def file_sha256(path: str | os.PathLike[str]) -> str:
    """Hexadecimal SHA-256 of a file."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
