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
    """Adds the command and its options."""
    parser: Parser = commands.add_parser(
        "split",
        help="split a dataset into several",
        description="Split a dataset into several. The documents keep their order.",
    )
    parser.add_argument("prefix", metavar="PREFIX", help=PREFIX_HELP)
    parser.add_argument(
        "--shares",
        type=float,
        action=Bounded,
        exclusive_minimum=0,
        nargs="+",
        metavar="X",
        help="share of the documents of each output; shares that do not sum to 1 are normalized, "
        "with a warning",
    )
    parser.add_argument(
        "--documents",
        type=int,
        action=Bounded,
        nargs="+",
        metavar="N",
        help="number of documents of each output, instead of --shares",
    )
    parser.add_argument(
        "--output-prefixes",
        nargs="+",
        required=True,
        metavar="PREFIX",
        help="folder and name of each output",
    )
    add_storage_option(parser)
    add_overwrite_option(parser)
    parser.set_defaults(run=partial(run, parser))


def run(parser: Parser, arguments: argparse.Namespace) -> int:
    """Splits the dataset and prints what each output holds."""
    from megatron_data.preprocessing.existing import refuse_existing
    from megatron_data.preprocessing.joining import split

    if (arguments.shares is None) == (arguments.documents is None):
        parser.error("give either --shares or --documents")
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
