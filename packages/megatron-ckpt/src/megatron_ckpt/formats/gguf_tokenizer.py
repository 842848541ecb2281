"""Conversion of the tokenizer in the metadata of a GGUF file to files of Hugging Face's libraries.

`tokenizer.json` is written as plain data, so the library `tokenizers` is not needed. Byte-level BPE
(``tokenizer.ggml.model`` is ``gpt2``) is supported, with the pre-tokenizers that models of the
supported architectures use, and the BPE of SentencePiece (``llama``).
"""

import json
from collections.abc import Sequence
from typing import Any

from megatron_ckpt.errors import CheckpointError, did_you_mean
from megatron_ckpt.formats.gguf_file import GGUFFile
from megatron_ckpt.formats.gguf_sentence_piece import sentence_piece_bpe

_KEY = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # of tokenizer.ggml.token_type
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_GPT2: list[dict[str, Any]] = [{**_BYTE_LEVEL, "use_regex": True}]
_DIGITS: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}, *_GPT2]


def _split(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return [{**split, "invert": False}, {**_BYTE_LEVEL, "use_regex": False}]


_LLAMA3 = _split(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Pre-tokenizers by ``tokenizer.ggml.pre``.
_SPLITS = {
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}


def tokenizer_files(file: GGUFFile) -> dict[str, bytes]:
    """Returns ``tokenizer.json`` and ``tokenizer_config.json`` by name.

    Raises:
        CheckpointError: The kind of tokenizer is not supported.
    """
    model = file.require(f"{_KEY}model")
    if model not in _KINDS:
        raise CheckpointError(
            f"{file.path}: the tokenizer is of kind {model!r}; only byte-level BPE ('gpt2') and "
            "SentencePiece's BPE ('llama') are supported in GGUF files; import the safetensors of "
            "the model"
        )
    tokens = file.listed(f"{_KEY}tokens", str)
    kinds = [1] * len(tokens)
    if file.get(f"{_KEY}token_type") is not None:
        kinds = file.listed(f"{_KEY}token_type", int)
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{file.path} has {len(tokens)} tokens but {len(kinds)} token types")
    settings = _settings(file, tokens)
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(number, token, kind)
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind in (_CONTROL, _USER_DEFINED)
        ],
        **_KINDS[model](file, tokens, kinds),
    }
    content["post_processor"] = _post_processor(settings, tokens) or content["post_processor"]
    return {
        "tokenizer.json": (json.dumps(content, ensure_ascii=False) + "\n").encode(),
        "tokenizer_config.json": (
            json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
        ).encode(),
    }


def _byte_level_bpe(file: GGUFFile, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, Any]:
    """Returns the parts of ``tokenizer.json`` that determine how text is split."""
    pre = file.require(f"{_KEY}pre")
    if pre not in _SPLITS:
        raise CheckpointError(
            f"{file.path}: unknown {_KEY}pre {pre!r}{did_you_mean(pre, _SPLITS)}; known are "
            f"{', '.join(_SPLITS)}"
        )
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _SPLITS[pre]},
        "post_processor": {**_BYTE_LEVEL, "use_regex": True},
        "decoder": {**_BYTE_LEVEL, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # The vocabulary of Llama 3 has whole words that its merges do not produce.
            "ignore_merges": _SPLITS[pre] is _LLAMA3,
            "vocab": {
                token: number
                for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
                if kind != _UNUSED
            },
            "merges": [merge.split(" ", 1) for merge in file.require(f"{_KEY}merges")],
        },
    }


_KINDS = {"gpt2": _byte_level_bpe, "llama": sentence_piece_bpe}


def _added_token(number: int, token: str, kind: int) -> dict[str, Any]:
    return {
        "id": number,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,  # also those of spaces, which llama.cpp writes without their symbol
        "special": kind == _CONTROL,
    }


def _settings(file: GGUFFile, tokens: list[str]) -> dict[str, Any]:
    """Returns the content of ``tokenizer_config.json``."""
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for role, theirs in _ROLES.items():
        number = file.get(f"{_KEY}{theirs}_token_id")
        if number is None:
            continue
        if not 0 <= number < len(tokens):
            raise CheckpointError(
                f"{file.path}: {_KEY}{theirs}_token_id is {number}, but the vocabulary has "
                f"{len(tokens)} tokens"
            )
        settings[f"{role}_token"] = tokens[number]
    if (starts := file.get(f"{_KEY}add_bos_token", _starts_with_bos(file))) is not None:
        settings["add_bos_token"] = starts
    if (ends := file.get(f"{_KEY}add_eos_token")) is not None:
        settings["add_eos_token"] = ends
    if templates := _templates(file):
        settings["chat_template"] = templates
    settings["clean_up_tokenization_spaces"] = False
    return settings


def _starts_with_bos(file: GGUFFile) -> bool | None:
    """Returns True for tokenizers that start a text with its token unless the file denies it.

    In llama.cpp (``llama-vocab.cpp``) these are SentencePiece's BPE and the pre-tokenizer of
    Llama 3. Others do so only if the file demands it.
    """
    split = _SPLITS.get(file.get(f"{_KEY}pre", ""))
    return True if file.get(f"{_KEY}model") == "llama" or split is _LLAMA3 else None


def _templates(file: GGUFFile) -> str | list[dict[str, str]] | None:
    """Returns the chat template, or a list if there are others with names, such as ``tool_use``."""
    default = file.get(_TEMPLATE)
    if file.get(f"{_TEMPLATE}s") is None:
        return default or None
    named = {
        name: file.require(f"{_TEMPLATE}.{name}") for name in file.listed(f"{_TEMPLATE}s", str)
    }
    if default:
        named = {"default": default} | named
    return [{"name": name, "template": source} for name, source in named.items()]


def _post_processor(settings: dict[str, Any], tokens: list[str]) -> dict[str, Any] | None:
    """Returns the post-processor that adds tokens around a text, or None if the file adds none."""
    wanted = [role for role in ("bos", "eos") if settings.get(f"add_{role}_token")]
    around = {role: settings[f"{role}_token"] for role in wanted if f"{role}_token" in settings}
    if not around:
        return None

    def piece(role: str) -> list[dict[str, Any]]:
        token = around.get(role)
        return [{"SpecialToken": {"id": token, "type_id": 0}}] if token else []

    def sequence(name: str) -> list[dict[str, Any]]:
        return [*piece("bos"), {"Sequence": {"id": name, "type_id": 0}}, *piece("eos")]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A"),
        "pair": sequence("A") + sequence("B"),
        "special_tokens": {
            token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]}
            for token in around.values()
        },
    }
