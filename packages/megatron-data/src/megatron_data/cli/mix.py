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
    """Adds the command and its options."""
    parser: Parser = commands.add_parser(
        "mix",
        help="show or write a blend of datasets",
        description="Show the samples, tokens and epochs of each dataset of a blend in a run. "
        "Weights are given before the prefixes, or computed from --epochs or --tokens.",
    )
    parser.add_argument(
        "blend",
        metavar="PREFIX",
        nargs="*",
        help="datasets as in --data-path: prefixes, or alternating weights and prefixes; prefixes "
        "without weights are weighted by size",
    )
    parser.add_argument(
        "--data-args-path", metavar="FILE", help="file that holds such a list, instead of PREFIX"
    )
    parser.add_argument(
        "--epochs",
        type=float,
        action=Bounded,
        exclusive_minimum=0,
        nargs="+",
        metavar="X",
        help="epochs of each prefix",
    )
    parser.add_argument(
        "--tokens",
        type=float,
        action=Bounded,
        exclusive_minimum=0,
        nargs="+",
        metavar="N",
        help="tokens to read from each prefix, such as 2e9",
    )
    parser.add_argument(
        "--samples",
        type=int,
        action=Bounded,
        metavar="N",
        help="samples of the run; unset: as many as --epochs or --tokens give, else one epoch of "
        "all datasets together",
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
        "--split", metavar="TEXT", help="--split of the run; its first share is the training split"
    )
    parser.add_argument(
        "--output", metavar="FILE", help="write the blend as a file for --data-args-path"
    )
    add_storage_option(parser)
    add_overwrite_option(parser)
    parser.set_defaults(run=partial(run, parser))


def run(parser: Parser, arguments: argparse.Namespace) -> int:
    """Prints the table and writes the blend if --output is given."""
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
        samples = max(int(total) // length, 1)
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
        parser.error("give either PREFIX or --data-args-path FILE")
    if arguments.data_args_path is not None:
        blend = read_data_args(arguments.data_args_path)
    else:
        blend = parse_data_path(arguments.blend)
    amounts = arguments.epochs or arguments.tokens
    if not amounts:
        return blend
    if (arguments.epochs and arguments.tokens) or blend.weights:
        parser.error("give only one of weights, --epochs and --tokens")
    if len(amounts) != len(blend.prefixes):
        which = "--epochs" if arguments.epochs else "--tokens"
        prefixes = len(blend.prefixes)
        given = "1 prefix" if prefixes == 1 else f"{prefixes:,} prefixes"
        parser.error(
            f"{which} has {plural(len(amounts), 'number')} for {given}; give one for each prefix"
        )
    named = dict(zip(blend.prefixes, amounts, strict=True))
    if len(named) < len(amounts):
        parser.error("a prefix is given twice; give each prefix once")
    if arguments.epochs:
        return blend_by_epochs(named, arguments.split, storage_from(arguments))
    return blend_by_tokens({prefix: round(count) for prefix, count in named.items()})
