"""``megatron-train tasks``: lists the installed tasks."""

import argparse
import sys

from megatron_train.config.extensions import kinds_for
from megatron_train.config.flags import Parser
from megatron_train.tasks.kinds import task_kinds
from megatron_train.tasks.registry import TASKS


def add_command(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Adds the command to ``commands``."""
    summary = "list the installed tasks"
    tasks = commands.add_parser("tasks", help=summary, description=summary.capitalize() + ".")
    actions = tasks.add_subparsers(metavar="ACTION", required=True)
    text = "list tasks with the kinds of models they train, including those of other distributions"
    parser = actions.add_parser("list", help=text, description=text.capitalize() + ".")
    parser.set_defaults(run=_list)


def _list(arguments: argparse.Namespace) -> int:
    origins = {name: entry.module.partition(".")[0] for name, entry in TASKS.entries().items()}
    for name, task in task_kinds().items():
        sys.stdout.write(f"{name}: {task.summary} ({origins[name]})\n")
        sys.stdout.write(f"  models: {', '.join(kinds_for(name)) or 'none'}\n")
        for section in task.sections:
            sys.stdout.write(f"  settings: {section.name} ({section.title})\n")
    return 0
