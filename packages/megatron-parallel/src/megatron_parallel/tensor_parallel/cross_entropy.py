"""Cross entropy of logits whose vocabulary dim is cut over an axis.

No rank ever sees all logits of a token: the ranks exchange three numbers per token (the largest
logit and the target's, in one all-reduce, then the sum of exponentials); with label smoothing a
fourth, with the last.
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
"""A target that has no loss and no gradient, as in `torch.nn.functional.cross_entropy`."""

PURPOSE: Final = "token losses"
"""What its messages are for, in `Traffic` and in errors."""


def vocab_parallel_cross_entropy(
    logits: Float[Tensor, "*batch part"],
    targets: Int[Tensor, "*batch"],
    axis: Axis,
    true_vocab: int,
    *,
    label_smoothing: float = 0.0,
) -> Float[Tensor, "*batch"]:
    """Loss per token, `-log softmax(logits)[target]`, over the whole vocabulary.

    `logits` `[..., v/n]` are this rank's columns; `targets` are global token numbers below
    `true_vocab`, equal on all ranks of the axis, or `IGNORE_INDEX`. Columns from `true_vocab` on
    are padding and never get probability mass or gradient. The loss is float32, computed in float32
    whatever the logits, except that float64 stays float64. A target that no rank holds has infinite
    loss.

    With `label_smoothing` e the target's share of the loss is `1 - e`, and all `v = true_vocab`
    tokens, whichever rank holds them, share e: `(1 - e) loss - e / v * sum of log softmax(logits)`,
    as in `torch.nn.functional.cross_entropy` (Szegedy et al. 2016, section 7). Megatron-Core's
    function spreads its a over the other `v - 1` tokens: its a is our `e = a v / (v - 1)`.

    One path serves every axis size. It keeps one buffer of the size of the logits: the
    probabilities, which the backward pass turns into the gradient in place. So `backward` can run
    once; a second time raises. `F.cross_entropy` makes three such buffers, and a fourth where
    padding has to be cut off first.

    Raises:
        LayoutError: a `label_smoothing` that is not in `0 <= e < 1`.
    """
    if not 0.0 <= label_smoothing < 1.0:
        raise LayoutError(f"label_smoothing {label_smoothing} is not in 0 <= e < 1")
    result: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, targets, axis, true_vocab, label_smoothing
    )
    return result


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
        # Of the logits less the largest one, before they are overwritten.
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
        if shifted is not None:  # less log(total) for every token, they are all log-probabilities
            every = shifted.sub_(total.log().mul_(true_vocab))
            loss = loss.mul_(1.0 - smoothing).sub_(every.mul_(share))
        loss = loss.squeeze(-1)
        ignored = targets == IGNORE_INDEX
        ctx.save_for_backward(probabilities, local, held, ignored)
        ctx.dtype, ctx.smoothing, ctx.valid = logits.dtype, smoothing, valid
        ctx.share = share
        # Not in place: torch 2.11 compiles what was changed in place to a result without gradient.
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
    """Returns what each token of the whole vocabulary gets."""
    return smoothing / vocabulary
