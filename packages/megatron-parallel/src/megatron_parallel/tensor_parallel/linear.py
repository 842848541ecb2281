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

With an `Accumulate` the gradient of the weight is added up by the product that makes it.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from megatron_parallel import _compat
from megatron_parallel.axes import Axis
from megatron_parallel.collectives import (
    all_gather,
    copy_to_axis,
    gather_sequence,
    reduce_from_axis,
    scatter_sequence,
)
from megatron_parallel.tensor_parallel.started import (
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron_parallel.tensor_parallel.weight_gradient import Accumulate, weight_gradient


def column_parallel_linear(
    x: Float[Tensor, "... in"],
    weight: Float[Tensor, "*out in"],
    bias: Float[Tensor, "*out"] | None,
    axis: Axis,
    sequence_parallel: bool = False,
    chunks: int = 1,
    accumulate: Accumulate | None = None,
) -> Float[Tensor, "..."]:
    """What `ColumnParallelLinear` does, with a weight held elsewhere (tied output embeddings).

    Args:
        x: Input, or with `sequence_parallel` this rank's part of it along dim 0.
        weight: This rank's part.
        bias: This rank's part, if there is one.
        axis: Over which the layer is cut.
        sequence_parallel: Whether the input is cut and has to be gathered.
        chunks: At most so many pieces in which the input is gathered while products of those that
            are there are computed.
        accumulate: Adds up the gradient of the weight, a leaf; by default autograd does.
    """
    shape = weight.shape[:-1]
    flat_bias = bias if bias is None or bias.dim() == 1 else bias.flatten()
    if axis.size == 1:
        y = _linear(x, weight, flat_bias, accumulate)
    elif torch.compiler.is_compiling():  # the compiler itself moves collectives
        whole = gather_sequence(x, axis) if sequence_parallel else copy_to_axis(x, axis)
        y = functional.linear(whole, _matrix(weight), flat_bias)
    else:
        cut = sequence_parallel, chunks
        y = _Column.apply(x, weight, flat_bias, axis, *cut, accumulate)  # type: ignore[no-untyped-call]
    return y if len(shape) == 1 else y.view(*y.shape[:-1], *shape)


def row_parallel_linear(
    x: Float[Tensor, "... part"],
    weight: Float[Tensor, "out part"],
    axis: Axis,
    sequence_parallel: bool = False,
    chunks: int = 1,
    *,
    bias: Float[Tensor, " out"] | None = None,
    accumulate: Accumulate | None = None,
) -> Float[Tensor, "... out"]:
    """The sum over the ranks of an axis of `x W^T`, or this rank's part of its dim 0.

    Args:
        x: This rank's part of the input, along its last dim.
        weight: This rank's part.
        axis: Over which the layer is cut.
        sequence_parallel: Whether the output is cut along dim 0.
        chunks: With it, at most so many pieces in which the sum travels while further ones are
            computed.
        bias: Added to the sum, once.
        accumulate: Adds up the gradient of the weight, a leaf; by default autograd does.
    """
    if axis.size == 1:
        return _linear(x, weight, bias, accumulate)
    y: Tensor
    if sequence_parallel and chunks > 1 and not torch.compiler.is_compiling():
        y = _Row.apply(x, weight, axis, chunks, accumulate)  # type: ignore[no-untyped-call]
    else:
        leave = scatter_sequence if sequence_parallel else reduce_from_axis
        y = leave(_linear(x, weight, None, accumulate), axis)
    return y if bias is None else y + bias


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, accumulate: Accumulate | None
) -> Tensor:
    """`x W^T + b` of this rank; the outputs are one dim."""
    if accumulate is None or torch.compiler.is_compiling():  # traced code cannot add to a buffer
        return functional.linear(x, _matrix(weight), bias)
    y: Tensor = _Linear.apply(x, weight, bias, accumulate)  # type: ignore[no-untyped-call]
    return y


class _Linear(Function):
    """The product of one rank, of which autograd gets no gradient of the weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, accumulate: Accumulate
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.accumulate = accumulate
        return functional.linear(x, _matrix(weight), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = (_compat.gradient_wanted(ctx, i) for i in range(3))
        rows = _rows(grads[0])
        dx = (rows @ _matrix(weight)).view(x.shape) if needs_x else None
        dweight = weight_gradient(ctx, 1, rows, _rows(x), weight.shape) if needs_weight else None
        return dx, dweight, rows.sum(0) if needs_bias else None, None


class _Column(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: Axis,
        cut: bool,
        chunks: int,
        accumulate: Accumulate | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.cut, ctx.accumulate = axis, cut, accumulate
        matrix = _matrix(weight)
        if not cut:
            return functional.linear(x, matrix, bias)
        count = _divisor(len(x), chunks)
        if count == 1:
            return functional.linear(all_gather(x, axis), matrix, bias)
        return _gathered_in_chunks(x, matrix, bias, axis, count)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = (_compat.gradient_wanted(ctx, i) for i in range(3))
        gathering = start_all_gather(x, ctx.axis) if ctx.cut and needs_weight else None
        dy = grads[0]
        rows = _rows(dy)
        reducing = None
        if needs_x:
            partial = (rows @ _matrix(weight)).view(*dy.shape[:-1], weight.shape[-1])
            start = start_reduce_scatter if ctx.cut else start_all_reduce
            reducing = start(partial, ctx.axis)
        dweight = dbias = None
        if needs_weight:
            whole = x if gathering is None else gathering.wait()
            dweight = weight_gradient(ctx, 1, rows, _rows(whole), weight.shape)
        if needs_bias:
            dbias = rows.sum(0)
        dx = None if reducing is None else reducing.wait()
        return dx, dweight, dbias, None, None, None, None


class _Row(Function):
    """The sequence-parallel row product in chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        axis: Axis,
        chunks: int,
        accumulate: Accumulate | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.accumulate, ctx.gathered = axis, accumulate, None
        count = _divisor(len(x) // axis.size, chunks)
        places = x.reshape(axis.size, count, -1, *x.shape[1:])
        under_way = []
        for chunk in range(count):
            product = functional.linear(places[:, chunk].flatten(0, 1), weight)
            under_way.append(start_reduce_scatter(product, axis))
        return _joined([part.wait() for part in under_way])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = (_compat.gradient_wanted(ctx, i) for i in range(2))
        # A split pass comes twice, with one gradient: it is gathered for the first half.
        known, dy = ctx.gathered or (None, None)
        if dy is None or known is not grads[0]:
            dy = all_gather(grads[0], ctx.axis)
        later = ctx.needs_input_grad[1] and not needs_weight
        ctx.gathered = (grads[0], dy) if later else None
        rows = _rows(dy)
        dx = (rows @ weight).view(x.shape) if needs_x else None
        dweight = weight_gradient(ctx, 1, rows, _rows(x), weight.shape) if needs_weight else None
        return dx, dweight, None, None, None


def _gathered_in_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, axis: Axis, count: int
) -> Tensor:
    """The product with the gathered input, chunk by chunk as they come."""
    under_way = [start_all_gather(chunk, axis) for chunk in x.chunk(count)]
    y = x.new_empty((axis.size, count, len(x) // count, *x.shape[1:-1], weight.shape[0]))
    for chunk, gathering in enumerate(under_way):
        product = functional.linear(gathering.wait(), weight, bias)
        y[:, chunk] = product.view(axis.size, -1, *product.shape[1:])
    return y.flatten(0, 2)


def _matrix(weight: Tensor) -> Tensor:
    """A weight `(*out, in)` with one dim of outputs."""
    return weight if weight.dim() == 2 else weight.flatten(0, -2)


def _rows(t: Tensor) -> Tensor:
    """`[..., h]` as a matrix."""
    return t.reshape(-1, t.shape[-1])


def _joined(chunks: list[Tensor]) -> Tensor:
    """This rank's part, of its chunks in order."""
    return torch.cat(chunks)


def _divisor(length: int, limit: int) -> int:
    """The largest number of equal chunks, at most `limit`."""
    return next(count for count in range(min(limit, max(length, 1)), 0, -1) if length % count == 0)
