"""What a storage says when it fails, told in one line.

Each of fsspec's file systems raises exceptions of its own. Three cases matter: there is no such
file, whoever asks may not read it, and it could not be read this time.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from megatron_data.errors import DataError
from megatron_data.sources.wrapped_file import WrappedFile

_BUFFER = 1 << 18
_NOT_FOUND = 404
_REFUSALS = (401, 403)


class MissingError(DataError):
    """There is nothing at a path or a URL."""


class NotRegularFileError(DataError):
    """There is a device or a pipe at a path, not a file."""


class TransferError(DataError):
    """A storage that did not answer, or not to the end; it may if it is asked again."""


@contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Tells in one line what fails at a URL.

    Raises:
        MissingError: nothing is there.
        DataError: the storage cannot be reached, or refuses.
    """
    try:
        yield
    except DataError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        cause = error.__cause__
        if isinstance(cause, FileNotFoundError | None) or _status(cause) == _NOT_FOUND:
            raise missing_error(url) from None
        # fsspec's HTTP raises this whatever happened.
        raise access_denied_error(url, cause) or _unreadable_error(url, cause) from None
    except Exception as error:  # noqa: BLE001 - each of fsspec's backends has exceptions of its own
        raise access_denied_error(url, error) or _unreadable_error(url, error) from None


def wrap_file(file: BinaryIO, url: str) -> BinaryIO:
    """Returns a file at a URL of which `storage_errors` tells whatever fails while it is read."""
    return io.BufferedReader(_StorageFile(file, url), _BUFFER)


class _StorageFile(WrappedFile):
    def __init__(self, file: BinaryIO, url: str) -> None:
        super().__init__(file)
        self._url = url

    def _read(self, size: int) -> bytes:
        with storage_errors(self._url):
            return super()._read(size)


def access_denied_error(url: str, error: BaseException) -> DataError | None:
    """Returns what to say of an error by which a storage refuses; None of any other."""
    if not isinstance(error, PermissionError) and _status(error) not in _REFUSALS:
        return None
    return DataError(
        f"access to {url} is denied ({str(error) or type(error).__name__}); check the credentials "
        "of this process and who may read there (S3 answers so, too, where there is no such object "
        "and listing is not allowed)"
    )


def missing_error(path: str) -> MissingError:
    """That nothing is at a path or a URL."""
    return MissingError(f"no input file or folder at {path}")


def _unreadable_error(url: str, error: BaseException) -> TransferError:
    return TransferError(f"{url} cannot be read: {type(error).__name__}: {error}")


def _status(error: BaseException) -> int | None:
    """Returns the HTTP status that an error of aiohttp or of botocore carries, or is caused by."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        code = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        code = getattr(error, "status", None)
    if isinstance(code, int):
        return code
    return None if error.__cause__ is None else _status(error.__cause__)
