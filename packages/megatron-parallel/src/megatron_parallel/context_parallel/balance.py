"""How evenly a split shares out the work of attention, counted in pairs of query and key."""

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from megatron_parallel.context_parallel.split import ContextSplit


def attention_pairs(
    split: ContextSplit, document_ids: Int[Tensor, "b s"] | None = None
) -> Float64[Tensor, " ranks"]:
    """Pairs that the queries of every rank make with keys, under a causal mask.

    Args:
        split: How the sequences are shared out.
        document_ids: Documents that do not see each other; -1 is padding. One document if absent.
    """
    if document_ids is None:
        document_ids = torch.zeros(1, split.length, dtype=torch.int32)
    indices = torch.arange(split.length).expand_as(document_ids)
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    keys = indices - torch.where(begins, indices, 0).cummax(1).values + 1
    keys = torch.where(document_ids < 0, 0, keys).double()
    return torch.stack([split.take(keys, rank).sum() for rank in range(split.ranks)])


def imbalance(work: Float64[Tensor, " ranks"]) -> float:
    """Work of the busiest rank over that of the average one; the others wait for it."""
    return float(work.max() / work.mean())
