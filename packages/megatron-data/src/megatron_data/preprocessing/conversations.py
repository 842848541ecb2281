"""Conversations to tokens, and which of them the loss counts."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, time

from megatron_data.files import local_prefix
from megatron_data.preprocessing.conversation_encoding import ConversationEncoder, OverLength
from megatron_data.preprocessing.engine import OnError, PreprocessedDataset, WorkOptions, run_job
from megatron_data.sources.conversations import KEYS
from megatron_data.sources.opening import open_sources
from megatron_data.sources.protocol import MAX_DOCUMENT_BYTES
from megatron_data.tokenizers.chat import ChatTemplate
from megatron_data.tokenizers.conversations import LossOver
from megatron_data.tokenizers.huggingface import HuggingFaceTokenizer


@dataclass(frozen=True)
class ConversationReport:
    """What became of conversations; none is lost without being counted.

    Attributes:
        rows: lines or rows read; each is a document.
        conversations: written, each a sequence of its document. Together with those dropped and
            unanswered they are all there were.
        tokens: written.
        loss_tokens: tokens that the loss counts.
        truncated: conversations written that lost their end.
        dropped: conversations that were too long.
        without_loss: conversations in which no token counts, which are left out.
        dataset: the dataset of the tokens, and what was skipped; that of the mask is as large.
    """

    rows: int
    conversations: int
    tokens: int
    loss_tokens: int
    truncated: int
    dropped: int
    without_loss: int
    dataset: PreprocessedDataset


def tokenize_conversations(
    inputs: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    tokenizer: HuggingFaceTokenizer,
    template: ChatTemplate,
    *,
    loss: LossOver = "assistant",
    max_tokens: int | None = None,
    over_length: OverLength = "truncate",
    workers: int = 1,
    on_error: OnError = "fail",
    max_document_bytes: int | None = MAX_DOCUMENT_BYTES,
    chunk_bytes: int | None = None,
    progress: bool = False,
    overwrite: bool = True,
) -> ConversationReport:
    """Writes `{output_prefix}_conversation` and `{output_prefix}_conversation_loss`, two datasets.

    The first holds a document for each line and in it a sequence for each conversation, the second
    a 1 for every token that the loss counts and a 0 for the others; both have a manifest. A line
    has `messages`, objects with `role` and `content`; or `conversations`, objects with `from` and
    `value`; or `instruction`, `output` and maybe `input` (Alpaca's, whose prompt the user then
    says). Every system message begins another conversation. `tools` are given to the template. A
    conversation ends with the end-of-document token, which is put there if the template did not.

    The work is done as in `preprocess`: in the order of the input, with the same bytes whatever the
    number of workers; a run that was ended goes on; older datasets of these names are replaced, and
    never is a mask seen beside tokens that are not its own.

    Args:
        inputs: JSON lines, Parquet files with columns of these names, packed lines, folders,
            patterns and URLs, as in `preprocess`.
        output_prefix: path and name.
        tokenizer: of the text.
        template: from messages to text. The time that its `strftime_now` writes is the beginning of
            today unless it has a fixed one, and stands in the manifest. A run that is continued on
            another day does its chunks again.
        loss: "assistant" counts what assistants say, the end of their turn included; "all" counts
            every token but the first (Megatron's prompt format `default`).
        max_tokens: tokens a conversation may have, such as a sample's; None for no limit.
        over_length: what becomes of a longer one.
        workers: processes.
        on_error: what a line does that holds no conversation, or of which the template refuses a
            message: "fail" ends the run, "skip" counts it, "quarantine" also writes its place and
            the reason to `{output_prefix}.quarantine.jsonl`.
        max_document_bytes: a line or row of more bytes is such a line; None for no limit.
        chunk_bytes: bytes of the input in a chunk; None for 1 to 16 MiB, by the size of the input.
        progress: show a bar on stderr.
        overwrite: replace older datasets of these names; otherwise they are refused, unless a run
            of the same work that was ended is continued.

    Returns:
        What became of the conversations.

    Raises:
        DataError: a line that holds no conversation (file, line and message), messages that the
            template refuses, or nothing for the loss to count.
    """
    prefix = local_prefix(output_prefix)
    if template.uses_time and template.now is None:
        template = template.with_time(datetime.combine(date.today(), time.min))
    work = WorkOptions(workers, on_error, chunk_bytes, progress, overwrite)
    encoder = ConversationEncoder(
        tokenizer, template, loss, max_tokens, over_length, max_document_bytes
    )
    sources = open_sources(inputs, KEYS, rows=True)
    (made, _), tallies = run_job(sources, prefix, encoder, work, "tokenize-conversations")
    return ConversationReport(
        rows=made.counts.documents,
        conversations=tallies["conversations"],
        tokens=made.counts.tokens,
        loss_tokens=tallies["answered"],
        truncated=tallies["truncated"],
        dropped=tallies["dropped"],
        without_loss=tallies["unanswered"],
        dataset=made,
    )
