"""Kinds of tokenizers by Megatron's names, the options that each takes, and `build_tokenizer`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from megatron_data.errors import DataError

if TYPE_CHECKING:
    from megatron_data.tokenizers.protocol import Tokenizer

TokenizerKind: TypeAlias = Literal[
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "SFTTokenizer",
    "MultimodalTokenizer",
    "ByteTokenizer",
    "NullTokenizer",
    "NullMultimodalTokenizer",
]
TOKENIZER_KINDS: tuple[TokenizerKind, ...] = get_args(TokenizerKind)


@dataclass(frozen=True)
class TokenizerOptions:
    """The options of a kind of tokenizer, named without `--` and with `_`.

    Attributes:
        required: Options that must be given.
        optional: Options that may be given.
    """

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    def error(self, kind: str, given: Mapping[str, Any]) -> str | None:
        """Returns an error message if the options given do not fit a kind, or None."""
        if foreign := [name for name in given if name not in (*self.required, *self.optional)]:
            optional = ", ".join(map(flag, (*self.required, *self.optional))) or "no options"
            return f"{flag(foreign[0])} does not go with --tokenizer-type {kind} (takes {optional})"
        if missing := [flag(name) for name in self.required if name not in given]:
            return f"--tokenizer-type {kind} needs {' and '.join(missing)}"
        return None


_SPECIAL = ("tokenizer_special_tokens",)
_TIKTOKEN = ("tiktoken_pattern", "tiktoken_num_special_tokens", "vocab_size")
_SFT = ("sft_tokenizer_prompt_format", "chat_template", *_SPECIAL)
_MULTIMODAL = ("image_tag_type", "force_system_message", *_SPECIAL)
_BERT = TokenizerOptions(("vocab_file",), ("vocab_extra_ids", *_SPECIAL))

TOKENIZER_OPTIONS: Mapping[str, TokenizerOptions] = {
    "HuggingFaceTokenizer": TokenizerOptions(("tokenizer_model",), _SPECIAL),
    "GPT2BPETokenizer": TokenizerOptions(("vocab_file", "merge_file"), _SPECIAL),
    "BertWordPieceLowerCase": _BERT,
    "BertWordPieceCase": _BERT,
    "SentencePieceTokenizer": TokenizerOptions(
        ("tokenizer_model",), ("vocab_extra_ids", *_SPECIAL)
    ),
    "GPTSentencePieceTokenizer": TokenizerOptions(("tokenizer_model",)),
    "Llama2Tokenizer": TokenizerOptions(("tokenizer_model",)),
    "TikTokenizer": TokenizerOptions(("tokenizer_model",), (*_TIKTOKEN, *_SPECIAL)),
    "SFTTokenizer": TokenizerOptions(("tokenizer_model",), _SFT),
    "MultimodalTokenizer": TokenizerOptions(
        ("tokenizer_model", "tokenizer_prompt_format"), _MULTIMODAL
    ),
    "ByteTokenizer": TokenizerOptions(),
    "NullTokenizer": TokenizerOptions(("vocab_size",)),
    "NullMultimodalTokenizer": TokenizerOptions(("vocab_size",)),
}


WITHOUT_MERGES = (
    "--vocab-file alone is a GPT2BPETokenizer's, which needs --merge-file as well; for BERT's "
    "vocab.txt give --tokenizer-type BertWordPieceLowerCase or BertWordPieceCase"
)
"""The error for `--vocab-file` without `--merge-file` and `--tokenizer-type`."""


def flag(name: str) -> str:
    """Returns the command-line flag of an option."""
    return f"--{name.replace('_', '-')}"


def default_tokenizer_kind(given: Mapping[str, Any]) -> TokenizerKind:
    """Returns the kind of tokenizer that the options imply without `--tokenizer-type`."""
    if "vocab_file" in given:
        return "GPT2BPETokenizer"
    if "tokenizer_prompt_format" in given:
        return "MultimodalTokenizer"
    if "sft_tokenizer_prompt_format" in given or "chat_template" in given:
        return "SFTTokenizer"
    return "HuggingFaceTokenizer"


def tokenizer_options_error(kind: str | None, given: Mapping[str, Any]) -> str | None:
    """Returns an error message if the options do not fit a kind of tokenizer, or None.

    Args:
        kind: `--tokenizer-type`, or None for the kind that the options imply.
        given: The options by name.
    """
    meant = kind or default_tokenizer_kind(given)
    if kind is None and "vocab_file" in given and "merge_file" not in given:
        return WITHOUT_MERGES
    return TOKENIZER_OPTIONS[meant].error(meant, given)


def build_tokenizer(kind: str | None = None, **options: Any) -> "Tokenizer":
    """Builds a tokenizer from Megatron's options.

    Args:
        kind: Megatron's `--tokenizer-type`. None means GPT2BPETokenizer if `vocab_file` is given,
            the kind of the prompt format if one is given, and otherwise the tokenizer that
            `load_tokenizer` finds at `tokenizer_model`.
        options: Options with Megatron's names: `tokenizer_model`, `vocab_file`, `merge_file`,
            `vocab_size`, `vocab_extra_ids`, `tiktoken_pattern`, `tiktoken_num_special_tokens`,
            `tokenizer_special_tokens`, `chat_template`, `sft_tokenizer_prompt_format`,
            `tokenizer_prompt_format`, `image_tag_type`, `force_system_message`. None means not
            given.

    Raises:
        DataError: The kind is unknown, a required option is missing, an option does not belong to
            the kind, or a file is invalid.
    """
    given = {name: value for name, value in options.items() if value is not None}
    anything_saved = kind is None
    if kind is not None and kind not in TOKENIZER_OPTIONS:
        known = ", ".join(TOKENIZER_KINDS)
        raise DataError(f"unknown tokenizer type {kind!r}; give one of {known}")
    if error := tokenizer_options_error(kind, given):
        raise DataError(error)
    kind = kind or default_tokenizer_kind(given)
    names = given.get("tokenizer_special_tokens", ())
    match kind:
        case "ByteTokenizer" | "NullTokenizer":
            from megatron_data.tokenizers.plain import ByteTokenizer, NullTokenizer

            return ByteTokenizer() if kind == "ByteTokenizer" else NullTokenizer(**given)
        case "SFTTokenizer" | "MultimodalTokenizer" | "NullMultimodalTokenizer":
            return _of_conversations(kind, given)
        case "SentencePieceTokenizer" | "GPTSentencePieceTokenizer" | "Llama2Tokenizer":
            from megatron_data.tokenizers.sentence_piece import SentencePieceTokenizer

            return SentencePieceTokenizer.load(
                given["tokenizer_model"],
                added_tokens=kind == "SentencePieceTokenizer",
                extra_ids=given.get("vocab_extra_ids", 0),
                special_tokens=names,
                begin=kind == "Llama2Tokenizer",
            )
        case "TikTokenizer":
            return _tik_tokenizer(given)
    tokenizer = _of_the_library(kind, given, anything_saved)
    if not names:
        return tokenizer
    from megatron_data.tokenizers.huggingface import HuggingFaceTokenizer

    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise DataError(
            f"{given['tokenizer_model']} holds a {type(tokenizer).__name__}, which does not "
            "support --tokenizer-special-tokens; leave the option out"
        )
    return tokenizer.with_special_tokens(names)


def _of_conversations(kind: str, given: Mapping[str, Any]) -> "Tokenizer":
    from megatron_data.tokenizers import multimodal, sft

    if kind == "NullMultimodalTokenizer":
        return multimodal.NullMultimodalTokenizer(**given)
    names = given.get("tokenizer_special_tokens")
    if kind == "SFTTokenizer":
        return sft.SFTTokenizer.load(
            given["tokenizer_model"],
            given.get("sft_tokenizer_prompt_format"),
            given.get("chat_template"),
            names or (),
        )
    return multimodal.MultimodalTokenizer.load(
        given["tokenizer_model"],
        given["tokenizer_prompt_format"],
        special_tokens=(multimodal.IMAGE_TOKEN,) if names is None else names,
        image_tag=given.get("image_tag_type", ""),
        force_system_message=given.get("force_system_message", False),
    )


def _tik_tokenizer(given: Mapping[str, Any]) -> "Tokenizer":
    from megatron_data.tokenizers.tik_token import TikTokenizer

    renamed = {
        "tiktoken_pattern": "pattern",
        "tiktoken_num_special_tokens": "num_special_tokens",
        "tokenizer_special_tokens": "special_tokens",
        "vocab_size": "vocab_size",
    }
    options = {renamed[name]: value for name, value in given.items() if name in renamed}
    return TikTokenizer.load(given["tokenizer_model"], **options)


def _of_the_library(kind: str, given: Mapping[str, Any], anything_saved: bool) -> "Tokenizer":
    if kind == "GPT2BPETokenizer":
        from megatron_data.tokenizers.gpt2 import gpt2_tokenizer

        return gpt2_tokenizer(given["vocab_file"], given["merge_file"])
    if kind == "HuggingFaceTokenizer":
        from megatron_data.tokenizers.huggingface import HuggingFaceTokenizer
        from megatron_data.tokenizers.loading import load_tokenizer

        load = load_tokenizer if anything_saved else HuggingFaceTokenizer.load
        return load(given["tokenizer_model"])
    from megatron_data.tokenizers.wordpiece import bert_tokenizer

    return bert_tokenizer(
        given["vocab_file"],
        lower_case=kind == "BertWordPieceLowerCase",
        extra_ids=given.get("vocab_extra_ids", 0),
    )
