"""The dispatcher that sends all tokens to all ranks that hold experts."""

from math import ceil
from typing import Final, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from megatron_parallel.collectives.operations import all_gather
from megatron_parallel.errors import LayoutError
from megatron_parallel.expert_parallel.gather import gather_rows, scatter_rows
from megatron_parallel.expert_parallel.protocol import (
    COMBINE,
    DISPATCH,
    ExpertRows,
    RowLimits,
    RowOps,
)
from megatron_parallel.expert_parallel.slots import clipped, micro_batches_of_experts, refused
from megatron_parallel.mesh.mesh import Mesh
from megatron_parallel.pipeline.pass_interleaving import PassInterleaver

NO_LIMITS: Final = RowLimits()


class AllGatherDispatcher:
    """Gathers all tokens and their chosen experts on all ranks that hold experts.

    The ranks of `expert_tp_ep` must have equal numbers of tokens.
    """

    def __init__(
        self, mesh: Mesh, num_experts: int, ops: RowOps, rank_capacity_factor: float | None = None
    ) -> None:
        self.axis, self.ep = mesh.axis("expert_tp_ep"), mesh.axis("ep")
        self.local = num_experts // self.ep.size
        self.first = self.local * self.ep.index
        self.micro_batches = micro_batches_of_experts(mesh)
        self.ops = ops
        self.factor = rank_capacity_factor

    def route(self, experts: Int[Tensor, "n k"], limits: RowLimits = NO_LIMITS) -> "_Route":
        """Gathers the chosen experts, and sorts those of this rank."""
        chosen = all_gather(experts.int(), self.axis, purpose="chosen experts")
        local = torch.where(chosen >= 0, chosen - self.first, -1)
        order, counts = self.ops.sort(local, self.local)
        tokens, choices = chosen.shape
        bound = self.bound(tokens, choices, limits)
        overflow = None
        if self.factor is not None:
            kept = clipped(counts[None], bound)[0]
            overflow, counts = (counts - kept).sum(), kept
        has_tail = self.ep.size > 1 or not limits.all_routed
        sizes = (len(experts),) * self.axis.size
        return _Route(self, sizes, order[:bound], counts, has_tail, overflow)

    def bound(self, tokens: int, choices: int, limits: RowLimits) -> int:
        """Returns the largest number of rows of this rank's experts.

        Args:
            tokens: Tokens of all ranks.
            choices: Experts of each token.
            limits: What the caller knows.
        """
        bound = tokens * min(choices, self.local)
        if limits.per_expert is not None:
            bound = min(bound, self.local * limits.per_expert * self.micro_batches)
        if self.factor is not None:
            bound = min(bound, ceil(tokens * choices * self.factor / self.ep.size))
        return bound


class _Route(NamedTuple):
    """One route of `AllGatherDispatcher`."""

    owner: AllGatherDispatcher
    sizes: tuple[int, ...]
    order: Tensor
    counts: Tensor
    has_tail: bool
    overflow: Tensor | None
    changes: bool = False

    def dispatch(
        self,
        tokens: Float[Tensor, "n h"],
        weights: Float[Tensor, "n k"],
        interleaver: PassInterleaver | None = None,
    ) -> "_AllGather":
        """Gathers tokens and weights."""
        if interleaver is not None:
            raise LayoutError(
                "dispatcher 'allgather' communicates synchronously, so passes cannot be "
                "interleaved: use 'alltoall' or give no interleaver"
            )
        axis = self.owner.axis
        gathered = gather_rows(tokens, self.sizes, axis, purpose=DISPATCH)
        share = gather_rows(weights, self.sizes, axis, purpose="combine weights")
        return _AllGather(self, gathered, refused(share, self.overflow))


class _AllGather:
    """One dispatch of `AllGatherDispatcher`."""

    def __init__(self, route: _Route, tokens: Tensor, weights: Tensor) -> None:
        self.route = route
        self.tokens, self.weights = tokens, weights

    def wait(self) -> ExpertRows:
        """Selects the rows of this rank's experts."""
        route = self.route
        rows = route.owner.ops.permute(self.tokens, route.order, self.weights.shape[1])
        return ExpertRows(rows, route.counts, route.has_tail)

    def combine(self, rows: Float[Tensor, "m h"]) -> "_Combine":
        """Returns the weighted sums of all ranks, each on the rank of its token."""
        route = self.route
        partial = route.owner.ops.unpermute(rows, route.order, self.weights)
        summed = scatter_rows(partial, route.sizes, route.owner.axis, purpose=COMBINE)
        return _Combine(summed)


class _Combine(NamedTuple):
    summed: Tensor

    def wait(self) -> Float[Tensor, "n h"]:
        """Returns the sums, which are complete already."""
        return self.summed
