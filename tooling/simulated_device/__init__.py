"""A CUDA device in name, on a torch without CUDA.

    load()                          # before torch is imported
    with simulated() as dispatch:
        torch.ones(2, device="cuda") + 1

In the block, tensors with `device="cuda"` compute on the CPU, really, and behave as on a GPU where
that can go wrong: tensors of host and device do not mix, reading a value is a wait, a collective
takes tensors of the device only, and autograd runs in a thread of the device. Kernels, their speed
and their rounding are not simulated. For tests (`gpu_device`, a pytest plugin); no wheel has it.

`guard.cpp` is compiled at the first use (four seconds) and kept in the user's cache.
`NotSimulatedError` says what is missing for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from simulated_device.library import NotSimulatedError, load

if TYPE_CHECKING:
    from simulated_device.tensors import Dispatch

__all__ = ["NotSimulatedError", "load", "simulated"]


@contextmanager
def simulated() -> "Iterator[Dispatch]":
    """Simulate a device in the block, in the thread that enters it and in those of autograd."""
    import torch

    from simulated_device.functions import functions
    from simulated_device.tensors import Dispatch

    dispatch = Dispatch()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with functions(dispatch), dispatch:
            yield dispatch
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
