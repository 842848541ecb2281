"""RMSNorm (Zhang and Sennrich, 2019)."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from megatron_kernels.ops.norm import apex
from megatron_kernels.ops.precision import upcast
from megatron_kernels.registry import AUTO, Backend, accept_all, op


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes the definition, with the mean square in at least float32."""
    values = upcast(x)
    normal = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (normal * weight).to(x.dtype)


def fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Calls `F.rms_norm`."""
    return functional.rms_norm(x, weight.shape, weight, eps)


def fused_unsupported_reason(x: Tensor, weight: Tensor, eps: float) -> str | None:
    """Returns that dtypes differ, which torch's kernel does not support."""
    if weight.dtype == x.dtype:
        return None
    return f"x is {x.dtype}, weight {weight.dtype}; they must agree"


@op(
    Backend("torch", fused, fused_unsupported_reason, "F.rms_norm"),
    Backend("apex", apex.rms_norm, apex.rms_norm_unsupported_reason, "Apex's fused RMSNorm"),
    Backend("reference", reference, accept_all, "plain torch, mean square in float32 or float64"),
)
def rms_norm(
    x: Float[Tensor, "*rows h"],
    weight: Float[Tensor, " h"],
    eps: float = 1e-5,
    *,
    backend: str = AUTO,
) -> Float[Tensor, "*rows h"]:
    """Divides the last dim by its root mean square, and scales.

    Args:
        x: Input `[..., h]`.
        weight: Gain `[h]`.
        eps: Added to the mean square.
        backend: "auto" or the name of one backend.

    Returns:
        `[..., h]` in the dtype of `x`.
    """
    return rms_norm.run(backend, x, weight, eps)
