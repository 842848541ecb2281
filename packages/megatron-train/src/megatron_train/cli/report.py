"""``megatron-train report``: writes an HTML page about a run."""

import argparse
from pathlib import Path

from megatron_train.config.flags import Parser


def add_command(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Adds the command to ``commands``."""
    parser = commands.add_parser(
        "report",
        help="write an HTML page about a run: curves, throughput, events, configuration",
        description="Write a self-contained HTML page of the records of a run, which may still be "
        "in progress.",
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="folder of the run (--save)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="HTML file to write [default RUN/report.html]"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Writes the page and prints its path."""
    from megatron_train.report.page import write_report

    output = arguments.output or arguments.folder / "report.html"
    write_report(arguments.folder, output)
    print(output)
    return 0
