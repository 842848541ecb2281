"""`megatron-data bench`."""

import argparse
import os
from functools import partial
from typing import Any

from megatron_data._command import Parser
from megatron_data.cli.bounds import Bounded
from megatron_data.cli.options import INPUT_HELP, add_tokenizer_options, tokenizer_from
from megatron_data.cli.tables import format_table
from megatron_data.cli.work import add_max_document_bytes
from megatron_data.plural import plural

_ADVICE = {
    "read": "storage or decompression is the bottleneck: use a local disk, or zstd",
    "parse": "use several processes: preprocess --workers",
    "tokenize": "use several processes (preprocess --workers), or try --fast",
    "write": "the disk of the output is the bottleneck: --folder measures another one",
}


def add_parser(commands: Any) -> None:
    """Adds the command and its options."""
    parser: Parser = commands.add_parser(
        "bench",
        help="measure how fast files are read and tokenized, and find the bottleneck",
        description="Measure the phases of preprocess, and how fast samples are read, on the first "
        "part of a corpus.",
    )
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help=INPUT_HELP)
    parser.add_argument(
        "--json-key", default="text", metavar="KEY", help="key or column that holds the text"
    )
    parser.add_argument(
        "--megabytes",
        type=float,
        action=Bounded,
        exclusive_minimum=0,
        default=16,
        metavar="N",
        help="megabytes of uncompressed input to measure",
    )
    parser.add_argument(
        "--workers",
        type=int,
        action=Bounded,
        default=1,
        metavar="N",
        help="processes of the complete preprocess run",
    )
    parser.add_argument(
        "--fast", action="store_true", help="also measure gigatoken (the extra fast)"
    )
    parser.add_argument(
        "--seq-length",
        type=int,
        action=Bounded,
        default=1024,
        metavar="N",
        help="tokens per sample",
    )
    parser.add_argument(
        "--folder",
        metavar="PATH",
        help="folder in which a temporary folder is made for the output; unset: the system's "
        "folder for temporary files",
    )
    add_max_document_bytes(parser, "largest size of a document in bytes")
    add_tokenizer_options(parser)
    parser.set_defaults(run=partial(run, parser))


def run(parser: Parser, arguments: argparse.Namespace) -> int:
    """Runs the benchmark and prints a table and the bottleneck."""
    from megatron_data.preprocessing.benchmarking import benchmark
    from megatron_data.tokenizers.fast import fast_tokenizer

    tokenizer = tokenizer_from(parser, arguments)
    fast = fast_tokenizer(tokenizer) if arguments.fast else tokenizer
    found = benchmark(
        arguments.input,
        tokenizer,
        json_key=arguments.json_key,
        megabytes=arguments.megabytes,
        workers=arguments.workers,
        other_tokenizers=() if fast is tokenizer else (fast,),
        sequence_length=arguments.seq_length,
        folder=arguments.folder,
        max_document_bytes=arguments.max_document_bytes,
    )
    whole = sum(phase.seconds for phase in found.phases)
    rows = [
        (
            one.name,
            f"{one.seconds:.3f}",
            f"{one.seconds / whole:.1%}" if one in found.phases else "",
            f"{one.size / 1e6 / one.seconds:,.2f}" if one.size else "",
            f"{one.documents / one.seconds:,.0f}",
            f"{one.tokens / one.seconds:,.0f}" if one.tokens else "",
        )
        for one in (*found.phases, *found.other_measurements)
    ]
    head = ("phase", "seconds", "of phases", "MB/s", "documents/s", "tokens/s")
    print(format_table(head, rows))
    first, (name, share) = found.phases[0], found.bottleneck
    print(
        f"\n{plural(first.documents, 'document')}, {first.size / 1e6:.1f} MB, on a machine of "
        f"{os.cpu_count()} cores; for samples, documents are samples"
    )
    print(f"bound by {name}, {share:.0%} of the phases: {_ADVICE[name]}")
    return 0
