"""Checks of values from files before they are used or shown."""

import reprlib
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from megatron_train.errors import TrainError

Value = TypeVar("Value")

MAX_INTEGER: Final = 2**63 - 1
"""Largest integer of counters and settings: the maximum of int64."""


def read_value(state: object, name: str, kind: type[Value]) -> Value:
    """Returns the value ``name`` of a saved state.

    Args:
        state: The saved state; must be a mapping.
        name: Name of the value.
        kind: Type of the value. ``int`` accepts integers in [0, `MAX_INTEGER`].

    Raises:
        TrainError: The value is missing or has another type.
    """
    if not isinstance(state, Mapping):
        raise TrainError(f"the saved state is damaged: {short_repr(state)} holds no {name!r}")
    if name not in state:
        raise TrainError(f"the saved state is damaged: it has no {name!r}")
    value: Any = state[name]
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    valid = is_integer and 0 <= value <= MAX_INTEGER if kind is int else isinstance(value, kind)
    if not valid:
        raise TrainError(f"the saved state is damaged: {name!r} is {short_repr(value)}")
    return value  # type: ignore[no-any-return]


def short_repr(value: object) -> str:
    """Returns the ``repr`` of a value in one line, truncated if it is long or nested deeply."""
    formatter = reprlib.Repr()
    formatter.maxstring, formatter.maxlong, formatter.maxother = 80, 40, 80
    formatter.maxlevel = formatter.maxlist = formatter.maxdict = 3
    try:
        return formatter.repr(value)
    except ValueError:  # Python does not print integers of more than 4300 digits
        return "an integer of thousands of digits"


def describe_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Returns the keys in which two mappings differ, with both values; empty if they are equal."""
    keys = [key for key in {**saved, **current} if saved.get(key) != current.get(key)]
    return ", ".join(
        f"{key} {saved.get(key)} in the checkpoint and {current.get(key)} in this run"
        for key in keys
    )
