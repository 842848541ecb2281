"""Slots for the rows of experts: room for a number of rows that the host knows without reading.

With slots, a rank sends the same number of rows to every rank, most of them real. A slot without a
row has a copy of some row. Nothing reads its results, and its gradient is zero.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from megatron_parallel.mesh.mesh import Mesh


class Slots(NamedTuple):
    """Where the rows of one rank are in its slots.

    Attributes:
        source: `[ranks * size]`, for each slot the index of its row among the sorted rows.
        used: `[ranks * size]`, whether the slot has a row. Otherwise it has a copy of another one.
        place: `[m]`, for each sorted row the index of its slot.
        sent: `[m]`, whether the row has a slot.
        counts: `[ranks, e]`, rows in slots by rank and expert.
    """

    source: Int[Tensor, " slots"]
    used: Bool[Tensor, " slots"]
    place: Int[Tensor, " m"]
    sent: Bool[Tensor, " m"]
    counts: Int[Tensor, "ranks e"]


def assign_slots(counts: Int[Tensor, "ranks e"], rows: int, size: int) -> Slots:
    """Returns slots for rows that are sorted by rank and expert.

    Args:
        counts: Rows by rank and expert.
        rows: Number of sorted rows, at least one; those after the last expert get no slot.
        size: Slots for each rank. The first rows of a rank get them.
    """
    totals = counts.sum(1)
    ends = totals.cumsum(0)
    begins = ends - totals
    slots = torch.arange(len(counts) * size, device=counts.device)
    rank, index = slots // size, slots % size
    # Empty slots have different rows, since the gradients of one row would be summed one by one.
    used = index < totals.index_select(0, rank)
    source = torch.where(used, begins.index_select(0, rank) + index, slots % rows)
    indices = torch.arange(rows, device=counts.device)
    owner = torch.searchsorted(ends, indices, right=True)  # len(counts) after the last expert
    index = indices - begins.index_select(0, owner.clamp(max=len(counts) - 1))
    sent = (owner < len(counts)) & (index < size)
    place = torch.where(sent, owner * size + index, indices % len(slots))
    return Slots(source, used, place, sent, clipped(counts, size))


def clipped(counts: Int[Tensor, "ranks e"], size: int) -> Int[Tensor, "ranks e"]:
    """Returns the rows of each expert among the first ``size`` rows of each rank."""
    ends = counts.cumsum(1).clamp(max=size)
    return ends.diff(dim=1, prepend=ends.new_zeros(len(ends), 1))


def order_by_expert(counts: Int[Tensor, "sources e"], size: int) -> Int[Tensor, " slots"]:
    """Returns the order that sorts the slots of all sources by expert; empty slots come last.

    Args:
        counts: Rows by source and expert; the rows of a source are sorted by expert.
        size: Slots of each source.
    """
    indices = torch.arange(size, device=counts.device).expand(len(counts), size)
    experts = torch.searchsorted(counts.cumsum(1), indices.contiguous(), right=True)
    return torch.argsort(experts.flatten(), stable=True)


def refused(
    weights: Float[Tensor, "n k"], overflow: Int[Tensor, ""] | None
) -> Float[Tensor, "n k"]:
    """Returns ``weights``, or NaN if choices were lost."""
    return weights if overflow is None else weights.masked_fill(overflow > 0, torch.nan)


def micro_batches_of_experts(mesh: Mesh) -> int:
    """Returns the number of micro-batches that have tokens on the ranks that share experts."""
    first, layout = mesh.axis("world").ranks[0], mesh.layout
    ranks = mesh.axis("expert_tp_ep").ranks
    return len({layout.group_of("tp_cp", rank - first) for rank in ranks})
