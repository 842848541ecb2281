"""Exceptions of this package. All of them are subclasses of `DataError`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_HEAD, _TAIL = 1000, 500  # characters of a message


class DataError(ValueError):
    """Raised for invalid input: a file, a corpus, a split, a blend or an option.

    The message is one line that names the invalid value, the location and the remedy. The middle of
    a very long message, which quotes a file, is omitted.
    """

    def __init__(self, message: str = "") -> None:
        if len(message.splitlines()) > 1:
            message = " ".join(message.split())
        if len(message) > _HEAD + _TAIL:
            message = f"{message[:_HEAD]} … {message[-_TAIL:]}"
        super().__init__(message)


class TokenizerMismatchError(DataError):
    """Raised if a dataset was made with a different tokenizer than the one it is used with."""


class EmptySplitError(DataError):
    """Raised if a split contains no token.

    Attributes:
        what: Description of the split, without the remedy.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"{what}; widen the split, or request 0 samples")


@contextmanager
def add_path_to_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Adds the path to an `OSError` without a file name, such as that of a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None
