"""`megatron-data tokenize-conversations`."""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._command import Parser
from .work import add_work_options, say_continued, say_skipped

if TYPE_CHECKING:
    from ..tokenizers.chat import ChatTemplate

OWN = "default"
FORMATS = (OWN, "nemotron-h-aligned", "nemotron-nano-v2", "identity")


def add_parser(commands: Any) -> None:
    """Declare the command."""
    parser: Parser = commands.add_parser(
        "tokenize-conversations",
        help="tokenize chats for fine-tuning",
        description="Tokenize conversations into PREFIX_conversation.bin and .idx, and what the "
        "loss counts of them into PREFIX_conversation_loss.bin and .idx: what assistants say. A "
        "run that was ended goes on where it was when the same command is given again.",
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="JSON lines or Parquet of messages with role and content, of conversations with from "
        "and value, or of instruction, input and output; .gz, .bz2 and .zst of lines; folders, "
        "patterns, URLs",
    )
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path and name")
    parser.add_argument(
        "--tokenizer-model",
        required=True,
        metavar="PATH",
        help="a tokenizer.json, or a folder that holds one",
    )
    parser.add_argument(
        "--sft-tokenizer-prompt-format",
        choices=FORMATS,
        metavar="NAME",
        help=f"{', '.join(FORMATS)}; unset: {OWN}, the template in the tokenizer's folder",
    )
    parser.add_argument("--chat-template", metavar="PATH", help="file of another template")
    parser.add_argument(
        "--loss",
        choices=("assistant", "all"),
        default="assistant",
        metavar="WHAT",
        help="assistant counts what assistants say, all every token",
    )
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="tokens of a conversation; unset: no limit"
    )
    parser.add_argument(
        "--over-length",
        choices=("truncate", "drop"),
        default="truncate",
        metavar="HOW",
        help="what becomes of a longer one: truncate or drop",
    )
    add_work_options(
        parser,
        "a line that holds no conversation, or of which the template refuses a message,",
        "a longer line or row",
        "",
    )
    parser.set_defaults(run=partial(run, parser))


def run(parser: Parser, arguments: argparse.Namespace) -> int:
    """Tokenize and say what became of the conversations."""
    from ..preprocessing.conversations import tokenize_conversations
    from ..tokenizers.huggingface import HuggingFaceTokenizer

    report = tokenize_conversations(
        arguments.input,
        arguments.output_prefix,
        HuggingFaceTokenizer.load(arguments.tokenizer_model),
        _template_of(parser, arguments),
        loss=arguments.loss,
        max_tokens=arguments.max_tokens,
        over_length=arguments.over_length,
        workers=arguments.workers,
        on_error=arguments.on_error,
        max_document_bytes=arguments.max_document_bytes,
        progress=True,
    )
    say_continued(report.made)
    print(
        f"{arguments.output_prefix}_conversation: {report.conversations:,} conversations of "
        f"{report.rows:,} rows, {report.tokens:,} tokens, {report.answered:,} of them counted by "
        f"the loss; {report.truncated:,} truncated, {report.dropped:,} dropped, "
        f"{report.unanswered:,} without an answer"
    )
    say_skipped(report.made, arguments)
    return 0


def _template_of(parser: Parser, arguments: argparse.Namespace) -> "ChatTemplate":
    from ..tokenizers.chat import ChatTemplate

    prompt_format = arguments.sft_tokenizer_prompt_format
    if arguments.chat_template is not None:
        if prompt_format is not None:
            parser.error("--chat-template and --sft-tokenizer-prompt-format: give one of them")
        return ChatTemplate.load(arguments.chat_template)
    if prompt_format in (None, OWN):
        path = Path(arguments.tokenizer_model)
        return ChatTemplate.load(path if path.is_dir() else path.parent)
    return ChatTemplate.named(prompt_format)
