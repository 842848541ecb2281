"""``megatron-train models``: lists the installed kinds and families of models."""

import argparse
import sys
from importlib.metadata import entry_points

from megatron_models import Family, model_kinds

from megatron_train.config.flags import Parser


def add_command(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Adds the command to ``commands``."""
    summary = "list the installed kinds and families of models"
    models = commands.add_parser("models", help=summary, description=summary.capitalize() + ".")
    actions = models.add_subparsers(metavar="ACTION", required=True)
    text = "list kinds with their components and families, including those of other distributions"
    parser = actions.add_parser("list", help=text, description=text.capitalize() + ".")
    parser.set_defaults(run=_list)


def _list(arguments: argparse.Namespace) -> int:
    families: list[tuple[str, Family]] = [
        (_origin(entry.value), entry.load())
        for entry in sorted(entry_points(group="megatron.families"), key=lambda entry: entry.name)
    ]
    origins = {entry.name: _origin(entry.value) for entry in entry_points(group="megatron.models")}
    for name, kind in model_kinds().items():
        sys.stdout.write(
            f"{name}: {kind.summary} ({origins[name]})\n"
            f"  components: {', '.join(kind.components)}\n"
        )
        for origin, family in families:
            if family.kind == name:
                names = ", ".join(family.architectures)
                sys.stdout.write(f"  family {family.name}: {names} ({origin})\n")
    return 0


def _origin(value: str) -> str:
    """Returns the package of an entry point."""
    return value.partition(".")[0]
