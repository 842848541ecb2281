"""The defects that cosmic-ray can plant in a source file, without those that change nothing."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import parso
from cosmic_ray.ast import Visitor
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator

from mutation.unnoticed import PARAMETERS, unnoticed

PAIRS = {
    "ReplaceBinaryOperator": (
        *("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv", "Pow_Mul"),
        *("RShift_LShift", "LShift_RShift", "BitOr_BitAnd", "BitAnd_BitOr", "BitXor_BitAnd"),
    ),
    "ReplaceComparisonOperator": (
        *("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is"),
        *("Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt"),
    ),
    "ReplaceUnaryOperator": ("Delete_USub", "Delete_Invert", "Delete_Not"),
}
"""Replacements that give running code: `<<` for `+` would fail on the first float."""

OPERATORS = (
    *(f"{name}_{pair}" for name, pairs in PAIRS.items() for pair in pairs),
    *("AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue"),
    *("ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ExceptionReplacer"),
    *("NumberReplacer", "ZeroIterationForLoop"),
)


class DropStatement(Operator):
    """Replaces a call whose result is not used, or an augmented assignment, by `pass`."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        """Yields the statement if it is one of these."""
        if node.type == "simple_stmt":
            statement = node.children[0]
            called = statement.type == "atom_expr" and statement.children[-1].type == "trailer"
            added = statement.type == "expr_stmt" and "annassign" in statement.children[1].type
            augmented = statement.type == "expr_stmt" and is_augmented(statement)
            if (called and not added) or augmented:
                yield (statement.start_pos, statement.end_pos)

    def mutate(self, node: Any, index: int) -> Any:
        """Puts `pass` in its place."""
        first = node.children[0].get_first_leaf()
        node.children[0] = parso.python.tree.Keyword("pass", first.start_pos, first.prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        """Returns no examples; cosmic-ray requires the method."""
        return ()


def is_augmented(statement: Any) -> bool:
    """Returns whether an expression statement is an augmented assignment such as `x += y`."""
    sign = statement.children[1]
    code: str = sign.get_code().strip()
    return code.endswith("=") and code != "="


def operators() -> Iterator[tuple[str, Operator]]:
    """Returns every operator by name."""
    for name in OPERATORS:
        yield name, get_operator(f"core/{name}")()
    yield "DropStatement", DropStatement()


@dataclass(frozen=True)
class Defect:
    """One small change of a source file.

    Attributes:
        source: The file, relative to the repository.
        operator: Name of the operator of cosmic-ray, or `DropStatement`.
        occurrence: Index of the occurrence of the operator in the file, from 0.
        line: Line number, from 1.
        rank: A fixed random number that does not depend on other lines.
    """

    source: str
    operator: str
    occurrence: int
    line: int
    rank: str


@cache
def defects(source: str, text: str) -> tuple[list[Defect], Counter[str]]:
    """Returns all defects of a source file, and the number left out for each reason."""
    found: list[Defect] = []
    left_out: Counter[str] = Counter()
    ignored = unnoticed(source, text)
    lines = text.splitlines()
    tree = parso.parse(text)
    for name, operator in operators():
        places = Places(operator)
        places.walk(tree)
        same: Counter[str] = Counter()
        changes: Counter[tuple[int, int]] = Counter()
        for occurrence, (line, column, starred) in enumerate(places.found):
            change, changes[line, column] = changes[line, column], changes[line, column] + 1
            parts = (one.reason for one in ignored if one.covers(name, change, line, column))
            reason = PARAMETERS if starred else next(parts, None)
            if reason:
                left_out[reason] += 1
                continue
            words = f"{source}\0{name}\0{lines[line - 1].strip()}"
            rank = hashlib.sha256(f"{words}\0{same[words]}".encode()).hexdigest()
            same[words] += 1
            found.append(Defect(source, name, occurrence, line, rank))
    return found, left_out


def plant(defect: Defect, text: str) -> str | None:
    """Returns the source text with a defect, or None if that is no Python or changes nothing."""
    name = defect.operator
    operator = DropStatement() if name == "DropStatement" else get_operator(f"core/{name}")()
    try:
        changed = mutate_code(text, operator, defect.occurrence)
        compile(changed, "defect", "exec", dont_inherit=True)
    except (AttributeError, SyntaxError):  # cosmic-ray knows no `except module.Error`
        return None
    return None if changed == text else str(changed)


class Places(Visitor):
    """The positions where an operator can change a tree, in cosmic-ray's order."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator
        self.found: list[tuple[int, int, bool]] = []

    def visit(self, node: Any) -> Any:
        """Records the positions of one node, and whether it is an operator between parameters."""
        for (line, column), _ in self.operator.mutation_positions(node):
            parent = node.parent.type if node.parent else ""
            self.found.append((line, column, parent in ("parameters", "param", "lambdef")))
        return node


def difference(before: str, after: str) -> tuple[str, str]:
    """Returns the lines that differ, each side joined to one line."""
    old, new = before.splitlines(), after.splitlines()
    while old and new and old[0] == new[0]:
        del old[0], new[0]
    while old and new and old[-1] == new[-1]:
        del old[-1], new[-1]
    return " ".join(line.strip() for line in old), " ".join(line.strip() for line in new)
