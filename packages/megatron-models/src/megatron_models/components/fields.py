"""Fields of configurations: their flags, and the checks that their metadata describe.

A component's configuration is a frozen dataclass of plain values that derives from
`ComponentConfig`. A model's configuration derives from those of its components, so it has their
fields, flat and under Megatron-LM's names. A field added to a component is a field of every model
with the component. Messages name fields in braces, so that a program with flags can show the flags.

Importing this module does not import torch.
"""

import dataclasses
import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin

from megatron_parallel.nearest import nearest_divisors, nearest_multiples

from megatron_models.errors import ConfigError

Config = TypeVar("Config", bound="ComponentConfig")

_LARGEST = 2**40
"""Bound of integers, since a configuration may come from a damaged file."""


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
    head: bool = False,
    small: int | None = None,
    **metadata: Any,
) -> dict[str, Any]:
    """Returns the metadata of a field.

    Args:
        name: The flag.
        help_text: One line for ``--help`` and the documentation.
        positive: The value must be finite and above 0.
        nonnegative: The value must be finite and at least 0.
        derived: 0 stands for a value that is derived from other fields.
        maximum: The largest number allowed.
        no_effect: The value has no effect on what a model computes, such as weights of training
            losses or padding in memory. A family need not express it.
        objective: The value affects training losses only. A checkpoint's weights work with any
            value.
        head: The value selects or shapes heads only. Weights of a model with another value can
            begin a training (`megatron_models.new_head_parameters`).
        small: Size in a small model of the same structure (`megatron_models.shrunk`), or the next
            larger one that fits. Defaults to None, which means that the size is kept.
        **metadata: ``unit`` and ``choices``.
    """
    checks = {
        "positive": positive,
        "nonnegative": nonnegative,
        "derived": derived,
        "maximum": maximum,
        "no_effect": no_effect,
        "objective": objective,
        "head": head,
        "small": small,
    }
    used = {key: value for key, value in checks.items() if value}
    return {"flag": name, "help": help_text, **used, **metadata}


@dataclass(frozen=True, kw_only=True)
class ComponentConfig:
    """Base of the configurations of components and models.

    Raises:
        ConfigError: A value has the wrong type or range, or values do not fit together. The message
            names the fields and the values.
    """

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            _check_type(self, entry)
        for entry in dataclasses.fields(self):
            _check_range(self, entry)
        self._fill()
        self._check()

    def _fill(self) -> None:
        """Derives fields that are 0 from other fields.

        An override calls `super`, since models have several bases.
        """

    def _check(self) -> None:
        """Refuses values that do not fit together, after all fields are derived.

        An override calls `super`, since models have several bases.
        """

    def _set(self, name: str, value: float) -> None:
        """Sets a field that is 0."""
        if getattr(self, name) == 0:
            object.__setattr__(self, name, value)

    def unused_fields(self) -> dict[str, str]:
        """Returns fields with other values than their defaults that have no effect, and why.

        Such values are accepted, since published models and checkpoints have them. A program shows
        them to its user. The reason follows "has no effect" and names fields in braces. An override
        adds to the result of `super`.
        """
        return {}

    def fields_for_layers(self, layers: Sequence[int]) -> dict[str, Any]:
        """Returns the fields that differ in a model with only some of the layers.

        An override adds fields that describe single layers, such as patterns, to the result of
        `super`.

        Args:
            layers: Global numbers of the layers, ascending.
        """
        return {}

    def component(self, kind: type[Config], **changes: Any) -> Config:
        """Returns a component's own configuration with this model's values.

        Args:
            kind: The component's configuration or description. Fields that the model lacks have
                their defaults.
            **changes: Fields with other values, for example in one layer.
        """
        names = [each.name for each in dataclasses.fields(kind) if hasattr(self, each.name)]
        return kind(**{name: getattr(self, name) for name in names} | changes)


def check_divisible(
    config: ComponentConfig, field: str, axis: str, parts: int, what: str = ""
) -> None:
    """Refuses a size that an axis of the layout does not divide.

    Args:
        config: The configuration with the field.
        field: Name of the field with the size.
        axis: Field of the layout for the axis.
        parts: Size of the axis.
        what: Text before the field in the message.

    Raises:
        ConfigError: The size is not divisible; the message names both fields, their values and the
            nearest ones that fit.
    """
    size: int = getattr(config, field)
    if size % parts:
        raise ConfigError(
            f"{{{axis}}} cannot cut {what}{{{field}}} into {parts} equal parts; use "
            f"{{{axis}:name}} {nearest_divisors(size, parts)}, or {{{field}:name}} "
            f"{nearest_multiples(size, parts)}",
            {**vars(config), axis: parts},
        )


def _check_type(config: ComponentConfig, entry: "dataclasses.Field[Any]") -> None:
    """Refuses a value of another type. An integer for a float is converted."""
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
    if kind == tuple[int, ...]:
        if type(value) in (list, tuple) and all(type(each) is int for each in value):
            object.__setattr__(config, entry.name, tuple(value))  # JSON has lists
            return
        raise ConfigError(
            f"{{{entry.name}:name}} must be a list of integers, not {{{entry.name}:repr}}",
            vars(config),
        )
    if type(value) is not kind:
        expected = {int: "an integer", float: "a number", bool: "true or false", str: "text"}[kind]  # type: ignore[index]
        raise ConfigError(
            f"{{{entry.name}:name}} must be {expected}, not {{{entry.name}:repr}}", vars(config)
        )


def _check_range(config: ComponentConfig, entry: "dataclasses.Field[Any]") -> None:
    """Refuses integers and sizes outside their range."""
    name, value, checks = entry.name, getattr(config, entry.name), entry.metadata
    largest = checks.get("maximum", _LARGEST if entry.type is int else math.inf)
    if entry.type in (int, float) and value > largest:
        raise ConfigError(
            f"{{{name}:name}} is {{{name}:repr}}, more than {largest}; use {largest} or less",
            vars(config),
        )
    if value == 0 and checks.get("derived"):
        return
    if checks.get("positive") and not (value > 0 and math.isfinite(value)):
        raise ConfigError(
            f"{{{name}:name}} must be a positive number, not {{{name}:repr}}; {_nearest(entry, 1)}",
            vars(config),
        )
    if checks.get("nonnegative") and not (value >= 0 and math.isfinite(value)):
        raise ConfigError(
            f"{{{name}:name}} must be a number of at least 0, not {{{name}:repr}}; "
            f"{_nearest(entry, 0)}",
            vars(config),
        )


def _nearest(entry: "dataclasses.Field[Any]", smallest: int) -> str:
    """Returns the smallest integer that a field accepts, or the default of a number."""
    if entry.type is float and entry.default is not dataclasses.MISSING:
        return f"the default is {entry.default!r}"
    return f"use {smallest} or more"


def literal(text: object) -> str:
    """Returns text for a `ConfigError` with fields, whose braces are printed as they are."""
    return str(text).replace("{", "{{").replace("}", "}}")
