"""The pair of block operations for cross-entropy over a part of the vocabulary, of one rank.

The forward pass returns three numbers for each token. Ranks combine the log-sum-exps of their parts
by `logaddexp`, take the largest logit of the target, and add the sums. The backward pass takes the
log-sum-exp of the *whole* vocabulary and computes the probabilities again, so it saves no matrix
but the logits, and may write the gradient over them.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from megatron_kernels.ops.loss import triton
from megatron_kernels.ops.precision import upcast
from megatron_kernels.ops.triton_op import triton_backend
from megatron_kernels.registry import AUTO, Backend, accept_all, op


def _held(targets: Tensor, valid: int) -> Tensor:
    return (targets >= 0) & (targets < valid)


def reference(logits: Tensor, targets: Tensor, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the definitions, in at least float32."""
    values = upcast(logits[..., :valid])
    held = _held(targets, valid)
    picked = torch.full_like(values[..., :1].sum(-1), -torch.inf)
    if valid:
        found = values.gather(-1, torch.where(held, targets, 0)[..., None])[..., 0]
        picked = torch.where(held, found, -torch.inf)
    return torch.logsumexp(values, -1), picked, values.sum(-1)


def gradient_reference(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    dloss: Tensor,
    valid: int,
    at_target: float,
    everywhere: float,
    overwrites: bool,
) -> Tensor:
    """Computes the definition, in at least float32."""
    columns = torch.arange(logits.shape[-1], device=logits.device)
    p = torch.exp(upcast(logits) - lse[..., None]) - everywhere
    p = p - torch.where(columns == targets[..., None], at_target, 0.0)
    counted = (dloss[..., None] != 0) & (columns < valid)
    found = torch.where(counted, p * dloss[..., None], 0.0).to(logits.dtype)
    return logits.copy_(found) if overwrites else found


@op(
    triton_backend(
        triton.vocab_cross_entropy,
        triton.unsupported_reason,
        "a kernel of ours, reads the logits once",
    ),
    Backend("reference", reference, accept_all, "plain torch, in float32 or float64"),
)
def vocab_cross_entropy(
    logits: Float[Tensor, "*tokens v"],
    targets: Int[Tensor, "*tokens"],
    valid: int,
    *,
    backend: str = AUTO,
) -> tuple[Float[Tensor, "*tokens"], Float[Tensor, "*tokens"], Float[Tensor, "*tokens"]]:
    """Returns what a part of the vocabulary contributes to the cross-entropy of each token.

    Autograd does not follow it; `vocab_cross_entropy_gradient` is its backward pass.

    Args:
        logits: Logits of this part of the vocabulary, `[..., v]`.
        targets: int64 `[...]`, the column of each target; negative if it is elsewhere or absent.
        valid: Number of columns that count. Those from `valid` on are padding.
        backend: "auto" or the name of one backend.

    Returns:
        The log-sum-exp of the columns that count, the logit of the target (-inf if it is
        elsewhere), and the sum of the logits, `[...]` each, in float32, or float64 for float64
        logits. Without columns: -inf, -inf and 0.
    """
    return vocab_cross_entropy.run(backend, logits, targets, valid)


@op(
    triton_backend(
        triton.vocab_cross_entropy_gradient,
        triton.unsupported_reason,
        "a kernel of ours, reads the logits once",
    ),
    Backend("reference", gradient_reference, accept_all, "plain torch, in float32 or float64"),
)
def vocab_cross_entropy_gradient(
    logits: Float[Tensor, "*tokens v"],
    targets: Int[Tensor, "*tokens"],
    lse: Float[Tensor, "*tokens"],
    dloss: Float[Tensor, "*tokens"],
    valid: int,
    at_target: float = 1.0,
    everywhere: float = 0.0,
    overwrites: bool = False,
    *,
    backend: str = AUTO,
) -> Float[Tensor, "*tokens v"]:
    """Returns `dloss * (softmax - everywhere - at_target at the target)`, 0 for padding.

    With label smoothing e over V tokens, `at_target` is 1 - e and `everywhere` e / V.

    Args:
        logits: Logits of this part of the vocabulary, `[..., v]`.
        targets: As for `vocab_cross_entropy`.
        lse: Log-sum-exp of the whole vocabulary `[...]`, in float32 or float64.
        dloss: Gradient of each token's loss `[...]`, in the same dtype. Tokens with 0 have the
            gradient 0, also if their logits are NaN.
        valid: Number of columns that count.
        at_target: What is subtracted from the probability of the target.
        everywhere: What is subtracted from every probability.
        overwrites: Whether the gradient may be written over the logits. If it is, the result is
            `logits`.
        backend: "auto" or the name of one backend.

    Returns:
        `[..., v]` in the dtype of `logits`.
    """
    return vocab_cross_entropy_gradient.run(
        backend, logits, targets, lse, dloss, valid, at_target, everywhere, overwrites
    )
