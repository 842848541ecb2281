"""All-gather and reduce-scatter of rows of which every rank may have another number.

Backends do both for equal parts, so the shorter ones are padded to the longest.

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


def gather_sizes(size: int, axis: Axis, device: torch.device, *, purpose: str) -> tuple[int, ...]:
    """Returns how many rows every rank of the axis has."""
    own = torch.tensor([size], dtype=torch.int64, device=device)
    return tuple(all_gather(own, axis, purpose=purpose).tolist())


def gather_rows(
    rows: Shaped[Tensor, "own ..."], sizes: Sequence[int], axis: Axis, *, purpose: str = ""
) -> Shaped[Tensor, "all ..."]:
    """Returns the rows of all ranks, in the order of the axis; gradients of a row are summed.

    Args:
        rows: This rank's, `sizes[axis.index]` of them.
        sizes: Number of rows of every rank, the same on all.
        axis: Who takes part.
        purpose: In words, for errors and `Traffic`.
    """
    if axis.size == 1:
        return rows
    if len(rows) != sizes[axis.index]:
        raise LayoutError(f"{len(rows)} rows were given, the sizes say {sizes[axis.index]}")
    return _apply(_Gather, rows, tuple(sizes), axis, purpose)


def scatter_rows(
    rows: Shaped[Tensor, "all ..."], sizes: Sequence[int], axis: Axis, *, purpose: str = ""
) -> Shaped[Tensor, "own ..."]:
    """This rank's part of the sum of the ranks' `rows`; the transpose of `gather_rows`."""
    if axis.size == 1:
        return rows
    if len(rows) != sum(sizes):
        raise LayoutError(f"{len(rows)} rows were given, the sizes add up to {sum(sizes)}")
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
        ctx.place = sizes, axis, purpose
        return _gather(rows, sizes, axis, purpose)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _scatter(grads[0], *ctx.place), None, None, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: tuple[int, ...], axis: Axis, purpose: str) -> Tensor:
        ctx.place = sizes, axis, purpose
        return _scatter(rows, sizes, axis, purpose)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _gather(grads[0], *ctx.place), None, None, None
