"""Lines on standard output and one progress bar on standard error that do not tear each other."""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from tqdm import tqdm


class Console:
    """Print lines above a progress bar, where there is one.

    Args:
        out: where lines go; standard output by default.
        silent: say nothing, for all ranks but one.
    """

    def __init__(self, out: TextIO | None = None, *, silent: bool = False) -> None:
        self._out = out
        self.silent = silent
        self.header: Callable[[], Iterable[str]] | None = None
        """What comes before the first line, which may never be printed."""
        self._bar: tqdm[Any] | None = None

    def print_line(self, text: str) -> None:
        """Prints one line and flush it."""
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
        """Shows what ``logger`` warns of, as `warn` does."""
        handler = _Warnings(self)
        logging.getLogger(logger).addHandler(handler)
        try:
            yield
        finally:
            logging.getLogger(logger).removeHandler(handler)

    def start_bar(self, total_tokens: int, done_tokens: int) -> None:
        """Shows a bar that counts tokens, unless standard error is not a terminal."""
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
        """Moves the bar by ``tokens`` and show ``postfix`` behind it."""
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
