"""Asynchronous all-to-all of rows with uneven splits.

    pending = start_all_to_all(rows, splits)
    ...                                   # compute
    received = pending.wait()

The backward pass sends the gradients back. It starts where the forward pass waited and waits where
the forward pass started, so the backward pass of the computation in between overlaps it too. With a
`PassInterleaver`, another micro-batch computes before each wait.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Int, Shaped
from torch import Tensor
from torch.autograd import Function

from megatron_parallel.collectives.failure import raise_collective_errors
from megatron_parallel.collectives.operations import all_to_all
from megatron_parallel.errors import LayoutError
from megatron_parallel.mesh.axes import Axis
from megatron_parallel.pipeline.pass_interleaving import PassInterleaver


@dataclass(frozen=True)
class RowSplits:
    """Numbers of rows that the ranks of an all-to-all exchange.

    Attributes:
        axis: Axis of the all-to-all.
        input_splits: Number of rows to send to each rank, including this one.
        output_splits: Number of rows to receive from each rank.
        purpose: Purpose in words, for errors and `Traffic`.
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
        """Splits of the all-to-all that sends the rows back."""
        return RowSplits(self.axis, self.output_splits, self.input_splits, self.purpose)


def exchange_counts(
    counts: Int[Tensor, "ranks e"], axis: Axis, *, purpose: str = "row counts"
) -> Int[Tensor, "ranks e"]:
    """Sends row `i` to rank `i` of the axis, and returns the row from rank `i` as row `i`.

    Used before an exchange of rows, so that each rank knows how many rows it will receive.
    """
    return all_to_all(counts, axis, purpose=purpose)


class PendingAllToAll:
    """An all-to-all in flight."""

    def __init__(self, rows: Tensor, exchange: "_Exchange | None") -> None:
        self._rows = rows
        self._exchange = exchange

    def wait(self) -> Shaped[Tensor, "received ..."]:
        """Returns the rows of all ranks in the order of the axis. Must be called once."""
        if self._exchange is None:
            return self._rows
        received: Tensor = _Wait.apply(self._rows, self._exchange)  # type: ignore[no-untyped-call]
        return received


def start_all_to_all(
    rows: Shaped[Tensor, "sent ..."], splits: RowSplits, interleaver: PassInterleaver | None = None
) -> PendingAllToAll:
    """Starts to send `rows`, those for the first rank first; returns at once.

    Before `wait`, other collectives may be started, in the same order on all ranks of the axis.
    `wait` and its counterpart in the backward pass call `interleaver.switch` first.

    Compiled code exchanges the rows at once, as the compiler orders communication itself.

    Raises:
        LayoutError: The number of rows differs from `splits`, or compiled code has an interleaver.
        CollectiveError: A rank does not take part. Raised here or in `wait`.
    """
    if len(rows) != sum(splits.input_splits):
        raise LayoutError(
            f"{len(rows)} rows were given, but input_splits has {sum(splits.input_splits)}"
        )
    if splits.axis.size == 1:
        return PendingAllToAll(rows, None)
    if torch.compiler.is_compiling():
        if interleaver is not None:
            raise LayoutError("passes of compiled code cannot be interleaved; leave out --compile")
        exchanged: Tensor = _Exchanged.apply(rows, splits)  # type: ignore[no-untyped-call]
        return PendingAllToAll(exchanged, None)
    exchange = _Exchange(splits, interleaver)
    started: Tensor = _Start.apply(rows, exchange)  # type: ignore[no-untyped-call]
    return PendingAllToAll(started, exchange)


class _Exchange:
    """One exchange and its message in flight, in the forward and then the backward pass."""

    def __init__(self, splits: RowSplits, interleaver: PassInterleaver | None) -> None:
        self.splits = splits
        self.interleaver = interleaver
        self.in_flight: _Message | None = None

    def start(self, rows: Tensor, splits: RowSplits) -> Tensor:
        self.in_flight = _launch(rows, splits)
        return self.in_flight.received

    def finish(self) -> Tensor:
        message, self.in_flight = self.in_flight, None
        if message is None:
            raise LayoutError(f"wait was called twice for the all_to_all of {self.splits.purpose}")
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
        return ctx.exchange.finish(), None  # the received gradient of the rows


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, started: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.finish()
        return started.view_as(started)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.start(grads[0], ctx.exchange.splits.transposed)
        return grads[0], None  # autograd needs this shape; `_Start` returns the received one


class _Exchanged(Function):
    """An all-to-all of which nothing is in flight."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, splits: RowSplits) -> Tensor:
        ctx.splits = splits
        return _exchanged(rows, splits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grads[0], ctx.splits.transposed), None


@dataclass(frozen=True)
class _Message:
    """An all-to-all in flight. `sent` is referenced until the backend has read it."""

    splits: RowSplits
    sent: Tensor
    received: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        with _error_context(self.splits, self.sent):
            self.work.wait()
        return self.received


def _launch(rows: Tensor, splits: RowSplits) -> _Message:
    sent, received = rows.contiguous(), _empty_received(rows, splits)
    splits.axis.count(_operation(splits), sent)
    with _error_context(splits, sent).for_launch():
        work = dist.all_to_all_single(
            received,
            sent,
            list(splits.output_splits),
            list(splits.input_splits),
            group=splits.axis.process_group,
            async_op=True,
        )
    return _Message(splits, sent, received, work)


def _exchanged(rows: Tensor, splits: RowSplits) -> Tensor:
    sent, received = rows.contiguous(), _empty_received(rows, splits)
    splits.axis.count(_operation(splits), sent)
    with _error_context(splits, sent):
        dist.all_to_all_single(
            received,
            sent,
            list(splits.output_splits),
            list(splits.input_splits),
            group=splits.axis.process_group,
        )
    return received


def _empty_received(rows: Tensor, splits: RowSplits) -> Tensor:
    return rows.new_empty(sum(splits.output_splits), *rows.shape[1:])


def _error_context(splits: RowSplits, sent: Tensor) -> raise_collective_errors:
    operation = _operation(splits)  # ranks send different numbers of rows
    return raise_collective_errors(
        splits.axis, operation, sent, match=f"{operation} on axis {splits.axis.name!r}"
    )


def _operation(splits: RowSplits) -> str:
    return f"all_to_all of {splits.purpose}"
