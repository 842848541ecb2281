"""All-to-all of rows, uneven, with something to compute while it is under way.

    pending = start_all_to_all(rows, splits)
    ...                                   # compute
    received = pending.wait()

The backward pass sends the gradients the same way back, and is split alike: it starts where the
forward pass waited, and waits where the forward pass started. So whatever was computed in between
has its backward pass in between, too. With a `PassInterleaver`, another micro-batch computes before
each wait.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Int, Shaped
from torch import Tensor
from torch.autograd import Function

from megatron_parallel.collectives.failure import raise_collective_errors
from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.axes import Axis
from megatron_parallel.pipeline.pass_interleaving import PassInterleaver


@dataclass(frozen=True)
class RowSplits:
    """How many rows go where.

    Attributes:
        axis: Who takes part.
        input_splits: Rows for each of its ranks, in order; a rank keeps its own.
        output_splits: Rows from each of them: what they have in `input_splits` for this rank.
        purpose: In words, for errors and `Traffic`.
    """

    axis: Axis
    input_splits: tuple[int, ...]
    output_splits: tuple[int, ...]
    purpose: str

    def __post_init__(self) -> None:
        for name in ("input_splits", "output_splits"):
            if len(getattr(self, name)) != self.axis.size:
                raise LayoutError(
                    f"{name} has {len(getattr(self, name))} numbers of rows for the "
                    f"{self.axis.size} ranks of axis {self.axis.name!r}"
                )

    @property
    def transposed(self) -> "RowSplits":
        """The way back."""
        return RowSplits(self.axis, self.output_splits, self.input_splits, self.purpose)


def exchange_counts(
    counts: Int[Tensor, "ranks e"], axis: Axis, *, purpose: str = "row counts"
) -> Int[Tensor, "ranks e"]:
    """Sends row `i` to rank `i` of the axis; row `i` of the result is what rank `i` sent.

    Before an exchange of rows, so that every rank knows how many to expect.
    """
    if axis.size == 1:
        return counts
    ones = (1,) * axis.size
    return _launch(counts, RowSplits(axis, ones, ones, purpose)).wait()


class PendingAllToAll:
    """Rows on their way."""

    def __init__(self, rows: Tensor, exchange: "_Exchange | None") -> None:
        self._rows = rows
        self._exchange = exchange

    def wait(self) -> Shaped[Tensor, "received ..."]:
        """Returns the rows of all ranks, in the order of the axis. To be called once."""
        if self._exchange is None:
            return self._rows
        received: Tensor = _Wait.apply(self._rows, self._exchange)  # type: ignore[no-untyped-call]
        return received


def start_all_to_all(
    rows: Shaped[Tensor, "sent ..."], splits: RowSplits, interleaver: PassInterleaver | None = None
) -> PendingAllToAll:
    """Starts to send `rows`, those for the first rank first; returns at once.

    Until `wait`, other collectives may be started, by all ranks of the axis in the same order.
    `wait`, and its counterpart in the backward pass, call `interleaver.switch`.

    Raises:
        LayoutError: not as many rows as the splits says.
        CollectiveError: here or in `wait`, if a rank does not take part.
    """
    if len(rows) != sum(splits.input_splits):
        raise LayoutError(
            f"{len(rows)} rows were given, but {sum(splits.input_splits)} are to be sent"
        )
    if splits.axis.size == 1:
        return PendingAllToAll(rows, None)
    exchange = _Exchange(splits, interleaver)
    started: Tensor = _Start.apply(rows, exchange)  # type: ignore[no-untyped-call]
    return PendingAllToAll(started, exchange)


class _Exchange:
    """One exchange: what is under way in the forward pass, then in the backward pass."""

    def __init__(self, splits: RowSplits, interleaver: PassInterleaver | None) -> None:
        self.splits = splits
        self.interleaver = interleaver
        self.under_way: _Message | None = None

    def start(self, rows: Tensor, splits: RowSplits) -> Tensor:
        self.under_way = _launch(rows, splits)
        return self.under_way.received

    def finish(self) -> Tensor:
        message, self.under_way = self.under_way, None
        if message is None:
            raise LayoutError(f"all_to_all of {self.splits.purpose} was waited for twice")
        if self.interleaver is not None:
            self.interleaver.switch()
        return message.wait()


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.start(rows, exchange.splits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.finish(), None  # what grads[0] became on its way


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, started: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.finish()
        return started.view_as(started)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.start(grads[0], ctx.exchange.splits.transposed)
        return grads[0], None  # autograd wants one of this shape; `_Start` takes the other


@dataclass(frozen=True)
class _Message:
    """A running all-to-all; `sent` is kept until nobody reads it any more."""

    splits: RowSplits
    sent: Tensor
    received: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        with _naming(self.splits, self.sent):
            self.work.wait()
        return self.received


def _launch(rows: Tensor, splits: RowSplits) -> _Message:
    sent = rows.contiguous()
    received = torch.empty(
        (sum(splits.output_splits), *rows.shape[1:]), dtype=rows.dtype, device=rows.device
    )
    splits.axis.count(_operation(splits), sent)
    with _naming(splits, sent).for_launch():
        work = dist.all_to_all_single(
            received,
            sent,
            list(splits.output_splits),
            list(splits.input_splits),
            group=splits.axis.process_group,
            async_op=True,
        )
    return _Message(splits, sent, received, work)


def _naming(splits: RowSplits, sent: Tensor) -> raise_collective_errors:
    operation = _operation(splits)  # ranks that belong together send different numbers of rows
    return raise_collective_errors(
        splits.axis, operation, sent, match=f"{operation} on axis {splits.axis.name!r}"
    )


def _operation(splits: RowSplits) -> str:
    return f"all_to_all of {splits.purpose}"
