"""Megatron's greedy blending of datasets.

Step i draws from the dataset that is furthest below its share: the one with the largest
`weight * max(i, 1) - samples drawn so far`, and the first of several equal ones. The arithmetic is
float64 as in Megatron, so that the results are equal element by element.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import DataError
from megatron_data.order.cache import cache_key, load_or_build
from megatron_data.order.protocol import BlendEntry

_MOST_DATASETS = 32_767


class BlendIndices(NamedTuple):
    """Maps the samples of a blend to datasets and to samples within the datasets.

    Attributes:
        dataset_index: Int16 `[samples]`.
        dataset_sample_index: Int64 `[samples]`.
    """

    dataset_index: NDArray[np.int16]
    dataset_sample_index: NDArray[np.int64]


def normalize(weights: Sequence[float]) -> list[float]:
    """Returns the weights divided by their sum.

    Raises:
        DataError: `weights` is empty, or a weight is not a positive finite number.
    """
    array = np.array(weights, np.float64)
    if not len(array) or not np.all(np.isfinite(array)) or not np.all(array > 0):
        raise DataError(f"blend weights {list(weights)}; each must be a positive number")
    return [float(weight) for weight in array / np.sum(array)]


def blend_by_weight(weights: Sequence[float], size: int) -> BlendIndices:
    """Draws `size` samples in proportion to `weights`.

    Raises:
        DataError: A weight is not positive, or there are more than 32,766 datasets.
    """
    shares = np.array(normalize(weights), np.float64)
    _check_count(len(shares))
    indices = _empty(size)
    drawn = np.zeros(len(shares), np.float64)
    lag = np.empty_like(shares)
    for step in range(size):
        np.multiply(shares, max(float(step), 1.0), out=lag)
        np.subtract(lag, drawn, out=lag)
        dataset = int(lag.argmax())
        indices.dataset_index[step] = dataset
        indices.dataset_sample_index[step] = drawn[dataset]
        drawn[dataset] += 1
    return indices


def blend_exhaustively(sizes: Sequence[int]) -> BlendIndices:
    """Draws every sample of every dataset once, in proportion to their sizes.

    Raises:
        DataError: A size is not positive, or there are more than 32,766 datasets.
    """
    if any(size < 1 for size in sizes):
        raise DataError(f"blend sizes {list(sizes)}; each must be at least 1")
    _check_count(len(sizes))
    total = sum(sizes)
    shares = np.array(sizes, np.float64) / total
    indices = _empty(total)
    drawn = np.zeros(len(shares), np.float64)
    for step in range(total):
        lag = shares * max(float(step), 1.0) - drawn
        lag[drawn >= sizes] = -np.inf
        dataset = int(lag.argmax())
        indices.dataset_index[step] = dataset
        indices.dataset_sample_index[step] = drawn[dataset]
        drawn[dataset] += 1
    return indices


class GreedyBlend:
    """A `BlendOrder` that builds Megatron's two arrays.

    Args:
        weights: One positive number per dataset.
        num_samples: Number of samples. If None, dataset i gives exactly `weights[i]` samples.
        cache_path: Folder that stores built arrays. Defaults to None, which stores nothing.

    Raises:
        DataError: A weight is not positive, or there are more than 32,766 datasets.
    """

    def __init__(
        self,
        weights: Sequence[float],
        num_samples: int | None,
        cache_path: str | os.PathLike[str] | None = None,
    ) -> None:
        key = cache_key({"what": "blend 1", "weights": list(weights), "size": num_samples})

        def build() -> dict[str, NDArray[np.integer]]:
            if num_samples is None:
                return blend_exhaustively([int(weight) for weight in weights])._asdict()
            return blend_by_weight(weights, num_samples)._asdict()

        self.indices = BlendIndices(**load_or_build(cache_path, key, build))
        self._sources = len(weights)

    def __len__(self) -> int:
        return len(self.indices.dataset_index)

    def __getitem__(self, sample: int) -> BlendEntry:
        """Returns the dataset of a sample and the sample's index in it.

        Raises:
            IndexError: The blend has no such sample.
        """
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} is out of range; there are {len(self)} samples")
        number = int(self.indices.dataset_sample_index[sample])
        return BlendEntry(int(self.indices.dataset_index[sample]), number)

    def counts(self) -> list[int]:
        """Returns the number of samples from each dataset."""
        counts: list[int] = np.bincount(
            self.indices.dataset_index, minlength=self._sources
        ).tolist()
        return counts


def _empty(size: int) -> BlendIndices:
    return BlendIndices(np.empty(size, np.int16), np.empty(size, np.int64))


def _check_count(count: int) -> None:
    if count >= _MOST_DATASETS:
        raise DataError(f"the blend has {count} datasets; use at most {_MOST_DATASETS - 1}")
