"""Checks the words of CONTRIBUTING.md that a program can check.

Usage: python tooling/check_words.py [FILE ...]

Without files, checks the Python, Markdown and web files that git tracks. Two rules:

- No file uses a word of `AVOIDED`, in prose or in a name.
- The docstring of a function or method starts with a verb in the third person: "Returns ...",
  "Adds ...", "Raises ...". Properties, classes and modules may start with a noun.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]

AVOIDED: Final = {
    "told": "passed, reported, named",
    "nobody": "no rank, no process, nothing",
    "anybody": "a rank, a process, a user",
    "somebody": "a rank, a process, a user",
    "whoever": "the caller, the process that",
    "lest": "so that ... not",
    "whatever the": "for every, independent of",
    "says otherwise": "unless ... is given; defaults to",
    "thereof": "of it",
}
"""Words and phrases to avoid, with what to write instead."""

PROPERTIES: Final = {"property", "cached_property", "setter", "overload", "fixture"}
SUFFIXES: Final = {".py", ".pyi", ".md", ".js", ".html", ".css", ".yaml", ".toml"}
EXEMPT: Final = {
    "CONTRIBUTING.md",
    "tooling/check_words.py",
    "tooling/tests/test_check_words.py",
}
"""Files that quote the words."""


def without_old_names(text: str) -> str:
    """Returns a changelog with the rows of its tables, which list old names, left empty."""
    return re.sub(r"(?m)^\|.*$", "", text)


def avoided_words(text: str) -> Iterator[tuple[int, str]]:
    """Yields line numbers and complaints about the words of `AVOIDED` in a text."""
    for word, better in AVOIDED.items():
        pattern = r"(?<![a-zA-Z])" + word.replace(" ", r"\s+") + r"(?![a-zA-Z])"
        for match in re.finditer(pattern, text, re.IGNORECASE):
            line = text.count("\n", 0, match.start()) + 1
            yield line, f"{word!r}: write {better}"


def docstring_verbs(text: str) -> Iterator[tuple[int, str]]:
    """Yields line numbers and complaints about docstrings of functions without a leading verb."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node)
        decorators = {
            ast.unparse(each).split("(")[0].split(".")[-1] for each in node.decorator_list
        }
        if docstring is None or decorators & PROPERTIES:
            continue
        first = docstring.split()[0]
        if not re.fullmatch(r"[A-Z][a-z]+s[,:;.]?", first):
            yield (
                node.body[0].lineno,
                f"{node.name}: starts with {first!r}, not with a verb (Returns)",
            )


def complaints(path: Path, name: str) -> list[str]:
    """Returns one line for each complaint about a file."""
    text = path.read_text()
    prose = without_old_names(text) if path.name == "CHANGELOG.md" else text
    found = [] if name in EXEMPT else list(avoided_words(prose))
    if path.suffix == ".py" and "/src/" in name:
        found += docstring_verbs(text)
    return [f"{name}:{line}: {what}" for line, what in sorted(found)]


def tracked_files() -> list[Path]:
    """Returns the files that git tracks, of the kinds that hold prose."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return [ROOT / name for name in names if Path(name).suffix in SUFFIXES]


if __name__ == "__main__":
    paths = [Path(argument).resolve() for argument in sys.argv[1:]] or tracked_files()
    lines = [line for path in paths for line in complaints(path, str(path.relative_to(ROOT)))]
    print("\n".join(lines))
    if lines:
        sys.exit(f"{len(lines)} complaints; the words are explained in CONTRIBUTING.md")
