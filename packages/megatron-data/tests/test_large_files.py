"""Datasets whose pointers need more than 32 bits. The `.bin` has holes in place of tokens."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from megatron_data import (
    IndexedDataset,
    IndexedDatasetBuilder,
    build_gpt_datasets,
    merge,
    split,
    verify,
)
from megatron_data.indexed.format import Header
from megatron_data.order import build_gpt_indices
from megatron_data.order.compat import build_sample_index

LONGEST = 2**31 - 1
LENGTHS = [10, LONGEST, 10, 5, LONGEST, 10, LONGEST, 10]
STARTS = [sum(LENGTHS[:number]) for number in range(len(LENGTHS) + 1)]
BOUNDS = [0, 1, 3, 3, 5, 6, 8]
SIZE = 2


def forge(prefix: Path, lengths: list[int], bounds: list[int]) -> None:
    """Writes an index and a `.bin` of holes. Short sequences contain their own index."""
    starts = [sum(lengths[:number]) * SIZE for number in range(len(lengths))]
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(Header(np.dtype("<u2"), len(lengths), len(bounds)).pack())
        file.write(np.array(lengths, "<i4").tobytes())
        file.write(np.array(starts, "<i8").tobytes())
        file.write(np.array(bounds, "<i8").tobytes())
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(sum(lengths) * SIZE)
        for number, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            if length < 100:
                file.seek(start)
                file.write(tokens_of(number, length).astype("<u2").tobytes())


def tokens_of(number: int, length: int) -> np.ndarray:
    return np.arange(length) + 100 * (number + 1)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    forge(tmp_path / "d", LENGTHS, BOUNDS)
    return str(tmp_path / "d")


@pytest.mark.parametrize("mapped", [True, False])
def test_sequences_behind_4_gib_are_read(prefix: str, mapped: bool) -> None:
    assert STARTS[2] * SIZE > 2**31 and STARTS[-1] > 2**32
    with IndexedDataset(prefix, mmap=mapped) as dataset:
        dataset.check()
        assert dataset.num_tokens == STARTS[-1]
        assert dataset.sequence_pointers.tolist() == [start * SIZE for start in STARTS[:-1]]
        assert dataset.tokens_before(np.arange(len(STARTS))).tolist() == STARTS
        for number, length in enumerate(LENGTHS):
            if length < 100:
                assert np.array_equal(dataset.get(number), tokens_of(number, length))
                assert dataset.get(number, 3, 2).tolist() == tokens_of(number, length)[3:5].tolist()
        assert dataset.get(6, LONGEST - 4, 4).tolist() == [0] * 4
        assert dataset.document(4).tolist() == tokens_of(5, 10).tolist()
        (part,) = dataset.scan(STARTS[5], STARTS[5] + 10)
        assert part.tolist() == tokens_of(5, 10).tolist()
    verify(prefix)


@pytest.mark.parametrize("order", ["stateless", "compat"])
def test_samples_of_both_orders_are_the_tokens_of_their_spans(prefix: str, order: str) -> None:
    """Every token is an input once in an epoch, and samples contain the tokens of their spans."""
    whole = build_gpt_datasets(
        prefix, "0,1,0", sequence_length=1 << 24, order=order, drop_last_partial_validation=False
    ).valid
    assert whole is not None
    seen: dict[int, int] = {}
    total = 0
    for sample in range(len(whole)):
        spans = whole.order.spans(sample)
        place = 0
        for sequence, offset, length in spans:
            length = LENGTHS[sequence] - offset if length is None else length
            assert 0 <= offset <= offset + length <= LENGTHS[sequence]
            inputs = min(length, (1 << 24) - place)  # the rest is the last label
            place += length
            if LENGTHS[sequence] < 100:
                seen[sequence] = seen.get(sequence, 0) + inputs
                found = whole.source.get(sequence, offset, length)
                assert np.array_equal(found, tokens_of(sequence, 10)[offset : offset + length])
            total += inputs
    short = {number: length for number, length in enumerate(LENGTHS) if length < 100}
    assert seen == short
    assert total == STARTS[-1]


def by_hand(
    lengths: list[int], document_index: list[int], sequence_length: int
) -> Iterator[list[int]]:
    """Computes Megatron's sample index with Python integers."""
    ends = np.cumsum(np.array([lengths[n] for n in document_index], object)).tolist()
    yield [0, 0]
    place, sample = 0, 1
    while sample * sequence_length + 1 <= ends[-1]:
        while ends[place] < sample * sequence_length + 1:
            place += 1
        begin = ends[place] - lengths[document_index[place]]
        yield [place, sample * sequence_length - begin]
        sample += 1


def test_the_sample_index_of_megatrons_order_beyond_32_bits() -> None:
    documents = [4, 0, 6, 3, 1, 7, 2, 5]
    index = build_sample_index(
        np.array(LENGTHS, np.int32), np.array(documents, np.int32), sequence_length=1 << 22
    )
    assert index.dtype == np.int32, "places in sequences fit"
    assert index.tolist() == list(by_hand(LENGTHS, documents, 1 << 22))
    wide = build_sample_index(
        np.array([2**31, 9], np.int64), np.array([1, 0], np.int32), sequence_length=1 << 28
    )
    assert wide.dtype == np.int64, "a place that does not fit"
    assert wide.tolist() == list(by_hand([2**31, 9], [1, 0], 1 << 28))
    indices = build_gpt_indices(
        np.array(LENGTHS, np.int32),
        np.arange(8, dtype=np.int32),
        sequence_length=1 << 22,
        seed=1,
        num_samples=4000,
    )
    assert len(indices.document_index) == 3 * 8
    wanted = list(by_hand(LENGTHS, indices.document_index.tolist(), 1 << 22))
    assert indices.sample_index.tolist() == wanted
    assert sorted(indices.shuffle_index.tolist()) == list(range(len(wanted) - 1))


def test_documents_behind_4_gib_are_split_and_merged(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Billions of tokens are not copied; the sizes of the files are set afterwards."""
    with IndexedDataset(prefix) as dataset, IndexedDatasetBuilder(tmp_path / "e", "u2") as builder:
        builder.copy_documents(dataset, 4, 5)
        builder.finalize()
    assert IndexedDataset(tmp_path / "e").document(0).tolist() == tokens_of(5, 10).tolist()

    without_tokens(monkeypatch)
    split(prefix, [tmp_path / "a", tmp_path / "b"], documents=(3, 3))
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m")
    assert (tmp_path / "m.idx").read_bytes() == Path(f"{prefix}.idx").read_bytes()
    with IndexedDataset(tmp_path / "b") as last:
        last.check()
        assert last.sequence_lengths.tolist() == LENGTHS[3:]
        assert last.sequence_pointers.tolist() == [
            (start - STARTS[3]) * SIZE for start in STARTS[3:-1]
        ]


def without_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `scan` yield nothing and `finalize` extend the `.bin` to the size in its index."""

    def lengthened(
        finalize: Callable[[IndexedDatasetBuilder], object],
    ) -> Callable[[IndexedDatasetBuilder], object]:
        def finalized(builder: IndexedDatasetBuilder) -> object:
            written = finalize(builder)
            os.truncate(f"{builder.prefix}.bin", builder.tokens * SIZE)
            return written

        return finalized

    monkeypatch.setattr(IndexedDataset, "scan", lambda dataset, begin, end: iter(()))
    finalize = IndexedDatasetBuilder.finalize
    monkeypatch.setattr(IndexedDatasetBuilder, "finalize", lengthened(finalize))
