"""Token dispatch: sends tokens to the ranks of their experts, and the results back.

    dispatch = dispatcher.dispatch(tokens, experts, weights)  # starts to send
    rows, counts = dispatch.wait()                            # [m, h], sorted by local expert
    combine = dispatch.combine(experts_of_this_rank(rows, counts))
    y = combine.wait()                                        # [n, h], summed over experts

Each rank has tokens of its own. The experts are distributed over two axes: each rank of `ep` has
some of the experts, and `expert_tp` cuts the matrices of each expert, so that a rank computes
partial sums. Results and gradients are neither scaled nor averaged.

Between `dispatch` and its `wait`, and between `combine` and its `wait`, the messages of `alltoall`
are in flight, in the backward pass too. Other work can overlap them: a shared expert, or another
micro-batch with a `PassInterleaver`.

| dispatcher | over `ep` | over `expert_tp` | suited to |
|---|---|---|---|
| `alltoall` | sends one row per choice to its rank | gathers these rows | many experts |
| `allgather` | sends all tokens to all ranks | the same | tokens that most ranks need |
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
"""Purposes of the messages in `Traffic`, in both passes."""


class RowOps(NamedTuple):
    """Operations on rows that a dispatcher uses, such as those of megatron-kernels.

    Attributes:
        sort: `sort(experts [n, k], num_experts) -> (order [m], counts [e])`. Indices that are not
            those of experts have no row.
        permute: `permute(tokens [n, h], order, k) -> rows [m, h]`.
        unpermute: `unpermute(rows [m, h], order, weights [n, k]) -> tokens [n, h]`.
    """

    sort: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    permute: Callable[[Tensor, Tensor, int], Tensor]
    unpermute: Callable[[Tensor, Tensor, Tensor], Tensor]


@runtime_checkable
class Combine(Protocol):
    """Outputs of the experts in flight to the ranks of their tokens."""

    def wait(self) -> Float[Tensor, "n h"]:
        """Returns the weighted sum of the expert outputs of each token; zero without experts."""


@runtime_checkable
class Dispatch(Protocol):
    """Tokens in flight to the ranks of their experts."""

    def wait(self) -> tuple[Float[Tensor, "m h"], Int[Tensor, " e"]]:
        """Returns this rank's rows, sorted by local expert, and the number for each expert."""

    def combine(self, rows: Float[Tensor, "m h"]) -> Combine:
        """Starts to send the outputs back. `rows` are partial sums over `expert_tp`."""


@runtime_checkable
class Dispatcher(Protocol):
    """Sends tokens to the ranks of their experts."""

    def dispatch(
        self,
        tokens: Float[Tensor, "n h"],
        experts: Int[Tensor, "n k"],
        weights: Float[Tensor, "n k"],
        interleaver: PassInterleaver | None = None,
    ) -> Dispatch:
        """Starts to send tokens.

        Args:
            tokens: Tokens of this rank. Their number may differ between ranks.
            experts: Indices of the chosen experts of each token; -1 for none (padding).
            weights: Weights of the chosen experts, in float32 or wider.
            interleaver: Lets another micro-batch compute while this one waits, in forward and
                backward pass.

        Raises:
            LayoutError: An `interleaver` was given to a dispatcher that communicates synchronously.
        """


def build_dispatcher(name: str, mesh: Mesh, num_experts: int, ops: RowOps) -> Dispatcher:
    """Returns a dispatcher for the experts of one layer.

    Args:
        name: Name of the dispatcher, one of `DISPATCHERS`.
        mesh: Mesh of this rank.
        num_experts: Number of experts of the layer.
        ops: Operations on rows.

    Raises:
        LayoutError: No dispatcher has that name, or the size of axis `ep` does not divide the
            number of experts.
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
    """Sends one row per chosen expert to the rank that holds the expert."""

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
        """Sorts the rows by expert, exchanges their counts, and starts to send them."""
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
        """Receives the rows, gathers those of other ranks of `expert_tp`, and sorts by expert."""
        rows, axis = self.pending.wait(), self.owner.expert_tp
        counts = self.counts
        if axis.size > 1:
            counts = all_gather(counts, axis, purpose="expert counts")
            self.sizes = _sums(counts.view(axis.size, -1))
            rows = gather_rows(rows, self.sizes, axis, purpose=DISPATCH)
        if len(counts) > 1:  # rows are sorted by source, and by expert only within a source
            local = torch.arange(counts.shape[1], device=counts.device).repeat(len(counts))
            self.by_expert = torch.argsort(local.repeat_interleave(counts.flatten()), stable=True)
            rows = rows.index_select(0, self.by_expert)
        return rows, counts.sum(0)

    def combine(self, rows: Float[Tensor, "m h"]) -> "_AllToAllCombine":
        """Restores the received order, sums over `expert_tp`, and starts to send the rows back."""
        if self.by_expert is not None:
            rows = rows.index_select(0, torch.argsort(self.by_expert))
        rows = scatter_rows(rows, self.sizes, self.owner.expert_tp, purpose=COMBINE)
        transposed = RowSplits(
            self.splits.axis, self.splits.output_splits, self.splits.input_splits, COMBINE
        )
        return _AllToAllCombine(self, start_all_to_all(rows, transposed, self.interleaver))


class _AllToAllCombine:
    def __init__(self, dispatch: _AllToAll, pending: PendingAllToAll) -> None:
        self.dispatch = dispatch
        self.pending = pending

    def wait(self) -> Float[Tensor, "n h"]:
        """Returns the weighted sums of the received rows by token."""
        own = self.dispatch
        return own.owner.ops.unpermute(self.pending.wait(), own.order, own.weights)


# -- all-gather ------------------------------------------------------------------------------------


class AllGatherDispatcher:
    """Gathers all tokens and their chosen experts on all ranks that hold experts."""

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
        """Gathers tokens, chosen experts and weights."""
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
        local = torch.where(chosen >= 0, chosen - self.first, -1)
        return _AllGather(self, gathered, local, share, sizes)


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
        """Selects the rows of this rank's experts."""
        ops = self.owner.ops
        self.order, counts = ops.sort(self.experts, self.owner.local)
        return ops.permute(self.tokens, self.order, self.experts.shape[1]), counts

    def combine(self, rows: Float[Tensor, "m h"]) -> "_AllGatherCombine":
        """Returns the weighted sums of all ranks, each on the rank of its token."""
        partial = self.owner.ops.unpermute(rows, self.order, self.weights)
        summed = scatter_rows(partial, self.sizes, self.owner.axis, purpose=COMBINE)
        return _AllGatherCombine(summed)


class _AllGatherCombine(NamedTuple):
    summed: Tensor

    def wait(self) -> Float[Tensor, "n h"]:
        """Returns the sums, which are complete already."""
        return self.summed


DISPATCHERS: Final[dict[str, Callable[[Mesh, int, RowOps], Dispatcher]]] = {
    "allgather": AllGatherDispatcher,
    "alltoall": AllToAllDispatcher,
}
"""Dispatchers by their names in Megatron-LM."""


def _sums(counts: Tensor) -> tuple[int, ...]:
    return tuple(counts.sum(1).tolist())
