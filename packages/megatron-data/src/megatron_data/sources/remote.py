"""Reads files in object storage, and detects that a file was replaced.

Nothing is cached here; see `block_cache`.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

from megatron_data.errors import DataError
from megatron_data.sources.failures import MissingError, TransferError, access_denied_error
from megatron_data.sources.storage import read_range, stat
from megatron_data.sources.urls import is_url

_ATTEMPTS = 3
_PAUSE = 0.5  # seconds before the second attempt, twice as long before the third
_STEP = 8 << 20
_AHEAD = 4  # concurrent requests of a stream

_T = TypeVar("_T")


class RemoteFile(NamedTuple):
    """A version of a file at a URL.

    Attributes:
        url: The URL.
        size: Size in bytes.
        version: A tag or time that changes with the content; empty if the storage has neither.
    """

    url: str
    size: int
    version: str

    @classmethod
    def open(cls, url: str) -> Self:
        """Looks up a file, with several attempts.

        Raises:
            MissingError: The file does not exist.
            DataError: The storage cannot be reached, or denies access.
        """
        return cls(url, *_repeated(partial(stat, url, fresh=True)))

    @property
    def key(self) -> str:
        """A name for cached data, which is different for each version of the file."""
        described = "\0".join((self.url, str(self.size), self.version))
        return hashlib.sha256(described.encode()).hexdigest()[:32]

    def fetch(self, begin: int, end: int) -> bytes:
        """Reads a range, with several attempts.

        Call `check_unchanged` afterwards to make sure that the data is of this version.

        Raises:
            DataError: The range cannot be read; the error names URL, range and reason.
        """
        try:
            return _repeated(partial(self._range, begin, end))
        except TransferError as error:
            self.check_unchanged()  # a shorter file would explain the failure
            raise DataError(
                f"{self.url}: bytes {begin:,} to {end:,} could not be read in {_ATTEMPTS} "
                f"attempts: {error}"
            ) from None

    def _range(self, begin: int, end: int) -> bytes:
        try:
            data = read_range(self.url, begin, end)
        except FileNotFoundError:
            raise self._gone() from None
        except Exception as error:  # noqa: BLE001 - each of fsspec's backends has its own
            problem = f"{type(error).__name__}: {error}"
            raise access_denied_error(self.url, error) or TransferError(problem) from None
        if len(data) > end - begin:
            raise TransferError(
                f"received {len(data):,} bytes instead of {end - begin:,}: the server ignores "
                "ranges; copy the file to a local disk, or use another server"
            )
        if len(data) < end - begin:
            raise TransferError(f"received {len(data):,} of {end - begin:,} bytes")
        return data

    def stream(self, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yields a range in blocks of equal size, except the last; reads a few blocks ahead.

        Raises:
            DataError: The range cannot be read, or the file was replaced meanwhile.
        """
        end = self.size if end is None else end
        pool = ThreadPoolExecutor(_AHEAD, "stream")
        pending: deque[Future[bytes]] = deque()
        try:
            for start in range(begin, end, _STEP):
                pending.append(pool.submit(self.fetch, start, min(start + _STEP, end)))
                if len(pending) == _AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raises an error if the file was replaced.

        Raises:
            DataError: Size or version have changed, or the file does not exist any more.
        """
        try:
            now = RemoteFile.open(self.url)
        except MissingError:
            raise self._gone() from None
        if now != self:
            raise DataError(
                f"{self.url} was replaced while it was read (from {self.size:,} bytes, version "
                f"{self.version or 'unknown'}, to {now.size:,} bytes, version "
                f"{now.version or 'unknown'}); start again, and do not overwrite files in use"
            )

    def _gone(self) -> DataError:
        return DataError(f"{self.url} does not exist any more; it was removed while in use")


def read_blocks(path: str) -> Iterator[bytes]:
    """Yields the content of a local file or URL in blocks.

    Raises:
        DataError: A URL cannot be read.
    """
    if is_url(path):
        yield from RemoteFile.open(path).stream()
        return
    with Path(path).open("rb") as file:
        while block := file.read(_STEP):
            yield block


def read_if_there(path: str) -> bytes | None:
    """Reads a small local file or URL; returns None if it does not exist.

    Raises:
        DataError: A URL cannot be read.
    """
    if not is_url(path):
        return Path(path).read_bytes() if Path(path).is_file() else None
    try:
        return b"".join(RemoteFile.open(path).stream())
    except MissingError:
        return None


def _repeated(attempt: Callable[[], _T]) -> _T:
    """Calls a function, up to `_ATTEMPTS` times while it raises `TransferError`."""
    for number in range(_ATTEMPTS - 1):
        try:
            return attempt()
        except TransferError:
            time.sleep(_PAUSE * 2**number)
    return attempt()
