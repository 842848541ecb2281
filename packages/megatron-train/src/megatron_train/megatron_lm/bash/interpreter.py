"""Interprets the commands of a launch script without running any."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from megatron_train.errors import TrainError
from megatron_train.megatron_lm.bash.assigned import Changes, changes_of
from megatron_train.megatron_lm.bash.builtins import Builtins
from megatron_train.megatron_lm.bash.conditions import double_brackets, test_command
from megatron_train.megatron_lm.bash.expand import Expander
from megatron_train.megatron_lm.bash.lexer import Lexer
from megatron_train.megatron_lm.bash.parser import (
    ArithmeticCommand,
    Block,
    Command,
    FunctionCommand,
    GroupCommand,
    IfCommand,
    Pipeline,
    ScriptParser,
    SimpleCommand,
)
from megatron_train.megatron_lm.bash.variables import Variables, is_unknown

_PROGRAM = re.compile(r"(?:\S*/)?(?:pretrain|train|finetune)_?\w*\.py")
_MOST_COMMANDS = 20_000


class EndOfScript(Exception):  # noqa: N818 - the end of a script, not an error
    """The script ends; ``state`` is whether with success, or None if that is unknown."""

    def __init__(self, state: bool | None) -> None:
        super().__init__(state)
        self.state = state


Training = tuple[str, tuple[str, ...], tuple[str, ...], int]
"""Program, words before and after it, and the line."""


class Interpreter:
    """Interprets the commands of a script.

    Attributes:
        variables: The variables of the script.
        found: The training command, once it is reached.
    """

    def __init__(self, variables: Variables, found: list[Training] | None = None) -> None:
        self.variables = variables
        self._training: list[Training] = [] if found is None else found
        self._expander = Expander(variables)
        self._builtins = Builtins(self._expander)
        self._functions: dict[str, Changes] = {}
        self._commands = 0
        self._tested = 0

    @property
    def found(self) -> Training | None:
        """The training command, or None."""
        return next(iter(self._training), None)

    def block(self, commands: Block) -> bool | None:
        """Interprets commands; returns whether the last one succeeds, or None if unknown."""
        state: bool | None = True
        operator = ""
        for item in commands:
            if operator and state is None:
                self._maybe(item.command, operator)
            elif not operator or (operator == "&&") == (state is True):
                state = self._command(item.command, tested=item.operator != "")
            operator = item.operator
        return state

    def _maybe(self, command: Command, operator: str) -> None:
        """Handles a command after one whose success is unknown."""
        changes = changes_of(command.tokens, self._functions)
        if changes.names or changes.positional or changes.everything:
            self._note_unknown(command.line, changes)
        elif operator == "&&" and isinstance(command, SimpleCommand):
            words = [text for word in command.words for text in self._expander.words(word)]
            self._find_program(words, command.line)
        self.variables.change(changes)

    def _note_unknown(self, line: int, changes: Changes) -> None:
        text = "a condition cannot be evaluated without running it; its commands are skipped"
        self.variables.note(line, text + _listed(changes))

    def _command(self, command: Command, *, tested: bool = False) -> bool | None:
        self._commands += 1
        if self._commands > _MOST_COMMANDS:
            raise self.variables.error(command.line, "the script has too many commands")
        self._tested += tested
        state = self._run_command(command)
        compound = isinstance(command, IfCommand)
        compound |= isinstance(command, GroupCommand) and not command.subshell
        negated = isinstance(command, Pipeline) and command.negated
        ends = self._builtins.ends_at_failure and not (self._tested or compound or negated)
        self._tested -= tested
        if state is False and ends:
            self._end(command.line, " because of 'set -e'", state=False)
        return state

    def _run_command(self, command: Command) -> bool | None:
        if isinstance(command, SimpleCommand):
            return self._simple(command)
        if isinstance(command, IfCommand):
            return self._if(command)
        if isinstance(command, GroupCommand):
            return self._group(command)
        if isinstance(command, Pipeline):
            return self._pipeline(command)
        if isinstance(command, ArithmeticCommand):
            value = self._expander.arithmetic(command.text, command.line)
            if value is None:
                self.variables.change(changes_of(command.tokens, self._functions))
            return None if value is None else value != 0
        changes = changes_of(command.tokens, self._functions)
        if isinstance(command, FunctionCommand):
            self._functions[command.name] = changes
            self.variables.note(command.line, "a function is skipped" + _listed(changes))
            return True
        self.variables.note(command.line, f"{command.kind} is skipped" + _listed(changes))
        self.variables.change(changes)
        return None

    def _if(self, command: IfCommand) -> bool | None:
        for condition, body in command.branches:
            self._tested += 1
            state = self.block(condition)
            self._tested -= 1
            if state is None:
                changes = changes_of(command.tokens, self._functions)
                self._note_unknown(command.line, changes)
                self.variables.change(changes)
                return None
            if state:
                return self.block(body)
        return self.block(command.else_body)

    def _group(self, command: GroupCommand) -> bool | None:
        if not command.subshell:
            return self.block(command.body)
        return self._process().child_block(command.body)

    def _process(self) -> "Interpreter":
        """Returns an interpreter of a process of its own, whose variables do not come back."""
        child = Interpreter(self.variables.copy(), self._training)
        child._functions, child._commands = dict(self._functions), self._commands
        child._builtins.ends_at_failure = self._builtins.ends_at_failure
        child._builtins.any_failure = self._builtins.any_failure
        child._tested = self._tested
        return child

    def child_block(self, commands: Block) -> bool | None:
        """Interprets commands of a process of its own, which `exit` ends."""
        try:
            return self.block(commands)
        except EndOfScript as end:
            return end.state

    def _pipeline(self, command: Pipeline) -> bool | None:
        if len(command.commands) == 1 and not command.background:
            self._tested += command.negated
            state = self._command(command.commands[0])
            self._tested -= command.negated
        else:
            states = [self._in_pipeline(each) for each in command.commands]
            if command.background:
                return True
            state = states[-1]
            if self._builtins.any_failure and state is not False:
                state = False if False in states else None if None in states else True
        if command.negated:
            return None if state is None else not state
        return state

    def _in_pipeline(self, command: Command) -> bool | None:
        """Interprets a command in a process of its own; returns whether it succeeds."""
        child = self._process()
        child._tested = 1
        try:
            return child._command(command)
        except EndOfScript as end:
            return end.state

    def _simple(self, command: SimpleCommand) -> bool | None:
        words = list(command.words)
        assignments = []
        while words and self._builtins.is_assignment(words[0]):
            assignments.append(words.pop(0))
        if not words:
            states = [self._builtins.assign(word) for word in assignments]
            return None if None in states else True
        literal = words[0].literal
        if literal == "[[":
            return double_brackets(words[1:-1], command.line, self._expander)
        if literal in self._builtins.declarations:
            return self._builtins.declare(literal, words[1:], command.line)
        expanded = [text for word in words for text in self._expander.words(word)]
        if assignments and not expanded:
            states = [self._builtins.assign(word) for word in assignments]
            return None if None in states else True
        if assignments and expanded[0] in ("eval", "export", "read", "set", "source", "."):
            raise self.variables.error(
                command.line, f"an assignment before {expanded[0]} is not supported"
            )
        return self._run(expanded, command)

    def _run(self, words: list[str], command: SimpleCommand) -> bool | None:
        if not words:
            return True
        name, line = words[0], command.line
        if name in self._functions:
            self.variables.change(self._functions[name])
            self.variables.note(line, f"the function {name} is not run")
            return None
        if name in ("command", "builtin") and len(words) > 1:
            if words[1] in self._builtins.declarations:
                raise self.variables.error(line, f"'{name} {words[1]}' is not supported")
            if not words[1].startswith("-"):
                return self._run(words[1:], command)
        if name in ("exit", "return"):
            self._end(line, state={"0": True}.get(words[1], False) if words[1:] else None)
        if name == "exec" and len(words) > 1:
            self._find_program(words[1:], line)
            self._end(line)
        if name == "[":
            return test_command(words[1:-1], self._expander) if words[-1] == "]" else False
        if name == "test":
            return test_command(words[1:], self._expander)
        if name == "eval":
            return self._eval(" ".join(words[1:]), line)
        if is_unknown(name) and not any(_PROGRAM.fullmatch(word) for word in words):
            self.variables.note(line, f"the command {name} is unknown")
        if self._builtins.handles(name):
            return self._builtins.run(words, line)
        self._find_program(words, line)
        return None

    def _end(self, line: int, reason: str = "", *, state: bool | None = None) -> NoReturn:
        if not self._training:
            self.variables.note(line, f"the script ends here{reason}")
        raise EndOfScript(state)

    def _eval(self, text: str, line: int) -> bool | None:
        """Interprets the words of `eval` as commands."""
        plain = text.replace("\0", "")
        tokens = Lexer(plain, self.variables.name, line=line).tokens()
        commands = ScriptParser(tokens, self.variables.name).script()
        if is_unknown(text):
            state: bool | None = None
            for item in commands:
                if isinstance(item.command, SimpleCommand):
                    state = self._command(item.command, tested=True)
            self.variables.change(Changes(everything=True))
            return state
        self._tested += 1
        state = self.block(commands)
        self._tested -= 1
        return state

    def _find_program(self, words: list[str], line: int) -> None:
        """Stores the command if it is the first one that starts training."""
        for index, word in enumerate(words):
            if not _PROGRAM.fullmatch(word):
                continue
            if self._training:
                self.variables.note(line, f"a second training command, {word}, is skipped")
                return
            before, after = tuple(words[:index]), tuple(words[index + 1 :])
            self._training.append((Path(word).name, before, after, line))
            return


def _listed(changes: Changes) -> str:
    """Returns the end of a note: what is unknown after it."""
    if changes.everything:
        return "; all variables are unknown after it"
    names = [*sorted(changes.names)[:8], *(["..."] if len(changes.names) > 8 else [])]
    names += ["the arguments of the script"] if changes.positional else []
    return f"; unknown after it: {', '.join(names)}" if names else ""


def interpret(
    text: str, name: str, positional: Sequence[str], variables: Mapping[str, str]
) -> Interpreter:
    """Interprets the script ``text``; ``name`` is its name in errors.

    Raises:
        TrainError: The script cannot be parsed, or it uses what is not supported.
    """
    commands = ScriptParser(Lexer(text, name).tokens(), name).script()
    interpreter = Interpreter(Variables(name, positional, variables))
    try:
        interpreter.child_block(commands)
    except RecursionError:
        raise TrainError(f"{name}: the script is nested too deeply") from None
    return interpreter
