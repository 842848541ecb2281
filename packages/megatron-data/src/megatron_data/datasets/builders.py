"""Builders: how one split of one or more sources becomes a dataset, for each sample order."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from megatron_data.datasets.batches import Dataset
from megatron_data.datasets.blended import BlendedDataset
from megatron_data.datasets.fim import FillInTheMiddle
from megatron_data.datasets.gpt import GPTDataset, GPTDatasetConfig, TokenSource
from megatron_data.datasets.paths import Blend
from megatron_data.datasets.pool import DatasetPool
from megatron_data.datasets.split import Interval, count_tokens, sequence_range
from megatron_data.datasets.split_names import SplitName
from megatron_data.errors import DataError, EmptySplitError
from megatron_data.indexed.reader import IndexedDataset
from megatron_data.order.blend import GreedyBlend, normalize
from megatron_data.order.cache import cache_key, load_or_build
from megatron_data.order.compat import CompatOrder, GPTIndices, build_gpt_indices
from megatron_data.order.packing import PackedOrder
from megatron_data.order.permutation import hash_integers
from megatron_data.order.protocol import SampleOrder
from megatron_data.order.schedule import BlendSchedule, WeightChange
from megatron_data.order.stateless import InMemorySequenceTable, SequenceTable, StatelessOrder
from megatron_data.sources.block_cache import StorageCache

OrderName: TypeAlias = Literal["stateless", "packed", "compat"]


def check_order_name(order: str) -> None:
    """Checks the name of a sample order.

    Raises:
        DataError: There is no order of this name.
    """
    if order not in get_args(OrderName):
        raise DataError(f"order={order!r}; give one of {', '.join(get_args(OrderName))}")


class SplitRequest(NamedTuple):
    """A split of a source or of a blend.

    Attributes:
        split: Name of the split.
        interval: Interval of every source that belongs to the split, within [0, 1].
        num_samples: Number of samples; None for one epoch.
    """

    split: SplitName
    interval: Interval
    num_samples: int | None


@dataclass(kw_only=True)
class Builder(ABC):
    """Base class of builders.

    Attributes:
        seed: Seed of the order.
        storage: Cache for datasets in object storage.
        mmap: Maps token files into memory.
        dataset_pool: Opens and checks each dataset once.
    """

    seed: int
    storage: StorageCache | None = None
    mmap: bool = True
    dataset_pool: DatasetPool = field(default_factory=DatasetPool)

    def open_source(self, prefix: str) -> IndexedDataset:
        """Opens the dataset at a prefix and checks its whole index.

        Raises:
            DataError: The dataset is missing, its index is damaged, or it contains images.
        """
        dataset = self.dataset_pool.indexed_dataset(prefix, self.storage, self.mmap)
        if dataset.sequence_modes is not None:
            raise DataError(
                f"{prefix} contains images, whose bytes are not tokens; give a dataset of text only"
            )
        return dataset

    @abstractmethod
    def build_source(
        self, source: TokenSource, name: str, request: SplitRequest, source_index: int = 0
    ) -> Dataset:
        """Builds one split of one source.

        Args:
            source: The source.
            name: Its name in errors.
            request: The split.
            source_index: Index of the source in the blend. Defaults to 0.

        Raises:
            EmptySplitError: The split has no token.
            DataError: The split is too short for one sample.
        """

    def build_prefix(self, prefix: str, request: SplitRequest, source_index: int = 0) -> Dataset:
        """Builds one split of the dataset at a prefix.

        Raises:
            EmptySplitError: The split has no token.
            DataError: The dataset is missing or damaged, or the split is too short for one sample.
        """
        return self.build_source(self.open_source(prefix), prefix, request, source_index)

    def build_split(self, blend: Blend, request: SplitRequest) -> Dataset:
        """Builds one split of a blend.

        Raises:
            EmptySplitError: The split of a source has no token.
            DataError: A dataset is missing or damaged, or weights are given without a size.
        """
        if blend.weights is not None and request.num_samples is None:
            raise DataError(
                f"the {request.split} blend has weights, but its number of samples is not given; "
                "give one, or leave out the weights"
            )
        if len(blend.prefixes) == 1 and blend.weights is None:
            (prefix,) = blend.prefixes
            return self.build_prefix(prefix, request)
        return self._build_blend(blend, request)

    @abstractmethod
    def _build_blend(self, blend: Blend, request: SplitRequest) -> BlendedDataset:
        """Builds a blend of several sources. If weights are given, the size is given too."""


@dataclass(kw_only=True)
class GreedyBuilder(Builder):
    """Builds blends like Megatron.

    Attributes:
        surplus: Fraction of extra samples that each dataset of a weighted blend provides.
        cache_path: Folder that stores built indices. None stores nothing.
    """

    surplus: float = 0.005
    cache_path: str | os.PathLike[str] | None = None

    def _build_blend(self, blend: Blend, request: SplitRequest) -> BlendedDataset:
        size = request.num_samples
        weights: Sequence[float] = ()
        counts: list[int | None] = [None] * len(blend.prefixes)
        if blend.weights is not None and size is not None:
            weights = normalize(blend.weights)
            shares = [ceil(size * weight) for weight in weights]
            counts = [ceil(share * (1 + self.surplus)) for share in shares]
            size = sum(shares)
        datasets = [
            self.build_prefix(prefix, request._replace(num_samples=count))
            for prefix, count in zip(blend.prefixes, counts, strict=True)
        ]
        if not weights:
            weights = [len(dataset) for dataset in datasets]
            size = None if size is None else min(size, int(sum(weights)))
        return BlendedDataset(datasets, GreedyBlend(weights, size, self.cache_path))


@dataclass(kw_only=True)
class GPTBuilder(Builder):
    """Builds a `GPTDataset`.

    Attributes:
        config: Configuration of the samples.
        drop_last_partial_validation: Omits an incomplete last validation sample.
        infill: Rearranges documents, with a seed of its own for each source.
    """

    config: GPTDatasetConfig
    drop_last_partial_validation: bool = True
    infill: FillInTheMiddle | None = None

    def build_source(
        self, source: TokenSource, name: str, request: SplitRequest, source_index: int = 0
    ) -> Dataset:
        """Builds one split of one source; see `Builder.build_source`.

        Raises:
            EmptySplitError: The split has no token.
            DataError: The split is too short for one sample.
        """
        count = len(source.sequence_lengths)
        first, last = sequence_range(request.interval, count)
        with dataset_named_in_errors(
            f"{request.split} split of {name} ({last - first} of {count} sequences)"
        ):
            order = self._build_order(source, (first, last), request, source_index)
        return self._build_along_order(source, name, order, source_index)

    def _build_along_order(
        self, source: TokenSource, name: str, order: SampleOrder, source_index: int
    ) -> Dataset:
        """Builds the dataset of one source with a sample order."""
        infill = self.infill and self.infill.with_seed(
            hash_integers(self.infill.seed, source_index)
        )
        return GPTDataset(source, order, self.config, infill)

    @abstractmethod
    def _build_order(
        self,
        source: TokenSource,
        sequences: tuple[int, int],
        request: SplitRequest,
        source_index: int,
    ) -> SampleOrder:
        """Builds the sample order of one source."""

    def _drops_last_partial(self, split: SplitName) -> bool:
        return split != "valid" or self.drop_last_partial_validation


@dataclass
class CompatBuilder(GreedyBuilder, GPTBuilder):
    """Builds datasets in the sample order of Megatron's `GPTDataset`."""

    def _build_order(
        self,
        source: TokenSource,
        sequences: tuple[int, int],
        request: SplitRequest,
        source_index: int,
    ) -> CompatOrder:
        lengths, numbers = source.sequence_lengths, np.arange(*sequences, dtype=np.int32)
        length, extra = self.config.sequence_length, self.config.extra
        options: dict[str, Any] = {
            "sequence_length": length,
            "seed": self.seed,
            "num_samples": request.num_samples,
            "extra": extra,
            "drop_last_partial": self._drops_last_partial(request.split),
        }

        def build() -> dict[str, NDArray[np.integer]]:
            return build_gpt_indices(lengths, numbers, **options)._asdict()

        key = (
            ""
            if self.cache_path is None
            else cache_key({"what": "gpt 1"} | options, lengths, numbers)
        )
        return CompatOrder(GPTIndices(**load_or_build(self.cache_path, key, build)), length, extra)


@dataclass(kw_only=True)
class StatelessBuilder(GPTBuilder):
    """Builds datasets in the order that is computed from seed, weights and sample index.

    Attributes:
        changes: Blends that replace the training blend, with their first sample.
    """

    changes: Sequence[tuple[int, Blend]] = ()

    def _build_order(
        self,
        source: TokenSource,
        sequences: tuple[int, int],
        request: SplitRequest,
        source_index: int,
    ) -> SampleOrder:
        return StatelessOrder(
            _table(source),
            sequences,
            sequence_length=self.config.sequence_length,
            seed=hash_integers(self.seed, source_index),
            num_samples=request.num_samples,
            extra=self.config.extra,
            drop_last_partial=self._drops_last_partial(request.split),
        )

    def build_split(self, blend: Blend, request: SplitRequest) -> Dataset:
        """Builds one split of a blend.

        Raises:
            EmptySplitError: The split of a source has no token.
            DataError: A dataset is missing or damaged, or weights are given without a size.
        """
        if request.split == "train" and self.changes:
            if request.num_samples is None:
                raise DataError(
                    "data_path_changes needs the number of training samples; give it in sizes"
                )
            return self._build_blend(blend, request)
        return super().build_split(blend, request)

    def _build_blend(self, blend: Blend, request: SplitRequest) -> BlendedDataset:
        if request.num_samples is None:
            datasets = [
                self.build_source(self.open_source(prefix), prefix, request, source_index)
                for source_index, prefix in enumerate(blend.prefixes)
            ]
            lengths = {str(number): len(dataset) for number, dataset in enumerate(datasets)}
            return BlendedDataset(
                datasets, BlendSchedule([WeightChange(0, lengths)], sum(lengths.values()))
            )
        blends = [(0, blend), *(self.changes if request.split == "train" else ())]
        changes = [
            WeightChange(first, self._weights(changed_blend, request.interval))
            for first, changed_blend in blends
        ]
        schedule = BlendSchedule(changes, request.num_samples)
        counts_by_prefix = zip(schedule.sources, schedule.counts(), strict=True)
        return BlendedDataset(
            [
                self.build_source(
                    self.open_source(prefix),
                    prefix,
                    request._replace(num_samples=count),
                    source_index,
                )
                for source_index, (prefix, count) in enumerate(counts_by_prefix)
            ],
            schedule,
        )

    def _weights(self, blend: Blend, interval: Interval) -> dict[str, float]:
        """Returns weights by prefix: tokens of the split by default. Repeated prefixes add up."""
        weights: dict[str, float] = {}
        given_weights = blend.weights or [
            count_tokens(self.open_source(prefix), interval) for prefix in blend.prefixes
        ]
        for prefix, weight in zip(blend.prefixes, given_weights, strict=True):
            weights[prefix] = weights.get(prefix, 0) + weight
        return weights


class PackedBuilder(StatelessBuilder):
    """Builds samples of whole documents. Blends are those of `StatelessBuilder`."""

    def _build_order(
        self,
        source: TokenSource,
        sequences: tuple[int, int],
        request: SplitRequest,
        source_index: int,
    ) -> PackedOrder:
        return PackedOrder(
            source.sequence_lengths,
            sequences,
            sequence_length=self.config.sequence_length,
            seed=hash_integers(self.seed, source_index),
            num_samples=request.num_samples,
            extra=self.config.extra,
        )


@contextmanager
def dataset_named_in_errors(name: str) -> Iterator[None]:
    """Adds the name of the dataset to errors that the block raises."""
    try:
        yield
    except EmptySplitError as error:
        raise EmptySplitError(f"{name}: {error.what}") from None
    except DataError as error:
        raise DataError(f"{name}: {error}") from None


def _table(source: TokenSource) -> SequenceTable:
    """Returns the source itself if its index holds cumulative lengths."""
    return (
        source
        if isinstance(source, IndexedDataset)
        else InMemorySequenceTable(source.sequence_lengths)
    )
