"""Boxes that cover a flat range of a tensor, such as this rank's shard of a bucket."""

from collections.abc import Iterator
from math import prod

from megatron_parallel.errors import LayoutError
from megatron_parallel.sharding.sharding import Box


def flat_range_boxes(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """Returns the boxes that cover elements `start <= i < stop` of a row-major tensor, in order.

    Each box is contiguous in memory. For `n` dims there are at most `2n - 1` boxes.

    Raises:
        LayoutError: The range is not within the tensor.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise LayoutError(
            f"range {start}:{stop} is outside shape {shape} of {prod(shape)} elements"
        )
    return tuple(_flat_boxes(shape, start, stop)) if start < stop else ()


def _flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])

    def inside(index: int, first: int, last: int) -> Iterator[Box]:
        for box in _flat_boxes(shape[1:], first, last):
            yield Box((index, *box.offsets), (1, *box.lengths))

    head, tail = divmod(start, row), divmod(stop, row)
    if head[0] == tail[0]:  # within one row
        yield from inside(head[0], head[1], tail[1])
        return
    first_whole = head[0]
    if head[1]:
        yield from inside(head[0], head[1], row)
        first_whole += 1
    if first_whole < tail[0]:
        zeros = (0,) * (len(shape) - 1)
        yield Box((first_whole, *zeros), (tail[0] - first_whole, *shape[1:]))
    if tail[1]:
        yield from inside(tail[0], 0, tail[1])
