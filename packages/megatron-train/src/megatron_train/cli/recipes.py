"""``megatron-train recipes``: lists, shows and compares recipes."""

import argparse
import sys
import textwrap
from typing import Any

from megatron_train.config.flags import Parser
from megatron_train.config.recipes import (
    compare_recipes,
    recipe_description,
    recipe_names,
    recipe_text,
)

_EXAMPLE = """\
example:
  megatron-train recipes diff gpt2-124m megatron-gpt-345m
  megatron-train recipes show llama-tiny > run.yaml
  megatron-train pretrain gpt --config run.yaml --data-path corpus_text_document
"""


def add_command(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Adds the command to ``commands``."""
    summary = "list, show and compare the recipes for --recipe"
    recipes = commands.add_parser(
        "recipes", help=summary, description=summary.capitalize() + ".", epilog=_EXAMPLE
    )
    actions = recipes.add_subparsers(metavar="ACTION", required=True)
    parser = _add(actions, "list", "list all recipes with descriptions", _list)
    parser = _add(actions, "show", "print a recipe as YAML for --config", _show)
    parser.add_argument("name", metavar="NAME", help="name of a recipe")
    parser = _add(actions, "diff", "print the settings that differ between two recipes", _diff)
    parser.add_argument("one", metavar="ONE", help="a recipe, or a YAML file of settings")
    parser.add_argument("other", metavar="OTHER", help="another recipe or file")


def _add(actions: Any, name: str, summary: str, run: Any) -> Parser:
    description = summary.capitalize() + "."
    parser: Parser = actions.add_parser(name, help=summary, description=description)
    parser.set_defaults(run=run)
    return parser


def _list(arguments: argparse.Namespace) -> int:
    for name in recipe_names():
        sys.stdout.write(
            f"{name}\n{textwrap.indent(textwrap.fill(recipe_description(name), 92), '  ')}\n"
        )
    return 0


def _show(arguments: argparse.Namespace) -> int:
    sys.stdout.write(recipe_text(arguments.name))
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    rows = compare_recipes(arguments.one, arguments.other)
    table = [("", arguments.one, arguments.other)] + [
        (key, _shown(one), _shown(other)) for key, one, other in rows
    ]
    widths = [max(len(row[column]) for row in table) for column in range(2)]
    for key, one, other in table:
        sys.stdout.write(f"{key:<{widths[0]}}  {one:<{widths[1]}}  {other}\n")
    return 0


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "-" if value is None else str(value)
