"""Builds the training, validation and test datasets of a run."""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from megatron_data.datasets.batches import Dataset
from megatron_data.datasets.builders import (
    Builder,
    CompatBuilder,
    GPTBuilder,
    OrderName,
    PackedBuilder,
    SplitRequest,
    StatelessBuilder,
    check_order_name,
)
from megatron_data.datasets.fim import FillInTheMiddle
from megatron_data.datasets.gpt import GPTDatasetConfig, TokenSource
from megatron_data.datasets.paths import Blend, parse_data_path, parse_per_split
from megatron_data.datasets.pool import DatasetPool
from megatron_data.datasets.split import DEFAULT_SPLIT, Interval, parse_split
from megatron_data.datasets.split_names import SPLITS
from megatron_data.errors import DataError
from megatron_data.sources.block_cache import StorageCache

DataPath: TypeAlias = (
    "str | os.PathLike[str] | Sequence[str] | Blend | Mapping[str, str | Sequence[str] | None]"
)

_WHOLE: Interval = (0.0, 1.0)


class Datasets(NamedTuple):
    """One dataset per split. A dataset is None if its size is 0 or its split is empty."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None


def build_gpt_datasets(
    data_path: DataPath,
    split: str | None = DEFAULT_SPLIT,
    sizes: tuple[int | None, int | None, int | None] = (None, None, None),
    sequence_length: int = 1024,
    seed: int = 1234,
    *,
    order: OrderName = "stateless",
    data_path_changes: Sequence[tuple[int, DataPath]] = (),
    eod_id: int | None = None,
    pad_id: int | None = None,
    add_extra_token: bool = True,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
    cu_seqlens: bool = False,
    infill: FillInTheMiddle | None = None,
    drop_last_partial_validation: bool = True,
    surplus: float = 0.005,
    cache_path: str | os.PathLike[str] | None = None,
    storage: StorageCache | None = None,
    mmap: bool = True,
    dataset_pool: DatasetPool | None = None,
) -> Datasets:
    """Builds the three GPT datasets of a run.

    Args:
        data_path: A prefix; a `--data-path` list of prefixes, or of alternating weights and
            prefixes; a `Blend`, such as the result of `blend_by_epochs` or `blend_by_tokens`; or a
            mapping from "train", "valid" and "test" to such values.
        split: Fractions of each dataset for the three splits, as in `--split`. Not used with a
            mapping. Defaults to "969,30,1".
        sizes: Number of training, validation and test samples. None takes one epoch, 0 builds no
            dataset. Defaults to one epoch each.
        sequence_length: Tokens in a sample. Defaults to 1024.
        seed: Seed of the order. Defaults to 1234.
        order: "stateless" computes each sample from its index: no index is built, and a longer run
            or changed weights do not affect earlier samples. "packed" does not split documents
            that fit into a sample; see `Packing`. "compat" equals Megatron's samples element by
            element. Defaults to "stateless".
        data_path_changes: Pairs of a training sample and the data that replaces `data_path` from
            that sample on, with other weights or other datasets. Not with "compat".
        eod_id: End-of-document token.
        pad_id: Token that is excluded from the loss as a label and read as token 0, as
            megatron-core treats the padding token of the tokenizer. Defaults to no such token.
        add_extra_token: Reads one token beyond `sequence_length`, for the last label. Defaults to
            True.
        reset_position_ids: Restarts positions after each document. Defaults to False.
        reset_attention_mask: Gives each document its own id, which attention does not cross.
            Defaults to False.
        eod_mask_loss: Excludes positions whose input is `eod_id` from the loss. Defaults to False.
        cu_seqlens: Adds `cu_seqlens` and `max_seqlen`, the bounds of documents. Defaults to False.
        infill: Rearranges documents for fill-in-the-middle, also in validation and test as in
            Megatron. Defaults to None.
        drop_last_partial_validation: Omits an incomplete last validation sample. Defaults to True.
        surplus: Fraction of extra samples that each dataset of a weighted blend provides. "compat"
            only. Defaults to 0.005.
        cache_path: Folder that stores built indices. "compat" only. Defaults to None, which builds
            them each time.
        storage: Cache for prefixes that are URLs.
        mmap: Maps token files into memory; see `IndexedDataset`. Defaults to True.
        dataset_pool: Datasets that several calls share, such as one call per split. Defaults to a
            pool for this call.

    Raises:
        EmptySplitError: A split has no token.
        DataError: A dataset is missing or damaged, or a blend draws more samples from a dataset
            than it has.
    """
    check_order_name(order)
    config = GPTDatasetConfig(
        sequence_length=sequence_length,
        eod_id=eod_id,
        pad_id=pad_id,
        add_extra_token=add_extra_token,
        reset_position_ids=reset_position_ids,
        reset_attention_mask=reset_attention_mask,
        eod_mask_loss=eod_mask_loss,
        cu_seqlens=cu_seqlens,
    )
    builder: Builder
    if order == "compat":
        if data_path_changes:
            raise DataError(
                'data_path_changes does not work with the order "compat", which is drawn for a '
                'whole run; use "stateless" or "packed"'
            )
        builder = CompatBuilder(
            config=config,
            seed=seed,
            storage=storage,
            mmap=mmap,
            dataset_pool=dataset_pool or DatasetPool(),
            drop_last_partial_validation=drop_last_partial_validation,
            infill=infill,
            surplus=surplus,
            cache_path=cache_path,
        )
    else:
        changes = [(first, _training_data(first, path)) for first, path in data_path_changes]
        kind = PackedBuilder if order == "packed" else StatelessBuilder
        builder = kind(
            config=config,
            seed=seed,
            storage=storage,
            mmap=mmap,
            dataset_pool=dataset_pool or DatasetPool(),
            drop_last_partial_validation=drop_last_partial_validation,
            infill=infill,
            changes=changes,
        )
    return build_splits(builder, data_path, split, sizes)


def build_splits(
    builder: Builder,
    data_path: DataPath,
    split: str | None,
    sizes: tuple[int | None, int | None, int | None],
) -> Datasets:
    """Builds the three datasets with a builder.

    Args:
        builder: Builds the dataset of one split.
        data_path: Data path; see `build_gpt_datasets`.
        split: Fractions of the three splits; see `build_gpt_datasets`.
        sizes: Number of samples of each split; see `build_gpt_datasets`.

    Raises:
        EmptySplitError: A split has no token.
        DataError: The builder cannot build a dataset.
    """
    parts = _parts(data_path, split)
    built = [
        None
        if part is None or size == 0
        else builder.build_split(part[0], SplitRequest(name, part[1], size))
        for name, part, size in zip(SPLITS, parts, sizes, strict=True)
    ]
    return Datasets(*built)


def build_mock_gpt_datasets(
    source: TokenSource,
    sizes: tuple[int | None, int | None, int | None],
    config: GPTDatasetConfig,
    seed: int = 1234,
    split: str = "1,1,1",
    *,
    order: OrderName = "stateless",
) -> Datasets:
    """Builds the three GPT datasets of a source in memory, such as `MockTokens`.

    Args:
        source: Token source.
        sizes: Number of samples of each split; see `build_gpt_datasets`.
        config: Configuration of the samples.
        seed: Seed of the order. Defaults to 1234.
        split: Fractions of the three splits. Defaults to "1,1,1".
        order: Sample order; see `build_gpt_datasets`. Defaults to "stateless".

    Raises:
        EmptySplitError: A split has no token.
    """
    check_order_name(order)
    kinds: dict[str, type[GPTBuilder]] = {
        "stateless": StatelessBuilder,
        "packed": PackedBuilder,
        "compat": CompatBuilder,
    }
    builder = kinds[order](config=config, seed=seed)
    built = [
        None
        if interval is None or size == 0
        else builder.build_source(source, "mock", SplitRequest(name, interval, size))
        for name, interval, size in zip(SPLITS, parse_split(split), sizes, strict=True)
    ]
    return Datasets(*built)


def _parts(data_path: DataPath, split: str | None) -> list[tuple[Blend, Interval] | None]:
    """Returns the blend and the interval of each split."""
    if isinstance(data_path, Mapping):
        blends = parse_per_split(data_path)
        return [None if (blend := blends[name]) is None else (blend, _WHOLE) for name in SPLITS]
    if split is None:
        raise DataError(
            "--split is required if all splits come from the same data, such as "
            f"--split {DEFAULT_SPLIT}"
        )
    blend = parse_data_path(data_path)
    return [None if interval is None else (blend, interval) for interval in parse_split(split)]


def _training_data(first_sample: int, data_path: DataPath) -> Blend:
    """Returns the training blend of a changed data path."""
    if not isinstance(data_path, Mapping):
        return parse_data_path(data_path)
    blend = parse_per_split(data_path)["train"]
    if blend is None:
        raise DataError(f"the data path from sample {first_sample} on has no training data")
    return blend
