"""`megatron-data train-tokenizer`."""

import argparse
import sys
from typing import Any

from .._command import Parser
from .options import INPUT_HELP


def add_parser(commands: Any) -> None:
    """Declare the command."""
    parser: Parser = commands.add_parser(
        "train-tokenizer",
        help="train a byte-level BPE tokenizer on text",
        description="Train a byte-level BPE tokenizer and save it as a folder with tokenizer.json.",
    )
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help=INPUT_HELP)
    parser.add_argument(
        "--json-key", default="text", metavar="KEY", help="key of JSON lines that holds the text"
    )
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N", help="largest size")
    parser.add_argument(
        "--special-tokens",
        nargs="+",
        default=["<|endoftext|>"],
        metavar="TOKEN",
        help="tokens kept whole; the first one ends documents",
    )
    parser.add_argument(
        "--min-frequency", type=int, default=2, metavar="N", help="occurrences a merge needs"
    )
    parser.add_argument("--output", required=True, metavar="FOLDER", help="folder to write")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train and save."""
    from ..sources.opening import read_texts
    from ..tokenizers.training import train_bpe

    tokenizer = train_bpe(
        read_texts(arguments.input, arguments.json_key),
        arguments.vocab_size,
        special_tokens=arguments.special_tokens,
        min_frequency=arguments.min_frequency,
        progress=sys.stderr.isatty(),
    )
    tokenizer.save(arguments.output)
    size = tokenizer.vocab_size
    less = "" if size == arguments.vocab_size else f" (the text has no more than {size:,})"
    print(f"{arguments.output}: {size:,} tokens{less}, {tokenizer.fingerprint}")
    return 0
