"""Cross entropy of logits whose vocabulary dim is cut over an axis.

No rank holds all logits of a token. The ranks exchange three numbers per token: the largest logit
and the logit of the target in one all-reduce, then the sum of exponentials. Label smoothing adds a
fourth number to the second all-reduce.

A `LogitsBlock` computes what one rank's columns contribute, in kernels that read the logits once.
Without one, torch's operations do.
"""

from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

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


@runtime_checkable
class LogitsBlock(Protocol):
    """Cross entropy over one rank's columns of the logits, such as by a fused kernel."""

    def forward(
        self, logits: Float[Tensor, "*batch part"], columns: Int[Tensor, "*batch"], valid: int
    ) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
        """Returns log-sum-exp, logit of the target and sum of the logits, in at least float32.

        Args:
            logits: This rank's columns.
            columns: Column of each target, -1 if another rank holds it. Its logit is then -inf.
            valid: Number of columns that count; the others are padding. It may be 0.
        """

    def backward(
        self,
        logits: Float[Tensor, "*batch part"],
        columns: Int[Tensor, "*batch"],
        whole: Float[Tensor, "*batch"],
        upstream: Float[Tensor, "*batch"],
        valid: int,
        *,
        at_target: float,
        everywhere: float,
        overwrites: bool,
    ) -> Float[Tensor, "*batch part"]:
        """Returns `upstream * (softmax - everywhere - at_target at the target)`, 0 for padding.

        Args:
            logits: This rank's columns.
            columns: As for `forward`.
            whole: Log-sum-exp of the whole vocabulary.
            upstream: Gradients of the losses.
            valid: As for `forward`.
            at_target: What is subtracted from the probability of the target.
            everywhere: What is subtracted from every probability.
            overwrites: Whether the result may be written over the logits.
        """


def vocab_parallel_cross_entropy(
    logits: Float[Tensor, "*batch part"],
    targets: Int[Tensor, "*batch"],
    axis: Axis,
    true_vocab: int,
    *,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
    overwrites: bool = False,
    block: LogitsBlock | None = None,
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
    With a `block`, the logits are saved instead of probabilities, and the backward pass writes the
    gradient over them if it `overwrites`.

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
        block: Computes the part of this rank's columns. Defaults to operations of torch.

    Raises:
        LayoutError: `label_smoothing` is not in `0 <= e < 1`.
    """
    if not 0.0 <= label_smoothing < 1.0:
        raise LayoutError(f"label_smoothing {label_smoothing} is not in 0 <= e < 1")
    owned = (overwrites or softcap > 0) and not torch.compiler.is_compiling()
    arguments = bound_logits(logits, softcap), targets, axis, true_vocab, label_smoothing, owned
    result: Tensor
    if block is None:
        result = _CrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]
    else:
        result = _BlockCrossEntropy.apply(*arguments, block)  # type: ignore[no-untyped-call]
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
        start, valid = _columns_of(axis, width, true_vocab)
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
        terms = _over_ranks(own, at_target, every, axis)
        scale = (own - terms.whole).exp_() if axis.size > 1 else None  # this rank's part
        whole, ignored = terms.whole, targets == IGNORE_INDEX
        loss = terms.loss(smoothing, true_vocab).squeeze(-1)
        share = _share(smoothing, true_vocab)
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


class _BlockCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        axis: Axis,
        true_vocab: int,
        smoothing: float,
        owned: bool,
        block: LogitsBlock,
    ) -> Tensor:
        start, valid = _columns_of(axis, logits.shape[-1], true_vocab)
        local = targets - start
        columns = torch.where((local >= 0) & (local < valid), local, -1)
        own, at_target, total = block.forward(logits, columns, valid)
        terms = _over_ranks(own, at_target, total if smoothing else None, axis)
        ignored = targets == IGNORE_INDEX
        ctx.save_for_backward(logits, columns, terms.whole, ignored)
        ctx.block, ctx.valid, ctx.owned = block, valid, owned
        ctx.at_target, ctx.everywhere = 1.0 - smoothing, _share(smoothing, true_vocab)
        return terms.loss(smoothing, true_vocab).masked_fill(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, columns, whole, ignored = ctx.saved_tensors
        grad = ctx.block.backward(
            logits.detach(),
            columns,
            whole,
            grads[0].masked_fill(ignored, 0.0),
            ctx.valid,
            at_target=ctx.at_target,
            everywhere=ctx.everywhere,
            overwrites=ctx.owned,
        )
        return grad, None, None, None, None, None, None


class _Terms(NamedTuple):
    """Numbers of each token over the whole vocabulary.

    Attributes:
        whole: Log-sum-exp of the logits.
        at_target: Logit of the target.
        every: Sum of the logits, for label smoothing, or None.
    """

    whole: Tensor
    at_target: Tensor
    every: Tensor | None

    def loss(self, smoothing: float, true_vocab: int) -> Tensor:
        """Returns the loss of each token."""
        loss = self.whole - self.at_target
        if self.every is None:
            return loss
        # Subtracting the log-sum-exp per token gives log-probabilities.
        every = self.every - self.whole * true_vocab
        return loss.mul_(1.0 - smoothing).sub_(every.mul_(_share(smoothing, true_vocab)))


def _over_ranks(own: Tensor, at_target: Tensor, every: Tensor | None, axis: Axis) -> _Terms:
    """Combines the terms of each rank's columns."""
    if axis.size == 1:
        return _Terms(own, at_target, every)
    # A NaN may get lost in the maxima: that of `own` comes back in the sum of exponentials.
    lossy: Any = {"purpose": PURPOSE, "keeps_nan": False}
    if torch.compiler.is_compiling():
        # Inductor (torch 2.13) computes the parts of a stack in its memory and lets the collective
        # overwrite it, although `own` is read again.
        largest, at_target = (
            all_reduce(part.clone(), axis, "max", **lossy) for part in (own, at_target)
        )
    else:
        both = all_reduce(torch.stack((own, at_target)), axis, "max", **lossy)
        largest, at_target = both.unbind()
    terms = [(own - largest).exp_(), *([] if every is None else [every])]
    total, *rest = all_reduce(torch.stack(terms), axis, purpose=PURPOSE).unbind()
    return _Terms(total.log_().add_(largest), at_target, rest[0] if rest else None)


def _columns_of(axis: Axis, width: int, true_vocab: int) -> tuple[int, int]:
    """Returns the token of this rank's first column, and how many columns are no padding."""
    start = axis.index * width
    return start, min(max(true_vocab - start, 0), width)


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
