"""Encodes the conversations of a chunk as tokens and loss masks."""

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
from megatron_data.tokenizers.turn_ends import TurnEnds

OverLength: TypeAlias = Literal["truncate", "drop"]

_REQUIRED_CONTENT = "a conversation with a token that the loss counts"
_SKIP_REASONS = (
    ("unanswered", "without text of the role assistant within --max-tokens"),
    ("dropped", "longer than --max-tokens"),
)


class ConversationEncoder:
    """Encodes conversations as tokens and loss masks; every row is a document of both datasets.

    Args:
        tokenizer: The tokenizer.
        template: The chat template.
        loss: "assistant" counts the text of assistants, including the end of their turn; "all"
            counts every token but the first.
        max_tokens: Largest number of tokens of a conversation; None for no limit.
        over_length: What to do with a longer conversation: "truncate" or "drop".
        max_document_bytes: Largest size of a row in bytes; None for no limit.

    Raises:
        DataError: `max_tokens` is below 2, `loss` or `over_length` is unknown, or the tokenizer has
            no end-of-document token.
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
                f"--max-tokens {max_tokens}: a token is predicted from the one before it; give at "
                "least 2"
            )
        for name, value, known in (
            ("loss", loss, get_args(LossOver)),
            ("over_length", over_length, get_args(OverLength)),
        ):
            if value not in known:
                raise DataError(f"{name}={value!r}; give one of {', '.join(known)}")
        if tokenizer.eod_id is None:
            raise DataError(
                "conversations need an end-of-document token, which the tokenizer lacks; use "
                "another tokenizer"
            )
        self.tokenizer = tokenizer
        self.template = template
        self.turn_ends = TurnEnds(template, tokenizer)
        self.loss: LossOver = loss
        self.max_tokens = max_tokens
        self.over_length: OverLength = over_length
        self.max_document_bytes = max_document_bytes
        self.outputs = (
            Output(
                "_conversation",
                choose_dtype(tokenizer.vocab_size),
                _REQUIRED_CONTENT,
                skip_reasons=_SKIP_REASONS,
            ),
            Output(
                f"_conversation{LOSS_SUFFIX}",
                DTYPES[1],
                _REQUIRED_CONTENT,
                values=2,
                skip_reasons=_SKIP_REASONS,
            ),
        )
        self.chunk_bytes = SMALLEST_CHUNK, LARGEST_CHUNK

    @property
    def job(self) -> dict[str, Any]:
        """The values that determine the encoding of a conversation."""
        return {
            "tokenizer": self.tokenizer.fingerprint,
            "end of document": self.tokenizer.eod_id,
            "end of turn": self.turn_ends.token,
            "conversations": self._made_by,
            "template limits": asdict(self.template.limits),
            "token type": str(self.outputs[0].dtype),
            "max document bytes": self.max_document_bytes,
        }

    @property
    def reader_options(self) -> dict[str, Any]:
        """Whole rows, their columns, and the limit of their size."""
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
        """Returns the digest of the template and the options; the same for both datasets."""
        return {"conversations": self._made_by}

    def external_version(self, chunk: Chunk) -> str:
        """Returns "": conversations name no other files."""
        return ""

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        """Encodes the conversations of a chunk; every row is a document."""
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
            for made in encode_rendered(
                rows, rendered, self.tokenizer, self.template, self.loss, self.turn_ends
            ):
                documents.append([kept for one in made if (kept := self._kept(one, tallies))])
        return EncodedChunk(self._joined(documents), faults, refused, tallies)

    def _rendered(self, item: Row) -> tuple[ConversationRow, list[RenderedConversation]]:
        row = row_of("", item.values)
        try:
            return row, render_row(row, self.template, self.loss)
        except DataError as error:
            raise UnreadableError("template", str(error)) from None

    def _kept(self, made: ConversationTokens, tallies: Counter[str]) -> ConversationTokens | None:
        """Returns a conversation, truncated if it is too long; None if it is skipped."""
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
