"""Every example of the documentation runs as it stands.

The ``python`` blocks of a page run in order, in one process and one namespace, in an empty folder;
a failure names the page and its line. In ``console`` blocks, each line that starts with
``$ megatron-`` must name a command, subcommands and flags that its ``--help`` knows; the commands
are not run.
"""

import json
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("packages/*/README.md"), *ROOT.glob("docs/**/*.md")])
TIMEOUT = 240

# Runs as __main__, so that what the examples define can be pickled; line numbers are the page's.
RUNNER = """
import json as _json, sys as _sys
_page, _blocks = _json.loads(_sys.stdin.read())
for _line, _code in _blocks:
    exec(compile("\\n" * _line + _code, _page, "exec"), globals())
"""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the number of lines before its first, and its text."""

    language: str
    line: int
    text: str


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, also those indented in lists and admonitions."""
    lines = page.splitlines(keepends=True)
    number = 0
    while number < len(lines):
        opening = re.match(r"( *)(`{3,})(\w*)[^`]*$", lines[number])
        number += 1
        if not opening:
            continue
        start = number
        while number < len(lines) and lines[number].strip() != opening[2]:
            number += 1
        if number == len(lines):
            raise ValueError(f"the block that opens in line {start} is never closed")
        yield Block(opening[3], start, textwrap.dedent("".join(lines[start:number])))
        number += 1


def run_examples(page: Path, folder: Path) -> str:
    """What went wrong in the page's python blocks, or an empty string."""
    found = [(block.line, block.text) for block in blocks(page.read_text()) if is_python(block)]
    try:
        done = subprocess.run(
            [sys.executable, "-c", RUNNER],
            input=json.dumps([str(page), found]),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{page}: its examples did not end within {TIMEOUT} s"
    return done.stderr[-4000:] if done.returncode else ""


def is_python(block: Block) -> bool:
    return block.language == "python"


def commands(page: str) -> Iterator[tuple[int, list[str]]]:
    """Line number and words of each ``$ megatron-...`` line, continuation lines joined."""
    for block in blocks(page):
        if block.language != "console":
            continue
        lines = block.text.splitlines()
        for number, line in enumerate(lines):
            if line.startswith("$ megatron-"):
                words, following = line[2:], number
                while words.endswith("\\") and following + 1 < len(lines):
                    following += 1
                    words = words[:-1] + lines[following].lstrip("> ")
                yield block.line + number + 1, shlex.split(words, comments=True)


@cache
def help_of(command: tuple[str, ...]) -> str | None:
    """What ``command --help`` prints, or None if there is no such command."""
    path = Path(sys.executable).with_name(command[0])
    if not path.exists():
        return None
    done = subprocess.run(
        [path, *command[1:], "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    return None if done.returncode else done.stdout


def unknown(words: list[str]) -> list[str]:
    """What of a command line its ``--help`` does not know."""
    for end, word in enumerate(words):
        if word in ("|", "&&", ";", ">", "2>&1", "&"):
            words = words[:end]
            break
    flags = [number for number, word in enumerate(words) if word.startswith("-")]
    named = tuple(words[: flags[0]] if flags else words)
    text = help_of(named)
    if text is None:
        return [" ".join(named)]
    known = set(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", text))
    return [
        words[number].partition("=")[0]
        for number in flags
        if words[number].partition("=")[0] not in known
    ]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


WITH_PYTHON = [page for page in PAGES if any(map(is_python, blocks(page.read_text())))]
WITH_COMMANDS = [page for page in PAGES if any(commands(page.read_text()))]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path) -> None:
    wrong = run_examples(page, tmp_path)
    assert not wrong, wrong


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name)
def test_the_commands_of_a_page_exist(page: Path) -> None:
    for line, words in commands(page.read_text()):
        missing = unknown(words)
        assert not missing, f"{page}:{line}: unknown: {', '.join(missing)}"


def test_a_failing_example_is_named_with_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Text\n\n```python\nx = 1\n```\n\n- item\n\n    ```python\n    x / 0\n    ```\n"
    )
    assert re.search(rf'File "{page}", line 10.*\n.*x / 0', run_examples(page, tmp_path))


def test_unknown_commands_and_flags_are_found() -> None:
    page = "```console\n$ megatron-no-such run\n$ megatron-data --hlep \\\n    --help\nout\n```\n"
    found = list(commands(page))
    assert found == [
        (2, ["megatron-no-such", "run"]),
        (3, ["megatron-data", "--hlep", "--help"]),
    ]
    assert unknown(found[0][1]) == ["megatron-no-such run"]
    assert unknown(found[1][1]) in (["--hlep"], ["megatron-data"])
