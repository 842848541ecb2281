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
from megatron_data.datasets.opened import OpenDatasets
from megatron_data.datasets.paths import Blend
from megatron_data.datasets.split import Interval, SplitName, sequences_of, tokens_in
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
        DataError: there is none of this name.
    """
    if order not in get_args(OrderName):
        raise DataError(f"order={order!r}; give one of {', '.join(get_args(OrderName))}")


class Wanted(NamedTuple):
    """What is asked of a source or of a blend.

    Attributes:
        split: which part of a run it is for.
        interval: the part of every source.
        size: number of samples; None for one epoch.
    """

    split: SplitName
    interval: Interval
    size: int | None


@dataclass(kw_only=True)
class Builder(ABC):
    """What every dataset of one call shares.

    Attributes:
        seed: of the order.
        storage: cache for datasets in object storage.
        mapped: map token files into memory.
        opened: the datasets, each of which is opened and checked once.
    """

    seed: int
    storage: StorageCache | None = None
    mapped: bool = True
    opened: OpenDatasets = field(default_factory=OpenDatasets)

    def source(self, prefix: str) -> IndexedDataset:
        """Returns the dataset at a prefix, its index checked from end to end.

        Raises:
            DataError: there is none, its index is damaged, or it holds images.
        """
        dataset = self.opened.indexed(prefix, self.storage, self.mapped)
        if dataset.sequence_modes is not None:
            raise DataError(
                f"{prefix} holds images beside its texts, whose bytes are no tokens; give a "
                "dataset of texts"
            )
        return dataset

    @abstractmethod
    def dataset(self, source: TokenSource, name: str, wanted: Wanted, number: int = 0) -> Dataset:
        """Returns one split of one source, the `number`th of a blend.

        Raises:
            EmptySplitError: it has no token.
            DataError: it is too short for one sample.
        """

    def part(self, prefix: str, wanted: Wanted, number: int = 0) -> Dataset:
        """Returns one split of what a prefix names, the `number`th of a blend.

        Raises:
            EmptySplitError: it has no token.
            DataError: it is missing, damaged, or too short for one sample.
        """
        return self.dataset(self.source(prefix), prefix, wanted, number)

    def split(self, blend: Blend, wanted: Wanted) -> Dataset:
        """Returns one split of one or more sources, hash_integers.

        Raises:
            DataError: a dataset that is missing or damaged, a split without tokens, or weights
                without a size.
        """
        if blend.weights is not None and wanted.size is None:
            raise DataError(
                f"the {wanted.split} blend has weights but no size; give the number of samples"
            )
        if len(blend.prefixes) == 1 and blend.weights is None:
            (prefix,) = blend.prefixes
            return self.part(prefix, wanted)
        return self._mixture(blend, wanted)

    @abstractmethod
    def _mixture(self, blend: Blend, wanted: Wanted) -> BlendedDataset:
        """Several sources; a size is there if the weights are."""


@dataclass(kw_only=True)
class GreedyBuilder(Builder):
    """Mixes as Megatron does.

    Attributes:
        surplus: share of samples that each dataset of a weighted blend holds in reserve.
        cache: folder for built indices, or None.
    """

    surplus: float = 0.005
    cache: str | os.PathLike[str] | None = None

    def _mixture(self, blend: Blend, wanted: Wanted) -> BlendedDataset:
        size = wanted.size
        weights: Sequence[float] = ()
        requests: list[int | None] = [None] * len(blend.prefixes)
        if blend.weights is not None and size is not None:
            weights = normalize(blend.weights)
            shares = [ceil(size * weight) for weight in weights]
            requests = [ceil(share * (1 + self.surplus)) for share in shares]
            size = sum(shares)
        datasets = [
            self.part(prefix, wanted._replace(size=request))
            for prefix, request in zip(blend.prefixes, requests, strict=True)
        ]
        if not weights:
            weights = [len(dataset) for dataset in datasets]
            size = None if size is None else min(size, int(sum(weights)))
        return BlendedDataset(datasets, GreedyBlend(weights, size, self.cache))


@dataclass(kw_only=True)
class GPTBuilder(Builder):
    """Makes `GPTDataset`s.

    Attributes:
        config: how tokens become samples.
        drop_last_partial_validation: leave out a last validation sample that is not full.
        infill: what takes the documents of samples apart, with draws of its own in each source.
    """

    config: GPTDatasetConfig
    drop_last_partial_validation: bool = True
    infill: FillInTheMiddle | None = None

    def dataset(self, source: TokenSource, name: str, wanted: Wanted, number: int = 0) -> Dataset:
        """Returns one split of one source, the `number`th of a blend.

        Raises:
            EmptySplitError: it has no token.
            DataError: it is too short for one sample.
        """
        count = len(source.sequence_lengths)
        first, last = sequences_of(wanted.interval, count)
        with named(f"{wanted.split} split of {name} ({last - first} of {count} sequences)"):
            order = self._order(source, (first, last), wanted, number)
        return self._along(source, name, order, number)

    def _along(self, source: TokenSource, name: str, order: SampleOrder, number: int) -> Dataset:
        """Returns the dataset of one source along its order."""
        infill = self.infill and self.infill.with_seed(hash_integers(self.infill.seed, number))
        return GPTDataset(source, order, self.config, infill)

    @abstractmethod
    def _order(
        self, source: TokenSource, sequences: tuple[int, int], wanted: Wanted, number: int
    ) -> SampleOrder:
        """Returns the order of one source."""

    def _drops_last_partial(self, split: SplitName) -> bool:
        return split != "valid" or self.drop_last_partial_validation


@dataclass(kw_only=True)
class CompatBuilder(GreedyBuilder, GPTBuilder):
    """The order of samples of Megatron's `GPTDataset`."""

    def _order(
        self, source: TokenSource, sequences: tuple[int, int], wanted: Wanted, number: int
    ) -> CompatOrder:
        lengths, numbers = source.sequence_lengths, np.arange(*sequences, dtype=np.int32)
        length, extra = self.config.sequence_length, self.config.extra
        options: dict[str, Any] = {
            "sequence_length": length,
            "seed": self.seed,
            "num_samples": wanted.size,
            "extra": extra,
            "drop_last_partial": self._drops_last_partial(wanted.split),
        }

        def build() -> dict[str, NDArray[np.integer]]:
            return build_gpt_indices(lengths, numbers, **options)._asdict()

        key = "" if self.cache is None else cache_key({"what": "gpt 1"} | options, lengths, numbers)
        return CompatOrder(GPTIndices(**load_or_build(self.cache, key, build)), length, extra)


@dataclass(kw_only=True)
class StatelessBuilder(GPTBuilder):
    """The order that is computed from seed, weights and sample number.

    Attributes:
        changes: blends of the training split that take the place of the first, with the sample
            from which they do.
    """

    changes: Sequence[tuple[int, Blend]] = ()

    def _order(
        self, source: TokenSource, sequences: tuple[int, int], wanted: Wanted, number: int
    ) -> SampleOrder:
        return StatelessOrder(
            _table(source),
            sequences,
            sequence_length=self.config.sequence_length,
            seed=hash_integers(self.seed, number),
            num_samples=wanted.size,
            extra=self.config.extra,
            drop_last_partial=self._drops_last_partial(wanted.split),
        )

    def split(self, blend: Blend, wanted: Wanted) -> Dataset:
        """Returns one split of one or more sources, hash_integers.

        Raises:
            DataError: a dataset that is missing or damaged, a split without tokens, or weights
                without a size.
        """
        if wanted.split == "train" and self.changes:
            if wanted.size is None:
                raise DataError("data that changes at a sample needs the number of samples")
            return self._mixture(blend, wanted)
        return super().split(blend, wanted)

    def _mixture(self, blend: Blend, wanted: Wanted) -> BlendedDataset:
        if wanted.size is None:
            datasets = [
                self.dataset(self.source(prefix), prefix, wanted, number)
                for number, prefix in enumerate(blend.prefixes)
            ]
            lengths = {str(number): len(dataset) for number, dataset in enumerate(datasets)}
            return BlendedDataset(
                datasets, BlendSchedule([WeightChange(0, lengths)], sum(lengths.values()))
            )
        blends = [(0, blend), *(self.changes if wanted.split == "train" else ())]
        changes = [
            WeightChange(first, self._weights(each, wanted.interval)) for first, each in blends
        ]
        schedule = BlendSchedule(changes, wanted.size)
        drawn = zip(schedule.sources, schedule.counts(), strict=True)
        return BlendedDataset(
            [
                self.dataset(self.source(prefix), prefix, wanted._replace(size=count), number)
                for number, (prefix, count) in enumerate(drawn)
            ],
            schedule,
        )

    def _weights(self, blend: Blend, interval: Interval) -> dict[str, float]:
        """Weights by prefix, those of a prefix named twice together; unset, tokens of the split."""
        weights: dict[str, float] = {}
        given = blend.weights or [
            tokens_in(self.source(prefix), interval) for prefix in blend.prefixes
        ]
        for prefix, weight in zip(blend.prefixes, given, strict=True):
            weights[prefix] = weights.get(prefix, 0) + weight
        return weights


@dataclass(kw_only=True)
class PackedBuilder(StatelessBuilder):
    """Whole documents, packed into samples; sources are mixed as in `StatelessBuilder`."""

    def _order(
        self, source: TokenSource, sequences: tuple[int, int], wanted: Wanted, number: int
    ) -> PackedOrder:
        return PackedOrder(
            source.sequence_lengths,
            sequences,
            sequence_length=self.config.sequence_length,
            seed=hash_integers(self.seed, number),
            num_samples=wanted.size,
            extra=self.config.extra,
        )


@contextmanager
def named(which: str) -> Iterator[None]:
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
