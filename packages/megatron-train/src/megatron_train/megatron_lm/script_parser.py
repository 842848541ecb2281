"""Parses a Bash script into simple commands, `if` commands and skipped constructs."""

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_train.errors import TrainError
from megatron_train.megatron_lm.lexer import Operator, Part, Token, Word

_ENDS = ("\n", ";", "&", "&&", "||", "|", ")", ";;")
_LOOPS = ("for", "while", "until", "select")
_DEEPEST = 40


@dataclass(frozen=True)
class SimpleCommand:
    """A command of words; ``list_operator`` joins it to the next one: ``&&``, ``||`` or empty."""

    words: tuple[Word, ...]
    line: int
    list_operator: str = ""


@dataclass(frozen=True)
class IfCommand:
    """Pairs of condition and body, and the body of `else`, which may be empty."""

    branches: tuple[tuple["Block", "Block"], ...]
    else_body: "Block"
    line: int
    list_operator: str = ""


@dataclass(frozen=True)
class SkippedCommand:
    """A construct that is not interpreted, such as a loop."""

    kind: str
    line: int
    list_operator: str = ""


Command = SimpleCommand | IfCommand | SkippedCommand
Block = tuple[Command, ...]


class ScriptParser:
    """Reads commands from tokens; ``name`` is the script's name in errors."""

    def __init__(self, tokens: Iterable[Token], name: str) -> None:
        self._tokens, self._name = list(tokens), name
        self._at, self._depth = 0, 0

    def script(self) -> Block:
        """Returns all commands of the script."""
        commands = self._block(())
        if self._at < len(self._tokens):
            token = self._tokens[self._at]
            text = token.text if isinstance(token, Operator) else token.literal
            raise TrainError(f"{self._name}: line {token.line}: unexpected {text!r}")
        return commands

    def _block(self, ends: tuple[str, ...]) -> Block:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise TrainError(f"{self._name}: commands are nested deeper than {_DEEPEST} levels")
        commands: list[Command] = []
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            if isinstance(token, Operator):
                if token.text in ends or token.text == ")":
                    break
                if token.text != "(":
                    self._at += 1
                    continue
            elif token.literal in ends:
                break
            commands.append(self._joined(self._command()))
        self._depth -= 1
        return tuple(commands)

    def _joined(self, command: Command) -> Command:
        """Adds the operator that joins a command to the next one; skips commands after a pipe."""
        while self._operator() == "|":
            self._at += 1
            self._command()
        list_operator = self._operator()
        if list_operator in ("&&", "||"):
            if isinstance(command, SimpleCommand):
                return SimpleCommand(command.words, command.line, list_operator)
            if isinstance(command, IfCommand):
                return IfCommand(command.branches, command.else_body, command.line, list_operator)
            return SkippedCommand(command.kind, command.line, list_operator)
        return command

    def _operator(self) -> str:
        if self._at < len(self._tokens):
            token = self._tokens[self._at]
            return token.text if isinstance(token, Operator) else ""
        return ""

    def _command(self) -> Command:
        while self._operator() == "\n":
            self._at += 1
        if self._at >= len(self._tokens):
            return SimpleCommand((), 0)
        token = self._tokens[self._at]
        word = token.literal if isinstance(token, Word) else ""
        if word == "if":
            return self._if(token.line)
        if word in _LOOPS:
            self._skip_past("do")
            self._skip_block(("done",))
            return SkippedCommand(f"the loop {word!r}", token.line)
        if word == "case":
            self._at += 1
            self._skip_nested("case", "esac")
            return SkippedCommand("'case'", token.line)
        if word == "{" or self._operator() == "(":
            self._at += 1
            self._skip_block(("}",) if word else (")",))
            return SkippedCommand("a group of commands", token.line)
        if word == "function" or self._is_function():
            self._skip_past("{")
            self._skip_block(("}",))
            return SkippedCommand("a function", token.line)
        return self._simple(token.line)

    def _is_function(self) -> bool:
        following = self._tokens[self._at + 1 : self._at + 3]
        return [token.text for token in following if isinstance(token, Operator)] == ["(", ")"]

    def _if(self, line: int) -> IfCommand:
        branches: list[tuple[Block, Block]] = []
        else_body: Block = ()
        keyword = "if"
        while keyword in ("if", "elif"):
            self._at += 1
            condition = self._block(("then",))
            self._expect("then", line)
            branches.append((condition, self._block(("elif", "else", "fi"))))
            keyword = self._word()
        if keyword == "else":
            self._at += 1
            else_body = self._block(("fi",))
        self._expect("fi", line)
        return IfCommand(tuple(branches), else_body, line)

    def _word(self) -> str:
        token = self._tokens[self._at] if self._at < len(self._tokens) else None
        return token.literal if isinstance(token, Word) else ""

    def _expect(self, word: str, line: int) -> None:
        if self._word() != word:
            raise TrainError(f"{self._name}: line {line}: {word!r} is missing after 'if'")
        self._at += 1

    def _skip_past(self, word: str) -> None:
        """Advances past the next ``word``."""
        while self._at < len(self._tokens) and self._word() != word:
            self._at += 1
        self._at += 1

    def _skip_block(self, ends: tuple[str, ...]) -> None:
        """Advances past a block that is not interpreted."""
        self._block(ends)
        self._at += 1

    def _skip_nested(self, opening: str, closing: str) -> None:
        depth = 1
        while self._at < len(self._tokens) and depth:
            depth += (self._word() == opening) - (self._word() == closing)
            self._at += 1

    def _simple(self, line: int) -> SimpleCommand:
        words: list[Word] = []
        test = self._word() == "[["
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            if isinstance(token, Word):
                words.append(token)
                self._at += 1
                if test and token.literal == "]]":
                    test = False
            elif test and token.text != "\n":
                words.append(Word((Part("text", token.text, False),), token.line))
                self._at += 1
            elif token.text in _ENDS:
                break
            elif token.text == "(":  # an arithmetic command, or not a launch script
                raise TrainError(f"{self._name}: line {token.line}: unexpected '('")
            else:
                self._at += 1 if token.text[-1] in "-0123456789" else 2  # a redirection
        return SimpleCommand(tuple(words), line)
