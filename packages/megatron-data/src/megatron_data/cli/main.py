"""The entry point of `megatron-data`: its parser, and one-line errors."""

from collections.abc import Sequence

from megatron_data._command import Parser, run_command
from megatron_data._version import __version__
from megatron_data.cli import (
    bench,
    inspect,
    merge,
    mix,
    preprocess,
    split,
    tokenize_conversations,
    tokenize_images,
    trace,
    train_tokenizer,
    verify,
)
from megatron_data.errors import DataError

PROG = "megatron-data"


def build_parser() -> Parser:
    """Returns the parser of `megatron-data` with all its commands."""
    parser = Parser(prog=PROG, description="From text to training samples.")
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (
        train_tokenizer,
        preprocess,
        tokenize_conversations,
        tokenize_images,
        inspect,
        verify,
        trace,
        merge,
        split,
        mix,
        bench,
    ):
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `megatron-data`; returns the exit status (`run_command` lists them)."""
    return run_command(build_parser(), argv, lambda: (DataError,))
