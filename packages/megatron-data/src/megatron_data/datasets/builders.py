"""How one split of one or more sources becomes a dataset, in each of the two sample orders."""

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
from megatron_data.datasets.split import Interval, SplitName, count_tokens, sequence_range
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
    """Refuses what is no order of samples.

    Raises:
        DataError: There is none of this name.
    """
    if order not in get_args(OrderName):
        raise DataError(f"order={order!r}; give one of {', '.join(get_args(OrderName))}")


class SplitRequest(NamedTuple):
    """What is asked of a source or of a blend.

    Attributes:
        split: Which part of a run it is for.
        interval: The part of every source.
        size: Number of samples; None for one epoch.
    """

    split: SplitName
    interval: Interval
    num_samples: int | None


@dataclass(kw_only=True)
class Builder(ABC):
    """What every dataset of one call shares.

    Attributes:
        seed: Of the order.
        storage: Cache for datasets in object storage.
        mmap: Map token files into memory.
        dataset_pool: The datasets, each of which is opened and checked once.
    """

    seed: int
    storage: StorageCache | None = None
    mmap: bool = True
    dataset_pool: DatasetPool = field(default_factory=DatasetPool)

    def open_source(self, prefix: str) -> IndexedDataset:
        """Returns the dataset at a prefix, its index checked from end to end.

        Raises:
            DataError: There is none, its index is damaged, or it holds images.
        """
        dataset = self.dataset_pool.indexed_dataset(prefix, self.storage, self.mmap)
        if dataset.sequence_modes is not None:
            raise DataError(
                f"{prefix} holds images beside its texts, whose bytes are no tokens; give a "
                "dataset of texts"
            )
        return dataset

    @abstractmethod
    def build_source(
        self, source: TokenSource, name: str, request: SplitRequest, source_index: int = 0
    ) -> Dataset:
        """Returns one split of one source, the `source_index`-th of a blend.

        Raises:
            EmptySplitError: It has no token.
            DataError: It is too short for one sample.
        """

    def build_prefix(self, prefix: str, request: SplitRequest, source_index: int = 0) -> Dataset:
        """Returns one split of what a prefix names, the `source_index`-th of a blend.

        Raises:
            EmptySplitError: It has no token.
            DataError: It is missing, damaged, or too short for one sample.
        """
        return self.build_source(self.open_source(prefix), prefix, request, source_index)

    def build_split(self, blend: Blend, request: SplitRequest) -> Dataset:
        """Returns one split of one or more sources, hash_integers.

        Raises:
            DataError: A dataset that is missing or damaged, a split without tokens, or weights
                without a size.
        """
        if blend.weights is not None and request.num_samples is None:
            raise DataError(
                f"the {request.split} blend has weights but no size; give the number of samples"
            )
        if len(blend.prefixes) == 1 and blend.weights is None:
            (prefix,) = blend.prefixes
            return self.build_prefix(prefix, request)
        return self._build_blend(blend, request)

    @abstractmethod
    def _build_blend(self, blend: Blend, request: SplitRequest) -> BlendedDataset:
        """Several sources; a size is there if the weights are."""


@dataclass(kw_only=True)
class GreedyBuilder(Builder):
    """Mixes as Megatron does.

    Attributes:
        surplus: Share of samples that each dataset of a weighted blend holds in reserve.
        cache_path: Folder for built indices, or None.
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
    """Makes `GPTDataset`s.

    Attributes:
        config: How tokens become samples.
        drop_last_partial_validation: Leave out a last validation sample that is not full.
        infill: What takes the documents of samples apart, with draws of its own in each source.
    """

    config: GPTDatasetConfig
    drop_last_partial_validation: bool = True
    infill: FillInTheMiddle | None = None

    def build_source(
        self, source: TokenSource, name: str, request: SplitRequest, source_index: int = 0
    ) -> Dataset:
        """Returns one split of one source, the `source_index`-th of a blend.

        Raises:
            EmptySplitError: It has no token.
            DataError: It is too short for one sample.
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
        """Returns the dataset of one source along its order."""
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
        """Returns the order of one source."""

    def _drops_last_partial(self, split: SplitName) -> bool:
        return split != "valid" or self.drop_last_partial_validation


@dataclass(kw_only=True)
class CompatBuilder(GreedyBuilder, GPTBuilder):
    """The order of samples of Megatron's `GPTDataset`."""

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
    """The order that is computed from seed, weights and sample number.

    Attributes:
        changes: Blends of the training split that take the place of the first, with the sample
            from which they do.
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
        """Returns one split of one or more sources, hash_integers.

        Raises:
            DataError: A dataset that is missing or damaged, a split without tokens, or weights
                without a size.
        """
        if request.split == "train" and self.changes:
            if request.num_samples is None:
                raise DataError("data that changes at a sample needs the number of samples")
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
            WeightChange(first, self._weights(each, request.interval)) for first, each in blends
        ]
        schedule = BlendSchedule(changes, request.num_samples)
        drawn = zip(schedule.sources, schedule.counts(), strict=True)
        return BlendedDataset(
            [
                self.build_source(
                    self.open_source(prefix),
                    prefix,
                    request._replace(num_samples=count),
                    source_index,
                )
                for source_index, (prefix, count) in enumerate(drawn)
            ],
            schedule,
        )

    def _weights(self, blend: Blend, interval: Interval) -> dict[str, float]:
        """Weights by prefix, those of a prefix named twice together; unset, tokens of the split."""
        weights: dict[str, float] = {}
        given = blend.weights or [
            count_tokens(self.open_source(prefix), interval) for prefix in blend.prefixes
        ]
        for prefix, weight in zip(blend.prefixes, given, strict=True):
            weights[prefix] = weights.get(prefix, 0) + weight
        return weights


@dataclass(kw_only=True)
class PackedBuilder(StatelessBuilder):
    """Whole documents, packed into samples; sources are mixed as in `StatelessBuilder`."""

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
def dataset_named_in_errors(which: str) -> Iterator[None]:
    """Says of errors in the block which dataset they are about."""
    try:
        yield
    except EmptySplitError as error:
        raise EmptySplitError(f"{which}: {error.what}") from None
    except DataError as error:
        raise DataError(f"{which}: {error}") from None


def _table(source: TokenSource) -> SequenceTable:
    """Returns the source itself where its index holds the sums of the lengths."""
    return (
        source
        if isinstance(source, IndexedDataset)
        else InMemorySequenceTable(source.sequence_lengths)
    )
