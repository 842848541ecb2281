"""Conversations to tokens, and which of them the loss counts."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron_data.errors import DataError
from megatron_data.sources.conversations import ConversationRow
from megatron_data.tokenizers.chat import ChatTemplate, RenderedConversation
from megatron_data.tokenizers.huggingface import HuggingFaceTokenizer, Offsets

LossOver: TypeAlias = Literal["assistant", "all"]
IGNORE_INDEX = -100
"""Number of a target that the loss does not count, as in Megatron and Hugging Face's models."""


class ConversationTokens(NamedTuple):
    """Tokens of a conversation.

    Attributes:
        ids: `[s]`.
        loss_mask: `[s]`, 1 for every token that the loss counts, 0 for the others.
    """

    ids: NDArray[np.int64]
    loss_mask: NDArray[np.uint8]

    @property
    def targets(self) -> NDArray[np.int64]:
        """The tokens, -100 in place of those that the loss does not count, int64 `[s]`."""
        return np.where(self.loss_mask, self.ids, IGNORE_INDEX)


def encode_rows(
    rows: Sequence[ConversationRow],
    tokenizer: HuggingFaceTokenizer,
    template: ChatTemplate,
    loss: LossOver,
) -> Iterator[list[ConversationTokens]]:
    """Tokens and mask of every conversation, row by row.

    A conversation ends with the end-of-document token, put there if the template did not.

    Raises:
        DataError: the template refuses messages (file and line).
    """
    rendered = []
    for row in rows:
        try:
            rendered.append(render_row(row, template, loss))
        except DataError as error:
            raise DataError(f"{row.place}: {error}") from None
    return encode_rendered(rows, rendered, tokenizer, loss)


def render_row(
    row: ConversationRow, template: ChatTemplate, loss: LossOver
) -> list[RenderedConversation]:
    """Returns the text of every conversation of a row, and what counts in it if not all does.

    Raises:
        DataError: the template refuses messages.
    """
    said = loss != "all"
    return [
        template.render(messages, row.tools, return_assistant_spans=said)
        for messages in row.conversations
    ]


def encode_rendered(
    rows: Sequence[ConversationRow],
    rendered: Sequence[Sequence[RenderedConversation]],
    tokenizer: HuggingFaceTokenizer,
    loss: LossOver,
) -> Iterator[list[ConversationTokens]]:
    """`encode_rows` of rows whose texts are there."""
    encoded = iter(tokenizer.encode_with_offsets([one.text for texts in rendered for one in texts]))
    for row, texts in zip(rows, rendered, strict=True):
        made = [with_loss_mask(text.assistant_spans, *next(encoded), loss) for text in texts]
        yield [
            _ended(*one, tokenizer.eod_id, loss == "all" or messages[-1]["role"] == "assistant")
            for one, messages in zip(made, row.conversations, strict=True)
        ]


def with_loss_mask(
    assistant_spans: list[tuple[int, int]],
    ids: list[int],
    places: list[Offsets],
    loss: LossOver,
) -> ConversationTokens:
    """Tokens and mask of one conversation; a token counts if part of it is said.

    Args:
        assistant_spans: first character and end of every stretch that is said.
        ids: its tokens.
        places: first character and end of every token.
        loss: "all" counts every token.
    """
    loss_mask = np.full(len(ids), loss == "all", np.uint8)
    begins, ends = np.array(places, np.int64).reshape(-1, 2).T
    for first, last in assistant_spans:
        loss_mask[(begins < last) & (ends > first)] = 1
    return ConversationTokens(np.array(ids, np.int64), loss_mask)


def _ended(
    tokens: NDArray[np.int64], loss_mask: NDArray[np.uint8], eod_id: int | None, counts: bool
) -> ConversationTokens:
    """With the end of the document behind, if it is not there; whether it counts."""
    if eod_id is None or (len(tokens) and tokens[-1] == eod_id):
        return ConversationTokens(tokens, loss_mask)
    return ConversationTokens(np.append(tokens, eod_id), np.append(loss_mask, np.uint8(counts)))
