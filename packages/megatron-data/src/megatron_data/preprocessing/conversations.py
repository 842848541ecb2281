"""Conversations of JSON lines to tokens, and which of them the loss counts."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeAlias

from ..errors import DataError
from ..files import local_prefix
from ..indexed.builder import IndexedDatasetBuilder
from ..indexed.format import choose_dtype, idx_path
from ..sources.conversations import ConversationRow, read_row
from ..sources.json_lines import NEWLINE, JsonLines
from ..sources.protocol import BrokenChunk
from ..tokenizers.chat import ChatTemplate
from ..tokenizers.conversations import LossOver, encode_rows
from ..tokenizers.huggingface import HuggingFaceTokenizer

LOSS = "_loss"
"""What the name of a dataset of conversations and that of its mask differ by."""

OverLength: TypeAlias = Literal["truncate", "drop"]

_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class ConversationReport:
    """What became of conversations; none is lost without being counted.

    Attributes:
        rows: lines read; each is a document.
        conversations: written, each a sequence of its document. Together with those dropped and
            unanswered they are all there were.
        tokens: written.
        answered: tokens that the loss counts.
        truncated: conversations written that lost their end.
        dropped: conversations that were too long.
        unanswered: conversations in which no token counts, which are left out.
    """

    rows: int
    conversations: int
    tokens: int
    answered: int
    truncated: int
    dropped: int
    unanswered: int


def tokenize_conversations(
    inputs: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    tokenizer: HuggingFaceTokenizer,
    template: ChatTemplate,
    *,
    loss: LossOver = "assistant",
    max_tokens: int | None = None,
    over_length: OverLength = "truncate",
) -> ConversationReport:
    """Write `{output_prefix}_conversation` and `{output_prefix}_conversation_loss`, two pairs.

    The first holds a document for each line and in it a sequence for each conversation, the second
    a 1 for every token that the loss counts and a 0 for the others. A line has `messages`, objects
    with `role` and `content`, or `conversations`, objects with `from` and `value`; every system
    message begins another conversation. `tools` are given to the template. A conversation ends with
    the end-of-document token, which is put there if the template did not.

    Args:
        inputs: files of JSON lines, packed or not.
        output_prefix: path and name.
        tokenizer: of the text.
        template: from messages to text.
        loss: "assistant" counts what assistants say, the end of their turn included; "all" counts
            every token but the first (Megatron's prompt format `default`).
        max_tokens: tokens a conversation may have, such as a sample's; None for no limit.
        over_length: what becomes of a longer one.

    Returns:
        What became of the conversations.

    Raises:
        DataError: a line that holds no conversation (file and line), messages that the template
            refuses, or nothing for the loss to count.
    """
    if max_tokens is not None and max_tokens < 2:
        raise DataError(
            f"--max-tokens {max_tokens}: a token is learned behind another; give at least 2"
        )
    if tokenizer.eod_id is None:
        raise DataError("conversations end with the end-of-document token; the tokenizer has none")
    prefix = f"{local_prefix(output_prefix)}_conversation"
    counts = dict.fromkeys(ConversationReport.__dataclass_fields__, 0)
    with ExitStack() as stack:
        tokens = stack.enter_context(
            IndexedDatasetBuilder(prefix, choose_dtype(tokenizer.vocab_size))
        )
        mask = stack.enter_context(IndexedDatasetBuilder(prefix + LOSS, "uint8"))
        rest = _rows(inputs)
        while rows := list(islice(rest, _ROWS_AT_ONCE)):
            for encoded in encode_rows(rows, tokenizer, template, loss):
                counts["rows"] += 1
                for ids, counted in encoded:
                    too_long = max_tokens is not None and len(ids) > max_tokens
                    if too_long and over_length == "drop":
                        counts["dropped"] += 1
                        continue
                    ids, counted = ids[:max_tokens], counted[:max_tokens]
                    if not counted[1:].any():
                        counts["unanswered"] += 1
                        continue
                    counts["truncated"] += too_long
                    counts["conversations"] += 1
                    counts["tokens"] += len(ids)
                    counts["answered"] += int(counted[1:].sum())
                    tokens.add_item(ids)
                    mask.add_item(counted)
                tokens.end_document()
                mask.end_document()
        if not counts["conversations"]:
            raise DataError(
                f"none of the conversations in {', '.join(map(str, inputs))} has a token that the "
                "loss counts"
            )
        # An older mask must never be seen beside new tokens, nor new ones beside older tokens.
        for path in (idx_path(prefix + LOSS), idx_path(prefix)):
            path.unlink(missing_ok=True)
        tokens.finalize()
        mask.finalize()
    return ConversationReport(**counts)


def _rows(inputs: Sequence[str | os.PathLike[str]]) -> Iterator[ConversationRow]:
    """The conversations of every line that is not white space."""
    for path in [os.fspath(path) for path in inputs]:
        for chunk in JsonLines(path).chunks():
            if isinstance(chunk, BrokenChunk):
                raise DataError(str(chunk.problem))
            for number, line in enumerate(chunk.data.split(NEWLINE), start=chunk.line):
                if line.strip():
                    yield read_row(f"{path}:{number}", line)
