"""Parser and exit codes of ``megatron-train``; torch is not imported before a run starts."""

import sys
from collections.abc import Sequence

from megatron_train._version import __version__
from megatron_train.cli import layout, pretrain
from megatron_train.config.flags import Parser
from megatron_train.errors import UsageError

PROG = "megatron-train"


def build_parser() -> Parser:
    """Return the parser of the command with all its subcommands."""
    parser = Parser(prog=PROG, description="Train transformer language models.")
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    pretrain.add_command(commands)
    layout.add_command(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    0 is success, 1 an error, 2 a usage error, 130 and 143 a stop by SIGINT and SIGTERM.
    """
    try:
        arguments = build_parser().parse_args(argv)
        return int(arguments.run(arguments))
    except UsageError as error:
        return _fail(error, 2)
    except _user_errors() as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        sys.stderr.write(f"{PROG}: interrupted\n")
        return 130


def _user_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that are answered with one line; called only when one was raised."""
    from megatron_ckpt import CheckpointError
    from megatron_data import DataError
    from megatron_kernels import KernelError
    from megatron_models import ConfigError
    from megatron_optim import OptimError
    from megatron_parallel import LayoutError

    from megatron_train.errors import TrainError

    ours = (CheckpointError, DataError, KernelError, ConfigError, OptimError, LayoutError)
    return (TrainError, *ours, OSError)


def _fail(error: Exception, status: int) -> int:
    message = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename}: {error.strerror}"
    sys.stderr.write(f"{PROG}: error: {' '.join(message.split())}\n")
    return status
