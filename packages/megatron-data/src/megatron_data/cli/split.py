"""`megatron-data split`."""

import argparse
from functools import partial
from typing import Any

from megatron_data._command import Parser
from megatron_data.cli.bounds import Bounded
from megatron_data.cli.options import (
    PREFIX_HELP,
    add_overwrite_option,
    add_storage_option,
    storage_from,
)


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser: Parser = commands.add_parser(
        "split",
        help="cut a dataset into several",
        description="Cut a dataset into several, which hold its documents in their order.",
    )
    parser.add_argument("prefix", metavar="PREFIX", help=PREFIX_HELP)
    parser.add_argument(
        "--shares",
        type=float,
        action=Bounded,
        exclusive_minimum=0,
        nargs="+",
        metavar="X",
        help="of the documents, one for each output; others than those that sum to 1 are divided "
        "by their sum, which a warning says",
    )
    parser.add_argument(
        "--documents",
        type=int,
        action=Bounded,
        nargs="+",
        metavar="N",
        help="numbers of documents, instead of shares, one for each output",
    )
    parser.add_argument(
        "--output-prefixes", nargs="+", required=True, metavar="PREFIX", help="paths and names"
    )
    add_storage_option(parser)
    add_overwrite_option(parser)
    parser.set_defaults(run=partial(run, parser))


def run(parser: Parser, arguments: argparse.Namespace) -> int:
    """Splits and says what came out."""
    from megatron_data.preprocessing.existing import refuse_existing
    from megatron_data.preprocessing.joining import split

    if (arguments.shares is None) == (arguments.documents is None):
        parser.error("--shares or --documents is needed, one of the two")
    outputs = arguments.output_prefixes
    if not arguments.overwrite:
        refuse_existing(outputs)
    made = split(
        arguments.prefix,
        outputs,
        shares=arguments.shares,
        documents=arguments.documents,
        storage=storage_from(arguments),
    )
    for output, counts in zip(outputs, made, strict=True):
        print(f"{output}: {counts.summary}")
    return 0
