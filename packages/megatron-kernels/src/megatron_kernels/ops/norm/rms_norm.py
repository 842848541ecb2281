"""RMSNorm (Zhang and Sennrich, 2019)."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from megatron_kernels.ops.batch_invariant import NAME, SLOWER, with_gradients_of
from megatron_kernels.ops.norm import apex, batch_invariant, triton
from megatron_kernels.ops.norm.gain import gain_of
from megatron_kernels.ops.precision import upcast
from megatron_kernels.ops.triton_op import triton_backend
from megatron_kernels.registry import AUTO, NEVER_RUN, Backend, accept_all, op
from megatron_kernels.transformer_engine import norm as transformer_engine
from megatron_kernels.transformer_engine.library import NAME as TRANSFORMER_ENGINE


def reference(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool = False) -> Tensor:
    """Computes the definition, with the mean square in at least float32."""
    values = upcast(x)
    normal = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    scaled = normal if weight is None else normal * gain_of(weight, zero_centered)
    return scaled.to(x.dtype)


def fused(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool = False) -> Tensor:
    """Calls `F.rms_norm`, in at least float32 if the gain is `1 + weight`."""
    if weight is None or not zero_centered:
        return functional.rms_norm(x, x.shape[-1:], weight, eps)
    gain = gain_of(weight, zero_centered)
    return functional.rms_norm(upcast(x), weight.shape, gain, eps).to(x.dtype)


def fused_unsupported_reason(
    x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool = False
) -> str | None:
    """Returns that dtypes differ, which torch's kernel does not support."""
    if weight is None or weight.dtype == x.dtype:
        return None
    return f"x is {x.dtype}, weight {weight.dtype}; they must agree"


def invariant(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool = False) -> Tensor:
    """Adds up rows in a fixed order; the backward pass is that of the fused backend."""
    inputs = x, weight, eps, zero_centered
    known = fused if fused_unsupported_reason(*inputs) is None else reference
    return with_gradients_of(known, batch_invariant.rms_norm, *inputs)


@op(
    Backend("torch", fused, fused_unsupported_reason, "F.rms_norm"),
    triton_backend(
        triton.rms_norm, triton.rms_norm_unsupported_reason, "one kernel of ours each way"
    ),
    Backend(
        "apex", apex.rms_norm, apex.rms_norm_unsupported_reason, "Apex's fused RMSNorm", NEVER_RUN
    ),
    Backend(
        TRANSFORMER_ENGINE,
        transformer_engine.rms_norm,
        transformer_engine.rms_norm_unsupported_reason,
        "Transformer Engine's RMSNorm",
        NEVER_RUN,
    ),
    Backend(NAME, invariant, accept_all, "sums of rows in halves", on_request=SLOWER),
    Backend("reference", reference, accept_all, "plain torch, mean square in float32 or float64"),
)
def rms_norm(
    x: Float[Tensor, "*rows h"],
    weight: Float[Tensor, " h"] | None,
    eps: float = 1e-5,
    zero_centered: bool = False,
    *,
    backend: str = AUTO,
) -> Float[Tensor, "*rows h"]:
    """Divides the last dim by its root mean square, and scales.

    Args:
        x: Input `[..., h]`.
        weight: Gain `[h]`. None means 1.
        eps: Added to the mean square.
        zero_centered: Whether the gain is `1 + weight`, as in Gemma.
        backend: "auto" or the name of one backend.

    Returns:
        `[..., h]` in the dtype of `x`.
    """
    return rms_norm.run(backend, x, weight, eps, zero_centered)
