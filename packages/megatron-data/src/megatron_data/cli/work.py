"""Options of the commands that preprocess, and what those say of their work."""

import argparse
from typing import TYPE_CHECKING

from megatron_data._command import Parser
from megatron_data.cli.bounds import Bounded
from megatron_data.cli.options import add_overwrite_option
from megatron_data.plural import plural
from megatron_data.sources.protocol import MAX_DOCUMENT_BYTES

if TYPE_CHECKING:
    from megatron_data.preprocessing.engine import PreprocessedDataset

ON_ERROR = ("fail", "skip", "quarantine")


def add_work_options(
    parser: Parser, one: str, longer: str, workers: str
) -> "argparse._ArgumentGroup":
    """`--workers`, `--on-error`, `--max-document-bytes` and `--overwrite`.

    Args:
        parser: of a command.
        one: of what may fail, as a clause: "a document that cannot be read".
        longer: what may have too many bytes: "a longer document".
        workers: what is said of one process.
    """
    group = parser.add_argument_group("work")
    group.add_argument(
        "--workers", type=int, action=Bounded, default=1, metavar="N", help=f"processes{workers}"
    )
    group.add_argument(
        "--on-error",
        choices=ON_ERROR,
        default=ON_ERROR[0],
        metavar="HOW",
        help=f"what {one} does: fail ends the run, skip counts it, quarantine also writes its "
        "place and the reason to PREFIX.quarantine.jsonl",
    )
    add_max_document_bytes(group, f"{longer} is one that cannot be read")
    add_overwrite_option(group)
    return group


def add_max_document_bytes(group: "Parser | argparse._ArgumentGroup", what: str) -> None:
    """`--max-document-bytes`.

    Args:
        group: that takes it.
        what: becomes of a longer document.
    """
    group.add_argument(
        "--max-document-bytes",
        type=int,
        action=Bounded,
        default=MAX_DOCUMENT_BYTES,
        metavar="N",
        help=what,
    )


def print_resumed(made: "PreprocessedDataset") -> None:
    """Says how much an earlier run had done, if it had."""
    if made.resumed_chunks:
        were = "was" if made.chunks == 1 else "were"
        chunks = f"{made.resumed_chunks:,} of {plural(made.chunks, 'chunk')}"
        print(f"{chunks} {were} done by an earlier run")


def print_skipped(made: "PreprocessedDataset", arguments: argparse.Namespace) -> None:
    """Says what was left out, if anything was."""
    from megatron_data.preprocessing.assembly import quarantine_path
    from megatron_data.sources.protocol import KINDS

    if skipped := made.skipped.documents:
        kinds = ", ".join(f"{count:,} {KINDS[kind]}" for kind, count in made.skipped.kinds.items())
        told = f"the first: {made.first_skipped}"
        if arguments.on_error == "quarantine":
            told = f"see {quarantine_path(arguments.output_prefix)}"
        print(f"{skipped:,} skipped ({kinds}); {told}")
