"""Training, validation and test datasets from what a command line names."""

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
from megatron_data.datasets.split import DEFAULT_SPLIT, SPLITS, Interval, parse_split
from megatron_data.errors import DataError
from megatron_data.sources.block_cache import StorageCache

DataPath: TypeAlias = (
    "str | os.PathLike[str] | Sequence[str] | Blend | Mapping[str, str | Sequence[str] | None]"
)

_WHOLE: Interval = (0.0, 1.0)


class Datasets(NamedTuple):
    """One dataset per split, None where nothing was asked for or the split is empty."""

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
    """Builds the three datasets of a run.

    Args:
        data_path: A prefix; a `--data-path` list of prefixes, or of weights and prefixes in turn;
            a `Blend`, such as `blend_by_epochs` and `blend_by_tokens` give; or a mapping
            from "train", "valid" and "test" to such a list each.
        split: How a dataset is cut into the three splits; not used with a mapping.
        sizes: Samples wanted for training, validation and test. None takes one epoch; 0 builds
            nothing.
        sequence_length: Tokens in a sample.
        seed: Of the order.
        order: "stateless" computes every sample from its number: nothing is built or kept, a run
            can be made longer, and weights changed, without changing what it has seen. "packed"
            does not cut documents that fit into a sample, see `Packing`. "compat" gives Megatron's
            samples element by element.
        data_path_changes: Data that takes the place of `data_path` in training from a sample on,
            with other weights or other datasets; not with "compat".
        eod_id: Token that ends a document.
        pad_id: Token that bears no loss as a label and is read as token 0, as megatron-core treats
            the tokenizer's padding token; None for none.
        add_extra_token: Read one token beyond the sequence length, for the last label.
        reset_position_ids: Restart positions after a document.
        reset_attention_mask: Number documents, so that attention stays within one.
        eod_mask_loss: No loss where the input is the end-of-document token.
        cu_seqlens: Add `cu_seqlens` and `max_seqlen`, the bounds of documents.
        infill: What takes documents apart for filling in the middle; also in validation and test,
            as in Megatron.
        drop_last_partial_validation: Leave out a last validation sample that is not full.
        surplus: Share of samples that each dataset of a weighted blend holds in reserve; "compat"
            only.
        cache_path: Folder for built indices, or None to build them each time; "compat" only.
        storage: Cache for what is read of prefixes that are URLs.
        mmap: Map token files into memory; see `IndexedDataset`.
        dataset_pool: Datasets that several calls share, such as one call per split. Defaults to a
            pool for this call.

    Raises:
        EmptySplitError: A split without tokens.
        DataError: A dataset that is missing or damaged, or a blend that asks a dataset for more
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
                'data that changes at a sample needs another order than "compat", which is drawn '
                "for a whole run"
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
    """Returns the three datasets that a builder makes of what a command line names.

    Raises:
        EmptySplitError: A split without tokens.
        DataError: What the builder cannot make a dataset of.
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
    """Returns the three datasets of a source in memory, such as `MockTokens`.

    Raises:
        DataError: A split without tokens.
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
    """Blends and interval of each split."""
    if isinstance(data_path, Mapping):
        blends = parse_per_split(data_path)
        return [None if (blend := blends[name]) is None else (blend, _WHOLE) for name in SPLITS]
    if split is None:
        raise DataError(
            f"--split is needed where all splits come from the same data: {DEFAULT_SPLIT}"
        )
    blend = parse_data_path(data_path)
    return [None if interval is None else (blend, interval) for interval in parse_split(split)]


def _training_data(first_sample: int, data_path: DataPath) -> Blend:
    """Returns what a change of data names for training."""
    if not isinstance(data_path, Mapping):
        return parse_data_path(data_path)
    blend = parse_per_split(data_path)["train"]
    if blend is None:
        raise DataError(f"the data from sample {first_sample} on names nothing to train on")
    return blend
