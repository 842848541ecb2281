"""Communication traffic of a rank: calls and bytes by axis and operation.

    with mesh.counting() as traffic:
        train_step()
    print(traffic)

Counts the messages of the functions of `collectives`, the backward passes of region mappings,
`GradientBuffers` and the pipeline, over axes of more than one rank. Bytes are those of the payload,
without the factor of the algorithm of the backend:

| operation | bytes of a call |
|---|---|
| `all_reduce` | the tensor |
| `all_gather` | the input, this rank's part |
| `reduce_scatter` | the input, the whole tensor |
| `broadcast` | the tensor, on every rank |
| `all_to_all` | the rows for all ranks, including this one |
| `send`, `receive` | the tensor |

A ring of `n` ranks sends `2 (n - 1) / n` of these bytes for an all-reduce, `n - 1` times them for
an all-gather, and `(n - 1) / n` of them for a reduce-scatter.

The purpose of a message follows after `of`, so that formulas can distinguish messages:

| operation | sender | per step |
|---|---|---|
| `all_reduce`, `all_gather`, `reduce_scatter`, … | layers and other callers of `collectives` | |
| `all_reduce of token losses` | vocab-parallel cross entropy | 2 for each micro-batch |
| `all_to_all of dispatched tokens`, `... combined tokens` | `expert_parallel` | 2 for each layer |
| `all_reduce of gradients` | `GradientBuffers` | 1 for each bucket and axis |
| `all_reduce of tied gradient` | `sum_tied_gradient` | 1 for each weight |
| `broadcast of tied parameter` | `copy_tied_parameter` | |
| `send of activations`, `receive of activations` | pipeline | 1 for each micro-batch and peer |
| `send of gradient`, `receive of gradient` | pipeline | 1 for each micro-batch and peer |
| `all_gather of step digest` | pipeline: comparison of the step on all ranks | 1 of 8 bytes |
| `broadcast of loss sums` | pipeline: from the last stage to all ranks | 1 of 8 bytes for a sum |

Requests to the key-value store of the job (agreement, reports of failures) are not counted: a step
that succeeds makes none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from megatron_parallel import _compat


class Record(NamedTuple):
    """Messages of one kind: axis name, operation, number of calls and their total bytes."""

    axis: str
    operation: str
    calls: int
    nbytes: int


class Traffic:
    """Traffic of this rank within a block of `Mesh.counting`."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, str], tuple[int, int]] = {}

    @property
    def records(self) -> list[Record]:
        """One record for each axis and operation, in the order of their first calls."""
        return [Record(*key, *total) for key, total in self._totals.items()]

    def of(self, axis: str, operation: str) -> Record:
        """Returns the record of an operation on an axis; zeros if there were no calls."""
        return Record(axis, operation, *self._totals.get((axis, operation), (0, 0)))

    def add(self, axis: str, operation: str, nbytes: int) -> None:
        """Adds one call."""
        calls, before = self._totals.get((axis, operation), (0, 0))
        self._totals[axis, operation] = (calls + 1, before + nbytes)

    def __str__(self) -> str:
        head = ("axis", "operation", "calls", "bytes")
        rows = [(r.axis, r.operation, f"{r.calls:,}", f"{r.nbytes:,}") for r in self.records]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = (
            f"{axis:<{widths[0]}}  {operation:<{widths[1]}}  {calls:>{widths[2]}}  {n:>{widths[3]}}"
            for axis, operation, calls, n in (head, *rows)
        )
        return "\n".join(lines)


class Ledger:
    """The open counters of a mesh, shared by its axes."""

    def __init__(self) -> None:
        self.open: list[Traffic] = []

    def add(self, axis: str, operation: str, nbytes: int) -> None:
        """Adds one call to every open counter."""
        for traffic in self.open:
            traffic.add(axis, operation, nbytes)

    @contextmanager
    def counting(self) -> Iterator[Traffic]:
        """Yields a counter of the traffic in the `with` block. Blocks may be nested.

        Compiled functions run eagerly in the block, since a compiled graph counts nothing.
        """
        traffic = Traffic()
        with _compat.force_eager():
            self.open.append(traffic)
            try:
                yield traffic
            finally:
                self.open.remove(traffic)
