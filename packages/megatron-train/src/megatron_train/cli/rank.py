"""``python -m megatron_train.cli.rank LINK SCREEN words...``: the command as one rank of several.

`megatron-train ... --nproc-per-node N` starts this program and prints errors on behalf of its
ranks. A rank sends errors through the descriptor LINK and writes output for the user (warnings, a
progress bar) to the descriptor SCREEN. The parent keeps everything else on standard error.
"""

import sys
from typing import NoReturn

from megatron_train.cli.failure import failure_report
from megatron_train.cli.main import build_parser, exit_now
from megatron_train.launch.link import ParentLink
from megatron_train.launch.output import write_whole_lines


def main() -> NoReturn:
    """Runs the command, reports an error to the parent, and ends at once."""
    link = ParentLink(int(sys.argv[1]))
    link.exit_with_parent()
    write_whole_lines(sys.stdout)
    screen, words = sys.argv[2], sys.argv[3:]
    if screen != "-":
        sys.stderr = open(int(screen), "w", buffering=1, errors="backslashreplace")  # noqa: SIM115, PTH123
    try:
        arguments = build_parser().parse_args(words)
        arguments.words = words
        arguments.print_notes = False  # the parent prints them
        arguments.nproc_per_node = None  # the ranks are started already
        status = int(arguments.run(arguments))
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:  # noqa: BLE001 - interrupts are reported too
        report = failure_report(error)
        link.send(report)
        status = report.status
    exit_now(status)


if __name__ == "__main__":
    main()
