"""Limits on chat templates: the number of steps, and the size of the texts that they make.

A template comes with a tokenizer and is not trusted. The limit is on steps and not on time, so
that every machine refuses the same conversations. Operations cost steps according to their work.
The size of a text is checked before it is made.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from string import Formatter
from typing import Any

from jinja2 import TemplateError

from megatron_data.tokenizers.generation_blocks import Blocks

CALL, FILTER = 32, 8
"""Steps of a call (such as a macro) and of a filter, besides the text that they read and make."""

_CHARACTERS = 64  # characters per step
_ELEMENT = 2  # steps per element of a new list
_BITS = 20_000  # largest number of bits of an integer
_WIDTHS = re.compile(r"\d+")
# A specification of the operator `%`: key, flags, width, precision, length, conversion.
_PERCENT = re.compile(
    r"%(?:\([^()]*\))?[-#0 +]*((?:\*|[0-9]*)(?:\.(?:\*|[0-9]*))?)[hlL]?.?", re.DOTALL
)
_NESTED_KEY = re.compile(r"%\([^()]*\(")
_LONGER = (
    *("capitalize", "casefold", "decode", "encode", "hex", "lower", "swapcase", "title"),
    "upper",
)
_GROWTH = 4  # largest number of characters of one character in another case or as bytes
_UNBOUNDED = ("expandtabs", "translate", "maketrans", "to_bytes", "from_bytes", "fromkeys")
_CODECS = ("utf-8", "utf8", "ascii", "latin-1", "strict", "ignore", "replace")


class TemplateLimitError(TemplateError):
    """Raised when a template exceeds its budget."""


@dataclass
class Budget:
    """The remaining budget of a template for one conversation.

    Attributes:
        steps: Remaining steps.
        characters: Largest number of characters of a text.
        now: The time that the template reads.
        blocks: The `{% generation %}` blocks of the rendering.
    """

    steps: int
    characters: int
    now: datetime = datetime.min
    blocks: Blocks = field(default_factory=Blocks)

    def spend(self, steps: int) -> None:
        """Charges steps.

        Raises:
            TemplateLimitError: No steps are left.
        """
        self.steps -= steps
        if self.steps < 0:
            raise TemplateLimitError(
                "it exceeds the limit of steps (--max-template-steps, TemplateLimits.steps)"
            )

    def allocate(self, characters: int) -> None:
        """Charges a text before it is made.

        Raises:
            TemplateLimitError: The text is too long.
        """
        if characters > self.characters:
            raise TemplateLimitError(
                f"it makes a text of more than {self.characters:,} characters "
                "(--max-template-characters, TemplateLimits.characters)"
            )
        self.spend(1 + max(characters // _CHARACTERS, 0))

    def measure(self, value: Any) -> int:
        """Charges reading a whole value; returns its approximate size as text in characters."""
        if isinstance(value, str | bytes):
            self.allocate(len(value))
            return len(value)
        waiting, size = [value], 0
        while waiting:
            each = waiting.pop()
            self.spend(1)
            if isinstance(each, str | bytes):
                size += len(each)
            elif isinstance(each, Mapping):
                waiting += each.keys()
                waiting += each.values()
                self.spend(2 * len(each))
            elif isinstance(each, list | tuple | set | frozenset):
                waiting += each
                self.spend(len(each))
            elif isinstance(each, range):
                size += 8 * len(each)
            size += 8
            if size > self.characters:
                self.allocate(size)
        self.spend(size // _CHARACTERS)
        return size

    def collect(self, values: Any) -> list[Any]:
        """Returns the elements of an iterable as a list; charges each of them."""
        found = []
        for value in values:
            self.spend(1)
            found.append(value)
        return found

    def spend_elements(self, value: Any, weight: int = 1) -> None:
        """Charges `weight` steps per element of a value; a value without a length counts as 1."""
        try:
            count = len(value)
        except TypeError:
            count = 1
        self.spend(weight * (1 + count))


def check_binary(budget: Budget, operator: str, left: Any, right: Any) -> None:
    """Charges a binary operator before it is applied.

    Raises:
        TemplateLimitError: The result exceeds a limit.
    """
    budget.spend(1)
    if operator == "%" and isinstance(left, str | bytes):
        check_percent(budget, str(left), [right])
    elif operator == "*":
        for repeated, times in ((left, right), (right, left)):
            if isinstance(repeated, str | bytes) and isinstance(times, int):
                budget.allocate(len(repeated) * times)
            elif isinstance(repeated, list | tuple) and isinstance(times, int):
                budget.spend(_ELEMENT * max(len(repeated) * times, 0))
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(max(left.bit_length(), 1) * abs(right))
    elif operator == "+" and isinstance(left, str | bytes) and isinstance(right, str | bytes):
        budget.allocate(len(left) + len(right))
    elif operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
        budget.spend(_ELEMENT * (len(left) + len(right)))


def check_format(budget: Budget, text: str, values: Iterable[Any]) -> None:
    """Charges `str.format` before it is applied.

    Raises:
        TemplateLimitError: The result exceeds a limit, or a width is given by a value.
        ValueError: The text is not a format.
    """
    parsed = [(field, spec or "") for _, field, spec, _ in Formatter().parse(text)]
    specifications = [spec for field, spec in parsed if field is not None]
    nested = any("{" in spec for spec in specifications)
    _check_widths(budget, text, specifications, values, nested)


def check_percent(budget: Budget, text: str, values: Iterable[Any]) -> None:
    """Charges the operator `%` on a text before it is applied.

    Raises:
        TemplateLimitError: The result exceeds a limit, or a width is given by a value.
    """
    if _NESTED_KEY.search(text):
        raise TemplateLimitError(f"a key with brackets in {text!r:.60} is not supported")
    specifications = _PERCENT.findall(text)
    nested = any("*" in spec for spec in specifications)
    _check_widths(budget, text, specifications, values, nested)


def _check_widths(
    budget: Budget, text: str, specifications: Sequence[str], values: Iterable[Any], nested: bool
) -> None:
    if nested:
        raise TemplateLimitError(f"a width given by a value in {text!r:.60} is not supported")
    widths = [digits for spec in specifications for digits in _WIDTHS.findall(spec)]
    if any(len(digits) > 5 for digits in widths):
        raise TemplateLimitError(f"a number of more than 5 digits in {text!r:.60} is not supported")
    longest = sum(map(budget.measure, values))
    width = max(map(int, widths), default=0)
    budget.allocate(len(text) + len(specifications) * (width + longest))


def check_method(budget: Budget, value: Any, name: str, arguments: tuple[Any, ...]) -> None:
    """Charges a method of a built-in type before it is called.

    Raises:
        TemplateLimitError: The result exceeds a limit, or its size cannot be known.
    """
    if name in _UNBOUNDED:
        raise TemplateLimitError(f"the method {name} is not supported")
    if name in ("encode", "decode") and (others := [a for a in arguments if a not in _CODECS]):
        raise TemplateLimitError(f"{name}({others[0]!r:.20}) is not supported")
    if not isinstance(value, str | bytes):
        if name in ("index", "count"):  # they compare elements
            budget.measure(value)
        elif name == "isdisjoint":
            budget.spend_elements(value)
            for other in arguments:
                budget.measure(other)
                budget.spend_elements(other)
        elif name != "get":
            budget.spend_elements(value)
        return
    size = (_GROWTH if name in _LONGER else 1) * len(value)
    match name, arguments:
        case "center" | "ljust" | "rjust" | "zfill", (int(width), *_):
            size = max(size, width)
        case "replace", (str() | bytes() as old, str() | bytes() as new, *_):
            size = replaced_size(value, old, new)
        case "join", (parts, *_):
            size = joined_size(budget, value, parts)
    budget.allocate(size)


def replaced_size(value: Any, old: Any, new: Any) -> int:
    """Returns the characters of a text after a replacement."""
    try:
        return int(len(value) + value.count(old) * max(len(new) - len(old), 0))
    except TypeError:
        return len(value)


def joined_size(budget: Budget, between: Any, parts: Any) -> int:
    """Returns the characters of joined parts."""
    return budget.measure(parts) + len(between) * len(parts)


def _check_bits(bits: int) -> None:
    if bits > _BITS:
        raise TemplateLimitError(f"an integer of more than {_BITS:,} bits is not supported")
