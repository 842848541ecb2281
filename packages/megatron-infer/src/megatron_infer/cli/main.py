"""Entry point: parse, run one command, turn expected errors into one line."""

import os
import sys
from collections.abc import Sequence

from megatron_infer._version import __version__
from megatron_infer.cli import chat, generate, serve
from megatron_infer.cli.parser import Parser
from megatron_infer.errors import InferError

PROG = "megatron-infer"


def build_parser() -> Parser:
    """Return the parser of ``megatron-infer`` and all its commands."""
    parser = Parser(prog=PROG, description="Text from trained models.")
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in (generate, chat, serve):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``megatron-infer``; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
        return 141
    except KeyboardInterrupt:
        print(f"\n{PROG}: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        print(f"{PROG}: error: {error.strerror or error}{where}", file=sys.stderr)
        return 1
    except InferError as error:
        return _report(error)
    except _expected_errors() as error:
        return _report(error)
    return status


def _report(error: Exception) -> int:
    print(f"{PROG}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 1


def _expected_errors() -> tuple[type[Exception], ...]:
    """Return what a user can cause, in the packages a command calls; they import torch."""
    from megatron_ckpt import CheckpointError
    from megatron_data import DataError
    from megatron_models import ConfigError

    return (CheckpointError, DataError, ConfigError)
