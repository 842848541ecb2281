"""Options that several commands share."""

import argparse
from collections.abc import Iterable
from typing import Any

from megatron_data._command import Parser
from megatron_data.cli.bounds import Bounded
from megatron_data.sources.block_cache import StorageCache
from megatron_data.tokenizers.kinds import (
    TOKENIZER_KINDS,
    TOKENIZER_OPTIONS,
    build_tokenizer,
    default_tokenizer_kind,
    tokenizer_options_error,
)
from megatron_data.tokenizers.prompt_formats import MULTIMODAL_PROMPT_FORMATS, PROMPT_FORMATS
from megatron_data.tokenizers.protocol import Tokenizer

INPUT_HELP = (
    "JSON lines; .txt files, each one document; .parquet files, one document per row; JSON lines "
    "and .txt files compressed as .gz, .bz2 or .zst; folders, read recursively in sorted order; "
    "glob patterns; URLs that fsspec opens"
)

PREFIX_HELP = "path or URL of a .bin/.idx pair without suffix"

_PATHS = {"metavar": "PATH"}
_COUNT: dict[str, Any] = {"type": int, "action": Bounded, "metavar": "N"}
_OPTIONS: dict[str, dict[str, Any]] = {
    "tokenizer_model": {
        **_PATHS,
        "help": "HuggingFaceTokenizer: a tokenizer.json, a folder that holds one, or a folder that "
        "train-tokenizer wrote; kinds of sentencepiece: a .model; TikTokenizer: a JSON vocabulary",
    },
    "vocab_file": {
        **_PATHS,
        "help": "GPT2BPETokenizer: vocab.json; BertWordPieceLowerCase and …Case: vocab.txt",
    },
    "merge_file": {**_PATHS, "help": "GPT2BPETokenizer: merges.txt"},
    "vocab_extra_ids": {
        **_COUNT,
        "minimum": 0,
        "help": "BertWordPieceLowerCase, …Case and SentencePieceTokenizer: sentinel tokens of T5",
    },
    "vocab_size": {
        **_COUNT,
        "help": "NullTokenizer: ids below N are tokens, N is the end-of-document token; "
        "TikTokenizer: size of the vocabulary",
    },
    "tiktoken_pattern": {
        "choices": ("v1", "v2"),
        "help": "TikTokenizer: regular expression that splits text into words; unset: v2",
    },
    "tiktoken_num_special_tokens": {
        **_COUNT,
        "minimum": 0,
        "help": "TikTokenizer: ids reserved for special tokens; unset: 1000",
    },
    "tokenizer_special_tokens": {
        "nargs": "+",
        "metavar": "TOKEN",
        "help": "special tokens to add after the vocabulary, such as those of fill-in-the-middle; "
        "TikTokenizer: all special tokens, including Megatron's seven; unset: MultimodalTokenizer "
        "adds <image>",
    },
    "sft_tokenizer_prompt_format": {
        "choices": (*PROMPT_FORMATS,),
        "metavar": "NAME",
        "help": "SFTTokenizer: prompt format, default (the template in the tokenizer's folder), "
        f"{', '.join([*PROMPT_FORMATS][1:])}; unset: nemotron-h-aligned, as in Megatron",
    },
    "chat_template": {**_PATHS, "help": "SFTTokenizer: file of a chat template"},
    "tokenizer_prompt_format": {
        "choices": (*MULTIMODAL_PROMPT_FORMATS,),
        "metavar": "NAME",
        "help": f"MultimodalTokenizer: prompt format, {', '.join(MULTIMODAL_PROMPT_FORMATS)}",
    },
    "image_tag_type": {
        "choices": ("nvlm", "internvl", ""),
        "metavar": "TYPE",
        "help": "MultimodalTokenizer: tags around <image>: nvlm uses <Image>, internvl <img>; "
        "unset or '': none",
    },
    "force_system_message": {
        "action": "store_true",
        "default": None,
        "help": "MultimodalTokenizer: start every conversation with Qwen's system message",
    },
}
_ALSO = {"tokenizer_special_tokens": ("--special-tokens",)}
"""Other spellings of flags in Megatron."""


def add_overwrite_option(parser: "Parser | argparse._ArgumentGroup") -> None:
    """Adds `--overwrite`."""
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an existing output; without it, an existing output is an error",
    )


def add_tokenizer_options(parser: Parser, kinds: Iterable[str] = TOKENIZER_KINDS) -> None:
    """Adds `--tokenizer-type` and the options of the given kinds of tokenizers."""
    kinds = (*kinds,)
    made_of = [TOKENIZER_OPTIONS[kind] for kind in kinds]
    names = {name for each in made_of for name in (*each.required, *each.optional)}
    otherwise = [each for each in ("GPT2BPETokenizer with --vocab-file",) if "vocab_file" in names]
    otherwise.append("the kind that a given prompt format belongs to")
    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer-type",
        choices=kinds,
        metavar="KIND",
        help=f"{', '.join(kinds)}; unset: {', '.join(otherwise)}, else HuggingFaceTokenizer",
    )
    for name, settings in _OPTIONS.items():
        if name in names:
            spellings = (f"--{name.replace('_', '-')}", *_ALSO.get(name, ()))
            group.add_argument(*spellings, **settings)


def add_storage_option(parser: Parser) -> None:
    """Adds `--object-storage-cache-path`, with the spelling of `megatron-train`."""
    parser.add_argument(
        "--object-storage-cache-path",
        metavar="FOLDER",
        help="folder on a local disk that caches data read from datasets at URLs (s3://, gs://, "
        "hf://)",
    )


def add_allow_http(parser: "Parser | argparse._ArgumentGroup", what: str) -> None:
    """Adds `--allow-http`: whether data may name files on web servers."""
    parser.add_argument(
        "--allow-http",
        action="store_true",
        help=f"{what}; local files and object storage are always read",
    )


def storage_from(arguments: argparse.Namespace) -> StorageCache | None:
    """Returns the cache of `--object-storage-cache-path`, or None."""
    folder = arguments.object_storage_cache_path
    return None if folder is None else StorageCache(folder)


def tokenizer_from(parser: Parser, arguments: argparse.Namespace) -> Tokenizer:
    """Builds the tokenizer of the options; options of another kind are a usage error."""
    given = _given(arguments)
    kind = arguments.tokenizer_type or default_tokenizer_kind(given)
    if kind == "HuggingFaceTokenizer" and not given:
        parser.error(
            "--tokenizer-model PATH is required; megatron-data train-tokenizer trains a tokenizer"
        )
    if error := tokenizer_options_error(arguments.tokenizer_type, given):
        parser.error(error)
    return build_tokenizer(arguments.tokenizer_type, **given)


def has_tokenizer_options(arguments: argparse.Namespace) -> bool:
    """Returns whether any tokenizer option was given."""
    return arguments.tokenizer_type is not None or bool(_given(arguments))


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the tokenizer options that were given, by name."""
    values = {name: getattr(arguments, name, None) for name in _OPTIONS}
    return {name: value for name, value in values.items() if value is not None}
