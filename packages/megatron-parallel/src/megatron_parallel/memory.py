"""Which errors of torch mean that memory ran out."""

import torch

_CPU_ALLOCATOR = "can't allocate memory"  # c10/core/impl/alloc_cpu.cpp


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether memory of the host or of a device ran out.

    torch raises `torch.OutOfMemoryError` for devices alone; for the host it raises a plain
    `RuntimeError` with the text of its allocator.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)
