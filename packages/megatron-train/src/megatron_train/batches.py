"""From a run's configuration to micro-batches: which samples each step sees, and on which rank.

The order of samples depends on the seed (in Megatron's order on the length of the run, too), never
on the layout or on how often it was resumed: a loader that starts at ``consumed_samples`` continues
exactly where another stopped. Of the samples of a step, data-parallel ranks take micro-batches in
turn; the ranks that hold one copy of the model read the same ones.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from megatron_data import (
    DataError,
    Dataset,
    Datasets,
    EmptySplitError,
    FillInTheMiddle,
    OpenDatasets,
    SequentialSampler,
    SFTTokenizer,
    StorageCache,
    Tokenizer,
    TokenizerMismatchError,
    build_gpt_datasets,
    build_sft_datasets,
    check_tokenizer,
    conversation_tokenizer,
    read_data_path_changes,
)
from megatron_data.torch import read_batch
from megatron_parallel import Axis

from megatron_train.config.batch_size import BatchSizeSchedule
from megatron_train.config.run import RunConfig
from megatron_train.document_pool import DocumentPool
from megatron_train.errors import TrainError
from megatron_train.mock_data import MockDataset
from megatron_train.tasks.task import Batch


class GPTBatches:
    """Training, validation and test micro-batches of one rank of a run.

    The test set is the third share of --split, or --test-data-path. A small corpus may have no
    document in a share of one in a thousand, which is no mistake.

    Args:
        config: the run.
        tokenizer: its tokenizer, if it has one.
        data_axis: the ranks that share out the samples of a step.
        pool: shares out the documents of a step instead.

    Attributes:
        untested: why the share of --split to test on gives nothing, if it does not.

    Raises:
        DataError: a corpus that is missing, damaged or too small for one sample.
        TrainError: a split that leaves nothing to train or to validate on, or a corpus that another
            tokenizer made.
    """

    def __init__(
        self,
        config: RunConfig,
        tokenizer: Tokenizer | None,
        data_axis: Axis,
        pool: DocumentPool | None = None,
    ) -> None:
        data, training = config.data, config.training
        self._data_axis = data_axis
        self._pool = pool
        self._micro_batch_size = training.micro_batch_size
        self._sizes = config.batch_sizes
        self._evaluated = BatchSizeSchedule.constant(config.batch_sizes.last)
        self._samples_at_once = config.samples_at_once
        self._vocab_size = config.model.vocab_size
        self._train_samples = config.train_samples
        self._valid_samples = config.evaluation.eval_iters * config.batch_sizes.last
        by_split = {
            "train": data.train_data_path,
            "valid": data.valid_data_path,
            "test": data.test_data_path,
        }
        build = _builder(config, tokenizer, data.data_path or by_split)
        self._train = _require(build(sizes=(self._train_samples, 0, 0)).train, "train")
        self._valid: Dataset | None = None
        self._test: Dataset | None = None
        self.untested = ""
        try:
            self._valid = build(sizes=(0, self._valid_samples, 0)).valid
            if self._valid_samples:
                _require(self._valid, "validate")
        except EmptySplitError as error:
            raise TrainError(
                f"{error.what}; widen it, as by --split 8,2,0, or do without by --eval-iters 0"
            ) from None
        try:
            self._test = build(sizes=(0, 0, self._valid_samples)).test
        except EmptySplitError as error:
            if data.test_data_path:
                raise
            self.untested = error.what
        _refuse_other_tokenizers(config, tokenizer, data.data_path or by_split)

    @property
    def tests(self) -> bool:
        """Whether there is text to test on."""
        return self._test is not None

    def training(self, consumed_samples: int) -> Iterator[Sequence[Batch]]:
        """Yield the micro-batches of each step after ``consumed_samples`` samples."""
        return self._steps(self._train, self._train_samples, consumed_samples, self._sizes)

    def validation(self) -> Iterator[Sequence[Batch]]:
        """Yield the micro-batches of one evaluation by global batch, the same ones every time."""
        if self._valid is None:
            return iter(())
        return self._steps(self._valid, self._valid_samples, 0, self._evaluated)

    def testing(self) -> Iterator[Sequence[Batch]]:
        """Yield the micro-batches of the test by global batch; none where nothing `tests`."""
        if self._test is None:
            return iter(())
        return self._steps(self._test, self._valid_samples, 0, self._evaluated)

    def _steps(
        self, dataset: Dataset, samples: int, consumed: int, sizes: BatchSizeSchedule
    ) -> Iterator[Sequence[Batch]]:
        if self._pool is not None:
            read = partial(self._batch, dataset)
            while (end := consumed + sizes.at(consumed)) <= samples:
                yield self._pool.rows(read, range(consumed, end))
                consumed = end
            return
        micro_batches = self._read(dataset, samples, consumed)
        while step := list(islice(micro_batches, sizes.at(consumed) // self._samples_at_once)):
            yield step
            consumed += len(step) * self._samples_at_once

    def _read(self, dataset: Dataset, samples: int, consumed: int) -> Iterator[Batch]:
        axis = self._data_axis
        sampler = SequentialSampler(
            samples, consumed, self._micro_batch_size, axis.index, axis.size
        )
        for indices in sampler:
            yield self._batch(dataset, indices)

    def _batch(self, dataset: Dataset, indices: Sequence[int]) -> Batch:
        batch = read_batch(dataset, indices)
        largest = max(int(batch[name].max()) for name in ("tokens", "labels"))
        if largest >= self._vocab_size:
            raise DataError(
                f"the corpus holds token {largest}, but the vocabulary has {self._vocab_size}; "
                "train with the tokenizer that the corpus was made with"
            )
        return batch


def _builder(
    config: RunConfig, tokenizer: Tokenizer | None, data_path: Any
) -> Callable[..., Datasets]:
    """What builds the datasets of a run, given their `sizes`."""
    data = config.data
    if data.mock_data:
        return partial(_mock_datasets, config)
    build = partial(
        build_sft_datasets if data.sft else build_gpt_datasets,
        data_path,
        data.split,
        sequence_length=data.seq_length,
        seed=config.training.seed,
        order=data.sample_order,
        mapped=data.mmap_bin_files,
        storage=StorageCache(folder) if (folder := data.object_storage_cache_path) else None,
        opened=OpenDatasets(),
    )
    if data.sft:
        longest = data.max_document_bytes
        limits = {} if longest is None else {"max_document_bytes": longest}
        return partial(build, tokenizer=of_conversations(config, tokenizer), **limits)
    return partial(
        build,
        data_path_changes=_changes(config),
        eod_id=tokenizer.eod_id if tokenizer else None,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
        infill=_infill(config, tokenizer),
        cache=data.data_cache_path if data.sample_order == "compat" else None,
    )


def _mock_datasets(config: RunConfig, sizes: Sequence[int]) -> Datasets:
    made = (
        MockDataset(size, config.data.seq_length, config.model.vocab_size, config.training.seed, i)
        if size
        else None
        for i, size in enumerate(sizes)
    )
    return Datasets(*made)


def _changes(config: RunConfig) -> Sequence[tuple[int, str | Sequence[str]]]:
    path = config.data.data_path_changes
    return read_data_path_changes(path) if path else ()


def _refuse_other_tokenizers(
    config: RunConfig, tokenizer: Tokenizer | None, data_path: Any
) -> None:
    """Compare the tokenizers of all corpora with the run's, or with one another."""
    if config.data.allow_tokenizer_mismatch or config.data.mock_data:
        return
    try:
        check_tokenizer(data_path, tokenizer, data_path_changes=_changes(config))
    except TokenizerMismatchError as error:
        raise TrainError(
            f"{error}, or give --allow-tokenizer-mismatch if both have the same tokens"
        ) from None


def of_conversations(config: RunConfig, tokenizer: Tokenizer | None) -> SFTTokenizer | None:
    """What conversations are tokenized with that are JSON lines, None where there are none."""
    data = config.data
    if tokenizer is None or not data.holds_conversation_lines:
        return None
    found = copy(conversation_tokenizer(tokenizer, data.tokenizer_model or ""))
    given = {"steps": data.max_template_steps, "characters": data.max_template_characters}
    named = {name: value for name, value in given.items() if value is not None}
    found.template = found.template.with_limits(replace(found.template.limits, **named))
    return found


def _infill(config: RunConfig, tokenizer: Tokenizer | None) -> FillInTheMiddle | None:
    """What takes documents apart, with the draws of the run's seed."""
    if not config.data.fim_data or tokenizer is None:
        return None
    return FillInTheMiddle(config.fim, tokenizer, config.training.seed)


def _require(dataset: Dataset | None, purpose: str) -> Dataset:
    if dataset is None:
        without = ", or do without by --eval-iters 0" if purpose == "validate" else ""
        raise TrainError(f"--split leaves nothing to {purpose} on; give it a share{without}")
    return dataset
