"""The tokenizer of a run, from the files that its configuration names; nothing here needs torch."""

import json
from pathlib import Path
from typing import Any

from megatron_data import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    Tokenizer,
    load_tokenizer,
)

from megatron_train.config.data import DataConfig
from megatron_train.errors import TrainError

END_OF_TEXT = "<|endoftext|>"


def open_tokenizer(data: DataConfig, vocab_size: int | None = None) -> Tokenizer | None:
    """Return the tokenizer that the section ``data`` names, None where it names none.

    Args:
        data: the section.
        vocab_size: tokens of the model, which is all that a NullTokenizer is made of.

    Raises:
        DataError: a file that is missing or no tokenizer.
        TrainError: files of a GPT2BPETokenizer that do not belong together, or no vocabulary size.
    """
    model = data.tokenizer_model or ""
    match data.tokenizer:
        case None:
            return None
        case "GPT2BPETokenizer":
            definition = gpt2_definition(Path(data.vocab_file or ""), Path(data.merge_file or ""))
            return HuggingFaceTokenizer(definition, {"eod": END_OF_TEXT, "eos": END_OF_TEXT})
        case "ByteTokenizer":
            return ByteTokenizer()
        case "NullTokenizer":
            if vocab_size is None:
                raise TrainError("--tokenizer-type NullTokenizer needs --vocab-size")
            return NullTokenizer(vocab_size - 1)
        case "HuggingFaceTokenizer":
            if data.tokenizer_type is not None:
                return HuggingFaceTokenizer.load(model)
            return load_tokenizer(model)


def gpt2_definition(vocab_file: Path, merge_file: Path) -> str:
    """Return the `tokenizer.json` of the byte-level BPE in GPT-2's two files.

    Raises:
        TrainError: a file that is not what it should be; the message names it.
    """
    try:
        vocabulary: Any = json.loads(vocab_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TrainError(f"--vocab-file {vocab_file} is not JSON: {error}") from error
    if not isinstance(vocabulary, dict) or not all(type(n) is int for n in vocabulary.values()):
        raise TrainError(f"--vocab-file {vocab_file} does not map tokens to numbers")
    if END_OF_TEXT not in vocabulary:
        raise TrainError(f"--vocab-file {vocab_file} lacks {END_OF_TEXT}, the end of a document")
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    end = {"id": vocabulary[END_OF_TEXT], "content": END_OF_TEXT, "special": True, **added}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [end],
            "pre_tokenizer": {**byte_level, "use_regex": True},
            "decoder": {**byte_level, "use_regex": True},
            "model": {
                "type": "BPE",
                "vocab": vocabulary,
                "merges": _merges(merge_file, vocabulary),
            },
        },
        ensure_ascii=False,
    )


def _merges(path: Path, vocabulary: dict[str, int]) -> list[list[str]]:
    """Return the pairs of a merges file in their order, each checked to be in the vocabulary."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise TrainError(f"--merge-file {path} is not UTF-8 text: {error}") from error
    start = 1 if lines[0].startswith("#version") else 0
    merges = []
    for number, line in enumerate(lines[start:], start=start + 1):
        if not line:
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
            raise TrainError(
                f"--merge-file {path}, line {number}: {line!r} does not join two tokens of "
                "--vocab-file to a third; give the two files of one tokenizer"
            )
        merges.append(pair)
    return merges
