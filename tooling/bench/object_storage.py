"""What reading datasets in object storage costs on our side: the cache, and streams.

    python tooling/bench/object_storage.py [--blocks 10000]

The cache: one block after the other is read of a dataset in fsspec's memory, so that what is
measured is the cache itself: a block that is missing (fetched, checked, written and renamed) and
one that is there (opened, compared with its checksum), in a folder of few and of many blocks, and
in one that is full, where each that is added makes others go. Blocks are of 4 KiB: what depends on
their size is left out.

Streams: a whole file of a storage that takes 50 ms to answer and then gives 80 MB/s to each
request, which are common numbers, through `IndexedDataset.scan`, in turns with fsspec's own file,
read block by block.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from fsspec.implementations.memory import MemoryFileSystem
from megatron_data import IndexedDataset, IndexedDatasetBuilder
from megatron_data.sources import StorageCache

BLOCK = 4096
MEASURED = 300
LATENCY, RATE = 0.05, 80e6


class Distant(MemoryFileSystem):
    """A storage that takes its time."""

    protocol = "msc"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        name: str = super()._strip_protocol(path.replace("msc://", "memory://"))
        return name

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        """Return a range after the time that it takes."""
        data: bytes = super().cat_file(path, start=start, end=end, **kwargs)
        time.sleep(LATENCY + len(data) / RATE)
        return data

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        """A file that is read through fsspec's read-ahead of 5 MiB, as those of s3fs are."""
        size = self.info(path)["size"]

        class File(fsspec.spec.AbstractBufferedFile):
            def _fetch_range(inner, start: int, end: int) -> bytes:  # noqa: N805
                return self.cat_file(path, start, end)

        return File(self, path, mode, cache_type="readahead", size=size)


def write(folder: Path, sequences: int) -> None:
    """A dataset in fsspec's memory whose sequences fill a block each."""
    tokens = np.random.default_rng(0).integers(0, 50_000, BLOCK // 2).astype(np.uint16)
    with IndexedDatasetBuilder(folder / "d", "uint16") as builder:
        for _ in range(sequences):
            builder.add_document(tokens, [len(tokens)])
        builder.finalize()
    for suffix in (".bin", ".idx"):
        content = (folder / f"d{suffix}").read_bytes()
        fsspec.filesystem("memory").pipe_file(f"/bench/d{suffix}", content)


def microseconds(dataset: IndexedDataset, numbers: list[int]) -> tuple[float, float]:
    """The median and the mean time of reading one sequence."""
    times = []
    for number in numbers:
        started = time.perf_counter()
        dataset.get(number)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6, statistics.fmean(times) * 1e6


def cached(folder: Path, blocks: int) -> None:
    """The table of blocks that are missing and of those that are there."""
    print("| blocks in the folder | block | microseconds, median | mean |\n|---|---|---|---|")
    for many, limit in ((10, 10 * blocks), (blocks, 10 * blocks), (blocks, blocks)):
        storage = StorageCache(str(folder / f"cache-{many}-{limit}"), BLOCK, limit * (BLOCK + 4))
        with IndexedDataset("memory://bench/d", storage) as dataset:
            for number in range(many):
                dataset.get(number)
        numbers = list(range(many, many + MEASURED))
        for what in ("missing", "there"):
            with IndexedDataset("memory://bench/d", storage) as dataset:
                median, mean = microseconds(dataset, numbers)
            full = ", full" if limit == many else ""
            print(f"| {many:,}{full} | {what} | {median:,.0f} | {mean:,.0f} |")
            random.Random(0).shuffle(numbers)


def streamed(folder: Path, rounds: int) -> None:
    """The table of whole files."""
    fsspec.register_implementation("msc", Distant, clobber=True)
    with IndexedDatasetBuilder(folder / "s", "uint16") as builder:
        builder.add_document(np.zeros(60_000_000, np.uint16), [60_000_000])
        builder.finalize()
    for suffix in (".bin", ".idx"):
        content = (folder / f"s{suffix}").read_bytes()
        fsspec.filesystem("memory").pipe_file(f"/bench/s{suffix}", content)

    def scan() -> None:
        with IndexedDataset("msc://bench/s", StorageCache(str(folder / "s-cache"))) as dataset:
            for _ in dataset.scan():
                pass

    def plain() -> None:
        with fsspec.open("msc://bench/s.bin", "rb") as file:
            while file.read(8 << 20):
                pass

    ways: dict[str, Callable[[], None]] = {"scan": scan, "fsspec's file": plain}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - started)
    print("\n| 120 MB as a stream | MB/s |\n|---|---|")
    for name, times in seconds.items():
        print(f"| {name} | {120 / statistics.median(times):,.0f} |")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10_000, help="in the folder")
    parser.add_argument("--rounds", type=int, default=3, help="of the streams")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), options.blocks + MEASURED)
        cached(Path(folder), options.blocks)
        streamed(Path(folder), options.rounds)


if __name__ == "__main__":
    main()
