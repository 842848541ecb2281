"""Exceptions for invalid settings and for ranks that do not take part. Messages are one line."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Self


class FieldError(ValueError):
    """Invalid settings of a configuration dataclass.

    Base class of the exceptions of packages with such configurations. The message names the fields.
    Code that built the configuration from flags or a file can format the message with the names of
    the flags or keys instead, see `format_message`.

    Args:
        message: One line. With ``fields``, ``{size}`` stands for the name and the value of the
            field, ``size 96``; ``{size:=}`` for ``size=96``; ``{size:name}`` for the name only;
            ``{size:repr}`` for the value only.
        fields: Values of the configuration by field, as from `vars`.
    """

    def __init__(self, message: str, fields: Mapping[str, Any] | None = None) -> None:
        self._message = message
        self._fields = fields
        super().__init__(self.format_message({}))

    def format_message(self, names: Mapping[str, str]) -> str:
        """Returns the message with other names of fields.

        Args:
            names: Name to print for a field, such as its flag, by field. A field that is not in
                ``names`` keeps its own name. A replaced name is followed by a space and the value.
        """
        if self._fields is None:
            return self._message
        return self._message.format_map(
            {name: _Field(name, value, names.get(name)) for name, value in self._fields.items()}
        )

    def prefixed(self, words: str) -> Self:
        """Returns the error with words before its message.

        Args:
            words: Text without braces, such as the number of a layer.
        """
        return type(self)(f"{words}{self._message}", self._fields)


_LONGEST_VALUE = 200  # characters; values from a damaged file may have any number


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


class _Field:
    """A field of a configuration in the message of an error."""

    def __init__(self, name: str, value: Any, replaced: str | None) -> None:
        self._name, self._value, self._replaced = name, value, replaced

    def __format__(self, form: str) -> str:
        name = self._replaced or self._name
        if form == "name":
            return name
        if form == "repr":
            return _short(repr(self._value))
        between = "=" if form == "=" and self._replaced is None else " "
        return f"{name}{between}{_short(str(self._value))}"


class LayoutError(FieldError):
    """An invalid layout, or ranks that disagree on the layout."""


class CollectiveError(RuntimeError):
    """A rank did not take part in a collective, or its connection broke. The job must end."""


def rank_list(ranks: Sequence[int]) -> str:
    """Returns ascending ranks as text: `rank 3`, `ranks 0-5, 7`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def backend_text(error: RuntimeError) -> str:
    """Returns the first sentence of a backend's message, without its source location."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[[^\]]*\]\s*", "", lines[0]).split(". ")[0].rstrip(".")
