"""`megatron-data train-tokenizer`."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_data._command import Parser
from megatron_data.cli.bounds import Bounded
from megatron_data.cli.options import INPUT_HELP, add_overwrite_option
from megatron_data.cli.work import add_max_document_bytes

if TYPE_CHECKING:
    from megatron_data.tokenizers.huggingface import HuggingFaceTokenizer


def add_parser(commands: Any) -> None:
    """Adds the command and its options."""
    parser: Parser = commands.add_parser(
        "train-tokenizer",
        help="train a tokenizer on text",
        description="Train a tokenizer and save it as a folder with tokenizer.json.",
    )
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help=INPUT_HELP)
    parser.add_argument(
        "--json-key", default="text", metavar="KEY", help="key of JSON lines that holds the text"
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        action=Bounded,
        required=True,
        metavar="N",
        help="largest size of the vocabulary",
    )
    parser.add_argument(
        "--kind",
        choices=("bpe", "unigram", "wordpiece"),
        default="bpe",
        help="byte-level BPE as in GPT-2, byte-level unigram, or WordPiece as in BERT",
    )
    parser.add_argument(
        "--cased", action="store_true", help="wordpiece: keep capital letters and accents"
    )
    parser.add_argument(
        "--special-tokens",
        nargs="+",
        metavar="TOKEN",
        help="bpe and unigram: special tokens; the first is the end-of-document token; unset: "
        "<|endoftext|>",
    )
    parser.add_argument(
        "--min-frequency",
        type=int,
        action=Bounded,
        metavar="N",
        help="bpe and wordpiece: smallest number of occurrences of a merged pair; unset: 2",
    )
    add_max_document_bytes(parser, "largest size of a document in bytes")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="folder to write")
    add_overwrite_option(parser)
    parser.set_defaults(run=partial(run, parser))


_TAKES = {
    "bpe": ("special_tokens", "min_frequency"),
    "unigram": ("special_tokens",),
    "wordpiece": ("cased", "min_frequency"),
}


def run(parser: Parser, arguments: argparse.Namespace) -> int:
    """Trains the tokenizer and saves it."""
    from megatron_data.files import local_folder
    from megatron_data.preprocessing.existing import refuse_file
    from megatron_data.sources.opening import read_texts
    from megatron_data.tokenizers import training
    from megatron_data.tokenizers.plain import PLAIN_FILE

    names = ("special_tokens", "min_frequency", "cased")
    given = {name: value for name in names if (value := getattr(arguments, name))}
    if foreign := [name for name in given if name not in _TAKES[arguments.kind]]:
        parser.error(f"--{foreign[0].replace('_', '-')} does not go with --kind {arguments.kind}")
    if given.pop("cased", False):
        given["lower_case"] = False
    output = local_folder(arguments.output)  # check the output before the long training
    if not arguments.overwrite:
        refuse_file(output)
    kinds: dict[str, Callable[..., HuggingFaceTokenizer]] = {
        "bpe": training.train_bpe,
        "unigram": training.train_unigram,
        "wordpiece": training.train_wordpiece,
    }
    tokenizer = kinds[arguments.kind](
        read_texts(arguments.input, arguments.json_key, arguments.max_document_bytes),
        arguments.vocab_size,
        progress=sys.stderr.isatty(),
        **given,
    )
    (output / PLAIN_FILE).unlink(missing_ok=True)  # written by a tokenizer of another kind
    tokenizer.save(output)
    size = tokenizer.vocab_size
    less = "" if size == arguments.vocab_size else f" (the text gives at most {size:,})"
    print(f"{arguments.output}: {size:,} tokens{less}, {tokenizer.fingerprint}")
    return 0
