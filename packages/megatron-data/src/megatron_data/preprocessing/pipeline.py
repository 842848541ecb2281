"""Preprocessing: a corpus in, `.bin/.idx` and a manifest out."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Literal, TypeAlias, get_args

from tqdm import tqdm

from ..errors import DataError
from ..files import local_prefix
from ..sources.opening import open_parallel, open_sources
from ..sources.protocol import Source
from ..tokenizers.fast import FastTokenizer, MismatchError
from ..tokenizers.protocol import Tokenizer
from .assembly import assemble, quarantine_path
from .encoding import Encoder
from .manifest import Counts, Skipped, describe, write_manifest
from .parts import Done, PartWriter, Record, Task, WorkFolder
from .pool import ordered_map
from .sentences import SentenceSplitter

OnError: TypeAlias = Literal["fail", "skip", "quarantine"]
"""What becomes of a document that cannot be read or tokenized."""

_SMALLEST, _LARGEST = 1 << 20, 1 << 24
_CHUNKS = 1024

_log = logging.getLogger("megatron_data")


@dataclass(frozen=True)
class Preprocessed:
    """One finished dataset.

    Attributes:
        prefix: path of the pair without `.bin` or `.idx`.
        counts: what it holds.
        bytes_read: size of the sources as they lie.
        seconds: time from the first byte read to the last file named.
        skipped: what was left out.
        chunks: into how many pieces of work the sources were cut.
        continued: how many of them an earlier run that was ended had done.
    """

    prefix: str
    counts: Counts
    bytes_read: int
    seconds: float
    skipped: Skipped
    chunks: int
    continued: int


def preprocess(
    inputs: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    json_keys: Sequence[str] = ("text",),
    parallel: bool = False,
    append_eod: bool = False,
    splitter: SentenceSplitter | None = None,
    workers: int = 1,
    on_error: OnError = "fail",
    max_document_bytes: int | None = None,
    chunk_bytes: int | None = None,
    progress: bool = False,
) -> list[Preprocessed]:
    """Tokenize text into `{output_prefix}_{key}_document.bin`, `.idx` and `.meta.json`.

    With a `splitter` the names end in `_sentence`, and the sequences of a document are its
    sentences, as datasets of BERT, T5 and the inverse cloze task want them.

    Documents keep the order of the input, and the files are the same byte for byte whatever the
    number of workers. Nothing takes its name before it is whole; an older dataset of the same
    name is replaced. A text that gives no token is kept as a document without sequences, as
    Megatron does.

    The work is done in chunks, which are kept in a hidden folder beside the output,
    `.NAME.parts`, until the last is done. A run that was ended, however that was, is continued by
    one with the same tokenizer and options: chunks whose content is the same are not done again.

    Args:
        inputs: files of JSON lines, one object a line; files whose name ends in `.txt`, each one
            document; `.parquet` files, a document in each row; `.gz`, `.bz2` and `.zst` of the
            first two; folders, which stand for the `.txt` files in them and below, sorted, and
            after them for their `.jsonl` and `.parquet` files; patterns; URLs that fsspec opens.
        output_prefix: path and name to which `_{key}_document` is appended.
        tokenizer: see `load_tokenizer`; a `FastTokenizer` is checked as it goes, and all is done
            anew with its reference, which a warning says, at the first text whose tokens differ.
        json_keys: keys whose text is tokenized, each into a dataset of its own. The text of a
            `.txt` file stands for any key, but for one only.
        parallel: the inputs are text files, one for each key, of which line i of each is document
            i: a corpus of translations. Whatever the names, a line is a text, an empty one, too.
        append_eod: end every document with the tokenizer's end-of-document token.
        splitter: what cuts texts into sentences, such as a `PunktSplitter`; texts that are lists of
            several strings are cut already. Sentences without a token are left out.
        workers: processes. With 1 no process is started and the tokenizer runs here, in its own
            threads; with more, each process uses one thread.
        on_error: what to do with a document that cannot be read or tokenized: "fail" ends the
            run with its place and the reason, "skip" counts it, "quarantine" also writes its
            place and the reason to `{output_prefix}.quarantine.jsonl`. With several keys it is
            left out of every dataset.
        max_document_bytes: a document of more bytes in its source (the line, the text file, the
            texts of the row) is such a document, and is not kept in memory; None for no limit.
        chunk_bytes: bytes of text in a chunk; None for 1 to 16 MiB, by the size of the input.
        progress: show a bar on stderr with MB/s, tokens/s and the time left.

    Returns:
        One `Preprocessed` per key.

    Raises:
        DataError: missing or empty input; a line or text that cannot be read (file and place),
            unless it is to be skipped; parallel files of unequal numbers of lines; an output that
            is a URL or a folder; another process writes the same output.
    """
    started = perf_counter()
    prefix = local_prefix(output_prefix)
    if len(set(json_keys)) < len(json_keys):
        raise DataError(f"--json-keys {' '.join(json_keys)}: name every key once")
    if max_document_bytes is not None and max_document_bytes < 1:
        raise DataError(f"--max-document-bytes {max_document_bytes}; give at least 1")
    if on_error not in get_args(OnError):
        raise DataError(f"on_error={on_error!r}; give one of {', '.join(get_args(OnError))}")

    def run(chosen: Tokenizer) -> list[Preprocessed]:
        encoder = Encoder(chosen, tuple(json_keys), append_eod, max_document_bytes, splitter)
        keys = encoder.keys
        sources = [open_parallel(inputs, keys)] if parallel else open_sources(inputs, keys)
        return _preprocess(sources, prefix, encoder, on_error, workers, chunk_bytes, progress)

    try:
        made = run(tokenizer)
    except MismatchError as error:
        if not isinstance(tokenizer, FastTokenizer):
            raise
        _log.warning("%s; all is done anew without gigatoken", error)
        made = run(tokenizer.reference)
    seconds = perf_counter() - started
    return [replace(dataset, seconds=seconds) for dataset in made]


def _preprocess(
    sources: list[Source],
    prefix: str,
    encoder: Encoder,
    on_error: OnError,
    workers: int,
    chunk_bytes: int | None,
    progress: bool,
) -> list[Preprocessed]:
    """`preprocess` with one tokenizer, not timed."""
    total = sum(source.size for source in sources)
    level = "document" if encoder.splitter is None else "sentence"
    size = chunk_bytes or min(max(total // _CHUNKS, _SMALLEST), _LARGEST)
    with ExitStack() as stack:
        folder = stack.enter_context(WorkFolder(prefix, _job(encoder, size)))
        bar = stack.enter_context(_Bar(total, progress))
        work = _Work(folder, sources, size, encoder.longest, on_error != "fail", bar)
        writer = PartWriter(encoder, folder.path, on_error != "fail")
        for done in ordered_map(writer, work.tasks(), workers):
            work.note(done)
        names = ", ".join(source.path for source in sources)
        made, faults = assemble(
            folder,
            work.chunks,
            [f"{prefix}_{key}_{level}" for key in encoder.keys],
            encoder.dtype,
            quarantine_path(prefix) if on_error == "quarantine" else None,
            [f"no document with text under {key!r} in {names}" for key in encoder.keys],
        )
        skipped = Skipped(faults.total(), dict(sorted(faults.items())))
        for key, (name, written, counts, origins) in zip(encoder.keys, made, strict=True):
            description = describe(key=key, encoder=encoder, sources=sources, skipped=skipped)
            write_manifest(name, description, written=written, counts=counts, origins=origins)
        folder.finish()
    read = sum(source.record()["bytes"] for source in sources)
    return [
        Preprocessed(name, counts, read, 0.0, skipped, work.chunks, work.continued)
        for name, _, counts, _ in made
    ]


def _job(encoder: Encoder, chunk_bytes: int) -> dict[str, object]:
    """What decides which tokens a text becomes, and where the sources are cut."""
    return {
        "format": "megatron-data parts 1",
        "tokenizer": encoder.tokenizer.fingerprint,
        "json keys": list(encoder.keys),
        "end of document": encoder.eod,
        "sentences": None if encoder.splitter is None else encoder.splitter.record,
        "token type": str(encoder.dtype),
        "max document bytes": encoder.longest,
        "chunk bytes": chunk_bytes,
        "gigatoken": isinstance(encoder.tokenizer, FastTokenizer),
    }


class _Work:
    """The chunks of all sources: which are there already, and how far the others are."""

    def __init__(
        self,
        folder: WorkFolder,
        sources: list[Source],
        chunk_bytes: int,
        longest: int | None,
        tolerant: bool,
        bar: "_Bar",
    ) -> None:
        self._folder = folder
        self._sources = sources
        self._chunk_bytes = chunk_bytes
        self._longest = longest
        self._tolerant = tolerant
        self._bar = bar
        self.chunks = self.continued = 0

    def tasks(self) -> Iterator[Task]:
        """The chunks that are still to be done, read as they are asked for."""
        for number, source in enumerate(self._sources):
            for chunk in source.chunks(self._chunk_bytes, self._longest):
                task = Task(self.chunks, number, source.path, chunk)
                self.chunks += 1
                record = self._folder.holds(task)
                if record is None:
                    yield task
                else:
                    self._take_over(record)

    def _take_over(self, record: Record) -> None:
        self.continued += 1
        first = record.faults[0] if record.faults else None
        self.note(Done(record.stored, sum(record.tokens), first))

    def note(self, done: Done) -> None:
        """Take account of a finished chunk.

        Raises:
            DataError: it has a fault and faults end the run.
        """
        if done.fault is not None and not self._tolerant:
            raise DataError(str(done.fault))
        self._bar.advance(done.stored, done.tokens)


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
