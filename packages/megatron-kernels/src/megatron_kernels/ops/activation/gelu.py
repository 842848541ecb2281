"""GELU (Hendrycks and Gimpel, 2016)."""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from megatron_kernels.ops.activation import batch_invariant, triton
from megatron_kernels.ops.batch_invariant import NAME, SLOWER, with_gradients_of
from megatron_kernels.ops.precision import upcast
from megatron_kernels.ops.triton_op import triton_backend
from megatron_kernels.registry import AUTO, Backend, accept_all, op

Approximation = Literal["none", "tanh"]


def reference(x: Tensor, approximate: Approximation) -> Tensor:
    """Computes x times the normal distribution function, or its tanh approximation."""
    values = upcast(x)
    if approximate == "none":
        probability = 0.5 * (1 + torch.erf(values / math.sqrt(2)))
    else:
        inner = math.sqrt(2 / math.pi) * (values + 0.044715 * values**3)
        probability = 0.5 * (1 + torch.tanh(inner))
    return (values * probability).to(x.dtype)


def fused(x: Tensor, approximate: Approximation) -> Tensor:
    """Calls `F.gelu`."""
    return functional.gelu(x, approximate=approximate)


def invariant(x: Tensor, approximate: Approximation) -> Tensor:
    """Computes the definition; the backward pass is that of the fused backend."""
    return with_gradients_of(fused, batch_invariant.gelu, x, approximate)


@op(
    Backend("torch", fused, accept_all, "F.gelu"),
    triton_backend(triton.gelu, triton.unsupported_reason, "one kernel of ours each way"),
    Backend(NAME, invariant, accept_all, "the definition, rounded alike", on_request=SLOWER),
    Backend("reference", reference, accept_all, "plain torch, in float32 or float64"),
)
def gelu(
    x: Float[Tensor, "*shape"],
    approximate: Approximation = "none",
    *,
    backend: str = AUTO,
) -> Float[Tensor, "*shape"]:
    """Applies the Gaussian error linear unit, x * P(X <= x) for a standard normal X, elementwise.

    Args:
        x: Input of any shape.
        approximate: "none" for the error function, "tanh" for the approximation of GPT-2.
        backend: "auto" or the name of one backend.

    Returns:
        The shape and dtype of `x`.
    """
    return gelu.run(backend, x, approximate)
