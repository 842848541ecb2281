"""Builds the datasets of supervised fine-tuning on conversations."""

import logging
from dataclasses import dataclass
from typing import TypeAlias

from megatron_data.datasets.batches import Dataset
from megatron_data.datasets.build import DataPath, Datasets, build_splits
from megatron_data.datasets.builders import (
    GPTBuilder,
    GreedyBuilder,
    OrderName,
    PackedBuilder,
    SplitRequest,
    StatelessBuilder,
    check_order_name,
)
from megatron_data.datasets.conversation_lines import ConversationLinesDataset
from megatron_data.datasets.gpt import GPTDatasetConfig, TokenSource
from megatron_data.datasets.paths import is_conversation_file
from megatron_data.datasets.pool import DatasetPool
from megatron_data.datasets.sft import SFTDataset
from megatron_data.datasets.split import DEFAULT_SPLIT, sequence_range
from megatron_data.errors import DataError, EmptySplitError
from megatron_data.indexed.reader import IndexedDataset
from megatron_data.order.packing import PackedOrder
from megatron_data.order.protocol import SampleOrder
from megatron_data.order.rows import RowOrder
from megatron_data.plural import plural
from megatron_data.preprocessing.manifest import LOSS_SUFFIX, check_mask
from megatron_data.sources.block_cache import StorageCache
from megatron_data.sources.protocol import MAX_DOCUMENT_BYTES
from megatron_data.tokenizers.sft import SFTTokenizer

_Builders: TypeAlias = "dict[OrderName, type[_SFTBuilder]]"

_log = logging.getLogger("megatron_data")


@dataclass(kw_only=True)
class _SFTBuilder(GPTBuilder):
    """Builds an `SFTDataset` from a dataset and its loss mask.

    Attributes:
        tokenizer: Tokenizer of conversations in JSON lines.
        max_document_bytes: Largest size of such a line in bytes. None is no limit.
    """

    tokenizer: SFTTokenizer | None = None
    max_document_bytes: int | None = MAX_DOCUMENT_BYTES

    def open_source(self, prefix: str) -> IndexedDataset:
        """Returns the dataset at a prefix.

        Raises:
            DataError: The prefix is a file of JSON lines, whose token lengths are unknown.
        """
        if is_conversation_file(prefix):
            raise DataError(
                f"{prefix} holds conversations as text, but this sample order needs their lengths; "
                f"run megatron-data tokenize-conversations --input {prefix} --output-prefix NAME "
                "--tokenizer-model PATH and give NAME_conversation, or use --sample-order compat, "
                "in which each line is a sample"
            )
        return super().open_source(prefix)

    def _build_along_order(
        self, source: TokenSource, name: str, order: SampleOrder, source_index: int
    ) -> Dataset:
        if not self.dataset_pool.is_open(name + LOSS_SUFFIX, self.mmap):
            check_mask(name)
        return SFTDataset(source, self.open_source(name + LOSS_SUFFIX), order)

    def build_source(
        self, source: TokenSource, name: str, request: SplitRequest, source_index: int = 0
    ) -> Dataset:
        """Builds one split of one source. Warns of conversations that are truncated or split.

        Raises:
            EmptySplitError: The split has no token.
            DataError: The dataset has no loss mask.
        """
        dataset = super().build_source(source, name, request, source_index)
        order = dataset.order if isinstance(dataset, SFTDataset) else None
        split_name = f"{request.split} split of {name}"
        if isinstance(order, RowOrder) and order.truncated:
            rows = plural(order.truncated, "row")
            _log.warning("%s: %s longer than a sample, truncated", split_name, rows)
        if isinstance(order, PackedOrder) and (count := order.packing.report().split_documents):
            conversations = plural(count, "conversation")
            _log.warning("%s: %s longer than a sample, split", split_name, conversations)
        return dataset


@dataclass
class _PackedConversations(_SFTBuilder, PackedBuilder):
    """Builds samples of whole conversations."""


@dataclass
class _CutConversations(_SFTBuilder, StatelessBuilder):
    """Builds samples of concatenated conversations."""


@dataclass
class _Rows(GreedyBuilder, _SFTBuilder):
    """Builds samples in Megatron's order: the conversations of a line are a sample."""

    def build_prefix(self, prefix: str, request: SplitRequest, source_index: int = 0) -> Dataset:
        """Builds one split of the dataset at a prefix, or of a file of JSON lines."""
        if not is_conversation_file(prefix):
            return super().build_prefix(prefix, request, source_index)
        if self.tokenizer is None:
            raise DataError(f"{prefix} holds conversations as text; give --tokenizer-model")
        lines = self.dataset_pool.conversation_lines(
            prefix, self.tokenizer, self.max_document_bytes
        )
        first, last = sequence_range(request.interval, len(lines))
        if first == last:
            what = f"{request.split} split of {prefix} ({last - first} of {len(lines)} lines)"
            raise EmptySplitError(f"{what}: the split holds no conversation")
        return ConversationLinesDataset(
            lines,
            (first, last),
            sequence_length=self.config.sequence_length,
            num_samples=request.num_samples,
        )

    def _build_order(
        self,
        source: TokenSource,
        sequences: tuple[int, int],
        request: SplitRequest,
        source_index: int,
    ) -> RowOrder:
        if not isinstance(source, IndexedDataset):
            raise DataError('order="compat" needs an indexed dataset; the source is not one')
        return RowOrder(
            source.document_indices,
            source.sequence_lengths,
            sequence_range(request.interval, source.num_documents),
            sequence_length=self.config.sequence_length,
            num_samples=request.num_samples,
        )


def build_sft_datasets(
    data_path: DataPath,
    split: str | None = DEFAULT_SPLIT,
    sizes: tuple[int | None, int | None, int | None] = (None, None, None),
    sequence_length: int = 1024,
    seed: int = 1234,
    *,
    order: OrderName = "packed",
    tokenizer: SFTTokenizer | None = None,
    storage: StorageCache | None = None,
    mmap: bool = True,
    max_document_bytes: int | None = MAX_DOCUMENT_BYTES,
    dataset_pool: DatasetPool | None = None,
) -> Datasets:
    """Builds the three datasets of supervised fine-tuning.

    Args:
        data_path: Data path as in `build_gpt_datasets`: prefixes of `tokenize_conversations`,
            which end in `_conversation`. With the order "compat" also local files of JSON lines,
            whose names end in `.jsonl` or `.json`; their lines are tokenized on demand.
        split: Fractions of each dataset for the three splits. Not used with a mapping. Defaults to
            "969,30,1".
        sizes: Number of training, validation and test samples. None takes one epoch, 0 builds no
            dataset.
        sequence_length: Tokens in a sample. Defaults to 1024.
        seed: Seed of the order. Defaults to 1234.
        order: "packed" puts whole conversations into samples and splits only those that are longer
            than a sample; `dataset.order.packing.report()` counts them. "stateless" concatenates
            conversations and cuts at each sample. "compat" is Megatron's order: a sample is the
            conversations of one line in the order of the file, truncated to the sequence length.
            Defaults to "packed".
        tokenizer: Tokenizer of JSON lines.
        storage: Cache for prefixes that are URLs.
        mmap: Maps token files into memory; see `IndexedDataset`. Defaults to True.
        max_document_bytes: Largest size of a JSON line in bytes. None is no limit. Defaults to
            32 MiB.
        dataset_pool: Datasets that several calls share, such as one call per split. Defaults to a
            pool for this call.

    Raises:
        EmptySplitError: A split has no conversation.
        DataError: A dataset is missing or damaged, or has no loss mask, or JSON lines are used
            with another order or without a tokenizer.
    """
    check_order_name(order)
    kinds: _Builders = {
        "packed": _PackedConversations,
        "stateless": _CutConversations,
        "compat": _Rows,
    }
    builder = kinds[order](
        config=GPTDatasetConfig(sequence_length),
        seed=seed,
        storage=storage,
        mmap=mmap,
        tokenizer=tokenizer,
        max_document_bytes=max_document_bytes,
        dataset_pool=dataset_pool or DatasetPool(),
    )
    return build_splits(builder, data_path, split, sizes)
