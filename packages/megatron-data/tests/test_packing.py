"""Best-fit packing against the textbook algorithm, which places one document at a time."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_data import DataError, EmptySplitError, build_gpt_datasets
from megatron_data.order import PackedOrder, Packing, PackingReport

Write = Callable[..., str]

lengths = st.lists(st.integers(0, 70), min_size=1, max_size=60).filter(any)


def best_fit_decreasing(sizes: list[int], capacity: int) -> int:
    """Returns the number of samples that the textbook algorithm needs."""
    room: list[int] = []
    for size in sorted((size % capacity for size in sizes if size % capacity), reverse=True):
        fits = [place for place in range(len(room)) if room[place] >= size]
        if fits:
            room[min(fits, key=room.__getitem__)] -= size
        else:
            room.append(capacity - size)
    return len(room) + sum(size // capacity for size in sizes)


@settings(max_examples=150, deadline=None)
@given(lengths, st.integers(1, 40))
def test_packing_is_best_fit_decreasing(sizes: list[int], capacity: int) -> None:
    packing = Packing(np.array(sizes, np.int32), capacity)
    assert len(packing) == best_fit_decreasing(sizes, capacity)
    seen = [np.zeros(size, int) for size in sizes]
    samples: list[set[int]] = [set() for _ in sizes]
    for number in range(len(packing)):
        spans = packing.spans(number)
        assert 0 < sum(span.length or 0 for span in spans) <= capacity
        for span in spans:
            assert span.length
            seen[span.sequence][span.offset : span.offset + span.length] += 1
            samples[span.sequence].add(number)
    assert all((tokens == 1).all() for tokens in seen)
    cut = [document for document, where in enumerate(samples) if len(where) > 1]
    assert cut == [document for document, size in enumerate(sizes) if size > capacity]
    report = packing.report()
    assert report.split_documents == len(cut)
    assert report.padding_tokens == len(packing) * capacity - sum(sizes)
    assert report.num_documents == sum(size > 0 for size in sizes)


def test_a_report_by_hand() -> None:
    """9 tokens fill a sample of 8 and leave 1. 5 and 3 fill the second, and 1 begins the third."""
    report = Packing(np.array([3, 0, 9, 5], np.int32), 8).report()
    assert report == PackingReport(3, 3, 1, 7, 7 / 24)


def test_a_web_corpus_has_little_padding() -> None:
    sizes = np.random.default_rng(0).lognormal(6.3, 1.1, 200_000).astype(np.int32) + 1
    report = Packing(sizes, 4096).report()
    assert report.padding_fraction < 1e-4
    assert report.split_documents == (sizes > 4096).sum()


def test_more_than_65_536_samples_hold_their_documents_in_order() -> None:
    """Half of the documents fill the samples one by one, and the other half joins them."""
    packing = Packing(np.ones(140_000, np.int32), 2)
    assert len(packing) == 70_000
    for sample in (0, 1, 65_535, 65_536, 69_999):
        assert [span.sequence for span in packing.spans(sample)] == [sample, sample + 70_000]


@settings(max_examples=40, deadline=None)
@given(lengths, st.integers(1, 30), st.integers(1, 3))
def test_every_epoch_contains_every_token_once(sizes: list[int], length: int, epochs: int) -> None:
    table = np.array([5, *sizes, 5], np.int32)
    one = PackedOrder(table, (1, len(table) - 1), sequence_length=length, seed=3)
    assert one.sample_length == length + 1
    several = PackedOrder(
        table, (1, len(table) - 1), sequence_length=length, seed=3, num_samples=epochs * len(one)
    )
    counts = [np.zeros(size, int) for size in table]
    for sample in range(len(several)):
        for span in several.spans(sample):
            assert span.length
            counts[span.sequence][span.offset : span.offset + span.length] += 1
    assert all((tokens == epochs).all() for tokens in counts[1:-1])
    assert not counts[0].any()
    assert not counts[-1].any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sequence_length": 0}, "sequence length 0; give at least 1"),
        ({"sequence_length": 4, "extra": 2}, "extra 2; give 0 or 1 tokens"),
        ({"sequence_length": 4, "num_samples": -1}, "num_samples -1; give at least 0"),
    ],
)
def test_a_packed_order_refuses_wrong_sizes(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        PackedOrder(np.array([5, 7], np.int32), (0, 2), seed=3, **arguments)


def test_packed_samples(write_dataset: Write) -> None:
    prefix = write_dataset([[number] * (1 + number % 9) for number in range(1, 60)])
    train = build_gpt_datasets(prefix, "100", sequence_length=15, order="packed").train
    assert train is not None
    documents: set[int] = set()
    for number in range(len(train)):
        sample = train[number]
        text = sample["document_ids"] >= 0
        assert not sample["loss_mask"][~text].any()
        here = set(sample["tokens"][text].tolist()) | set(
            sample["labels"][sample["loss_mask"] > 0].tolist()
        )
        assert not documents & here
        documents |= here
    assert documents == set(range(1, 60))


def test_refusals() -> None:
    with pytest.raises(EmptySplitError, match="holds no token"):
        Packing(np.zeros(4, np.int32), 8)
    assert len(Packing(np.ones(4, np.int32), 65_536)) == 1
    assert len(Packing(np.ones(4, np.int32), 1)) == 4
    order = PackedOrder(np.ones(4, np.int32), (0, 4), sequence_length=1, seed=3, num_samples=3)
    for sample in (-1, 3):
        with pytest.raises(IndexError, match=f"sample {sample} is out of range; there are 3 samp"):
            order.spans(sample)
    for capacity in (0, 65_537):
        with pytest.raises(DataError, match=f"sample length {capacity}; packing supports"):
            Packing(np.ones(4, np.int32), capacity)
    for number in (-1, 1):
        with pytest.raises(IndexError, match=f"sample {number} is out of range; there are 1 samp"):
            Packing(np.ones(4, np.int32), 8).spans(number)
