"""Integer arithmetic of Bash: 64 bits, division and remainder truncate."""

import re
from collections.abc import Callable
from typing import Protocol

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]+#[0-9A-Za-z@_]+|0[xX][0-9A-Fa-f]+|[0-9]+)(?![0-9A-Za-z_@#])|"
    r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)|"
    r"(?P<sign>\+\+|--|\*\*|<<=|>>=|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&^|]=|[-+*/%&^|<>=!~?:,()]))"
)
_LEVELS = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<=", ">=", "<", ">"),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)
"""Binary operators from the lowest precedence to the highest, without ``**``."""

_ASSIGNMENTS = ("=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "^=", "|=")
_LONGEST = 400
_DEEPEST = 24


class ArithmeticFault(Exception):  # noqa: N818 - a value that is unknown, not an error of the user
    """The expression is not supported, or Bash does not evaluate it."""


class UnknownValue(ArithmeticFault):
    """A value in the expression is only known when the script runs."""


class Values(Protocol):
    """Variables as text."""

    def value(self, name: str) -> str:
        """Returns the value of a variable, which is empty if it is not set."""

    def assign(self, name: str, value: str) -> None:
        """Sets a variable."""


def calculate(text: str, variables: Values, depth: int = 0) -> int:
    """Returns the value of an expression; assignments in it change ``variables``.

    Raises:
        ArithmeticFault: The expression is not supported, or Bash does not evaluate it.
    """
    if "\0" in text:
        raise UnknownValue
    if depth > _DEEPEST or len(text) > _LONGEST:
        raise ArithmeticFault("the expression is too long")
    if not text.strip():
        return 0
    evaluation = _Evaluation(text, variables, depth)
    value = evaluation.comma(True)
    if evaluation.sign():
        raise ArithmeticFault(f"unexpected {evaluation.sign()!r}")
    return value


class _Evaluation:
    def __init__(self, text: str, variables: Values, depth: int) -> None:
        self._variables, self._depth, self._at = variables, depth, 0
        self._tokens: list[tuple[str, str]] = []
        index, end = 0, len(text.rstrip())
        while index < end:
            found = _TOKEN.match(text, index)
            if not found:
                raise ArithmeticFault(f"unexpected {text[index:]!r}")
            self._tokens.append((found.lastgroup or "", found.group(found.lastgroup or 0)))
            index = found.end()

    def sign(self, offset: int = 0) -> str:
        """Returns the token at the current index as text; it is empty at the end."""
        index = self._at + offset
        return self._tokens[index][1] if index < len(self._tokens) else ""

    def comma(self, active: bool) -> int:
        value = self._assignment(active)
        while self.sign() == ",":
            self._at += 1
            value = self._assignment(active)
        return value

    def _assignment(self, active: bool) -> int:
        """Evaluates an assignment or less; ``active`` is false where Bash does not evaluate."""
        if self._kind() == "name" and self.sign(1) in _ASSIGNMENTS:
            name, sign = self.sign(), self.sign(1)
            self._at += 2
            before = self._variable(name, active) if active and sign != "=" else 0
            value = self._assignment(active)
            if active:
                value = value if sign == "=" else self._apply(sign[:-1], before, value)
                self._variables.assign(name, str(value))
            return value
        return self._conditional(active)

    def _conditional(self, active: bool) -> int:
        condition = self._binary(0, active)
        if self.sign() != "?":
            return condition
        self._at += 1
        first = self.comma(active and bool(condition))
        if self.sign() != ":":
            raise ArithmeticFault("':' is missing")
        self._at += 1
        second = self._conditional(active and not condition)
        if self.sign() in _ASSIGNMENTS:
            raise ArithmeticFault("an assignment to a value")
        return first if condition else second

    def _binary(self, level: int, active: bool) -> int:
        if level == len(_LEVELS):
            return self._power(active)
        value = self._binary(level + 1, active)
        while self.sign() in _LEVELS[level] and self._kind() == "sign":
            sign = self.sign()
            self._at += 1
            if sign in ("&&", "||"):
                needed = active and bool(value) == (sign == "&&")
                other = self._binary(level + 1, needed)
                value = int(bool(other) if needed else sign == "||")
            else:
                other = self._binary(level + 1, active)
                value = self._apply(sign, value, other) if active else 0
        return value

    def _power(self, active: bool) -> int:
        base = self._unary(active)
        if self.sign() != "**":
            return base
        self._at += 1
        exponent = self._power(active)
        return self._apply("**", base, exponent) if active else 0

    def _unary(self, active: bool) -> int:
        sign = self.sign()
        if sign in ("++", "--"):
            self._at += 1
            if self._kind() != "name":
                if not self._tokens[self._at :]:
                    raise ArithmeticFault("an operand is missing")
                return self._unary(active)  # Bash reads two signs
            name = self.sign()
            self._at += 1
            return self._step(name, sign, active)[1]
        if sign in ("-", "+", "!", "~"):
            self._at += 1
            value = self._unary(active)
            return _wrap({"-": -value, "+": value, "!": int(not value), "~": ~value}[sign])
        return self._primary(active)

    def _primary(self, active: bool) -> int:
        kind, text = self._kind(), self.sign()
        self._at += 1
        if text == "(":
            value = self.comma(active)
            if self.sign() != ")":
                raise ArithmeticFault("')' is missing")
            self._at += 1
            return value
        if kind == "number":
            return _number(text)
        if kind != "name":
            raise ArithmeticFault(f"unexpected {text!r}")
        if self.sign() in ("++", "--"):
            sign = self.sign()
            self._at += 1
            return self._step(text, sign, active)[0]
        return self._variable(text, active)

    def _kind(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    def _variable(self, name: str, active: bool) -> int:
        if not active:
            return 0
        return calculate(self._variables.value(name), self._variables, self._depth + 1)

    def _step(self, name: str, sign: str, active: bool) -> tuple[int, int]:
        """Adds 1 to a variable or subtracts it; returns the values before and after it."""
        before = self._variable(name, active)
        after = _wrap(before + (1 if sign == "++" else -1))
        if active:
            self._variables.assign(name, str(after))
        return before, after

    @staticmethod
    def _apply(sign: str, left: int, right: int) -> int:
        if sign in ("/", "%"):
            if not right:
                raise ArithmeticFault("a division by 0")
            quotient = abs(left) // abs(right)
            quotient = quotient if (left < 0) == (right < 0) else -quotient
            return _wrap(quotient if sign == "/" else left - quotient * right)
        if sign == "**":
            if right < 0:
                raise ArithmeticFault("a negative exponent")
            return _wrap(pow(left, right, 1 << 64))
        return _wrap(_FUNCTIONS[sign](left, right))


_FUNCTIONS: dict[str, Callable[[int, int], int]] = {
    "|": int.__or__,
    "^": int.__xor__,
    "&": int.__and__,
    "==": int.__eq__,
    "!=": int.__ne__,
    "<": int.__lt__,
    ">": int.__gt__,
    "<=": int.__le__,
    ">=": int.__ge__,
    "<<": lambda left, right: left << (right & 63),
    ">>": lambda left, right: left >> (right & 63),
    "+": int.__add__,
    "-": int.__sub__,
    "*": int.__mul__,
}


def _wrap(value: int) -> int:
    """Returns ``value`` as a signed number of 64 bits."""
    return (int(value) + (1 << 63)) % (1 << 64) - (1 << 63)


def _number(text: str) -> int:
    base_text, hash_sign, digits = text.partition("#")
    if not hash_sign:
        digits, base = text, 10
        if text[:2] in ("0x", "0X"):
            digits, base = text[2:], 16
        elif text[0] == "0":
            base = 8
    else:
        base = int(base_text[:3])
    if not 2 <= base <= 64 or (base_text[:1] == "0" and hash_sign):
        raise ArithmeticFault(f"the base of {text}")
    value = 0
    for digit in digits:
        value = value * base + _digit(digit, base)
    return _wrap(value)


def _digit(digit: str, base: int) -> int:
    if digit.isdigit():
        value = int(digit)
    elif digit in "@_":
        value = 62 + (digit == "_")
    elif base <= 36:
        value = ord(digit.lower()) - ord("a") + 10
    else:
        value = ord(digit) - ord("a") + 10 if digit.islower() else ord(digit) - ord("A") + 36
    if value >= base:
        raise ArithmeticFault(f"the digit {digit}")
    return value
