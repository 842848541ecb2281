"""Cross-entropy of logits and target indices, per token."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from megatron_kernels.ops.loss import triton
from megatron_kernels.ops.precision import upcast
from megatron_kernels.ops.triton_op import triton_backend
from megatron_kernels.registry import AUTO, Backend, accept_all, op

IGNORED = triton.IGNORED


def reference(logits: Tensor, targets: Tensor) -> Tensor:
    """Computes the log-sum-exp minus the target's logit."""
    values = upcast(logits)
    counted = targets != IGNORED
    picked = values.gather(-1, torch.where(counted, targets, 0)[..., None])[..., 0]
    return torch.where(counted, torch.logsumexp(values, -1) - picked, 0)


def fused(logits: Tensor, targets: Tensor) -> Tensor:
    """Calls `F.cross_entropy` without reduction."""
    values = upcast(logits).reshape(-1, logits.shape[-1])
    loss = functional.cross_entropy(
        values, targets.reshape(-1), reduction="none", ignore_index=IGNORED
    )
    return loss.view(targets.shape)


@op(
    triton_backend(
        triton.cross_entropy,
        triton.unsupported_reason,
        "kernels of ours, read the logits once in each pass",
    ),
    Backend("torch", fused, accept_all, "F.cross_entropy"),
    Backend("reference", reference, accept_all, "plain torch, in float32 or float64"),
)
def cross_entropy(
    logits: Float[Tensor, "*tokens v"],
    targets: Int[Tensor, "*tokens"],
    *,
    backend: str = AUTO,
) -> Float[Tensor, "*tokens"]:
    """Computes minus the log-probability of each target under softmax(logits), in nats.

    Args:
        logits: `[..., v]`.
        targets: int64 `[...]`, each in [0, v); -100 marks a token whose loss is zero.
        backend: "auto" or the name of one backend.

    Returns:
        `[...]` in float32, or float64 for float64 logits, without reduction.
    """
    return cross_entropy.run(backend, logits, targets)
