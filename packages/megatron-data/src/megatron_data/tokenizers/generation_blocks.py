"""Finds the text of `{% generation %}` blocks in the text that a template renders.

A template may capture, trim or test the text of a block before it writes it. So the text comes
from a rendering without marks. Another rendering, with marks around each block, gives the spans. It
counts only if its text without marks is the same and each block has its whole text. If a template
trims the text of a block, the marks are inside the white space.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from megatron_data.errors import DataError

Span: TypeAlias = tuple[int, int]
"""First character and end of a part of a text."""

_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # code points that are not valid in text
_INSIDE = ((False, False), (True, False), (False, True), (True, True))


class TemplateBudgetError(DataError):
    """Raised when the rendering of a conversation exceeds the limits of a template."""


@dataclass
class Blocks:
    """The `{% generation %}` blocks of one rendering.

    Attributes:
        marks: What is written before and after the text of a block.
        inside: Whether the first and the second mark are inside the white space around the text.
        only: The index of the one block that gets marks; None for all.
        texts: The texts of the blocks so far, in the order of their ends.
        marked: The number of blocks with marks so far.
    """

    marks: tuple[str, str] = ("", "")
    inside: tuple[bool, bool] = (False, False)
    only: int | None = None
    texts: list[str] = field(default_factory=list)
    marked: int = 0

    def write(self, text: str) -> str:
        """Returns what a block writes: its text, with marks unless it is empty."""
        self.texts.append(text)
        if self.only not in (None, len(self.texts) - 1):
            return text
        core = self.trimmed(text)
        if not core:
            return text
        begin, end = self.marks
        self.marked += 1
        first = len(text) - len(text.lstrip()) if self.inside[0] else 0
        return text[:first] + begin + core + end + text[first + len(core) :]

    def trimmed(self, text: str) -> str:
        """Returns the part of a block's text that is between the marks."""
        text = text.lstrip() if self.inside[0] else text
        return text.rstrip() if self.inside[1] else text

    def spans(self, marked: str) -> list[Span] | None:
        """Returns the spans between the marks in the text without marks; None if marks are lost."""
        begin, end = self.marks
        opened: list[int] = []
        spans: list[Span] = []
        length = 0
        for character in marked:
            if character == begin:
                opened.append(length)
            elif character != end:
                length += 1
            elif opened:
                spans.append((opened.pop(), length))
            else:
                return None
        return None if opened else spans

    def plain(self, marked: str) -> str:
        """Returns a text without the marks."""
        begin, end = self.marks
        return marked.replace(begin, "").replace(end, "")


def render_blocks(render: Callable[[Blocks], str], direct: bool) -> tuple[str, list[Span]]:
    """Renders a template and finds the text of its `{% generation %}` blocks.

    Args:
        render: Renders the template with the given blocks.
        direct: Whether every block writes to the result, so that the template cannot read its text.

    Returns:
        The text, and the spans of the blocks.

    Raises:
        DataError: The template refuses the messages, or a block cannot be found in the text.
    """
    if direct:
        blocks = Blocks((_MARKS[0], _MARKS[1]))
        marked = render(blocks)
        if [marked.count(mark) for mark in blocks.marks] == [blocks.marked] * 2:
            return blocks.plain(marked), _merged(blocks.spans(marked) or [])
    unmarked = Blocks()
    text = render(unmarked)
    unused = [mark for mark in _MARKS if mark not in text]
    if len(unused) < 2:
        raise DataError("the messages contain U+FDD0 to U+FDEF, which are not valid in text")
    marks = unused[0], unused[1]
    spans = _find(render, text, unmarked.texts, Blocks(marks))
    if spans is None:
        spans = []
        for number in range(len(unmarked.texts)):
            ways = (Blocks(marks, inside, number) for inside in _INSIDE)
            tried = (_find(render, text, unmarked.texts, blocks) for blocks in ways)
            found = next((each for each in tried if each is not None), None)
            if found is None:
                raise DataError(
                    "the chat template changes or tests the text of its {% generation %} block "
                    f"{number + 1}, so the text of the assistant cannot be found; write the block "
                    "around the text that the template writes"
                )
            spans += found
    return text, _merged(spans)


def _find(
    render: Callable[[Blocks], str], text: str, texts: list[str], blocks: Blocks
) -> list[Span] | None:
    """Returns the spans of marked blocks; None if the marks change the text or a block is cut."""
    try:
        marked = render(blocks)
    except TemplateBudgetError:
        raise
    except DataError:  # the template reads the marks
        return None
    spans = blocks.spans(marked)
    if spans is None or blocks.plain(marked) != text:
        return None
    written = texts if blocks.only is None else [texts[blocks.only]]
    wholes = set(map(blocks.trimmed, written))
    return spans if all(text[first:last] in wholes for first, last in spans) else None


def _merged(spans: list[Span]) -> list[Span]:
    """Returns spans in order, without those inside others (of blocks in blocks)."""
    merged: list[Span] = []
    for first, last in sorted(spans, key=lambda span: (span[0], -span[1])):
        if not merged or last > merged[-1][1]:
            merged.append((first, last))
    return merged
