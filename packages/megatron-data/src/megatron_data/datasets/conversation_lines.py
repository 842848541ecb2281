"""Conversations that stay text until a sample asks for them."""

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

_WHITE = np.frombuffer(b" \t\r\v\f\n", np.uint8)
_STEP = 1 << 24
_KEPT = 64

_log = logging.getLogger("megatron_data")


class _Lines(NamedTuple):
    """Where the lines of a file are that hold something.

    Attributes:
        starts: First byte of every line, int64 `[L]`.
        sizes: Its bytes with the end of the line, int64 `[L]`.
        blank: How many lines with something stand before each line of white space, int64.
    """

    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    blank: NDArray[np.int64]


class ConversationLines:
    """The conversations of a file of JSON lines, as `tokenize_conversations` reads them.

    Opening finds where lines begin: 16 bytes a line are kept, and nothing is written. A line is
    read and tokenized when it is asked for; the last 64 are kept.

    Args:
        path: A local file that is not packed.
        tokenizer: Knows how conversations are written.
        loss: "assistant" counts what assistants say, "all" every token but the first.
        max_document_bytes: Bytes that a line may have; None for no limit.

    Raises:
        DataError: No such file, a packed one or one at a URL, nothing in it, a line that is too
            long (file and line), or a tokenizer without an end-of-document token.
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
                f"{self.path}: lines are read here and there, which only a local file allows that "
                "is not packed; unpack a local copy, or run megatron-data tokenize-conversations"
            )
        if not Path(self.path).is_file():
            raise DataError(f"{self.path} does not exist, or is no file")
        if tokenizer.eod_id is None:
            raise DataError("conversations end with the end-of-document token; there is none")
        if tokenizer.template.uses_time and tokenizer.template.now is None:
            _log.warning(
                "%s: the chat template writes the time (strftime_now), so samples change with the "
                "day on which they are read; fix it with ChatTemplate.at, or run megatron-data "
                "tokenize-conversations",
                self.path,
            )
        self._stat = _stat_of(Path(self.path).stat())
        self._lines = _find_lines(self.path)
        if not len(self):
            raise DataError(f"{self.path} holds nothing; every line is to hold a conversation")
        self._check_sizes(max_document_bytes)
        self._rows: LRUCache[list[ConversationTokens]] = LRUCache(_KEPT)

    def __len__(self) -> int:
        """Returns the number of lines that are not white space."""
        return len(self._lines.starts)

    def conversations(self, index: int) -> list[ConversationTokens]:
        """The conversations of a line in which a token counts, each with its end of document.

        Raises:
            DataError: The line holds no conversation, or the template refuses it (file and line);
                or the file changed.
        """
        return self._rows.get(index, lambda: self._read(index))

    def location(self, index: int) -> str:
        """File and line."""
        before = np.searchsorted(self._lines.blank, index, side="right")
        return f"{self.path}:{index + 1 + int(before)}"

    def _read(self, number: int) -> list[ConversationTokens]:
        start, size = int(self._lines.starts[number]), int(self._lines.sizes[number])
        with Path(self.path).open("rb") as file:
            if _stat_of(os.fstat(file.fileno())) != self._stat:
                raise DataError(f"{self.path} changed since it was opened; start again")
            file.seek(start)
            line = file.read(size).removesuffix(NEWLINE)
        row = read_row(self.location(number), line)
        reference, template = self.tokenizer.reference, self.tokenizer.template
        (conversations,) = encode_rows([row], reference, template, self._loss)
        return [each for each in conversations if each.loss_mask[1:].any()]

    def _check_sizes(self, longest: int | None) -> None:
        """Refuses the first line of more bytes, its end not among them."""
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
    """Megatron's rows: a sample is the conversations of a line, in the order of the file.

    Samples are those of an `SFTDataset` along a `RowOrder` of the same lines, tokenized before; see
    there. Of lines that are longer than a sample, and lose their end, the first that is read is
    warned of, and of those in which nothing counts.

    Args:
        lines: The conversations.
        rows: First line of the split, and the one after its last.
        sequence_length: Tokens of a sample.
        num_samples: How many samples there are; None for one of every line.
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
            raise IndexError(f"sample {sample} of {self._samples}")
        number = self._first + sample % self._count
        row = self.lines.conversations(number)
        lengths = np.array([len(each.ids) for each in row], np.int64)
        kept = truncated_lengths(lengths, self.sequence_length)
        if not row:
            self._warn_once(
                "empty", number, "no word of the role assistant; such samples teach nothing"
            )
        if sum(kept) < lengths.sum():
            held = f"of which a sample holds the first {self.sequence_length}; longer lines"
            self._warn_once("long", number, f"{lengths.sum()} tokens, {held} lose their end")
        parts = [
            (each.ids[:length], each.loss_mask[:length])
            for each, length in zip(row, kept, strict=True)
            if length
        ]
        return make_sample(parts, self.sequence_length, sample)

    def _warn_once(self, kind: str, number: int, what: str) -> None:
        """Warns of the first line of a kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("%s: %s, and this is the only warning", self.lines.location(number), what)


def _stat_of(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns


def _is_white(file: BinaryIO, size: int) -> bool:
    """Returns whether the next bytes are all white space."""
    while size > 0:
        data = file.read(min(size, _STEP))
        if not data or data.strip():
            return not data
        size -= len(data)
    return True


def _find_lines(path: str) -> _Lines:
    """Reads a file once, a stretch at a time."""
    parts = [np.empty(0, np.int64)]
    white = [np.empty(0, bool)]
    size, begins = 0, True
    with Path(path).open("rb") as file:
        while stretch := file.read(_STEP):
            data = np.frombuffer(stretch, np.uint8)
            starts = np.flatnonzero(data == NEWLINE[0]) + 1
            starts = np.append(np.zeros(int(begins), np.int64), starts)
            begins = bool(starts.size and starts[-1] == len(data))
            starts = starts[: starts.size - begins]
            parts.append(starts + size)
            white.append(np.isin(data[starts], _WHITE))
            size += len(data)
        bounds = np.append(np.concatenate(parts), size)
        starts, sizes = bounds[:-1], np.diff(bounds)
        blank = np.concatenate(white)
        for line in np.flatnonzero(blank).tolist():
            file.seek(starts[line])
            blank[line] = _is_white(file, int(sizes[line]))
    return _Lines(starts[~blank], sizes[~blank], np.cumsum(~blank)[blank])
