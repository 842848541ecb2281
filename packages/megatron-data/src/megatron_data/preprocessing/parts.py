"""Finished chunks (parts), stored in a folder beside the output until all of them are finished.

A part is one file: the length of its record (8 bytes, little-endian), the record as JSON, and the
arrays of every dataset: tokens, lengths, sequences and, if it has them, modes. The file gets its
name when it is complete; a digest of the arrays detects later damage. A part is valid for the
content of one chunk, whose digest it records, and for one job: the tokenizer and the options that
determine the encoding. No other part is reused.
"""

import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import orjson

from megatron_data.errors import DataError
from megatron_data.files import read_json, write_json, write_then_rename
from megatron_data.indexed.format import TokenType
from megatron_data.preprocessing.protocol import ChunkEncoder, EncodedDocuments, Output
from megatron_data.sources.protocol import Chunk, Fault, Span

JOB = "job.json"
LOCK = "lock"
_LENGTH = 8

_log = logging.getLogger("megatron_data")


@dataclass(frozen=True)
class PartRecord:
    """The record of a part. Its attributes are keys in the file.

    Attributes:
        source: Index of the source.
        path: Path of the source.
        span: Range of the source.
        digest: SHA-256 of the chunk.
        stored: Bytes of the source file read for the chunk, compressed if the file is.
        documents: Number of documents, which is the same in every dataset.
        sequences: Number of sequences in each dataset.
        tokens: Number of tokens in each dataset.
        faults: Faults of the chunk.
        refused: Indices of the documents that the encoder refused.
        sha256: SHA-256 of the arrays.
        tallies: Counters of the encoder.
        others: `ChunkEncoder.external_version` of the chunk.
    """

    source: int
    path: str
    span: Span
    digest: str
    stored: int
    documents: int
    sequences: list[int]
    tokens: list[int]
    faults: list[Fault]
    refused: list[int]
    sha256: str
    tallies: dict[str, int] = field(default_factory=dict)
    others: str = ""

    @classmethod
    def from_json(cls, data: bytes) -> "PartRecord":
        """Reads a record from the JSON of its `asdict`."""
        content = orjson.loads(data)
        content["span"] = Span(*content["span"])
        content["faults"] = [Fault(*fault) for fault in content["faults"]]
        return cls(**content)


class Task(NamedTuple):
    """A chunk to encode: its index in the job, index and path of its source, and the chunk."""

    number: int
    source: int
    path: str
    chunk: Chunk


class PartResult(NamedTuple):
    """What a worker returns for a part: bytes of the source, tokens, and the first fault."""

    stored: int
    tokens: int
    fault: Fault | None


def count_vocabulary_tokens(tokens: Sequence[int], outputs: Sequence[Output]) -> int:
    """Returns the number of tokens in all datasets except masks."""
    pairs = zip(tokens, outputs, strict=True)
    return sum(count for count, output in pairs if output.values is None)


class PartWriter:
    """Encodes a chunk and writes it as a part; runs in every worker process.

    Args:
        encoder: The encoder.
        folder: The folder of the parts.
        tolerant: Whether to write parts of chunks with faults.
    """

    def __init__(self, encoder: ChunkEncoder, folder: Path, tolerant: bool) -> None:
        self._encoder = encoder
        self._folder = folder
        self._tolerant = tolerant

    def __call__(self, task: Task) -> PartResult:
        """Encodes one chunk and writes its part."""
        encoded = self._encoder(task.chunk)
        first = encoded.faults[0] if encoded.faults else None
        tokens = [len(output.tokens) for output in encoded.outputs]
        done = PartResult(
            task.chunk.stored, count_vocabulary_tokens(tokens, self._encoder.outputs), first
        )
        if first is not None and not self._tolerant:
            return done
        arrays = [array for output in encoded.outputs for array in output.arrays]
        digest = hashlib.sha256()
        for array in arrays:
            digest.update(np.ascontiguousarray(array).data)
        record = PartRecord(
            source=task.source,
            path=task.path,
            span=task.chunk.span,
            digest=task.chunk.digest,
            stored=task.chunk.stored,
            documents=len(encoded.outputs[0].sequences),
            sequences=[len(output.lengths) for output in encoded.outputs],
            tokens=tokens,
            faults=encoded.faults,
            refused=encoded.refused,
            sha256=digest.hexdigest(),
            tallies=dict(encoded.tallies),
            others=encoded.external_version,
        )
        _write(
            part_path(self._folder, task.number),
            orjson.dumps(asdict(record), default=tuple),
            arrays,
        )
        return done


class WorkFolder:
    """The folder of the parts of a job, locked by one process at a time.

    Args:
        output_prefix: Folder and name of the output; the folder is `.NAME.parts` beside it.
        job: JSON values that determine the encoding.

    Raises:
        DataError: Another process writes the same output.

    Attributes:
        path: The folder.
    """

    def __init__(self, output_prefix: str, job: dict[str, Any]) -> None:
        self.path = _folder_of(output_prefix)
        self._output = output_prefix
        self._lock = self._take()
        self._finished = False
        try:
            self._adopt(job)
        except BaseException:  # including an interrupt: no other code can release the lock yet
            self._release()
            raise

    def _take(self) -> int:
        """Locks the folder for this process; the kernel releases the lock when the process ends."""
        lock = self.path / LOCK
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(lock, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                continue  # the previous owner has just removed the folder
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_ino == lock.stat().st_ino:
                    return descriptor
            except BlockingIOError:
                os.close(descriptor)
                raise DataError(
                    f"another process is writing {self._output}; wait for it or give another output"
                ) from None
            except FileNotFoundError:
                pass
            os.close(descriptor)

    def _adopt(self, job: dict[str, Any]) -> None:
        """Keeps the parts of an equal job and removes those of any other."""
        for path in self.path.iterdir():
            if path.name not in (JOB, LOCK) and path.suffix != ".part":
                path.unlink()  # an incomplete file of a killed process
        before = _job_of(self.path / JOB)
        if before == job:
            return
        parts = list(self.path.glob("*.part"))
        if parts:
            names = sorted(set(job) | set(before or {}))
            other = [name for name in names if (before or {}).get(name) != job.get(name)]
            _log.warning(
                "%s holds %d parts of another job (%s differ); they are removed and the run starts "
                "again",
                self.path,
                len(parts),
                ", ".join(other),
            )
        for path in parts:
            path.unlink()
        write_json(self.path / JOB, job)

    def find_record(self, task: Task) -> PartRecord | None:
        """Returns the record of the part of a chunk; None if it is missing, old or damaged."""
        path = part_path(self.path, task.number)
        if not path.is_file():
            return None
        try:
            record, arrays = _read(path)
        except (ValueError, TypeError, KeyError):  # damaged
            return None
        same = (record.source, record.path, record.span) == (
            task.source,
            task.path,
            task.chunk.span,
        )
        if not same or record.digest != task.chunk.digest:
            return None
        return record if hashlib.sha256(arrays).hexdigest() == record.sha256 else None

    def read(
        self, number: int, outputs: Sequence[Output]
    ) -> tuple[PartRecord, list[EncodedDocuments]]:
        """Reads a finished part: its record and its documents in each dataset.

        Raises:
            DataError: The part was damaged since it was written.
        """
        path = part_path(self.path, number)
        try:
            record, data = _read(path)
            return record, list(_arrays(record, data, outputs))
        except (ValueError, TypeError, KeyError):
            raise DataError(f"{path} was damaged; run the same command again") from None

    def mark_finished(self) -> None:
        """Marks the job as finished, so that the folder is removed on exit."""
        self._finished = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._release()

    def _release(self) -> None:
        """Releases the lock; removes the folder if the job is finished or there are no parts."""
        try:
            if self._finished or not any(self.path.glob("*.part")):
                for path in self.path.iterdir():
                    if path.name not in (JOB, LOCK):
                        path.unlink(missing_ok=True)
                # After the parts, because parts without a job would seem to be of another job.
                (self.path / JOB).unlink(missing_ok=True)
                (self.path / LOCK).unlink()
                with suppress(OSError):  # another process may have started to use it
                    self.path.rmdir()
        finally:
            os.close(self._lock)


def can_resume(output_prefix: str, job: dict[str, Any]) -> bool:
    """Returns whether an interrupted run of the same job left its folder and can be resumed."""
    return _job_of(_folder_of(output_prefix) / JOB) == job


def _folder_of(output_prefix: str) -> Path:
    output = Path(output_prefix)
    return output.parent / f".{output.name}.parts"


def part_path(folder: Path, number: int) -> Path:
    """Returns the path of a part."""
    return folder / f"{number:08}.part"


def _job_of(path: Path) -> dict[str, Any] | None:
    try:
        content = read_json(path)
    except (DataError, FileNotFoundError):
        return None
    return content if isinstance(content, dict) else None


def _write(path: Path, record: bytes, arrays: list[np.ndarray[Any, Any]]) -> None:
    """Writes a part without flushing it to the disk; its digest detects damage after a crash."""
    with write_then_rename(path, path.with_suffix(f".{os.getpid()}")) as file:
        file.write(len(record).to_bytes(_LENGTH, "little"))
        file.write(record)
        for array in arrays:
            file.write(np.ascontiguousarray(array).data)


def _read(path: Path) -> tuple[PartRecord, memoryview]:
    data = memoryview(path.read_bytes())
    start = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    return PartRecord.from_json(bytes(data[_LENGTH:start])), data[start:]


def _arrays(
    record: PartRecord, data: memoryview, outputs: Sequence[Output]
) -> Iterator[EncodedDocuments]:
    offset = 0

    def take(count: int, kind: TokenType) -> np.ndarray[Any, Any]:
        nonlocal offset
        array = np.frombuffer(data, kind, count, offset) if count else np.empty(0, kind)
        offset += array.nbytes
        return array

    for output, sequences, tokens in zip(outputs, record.sequences, record.tokens, strict=True):
        yield EncodedDocuments(
            take(tokens, output.dtype),
            take(sequences, np.dtype("<i4")),
            take(record.documents, np.dtype("<i4")),
            take(sequences, np.dtype("i1")) if output.multimodal else None,
        )
