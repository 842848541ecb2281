"""Patterns that select layers of a model, in Megatron-LM's syntax.

>>> layer_pattern("2", 4)
(True, False, True, False)
>>> layer_pattern("[0]+[1]*3", 4)
(False, True, True, True)
"""

import ast
from collections.abc import Iterable

from megatron_models.errors import ConfigError


class PatternError(ConfigError):
    """A pattern that is invalid, or has another number of layers."""


def layer_pattern(text: str, num_layers: int) -> tuple[bool, ...]:
    """Returns for each layer whether a pattern selects it.

    Args:
        text: A number N, for every N-th layer beginning with the first, or an expression of lists
            of ones and zeros, joined by ``+`` and repeated by ``*``.
        num_layers: Number of layers of the model.

    Raises:
        PatternError: The text is no pattern, or its list has another length.
    """
    shown = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except (
        SyntaxError,
        ValueError,
        RecursionError,
        MemoryError,
    ):  # MemoryError is raised by Python's parser
        raise PatternError(
            f"{shown!r} is not a pattern of layers; give a number, or lists of ones and zeros like "
            "([0]*2+[1])*4"
        ) from None
    if isinstance(value, int):
        if value < 1:
            raise PatternError(f"{value} is not a pattern of layers; give a number of at least 1")
        return tuple(layer % value == 0 for layer in range(num_layers))
    if len(value) != num_layers:
        raise PatternError(
            f"the pattern {shown} has {len(value)} layers, but the model has {num_layers}; give "
            "one number for each layer"
        )
    return tuple(bool(each) for each in value)


def skipping_pattern(text: str, num_layers: int) -> tuple[bool, ...]:
    """Returns for each layer whether a pattern selects it; a number names the others.

    >>> skipping_pattern("2", 4)
    (True, False, True, False)

    Args:
        text: A number N, for all but every N-th layer counted from 1, or lists as for
            `layer_pattern`.
        num_layers: Number of layers of the model.

    Raises:
        PatternError: The text is no pattern, or its list has another length.
    """
    if not text.strip().isdigit():
        return layer_pattern(text, num_layers)
    skipped = layer_pattern(text, num_layers + 1)  # which counts from 0
    return tuple(not each for each in skipped[1:])


def pattern_text(selected: Iterable[bool]) -> str:
    """Returns the pattern that selects these layers, as a list.

    >>> pattern_text([True, False])
    '[1, 0]'
    """
    return str([int(each) for each in selected])


_LONGEST_SHOWN = 200
_LONGEST = 100_000


def _value(node: ast.expr) -> int | list[int]:
    """Evaluates the syntax of patterns, and nothing else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        found = [_value(element) for element in node.elts]
        if all(each in (0, 1) for each in found):
            return [int(each == 1) for each in found]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult):
            times, part = (left, right) if isinstance(left, int) else (right, left)
            short = isinstance(times, int) and isinstance(part, list)
            if short and times * len(part) <= _LONGEST:  # type: ignore[arg-type, operator]
                return part * times  # type: ignore[operator]
    raise ValueError
