"""Conversations in JSON lines that are tokenized on demand."""

import logging
import os
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_data.datasets.batches import Sample
from megatron_data.datasets.sft import make_sample
from megatron_data.errors import DataError
from megatron_data.lru_cache import LRUCache
from megatron_data.order.protocol import check_order_arguments
from megatron_data.order.rows import truncated_lengths
from megatron_data.sources.conversations import read_row
from megatron_data.sources.json_lines import NEWLINE
from megatron_data.sources.protocol import MAX_DOCUMENT_BYTES, too_long
from megatron_data.sources.streams import split_suffix
from megatron_data.sources.urls import is_url, without_scheme
from megatron_data.tokenizers.conversations import ConversationTokens, LossOver, encode_rows
from megatron_data.tokenizers.sft import SFTTokenizer

_WHITE_SPACE = np.frombuffer(b" \t\r\v\f\n", np.uint8)
_READ_BYTES = 1 << 24
_CACHED_LINES = 64

_log = logging.getLogger("megatron_data")


class _Lines(NamedTuple):
    """Positions of the lines of a file that are not blank.

    Attributes:
        starts: First byte of each line, int64 `[L]`.
        sizes: Size of each line in bytes, including its newline, int64 `[L]`.
        blank: Number of non-blank lines before each blank line, int64.
    """

    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    blank: NDArray[np.int64]


class ConversationLines:
    """The conversations of a file of JSON lines, tokenized as by `tokenize_conversations`.

    The constructor finds the beginning of each line. This takes 16 bytes of memory per line;
    nothing is written. Lines are read and tokenized on demand, and the last 64 are cached.

    Args:
        path: Path of a local, uncompressed file.
        tokenizer: Tokenizer with a prompt format.
        loss: "assistant" includes what assistants say in the loss, "all" every token but the first.
            Defaults to "assistant".
        max_document_bytes: Largest size of a line in bytes. None is no limit. Defaults to 32 MiB.

    Raises:
        DataError: The file is missing, empty, compressed or at a URL, a line is too long, or the
            tokenizer has no end-of-document token.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tokenizer: SFTTokenizer,
        loss: LossOver = "assistant",
        max_document_bytes: int | None = MAX_DOCUMENT_BYTES,
    ) -> None:
        self.path = without_scheme(os.fspath(path))
        self.tokenizer = tokenizer
        self._loss: LossOver = loss
        if is_url(self.path) or split_suffix(self.path)[1]:
            raise DataError(
                f"{self.path}: lines are read in any order, which needs a local, uncompressed "
                "file; decompress a local copy, or run megatron-data tokenize-conversations"
            )
        if not Path(self.path).is_file():
            raise DataError(f"{self.path} does not exist or is not a file")
        if tokenizer.eod_id is None:
            raise DataError(
                "conversations end with the end-of-document token, but the tokenizer has none"
            )
        if tokenizer.template.uses_time and tokenizer.template.now is None:
            _log.warning(
                "%s: the chat template writes the time (strftime_now), so samples depend on the "
                "day on which they are read; fix the time with ChatTemplate.with_time, or run "
                "megatron-data tokenize-conversations",
                self.path,
            )
        self._stat = _stat_of(Path(self.path).stat())
        self._lines = _find_lines(self.path)
        if not len(self):
            raise DataError(f"{self.path} is empty; write one conversation per line")
        self._check_sizes(max_document_bytes)
        self._rows: LRUCache[list[ConversationTokens]] = LRUCache(_CACHED_LINES)

    def __len__(self) -> int:
        """Returns the number of lines that are not blank."""
        return len(self._lines.starts)

    def conversations(self, index: int) -> list[ConversationTokens]:
        """Returns the conversations of a line that have a token in the loss.

        Raises:
            DataError: The line is not a conversation, the template refuses it, or the file changed
                since it was opened. The error names file and line.
        """
        return self._rows.get(index, lambda: self._read(index))

    def location(self, index: int) -> str:
        """Returns the file name and the line number of a line."""
        before = np.searchsorted(self._lines.blank, index, side="right")
        return f"{self.path}:{index + 1 + int(before)}"

    def _read(self, number: int) -> list[ConversationTokens]:
        start, size = int(self._lines.starts[number]), int(self._lines.sizes[number])
        with Path(self.path).open("rb") as file:
            if _stat_of(os.fstat(file.fileno())) != self._stat:
                raise DataError(f"{self.path} changed since it was opened; start the run again")
            file.seek(start)
            line = file.read(size).removesuffix(NEWLINE)
        row = read_row(self.location(number), line)
        reference, template = self.tokenizer.reference, self.tokenizer.template
        (conversations,) = encode_rows(
            [row], reference, template, self._loss, self.tokenizer.turn_ends
        )
        return [conversation for conversation in conversations if conversation.loss_mask[1:].any()]

    def _check_sizes(self, longest: int | None) -> None:
        """Raises an error for the first line of more than `longest` bytes without its newline."""
        if longest is None:
            return
        starts, sizes = self._lines.starts, self._lines.sizes
        for number in np.flatnonzero(sizes > longest).tolist():
            end = int(starts[number] + sizes[number])
            with Path(self.path).open("rb") as file:
                file.seek(end - len(NEWLINE))
                size = int(sizes[number]) - (file.read(len(NEWLINE)) == NEWLINE)
            if size > longest:
                raise DataError(f"{self.location(number)}: {too_long(size, longest)}")


class ConversationLinesDataset:
    """Samples in Megatron's order: the conversations of a line, in the order of the file.

    Samples equal those of an `SFTDataset` with a `RowOrder` of the tokenized lines; see there. A
    warning names the first line that is truncated, and the first line without a token in the loss.

    Args:
        lines: The conversations.
        rows: First line of the split, and the index after its last.
        sequence_length: Tokens of a sample.
        num_samples: Number of samples. Defaults to the number of lines.
    """

    def __init__(
        self,
        lines: ConversationLines,
        rows: tuple[int, int],
        *,
        sequence_length: int,
        num_samples: int | None = None,
    ) -> None:
        check_order_arguments(sequence_length, 1, num_samples)
        self.lines = lines
        self.sequence_length = sequence_length
        self._first, self._count = rows[0], rows[1] - rows[0]
        self._samples = self._count if num_samples is None else num_samples
        self._warned: set[str] = set()

    def __len__(self) -> int:
        """Returns the number of samples."""
        return self._samples

    def __getitem__(self, sample: int) -> Sample:
        if not 0 <= sample < self._samples:
            raise IndexError(f"sample {sample} is out of range; there are {self._samples} samples")
        number = self._first + sample % self._count
        row = self.lines.conversations(number)
        lengths = np.array([len(conversation.ids) for conversation in row], np.int64)
        truncated = truncated_lengths(lengths, self.sequence_length)
        if not row:
            self._warn_once(
                "empty", number, "no message of the role assistant; the sample has no loss"
            )
        if sum(truncated) < lengths.sum():
            held = f"truncated to {self.sequence_length}; lines longer than a sample"
            self._warn_once("long", number, f"{lengths.sum()} tokens, {held} lose their end")
        parts = [
            (conversation.ids[:length], conversation.loss_mask[:length])
            for conversation, length in zip(row, truncated, strict=True)
            if length
        ]
        return make_sample(parts, self.sequence_length, sample)

    def _warn_once(self, kind: str, number: int, what: str) -> None:
        """Logs a warning for the first line of a kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("%s: %s (logged only once)", self.lines.location(number), what)


def _stat_of(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns


def _is_white(file: BinaryIO, size: int) -> bool:
    """Returns whether the next `size` bytes are all white space."""
    while size > 0:
        data = file.read(min(size, _READ_BYTES))
        if not data or data.strip():
            return not data
        size -= len(data)
    return True


def _find_lines(path: str) -> _Lines:
    """Finds the lines of a file in one pass."""
    parts = [np.empty(0, np.int64)]
    starts_blank = [np.empty(0, bool)]
    size, at_line_start = 0, True
    with Path(path).open("rb") as file:
        while block := file.read(_READ_BYTES):
            data = np.frombuffer(block, np.uint8)
            starts = np.flatnonzero(data == NEWLINE[0]) + 1
            starts = np.append(np.zeros(int(at_line_start), np.int64), starts)
            at_line_start = bool(starts.size and starts[-1] == len(data))
            starts = starts[: starts.size - at_line_start]
            parts.append(starts + size)
            starts_blank.append(np.isin(data[starts], _WHITE_SPACE))
            size += len(data)
        bounds = np.append(np.concatenate(parts), size)
        starts, sizes = bounds[:-1], np.diff(bounds)
        blank = np.concatenate(starts_blank)
        for line in np.flatnonzero(blank).tolist():
            file.seek(starts[line])
            blank[line] = _is_white(file, int(sizes[line]))
    return _Lines(starts[~blank], sizes[~blank], np.cumsum(~blank)[blank])
