"""``megatron-train merge``: merges adapters into the weights of a checkpoint."""

import argparse
import sys

from megatron_train.config.flags import Parser


def add_command(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Adds the command to ``commands``."""
    summary = "merge adapters (--linear-product) into the weights of a checkpoint, for export"
    parser = commands.add_parser("merge", help=summary, description=summary.capitalize() + ".")
    text = "folder of checkpoints, whose newest one is merged, or one checkpoint"
    parser.add_argument("--load", required=True, metavar="DIR", help=text)
    text = "folder to save the merged checkpoint into, without optimizer state"
    parser.add_argument("--save", required=True, metavar="DIR", help=text)
    parser.set_defaults(run=_merge)


def _merge(arguments: argparse.Namespace) -> int:
    from megatron_train.merging import merge_checkpoint

    path = merge_checkpoint(arguments.load, arguments.save)
    sys.stdout.write(f"saved merged checkpoint {path}\n")
    return 0
