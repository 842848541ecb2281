"""`megatron-data inspect`."""

import argparse
import sys
from functools import partial
from typing import Any

from megatron_data._command import Parser
from megatron_data.cli.bounds import Bounded
from megatron_data.cli.options import (
    PREFIX_HELP,
    add_storage_option,
    add_tokenizer_options,
    has_tokenizer_options,
    storage_from,
    tokenizer_from,
)
from megatron_data.plural import plural


def add_parser(commands: Any) -> None:
    """Adds the command and its options."""
    parser: Parser = commands.add_parser(
        "inspect",
        help="show documents, counts, lengths and vocabulary use of a dataset",
        description="Show a dataset: counts, a histogram of document lengths, how much of the "
        "vocabulary it uses, and its first documents (as text if a tokenizer is given).",
    )
    parser.add_argument("prefix", metavar="PREFIX", help=PREFIX_HELP)
    parser.add_argument(
        "--documents",
        type=int,
        action=Bounded,
        minimum=0,
        default=3,
        metavar="N",
        help="documents to show",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        action=Bounded,
        minimum=0,
        default=60,
        metavar="N",
        help="tokens to show per document",
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="write the histogram of document lengths to an SVG file"
    )
    add_storage_option(parser)
    add_tokenizer_options(parser)
    parser.set_defaults(run=partial(run, parser))


def run(parser: Parser, arguments: argparse.Namespace) -> int:
    """Prints the summary and the documents."""
    from megatron_data.files import AtomicFile
    from megatron_data.indexed.inspection import document_text, draw_histogram, draw_svg, summarize
    from megatron_data.indexed.reader import IndexedDataset
    from megatron_data.preprocessing.fingerprints import compare_fingerprints, fingerprint_in
    from megatron_data.preprocessing.manifest import read_manifest

    tokenizer = None
    if has_tokenizer_options(arguments):
        tokenizer = tokenizer_from(parser, arguments)
    manifest = read_manifest(arguments.prefix)
    recorded = (manifest or {}).get("tokenizer", {})
    if tokenizer:
        compare_fingerprints({arguments.prefix: fingerprint_in(manifest)}, tokenizer)
    values = (manifest or {}).get("values")
    if values is not None:
        tokenizer = None  # the values of a mask are not token ids
    with IndexedDataset(arguments.prefix, storage_from(arguments)) as dataset:
        summary = summarize(dataset)
        counts = summary.counts
        size = f"{plural(counts.images, 'image')} ({counts.image_bytes:,} bytes), "
        pictures = size if counts.images else ""
        empty = f" ({counts.empty_documents:,} empty)" if counts.empty_documents else ""
        print(
            f"{arguments.prefix}: {plural(counts.documents, 'document')}{empty}, "
            f"{plural(counts.sequences, 'sequence')}, {plural(counts.tokens, 'token')}, "
            f"{pictures}{dataset.dtype}"
        )
        print("\ndocument lengths in tokens")
        encoding = (sys.stdout.encoding or "").lower()
        print(draw_histogram(summary.document_lengths, blocks=encoding.startswith("utf")))
        if arguments.plot is not None:
            title = f"{arguments.prefix}: document lengths in tokens"
            with AtomicFile(arguments.plot) as file:
                file.write(draw_svg(summary.document_lengths, title).encode())
        vocab_size = tokenizer.vocab_size if tokenizer else values or recorded.get("vocab_size")
        used = f"{summary.distinct_tokens:,}"
        if vocab_size:
            used += f" of {vocab_size:,} ({summary.distinct_tokens / vocab_size:.1%})"
        print(f"\nvocabulary: {used} tokens occur; the most common:")
        for token, times in summary.most_common(8):
            text = f"  {tokenizer.decode([token])!r}" if tokenizer else ""
            print(f"{token:>10}  {times / summary.token_counts.sum():6.2%}{text}")
        for number in range(min(arguments.documents, counts.documents)):
            tokens, images = document_text(dataset, number)
            shown = tokens[: arguments.tokens].tolist()
            beside = f", images {images}" if images else ""
            print(f"\ndocument {number}, {plural(len(tokens), 'token')}{beside}")
            print(tokenizer.decode(shown) if tokenizer else " ".join(map(str, shown)))
    return 0
