"""`megatron-data mix`."""

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_data._command import Parser
from megatron_data.cli.bounds import Bounded
from megatron_data.cli.options import add_overwrite_option, add_storage_option, storage_from
from megatron_data.cli.tables import format_table
from megatron_data.plural import plural

if TYPE_CHECKING:
    from megatron_data.datasets.paths import Blend


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser: Parser = commands.add_parser(
        "mix",
        help="show or write a blend of datasets",
        description="Show what a blend comes to: samples, tokens and epochs of every source in a "
        "run. Weights may be given before the prefixes, or follow from epochs or tokens.",
    )
    parser.add_argument(
        "blend",
        metavar="PREFIX",
        nargs="*",
        help="datasets as in --data-path: prefixes, or weights and prefixes in turn; prefixes "
        "alone are mixed by their sizes",
    )
    parser.add_argument(
        "--data-args-path", metavar="FILE", help="file that holds such a list, in place of it"
    )
    parser.add_argument(
        "--epochs",
        type=float,
        action=Bounded,
        exclusive_minimum=0,
        nargs="+",
        metavar="X",
        help="how often each prefix is read",
    )
    parser.add_argument(
        "--tokens",
        type=float,
        action=Bounded,
        exclusive_minimum=0,
        nargs="+",
        metavar="N",
        help="tokens to read of each prefix (2e9)",
    )
    parser.add_argument(
        "--samples",
        type=int,
        action=Bounded,
        metavar="N",
        help="samples of the run; unset: those that --epochs or --tokens come to, else one epoch "
        "of all sources together",
    )
    parser.add_argument(
        "--seq-length", type=int, action=Bounded, default=1024, metavar="N", help="of a sample"
    )
    parser.add_argument(
        "--split", metavar="TEXT", help="--split of the run, which trains on the first share"
    )
    parser.add_argument(
        "--output", metavar="FILE", help="write the blend as a file for --data-args-path"
    )
    add_storage_option(parser)
    add_overwrite_option(parser)
    parser.set_defaults(run=partial(run, parser))


def run(parser: Parser, arguments: argparse.Namespace) -> int:
    """Prints the table and writes the file."""
    from megatron_data.datasets.blends import summarize_blend
    from megatron_data.datasets.paths import write_data_args
    from megatron_data.preprocessing.existing import refuse_file

    if arguments.output is not None and not arguments.overwrite:
        refuse_file(arguments.output)
    blend = _blend(parser, arguments)
    length, split, storage = arguments.seq_length, arguments.split, storage_from(arguments)
    samples = arguments.samples
    if samples is None:
        total = sum(
            blend.weights
            if blend.weights and (arguments.epochs or arguments.tokens)
            else (source.num_tokens for source in summarize_blend(blend, 1, 1, split, storage))
        )
        samples = max(int(total) // max(length, 1), 1)
    mixed = summarize_blend(blend, samples, length, split, storage)
    rows = [
        (
            source.prefix,
            f"{source.num_documents:,}",
            f"{source.num_tokens:,}",
            f"{source.num_samples / samples:.2%}",
            f"{source.num_samples:,}",
            f"{source.drawn_tokens:,}",
            f"{source.epochs:.2f}",
        )
        for source in mixed
    ]
    print(
        format_table(("source", "documents", "tokens", "share", "samples", "drawn", "epochs"), rows)
    )
    each = plural(length, "token")
    print(f"{plural(samples, 'sample')} of {each}: {plural(samples * length, 'token')}")
    if arguments.output is not None:
        write_data_args(arguments.output, blend)
        print(f"{arguments.output}: for --data-args-path")
    return 0


def _blend(parser: Parser, arguments: argparse.Namespace) -> "Blend":
    from megatron_data.datasets.blends import blend_by_epochs, blend_by_tokens
    from megatron_data.datasets.paths import parse_data_path, read_data_args

    if bool(arguments.blend) == (arguments.data_args_path is not None):
        parser.error("PREFIX or --data-args-path FILE is needed, one of the two")
    if arguments.data_args_path is not None:
        blend = read_data_args(arguments.data_args_path)
    else:
        blend = parse_data_path(arguments.blend)
    amounts = arguments.epochs or arguments.tokens
    if not amounts:
        return blend
    if (arguments.epochs and arguments.tokens) or blend.weights:
        parser.error("weights, --epochs and --tokens exclude each other")
    if len(amounts) != len(blend.prefixes):
        which = "--epochs" if arguments.epochs else "--tokens"
        parser.error(
            f"{which} has {plural(len(amounts), 'number')}, and {len(blend.prefixes)} prefixes "
            "are named; give one for each"
        )
    named = dict(zip(blend.prefixes, amounts, strict=True))
    if len(named) < len(amounts):
        parser.error("a prefix is named twice")
    if arguments.epochs:
        return blend_by_epochs(named, arguments.split, storage_from(arguments))
    return blend_by_tokens({prefix: round(count) for prefix, count in named.items()})
