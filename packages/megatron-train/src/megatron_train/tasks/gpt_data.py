"""Samples of causal language modelling: corpora, conversations or mock data."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from megatron_data import (
    DataError,
    Datasets,
    Tokenizer,
    TokenizerMismatchError,
    build_gpt_datasets,
    build_sft_datasets,
)
from megatron_data.datasets import (
    Dataset,
    DatasetPool,
    FillInTheMiddle,
    FIMConfig,
    check_tokenizer,
    read_data_path_changes,
)
from megatron_data.sources import StorageCache
from megatron_data.tokenizers import SFTTokenizer, conversation_tokenizer
from megatron_data.torch import read_batch
from torch import Tensor

from megatron_train.config.data import CONVERSATION_OPTIONS
from megatron_train.config.run import RunConfig
from megatron_train.data_identity import changes_identity
from megatron_train.errors import TrainError
from megatron_train.mock_data import MockDataset
from megatron_train.tasks.task import MicroBatch


class GPTData:
    """The source of a run's samples; see `megatron_train.tasks.kinds.TaskData`.

    Args:
        config: Configuration of the run.
        tokenizer: Tokenizer of the run, or None.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer | None) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._path = config.data.corpora
        changes = config.data.data_path_changes
        self._changes = read_data_path_changes(changes) if changes else ()
        self._writer = _writer(config, tokenizer)
        self._build = self._builder()

    def datasets(self, sizes: Sequence[int]) -> Datasets:
        """Returns datasets with these numbers of samples; corpora are opened once and shared."""
        return self._build(sizes=sizes)

    def check(self) -> None:
        """Refuses corpora that were made with another tokenizer.

        Raises:
            TrainError: The tokenizers differ; the message names both.
        """
        data = self._config.data
        if data.allow_tokenizer_mismatch or data.mock_data:
            return
        try:
            check_tokenizer(self._path, self._tokenizer, data_path_changes=self._changes)
        except TokenizerMismatchError as error:
            raise TrainError(
                f"{error}, or give --allow-tokenizer-mismatch if both have the same tokens"
            ) from None

    def identity(self) -> dict[str, Any]:
        """Returns the settings that determine samples: order, masks and format of conversations."""
        data = self._config.data
        found: dict[str, Any] = {
            "order": data.sample_order,
            "reset_position_ids": data.reset_position_ids,
            "reset_attention_mask": data.reset_attention_mask,
            "sft": data.sft,
            "fim": asdict(self._config.section(FIMConfig)) if data.fim_data else None,
            "written": None,
        }
        if self._writer is not None:
            given = data.tokenizer_settings
            named = {name: given[name] for name in CONVERSATION_OPTIONS if name in given}
            # A template's file or a tokenizer's folder may change its content under the same name.
            fingerprint = self._writer.template.fingerprint[:19]
            found["written"] = named | {"template": fingerprint}
        if self._changes:
            found["changes"] = changes_identity(self._changes)
        return found

    def read(self, dataset: Dataset, samples: Sequence[int]) -> dict[str, Tensor]:
        """Reads samples by their numbers; returns fields of shape ``[b, s]`` and ``[b]``.

        Raises:
            DataError: A token is not in the model's vocabulary.
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
        """Returns the micro-batch of these fields."""
        return MicroBatch.from_fields(fields, token_field="tokens")

    def _builder(self) -> Callable[..., Datasets]:
        """Returns a function that builds the datasets of the run from their `sizes`."""
        config, tokenizer, data = self._config, self._tokenizer, self._config.data
        if data.mock_data:
            return partial(_mock_datasets, config)
        build = partial(
            build_sft_datasets if data.sft else build_gpt_datasets,
            self._path,
            data.split,
            sequence_length=data.seq_length,
            seed=config.training.seed,
            order=data.sample_order,
            mmap=data.mmap_bin_files,
            storage=StorageCache(folder) if (folder := data.object_storage_cache_path) else None,
            dataset_pool=DatasetPool(),
        )
        if data.sft:
            longest = data.max_document_bytes
            limits = {} if longest is None else {"max_document_bytes": longest}
            return partial(build, tokenizer=self._writer, **limits)
        return partial(
            build,
            data_path_changes=self._changes,
            eod_id=tokenizer.eod_id if tokenizer else None,
            reset_position_ids=data.reset_position_ids,
            reset_attention_mask=data.reset_attention_mask,
            eod_mask_loss=data.eod_mask_loss,
            infill=_infill(config, tokenizer),
            cache_path=data.data_cache_path if data.sample_order == "compat" else None,
        )


def _mock_datasets(config: RunConfig, sizes: Sequence[int]) -> Datasets:
    length, vocab_size = config.data.seq_length, config.model.embedding.vocab_size
    made = (
        MockDataset(size, length, vocab_size, config.training.seed, i) if size else None
        for i, size in enumerate(sizes)
    )
    return Datasets(*made)


def _writer(config: RunConfig, tokenizer: Tokenizer | None) -> SFTTokenizer | None:
    """Returns the tokenizer for conversations in JSON lines, or None if the run reads none."""
    data = config.data
    if tokenizer is None or not data.holds_conversation_lines:
        return None
    found = copy(conversation_tokenizer(tokenizer, data.tokenizer_model or ""))
    given = {"steps": data.max_template_steps, "characters": data.max_template_characters}
    named = {name: value for name, value in given.items() if value is not None}
    found.template = found.template.with_limits(replace(found.template.limits, **named))
    return found


def _infill(config: RunConfig, tokenizer: Tokenizer | None) -> FillInTheMiddle | None:
    """Returns the fill-in-the-middle transform with the run's seed, or None if it is off."""
    if not config.data.fim_data or tokenizer is None:
        return None
    return FillInTheMiddle(config.section(FIMConfig), tokenizer, config.training.seed)
