"""Prints lines to standard output and one progress bar to standard error without mixing them."""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from tqdm import tqdm


class Console:
    """Prints lines above the progress bar, if there is one.

    Args:
        out: Stream that lines are written to. Defaults to standard output.
        silent: Whether nothing is printed, as on all ranks but one.
    """

    def __init__(self, out: TextIO | None = None, *, silent: bool = False) -> None:
        self._out = out
        self.silent = silent
        self.header: Callable[[], Iterable[str]] | None = None
        """Returns lines to print before the first line; not called if no line is printed."""
        self._bar: tqdm[Any] | None = None

    def print_line(self, text: str) -> None:
        """Prints one line and flushes the stream."""
        if self.silent:
            return
        header, self.header = self.header, None
        lines = [*(header() if header is not None else ()), text]
        out = self._out or sys.stdout
        with tqdm.external_write_mode(file=out):
            out.write("".join(f"{line}\n" for line in lines))
            out.flush()

    def warn(self, text: str) -> None:
        """Prints one line that starts with ``megatron-train: warning:`` to standard error."""
        if self.silent:
            return
        with tqdm.external_write_mode(file=sys.stderr):
            sys.stderr.write(f"megatron-train: warning: {text}\n")
            sys.stderr.flush()

    @contextmanager
    def forward_warnings(self, logger: str) -> Iterator[None]:
        """Prints warnings of ``logger`` with `warn` within the context."""
        handler = _Warnings(self)
        logging.getLogger(logger).addHandler(handler)
        try:
            yield
        finally:
            logging.getLogger(logger).removeHandler(handler)

    def start_bar(self, total_tokens: int, done_tokens: int) -> None:
        """Shows a progress bar that counts tokens if standard error is a terminal."""
        self._bar = tqdm(
            total=total_tokens,
            initial=done_tokens,
            unit="tok",
            unit_scale=True,
            desc="training",
            disable=self.silent or None,
            dynamic_ncols=True,
            file=sys.stderr,
        )

    def advance_bar(self, tokens: int, postfix: str) -> None:
        """Advances the bar by ``tokens`` and shows ``postfix`` after it."""
        if self._bar is not None:
            self._bar.set_postfix_str(postfix, refresh=False)
            self._bar.update(tokens)

    def stop_bar(self) -> None:
        """Removes the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class _Warnings(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.warn(record.getMessage())
