"""Samples of fine-tuning on conversations."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ..errors import DataError
from ..indexed.reader import IndexedDataset
from ..order.rows import RowOrder
from ..order.spans import SampleOrder
from ..preprocessing.manifest import LOSS, check_mask
from ..sources.block_cache import StorageCache
from .batches import Dataset, Sample
from .build import DataPath, Datasets, build_splits
from .builders import (
    GPTBuilder,
    GreedyBuilder,
    OrderName,
    PackedBuilder,
    StatelessBuilder,
    Wanted,
)
from .gpt import GPTDatasetConfig, TokenSource
from .masks import cumulative_lengths
from .split import DEFAULT_SPLIT, sequences_of

_Builders: TypeAlias = "dict[OrderName, type[_SFTBuilder]]"


class SFTDataset:
    """Samples of whole conversations, next to one another, that do not see each other.

    A sample is a dictionary of arrays:

    - `tokens`, `labels`: int64 `[s]`; label i is the token after token i.
    - `loss_mask`: float32 `[s]`: 1 where the label is what an assistant says.
    - `positions`: int32 `[s]`, from 0 in every conversation.
    - `document_ids`: int32 `[s]`: a number for each conversation; -1 is padding.
    - `cu_seqlens`, `max_seqlen`: int32 `[s + 1]` and scalar; see `CumulativeLengths`.
    - `sample_ids`: int64 scalar, the number asked for.

    Padding is token 0.

    Args:
        source: conversations; see `tokenize_conversations`.
        mask: 1 for every token that the loss counts.
        order: which stretches of conversations make up which sample.

    Raises:
        DataError: a mask of other conversations.
    """

    def __init__(self, source: TokenSource, mask: TokenSource, order: SampleOrder) -> None:
        if not np.array_equal(source.sequence_lengths, mask.sequence_lengths):
            raise DataError(
                "the mask does not belong to the conversations: their lengths differ; tokenize "
                "them again"
            )
        self.source = source
        self.mask = mask
        self.order = order

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.order)

    def __getitem__(self, sample: int) -> Sample:
        length = self.order.sample_length - 1
        text, counted = np.zeros(length + 1, np.int64), np.zeros(length + 1, bool)
        numbers, positions = np.full(length + 1, -1, np.int32), np.zeros(length + 1, np.int32)
        filled = 0
        for number, span in enumerate(self.order.spans(sample)):
            part = self.source.get(span.sequence, span.offset, span.length)
            place = slice(filled, filled + len(part))
            text[place] = part
            counted[place] = self.mask.get(span.sequence, span.offset, span.length)
            numbers[place] = number
            positions[place] = np.arange(len(part))
            filled += len(part)
        bounds = cumulative_lengths(numbers[:-1])
        same = numbers[1:] == numbers[:-1]
        return {
            "tokens": text[:-1],
            "labels": text[1:].copy(),
            "loss_mask": (counted[1:] & same).astype(np.float32),
            "positions": positions[:-1],
            "document_ids": numbers[:-1],
            "cu_seqlens": bounds.cu_seqlens,
            "max_seqlen": bounds.max_seqlen,
            "sample_ids": np.asarray(sample, np.int64),
        }


@dataclass(kw_only=True)
class _SFTBuilder(GPTBuilder):
    """Makes `SFTDataset`s of a dataset and the mask beside it."""

    def _along(self, source: TokenSource, name: str, order: SampleOrder, number: int) -> Dataset:
        if name + LOSS not in self._opened:
            check_mask(name)
        return SFTDataset(source, self.source(name + LOSS), order)


@dataclass(kw_only=True)
class _PackedConversations(_SFTBuilder, PackedBuilder):
    """As many conversations in a sample as fit."""


@dataclass(kw_only=True)
class _CutConversations(_SFTBuilder, StatelessBuilder):
    """Conversations end to end, cut where a sample is full."""


@dataclass(kw_only=True)
class _Rows(GreedyBuilder, _SFTBuilder):
    """Megatron's order: the conversations of a line are a sample."""

    def _order(
        self, source: TokenSource, sequences: tuple[int, int], wanted: Wanted, number: int
    ) -> RowOrder:
        if not isinstance(source, IndexedDataset):
            raise DataError("rows are documents of an indexed dataset; this source has none")
        return RowOrder(
            source.document_indices,
            source.sequence_lengths,
            sequences_of(wanted.interval, source.documents),
            sequence_length=self.config.sequence_length,
            num_samples=wanted.size,
        )


def build_sft_datasets(
    data_path: DataPath,
    split: str | None = DEFAULT_SPLIT,
    sizes: tuple[int | None, int | None, int | None] = (None, None, None),
    sequence_length: int = 1024,
    seed: int = 1234,
    *,
    order: OrderName = "packed",
    storage: StorageCache | None = None,
    mapped: bool = True,
) -> Datasets:
    """Build the three datasets of a run on conversations.

    Args:
        data_path: as in `build_gpt_datasets`; prefixes of `tokenize_conversations`, which end in
            `_conversation`.
        split: how a dataset is cut into the three splits; not used with a mapping.
        sizes: samples wanted for training, validation and test. None takes one epoch; 0 builds
            nothing.
        sequence_length: tokens in a sample.
        seed: of the order.
        order: "packed" puts whole conversations into samples and cuts only those that are longer
            than a sample; `dataset.order.packing.report()` counts them. "stateless" lays them end
            to end and cuts at every sample. "compat" is Megatron's: a sample is the conversations
            of one line, in the order of the file, its end cut off where it is too long.
        storage: cache for what is read of prefixes that are URLs.
        mapped: map token files into memory; see `IndexedDataset`.

    Raises:
        EmptySplitError: a split without conversations.
        DataError: a dataset that is missing or damaged, or has no mask.
    """
    kinds: _Builders = {
        "packed": _PackedConversations,
        "stateless": _CutConversations,
        "compat": _Rows,
    }
    builder = kinds[order](
        config=GPTDatasetConfig(sequence_length), seed=seed, storage=storage, mapped=mapped
    )
    return build_splits(builder, data_path, split, sizes)
