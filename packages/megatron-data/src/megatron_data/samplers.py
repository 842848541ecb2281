"""Samplers: the sample indices of the micro-batches of a data-parallel rank.

A sampler is a pure function of the number of samples, the number of samples consumed by all ranks,
the micro-batch size, and the data-parallel rank and size. To resume with any number of ranks and
any micro-batch size, construct a sampler with the number of consumed samples.
"""

from collections.abc import Iterator

from megatron_data.errors import DataError
from megatron_data.order.permutation import Permutation, hash_integers


class SequentialSampler:
    """Yields micro-batches in the order of the dataset, like Megatron's `single` loader.

    Each step takes the next `micro_batch_size * data_parallel_size` samples. Rank r gets the r-th
    micro-batch of them. An incomplete last step is dropped.

    Args:
        total_samples: Number of samples in the dataset.
        consumed_samples: Number of samples that all ranks consumed so far.
        micro_batch_size: Samples per rank and step.
        data_parallel_rank: Data-parallel rank of this process. Defaults to 0.
        data_parallel_size: Number of data-parallel ranks. Defaults to 1.

    Raises:
        DataError: A size is below 1, or the rank or a count is out of range.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
    ) -> None:
        check_sampler(
            total_samples,
            consumed_samples,
            micro_batch_size,
            data_parallel_rank,
            data_parallel_size,
        )
        if consumed_samples > total_samples:
            raise DataError(
                f"{consumed_samples} samples are consumed, but the dataset has {total_samples}; "
                "build a dataset with more samples"
            )
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size

    @property
    def samples_per_step(self) -> int:
        """Number of samples that all ranks take in a step."""
        return self.micro_batch_size * self.data_parallel_size

    def __len__(self) -> int:
        """Returns the number of remaining micro-batches."""
        return (self.total_samples - self.consumed_samples) // self.samples_per_step

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            first = self.consumed_samples + self.data_parallel_rank * self.micro_batch_size
            self.consumed_samples += self.samples_per_step
            yield list(range(first, first + self.micro_batch_size))

    def state_dict(self) -> dict[str, int]:
        """Returns the state to resume from. Micro-batches that were yielded count as consumed.

        A loader that prefetches takes micro-batches before they are trained on. Save the trainer's
        own count of samples in that case.
        """
        return {"consumed_samples": self.consumed_samples}


class ShuffledSampler(SequentialSampler):
    """Yields micro-batches of several epochs over a dataset, each epoch in a different order.

    Use it for datasets without an order of their own. The epochs are concatenated, so a step may
    contain the end of one epoch and the beginning of the next; only an incomplete last step is
    dropped. The sequence of samples is the same for any number of ranks and any micro-batch size.
    Megatron's `cyclic` loader (`megatron_data.torch.CyclicSampler`) does not guarantee this,
    because the length of its epochs depends on both.

    Args:
        dataset_samples: Number of samples in the dataset.
        consumed_samples: Number of samples that all ranks consumed so far, in all epochs.
        micro_batch_size: Samples per rank and step.
        data_parallel_rank: Data-parallel rank of this process. Defaults to 0.
        data_parallel_size: Number of data-parallel ranks. Defaults to 1.
        epochs: Number of epochs. Earlier epochs do not depend on it. Defaults to 1.
        seed: Seed of the permutations. Defaults to 1234.

    Raises:
        DataError: A size is below 1, or the rank or a count is out of range.
    """

    def __init__(
        self,
        dataset_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        *,
        epochs: int = 1,
        seed: int = 1234,
    ) -> None:
        super().__init__(
            dataset_samples * epochs,
            consumed_samples,
            micro_batch_size,
            data_parallel_rank,
            data_parallel_size,
        )
        self.dataset_samples = dataset_samples
        self.seed = seed

    def __iter__(self) -> Iterator[list[int]]:
        current: tuple[int, Permutation] | None = None
        for positions in super().__iter__():
            samples = []
            for position in positions:
                epoch, number = divmod(position, self.dataset_samples)
                if current is None or current[0] != epoch:
                    current = (
                        epoch,
                        Permutation(self.dataset_samples, hash_integers(self.seed, epoch)),
                    )
                samples.append(current[1][number])
            yield samples


def check_sampler(
    total_samples: int,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> None:
    """Checks the arguments that all samplers have in common.

    Raises:
        DataError: A size is below 1, or the rank or a count is out of range.
    """
    if total_samples < 1:
        raise DataError(f"the dataset has {total_samples} samples; give at least 1")
    if consumed_samples < 0:
        raise DataError(f"{consumed_samples} consumed samples; give 0 to start")
    if micro_batch_size < 1:
        raise DataError(f"micro-batch size {micro_batch_size}; give at least 1")
    if not 0 <= data_parallel_rank < data_parallel_size:
        raise DataError(
            f"data-parallel rank {data_parallel_rank} of {data_parallel_size}; give 0 to size - 1"
        )
