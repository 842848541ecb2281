"""Trained vocabularies repeat in every process and equal those of independent trainers."""

import hashlib
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from megatron_data import DataError
from megatron_data.tokenizers import train_bpe, train_unigram, train_wordpiece
from megatron_data.tokenizers.training import END_OF_TEXT
from megatron_data.tokenizers.unigram_training import unigram_pieces
from megatron_data.tokenizers.words import as_texts, count_words

TRAIN: dict[str, Callable[..., Any]] = {
    "bpe": train_bpe,
    "wordpiece": train_wordpiece,
    "unigram": train_unigram,
}
PROGRAM = """
import hashlib, sys
from megatron_data.tokenizers import train_bpe, train_unigram, train_wordpiece
from test_training import TRAIN, many_ties
print(*(hashlib.sha256(TRAIN[kind](many_ties(), 320).definition).hexdigest() for kind in TRAIN))
"""


def many_ties() -> list[str]:
    """Returns texts with many pairs of equal counts."""
    draw = random.Random(3)
    words = ["".join(draw.choices("abcdeé", k=draw.randint(1, 6))) for _ in range(400)]
    return [" ".join(words[at : at + 20]) for at in range(0, 400, 20)] * 2


def test_every_process_and_number_of_threads_writes_the_same_bytes() -> None:
    lines = set()
    for threads in ("1", "2", "1"):
        environment = os.environ | {"RAYON_NUM_THREADS": threads}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environment,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
        lines.add(done.stdout)
    own = (hashlib.sha256(TRAIN[kind](many_ties(), 320).definition) for kind in TRAIN)
    assert lines == {" ".join(one.hexdigest() for one in own) + "\n"}


def library_word_pieces(texts: Sequence[str], size: int) -> dict[str, int]:
    """Returns the vocabulary of the library's trainer for word pieces."""
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer=trainer)
    return dict(made.get_vocab())


def test_word_pieces_are_those_of_the_library() -> None:
    """Without ties the pieces are equal; their ids differ only among continuing characters."""
    words = {"whale": 97, "wharf": 61, "Été": 41, "sea": 29, "seal": 17, "x1": 7, "don't": 5}
    texts = [f" {word}\t" * count for word, count in words.items()]
    for size in (40, 45, 60):
        theirs = library_word_pieces(texts, size)
        ours = json.loads(train_wordpiece(texts, size).definition)["model"]["vocab"]
        assert ours.keys() == theirs.keys()
        assert ours.keys() >= {"[MASK]", "##h", "wha" if size > 40 else "w"}
        merged = [piece for piece in theirs if len(piece.removeprefix("##")) > 1]
        first = [piece for piece in theirs if not piece.startswith("##")]
        assert all(ours[piece] == theirs[piece] for piece in [*merged, *first])


def test_long_texts_are_counted_like_short_ones() -> None:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = "The whale\n swam  on. " * 30_000
    whole = made.pre_tokenizer.pre_tokenize_str(text)
    assert count_words([text], made) == sorted(Counter(word for word, _ in whole).items())
    assert dict(count_words(["a a\nb"], made)) == {"a": 1, "Ġa": 1, "Ċ": 1, "b": 1}
    counts = [("a", 5000), ("b", 2)]
    assert " ".join(as_texts(counts)).split() == ["a"] * 5000 + ["b"] * 2


def test_a_unigram_model_has_the_likeliest_pieces() -> None:
    texts = ["the whale and the sea " * 50, "the wharf " * 30]
    model = json.loads(train_unigram(texts, 300, special_tokens=[END_OF_TEXT, "<pad>"]).definition)
    pieces = model["model"]["vocab"]
    assert pieces[:2] == [[END_OF_TEXT, 0.0], ["<pad>", 0.0]]  # as control symbols have
    assert len(pieces) == len({piece for piece, _ in pieces}) <= 300
    assert {"the", "Ġwharf"} <= {piece for piece, _ in pieces[2:20]}
    assert {*tokenizers.pre_tokenizers.ByteLevel.alphabet()} <= {piece for piece, _ in pieces}
    alphabet = {*tokenizers.pre_tokenizers.ByteLevel.alphabet()}
    assert {*"".join(piece for piece, _ in pieces[2:])} <= alphabet
    mixed = json.loads(train_unigram(["abc123 naïve " * 99, "abd124 navy " * 9], 300).definition)
    known = {piece for piece, _ in mixed["model"]["vocab"]}
    assert {"abc123", "ĠnaÃ¯ve"} & known or {"Ġabc123", "ĠnaÃ¯ve"} <= known
    assert train_unigram(many_ties(), 320).vocab_size == 320  # there are enough pieces
    trained = train_unigram(texts, 300)
    assert trained.decode(trained.encode("a whale \n\u2581 é\t")) == "a whale \n\u2581 é\t"


def test_unigram_training_names_the_library_that_fails_or_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(DataError, match="sentencepiece cannot train on these texts: "):
        unigram_pieces([("ab", 1), ("cd", 1)], ["a", "b", "c", "d"], 1, progress=False)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(DataError, match=r"megatron-data\[sentencepiece\]"):
        unigram_pieces([("a", 1)], ["a"], 5, progress=False)
