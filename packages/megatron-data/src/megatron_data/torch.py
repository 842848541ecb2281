"""Batches of tensors and a `DataLoader`. No other module of this package imports torch."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Sampler

from megatron_data.datasets.batches import Dataset, Sample, stack
from megatron_data.datasets.batches import read_batch as read_arrays
from megatron_data.errors import DataError
from megatron_data.samplers import SequentialSampler, check_sampler

Batch = dict[str, torch.Tensor]


def to_batch(samples: Sequence[Mapping[str, NDArray[Any]]]) -> Batch:
    """Stacks samples into tensors: arrays `[s]` become `[b, s]`, scalars `[b]`.

    Raises:
        DataError: `samples` is empty, or the samples have different keys.
    """
    return _tensors(stack(samples))


def read_batch(dataset: Dataset, samples: Sequence[int]) -> Batch:
    """Reads samples as tensors `[b, s]` and `[b]`. Faster than `to_batch` of single samples.

    Args:
        dataset: Dataset to read from.
        samples: Indices of the samples.

    Raises:
        DataError: `samples` is empty, or the samples have different keys.
    """
    return _tensors(read_arrays(dataset, samples))


def _tensors(batch: Sample) -> Batch:
    return {key: torch.from_numpy(array) for key, array in batch.items()}


class _BatchReader:
    """A dataset for torch's `DataLoader` that reads a whole batch of indices at once."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, samples: Sequence[int]) -> Sample:
        return read_arrays(self.dataset, samples)


def data_loader(
    dataset: Dataset,
    sampler: "SequentialSampler | CyclicSampler",
    *,
    workers: int = 0,
    prefetch: int = 2,
    pin_memory: bool = False,
) -> "DataLoader[Batch]":
    """Returns a torch `DataLoader` that yields one batch per micro-batch of the sampler.

    Args:
        dataset: Dataset to read from.
        sampler: Yields the indices of each micro-batch.
        workers: Number of worker processes that prefetch batches. Defaults to 0, which reads each
            batch on demand.
        prefetch: Number of batches that each worker prefetches. Defaults to 2.
        pin_memory: Copies batches into page-locked memory, for transfers to a GPU. Defaults to
            False.
    """
    return DataLoader(
        _BatchReader(dataset),  # type: ignore[arg-type]  # implements what the loader calls
        batch_sampler=sampler,
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        persistent_workers=workers > 0,
        pin_memory=pin_memory,
        collate_fn=_tensors,  # type: ignore[arg-type]  # batches are not lists of samples
    )


class CyclicSampler(Sampler[list[int]]):
    """Yields micro-batches in a new permutation each epoch, like Megatron's `cyclic` loader.

    An iteration ends with the epoch; iterate again for the next epoch. The permutation of epoch e
    is `torch.randperm` with seed e. The length of an epoch depends on the number of ranks and the
    micro-batch size. If either changes when a run resumes within an epoch, some samples are
    repeated and as many are skipped. `ShuffledSampler` has no such effect.

    Args:
        total_samples: Number of samples in the dataset. Samples of an incomplete step are omitted.
        consumed_samples: Number of samples that all ranks consumed so far.
        micro_batch_size: Samples per rank and step.
        data_parallel_rank: Data-parallel rank of this process. Defaults to 0.
        data_parallel_size: Number of data-parallel ranks. Defaults to 1.
        data_sharding: Whether each rank permutes its own contiguous shard of the dataset. If False,
            all ranks share one permutation, and the order does not depend on the number of ranks.
            Defaults to True.

    Raises:
        DataError: A size is below 1, the dataset has fewer samples than a step, or
            `consumed_samples` is not a whole number of steps of this epoch.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        *,
        data_sharding: bool = True,
    ) -> None:
        check_sampler(
            total_samples,
            consumed_samples,
            micro_batch_size,
            data_parallel_rank,
            data_parallel_size,
        )
        self.samples_per_step = micro_batch_size * data_parallel_size
        self.epoch_samples = total_samples - total_samples % self.samples_per_step
        if not self.epoch_samples:
            raise DataError(
                f"the dataset has {total_samples} samples, but one step takes "
                f"{self.samples_per_step}"
            )
        if consumed_samples % self.epoch_samples % self.samples_per_step:
            raise DataError(
                f"{consumed_samples} consumed samples are not a whole number of steps; give a "
                f"multiple of {self.samples_per_step}"
            )
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.data_sharding = data_sharding

    def __len__(self) -> int:
        """Returns the number of remaining micro-batches of this epoch."""
        return (
            self.epoch_samples - self.consumed_samples % self.epoch_samples
        ) // self.samples_per_step

    def __iter__(self) -> Iterator[list[int]]:
        epoch, consumed = divmod(self.consumed_samples, self.epoch_samples)
        order = self._order(epoch, consumed)
        for start in range(0, len(self) * self.micro_batch_size, self.micro_batch_size):
            self.consumed_samples += self.samples_per_step
            yield order[start : start + self.micro_batch_size]

    def _order(self, epoch: int, consumed: int) -> list[int]:
        """Returns the remaining sample indices of this rank's epoch."""
        rank, ranks = self.data_parallel_rank, self.data_parallel_size
        generator = torch.Generator().manual_seed(epoch)
        if self.data_sharding:
            shard_samples = self.epoch_samples // ranks
            order = (
                torch.randperm(shard_samples, generator=generator)[consumed // ranks :]
                + rank * shard_samples
            )
        else:
            whole = self.total_samples - self.total_samples % self.micro_batch_size
            order = torch.randperm(whole, generator=generator)[consumed:][rank::ranks]
        indices: list[int] = order.tolist()
        return indices

    def state_dict(self) -> dict[str, int]:
        """Returns the state to resume from. Micro-batches that were yielded count as consumed."""
        return {"consumed_samples": self.consumed_samples}
