"""Fused linear cross entropy: output layer and loss of a few tokens at a time.

The logits of a slice of the tokens exist until their gradient is used, and those of the next slice
take their memory. The gradients of the layer come from one of two passes:

| gradients | products | saved for the backward pass |
|---|---|---|
| backward | 4: the backward pass computes the logits again | the input |
| forward | 3, as without fusion | the gradients of input and weights |

The forward pass does not know the gradients of the losses, so with `forward` these must be equal
for all tokens with a label, as those of a sum or a mean are. The backward pass multiplies by them.
"""

from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from megatron_parallel import _compat
from megatron_parallel._compat.imagined import has_no_values
from megatron_parallel.collectives.async_collective import start_all_reduce, start_reduce_scatter
from megatron_parallel.collectives.operations import all_gather
from megatron_parallel.errors import LayoutError
from megatron_parallel.tensor_parallel.added_product import add_product
from megatron_parallel.tensor_parallel.cross_entropy import (
    IGNORE_INDEX,
    LogitsBlock,
    vocab_parallel_cross_entropy,
)
from megatron_parallel.tensor_parallel.differentiation import AccumulatingProduct
from megatron_parallel.tensor_parallel.product import (
    FactorProduct,
    Product,
    WeightGradientRequest,
    Weights,
    as_matrix,
    multiply_matrix,
    weight_gradient_requests,
)
from megatron_parallel.tensor_parallel.vocabulary_loss import (
    LogitsCrossEntropy,
    OutputLayer,
    VocabularyLoss,
)

_SLICES: Final = 16
_LEAST_TOKENS: Final = 256
"""Each slice reads the weights, so fewer tokens take longer."""
_ROWS: Final = 16384


@dataclass(frozen=True)
class LinearCrossEntropy:
    """Fused linear cross entropy: computes the losses of one slice of the tokens at a time.

    Needs memory for the logits of one slice. Losses and gradients equal those of
    `UNFUSED_CROSS_ENTROPY` up to the order of summation. Not supported in code compiled with
    `torch.compile`.

    Attributes:
        tokens_per_slice: Maximum number of tokens in a slice. Defaults to 1/16 of the tokens,
            and at least 256.
        gradients: Pass that computes the gradients. With `backward` it computes the logits again.
            With `forward` it does not, and the gradients wait for the backward pass: as many
            numbers as weights, in at least float32. The losses of all tokens whose target is not
            `IGNORE_INDEX` must have the same gradient, which the backward pass checks. A second
            backward pass raises.
        block: Computes the part of each rank's columns, see `vocab_parallel_cross_entropy`.
            Defaults to operations of torch. Logits in 16 bits are then not copied to float32.

    Raises:
        LayoutError: `tokens_per_slice` is less than 1, or `gradients` is neither.
    """

    tokens_per_slice: int | None = None
    gradients: str = "backward"
    block: LogitsBlock | None = None

    def __post_init__(self) -> None:
        if self.tokens_per_slice is not None and self.tokens_per_slice < 1:
            raise LayoutError("{tokens_per_slice:=} is not a number of tokens >= 1", vars(self))
        if self.gradients not in ("backward", "forward"):
            raise LayoutError(f"gradients={self.gradients!r} is not 'backward' or 'forward'")

    def __call__(
        self,
        x: Float[Tensor, "part b h"],
        layer: OutputLayer,
        *,
        targets: Int[Tensor, "s b"],
        true_vocab: int,
        label_smoothing: float = 0.0,
        softcap: float = 0.0,
    ) -> Float[Tensor, "s b"]:
        """Returns the losses in nats."""
        early = self.gradients == "forward" and torch.is_grad_enabled()
        size = self.tokens_per_slice or max(-(-targets.numel() // _SLICES), _LEAST_TOKENS)
        options = _Options(
            layer, targets, true_vocab, label_smoothing, softcap, size, early, self.block
        )
        inputs = (x, *layer.weights, layer.bias, options)
        losses: Tensor = _LinearCrossEntropy.apply(*inputs)  # type: ignore[no-untyped-call]
        return losses


def with_logits_block(loss: VocabularyLoss, block: LogitsBlock) -> VocabularyLoss:
    """Returns a loss of this package that uses a block; other losses as they are."""
    if isinstance(loss, LogitsCrossEntropy | LinearCrossEntropy) and loss.block is None:
        return replace(loss, block=block)
    return loss


class _Options(NamedTuple):
    """Arguments of the function that are not tensors with gradients."""

    layer: OutputLayer
    targets: Tensor
    true_vocab: int
    smoothing: float
    softcap: float
    tokens_per_slice: int
    early: bool
    block: LogitsBlock | None

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the losses of one slice. Overwrites the logits."""
        return vocab_parallel_cross_entropy(
            logits,
            targets,
            self.layer.axis,
            self.true_vocab,
            label_smoothing=self.smoothing,
            softcap=self.softcap,
            overwrites=True,
            block=self.block,
        )

    def losses_and_gradient(
        self, logits: Tensor, exact: Tensor, targets: Tensor, upstream: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the losses of one slice, and the gradient of its logits, in their memory.

        Args:
            logits: The logits.
            exact: The same, in at least float32 unless there is a block.
            targets: Their targets.
            upstream: Gradients of their losses.
        """
        # Hooks of the outer graph, such as those of offloading, are not for what is used at once.
        with torch.enable_grad(), saved_tensors_hooks(_same, _same):
            losses = self.losses(exact.requires_grad_(), targets)
        (found,) = torch.autograd.grad(losses, exact, upstream)
        return losses.detach(), found if found.dtype == logits.dtype else logits.copy_(found)

    def rows(self, x: Tensor) -> Tensor:
        """Returns the whole input as rows, gathered with sequence parallelism."""
        whole = all_gather(x, self.layer.axis) if self.layer.sequence_parallel else x
        return whole.flatten(0, -2)

    def split(self, *rows: Tensor) -> Any:
        """Yields slices of several tensors."""
        return zip(*(torch.split(t, self.tokens_per_slice) for t in rows), strict=True)

    def summed(self, dx: Tensor, shape: torch.Size) -> Tensor:
        """Returns the gradient of the input, summed over the ranks."""
        axis = self.layer.axis
        if axis.size > 1:
            cut = self.layer.sequence_parallel
            start = start_reduce_scatter if cut else start_all_reduce
            dx = start(dx.view(-1, *shape[1:]), axis).wait()
        return dx.view(shape)


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        *weights, bias, options = rest
        ctx.options, ctx.num_weights = options, len(weights)
        ctx.dtypes = [None if t is None else t.dtype for t in (x, *weights, bias)]
        wanted = ctx.needs_input_grad[: len(weights) + 2]
        early = options.early and any(wanted)
        product, whole = options.layer.product, options.rows(x)
        if isinstance(product, AccumulatingProduct):
            product = product.product  # the buffers wait for the factor of the backward pass
        requests = [
            WeightGradientRequest(w.shape) if wanted[n] else None for n, w in enumerate(weights, 1)
        ]
        sums = _Gradients(product, weights, whole, wanted[0], requests, wanted[-1])
        logits_of, losses = _Logits(product, weights, bias, options.block is None), []
        for rows, targets in options.split(whole, options.targets.flatten()):
            logits, exact = logits_of(rows)
            if early:
                ones = torch.ones_like(targets, dtype=_at_least_float32(exact))
                found, dlogits = options.losses_and_gradient(logits, exact, targets, ones)
                sums.add(dlogits, rows)
            else:
                found = options.losses(exact, targets)
            losses.append(found)
        if early:
            dx = None if sums.dx is None else options.summed(sums.dx, x.shape)
            ctx.save_for_backward(dx, *sums.weights, sums.bias)
        else:
            ctx.save_for_backward(x, *weights, bias)
        ctx.early = early
        return torch.cat(losses).view(options.targets.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        options: _Options = ctx.options
        if ctx.early:
            factor = _common_factor(grads[0], options.targets)
            found = [
                _multiplied(t, factor, dtype, in_place=index > 0)
                if t is not None and _compat.gradient_wanted(ctx, index)
                else None
                for index, (t, dtype) in enumerate(zip(ctx.saved_tensors, ctx.dtypes, strict=True))
            ]
            return *found, None
        x, *weights, bias = ctx.saved_tensors
        product, whole = options.layer.product, options.rows(x)
        needs_x, needs_bias = (
            _compat.gradient_wanted(ctx, index) for index in (0, 1 + len(weights))
        )
        requests = weight_gradient_requests(ctx, [weight.shape for weight in weights])
        sums = _Gradients(product, weights, whole, needs_x, requests, needs_bias)
        logits_of = _Logits(product, weights, bias, options.block is None)
        for rows, targets, upstream in options.split(
            whole, options.targets.flatten(), grads[0].flatten()
        ):
            _, dlogits = options.losses_and_gradient(*logits_of(rows), targets, upstream)
            sums.add(dlogits, rows)
        dx = None if sums.dx is None else options.summed(sums.dx, x.shape)
        dweights = [
            None if t is None else t.to(weight.dtype)
            for t, weight in zip(sums.weights, weights, strict=True)
        ]
        return dx, *dweights, None if sums.bias is None else sums.bias.to(ctx.dtypes[-1]), None


class _Logits:
    """Computes the logits of one slice after another in the same memory."""

    def __init__(
        self, product: Product, weights: Weights, bias: Tensor | None, copies: bool
    ) -> None:
        self._product, self._weights, self._bias = product, weights, bias
        self._copies = copies
        self._memory: Tensor | None = None
        self._exact: Tensor | None = None
        self._is_free = False

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logits, and in at least float32 if it copies; those before are lost."""
        self._is_free = True
        with torch.no_grad():
            logits = self._product.forward(rows, self._weights, self._bias, self._multiply)
        dtype = _at_least_float32(logits)
        if logits.dtype == dtype or not self._copies:
            return logits, logits
        if self._exact is None:
            self._exact = torch.empty_like(logits, dtype=dtype)
        return logits, self._exact[: len(rows)].copy_(logits)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns `x W^T + b`; the first product as wide as the logits in the memory."""
        matrix = as_matrix(weight)
        if not self._is_free or weight is not self._weights[0]:
            return multiply_matrix(x, weight, bias)
        self._is_free = False
        if self._memory is None:
            self._memory = x.new_empty(len(x), len(matrix))
        out = self._memory[: len(x)]
        if bias is None:
            return torch.mm(x, matrix.t(), out=out)
        return torch.addmm(bias, x, matrix.t(), out=out)


class _Gradients:
    """The gradients of an output layer, added up over slices in at least float32.

    Attributes:
        dx: Gradient of the rows of the input, if it is wanted.
        bias: Gradient of the bias, if it is wanted.
    """

    def __init__(
        self,
        product: Product,
        weights: Weights,
        rows: Tensor,
        needs_x: bool,
        requests: list[WeightGradientRequest | None],
        needs_bias: bool,
    ) -> None:
        self._product, self._weights, self._needs_bias = product, weights, needs_bias
        self._requests = [None if each is None else _Sum(each) for each in requests]
        self._returned: list[Tensor | None] = [None] * len(weights)
        self.dx = torch.empty_like(rows) if needs_x else None
        self.bias: Tensor | None = None
        self._start = 0

    @property
    def weights(self) -> list[Tensor | None]:
        """The gradient of each weight; None if it is not wanted or was accumulated elsewhere."""
        return [
            _added(returned, None if request is None else request.total)
            for request, returned in zip(self._requests, self._returned, strict=True)
        ]

    def add(self, dlogits: Tensor, rows: Tensor) -> None:
        """Adds the gradients of the next slice."""
        if self.dx is not None:
            own = self.dx[self._start : self._start + len(rows)]
            own.copy_(self._product.dgrad(dlogits, self._weights))
        if self._needs_bias:
            self.bias = _added(self.bias, dlogits.sum(0, dtype=_at_least_float32(dlogits)))
        if any(self._requests):
            found = self._product.wgrad(dlogits, rows, self._weights, self._requests)
            self._returned = [_added(*p) for p in zip(self._returned, found, strict=True)]
        self._start += len(rows)


class _Sum(WeightGradientRequest):
    """A request that adds the gradient up over slices.

    Attributes:
        total: The sum, in at least float32.
    """

    def __init__(self, request: WeightGradientRequest) -> None:
        super().__init__(request.shape, lambda: request.must_return)
        self.total: Tensor | None = None

    def __call__(
        self,
        dy: Float[Tensor, "rows out"],
        x: Float[Tensor, "rows in"],
        multiply: FactorProduct | None = None,
    ) -> Float[Tensor, "..."] | None:
        """Adds `dy^T x`; returns None."""
        dtype, first = _at_least_float32(dy), self.total is None
        # On CUDA, products of bf16 are summed in float32 without a copy.
        adds = multiply is not None or dtype == dy.dtype
        adds |= dy.is_cuda and dy.dtype == torch.bfloat16
        if self.total is None:
            fill = torch.empty if adds else torch.zeros
            self.total = fill(self.shape, dtype=dtype, device=dy.device)
        total = self.total.view(-1, x.shape[1])
        if multiply is not None:
            multiply(dy, x, total, first=first)
            return None
        if adds:
            add_product(total, dy, x, first=first)
            return None
        # A few rows at a time, since their sum in 16 bits is a copy.
        for rows, columns in zip(torch.split(total, _ROWS), torch.split(dy, _ROWS, 1), strict=True):
            rows += columns.t() @ x
        return None


def _same(t: Tensor) -> Tensor:
    return t


def _at_least_float32(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


def _added(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    """Returns the sum of gradients, in the memory of the first."""
    if total is None or more is None:
        return more if total is None else total
    return total.add_(more) if total.is_contiguous() else total + more


def _multiplied(total: Tensor, factor: Tensor, dtype: torch.dtype, *, in_place: bool) -> Tensor:
    """Returns a gradient of a sum of losses times their gradient, in the dtype of its tensor.

    The gradient of the input is not changed in place: a split backward pass reads it first, and
    those of the weights later.
    """
    if in_place:
        return total.mul_(factor).to(dtype)
    # With a dim, the factor is not rounded to 16 bits before the product.
    return torch.mul(total, factor.view(-1), out=torch.empty_like(total))


def _common_factor(upstream: Tensor, targets: Tensor) -> Tensor:
    """Returns the gradient of the losses of all tokens with a label, `[]`.

    Raises:
        LayoutError: They differ, on the CPU. A GPU reports it later, without a wait.
    """
    counted = targets != IGNORE_INDEX
    largest = upstream.masked_fill(~counted, -torch.inf).amax()
    smallest = upstream.masked_fill(~counted, torch.inf).amin()
    message = (
        "losses of LinearCrossEntropy(gradients='forward') have gradients that differ between "
        "tokens with a label; set the labels of tokens without loss to -100, or give "
        "gradients='backward'"
    )
    if upstream.device.type != "cpu":
        torch._assert_async(~counted.any() | ~(smallest < largest), message)
    elif not has_no_values(upstream) and bool(smallest < largest):
        raise LayoutError(message)
    return largest.masked_fill(~counted.any(), 0.0)
