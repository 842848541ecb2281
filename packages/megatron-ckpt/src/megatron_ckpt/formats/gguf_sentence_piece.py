"""The definition of a SentencePiece BPE from a GGUF file, for the library ``tokenizers``.

SentencePiece joins the two neighbouring pieces whose union has the highest score, and the leftmost
of several such pairs. A ``tokenizer.json`` lists the pairs in this order instead. Text outside the
vocabulary becomes bytes.

Source: the paper of SentencePiece (Kudo and Richardson, 2018) and its ``bpe_model.cc``.
"""

from collections.abc import Sequence
from typing import Any

from megatron_ckpt.errors import CheckpointError
from megatron_ckpt.formats.gguf_file import GGUFFile

_KEY = "tokenizer.ggml."
_NORMAL, _BYTE = 1, 6  # of tokenizer.ggml.token_type
_SPACE = "\u2581"
_LONGEST = 256  # characters; bounds the number of pairs of a damaged file


def sentence_piece_bpe(
    file: GGUFFile, tokens: Sequence[str], kinds: Sequence[int]
) -> dict[str, Any]:
    """Returns the parts of ``tokenizer.json`` that determine how text is split.

    Args:
        file: The file.
        tokens: Its vocabulary.
        kinds: The type of each token.

    Raises:
        CheckpointError: Scores are missing, or the length of a token or of the scores is wrong.
    """
    scores = file.listed(f"{_KEY}scores", float)
    if len(scores) != len(tokens):
        raise CheckpointError(f"{file.path} has {len(tokens)} tokens but {len(scores)} scores")
    prefix = file.get(f"{_KEY}add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    unknown = file.get(f"{_KEY}unknown_token_id")
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*steps, replace]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else tokens[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": _BYTE in kinds,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": _merges(file, tokens, scores, kinds),
        },
    }


def _merges(
    file: GGUFFile, tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    """Returns the pairs that form a piece, those with the highest score first."""
    pieces = {
        token: score
        for token, score, kind in zip(tokens, scores, kinds, strict=True)
        if kind == _NORMAL
    }
    longest = max(map(len, pieces), default=0)
    if longest > _LONGEST:
        raise CheckpointError(
            f"{file.path} has a token of {longest} characters; the limit is {_LONGEST}"
        )
    # Of two ways to form one piece, the one with the longer left piece comes first.
    found = [
        (-score, -cut, piece)
        for piece, score in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    found.sort()
    return [(piece[:-left], piece[-left:]) for _, left, piece in found]
