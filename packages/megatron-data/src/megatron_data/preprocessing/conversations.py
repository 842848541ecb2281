"""Conversations of JSON lines to tokens, and which of them the loss counts."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import orjson
from numpy.typing import NDArray

from ..errors import DataError
from ..files import local_prefix
from ..indexed.builder import IndexedDatasetBuilder
from ..indexed.format import choose_dtype, idx_path
from ..sources.json_lines import NEWLINE, JsonLines
from ..sources.protocol import BrokenChunk
from ..tokenizers.chat import ChatTemplate, Message, Rendered
from ..tokenizers.huggingface import HuggingFaceTokenizer, Place

LOSS = "_loss"
"""What the name of a dataset of conversations and that of its mask differ by."""

OverLength: TypeAlias = Literal["truncate", "drop"]

_ROLES = {"human": "user", "gpt": "assistant"}
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


class _Row(NamedTuple):
    """One line: where it is, its conversations, and the tools they may use."""

    place: str
    conversations: list[list[Message]]
    tools: Sequence[Mapping[str, Any]] | None


def tokenize_conversations(
    inputs: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    tokenizer: HuggingFaceTokenizer,
    template: ChatTemplate,
    *,
    loss: Literal["assistant", "all"] = "assistant",
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
            for encoded in _encoded(rows, tokenizer, template, loss):
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


def _rows(inputs: Sequence[str | os.PathLike[str]]) -> Iterator[_Row]:
    """The conversations of every line that is not white space."""
    for path in [os.fspath(path) for path in inputs]:
        for chunk in JsonLines(path).chunks():
            if isinstance(chunk, BrokenChunk):
                raise DataError(str(chunk.problem))
            for number, line in enumerate(chunk.data.split(NEWLINE), start=chunk.line):
                if line.strip():
                    yield _row(f"{path}:{number}", line)


def _row(place: str, line: bytes) -> _Row:
    try:
        content = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON ({error.msg})") from None
    match content:
        case {"messages": [*messages]}:
            pass
        case {"conversations": [*messages]}:
            messages = [
                {"role": _ROLES.get(message["from"], message["from"]), "content": message["value"]}
                if isinstance(message, dict) and {"from", "value"} <= message.keys()
                else message
                for message in messages
            ]
        case _:
            raise DataError(f'{place}: no conversation; a line must be like {{"messages": […]}}')
    if not all(isinstance(message, dict) and "role" in message for message in messages):
        raise DataError(f'{place}: every message must be like {{"role": "user", "content": "…"}}')
    return _Row(place, _cut(messages), content.get("tools"))


def _cut(messages: list[Message]) -> list[list[Message]]:
    """Conversations, each of which but the first begins with a system message."""
    conversations: list[list[Message]] = []
    for message in messages:
        if not conversations or message["role"] == "system":
            conversations.append([])
        conversations[-1].append(message)
    return conversations


def _encoded(
    rows: Sequence[_Row],
    tokenizer: HuggingFaceTokenizer,
    template: ChatTemplate,
    loss: Literal["assistant", "all"],
) -> Iterator[list[tuple[NDArray[np.int64], NDArray[np.uint8]]]]:
    """Tokens and mask of every conversation, row by row."""
    rendered: list[list[Rendered]] = []
    for row in rows:
        try:
            rendered.append(
                [template.render(messages, row.tools) for messages in row.conversations]
            )
        except DataError as error:
            raise DataError(f"{row.place}: {error}") from None
    encoded = iter(tokenizer.encode_with_places([one.text for texts in rendered for one in texts]))
    for row, texts in zip(rows, rendered, strict=True):
        made = [_masked(text.answers, *next(encoded), loss) for text in texts]
        yield [
            _ended(*one, tokenizer.eod_id, loss == "all" or messages[-1]["role"] == "assistant")
            for one, messages in zip(made, row.conversations, strict=True)
        ]


def _masked(
    answers: list[tuple[int, int]],
    ids: list[int],
    places: list[Place],
    loss: Literal["assistant", "all"],
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Tokens and mask of one conversation; a token counts if part of it is said."""
    counted = np.full(len(ids), loss == "all", np.uint8)
    begins, ends = np.array(places, np.int64).reshape(-1, 2).T
    for first, last in answers:
        counted[(begins < last) & (ends > first)] = 1
    return np.array(ids, np.int64), counted


def _ended(
    tokens: NDArray[np.int64], counted: NDArray[np.uint8], eod_id: int | None, counts: bool
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """With the end of the document behind, if it is not there; whether it counts."""
    if eod_id is None or (len(tokens) and tokens[-1] == eod_id):
        return tokens, counted
    return np.append(tokens, eod_id), np.append(counted, np.uint8(counts))
