"""Parser and exit statuses of ``megatron-train``. Imports torch only when a run starts."""

import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron_train._command import CommandError, discard_stdout, report_error, report_interrupt
from megatron_train._version import __version__
from megatron_train.cli import (
    config,
    dry_run,
    finetune,
    layout,
    merge,
    models,
    plan,
    pretrain,
    prove,
    recipes,
    schedule,
    tasks,
    upcycle,
)
from megatron_train.cli import report as report_page
from megatron_train.cli.failure import failure_report
from megatron_train.config.flags import Parser
from megatron_train.launch.error_file import write_error_file
from megatron_train.launch.link import FailureReport
from megatron_train.launch.output import write_whole_lines

PROG = "megatron-train"


def build_parser() -> Parser:
    """Returns the parser of the command with all its subcommands."""
    parser = Parser(prog=PROG, description="Train transformer language models.")
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    pretrain.add_command(commands)
    finetune.add_command(commands)
    merge.add_command(commands)
    upcycle.add_command(commands)
    recipes.add_command(commands)
    models.add_command(commands)
    tasks.add_command(commands)
    config.add_command(commands)
    plan.add_command(commands)
    dry_run.add_command(commands)
    prove.add_command(commands)
    layout.add_command(commands)
    schedule.add_command(commands)
    report_page.add_command(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    The status is 0 on success, 1 after an error, 2 after a usage error, 130 and 143 after SIGINT
    and SIGTERM, 141 if the reader of the output is gone, and 128 plus the number of the signal that
    killed a rank. A rank of several (torchrun) does not return: its process ends at once, because
    threads of open communication could hang or abort a regular exit. An error is also written to
    the file that torchrun quotes in its summary.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    several = "RANK" in os.environ and os.environ.get("WORLD_SIZE") != "1"
    if several:
        write_whole_lines(sys.stdout)
    try:
        try:
            arguments = build_parser().parse_args(words)
            arguments.words = words
            arguments.print_notes = True
            status = int(arguments.run(arguments))
        finally:  # also after --help, which raises SystemExit
            sys.stdout.flush()
    except BrokenPipeError:
        status = discard_stdout()
    except (Exception, KeyboardInterrupt) as error:
        report = failure_report(error)
        write_error_file(report)
        if report.kind == "bug" and not several:
            raise
        status = _tell(report, several)
    if several:
        exit_now(status)
    return status


def _tell(report: FailureReport, several: bool) -> int:
    """Writes the error to standard error; returns the exit status."""
    if report.kind == "interrupted":
        return report_interrupt(PROG)
    if report.traceback:
        sys.stderr.write(report.traceback)
        return report.status
    rank = f"rank {os.environ.get('RANK')}: " if several else ""
    lines = [rank + line for line in report.message.splitlines()]
    return report_error(PROG, CommandError(*lines), report.status)


def exit_now(status: int) -> NoReturn:
    """Ends this process at once: flushes logs and output, but runs no exit handlers."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
