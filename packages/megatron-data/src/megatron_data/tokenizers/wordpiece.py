"""BERT's `vocab.txt` as a tokenizer."""

import os
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from megatron_data.errors import DataError
from megatron_data.files import read_text, tokenizer_path
from megatron_data.tokenizers.huggingface import HuggingFaceTokenizer

UNKNOWN, BEGIN, END = "[UNK]", "[BOS]", "[EOS]"
SPECIAL_TOKENS = ("[PAD]", UNKNOWN, "[CLS]", "[SEP]", "[MASK]")
CONTINUATION_PREFIX = "##"
"""Begins every piece that goes on with a word."""

_LONGEST_WORD = 200  # characters; a longer one is unknown, as in BERT's own code


def bert_tokenizer(
    vocab_file: str | os.PathLike[str], *, lower_case: bool = True, extra_ids: int = 0
) -> HuggingFaceTokenizer:
    """The WordPiece tokenizer of a `vocab.txt`: Megatron's `BertWordPieceLowerCase` and `…Case`.

    Megatron's two additional tokens come after the vocabulary, [BOS] and [EOS], and after them the
    sentinels of T5, `<extra_id_0>` and so on. [EOS] ends a document.

    Args:
        vocab_file: a token a line, whose number is that of the line from 0.
        lower_case: make text lower-case and strip accents.
        extra_ids: number of sentinels (Megatron: `--vocab-extra-ids`).

    Raises:
        DataError: a file that is missing, has a line twice, or lacks a special token.
    """
    vocabulary = _vocabulary(tokenizer_path(vocab_file))
    if extra_ids < 0:
        raise DataError(f"{extra_ids} extra ids; give at least 0")
    tokenizer = wordpiece_pipeline(
        models.WordPiece(vocabulary, unk_token=UNKNOWN, max_input_chars_per_word=_LONGEST_WORD),
        lower_case,
    )
    sentinels = [f"<extra_id_{number}>" for number in range(extra_ids)]
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.add_special_tokens(
        [AddedToken(name, normalized=False) for name in (BEGIN, END, *sentinels)]
    )
    roles = {"eod": END, "eos": END, "bos": BEGIN, "pad": "[PAD]"}
    return HuggingFaceTokenizer(tokenizer.to_str(), roles)


def wordpiece_pipeline(model: models.WordPiece, lower_case: bool) -> tokenizers.Tokenizer:
    """BERT's way to words around a model: clean, split at white space and punctuation."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUATION_PREFIX)
    return tokenizer


def _vocabulary(path: Path) -> dict[str, int]:
    if not path.is_file():
        raise DataError(f"no tokenizer file {path}")
    lines = read_text(path).split("\n")
    if lines and not lines[-1]:
        lines.pop()
    vocabulary: dict[str, int] = {}
    for number, line in enumerate(lines):
        token = line.rstrip("\r")
        if token in vocabulary:
            raise DataError(
                f"{path}: line {number + 1} is {token!r}, as line {vocabulary[token] + 1} is; "
                "every token has one number"
            )
        vocabulary[token] = number
    missing = [token for token in SPECIAL_TOKENS if token not in vocabulary]
    if missing:
        raise DataError(f"{path} lacks {', '.join(missing)}; it is not a vocab.txt of BERT")
    return vocabulary
