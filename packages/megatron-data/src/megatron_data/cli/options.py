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
    "JSON lines; text files, whose names end in .txt and each of which is a document; .parquet "
    "files, a document in each row; .gz, .bz2 and .zst of lines and texts; folders of them, read "
    "with what is below them in sorted order; patterns; URLs that fsspec opens"
)

PREFIX_HELP = "path or URL of a .bin/.idx pair without suffix"

_PATHS = {"metavar": "PATH"}
_COUNT: dict[str, Any] = {"type": int, "action": Bounded, "metavar": "N"}
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
        "minimum": 0,
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
        "minimum": 0,
        "help": "TikTokenizer: numbers that special tokens take; unset: 1000",
    },
    "tokenizer_special_tokens": {
        "nargs": "+",
        "metavar": "TOKEN",
        "help": "tokens that are kept whole, such as those of fill-in-the-middle: added behind the "
        "vocabulary, or with TikTokenizer all the special tokens, Megatron's seven among them; "
        "unset, MultimodalTokenizer adds <image>",
    },
    "sft_tokenizer_prompt_format": {
        "choices": (*PROMPT_FORMATS,),
        "metavar": "NAME",
        "help": "SFTTokenizer: how conversations are written, default (the template in the "
        f"tokenizer's folder), {', '.join([*PROMPT_FORMATS][1:])}; unset: nemotron-h-aligned, as "
        "in Megatron",
    },
    "chat_template": {**_PATHS, "help": "SFTTokenizer: file of another template"},
    "tokenizer_prompt_format": {
        "choices": (*MULTIMODAL_PROMPT_FORMATS,),
        "metavar": "NAME",
        "help": f"MultimodalTokenizer: how conversations are written, "
        f"{', '.join(MULTIMODAL_PROMPT_FORMATS)}",
    },
    "image_tag_type": {
        "choices": ("nvlm", "internvl", ""),
        "metavar": "TYPE",
        "help": "MultimodalTokenizer: what stands around <image>, nvlm <Image>, internvl <img>; "
        "unset or '': nothing",
    },
    "force_system_message": {
        "action": "store_true",
        "default": None,
        "help": "MultimodalTokenizer: begin every conversation with Qwen's system message",
    },
}
_ALSO = {"tokenizer_special_tokens": ("--special-tokens",)}
"""Other spellings of Megatron's."""


def add_overwrite_option(parser: "Parser | argparse._ArgumentGroup") -> None:
    """`--overwrite`, without which an older output is refused."""
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an older output of the same name, which is refused otherwise",
    )


def add_tokenizer_options(parser: Parser, kinds: Iterable[str] = TOKENIZER_KINDS) -> None:
    """`--tokenizer-type` and what the kinds are made from."""
    kinds = (*kinds,)
    made_of = [TOKENIZER_OPTIONS[kind] for kind in kinds]
    names = {name for each in made_of for name in (*each.required, *each.optional)}
    otherwise = [each for each in ("GPT2BPETokenizer with --vocab-file",) if "vocab_file" in names]
    otherwise.append("the kind a prompt format is of")
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
    """`--object-storage-cache-path`, as megatron-train spells it."""
    parser.add_argument(
        "--object-storage-cache-path",
        metavar="FOLDER",
        help="folder on a local disk that keeps what is read of datasets at URLs (s3://, gs://, "
        "hf://) for the next time",
    )


def add_allow_http(parser: "Parser | argparse._ArgumentGroup", what: str) -> None:
    """`--allow-http`: whether names that came with data may be those of web servers."""
    parser.add_argument(
        "--allow-http",
        action="store_true",
        help=f"{what}; local files and object storage are read in any case",
    )


def storage_from(arguments: argparse.Namespace) -> StorageCache | None:
    """Returns the cache that the option names."""
    folder = arguments.object_storage_cache_path
    return None if folder is None else StorageCache(folder)


def tokenizer_from(parser: Parser, arguments: argparse.Namespace) -> Tokenizer:
    """Returns the tokenizer that the options name; options of another kind are refused."""
    given = _given(arguments)
    kind = arguments.tokenizer_type or default_tokenizer_kind(given)
    if kind == "HuggingFaceTokenizer" and not given:
        parser.error(
            "--tokenizer-model PATH is needed; train one with megatron-data train-tokenizer"
        )
    if error := tokenizer_options_error(arguments.tokenizer_type, given):
        parser.error(error)
    return build_tokenizer(arguments.tokenizer_type, **given)


def has_tokenizer_options(arguments: argparse.Namespace) -> bool:
    """Returns whether any option about a tokenizer was given."""
    return arguments.tokenizer_type is not None or bool(_given(arguments))


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the values of the options that tokenizers are made from, by name."""
    values = {name: getattr(arguments, name, None) for name in _OPTIONS}
    return {name: value for name, value in values.items() if value is not None}
