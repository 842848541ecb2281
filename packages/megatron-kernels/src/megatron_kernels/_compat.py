"""Contact with what torch does not promise to keep, in one place."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def constant_to_compiler(function: Callable[P, R]) -> Callable[P, R]:
    """Marks a function whose result torch.compile may take for a constant.

    `torch.compiler.assume_constant_result` sets this mark too, but imports the whole compiler for
    it: 3 to 4 seconds of a CPU at every start, also of programs that compile nothing.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
