"""Splits expanded text into words as Bash does."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_UNKNOWN = "\0[^\0]*\0"


@dataclass(frozen=True)
class Piece:
    """A piece of an expanded word.

    Attributes:
        text: The text; for a ``boundary``, what joins the words where words are not split.
        quoted: Whether the text was quoted: it is not split, and it is no pattern.
        expanded: Whether the text comes from an expansion outside of quotes, so that it is split.
        boundary: Whether a word ends here, as between the elements of ``"$@"``.
    """

    text: str
    quoted: bool
    expanded: bool = False
    boundary: bool = False


Field = list[tuple[str, bool]]
"""A word after splitting: pieces of text, and whether each is quoted."""


def split(pieces: Iterable[Piece], separators: str) -> list[Field]:
    """Splits expanded text at ``separators``, the value of IFS."""
    splitter = _Splitter(separators)
    for piece in pieces:
        if piece.boundary:
            splitter.boundary(piece.expanded)
        elif piece.expanded:
            splitter.expanded(piece.text)
        else:
            splitter.add(piece.text, piece.quoted)
    return splitter.finish()


def joined(pieces: Sequence[Piece]) -> Field:
    """Returns the pieces as one word."""
    return [(piece.text, piece.quoted) for piece in pieces]


def text_of(field: Field) -> str:
    """Returns the text of a word."""
    return "".join(text for text, _ in field)


class _Splitter:
    """Collects words; a word that is empty exists only if a piece of it is quoted."""

    def __init__(self, separators: str) -> None:
        self._spaces = {each for each in separators if each in " \t\n"}
        self._marks = set(separators) - self._spaces
        self._first = separators[:1]
        special = "".join(map(re.escape, separators))
        ordinary = f"(?:{_UNKNOWN}|[^{special}\0])+" if special else r"(?s:.+)"
        self._run = re.compile(f"{ordinary}|(?s:.)")
        self._fields: list[Field] = []
        self._current: Field | None = None
        self._after_space = False

    def add(self, text: str, quoted: bool) -> None:
        self._current = [*(self._current or []), (text, quoted)]

    def boundary(self, expanded: bool) -> None:
        if expanded and self._first:  # Bash joins the elements by it and splits the whole
            self.expanded(self._first)
        else:
            self._close()
            self._after_space = False

    def expanded(self, text: str) -> None:
        for found in self._run.finditer(text):
            run = found.group()
            if run in self._spaces:
                if self._close():
                    self._after_space = True
            elif run in self._marks:
                self._mark()
            else:
                self.add(run, False)

    def finish(self) -> list[Field]:
        self._close()
        return self._fields

    def _close(self) -> bool:
        if self._current is None:
            return False
        self._fields.append(self._current)
        self._current = None
        return True

    def _mark(self) -> None:
        """Ends a word at a separator that is no space; two in a row have an empty word between."""
        if self._close() or self._after_space:
            self._after_space = False
        else:
            self._fields.append([])
