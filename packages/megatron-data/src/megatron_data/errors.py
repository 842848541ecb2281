"""The exceptions of this package; users need to catch only the first."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_HEAD, _TAIL = 1000, 500  # characters of a message


class DataError(ValueError):
    """Bad input: a file, a corpus, a split, a blend or an option that cannot be used.

    The message is one line: what was wrong with the offending value, where, and what to do. Of a
    very long one, which quotes a file, the middle is left out.
    """

    def __init__(self, message: str = "") -> None:
        if len(message.splitlines()) > 1:
            message = " ".join(message.split())
        if len(message) > _HEAD + _TAIL:
            message = f"{message[:_HEAD]} … {message[-_TAIL:]}"
        super().__init__(message)


class TokenizerMismatchError(DataError):
    """A dataset that another tokenizer made than the one it is to be used with."""


class EmptySplitError(DataError):
    """A split that holds no token.

    Attributes:
        what: Which, without what to do about it.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"{what}; widen it, or ask for 0 samples")


@contextmanager
def add_path_to_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Names the file in a failed system call that does not, such as a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None
