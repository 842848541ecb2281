"""The precision in which an operation computes."""

import torch
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """`x` in float64 if it is float64, otherwise in float32: low precision is for storage only."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
