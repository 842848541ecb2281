"""Sample orders: building Megatron's, computing ours, maps of sentences, packing.

The peers are megatron-core's own functions with its compiled helpers, interleaved with ours; the
tables have medians. A random shuffle of 32-bit numbers and a pass over the lengths bound the build.
Without megatron-core only ours is measured.

    OMP_NUM_THREADS=1 python tooling/bench/sample_order.py [--documents 1e7] [--rounds 5] [--large]

`--large` adds 10^8 documents.
"""

import argparse
import resource
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
from megatron_data.order import (
    BlendSchedule,
    Packing,
    StatelessOrder,
    WeightChange,
    build_gpt_indices,
    sentence_map,
)
from megatron_data.order.compat import build_sample_index
from numpy.typing import NDArray

try:
    from megatron.core.datasets import gpt_dataset, helpers
except ImportError:
    gpt_dataset = helpers = None

SEQUENCE, SEED = 4096, 1234
Row = tuple[str, list[float], list[float]]


def in_turns(rounds: int, ours: Callable[[], Any], theirs: Callable[[], Any] | None) -> list[Any]:
    """Returns the seconds of both, interleaved; the order alternates."""
    seconds: list[list[float]] = [[], []]
    ways = [(0, ours), (1, theirs)]
    for number in range(rounds):
        for place, way in ways if number % 2 else reversed(ways):
            if way is not None:
                start = time.perf_counter()
                way()
                seconds[place].append(time.perf_counter() - start)
    return seconds


def show(what: str, seconds: list[list[float]]) -> None:
    """Prints one line of the table."""
    ours, theirs = (statistics.median(times) if times else None for times in seconds)
    ratio = f"{theirs / ours:.2f}" if ours and theirs else ""
    print(f"| {what} | {ours:.3f} | {'' if theirs is None else f'{theirs:.3f}'} | {ratio} |")


def corpus(documents: int) -> NDArray[np.int32]:
    """Returns the lengths of a web corpus: lognormal with a mean of about 1,000 tokens."""
    lengths = np.random.default_rng(0).lognormal(6.3, 1.1, documents)
    return np.minimum(lengths, 1e6).astype(np.int32) + 1


def theirs_whole(lengths: NDArray[np.int32]) -> None:
    """Runs megatron-core's build for one epoch of a split, without its files."""
    state = np.random.RandomState(SEED)
    documents = np.arange(len(lengths), dtype=np.int32)
    index = gpt_dataset._build_document_index(documents, 1, state, False)
    tokens = int(np.sum(lengths))
    samples = helpers.build_sample_idx(lengths, index, SEQUENCE, 1, tokens, True, True)
    gpt_dataset._build_shuffle_index(len(samples) - 1, len(samples) - 1, state)


def building(documents: int, rounds: int) -> None:
    lengths = corpus(documents)
    everything = np.arange(documents, dtype=np.int32)
    index = np.random.RandomState(SEED).permutation(everything)
    tokens = int(lengths.sum(dtype=np.int64))
    seconds = in_turns(
        rounds,
        lambda: build_gpt_indices(lengths, everything, sequence_length=SEQUENCE, seed=SEED),
        None if helpers is None else lambda: theirs_whole(lengths),
    )
    show(f"all indices of {documents:.0e} documents", seconds)
    seconds = in_turns(
        rounds,
        lambda: build_sample_index(lengths, index, sequence_length=SEQUENCE),
        None
        if helpers is None
        else lambda: helpers.build_sample_idx(lengths, index, SEQUENCE, 1, tokens, True, True),
    )
    show("its sample index alone", seconds)
    tracemalloc.start()
    built = build_gpt_indices(lengths, everything, sequence_length=SEQUENCE, seed=SEED)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    sizes = sum(array.nbytes for array in built)
    print(f"| memory of it at most, over the size of the arrays | {peak / sizes:.2f} | | |")


def sentences(rounds: int) -> None:
    random = np.random.default_rng(0)
    bounds = np.concatenate([[0], np.cumsum(random.integers(1, 60, 230_000))]).astype(np.int64)
    lengths = random.integers(1, 60, bounds[-1]).astype(np.int32)
    made = 0

    def ours() -> None:
        nonlocal made
        made = len(
            sentence_map(
                bounds,
                lengths,
                max_length=509,
                short_probability=0.1,
                seed=SEED,
                num_samples=1_000_000,
                min_sentences=2,
            )
        )

    seconds = in_turns(
        rounds,
        ours,
        None
        if helpers is None
        else lambda: helpers.build_mapping(
            bounds, lengths, 2**31 - 2, 1_000_000, 509, 0.1, SEED, False, 2
        ),
    )
    show(f"BERT's map of {made:,} samples", seconds)


def packing(documents: int) -> None:
    """Returns time and memory of packing, without the memory of the lengths."""
    lengths = corpus(documents)
    tracemalloc.start()
    start = time.perf_counter()
    report = Packing(lengths, SEQUENCE).report()
    seconds = time.perf_counter() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    padding = f"{report.padding_fraction:.4%} padding"
    what = f"packing {documents:.0e} documents, {padding}, {peak / 1e9:.2f} GB"
    show(what, [[seconds], []])


class Computed:
    """A table of equal lengths that takes no memory."""

    def __init__(self, sequences: int, length: int) -> None:
        self.sequence_lengths = np.broadcast_to(np.int32(length), (sequences,))
        self._length = length

    def tokens_before(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        return sequences * self._length


def stateless(sources: int = 100, tokens: int = 10**12) -> None:
    documents, samples = tokens // sources // 1000, tokens // SEQUENCE
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    weights = {str(source): 1 / (source + 1) for source in range(sources)}
    schedule = BlendSchedule([WeightChange(0, weights)], samples)
    orders = [
        StatelessOrder(
            Computed(documents, 1000),
            (0, documents),
            sequence_length=SEQUENCE,
            seed=source,
            num_samples=count,
        )
        for source, count in enumerate(schedule.counts())
    ]
    opened = time.perf_counter() - start
    times = []
    for sample in np.random.default_rng(0).integers(0, samples, 2000).tolist():
        start = time.perf_counter()
        source, number = schedule[sample]
        orders[source].spans(number)
        times.append(time.perf_counter() - start)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    median, slow = np.percentile(times, [50, 99]) * 1e3
    print(
        f"a blend of {sources} sources and {tokens:.0e} tokens opens in {opened * 1e3:.1f} ms; a "
        f"random sample is found in {median:.3f} ms (99 of 100 in {slow:.3f}); "
        f"{grown / 1e3:.0f} MB more memory after 2,000 of them"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=float, default=1e7)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--large", action="store_true")
    arguments = parser.parse_args()
    stateless()
    print("| what | ours, s | megatron-core, s | theirs / ours |")
    print("|---|---|---|---|")
    building(int(arguments.documents), arguments.rounds)
    sentences(min(arguments.rounds, 3))
    packing(int(arguments.documents))
    if arguments.large:
        building(10**8, 1)
        packing(10**8)


if __name__ == "__main__":
    main()
