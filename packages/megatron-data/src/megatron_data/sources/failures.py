"""Converts errors of storage to `DataError` with one line.

Each file system of fsspec raises its own exceptions. Three cases are distinguished: the file does
not exist, access is denied, and a failure that another attempt may resolve.
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
    """Raised when a path or URL does not exist."""


class NotRegularFileError(DataError):
    """Raised when a path is a device or a pipe."""


class TransferError(DataError):
    """Raised when a transfer fails or is incomplete; another attempt may succeed."""


@contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Converts errors of the storage of a URL inside the block.

    Raises:
        MissingError: The URL does not exist.
        DataError: The storage cannot be reached, or denies access.
    """
    try:
        yield
    except DataError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        cause = error.__cause__
        if isinstance(cause, FileNotFoundError | None) or _status(cause) == _NOT_FOUND:
            raise missing_error(url) from None
        # The HTTP file system of fsspec raises FileNotFoundError for every failure.
        raise access_denied_error(url, cause) or _unreadable_error(url, cause) from None
    except Exception as error:  # noqa: BLE001 - each of fsspec's backends has exceptions of its own
        raise access_denied_error(url, error) or _unreadable_error(url, error) from None


def wrap_file(file: BinaryIO, url: str) -> BinaryIO:
    """Wraps a file at a URL, so that errors of reading it are converted by `storage_errors`."""
    return io.BufferedReader(_StorageFile(file, url), _BUFFER)


class _StorageFile(WrappedFile):
    def __init__(self, file: BinaryIO, url: str) -> None:
        super().__init__(file)
        self._url = url

    def _read(self, size: int) -> bytes:
        with storage_errors(self._url):
            return super()._read(size)


def access_denied_error(url: str, error: BaseException) -> DataError | None:
    """Returns a `DataError` if an exception means that access is denied, else None."""
    if not isinstance(error, PermissionError) and _status(error) not in _REFUSALS:
        return None
    return DataError(
        f"access to {url} is denied ({str(error) or type(error).__name__}); check the credentials "
        "of this process and the permissions of the file (S3 also denies access to objects that do "
        "not exist if listing is not allowed)"
    )


def missing_error(path: str) -> MissingError:
    """Returns the error for a path or URL that does not exist."""
    return MissingError(f"no input file or folder at {path}")


def _unreadable_error(url: str, error: BaseException) -> TransferError:
    return TransferError(f"{url} cannot be read: {type(error).__name__}: {error}")


def _status(error: BaseException) -> int | None:
    """Returns the HTTP status of an error of aiohttp or botocore or of its cause, or None."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        code = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        code = getattr(error, "status", None)
    if isinstance(code, int):
        return code
    return None if error.__cause__ is None else _status(error.__cause__)
