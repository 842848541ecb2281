"""Detection of out-of-memory errors."""

import torch

_CPU_ALLOCATOR = "can't allocate memory"  # c10/core/impl/alloc_cpu.cpp


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error means that the host or a device ran out of memory.

    torch raises `torch.OutOfMemoryError` only for devices. For the host it raises a `RuntimeError`
    with the text of its allocator.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)
