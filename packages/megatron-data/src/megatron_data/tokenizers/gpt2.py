"""The tokenizer of GPT-2's files `vocab.json` and `merges.txt`."""

import json
import os
from pathlib import Path
from typing import Any

import orjson

from megatron_data.errors import DataError
from megatron_data.files import read_text, tokenizer_path
from megatron_data.tokenizers.huggingface import HuggingFaceTokenizer

END_OF_TEXT = "<|endoftext|>"


def gpt2_tokenizer(
    vocab_file: str | os.PathLike[str], merge_file: str | os.PathLike[str]
) -> HuggingFaceTokenizer:
    """Reads the byte-level BPE tokenizer of GPT-2's two files: Megatron's `GPT2BPETokenizer`.

    It splits text into words as GPT-2 does, for any vocabulary. `<|endoftext|>` ends a document.

    Args:
        vocab_file: `vocab.json`, which maps tokens to ids.
        merge_file: `merges.txt`, with one pair of tokens per line in the order of merging.

    Raises:
        DataError: A file is missing or invalid; the message names it.
    """
    definition = _definition(tokenizer_path(vocab_file), tokenizer_path(merge_file))
    return HuggingFaceTokenizer(definition, {"eod": END_OF_TEXT, "eos": END_OF_TEXT})


def _definition(vocab_file: Path, merge_file: Path) -> str:
    """Returns the content of a `tokenizer.json` equal to the two files."""
    try:
        vocabulary: Any = orjson.loads(_text(vocab_file))
    except ValueError as error:
        raise DataError(f"{vocab_file} is not JSON: {error}") from error
    if not isinstance(vocabulary, dict) or not all(type(n) is int for n in vocabulary.values()):
        raise DataError(f"{vocab_file} does not map tokens to token ids; is it the right file?")
    if END_OF_TEXT not in vocabulary:
        raise DataError(f"{vocab_file} lacks {END_OF_TEXT}, the end-of-document token")
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    end = {"id": vocabulary[END_OF_TEXT], "content": END_OF_TEXT, "special": True, **added}
    options = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    byte_level = {"type": "ByteLevel", **options}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [end],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "vocab": vocabulary,
                "merges": _merges(merge_file, vocabulary),
            },
        },
        ensure_ascii=False,
    )


def _merges(path: Path, vocabulary: dict[str, int]) -> list[list[str]]:
    """Reads the pairs of a merges file in order and checks that the vocabulary has them."""
    lines = _text(path).split("\n")
    start = 1 if lines[0].startswith("#version") else 0
    merges = []
    for number, line in enumerate(lines[start:], start=start + 1):
        if not line:
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not all(part in vocabulary for part in (*pair, "".join(pair))):
            raise DataError(
                f"{path}, line {number}: {line!r} does not merge two tokens of the vocabulary into "
                "a third; give the two files of the same tokenizer"
            )
        merges.append(pair)
    return merges


def _text(path: Path) -> str:
    if not path.is_file():
        raise DataError(f"no tokenizer file {path}")
    return read_text(path)
