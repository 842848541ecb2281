"""All-to-all of rows, uneven, with something to compute while it is under way.

    in_flight = start_exchange(rows, route)
    ...                                   # compute
    received = in_flight.wait()

The backward pass sends the gradients the same way back, and is split alike: it starts where the
forward pass waited, and waits where the forward pass started. So whatever was computed in between
has its backward pass in between, too. With `Turns`, whoever is about to wait first lets another
micro-batch compute.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Int, Shaped
from torch import Tensor
from torch.autograd import Function

from megatron_parallel.axes import Axis
from megatron_parallel.collective_failure import naming_failures
from megatron_parallel.errors import LayoutError
from megatron_parallel.turns import Turns


@dataclass(frozen=True)
class Route:
    """How many rows go where.

    Attributes:
        axis: Who takes part.
        send: Rows for each of its ranks, in order; a rank keeps its own.
        receive: Rows from each of them: what they have in `send` for this rank.
        purpose: In words, for errors and `Traffic`.
    """

    axis: Axis
    send: tuple[int, ...]
    receive: tuple[int, ...]
    purpose: str

    def __post_init__(self) -> None:
        for name in ("send", "receive"):
            if len(getattr(self, name)) != self.axis.size:
                raise LayoutError(
                    f"{name} has {len(getattr(self, name))} numbers of rows for the "
                    f"{self.axis.size} ranks of axis {self.axis.name!r}"
                )

    @property
    def back(self) -> "Route":
        """The way back."""
        return Route(self.axis, self.receive, self.send, self.purpose)


def exchange_counts(
    counts: Int[Tensor, "ranks e"], axis: Axis, *, purpose: str = "row counts"
) -> Int[Tensor, "ranks e"]:
    """Sends row `i` to rank `i` of the axis; row `i` of the result is what rank `i` sent.

    Before an exchange of rows, so that every rank knows how many to expect.
    """
    if axis.size == 1:
        return counts
    ones = (1,) * axis.size
    return _launch(counts, Route(axis, ones, ones, purpose)).wait()


class InFlight:
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


def start_exchange(
    rows: Shaped[Tensor, "sent ..."], route: Route, turns: Turns | None = None
) -> InFlight:
    """Starts to send `rows`, those for the first rank first; returns at once.

    Until `wait`, other collectives may be started, by all ranks of the axis in the same order.
    `wait`, and its counterpart in the backward pass, end a turn of `turns`.

    Raises:
        LayoutError: not as many rows as the route says.
        CollectiveError: here or in `wait`, if a rank does not take part.
    """
    if len(rows) != sum(route.send):
        raise LayoutError(f"{len(rows)} rows were given, but {sum(route.send)} are to be sent")
    if route.axis.size == 1:
        return InFlight(rows, None)
    exchange = _Exchange(route, turns)
    started: Tensor = _Start.apply(rows, exchange)  # type: ignore[no-untyped-call]
    return InFlight(started, exchange)


class _Exchange:
    """One exchange: what is under way in the forward pass, then in the backward pass."""

    def __init__(self, route: Route, turns: Turns | None) -> None:
        self.route = route
        self.turns = turns
        self.under_way: _Message | None = None

    def start(self, rows: Tensor, route: Route) -> Tensor:
        self.under_way = _launch(rows, route)
        return self.under_way.received

    def finish(self) -> Tensor:
        message, self.under_way = self.under_way, None
        if message is None:
            raise LayoutError(f"all_to_all of {self.route.purpose} was waited for twice")
        if self.turns is not None:
            self.turns.hand_over()
        return message.wait()


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.start(rows, exchange.route)

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
        ctx.exchange.start(grads[0], ctx.exchange.route.back)
        return grads[0], None  # autograd wants one of this shape; `_Start` takes the other


@dataclass(frozen=True)
class _Message:
    """A running all-to-all; `sent` is kept until nobody reads it any more."""

    route: Route
    sent: Tensor
    received: Tensor
    work: dist.Work

    def wait(self) -> Tensor:
        with _naming(self.route, self.sent):
            self.work.wait()
        return self.received


def _launch(rows: Tensor, route: Route) -> _Message:
    sent = rows.contiguous()
    received = torch.empty(
        (sum(route.receive), *rows.shape[1:]), dtype=rows.dtype, device=rows.device
    )
    route.axis.count(_operation(route), sent)
    with _naming(route, sent).starting():
        work = dist.all_to_all_single(
            received,
            sent,
            list(route.receive),
            list(route.send),
            group=route.axis.bound,
            async_op=True,
        )
    return _Message(route, sent, received, work)


def _naming(route: Route, sent: Tensor) -> naming_failures:
    operation = _operation(route)  # ranks that belong together send different numbers of rows
    return naming_failures(
        route.axis, operation, sent, match=f"{operation} on axis {route.axis.name!r}"
    )


def _operation(route: Route) -> str:
    return f"all_to_all of {route.purpose}"
