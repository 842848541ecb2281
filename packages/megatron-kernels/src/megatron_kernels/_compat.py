"""Uses of torch features without a stability guarantee, in one place."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def constant_to_compiler(function: Callable[P, R]) -> Callable[P, R]:
    """Marks a function whose result torch.compile may treat as a constant.

    `torch.compiler.assume_constant_result` sets this mark too, but imports the whole compiler: 3 to
    4 seconds of CPU time at every start, also of programs that compile nothing.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
