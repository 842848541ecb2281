from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_data import (
    BlendedDataset,
    DataError,
    GPTDataset,
    GPTDatasetConfig,
    IndexedDataset,
    build_gpt_datasets,
    read_batch,
)
from megatron_data.datasets import (
    Blend,
    MockTokens,
    cumulative_lengths,
    parse_data_path,
    parse_split,
    read_data_args,
    read_data_path_changes,
    read_per_split_data_args,
)
from megatron_data.datasets.builders import OrderName
from megatron_data.datasets.masks import document_masks
from megatron_data.datasets.split import sequence_range
from megatron_data.order import CompatOrder, GPTIndices, GreedyBlend

Write = Callable[..., str]


def in_file_order(prefix: str, sequence_length: int, extra: int = 1, **options: Any) -> GPTDataset:
    """Returns a dataset whose samples are in the order of the file."""
    from megatron_data.order.compat import build_sample_index

    source = IndexedDataset(prefix)
    documents = np.arange(len(source), dtype=np.int32)
    index = build_sample_index(
        source.sequence_lengths,
        documents,
        sequence_length=sequence_length,
        extra=extra,
        drop_last_partial=False,
    )
    indices = GPTIndices(documents, index, np.arange(len(index) - 1))
    config = GPTDatasetConfig(sequence_length, add_extra_token=bool(extra), **options)
    return GPTDataset(source, CompatOrder(indices, sequence_length, extra), config)


def test_masks_equal_the_golden_numbers(golden: dict[str, Any]) -> None:
    given = golden["document_masks"]
    masks = document_masks(
        np.array(given["tokens"]),
        given["eod"],
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
    )
    assert masks.positions.tolist() == given["position_ids"]
    assert masks.loss_mask.tolist() == given["loss_mask"]
    same = masks.document_ids[:, None] == masks.document_ids[None, :]
    masked = ~np.tril(same)
    assert masked.astype(int).tolist() == given["attention_mask_true_is_masked"]


def test_nothing_is_reset_by_default() -> None:
    masks = document_masks(np.array([5, 0, 0, 7]), 0)
    assert masks.positions.tolist() == [0, 1, 2, 3]
    assert masks.document_ids.tolist() == [0, 0, 0, 0]
    assert masks.loss_mask.tolist() == [1, 1, 1, 1]


def test_a_sample_by_hand(write_dataset: Write) -> None:
    dataset = in_file_order(
        write_dataset([[1, 2, 0], [3, 0], [4, 5, 6, 7, 0]]),
        4,
        eod_id=0,
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
    )
    assert len(dataset) == 3
    sample = dataset[0]
    assert {key: (value.dtype, value.tolist()) for key, value in sample.items()} == {
        "tokens": (np.int64, [1, 2, 0, 3]),
        "labels": (np.int64, [2, 0, 3, 0]),
        "loss_mask": (np.float32, [1, 1, 0, 1]),
        "positions": (np.int32, [0, 1, 2, 0]),
        "document_ids": (np.int32, [0, 0, 0, 1]),
        "sample_ids": (np.int64, 0),
    }
    last = dataset[2]  # one token and its label, then padding
    assert last["tokens"].tolist() == [7, 0, 0, 0]
    assert last["labels"].tolist() == [0, 0, 0, 0]
    assert last["loss_mask"].tolist() == [1, 0, 0, 0]
    assert last["document_ids"].tolist() == [0, 0, -1, -1]
    assert last["positions"].tolist() == [0, 1, 0, 1]  # padding holds no end of a document


def test_bounds_of_documents_by_hand(write_dataset: Write) -> None:
    dataset = in_file_order(
        write_dataset([[1, 2, 0], [3, 0], [4, 5, 6, 7, 0]]),
        4,
        eod_id=0,
        reset_attention_mask=True,
        cu_seqlens=True,
    )
    found = dataset.batch([0, 1, 2])  # 1 2 0|3, 0|4 5 6, 7 0|padding
    assert found["cu_seqlens"].dtype == found["max_seqlen"].dtype == np.int32
    assert found["cu_seqlens"].tolist() == [[0, 3, 4, 4, 4], [0, 1, 4, 4, 4], [0, 2, 4, 4, 4]]
    assert found["max_seqlen"].tolist() == [3, 3, 2]
    single = dataset[0]
    assert single["cu_seqlens"].tolist() == [0, 3, 4, 4, 4]
    assert single["max_seqlen"].shape == ()
    with pytest.raises(DataError, match="set reset_attention_mask"):
        GPTDatasetConfig(8, eod_id=0, cu_seqlens=True)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=4))
def test_bounds_and_document_ids_describe_the_same_documents(ends: list[list[bool]]) -> None:
    tokens = np.where(ends, 0, 5)
    ids = document_masks(tokens, 0, reset_attention_mask=True).document_ids
    bounds, longest = cumulative_lengths(ids)
    for row in range(len(ids)):
        lengths = np.diff(bounds[row])
        assert np.array_equal(np.repeat(np.arange(9), lengths), ids[row])
        assert longest[row] == lengths.max()
        assert [bounds[row].tolist(), int(longest[row])] == [
            part.tolist() for part in cumulative_lengths(ids[row])
        ]


def test_tokens_and_labels_do_not_share_memory(write_dataset: Write) -> None:
    sample = in_file_order(write_dataset([[1, 2, 3, 4, 5]]), 4)[0]
    sample["tokens"][:] = 9
    assert sample["labels"].tolist() == [2, 3, 4, 5]


def test_the_padding_token_inside_the_text_stays_in_its_document(write_dataset: Write) -> None:
    """As in megatron-core, the token is only excluded from the loss as a label."""
    text = [[5, 7, 9, 0, 4, 6]]
    sample = in_file_order(write_dataset(text), 4, pad_id=9)[0]
    assert sample["tokens"].tolist() == [5, 7, 0, 0]
    assert sample["labels"].tolist() == [7, 0, 0, 4]
    assert sample["loss_mask"].tolist() == [1, 0, 1, 1]
    assert sample["document_ids"].tolist() == [0, 0, 0, 0]
    sample = in_file_order(write_dataset(text, "e"), 4, pad_id=0)[0]
    assert sample["loss_mask"].tolist() == [1, 1, 0, 1]
    assert sample["document_ids"].tolist() == [0, 0, 0, 0]


def test_only_padding_has_document_id_minus_one(write_dataset: Write) -> None:
    options = {"eod_id": 8, "pad_id": 0, "reset_attention_mask": True, "cu_seqlens": True}
    dataset = in_file_order(write_dataset([[5, 0, 8, 0, 0]]), 6, **options)
    sample = dataset[0]  # the last token has no label
    assert sample["tokens"].tolist() == [5, 0, 8, 0, 0, 0]
    assert sample["labels"].tolist() == [0, 8, 0, 0, 0, 0]
    assert sample["loss_mask"].tolist() == [0, 1, 0, 0, 0, 0]
    assert sample["document_ids"].tolist() == [0, 0, 0, 1, 1, -1]
    assert sample["cu_seqlens"].tolist() == [0, 3, 5, 6, 6, 6, 6]


def test_without_the_extra_token_the_last_label_has_no_loss(write_dataset: Write) -> None:
    sample = in_file_order(write_dataset([[1, 2, 3, 4]]), 4, extra=0)[0]
    assert sample["tokens"].tolist() == [1, 2, 3, 4]
    assert sample["labels"].tolist() == [2, 3, 4, 0]
    assert sample["loss_mask"].tolist() == [1, 1, 1, 0]


def test_contradictory_configurations_are_refused(write_dataset: Write) -> None:
    with pytest.raises(DataError, match="needs eod_id"):
        GPTDatasetConfig(8, reset_attention_mask=True)
    with pytest.raises(DataError, match="both pad_id and eod_id"):
        GPTDatasetConfig(8, eod_id=3, pad_id=3)
    with pytest.raises(DataError, match="sequence length 0"):
        GPTDatasetConfig(0)
    dataset = in_file_order(write_dataset([[1, 2, 3, 4, 5]]), 4)
    with pytest.raises(DataError, match="samples of 5 tokens, but the configuration has 8"):
        GPTDataset(dataset.source, dataset.order, GPTDatasetConfig(8))
    with pytest.raises(IndexError, match="sample 1 is out of range; there are 1 samples"):
        dataset[1]


@pytest.mark.parametrize("order", ["stateless", "compat"])
def test_every_token_occurs_once_in_an_epoch(write_dataset: Write, order: OrderName) -> None:
    prefix = write_dataset([range(i * 10, i * 10 + 10) for i in range(40)])
    train = build_gpt_datasets(prefix, "100", sequence_length=13, order=order).train
    assert train is not None
    seen = np.concatenate([train[i]["tokens"] for i in range(len(train))])
    assert len(set(seen.tolist())) == len(seen) == 13 * (399 // 13)


@pytest.mark.parametrize("order", ["stateless", "packed", "compat"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pad_id": 3},
        {"add_extra_token": False},
        {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True},
        {"reset_attention_mask": True, "cu_seqlens": True},
    ],
    ids=str,
)
def test_a_batch_equals_its_samples(
    write_dataset: Write, order: OrderName, options: dict[str, Any]
) -> None:
    words = ["3", write_dataset([[*range(i % 23), 0] for i in range(80)], "a")]
    words += ["1", write_dataset([[5, 0]] * 60, "b")]
    for data_path in (words, words[1]):
        train = build_gpt_datasets(
            data_path, "100", (20, 0, 0), 16, order=order, eod_id=0, **options
        ).train
        assert train is not None
        numbers = [7, 3, 3, 19, 0, 12]
        batch = read_batch(train, numbers)
        views = train.__getitems__(numbers)  # type: ignore[attr-defined]
        for row, number in enumerate(numbers):
            single = train[number]
            assert single.keys() == batch.keys() == views[row].keys()
            for name, value in single.items():
                for other in (batch[name][row, ...], views[row][name]):
                    assert (value.dtype, value.tolist()) == (other.dtype, other.tolist())
        assert all(array.flags.c_contiguous for array in batch.values())


def test_batches_of_any_dataset(write_dataset: Write) -> None:
    """A dataset without a method `batch` is read sample by sample."""
    samples = [{"a": np.arange(3) + i, "b": np.asarray(i)} for i in range(5)]
    batch = read_batch(samples, [4, 1])
    assert batch["a"].tolist() == [[4, 5, 6], [1, 2, 3]]
    assert batch["b"].tolist() == [4, 1]
    for source in (samples, in_file_order(write_dataset([[1, 2, 3, 4, 5]]), 4)):
        with pytest.raises(DataError, match="at least one sample"):
            read_batch(source, [])
    other = [{"a": np.arange(3)}] * 5
    mixture = BlendedDataset([samples, other], GreedyBlend([0.5, 0.5], 4))
    with pytest.raises(DataError, match="different keys"):
        mixture.batch([0, 1, 2])
    with pytest.raises(IndexError, match="sample 4 is out of range; there are 4 samples"):
        mixture.batch([4])


@pytest.mark.parametrize("order", ["stateless", "compat"])
def test_splits_share_no_document(write_dataset: Write, order: OrderName) -> None:
    prefix = write_dataset([[i] * 9 for i in range(100)])
    built = build_gpt_datasets(prefix, "70,20,10", (300, 50, 10), 16, order=order)
    documents = []
    for dataset in built:
        assert dataset is not None
        documents.append({int(t) for i in range(len(dataset)) for t in dataset[i]["tokens"]})
    assert documents == [set(range(70)), set(range(70, 90)), set(range(90, 100))]


@pytest.mark.parametrize("order", ["stateless", "compat"])
def test_sizes_of_none_and_zero(write_dataset: Write, order: OrderName) -> None:
    prefix = write_dataset([[i] * 9 for i in range(100)])
    train, valid, test = build_gpt_datasets(prefix, "70,20,10", (None, 0, None), 16, order=order)
    assert train is not None
    assert len(train) == (70 * 9 - 1) // 16
    assert valid is None
    assert test is not None


@pytest.mark.parametrize("order", ["stateless", "compat"])
def test_an_empty_split_is_an_error_that_names_it(write_dataset: Write, order: OrderName) -> None:
    prefix = write_dataset([[i] * 9 for i in range(10)])
    with pytest.raises(DataError, match=r"test split of .*d \(0 of 10 sequences\)"):
        build_gpt_datasets(prefix, "969,30,1", (10, 0, 10), 16, order=order)


def test_a_cached_build_equals_a_fresh_one(write_dataset: Write, tmp_path: Path) -> None:
    words = ["2", write_dataset([[i] * 9 for i in range(100)], "a"), "1"]
    words.append(write_dataset([[i] * 5 for i in range(50)], "b"))

    def tokens(cache: Path | None) -> list[list[int]]:
        train = build_gpt_datasets(
            words, "90,10", (60, 0, 0), 16, order="compat", cache_path=cache
        ).train
        assert train is not None
        return [train[i]["tokens"].tolist() for i in range(len(train))]

    fresh = tokens(None)
    assert tokens(tmp_path / "cache") == fresh
    entries = {path.name for path in (tmp_path / "cache").iterdir()}
    assert len(entries) == 3
    assert tokens(tmp_path / "cache") == fresh
    assert {path.name for path in (tmp_path / "cache").iterdir()} == entries


def test_a_replaced_dataset_does_not_hit_the_cache(write_dataset: Write, tmp_path: Path) -> None:
    for length in (9, 8):
        prefix = write_dataset([[1] * length] * 40)
        train = build_gpt_datasets(
            prefix, "100", sequence_length=16, order="compat", cache_path=tmp_path / "c"
        ).train
        assert train is not None
        assert len(train) == (40 * length - 1) // 16


@pytest.mark.parametrize("order", ["stateless", "compat"])
def test_a_blend_has_its_own_sample_ids_and_dataset_ids(
    write_dataset: Write, order: OrderName
) -> None:
    words = ["3", write_dataset([[1] * 9] * 50, "a"), "1", write_dataset([[2] * 9] * 50, "b")]
    train = build_gpt_datasets(words, "100", (40, 0, 0), 16, order=order).train
    assert isinstance(train, BlendedDataset)
    drawn = [int(train[i]["dataset_ids"]) for i in range(len(train))]
    assert drawn.count(0) == 30
    assert [int(train[i]["sample_ids"]) for i in range(40)] == list(range(40))
    assert all((train[i]["tokens"] == drawn[i] + 1).all() for i in range(40))


def test_a_blend_that_draws_too_many_samples_is_refused(write_dataset: Write) -> None:
    dataset = in_file_order(write_dataset([[1, 2, 3, 4, 5]]), 4)
    with pytest.raises(DataError, match="draws 5 samples from dataset 0, which has 1"):
        BlendedDataset([dataset, dataset], GreedyBlend([0.5, 0.5], 10))
    with pytest.raises(DataError, match="1 sources, but there are 2 datasets"):
        BlendedDataset([dataset, dataset], GreedyBlend([1.0], 10))
    with pytest.raises(DataError, match="weights, but its number of samples is not given"):
        build_gpt_datasets(["1", dataset.source.prefix], "100")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "blend"),
    [
        ("a", Blend(("a",), None)),
        (["a"], Blend(("a",), None)),
        (["a", " b ", "c"], Blend(("a", "b", "c"), None)),
        (["a", "b"], Blend(("a", "b"), None)),
        (["30", "a", "0.7", "b"], Blend(("a", "b"), (30.0, 0.7))),
        (["1", "a"], Blend(("a",), (1.0,))),
    ],
)
def test_data_paths(words: str | list[str], blend: Blend) -> None:
    assert parse_data_path(words) == blend


def test_data_paths_from_files(tmp_path: Path) -> None:
    path = tmp_path / "args"
    path.write_text("1 a\n2   b\n")
    assert read_data_args(path) == Blend(("a", "b"), (1.0, 2.0))
    path.write_text('{"train": ["1", "a", "2", "b"], "valid": "c"}')
    assert read_per_split_data_args(path) == {
        "train": Blend(("a", "b"), (1.0, 2.0)),
        "valid": Blend(("c",), None),
        "test": None,
    }
    path.write_text('{"training": "a"}')
    with pytest.raises(DataError, match="'training' is not one of train, valid, test"):
        read_per_split_data_args(path)
    with pytest.raises(DataError, match="does not exist"):
        read_data_args(tmp_path / "nothing")
    with pytest.raises(DataError, match="a weight before every prefix"):
        parse_data_path(["1", "a", "b", "c"])
    with pytest.raises(DataError, match="empty"):
        parse_data_path([])


def test_split_strings() -> None:
    assert parse_split("1,1") == ((0.0, 0.5), (0.5, 1.0), None)
    assert parse_split("0.5, 0, 0.5") == ((0.0, 0.5), None, (0.5, 1.0))
    for bad in ("", "a,b", "0,0", "1,2,3,4", "1.2.3", "-1,2"):
        with pytest.raises(DataError, match="split"):
            parse_split(bad)
    # 0.5 and 2.5 round to the even neighbour
    assert sequence_range((0.1, 0.5), 5) == (0, 2)


def test_mock_tokens_count_up_and_end_with_eod() -> None:
    mock = MockTokens(vocab_size=50, eod_id=7, num_documents=10, max_length=200)
    for number, length in enumerate(mock.sequence_lengths.tolist()):
        expected = [(i + 1) % 50 for i in range(length - 1)] + [7]
        assert mock.get(number).tolist() == expected
        assert mock.get(number, length // 2).tolist() == expected[length // 2 :]
        assert mock.get(number, 1, length // 3).tolist() == expected[1 : 1 + length // 3]


def test_data_path_changes_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "changes.json"
    path.write_text(
        '[{"from_sample": 5, "data_path": "1 a 2 b"}, {"from_sample": 9, "data_path": ["c"]}]'
    )
    assert read_data_path_changes(path) == [(5, ["1", "a", "2", "b"]), (9, ["c"])]
    with pytest.raises(DataError, match="does not exist"):
        read_data_path_changes(tmp_path / "none")
    for bad in ('[{"from_sample": "5", "data_path": "a"}]', '[{"from_sample": 5}]', "[3]", "3"):
        path.write_text(bad)
        with pytest.raises(DataError, match="give entries such as"):
            read_data_path_changes(path)
