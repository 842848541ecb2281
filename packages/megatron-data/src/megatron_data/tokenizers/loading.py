"""Loads tokenizers from local files and folders."""

import fnmatch
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_data.errors import DataError
from megatron_data.files import read_json, tokenizer_path
from megatron_data.tokenizers.huggingface import TOKENIZER_FILE, HuggingFaceTokenizer
from megatron_data.tokenizers.multimodal import (
    ImageTemplate,
    MultimodalTokenizer,
    NullMultimodalTokenizer,
)
from megatron_data.tokenizers.plain import PLAIN_FILE, ByteTokenizer, NullTokenizer
from megatron_data.tokenizers.prompt_formats import PromptFormat
from megatron_data.tokenizers.protocol import Tokenizer
from megatron_data.tokenizers.sentence_piece import MODEL_FILE, SentencePieceTokenizer
from megatron_data.tokenizers.sft import SFTTokenizer, load_template
from megatron_data.tokenizers.tik_token import VOCABULARY_FILE, TikTokenizer


def load_tokenizer(
    path: str | os.PathLike[str], special_tokens: Mapping[str, str] | None = None
) -> Tokenizer:
    """Loads a tokenizer from a `tokenizer.json`, its folder, or a folder that `save` wrote.

    Nothing is downloaded; the name of a model on a hub is not a path.

    Args:
        path: File or folder.
        special_tokens: Overrides the tokens of the roles "eod", "bos", "eos" and "pad".

    Raises:
        DataError: The path does not exist or is not a tokenizer.
    """
    folder = tokenizer_path(path)
    plain = folder / PLAIN_FILE
    if not plain.is_file():
        if folder.is_file() and folder.suffix == ".model":
            raise DataError(
                f"{path} looks like a sentencepiece model, which does not name its kind of "
                "tokenizer; give --tokenizer-type Llama2Tokenizer, GPTSentencePieceTokenizer or "
                "SentencePieceTokenizer (in Python SentencePieceTokenizer.load)"
            )
        if folder.is_dir() and not (folder / TOKENIZER_FILE).is_file():
            _refuse_other_files(path, folder)
        return HuggingFaceTokenizer.load(path, special_tokens)
    content: Any = read_json(plain)
    try:
        return _saved(folder, content)
    except DataError:
        raise
    # The file has options of other names or types than `save` writes.
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise DataError(f"{plain} is damaged ({error}); save the tokenizer again") from None


_WRITTEN = "a tokenizer.json that transformers wrote from it (save_pretrained)"
#: Files without a `tokenizer.json` -> the options of their kinds.
_OTHER_KINDS = {
    "*.model": "--tokenizer-type Llama2Tokenizer, GPTSentencePieceTokenizer or "
    "SentencePieceTokenizer with --tokenizer-model {folder}/{name}",
    "merges.txt": "--tokenizer-type GPT2BPETokenizer with --vocab-file {folder}/vocab.json and "
    "--merge-file {folder}/{name}",
    "vocab.txt": "--tokenizer-type BertWordPieceCase or BertWordPieceLowerCase with --vocab-file "
    "{folder}/{name} (for training)",
    "tekken.json": _WRITTEN,
    "*.tiktoken": _WRITTEN,
}


def _refuse_other_files(path: str | os.PathLike[str], folder: Path) -> None:
    """Raises DataError if a folder has files of a tokenizer of another kind, and names them."""
    names = sorted(each.name for each in folder.iterdir())
    for pattern, remedy in _OTHER_KINDS.items():
        for name in fnmatch.filter(names, pattern):
            raise DataError(
                f"{path} has {name} but no {TOKENIZER_FILE}, so the kind of its tokenizer is not "
                f"known; use {remedy.format(folder=folder, name=name)}"
            )


def _saved(folder: Path, content: Any) -> Tokenizer:
    """Returns the tokenizer of a folder that `save` wrote; `content` is that of `PLAIN_FILE`."""
    options: dict[str, Any] = content.get("options", {}) if isinstance(content, dict) else {}
    match content:
        case {"type": "SentencePieceTokenizer"}:
            return SentencePieceTokenizer.load(folder / MODEL_FILE, **options)
        case {"type": "TikTokenizer"}:
            return TikTokenizer.load(folder / VOCABULARY_FILE, **options)
        case {"type": "SFTTokenizer" | "MultimodalTokenizer" as kind}:
            return _of_conversations(kind, folder, content, options)
        case {"type": "ByteTokenizer"}:
            return ByteTokenizer()
        case {"type": "NullTokenizer", "vocab_size": int(vocab_size)}:
            return NullTokenizer(vocab_size)
        case {"type": "NullMultimodalTokenizer", "vocab_size": int(vocab_size)}:
            return NullMultimodalTokenizer(vocab_size)
    raise DataError(
        f"{folder / PLAIN_FILE} does not describe a tokenizer of this package: {content!r:.300}"
    )


def _of_conversations(
    kind: str, folder: Path, saved: Mapping[str, Any], options: Mapping[str, Any]
) -> Tokenizer:
    """Returns the tokenizer that `SFTTokenizer.save` or `MultimodalTokenizer.save` wrote."""
    reference = HuggingFaceTokenizer.load(folder)
    template = load_template(PromptFormat(), reference, folder)
    template = template.with_variables(saved.get("variables", template.variables))
    pad_token = saved.get("pad_token")
    if pad_token is not None and not isinstance(pad_token, str):
        raise DataError(f"{folder / PLAIN_FILE}: pad_token is {pad_token!r:.60}, not a string")
    if kind == "SFTTokenizer":
        return SFTTokenizer(reference, template, pad_token)
    return MultimodalTokenizer(reference, ImageTemplate(template, **options), pad_token)
