"""Batch-invariant activations: their definitions, from functions that round every element alike."""

import math
from typing import Final

import torch
from torch import Tensor

from megatron_kernels.ops.precision import upcast

QUICK: Final = 1.702
"""Slope of quick GELU."""


def activate(values: Tensor, kind: str) -> Tensor:
    """Returns an activation of float32 or float64 numbers, by its name, in new memory.

    Not differentiable by autograd.
    """
    if kind in ("silu", "quick_gelu"):
        divisor = torch.mul(values, -QUICK if kind == "quick_gelu" else -1.0).exp_().add_(1.0)
        return torch.div(values, divisor, out=divisor)
    if kind == "gelu":
        return values * (0.5 * (1 + torch.erf(values * math.sqrt(0.5))))
    if kind == "gelu_tanh":
        cubic = values + 0.044715 * (values * values * values)
        return values * (0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * cubic)))
    positive = values.clamp(min=0)
    return positive.mul_(positive) if kind == "squared_relu" else positive


def gelu(x: Tensor, approximate: str) -> Tensor:
    """Computes GELU."""
    kind = "gelu" if approximate == "none" else "gelu_tanh"
    return activate(upcast(x), kind).to(x.dtype)


def pointwise(x: Tensor, kind: str) -> Tensor:
    """Computes an activation of one input."""
    return activate(upcast(x), kind).to(x.dtype)


def glu(x: Tensor, gate: str, bound: float, offset: float) -> Tensor:
    """Computes a gated linear unit."""
    g, up = upcast(x).unbind(-2)
    if bound:
        g, up = g.clamp(max=bound), up.clamp(-bound, bound)
    return activate(g, gate).mul_(up + offset if offset else up).to(x.dtype)


def swiglu(x: Tensor) -> Tensor:
    """Computes SwiGLU."""
    return glu(x, "silu", 0.0, 0.0)
