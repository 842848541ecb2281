"""Runs an encoder over all source chunks with several processes, and writes the datasets."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Literal, NamedTuple, TypeAlias, get_args

from tqdm import tqdm

from megatron_data.errors import DataError
from megatron_data.preprocessing.assembly import assemble
from megatron_data.preprocessing.existing import refuse_existing
from megatron_data.preprocessing.manifest import Counts, Skipped, describe_output, write_manifest
from megatron_data.preprocessing.parts import (
    PartRecord,
    PartResult,
    PartWriter,
    Task,
    WorkFolder,
    can_resume,
    count_vocabulary_tokens,
)
from megatron_data.preprocessing.pool import ordered_map
from megatron_data.preprocessing.protocol import ChunkEncoder
from megatron_data.sources.protocol import Source

OnError: TypeAlias = Literal["fail", "skip", "quarantine"]
"""What to do with a document that cannot be read or tokenized."""

_CHUNKS = 1024

_log = logging.getLogger("megatron_data")


@dataclass(frozen=True)
class PreprocessedDataset:
    """A finished dataset.

    Attributes:
        prefix: Path of the files without `.bin` or `.idx`.
        counts: Counts of its documents and tokens.
        bytes_read: Size of the source files in bytes, compressed if they are.
        seconds: Time from the first byte read until the last file is complete.
        skipped: Counts of skipped documents.
        first_skipped: Place and reason of the first skipped document, or None.
        chunks: Number of source chunks.
        resumed_chunks: Number of chunks that an earlier, interrupted run had finished.
    """

    prefix: str
    counts: Counts
    bytes_read: int
    seconds: float
    skipped: Skipped
    first_skipped: str | None
    chunks: int
    resumed_chunks: int


@dataclass(frozen=True)
class WorkOptions:
    """The arguments of `preprocess` with these names.

    Raises:
        DataError: `on_error` is unknown, or `chunk_bytes` is below 1.
    """

    workers: int = 1
    on_error: OnError = "fail"
    chunk_bytes: int | None = None
    progress: bool = False
    overwrite: bool = True

    def __post_init__(self) -> None:
        if self.on_error not in get_args(OnError):
            raise DataError(
                f"on_error={self.on_error!r}; give one of {', '.join(get_args(OnError))}"
            )
        if self.chunk_bytes is not None and self.chunk_bytes < 1:
            raise DataError(f"chunk_bytes={self.chunk_bytes}; give at least 1, or None")


class JobResult(NamedTuple):
    """The result of a job.

    Attributes:
        datasets: The datasets in the order of the encoder's outputs.
        tallies: Counters of the encoder by name; 0 for a missing name.
    """

    datasets: list[PreprocessedDataset]
    tallies: Mapping[str, int]


def run_job(
    sources: list[Source], prefix: str, encoder: ChunkEncoder, work: WorkOptions, title: str
) -> JobResult:
    """Writes the datasets of an encoder, or resumes an interrupted run.

    The files are byte-identical for any number of workers and interruptions. Existing datasets are
    replaced once all new ones are complete.

    Args:
        sources: The sources in the order of the datasets.
        prefix: Folder and name; each output adds its suffix.
        encoder: Encodes a chunk as documents.
        work: Options of the run.
        title: Title of the progress bar.

    Raises:
        DataError: A document is invalid and `on_error` is "fail", there is no document, another
            process writes the same output, or an output exists, may not be overwritten, and does
            not belong to an interrupted run of this job.
    """
    limit = encoder.max_document_bytes
    if limit is not None and limit < 1:
        raise DataError(
            f"--max-document-bytes {limit}; give at least 1 (in Python None for no limit)"
        )
    started = perf_counter()
    total = sum(source.size for source in sources)
    least, most = encoder.chunk_bytes
    size = work.chunk_bytes or min(max(total // _CHUNKS, least), most)
    job = _job(encoder, size)
    if not work.overwrite and not can_resume(prefix, job):
        refuse_existing(prefix + output.suffix for output in encoder.outputs)
    with ExitStack() as stack:
        folder = stack.enter_context(WorkFolder(prefix, job))
        bar = stack.enter_context(_Bar(total, title, work.progress))
        chunks = _Chunks(folder, sources, size, encoder, work.on_error != "fail", bar)
        writer = PartWriter(encoder, folder.path, work.on_error != "fail")
        for result in ordered_map(writer, chunks.tasks(), work.workers):
            chunks.finish_chunk(result)
        made = assemble(
            folder,
            chunks.count,
            prefix,
            encoder.outputs,
            work.on_error == "quarantine",
            ", ".join(source.path for source in sources),
        )
        skipped = Skipped(made.faults.total(), dict(sorted(made.faults.items())))
        for number, (name, written, counts, origins) in enumerate(made.datasets):
            description = describe_output(
                encoder, number, sources=sources, skipped=skipped, tallies=made.tallies
            )
            write_manifest(name, description, written=written, counts=counts, origins=origins)
        folder.mark_finished()
    _warn_of_missing_checksums(sources)
    read = sum(source.record()["bytes"] for source in sources)
    seconds = perf_counter() - started
    first = None if made.first_fault is None else str(made.first_fault)
    finished = [
        PreprocessedDataset(
            name, counts, read, seconds, skipped, first, chunks.count, chunks.resumed
        )
        for name, _, counts, _ in made.datasets
    ]
    return JobResult(finished, made.tallies)


def _warn_of_missing_checksums(sources: Sequence[Source]) -> None:
    """Logs one warning for Parquet files without checksums, in which damage is not detected."""
    records = (source.record() for source in sources)
    unprotected = [record["path"] for record in records if record.get("page_checksums") is False]
    if unprotected:
        more = f" and {len(unprotected) - 1:,} more" if len(unprotected) > 1 else ""
        _log.warning(
            "%s%s: no page checksums, so damage may not be detected; write the files with them "
            "(pyarrow: write_page_checksum=True)",
            unprotected[0],
            more,
        )


def _job(encoder: ChunkEncoder, chunk_bytes: int) -> dict[str, object]:
    """Returns the values that determine the encoding and where the sources are split."""
    return {"format": "megatron-data parts 1", **encoder.job, "chunk bytes": chunk_bytes}


class _Chunks:
    """Yields the chunks of all sources that are not finished, and counts all of them."""

    def __init__(
        self,
        folder: WorkFolder,
        sources: list[Source],
        chunk_bytes: int,
        encoder: ChunkEncoder,
        tolerant: bool,
        bar: "_Bar",
    ) -> None:
        self._folder = folder
        self._sources = sources
        self._chunk_bytes = chunk_bytes
        self._encoder = encoder
        self._tolerant = tolerant
        self._bar = bar
        self.count = self.resumed = 0

    def tasks(self) -> Iterator[Task]:
        """Yields a task for each chunk that an earlier run did not finish; reads lazily."""
        for number, source in enumerate(self._sources):
            for chunk in source.chunks(self._chunk_bytes, self._encoder.max_document_bytes):
                task = Task(self.count, number, source.path, chunk)
                self.count += 1
                record = self._folder.find_record(task)
                if record is None or record.others != self._encoder.external_version(chunk):
                    yield task
                else:
                    self._take_over(record)

    def _take_over(self, record: PartRecord) -> None:
        self.resumed += 1
        first = record.faults[0] if record.faults else None
        self.finish_chunk(
            PartResult(
                record.stored, count_vocabulary_tokens(record.tokens, self._encoder.outputs), first
            )
        )

    def finish_chunk(self, result: PartResult) -> None:
        """Updates the progress bar for a finished chunk.

        Raises:
            DataError: The chunk has a fault and `on_error` is "fail".
        """
        if result.fault is not None and not self._tolerant:
            raise DataError(str(result.fault))
        self._bar.advance(result.stored, result.tokens)


class _Bar:
    """A progress bar of bytes read, with tokens per second."""

    def __init__(self, total: int, title: str, shown: bool) -> None:
        self._bar = tqdm(
            total=total,
            unit="B",
            unit_scale=True,
            desc=title,
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
