"""Samples of left-to-right language modelling: corpora, conversations, made-up text."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_data import (
    DataError,
    Dataset,
    Datasets,
    FillInTheMiddle,
    FIMConfig,
    OpenDatasets,
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
from torch import Tensor

from megatron_train.config.run import RunConfig
from megatron_train.errors import TrainError
from megatron_train.mock_data import MockDataset
from megatron_train.tasks.task import MicroBatch


class GPTData:
    """What a run reads its samples from, see `megatron_train.tasks.kinds.TaskData`.

    Args:
        config: the run.
        tokenizer: its tokenizer, if it has one.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer | None) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._path = config.data.corpora
        self._build = _builder(config, tokenizer, self._path)

    def datasets(self, sizes: Sequence[int]) -> Datasets:
        """Return the datasets of these numbers of samples, opened when they are asked for."""
        return self._build(sizes=sizes)

    def check(self) -> None:
        """Refuse corpora that another tokenizer made.

        Raises:
            TrainError: naming both.
        """
        _refuse_other_tokenizers(self._config, self._tokenizer, self._path)

    def read(self, dataset: Dataset, samples: Sequence[int]) -> dict[str, Tensor]:
        """Read samples by their numbers: fields ``[b, s]`` and ``[b]``.

        Raises:
            DataError: a token that the model does not have.
        """
        fields = read_batch(dataset, samples)
        size = self._config.model.embedding.vocab_size
        largest = max(int(fields[name].max()) for name in ("tokens", "labels"))
        if largest >= size:
            raise DataError(
                f"the corpus holds token {largest}, but the vocabulary has {size}; "
                "train with the tokenizer that the corpus was made with"
            )
        return fields

    def micro_batch(self, fields: Mapping[str, Tensor]) -> MicroBatch:
        """Return the micro-batch of these fields, counted by its tokens."""
        return MicroBatch.of(fields, by="tokens")


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
    length, vocab_size = config.data.seq_length, config.model.embedding.vocab_size
    made = (
        MockDataset(size, length, vocab_size, config.training.seed, i) if size else None
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
    return FillInTheMiddle(config.section(FIMConfig), tokenizer, config.training.seed)
