"""Options that several commands share."""

import argparse
from typing import Any

from .._command import Parser
from ..tokenizers.gpt2 import gpt2_tokenizer
from ..tokenizers.loading import load_tokenizer
from ..tokenizers.plain import ByteTokenizer, NullTokenizer
from ..tokenizers.protocol import Tokenizer
from ..tokenizers.wordpiece import bert_tokenizer

INPUT_HELP = (
    "JSON lines; text files, whose names end in .txt and each of which is a document; .parquet "
    "files, a document in each row; .gz, .bz2 and .zst of lines and texts; folders of them, read "
    "with what is below them in sorted order; patterns; URLs that fsspec opens"
)

HUGGING_FACE = "HuggingFaceTokenizer"
GPT2 = "GPT2BPETokenizer"
BERT_LOWER = "BertWordPieceLowerCase"
BERT_CASED = "BertWordPieceCase"
BYTES = "ByteTokenizer"
NULL = "NullTokenizer"

_TAKES = {
    HUGGING_FACE: ("--tokenizer-model",),
    GPT2: ("--vocab-file", "--merge-file"),
    BERT_LOWER: ("--vocab-file",),
    BERT_CASED: ("--vocab-file",),
    BYTES: (),
    NULL: ("--vocab-size",),
}

_MAY_TAKE = {BERT_LOWER: ("--vocab-extra-ids",), BERT_CASED: ("--vocab-extra-ids",)}


def add_tokenizer_options(parser: Parser) -> None:
    """`--tokenizer-type` and what the kinds are made from."""
    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer-type",
        choices=tuple(_TAKES),
        metavar="KIND",
        help=f"{', '.join(_TAKES)}; unset: {GPT2} with --vocab-file, else {HUGGING_FACE}",
    )
    group.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help=f"{HUGGING_FACE}: a tokenizer.json or a folder that holds one",
    )
    group.add_argument(
        "--vocab-file",
        metavar="PATH",
        help=f"{GPT2}: vocab.json; {BERT_LOWER} and {BERT_CASED}: vocab.txt",
    )
    group.add_argument("--merge-file", metavar="PATH", help=f"{GPT2}: merges.txt")
    group.add_argument(
        "--vocab-extra-ids",
        type=int,
        metavar="N",
        help=f"{BERT_LOWER} and {BERT_CASED}: sentinels for T5",
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help=f"{NULL}: numbers below N are tokens, N ends a document",
    )


def tokenizer_of(parser: Parser, arguments: argparse.Namespace) -> Tokenizer:
    """The tokenizer that the options name; options of another kind are refused."""
    given = _given(arguments)
    kind = arguments.tokenizer_type or (GPT2 if "--vocab-file" in given else HUGGING_FACE)
    taken = (*_TAKES[kind], *_MAY_TAKE.get(kind, ()))
    if foreign := [option for option in given if option not in taken]:
        parser.error(f"{foreign[0]} does not go with --tokenizer-type {kind}")
    if missing := [option for option in _TAKES[kind] if option not in given]:
        if kind == HUGGING_FACE:
            parser.error(
                "--tokenizer-model PATH is needed; train one with megatron-data train-tokenizer"
            )
        parser.error(f"--tokenizer-type {kind} needs {' and '.join(missing)}")
    if kind == BYTES:
        return ByteTokenizer()
    if kind == NULL:
        return NullTokenizer(given["--vocab-size"])
    if kind in (BERT_LOWER, BERT_CASED):
        extra_ids = given.get("--vocab-extra-ids", 0)
        return bert_tokenizer(
            given["--vocab-file"], lower_case=kind == BERT_LOWER, extra_ids=extra_ids
        )
    if kind == GPT2:
        return gpt2_tokenizer(given["--vocab-file"], given["--merge-file"])
    return load_tokenizer(given["--tokenizer-model"])


def names_tokenizer(arguments: argparse.Namespace) -> bool:
    """Whether any option about a tokenizer was given."""
    return arguments.tokenizer_type is not None or bool(_given(arguments))


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The values of the options that tokenizers are made from, by flag."""
    flags = (flag for kinds in (_TAKES, _MAY_TAKE) for taken in kinds.values() for flag in taken)
    values = {flag: getattr(arguments, flag[2:].replace("-", "_")) for flag in flags}
    return {flag: value for flag, value in values.items() if value is not None}
