"""All-gather and reduce-scatter of different numbers of rows per rank.

Backends support only equal parts, so shorter parts are padded to the longest.

| mapping | forward | backward |
|---|---|---|
| `gather_rows` | all-gather | reduce-scatter |
| `scatter_rows` | reduce-scatter | all-gather |
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.autograd import Function

from megatron_parallel.collectives.operations import all_gather, reduce_scatter
from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.axes import Axis


def gather_rows(
    rows: Shaped[Tensor, "own ..."], sizes: Sequence[int], axis: Axis, *, purpose: str = ""
) -> Shaped[Tensor, "all ..."]:
    """Returns the rows of all ranks in the order of the axis. The gradients of a row are summed.

    Args:
        rows: Rows of this rank, `sizes[axis.index]` of them.
        sizes: Number of rows of each rank, equal on all ranks.
        axis: Axis of the all-gather.
        purpose: Purpose in words, for errors and `Traffic`.

    Raises:
        LayoutError: The number of rows differs from `sizes`.
    """
    if axis.size == 1:
        return rows
    if len(rows) != sizes[axis.index]:
        raise LayoutError(
            f"{len(rows)} rows were given, but sizes has {sizes[axis.index]} for this rank"
        )
    return _apply(_Gather, rows, tuple(sizes), axis, purpose)


def scatter_rows(
    rows: Shaped[Tensor, "all ..."], sizes: Sequence[int], axis: Axis, *, purpose: str = ""
) -> Shaped[Tensor, "own ..."]:
    """Returns this rank's part of the sum of `rows` over the ranks; transpose of `gather_rows`.

    Raises:
        LayoutError: The number of rows differs from the sum of `sizes`.
    """
    if axis.size == 1:
        return rows
    if len(rows) != sum(sizes):
        raise LayoutError(f"{len(rows)} rows were given, but sizes add up to {sum(sizes)}")
    return _apply(_Scatter, rows, tuple(sizes), axis, purpose)


def _apply(function: type[Function], *args: object) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


def _gather(rows: Tensor, sizes: tuple[int, ...], axis: Axis, purpose: str) -> Tensor:
    longest = max(sizes)
    whole = all_gather(_padded(rows, longest), axis, purpose=purpose)
    if min(sizes) == longest:
        return whole
    parts = torch.split(whole, longest)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _scatter(rows: Tensor, sizes: tuple[int, ...], axis: Axis, purpose: str) -> Tensor:
    longest = max(sizes)
    if min(sizes) != longest:
        rows = torch.cat([_padded(part, longest) for part in torch.split(rows, list(sizes))])
    return reduce_scatter(rows, axis, purpose=purpose)[: sizes[axis.index]]


def _padded(rows: Tensor, length: int) -> Tensor:
    missing = length - len(rows)
    if not missing:
        return rows
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: tuple[int, ...], axis: Axis, purpose: str) -> Tensor:
        ctx.options = sizes, axis, purpose
        return _gather(rows, sizes, axis, purpose)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _scatter(grads[0], *ctx.options), None, None, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: tuple[int, ...], axis: Axis, purpose: str) -> Tensor:
        ctx.options = sizes, axis, purpose
        return _scatter(rows, sizes, axis, purpose)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _gather(grads[0], *ctx.options), None, None, None
