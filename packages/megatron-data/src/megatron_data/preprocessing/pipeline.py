"""Preprocessing: JSON lines and text files in, `.bin/.idx` and a manifest out."""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from tqdm import tqdm

from ..errors import DataError
from ..indexed.builder import IndexedDatasetBuilder
from ..sources.opening import open_sources
from ..sources.protocol import Chunk, Source
from ..tokenizers.protocol import Tokenizer
from .encoding import Encoded, Encoder
from .manifest import Counts, manifest_path, write_manifest
from .pool import ordered_map


@dataclass(frozen=True)
class Preprocessed:
    """One finished dataset.

    Attributes:
        prefix: path of the pair without `.bin` or `.idx`.
        counts: what it holds.
        bytes_read: size of the sources.
        seconds: time from the first byte read to the last file named.
    """

    prefix: str
    counts: Counts
    bytes_read: int
    seconds: float


def preprocess(
    inputs: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    workers: int = 1,
    progress: bool = False,
) -> list[Preprocessed]:
    """Tokenize text into `{output_prefix}_{key}_document.bin`, `.idx` and `.meta.json`.

    Documents keep the order of the input, and the files are the same byte for byte whatever the
    number of workers. Nothing takes its name before it is whole; an older dataset of the same
    name is replaced. A text that gives no token is kept as a document without sequences, as
    Megatron does.

    Args:
        inputs: files of JSON lines, one object a line; files whose name ends in `.txt`, each one
            document; folders, which stand for the `.txt` files in them and below, sorted, and
            after them for their `.jsonl` files.
        output_prefix: path and name to which `_{key}_document` is appended.
        tokenizer: see `load_tokenizer`.
        json_keys: keys whose text is tokenized, each into a dataset of its own. The text of a
            `.txt` file stands for any key, but for one only.
        append_eod: end every document with the tokenizer's end-of-document token.
        workers: processes. With 1 no process is started and the tokenizer runs here, in its own
            threads; with more, each process uses one thread.
        progress: show a bar on stderr with MB/s, tokens/s and the time left.

    Returns:
        One `Preprocessed` per key.

    Raises:
        DataError: missing or empty input, or a line or text that cannot be read (file and place).
    """
    started = perf_counter()
    encoder = Encoder(tokenizer, tuple(json_keys), append_eod)
    sources = open_sources(inputs, encoder.keys)
    prefixes = [f"{os.fspath(output_prefix)}_{key}_document" for key in encoder.keys]
    with ExitStack() as stack:
        builders = [
            stack.enter_context(IndexedDatasetBuilder(prefix, encoder.dtype)) for prefix in prefixes
        ]
        bar = stack.enter_context(_Bar(sum(source.size for source in sources), progress))
        empty = [0] * len(builders)
        for size, results in _encode(sources, encoder, workers):
            for number, (builder, result) in enumerate(zip(builders, results, strict=True)):
                builder.add_documents(result.tokens, result.lengths, result.sequences)
                empty[number] += int(np.count_nonzero(result.sequences == 0))
            bar.advance(size, sum(len(result.tokens) for result in results))
        for key, builder in zip(encoder.keys, builders, strict=True):
            if not builder.tokens:
                names = ", ".join(source.path for source in sources)
                raise DataError(f"no document with text under {key!r} in {names}")
        finished = []
        for key, builder, without_token in zip(encoder.keys, builders, empty, strict=True):
            manifest_path(builder.prefix).unlink(missing_ok=True)  # it describes the older files
            written = builder.finalize()
            counts = Counts(written.documents, without_token, written.sequences, written.tokens)
            write_manifest(
                builder.prefix,
                key=key,
                append_eod=append_eod,
                dtype=str(encoder.dtype),
                tokenizer=tokenizer,
                sources=sources,
                written=written,
                counts=counts,
            )
            finished.append((builder.prefix, counts))
    seconds = perf_counter() - started
    read = sum(source.record()["bytes"] for source in sources)
    return [Preprocessed(prefix, counts, read, seconds) for prefix, counts in finished]


def _encode(
    sources: list[Source], encoder: Encoder, workers: int
) -> Iterator[tuple[int, list[Encoded]]]:
    """Size in bytes and result of every chunk, in order."""
    sizes: deque[int] = deque()

    def chunks() -> Iterator[Chunk]:
        for source in sources:
            for chunk in source.chunks():
                sizes.append(chunk.size)
                yield chunk

    for results in ordered_map(encoder, chunks(), workers):
        yield sizes.popleft(), results


class _Bar:
    """Bytes read against bytes in all, and tokens per second."""

    def __init__(self, total: int, shown: bool) -> None:
        self._bar = tqdm(
            total=total,
            unit="B",
            unit_scale=True,
            desc="preprocess",
            disable=None if shown else True,  # None: no bar where stderr is not a terminal
            leave=False,
        )
        self._tokens = 0
        self._started = perf_counter()

    def advance(self, size: int, tokens: int) -> None:
        self._tokens += tokens
        rate = self._tokens / max(perf_counter() - self._started, 1e-9)
        self._bar.set_postfix_str(f"{tqdm.format_sizeof(rate)} tokens/s", refresh=False)
        self._bar.update(size)

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
