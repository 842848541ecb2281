"""Parses the tokens of a Bash script into commands."""

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_train.errors import TrainError
from megatron_train.megatron_lm.bash.lexer import (
    ArithmeticToken,
    Operator,
    Part,
    Token,
    Word,
)
from megatron_train.megatron_lm.bash.messages import error_at

_LOOPS = ("for", "while", "until", "select")
_CLOSING = ("then", "elif", "else", "fi", "do", "done", "esac", "}", "in")
_DEEPEST = 40


@dataclass(frozen=True)
class SimpleCommand:
    """A command of words."""

    words: tuple[Word, ...]
    line: int
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True)
class ArithmeticCommand:
    """The command ``((...))``."""

    text: str
    line: int
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True)
class IfCommand:
    """Pairs of condition and body, and the body of `else`, which may be empty."""

    branches: tuple[tuple["Block", "Block"], ...]
    else_body: "Block"
    line: int
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True)
class GroupCommand:
    """Commands in braces or, in a process of their own (``subshell``), in parentheses."""

    body: "Block"
    subshell: bool
    line: int
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True)
class Pipeline:
    """Commands that are joined by ``|``, possibly negated, or one that runs in the background."""

    commands: tuple["Command", ...]
    negated: bool
    background: bool
    line: int
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True)
class FunctionCommand:
    """The definition of a function; ``tokens`` has its body."""

    name: str
    line: int
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True)
class SkippedCommand:
    """A construct that is not interpreted, such as a loop; ``tokens`` has all of it."""

    kind: str
    line: int
    tokens: tuple[Token, ...] = ()


Command = (
    SimpleCommand
    | ArithmeticCommand
    | IfCommand
    | GroupCommand
    | Pipeline
    | FunctionCommand
    | SkippedCommand
)


@dataclass(frozen=True)
class Item:
    """A command in a list; ``operator`` joins it to the next one: ``&&``, ``||`` or empty."""

    command: Command
    operator: str


Block = tuple[Item, ...]


class ScriptParser:
    """Reads commands from tokens; ``name`` is the script's name in errors."""

    def __init__(self, tokens: Iterable[Token], name: str) -> None:
        self._tokens, self._name = list(tokens), name
        self._at, self._depth = 0, 0

    def script(self) -> Block:
        """Returns all commands of the script."""
        commands = self._block(())
        if self._at < len(self._tokens):
            raise self._unexpected()
        return commands

    def _block(self, ends: tuple[str, ...]) -> Block:
        """Reads commands up to one of the words or operators ``ends``, which it leaves."""
        self._depth += 1
        if self._depth > _DEEPEST:
            raise TrainError(f"{self._name}: commands are nested deeper than {_DEEPEST} levels")
        items: list[Item] = []
        while self._at < len(self._tokens):
            operator, word = self._operator(), self._word()
            if (operator or word) in ends:
                break
            if operator == "\n":
                self._at += 1
                continue
            if word in _CLOSING or (operator and operator != "(" and not _redirects(operator)):
                raise self._unexpected()
            items.append(self._item())
        if ends and not items:
            raise self._unexpected()
        self._depth -= 1
        return tuple(items)

    def _item(self) -> Item:
        """Reads a pipeline and the operator after it."""
        start, line = self._at, self._tokens[self._at].line
        negated = False
        while self._word() == "!":
            negated = not negated
            self._at += 1
        commands = [self._command()]
        while self._operator() in ("|", "|&"):
            self._at += 1
            self._skip_newlines()
            commands.append(self._command())
        operator = self._operator()
        tokens = tuple(self._tokens[start : self._at])
        command = commands[0]
        if negated or len(commands) > 1 or operator == "&":
            command = Pipeline(tuple(commands), negated, operator == "&", line, tokens)
        if operator in ("&&", "||", ";", "&", "\n"):
            self._at += 1
        if operator in ("&&", "||"):
            self._skip_newlines()
            if self._at >= len(self._tokens):
                raise TrainError(
                    f"{self._name}: line {line}: a command is missing after {operator}"
                )
            return Item(command, operator)
        return Item(command, "")

    def _skip_newlines(self) -> None:
        while self._operator() == "\n":
            self._at += 1

    def _operator(self) -> str:
        token = self._tokens[self._at] if self._at < len(self._tokens) else None
        return token.text if isinstance(token, Operator) else ""

    def _word(self) -> str:
        token = self._tokens[self._at] if self._at < len(self._tokens) else None
        return token.literal if isinstance(token, Word) else ""

    def _unexpected(self) -> TrainError:
        if self._at >= len(self._tokens):
            line = self._tokens[-1].line if self._tokens else 1
            return error_at(self._name, line, "a command is missing at the end")
        token = self._tokens[self._at]
        text = token.literal if isinstance(token, Word) else token.text
        return error_at(self._name, token.line, f"unexpected {text!r}")

    def _command(self) -> Command:
        if self._at >= len(self._tokens):
            raise self._unexpected()
        start, token, word = self._at, self._tokens[self._at], self._word()
        line = token.line
        if isinstance(token, ArithmeticToken):
            self._at += 1
            self._redirections()
            return ArithmeticCommand(token.text, line, (token,))
        if word == "if":
            branches, else_body = self._if(line)
            return IfCommand(branches, else_body, line, self._since(start))
        if word in _LOOPS:
            return self._loop(word, start)
        if word == "case":
            self._at += 1
            self._skip_nested("case", "esac", line)
            self._redirections()
            return SkippedCommand("'case'", line, self._since(start))
        if word == "{" or self._operator() == "(":
            self._at += 1
            end = "}" if word else ")"
            body = self._block((end,))
            self._expect(end, line, word or "(")
            self._redirections()
            return GroupCommand(body, not word, line, self._since(start))
        if word == "function" or self._is_function():
            return self._function(word, start)
        reserved = word in ("coproc", "time", *_CLOSING) or self._operator() != ""
        if reserved and not _redirects(self._operator()):
            raise self._unexpected()
        return self._simple(line)

    def _since(self, start: int) -> tuple[Token, ...]:
        return tuple(self._tokens[start : self._at])

    def _loop(self, kind: str, start: int) -> SkippedCommand:
        line = self._tokens[start].line
        self._at += 1
        while self._at < len(self._tokens) and self._word() != "do":
            self._at += 1
        self._expect("do", line, kind)
        self._block(("done",))
        self._expect("done", line, kind)
        self._redirections()
        return SkippedCommand(f"the loop {kind!r}", line, self._since(start))

    def _is_function(self) -> bool:
        following = self._tokens[self._at + 1 : self._at + 3]
        return [token.text for token in following if isinstance(token, Operator)] == ["(", ")"]

    def _function(self, word: str, start: int) -> FunctionCommand:
        line = self._tokens[start].line
        if word == "function":
            self._at += 1
        name = self._word()
        self._at += 1
        if self._operator() == "(":
            self._at += 1
            self._expect_operator(")", line)
        self._skip_newlines()
        self._command()
        return FunctionCommand(name, line, self._since(start))

    def _expect_operator(self, text: str, line: int) -> None:
        if self._operator() != text:
            raise error_at(self._name, line, f"{text!r} is missing")
        self._at += 1

    def _if(self, line: int) -> tuple[tuple[tuple[Block, Block], ...], Block]:
        branches: list[tuple[Block, Block]] = []
        else_body: Block = ()
        keyword = "if"
        while keyword in ("if", "elif"):
            self._at += 1
            condition = self._block(("then",))
            self._expect("then", line, "if")
            branches.append((condition, self._block(("elif", "else", "fi"))))
            keyword = self._word()
        if keyword == "else":
            self._at += 1
            else_body = self._block(("fi",))
        self._expect("fi", line, "if")
        self._redirections()
        return tuple(branches), else_body

    def _expect(self, word: str, line: int, after: str) -> None:
        if word not in (self._word(), self._operator()):
            raise error_at(self._name, line, f"{word!r} is missing after {after!r}")
        self._at += 1

    def _skip_nested(self, opening: str, closing: str, line: int) -> None:
        depth = 1
        while depth:
            if self._at >= len(self._tokens):
                raise TrainError(
                    f"{self._name}: line {line}: {closing!r} is missing after {opening!r}"
                )
            depth += (self._word() == opening) - (self._word() == closing)
            self._at += 1

    def _redirections(self) -> None:
        """Skips redirections after a compound command."""
        while _redirects(self._operator()):
            self._redirection()

    def _redirection(self) -> None:
        text = self._operator()
        self._at += 1
        if text[-1] in "-0123456789" or text in ("<<", "<<-"):
            return
        if self._at >= len(self._tokens) or not isinstance(self._tokens[self._at], Word):
            raise self._unexpected()
        self._at += 1

    def _simple(self, line: int) -> SimpleCommand:
        start = self._at
        if self._word() == "[[":
            return self._test(start, line)
        words: list[Word] = []
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            if isinstance(token, Word):
                words.append(token)
                self._at += 1
            elif _redirects(self._operator()):
                self._redirection()
            elif isinstance(token, ArithmeticToken) or token.text == "(":
                raise self._unexpected()
            else:
                break
        return SimpleCommand(tuple(words), line, self._since(start))

    def _test(self, start: int, line: int) -> SimpleCommand:
        """Reads ``[[ ... ]]``, in which operators are words."""
        words: list[Word] = []
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            self._at += 1
            if isinstance(token, Word):
                words.append(token)
                if token.literal == "]]":
                    self._redirections()
                    return SimpleCommand(tuple(words), line, self._since(start))
            elif isinstance(token, ArithmeticToken):
                raise error_at(self._name, token.line, "'((' in [[ is not supported")
            elif token.text != "\n":
                words.append(Word((Part("text", token.text, False),), token.line))
        raise error_at(self._name, line, "']]' is missing after '[['")


def _redirects(operator: str) -> bool:
    return bool(operator) and ("<" in operator or ">" in operator)
