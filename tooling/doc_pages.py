"""The pages of the documentation, their fenced blocks, and the command lines in them."""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("packages/*/README.md"),
        *ROOT.glob("docs/**/*.md"),
    ]
)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the number of lines before its first, its text, its title.

    A block with a title is a file of that name, which a reader saves.
    """

    language: str
    line: int
    text: str
    title: str = ""


@dataclass(frozen=True)
class Command:
    """A command line of a page.

    Attributes:
        page: The page that contains the command.
        line: Line number in the page, from 1.
        text: The words after ``$``, with continued lines joined and without a trailing comment.
        typed: Lines that the page shows as input of the command (after ``>>>``).
    """

    page: Path
    line: int
    text: str
    typed: str = ""

    @property
    def location(self) -> str:
        """Page and line, as an editor opens them."""
        page = self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page
        return f"{page}:{self.line}"


def blocks(text: str) -> Iterator[Block]:
    """Yields the fenced blocks of a page, including those indented in lists and admonitions."""
    lines = text.splitlines(keepends=True)
    number = 0
    while number < len(lines):
        opening = re.match(r"( *)(`{3,})(\w*)(?: +title=\"(.*?)\")?[^`]*$", lines[number])
        number += 1
        if not opening:
            continue
        start = number
        while number < len(lines) and lines[number].strip() != opening[2]:
            number += 1
        if number == len(lines):
            raise ValueError(f"the block that opens in line {start} is never closed")
        text = textwrap.dedent("".join(lines[start:number]))
        yield Block(opening[3], start, text, opening[4] or "")
        number += 1


def commands(page: Path) -> list[Command]:
    """Returns the lines of the page's ``console`` blocks that start with ``$``, in order."""
    found = []
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language != "console":
            continue
        lines = block.text.splitlines()
        for number, line in enumerate(lines):
            if not line.startswith("$ "):
                continue
            text, last = line[2:], number
            while text.endswith("\\") and last + 1 < len(lines):
                last += 1
                text = text[:-1].rstrip() + " " + lines[last].strip()
            typed = []
            while last + 1 < len(lines) and lines[last + 1].startswith(">>> "):
                last += 1
                typed.append(lines[last][4:] + "\n")
            text = re.sub(r"\s+# .*$", "", text)
            found.append(Command(page, block.line + number + 1, text, "".join(typed)))
    return found


def save_titled(page: Path, folder: Path) -> None:
    """Writes every block of a page that has a title into a folder, as a file of that name."""
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.title:
            (folder / block.title).write_text(block.text, encoding="utf-8")
