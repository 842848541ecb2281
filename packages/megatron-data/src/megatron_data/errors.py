"""The exceptions of this package; users need to catch only the first."""

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
        what: which, without what to do about it.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"{what}; widen it, or ask for 0 samples")
