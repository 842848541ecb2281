"""The one exception that users of this package need to catch."""


class DataError(ValueError):
    """Bad input: a file, a corpus, a split, a blend or an option that cannot be used.

    The message is one line: what was wrong with the offending value, where, and what to do.
    """
