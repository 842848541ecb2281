"""The dispatcher that sends one row per chosen expert to the rank that holds the expert."""

from collections.abc import Callable, Sequence
from math import ceil
from typing import Final, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from megatron_parallel._compat import outside_graphs
from megatron_parallel.collectives.operations import all_gather
from megatron_parallel.expert_parallel.all_gather import NO_LIMITS, AllGatherDispatcher
from megatron_parallel.expert_parallel.exchange import (
    PendingAllToAll,
    RowSplits,
    exchange_counts,
    start_all_to_all,
)
from megatron_parallel.expert_parallel.gather import gather_rows, scatter_rows
from megatron_parallel.expert_parallel.protocol import (
    COMBINE,
    DISPATCH,
    Dispatch,
    ExpertRows,
    Route,
    RowLimits,
    RowOps,
)
from megatron_parallel.expert_parallel.slots import Slots, assign_slots, order_by_expert, refused
from megatron_parallel.host_copy import HostCopy
from megatron_parallel.imagined import read_integers
from megatron_parallel.mesh.mesh import Mesh
from megatron_parallel.pipeline.pass_interleaving import PassInterleaver

COUNTS: Final = "expert counts"


class AllToAllDispatcher:
    """Sends one row per chosen expert to the rank that holds the expert.

    With a bound (`RowLimits.static` or a factor), ranks must have equal numbers of tokens.
    """

    def __init__(
        self, mesh: Mesh, num_experts: int, ops: RowOps, rank_capacity_factor: float | None = None
    ) -> None:
        self.ep, self.expert_tp = mesh.axis("ep"), mesh.axis("expert_tp")
        self.num_experts = num_experts
        self.ops = ops
        self.factor = rank_capacity_factor
        # A rank that has all experts alone sends nothing.
        alone = self.ep.size == self.expert_tp.size == 1
        self.own = AllGatherDispatcher(mesh, num_experts, ops, self.factor) if alone else None

    def route(self, experts: Int[Tensor, "n k"], limits: RowLimits = NO_LIMITS) -> Route:
        """Sorts the choices by expert and exchanges their numbers."""
        if self.own is not None:
            return _OwnRoute(self.own.route(experts, limits))
        order, counts = self.ops.sort(experts, self.num_experts)
        to_ranks = counts.view(self.ep.size, -1)
        tokens, choices = experts.shape
        size = self.slots(tokens, choices, limits)
        slots = None if size is None else assign_slots(to_ranks, len(order), size)
        from_ranks = to_ranks if slots is None else slots.counts
        from_ranks = exchange_counts(from_ranks, self.ep, purpose=COUNTS)
        every = all_gather(from_ranks, self.expert_tp, purpose=COUNTS)
        if size is not None and slots is not None:
            overflow = None if self.factor is None else (to_ranks - slots.counts).sum()
            return _SlotRoute(self, order, slots, size, every, overflow)
        if limits.per_expert is not None:  # the others are no rows
            order = order[: self.num_experts * min(tokens, limits.per_expert)]
        by_rank = every.view(self.expert_tp.size, -1)
        numbers = torch.cat([to_ranks.sum(1), from_ranks.sum(1), by_rank.sum(1)])
        copy = None if torch.compiler.is_compiling() else _copied_aside(numbers)
        return _ExactRoute(self, order, every, numbers, copy)

    def slots(self, tokens: int, choices: int, limits: RowLimits) -> int | None:
        """Returns the largest number of rows from a rank to another, or None without a bound.

        Args:
            tokens: Tokens of a rank.
            choices: Experts of each token.
            limits: What the caller knows.
        """
        static = limits.static and limits.per_expert is not None
        if not tokens * choices or not (static or self.factor is not None):
            return None
        local = self.num_experts // self.ep.size
        bound = tokens * min(choices, local)
        if limits.per_expert is not None:
            bound = min(bound, local * limits.per_expert)
        if self.factor is not None:
            bound = min(bound, ceil(tokens * choices * self.factor / self.ep.size))
        return bound


class _OwnRoute(NamedTuple):
    """The route on a rank that has all experts. Nothing is in flight."""

    route: Route

    @property
    def overflow(self) -> Tensor | None:
        """That of the route."""
        return self.route.overflow

    @property
    def changes(self) -> bool:
        """That of the route."""
        return self.route.changes

    def dispatch(
        self, tokens: Tensor, weights: Tensor, interleaver: PassInterleaver | None = None
    ) -> Dispatch:
        """Selects rows; the interleaver has nothing to overlap."""
        return self.route.dispatch(tokens, weights)


class _ExactRoute(NamedTuple):
    """A route of exactly the rows that there are. The host reads their numbers once."""

    owner: AllToAllDispatcher
    order: Tensor
    counts: Tensor  # rows by source on `expert_tp` and `ep`, and local expert
    numbers: Tensor  # rows sent, received, and of ranks of `expert_tp`; alive until they are read
    copy: HostCopy | None  # None in compiled code, of which nothing runs aside
    overflow: None = None
    changes: bool = True

    def dispatch(
        self,
        tokens: Float[Tensor, "n h"],
        weights: Float[Tensor, "n k"],
        interleaver: PassInterleaver | None = None,
    ) -> "_AllToAll":
        """Waits for the numbers of rows, and starts to send rows."""
        owner, ranks = self.owner, self.owner.ep.size
        rows = owner.ops.permute(tokens, self.order, weights.shape[1])
        # After the permutation was queued on the device.
        numbers = _read(self.numbers, self.copy, self._equal_loads)
        sent, received, sizes = numbers[:ranks], numbers[ranks : 2 * ranks], numbers[2 * ranks :]
        order, total = self.order, sum(sent)
        if total < len(order):
            rows, order = rows[:total], order[:total]
        splits = RowSplits(owner.ep, sent, received, DISPATCH)
        pending = start_all_to_all(rows, splits, interleaver)
        # Rows are sorted by source, of which there are several, and by expert only within a source.
        indices = torch.arange(sum(sizes), device=order.device)
        group = torch.searchsorted(self.counts.flatten().cumsum(0), indices, right=True)
        by_expert = torch.argsort(group % self.counts.shape[1], stable=True)
        found = _Received(self.counts.sum(0), sizes, by_expert, has_tail=False)
        return _AllToAll(owner, pending, splits, found, _Return(order, weights), interleaver)

    def _equal_loads(self) -> list[int]:
        """Returns the numbers if every expert has equally many tokens."""
        ep, total = self.owner.ep, len(self.order)
        sent = [total // ep.size + (rank < total % ep.size) for rank in range(ep.size)]
        received = [sent[ep.index]] * ep.size
        return [*sent, *received, *[sum(received)] * self.owner.expert_tp.size]


class _SlotRoute(NamedTuple):
    """A route of equally many slots for each rank, of which the host reads nothing."""

    owner: AllToAllDispatcher
    order: Tensor
    slots: Slots
    size: int
    counts: Tensor  # rows by source on `expert_tp` and `ep`, and local expert
    overflow: Tensor | None
    changes: bool = False

    def dispatch(
        self,
        tokens: Float[Tensor, "n h"],
        weights: Float[Tensor, "n k"],
        interleaver: PassInterleaver | None = None,
    ) -> "_AllToAll":
        """Fills the slots and starts to send them."""
        owner, slots = self.owner, self.slots
        order = torch.where(slots.used, self.order.index_select(0, slots.source), -1)
        rows = owner.ops.permute(tokens, order, weights.shape[1])
        each = (self.size,) * owner.ep.size
        splits = RowSplits(owner.ep, each, each, DISPATCH)
        pending = start_all_to_all(rows, splits, interleaver)
        sizes = (self.size * owner.ep.size,) * owner.expert_tp.size
        by_expert = order_by_expert(self.counts, self.size)
        found = _Received(self.counts.sum(0), sizes, by_expert, has_tail=True)
        back = _Return(order, refused(weights, self.overflow))
        return _AllToAll(owner, pending, splits, found, back, interleaver)


class _Received(NamedTuple):
    """The rows that a rank receives.

    Attributes:
        counts: Rows of each local expert.
        sizes: Rows of each rank of `expert_tp`.
        by_expert: Order that sorts them by expert.
        has_tail: Whether rows of no expert come last.
    """

    counts: Tensor
    sizes: tuple[int, ...]
    by_expert: Tensor
    has_tail: bool


class _Return(NamedTuple):
    """What a rank does with the rows that come back.

    Attributes:
        order: Order of the rows, for `RowOps.unpermute`.
        weights: Weights of the choices.
    """

    order: Tensor
    weights: Tensor


class _AllToAll:
    """One dispatch of `AllToAllDispatcher`."""

    def __init__(
        self,
        owner: AllToAllDispatcher,
        pending: PendingAllToAll,
        splits: RowSplits,
        received: _Received,
        back: _Return,
        interleaver: PassInterleaver | None,
    ) -> None:
        self.owner = owner
        self.pending = pending
        self.splits = splits
        self.received, self.back = received, back
        self.interleaver = interleaver

    def wait(self) -> ExpertRows:
        """Receives the rows, gathers those of other ranks of `expert_tp`, and sorts by expert."""
        counts, sizes, by_expert, has_tail = self.received
        rows = self.pending.wait()
        rows = gather_rows(rows, sizes, self.owner.expert_tp, purpose=DISPATCH)
        return ExpertRows(rows.index_select(0, by_expert), counts, has_tail)

    def combine(self, rows: Float[Tensor, "m h"]) -> "_Combine":
        """Restores the received order, sums over `expert_tp`, and starts to send the rows back."""
        _, sizes, by_expert, _ = self.received
        rows = rows.index_select(0, torch.argsort(by_expert))
        rows = scatter_rows(rows, sizes, self.owner.expert_tp, purpose=COMBINE)
        transposed = RowSplits(
            self.splits.axis, self.splits.output_splits, self.splits.input_splits, COMBINE
        )
        pending = start_all_to_all(rows, transposed, self.interleaver)
        return _Combine(self.owner.ops, pending, self.back)


class _Combine(NamedTuple):
    ops: RowOps
    pending: PendingAllToAll
    back: _Return

    def wait(self) -> Float[Tensor, "n h"]:
        """Returns the weighted sums of the received rows by token."""
        return self.ops.unpermute(self.pending.wait(), *self.back)


@outside_graphs
def _read(
    numbers: Tensor, copy: HostCopy | None, assumed: Callable[[], Sequence[int]]
) -> tuple[int, ...]:
    """Reads numbers of rows, for which the host waits."""
    return tuple(read_integers(numbers if copy is None else copy.read(), assumed))


def _copied_aside(numbers: Tensor) -> HostCopy:
    """Starts to copy numbers to the host, on a CUDA device beside the work that is queued next."""
    if not numbers.is_cuda:
        return HostCopy(numbers)
    # Copies of activations may fill the streams of normal priority.
    side: torch.cuda.Stream = torch.cuda.Stream(numbers.device, priority=-1)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(numbers.device))
    with torch.cuda.stream(side):
        return HostCopy(numbers)
