"""Words and operators of a Bash script, as far as launch scripts use the language."""

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
    """A piece of a word.

    Attributes:
        kind: ``text``, ``parameter`` (``$NAME`` or what stands in ``${...}``), ``arithmetic`` or
            ``command`` (what stands in ``$(...)``).
        text: its content.
        quoted: whether it stands in quotes, so that it is not cut at spaces.
    """

    kind: str
    text: str
    quoted: bool


@dataclass(frozen=True)
class Word:
    """A word: its pieces, its line, and the elements behind it where it assigns an array."""

    parts: tuple[Part, ...]
    line: int
    elements: tuple["Word", ...] | None = None

    @property
    def literal(self) -> str:
        """Its text if nothing in it is quoted or expanded, else nothing."""
        if any(part.kind != "text" or part.quoted for part in self.parts):
            return ""
        return "".join(part.text for part in self.parts)


@dataclass(frozen=True)
class Operator:
    """A separator of commands, a bracket or a redirection."""

    text: str
    line: int


Token = Word | Operator


class Lexer:
    """Reads the tokens of ``text``, which errors call ``name``."""

    def __init__(self, text: str, name: str, *, line: int = 1, depth: int = 0) -> None:
        self._text, self._name = text, name
        self._at, self._line, self._depth = 0, line, depth
        if depth > _DEEPEST:
            raise TrainError(f"{name}: line {line}: nested deeper than {_DEEPEST} levels")

    def tokens(self, closing: str = "") -> Iterator[Token]:
        """Yields tokens until the end, or the bracket ``closing``, which is left out."""
        ends: list[str] = []
        while self._at < len(self._text):
            rest = self._text[self._at]
            if rest in " \t\r":
                self._at += 1
            elif self._text.startswith("\\\n", self._at):
                self._advance(2)
            elif rest == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            elif rest == "\n":
                yield Operator("\n", self._line)
                self._advance(1)
                self._skip_documents(ends)
            elif rest == closing:
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
        """Returns all of the text as pieces of one word, spaces included."""
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
        """Skips the lines of here-documents that begin behind this line."""
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
        plain = ""
        while self._at < len(self._text) and self._text[self._at] not in stops:
            letter = self._text[self._at]
            if letter not in "\\'\"$`":
                plain += letter
                self._advance(1)
                continue
            if plain:
                yield Part("text", plain, False)
                plain = ""
            yield from self._special(letter)
        if plain:
            yield Part("text", plain, False)

    def _special(self, letter: str) -> Iterator[Part]:
        if letter == "\\":
            following = self._text[self._at + 1 : self._at + 2]
            self._advance(2)
            if following != "\n":
                yield Part("text", following, True)
        elif letter == "'":
            yield Part("text", self._until("'", self._at + 1), True)
        elif letter == '"':
            yield from self._double_quoted()
        elif letter == "`":
            yield Part("command", self._until("`", self._at + 1), False)
        else:
            yield self._dollar(False)

    def _double_quoted(self) -> Iterator[Part]:
        self._at += 1
        text = ""
        yield Part("text", "", True)  # "" is a word, too
        while True:
            if self._at >= len(self._text):
                raise TrainError(f'{self._name}: line {self._line}: " is missing at the end')
            letter = self._text[self._at]
            if letter == "\\" and self._text[self._at + 1 : self._at + 2] in set('"\\$`\n'):
                text += self._text[self._at + 1].replace("\n", "")
                self._advance(2)
            elif letter in '"$`':
                yield Part("text", text, True)
                text = ""
                if letter == '"':
                    self._at += 1
                    return
                if letter == "`":
                    yield Part("command", self._until("`", self._at + 1), True)
                else:
                    yield self._dollar(True)
            else:
                text += letter
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
        """Returns what stands between the bracket at ``start`` and the one that closes it."""
        opening = self._text[start]
        depth, quote, place = 0, "", start
        while place < len(self._text):
            letter = self._text[place]
            if letter == "\\":
                place += 1
            elif quote:
                quote = "" if letter == quote else quote
            elif letter in "'\"":
                quote = letter
            elif letter == opening:
                depth += 1
            elif letter == _PAIRS[opening]:
                depth -= 1
                if not depth:
                    self._advance(place + 1 - self._at)
                    return self._text[start + 1 : place]
            place += 1
        missing = _PAIRS[opening]
        raise TrainError(f"{self._name}: line {self._line}: {missing} is missing at the end")
