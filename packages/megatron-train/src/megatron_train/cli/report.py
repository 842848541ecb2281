"""``megatron-train report``: one page of what a run has recorded."""

import argparse
from pathlib import Path

from megatron_train.config.flags import Parser


def add_command(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Adds the command to ``commands``."""
    parser = commands.add_parser(
        "report",
        help="write one HTML page of a run: curves, throughput, events, configuration",
        description="Write one self-contained HTML page of what a run has recorded so far; "
        "the run may still be going on.",
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="folder of --save of the run")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="the page [default RUN/report.html]"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Writes the page and says where it is."""
    from megatron_train.report.page import write_report

    output = arguments.output or arguments.folder / "report.html"
    write_report(arguments.folder, output)
    print(output)
    return 0
