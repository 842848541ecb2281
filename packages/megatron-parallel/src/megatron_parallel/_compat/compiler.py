"""What torch.compile can generate code for, and what it takes as a constant."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._C._dynamo import eval_frame

P = ParamSpec("P")
R = TypeVar("R")


def constant_to_compiler(function: Callable[P, R]) -> Callable[P, R]:
    """Marks a function of Python values whose result torch.compile takes as a constant.

    `torch.compiler.assume_constant_result` does the same, but imports the whole compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Marks a function that compiled code calls as it is, between two graphs.

    `torch.compiler.disable` does the same, but imports the whole compiler.
    """
    skip = eval_frame._FrameAction.SKIP  # this function and all that it calls
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = function.__doc__  # type: ignore[attr-defined]
    return function


def why_not_compiled() -> str | None:
    """Returns why torch.compile has no compiler for the GPU of this process, or None."""
    from torch.utils import _triton

    if not _triton.has_triton_package():
        return "Triton is not installed"
    return None if _triton.has_triton() else "Triton does not support this device"
