"""Megatron's orders at their limits: epochs, defaults, dtypes, and what a cache keeps."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from megatron_data import DataError
from megatron_data.order import CompatOrder, blend_by_weight, build_gpt_indices, compat
from megatron_data.order.cache import cache_key, load_or_build
from megatron_data.order.compat import (
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    epochs_needed,
)

Built = dict[str, np.ndarray[Any, Any]]


def drawn_apart(numbers: list[int], first: int, random: np.random.RandomState) -> list[int]:
    """Returns the first numbers in a drawn order, then the others in another one."""
    parts = [np.array(numbers[:first]), np.array(numbers[first:])]
    for part in parts:
        if len(part):
            random.shuffle(part)
    return [*parts[0].tolist(), *parts[1].tolist()]


def megatrons_indices(
    lengths: Sequence[int], length: int, samples: int | None, seed: int
) -> tuple[list[int], list[int]]:
    """Returns the document and shuffle index with the steps of `gpt_dataset.py` of Megatron-LM."""
    tokens, epochs = sum(lengths), 1
    while samples is not None and epochs * tokens < samples * length + 1:
        epochs += 1
    total = (epochs * tokens - 1) // length
    separate, before = False, total
    if epochs > 1 and samples is not None:
        whole = ((epochs - 1) * tokens - 1) // length
        separate = samples - whole < int(0.80 * ((tokens - 1) // length))
        before = whole if separate else total
    random = np.random.RandomState(seed)
    documents = list(range(len(lengths))) * epochs
    together = len(lengths) * (epochs - separate)
    return drawn_apart(documents, together, random), drawn_apart([*range(total)], before, random)


# Of 49 samples an epoch, the last epoch needs 39 to be shuffled with the others.
@pytest.mark.parametrize("samples", [None, 1, 2, 48, 49, 60, 87, 88, 98, 110, 137, 138, 149, 150])
def test_documents_and_samples_are_shuffled_as_in_megatron(samples: int | None) -> None:
    lengths = [7, 13] * 25
    found = build_gpt_indices(
        np.array(lengths, np.int32), np.arange(50), sequence_length=10, seed=5, num_samples=samples
    )
    documents, rows = megatrons_indices(lengths, 10, samples, 5)
    assert found.document_index.tolist() == documents
    assert found.shuffle_index.tolist() == rows


def test_a_sample_has_a_label_more_than_its_tokens_by_default() -> None:
    lengths, documents = np.array([4, 4, 1], np.int32), np.arange(3, dtype=np.int32)
    index = build_sample_index(lengths, documents, sequence_length=4)
    assert index.tolist() == [[0, 0], [1, 0], [2, 0]]
    assert (epochs_needed(9, 4, 2), epochs_needed(8, 4, 2)) == (1, 2)
    assert epochs_needed(9, 4, 0, 0) == 1
    one = build_gpt_indices(np.array([9], np.int32), np.arange(1), sequence_length=4, seed=1)
    order = CompatOrder(one, 4)
    assert order.sample_length == 5
    assert sorted(order.spans(sample) for sample in range(2)) == [[(0, 0, 5)], [(0, 4, 5)]]
    for sample in (-1, 2):
        with pytest.raises(IndexError, match=f"sample {sample} is out of range; there are 2 samp"):
            order.spans(sample)


@pytest.mark.parametrize("extra", [0, 1])
def test_a_stream_without_tokens_has_no_partial_sample(extra: int) -> None:
    lengths, documents = np.zeros(2, np.int32), np.arange(2, dtype=np.int32)
    index = build_sample_index(
        lengths, documents, sequence_length=4, extra=extra, drop_last_partial=False
    )
    assert index.tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("sequences", "dtype"), [([2**31 - 1], np.int32), ([2**31], np.int64), ([], np.int32)]
)
def test_documents_that_int32_cannot_number_are_int64(sequences: list[int], dtype: type) -> None:
    index = build_document_index(np.array(sequences, np.int64), 2, np.random.RandomState(0))
    assert index.dtype == dtype and index.tolist() == sequences * 2


@pytest.mark.parametrize(("total", "dtype"), [(2**32 - 3, np.uint32), (2**32 - 2, np.int64)])
def test_samples_are_int64_from_megatrons_number_on(
    monkeypatch: pytest.MonkeyPatch, total: int, dtype: type
) -> None:
    """The array would take 16 GiB, so that only its dtype is recorded."""
    asked: list[tuple[int, type]] = []
    random: Any = SimpleNamespace(shuffle=len)
    with monkeypatch.context() as patch:
        patch.setattr(compat.np, "arange", lambda count, dtype: asked.append((count, dtype)) or [])
        build_shuffle_index(total, total, random)
    assert asked == [(total, dtype)]


@pytest.mark.parametrize("weights", [[], [float("inf"), 1.0], [-1.0, 2.0], [1.0, 0.0]])
def test_weights_that_are_no_shares_are_refused(weights: list[float]) -> None:
    with pytest.raises(DataError, match=r"blend weights .*; each must be a positive number"):
        blend_by_weight(weights, 3)


def test_equal_bytes_of_another_dtype_or_shape_have_another_key() -> None:
    array = np.array([1, 2, 3, 4], np.int32)
    same_bytes = [array, array.view(np.uint32), array.view(np.int64), array.reshape(2, 2)]
    assert len({cache_key({}, each) for each in same_bytes}) == 4
    assert cache_key({}, array, array) != cache_key({}, array)


def test_built_arrays_are_mapped_from_the_first_time_on(tmp_path: Path) -> None:
    for _ in range(2):
        array = load_or_build(tmp_path, "key", lambda: {"a": np.arange(3)})["a"]
        assert isinstance(array, np.memmap) and not array.flags.writeable
        assert array.tolist() == [0, 1, 2]


def test_an_array_is_whole_when_it_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: sizes.append(os.fstat(file).st_size))
    load_or_build(tmp_path, "key", lambda: {"a": np.arange(5)})
    assert sizes[0] == (tmp_path / "key" / "a.npy").stat().st_size > 5 * 8


def test_no_memory_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    load_or_build(tmp_path, "key", lambda: {"a": np.arange(3)})
    monkeypatch.setattr(np, "memmap", full)
    with pytest.raises(MemoryError):
        load_or_build(tmp_path, "key", dict)


def test_the_entry_that_another_process_stored_first_stays(tmp_path: Path) -> None:
    file, first = tmp_path / "key" / "a.npy", []

    def build() -> Built:
        load_or_build(tmp_path, "key", lambda: {"a": np.arange(3)})  # the other process
        first.append(file.stat().st_ino)
        return {"a": np.arange(3)}

    load_or_build(tmp_path, "key", build)
    assert [file.stat().st_ino] == first


def test_a_damaged_entry_may_be_removed_by_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree

    def too_late(path: Path, ignore_errors: bool = False) -> None:
        remove(path, ignore_errors=True)  # the other process
        remove(path, ignore_errors=ignore_errors)

    load_or_build(tmp_path, "key", lambda: {"a": np.arange(3)})
    (tmp_path / "key" / "entry.json").write_bytes(b"{}")
    monkeypatch.setattr(shutil, "rmtree", too_late)
    found = load_or_build(tmp_path, "key", lambda: {"a": np.arange(4)})
    assert found["a"].tolist() == [0, 1, 2, 3]
