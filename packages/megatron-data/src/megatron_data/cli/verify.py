"""`megatron-data verify`."""

import argparse
from typing import Any

from megatron_data._command import Parser
from megatron_data.cli.options import PREFIX_HELP, add_storage_option, storage_from


def add_parser(commands: Any) -> None:
    """Adds the command and its options."""
    parser: Parser = commands.add_parser(
        "verify",
        help="check structure and digests of datasets",
        description="Check every length, pointer and bound of a dataset, and compare its sizes, "
        "counts and digests with its manifest if it has one. Exits with 1 at the first error.",
    )
    parser.add_argument("prefix", metavar="PREFIX", nargs="+", help=PREFIX_HELP)
    add_storage_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Verifies each dataset; the first error ends the command."""
    from megatron_data.preprocessing.verification import verify

    storage = storage_from(arguments)
    for prefix in arguments.prefix:
        found = verify(prefix, storage)
        compared = (
            "digests match the manifest" if found.has_manifest else "no manifest: structure only"
        )
        print(f"{prefix}: in order, {found.counts.summary} ({compared})")
    return 0
