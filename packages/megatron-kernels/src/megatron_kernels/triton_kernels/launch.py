"""What launches of kernels have in common."""

import struct
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS: int = 1024
"""Elements of one program of an elementwise kernel."""

_DATA_CENTER: Final = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Compute capabilities of GPUs whose programs have at least 163 KiB of shared memory."""


def has_data_center_memory(device: torch.device) -> bool:
    """Returns whether a program has 163 KiB of shared memory; on other GPUs it has 99 KiB."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(device) in _DATA_CENTER


def accumulator(dtype: torch.dtype) -> Any:
    """Returns the dtype in which a kernel computes: float64 for float64, otherwise float32."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the same as a dtype of torch."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def two_floats(number: float) -> tuple[float, float]:
    """Returns two numbers of float32 whose sum is a number of float64; kernels take no other."""
    first = struct.unpack("f", struct.pack("f", number))[0]
    return first, number - first


@triton.jit
def exact(number, rest, ACC: tl.constexpr):
    """Returns the sum of `two_floats` in a dtype."""
    return tl.cast(number, ACC) + tl.cast(rest, ACC)


def power_of_two(number: int) -> int:
    """Returns the smallest power of two that is not less than a number."""
    return int(triton.next_power_of_2(max(number, 1)))


def warps(block: int) -> int:
    """Returns how many warps share a block of elements."""
    return max(4, min(16, block // 512))


def resident_programs(device: torch.device, rows: int, num_warps: int) -> int:
    """Returns how many programs share rows if each of them keeps a partial sum.

    A multiprocessor of a GPU gets half of the warps that it can hold, so that some of them compute
    while others wait for memory.
    """
    if device.type != "cuda":
        return min(rows, 3)
    each = max(1, 32 // num_warps)
    return min(rows, each * torch.cuda.get_device_properties(device).multi_processor_count)


def elementwise_grid(x: Tensor, width: int) -> tuple[int]:
    """Returns the grid of a kernel whose programs have up to `ELEMENTS` elements of one row each.

    A division for each element would take longer than its bytes.

    Args:
        x: All elements.
        width: Elements of a row.
    """
    return (x.numel() // width * triton.cdiv(width, ELEMENTS),)
