"""Tokens and labels of the depths of multi-token prediction."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
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
        document_ids: Neighbours with equal ids are one document. Defaults to one document for each
            row.
    """
    number = torch.ones_like(t, dtype=torch.int64)  # of the document in its row
    if document_ids is not None:
        number[:, 1:] += (document_ids[:, 1:] != document_ids[:, :-1]).cumsum(1)
    found = t.new_zeros(*t.shape, depths)
    for by in range(1, min(depths, t.shape[1] - 1) + 1):
        inside = number[:, by:] == number[:, :-by]
        found[:, :-by, by - 1] = t[:, by:].masked_fill(~inside, 0)
    return found
