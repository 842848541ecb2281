"""Several datasets drawn from in proportion to weights."""

import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..order.blend import BlendIndices, blend_by_weight, blend_exhaustively
from ..order.cache import cache_key, load_or_build
from .gpt import Sample


class Dataset(Protocol):
    """Samples by number."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, sample: int, /) -> Sample:
        """The sample of that number, a dictionary of arrays."""


class BlendedDataset:
    """A mixture of datasets in Megatron's greedy order.

    Samples are those of the datasets, with `sample_ids` numbered in the mixture and `dataset_ids`,
    an int64 scalar that says which dataset a sample came from.

    Args:
        datasets: what to draw from.
        weights: one positive number each.
        size: how many samples to draw; None draws exactly `weights[i]` samples from dataset i.
        cache: folder for the built indices, or None.

    Raises:
        DataError: unusable weights, or a dataset with fewer samples than the mixture draws.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        weights: Sequence[float],
        size: int | None,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        if len(datasets) != len(weights):
            raise DataError(f"{len(datasets)} datasets, {len(weights)} weights")
        self.datasets = tuple(datasets)
        key = cache_key({"what": "blend 1", "weights": list(weights), "size": size})

        def build() -> dict[str, NDArray[np.integer]]:
            if size is None:
                return blend_exhaustively([int(weight) for weight in weights])._asdict()
            return blend_by_weight(weights, size)._asdict()

        self.indices = BlendIndices(**load_or_build(cache, key, build))
        drawn = np.bincount(self.indices.dataset_index, minlength=len(datasets))
        for number, (dataset, count) in enumerate(zip(datasets, drawn.tolist(), strict=True)):
            if count > len(dataset):
                raise DataError(
                    f"the blend draws {count} samples from dataset {number}, which has "
                    f"{len(dataset)}; raise the surplus or lower its weight"
                )

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.indices.dataset_index)

    def __getitem__(self, sample: int) -> Sample:
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        dataset = int(self.indices.dataset_index[sample])
        return {
            **self.datasets[dataset][int(self.indices.dataset_sample_index[sample])],
            "sample_ids": np.asarray(sample, np.int64),
            "dataset_ids": np.asarray(dataset, np.int64),
        }
