"""Every kind of tokenizer by Megatron's name, what it is made from, and its making."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from ..errors import DataError

if TYPE_CHECKING:
    from .protocol import Tokenizer

TokenizerKind: TypeAlias = Literal[
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "ByteTokenizer",
    "NullTokenizer",
]
TOKENIZER_KINDS: tuple[TokenizerKind, ...] = get_args(TokenizerKind)


@dataclass(frozen=True)
class Ingredients:
    """What a kind of tokenizer is made from, as names of options without `--` and with `_`.

    Attributes:
        needs: without which there is none.
        takes: which change it.
    """

    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()

    def complaint(self, kind: str, given: Mapping[str, Any]) -> str | None:
        """What is wrong with the options given for a kind, or None."""
        if foreign := [name for name in given if name not in (*self.needs, *self.takes)]:
            takes = ", ".join(map(flag, (*self.needs, *self.takes))) or "no options"
            return f"{flag(foreign[0])} does not go with --tokenizer-type {kind} (takes {takes})"
        if missing := [flag(name) for name in self.needs if name not in given]:
            return f"--tokenizer-type {kind} needs {' and '.join(missing)}"
        return None


_SPECIAL = ("tokenizer_special_tokens",)
_TIKTOKEN = ("tiktoken_pattern", "tiktoken_num_special_tokens", "vocab_size")
_BERT = Ingredients(("vocab_file",), ("vocab_extra_ids", *_SPECIAL))

TOKENIZER_INGREDIENTS: Mapping[str, Ingredients] = {
    "HuggingFaceTokenizer": Ingredients(("tokenizer_model",), _SPECIAL),
    "GPT2BPETokenizer": Ingredients(("vocab_file", "merge_file"), _SPECIAL),
    "BertWordPieceLowerCase": _BERT,
    "BertWordPieceCase": _BERT,
    "SentencePieceTokenizer": Ingredients(("tokenizer_model",), ("vocab_extra_ids", *_SPECIAL)),
    "GPTSentencePieceTokenizer": Ingredients(("tokenizer_model",)),
    "Llama2Tokenizer": Ingredients(("tokenizer_model",)),
    "TikTokenizer": Ingredients(("tokenizer_model",), (*_TIKTOKEN, *_SPECIAL)),
    "ByteTokenizer": Ingredients(),
    "NullTokenizer": Ingredients(("vocab_size",)),
}


def flag(name: str) -> str:
    """The option of a name."""
    return f"--{name.replace('_', '-')}"


def default_kind(given: Mapping[str, Any]) -> TokenizerKind:
    """The kind of tokenizer that options mean of which none is `--tokenizer-type`."""
    return "GPT2BPETokenizer" if "vocab_file" in given else "HuggingFaceTokenizer"


def make_tokenizer(kind: str | None = None, **options: Any) -> "Tokenizer":
    """The tokenizer that Megatron's options name.

    Args:
        kind: Megatron's `--tokenizer-type`. None: a GPT2BPETokenizer with a `vocab_file`, else
            whatever `load_tokenizer` opens at `tokenizer_model`.
        options: what it is made from, named as Megatron's options: `tokenizer_model`, `vocab_file`,
            `merge_file`, `vocab_size`, `vocab_extra_ids`, `tiktoken_pattern`,
            `tiktoken_num_special_tokens`, `tokenizer_special_tokens`; None as if not given.

    Raises:
        DataError: an unknown kind, options that it lacks or has no use for, or files that are not
            what they should be.
    """
    given = {name: value for name, value in options.items() if value is not None}
    anything_saved = kind is None
    kind = kind or default_kind(given)
    if kind not in TOKENIZER_INGREDIENTS:
        raise DataError(f"tokenizer type {kind!r}; known are {', '.join(TOKENIZER_KINDS)}")
    if complaint := TOKENIZER_INGREDIENTS[kind].complaint(kind, given):
        raise DataError(complaint)
    names = given.get("tokenizer_special_tokens", ())
    match kind:
        case "ByteTokenizer" | "NullTokenizer":
            from .plain import ByteTokenizer, NullTokenizer

            return ByteTokenizer() if kind == "ByteTokenizer" else NullTokenizer(**given)
        case "SentencePieceTokenizer" | "GPTSentencePieceTokenizer" | "Llama2Tokenizer":
            from .sentence_piece import SentencePieceTokenizer

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
    from .huggingface import HuggingFaceTokenizer

    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise DataError(
            f"{given['tokenizer_model']} holds a {type(tokenizer).__name__}, to which "
            "--tokenizer-special-tokens cannot add"
        )
    return tokenizer.with_special_tokens(names)


def _tik_tokenizer(given: Mapping[str, Any]) -> "Tokenizer":
    from .tik_token import TikTokenizer

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
        from .gpt2 import gpt2_tokenizer

        return gpt2_tokenizer(given["vocab_file"], given["merge_file"])
    if kind == "HuggingFaceTokenizer":
        from .huggingface import HuggingFaceTokenizer
        from .loading import load_tokenizer

        load = load_tokenizer if anything_saved else HuggingFaceTokenizer.load
        return load(given["tokenizer_model"])
    from .wordpiece import bert_tokenizer

    return bert_tokenizer(
        given["vocab_file"],
        lower_case=kind == "BertWordPieceLowerCase",
        extra_ids=given.get("vocab_extra_ids", 0),
    )
