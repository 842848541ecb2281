"""Expands the words of a launch script as Bash does."""

import re
from collections.abc import Callable, Sequence

from megatron_train.errors import TrainError
from megatron_train.megatron_lm.bash import patterns
from megatron_train.megatron_lm.bash.arithmetic import ArithmeticFault, UnknownValue, calculate
from megatron_train.megatron_lm.bash.assigned import changes_of
from megatron_train.megatron_lm.bash.fields import Field, Piece, joined, split, text_of
from megatron_train.megatron_lm.bash.lexer import ArithmeticToken, Lexer, Part, Word
from megatron_train.megatron_lm.bash.parameters import (
    Parameter,
    changed_case,
    parse_parameter,
)
from megatron_train.megatron_lm.bash.variables import Value, Variables, is_unknown, unknown

_BRACES = re.compile(r"\{[^{}]*(?:,|\.\.).*\}", re.S)
_CHANGED_LIST = re.compile(r"(?:\*|[A-Za-z_][A-Za-z0-9_]*\[\*\])[#%^,]")
_UNCLEAR_EMPTY = re.compile(r"\w+(?:\[[^\]]*\])?(?::?=|[\^,])|[^-+]*[-+].*(?:\$@|\{@|\[@)", re.S)
_CHANGES = ("%", "#", "^", ",")
_UNCLEAR = "\0\0"
_LONGEST = 1 << 16
_LONGEST_PATTERN_TEXT = 4096
_DEEPEST = 20


class Expander:
    """Expands words with the values of ``variables``."""

    def __init__(self, variables: Variables) -> None:
        self.variables = variables
        self._depth = 0
        self._line = 0

    def words(self, word: Word, *, element: bool = False) -> list[str]:
        """Expands a word and splits it; returns any number of words.

        Args:
            word: A word of a command, or an ``element`` in the list of an array.
            element: Whether ``NAME=~`` is not expanded.
        """
        self._line = word.line
        shape = "".join(self._shape(part) for part in word.parts)
        if _BRACES.search(shape):
            text = f"$(echo {shape})"
            self.variables.note(word.line, f"braces are not expanded: {shape}")
            return [unknown(text)]
        assigns = re.match(r"[A-Za-z_][A-Za-z0-9_]*\+?=", word.prefix)
        assigned = assigns is not None and not element
        pieces = self._pieces(self._tilde(word.parts, assigned=assigned))
        return [self._named(field) for field in self._split(pieces)]

    def text(self, word: Word | Sequence[Part], line: int = 0, *, assigned: bool = False) -> str:
        """Expands a word without splitting it, as in an assignment."""
        return text_of(self.field(word, line, assigned=assigned))

    def field(self, word: Word | Sequence[Part], line: int = 0, *, assigned: bool = False) -> Field:
        """Expands a word without splitting it; keeps which pieces are quoted."""
        parts = word.parts if isinstance(word, Word) else word
        self._line = word.line if isinstance(word, Word) else line or self._line
        pieces = self._pieces(self._tilde(parts, assigned=assigned))
        if any(piece.boundary and piece.text == _UNCLEAR for piece in pieces):
            raise self._error("a changed ${@...} in an assignment is not supported with this IFS")
        field = joined(pieces)
        self._check(sum(len(text) for text, _ in field))
        return field

    def arithmetic(self, text: str, line: int) -> int | None:
        """Returns the value of an expression, or None if it contains an unknown value.

        Raises:
            TrainError: The expression is not supported, or Bash refuses it as well.
        """
        self._line = line
        plain = self._plain(text)
        try:
            return calculate(plain, _Numbers(self))
        except UnknownValue:
            self.variables.note(line, f"$(({text})) contains a value that is unknown")
            self.variables.change(changes_of([ArithmeticToken(text, line)], {}))
            return None
        except (ArithmeticFault, RecursionError) as fault:
            raise self._error(f"$(({text[:100]})) cannot be calculated: {fault}") from None

    @staticmethod
    def _shape(part: Part) -> str:
        """Returns the text of an unquoted part; other parts are one letter."""
        return part.text if part.kind == "text" and not part.quoted else "x"

    def _split(self, pieces: Sequence[Piece]) -> list[Field]:
        separators = self.variables.ifs()
        if is_unknown(separators):
            if any(piece.expanded for piece in pieces):
                return [[(unknown(f"$(echo {text_of(joined(pieces))})"), False)]]
            separators = ""
        fields = split(pieces, separators)
        self._check(sum(len(text) for field in fields for text, _ in field))
        return fields

    def _named(self, field: Field) -> str:
        """Returns the text of a word, or an unknown text if it matches names of files."""
        text = text_of(field)
        marked = "".join(
            piece if not quoted else re.sub("[^/]", "q", piece) for piece, quoted in field
        )
        if "/" in marked and "\\" in marked.rpartition("/")[2]:  # Bash may remove the backslash
            raise self._error(
                f"a path with a backslash from a variable is not supported: {text[:80]!r}"
            )
        if self.variables.patterns and not is_unknown(text) and patterns.may_match_files(field):
            self.variables.note(self._line, f"{text} is a pattern that matches files; quote it")
            return unknown(f"$(echo {text})")
        return text

    def _check(self, length: int) -> None:
        if length > _LONGEST:
            raise self._error(f"a value has more than {_LONGEST} characters")

    def _error(self, text: str) -> TrainError:
        return self.variables.error(self._line, text)

    def _tilde(self, parts: Sequence[Part], *, assigned: bool) -> Sequence[Part]:
        """Expands ``~`` at the start of a word and, in an assignment, after ``=`` and ``:``."""
        done: list[Part] = []
        for index, part in enumerate(parts):
            if part.kind != "text" or part.quoted or "~" not in part.text:
                done.append(part)
                continue
            mark = "(^)"
            if assigned:
                mark = "((?<=:))" if index else "(^(?:[^=]*=)?|(?<=:))"
            elif index:
                done.append(part)
                continue
            ends = "/:" if assigned else "/"
            last = index + 1 == len(parts)
            at = 0
            for found in re.compile(f"{mark}~([^{ends}]*)").finditer(part.text):
                if found.end() == len(part.text) and not last:
                    raise self._error("'~' before a quote or variable is not supported")
                done.append(Part("text", part.text[at : found.end(1)], False))
                done.append(Part("text", self._home(found.group(2)), True))
                at = found.end()
            done.append(Part("text", part.text[at:], False))
        return done

    def _home(self, user: str) -> str:
        home = self.variables.get("HOME")
        if user or not isinstance(home, str):
            self.variables.note(self._line, f"~{user} is unknown; give --set HOME=FOLDER")
            return unknown(f"$(echo ~{user})")
        return home

    def _pieces(self, parts: Sequence[Part]) -> list[Piece]:
        done: list[Piece] = []
        for part in parts:
            done += self._part(part)
        return done

    def _part(self, part: Part) -> list[Piece]:
        if part.kind == "text":
            return [Piece(part.text, part.quoted)]
        if part.kind == "quotes":
            return self._quotes(part.parts)
        if part.kind == "command":
            shown = f"$({part.text.strip()})"
            self.variables.note(self._line, f"{shown} is not run; it is left unexpanded")
            return [self._value(unknown(shown), part.quoted)]
        if part.kind == "arithmetic":
            value = self.arithmetic(part.text, self._line)
            text = unknown(f"$(({part.text}))") if value is None else str(value)
            return [self._value(text, part.quoted)]
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._error("variables are nested too deeply")
        pieces = self._parameter(part)
        self._depth -= 1
        return pieces

    def _quotes(self, parts: Sequence[Part]) -> list[Piece]:
        """Expands double quotes: an empty word, unless only an empty list is in them."""
        lists = [part.text for part in parts if part.kind == "parameter"]
        if len(lists) > 1 and any(_CHANGED_LIST.match(text) for text in lists):
            raise self._error('a changed ${*...} beside other variables in "..." is not supported')
        pieces = self._pieces(parts)
        if any(piece.text or piece.boundary for piece in pieces):
            return pieces
        if not any(self._is_empty_list(part) for part in parts):
            return [Piece("", True)]
        if len(lists) > 1 and any(_UNCLEAR_EMPTY.match(text) for text in lists):
            raise self._error('an empty "$@" beside this expansion in quotes is not supported')
        return []

    def _is_empty_list(self, part: Part) -> bool:
        parameter = parse_parameter(part.text) if part.kind == "parameter" else None
        if parameter is None or not parameter.is_list or parameter.star or parameter.length:
            return False
        if parameter.action in ("", "+", ":+") or parameter.action[0] in _CHANGES:
            return not self._values(parameter)
        return False

    @staticmethod
    def _has_list(part: Part) -> bool:
        """Returns whether the elements of a list are in these quotes."""
        return any("@" in each.text for each in part.parts if each.kind == "parameter")

    @staticmethod
    def _value(text: str, quoted: bool) -> Piece:
        return Piece(text, quoted, not quoted)

    def _parameter(self, part: Part) -> list[Piece]:
        parameter = parse_parameter(part.text)
        if parameter is None:
            self.variables.note(self._line, f"${{{part.text}}} is not supported")
            self.variables.change(changes_of([Word((part,), self._line)], {}))
            return [self._value(unknown(f"${{{part.text}}}"), part.quoted)]
        values = self._values(parameter)
        uncertain = any(map(is_unknown, values or ()))
        if uncertain and (parameter.action or parameter.length):
            self._set_unknown(parameter)
            return [self._value(unknown(f"${{{part.text}}}"), part.quoted)]
        if parameter.length:
            return [self._value(self._length(parameter, values), part.quoted)]
        if parameter.action[-1:] in ("-", "=", "?", "+") and parameter.action:
            default = self._default(parameter, values, part.quoted)
            if default is not None:
                return default
        elif values is None:
            self._note_unset(parameter)
        if parameter.action[:1] in _CHANGES and values:
            values = self._changed(part.text, parameter, values)
        return self._list(parameter, values, part.quoted)

    def _set_unknown(self, parameter: Parameter) -> None:
        if parameter.action in ("=", ":="):
            self.variables.set(parameter.name, unknown(f"${{{parameter.name}}}"), self._line)

    def _note_unset(self, parameter: Parameter) -> None:
        if parameter.is_list:
            return
        if self.variables.error_if_unset:
            raise self._error(
                f"{parameter.name} is not set, where the script ends because of 'set -u'; give "
                f"arguments of the script or --set {parameter.name}=VALUE"
            )
        self.variables.unset.setdefault(parameter.name, self._line)

    def _length(self, parameter: Parameter, values: list[str] | None) -> str:
        if parameter.is_list:
            return str(len(values or ()))
        if values is None:
            self._note_unset(parameter)
        return str(len("".join(values or ())))

    def _list(self, parameter: Parameter, values: list[str] | None, quoted: bool) -> list[Piece]:
        """Returns values as pieces with boundaries between elements."""
        if values is None or not parameter.is_list:
            return [self._value("".join(values or ()), quoted)] if values or quoted else []
        separators = self.variables.ifs()
        if is_unknown(separators) and parameter.star:
            return [self._value(unknown(f"${{{parameter.name}[*]}}"), quoted)]
        glue = separators[:1] if parameter.star else " "
        if parameter.action[:1] in _CHANGES and glue != separators[:1]:
            glue = _UNCLEAR  # Bash joins with a space in some cases and with IFS in others
        if parameter.action[:1] in _CHANGES and not glue and not quoted:
            raise self._error("a changed ${*...} is not supported while IFS is empty")
        if quoted and parameter.star:
            return [Piece(glue.join(values), True)]
        pieces: list[Piece] = []
        for index, value in enumerate(values):
            if index:
                pieces.append(Piece(glue, quoted, not quoted, boundary=True))
            pieces.append(self._value(value, quoted))
        return pieces

    def _values(self, parameter: Parameter) -> list[str] | None:
        """Returns the values of a parameter: one, those of a list, or None if it is not set."""
        name, positional = parameter.name, self.variables.positional
        if name in ("?", "$", "!", "-"):
            return [unknown(f"${name}")]
        if name.isdigit() and not name.strip("0"):
            return [self.variables.name]
        if name.isdigit() or name in ("@", "*", "#"):
            if positional is None:
                return [unknown(f"${{{name}}}")]
            if name in ("@", "*"):
                return list(positional) or None
            if name == "#":
                return [str(len(positional))]
            numbered = {str(number): [word] for number, word in enumerate(positional, 1)}
            return numbered.get(name.lstrip("0"))
        value = self.variables.get(name)
        if value is None:
            return None
        if parameter.index in ("@", "*"):
            return ([value] if isinstance(value, str) else list(value.values())) or None
        return self._element(parameter, value)

    def _element(self, parameter: Parameter, value: Value) -> list[str] | None:
        if isinstance(value, str) and is_unknown(value) and parameter.index is None:
            return [value]
        items = {0: value} if isinstance(value, str) else value
        index: int | None = 0
        if parameter.index is not None:
            index = self.arithmetic(parameter.index, self._line)
        if index is None or (isinstance(value, str) and is_unknown(value)):
            return [unknown(f"${{{parameter.name}[{parameter.index}]}}")]
        if index < 0:
            index += max(items, default=-1) + 1
        return [items[index]] if index in items else None

    def _default(
        self, parameter: Parameter, values: list[str] | None, quoted: bool
    ) -> list[Piece] | None:
        """Returns the pieces of ``${NAME:-default}`` and the like; None for the value itself."""
        action = parameter.action
        absent = values is None or (action[0] == ":" and not " ".join(values))
        if action[-1] == "+":
            if not absent:
                return self._operand(parameter.operand, quoted)
            return [Piece("", True)] if quoted and not self._nothing(parameter) else []
        if not absent:
            return None
        if action[-1] == "?":
            message = self._plain(parameter.operand) or "it is not set"
            raise self._error(
                f"${{{parameter.name}{action}...}} ends the script: {message}; give arguments of "
                f"the script or --set {parameter.name}=VALUE"
            )
        operand = self._operand(parameter.operand, quoted)
        if action[-1] == "=":
            return [self._value(self._assign(parameter, operand), quoted)]
        return operand

    def _nothing(self, parameter: Parameter) -> bool:
        return parameter.is_list and not parameter.star and not self._values(parameter)

    def _assign(self, parameter: Parameter, operand: Sequence[Piece]) -> str:
        if parameter.is_list or parameter.index or not re.match("[A-Za-z_]", parameter.name):
            raise self._error(f"${{{parameter.name}{parameter.action}...}} cannot be assigned")
        text = "".join(piece.text for piece in operand)
        self.variables.set(parameter.name, text, self._line)
        return text

    def _operand(self, text: str, quoted: bool) -> list[Piece]:
        lexer = Lexer(text, self.variables.name, line=self._line, depth=self._depth)
        if quoted:
            return self._pieces(lexer.quoted_parts()) or [Piece("", True)]
        parts = self._tilde(lexer.parts(), assigned=False)
        pieces = self._pieces(parts)
        if len(parts) > 1 and any(map(self._has_list, parts)):
            raise self._error('text beside "$@" in a default is not supported')
        separator = self.variables.ifs()[:1]
        if any(each.boundary and each.expanded and each.text != separator for each in pieces):
            raise self._error("${@} without quotes in a default is not supported with this IFS")
        return [piece if piece.quoted else Piece(piece.text, False, True) for piece in pieces]

    def _plain(self, text: str) -> str:
        """Expands the text of an expression as in double quotes."""
        lexer = Lexer(text, self.variables.name, line=self._line, depth=self._depth)
        return text_of(joined(self._pieces(lexer.quoted_parts())))

    def _changed(self, text: str, parameter: Parameter, values: Sequence[str]) -> list[str]:
        """Applies the removal of a pattern or a change of case to each value."""
        action = parameter.action
        change: Callable[[str], str | None]
        if action[0] in "^,":

            def change(value: str) -> str | None:
                return changed_case(value, action)
        else:
            lexer = Lexer(
                parameter.operand, self.variables.name, line=self._line, depth=self._depth
            )
            field = joined(self._pieces(self._tilde(lexer.parts(), assigned=False)))
            try:
                regex = re.compile(patterns.to_regex(field), re.S)
            except (patterns.PatternError, re.error):
                field = [("\0", False)]
            if is_unknown(text_of(field)) or max(map(len, values)) > _LONGEST_PATTERN_TEXT:
                self.variables.note(self._line, f"${{{text}}} is not supported")
                return [unknown(f"${{{text}}}")]

            def change(value: str) -> str | None:
                return patterns.strip(value, action, regex)

        changed = [change(value) for value in values]
        if None in changed:
            return [unknown(f"${{{text}}}")]
        return [value for value in changed if value is not None]


class _Numbers:
    """Variables for arithmetic."""

    def __init__(self, expander: Expander) -> None:
        self._expander = expander

    def value(self, name: str) -> str:
        """Returns the value of a variable; an unset one is noted and 0."""
        variables = self._expander.variables
        value = variables.get(name)
        if value is None:
            self._expander._note_unset(Parameter(name, None, False, "", ""))
            return ""
        return value if isinstance(value, str) else value.get(0, "")

    def assign(self, name: str, value: str) -> None:
        """Sets a variable."""
        self._expander.variables.set(name, value, self._expander._line)
