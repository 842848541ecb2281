"""The precision in which operations compute."""

import torch
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """Returns `x` in float64 if it is float64, otherwise in float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
