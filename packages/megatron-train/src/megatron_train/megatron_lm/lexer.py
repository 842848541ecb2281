"""Splits a Bash script into words and operators; supports what launch scripts use."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_train.errors import TrainError

_OPERATOR = re.compile(r"&&|\|\||;;|<<<|<<-?|&>>?|\d*>>?&\d*-?|\d*>>|\d*[<>]|[;&|()]")
_NAME = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!-]")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")
_PAIRS = {"(": ")", "{": "}"}
_DEEPEST = 40


@dataclass(frozen=True)
class Part:
    """A part of a word.

    Attributes:
        kind: ``text``, ``parameter`` (``$NAME`` or the content of ``${...}``), ``arithmetic`` (the
            content of ``$((...))``) or ``command`` (the content of ``$(...)``).
        text: Content of the part.
        quoted: Whether the part is in quotes and is therefore not split at spaces.
    """

    kind: str
    text: str
    quoted: bool


@dataclass(frozen=True)
class Word:
    """A word: its parts, its line, and the elements of the array that it assigns, if it does."""

    parts: tuple[Part, ...]
    line: int
    elements: tuple["Word", ...] | None = None

    @property
    def literal(self) -> str:
        """The text of the word if no part is quoted or expanded; otherwise an empty string."""
        if any(part.kind != "text" or part.quoted for part in self.parts):
            return ""
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True)
class Operator:
    """A separator of commands, a parenthesis or a redirection."""

    text: str
    line: int


Token = Word | Operator


class Lexer:
    """Reads the tokens of ``text``; ``name`` is the script's name in errors."""

    def __init__(self, text: str, name: str, *, line: int = 1, depth: int = 0) -> None:
        self._text, self._name = text, name
        self._at, self._line, self._depth = 0, line, depth
        if depth > _DEEPEST:
            raise TrainError(f"{name}: line {line}: nesting is deeper than {_DEEPEST} levels")

    def tokens(self, closing: str = "") -> Iterator[Token]:
        """Yields tokens up to the end of the text or up to the bracket ``closing``, without it."""
        ends: list[str] = []
        while self._at < len(self._text):
            character = self._text[self._at]
            if character in " \t\r":
                self._at += 1
            elif self._text.startswith("\\\n", self._at):
                self._advance(2)
            elif character == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            elif character == "\n":
                yield Operator("\n", self._line)
                self._advance(1)
                self._skip_documents(ends)
            elif character == closing:
                self._at += 1
                return
            elif found := _OPERATOR.match(self._text, self._at):
                yield Operator(found.group(), self._line)
                self._at = found.end()
                if found.group() in ("<<", "<<-"):
                    ends += self._end_of_document()
            else:
                yield self._word()
        if closing:
            raise TrainError(f"{self._name}: line {self._line}: {closing} is missing at the end")

    def parts(self) -> tuple[Part, ...]:
        """Returns the whole text, including spaces, as parts of one word."""
        return tuple(self._parts(""))

    def _advance(self, count: int) -> None:
        self._line += self._text.count("\n", self._at, self._at + count)
        self._at += count

    def _end_of_document(self) -> list[str]:
        found = re.compile(r"[ \t]*['\"\\]?(\w+)['\"]?").match(self._text, self._at)
        if not found:
            return []
        self._at = found.end()
        return [found.group(1)]

    def _skip_documents(self, ends: list[str]) -> None:
        """Skips the here-documents that start after this line."""
        while ends:
            mark = ends.pop(0)
            while self._at < len(self._text):
                stop = self._text.find("\n", self._at) + 1 or len(self._text)
                line = self._text[self._at : stop]
                self._advance(stop - self._at)
                if line.strip() == mark:
                    break

    def _word(self) -> Word:
        line = self._line
        parts = list(self._parts(" \t\r\n;&|()<>"))
        word = Word(tuple(parts), line)
        if self._text.startswith("(", self._at) and _ARRAY.fullmatch(word.literal):
            self._at += 1
            inner = Lexer(self._text, self._name, line=self._line, depth=self._depth + 1)
            inner._at = self._at
            words = [token for token in inner.tokens(")") if isinstance(token, Word)]
            self._at, self._line = inner._at, inner._line
            return Word(tuple(parts), line, tuple(words))
        return word

    def _parts(self, stops: str) -> Iterator[Part]:
        literal = ""
        while self._at < len(self._text) and self._text[self._at] not in stops:
            character = self._text[self._at]
            if character not in "\\'\"$`":
                literal += character
                self._advance(1)
                continue
            if literal:
                yield Part("text", literal, False)
                literal = ""
            yield from self._special(character)
        if literal:
            yield Part("text", literal, False)

    def _special(self, character: str) -> Iterator[Part]:
        if character == "\\":
            following = self._text[self._at + 1 : self._at + 2]
            self._advance(2)
            if following != "\n":
                yield Part("text", following, True)
        elif character == "'":
            yield Part("text", self._until("'", self._at + 1), True)
        elif character == '"':
            yield from self._double_quoted()
        elif character == "`":
            yield Part("command", self._until("`", self._at + 1), False)
        else:
            yield self._dollar(False)

    def _double_quoted(self) -> Iterator[Part]:
        self._at += 1
        text = ""
        yield Part("text", "", True)  # "" is a word as well
        while True:
            if self._at >= len(self._text):
                raise TrainError(f'{self._name}: line {self._line}: " is missing at the end')
            character = self._text[self._at]
            if character == "\\" and self._text[self._at + 1 : self._at + 2] in set('"\\$`\n'):
                text += self._text[self._at + 1].replace("\n", "")
                self._advance(2)
            elif character in '"$`':
                yield Part("text", text, True)
                text = ""
                if character == '"':
                    self._at += 1
                    return
                if character == "`":
                    yield Part("command", self._until("`", self._at + 1), True)
                else:
                    yield self._dollar(True)
            else:
                text += character
                self._advance(1)

    def _dollar(self, quoted: bool) -> Part:
        start = self._at + 1
        if self._text.startswith("((", start):
            inner = self._bracketed(start)
            return Part("arithmetic", inner.removeprefix("(").removesuffix(")"), quoted)
        if self._text.startswith("(", start):
            return Part("command", self._bracketed(start), quoted)
        if self._text.startswith("{", start):
            return Part("parameter", self._bracketed(start), quoted)
        found = _NAME.match(self._text, start)
        if not found:
            self._at = start
            return Part("text", "$", quoted)
        self._at = found.end()
        return Part("parameter", found.group(), quoted)

    def _until(self, mark: str, start: int) -> str:
        end = self._text.find(mark, start)
        if end < 0:
            raise TrainError(f"{self._name}: line {self._line}: {mark} is missing at the end")
        self._advance(end + 1 - self._at)
        return self._text[start:end]

    def _bracketed(self, start: int) -> str:
        """Returns the text between the bracket at ``start`` and its closing bracket."""
        opening = self._text[start]
        depth, quote, index = 0, "", start
        while index < len(self._text):
            character = self._text[index]
            if character == "\\":
                index += 1
            elif quote:
                quote = "" if character == quote else quote
            elif character in "'\"":
                quote = character
            elif character == opening:
                depth += 1
            elif character == _PAIRS[opening]:
                depth -= 1
                if not depth:
                    self._advance(index + 1 - self._at)
                    return self._text[start + 1 : index]
            index += 1
        missing = _PAIRS[opening]
        raise TrainError(f"{self._name}: line {self._line}: {missing} is missing at the end")
