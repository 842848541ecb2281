"""Preprocesses conversations: `tokenize_conversations`."""

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
    """Counts of `tokenize_conversations`, which include every conversation of the input.

    Attributes:
        rows: Lines or rows read; each is a document.
        conversations: Conversations written, each a sequence of its document. With `dropped` and
            `without_loss` they are all conversations read.
        tokens: Tokens written.
        loss_tokens: Tokens that the loss counts.
        truncated: Conversations written that were truncated.
        dropped: Conversations that were too long and not written.
        without_loss: Conversations without a token that the loss counts, which are not written.
        dataset: The dataset of the tokens with what was skipped; the mask has the same size.
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
    """Writes the datasets `{output_prefix}_conversation` and `{output_prefix}_conversation_loss`.

    The first has one document per line with one sequence per conversation. The second is the loss
    mask: 1 for every token that the loss counts and 0 for the others. Both have a manifest. A line
    has `messages`, objects with `role` and `content`; or `conversations`, objects with `from` and
    `value`; or `instruction`, `output` and optionally `input`, which become a message of the user
    in Alpaca's wording and an answer. Every system message begins another conversation. `tools`
    are passed to the template. The tokens are those of the template. Only if it ends turns with no
    token of the tokenizer, the end-of-document token is appended to a conversation; Megatron's
    prompt formats always get it, as in Megatron, also where they end turns with a token.

    As in `preprocess`, documents keep the order of the input, the files do not depend on the number
    of workers, an interrupted run is resumed, and existing datasets are replaced. A mask is never
    visible beside tokens of another run.

    Args:
        inputs: JSON lines, compressed JSON lines, Parquet files with columns of these names,
            folders, glob patterns and URLs, as in `preprocess`.
        output_prefix: Folder and name of the output.
        tokenizer: The tokenizer.
        template: The chat template. Its `strftime_now` writes the beginning of today, unless the
            template has a fixed time; the manifest records the time. A run that is resumed on
            another day starts again.
        loss: "assistant" counts the text of assistants, including the end of their turn; "all"
            counts every token but the first (Megatron's prompt format `default`).
        max_tokens: Largest number of tokens of a conversation, such as the length of a sample;
            None for no limit.
        over_length: What to do with a longer conversation: "truncate" or "drop".
        workers: Worker processes.
        on_error: What to do with a line without a conversation, or with a message that the
            template refuses: "fail" ends the run, "skip" counts it, "quarantine" also writes its
            location and the reason to `{output_prefix}.quarantine.jsonl`.
        max_document_bytes: Largest size of a line or row in bytes; a larger one is treated as
            `on_error` says. None for no limit.
        chunk_bytes: Bytes of a source chunk. Defaults to 1 to 16 MiB by the size of the input.
        progress: Whether to show a progress bar on stderr.
        overwrite: Whether to replace existing datasets. If False, they are an error unless they
            belong to an interrupted run that is resumed.

    Returns:
        The counts of conversations and tokens.

    Raises:
        DataError: A line has no conversation (the error names file, line and message), the template
            refuses a message, or no token counts in the loss.
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
