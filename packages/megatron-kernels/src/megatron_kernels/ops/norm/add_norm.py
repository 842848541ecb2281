"""Norms of the residual stream after an addition to it: the sum and its norm.

A layer adds the output of a sublayer to the stream, and the next sublayer reads the norm of the
sum. As one operation this reads and writes four tensors in each pass, instead of seven or eight.
"""

from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor

from megatron_kernels.ops.batch_invariant import NAME, SLOWER
from megatron_kernels.ops.norm import layer_norm as layer
from megatron_kernels.ops.norm import rms_norm as rms
from megatron_kernels.ops.norm import triton
from megatron_kernels.ops.triton_op import triton_backend
from megatron_kernels.registry import AUTO, Backend, accept_all, op


def _then(norm: Any, x: Tensor, added: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    """Computes the sum, then its norm."""
    total = x if added is None else x + added
    return total, norm(total, *options)


def _reason(norm: Any, x: Tensor, added: Tensor | None, *options: Any) -> str | None:
    """Returns why the norm does not support the sum, which is like `x`."""
    reason: str | None = norm(x, *options)
    return reason


@op(
    triton_backend(
        triton.add_rms_norm, triton.add_rms_norm_unsupported_reason, "one kernel of ours each way"
    ),
    Backend(
        "torch",
        partial(_then, rms.fused),
        partial(_reason, rms.fused_unsupported_reason),
        "a sum, then F.rms_norm",
    ),
    Backend(
        NAME, partial(_then, rms.invariant), accept_all, "sums of rows in halves", on_request=SLOWER
    ),
    Backend(
        "reference",
        partial(_then, rms.reference),
        accept_all,
        "plain torch, mean square in float32 or float64",
    ),
)
def add_rms_norm(
    x: Float[Tensor, "*rows h"],
    added: Float[Tensor, "*rows h"] | None,
    weight: Float[Tensor, " h"] | None,
    eps: float = 1e-5,
    zero_centered: bool = False,
    *,
    backend: str = AUTO,
) -> tuple[Float[Tensor, "*rows h"], Float[Tensor, "*rows h"]]:
    """Adds to the residual stream, and computes the RMSNorm of the sum.

    Args:
        x: Residual stream `[..., h]`.
        added: What is added to it, `[..., h]`. None means nothing: the sum is `x`, whose gradients
            the backward pass adds.
        weight: Gain `[h]`. None means 1.
        eps: Added to the mean square.
        zero_centered: Whether the gain is `1 + weight`, as in Gemma.
        backend: "auto" or the name of one backend.

    Returns:
        The sum and its norm, `[..., h]` each, in the dtype of `x`.
    """
    return add_rms_norm.run(backend, x, added, weight, eps, zero_centered)


@op(
    triton_backend(
        triton.add_layer_norm,
        triton.add_layer_norm_unsupported_reason,
        "one kernel of ours each way",
    ),
    Backend(
        "torch",
        partial(_then, layer.fused),
        partial(_reason, layer.fused_unsupported_reason),
        "a sum, then LayerNorm by kernels of torch",
    ),
    Backend(
        NAME,
        partial(_then, layer.invariant),
        accept_all,
        "sums of rows in halves",
        on_request=SLOWER,
    ),
    Backend(
        "reference",
        partial(_then, layer.reference),
        accept_all,
        "plain torch, statistics in float32 or float64",
    ),
)
def add_layer_norm(
    x: Float[Tensor, "*rows h"],
    added: Float[Tensor, "*rows h"] | None,
    weight: Float[Tensor, " h"],
    bias: Float[Tensor, " h"] | None,
    eps: float = 1e-5,
    zero_centered: bool = False,
    *,
    backend: str = AUTO,
) -> tuple[Float[Tensor, "*rows h"], Float[Tensor, "*rows h"]]:
    """Adds to the residual stream, and computes the LayerNorm of the sum.

    Args:
        x: Residual stream `[..., h]`.
        added: What is added to it, `[..., h]`. None means nothing: the sum is `x`, whose gradients
            the backward pass adds.
        weight: Gain `[h]`.
        bias: Shift `[h]`, or None.
        eps: Added to the variance.
        zero_centered: Whether the gain is `1 + weight` (LayerNorm1P of NeMo).
        backend: "auto" or the name of one backend.

    Returns:
        The sum and its norm, `[..., h]` each, in the dtype of `x`.
    """
    return add_layer_norm.run(backend, x, added, weight, bias, eps, zero_centered)
