"""The tokenizer of BERT's `vocab.txt`."""

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
"""Prefix of the word pieces that continue a word."""

_LONGEST_WORD = 200  # characters; a longer word becomes [UNK], as in BERT's code


def bert_tokenizer(
    vocab_file: str | os.PathLike[str], *, lower_case: bool = True, extra_ids: int = 0
) -> HuggingFaceTokenizer:
    """Reads the tokenizer of a `vocab.txt`: Megatron's `BertWordPieceLowerCase` and `…Case`.

    After the vocabulary come Megatron's additional tokens [BOS] and [EOS] and then the sentinel
    tokens of T5, `<extra_id_0>` and so on. [EOS] ends a document.

    Args:
        vocab_file: A file with one token per line; the id of a token is its line index from 0.
        lower_case: Whether to lower-case text and strip accents.
        extra_ids: Number of sentinel tokens (Megatron: `--vocab-extra-ids`).

    Raises:
        DataError: The file is missing, has a line twice, or lacks a special token.
    """
    vocabulary = _vocabulary(tokenizer_path(vocab_file))
    if extra_ids < 0:
        raise DataError(f"extra_ids={extra_ids}; give at least 0")
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
    """Returns a tokenizer that cleans text and splits it at white space and punctuation (BERT)."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUATION_PREFIX)
    return tokenizer


def _vocabulary(path: Path) -> dict[str, int]:
    if not path.is_file():
        raise DataError(f"no tokenizer file {path}")
    lines = read_text(path).split("\n")
    if not lines[-1]:
        lines.pop()
    vocabulary: dict[str, int] = {}
    for number, line in enumerate(lines):
        token = line.rstrip("\r")
        if token in vocabulary:
            raise DataError(
                f"{path}: lines {vocabulary[token] + 1} and {number + 1} are both {token!r}; "
                "copy the file again"
            )
        vocabulary[token] = number
    missing = [token for token in SPECIAL_TOKENS if token not in vocabulary]
    if missing:
        raise DataError(f"{path} lacks {', '.join(missing)}, so it is not a vocab.txt of BERT")
    return vocabulary
