"""Reading samples compared with megatron-core, and memory while reading a corpus of any size.

In each round all variants read the same number of new samples, interleaved, and discard them, as a
training loop does: one by one, and as batches of tensors (megatron-core's through torch's
collation, as in its loader). The tables have microseconds per sample, the median over the rounds,
and the median of the ratios of each round.

    OMP_NUM_THREADS=1 python tooling/bench/reading.py [--length 2048] [--rounds 15]
    python tooling/bench/reading.py --sparse 20 [--unmapped]

`--sparse GIB` reads 10^5 random samples from a sparse `.bin` of that size, which takes no disk
space. Anonymous memory belongs to the process itself. File memory is the mapped part of the page
cache: the system reclaims it under memory pressure, but counts it in the resident size of the
process and of its control group. With `--unmapped` the `.bin` is read instead of mapped, so that
only the index is mapped and the page cache of the `.bin` is not counted.
"""

import argparse
import itertools
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from megatron_data import IndexedDatasetBuilder, build_gpt_datasets
from megatron_data.indexed.format import DTYPES, Header, bin_path, idx_path
from megatron_data.torch import read_batch

try:
    from megatron.core.datasets import blended_dataset, gpt_dataset
except ImportError:
    gpt_dataset = None

SEED, BATCH, SAMPLES = 1234, 8, 400
ORDERS = (("compat", True), ("stateless", True), ("packed", True), ("stateless", False))
Ways = dict[str, Callable[[int], Any]]


def measure(what: str, ways: Ways, peer: str, rounds: int) -> None:
    """Runs all variants interleaved and prints one line of the table for each."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in ways if number % 2 else reversed(ways):
            start = time.perf_counter()
            ways[name](number * SAMPLES)
            if number:  # the first round fills caches
                seconds[name].append(time.perf_counter() - start)
    for name, times in seconds.items():
        ratio = ""
        if peer in seconds and name != peer:
            pairs = zip(seconds[peer], times, strict=True)
            ratio = f"{statistics.median(theirs / ours for theirs, ours in pairs):.2f}"
        print(f"| {what} | {name} | {statistics.median(times) / SAMPLES * 1e6:.1f} | {ratio} |")


def one_by_one(dataset: Any) -> Callable[[int], None]:
    def read(start: int) -> None:
        for sample in range(start, start + SAMPLES):
            dataset[sample]

    return read


def in_batches(read: Callable[[Sequence[int]], Any]) -> Callable[[int], None]:
    def read_all(start: int) -> None:
        for first in range(start, start + SAMPLES, BATCH):
            read(range(first, first + BATCH))

    return read_all


def speed(length: int, rounds: int) -> None:
    print(f"| samples of {length} tokens | way | microseconds per sample | megatron-core / way |")
    print("|---|---|---|---|")
    total = SAMPLES * (rounds + 1)
    with tempfile.TemporaryDirectory() as folder:
        prefixes = [f"{folder}/{name}" for name in "ab"]
        for seed, prefix in enumerate(prefixes):
            write_corpus(prefix, seed)
        blend = ["0.7", prefixes[0], "0.3", prefixes[1]]
        for what, data_path in (("one corpus", prefixes[0]), ("two, mixed", blend)):
            single: Ways = {}
            batched: Ways = {}
            for order, mapped in ORDERS:
                dataset = build_gpt_datasets(
                    data_path,
                    "1,0,0",
                    (total, 0, 0),
                    length,
                    SEED,
                    order=order,
                    eod_id=0,
                    mmap=mapped,
                ).train
                way = order if mapped else f"{order}, not mapped"
                single[way] = one_by_one(dataset)
                batched[way] = in_batches(lambda samples, d=dataset: read_batch(d, samples))
            if gpt_dataset is not None:
                theirs = their_dataset(
                    Path(folder), prefixes, length, total, mixed=data_path is blend
                )
                single["megatron-core"] = one_by_one(theirs)
                batched["megatron-core"] = in_batches(
                    lambda samples, d=theirs: collated(d, samples)
                )
            measure(what, single, "megatron-core", rounds)
            measure(f"{what}, batches of {BATCH}", batched, "megatron-core", rounds)


def write_corpus(prefix: str, seed: int) -> None:
    """Writes random tokens in 10,000 documents with the lengths of a web corpus."""
    random = np.random.default_rng(seed)
    with IndexedDatasetBuilder(prefix, "uint16") as builder:
        for size in np.minimum(random.lognormal(6.3, 1.1, 10_000), 1e5).astype(int).tolist():
            builder.add_item(random.integers(0, 50_000, size + 1, np.uint16))
            builder.end_document()
        builder.finalize()


def collated(dataset: Any, samples: Sequence[int]) -> Any:
    from torch.utils.data import default_collate

    return default_collate([dataset[sample] for sample in samples])


def their_dataset(
    folder: Path, prefixes: Sequence[str], length: int, total: int, *, mixed: bool
) -> Any:
    """Returns megatron-core's dataset of the first corpus, or its blend of both, of `total`
    samples.
    """
    import torch.distributed as dist
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    class Tokenizer:
        pad, eod, vocab_size, unique_identifiers = -1, 0, 50_000, {"name": "bench"}

    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    config = gpt_dataset.GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=length,
        blend=(list(prefixes), None),
        split="1,0,0",
        path_to_cache=f"{folder}/cache",
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    datasets = [
        gpt_dataset.GPTDataset(
            IndexedDataset(prefix),
            prefix,
            np.arange(10_000, dtype=np.int32),
            total,
            Split.train,
            config,
        )
        for prefix in prefixes
    ]
    if not mixed:
        return datasets[0]
    return blended_dataset.BlendedDataset(datasets, [0.7, 0.3], total, config)


def sparse(
    gibibytes: float, length: int, mapped: bool, samples: int = 100_000, document: int = 1000
) -> None:
    """Reads random samples of a sparse corpus and prints the memory in use."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/sparse"
        documents = int(gibibytes * 2**30) // (2 * document)
        write_hole(prefix, documents, document)
        train = build_gpt_datasets(
            prefix, "1,0,0", sequence_length=length, eod_id=0, mmap=mapped
        ).train
        assert train is not None
        numbers = np.random.default_rng(0).integers(0, len(train), samples)
        print(f"{documents:,} documents, {bin_path(prefix).stat().st_size / 2**30:.1f} GiB")
        print("| samples read | anonymous memory, MiB | file memory, MiB | microseconds each |")
        print("|---|---|---|---|")
        parts = np.array_split(numbers, 5)
        done = 0
        start = time.perf_counter()
        for part in itertools.chain([numbers[:1]], parts):
            for sample in part.tolist():
                train[sample]
            done += len(part)
            each = (time.perf_counter() - start) / len(part) * 1e6
            print(f"| {done:,} | {resident('RssAnon')} | {resident('RssFile')} | {each:.1f} |")
            start = time.perf_counter()


def write_hole(prefix: str, documents: int, document: int) -> None:
    """Writes the index of documents of zeros, and a sparse `.bin` of that size."""
    with idx_path(prefix).open("wb") as index:
        index.write(Header(DTYPES[8], documents, documents + 1).pack())
        np.full(documents, document, "<i4").tofile(index)
        (np.arange(documents, dtype="<i8") * (2 * document)).tofile(index)
        np.arange(documents + 1, dtype="<i8").tofile(index)
    bin_path(prefix).touch()
    os.truncate(bin_path(prefix), documents * document * 2)


def resident(kind: str) -> int:
    """Returns the memory of this process in MiB, for one of the kinds that Linux reports."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{kind}:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) >> 10 if found else -1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sparse", type=float, metavar="GIB")
    parser.add_argument("--unmapped", action="store_true")
    arguments = parser.parse_args()
    if arguments.sparse:
        sparse(arguments.sparse, arguments.length, mmap=not arguments.unmapped)
    else:
        speed(arguments.length, arguments.rounds)


if __name__ == "__main__":
    main()
