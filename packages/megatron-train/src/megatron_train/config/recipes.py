"""Recipes: their names, their settings and the differences between two of them."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

from megatron_train._command import nearest
from megatron_train.config.files import (
    MOST_BYTES,
    file_description,
    file_kind,
    parse_settings,
    read_file,
)
from megatron_train.config.options import Option
from megatron_train.config.run_sections import DEFAULT_KIND, run_options
from megatron_train.config.values import Values
from megatron_train.errors import TrainError

RECIPE_ORIGIN: Final = "recipe "
"""Prefix of the origin of values that come from a recipe."""

_SUFFIX = ".yaml"


def recipe_names() -> list[str]:
    """Returns the names of all recipes."""
    folder = resources.files("megatron_train.recipes")
    files = (entry.name for entry in folder.iterdir())
    return sorted(name.removesuffix(_SUFFIX) for name in files if name.endswith(_SUFFIX))


def recipe_text(name: str) -> str:
    """Returns the YAML text of a recipe.

    Raises:
        TrainError: There is no recipe with this name.
    """
    names = recipe_names()
    if name not in names:
        near = nearest(name, names)
        raise TrainError(f"unknown recipe {name!r}{near} (known: {', '.join(names)})")
    folder = resources.files("megatron_train.recipes")
    return folder.joinpath(name + _SUFFIX).read_text(encoding="utf-8")


def recipe_kind(name: str) -> str:
    """Returns the kind of model that a recipe is for."""
    return file_kind(recipe_text(name)) or DEFAULT_KIND


def recipe_values(name: str, options: Sequence[Option], kind: str | None = None) -> Values:
    """Returns the settings of a recipe.

    Args:
        name: Name of the recipe.
        options: All settings of a run.
        kind: Kind of the model. Defaults to None, which accepts recipes for every kind.

    Raises:
        TrainError: There is no such recipe, or it is for another kind of model.
    """
    own, origin = recipe_kind(name), f"{RECIPE_ORIGIN}{name}"
    if kind not in (None, own):
        raise TrainError(
            f"--recipe {name} is for models of kind {own}, not {kind}; use megatron-train pretrain "
            f"{own}"
        )
    return parse_settings(recipe_text(name), origin, options)


def recipe_description(name: str) -> str:
    """Returns the description of a recipe in one line."""
    return file_description(recipe_text(name))


def compare_recipes(one: str, other: str) -> list[tuple[str, Any, Any]]:
    """Returns the settings in which two recipes or configuration files differ.

    A missing setting counts with its default.

    Args:
        one: Name of a recipe or path of a YAML file.
        other: Name of a recipe or path of a YAML file.

    Returns:
        Triples of key, value in ``one`` and value in ``other``, in the order of the options.

    Raises:
        TrainError: They are for different kinds of models, or one of them cannot be read.
    """
    kinds = [_kind(name) for name in (one, other)]
    if kinds[0] != kinds[1]:
        raise TrainError(
            f"{one} is for models of kind {kinds[0]} and {other} for kind {kinds[1]}; compare "
            "settings of one kind"
        )
    options = run_options(kinds[0])
    first, second = (_values(name, options) for name in (one, other))
    pairs = ((o.key, _value(first, o), _value(second, o)) for o in options)
    return [(key, a, b) for key, a, b in pairs if a != b]


def _values(name: str, options: Sequence[Option]) -> Values:
    if _is_file(name):
        return read_file(Path(name), options)
    return recipe_values(name, options)


def _kind(name: str) -> str:
    """Returns the kind of model of a recipe or a file."""
    if not _is_file(name):
        return recipe_kind(name)
    with Path(name).open(encoding="utf-8", errors="replace") as file:
        return file_kind(file.read(MOST_BYTES)) or DEFAULT_KIND


def _is_file(name: str) -> bool:
    return name.endswith((_SUFFIX, ".yml")) or Path(name).is_file()


def _value(values: Values, option: Option) -> Any:
    return values.get(option.key) if option.key in values.given else option.default
