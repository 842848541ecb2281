"""Which layers of a model are of a kind, from Megatron-LM's way of writing it.

>>> layer_pattern("2", 4)
(True, False, True, False)
>>> layer_pattern("[0]+[1]*3", 4)
(False, True, True, True)
"""

import ast

from megatron_models.errors import ConfigError


class PatternError(ConfigError):
    """A pattern that cannot be read, or is for another number of layers."""


def layer_pattern(text: str, num_layers: int) -> tuple[bool, ...]:
    """Reads a pattern: for each layer whether it is of the kind.

    Args:
        text: a number N, for every N-th layer beginning with the first, or an expression of lists
            of ones and zeros, joined by ``+`` and repeated by ``*``.
        num_layers: of the model.

    Raises:
        PatternError: anything else, or a list of another length.
    """
    shown = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last of Python's parser
        raise PatternError(
            f"{shown!r} is no pattern of layers: give a number, or lists of ones and zeros like "
            "([0]*2+[1])*4"
        ) from None
    if isinstance(value, int):
        if value < 1:
            raise PatternError(f"every {value}-th layer is no pattern: give a number from 1 on")
        return tuple(layer % value == 0 for layer in range(num_layers))
    if len(value) != num_layers:
        raise PatternError(
            f"the pattern {shown} is of {len(value)} layers, the model has {num_layers}"
        )
    return tuple(bool(each) for each in value)


_LONGEST_SHOWN = 200
_LONGEST = 100_000


def _value(node: ast.expr) -> int | list[int]:
    """Evaluates what patterns are made of, and nothing else."""
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
