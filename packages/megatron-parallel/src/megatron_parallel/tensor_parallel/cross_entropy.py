"""Cross entropy of logits whose vocabulary dim is cut over an axis.

No rank holds all logits of a token. The ranks exchange three numbers per token: the largest logit
and the logit of the target in one all-reduce, then the sum of exponentials. Label smoothing adds a
fourth number to the second all-reduce.
"""

from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function

from megatron_parallel.collectives.operations import all_reduce
from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.axes import Axis

IGNORE_INDEX: Final = -100
"""Target without loss and gradient, as in `torch.nn.functional.cross_entropy`."""

PURPOSE: Final = "token losses"
"""Purpose of its messages in `Traffic` and in errors."""


def vocab_parallel_cross_entropy(
    logits: Float[Tensor, "*batch part"],
    targets: Int[Tensor, "*batch"],
    axis: Axis,
    true_vocab: int,
    *,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
) -> Float[Tensor, "*batch"]:
    """Returns the loss of each token, `-log softmax(logits)[target]`, over the whole vocabulary.

    The loss is computed in float32, or in float64 for float64 logits.

    With `label_smoothing` e, the loss is `(1 - e) loss - e / v * sum of log softmax(logits)` over
    all `v = true_vocab` tokens, as in `torch.nn.functional.cross_entropy` (Szegedy et al. 2016,
    section 7). Megatron-Core distributes its a over the other `v - 1` tokens: its a corresponds to
    `e = a v / (v - 1)`.

    The same code is used for every axis size. It saves one buffer of the size of the logits, the
    probabilities, which the backward pass turns into the gradient in place. A second backward pass
    therefore raises. `F.cross_entropy` allocates three such buffers, and a fourth to cut off
    padding.

    Args:
        logits: This rank's columns of the logits, `[..., v/n]`. Columns from `true_vocab` on are
            padding and have neither probability nor gradient.
        targets: Global token ids below `true_vocab`, equal on all ranks of the axis, or
            `IGNORE_INDEX`. A target that no rank holds has infinite loss.
        axis: Axis that cuts the vocabulary.
        true_vocab: Size of the vocabulary without padding.
        label_smoothing: Part of the loss that all tokens share, `0 <= e < 1`. Defaults to 0.
        softcap: Bound of the logits, see `bound_logits`. Defaults to 0, no bound.

    Raises:
        LayoutError: `label_smoothing` is not in `0 <= e < 1`.
    """
    if not 0.0 <= label_smoothing < 1.0:
        raise LayoutError(f"label_smoothing {label_smoothing} is not in 0 <= e < 1")
    logits = bound_logits(logits, softcap)
    result: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, targets, axis, true_vocab, label_smoothing
    )
    return result


def bound_logits(logits: Float[Tensor, "*shape"], softcap: float) -> Float[Tensor, "*shape"]:
    """Returns `softcap * tanh(logits / softcap)` (Gemma 2), or the logits if `softcap` is 0.

    The bound is computed in at least float32, which is the dtype of the result. It saves one buffer
    of the size of the logits.
    """
    if not softcap:
        return logits
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.tanh(exact / softcap) * softcap


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        axis: Axis,
        true_vocab: int,
        smoothing: float,
    ) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        width = logits.shape[-1]
        start = axis.index * width
        valid = min(max(true_vocab - start, 0), width)
        local = (targets - start).unsqueeze(-1)
        held = (local >= 0) & (local < valid)
        local = local.clamp(0, width - 1)

        exact = logits.to(dtype)  # a copy only if the dtype changes
        at_target = exact.gather(-1, local).masked_fill_(~held, -torch.inf)
        if valid:
            largest = exact[..., :valid].amax(-1, keepdim=True)
        else:
            largest = torch.full_like(at_target, -torch.inf)
        if axis.size > 1:
            both = all_reduce(torch.stack((largest, at_target)), axis, "max", purpose=PURPOSE)
            largest, at_target = both.unbind()

        probabilities = exact - largest if exact is logits else exact.sub_(largest)
        # Sum of the logits minus the largest one, before they are overwritten.
        shifted = probabilities[..., :valid].sum(-1, keepdim=True) if smoothing else None
        probabilities[..., valid:] = -torch.inf
        probabilities.exp_()
        total = probabilities.sum(-1, keepdim=True)
        if shifted is None:
            total = all_reduce(total, axis, purpose=PURPOSE)
        else:
            both = all_reduce(torch.stack((total, shifted)), axis, purpose=PURPOSE)
            total, shifted = both.unbind()
        probabilities /= total

        loss = total.log().add_(largest).sub_(at_target)
        share = _share(smoothing, true_vocab)
        if shifted is not None:  # subtracting log(total) per token gives log-probabilities
            every = shifted.sub_(total.log().mul_(true_vocab))
            loss = loss.mul_(1.0 - smoothing).sub_(every.mul_(share))
        loss = loss.squeeze(-1)
        ignored = targets == IGNORE_INDEX
        ctx.save_for_backward(probabilities, local, held, ignored)
        ctx.dtype, ctx.smoothing, ctx.valid = logits.dtype, smoothing, valid
        ctx.share = share
        # Not in place: torch 2.11 compiles in-place changes to a result without gradient.
        return loss.masked_fill(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, local, held, ignored = ctx.saved_tensors
        upstream = grads[0].masked_fill(ignored, 0.0).unsqueeze(-1)
        if ctx.smoothing:
            probabilities[..., : ctx.valid] -= ctx.share
        grad = probabilities.mul_(upstream)
        grad.scatter_add_(-1, local, upstream * held * (ctx.smoothing - 1.0))
        return grad.to(ctx.dtype), None, None, None, None


def _share(smoothing: float, vocabulary: int) -> float:
    """Returns the part of the smoothing that each token of the vocabulary gets."""
    return smoothing / vocabulary
