"""Options that several commands share."""

import argparse
from typing import Any

from .._command import Parser
from ..sources.block_cache import StorageCache
from ..tokenizers.kinds import TOKENIZER_INGREDIENTS, TOKENIZER_KINDS, default_kind, make_tokenizer
from ..tokenizers.protocol import Tokenizer

INPUT_HELP = (
    "JSON lines; text files, whose names end in .txt and each of which is a document; .parquet "
    "files, a document in each row; .gz, .bz2 and .zst of lines and texts; folders of them, read "
    "with what is below them in sorted order; patterns; URLs that fsspec opens"
)

PREFIX_HELP = "path or URL of a .bin/.idx pair without suffix"

_PATHS = {"metavar": "PATH"}
_COUNT: dict[str, Any] = {"type": int, "metavar": "N"}
_OPTIONS: dict[str, dict[str, Any]] = {
    "tokenizer_model": {
        **_PATHS,
        "help": "HuggingFaceTokenizer: a tokenizer.json, or a folder that holds one or that "
        "train-tokenizer wrote; sentencepiece's kinds: a .model; TikTokenizer: a JSON vocabulary",
    },
    "vocab_file": {
        **_PATHS,
        "help": "GPT2BPETokenizer: vocab.json; BertWordPieceLowerCase and …Case: vocab.txt",
    },
    "merge_file": {**_PATHS, "help": "GPT2BPETokenizer: merges.txt"},
    "vocab_extra_ids": {
        **_COUNT,
        "help": "BertWordPieceLowerCase, …Case and SentencePieceTokenizer: sentinels for T5",
    },
    "vocab_size": {
        **_COUNT,
        "help": "NullTokenizer: numbers below N are tokens, N ends a document; TikTokenizer: "
        "tokens in all",
    },
    "tiktoken_pattern": {
        "choices": ("v1", "v2"),
        "help": "TikTokenizer: how texts are cut into words; unset: v2",
    },
    "tiktoken_num_special_tokens": {
        **_COUNT,
        "help": "TikTokenizer: numbers that special tokens take; unset: 1000",
    },
    "tokenizer_special_tokens": {
        "nargs": "+",
        "metavar": "TOKEN",
        "help": "tokens that are kept whole, such as those of fill-in-the-middle: added behind the "
        "vocabulary, or with TikTokenizer all the special tokens, Megatron's seven among them",
    },
}


def add_tokenizer_options(parser: Parser) -> None:
    """`--tokenizer-type` and what the kinds are made from."""
    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer-type",
        choices=TOKENIZER_KINDS,
        metavar="KIND",
        help=f"{', '.join(TOKENIZER_KINDS)}; unset: GPT2BPETokenizer with --vocab-file, else "
        "HuggingFaceTokenizer",
    )
    for name, settings in _OPTIONS.items():
        group.add_argument(f"--{name.replace('_', '-')}", **settings)


def add_storage_option(parser: Parser) -> None:
    """`--object-storage-cache-path`, as megatron-train spells it."""
    parser.add_argument(
        "--object-storage-cache-path",
        metavar="FOLDER",
        help="folder on a local disk that keeps what is read of datasets at URLs (s3://, gs://, "
        "hf://) for the next time",
    )


def storage_of(arguments: argparse.Namespace) -> StorageCache | None:
    """The cache that the option names."""
    folder = arguments.object_storage_cache_path
    return None if folder is None else StorageCache(folder)


def tokenizer_of(parser: Parser, arguments: argparse.Namespace) -> Tokenizer:
    """The tokenizer that the options name; options of another kind are refused."""
    given = _given(arguments)
    kind = arguments.tokenizer_type or default_kind(given)
    if kind == "HuggingFaceTokenizer" and not given:
        parser.error(
            "--tokenizer-model PATH is needed; train one with megatron-data train-tokenizer"
        )
    if complaint := TOKENIZER_INGREDIENTS[kind].complaint(kind, given):
        parser.error(complaint)
    return make_tokenizer(arguments.tokenizer_type, **given)


def names_tokenizer(arguments: argparse.Namespace) -> bool:
    """Whether any option about a tokenizer was given."""
    return arguments.tokenizer_type is not None or bool(_given(arguments))


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The values of the options that tokenizers are made from, by name."""
    values = {name: getattr(arguments, name) for name in _OPTIONS}
    return {name: value for name, value in values.items() if value is not None}
