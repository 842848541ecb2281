"""Cross entropy of logits whose vocabulary dim is cut over an axis.

No rank ever sees all logits of a token: the ranks exchange three numbers per token (the largest
logit and the target's, in one all-reduce, then the sum of exponentials).
"""

from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function

from megatron_parallel.axes import Axis
from megatron_parallel.collectives import all_reduce

IGNORED_TARGET: Final = -100
"""A target that has no loss and no gradient, as in `torch.nn.functional.cross_entropy`."""

PURPOSE: Final = "token losses"
"""What its messages are for, in `Traffic` and in errors."""


def vocab_parallel_cross_entropy(
    logits: Float[Tensor, "*batch part"],
    targets: Int[Tensor, "*batch"],
    axis: Axis,
    true_vocab: int,
) -> Float[Tensor, "*batch"]:
    """Loss per token, `-log softmax(logits)[target]`, over the whole vocabulary.

    `logits` `[..., v/n]` are this rank's columns; `targets` are global token numbers below
    `true_vocab`, equal on all ranks of the axis, or `IGNORED_TARGET`. Columns from `true_vocab` on
    are padding and never get probability mass or gradient. The loss is float32, computed in float32
    whatever the logits, except that float64 stays float64. A target that no rank holds has infinite
    loss.

    One path serves every axis size. It keeps one buffer of the size of the logits: the
    probabilities, which the backward pass turns into the gradient in place. So `backward` can run
    once; a second time raises. `F.cross_entropy` makes three such buffers, and a fourth where
    padding has to be cut off first.
    """
    result: Tensor = _CrossEntropy.apply(logits, targets, axis, true_vocab)  # type: ignore[no-untyped-call]
    return result


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, axis: Axis, true_vocab: int) -> Tensor:
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
        probabilities[..., valid:] = -torch.inf
        probabilities.exp_()
        total = all_reduce(probabilities.sum(-1, keepdim=True), axis, purpose=PURPOSE)
        probabilities /= total

        loss = total.log_().add_(largest).sub_(at_target).squeeze(-1)
        ignored = targets == IGNORED_TARGET
        ctx.save_for_backward(probabilities, local, held, ignored)
        ctx.dtype = logits.dtype
        return loss.masked_fill_(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, local, held, ignored = ctx.saved_tensors
        upstream = grads[0].masked_fill(ignored, 0.0).unsqueeze(-1)
        grad = probabilities.mul_(upstream)
        grad.scatter_add_(-1, local, -upstream * held)
        return grad.to(ctx.dtype), None, None, None
