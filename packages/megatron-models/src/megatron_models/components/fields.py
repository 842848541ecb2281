"""Fields of configurations: their flags, and the checks that their metadata describe.

A component's configuration is a frozen dataclass of plain values that derives from
`ComponentConfig`. A model's configuration derives from those of its components, so that its fields
are theirs, flat and under Megatron-LM's names, and a field that a component gains is a field of
every model that has the component. Messages name fields in braces, so that a program
that took the values from flags can name the flags.

Importing this module does not import torch.
"""

import dataclasses
import difflib
import math
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin

from megatron_models.errors import ConfigError

Config = TypeVar("Config", bound="ComponentConfig")

_LARGEST = 2**40
"""A configuration may come from a damaged file: what is counted through has a bound."""


def flag(
    name: str,
    help_text: str,
    *,
    positive: bool = False,
    nonnegative: bool = False,
    derived: bool = False,
    maximum: int | None = None,
    no_effect: bool = False,
    objective: bool = False,
    **metadata: Any,
) -> dict[str, Any]:
    """Returns the metadata of a field.

    Args:
        name: its flag.
        help_text: one line for ``--help`` and the documentation.
        positive: the value must be above 0, and finite.
        nonnegative: the value must be 0 or more, and finite.
        derived: 0 stands for a value worked out from others.
        maximum: the largest integer allowed.
        no_effect: what a model computes is the same whatever the value: weights of training losses,
            padding in memory. A family need not express it.
        objective: only training losses depend on it. A checkpoint's weights go with any value.
        **metadata: ``unit`` and ``choices``.
    """
    said = {
        "positive": positive,
        "nonnegative": nonnegative,
        "derived": derived,
        "maximum": maximum,
        "no_effect": no_effect,
        "objective": objective,
    }
    given = {key: value for key, value in said.items() if value}
    return {"flag": name, "help": help_text, **given, **metadata}


@dataclass(frozen=True, kw_only=True)
class ComponentConfig:
    """Base of the configurations of components and of models.

    Raises:
        ConfigError: a value of the wrong type or range, or values that do not fit together. The
            message names the fields and the numbers.
    """

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            _check_type(self, entry)
        for entry in dataclasses.fields(self):
            _check_range(self, entry)
        self._fill()
        self._check()

    def _fill(self) -> None:
        """Work out fields that are 0 from others; calls `super`, as models have several bases."""

    def _check(self) -> None:
        """Refuses values that do not fit together; all are filled in. Calls `super`, likewise."""

    def _set(self, name: str, value: int) -> None:
        """Gives a field that is 0 its value."""
        if getattr(self, name) == 0:
            object.__setattr__(self, name, value)

    def component(self, kind: type[Config], **changes: Any) -> Config:
        """Returns a component's own configuration, with the values that this model has for it.

        Args:
            kind: the component's configuration or description; fields of it that the model lacks
                keep their defaults.
            **changes: fields that differ, in one layer for example.
        """
        names = [each.name for each in dataclasses.fields(kind) if hasattr(self, each.name)]
        return kind(**{name: getattr(self, name) for name in names} | changes)


def check_divisible(
    config: ComponentConfig, field: str, axis: str, parts: int, what: str = ""
) -> None:
    """Refuses a size that an axis of the layout cannot cut into equal parts.

    Args:
        config: has the field.
        field: the size.
        axis: field of the layout that cuts it.
        parts: of the axis.
        what: stands before the field in the message.

    Raises:
        ConfigError: naming both fields and their values.
    """
    if getattr(config, field) % parts:
        raise ConfigError(
            f"{{{axis}}} cannot cut {what}{{{field}}} into {parts} equal parts; change one of them",
            {**vars(config), axis: parts},
        )


def _check_type(config: ComponentConfig, entry: "dataclasses.Field[Any]") -> None:
    """Refuses a value of another type; an integer given for a float becomes one."""
    value, kind = getattr(config, entry.name), entry.type
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if value in choices:
            return
        near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{{{entry.name}:name}} is {{{entry.name}:repr}}, not one of "
            f"{', '.join(choices)}{hint}",
            vars(config),
        )
    if kind is float and type(value) is int and abs(value) < 2**1000:
        object.__setattr__(config, entry.name, float(value))
        return
    if type(value) is not kind:
        wanted = {int: "an integer", float: "a number", bool: "true or false", str: "text"}[kind]  # type: ignore[index]
        raise ConfigError(
            f"{{{entry.name}:name}} must be {wanted}, not {{{entry.name}:repr}}", vars(config)
        )


def _check_range(config: ComponentConfig, entry: "dataclasses.Field[Any]") -> None:
    """Refuses sizes and numbers outside their range."""
    name, value, checks = entry.name, getattr(config, entry.name), entry.metadata
    largest = checks.get("maximum", _LARGEST)
    if entry.type is int and value > largest:
        raise ConfigError(f"{{{name}:name}} is {{{name}:repr}}, more than {largest}", vars(config))
    if value == 0 and checks.get("derived"):
        return
    if checks.get("positive") and not (value > 0 and math.isfinite(value)):
        raise ConfigError(
            f"{{{name}:name}} must be a positive number, not {{{name}:repr}}", vars(config)
        )
    if checks.get("nonnegative") and not (value >= 0 and math.isfinite(value)):
        raise ConfigError(
            f"{{{name}:name}} must be a number from 0 on, not {{{name}:repr}}", vars(config)
        )
