"""The cost of reading datasets in object storage on our side: the block cache, and streams.

    python tooling/bench/object_storage.py [--blocks 10000]

Cache: reads a dataset in fsspec's memory block by block, which measures the cache itself. A block
is missing (fetched, checked, written and renamed) or cached (opened, compared with its checksum).
The folder has few blocks, many, or is full, so that each new block removes others. Blocks have 4
KiB, which excludes costs that depend on their size.

Streams: reads a whole file from a storage with 50 ms latency and 80 MB/s for each request, which
are common values, through `IndexedDataset.scan` and through fsspec's own file, interleaved.
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
    """A storage with latency and limited throughput."""

    protocol = "msc"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        name: str = super()._strip_protocol(path.replace("msc://", "memory://"))
        return name

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        """Returns a range after the time that the storage takes."""
        data: bytes = super().cat_file(path, start=start, end=end, **kwargs)
        time.sleep(LATENCY + len(data) / RATE)
        return data

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        """Opens a file with fsspec's read-ahead of 5 MiB, like the files of s3fs."""
        size = self.info(path)["size"]

        class File(fsspec.spec.AbstractBufferedFile):
            def _fetch_range(inner, start: int, end: int) -> bytes:  # noqa: N805
                return self.cat_file(path, start, end)

        return File(self, path, mode, cache_type="readahead", size=size)


def write(folder: Path, sequences: int) -> None:
    """Writes a dataset in fsspec's memory whose sequences fill one block each."""
    tokens = np.random.default_rng(0).integers(0, 50_000, BLOCK // 2).astype(np.uint16)
    with IndexedDatasetBuilder(folder / "d", "uint16") as builder:
        for _ in range(sequences):
            builder.add_document(tokens, [len(tokens)])
        builder.finalize()
    for suffix in (".bin", ".idx"):
        content = (folder / f"d{suffix}").read_bytes()
        fsspec.filesystem("memory").pipe_file(f"/bench/d{suffix}", content)


def microseconds(dataset: IndexedDataset, numbers: list[int]) -> tuple[float, float]:
    """Returns the median and the mean time of reading one sequence."""
    times = []
    for number in numbers:
        started = time.perf_counter()
        dataset.get(number)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6, statistics.fmean(times) * 1e6


def cached(folder: Path, blocks: int) -> None:
    """Returns the table of missing and cached blocks."""
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
    """Returns the table of whole files."""
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
    """Prints both tables."""
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
