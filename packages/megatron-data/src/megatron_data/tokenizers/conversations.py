"""Tokens of conversations, and the mask of those that the loss counts."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import DataError
from megatron_data.sources.conversations import ConversationRow
from megatron_data.tokenizers.chat import ChatTemplate, RenderedConversation
from megatron_data.tokenizers.huggingface import HuggingFaceTokenizer, Offsets
from megatron_data.tokenizers.turn_ends import TurnEnds
from megatron_data.tokenizers.turns import ASSISTANT

LossOver: TypeAlias = Literal["assistant", "all"]
IGNORE_INDEX = -100
"""Target that the loss ignores, as in Megatron and Hugging Face's models."""


class ConversationTokens(NamedTuple):
    """Tokens of a conversation with their loss mask.

    Attributes:
        ids: Token ids, int64 `[s]`.
        loss_mask: uint8 `[s]`, 1 for every token that the loss counts, 0 for the others.
    """

    ids: NDArray[np.int64]
    loss_mask: NDArray[np.uint8]

    @property
    def targets(self) -> NDArray[np.int64]:
        """The token ids, with -100 for tokens that the loss ignores, int64 `[s]`."""
        return np.where(self.loss_mask, self.ids, IGNORE_INDEX)


def encode_rows(
    rows: Sequence[ConversationRow],
    tokenizer: HuggingFaceTokenizer,
    template: ChatTemplate,
    loss: LossOver,
    ends: TurnEnds,
) -> Iterator[list[ConversationTokens]]:
    """Yields the tokens and loss masks of the conversations of each row.

    The tokens are those of the template. The end-of-document token is appended if the template ends
    turns with no token (`TurnEnds.missing`).

    Raises:
        DataError: The template refuses messages; the error names file and line.
    """
    rendered = []
    for row in rows:
        try:
            rendered.append(render_row(row, template, loss))
        except DataError as error:
            raise DataError(f"{row.location}: {error}") from None
    return encode_rendered(rows, rendered, tokenizer, template, loss, ends)


def render_row(
    row: ConversationRow, template: ChatTemplate, loss: LossOver
) -> list[RenderedConversation]:
    """Renders the conversations of a row; finds the assistant's text unless `loss` is "all".

    Raises:
        DataError: The template refuses messages.
    """
    spans = loss != "all"
    return [
        template.render(messages, row.tools, return_assistant_spans=spans)
        for messages in row.conversations
    ]


def encode_rendered(
    rows: Sequence[ConversationRow],
    rendered: Sequence[Sequence[RenderedConversation]],
    tokenizer: HuggingFaceTokenizer,
    template: ChatTemplate,
    loss: LossOver,
    ends: TurnEnds,
) -> Iterator[list[ConversationTokens]]:
    """Yields what `encode_rows` yields, for rows that are already rendered."""
    encoded = iter(tokenizer.encode_with_offsets([one.text for texts in rendered for one in texts]))
    for row, texts in zip(rows, rendered, strict=True):
        blocks = template.has_generation_blocks(row.tools)
        made = [
            with_loss_mask(spans if blocks else ends.closed(text, spans), *next(encoded), loss)
            for text, spans in texts
        ]
        yield [
            _ended(one, ends.missing(text), loss == "all" or messages[-1]["role"] == ASSISTANT)
            for one, (text, _), messages in zip(made, texts, row.conversations, strict=True)
        ]


def with_loss_mask(
    assistant_spans: list[tuple[int, int]],
    ids: list[int],
    offsets: list[Offsets],
    loss: LossOver,
) -> ConversationTokens:
    """Returns the tokens of a conversation with their loss mask.

    The loss counts a token if any character of it is in a span.

    Args:
        assistant_spans: First character and end of each text of an assistant.
        ids: Token ids of the conversation.
        offsets: First character and end of each token.
        loss: "assistant" counts the tokens of the spans, "all" counts every token.
    """
    loss_mask = np.full(len(ids), loss == "all", np.uint8)
    begins, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    for first, last in assistant_spans:
        loss_mask[(begins < last) & (ends > first)] = 1
    return ConversationTokens(np.array(ids, np.int64), loss_mask)


def _ended(made: ConversationTokens, end: int | None, counts: bool) -> ConversationTokens:
    """Appends a token if it is missing; `counts` is its value in the mask."""
    ids, loss_mask = made
    if end is None or (len(ids) and ids[-1] == end):
        return made
    return ConversationTokens(np.append(ids, end), np.append(loss_mask, np.uint8(counts)))
