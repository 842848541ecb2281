"""How much a rank communicates: calls and bytes by axis and operation.

    with mesh.counting() as traffic:
        train_step()
    print(traffic)

Counted is what goes through the functions of `collectives`, the backward passes of its region
mappings, `GradientBuffers` and the pipeline, over axes of more than one rank. Bytes are the
payload, before whatever factor the backend's algorithm puts on it:

| operation | bytes of a call |
|---|---|
| `all_reduce` | the tensor |
| `all_gather` | this rank's part, as it is handed in |
| `reduce_scatter` | the whole, as it is handed in |
| `broadcast` | the tensor, on its source and on every other rank |
| `all_to_all` | the rows for all ranks, the own ones among them |
| `send`, `receive` | the tensor |

A ring of `n` ranks sends `2 (n - 1) / n` of these bytes for an all-reduce, `n - 1` times them for
an all-gather, and `(n - 1) / n` of them for a reduce-scatter.

What a message is for follows after `of`, so that formulas can tell messages apart:

| operation | who | per step |
|---|---|---|
| `all_reduce`, `all_gather`, `reduce_scatter`, … | layers, and callers of `collectives` | |
| `all_reduce of token losses` | vocab-parallel cross entropy | 2 for each micro-batch |
| `all_to_all of dispatched tokens`, `... combined tokens` | `expert_parallel` | 2 for each layer |
| `all_reduce of gradients` | `GradientBuffers` | 1 for each bucket and axis |
| `all_reduce of tied gradient` | `sum_tied_gradient` | 1 for each weight |
| `broadcast of tied parameter` | `copy_tied_parameter` | |
| `send of activations`, `receive of activations` | pipeline | 1 for each micro-batch and border |
| `send of gradient`, `receive of gradient` | pipeline | 1 for each micro-batch and border |
| `all_gather of step digest` | pipeline: are all stages about to do the same? | 1 of 8 bytes |
| `broadcast of loss sums` | pipeline: from the last stage to all | 1 of 8 bytes a sum |

What ranks write into the job's key-value store (agreements, reports of failures) is not counted:
none of it happens in a step that succeeds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from megatron_parallel import _compat


class Record(NamedTuple):
    """Messages of one kind: axis name, operation, number of calls and bytes over all of them."""

    axis: str
    operation: str
    calls: int
    nbytes: int


class Traffic:
    """What this rank has communicated while `Mesh.counting` was open."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, str], tuple[int, int]] = {}

    @property
    def records(self) -> list[Record]:
        """One for each axis and operation, in the order in which they first came."""
        return [Record(*key, *total) for key, total in self._totals.items()]

    def of(self, axis: str, operation: str) -> Record:
        """Returns the record of an operation on an axis; zeros if there was none."""
        return Record(axis, operation, *self._totals.get((axis, operation), (0, 0)))

    def add(self, axis: str, operation: str, nbytes: int) -> None:
        """Counts a call."""
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
    """Who is counting at present; one for each mesh, shared by its axes."""

    def __init__(self) -> None:
        self.open: list[Traffic] = []

    def add(self, axis: str, operation: str, nbytes: int) -> None:
        """Counts a call for everyone who asked."""
        for traffic in self.open:
            traffic.add(axis, operation, nbytes)

    @contextmanager
    def counting(self) -> Iterator[Traffic]:
        """Count in the `with` block. Compiled functions run eagerly in it, as graphs count nothing.

        Blocks may be nested: both count.
        """
        traffic = Traffic()
        with _compat.force_eager():
            self.open.append(traffic)
            try:
                yield traffic
            finally:
                self.open.remove(traffic)
