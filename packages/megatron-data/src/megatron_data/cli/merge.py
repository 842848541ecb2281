"""`megatron-data merge`."""

import argparse
from typing import Any

from megatron_data._command import Parser
from megatron_data.cli.options import (
    PREFIX_HELP,
    add_overwrite_option,
    add_storage_option,
    storage_from,
)


def add_parser(commands: Any) -> None:
    """Adds the command and its options."""
    parser: Parser = commands.add_parser(
        "merge",
        help="concatenate datasets into one",
        description="Concatenate datasets of the same tokenizer into PREFIX.bin and .idx. The "
        "result has a manifest if all inputs have one.",
    )
    parser.add_argument("prefix", metavar="PREFIX", nargs="+", help=PREFIX_HELP)
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path and name")
    add_storage_option(parser)
    add_overwrite_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Merges the datasets and prints what the result holds."""
    from megatron_data.preprocessing.existing import refuse_existing
    from megatron_data.preprocessing.joining import merge

    if not arguments.overwrite:
        refuse_existing([arguments.output_prefix])
    counts = merge(arguments.prefix, arguments.output_prefix, storage_from(arguments))
    print(f"{arguments.output_prefix}: {counts.summary}")
    return 0
