"""The line of code that calls an operation."""

import sys
from types import FrameType

import torch
from torch.autograd.graph import Node

_SKIPPED = (
    "/megatron_parallel/imagined/",
    "/simulated_device/",
    "/megatron_kernels/ops/triton_op.py",  # calls the kernels of all operations
)


def code_line() -> str:
    """Returns the innermost line of a megatron package on the stack, as ``file:line function``.

    Torch runs backward passes without such lines; there, returns the name of autograd's node.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        start = name.rfind("/megatron_")
        if start >= 0 and not any(skipped in name for skipped in _SKIPPED):
            return f"{name[start + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    node: Node | None = torch._C._current_autograd_node()
    return "outside of the packages" if node is None else f"backward pass, {node.name()}"
