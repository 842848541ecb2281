"""Measures how fast a corpus is read and tokenized, phase by phase."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_data.datasets.build import build_gpt_datasets
from megatron_data.errors import DataError
from megatron_data.indexed.builder import IndexedDatasetBuilder
from megatron_data.indexed.format import choose_dtype
from megatron_data.preprocessing.pipeline import preprocess
from megatron_data.sources.opening import open_sources
from megatron_data.sources.protocol import MAX_DOCUMENT_BYTES, Fault
from megatron_data.tokenizers.protocol import Tokenizer

PHASES = ("read", "parse", "tokenize", "write")
"""The phases of `preprocess`, which each document passes in this order."""

_BATCH_CHARACTERS = 1 << 20  # characters per call of the tokenizer, as in preprocess
_SAMPLES = 2000


class PhaseMeasurement(NamedTuple):
    """The measurement of one phase.

    Attributes:
        name: One of `PHASES`, or the name of another measurement.
        seconds: Duration in seconds.
        size: Uncompressed bytes of the sources that it processed; 0 for samples of the dataset.
        documents: Number of documents or samples.
        tokens: Number of tokens; 0 for a phase before tokenization.
    """

    name: str
    seconds: float
    size: int
    documents: int
    tokens: int = 0


class BenchmarkReport(NamedTuple):
    """What was measured.

    Attributes:
        phases: `PHASES` in their order.
        other_measurements: all of `preprocess`, other tokenizers, and the samples of the dataset.
    """

    phases: tuple[PhaseMeasurement, ...]
    other_measurements: tuple[PhaseMeasurement, ...]

    @property
    def bottleneck(self) -> tuple[str, float]:
        """The slowest phase and its share of the total time of the phases."""
        slowest = max(self.phases, key=lambda phase: phase.seconds)
        return slowest.name, slowest.seconds / max(sum(s.seconds for s in self.phases), 1e-9)


def benchmark(
    inputs: Sequence[str | os.PathLike[str]],
    tokenizer: Tokenizer,
    *,
    json_key: str = "text",
    megabytes: float = 16,
    workers: int = 1,
    other_tokenizers: Sequence[Tokenizer] = (),
    sequence_length: int = 1024,
    folder: str | os.PathLike[str] | None = None,
    max_document_bytes: int | None = MAX_DOCUMENT_BYTES,
) -> BenchmarkReport:
    """Measures the phases of `preprocess` and the reading of samples on the start of a corpus.

    Args:
        inputs: Inputs as for `preprocess`.
        tokenizer: Tokenizer, which may use the threads of its library.
        json_key: Key or column that holds the text.
        megabytes: Megabytes of uncompressed input to measure.
        workers: Processes of the complete `preprocess` run.
        other_tokenizers: Further tokenizers to measure, such as a `FastTokenizer`.
        sequence_length: Tokens per sample.
        folder: Folder in which a temporary folder is made for the output. Defaults to the system's
            folder for temporary files.
        max_document_bytes: Largest size of a document in its source in bytes; None for no limit.

    Raises:
        DataError: An input is missing, cannot be read or has no tokens, or a size is below 1.
    """
    if megabytes <= 0 or workers < 1 or sequence_length < 1:
        raise DataError(
            f"{megabytes} megabytes, {workers} processes and samples of {sequence_length} tokens; "
            "each must be at least 1 (megabytes: more than 0)"
        )
    texts, phases = _read(inputs, json_key, int(megabytes * 1e6), max_document_bytes)
    size, documents = phases[0].size, len(texts)
    tokens, seconds = _tokenize(tokenizer, texts)
    count = sum(map(len, tokens))
    if not count:
        raise DataError(f"the first {size:,} bytes of the input give no token")
    phases.append(PhaseMeasurement("tokenize", seconds, size, documents, count))
    extra = []
    for other in other_tokenizers:
        made, seconds = _tokenize(other, texts)
        name = f"tokenize, {type(other).__name__}"
        extra.append(PhaseMeasurement(name, seconds, size, documents, sum(map(len, made))))
    with TemporaryDirectory(dir=folder) as scratch:
        started = perf_counter()
        with IndexedDatasetBuilder(Path(scratch, "d"), choose_dtype(tokenizer.vocab_size)) as out:
            for ids in tokens:
                out.add_document(ids, [len(ids)] if len(ids) else [])
            out.finalize()
        phases.append(PhaseMeasurement("write", perf_counter() - started, size, documents, count))
        lines = Path(scratch, "lines.jsonl")
        with lines.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        (whole,) = preprocess(
            [lines], Path(scratch, "p"), tokenizer, workers=workers, max_document_bytes=None
        )
        name = f"preprocess, {workers} process{'es' if workers > 1 else ''}"
        extra.append(PhaseMeasurement(name, whole.seconds, size, documents, count))
        extra += _samples(str(Path(scratch, "d")), sequence_length)
    return BenchmarkReport(tuple(phases), tuple(extra))


def _read(
    inputs: Sequence[str | os.PathLike[str]], key: str, limit: int, max_bytes: int | None
) -> tuple[list[str], list[PhaseMeasurement]]:
    """Reads the first `limit` bytes; returns their texts and the times of reading and parsing."""
    texts: list[str] = []
    size, reading, parsing = 0, 0.0, 0.0
    sources = open_sources(inputs, (key,))
    chunks = (chunk for source in sources for chunk in source.chunks(max_bytes=max_bytes))
    while size < limit:
        started = perf_counter()
        chunk = next(chunks, None)
        reading += perf_counter() - started
        if chunk is None:
            break
        started = perf_counter()
        items = list(chunk.items((key,), max_bytes))
        parsing += perf_counter() - started
        for item in items:
            if isinstance(item, Fault):
                raise DataError(str(item))
            size += item.size
            texts.append(" ".join(item.texts[0]))
    times = zip(PHASES, (reading, parsing), strict=False)
    return texts, [PhaseMeasurement(name, seconds, size, len(texts)) for name, seconds in times]


def _tokenize(tokenizer: Tokenizer, texts: list[str]) -> tuple[list[NDArray[Any]], float]:
    """Returns the tokens of texts as arrays, and the seconds of encoding."""
    dtype = choose_dtype(tokenizer.vocab_size)
    started = perf_counter()
    tokens = [
        np.asarray(ids, dtype) for some in _batches(texts) for ids in tokenizer.encode_batch(some)
    ]
    return tokens, perf_counter() - started


def _batches(texts: list[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _samples(prefix: str, sequence_length: int) -> list[PhaseMeasurement]:
    """Measures the reading of shuffled samples; returns nothing if the dataset is too short."""
    try:
        train, *_ = build_gpt_datasets(prefix, "1,0,0", sequence_length=sequence_length)
    except DataError:
        return []
    if not train:
        return []
    numbers = [number % len(train) for number in range(_SAMPLES)]
    started = perf_counter()
    for number in numbers:
        train[number]
    seconds = perf_counter() - started
    return [PhaseMeasurement("samples", seconds, 0, _SAMPLES, _SAMPLES * sequence_length)]
