"""The standard output of a rank, which several ranks share."""

import io
from typing import TextIO


def write_whole_lines(stream: TextIO) -> None:
    """Makes ``stream`` pass text on when a line ends, so that lines of several ranks do not mix.

    With ``PYTHONUNBUFFERED`` Python writes every argument of `print` by itself, and without it any
    8 KiB of text, which may end within a line. A text of several lines is passed on at once, with
    its last line even if that has not ended. Streams that do not encode text stay as they are.
    """
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(line_buffering=True, write_through=False)
