"""`megatron-data trace`."""

import argparse
from functools import partial
from typing import Any

from megatron_data._command import Parser
from megatron_data.cli.bounds import Bounded
from megatron_data.cli.options import PREFIX_HELP, add_allow_http, add_storage_option, storage_from
from megatron_data.cli.work import add_max_document_bytes


def add_parser(commands: Any) -> None:
    """Adds the command and its options."""
    parser: Parser = commands.add_parser(
        "trace",
        help="show which file, line and byte a token came from",
        description="Show which file, line or row, and byte a token or a document of a dataset "
        "came from. The sources are read from the paths in the manifest.",
    )
    parser.add_argument("prefix", metavar="PREFIX", help=PREFIX_HELP)
    parser.add_argument(
        "token", type=int, nargs="?", metavar="TOKEN", help="index of a token in the .bin, from 0"
    )
    parser.add_argument(
        "--document",
        type=int,
        action=Bounded,
        minimum=0,
        metavar="N",
        help="index of a document, from 0, instead of TOKEN",
    )
    add_allow_http(parser, "read a source from a web server that the manifest names")
    add_max_document_bytes(
        parser,
        "largest size of a document of the source in bytes; a lower limit in the manifest holds",
    )
    add_storage_option(parser)
    parser.set_defaults(run=partial(run, parser))


def run(parser: Parser, arguments: argparse.Namespace) -> int:
    """Prints the document and where it came from."""
    from megatron_data.preprocessing.tracing import trace

    if (arguments.token is None) == (arguments.document is None):
        parser.error("give either TOKEN or --document N")
    found = trace(
        arguments.prefix,
        arguments.token,
        document=arguments.document,
        storage=storage_from(arguments),
        allow_http=arguments.allow_http,
        max_document_bytes=arguments.max_document_bytes,
    )
    last = found.first_token + found.tokens - 1
    tokens = f"tokens {found.first_token:,} to {last:,}" if found.tokens else "no token"
    what = f"document {found.document:,} ({tokens})"
    if arguments.token is not None:
        what = (
            f"token {arguments.token:,} is number {arguments.token - found.first_token:,} of {what}"
        )
    print(f"{what}, from")
    if found.inexact_reason is None:
        print(found.path + "".join(_place(found.number, found.offset, found.size)))
        return 0
    first, units = found.span.first, found.span.units
    print(f"{found.path}, between line, row or file {first:,} and {first + units - 1:,}")
    print(f"the exact location is unknown: {found.inexact_reason}")
    return 0


def _place(number: int | None, offset: int | None, size: int | None) -> list[str]:
    parts = []
    if number is not None:
        parts.append(f", {'row' if offset is None else 'line'} {number:,}")
    if offset is not None and size:
        parts.append(f", bytes {offset:,} to {offset + size - 1:,}")
    return parts
