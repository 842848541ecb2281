"""Runs whose layout, batch size, length and blend change: no sample is skipped or repeated."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_data import (
    BlendedDataset,
    GPTDataset,
    GPTDatasetConfig,
    SequentialSampler,
    ShuffledSampler,
    read_batch,
)
from megatron_data.order import BlendSchedule, InMemorySequenceTable, StatelessOrder, WeightChange

LENGTH, DOCUMENT, DOCUMENTS = 4, 8, 6
ROWS = DOCUMENT * DOCUMENTS // LENGTH  # of an epoch of one source
NAMES = "abc"


@dataclass(frozen=True)
class Phase:
    """Part of a run on one layout: `steps` optimizer steps of `accumulated` micro-batches a rank.

    Another number of them is another global batch, as in a ramp-up.
    """

    micro: int
    ranks: int
    accumulated: int
    steps: int

    @property
    def batch(self) -> int:
        return self.micro * self.ranks * self.accumulated


phases = st.lists(
    st.builds(
        Phase,
        micro=st.integers(1, 4),
        ranks=st.integers(1, 4),
        accumulated=st.integers(1, 3),
        steps=st.integers(0, 3),
    ),
    min_size=1,
    max_size=5,
).filter(lambda plan: any(phase.steps for phase in plan))
weights = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 9), min_size=1)
changes = st.lists(st.tuples(st.integers(1, 60), weights), max_size=3)


def row(first: dict[str, int], later: Sequence[tuple[int, dict[str, int]]]) -> list[WeightChange]:
    """Returns weight changes: the first weights, and others after given numbers of samples."""
    found = [WeightChange(0, first)]
    for distance, shares in later:
        found.append(WeightChange(found[-1].first_sample + distance, shares))
    return found


def schedule(
    first: dict[str, int], later: Sequence[tuple[int, dict[str, int]]], samples: int
) -> BlendSchedule:
    return BlendSchedule(row(first, later), samples)


class Numbered:
    """A token source in which every token is a different number."""

    def __init__(self, name: str) -> None:
        self.first = NAMES.index(name) * DOCUMENT * DOCUMENTS
        self.sequence_lengths = np.full(DOCUMENTS, DOCUMENT, np.int32)

    def get(self, sequence: int, offset: int = 0, length: int | None = None):
        begin = self.first + sequence * DOCUMENT
        end = begin + (DOCUMENT if length is None else offset + length)
        return np.arange(begin + offset, end)


@cache
def source(name: str, samples: int) -> GPTDataset:
    numbered = Numbered(name)
    order = StatelessOrder(
        InMemorySequenceTable(numbered.sequence_lengths),
        (0, DOCUMENTS),
        sequence_length=LENGTH,
        seed=NAMES.index(name),
        num_samples=samples,
    )
    return GPTDataset(numbered, order, GPTDatasetConfig(LENGTH))


def mixture(blend: BlendSchedule) -> BlendedDataset:
    drawn = zip(blend.sources, blend.counts(), strict=True)
    return BlendedDataset([source(name, count) for name, count in drawn], blend)


def run(samples: int, plan: Sequence[Phase], start: int = 0) -> list[list[int]]:
    """Returns the samples of every step. Each phase resumes from the state of the previous one."""
    steps, state = [], {"consumed_samples": start}
    for phase in plan:
        ranks = [
            SequentialSampler(
                samples,
                **state,
                micro_batch_size=phase.micro,
                data_parallel_rank=rank,
                data_parallel_size=phase.ranks,
            )
            for rank in range(phase.ranks)
        ]
        readers = [iter(sampler) for sampler in ranks]
        for _ in range(phase.steps):
            if ranks[0].consumed_samples + phase.batch > samples:
                break
            micro_batches = [next(reader) for _ in range(phase.accumulated) for reader in readers]
            steps.append([number for batch in micro_batches for number in batch])
        (state,) = {json.dumps(sampler.state_dict()) for sampler in ranks}
        assert len(state) < 1024
        state = json.loads(state)
    return steps


@settings(max_examples=60, deadline=None)
@given(phases, weights, changes, st.integers(0, 40))
def test_a_run_with_changing_options_reads_every_sample_once(
    plan: list[Phase], first: dict[str, int], later: list, more: int
) -> None:
    samples = sum(phase.batch * phase.steps for phase in plan)
    steps = run(samples, plan)
    # Each step contains the next samples of the sequence that all layouts share.
    consumed = 0
    for step in steps:
        assert sorted(step) == list(range(consumed, consumed + len(step)))
        consumed += len(step)
    assert consumed == samples
    blend = schedule(first, later, samples)
    draws = [blend[number] for step in steps for number in sorted(step)]
    for place, count in enumerate(blend.counts()):
        assert [draw.sample_index for draw in draws if draw.source_index == place] == list(
            range(count)
        )
    # A longer run begins with the same samples, also if its data change at the end.
    kept = [change for change in row(first, later) if change.first_sample < samples]
    changed = BlendSchedule([*kept, WeightChange(samples, {"c": 1})], samples + more + 1)
    for other in (schedule(first, later, samples + more), changed):
        names = [other.sources[other[number].source_index] for number in range(samples)]
        assert names == [blend.sources[draw.source_index] for draw in draws]
        assert [other[number].sample_index for number in range(samples)] == [
            d.sample_index for d in draws
        ]


@settings(max_examples=40, deadline=None)
@given(phases, weights, changes)
def test_every_document_occurs_once_per_epoch_of_a_changing_run(
    plan: list[Phase], first: dict[str, int], later: list
) -> None:
    samples = sum(phase.batch * phase.steps for phase in plan)
    blend = schedule(first, later, samples)
    dataset = mixture(blend)
    inputs: Counter[int] = Counter()
    for step in run(samples, plan):
        inputs.update(read_batch(dataset, step)["tokens"].ravel().tolist())
    for name, count in zip(blend.sources, blend.counts(), strict=True):
        own = range(DOCUMENT * DOCUMENTS)
        seen = Counter(inputs[Numbered(name).first + token] for token in own)
        epochs, rest = divmod(count, ROWS)
        expected = {epochs: (ROWS - rest) * LENGTH, epochs + 1: rest * LENGTH}
        assert seen == {times: tokens for times, tokens in expected.items() if tokens}


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 50), st.integers(1, 4), phases, st.integers(0, 3))
def test_every_epoch_of_a_shuffled_dataset_is_complete(
    dataset: int, epochs: int, plan: list[Phase], more: int
) -> None:
    consumed, seen = 0, []
    for phase in plan:
        ranks = [
            iter(ShuffledSampler(dataset, consumed, phase.micro, rank, phase.ranks, epochs=epochs))
            for rank in range(phase.ranks)
        ]
        for _ in range(phase.steps):
            step = [number for reader in ranks for number in next(reader, [])]
            seen += step
            consumed += len(step)
    whole, rest = divmod(consumed, dataset)
    for epoch in range(whole):
        assert sorted(seen[epoch * dataset : (epoch + 1) * dataset]) == list(range(dataset))
    assert len(set(seen[whole * dataset :])) == rest
    longer = ShuffledSampler(dataset, 0, 1, epochs=epochs + more)
    assert [number for (number,) in longer][:consumed] == seen


def test_epochs_and_seeds_shuffle_differently() -> None:
    def order(seed: int) -> list[int]:
        return [number for (number,) in ShuffledSampler(100, 0, 1, epochs=2, seed=seed)]

    assert order(1) != order(2)
    assert order(1)[:100] != order(1)[100:]
    assert order(1) == order(1)


def test_a_loader_with_other_workers_resumes() -> None:
    """Only yielded batches count as consumed, not those that workers prefetched."""
    pytest.importorskip("torch", reason="torch is an extra of this package")
    from megatron_data.torch import data_loader

    dataset = mixture(schedule({"a": 2, "b": 1}, [(9, {"c": 1, "a": 1})], 48))
    seen, consumed = [], 0
    for workers, micro, ranks, batches in ((2, 2, 2, 3), (0, 3, 1, 4), (1, 4, 3, 2)):
        loaders = [
            iter(
                data_loader(
                    dataset,
                    SequentialSampler(48, consumed, micro, rank, ranks),
                    workers=workers if rank == 0 else 0,
                )
            )
            for rank in range(ranks)
        ]
        for _ in range(batches):
            seen += [n for loader in loaders for n in next(loader)["sample_ids"].tolist()]
            consumed += micro * ranks
    assert seen == list(range(48))
