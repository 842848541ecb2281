"""Values that a file gave back, checked before they are used or shown."""

import reprlib
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from megatron_train.errors import TrainError

Value = TypeVar("Value")

MAX_INTEGER: Final = 2**63 - 1
"""Largest whole number that counters and settings may have, which tensors hold."""


def read_value(state: object, name: str, kind: type[Value]) -> Value:
    """Returns the value ``name`` of a saved state.

    Args:
        state: a mapping, if it is not damaged.
        name: of the value.
        kind: its type. A whole number must not be negative, and is a number as well.

    Raises:
        TrainError: there is no such value, or it is of another type.
    """
    if not isinstance(state, Mapping):
        raise TrainError(f"the saved state is damaged: {short_repr(state)} holds no {name!r}")
    if name not in state:
        raise TrainError(f"the saved state is damaged: it has no {name!r}")
    value: Any = state[name]
    whole = isinstance(value, int) and not isinstance(value, bool)
    right = whole and 0 <= value <= MAX_INTEGER if kind is int else isinstance(value, kind)
    if not right:
        raise TrainError(f"the saved state is damaged: {name!r} is {short_repr(value)}")
    return value  # type: ignore[no-any-return]


def short_repr(value: object) -> str:
    """Returns ``value`` as in Python, in one line and cut where it is long or deep."""
    short = reprlib.Repr()
    short.maxstring, short.maxlong, short.maxother = 80, 40, 80
    short.maxlevel = short.maxlist = short.maxdict = 3
    try:
        return short.repr(value)
    except ValueError:  # whole numbers of more than 4300 digits have no text
        return "a number of thousands of digits"


def describe_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Says in which keys two mappings differ, with both values; empty if in none."""
    keys = [key for key in {**saved, **current} if saved.get(key) != current.get(key)]
    return ", ".join(f"{key} {saved.get(key)} there, {current.get(key)} here" for key in keys)
