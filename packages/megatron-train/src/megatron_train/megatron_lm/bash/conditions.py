"""Conditions: ``[ ... ]``, ``test`` and ``[[ ... ]]``."""

import re
from collections.abc import Sequence

from megatron_train.megatron_lm.bash import patterns
from megatron_train.megatron_lm.bash.expand import Expander
from megatron_train.megatron_lm.bash.fields import text_of
from megatron_train.megatron_lm.bash.lexer import Word
from megatron_train.megatron_lm.bash.variables import is_unknown

_COMPARISONS = {
    "-eq": int.__eq__,
    "-ne": int.__ne__,
    "-gt": int.__gt__,
    "-ge": int.__ge__,
    "-lt": int.__lt__,
    "-le": int.__le__,
}
_STRINGS = ("=", "==", "!=")
_BINARY = (*_STRINGS, *_COMPARISONS, "<", ">", "=~", "-nt", "-ot", "-ef")
_UNARY = re.compile(r"-[a-zA-Z]")
_INTEGER = re.compile(r"[ \t\n]*[-+]?[0-9]{1,40}[ \t]*")
_MOST_WORDS = 200


class _Fault(Exception):  # noqa: N818 - a test with a syntax error, which is false
    pass


class _Unknown(Exception):  # noqa: N818 - a condition that depends on more than variables
    pass


def test_command(words: Sequence[str], expander: Expander) -> bool | None:
    """Returns whether ``test`` succeeds with the words ``words``, or None if that is unknown."""
    if any(map(is_unknown, words)) or len(words) > _MOST_WORDS:
        return None
    try:
        return _Test(words, expander).result()
    except _Fault:
        return False
    except _Unknown:
        return None


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


def _both(first: bool | None, second: bool | None, decisive: bool) -> bool | None:
    """Combines two conditions; the result is ``decisive`` if one of them is."""
    if decisive in (first, second):
        return decisive
    return None if None in (first, second) else not decisive


class _Test:
    """Evaluates ``test`` by the number of its words, as POSIX says."""

    def __init__(self, words: Sequence[str], expander: Expander) -> None:
        self._words, self._expander, self._at = list(words), expander, 0

    def result(self) -> bool | None:
        return self._of(self._words)

    def _of(self, words: Sequence[str]) -> bool | None:
        if len(words) < 2:
            return bool(words and words[0])
        if len(words) == 2:
            if words[0] == "!":
                return not words[1]
            return self._unary(words[0], words[1])
        if len(words) == 3:
            if words[1] in _BINARY:
                return self._binary(*words)
            if words[1] in ("-a", "-o"):
                first, second = bool(words[0]), bool(words[2])
                return first and second if words[1] == "-a" else first or second
            if words[0] == "!":
                return _not(self._of(words[1:]))
            if words[0] == "(" and words[2] == ")":
                return bool(words[1])
            raise _Fault
        if len(words) == 4:
            if words[0] == "!":
                return _not(self._of(words[1:]))
            if words[0] == "(" and words[3] == ")":
                return self._of(words[1:3])
        self._words, self._at = list(words), 0
        value = self._or()
        if self._at < len(self._words):
            raise _Fault
        return value

    def _or(self) -> bool | None:
        value = self._and()
        while self._next() == "-o":
            self._at += 1
            value = _both(value, self._or(), True)
        return value

    def _and(self) -> bool | None:
        value = self._term()
        while self._next() == "-a":
            self._at += 1
            value = _both(value, self._and(), False)
        return value

    def _next(self, offset: int = 0) -> str | None:
        index = self._at + offset
        return self._words[index] if index < len(self._words) else None

    def _term(self) -> bool | None:
        word = self._next()
        if word is None:
            raise _Fault
        if word == "!":
            self._at += 1
            return _not(self._term())
        if word == "(":
            self._at += 1
            value = self._or()
            if self._next() != ")":
                raise _Fault
            self._at += 1
            return value
        following, third = self._next(1), self._next(2)
        if following in _BINARY and third is not None:
            self._at += 3
            return self._binary(word, str(following), third)
        if _UNARY.fullmatch(word):
            if following is None:
                raise _Fault
            self._at += 2
            return self._unary(word, following)
        self._at += 1
        return bool(word)

    def _unary(self, sign: str, word: str) -> bool | None:
        if sign in ("-z", "-n"):
            return (word == "") == (sign == "-z")
        if sign == "-v":
            return self._is_set(word)
        if not _UNARY.fullmatch(sign):
            raise _Fault
        raise _Unknown

    def _is_set(self, name: str) -> bool | None:
        value = self._expander.variables.get(name)
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) or isinstance(value, dict):
            raise _Unknown
        if value is not None and is_unknown(value):
            raise _Unknown
        return value is not None

    @staticmethod
    def _binary(left: str, sign: str, right: str) -> bool | None:
        if sign in _STRINGS:
            return (left == right) == (sign != "!=")
        if sign in _COMPARISONS:
            if not (_INTEGER.fullmatch(left) and _INTEGER.fullmatch(right)):
                raise _Fault
            numbers = int(left), int(right)
            if max(map(abs, numbers)) >= 1 << 63:
                raise _Unknown
            return bool(_COMPARISONS[sign](*numbers))
        raise _Unknown


def double_brackets(words: Sequence[Word], line: int, expander: Expander) -> bool | None:
    """Returns whether ``[[ words ]]`` at a line is true, or None if that is unknown.

    Raises:
        TrainError: The condition is incomplete.
    """
    if len(words) > _MOST_WORDS:
        return None
    condition = _DoubleBrackets(words, line, expander)
    value = condition.either(True)
    condition.end()
    return value


class _DoubleBrackets:
    """Evaluates ``[[ ... ]]``; words are not split, and the right side of ``==`` is a pattern."""

    def __init__(self, words: Sequence[Word], line: int, expander: Expander) -> None:
        self._words, self._line, self._expander, self._at = words, line, expander, 0

    def end(self) -> None:
        if self._at < len(self._words):
            raise self._error()

    def either(self, active: bool) -> bool | None:
        value = self._all(active)
        while self._literal() == "||":
            self._at += 1
            needed = active and value is not True
            other = self._all(needed)
            value = _both(value, other, True) if needed else value
        return value

    def _all(self, active: bool) -> bool | None:
        value = self._term(active)
        while self._literal() == "&&":
            self._at += 1
            needed = active and value is not False
            other = self._term(needed)
            value = _both(value, other, False) if needed else value
        return value

    def _literal(self, offset: int = 0) -> str:
        index = self._at + offset
        return self._words[index].literal if index < len(self._words) else ""

    def _error(self) -> Exception:
        line = self._words[min(self._at, len(self._words) - 1)].line if self._words else self._line
        text = self._literal() or "]]"
        return self._expander.variables.error(line, f"unexpected {text!r} in a condition")

    def _word(self) -> Word:
        if self._at >= len(self._words) or self._literal() in ("&&", "||", "(", ")", "<", ">"):
            raise self._error()
        self._at += 1
        return self._words[self._at - 1]

    def _term(self, active: bool) -> bool | None:
        if self._literal() == "!":
            self._at += 1
            return _not(self._term(active))
        if self._literal() == "(":
            self._at += 1
            value = self.either(active)
            if self._literal() != ")":
                raise self._error()
            self._at += 1
            return value
        following = self._literal(1)
        if _UNARY.fullmatch(self._literal()) and following not in _BINARY:
            sign = self._word().literal
            word = self._word()
            return self._unary(sign, word) if active else None
        left = self._word()
        sign = self._literal()
        if sign in _BINARY:
            self._at += 1
            right = self._word()
            return self._binary(left, sign, right) if active else None
        text = self._expander.text(left) if active else ""
        return None if is_unknown(text) else bool(text)

    def _unary(self, sign: str, word: Word) -> bool | None:
        text = self._expander.text(word)
        return test_command([sign, text], self._expander)

    def _binary(self, left: Word, sign: str, right: Word) -> bool | None:
        text = self._expander.text(left)
        if sign in _STRINGS:
            field = self._expander.field(right)
            if is_unknown(text + text_of(field)):
                return None
            try:
                regex = re.compile(patterns.to_regex(field), re.S)
            except (patterns.PatternError, re.error):
                return None
            return (regex.fullmatch(text) is not None) == (sign != "!=")
        other = self._expander.text(right)
        if sign not in _COMPARISONS or is_unknown(text + other):
            return None
        first = self._expander.arithmetic(text, left.line)
        second = self._expander.arithmetic(other, right.line)
        if first is None or second is None:
            return None
        return bool(_COMPARISONS[sign](first, second))
