"""The training command that a launch script starts, found by reading the script.

Nothing is run. Variables, arrays, defaults (``${NAME:-default}``), positional parameters, simple
arithmetic and the conditions of `if` that depend on them are followed as Bash would; what depends
on files, other commands or loops is left out and named.
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
        program: the Python program, such as ``pretrain_gpt.py``.
        launcher: words before it, such as those of torchrun.
        arguments: words behind it, which are its flags.
        line: of the script.
        notes: what in the script could not be decided, line by line.
        unset: names of variables that had no value where they were used, with the line.
    """

    program: str
    launcher: tuple[str, ...]
    arguments: tuple[str, ...]
    line: int
    notes: tuple[str, ...]
    unset: Mapping[str, int]


class _Exit(Exception):  # noqa: N818 - the end of a script, no error
    pass


def read_script(
    path: Path, positional: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> LaunchCommand:
    """Returns the command that the Bash script ``path`` starts training with.

    Args:
        path: of the script.
        positional: what the script is given, ``$1`` first.
        variables: values of variables that it takes from the environment.

    Raises:
        TrainError: a script that is not understood, or starts no training.
        OSError: a file that cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise TrainError(f"{path} has more than {_MOST_BYTES} bytes; give a launch script")
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
    """Follows the commands of a script."""

    def __init__(self, name: str, positional: Sequence[str], given: Mapping[str, str]) -> None:
        self.variables = Variables(name, positional, given)
        self.found: tuple[str, tuple[str, ...], tuple[str, ...], int] | None = None

    def block(self, commands: Block) -> bool | None:
        """Follows commands; returns whether the last one succeeds, None where that is open."""
        state: bool | None = True
        list_operator = ""
        for command in commands:
            if list_operator and state is None and isinstance(command, IfCommand | SkippedCommand):
                self._undecided(command)
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
            self.variables.note(command.line, f"{command.kind} is not followed")
            return None
        for condition, body in command.branches:
            state = self.block(condition)
            if state is None:
                self._undecided(command)
                return None
            if state:
                return self.block(body)
        return self.block(command.else_body)

    def _undecided(self, command: Command) -> None:
        text = "a condition cannot be decided without running it; its commands are left out"
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
        self._look(words, line)
        return None

    def _look(self, words: list[str], line: int) -> None:
        """Keeps a command if it starts training, the first one."""
        for place, word in enumerate(words):
            if not _PROGRAM.fullmatch(word):
                continue
            if self.found is not None:
                self.variables.note(line, f"a second command, {word}, is left out")
                return
            self.found = (Path(word).name, tuple(words[:place]), tuple(words[place + 1 :]), line)
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
            kept = [before] if isinstance(before, str) else before
            values[name] = [*kept, *items] if more else items
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
        """Returns whether a condition holds, None where it asks for more than variables."""
        inner = [word for word in words[1:] if word not in ("]", "]]")]
        return _either(inner)


def _either(words: Sequence[str]) -> bool | None:
    """Returns the value of a condition; of ``||`` and ``&&``, the first binds least."""
    for operator, decisive in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
        if operator in words:
            place = words.index(operator)
            sides = (_either(words[:place]), _either(words[place + 1 :]))
            if decisive in sides:
                return decisive
            return None if None in sides else not decisive
    if words[:1] == ["!"]:
        inner = _either(words[1:])
        return None if inner is None else not inner
    if len(words) == 1:
        return words[0] != ""
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return (words[1] == "") == (words[0] == "-z")
    if len(words) == 3:
        return _compare(*words)
    return None


def _compare(one: str, sign: str, other: str) -> bool | None:
    if "$(" in one + other or "${" in one + other:
        return None
    if sign in ("=", "=="):
        return one == other
    if sign == "!=":
        return one != other
    numbers = [int(text) for text in (one, other) if re.fullmatch(r"\s*-?\d{1,18}\s*", text)]
    if sign in _COMPARISONS and len(numbers) == 2:
        return bool(_COMPARISONS[sign](*numbers))
    return None


def _unquoted_prefix(word: Word) -> str:
    """Returns the unquoted text that a word begins with."""
    first = word.parts[0] if word.parts else None
    return first.text if first and first.kind == "text" and not first.quoted else ""
