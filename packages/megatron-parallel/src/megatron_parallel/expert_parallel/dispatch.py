"""Token dispatch: every chosen token to the ranks that hold the expert, and the answers back.

    dispatch = dispatcher.dispatch(tokens, experts, weights)  # messages leave
    rows, counts = dispatch.wait()                            # [m, h], sorted by local expert
    combine = dispatch.combine(experts_of_this_rank(rows, counts))
    y = combine.wait()                                        # [n, h]: each token's choices summed

Every rank comes with tokens that no other rank has. The experts are cut over two axes: `ep` gives
each of its ranks some of them, `expert_tp` cuts each expert's matrices, so that a rank computes
partial sums. What a rank computes is neither scaled nor averaged, forwards or backwards.

Between `dispatch` and its `wait`, and between `combine` and its `wait`, messages of `alltoall` are
under way, in the backward pass too: there is the place for other work (a shared expert; with
`PassInterleaver`, another micro-batch).

| dispatcher | over `ep` | over `expert_tp` | right for |
|---|---|---|---|
| `alltoall` | each choice's row, to the rank that needs it | gathers these rows | many experts |
| `allgather` | all tokens to all ranks, once | the same | choices that reach most ranks |
"""

from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from megatron_parallel.collectives.operations import all_gather
from megatron_parallel.errors import LayoutError
from megatron_parallel.expert_parallel.exchange import (
    PendingAllToAll,
    RowSplits,
    exchange_counts,
    start_all_to_all,
)
from megatron_parallel.expert_parallel.gather import gather_rows, gather_sizes, scatter_rows
from megatron_parallel.mesh.mesh import Mesh
from megatron_parallel.pipeline.pass_interleaving import PassInterleaver

DISPATCH: Final = "dispatched tokens"
COMBINE: Final = "combined tokens"
"""What messages are called in `Traffic`, those of the backward pass too."""


class RowOps(NamedTuple):
    """The operations on rows that a dispatcher is handed: those of megatron-kernels.

    Attributes:
        sort: `sort(experts [n, k], num_experts) -> (order [m], counts [e])`; numbers that are no
            expert's have no row.
        permute: `permute(tokens [n, h], order, k) -> rows [m, h]`.
        unpermute: `unpermute(rows [m, h], order, weights [n, k]) -> tokens [n, h]`.
    """

    sort: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    permute: Callable[[Tensor, Tensor, int], Tensor]
    unpermute: Callable[[Tensor, Tensor, Tensor], Tensor]


@runtime_checkable
class Combine(Protocol):
    """Answers of the experts on their way back."""

    def wait(self) -> Float[Tensor, "n h"]:
        """Returns the weighted sum of each token's answers; zero for a token without any."""


@runtime_checkable
class Dispatch(Protocol):
    """Tokens on their way to the experts."""

    def wait(self) -> tuple[Float[Tensor, "m h"], Int[Tensor, " e"]]:
        """This rank's rows, sorted by local expert, and how many each of them has."""

    def combine(self, rows: Float[Tensor, "m h"]) -> Combine:
        """Sends the answers back; `rows` are partial sums over `expert_tp`."""


@runtime_checkable
class Dispatcher(Protocol):
    """A way of bringing tokens to their experts."""

    def dispatch(
        self,
        tokens: Float[Tensor, "n h"],
        experts: Int[Tensor, "n k"],
        weights: Float[Tensor, "n k"],
        interleaver: PassInterleaver | None = None,
    ) -> Dispatch:
        """Starts to send tokens.

        Args:
            tokens: This rank's own; ranks may have different numbers of them.
            experts: The experts each has chosen; -1 for none (padding).
            weights: What each choice counts for, in float32 at least.
            interleaver: Lets another micro-batch compute while this one waits, in forward and
                backward pass.

        Raises:
            LayoutError: An `interleaver` was given to a dispatcher that communicates synchronously.
        """


def build_dispatcher(name: str, mesh: Mesh, num_experts: int, ops: RowOps) -> Dispatcher:
    """Returns the dispatcher called `name`, one of `DISPATCHERS`, for the experts of one layer.

    Raises:
        LayoutError: There is none of that name, or the experts cannot be cut over axis `ep`.
    """
    ep = mesh.axis("ep")
    if num_experts % ep.size:
        raise LayoutError(
            f"{num_experts} experts cannot be cut into {ep.size} equal parts over axis 'ep': "
            f"choose a degree that divides {num_experts}"
        )
    if name not in DISPATCHERS:
        raise LayoutError(f"no dispatcher is called {name!r}: there are {', '.join(DISPATCHERS)}")
    return DISPATCHERS[name](mesh, num_experts, ops)


# -- all-to-all ------------------------------------------------------------------------------------


class AllToAllDispatcher:
    """Sends a row for each choice to the rank that holds the expert."""

    def __init__(self, mesh: Mesh, num_experts: int, ops: RowOps) -> None:
        self.ep, self.expert_tp = mesh.axis("ep"), mesh.axis("expert_tp")
        self.num_experts = num_experts
        self.ops = ops

    def dispatch(
        self,
        tokens: Float[Tensor, "n h"],
        experts: Int[Tensor, "n k"],
        weights: Float[Tensor, "n k"],
        interleaver: PassInterleaver | None = None,
    ) -> "_AllToAll":
        """Sorts the choices by expert, exchange how many there are, and starts to send them."""
        order, counts = self.ops.sort(experts, self.num_experts)
        to_ranks = counts.view(self.ep.size, -1)
        from_ranks = exchange_counts(to_ranks, self.ep, purpose="expert counts")
        splits = RowSplits(self.ep, _sums(to_ranks), _sums(from_ranks), DISPATCH)
        rows = self.ops.permute(tokens, order, experts.shape[1])
        pending = start_all_to_all(rows, splits, interleaver)
        return _AllToAll(self, pending, splits, from_ranks, order, weights, interleaver)


class _AllToAll:
    """One dispatch of `AllToAllDispatcher`."""

    def __init__(
        self,
        owner: AllToAllDispatcher,
        pending: PendingAllToAll,
        splits: RowSplits,
        counts: Tensor,
        order: Tensor,
        weights: Tensor,
        interleaver: PassInterleaver | None,
    ) -> None:
        self.owner = owner
        self.pending = pending
        self.splits = splits
        self.counts = counts  # rows by source on `ep`, and local expert
        self.order, self.weights = order, weights
        self.interleaver = interleaver
        self.sizes: tuple[int, ...] = ()  # rows of each rank of `expert_tp`
        self.by_expert: Tensor | None = None

    def wait(self) -> tuple[Float[Tensor, "m h"], Int[Tensor, " e"]]:
        """Takes the rows, gather those of the other parts of the experts, sort by expert."""
        rows, axis = self.pending.wait(), self.owner.expert_tp
        counts = self.counts
        if axis.size > 1:
            counts = all_gather(counts, axis, purpose="expert counts")
            self.sizes = _sums(counts.view(axis.size, -1))
            rows = gather_rows(rows, self.sizes, axis, purpose=DISPATCH)
        if len(counts) > 1:  # rows are sorted by source, and by expert within each only
            local = torch.arange(counts.shape[1], device=counts.device).repeat(len(counts))
            self.by_expert = torch.argsort(local.repeat_interleave(counts.flatten()), stable=True)
            rows = rows.index_select(0, self.by_expert)
        return rows, counts.sum(0)

    def combine(self, rows: Float[Tensor, "m h"]) -> "_AllToAllCombine":
        """Back into the order in which they came, summed over `expert_tp`, and on their way."""
        if self.by_expert is not None:
            rows = rows.index_select(0, torch.argsort(self.by_expert))
        rows = scatter_rows(rows, self.sizes, self.owner.expert_tp, purpose=COMBINE)
        back = RowSplits(
            self.splits.axis, self.splits.output_splits, self.splits.input_splits, COMBINE
        )
        return _AllToAllCombine(self, start_all_to_all(rows, back, self.interleaver))


class _AllToAllCombine:
    def __init__(self, dispatch: _AllToAll, pending: PendingAllToAll) -> None:
        self.dispatch = dispatch
        self.pending = pending

    def wait(self) -> Float[Tensor, "n h"]:
        """Weight the answers and add them up where their tokens are."""
        own = self.dispatch
        return own.owner.ops.unpermute(self.pending.wait(), own.order, own.weights)


# -- all-gather ------------------------------------------------------------------------------------


class AllGatherDispatcher:
    """Gathers all tokens, with their choices, on all ranks that hold a part of the experts."""

    def __init__(self, mesh: Mesh, num_experts: int, ops: RowOps) -> None:
        self.axis = mesh.axis("expert_tp_ep")
        self.local = num_experts // mesh.axis("ep").size
        self.first = self.local * mesh.axis("ep").index
        self.ops = ops

    def dispatch(
        self,
        tokens: Float[Tensor, "n h"],
        experts: Int[Tensor, "n k"],
        weights: Float[Tensor, "n k"],
        interleaver: PassInterleaver | None = None,
    ) -> "_AllGather":
        """Gathers tokens, choices and weights."""
        if interleaver is not None:
            raise LayoutError(
                "dispatcher 'allgather' communicates synchronously, so passes cannot be "
                "interleaved: use 'alltoall' or give no interleaver"
            )
        axis = self.axis
        sizes = gather_sizes(len(tokens), axis, tokens.device, purpose="token counts")
        gathered = gather_rows(tokens, sizes, axis, purpose=DISPATCH)
        chosen = gather_rows(experts.int(), sizes, axis, purpose="chosen experts").long()
        share = gather_rows(weights, sizes, axis, purpose="combine weights")
        here = torch.where(chosen >= 0, chosen - self.first, -1)
        return _AllGather(self, gathered, here, share, sizes)


class _AllGather:
    """One dispatch of `AllGatherDispatcher`."""

    def __init__(
        self,
        owner: AllGatherDispatcher,
        tokens: Tensor,
        experts: Tensor,
        weights: Tensor,
        sizes: tuple[int, ...],
    ) -> None:
        self.owner = owner
        self.tokens, self.experts, self.weights = tokens, experts, weights
        self.sizes = sizes
        self.order = experts.new_empty(0)

    def wait(self) -> tuple[Float[Tensor, "m h"], Int[Tensor, " e"]]:
        """Picks the choices of this rank's experts."""
        ops = self.owner.ops
        self.order, counts = ops.sort(self.experts, self.owner.local)
        return ops.permute(self.tokens, self.order, self.experts.shape[1]), counts

    def combine(self, rows: Float[Tensor, "m h"]) -> "_AllGatherCombine":
        """Weight the answers, and sum those of all ranks where their tokens are."""
        partial = self.owner.ops.unpermute(rows, self.order, self.weights)
        summed = scatter_rows(partial, self.sizes, self.owner.axis, purpose=COMBINE)
        return _AllGatherCombine(summed)


class _AllGatherCombine(NamedTuple):
    summed: Tensor

    def wait(self) -> Float[Tensor, "n h"]:
        """They are there already."""
        return self.summed


DISPATCHERS: Final[dict[str, Callable[[Mesh, int, RowOps], Dispatcher]]] = {
    "allgather": AllGatherDispatcher,
    "alltoall": AllToAllDispatcher,
}
"""By the name that Megatron-LM gives them."""


def _sums(counts: Tensor) -> tuple[int, ...]:
    return tuple(counts.sum(1).tolist())
