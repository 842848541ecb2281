"""The entry point of ``megatron-infer``: its parser and its expected errors."""

from collections.abc import Sequence

from megatron_infer._command import Parser, run_command
from megatron_infer._version import __version__
from megatron_infer.cli import chat, generate, serve
from megatron_infer.errors import InferError

PROG = "megatron-infer"


def build_parser() -> Parser:
    """Returns the parser of ``megatron-infer`` with all its commands."""
    parser = Parser(prog=PROG, description="Generate text with trained models.")
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in (generate, chat, serve):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``megatron-infer`` and returns its exit status (see `run_command`)."""
    return run_command(build_parser(), argv, _expected_errors)


def _expected_errors() -> tuple[type[Exception], ...]:
    """Returns the exception types for errors of the user; imports torch."""
    from megatron_ckpt import CheckpointError
    from megatron_data import DataError
    from megatron_models import ConfigError

    return (InferError, CheckpointError, DataError, ConfigError)
