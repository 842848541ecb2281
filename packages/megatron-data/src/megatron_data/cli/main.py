"""Entry point: parse, run one command, turn expected errors into one line."""

import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .._version import __version__
from ..errors import DataError
from . import inspect, preprocess, train_tokenizer, verify
from .parser import Parser

PROG = "megatron-data"


def build_parser() -> Parser:
    """The parser of `megatron-data` and all its commands."""
    parser = Parser(prog=PROG, description="From text to training samples.")
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (train_tokenizer, preprocess, inspect, verify):
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `megatron-data`; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    try:
        with _warnings():
            status: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stdout = None  # nothing more to flush at exit
        return 128 + signal.SIGPIPE
    except (DataError, OSError) as error:
        print(f"{PROG}: error: {_one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted", file=sys.stderr)
        return 130
    return status


@contextmanager
def _warnings() -> Iterator[None]:
    """Show what the package warns of, a line each, on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"{PROG}: warning: %(message)s"))
    logger = logging.getLogger("megatron_data")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}"
    return " ".join(str(error).split())
