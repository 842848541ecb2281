"""A file in object storage: what it was when it was opened, and its bytes from there on.

Nothing is kept here; `block_cache` keeps what is read more than once.
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
_AHEAD = 4  # steps of a stream that are under way at once

_T = TypeVar("_T")


class RemoteFile(NamedTuple):
    """A file at a URL as it was when it was opened.

    Attributes:
        url: where it lies.
        size: in bytes.
        version: what changes with its content, a tag or a time; empty where the storage tells none.
    """

    url: str
    size: int
    version: str

    @classmethod
    def open(cls, url: str) -> Self:
        """Looks a file up, again where the storage does not answer.

        Raises:
            MissingError: there is none.
            DataError: the storage cannot be reached, or refuses.
        """
        return cls(url, *_repeated(partial(stat, url, fresh=True)))

    @property
    def key(self) -> str:
        """A name for what is kept of it, which another version of it does not share."""
        described = "\0".join((self.url, str(self.size), self.version))
        return hashlib.sha256(described.encode()).hexdigest()[:32]

    def fetch(self, begin: int, end: int) -> bytes:
        """Reads a range, again where a transfer breaks off.

        Whether it is one of this version, `check_unchanged` tells afterwards.

        Raises:
            DataError: it cannot be read; with URL, range and reason.
        """
        try:
            return _repeated(partial(self._range, begin, end))
        except TransferError as error:
            self.check_unchanged()  # a shorter file would explain it
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
                f"{len(data):,} bytes came for {end - begin:,}: the server ignores ranges; copy "
                "the file to a local disk, or serve it by another"
            )
        if len(data) < end - begin:
            raise TransferError(f"{len(data):,} of {end - begin:,} bytes came")
        return data

    def stream(self, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Reads a range piece by piece, a few pieces ahead; all but the last are equally long.

        Raises:
            DataError: it cannot be read, or the file was replaced meanwhile.
        """
        end = self.size if end is None else end
        pool = ThreadPoolExecutor(_AHEAD, "stream")
        coming: deque[Future[bytes]] = deque()
        try:
            for start in range(begin, end, _STEP):
                coming.append(pool.submit(self.fetch, start, min(start + _STEP, end)))
                if len(coming) == _AHEAD:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Refuses to go on with a file that has been replaced.

        Raises:
            DataError: size or version are not what they were, or there is no file any more.
        """
        try:
            now = RemoteFile.open(self.url)
        except MissingError:
            raise self._gone() from None
        if now != self:
            raise DataError(
                f"{self.url} was replaced while it was read (from {self.size:,} bytes, version "
                f"{self.version or 'unknown'}, to {now.size:,} bytes, version "
                f"{now.version or 'unknown'}); start again, and write other data to other names"
            )

    def _gone(self) -> DataError:
        return DataError(f"{self.url} is gone; it was there when it was opened")


def read_blocks(path: str) -> Iterator[bytes]:
    """Reads a whole file, on the disk or at a URL, piece by piece.

    Raises:
        DataError: a URL that cannot be read.
    """
    if is_url(path):
        yield from RemoteFile.open(path).stream()
        return
    with Path(path).open("rb") as file:
        while block := file.read(_STEP):
            yield block


def read_if_there(path: str) -> bytes | None:
    """Reads a small file, on the disk or at a URL; None if there is none.

    Raises:
        DataError: a URL that cannot be read.
    """
    if not is_url(path):
        return Path(path).read_bytes() if Path(path).is_file() else None
    try:
        return b"".join(RemoteFile.open(path).stream())
    except MissingError:
        return None


def _repeated(attempt: Callable[[], _T]) -> _T:
    """Returns what an attempt gives, made again where it breaks off."""
    for number in range(_ATTEMPTS - 1):
        try:
            return attempt()
        except TransferError:
            time.sleep(_PAUSE * 2**number)
    return attempt()
