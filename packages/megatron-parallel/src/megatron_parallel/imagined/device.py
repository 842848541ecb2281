"""A device without memory and values, on which one rank of a job runs."""

import contextlib
from collections.abc import Iterator
from typing import Final

import torch

from megatron_parallel._compat.imagined import fake_tensors
from megatron_parallel.imagined.cuda_kernels import cuda_kernels
from megatron_parallel.imagined.functions import cuda_functions
from megatron_parallel.imagined.guard import NoGuardError, guard_loaded
from megatron_parallel.imagined.ledger import DeviceLedger
from megatron_parallel.imagined.storages import StorageLedger

NAME: Final = "an imagined device"
CUDA_GRANULARITY: Final = 512
"""Sizes of allocations are multiples of this number of bytes in torch's CUDA allocator."""


@contextlib.contextmanager
def imagined_device(
    device: str | torch.device = "cuda", *, total_memory: int = 80 << 30
) -> Iterator[DeviceLedger]:
    """Makes tensors of a device without values in the block, and counts what is done with them.

    With "cuda", tensors of the host have values, so the program takes the same path as in a real
    run until it reads a value from the device. It then gets False, 0 or 1. With "cpu", no tensor
    has values: the ledger then describes a run on a CPU.

    Args:
        device: "cuda" or "cpu".
        total_memory: Memory in bytes that the device reports.

    Raises:
        NoGuardError: Tensors on "cuda" cannot have gradients here; see `missing_guard_reason`.
    """
    wanted = torch.device(device)
    is_cuda = wanted.type == "cuda"
    if is_cuda and (reason := missing_guard_reason()):
        raise NoGuardError(f"no device can be imagined: {reason}")
    absent = is_cuda and not torch.cuda.is_available()
    ledger = DeviceLedger(wanted.type, StorageLedger(CUDA_GRANULARITY if is_cuda else 1))
    with contextlib.ExitStack() as stack:
        if absent:
            stack.enter_context(cuda_functions(NAME, total_memory, ledger.wait, ledger.queue))
        if is_cuda:
            stack.enter_context(cuda_kernels(ledger))
        stack.enter_context(fake_tensors(device_exists=not absent))
        stack.enter_context(ledger)
        yield ledger


def missing_guard_reason() -> str | None:
    """Returns why tensors on "cuda" cannot have gradients in this process, or None if they can."""
    if torch.cuda.is_available() or guard_loaded():
        return None
    return "no device guard is loaded; call load_guard() before torch is imported"
