"""Test files that name what a source file defines: the first to run."""

import ast
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path, PurePosixPath

MOST = 3  # test files for one source file


def naming_tests(root: Path, files: Sequence[str], source: str, most: int = MOST) -> list[str]:
    """Returns the test files that name most of what a source file defines.

    Args:
        root: Folder of the repository.
        files: Test files to choose from, relative to ``root``.
        source: The source file, relative to ``root``.
        most: Number of files to return at most; fewer if fewer name anything.

    Returns:
        The files, first those that name the most for their length.
    """
    stem, defined = PurePosixPath(source).stem, defined_names((root / source).read_text("utf-8"))
    found = []
    for name in files:
        known, size = words(root / name)
        shared = len(defined & known) + 2 * (stem in known) + 4 * (f"test_{stem}" in name)
        if shared:
            found.append((-shared / size**0.25, name))
    return [name for _, name in sorted(found)[:most]]


def defined_names(text: str) -> set[str]:
    """Returns the names of functions, classes, methods, fields and constants of a module."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return {name for name in names if len(name) > 4 and not name.startswith("__")}


@cache
def words(path: Path) -> tuple[frozenset[str], int]:
    """Returns the words of a file and its length in characters."""
    text = path.read_text("utf-8")
    return frozenset(re.findall(r"\w+", text)), max(len(text), 1000)


def in_function(text: str, line: int) -> bool:
    """Returns whether a line is in the body of a function, which an import does not execute."""
    return any(
        isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body[0].lineno <= line <= (node.end_lineno or 0)
        for node in ast.walk(ast.parse(text))
    )
