"""Tokens and labels of the depths of multi-token prediction."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor


class FutureTokens(NamedTuple):
    """What each depth of multi-token prediction reads and predicts, of a micro-batch.

    Depth ``k``, counted from 1, has the values ``k`` tokens later in the same document. Beyond the
    end of the document tokens, labels, positions and mask are 0, as in Megatron-LM.

    Attributes:
        tokens: Tokens that a depth embeds ``[b, s, depths]``.
        labels: Tokens that it predicts.
        loss_mask: Weights of its losses.
        positions: Positions of its tokens.
    """

    tokens: Int[Tensor, "b s depths"]
    labels: Int[Tensor, "b s depths"]
    loss_mask: Float[Tensor, "b s depths"]
    positions: Int[Tensor, "b s depths"]

    @property
    def depths(self) -> int:
        """Number of depths."""
        return self.tokens.shape[2]


def shift_within_documents(
    t: Shaped[Tensor, "b s"], depths: int, document_ids: Int[Tensor, "b s"] | None = None
) -> Shaped[Tensor, "b s depths"]:
    """Returns the values 1, 2, ... ``depths`` tokens later; 0 where the document has ended.

    Args:
        t: Values of whole sequences, in their order.
        depths: Largest shift.
        document_ids: Equal ids are one document. Defaults to one document for each row.
    """
    return torch.stack([_shift(t, k, document_ids) for k in range(1, depths + 1)], -1)


def _shift(t: Tensor, by: int, document_ids: Tensor | None) -> Tensor:
    found = torch.zeros_like(t)
    found[:, :-by] = t[:, by:]
    if document_ids is None:
        return found
    inside: Bool[Tensor, "b s"] = torch.zeros_like(t, dtype=torch.bool)
    inside[:, :-by] = document_ids[:, by:] == document_ids[:, :-by]
    return found.masked_fill_(~inside, 0)
