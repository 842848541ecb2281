"""How fast a corpus is read and tokenized, phase by phase, on the user's own files."""

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
"""What `preprocess` does with every document, one after the other in a process."""

_BATCH_CHARACTERS = 1 << 20  # characters that a tokenizer is given together, as in preprocess
_SAMPLES = 2000


class PhaseMeasurement(NamedTuple):
    """One phase.

    Attributes:
        name: one of `PHASES`, or what was measured beside them.
        seconds: that it took.
        size: bytes of the sources, unpacked, that it worked on; 0 for samples of the dataset.
        documents: of these, or samples.
        tokens: that came of them; 0 where there are none yet.
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
        """The phase that takes longest, and its share of the time of all of them."""
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
    """Measures the phases of `preprocess`, and of reading samples, on the first part of a corpus.

    Args:
        inputs: as for `preprocess`.
        tokenizer: which encodes, in the threads of its library.
        json_key: key or column that holds the text.
        megabytes: of the sources, unpacked, after which it stops.
        workers: processes of the `preprocess` that is measured as a whole.
        other_tokenizers: tokenizers to measure beside it, such as a `FastTokenizer`.
        sequence_length: tokens of the samples that are read.
        folder: where a temporary folder is made for what is written; None for the system's.
        max_document_bytes: bytes that a document may have in its source; None for no limit.

    Raises:
        DataError: an input that is missing or cannot be read, or holds no token; sizes below 1.
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
    """Texts of the first `limit` bytes, and the times of reading and of parsing them."""
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
    """Returns the tokens of texts as arrays, and the seconds that they took."""
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
    """The reading of samples of a dataset in a random order; none if it is too short for one."""
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
