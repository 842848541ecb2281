"""JSON from files of unknown origin: every defect is reported by one type of error."""

import json
import reprlib
from typing import Any

from megatron_ckpt.dtypes import DTYPES
from megatron_ckpt.errors import CheckpointError, shorten

_INT64 = 1 << 63


def parse_object(
    data: bytes | str, where: object, error: type[CheckpointError] = CheckpointError
) -> dict[str, Any]:
    """Returns the JSON object in ``data``.

    Args:
        data: UTF-8 text.
        where: The name of the file, for messages.
        error: The type of error to raise.

    Raises:
        CheckpointError: The text is not JSON, is nested too deeply to be read, or is not an object.
    """
    try:
        content = json.loads(data)
    except RecursionError:
        raise error(f"{where} is nested too deeply to be read") from None
    except ValueError as problem:
        raise error(f"{where} is not JSON: {shorten(problem)}") from None
    if not isinstance(content, dict):
        raise error(f"{where} is not a JSON object")
    return content


class Fields:
    """One JSON object with methods that check the types of its values.

    Args:
        content: The object. Any other value is refused.
        where: File and key, for messages.
        error: The type of error to raise.
    """

    def __init__(
        self, content: object, where: str, error: type[CheckpointError] = CheckpointError
    ) -> None:
        self.where, self.error = where, error
        if not isinstance(content, dict):
            raise error(f"{where} is {reprlib.repr(content)}, not an object")
        self.content: dict[str, Any] = content

    def integer(self, key: str, least: int = 0) -> int:
        """Returns a 64-bit integer of at least ``least``."""
        value = self.require(key)
        if not _is_integer(value, least):
            raise self.invalid(key, f"not an integer of at least {least}")
        return int(value)

    def integers(self, key: str) -> tuple[int, ...]:
        """Returns a list of non-negative integers as a tuple."""
        value = self.require(key)
        if not isinstance(value, list) or not all(_is_integer(each, 0) for each in value):
            raise self.invalid(key, "not a list of non-negative integers")
        return tuple(value)

    def text(self, key: str) -> str:
        """Returns a string."""
        value = self.require(key)
        if not isinstance(value, str):
            raise self.invalid(key, "not a string")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Returns a list of strings as a tuple."""
        value = self.require(key)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.invalid(key, "not a list of strings")
        return tuple(value)

    def dtype(self, key: str) -> str:
        """Returns the safetensors name of a dtype."""
        value = self.text(key)
        if value not in DTYPES:
            raise self.invalid(key, f"not a dtype; known are {', '.join(DTYPES)}")
        return value

    def inner(self, key: str) -> "Fields":
        """Returns the object under ``key``."""
        return Fields(self.require(key), f"{self.where}: {key}", self.error)

    def items(self, key: str) -> "list[tuple[str, Fields]]":
        """Returns the objects in the object under ``key``, with their names."""
        inner = self.inner(key)
        return [
            (name, Fields(value, f"{inner.where} {name!r}", self.error))
            for name, value in inner.content.items()
        ]

    def elements(self, key: str) -> "list[Fields]":
        """Returns the objects in the list under ``key``."""
        value = self.require(key)
        if not isinstance(value, list):
            raise self.invalid(key, "not a list")
        return [
            Fields(each, f"{self.where}: {key}[{at}]", self.error) for at, each in enumerate(value)
        ]

    def require(self, key: str) -> Any:
        """Returns the value under ``key``, of any type.

        Raises:
            CheckpointError: The object has no such key.
        """
        if key not in self.content:
            raise self.error(f"{self.where} lacks {key!r}")
        return self.content[key]

    def invalid(self, key: str, reason: str) -> CheckpointError:
        """Returns the error for the value under ``key``."""
        value = reprlib.repr(self.content.get(key))
        return self.error(f"{self.where}: {key} is {value}, {reason}")


def _is_integer(value: object, least: int) -> bool:
    return type(value) is int and least <= value < _INT64  # excludes bool
