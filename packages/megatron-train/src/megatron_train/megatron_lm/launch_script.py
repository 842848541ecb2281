"""Finds the training command in a launch script by reading the script.

No command is run. Variables, arrays, defaults (``${NAME:-default}``), positional parameters,
integer arithmetic and conditions of `if` that depend on them are evaluated as in Bash. Constructs
that depend on files, other commands or loops are skipped and reported in notes.
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_train.errors import TrainError
from megatron_train.megatron_lm.expand import Variables
from megatron_train.megatron_lm.lexer import Lexer, Word
from megatron_train.megatron_lm.script_parser import (
    Block,
    Command,
    IfCommand,
    ScriptParser,
    SimpleCommand,
    SkippedCommand,
)

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.S)
_PROGRAM = re.compile(r"(?:\S*/)?(?:pretrain|train|finetune)_?\w*\.py")
_DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
_MOST_BYTES = 1 << 20
_COMPARISONS = {
    "-eq": int.__eq__,
    "-ne": int.__ne__,
    "-gt": int.__gt__,
    "-ge": int.__ge__,
    "-lt": int.__lt__,
    "-le": int.__le__,
}


@dataclass(frozen=True)
class LaunchCommand:
    """The command of a script that starts training.

    Attributes:
        program: File name of the Python program, such as ``pretrain_gpt.py``.
        launcher: Words before the program, such as those of torchrun.
        arguments: Words after the program: its flags and their values.
        line: Line of the command in the script.
        notes: One line for each construct that could not be evaluated.
        unset: Variables that were used without a value, with the line of their first use.
    """

    program: str
    launcher: tuple[str, ...]
    arguments: tuple[str, ...]
    line: int
    notes: tuple[str, ...]
    unset: Mapping[str, int]


class _Exit(Exception):  # noqa: N818 - the end of a script, not an error
    pass


def read_script(
    path: Path, positional: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> LaunchCommand:
    """Returns the command with which the Bash script ``path`` starts training.

    Args:
        path: Path of the script.
        positional: Arguments of the script, ``$1`` first.
        variables: Values of variables that the script expects in the environment.

    Raises:
        TrainError: The script cannot be parsed, or it starts no training.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise TrainError(
            f"{path} has more than {_MOST_BYTES} bytes, which is too large for a launch script"
        )
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TrainError(f"{path} is not a script: {error}") from error
    commands = ScriptParser(Lexer(text, str(path)).tokens(), str(path)).script()
    run = _Interpreter(str(path), positional, variables or {})
    with contextlib.suppress(_Exit):
        run.block(commands)
    if run.found is None:
        raise TrainError(
            f"{path} starts no program such as pretrain_gpt.py"
            + "".join(f"; {note}" for note in run.variables.notes[:3])
        )
    program, launcher, words, line = run.found
    notes = tuple(run.variables.notes)
    return LaunchCommand(program, launcher, words, line, notes, run.variables.unset)


class _Interpreter:
    """Interprets the commands of a script."""

    def __init__(self, name: str, positional: Sequence[str], given: Mapping[str, str]) -> None:
        self.variables = Variables(name, positional, given)
        self.found: tuple[str, tuple[str, ...], tuple[str, ...], int] | None = None

    def block(self, commands: Block) -> bool | None:
        """Interprets commands; returns whether the last one succeeds, or None if unknown."""
        state: bool | None = True
        list_operator = ""
        for command in commands:
            if list_operator and state is None and isinstance(command, IfCommand | SkippedCommand):
                self._note_unknown_condition(command)
            elif (list_operator == "&&" and state is False) or (
                list_operator == "||" and state is not False
            ):
                pass
            else:
                state = self._command(command)
            list_operator = command.list_operator
        return state

    def _command(self, command: Command) -> bool | None:
        if isinstance(command, SimpleCommand):
            return self._simple(command)
        if isinstance(command, SkippedCommand):
            self.variables.note(command.line, f"{command.kind} is skipped")
            return None
        for condition, body in command.branches:
            state = self.block(condition)
            if state is None:
                self._note_unknown_condition(command)
                return None
            if state:
                return self.block(body)
        return self.block(command.else_body)

    def _note_unknown_condition(self, command: Command) -> None:
        text = "a condition cannot be evaluated without running it; its commands are skipped"
        self.variables.note(command.line, text)

    def _simple(self, command: SimpleCommand) -> bool | None:
        words = list(command.words)
        while words and _ASSIGNMENT.match(_unquoted_prefix(words[0])):
            self._assign(words.pop(0))
        if not words:
            return True
        name = self.variables.words(words[0])[:1]
        if name and name[0] in _DECLARATIONS:
            for word in words[1:]:
                if _ASSIGNMENT.match(_unquoted_prefix(word)):
                    self._assign(word)
            return True
        if name in (["["], ["[["], ["test"]):
            return self._test([self.variables.text(word) for word in words])
        expanded = [text for word in words for text in self.variables.words(word)]
        return self._run(expanded, command.line)

    def _run(self, words: list[str], line: int) -> bool | None:
        if not words:
            return True
        name = words[0]
        if name in ("exit", "return"):
            raise _Exit
        if name in ("true", ":"):
            return True
        if name == "false":
            return False
        if name == "shift":
            count = int(words[1]) if words[1:] and words[1].isdecimal() and len(words[1]) < 5 else 1
            del self.variables.positional[:count]
            return True
        if name == "unset":
            for other in words[1:]:
                self.variables.values.pop(other, None)
            return True
        if name in ("source", "."):
            self.variables.note(line, f"{' '.join(words[:2])} is not read")
            return None
        if name in ("echo", "printf", "mkdir", "set", "ulimit", "sleep", "pip", "cd"):
            return None
        if name == "eval":
            words = [word for text in words[1:] for word in text.split()]
        self._find_program(words, line)
        return None

    def _find_program(self, words: list[str], line: int) -> None:
        """Stores the command if it is the first one that starts training."""
        for index, word in enumerate(words):
            if not _PROGRAM.fullmatch(word):
                continue
            if self.found is not None:
                self.variables.note(line, f"a second training command, {word}, is skipped")
                return
            self.found = (Path(word).name, tuple(words[:index]), tuple(words[index + 1 :]), line)
            return

    def _assign(self, word: Word) -> None:
        found = _ASSIGNMENT.match(_unquoted_prefix(word))
        if found is None:
            return
        name, more = found.groups()
        values = self.variables.values
        if word.elements is not None:
            items = [text for item in word.elements for text in self.variables.words(item)]
            before = values.get(name, [])
            items_before = [before] if isinstance(before, str) else before
            values[name] = [*items_before, *items] if more else items
            if sum(map(len, values[name])) > _MOST_BYTES:
                raise TrainError(f"line {word.line}: the array {name} is too long")
            return
        text = self.variables.text(word)[found.end() :]
        before = values.get(name, "")
        values[name] = (
            (before if isinstance(before, str) else "".join(before)) + text if more else text
        )
        if len(values[name]) > _MOST_BYTES:
            raise TrainError(f"line {word.line}: the value of {name} is too long")

    def _test(self, words: list[str]) -> bool | None:
        """Returns whether a condition is true, or None if it depends on more than variables."""
        inner = [word for word in words[1:] if word not in ("]", "]]")]
        return _evaluate(inner)


def _evaluate(words: Sequence[str]) -> bool | None:
    """Evaluates a condition; ``||`` has lower precedence than ``&&``."""
    for operator, decisive in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
        if operator in words:
            index = words.index(operator)
            sides = (_evaluate(words[:index]), _evaluate(words[index + 1 :]))
            if decisive in sides:
                return decisive
            return None if None in sides else not decisive
    if words[:1] == ["!"]:
        inner = _evaluate(words[1:])
        return None if inner is None else not inner
    if len(words) == 1:
        return words[0] != ""
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return (words[1] == "") == (words[0] == "-z")
    if len(words) == 3:
        return _compare(*words)
    return None


def _compare(left: str, sign: str, right: str) -> bool | None:
    if "$(" in left + right or "${" in left + right:
        return None
    if sign in ("=", "=="):
        return left == right
    if sign == "!=":
        return left != right
    numbers = [int(text) for text in (left, right) if re.fullmatch(r"\s*-?\d{1,18}\s*", text)]
    if sign in _COMPARISONS and len(numbers) == 2:
        return bool(_COMPARISONS[sign](*numbers))
    return None


def _unquoted_prefix(word: Word) -> str:
    """Returns the unquoted text at the start of a word."""
    first = word.parts[0] if word.parts else None
    return first.text if first and first.kind == "text" and not first.quoted else ""
