"""Positions, document ids and loss masks of samples."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class DocumentMasks(NamedTuple):
    """Positions, document ids and loss mask of samples.

    Attributes:
        positions: Position ids, int32 `[..., s]`.
        document_ids: Document ids, int32 `[..., s]`. Tokens attend only to tokens of the same id.
        loss_mask: 1 where the loss counts, otherwise 0, float32 `[..., s]`.
    """

    positions: NDArray[np.int32]
    document_ids: NDArray[np.int32]
    loss_mask: NDArray[np.float32]

    def copy(self) -> "DocumentMasks":
        """Returns a copy."""
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
    """Returns masks without resets and with loss everywhere."""
    positions = np.empty(shape, np.int32)
    positions[...] = np.arange(shape[-1], dtype=np.int32)
    return DocumentMasks(positions, np.zeros(shape, np.int32), np.ones(shape, np.float32))


class CumulativeLengths(NamedTuple):
    """Bounds of the documents of samples, for attention over packed sequences.

    Attributes:
        cu_seqlens: 0 and the end of each document, then `s` repeated up to the full length (empty
            documents), int32 `[..., s + 1]`.
        max_seqlen: Length of the longest document in tokens, int32 `[...]`.
    """

    cu_seqlens: NDArray[np.int32]
    max_seqlen: NDArray[np.int32]


def cumulative_lengths(document_ids: NDArray[np.int32]) -> CumulativeLengths:
    """Returns the bounds of documents. Padding at the end of a sample counts as a document.

    As in Megatron's datasets, the bounds have the same length for all samples, so that they stack.
    Remove repeated bounds before passing them to flash-attention's `varlen` functions or
    Transformer Engine, unless empty sequences are allowed there.

    Args:
        document_ids: Document ids of samples, int32 `[..., s]`; see `DocumentMasks`.
    """
    *batch, length = document_ids.shape
    bounds = np.full((*batch, length + 1), length, np.int32)
    bounds[..., 0] = 0
    samples = zip(bounds.reshape(-1, length + 1), document_ids.reshape(-1, length), strict=True)
    for row, ids in samples:
        ends = np.flatnonzero(ids[1:] != ids[:-1]) + 1
        row[1 : len(ends) + 1] = ends
    longest = np.diff(bounds, axis=-1).max(axis=-1)
    return CumulativeLengths(bounds, np.asarray(longest, np.int32))
