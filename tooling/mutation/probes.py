"""Probes: calls before statements that note which test functions reach them.

A probe appends the name of the running test to a file, named by the probe's number, in the folder
that the environment variable `HITS` names. What runs on import, in a rank of a worker pool or in a
fixture of several tests has no name: any test of the file may reach it.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

HITS = "MUTATION_HITS"  # the folder
TEST = "MUTATION_TEST"  # the running test function
MODULE = "mutation_probe"
CODE = f"""
import os
import sys

seen = set()


def hit(number, inside):
    folder = os.environ.get({HITS!r})
    name = os.environ.get({TEST!r}, "") if inside else ""
    if folder and (number, name) not in seen:
        seen.add((number, name))
        with open(os.path.join(folder, str(number)), "a") as file:
            file.write(name + "\\n")


def probe():
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    if compiler is None:
        return hit

    def unless_compiled(number, inside):
        if not compiler.is_compiling():  # a graph stays whole
            hit(number, inside)

    return unless_compiled
"""


def probed(text: str, lines: Mapping[int, int]) -> str:
    """Returns the text of a source file with a probe at each line.

    Args:
        text: The text.
        lines: Line numbers, from 1, by number of the probe.
    """
    tree, rows = ast.parse(text), text.splitlines(keepends=True)
    calls: dict[int, str] = {}
    for number, line in lines.items():
        start, inside = place(tree, rows, line)
        indent = rows[start - 1][: -len(rows[start - 1].lstrip())]
        calls[start] = calls.get(start, "") + f"{indent}{MODULE}({number}, {inside})\n"
    head = start_of(next(node for node in tree.body if not is_head(node)))
    load = f"{MODULE} = __import__({MODULE!r}).probe()\n"
    calls[head] = load + calls.get(head, "")
    return "".join(calls.get(number, "") + row for number, row in enumerate(rows, 1))


def module_of(source: str) -> str:
    """Returns the path of the module `CODE`, which the probes of a source file import."""
    root, found, _ = source.partition("/src/")
    folder = PurePosixPath(root, "src") if found else PurePosixPath(source).parent
    return str(folder / f"{MODULE}.py")


def place(tree: ast.Module, rows: list[str], line: int) -> tuple[int, bool]:
    """Returns the line before which a probe of another line stands, and whether in a function.

    This is the innermost statement with the line. Outside of functions, and in functions that
    Triton compiles from their source, it is the statement of the module.
    """
    best, inside, in_function = 0, False, False
    for node in statements_at(tree, line):
        start = start_of(node)
        before = rows[start - 1][: node.col_offset]
        whole = not before.strip() and not rows[start - 1].lstrip().startswith("elif")
        if not best:
            best = start
        elif in_function and whole:
            best, inside = start, True
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if any("jit" in ast.unparse(one) for one in node.decorator_list):
                break
            in_function = True
    return best, inside


def statements_at(node: ast.AST, line: int) -> Iterator[ast.stmt]:
    """Yields the statements with a line, from the outermost to the innermost."""
    for child in statements(node):
        if start_of(child) <= line <= (child.end_lineno or child.lineno):
            yield child
            yield from statements_at(child, line)


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yields the statements in the bodies of a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
            yield from statements(child)


def start_of(node: ast.stmt) -> int:
    """Returns the first line of a statement, or that of its first decorator."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(one.lineno for one in decorators)])


def is_head(node: ast.stmt) -> bool:
    """Returns whether a statement stays before the probes' import: a docstring or an import."""
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return text or isinstance(node, (ast.Import, ast.ImportFrom))
