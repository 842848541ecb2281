"""Options that several commands share."""

import argparse

from ..tokenizers.loading import load_tokenizer
from ..tokenizers.plain import ByteTokenizer, NullTokenizer
from ..tokenizers.protocol import Tokenizer
from .parser import Parser

HUGGING_FACE = "HuggingFaceTokenizer"
BYTES = "ByteTokenizer"
NULL = "NullTokenizer"


def add_tokenizer_options(parser: Parser) -> None:
    """`--tokenizer-type`, `--tokenizer-model`, `--vocab-size`."""
    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer-type",
        choices=(HUGGING_FACE, BYTES, NULL),
        default=HUGGING_FACE,
        help="kind of tokenizer",
    )
    group.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help=f"{HUGGING_FACE}: a tokenizer.json or a folder that holds one",
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help=f"{NULL}: numbers below N are tokens, N ends a document",
    )


def tokenizer_of(parser: Parser, arguments: argparse.Namespace) -> Tokenizer:
    """The tokenizer that the options name; options of another kind are refused."""
    kind, model, size = (
        arguments.tokenizer_type,
        arguments.tokenizer_model,
        arguments.vocab_size,
    )
    if model is not None and kind != HUGGING_FACE:
        parser.error(f"--tokenizer-model does not go with --tokenizer-type {kind}")
    if size is not None and kind != NULL:
        parser.error(f"--vocab-size does not go with --tokenizer-type {kind}")
    if kind == BYTES:
        return ByteTokenizer()
    if kind == NULL:
        if size is None:
            parser.error(f"--tokenizer-type {NULL} needs --vocab-size")
        return NullTokenizer(size)
    if model is None:
        parser.error(
            "--tokenizer-model PATH is needed; train one with megatron-data train-tokenizer"
        )
    return load_tokenizer(model)
