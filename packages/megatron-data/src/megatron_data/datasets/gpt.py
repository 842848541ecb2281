"""Samples of causal language modelling."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_data.datasets.batches import Sample, unstack
from megatron_data.datasets.masks import DocumentMasks, cumulative_lengths, document_masks, unmasked
from megatron_data.errors import DataError
from megatron_data.order.protocol import SampleOrder

# Temporary padding while masks are computed. It is in no vocabulary, so it ends no document.
_NO_TOKEN = -1


class TokenSource(Protocol):
    """A source of token sequences, such as an `IndexedDataset`."""

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """Length of every sequence in tokens, int32 `[S]`."""

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Returns the tokens of a sequence, or `length` of them from `offset` on."""


@dataclass(frozen=True)
class GPTDatasetConfig:
    """Configuration of GPT samples.

    Raises:
        DataError: An option needs `eod_id`, which is None, `pad_id` equals `eod_id`, or
            `sequence_length` is below 1.
    """

    sequence_length: int = field(
        metadata={"help": "tokens in a sample", "flag": "--seq-length", "unit": "tokens"}
    )
    eod_id: int | None = field(default=None, metadata={"help": "end-of-document token"})
    pad_id: int | None = field(
        default=None,
        metadata={
            "help": "token that is excluded from the loss as a label and read as token 0; "
            "None: no such token"
        },
    )
    add_extra_token: bool = field(
        default=True,
        metadata={"help": "read one token beyond the sequence length, for the last label"},
    )
    reset_position_ids: bool = field(
        default=False,
        metadata={
            "help": "restart positions after each document",
            "flag": "--reset-position-ids",
        },
    )
    reset_attention_mask: bool = field(
        default=False,
        metadata={"help": "attend within a document only", "flag": "--reset-attention-mask"},
    )
    eod_mask_loss: bool = field(
        default=False,
        metadata={
            "help": "exclude positions whose input is the end-of-document token from the loss",
            "flag": "--eod-mask-loss",
        },
    )
    cu_seqlens: bool = field(
        default=False,
        metadata={"help": "add the bounds of documents, for attention over packed sequences"},
    )

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise DataError(f"sequence length {self.sequence_length}; give at least 1")
        if self.resets and self.eod_id is None:
            raise DataError(
                "resetting positions or attention, or masking the loss, at document ends needs "
                "eod_id, the end-of-document token"
            )
        if self.cu_seqlens and not self.reset_attention_mask:
            raise DataError(
                "cu_seqlens restricts attention to documents; set reset_attention_mask, too"
            )
        if self.pad_id is not None and self.pad_id == self.eod_id:
            raise DataError(
                f"token {self.pad_id} is both pad_id and eod_id, so that document ends would not "
                "count in the loss; leave pad_id None"
            )

    @property
    def extra(self) -> int:
        """Tokens that a sample reads beyond `sequence_length`: 1 with `add_extra_token`, else 0."""
        return int(self.add_extra_token)

    @property
    def resets(self) -> bool:
        """Whether masks or positions depend on document ends."""
        return self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss


class GPTDataset:
    """Samples of a token source in a sample order.

    A sample is a dictionary of arrays:

    - `tokens`, `labels`: int64 `[s]`; label i is the token after token i.
    - `loss_mask`: float32 `[s]`; 1 where the loss counts, otherwise 0.
    - `positions`: int32 `[s]`.
    - `document_ids`: int32 `[s]`; -1 for padding.
    - `sample_ids`: int64 scalar; index of the sample.
    - With `cu_seqlens`, `cu_seqlens`: int32 `[s + 1]`, and `max_seqlen`: int32 scalar; see
      `cumulative_lengths`.

    Padding is token 0 with loss mask 0. A token equal to `pad_id` inside the text is read as token
    0 and excluded from the loss as a label, but stays in its document, as in megatron-core.

    Args:
        source: Token source.
        order: Sample order.
        config: Configuration of the samples.
        infill: Function that rearranges the documents of a sample, called with its tokens, its
            index and the tokens of a full sample; see `FillInTheMiddle`. Defaults to None.

    Raises:
        DataError: The order was built for another sequence length.
    """

    def __init__(
        self,
        source: TokenSource,
        order: SampleOrder,
        config: GPTDatasetConfig,
        infill: Callable[[NDArray[np.int64], int, int], NDArray[np.int64]] | None = None,
    ) -> None:
        if order.sample_length != config.sequence_length + config.extra:
            raise DataError(
                f"the order was built for samples of {order.sample_length} tokens, but the "
                f"configuration has {config.sequence_length} + {config.extra}"
            )
        self.source = source
        self.order = order
        self.config = config
        self.infill = infill
        self._unmasked = unmasked((1, config.sequence_length))

    def __len__(self) -> int:
        """Returns the number of samples."""
        return len(self.order)

    def __getitem__(self, sample: int) -> Sample:
        return {name: array[0, ...] for name, array in self.batch([sample]).items()}

    def batch(self, samples: Sequence[int]) -> Sample:
        """Reads several samples at once. Arrays have a leading dim: `[b, s]` and `[b]`."""
        config = self.config
        text, filled = self._text(samples)
        tokens = np.ascontiguousarray(text[:, : config.sequence_length])
        labels = text[:, 1:].copy() if config.add_extra_token else _shifted(tokens)
        masks = self._masks(tokens)
        if filled.min() <= config.sequence_length:  # at least one token has no label
            indices = np.arange(config.sequence_length)
            is_padding = indices >= filled[:, None]
            tokens[is_padding] = 0
            masks.document_ids[is_padding] = -1
            is_padding = indices + 1 >= filled[:, None]
            labels[is_padding] = 0
            masks.loss_mask[is_padding] = 0
        if config.pad_id is not None:
            tokens[tokens == config.pad_id] = 0
            is_padding = labels == config.pad_id
            labels[is_padding] = 0
            masks.loss_mask[is_padding] = 0
        batch: Sample = {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": masks.loss_mask,
            "positions": masks.positions,
            "document_ids": masks.document_ids,
            "sample_ids": np.array(samples, np.int64),
        }
        if config.cu_seqlens:
            batch |= cumulative_lengths(masks.document_ids)._asdict()
        return batch

    def __getitems__(self, samples: Sequence[int]) -> list[Sample]:
        """Returns several samples for torch's `DataLoader`, as views of one batch."""
        return unstack(self.batch(samples))

    def _text(self, samples: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns tokens, int64 `[b, s + extra]`, and the number that is text, int64 `[b]`."""
        text = np.empty((len(samples), self.order.sample_length), np.int64)
        lengths = np.empty(len(samples), np.int64)
        for number, (row, sample) in enumerate(zip(text, samples, strict=True)):
            filled = 0
            for sequence, offset, length in self.order.spans(sample):
                part = self.source.get(sequence, offset, length)
                end = filled + len(part)
                row[filled:end] = part
                filled = end
            if self.infill is not None:
                infilled = self.infill(row[:filled], sample, len(row))
                filled = len(infilled)
                row[:filled] = infilled
            row[filled:] = _NO_TOKEN
            lengths[number] = filled
        return text, lengths

    def _masks(self, tokens: NDArray[np.int64]) -> DocumentMasks:
        config = self.config
        if config.resets:
            return document_masks(
                tokens,
                config.eod_id,
                reset_position_ids=config.reset_position_ids,
                reset_attention_mask=config.reset_attention_mask,
                eod_mask_loss=config.eod_mask_loss,
            )
        if len(tokens) == 1:  # copying takes a fifth of the time
            return self._unmasked.copy()
        return unmasked(tokens.shape)


def _shifted(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the labels of samples without an extra token. The last token has no label."""
    labels = np.full_like(tokens, _NO_TOKEN)
    labels[:, :-1] = tokens[:, 1:]
    return labels
