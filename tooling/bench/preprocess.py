"""JSON lines to finished .bin/.idx, against a bare `encode_batch` loop and one document at a time.

The bare loop has its texts in memory and throws the result away: the bound of what a tokenizer
leaves to gain. One document at a time through a process pool is how Megatron's preprocess_data.py
works; the stand-in here has its structure, with our writer.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from megatron_data import (
    HuggingFaceTokenizer,
    IndexedDatasetBuilder,
    load_tokenizer,
    preprocess,
    read_texts,
    train_bpe,
)
from tokenizers import Tokenizer

CORPUS = Path(__file__).parents[2] / "corpus"
BATCH = 1000


class OneByOne:
    """Megatron's structure: a worker parses and tokenizes a line, the parent appends it."""

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


def tasks(corpus: Path, folder: Path, threads: int) -> dict[str, Callable[[], object]]:
    """What is compared with `threads` threads or processes."""
    tokenizer = load_tokenizer(folder)
    bare = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = list(read_texts([corpus]))

    def loop() -> None:
        for start in range(0, len(texts), BATCH):
            bare.encode_batch(texts[start : start + BATCH], add_special_tokens=False)

    def ours(workers: int) -> None:
        preprocess([corpus], folder / "ours", tokenizer, append_eod=True, workers=workers)

    compared: dict[str, Callable[[], object]] = {
        "bare encode_batch loop": loop,
        "preprocess, workers=1": lambda: ours(1),
        "one document at a time": lambda: OneByOne.run(corpus, folder / "one", folder, threads),
    }
    if threads > 1:
        compared[f"preprocess, workers={threads}"] = lambda: ours(threads)
    return compared


def main() -> None:
    """Print a table for one thread and one for two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, help="JSON lines (the repository's, repeated)")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = arguments.corpus or folder / "corpus.jsonl"
        if arguments.corpus is None:
            corpus.write_bytes((CORPUS / "moby_dick.jsonl").read_bytes() * 6)
        train_bpe(read_texts([CORPUS / "moby_dick.jsonl"]), 4096).save(folder)
        megabytes = corpus.stat().st_size / 1e6
        print(f"JSON lines to .bin/.idx, {megabytes:.1f} MB, byte-level BPE of 4,096\n")
        print("| threads | way | MB/s | of the bare loop |\n|---|---|---|---|")
        for threads in (1, 2):
            os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
            compared = tasks(corpus, folder, threads)
            times: dict[str, list[float]] = {way: [] for way in compared}
            for _ in range(arguments.repeats):
                for way, task in compared.items():
                    start = time.perf_counter()
                    task()
                    times[way].append(time.perf_counter() - start)
            rates = {way: megabytes / statistics.median(seen) for way, seen in times.items()}
            for way, rate in rates.items():
                share = rate / rates["bare encode_batch loop"]
                print(f"| {threads} | {way} | {rate:.2f} | {share:.2f} |")


if __name__ == "__main__":
    main()
