"""Declarations of fields in sections of a configuration, and checks that sections share."""

from dataclasses import field
from typing import Any

from megatron_train.errors import TrainError


def setting(default: Any, help: str, **metadata: Any) -> Any:  # noqa: A002
    """Returns a dataclass field with a default and one line of help.

    Metadata are ``flag``, ``unit`` and ``choices``; ``read_by``, which is ``task`` or
    ``update rule`` for a setting that only some of them read; and ``small``, the size in a small
    copy of a run (`megatron_models.smaller_sizes`).
    """
    return field(default=default, metadata={"help": help, **metadata})


def required(help: str, **metadata: Any) -> Any:  # noqa: A002
    """Returns a dataclass field without a default, with one line of help."""
    return field(metadata={"help": help, **metadata})


def flag_of(name: str) -> str:
    """Returns the flag of the field ``name`` if its metadata give no other."""
    return "--" + name.replace("_", "-")


def check_positive(section: object, *names: str) -> None:
    """Refuses given fields that are not above 0."""
    for name in names:
        value = getattr(section, name)
        if value is not None and not value > 0:
            raise TrainError(f"{flag_of(name)} must be positive, got {value}")


def check_not_negative(section: object, *names: str) -> None:
    """Refuses given fields that are below 0."""
    for name in names:
        value = getattr(section, name)
        if value is not None and not value >= 0:
            raise TrainError(f"{flag_of(name)} must not be negative, got {value}")
