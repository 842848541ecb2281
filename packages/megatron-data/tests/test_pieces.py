"""Long texts are encoded in pieces with the tokens of the whole."""

import json
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_data import HuggingFaceTokenizer, train_bpe
from megatron_data.tokenizers import huggingface
from megatron_data.tokenizers.pieces import can_be_cut, pieces

SPELLINGS = (
    *("the", " the", "a", "B", "1", "22", "é", "日本", "²", "_", "'s", "'", "-", "...", "<|"),
    *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\x1c", "\x85", "\xa0", "\u3000", "\u2028"),
    *("<|endoftext|>", "endoftext|>", "\u0301", "\U0001f40b"),
)


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.sampled_from(SPELLINGS), max_size=40), size=st.integers(1, 12))
def test_pieces_give_the_tokens_of_the_whole(
    tokenizer: HuggingFaceTokenizer, parts: list[str], size: int
) -> None:
    text = "".join(parts)
    cut = list(pieces(text, size))
    assert "".join(cut) == text
    assert all(len(piece) >= size for piece in cut[:-1])
    assert list(chain.from_iterable(map(tokenizer.encode, cut))) == tokenizer.encode(text)


def test_a_long_text_is_cut_and_equal(
    tokenizer: HuggingFaceTokenizer, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "".join(texts)
    whole = tokenizer.encode(long)
    given_sizes: list[int] = []
    encode_all = HuggingFaceTokenizer._encode_all

    def watched(self: HuggingFaceTokenizer, some: list[str]) -> list[list[int]]:
        given_sizes.append(sum(map(len, some)))
        return encode_all(self, some)

    monkeypatch.setattr(HuggingFaceTokenizer, "_encode_all", watched)
    monkeypatch.setattr(huggingface, "PIECE", 100)
    assert tokenizer.encode_batch([long, "", "short"]) == [whole, [], tokenizer.encode("short")]
    assert max(given_sizes) < 120 * huggingface.PIECES_AT_ONCE < len(long)


def definition(**changes: object) -> dict[str, object]:
    made = json.loads(train_bpe(["a text"], 257)._definition)
    return {**made, **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}},
        {"model": {"type": "Unigram", "vocab": []}},
        {"model": {"type": "BPE", "dropout": 0.1}},
        {"added_tokens": [{"content": "<|end of text|>"}]},
        {"added_tokens": [{"content": "<mask>", "lstrip": True}]},
    ],
)
def test_tokenizers_that_look_beyond_a_word_are_not_cut(changes: dict[str, object]) -> None:
    assert can_be_cut(definition())
    assert not can_be_cut(definition(**changes))
