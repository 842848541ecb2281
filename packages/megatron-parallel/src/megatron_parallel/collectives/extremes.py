"""Numbers as integers of the same order, so that a maximum or minimum over ranks keeps a NaN.

Backends compare floating-point numbers, and a comparison with a NaN is false: Gloo keeps the number
of the first rank and loses a NaN of another one (torch 2.13), and NCCL documents nothing. The bits
of IEEE numbers have their order as integers once those of negative numbers are flipped. A NaN
becomes the largest integer of a maximum, and the smallest of a minimum.
"""

from typing import Final, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

_INTEGERS: Final = {torch.float32: torch.int32, torch.float64: torch.int64}


def to_ordered(t: Float[Tensor, "*shape"], op: Literal["max", "min"]) -> Int[Tensor, "*shape"]:
    """Returns integers of the order of numbers. Those of 16 bits become numbers of 32 bits before.

    Args:
        t: The numbers.
        op: What the integers are reduced by.
    """
    wide = t if t.dtype in _INTEGERS else t.float()
    bits = wide.contiguous().view(_INTEGERS[wide.dtype])
    limits = torch.iinfo(bits.dtype)
    ordered = torch.where(bits < 0, bits ^ limits.max, bits)
    return torch.where(wide.isnan(), limits.max if op == "max" else limits.min, ordered)


def from_ordered(
    ordered: Int[Tensor, "*shape"], op: Literal["max", "min"], dtype: torch.dtype
) -> Float[Tensor, "*shape"]:
    """Returns the numbers of `to_ordered`.

    Args:
        ordered: The integers.
        op: What they were reduced by.
        dtype: Dtype of the numbers.
    """
    limits = torch.iinfo(ordered.dtype)
    bits = torch.where(ordered < 0, ordered ^ limits.max, ordered)
    wide = bits.view(torch.float64 if ordered.dtype == torch.int64 else torch.float32)
    lost = ordered == (limits.max if op == "max" else limits.min)
    return wide.masked_fill(lost, torch.nan).to(dtype)
