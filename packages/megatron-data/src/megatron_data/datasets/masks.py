"""Positions, document numbers and loss mask of samples."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class DocumentMasks(NamedTuple):
    """Plain data from which every attention mask follows.

    Attributes:
        positions: int32 `[..., s]`.
        document_ids: int32 `[..., s]`; a token attends within its own number only.
        loss_mask: float32 `[..., s]`; 1 where the loss counts.
    """

    positions: NDArray[np.int32]
    document_ids: NDArray[np.int32]
    loss_mask: NDArray[np.float32]

    def copy(self) -> "DocumentMasks":
        """The same in other memory."""
        return DocumentMasks(self.positions.copy(), self.document_ids.copy(), self.loss_mask.copy())


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
        tokens: input tokens of a sample `[s]`, or of several `[..., s]`.
        eod_id: end of a document; may be None when nothing is reset.
    """
    masks = unmasked(tokens.shape)
    if not (reset_position_ids or reset_attention_mask or eod_mask_loss):
        return masks
    is_end = tokens == eod_id
    if eod_mask_loss:
        masks.loss_mask[is_end] = 0
    if reset_attention_mask:
        ids = masks.document_ids[..., 1:]
        np.cumsum(is_end[..., :-1], axis=-1, dtype=np.int32, out=ids)
    if reset_position_ids:
        begins = np.zeros(tokens.shape, np.int32)
        np.multiply(is_end[..., :-1], masks.positions[..., 1:], out=begins[..., 1:])
        np.maximum.accumulate(begins, axis=-1, out=begins)
        np.subtract(masks.positions, begins, out=masks.positions)
    return masks


def unmasked(shape: tuple[int, ...]) -> DocumentMasks:
    """Masks of samples in which nothing is reset or masked."""
    positions = np.empty(shape, np.int32)
    positions[...] = np.arange(shape[-1], dtype=np.int32)
    return DocumentMasks(positions, np.zeros(shape, np.int32), np.ones(shape, np.float32))
