"""Changes that no user could notice. They are left out before the choice, and counted."""

import ast
import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass

ANNOTATION = "in an annotation"
MESSAGE = "in the text of an error"
TYPING = "under TYPE_CHECKING"
PARAMETERS = "the `*` of a parameter list, taken for a product"
FIRST = "the index 0 as -1, the same element of one"
STRICT = "`strict` of a `zip`, an assertion"
INPUT = "another input for a check or benchmark"
PLACE = "a size or place in a picture"

INPUTS = ("megatron_kernels/*cases.py", "megatron_kernels/*workloads.py")
"""Modules that contain the inputs of `megatron-kernels check` and `bench`."""
DRAWN = ("Box", "Text", "add_axes", "bar", "barh", "legend", "subplots", "text", "tick_params")
"""Functions that put something into a picture, by the last part of their name."""

NUMBER = "NumberReplacer"
LOWER = 1
"""The second of the two changes of a number, which makes it one lower."""


@dataclass(frozen=True)
class Unnoticed:
    """A part of a file where changes of some kinds have no effect that a user could notice.

    Attributes:
        reason: Why.
        start: Line (from 1) and column of the first character.
        end: Line and column after the last character.
        operator: The only operator that is left out, by the start of its name; all if empty.
        only: The only one of the changes of this operator at a place; all if None.
    """

    reason: str
    start: tuple[int, int]
    end: tuple[int, int]
    operator: str = ""
    only: int | None = None

    def covers(self, operator: str, change: int, line: int, column: int) -> bool:
        """Returns whether a change of an operator at a place is left out."""
        return (
            self.start <= (line, column) < self.end
            and operator.startswith(self.operator)
            and self.only in (None, change)
        )


def unnoticed(source: str, text: str) -> list[Unnoticed]:
    """Returns the parts of a source file that are left out."""
    tree = ast.parse(text)
    found = [part for node in ast.walk(tree) for part in _of(node)]
    if any(fnmatch.fnmatch(source, f"*/{pattern}") for pattern in INPUTS):
        found.append(Unnoticed(INPUT, (1, 0), (len(text.splitlines()) + 1, 0), NUMBER))
    return found


def _of(node: ast.AST) -> Iterator[Unnoticed]:
    match node:
        case ast.AnnAssign(annotation=part) | ast.arg(annotation=ast.expr() as part):
            yield _span(ANNOTATION, part)
        case ast.FunctionDef(returns=ast.expr() as part):
            yield _span(ANNOTATION, part)
        case ast.AsyncFunctionDef(returns=ast.expr() as part):
            yield _span(ANNOTATION, part)
        case ast.Raise(exc=ast.expr() as part):
            yield _span(MESSAGE, part)
        case ast.If(test=test) if "TYPE_CHECKING" in ast.unparse(test):
            yield _span(TYPING, node)
        case ast.Assign() if _is_type_alias(node):
            yield _span(ANNOTATION, node)
        case ast.Subscript(slice=ast.Constant(value=0) as part):
            yield _span(FIRST, part, NUMBER, LOWER)
        case ast.Call(func=ast.Name(id="zip"), keywords=[ast.keyword(arg="strict", value=part)]):
            yield _span(STRICT, part, "ReplaceTrueWithFalse")
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in DRAWN:
            yield from (_span(PLACE, part, NUMBER) for part in _arguments(node))
        case ast.JoinedStr() if any(_is_markup(part) for part in node.values):
            yield _span(PLACE, node, NUMBER)


def _span(
    reason: str, node: ast.expr | ast.stmt, operator: str = "", only: int | None = None
) -> Unnoticed:
    end = (node.end_lineno or node.lineno, node.end_col_offset or 0)
    return Unnoticed(reason, (node.lineno, node.col_offset), end, operator, only)


def _arguments(node: ast.Call) -> list[ast.expr]:
    return [*node.args, *(keyword.value for keyword in node.keywords)]


def _is_markup(part: ast.expr) -> bool:
    """Returns whether a part of an f-string is text with an attribute of an SVG element."""
    return (
        isinstance(part, ast.Constant) and re.search(r'<\w+ [\w-]+="', str(part.value)) is not None
    )


def _is_type_alias(node: ast.Assign) -> bool:
    """Returns whether `A = X | Y` or `A = dict[X, Y]` names a type."""
    return (
        isinstance(node.targets[0], ast.Name)
        and node.targets[0].id[:1].isupper()
        and not node.targets[0].id.isupper()
        and isinstance(node.value, (ast.BinOp, ast.Subscript))
    )
