"""The products of parallel linear layers, with communication behind them.

Of its input a column-parallel layer keeps this rank's part only; under sequence parallelism the
backward pass gathers it again (Korthikanti et al. 2022, section 4.2.2). What travels while what is
computed:

| pass | collective | meanwhile |
|---|---|---|
| backward, column, sequence parallel | all-gather of the input | gradient of the input |
| | reduce-scatter of the input's gradient | gradient of the weight |
| backward, column | all-reduce of the input's gradient | gradient of the weight |
| forward, column, in chunks | all-gather of the next chunks | product of this one |
| forward, row, in chunks | reduce-scatter of the chunks before | product of this one |

Chunks cut every rank's part of the sequence alike, so that each collective is one of all ranks.
Sums are those of the layers without chunks, up to the order in which a product adds. A split
backward pass (zero bubble) sums the input's gradient in its first half only, and gathers the input
in its second; what a row-parallel layer in chunks gathers for the first half it keeps for the
second.

What is multiplied is a `Product`: `x W^T`, unless another one is handed in.
"""

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
    Product,
    Weights,
    as_rows,
    weight_gradient_requests,
    weight_gradients,
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
    """What `ColumnParallelLinear` does, with a weight held elsewhere (tied output embeddings).

    Args:
        x: Input, or with `sequence_parallel` this rank's part of it along dim 0.
        weight: This rank's part.
        bias: This rank's part, if there is one.
        axis: Over which the layer is cut.
        sequence_parallel: Whether the input is cut and has to be gathered.
        num_slices: Maximum number of slices in which the input is gathered. The product with one
            slice overlaps the gathering of the next.
        product: What is multiplied.
        added_weights: Parameters that the product adds to the weight, this rank's part of each.
    """
    shape = weight.shape[:-1]
    flat_bias = bias if bias is None or bias.dim() == 1 else bias.flatten()
    weights = (weight, *added_weights)
    if axis.size == 1:
        y = product.forward(x, weights, flat_bias)
    elif torch.compiler.is_compiling():  # the compiler itself moves collectives
        whole = gather_sequence(x, axis) if sequence_parallel else copy_to_axis(x, axis)
        y = product.forward(whole, weights, flat_bias)
    else:
        how = _How(product, axis, sequence_parallel, num_slices)
        y = _Column.apply(x, *weights, flat_bias, how)  # type: ignore[no-untyped-call]
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
    """Returns the sum over the ranks of an axis of `x W^T`, or this rank's part of its dim 0.

    Args:
        x: This rank's part of the input, along its last dim.
        weight: This rank's part.
        axis: Over which the layer is cut.
        sequence_parallel: Whether the output is cut along dim 0.
        num_slices: With `sequence_parallel`, maximum number of slices of the output. The sum of one
            slice overlaps the product of the next.
        bias: Added to the sum, once.
        product: What is multiplied.
        added_weights: Parameters that the product adds to the weight, this rank's part of each.
    """
    weights = (weight, *added_weights)
    if axis.size == 1:
        return product.forward(x, weights, bias)
    y: Tensor
    if sequence_parallel and num_slices > 1 and not torch.compiler.is_compiling():
        how = _How(product, axis, sequence_parallel, num_slices)
        y = _Row.apply(x, *weights, how)  # type: ignore[no-untyped-call]
    else:
        leave = scatter_sequence if sequence_parallel else reduce_from_axis
        y = leave(product.forward(x, weights), axis)
    return y if bias is None else y + bias


class _How(NamedTuple):
    """What a function takes beside tensors."""

    product: Product
    axis: Axis
    cut: bool
    num_slices: int


def _taken(*rest: Any) -> tuple[list[Tensor], Tensor | None, _How]:
    """Arguments after the input: weights, the bias, and what is no tensor."""
    *weights, bias, how = rest
    return weights, bias, how


class _Column(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        weights, bias, how = _taken(*rest)
        ctx.save_for_backward(x, *weights)
        ctx.how = how
        if not how.cut:
            return how.product.forward(x, weights, bias)
        count = _divisor(len(x), how.num_slices)
        if count == 1:
            return how.product.forward(all_gather(x, how.axis), weights, bias)
        return _gathered_in_chunks(x, weights, bias, how, count)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        how: _How = ctx.how
        requests = weight_gradient_requests(ctx, weights)
        needs_x = _compat.gradient_wanted(ctx, 0)
        needs_bias = _compat.gradient_wanted(ctx, 1 + len(weights))
        gathering = start_all_gather(x, how.axis) if how.cut and any(requests) else None
        dy = grads[0]
        rows = as_rows(dy)
        reducing = None
        if needs_x:
            partial = how.product.dgrad(rows, weights).view(*dy.shape[:-1], x.shape[-1])
            start = start_reduce_scatter if how.cut else start_all_reduce
            reducing = start(partial, how.axis)
        whole = x if gathering is None else gathering.wait()
        dweights = weight_gradients(how.product, rows, whole, weights, requests)
        dbias = rows.sum(0) if needs_bias else None
        dx = None if reducing is None else reducing.wait()
        return dx, *dweights, dbias, None


class _Row(Function):
    """The sequence-parallel row product in chunks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        *weights, how = rest
        ctx.save_for_backward(x, *weights)
        ctx.how, ctx.gathered = how, None
        count = _divisor(len(x) // how.axis.size, how.num_slices)
        places = x.reshape(how.axis.size, count, -1, *x.shape[1:])
        under_way = []
        for chunk in range(count):
            product = how.product.forward(places[:, chunk].flatten(0, 1), weights)
            under_way.append(start_reduce_scatter(product, how.axis))
        return _joined([part.wait() for part in under_way])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        how: _How = ctx.how
        needs_x, requests = _compat.gradient_wanted(ctx, 0), weight_gradient_requests(ctx, weights)
        # A split pass comes twice, with one gradient: it is gathered for the first half.
        known, dy = ctx.gathered or (None, None)
        if dy is None or known is not grads[0]:
            dy = all_gather(grads[0], how.axis)
        later = any(ctx.needs_input_grad[1 : 1 + len(weights)]) and not any(requests)
        ctx.gathered = (grads[0], dy) if later else None
        rows = as_rows(dy)
        dx = how.product.dgrad(rows, weights).view(x.shape) if needs_x else None
        return dx, *weight_gradients(how.product, rows, x, weights, requests), None


def _gathered_in_chunks(
    x: Tensor, weights: Weights, bias: Tensor | None, how: _How, count: int
) -> Tensor:
    """Returns the product with the gathered input, chunk by chunk as they come."""
    axis = how.axis
    under_way = [start_all_gather(chunk, axis) for chunk in x.chunk(count)]
    width = weights[0].shape[:-1].numel()
    y = x.new_empty((axis.size, count, len(x) // count, *x.shape[1:-1], width))
    for chunk, gathering in enumerate(under_way):
        product = how.product.forward(gathering.wait(), weights, bias)
        y[:, chunk] = product.view(axis.size, -1, *product.shape[1:])
    return y.flatten(0, 2)


def _joined(chunks: list[Tensor]) -> Tensor:
    """This rank's part, of its chunks in order."""
    return torch.cat(chunks)


def _divisor(length: int, limit: int) -> int:
    """Returns the largest number of equal chunks, at most `limit`."""
    return next(count for count in range(min(limit, max(length, 1)), 0, -1) if length % count == 0)
