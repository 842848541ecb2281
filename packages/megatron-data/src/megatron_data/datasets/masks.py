"""Positions, document numbers and loss mask of one sample."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class DocumentMasks(NamedTuple):
    """Plain data from which every attention mask follows.

    Attributes:
        positions: int32 `[s]`.
        document_ids: int32 `[s]`; a token attends within its own number only.
        loss_mask: float32 `[s]`; 1 where the loss counts.
    """

    positions: NDArray[np.int32]
    document_ids: NDArray[np.int32]
    loss_mask: NDArray[np.float32]


def document_masks(
    tokens: NDArray[np.integer],
    eod_id: int | None,
    *,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
) -> DocumentMasks:
    """Masks of left-to-right training, as Megatron's flags of the same names ask for.

    The end-of-document token belongs to the document it ends. Without `reset_attention_mask` the
    whole sample is document 0, without `reset_position_ids` positions run through, without
    `eod_mask_loss` the loss counts everywhere.

    Args:
        tokens: input tokens `[s]`.
        eod_id: end of a document; may be None when nothing is reset.
    """
    length = len(tokens)
    positions = np.arange(length, dtype=np.int32)
    document_ids = np.zeros(length, np.int32)
    loss_mask = np.ones(length, np.float32)
    if reset_position_ids or reset_attention_mask or eod_mask_loss:
        is_end = tokens == eod_id
        if eod_mask_loss:
            loss_mask[is_end] = 0
        if reset_attention_mask:
            np.cumsum(is_end[:-1], dtype=np.int32, out=document_ids[1:])
        if reset_position_ids:
            begins = np.zeros(length, np.int32)
            begins[1:][is_end[:-1]] = positions[1:][is_end[:-1]]
            positions -= np.maximum.accumulate(begins)
    return DocumentMasks(positions, document_ids, loss_mask)
