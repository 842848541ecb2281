"""JSON lines to .bin/.idx files, compared with a bare `encode_batch` loop and Megatron's structure.

The bare loop has its texts in memory and discards the result, which bounds what a tokenizer allows.
Megatron's preprocess_data.py sends one document at a time through a process pool; the stand-in here
has the same structure with our writer. `--megatron PATH` also runs that script itself, start and
imports included. If gigatoken is installed (the extra `fast`), it is measured too. The benchmark
checks that all variants write the same bytes.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from megatron_data import (
    HuggingFaceTokenizer,
    IndexedDatasetBuilder,
    preprocess,
    read_texts,
    train_bpe,
)
from megatron_data.tokenizers import FastTokenizer
from tokenizers import Tokenizer

CORPUS = Path(__file__).parents[2] / "corpus"
BATCH = 1000
BARE, ONE = "bare encode_batch loop", "one document at a time"
FAST = "preprocess --fast"


class OneByOne:
    """Megatron's structure: a worker parses and tokenizes a line, and the parent appends it."""

    tokenizer: HuggingFaceTokenizer

    @classmethod
    def start(cls, folder: str) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        cls.tokenizer = HuggingFaceTokenizer.load(folder)

    @classmethod
    def encode(cls, line: str) -> tuple[list[int], list[int]]:
        ids = cls.tokenizer.encode(json.loads(line)["text"])
        ids.append(cls.tokenizer.eod_id or 0)
        return ids, [len(ids)]

    @classmethod
    def run(cls, corpus: Path, output: Path, folder: Path, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        with (
            context.Pool(workers, cls.start, (str(folder),)) as pool,
            corpus.open(encoding="utf-8") as lines,
            IndexedDatasetBuilder(output, "uint16") as builder,
        ):
            for ids, lengths in pool.imap(cls.encode, lines, 32):
                builder.add_document(ids, lengths)
            builder.finalize()


def megatrons(script: Path, corpus: Path, folder: Path, workers: int) -> None:
    """Runs Megatron's script with the same tokenizer."""
    words = {
        "--input": corpus,
        "--output-prefix": folder / "megatron",
        "--tokenizer-type": "HuggingFaceTokenizer",
        "--tokenizer-model": folder,
        "--workers": workers,
    }
    given = [str(word) for pair in words.items() for word in pair]
    subprocess.run([sys.executable, str(script), *given, "--append-eod"], check=True)


def tasks(
    corpus: Path, folder: Path, threads: int, script: Path | None
) -> dict[str, Callable[[], object]]:
    """Returns the variants to compare with `threads` threads or processes."""
    tokenizer = HuggingFaceTokenizer.load(folder)
    bare = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = list(read_texts([corpus]))

    def loop() -> None:
        for start in range(0, len(texts), BATCH):
            bare.encode_batch(texts[start : start + BATCH], add_special_tokens=False)

    def ours(workers: int) -> None:
        preprocess([corpus], folder / "ours", tokenizer, append_eod=True, workers=workers)

    def fast(workers: int) -> None:
        made = FastTokenizer(tokenizer)
        preprocess([corpus], folder / "fast", made, append_eod=True, workers=workers)

    compared: dict[str, Callable[[], object]] = {
        BARE: loop,
        "preprocess, workers=1": lambda: ours(1),
        ONE: lambda: OneByOne.run(corpus, folder / "one", folder, threads),
    }
    if threads > 1:
        compared[f"preprocess, workers={threads}"] = lambda: ours(threads)
    if script is not None:
        compared[script.name] = lambda: megatrons(script, corpus, folder, threads)
    if importlib.util.find_spec("gigatoken"):
        compared[f"{FAST}, workers=1"] = lambda: fast(1)
        if threads > 1:
            compared[f"{FAST}, workers={threads}"] = lambda: fast(threads)
    return compared


def processor_seconds() -> float:
    """Returns the CPU time of this process and its finished children; load affects it less."""
    return sum(os.times()[:4])


def check_equal(folder: Path) -> None:
    """Checks that the files of all variants hold the same bytes."""
    for suffix in ("bin", "idx"):
        one = (folder / f"one.{suffix}").read_bytes()
        names = {"ours": "preprocess", "fast": "gigatoken", "megatron": "Megatron's script"}
        for name, whose in names.items():
            other = folder / f"{name}_text_document.{suffix}"
            if other.exists() and other.read_bytes() != one:
                raise SystemExit(f"{whose} gives another .{suffix} than one document at a time")


def main() -> None:
    """Prints a table for each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, help="JSON lines (the repository's, repeated)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--megatron", type=Path, help="Megatron-LM's tools/preprocess_data.py")
    parser.add_argument("--copies", type=int, default=1, help="the corpus so many times")
    parser.add_argument("--fast-only", action="store_true", help="only --fast and its peers")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = arguments.corpus or folder / "corpus.jsonl"
        if arguments.corpus is None:
            corpus.write_bytes((CORPUS / "moby_dick.jsonl").read_bytes() * 6)
        if arguments.copies > 1:
            content, corpus = corpus.read_bytes(), folder / "copies.jsonl"
            with corpus.open("wb") as file:
                for _ in range(arguments.copies):
                    file.write(content)
        train_bpe(read_texts([CORPUS / "moby_dick.jsonl"]), 4096).save(folder)
        megabytes = corpus.stat().st_size / 1e6
        print(f"JSON lines to .bin/.idx, {megabytes:.1f} MB, byte-level BPE of 4,096\n")
        peers = (ONE, arguments.megatron.name) if arguments.megatron else (ONE,)
        print(f"| threads | way | MB/s | MB per CPU second | of the bare loop | of {peers[-1]} |")
        print("|---|---|---|---|---|---|")
        for threads in arguments.threads:
            os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
            compared = tasks(corpus, folder, threads, arguments.megatron)
            if arguments.fast_only:
                compared = {way: compared[way] for way in compared if way in peers or FAST in way}
            times: dict[str, list[float]] = {way: [] for way in compared}
            worked: dict[str, list[float]] = {way: [] for way in compared}
            for _ in range(arguments.repeats):
                for way, task in compared.items():
                    start, before = time.perf_counter(), processor_seconds()
                    task()
                    times[way].append(time.perf_counter() - start)
                    worked[way].append(processor_seconds() - before)
            rates = {way: megabytes / statistics.median(seen) for way, seen in times.items()}
            for way, rate in rates.items():
                bare = f"{rate / rates[BARE]:.2f}" if BARE in rates else ""
                per_second = megabytes / statistics.median(worked[way])
                print(
                    f"| {threads} | {way} | {rate:.2f} | {per_second:.2f} | {bare} | "
                    f"{rate / rates[peers[-1]]:.2f} |"
                )
        check_equal(folder)


if __name__ == "__main__":
    main()
