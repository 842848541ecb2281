"""Commands with one parser for each kind of model: ``megatron-train COMMAND KIND``."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_models import model_kinds

from megatron_train.config.extensions import tasks_for
from megatron_train.config.flags import Parser


def add_model_command(
    commands: "argparse._SubParsersAction[Parser]",
    name: str,
    summary: str,
    *,
    add_flags: Callable[[str, Parser], None],
    usage: str,
    description: str,
    example: str,
    **defaults: Any,
) -> None:
    """Adds a command that takes the flags of a run, for each kind of model that has a task.

    Args:
        commands: Where to add the command.
        name: Name of the command.
        summary: What the command does, for the list of commands.
        add_flags: Adds the flags, given the name of a kind and the parser. Called when needed.
        usage: What follows ``megatron-train COMMAND KIND``.
        description: Help of a kind; ``{summary}`` stands for the summary of the kind.
        example: Commands for the end of the help; ``{kind}`` stands for the name of the kind.
        defaults: Attributes of the parsed command line.
    """
    command = commands.add_parser(name, help=summary, description=summary.capitalize() + ".")
    kinds = command.add_subparsers(metavar="MODEL", required=True)
    for kind_name, kind in model_kinds().items():
        if not tasks_for(kind_name):
            continue
        parser = kinds.add_parser(
            kind.name,
            megatron=True,
            flags=partial(add_flags, kind.name),
            usage=f"%(prog)s {usage}",
            help=kind.summary,
            description=description.format(summary=kind.summary),
            epilog=example.format(kind=kind.name),
        )
        parser.set_defaults(kind=kind.name, **defaults)
