"""From the conversations of a chunk to tokens, and to a mask of those that the loss counts."""

from collections import Counter
from dataclasses import asdict
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from megatron_data.errors import DataError
from megatron_data.indexed.format import DTYPES, choose_dtype
from megatron_data.preprocessing.batches import batch_items
from megatron_data.preprocessing.encoding import SMALLEST_CHUNK
from megatron_data.preprocessing.manifest import LOSS_SUFFIX
from megatron_data.preprocessing.protocol import EncodedChunk, EncodedDocuments, Output
from megatron_data.sources.conversations import KEYS, ConversationRow, row_of
from megatron_data.sources.protocol import (
    LARGEST_CHUNK,
    Chunk,
    Fault,
    Row,
    SupportsRows,
    UnreadableError,
)
from megatron_data.tokenizers.chat import ChatTemplate, RenderedConversation
from megatron_data.tokenizers.conversations import (
    ConversationTokens,
    LossOver,
    encode_rendered,
    render_row,
)
from megatron_data.tokenizers.huggingface import HuggingFaceTokenizer

OverLength: TypeAlias = Literal["truncate", "drop"]

_LACKING = "a conversation of which a token counts in the loss"
_LEFT_OUT = (
    ("unanswered", "without a word of the role assistant, whole or cut to --max-tokens"),
    ("dropped", "longer than --max-tokens"),
)


class ConversationEncoder:
    """Tokens of conversations, and a mask of them; every row is a document of both.

    Args:
        tokenizer: of the text.
        template: from messages to text.
        loss: "assistant" counts what assistants say, the end of their turn included; "all" counts
            every token but the first.
        max_tokens: tokens that a conversation may have; None for no limit.
        over_length: what becomes of a longer one.
        max_document_bytes: bytes that a row may have; None for no limit.

    Raises:
        DataError: `max_tokens` below 2, no such `loss` or `over_length`, or a tokenizer without an
            end-of-document token.
    """

    def __init__(
        self,
        tokenizer: HuggingFaceTokenizer,
        template: ChatTemplate,
        loss: LossOver = "assistant",
        max_tokens: int | None = None,
        over_length: OverLength = "truncate",
        max_document_bytes: int | None = None,
    ) -> None:
        if max_tokens is not None and max_tokens < 2:
            raise DataError(
                f"--max-tokens {max_tokens}: a token is learned behind another; give at least 2"
            )
        for name, value, known in (
            ("loss", loss, get_args(LossOver)),
            ("over_length", over_length, get_args(OverLength)),
        ):
            if value not in known:
                raise DataError(f"{name}={value!r}; give one of {', '.join(known)}")
        if tokenizer.eod_id is None:
            raise DataError(
                "conversations end with the end-of-document token; the tokenizer has none"
            )
        self.tokenizer = tokenizer
        self.template = template
        self.loss: LossOver = loss
        self.max_tokens = max_tokens
        self.over_length: OverLength = over_length
        self.max_document_bytes = max_document_bytes
        self.outputs = (
            Output(
                "_conversation",
                choose_dtype(tokenizer.vocab_size),
                _LACKING,
                skip_reasons=_LEFT_OUT,
            ),
            Output(
                f"_conversation{LOSS_SUFFIX}", DTYPES[1], _LACKING, values=2, skip_reasons=_LEFT_OUT
            ),
        )
        self.chunk_bytes = SMALLEST_CHUNK, LARGEST_CHUNK

    @property
    def job(self) -> dict[str, Any]:
        """What decides which tokens a conversation becomes."""
        return {
            "tokenizer": self.tokenizer.fingerprint,
            "end of document": self.tokenizer.eod_id,
            "conversations": self._made_by,
            "template limits": asdict(self.template.limits),
            "token type": str(self.outputs[0].dtype),
            "max document bytes": self.max_document_bytes,
        }

    @property
    def reader_options(self) -> dict[str, Any]:
        """Whole objects, the columns of them, and the limit."""
        return {
            "objects": True,
            "json_keys": list(KEYS),
            "max_document_bytes": self.max_document_bytes,
        }

    @property
    def _made_by(self) -> dict[str, Any]:
        now = self.template.now if self.template.uses_time else None
        return {
            "template": self.template.fingerprint,
            **({} if now is None else {"time": now.isoformat()}),
            "loss": self.loss,
            "max_tokens": self.max_tokens,
            "over_length": self.over_length,
        }

    def options(self, output: int) -> dict[str, Any]:
        """The template by its digest, and what becomes of conversations; the same for both."""
        return {"conversations": self._made_by}

    def external_version(self, chunk: Chunk) -> str:
        """Nothing: conversations stand in the chunk itself."""
        return ""

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        """Returns the conversations of a chunk, of which every row is a document."""
        if not isinstance(chunk, SupportsRows):
            raise TypeError(f"{type(chunk).__name__} holds no rows")
        documents: list[list[ConversationTokens]] = []
        faults: list[Fault] = []
        refused: list[int] = []
        tallies: Counter[str] = Counter()
        read = 0
        for found in batch_items(chunk.rows(self.max_document_bytes)):
            if isinstance(found, Fault):
                faults.append(found)
                continue
            rows, rendered = [], []
            for item in found:
                try:
                    row, texts = self._rendered(item)
                except UnreadableError as error:
                    faults.append(chunk.fault(item, error.kind, error.reason))
                    refused.append(read)
                else:
                    rows.append(row)
                    rendered.append(texts)
                read += 1
            for made in encode_rendered(rows, rendered, self.tokenizer, self.loss):
                documents.append([kept for one in made if (kept := self._kept(one, tallies))])
        return EncodedChunk(self._joined(documents), faults, refused, tallies)

    def _rendered(self, item: Row) -> tuple[ConversationRow, list[RenderedConversation]]:
        row = row_of("", item.values)
        try:
            return row, render_row(row, self.template, self.loss)
        except DataError as error:
            raise UnreadableError("template", str(error)) from None

    def _kept(self, made: ConversationTokens, tallies: Counter[str]) -> ConversationTokens | None:
        """Returns what is written of a conversation; None if it is left out."""
        too_long = self.max_tokens is not None and len(made.ids) > self.max_tokens
        if too_long and self.over_length == "drop":
            tallies["dropped"] += 1
            return None
        ids, loss_mask = made.ids[: self.max_tokens], made.loss_mask[: self.max_tokens]
        answered = int(loss_mask[1:].sum())
        if not answered:
            tallies["unanswered"] += 1
            return None
        tallies.update(conversations=1, answered=answered, truncated=int(too_long))
        return ConversationTokens(ids, loss_mask)

    def _joined(self, documents: list[list[ConversationTokens]]) -> list[EncodedDocuments]:
        kept = [one for document in documents for one in document]
        lengths = np.array([len(one.ids) for one in kept], np.int32)
        sequences = np.array([len(document) for document in documents], np.int32)
        tokens, mask = (output.dtype for output in self.outputs)
        ids = [np.empty(0, tokens), *(one.ids.astype(tokens) for one in kept)]
        loss_mask = [np.empty(0, mask), *(one.loss_mask for one in kept)]
        return [
            EncodedDocuments(np.concatenate(ids), lengths, sequences),
            EncodedDocuments(np.concatenate(loss_mask), lengths, sequences),
        ]
