"""Limits and defaults of datasets: settings, samples by hand, batches, blends and data paths."""

import inspect
import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from megatron_data import DataError, build_gpt_datasets, build_sft_datasets
from megatron_data.datasets import classification
from megatron_data.datasets.batches import merge_batches, read_batch, stack, unstack
from megatron_data.datasets.bert import BertDatasetConfig
from megatron_data.datasets.blended import BlendedDataset
from megatron_data.datasets.build import build_mock_gpt_datasets
from megatron_data.datasets.build_ict import build_ict_datasets
from megatron_data.datasets.build_sentences import build_bert_datasets, build_t5_datasets
from megatron_data.datasets.builders import check_order_name
from megatron_data.datasets.fim_config import FIMConfig
from megatron_data.datasets.gpt import GPTDataset, GPTDatasetConfig
from megatron_data.datasets.hugging_face import hugging_face_inputs
from megatron_data.datasets.ict import ICTDatasetConfig
from megatron_data.datasets.labelled_texts import TextColumns
from megatron_data.datasets.masking import MaskingConfig
from megatron_data.datasets.masks import cumulative_lengths, document_masks
from megatron_data.datasets.mock import MockTokens
from megatron_data.datasets.padding import pad, pad_text
from megatron_data.datasets.paths import (
    Blend,
    is_conversation_file,
    parse_data_path,
    parse_per_split,
    read_data_path_changes,
    read_per_split_data_args,
    write_data_args,
)
from megatron_data.datasets.pool import DatasetPool
from megatron_data.datasets.sft import make_sample
from megatron_data.datasets.split import parse_split, sequence_range
from megatron_data.datasets.t5 import T5DatasetConfig

Write = Callable[..., str]


@pytest.mark.parametrize(
    ("make", "least", "message"),
    [
        (BertDatasetConfig, 5, "give at least 5"),
        (lambda length: T5DatasetConfig(length, 40), 4, "^sequence length 3; give at least 4"),
        (lambda length: T5DatasetConfig(40, length), 4, "decoder sequence length 3; give at least"),
        (ICTDatasetConfig, 5, "give at least 5"),
        (GPTDatasetConfig, 1, "sequence length 0; give at least 1"),
        (lambda number: MaskingConfig(max_ngram=number), 1, "max_ngram 0; give at least 1"),
    ],
)
def test_the_shortest_samples_have_room_for_text(
    make: Callable[[int], object], least: int, message: str
) -> None:
    make(least)
    with pytest.raises(DataError, match=message):
        make(least - 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda share: BertDatasetConfig(40, short_probability=share),
        lambda share: T5DatasetConfig(40, 40, short_probability=share),
        lambda share: ICTDatasetConfig(40, query_in_block_probability=share),
        *(
            lambda share, name=name: FIMConfig(**{name: share})
            for name in ("rate", "spm_rate", "fragment_rate")
        ),
    ],
)
def test_shares_lie_between_0_and_1(make: Callable[[float], object]) -> None:
    for share in (0, 0.0, 0.5, 1, 1.0):
        make(share)
    for share in (-0.001, 1.001):
        with pytest.raises(DataError, match=f"{share} is not a (rate|probability); give 0 to 1"):
            make(share)


def test_a_masking_probability_lies_within_0_and_1() -> None:
    for share in (0.001, 0.999):
        MaskingConfig(probability=share)
    for share in (0.0, 1.0):
        with pytest.raises(DataError, match=f"masking probability {share}; give one between"):
            MaskingConfig(probability=share)
    with pytest.raises(DataError, match="exclude each other"):
        MaskingConfig(geometric=True, permutation=True)
    for one in ({"geometric": True}, {"permutation": True}):
        MaskingConfig(**one)


def test_defaults_are_those_of_megatron() -> None:
    assert MaskingConfig() == MaskingConfig(0.15, 3, True, False, False, False)
    assert BertDatasetConfig(8) == BertDatasetConfig(8, MaskingConfig(), 0.1, True)
    assert BertDatasetConfig(8).min_sentences == 2
    assert BertDatasetConfig(8, binary_head=False).min_sentences == 1
    assert T5DatasetConfig(8, 8).masking == MaskingConfig(max_ngram=10, geometric=True)
    assert T5DatasetConfig(8, 8).short_probability == 0.1
    assert ICTDatasetConfig(8) == ICTDatasetConfig(8, 0.1, False)
    assert (ICTDatasetConfig(12).block_length, ICTDatasetConfig(12).title_length) == (9, 4)
    assert FIMConfig() == FIMConfig(
        0.5, 0.5, None, 0.5, None, "<fim_prefix>", "<fim_middle>", "<fim_suffix>"
    )
    assert GPTDatasetConfig(8) == GPTDatasetConfig(8, None, None, True, False, False, False, False)
    for build in (build_gpt_datasets, build_sft_datasets, build_bert_datasets, build_t5_datasets,
                  build_ict_datasets, classification.build_classification_datasets):  # fmt: skip
        defaults = inspect.signature(build).parameters
        assert defaults["seed"].default == 1234
        assert defaults["sizes"].default == (None, None, None)
        for name, value in (("split", "969,30,1"), ("surplus", 0.005), ("mmap", True),
                            ("cache_path", None), ("eod_mask_loss", False),
                            ("reset_position_ids", False), ("reset_attention_mask", False),
                            ("add_extra_token", True), ("cu_seqlens", False),
                            ("drop_last_partial_validation", True)):  # fmt: skip
            if name in defaults and (name != "sequence_length" or value):
                assert defaults[name].default == value


@pytest.mark.parametrize(
    ("checked", "name"),
    [
        (MaskingConfig(), "probability"),
        (BertDatasetConfig(8), "sequence_length"),
        (T5DatasetConfig(8, 8), "sequence_length"),
        (ICTDatasetConfig(8), "sequence_length"),
        (GPTDatasetConfig(8), "sequence_length"),
        (FIMConfig(), "rate"),
        (TextColumns(), "texts"),
    ],
)
def test_settings_cannot_change_after_they_are_checked(checked: object, name: str) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(checked, name, -1)


@pytest.mark.parametrize(
    ("longer", "shares"), [(False, [6 / 11, 9 / 11, 1.0]), (True, [2 / 11, 5 / 11, 1.0])]
)
def test_short_spans_are_likelier_unless_long_ones_are_preferred(
    longer: bool, shares: list[float]
) -> None:
    """Spans of 1, 2 and 3 words have 6, 3 and 2 elevenths."""
    found = MaskingConfig(max_ngram=3, longer_ngrams=longer).ngram_shares()
    assert found.tolist() == pytest.approx(shares, rel=1e-15)
    assert found[-1] == 1.0


# -- samples by hand --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "bounds", "longest"),
    [
        ([0, 0, 1, 1, 1, -1], [0, 2, 5, 6, 6, 6, 6], 3),
        ([0, 0, 0], [0, 3, 3, 3], 3),
        ([0, 1, 2], [0, 1, 2, 3], 1),
        ([0], [0, 1], 1),
        ([0, -1, -1, -1], [0, 1, 4, 4, 4], 3),
    ],
)
def test_bounds_are_the_ends_of_documents(ids: list[int], bounds: list[int], longest: int) -> None:
    one = cumulative_lengths(np.array(ids, np.int32))
    assert (one.cu_seqlens.tolist(), int(one.max_seqlen)) == (bounds, longest)
    two = cumulative_lengths(np.array([ids, ids], np.int32))
    assert two.cu_seqlens.tolist() == [bounds, bounds]
    assert two.max_seqlen.tolist() == [longest, longest]


@pytest.mark.parametrize("position", [False, True])
@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("loss", [False, True])
def test_each_reset_of_documents_works_alone(position: bool, attention: bool, loss: bool) -> None:
    tokens = np.array([[9, 5, 6, 9, 9, 7], [5, 6, 7, 5, 6, 9]])
    found = document_masks(
        tokens,
        9,
        reset_position_ids=position,
        reset_attention_mask=attention,
        eod_mask_loss=loss,
    )
    counted = [0, 1, 2, 3, 4, 5]
    assert found.positions.tolist() == [[0, 0, 1, 2, 0, 0] if position else counted, counted]
    assert found.document_ids.tolist() == [[0, 1, 1, 1, 2, 3] if attention else [0] * 6, [0] * 6]
    assert found.loss_mask.tolist() == (
        [[0, 1, 1, 0, 0, 1], [1, 1, 1, 1, 1, 0]] if loss else [[1] * 6] * 2
    )


def test_a_sample_of_conversations_by_hand() -> None:
    parts = [
        (np.array([11, 12, 13]), np.array([0, 1, 1])),
        (np.array([21, 22]), np.array([1, 1])),
    ]
    found = make_sample(parts, 7, 3)
    assert {name: array.tolist() for name, array in found.items()} == {
        "tokens": [11, 12, 13, 21, 22, 0, 0],
        "labels": [12, 13, 21, 22, 0, 0, 0],
        # The first token of a conversation is no label, although its mask is 1.
        "loss_mask": [1, 1, 0, 1, 0, 0, 0],
        "positions": [0, 1, 2, 0, 1, 0, 0],
        "document_ids": [0, 0, 0, 1, 1, -1, -1],
        "cu_seqlens": [0, 3, 5, 7, 7, 7, 7, 7],
        "max_seqlen": 3,
        "sample_ids": 3,
    }
    full = make_sample([(np.arange(1, 5), np.ones(4))], 3, 0)  # one token more, for the last label
    assert full["tokens"].tolist() == [1, 2, 3] and full["labels"].tolist() == [2, 3, 4]
    assert full["loss_mask"].tolist() == [1, 1, 1]


def test_inputs_of_hugging_face_shift_the_labels_by_one() -> None:
    sample = {
        "tokens": np.array([5, 6, 7, 0]),
        "labels": np.array([6, 7, 8, 0]),
        "loss_mask": np.array([1, 0, 1, 0], np.float32),
        "positions": np.array([0, 1, 0, 1], np.int32),
        "document_ids": np.array([0, 0, 1, -1], np.int32),
    }
    found = hugging_face_inputs(sample)
    assert {name: array.tolist() for name, array in found.items()} == {
        "input_ids": [5, 6, 7, 0],
        "labels": [-100, 6, -100, 8],
        "position_ids": [0, 1, 0, 1],
        "attention_mask": [1, 1, 1, 0],
    }
    assert all(array.dtype == np.int64 for array in found.values())
    assert sample["labels"].tolist() == [6, 7, 8, 0]


def test_text_is_padded_behind_its_end() -> None:
    assert pad([3, 4], 4).tolist() == [3, 4, 0, 0]
    tokens, ids = pad_text([3, 0, 4], 5)
    assert (tokens.tolist(), ids.tolist()) == ([3, 0, 4, 0, 0], [0, 0, 0, -1, -1])
    assert pad_text([3], 1)[1].tolist() == [0]


def test_mock_documents_have_1_token_or_more_and_any_part_can_be_read() -> None:
    mock = MockTokens(vocab_size=5, eod_id=4)
    lengths = mock.sequence_lengths
    assert len(lengths) == 100_000 and (lengths.min(), lengths.max()) == (1, 4095)
    number = int(np.flatnonzero(lengths == 7)[0])
    whole = [1, 2, 3, 4, 0, 1, 4]
    for offset in range(8):
        assert mock.get(number, offset).tolist() == whole[offset:]
        for length in range(8 - offset):
            assert mock.get(number, offset, length).tolist() == whole[offset : offset + length]


# -- batches and blends -----------------------------------------------------------------------


def test_batches_are_stacked_merged_and_taken_apart_again() -> None:
    samples = [
        {"tokens": np.array([number, 7]), "sample_ids": np.array(number)} for number in range(4)
    ]
    batch = stack(samples)
    assert batch["tokens"].tolist() == [[0, 7], [1, 7], [2, 7], [3, 7]]
    assert [one["tokens"].tolist() for one in unstack(batch)] == batch["tokens"].tolist()
    assert unstack(batch)[2]["sample_ids"] == 2
    merged = merge_batches([([3, 0], stack(samples[1:3])), ([1, 2], stack(samples[::3]))])
    assert merged["sample_ids"].tolist() == [2, 0, 3, 1]
    for samples_of, message in (
        ([], "a batch needs at least one sample"),
        ([samples[0], {"tokens": np.array([1])}], "have different keys"),
    ):
        with pytest.raises(DataError, match=message):
            stack(samples_of)
    with pytest.raises(DataError, match="have different keys"):
        merge_batches([([0], stack(samples[:1])), ([1], {"tokens": np.array([[1, 2]])})])
    with pytest.raises(DataError, match="at least one sample"):
        read_batch(samples, [])  # type: ignore[arg-type]


def test_a_blend_may_draw_every_sample_of_a_dataset_and_no_more() -> None:
    def order(*counts: int) -> Any:
        return SimpleNamespace(counts=lambda: list(counts), __len__=lambda: sum(counts))

    datasets: list[Any] = [[1, 2], [1]]
    BlendedDataset(datasets, order(2, 1))
    with pytest.raises(DataError, match="draws 2 samples from dataset 1, which has 1; raise"):
        BlendedDataset(datasets, order(2, 2))
    with pytest.raises(DataError, match="has 3 sources, but there are 2 datasets"):
        BlendedDataset(datasets, order(1, 1, 1))


def test_an_order_for_another_length_is_refused() -> None:
    source: Any = SimpleNamespace()
    for extra, length in ((True, 9), (False, 8)):
        order: Any = SimpleNamespace(sample_length=length)
        config = GPTDatasetConfig(8, add_extra_token=extra)
        assert GPTDataset(source, order, config).config.extra == extra
        with pytest.raises(DataError, match=rf"samples of {length} tokens, but .* 7 \+ {extra:d}"):
            GPTDataset(source, order, GPTDatasetConfig(7, add_extra_token=extra))
    for name in ("stateless", "packed", "compat"):
        check_order_name(name)
    with pytest.raises(DataError, match="order='random'; give one of stateless, packed, compat"):
        check_order_name("random")


@pytest.mark.parametrize("order", ["stateless", "packed", "compat"])
def test_sizes_of_mock_datasets_may_be_0_and_splits_empty(order: Any) -> None:
    source = MockTokens(50, 7, num_documents=30, max_length=20)
    config = GPTDatasetConfig(8)
    found = build_mock_gpt_datasets(source, (5, 0, 3), config, order=order)
    assert found.train is not None and found.test is not None and found.valid is None
    assert found.train[4]["tokens"].shape == (8,)
    if order != "packed":  # the incomplete last sample of a validation is omitted
        valid = build_mock_gpt_datasets(source, (0, None, 0), config, order=order).valid
        tokens = int(source.sequence_lengths[10:20].sum())
        assert valid is not None and len(valid) == (tokens - 1) // 8 < (tokens - 1) / 8
    found = build_mock_gpt_datasets(source, (5, 5, 5), config, split="1,0,1", order=order)
    assert found.train is not None and found.valid is None and found.test is not None
    with pytest.raises(DataError, match="order='random'; give one of"):
        build_mock_gpt_datasets(source, (5, 0, 0), config, order="random")  # type: ignore[arg-type]


def test_a_pool_keeps_one_dataset_for_each_way_of_reading(write_dataset: Write) -> None:
    prefix, pool = write_dataset([[1, 2]]), DatasetPool()
    assert not pool.is_open(prefix)
    mapped = pool.indexed_dataset(prefix)
    assert pool.is_open(prefix) and not pool.is_open(prefix, mmap=False)
    assert pool.indexed_dataset(prefix) is mapped
    assert pool.indexed_dataset(prefix, mmap=False) is not mapped
    assert mapped.tokens.tolist() == [1, 2]  # mapped into memory


# -- data paths -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "bounds"),
    [
        ("969,30,1", [(0.0, 0.969), (0.969, 0.999), (0.999, 1.0)]),
        ("98, 2", [(0.0, 0.98), (0.98, 1.0), None]),
        ("7", [(0.0, 1.0), None, None]),
        ("0,1,0", [None, (0.0, 1.0), None]),
    ],
)
def test_splits_are_shares_of_their_sum(split: str, bounds: list[Any]) -> None:
    for found, wanted in zip(parse_split(split), bounds, strict=True):
        assert found == (None if wanted is None else pytest.approx(wanted))


@pytest.mark.parametrize(
    ("count", "half"), [(0, 0), (1, 0), (2, 1), (3, 2), (5, 2), (7, 4), (9, 4), (10, 5)]
)
def test_bounds_of_splits_are_rounded_half_to_even(count: int, half: int) -> None:
    assert sequence_range((0.0, 0.5), count) == (0, half)
    assert sequence_range((0.5, 1.0), count) == (half, count)


def test_data_paths_are_written_as_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "args"
    for blend, text in (
        (Blend(("a", "b"), (0.25, 2.0)), "0.25 a\n2.0 b\n"),
        (Blend(("a", "b"), None), "a\nb\n"),
    ):
        write_data_args(path, blend)
        assert path.read_text() == text
    with pytest.raises(DataError, match="'a b' contains white space"):
        write_data_args(path, Blend(("x", "a b"), None))
    assert parse_data_path(["1", "a", "b"]) == Blend(("1", "a", "b"), None)
    assert parse_data_path(["a", "1"]) == Blend(("a", "1"), None)
    assert parse_data_path(blend) is blend
    for name, lines in (("a.jsonl", True), ("a.json.gz", True), ("a", False), ("a.txt", False)):
        assert is_conversation_file(name) == lines


@pytest.mark.parametrize("value", [5, ["a", 1], [["a"]], {"a": 1}])
def test_the_data_of_a_split_is_text_or_a_list_of_texts(value: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"valid is .*; give a string or a list of strings"):
        parse_per_split({"train": "a", "valid": value})
    assert parse_per_split({"train": "1 a 2 b", "valid": None, "test": []}) == {
        "train": Blend(("a", "b"), (1.0, 2.0)),
        "valid": None,
        "test": None,
    }
    (tmp_path / "list").write_text("[]")
    with pytest.raises(DataError, match="is not a JSON object with the keys train, valid, test"):
        read_per_split_data_args(tmp_path / "list")
    with pytest.raises(DataError, match=r"--per-split-data-args-path .* does not exist"):
        read_per_split_data_args(tmp_path / "none")


def test_a_change_of_data_has_no_further_keys(tmp_path: Path) -> None:
    path = tmp_path / "changes.json"
    entry = {"from_sample": 5, "data_path": "a b"}
    path.write_text(json.dumps(entry))  # a single entry needs no list
    assert read_data_path_changes(path) == [(5, ["a", "b"])]
    for value in ("a b", ["a", "b"]):
        path.write_text(json.dumps([entry, entry | {"data_path": value, "weight": 1}]))
        with pytest.raises(DataError, match="give entries such as"):
            read_data_path_changes(path)
