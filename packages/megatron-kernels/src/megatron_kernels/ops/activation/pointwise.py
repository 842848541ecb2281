"""Activations of one input each, besides GELU: ReLU and its square, SiLU, quick GELU."""

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

QUICK = 1.702
"""Slope of quick GELU (Hendrycks and Gimpel, 2016, section 2)."""

Pointwise = Literal["relu", "squared_relu", "silu", "quick_gelu"]


def reference(x: Tensor, kind: Pointwise) -> Tensor:
    """Computes the definition, in at least float32."""
    values = upcast(x)
    if kind == "silu":
        y = values * torch.sigmoid(values)
    elif kind == "quick_gelu":
        y = values * torch.sigmoid(QUICK * values)
    else:
        positive = torch.relu(values)  # the gradient of `clamp` at 0 depends on torch's version
        y = positive if kind == "relu" else positive * positive
    return y.to(x.dtype)


def fused(x: Tensor, kind: Pointwise) -> Tensor:
    """Calls torch's functions.

    Each saves one tensor for the backward pass: ReLU its result, its square and SiLU their input,
    quick GELU its scaled input.
    """
    if kind == "silu":
        return functional.silu(x)
    if kind == "quick_gelu":
        return functional.silu(QUICK * x) * (1 / QUICK)
    positive = functional.relu(x)
    return positive if kind == "relu" else positive.square()


def invariant(x: Tensor, kind: Pointwise) -> Tensor:
    """Computes the definition; the backward pass is that of the fused backend."""
    return with_gradients_of(fused, batch_invariant.pointwise, x, kind)


@op(
    triton_backend(triton.pointwise, triton.unsupported_reason, "one kernel of ours each way"),
    Backend("torch", fused, accept_all, "F.relu and F.silu"),
    Backend(NAME, invariant, accept_all, "the definition, rounded alike", on_request=SLOWER),
    Backend("reference", reference, accept_all, "plain torch, in float32 or float64"),
)
def pointwise(
    x: Float[Tensor, "*shape"], kind: Pointwise, *, backend: str = AUTO
) -> Float[Tensor, "*shape"]:
    """Applies an activation elementwise.

    Args:
        x: Input of any shape.
        kind: `relu`; `squared_relu`, its square (So et al., 2021); `silu`, x * sigmoid(x);
            `quick_gelu`, x * sigmoid(1.702 x).
        backend: "auto" or the name of one backend.

    Returns:
        The shape and dtype of `x`.
    """
    return pointwise.run(backend, x, kind)
