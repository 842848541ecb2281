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
from typing import Any

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
from megatron_parallel.tensor_parallel.linear_options import linear_options, unpack
from megatron_parallel.tensor_parallel.product import (
    PLAIN,
    Product,
    Weights,
    as_rows,
    no_gradients,
    weight_gradient_requests,
)
from megatron_parallel.tensor_parallel.saving import (
    Saved,
    SavedTensors,
    save_for_backward,
    saved_of,
)
from megatron_parallel.tensor_parallel.sliced_linear import (
    SlicedRow,
    divisor,
    gather_in_slices,
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
    flat_bias = None if bias is None else bias.flatten()
    weights = (weight, *added_weights)
    if axis.size == 1:
        y = product.forward(x, weights, flat_bias)
    elif torch.compiler.is_compiling():  # the compiler schedules collectives itself
        whole = gather_sequence(x, axis) if sequence_parallel else copy_to_axis(x, axis)
        y = product.forward(whole, weights, flat_bias)
    else:
        options = linear_options(product, axis, sequence_parallel, num_slices, weights)
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
        options = linear_options(product, axis, sequence_parallel, num_slices, weights)
        y = SlicedRow.apply(x, *weights, options)  # type: ignore[no-untyped-call]
    else:
        leave = scatter_sequence if sequence_parallel else reduce_from_axis
        y = leave(product.forward(x, weights), axis)
    return y if bias is None else y + bias


class _Column(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        weights, bias, options = unpack(*rest)
        ctx.options, ctx.shapes = options, [weight.shape for weight in weights]
        saved = Saved((x,), tuple(weights))
        if not options.cut:
            y, saved = options.forward(x, weights, bias)
        elif (count := divisor(len(x), options.num_slices)) == 1:
            start = options.start_gather
            whole = all_gather(x, options.axis) if start is None else start(x, options.axis).wait()
            y, found = options.forward(whole, weights, bias)
            saved = Saved(_own_rows(found.input, whole, x, options.axis), found.weights)
        else:
            y = gather_in_slices(x, weights, bias, options, count)
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
