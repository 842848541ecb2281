"""Samples of supervised fine-tuning (SFT) on conversations."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_data.datasets.batches import Sample
from megatron_data.datasets.gpt import TokenSource
from megatron_data.datasets.masks import cumulative_lengths
from megatron_data.errors import DataError
from megatron_data.order.protocol import SampleOrder


class SFTDataset:
    """Samples of one or more conversations, which do not attend to each other.

    A sample is a dictionary of arrays:

    - `tokens`, `labels`: int64 `[s]`; label i is the token after token i.
    - `loss_mask`: float32 `[s]`: 1 where the label counts in the loss, otherwise 0.
    - `positions`: int32 `[s]`, from 0 in each conversation.
    - `document_ids`: int32 `[s]`: index of the conversation in the sample; -1 for padding.
    - `cu_seqlens`, `max_seqlen`: int32 `[s + 1]` and scalar; see `CumulativeLengths`.
    - `sample_ids`: int64 scalar: index of the sample.

    Padding is token 0.

    Args:
        source: Conversations; see `tokenize_conversations`.
        mask: Loss mask: 1 for each token that counts in the loss.
        order: Sample order of the conversations.

    Raises:
        DataError: The mask belongs to other conversations.
    """

    def __init__(self, source: TokenSource, mask: TokenSource, order: SampleOrder) -> None:
        if not np.array_equal(source.sequence_lengths, mask.sequence_lengths):
            raise DataError(
                "the loss mask does not belong to the conversations: their lengths differ; "
                "tokenize them again"
            )
        self.source = source
        self.mask = mask
        self.order = order

    def __len__(self) -> int:
        """Returns the number of samples."""
        return len(self.order)

    def __getitem__(self, sample: int) -> Sample:
        spans = self.order.spans(sample)
        parts = ((self.source.get(*span), self.mask.get(*span)) for span in spans)
        return make_sample(parts, self.order.sample_length - 1, sample)


def make_sample(
    parts: Iterable[tuple[NDArray[Any], NDArray[Any]]], length: int, number: int
) -> Sample:
    """Returns a sample of conversations; see `SFTDataset`.

    Args:
        parts: Tokens and loss mask of each conversation.
        length: Tokens of a sample. The conversations may have one more, for the last label.
        number: Index of the sample.
    """
    text, in_loss = np.zeros(length + 1, np.int64), np.zeros(length + 1, bool)
    document_ids, positions = np.full(length + 1, -1, np.int32), np.zeros(length + 1, np.int32)
    filled = 0
    for conversation, (part, mask) in enumerate(parts):
        indices = slice(filled, filled + len(part))
        text[indices] = part
        in_loss[indices] = mask
        document_ids[indices] = conversation
        positions[indices] = np.arange(len(part))
        filled += len(part)
    bounds = cumulative_lengths(document_ids[:-1])
    same_document = document_ids[1:] == document_ids[:-1]
    return {
        "tokens": text[:-1],
        "labels": text[1:].copy(),
        "loss_mask": (in_loss[1:] & same_document).astype(np.float32),
        "positions": positions[:-1],
        "document_ids": document_ids[:-1],
        "cu_seqlens": bounds.cu_seqlens,
        "max_seqlen": bounds.max_seqlen,
        "sample_ids": np.asarray(number, np.int64),
    }
