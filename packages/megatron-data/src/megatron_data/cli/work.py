"""Options and messages that the preprocessing commands share."""

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
    parser: Parser, unreadable: str, oversized: str, workers_note: str
) -> "argparse._ArgumentGroup":
    """Adds `--workers`, `--on-error`, `--max-document-bytes` and `--overwrite`.

    Args:
        parser: The parser of a command.
        unreadable: What `--on-error` applies to: "a document that cannot be read".
        oversized: What `--max-document-bytes` limits: "a larger document".
        workers_note: End of the help of `--workers`.
    """
    group = parser.add_argument_group("work")
    group.add_argument(
        "--workers",
        type=int,
        action=Bounded,
        default=1,
        metavar="N",
        help=f"worker processes{workers_note}",
    )
    group.add_argument(
        "--on-error",
        choices=ON_ERROR,
        default=ON_ERROR[0],
        metavar="HOW",
        help=f"what to do with {unreadable}: fail ends the run, skip counts it, quarantine also "
        "writes its location and the reason to PREFIX.quarantine.jsonl",
    )
    add_max_document_bytes(
        group, f"largest size of a document in bytes; {oversized} counts as unreadable"
    )
    add_overwrite_option(group)
    return group


def add_max_document_bytes(group: "Parser | argparse._ArgumentGroup", what: str) -> None:
    """Adds `--max-document-bytes`.

    Args:
        group: The parser or group that gets the option.
        what: The help of the option.
    """
    group.add_argument(
        "--max-document-bytes",
        type=int,
        action=Bounded,
        default=MAX_DOCUMENT_BYTES,
        metavar="N",
        help=what,
    )


def print_resumed(dataset: "PreprocessedDataset") -> None:
    """Prints how many chunks an earlier run had finished, if any."""
    if dataset.resumed_chunks:
        were = "was" if dataset.chunks == 1 else "were"
        chunks = f"{dataset.resumed_chunks:,} of {plural(dataset.chunks, 'chunk')}"
        print(f"{chunks} {were} finished by an earlier run")


def print_skipped(dataset: "PreprocessedDataset", arguments: argparse.Namespace) -> None:
    """Prints how many documents were skipped and why, if any."""
    from megatron_data.preprocessing.assembly import quarantine_path
    from megatron_data.sources.protocol import KINDS

    if skipped := dataset.skipped.documents:
        kinds = ", ".join(
            f"{count:,} {KINDS[kind]}" for kind, count in dataset.skipped.kinds.items()
        )
        details = f"the first: {dataset.first_skipped}"
        if arguments.on_error == "quarantine":
            details = f"see {quarantine_path(arguments.output_prefix)}"
        print(f"{skipped:,} skipped ({kinds}); {details}")
