"""From a run's configuration to micro-batches: which samples each step sees, and on which rank.

The order of samples depends on the seed (in Megatron's order on the length of the run, too), never
on the layout or on how often it was resumed: a loader that starts at ``consumed_samples`` continues
exactly where another stopped. Of the samples of a step, data-parallel ranks take micro-batches in
turn; the ranks that hold one copy of the model read the same ones.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

from megatron_data import EmptySplitError, SequentialSampler
from megatron_data.datasets import Dataset
from megatron_parallel import Axis

from megatron_train.config.batch_size import BatchSizeSchedule
from megatron_train.config.run import RunConfig
from megatron_train.document_pool import DocumentPool
from megatron_train.errors import TrainError
from megatron_train.tasks.kinds import TaskData
from megatron_train.tasks.task import MicroBatch


class RunBatches:
    """Training, validation and test micro-batches of one rank of a run.

    The test set is the third share of --split, or --test-data-path. A small corpus may have no
    document in a share of one in a thousand, which is no mistake.

    Args:
        config: the run.
        data: what it reads its samples from.
        data_axis: the ranks that share out the samples of a step.
        pool: shares out the documents of a step instead.

    Attributes:
        no_test_reason: why the share of --split to test on gives nothing, if it does not.

    Raises:
        DataError: a corpus that is missing, damaged or too small for one sample.
        TrainError: a split that leaves nothing to train or to validate on, or a corpus that another
            tokenizer made.
    """

    def __init__(
        self,
        config: RunConfig,
        data: TaskData,
        data_axis: Axis,
        pool: DocumentPool | None = None,
    ) -> None:
        self._data = data
        self._data_axis = data_axis
        self._pool = pool
        self._micro_batch_size = config.training.micro_batch_size
        self._sizes = config.batch_sizes
        self._evaluated = BatchSizeSchedule.constant(config.batch_sizes.last)
        self._samples_at_once = config.micro_batch_times_data_parallel_size
        self._train_samples = config.train_samples
        self._valid_samples = config.evaluation.eval_iters * config.batch_sizes.last
        self._train = _require(data.datasets((self._train_samples, 0, 0)).train, "train")
        self._valid: Dataset | None = None
        self._test: Dataset | None = None
        self.no_test_reason = ""
        try:
            self._valid = data.datasets((0, self._valid_samples, 0)).valid
            if self._valid_samples:
                _require(self._valid, "validate")
        except EmptySplitError as error:
            raise TrainError(
                f"{error.what}; widen it, as by --split 8,2,0, or do without by --eval-iters 0"
            ) from None
        try:
            self._test = data.datasets((0, 0, self._valid_samples)).test
        except EmptySplitError as error:
            if config.data.test_data_path:
                raise
            self.no_test_reason = error.what
        data.check()

    @property
    def has_test(self) -> bool:
        """Whether there is text to test on."""
        return self._test is not None

    def training(self, consumed_samples: int) -> Iterator[Sequence[MicroBatch]]:
        """Yields the micro-batches of each step after ``consumed_samples`` samples."""
        return self._steps(self._train, self._train_samples, consumed_samples, self._sizes)

    def validation(self) -> Iterator[Sequence[MicroBatch]]:
        """Yields the micro-batches of one evaluation by global batch, the same ones every time."""
        if self._valid is None:
            return iter(())
        return self._steps(self._valid, self._valid_samples, 0, self._evaluated)

    def testing(self) -> Iterator[Sequence[MicroBatch]]:
        """Yields the micro-batches of the test by global batch; none where nothing `has_test`."""
        if self._test is None:
            return iter(())
        return self._steps(self._test, self._valid_samples, 0, self._evaluated)

    def _steps(
        self, dataset: Dataset, samples: int, consumed: int, sizes: BatchSizeSchedule
    ) -> Iterator[Sequence[MicroBatch]]:
        if self._pool is not None:
            read = partial(self._data.read, dataset)
            while (end := consumed + sizes.at(consumed)) <= samples:
                yield self._pool.rows(read, range(consumed, end))
                consumed = end
            return
        micro_batches = self._read(dataset, samples, consumed)
        while step := list(islice(micro_batches, sizes.at(consumed) // self._samples_at_once)):
            yield step
            consumed += len(step) * self._samples_at_once

    def _read(self, dataset: Dataset, samples: int, consumed: int) -> Iterator[MicroBatch]:
        axis = self._data_axis
        sampler = SequentialSampler(
            samples, consumed, self._micro_batch_size, axis.index, axis.size
        )
        for indices in sampler:
            yield self._data.micro_batch(self._data.read(dataset, indices))


def _require(dataset: Dataset | None, purpose: str) -> Dataset:
    if dataset is None:
        without = ", or do without by --eval-iters 0" if purpose == "validate" else ""
        raise TrainError(f"--split leaves nothing to {purpose} on; give it a share{without}")
    return dataset
