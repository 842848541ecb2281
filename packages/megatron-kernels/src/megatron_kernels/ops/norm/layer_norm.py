"""LayerNorm (Ba et al., 2016)."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from megatron_kernels.ops.batch_invariant import NAME, SLOWER, with_gradients_of
from megatron_kernels.ops.norm import apex, batch_invariant, summed_rows, triton
from megatron_kernels.ops.norm.gain import gain_of
from megatron_kernels.ops.precision import upcast
from megatron_kernels.ops.triton_op import triton_backend
from megatron_kernels.registry import AUTO, NEVER_RUN, Backend, accept_all, op
from megatron_kernels.transformer_engine import norm as transformer_engine
from megatron_kernels.transformer_engine.library import NAME as TRANSFORMER_ENGINE


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """Computes the definition, with statistics in at least float32."""
    values = upcast(x)
    centred = values - values.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    normal = centred * torch.rsqrt(variance + eps)
    scaled = normal * gain_of(weight, zero_centered)
    return (scaled if bias is None else scaled + bias).to(x.dtype)


def fused(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """Calls torch's kernels, in at least float32 if the gain is `1 + weight`.

    On a CPU in 16 bits the gradients of gain and shift are summed in float32.
    """
    if summed_rows.sums_rows_in_16_bits(x):
        return summed_rows.layer_norm(x, weight, bias, eps, zero_centered)
    if not zero_centered:
        return functional.layer_norm(x, weight.shape, weight, bias, eps)
    shift = None if bias is None else upcast(bias)
    gain = gain_of(weight, zero_centered)
    return functional.layer_norm(upcast(x), weight.shape, gain, shift, eps).to(x.dtype)


def fused_unsupported_reason(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool = False
) -> str | None:
    """Returns that dtypes differ: torch supports a mixture in its CPU kernel only."""
    if weight.dtype == x.dtype and (bias is None or bias.dtype == x.dtype):
        return None
    shift = "" if bias is None else f", bias {bias.dtype}"
    return f"x is {x.dtype}, weight {weight.dtype}{shift}; they must agree"


def invariant(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool = False
) -> Tensor:
    """Adds up rows in a fixed order; the backward pass is that of the fused backend."""
    inputs = x, weight, bias, eps, zero_centered
    known = fused if fused_unsupported_reason(*inputs) is None else reference
    return with_gradients_of(known, batch_invariant.layer_norm, *inputs)


@op(
    Backend("torch", fused, fused_unsupported_reason, "kernels of torch"),
    triton_backend(
        triton.layer_norm, triton.layer_norm_unsupported_reason, "one kernel of ours each way"
    ),
    Backend(
        "apex",
        apex.layer_norm,
        apex.layer_norm_unsupported_reason,
        "Apex's fused LayerNorm",
        NEVER_RUN,
    ),
    Backend(
        TRANSFORMER_ENGINE,
        transformer_engine.layer_norm,
        transformer_engine.layer_norm_unsupported_reason,
        "Transformer Engine's LayerNorm",
        NEVER_RUN,
    ),
    Backend(NAME, invariant, accept_all, "sums of rows in halves", on_request=SLOWER),
    Backend("reference", reference, accept_all, "plain torch, statistics in float32 or float64"),
)
def layer_norm(
    x: Float[Tensor, "*rows h"],
    weight: Float[Tensor, " h"],
    bias: Float[Tensor, " h"] | None,
    eps: float = 1e-5,
    zero_centered: bool = False,
    *,
    backend: str = AUTO,
) -> Float[Tensor, "*rows h"]:
    """Subtracts the mean of the last dim, divides by its standard deviation, scales and shifts.

    Args:
        x: Input `[..., h]`.
        weight: Gain `[h]`.
        bias: Shift `[h]`, or None.
        eps: Added to the variance.
        zero_centered: Whether the gain is `1 + weight` (LayerNorm1P of NeMo).
        backend: "auto" or the name of one backend.

    Returns:
        `[..., h]` in the dtype of `x`.
    """
    return layer_norm.run(backend, x, weight, bias, eps, zero_centered)
