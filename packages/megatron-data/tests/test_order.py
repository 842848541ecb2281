"""Megatron's indices against recorded values and against a scalar loop; the cache of indices."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_data import DataError
from megatron_data.order import (
    CompatOrder,
    GreedyBlend,
    blend_by_weight,
    blend_exhaustively,
    build_gpt_indices,
    compat,
)
from megatron_data.order.cache import cache_key, load_or_build
from megatron_data.order.compat import (
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    epochs_needed,
)

Golden = dict[str, Any]


def test_indices_equal_the_golden_numbers(golden: Golden) -> None:
    given_ = golden["gpt_index"]
    sizes = np.array(given_["sizes"], np.int32)
    documents = np.array(given_["documents"])
    # 17 samples of 4 need 69 tokens: two epochs of 36, and the second is used in full
    indices = build_gpt_indices(sizes, documents, sequence_length=4, seed=1234, num_samples=17)
    assert indices.document_index.tolist() == given_["document_index"]
    assert indices.sample_index.tolist() == given_["sample_index"]
    assert indices.shuffle_index.tolist() == given_["shuffle_index"]
    assert indices.document_index.dtype == np.int32
    assert indices.sample_index.dtype == given_["sample_index_dtype"]
    assert indices.shuffle_index.dtype == given_["shuffle_index_dtype"]


def test_a_separate_last_epoch_equals_the_golden_numbers(golden: Golden) -> None:
    given_ = golden["gpt_index"]
    index = build_document_index(
        np.array(given_["documents"]), 3, np.random.RandomState(1234), separate_last=True
    )
    assert index.tolist() == given_["three_epochs_separate_last"]


def test_a_partial_last_sample_equals_the_golden_numbers(golden: Golden) -> None:
    given_ = golden["gpt_index"]
    index = build_sample_index(
        np.array(given_["sizes"], np.int32),
        np.array(given_["documents"], np.int32),
        sequence_length=4,
        extra=0,
        drop_last_partial=False,
    )
    assert index.tolist() == given_["no_extra_token_keep_partial_identity_order"]


def test_blends_equal_the_golden_numbers(golden: Golden) -> None:
    given_ = golden["blend"]
    blend = blend_by_weight(given_["weights"], given_["size"])
    assert blend.dataset_index.tolist() == given_["dataset_index"]
    assert blend.dataset_sample_index.tolist() == given_["dataset_sample_index"]
    assert (blend.dataset_index.dtype, blend.dataset_sample_index.dtype) == (np.int16, np.int64)
    blend = blend_exhaustively(given_["exhaustive_sizes"])
    assert blend.dataset_index.tolist() == given_["exhaustive_dataset_index"]
    assert blend.dataset_sample_index.tolist() == given_["exhaustive_sample_index"]


def walk(lengths: list[int], order: list[int], sequence_length: int, extra: int) -> list[list[int]]:
    """Returns the tokens of every full sample as (document, offset), computed one by one."""
    stream = [
        token for position, number in enumerate(order) for token in [position] * lengths[number]
    ]
    samples = (len(stream) - extra) // sequence_length
    return [
        list(range(i * sequence_length, (i + 1) * sequence_length + extra))
        for i in range(max(samples, 0))
    ]


lengths_strategy = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(
    lambda x: sum(x) > 2
)


@settings(max_examples=300, deadline=None)
@given(
    lengths=lengths_strategy,
    sequence_length=st.integers(1, 15),
    extra=st.integers(0, 1),
    epochs=st.integers(1, 3),
    block=st.sampled_from([1, 2, 5, 1 << 15]),
)
def test_samples_are_consecutive_spans_of_the_stream(
    lengths: list[int], sequence_length: int, extra: int, epochs: int, block: int
) -> None:
    array = np.array(lengths, np.int32)
    wanted = (epochs * sum(lengths) - extra) // sequence_length
    if (sum(lengths) - extra) // sequence_length < 1 or wanted < 1:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "_BLOCK", block)  # sequences per step
        indices = build_gpt_indices(
            array,
            np.arange(len(lengths)),
            sequence_length=sequence_length,
            seed=7,
            num_samples=wanted,
            extra=extra,
        )
    order = CompatOrder(indices, sequence_length, extra)
    begins = np.concatenate([[0], np.cumsum(array[indices.document_index])]).tolist()
    expected = walk(lengths, indices.document_index.tolist(), sequence_length, extra)
    seen = {}
    for sample in range(len(order)):
        row = int(indices.shuffle_index[sample])
        position = int(indices.sample_index[row, 0])
        tokens: list[int] = []
        for step, span in enumerate(order.spans(sample)):
            assert span.sequence == indices.document_index[position + step]
            length = lengths[span.sequence] - span.offset if span.length is None else span.length
            start = begins[position + step] + span.offset
            assert span.offset >= 0
            assert 0 <= length <= lengths[span.sequence] - span.offset
            tokens += range(start, start + length)
        seen[row] = tokens
    assert [seen[row] for row in range(len(order))] == expected


@settings(max_examples=200, deadline=None)
@given(lengths=lengths_strategy, sequence_length=st.integers(1, 15), extra=st.integers(0, 1))
def test_a_partial_last_sample_ends_with_the_stream(
    lengths: list[int], sequence_length: int, extra: int
) -> None:
    array, documents = np.array(lengths, np.int32), np.arange(len(lengths), dtype=np.int32)
    index = build_sample_index(
        array,
        documents,
        sequence_length=sequence_length,
        extra=extra,
        drop_last_partial=False,
    )
    stream = sum(lengths)
    assert len(index) - 1 == -(-(stream - extra) // sequence_length)
    begins = np.concatenate([[0], np.cumsum(array)])
    last = begins[index[-1, 0]] + index[-1, 1] + extra
    assert last == stream
    assert (index >= 0).all()


def test_the_number_of_samples_is_exact_beyond_float32() -> None:
    index = build_sample_index(
        np.array([16_777_217], np.int32),
        np.zeros(1, np.int32),
        sequence_length=8,
        extra=0,
        drop_last_partial=False,
    )
    assert len(index) - 1 == 2_097_153


def test_rows_wider_than_int32_are_int64() -> None:
    index = build_sample_index(
        np.array([2**31 - 1] * 3, np.int32), np.arange(3, dtype=np.int32), sequence_length=2**30
    )
    assert index.dtype == np.int32
    assert index.tolist() == [[0, 0], [0, 2**30], [1, 1], [1, 2**30 + 1], [2, 2], [2, 2**30 + 2]]


@pytest.mark.parametrize(
    ("tokens", "length", "samples", "extra", "epochs"),
    [(36, 4, 17, 1, 2), (36, 4, 18, 1, 3), (36, 4, 18, 0, 2), (36, 4, None, 1, 1), (9, 4, 0, 1, 1)],
)
def test_epochs(tokens: int, length: int, samples: int | None, extra: int, epochs: int) -> None:
    assert epochs_needed(tokens, length, samples, extra) == epochs


def test_a_partial_last_epoch_is_shuffled_separately() -> None:
    lengths = np.full(50, 10, np.int32)  # 49 samples of 10 an epoch
    indices = build_gpt_indices(lengths, np.arange(50), sequence_length=10, seed=1, num_samples=60)
    assert sorted(indices.document_index[:50].tolist()) == list(range(50))
    first = indices.shuffle_index[:49].tolist()
    assert sorted(first) == list(range(49))

    def first_epoch_is_whole(num_samples: int) -> bool:
        index = build_gpt_indices(
            lengths, np.arange(50), sequence_length=10, seed=1, num_samples=num_samples
        ).document_index
        return sorted(index[:50].tolist()) == list(range(50))

    # from int(0.8 * 49) = 39 samples on, the last epoch is shuffled with the others
    assert first_epoch_is_whole(49 + 38)
    assert not first_epoch_is_whole(49 + 39)


def test_the_shuffle_keeps_its_two_parts_separate() -> None:
    index = build_shuffle_index(5, 12, np.random.RandomState(0))
    assert sorted(index[:5].tolist()) == list(range(5))
    assert sorted(index[5:].tolist()) == list(range(5, 12))


def test_splits_without_tokens_and_invalid_numbers_are_refused() -> None:
    lengths, numbers = np.zeros(4, np.int32), np.arange(4)
    with pytest.raises(DataError, match="holds no token"):
        build_gpt_indices(lengths, numbers, sequence_length=4, seed=1)
    with pytest.raises(DataError, match="3 tokens are too few for one sample of 4 \\+ 1"):
        build_gpt_indices(np.array([3], np.int32), np.arange(1), sequence_length=4, seed=1)
    with pytest.raises(DataError, match="sequence length 0"):
        build_gpt_indices(lengths, numbers, sequence_length=0, seed=1)
    with pytest.raises(DataError, match="blend weights"):
        blend_by_weight([0.5, 0.0], 10)
    with pytest.raises(DataError, match="blend weights"):
        blend_by_weight([float("nan"), 1.0], 10)
    with pytest.raises(DataError, match="32767 datasets; use at most 32766"):
        blend_by_weight([1.0] * 32_767, 1)
    assert blend_by_weight([1.0] * 32_766, 1).dataset_index.tolist() == [0]
    with pytest.raises(DataError, match=r"blend sizes \[1, 0\]; each must be at least 1"):
        blend_exhaustively([1, 0])
    assert blend_exhaustively([1]).dataset_index.tolist() == [0]
    blend = GreedyBlend([1.0], 2)
    assert (len(blend), blend.counts(), blend[1]) == (2, [2], (0, 1))
    for sample in (-1, 2):
        with pytest.raises(IndexError, match=f"sample {sample} is out of range; there are 2 samp"):
            blend[sample]


@pytest.mark.parametrize("blend", [blend_by_weight([0.8, 0.2], 5), blend_exhaustively([4, 1])])
def test_a_blend_by_hand(blend: Any) -> None:
    """In step 1 the shares are those of one sample, of which the first dataset has 1 already."""
    assert blend.dataset_index.tolist() == [0, 1, 0, 0, 0]
    assert blend.dataset_sample_index.tolist() == [0, 0, 1, 2, 3]


@settings(max_examples=50, deadline=None)
@given(weights=st.lists(st.floats(0.01, 1), min_size=1, max_size=6), size=st.integers(1, 200))
def test_a_blend_stays_near_its_weights(weights: list[float], size: int) -> None:
    blend = blend_by_weight(weights, size)
    shares = np.array(weights) / np.sum(weights)
    for prefix in range(1, size + 1, 7):
        drawn = np.bincount(blend.dataset_index[:prefix], minlength=len(weights))
        assert np.abs(drawn - shares * prefix).max() < 2.5
    for dataset in range(len(weights)):
        own = blend.dataset_sample_index[blend.dataset_index == dataset]
        assert own.tolist() == list(range(len(own)))


def test_the_cache_builds_once_and_repairs_itself(tmp_path: Path) -> None:
    built = []

    def build() -> dict[str, np.ndarray[Any, Any]]:
        built.append(1)
        return {"a": np.arange(5), "b": np.ones((2, 2), np.float32)}

    for _ in range(3):
        arrays = load_or_build(tmp_path, "key", build)
        assert arrays["a"].tolist() == list(range(5))
        assert arrays["b"].dtype == np.float32
    assert len(built) == 1
    (tmp_path / "key" / "a.npy").write_bytes(b"\x93NUMPY")
    assert load_or_build(tmp_path, "key", build)["a"].tolist() == list(range(5))
    assert load_or_build(tmp_path, "key", build)["a"].tolist() == list(range(5))
    assert len(built) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key"]


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_cached_array_is_the_file_that_numpy_writes(tmp_path: Path, order: str) -> None:
    made = {
        "a": np.asarray(np.arange(6, dtype=np.int32).reshape(2, 3), order=order),  # type: ignore[call-overload]
        "none": np.empty((0, 2), np.int64),
    }
    load_or_build(tmp_path, "key", lambda: made)
    for name, array in made.items():
        read = np.load(tmp_path / "key" / f"{name}.npy")
        assert read.dtype == array.dtype and np.array_equal(read, array)
    assert np.array_equal(load_or_build(tmp_path, "key", dict)["a"], made["a"])


def test_an_error_on_a_full_disk_names_the_cache_entry_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        load_or_build(tmp_path, "key", lambda: {"a": np.arange(5)})
    assert caught.value.filename == str(tmp_path / "key")
    assert not list(tmp_path.iterdir())


def test_the_cache_key_depends_on_options_and_content() -> None:
    lengths = np.array([1, 2, 3], np.int32)
    key = cache_key({"seed": 1}, lengths)
    assert len(key) == 32 and key == cache_key({"seed": 1}, lengths.copy())
    assert key != cache_key({"seed": 2}, lengths)
    assert key != cache_key({"seed": 1}, np.array([1, 3, 2], np.int32))
    assert key != cache_key({"seed": 1}, lengths.astype(np.int64))


def test_an_entry_is_readable_for_others_and_is_built_again_if_a_file_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, built = tmp_path / "new" / "cache", []

    def build() -> dict[str, np.ndarray[Any, Any]]:
        built.append(1)
        return {"a": np.arange(5)}

    flushed: list[bool] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: flushed.append((cache / "key").exists()))
        load_or_build(cache, "key", build)
    assert flushed == [False, False]  # the array and the folder, before the entry has its name
    assert (cache / "key").stat().st_mode & 0o777 == 0o755
    path = cache / "key" / "a.npy"
    whole = path.read_bytes()
    for number, data in enumerate((whole + b"\0", whole.replace(b"<i8", b"<u8")), start=2):
        path.write_bytes(data)
        assert load_or_build(cache, "key", build)["a"].tolist() == list(range(5))
        assert (len(built), path.read_bytes()) == (number, whole)


def test_another_process_may_store_the_same_entry_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> dict[str, np.ndarray[Any, Any]]:
        load_or_build(tmp_path, "key", lambda: {"a": np.arange(3)})  # the other process
        return {"a": np.arange(3)}

    assert load_or_build(tmp_path, "key", build)["a"].tolist() == [0, 1, 2]

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(PermissionError):
        load_or_build(tmp_path, "other", lambda: {"a": np.arange(3)})
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
