"""Simulates a CUDA device on a machine without a GPU.

    load_guard()                    # before torch is imported
    with simulated() as dispatch:
        torch.ones(2, device="cuda") + 1

Inside the block, tensors with `device="cuda"` compute on the CPU and have the restrictions of a
GPU: host and device tensors do not mix, reading a value synchronizes, a collective accepts only
device tensors, and autograd runs in a thread of the device. Kernels, their speed and their rounding
are not simulated. The package is for tests (`gpu_device`, a pytest plugin) and in no wheel.

It needs the device guard of `megatron_parallel.imagined`, and a torch that is built for CPUs.
`NoGuardError` names what is missing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_parallel import imagined
from megatron_parallel.imagined import NoGuardError

if TYPE_CHECKING:
    from simulated_device.tensors import Dispatch

__all__ = ["NoGuardError", "load_guard", "simulated"]

NAME = "a simulated device"


def load_guard() -> None:
    """Loads the guard for the rest of this process; call it before torch is imported.

    Raises:
        NoGuardError: There is no guard, or torch is built for CUDA. Such a torch asks the libraries
            of the device which kernel of attention to use.
    """
    found = find_spec("torch")
    folder = Path(found.origin).parent if found is not None and found.origin is not None else Path()
    if (folder / "lib" / "libtorch_cuda.so").exists():
        raise NoGuardError("torch is built for CUDA; a simulated device needs one for CPUs")
    imagined.load_guard()


@contextmanager
def simulated() -> "Iterator[Dispatch]":
    """Simulates a device in the block, in the entering thread and in threads that start there."""
    import torch
    from megatron_parallel.imagined.functions import cuda_functions, host_memory

    from simulated_device.tensors import Dispatch, functions_in_backward_passes

    dispatch = Dispatch()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with (
            cuda_functions(NAME, host_memory(), dispatch.waits_for, dispatch.queue),
            dispatch.in_new_threads(),
            functions_in_backward_passes(),
            dispatch,
        ):
            yield dispatch
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
