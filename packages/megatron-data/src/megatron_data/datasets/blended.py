"""Several datasets, drawn from in turn."""

from collections.abc import Sequence

import numpy as np

from megatron_data.datasets.batches import Dataset, Sample, merge_batches, read_batch, unstack
from megatron_data.errors import DataError
from megatron_data.order.protocol import BlendOrder


class BlendedDataset:
    """A mixture of datasets.

    Samples are those of the datasets, with `sample_ids` numbered in the mixture and `dataset_ids`,
    an int64 scalar that says which dataset a sample came from.

    Args:
        datasets: What to draw from.
        order: Which dataset each sample comes from.

    Raises:
        DataError: An order of another number of datasets, or one that draws more from a dataset
            than it has.
    """

    def __init__(self, datasets: Sequence[Dataset], order: BlendOrder) -> None:
        self.datasets = tuple(datasets)
        self.order = order
        drawn = order.counts()
        if len(drawn) != len(datasets):
            raise DataError(f"{len(datasets)} datasets, {len(drawn)} weights")
        for number, (dataset, count) in enumerate(zip(datasets, drawn, strict=True)):
            if count > len(dataset):
                raise DataError(
                    f"the blend draws {count} samples from dataset {number}, which has "
                    f"{len(dataset)}; raise the surplus or lower its weight"
                )

    def __len__(self) -> int:
        """Returns the number of samples."""
        return len(self.order)

    def __getitem__(self, sample: int) -> Sample:
        dataset, number = self.order[sample]
        return {
            **self.datasets[dataset][number],
            "sample_ids": np.array(sample, np.int64),
            "dataset_ids": np.array(dataset, np.int64),
        }

    def batch(self, samples: Sequence[int]) -> Sample:
        """Several samples at once: the same arrays with a leading axis, `[b, s]` and `[b]`."""
        draws = [self.order[sample] for sample in samples]
        places: dict[int, list[int]] = {}
        for place, (source, _) in enumerate(draws):
            places.setdefault(source, []).append(place)
        parts = [
            (own, read_batch(self.datasets[source], [draws[place].sample_index for place in own]))
            for source, own in places.items()
        ]
        return merge_batches(parts) | {
            "sample_ids": np.array(samples, np.int64),
            "dataset_ids": np.array([source for source, _ in draws], np.int64),
        }

    def __getitems__(self, samples: Sequence[int]) -> list[Sample]:
        """Several samples; torch's `DataLoader` asks so. They are views of one batch."""
        return unstack(self.batch(samples))
