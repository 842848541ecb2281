"""Samples of left-to-right language modelling."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_data.datasets.batches import Sample, unstack
from megatron_data.datasets.masks import DocumentMasks, cumulative_lengths, document_masks, unmasked
from megatron_data.errors import DataError
from megatron_data.order.protocol import SampleOrder

# Fills samples up while masks are made: it is no vocabulary's, so no end of a document.
_NO_TOKEN = -1


class TokenSource(Protocol):
    """Where tokens come from: an `IndexedDataset`, or anything with these two."""

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """Tokens of every sequence, int32 `[S]`."""

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Tokens of a sequence, or `length` of them from `offset` on."""


@dataclass(frozen=True)
class GPTDatasetConfig:
    """How tokens become samples.

    Raises:
        DataError: An option that needs the end-of-document token without one, the same token as
            padding and as the end of a document, or a length below 1.
    """

    sequence_length: int = field(
        metadata={"help": "tokens in a sample", "flag": "--seq-length", "unit": "tokens"}
    )
    eod_id: int | None = field(default=None, metadata={"help": "token that ends a document"})
    pad_id: int | None = field(
        default=None,
        metadata={"help": "token that bears no loss as a label and is read as token 0; None: none"},
    )
    add_extra_token: bool = field(
        default=True,
        metadata={"help": "read one token more than the sequence length, for the last label"},
    )
    reset_position_ids: bool = field(
        default=False,
        metadata={"help": "restart positions after a document", "flag": "--reset-position-ids"},
    )
    reset_attention_mask: bool = field(
        default=False,
        metadata={"help": "attend within a document only", "flag": "--reset-attention-mask"},
    )
    eod_mask_loss: bool = field(
        default=False,
        metadata={
            "help": "no loss where the input is the end-of-document token",
            "flag": "--eod-mask-loss",
        },
    )
    cu_seqlens: bool = field(
        default=False,
        metadata={"help": "add where documents begin and end, for attention over packed sequences"},
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
                "cu_seqlens keeps attention within documents; ask for reset_attention_mask, too"
            )
        if self.pad_id is not None and self.pad_id == self.eod_id:
            raise DataError(
                f"token {self.pad_id} is both padding and the end of a document, so no loss would "
                "fall on document ends; leave pad_id None"
            )

    @property
    def extra(self) -> int:
        """1 with `add_extra_token`, else 0."""
        return int(self.add_extra_token)

    @property
    def resets(self) -> bool:
        """Whether masks or positions depend on where documents end."""
        return self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss


class GPTDataset:
    """Samples cut out of a token source along an order.

    A sample is a dictionary of arrays:

    - `tokens`, `labels`: int64 `[s]`; label i is the token after token i.
    - `loss_mask`: float32 `[s]`.
    - `positions`: int32 `[s]`.
    - `document_ids`: int32 `[s]`; -1 behind the end of a sample that is not full.
    - `sample_ids`: int64 scalar, the number asked for.
    - with `cu_seqlens`, `cu_seqlens`: int32 `[s + 1]`, and `max_seqlen`: int32 scalar; see
      `cumulative_lengths`.

    What fills a sample up is token 0 with loss mask 0. A token equal to `pad_id` inside the text
    is read as token 0 and bears no loss as a label, but stays in its document, as in megatron-core.

    Args:
        source: Tokens.
        order: Which tokens make up which sample.
        config: How they become a sample.
        infill: What takes the documents of a sample apart, given its tokens, its number
            and the tokens there is room for; see `FillInTheMiddle`. The rest is padding.

    Raises:
        DataError: An order built for another sequence length.
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
                f"the order was built for samples of {order.sample_length} tokens, the "
                f"configuration asks for {config.sequence_length} + {config.extra}"
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
        """Several samples at once: the same arrays with a leading axis, `[b, s]` and `[b]`."""
        config = self.config
        text, filled = self._text(samples)
        tokens = np.ascontiguousarray(text[:, : config.sequence_length])
        labels = text[:, 1:].copy() if config.add_extra_token else _shifted(tokens)
        masks = self._masks(tokens)
        if filled.min() <= config.sequence_length:  # the last token has no label, at least
            places = np.arange(config.sequence_length)
            is_padding = places >= filled[:, None]
            tokens[is_padding] = 0
            masks.document_ids[is_padding] = -1
            is_padding = places + 1 >= filled[:, None]
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
        """Several samples; torch's `DataLoader` asks so. They are views of one batch."""
        return unstack(self.batch(samples))

    def _text(self, samples: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens of samples, int64 `[b, s + extra]`, and how many of each are text, int64 `[b]`."""
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
                changed = self.infill(row[:filled], sample, len(row))
                filled = len(changed)
                row[:filled] = changed
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
        if len(tokens) == 1:  # copied, they are made in a fifth of the time
            return self._unmasked.copy()
        return unmasked(tokens.shape)


def _shifted(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Labels of samples that end with their last token: the last one has none."""
    labels = np.full_like(tokens, _NO_TOKEN)
    labels[:, :-1] = tokens[:, 1:]
    return labels
