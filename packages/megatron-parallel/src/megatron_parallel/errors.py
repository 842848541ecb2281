"""What is raised when settings cannot be used or a rank does not take part, in one line."""

import re
from collections.abc import Mapping, Sequence
from typing import Any


class FieldError(ValueError):
    """Settings that cannot be used, told by the names of their fields or by others' names for them.

    Base of the exceptions of packages whose configurations are dataclasses: whoever made one from
    flags or a file can tell the error in their spelling, see `format_message`.

    Args:
        message: one line. If there are ``fields``, ``{size}`` stands for the field and its value,
            ``size 96``, ``{size:=}`` for ``size=96``, ``{size:name}`` for the name alone and
            ``{size:repr}`` for the value alone.
        fields: values of the configuration by field, as `vars` gives them.
    """

    def __init__(self, message: str, fields: Mapping[str, Any] | None = None) -> None:
        self._message = message
        self._fields = fields
        super().__init__(self.format_message({}))

    def format_message(self, spelling: Mapping[str, str]) -> str:
        """The line with fields called as ``spelling`` says, each with a space before its value."""
        if self._fields is None:
            return self._message
        return self._message.format_map(
            {name: _Field(name, value, spelling.get(name)) for name, value in self._fields.items()}
        )


_LONGEST_VALUE = 200  # characters; values from a damaged file may have any number


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


class _Field:
    """What a field of a configuration is in the message of an error."""

    def __init__(self, name: str, value: Any, spelt: str | None) -> None:
        self._name, self._value, self._spelt = name, value, spelt

    def __format__(self, form: str) -> str:
        name = self._spelt or self._name
        if form == "name":
            return name
        if form == "repr":
            return _short(repr(self._value))
        between = "=" if form == "=" and self._spelt is None else " "
        return f"{name}{between}{_short(str(self._value))}"


class LayoutError(FieldError):
    """A layout that cannot be, or ranks that do not agree on one."""


class CollectiveError(RuntimeError):
    """A rank did not take part in a collective, or its connection broke; the job must end."""


def rank_list(ranks: Sequence[int]) -> str:
    """Ascending ranks in words: `rank 3`, `ranks 0-5, 7`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def backend_text(error: RuntimeError) -> str:
    """Returns the first sentence of the backend's message, without the place in its source."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[[^\]]*\]\s*", "", lines[0]).split(". ")[0].rstrip(".")
