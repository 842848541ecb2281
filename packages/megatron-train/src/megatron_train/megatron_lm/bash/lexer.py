"""Splits a Bash script into words and operators; supports what launch scripts use."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_train.errors import TrainError
from megatron_train.megatron_lm.bash import spans
from megatron_train.megatron_lm.bash.escapes import unescape
from megatron_train.megatron_lm.bash.messages import error_at

_OPERATOR = re.compile(
    r"&&|\|\||;;&|;;|;&|\|&|<<<|<<-?|&>>?|[0-9]*>>?&[0-9]*-?|[0-9]*<&[0-9]*-?|[0-9]*>>|[0-9]*>\||"
    r"[0-9]*<>|[0-9]*[<>]|[;&|()]"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]|[@*#?$!-]")
_ARRAY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
_ELEMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\[")
_INDEX = re.compile(r"\[[^\]\[\n\"'`;\\]*(?=\]\+?=)")
_DEEPEST = 40


@dataclass(frozen=True)
class Part:
    """A part of a word.

    Attributes:
        kind: ``text``, ``parameter`` (``$NAME`` or the content of ``${...}``), ``arithmetic`` (the
            content of ``$((...))``), ``command`` (the content of ``$(...)``) or ``quotes``
            (``parts`` in double quotes).
        text: Content of the part.
        quoted: Whether the part is in quotes and is therefore not split at spaces.
        parts: Parts in double quotes.
    """

    kind: str
    text: str
    quoted: bool
    parts: tuple["Part", ...] = ()


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

    @property
    def prefix(self) -> str:
        """The unquoted text at the start of the word."""
        first = self.parts[0] if self.parts else None
        return first.text if first and first.kind == "text" and not first.quoted else ""


@dataclass(frozen=True)
class Operator:
    """A separator of commands, a parenthesis or a redirection."""

    text: str
    line: int


@dataclass(frozen=True)
class ArithmeticToken:
    """The content of the command ``((...))``."""

    text: str
    line: int


Token = Word | Operator | ArithmeticToken


class Lexer:
    """Reads the tokens of ``text``; ``name`` is the script's name in errors."""

    def __init__(self, text: str, name: str, *, line: int = 1, depth: int = 0) -> None:
        self._text, self._name = text, name
        self._at, self._line, self._depth = 0, line, depth
        if depth > _DEEPEST:
            raise self._error(f"nesting is deeper than {_DEEPEST} levels")
        if found := re.search("[\0\r]", text):
            self._line += text.count("\n", 0, found.start())
            raise self._error(f"the character {found.group()!r} is not supported; remove it")

    def tokens(self, closing: str = "") -> Iterator[Token]:
        """Yields tokens up to the end of the text or up to the bracket ``closing``, without it."""
        ends: list[tuple[str, bool]] = []
        while self._at < len(self._text):
            character = self._text[self._at]
            if character in " \t":
                self._at += 1
            elif self._text.startswith("\\\n", self._at):
                self._advance(2)
            elif character == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end == -1 else end
            elif character == "\n":
                yield Operator("\n", self._line)
                self._advance(1)
                self._skip_documents(ends)
            elif character == closing:
                self._at += 1
                return
            elif self._text.startswith("((", self._at) and not closing:
                yield self._arithmetic_command()
            elif re.compile(r"[<>]\(").match(self._text, self._at):
                yield self._word()
            elif found := _OPERATOR.match(self._text, self._at):
                yield Operator(found.group(), self._line)
                self._at = found.end()
                if found.group() in ("<<", "<<-"):
                    ends.append((self._end_of_document(), found.group() == "<<-"))
            else:
                yield self._word()
        if closing:
            raise self._error(f"{closing} is missing at the end")
        if ends:
            self._skip_documents(ends)

    def parts(self) -> tuple[Part, ...]:
        """Returns the whole text, including spaces, as parts of one word."""
        return tuple(self._parts(""))

    def quoted_parts(self) -> tuple[Part, ...]:
        """Returns the whole text as parts in double quotes; double quotes in it are removed."""
        return tuple(self._double_quoted(end="", inner=True))

    def _error(self, message: str) -> TrainError:
        return error_at(self._name, self._line, message)

    def _advance(self, count: int) -> None:
        self._line += self._text.count("\n", self._at, self._at + count)
        self._at += count

    def _end_of_document(self) -> str:
        found = re.compile(r"[ \t]*(?:'([^'\n]+)'|\"([^\"\n]+)\"|\\?([^\s;&|()<>'\"\\$`]+))").match(
            self._text, self._at
        )
        if not found:
            raise self._error("the end mark of a here-document is missing")
        self._at = found.end()
        return found.group(1) or found.group(2) or found.group(3)

    def _skip_documents(self, ends: list[tuple[str, bool]]) -> None:
        """Skips the here-documents that start after this line."""
        while ends:
            mark, tabs = ends.pop(0)
            while self._at < len(self._text):
                stop = self._text.find("\n", self._at) + 1 or len(self._text)
                line = self._text[self._at : stop].removesuffix("\n")
                self._advance(stop - self._at)
                if (line.lstrip("\t") if tabs else line) == mark:
                    break

    def _arithmetic_command(self) -> Token:
        line, text = self._line, self._content(spans.command, self._at + 1)
        if not text.endswith(")"):
            raise self._error("'((' that is no arithmetic command is not supported; write '( ('")
        return ArithmeticToken(text[1:-1], line)

    def _word(self) -> Word:
        line = self._line
        parts = list(self._parts(" \t\n;&|()<>"))
        word = Word(tuple(parts), line)
        if self._text.startswith("(", self._at) and _ARRAY.fullmatch(word.literal):
            self._at += 1
            inner = Lexer(self._text, self._name, line=self._line, depth=self._depth + 1)
            inner._at = self._at
            words = []
            for token in inner.tokens(")"):
                self._line = token.line
                if isinstance(token, Word):
                    words.append(token)
                    if re.match(r"\[[^\]]*(?:$|\].*=)", token.prefix, re.S):
                        raise self._error(
                            "'[' at the start of an element is not supported; quote it"
                        )
                elif token.text != "\n":
                    raise self._error(f"unexpected {token.text!r} in an array")
            self._at, self._line = inner._at, inner._line
            return Word(tuple(parts), line, tuple(words))
        return word

    def _parts(self, stops: str) -> Iterator[Part]:
        literal = ""
        begin = self._at
        while self._at < len(self._text):
            character = self._text[self._at]
            if character in "<>" and self._text.startswith("(", self._at + 1) and stops:
                if literal:
                    yield Part("text", literal, False)
                literal = ""
                yield Part("command", character + self._content(spans.command, self._at + 2), False)
                continue
            found = _INDEX.match(self._text, self._at) if stops and character == "[" else None
            if found and _ELEMENT.fullmatch(self._text, begin, self._at + 1):
                literal += found.group()
                self._at = found.end()
                continue
            if character in stops:
                break
            if character not in "\\'\"$`":
                literal += character
                self._advance(1)
                continue
            if self._text.startswith("\\\n", self._at):
                self._advance(2)
                continue
            if literal:
                yield Part("text", literal, False)
                literal = ""
            yield from self._special(character)
        if literal:
            yield Part("text", literal, False)

    def _special(self, character: str) -> Iterator[Part]:
        if character == "\\":
            following = self._text[self._at + 1 : self._at + 2] or "\\"
            self._advance(2)
            yield Part("text", following, True)
        elif character == "'":
            yield Part("text", self._content(spans.single_quoted, self._at + 1), True)
        elif character == '"':
            yield self._quotes()
        elif character == "`":
            yield Part("command", self._content(spans.backquoted, self._at + 1), False)
        elif self._text.startswith("$'", self._at):
            content = self._content(spans.ansi_quoted, self._at + 2)
            text = unescape(content)
            if text is None:
                raise self._error(f"$'{content}' is not supported")
            yield Part("text", text, True)
        elif self._text.startswith('$"', self._at):
            self._at += 1
            yield self._quotes()
        else:
            yield self._dollar(False)

    def _quotes(self) -> Part:
        self._at += 1
        return Part("quotes", "", True, tuple(self._double_quoted(end='"')))

    def _double_quoted(self, end: str, inner: bool = False) -> Iterator[Part]:
        """Yields parts up to the closing quote ``end``; ``inner``: the operand of an expansion."""
        text = ""
        escaped = '"\\$`\n}' if inner else '"\\$`\n'
        while self._at < len(self._text):
            character = self._text[self._at]
            if character == "\\" and self._text[self._at + 1 : self._at + 2] in tuple(escaped):
                text += self._text[self._at + 1].replace("\n", "")
                self._advance(2)
                continue
            if character not in '"$`':
                text += character
                self._advance(1)
                continue
            if text:
                yield Part("text", text, True)
                text = ""
            if character == '"':
                self._at += 1
                if end:
                    return
            elif character == "`":
                yield Part("command", self._content(spans.backquoted, self._at + 1), True)
            else:
                yield self._dollar(True)
        if text:
            yield Part("text", text, True)
        if end:
            raise self._error(f"{end} is missing at the end")

    def _dollar(self, quoted: bool) -> Part:
        start = self._at + 1
        if self._text.startswith("((", start):
            inner = self._content(spans.command, start + 1)
            if inner.endswith(")"):
                return Part("arithmetic", inner[1:-1], quoted)
            return Part("command", inner, quoted)
        if self._text.startswith("(", start):
            inner = self._content(spans.command, start + 1)
            if re.search(r"\bcase\b|(?<!<)<<(?!<)", inner):
                raise self._error("'case' and here-documents in $(...) are not supported")
            return Part("command", inner, quoted)
        if self._text.startswith("{", start):
            inner = self._content(spans.braces, start + 1)
            return Part("parameter", inner, quoted)
        if self._text.startswith("[", start):
            raise self._error("$[...] is not supported; write $((...))")
        found = _NAME.match(self._text, start)
        if not found:
            self._at = start
            return Part("text", "$", quoted)
        self._at = found.end()
        return Part("parameter", found.group(), quoted)

    def _content(self, end_of: Callable[[str, int], int], start: int) -> str:
        """Returns the text from ``start`` to its closing mark and advances past the mark."""
        try:
            end = end_of(self._text, start)
        except spans.UnclosedError as error:
            raise self._error(f"{error.mark} is missing at the end") from None
        self._advance(end + 1 - self._at)
        return self._text[start:end]
