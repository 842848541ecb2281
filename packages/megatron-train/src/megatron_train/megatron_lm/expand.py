"""Variables of a launch script and the expansion of words."""

import ast
import operator
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from megatron_train.errors import TrainError
from megatron_train.megatron_lm.lexer import Lexer, Part, Word

_PARAMETER = re.compile(
    r"(?P<length>#?)(?P<name>[A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[(?P<index>[^\]]*)\])?(?P<rest>.*)",
    re.S,
)
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_LONGEST = 1 << 16
_LONGEST_NOTE = 160
_LARGEST = 1 << 63


class Variables:
    """The variables of a script; the environment is never read.

    Args:
        name: Name of the script, for errors.
        positional: Values of ``$1``, ``$2`` and so on.
        initial: Values of further variables.

    Attributes:
        values: Values by name: a string, or a list of strings for an array.
        notes: One line for each construct that could not be evaluated.
        unset: Variables that were used without a value, with the line of their first use.
    """

    def __init__(self, name: str, positional: Sequence[str], initial: Mapping[str, str]) -> None:
        self._name = name
        self.positional = list(positional)
        self.values: dict[str, str | list[str]] = dict(initial)
        self.notes: list[str] = []
        self.unset: dict[str, int] = {}
        self._depth = 0

    def note(self, line: int, text: str) -> None:
        """Adds a note on a construct that could not be evaluated; long texts are shortened."""
        text = " ".join(text.split())
        short = text if len(text) <= _LONGEST_NOTE else f"{text[:_LONGEST_NOTE]}..."
        entry = f"line {line}: {short}"
        if entry not in self.notes:
            self.notes.append(entry)

    def words(self, word: Word) -> list[str]:
        """Expands a word and splits it at spaces outside of quotes; returns any number of words."""
        done: list[str] = []
        current: str | None = None
        for part in word.parts:
            values = self._part(part, word.line)
            if part.kind == "text" or (part.quoted and len(values) == 1):
                current = (current or "") + (values[0] if values else "")
                continue
            pieces = values if part.quoted else self._cut(values)
            before, after = self._edges(values) if not part.quoted else (False, False)
            if before and current is not None:
                done.append(current)
                current = None
            for number, piece in enumerate(pieces):
                if number:
                    done.append(current or "")
                    current = None
                current = (current or "") + piece
            if after and current is not None:
                done.append(current)
                current = None
            self._check(sum(map(len, done)), word.line)
        if current is not None:
            done.append(current)
        self._check(sum(map(len, done)), word.line)
        return done

    def text(self, word: Word | Sequence[Part], line: int = 0) -> str:
        """Expands a word without splitting it at spaces, as in an assignment."""
        parts = word.parts if isinstance(word, Word) else word
        line = word.line if isinstance(word, Word) else line
        text = "".join(" ".join(self._part(part, line)) for part in parts)
        self._check(len(text), line)
        return text

    def _check(self, length: int, line: int) -> None:
        if length > _LONGEST:
            raise TrainError(
                f"{self._name}: line {line}: a value has more than {_LONGEST} characters"
            )

    @staticmethod
    def _cut(values: Sequence[str]) -> list[str]:
        return [piece for value in values for piece in value.split()]

    @staticmethod
    def _edges(values: Sequence[str]) -> tuple[bool, bool]:
        """Returns whether an unquoted value starts and ends with a space, which ends a word."""
        if not values:
            return False, False
        first, last = values[0], values[-1]
        return first[:1].isspace(), last[-1:].isspace()

    def _part(self, part: Part, line: int) -> list[str]:
        if part.kind == "text":
            return [part.text]
        if part.kind == "command":
            self.note(line, f"$({part.text.strip()}) is not run; it is left unexpanded")
            return [f"$({part.text.strip()})"]
        if part.kind == "arithmetic":
            return [self._arithmetic(part.text, line)]
        self._depth += 1
        if self._depth > 20:
            raise TrainError(f"{self._name}: line {line}: variables are nested too deeply")
        values = self._parameter(part, line)
        self._depth -= 1
        return values

    def _parameter(self, part: Part, line: int) -> list[str]:
        found = _PARAMETER.fullmatch(part.text)
        if not found:
            self.note(line, f"${{{part.text}}} is not supported; it is left unexpanded")
            return [f"${{{part.text}}}"]
        name, index, rest = found["name"], found["index"], found["rest"]
        values = self._lookup(name, index)
        if found["length"]:
            is_whole_array = index in ("@", "*")
            return [str(len(values or ()) if is_whole_array else len("".join(values or ())))]
        is_list = index == "@" or name == "@"
        if rest:
            return self._operation(name, values, rest, line)
        if values is None:
            if not is_list:
                self.unset.setdefault(name, line)
            return [] if is_list else [""]
        return list(values) if is_list else [" ".join(values)]

    def _lookup(self, name: str, index: str | None) -> list[str] | None:
        if name in ("@", "*"):
            return self.positional
        if name == "#":
            return [str(len(self.positional))]
        if name.isdigit():
            position = int(name) if len(name) < 10 else len(self.positional) + 1
            if not position:
                return [self._name]
            return [self.positional[position - 1]] if position <= len(self.positional) else None
        value = self.values.get(name)
        if value is None:
            return None
        items = [value] if isinstance(value, str) else value
        if index in ("@", "*"):
            return items
        position = int(index) if index and index.isdigit() and len(index) < 9 else 0
        return [items[position]] if position < len(items) else None

    def _operation(self, name: str, values: list[str] | None, rest: str, line: int) -> list[str]:
        """Evaluates ``${name rest}``: a default, an alternative, or a removed prefix or suffix."""
        colon, action, operand = rest.startswith(":"), *self._split(rest.removeprefix(":"))
        text = None if values is None else " ".join(values)
        absent = text is None or (colon and not text)
        if action in ("-", "=", "?", "+"):
            if action == "+":
                return [""] if absent else [self._operand(operand, line)]
            if not absent:
                return [text or ""]
            if action == "?":
                self.unset.setdefault(name, line)
                return [""]
            result = self._operand(operand, line)
            if action == "=":
                self.values[name] = result
            return [result]
        if not colon and action in ("%", "%%", "#", "##"):
            if text is None:
                self.unset.setdefault(name, line)
            return [_strip_pattern(text or "", action, self._operand(operand, line))]
        self.note(line, f"${{{name}{rest}}} is not supported; it is left unexpanded")
        return [f"${{{name}{rest}}}"]

    @staticmethod
    def _split(rest: str) -> tuple[str, str]:
        for action in ("%%", "##", "%", "#", "-", "=", "?", "+"):
            if rest.startswith(action):
                return action, rest.removeprefix(action)
        return "", rest

    def _operand(self, text: str, line: int) -> str:
        parts = Lexer(text, self._name, line=line, depth=self._depth).parts()
        return self.text(parts, line)

    def _arithmetic(self, text: str, line: int) -> str:
        plain = self._operand(text, line)
        names = {name: self._number(name) for name in re.findall(r"[A-Za-z_]\w*", plain)}
        try:
            tree = ast.parse(plain.strip()[:200] or "0", mode="eval")
            return str(_calculate(tree.body, names))
        except (SyntaxError, ValueError, ZeroDivisionError, MemoryError, RecursionError):
            self.note(line, f"$(({text})) cannot be calculated; it is left unexpanded")
            return f"$(({text}))"

    def _number(self, name: str) -> int:
        value = "".join(self._lookup(name, None) or ["0"]).strip()
        return int(value) if re.fullmatch(r"-?\d{1,18}", value) else 0


def _calculate(node: ast.expr, names: Mapping[str, int]) -> int:
    """Returns the value of an integer expression.

    Raises:
        ValueError: The expression contains something else, or its value is too large.
    """
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.Name):
        value = names[node.id]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_calculate(node.operand, names)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _calculate(node.left, names), _calculate(node.right, names)
        value = _OPERATIONS[type(node.op)](left, right)
    else:
        raise ValueError("not an integer expression")
    if abs(value) > _LARGEST:
        raise ValueError("too large")
    return value


def _strip_pattern(text: str, action: str, pattern: str) -> str:
    """Removes the shortest or longest prefix or suffix that matches ``pattern``."""
    ends = range(min(len(text), 4096) + 1)
    if action[0] == "#":
        order = ends if action == "#" else reversed(ends)
        return next((text[i:] for i in order if fnmatchcase(text[:i], pattern)), text)
    starts = range(len(text), -1, -1) if action == "%" else range(len(text) + 1)
    return next((text[:i] for i in starts if fnmatchcase(text[i:], pattern)), text)
