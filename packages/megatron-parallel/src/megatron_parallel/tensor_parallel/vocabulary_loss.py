"""Output layer and cross entropy as one operation, with or without all logits in memory.

    loss = layer(x, loss=partial(UNFUSED_CROSS_ENTROPY, targets=labels, true_vocab=v))    # [s, b]

`UNFUSED_CROSS_ENTROPY` computes the logits of all tokens and saves their probabilities for the
backward pass: tokens times this rank's part of the vocabulary. `LinearCrossEntropy` computes the
logits of one slice of the tokens at a time, once for the losses and again for the gradients.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function

from megatron_parallel import _compat
from megatron_parallel.collectives.async_collective import start_all_reduce, start_reduce_scatter
from megatron_parallel.collectives.operations import all_gather
from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.axes import Axis
from megatron_parallel.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron_parallel.tensor_parallel.linear import column_parallel_linear
from megatron_parallel.tensor_parallel.product import Product, Weights, weight_gradient_requests


class OutputLayer(NamedTuple):
    """A column-parallel output layer, as argument of a loss.

    Attributes:
        weights: This rank's part of the weights, see `Weights`.
        axis: Axis that cuts the vocabulary.
        sequence_parallel: Whether the input is cut along dim 0.
        num_slices: As for `column_parallel_linear`.
        product: Product that the layer computes.
        bias: This rank's part of the bias of the logits, `[vocabulary / n]`. Defaults to none.
    """

    weights: Weights
    axis: Axis
    sequence_parallel: bool
    num_slices: int
    product: Product
    bias: Tensor | None = None


@runtime_checkable
class VocabularyLoss(Protocol):
    """The loss of each token as a function of the input of the output layer."""

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
        """Returns the losses in nats, see `vocab_parallel_cross_entropy`.

        Args:
            x: Input of the output layer. With sequence parallelism, this rank's part of it.
            layer: The output layer.
            targets: Token ids, or `IGNORE_INDEX`.
            true_vocab: Size of the vocabulary without padding.
            label_smoothing: Part of the loss that all tokens share.
            softcap: Bound of the logits; 0 for none.
        """


def unfused_cross_entropy(
    x: Float[Tensor, "part b h"],
    layer: OutputLayer,
    *,
    targets: Int[Tensor, "s b"],
    true_vocab: int,
    label_smoothing: float = 0.0,
    softcap: float = 0.0,
) -> Float[Tensor, "s b"]:
    """Returns the losses, computed from the logits of all tokens."""
    weight, *added_weights = layer.weights
    options = layer.axis, layer.sequence_parallel, layer.num_slices, layer.product
    logits = column_parallel_linear(x, weight, layer.bias, *options, tuple(added_weights))
    return vocab_parallel_cross_entropy(
        logits,
        targets,
        layer.axis,
        true_vocab,
        label_smoothing=label_smoothing,
        softcap=softcap,
        overwrites=True,  # no other code holds the logits
    )


UNFUSED_CROSS_ENTROPY: Final[VocabularyLoss] = unfused_cross_entropy
"""The default loss."""


@dataclass(frozen=True)
class LinearCrossEntropy:
    """Fused linear cross entropy: computes the losses of one slice of the tokens at a time.

    Saves only the input of the layer for the backward pass, which computes the logits of each slice
    again. Needs memory for the logits of one slice, and one more product with the weight. Losses
    and gradients equal those of `UNFUSED_CROSS_ENTROPY` up to the order of summation. Not supported
    in code compiled with `torch.compile`.

    Attributes:
        tokens_per_slice: Maximum number of tokens in a slice.

    Raises:
        LayoutError: `tokens_per_slice` is less than 1.
    """

    tokens_per_slice: int = 1024

    def __post_init__(self) -> None:
        if self.tokens_per_slice < 1:
            raise LayoutError("{tokens_per_slice:=} is not a number of tokens >= 1", vars(self))

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
        options = _Options(
            layer, targets, true_vocab, label_smoothing, softcap, self.tokens_per_slice
        )
        inputs = (x, *layer.weights, layer.bias, options)
        losses: Tensor = _LinearCrossEntropy.apply(*inputs)  # type: ignore[no-untyped-call]
        return losses


class _Options(NamedTuple):
    """Arguments of the function that are not tensors with gradients."""

    layer: OutputLayer
    targets: Tensor
    true_vocab: int
    smoothing: float
    softcap: float
    tokens_per_slice: int

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the losses of one slice."""
        return vocab_parallel_cross_entropy(
            logits,
            targets,
            self.layer.axis,
            self.true_vocab,
            label_smoothing=self.smoothing,
            softcap=self.softcap,
        )

    def gradient(
        self,
        rows: Tensor,
        bias: Tensor | None,
        weights: Weights,
        targets: Tensor,
        upstream: Tensor,
    ) -> Tensor:
        """Returns the gradient of the logits of one slice, computing the logits again."""
        # Without gradients, as in every backward pass.
        logits = self.layer.product.forward(rows, weights, bias)
        with torch.enable_grad():
            losses = self.losses(logits.requires_grad_(), targets)
        (found,) = torch.autograd.grad(losses, logits, upstream)
        return found

    def rows(self, x: Tensor) -> Tensor:
        """Returns the whole input as rows, gathered with sequence parallelism."""
        gathers = self.layer.sequence_parallel and self.layer.axis.size > 1
        return (all_gather(x, self.layer.axis) if gathers else x).flatten(0, -2)


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        *weights, bias, options = rest
        ctx.save_for_backward(x, *weights, bias)
        ctx.options = options
        slices = (
            torch.split(t, options.tokens_per_slice)
            for t in (options.rows(x), options.targets.flatten())
        )
        losses = [
            options.losses(options.layer.product.forward(rows, weights, bias), targets)
            for rows, targets in zip(*slices, strict=True)
        ]
        return torch.cat(losses).view(options.targets.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights, bias = ctx.saved_tensors
        options: _Options = ctx.options
        product, axis = options.layer.product, options.layer.axis
        needs_x, requests = _compat.gradient_wanted(ctx, 0), weight_gradient_requests(ctx, weights)
        whole = options.rows(x)
        dx = torch.empty_like(whole) if needs_x else None
        dbias, needs_bias = None, _compat.gradient_wanted(ctx, 1 + len(weights))
        dweights: list[Tensor | None] = [None] * len(weights)
        split = (whole, options.targets.flatten(), grads[0].flatten())
        start = 0
        for rows, targets, upstream in zip(
            *(torch.split(t, options.tokens_per_slice) for t in split), strict=True
        ):
            dlogits = options.gradient(rows, bias, weights, targets, upstream)
            if dx is not None:
                dx[start : start + len(rows)] = product.dgrad(dlogits, weights)
            if needs_bias:
                dbias = _added(dbias, dlogits.sum(0))
            if any(requests):
                found = product.wgrad(dlogits, rows, weights, requests)
                dweights = [_added(*pair) for pair in zip(dweights, found, strict=True)]
            del dlogits  # frees memory before the logits of the next slice
            start += len(rows)
        if dx is not None and axis.size > 1:
            summed = start_reduce_scatter if options.layer.sequence_parallel else start_all_reduce
            dx = summed(dx.view(-1, *x.shape[1:]), axis).wait()
        return None if dx is None else dx.view(x.shape), *dweights, dbias, None


def _added(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    """Returns the sum of gradients, in the memory of the first."""
    if total is None or more is None:
        return more if total is None else total
    return total.add_(more) if total.is_contiguous() else total + more
