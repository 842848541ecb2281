"""`megatron-data tokenize-conversations`."""

import argparse
import sys
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_data._command import Parser
from megatron_data.cli.bounds import Bounded
from megatron_data.cli.options import add_tokenizer_options, tokenizer_from
from megatron_data.cli.work import add_work_options, print_resumed, print_skipped
from megatron_data.plural import plural
from megatron_data.tokenizers.limits import TemplateLimits

if TYPE_CHECKING:
    from megatron_data.tokenizers.sft import SFTTokenizer

KINDS = ("HuggingFaceTokenizer", "SFTTokenizer", "MultimodalTokenizer")


def add_parser(commands: Any) -> None:
    """Adds the command and its options."""
    parser: Parser = commands.add_parser(
        "tokenize-conversations",
        help="tokenize chats for fine-tuning",
        description="Tokenize conversations into PREFIX_conversation.bin and .idx, and write a "
        "mask of the tokens that the loss counts to PREFIX_conversation_loss.bin and .idx. A "
        "HuggingFaceTokenizer uses the chat template in its folder. The same command resumes an "
        "interrupted run.",
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="JSON lines or Parquet with messages (role and content), conversations (from and "
        "value), or instruction, input and output; JSON lines compressed as .gz, .bz2 or .zst; "
        "folders, glob patterns, URLs",
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="folder and name of the output"
    )
    add_tokenizer_options(parser, KINDS)
    parser.add_argument(
        "--loss",
        choices=("assistant", "all"),
        default="assistant",
        metavar="WHAT",
        help="tokens that the loss counts: assistant (the answers) or all",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        action=Bounded,
        minimum=2,
        metavar="N",
        help="largest number of tokens of a conversation; unset: no limit",
    )
    parser.add_argument(
        "--over-length",
        choices=("truncate", "drop"),
        default="truncate",
        metavar="HOW",
        help="what to do with a longer conversation: truncate or drop",
    )
    for limit in fields(TemplateLimits):
        parser.add_argument(
            limit.metadata["flag"],
            type=int,
            action=Bounded,
            default=limit.default,
            metavar="N",
            help=limit.metadata["help"],
        )
    add_work_options(
        parser,
        "a line without a conversation, or with a message that the template refuses",
        "a larger line or row",
        "",
    )
    parser.set_defaults(run=partial(run, parser))


def run(parser: Parser, arguments: argparse.Namespace) -> int:
    """Tokenizes the conversations and prints what was written, truncated and dropped."""
    from megatron_data.preprocessing.conversations import tokenize_conversations

    tokenizer = _tokenizer_from(parser, arguments)
    report = tokenize_conversations(
        arguments.input,
        arguments.output_prefix,
        tokenizer.reference,
        tokenizer.template.with_limits(
            TemplateLimits(arguments.max_template_steps, arguments.max_template_characters)
        ),
        loss=arguments.loss,
        max_tokens=arguments.max_tokens,
        over_length=arguments.over_length,
        workers=arguments.workers,
        on_error=arguments.on_error,
        max_document_bytes=arguments.max_document_bytes,
        progress=True,
        overwrite=arguments.overwrite,
    )
    ends = tokenizer.turn_ends
    if ends.last_is_open:
        print(
            f"the chat template ends an answer only by the next turn ({ends.token}); the last "
            "answer of a conversation has no end that the model could learn",
            file=sys.stderr,
        )
    print_resumed(report.dataset)
    print(
        f"{arguments.output_prefix}_conversation: {plural(report.conversations, 'conversation')} "
        f"of {plural(report.rows, 'row')}, {plural(report.tokens, 'token')}, "
        f"{report.loss_tokens:,} of them counted by the loss; {report.truncated:,} truncated, "
        f"{report.dropped:,} dropped, {report.without_loss:,} without an answer"
    )
    print_skipped(report.dataset, arguments)
    return 0


def _tokenizer_from(parser: Parser, arguments: argparse.Namespace) -> "SFTTokenizer":
    """Builds the tokenizer of the options, with a chat template."""
    from megatron_data.tokenizers.sft import conversation_tokenizer

    if None not in (arguments.chat_template, arguments.sft_tokenizer_prompt_format):
        parser.error("give only one of --chat-template and --sft-tokenizer-prompt-format")
    tokenizer = tokenizer_from(parser, arguments)
    return conversation_tokenizer(tokenizer, arguments.tokenizer_model)
