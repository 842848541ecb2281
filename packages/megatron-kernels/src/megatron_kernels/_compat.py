"""Uses of torch features without a stability guarantee, in one place."""

from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter

P = ParamSpec("P")
R = TypeVar("R")


def constant_to_compiler(function: Callable[P, R]) -> Callable[P, R]:
    """Marks a function whose result torch.compile may treat as a constant.

    `torch.compiler.assume_constant_result` sets this mark too, but imports the whole compiler: 3 to
    4 seconds of CPU time at every start, also of programs that compile nothing.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_plain(arguments: Iterable[object]) -> bool:
    """Returns whether all tensors are torch's own and no mode observes operations on them."""
    if torch._C._len_torch_dispatch_stack():
        return False
    kinds = {type(each) for each in arguments if isinstance(each, Tensor)}
    return kinds <= {Tensor, Parameter}


def occupy_device(seconds: float) -> None:
    """Starts a kernel on the current CUDA device that does nothing for a time."""
    torch.cuda._sleep(int(seconds * 2e9))  # type: ignore[no-untyped-call]  # clock cycles


def has_gpu() -> bool:
    """Returns whether the driver finds a GPU, also where `torch.cuda` is simulated."""
    count = getattr(torch._C, "_cuda_getDeviceCount", None)  # missing in builds without CUDA
    return count is not None and count() > 0


@constant_to_compiler
def lacks_gpu() -> bool:
    """Returns whether the driver finds no GPU."""
    return not has_gpu()


def is_fake(tensor: Tensor) -> bool:
    """Returns whether a tensor has a shape, a dtype and a device, but no values."""
    return isinstance(tensor, FakeTensor)


def missing_gpu_reason(tensor: Tensor) -> str | None:
    """Returns that no kernel of CUDA can run on a tensor with values, if the driver has no GPU."""
    return "the driver finds no GPU" if not is_fake(tensor) and lacks_gpu() else None


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Marks a function that compiled code calls as it is, between two graphs.

    `torch.compiler.disable` does the same, but imports the whole compiler.
    """
    skip = eval_frame._FrameAction.SKIP  # this function and all that it calls
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = function.__doc__  # type: ignore[attr-defined]
    return function
