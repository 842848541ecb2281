"""Indices, blends and splits against Megatron's compiled helpers."""

import numpy as np
import pytest
from megatron_data.datasets.split import parse_split, sequence_range
from megatron_data.order import blend_by_weight, blend_exhaustively
from megatron_data.order.compat import build_document_index, build_sample_index

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)


@pytest.mark.parametrize("case", range(60))
def test_sample_index_equals_the_compiled_helper(case: int) -> None:
    random = np.random.default_rng(case)
    lengths = random.integers(0 if case % 2 else 1, 40, random.integers(1, 60)).astype(np.int32)
    lengths[-1] = 7  # the helper does not support an empty last sequence
    extra, drop = int(random.integers(2)), bool(random.integers(2))
    epochs = int(random.integers(1, 4))
    sequences = np.arange(len(lengths), dtype=np.int32)
    document_index = np.concatenate(
        [build_document_index(sequences, epochs, np.random.RandomState(case))[:-1], sequences[-1:]]
    )
    tokens = int(lengths[document_index].sum())
    sequence_length = int(random.integers(2, min(60, tokens)))
    ours = build_sample_index(
        lengths,
        document_index,
        sequence_length=sequence_length,
        extra=extra,
        drop_last_partial=drop,
    )
    theirs = helpers.build_sample_idx(
        lengths, document_index, sequence_length, 1, tokens, drop, bool(extra)
    )
    np.testing.assert_array_equal(ours, theirs)
    assert ours.dtype == theirs.dtype


def test_sample_index_beyond_32_bits_equals_the_compiled_helper() -> None:
    lengths = np.array([10, 2**31 - 1, 10, 5, 2**31 - 1, 10, 2**31 - 1, 7], np.int32)
    documents = np.array([4, 0, 6, 3, 1, 2, 5, 7], np.int32)
    ours = build_sample_index(lengths, documents, sequence_length=1 << 22)
    tokens = int(lengths.sum(dtype=np.int64))
    theirs = helpers.build_sample_idx(lengths, documents, 1 << 22, 1, tokens, True, True)
    np.testing.assert_array_equal(ours, theirs)
    assert ours.dtype == theirs.dtype


@pytest.mark.parametrize("case", range(10))
def test_blends_equal_the_compiled_helper(case: int) -> None:
    random = np.random.default_rng(case)
    weights = (random.integers(1, 5, 5) if case % 2 else random.random(5)).astype(np.float64)
    weights /= weights.sum()
    ours = blend_by_weight(weights.tolist(), 500)
    index, sample_index = np.zeros(500, np.int16), np.zeros(500, np.int64)
    normalized = (weights / weights.sum()).tolist()
    helpers.build_blending_indices(index, sample_index, normalized, 5, 500, False)
    np.testing.assert_array_equal(ours.dataset_index, index)
    np.testing.assert_array_equal(ours.dataset_sample_index, sample_index)

    sizes = random.integers(1, 60, 4).tolist()
    ours = blend_exhaustively(sizes)
    index, sample_index = np.zeros(sum(sizes), np.int16), np.zeros(sum(sizes), np.int64)
    helpers.build_exhaustive_blending_indices(index, sample_index, sizes, 4)
    np.testing.assert_array_equal(ours.dataset_index, index)
    np.testing.assert_array_equal(ours.dataset_sample_index, sample_index)


@pytest.mark.parametrize("split", ["969, 30, 1", "98,2", "1,1,1", "0.5,0,0.25", "7,3,90", "100"])
@pytest.mark.parametrize("count", [7, 138, 1001])
def test_splits_equal(split: str, count: int) -> None:
    theirs = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    ours = parse_split(split)
    assert [part is None for part in ours] == [part is None for part in theirs]
    for our_part, their_part in zip(ours, theirs, strict=True):
        if our_part is not None and their_part is not None:
            begin, end = (round(mark * float(count)) for mark in their_part)
            assert sequence_range(our_part, count) == (begin, end)
