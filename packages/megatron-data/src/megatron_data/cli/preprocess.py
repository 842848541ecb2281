"""`megatron-data preprocess`."""

import argparse
from functools import partial
from typing import Any

from .._command import Parser
from .options import INPUT_HELP, add_tokenizer_options, tokenizer_of


def add_parser(commands: Any) -> None:
    """Declare the command."""
    parser: Parser = commands.add_parser(
        "preprocess",
        help="tokenize text into .bin/.idx",
        description="Tokenize text into PREFIX_KEY_document.bin and .idx, which Megatron "
        "reads too, and a manifest PREFIX_KEY_document.meta.json.",
    )
    data = parser.add_argument_group("input and output")
    data.add_argument("--input", nargs="+", required=True, metavar="PATH", help=INPUT_HELP)
    data.add_argument(
        "--json-keys",
        "--json-key",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of JSON lines that hold text; each becomes a dataset",
    )
    data.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path and name")
    add_tokenizer_options(parser)
    work = parser.add_argument_group("work")
    work.add_argument(
        "--append-eod",
        action="store_true",
        help="end every document with the end-of-document token",
    )
    work.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="processes; with 1 the tokenizer runs in its own threads",
    )
    parser.set_defaults(run=partial(run, parser))


def run(parser: Parser, arguments: argparse.Namespace) -> int:
    """Preprocess and say what came out."""
    from ..preprocessing.pipeline import preprocess

    finished = preprocess(
        arguments.input,
        arguments.output_prefix,
        tokenizer_of(parser, arguments),
        json_keys=arguments.json_keys,
        append_eod=arguments.append_eod,
        workers=arguments.workers,
        progress=True,
    )
    for dataset in finished:
        counts, seconds = dataset.counts, max(dataset.seconds, 1e-9)
        empty = f" ({counts.empty_documents:,} empty)" if counts.empty_documents else ""
        print(
            f"{dataset.prefix}: {counts.documents:,} documents{empty}, {counts.tokens:,} tokens "
            f"in {seconds:.1f} s ({dataset.bytes_read / 1e6 / seconds:.2f} MB/s, "
            f"{counts.tokens / seconds:,.0f} tokens/s)"
        )
    return 0
