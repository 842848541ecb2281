"""Load balance of attention over context-parallel ranks, in pairs of query and key."""

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from megatron_parallel.context_parallel.split import ContextSplit


def attention_pairs(
    split: ContextSplit, document_ids: Int[Tensor, "b s"] | None = None
) -> Float64[Tensor, " ranks"]:
    """Returns the number of pairs of query and key of each rank, under a causal mask.

    Args:
        split: Split of the sequences over the ranks.
        document_ids: Documents that do not attend to each other; -1 is padding. Defaults to one
            document.
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
    """Returns the largest work of a rank divided by the average."""
    return float(work.max() / work.mean())
