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
    overwrites: bool = False,
) -> Float[Tensor, "*batch"]:
    """Returns the loss of each token, `-log softmax(logits)[target]`, over the whole vocabulary.

    The loss is computed in float32, or in float64 for float64 logits.

    With `label_smoothing` e, the loss is `(1 - e) loss - e / v * sum of log softmax(logits)` over
    all `v = true_vocab` tokens, as in `torch.nn.functional.cross_entropy` (Szegedy et al. 2016,
    section 7). Megatron-Core distributes its a over the other `v - 1` tokens: its a corresponds to
    `e = a v / (v - 1)`.

    The same code is used for every axis size. It reads the logits three times: once for the largest
    one, once for the probabilities under this rank's columns alone, and once, as probabilities, for
    their largest one, from which the log-sum-exp follows. The backward pass turns the probabilities
    into the gradient in place. A second backward pass therefore raises. `F.cross_entropy` allocates
    three buffers of the size of the logits, and a fourth to cut off padding. In code compiled by
    torch.compile, the backward pass of 16-bit logits computes the probabilities again, in one loop.

    Args:
        logits: This rank's columns of the logits, `[..., v/n]`. Columns from `true_vocab` on are
            padding and have neither probability nor gradient.
        targets: Global token ids below `true_vocab`, equal on all ranks of the axis, or
            `IGNORE_INDEX`. A target that no rank holds has infinite loss.
        axis: Axis that cuts the vocabulary.
        true_vocab: Size of the vocabulary without padding.
        label_smoothing: Part of the loss that all tokens share, `0 <= e < 1`. Defaults to 0.
        softcap: Bound of the logits, see `bound_logits`. Defaults to 0, no bound.
        overwrites: Whether float32 or float64 logits are overwritten with probabilities, which
            saves the buffer. No other code may read them. Defaults to False. Ignored in code
            compiled by torch.compile.

    Raises:
        LayoutError: `label_smoothing` is not in `0 <= e < 1`.
    """
    if not 0.0 <= label_smoothing < 1.0:
        raise LayoutError(f"label_smoothing {label_smoothing} is not in 0 <= e < 1")
    owned = (overwrites or softcap > 0) and not torch.compiler.is_compiling()
    result: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        bound_logits(logits, softcap), targets, axis, true_vocab, label_smoothing, owned
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
        owned: bool,
    ) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        width = logits.shape[-1]
        start = axis.index * width
        valid = min(max(true_vocab - start, 0), width)
        local = (targets - start).unsqueeze(-1)
        held = (local >= 0) & (local < valid)
        local = local.clamp(0, width - 1)

        at_target = logits.gather(-1, local).to(dtype).masked_fill_(~held, -torch.inf)
        # Before the logits are overwritten.
        every = logits[..., :valid].sum(-1, keepdim=True, dtype=dtype) if smoothing else None
        # Probabilities in float32 take more traffic than computing them again from 16 bits.
        fused = torch.compiler.is_compiling() and logits.dtype != dtype
        if fused:
            saved, own = logits, _log_sum_exp(logits, valid, dtype)
        else:
            saved, own = _softmax(logits, valid, dtype, owned)
        scale = None
        if axis.size > 1:
            both = all_reduce(torch.stack((own, at_target)), axis, "max", purpose=PURPOSE)
            largest, at_target = both.unbind()
            terms = [(own - largest).exp_(), *([] if every is None else [every])]
            total, *rest = all_reduce(torch.stack(terms), axis, purpose=PURPOSE).unbind()
            whole = total.log_().add_(largest)
            scale = (own - whole).exp_()  # this rank's part of the probability
            every = rest[0] if rest else None
        else:
            whole = own

        loss = whole - at_target
        share = _share(smoothing, true_vocab)
        if every is not None:  # subtracting the log-sum-exp per token gives log-probabilities
            every = every - whole * true_vocab
            loss = loss.mul_(1.0 - smoothing).sub_(every.mul_(share))
        loss = loss.squeeze(-1)
        ignored = targets == IGNORE_INDEX
        ctx.save_for_backward(saved, whole if fused else scale, local, held, ignored)
        ctx.dtype, ctx.smoothing, ctx.valid = logits.dtype, smoothing, valid
        ctx.share, ctx.fused = share, fused
        # Not in place: torch 2.11 compiles in-place changes to a result without gradient.
        return loss.masked_fill(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, scale, local, held, ignored = ctx.saved_tensors
        upstream = grads[0].masked_fill(ignored, 0.0).unsqueeze(-1)
        if ctx.fused:
            grad = _probabilities(saved, scale, local, held, ctx) * upstream
        else:
            grad = saved.mul_(upstream if scale is None else upstream * scale)
            if ctx.smoothing:
                grad[..., : ctx.valid] -= upstream * ctx.share
            grad.scatter_add_(-1, local, upstream * held * (ctx.smoothing - 1.0))
        return grad.to(ctx.dtype), None, None, None, None, None


def _log_sum_exp(logits: Tensor, valid: int, dtype: torch.dtype) -> Tensor:
    """Returns the log-sum-exp of the first `valid` columns."""
    if valid == 0:
        return torch.full_like(logits[..., :1], -torch.inf, dtype=dtype)
    exact = logits[..., :valid].to(dtype)
    largest = exact.amax(-1, keepdim=True)
    return (exact - largest).exp().sum(-1, keepdim=True).log() + largest


def _probabilities(logits: Tensor, whole: Tensor, local: Tensor, held: Tensor, ctx: Any) -> Tensor:
    """Returns the gradient of each token's own loss, as one loop that a compiler fuses.

    It saves no probabilities: it computes them again from the log-sum-exp of the whole vocabulary.
    """
    columns = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.int32)
    target = (columns == local.to(torch.int32)) & held
    exact = (logits.to(whole.dtype) - whole).exp()
    if ctx.smoothing:
        exact = exact - ctx.share
    grad = exact - torch.where(target, 1.0 - ctx.smoothing, 0.0)
    return grad if ctx.valid == logits.shape[-1] else torch.where(columns < ctx.valid, grad, 0.0)


def _softmax(logits: Tensor, valid: int, dtype: torch.dtype, owned: bool) -> tuple[Tensor, Tensor]:
    """Returns the probabilities under the first `valid` columns, and their log-sum-exp.

    The logits are overwritten if they are `owned` and of the dtype of the result.
    """
    width = logits.shape[-1]
    if valid == 0:
        own = torch.full_like(logits[..., :1], -torch.inf, dtype=dtype)
        return torch.zeros_like(logits, dtype=dtype), own
    largest = logits[..., :valid].amax(-1, keepdim=True).to(dtype)
    exact = logits.detach().to(dtype)  # a copy only if the dtype changes
    if logits.dtype != dtype or owned:
        exact[..., valid:] = -torch.inf
        # Every element is read for the last time where it is written, so the memory can be shared.
        probabilities = torch.softmax(exact, -1, out=exact)
    elif valid == width:
        probabilities = torch.softmax(exact, -1)
    else:
        probabilities = torch.zeros_like(exact)
        probabilities[..., :valid] = torch.softmax(exact[..., :valid], -1)
    # The largest probability is 1 / sum(exp(logits - largest)), at least 1 / valid.
    return probabilities, largest - probabilities.amax(-1, keepdim=True).log_()


def _share(smoothing: float, vocabulary: int) -> float:
    """Returns the part of the smoothing that each token of the vocabulary gets."""
    return smoothing / vocabulary
