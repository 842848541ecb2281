"""Reads the content of ``${...}``."""

import re
from dataclasses import dataclass

_PARAMETER = re.compile(
    r"(?P<length>#?)(?P<name>[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-])"
    r"(?:\[(?P<index>[^\]]*)\])?(?P<rest>.*)",
    re.S,
)
_OPERATION = re.compile(r"(?P<action>:?[-=?+]|%%|##|\^\^|,,|[%#^,])(?P<operand>.*)", re.S)
_CASES = ("^", "^^", ",", ",,")


@dataclass(frozen=True)
class Parameter:
    """The content of ``${...}``.

    Attributes:
        name: Name of a variable, a number or ``@ * # ? $ ! -``.
        index: Index of an array as text, or None.
        length: Whether the length is asked for (``${#NAME}``).
        action: The operation, such as ``:-`` or ``%%``; empty without one.
        operand: The text after the operation.
    """

    name: str
    index: str | None
    length: bool
    action: str
    operand: str

    @property
    def is_list(self) -> bool:
        """Whether it stands for all elements of an array or all positional parameters."""
        return self.name in ("@", "*") or self.index in ("@", "*")

    @property
    def star(self) -> bool:
        """Whether elements are joined in quotes."""
        return "*" in (self.name, self.index)


def parse_parameter(text: str) -> Parameter | None:
    """Returns the parts of ``text``, or None if the expansion is not supported."""
    found = _PARAMETER.fullmatch(text)
    if not found:
        return None
    if text[0] == "#" and len(text) > 1 and found["length"] and found["rest"]:
        return None
    if found["index"] is not None and not re.match("[A-Za-z_]", found["name"]):
        return None
    action = operand = ""
    if found["rest"]:
        operation = _OPERATION.fullmatch(found["rest"])
        if not operation:
            return None
        action, operand = operation["action"], operation["operand"]
        if action in _CASES and operand:
            return None
    return Parameter(found["name"], found["index"], bool(found["length"]), action, operand)


def changed_case(text: str, action: str) -> str | None:
    """Returns ``text`` in other letters; None for letters whose case depends on the locale."""
    if not text.isascii():
        return None
    change = str.upper if action[0] == "^" else str.lower
    return change(text) if len(action) == 2 else change(text[:1]) + text[1:]
