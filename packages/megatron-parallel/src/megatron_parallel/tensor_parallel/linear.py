"""Column- and row-parallel linear functions that overlap communication with computation.

The forward pass of a column-parallel layer needs no collective, and that of a row-parallel layer
all-reduces the output. With sequence parallelism, a column-parallel layer all-gathers its input,
and a row-parallel layer reduce-scatters its output. The column-parallel layer then saves only this
rank's part of the input and gathers it again in the backward pass (Korthikanti et al. 2022, section
4.2.2). These collectives overlap with computation:

| pass | collective | overlaps with |
|---|---|---|
| backward, column, sequence parallel | all-gather of the input | gradient of the input |
| | reduce-scatter of the input's gradient | gradient of the weight |
| backward, column | all-reduce of the input's gradient | gradient of the weight |
| forward, column, in slices | all-gather of the next slices | product of this slice |
| forward, row, in slices | reduce-scatter of the previous slices | product of this slice |

All ranks slice their parts of the sequence alike. Results equal those without slices, up to the
order of summation. A schedule such as zero bubble splits the backward pass: the first half computes
and reduces the gradient of the input, and the second half gathers the input and computes the
gradient of the weight. A row-parallel layer in slices gathers the gradient of its output in the
first half and keeps it for the second.

The layers compute a `Product`, by default `x W^T`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from megatron_parallel import _compat
from megatron_parallel.collectives.async_collective import (
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron_parallel.collectives.operations import (
    all_gather,
    copy_to_axis,
    gather_sequence,
    reduce_from_axis,
    scatter_sequence,
)
from megatron_parallel.mesh.axes import Axis
from megatron_parallel.tensor_parallel.product import (
    PLAIN,
    AccumulatingProduct,
    Gathering,
    Product,
    Weights,
    as_rows,
    multiply_matrix,
    no_gradients,
    saving,
    wants_gradients,
    weight_gradient_requests,
)
from megatron_parallel.tensor_parallel.saving import (
    Saved,
    SavedTensors,
    SavingProduct,
    save_for_backward,
    saved_of,
)


def column_parallel_linear(
    x: Float[Tensor, "... in"],
    weight: Float[Tensor, "*out in"],
    bias: Float[Tensor, "*out"] | None,
    axis: Axis,
    sequence_parallel: bool = False,
    num_slices: int = 1,
    product: Product = PLAIN,
    added_weights: Weights = (),
) -> Float[Tensor, "..."]:
    """Applies a `ColumnParallelLinear` with a given weight, such as that of tied embeddings.

    Args:
        x: Input. With `sequence_parallel`, this rank's part of it along dim 0.
        weight: This rank's part of the weight.
        bias: This rank's part of the bias, or None.
        axis: Axis that cuts the layer.
        sequence_parallel: Whether the input is cut and must be gathered.
        num_slices: Maximum number of slices in which the input is gathered. The product with one
            slice overlaps the gathering of the next.
        product: Product that the layer computes.
        added_weights: This rank's part of each parameter that the product adds to the weight.
    """
    shape = weight.shape[:-1]
    flat_bias = bias if bias is None or bias.dim() == 1 else bias.flatten()
    weights = (weight, *added_weights)
    if axis.size == 1:
        y = product.forward(x, weights, flat_bias)
    elif torch.compiler.is_compiling():  # the compiler schedules collectives itself
        whole = gather_sequence(x, axis) if sequence_parallel else copy_to_axis(x, axis)
        y = product.forward(whole, weights, flat_bias)
    else:
        options = _options(product, axis, sequence_parallel, num_slices, weights)
        y = _Column.apply(x, *weights, flat_bias, options)  # type: ignore[no-untyped-call]
    return y if len(shape) == 1 else y.view(*y.shape[:-1], *shape)


def row_parallel_linear(
    x: Float[Tensor, "... part"],
    weight: Float[Tensor, "out part"],
    axis: Axis,
    sequence_parallel: bool = False,
    num_slices: int = 1,
    *,
    bias: Float[Tensor, " out"] | None = None,
    product: Product = PLAIN,
    added_weights: Weights = (),
) -> Float[Tensor, "... out"]:
    """Returns the sum of `x W^T` over the ranks of an axis, or this rank's part of it along dim 0.

    Args:
        x: This rank's part of the input along its last dim.
        weight: This rank's part of the weight.
        axis: Axis that cuts the layer.
        sequence_parallel: Whether the output is cut along dim 0.
        num_slices: With `sequence_parallel`, maximum number of slices of the output. The sum of one
            slice overlaps the product of the next.
        bias: Added once, after the sum.
        product: Product that the layer computes.
        added_weights: This rank's part of each parameter that the product adds to the weight.
    """
    weights = (weight, *added_weights)
    if axis.size == 1:
        return product.forward(x, weights, bias)
    y: Tensor
    if sequence_parallel and num_slices > 1 and not torch.compiler.is_compiling():
        options = _options(product, axis, sequence_parallel, num_slices, weights)
        y = _Row.apply(x, *weights, options)  # type: ignore[no-untyped-call]
    else:
        leave = scatter_sequence if sequence_parallel else reduce_from_axis
        y = leave(product.forward(x, weights), axis)
    return y if bias is None else y + bias


class _Options(NamedTuple):
    """Arguments of a function that are not tensors of autograd.

    Attributes:
        product: The product.
        axis: The axis.
        cut: Whether the sequence is cut.
        num_slices: Maximum number of slices.
        constant: Converted weights, see `SavingProduct.constant_weights`.
        saves: Whether gradients of weights are needed.
        start_gather: How a `GatheringProduct` starts the all-gather of its input; None for others.
    """

    product: SavingProduct
    axis: Axis
    cut: bool
    num_slices: int
    constant: SavedTensors
    saves: bool
    start_gather: Callable[[Tensor, Axis], Gathering] | None

    def forward(self, x: Tensor, weights: Weights, bias: Tensor | None) -> tuple[Tensor, Saved]:
        """Returns the product, and what the backward pass needs."""
        return self.product.forward_saving(
            x,
            weights,
            bias,
            multiply_matrix,
            constant=self.constant,
            saves=self.saves,
            by_rows=self.cut,
        )

    def of_slice(self, x: Tensor, weights: Weights, bias: Tensor | None = None) -> Tensor:
        """Returns the product of a slice, of which nothing is saved."""
        return self._replace(saves=False).forward(x, weights, bias)[0]


def _options(
    product: Product, axis: Axis, cut: bool, num_slices: int, weights: Weights
) -> _Options:
    saver = saving(product)
    constant = saver.constant_weights(weights)
    return _Options(
        saver, axis, cut, num_slices, constant, wants_gradients(weights), _own_gather(product)
    )


def _unpack(*rest: Any) -> tuple[list[Tensor], Tensor | None, _Options]:
    """Returns the arguments after the input: weights, bias, and options."""
    *weights, bias, options = rest
    return weights, bias, options


class _Column(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        weights, bias, options = _unpack(*rest)
        ctx.options, ctx.shapes = options, [weight.shape for weight in weights]
        saved = Saved((x,), tuple(weights))
        if not options.cut:
            y, saved = options.forward(x, weights, bias)
        elif (count := _divisor(len(x), options.num_slices)) == 1:
            start = options.start_gather
            whole = all_gather(x, options.axis) if start is None else start(x, options.axis).wait()
            y, found = options.forward(whole, weights, bias)
            saved = Saved(_own_rows(found.input, whole, x, options.axis), found.weights)
        else:
            y = _gather_in_slices(x, weights, bias, options, count)
        save_for_backward(ctx, saved, options.constant)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, options = saved_of(ctx), ctx.options
        product = options.product
        requests = weight_gradient_requests(ctx, ctx.shapes)
        needs_x = _compat.gradient_wanted(ctx, 0)
        needs_bias = _compat.gradient_wanted(ctx, 1 + len(ctx.shapes))
        gathers, start_gather = options.cut and any(requests), options.start_gather
        start: Callable[[Tensor, Axis], Any] = start_gather or start_all_gather
        gathering = start(saved.input[0], options.axis) if gathers else None
        dy = grads[0]
        rows = as_rows(dy)
        reducing, operand = None, None
        if needs_x or any(requests):
            operand = product.gradient(rows, of_input=needs_x, of_weights=any(requests))
        if needs_x:
            partial = product.input_gradient(operand, saved)
            start = start_reduce_scatter if options.cut else start_all_reduce
            reducing = start(partial.view(*dy.shape[:-1], partial.shape[-1]), options.axis)
        if gathering is not None:
            saved = Saved((gathering.wait(), *saved.input[1:]), saved.weights)
        dweights: tuple[Tensor | None, ...] = no_gradients(len(ctx.shapes))
        if any(requests):
            dweights = product.weight_gradients(operand, saved, requests)
        dbias = rows.sum(0) if needs_bias else None
        dx = None if reducing is None else reducing.wait()
        return dx, *dweights, dbias, None


def _own_rows(saved: SavedTensors, whole: Tensor, x: Tensor, axis: Axis) -> SavedTensors:
    """Returns what is saved of a gathered input, with the rows of this rank alone."""
    if not saved:
        return saved
    first, *others = saved
    own = x if first is whole else first.chunk(axis.size)[axis.index].clone()
    return own, *others


class _Row(Function):
    """The sequence-parallel row product in slices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        *weights, options = rest
        save_for_backward(ctx, Saved((x,), tuple(weights)), options.constant)
        ctx.options, ctx.gathered = options, None
        ctx.shape, ctx.shapes = x.shape, [weight.shape for weight in weights]
        count = _divisor(len(x) // options.axis.size, options.num_slices)
        slices = x.reshape(options.axis.size, count, -1, *x.shape[1:])
        reducing = []
        for index in range(count):
            product = options.of_slice(slices[:, index].flatten(0, 1), weights)
            reducing.append(start_reduce_scatter(product, options.axis))
        return _concatenate([each.wait() for each in reducing])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, options = saved_of(ctx), ctx.options
        needs_x, requests = (
            _compat.gradient_wanted(ctx, 0),
            weight_gradient_requests(ctx, ctx.shapes),
        )
        # A split backward pass calls this twice with the same gradient; only the first one gathers.
        previous, dy = ctx.gathered or (None, None)
        if dy is None or previous is not grads[0]:
            dy = all_gather(grads[0], options.axis)
        later = any(ctx.needs_input_grad[1 : 1 + len(ctx.shapes)]) and not any(requests)
        ctx.gathered = (grads[0], dy) if later else None
        product, dx = options.product, None
        dweights: tuple[Tensor | None, ...] = no_gradients(len(ctx.shapes))
        if needs_x or any(requests):
            operand = product.gradient(as_rows(dy), of_input=needs_x, of_weights=any(requests))
            if needs_x:
                dx = product.input_gradient(operand, saved).view(ctx.shape)
            if any(requests):
                dweights = product.weight_gradients(operand, saved, requests)
        return dx, *dweights, None


def _own_gather(product: Product) -> Callable[[Tensor, Axis], Gathering] | None:
    """Returns how a `GatheringProduct` starts the all-gather of its input; None for others."""
    own = product.product if isinstance(product, AccumulatingProduct) else product
    start: Callable[[Tensor, Axis], Gathering] | None = getattr(own, "start_gather", None)
    return start


def _gather_in_slices(
    x: Tensor, weights: Weights, bias: Tensor | None, options: _Options, count: int
) -> Tensor:
    """Returns the product with the gathered input, one slice after another."""
    axis = options.axis
    gathers = [start_all_gather(part, axis) for part in x.chunk(count)]
    width = weights[0].shape[:-1].numel()
    y = x.new_empty((axis.size, count, len(x) // count, *x.shape[1:-1], width))
    for index, gathering in enumerate(gathers):
        product = options.of_slice(gathering.wait(), weights, bias)
        y[:, index] = product.view(axis.size, -1, *product.shape[1:])
    return y.flatten(0, 2)


def _concatenate(slices: list[Tensor]) -> Tensor:
    """Returns this rank's part from its slices in order."""
    return torch.cat(slices)


def _divisor(length: int, limit: int) -> int:
    """Returns the largest number of equal slices, at most `limit`."""
    return next(count for count in range(min(limit, max(length, 1)), 0, -1) if length % count == 0)
