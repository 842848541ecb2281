"""Positions, document numbers and loss mask of samples."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class DocumentMasks(NamedTuple):
    """Plain data from which every attention mask follows.

    Attributes:
        positions: Int32 `[..., s]`.
        document_ids: Int32 `[..., s]`; a token attends within its own number only.
        loss_mask: Float32 `[..., s]`; 1 where the loss counts.
    """

    positions: NDArray[np.int32]
    document_ids: NDArray[np.int32]
    loss_mask: NDArray[np.float32]

    def copy(self) -> "DocumentMasks":
        """Returns the same in other memory."""
        return DocumentMasks(self.positions.copy(), self.document_ids.copy(), self.loss_mask.copy())


def document_masks(
    tokens: NDArray[np.integer],
    eod_id: int | None,
    *,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
) -> DocumentMasks:
    """Returns the masks of left-to-right training, as for Megatron's flags of the same names.

    The end-of-document token belongs to the document it ends.

    Args:
        tokens: Input tokens of one sample `[s]`, or of several `[..., s]`.
        eod_id: The end-of-document token. May be None if none of the options below is set.
        reset_position_ids: Positions restart at 0 in each document. Otherwise they run through.
        reset_attention_mask: Each document gets an id of its own. Otherwise all ids are 0.
        eod_mask_loss: The loss skips end-of-document tokens. Otherwise it counts every token.
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


class CumulativeLengths(NamedTuple):
    """Where the documents of samples begin and end, as attention over packed sequences takes it.

    Attributes:
        cu_seqlens: Int32 `[..., s + 1]`; 0, the end of every document, and then `s` again and
            again, which are documents without a token.
        max_seqlen: Int32 `[...]`, tokens of the longest document.
    """

    cu_seqlens: NDArray[np.int32]
    max_seqlen: NDArray[np.int32]


def cumulative_lengths(document_ids: NDArray[np.int32]) -> CumulativeLengths:
    """Returns the bounds of documents. Padding at the end of a sample counts as one.

    As Megatron's datasets return them, of one length for all samples, so that they stack; drop
    what repeats before flash-attention's `varlen` functions or Transformer Engine get them, or
    leave it, where empty sequences are allowed.

    Args:
        document_ids: Of samples, `[s]` or `[..., s]`; see `DocumentMasks`.
    """
    *batch, length = document_ids.shape
    bounds = np.full((*batch, length + 1), length, np.int32)
    bounds[..., 0] = 0
    samples = zip(bounds.reshape(-1, length + 1), document_ids.reshape(-1, length), strict=True)
    for own, ids in samples:
        ends = np.flatnonzero(ids[1:] != ids[:-1]) + 1
        own[1 : len(ends) + 1] = ends
    longest = np.diff(bounds, axis=-1).max(axis=-1)
    return CumulativeLengths(bounds, np.asarray(longest, np.int32))
