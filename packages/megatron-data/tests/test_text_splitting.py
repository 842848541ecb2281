"""Tests that long texts encoded in segments have the tokens of the whole text."""

import json
import re
import sys
import unicodedata
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_data import ByteTokenizer, HuggingFaceTokenizer, train_bpe
from megatron_data.preprocessing import encoding
from megatron_data.sources.json_lines import LinesChunk
from megatron_data.tokenizers import NullTokenizer, huggingface, plain
from megatron_data.tokenizers.text_splitting import GPT2, LLAMA3, QWEN2, split_pattern, split_text

SPELLINGS = (
    *(
        "the",
        " the",
        "\nthe",
        "the\n",
        "。\n",
        "a",
        "B",
        "1",
        "22",
        "é",
        "日本",
        "²",
        "_",
        "'s",
        "'",
        "-",
        "...",
        "<|",
    ),
    *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\x1c", "\x85", "\xa0", "\u3000", "\u2028"),
    *("<|endoftext|>", "endoftext|>", "\u0301", "\U0001f40b"),
)


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def split_by(pattern: str) -> dict[str, object]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    parts = [{**split, "invert": False}, {**BYTES, "use_regex": False}]
    return {"type": "Sequence", "pretokenizers": parts}


def of_parts(
    split: Mapping[str, object] | None = None,
    level: Mapping[str, object] | None = None,
    parts: int = 2,
    without: str = "",
) -> dict[str, object]:
    """Returns a Llama 3 pre-tokenizer with changes; an absent key has the library's default."""
    whole = split_by(LLAMA3)
    made: Any = whole["pretokenizers"]
    made[0] |= split or {}
    made[1] |= level or {}
    made[1].pop(without, None)
    return {**whole, "pretokenizers": (made * 2)[:parts]}


def wordpiece() -> str:
    made = tokenizers.BertWordPieceTokenizer(lowercase=True)
    made.train_from_iterator(["".join(SPELLINGS), "the whale endoftext"], vocab_size=120)
    return made.to_str()


def changed(**parts: object) -> str:
    return json.dumps(definition(**parts))


KINDS: dict[str, Callable[[], str]] = {
    "ByteLevel": lambda: changed(),
    "ByteLevel, NFC": lambda: changed(normalizer={"type": "NFC"}),
    "GPT-2 as a Split": lambda: changed(pre_tokenizer=split_by(GPT2)),
    "Llama 3": lambda: changed(pre_tokenizer=split_by(LLAMA3)),
    "Qwen 2": lambda: changed(pre_tokenizer=split_by(QWEN2), normalizer={"type": "NFC"}),
    "BERT": wordpiece,
}


@pytest.mark.parametrize("kind", KINDS)
def test_segments_give_the_tokens_of_the_whole_text(kind: str) -> None:
    made = HuggingFaceTokenizer(KINDS[kind]())
    places = split_pattern(json.loads(KINDS[kind]()))
    assert places is not None
    cuts = 0

    @settings(max_examples=150, deadline=None, database=None)
    @given(
        parts=st.lists(st.sampled_from(SPELLINGS), min_size=4, max_size=40), size=st.integers(1, 6)
    )
    def holds(parts: list[str], size: int) -> None:
        nonlocal cuts
        text = "".join(parts)
        cut = list(split_text(text, size, places))
        cuts += len(cut) - 1
        assert "".join(cut) == text
        assert all(len(piece) >= size for piece in cut[:-1])
        assert list(chain.from_iterable(map(made.encode, cut))) == made.encode(text)

    holds()
    assert cuts > 30


@pytest.mark.parametrize("kind", ["GPT-2 as a Split", "Llama 3"])
def test_the_check_finds_a_rule_that_is_wrong(kind: str) -> None:
    """GPT-2 groups line ends except the last; Llama 3 groups a full stop with line ends."""
    made = HuggingFaceTokenizer(KINDS[kind]())
    wrong = {
        "GPT-2 as a Split": ("the\n\nthe", r"(?<=\n)(?=[^\W_])"),
        "Llama 3": ("the。\n\nthe", r"(?<=[。])(?=\n)"),
    }
    text, places = wrong[kind]
    cut = list(split_text(text, 1, re.compile(places)))
    assert len(cut) == 2
    words = made._tokenizer.pre_tokenizer.pre_tokenize_str  # type: ignore[attr-defined]
    assert [word for piece in cut for word, _ in words(piece)] != [word for word, _ in words(text)]


def test_no_letter_becomes_white_space_or_a_mark_when_it_is_composed() -> None:
    """The rules see the original letters, but NFC is applied before words are found."""
    for number in range(sys.maxunicode + 1):
        letter = chr(number)
        if letter.isalnum():
            assert unicodedata.normalize("NFC", letter)[0].isalnum(), hex(number)
            assert unicodedata.normalize("NFC", f"\n{letter}")[0] == "\n"


def test_a_split_text_has_equal_tokens(
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
    monkeypatch.setattr(huggingface, "SEGMENT_CHARACTERS", 100)
    assert len(list(tokenizer.split_text(long))) > 20
    assert tokenizer.encode_batch([long, "", "short"]) == [whole, [], tokenizer.encode("short")]
    assert max(given_sizes) < 120 * huggingface.SEGMENTS_AT_ONCE < len(long)


def definition(**changes: object) -> dict[str, object]:
    made = json.loads(train_bpe(["".join(SPELLINGS) * 3, "the the whale\n\n\n"], 300)._definition)
    return {**made, **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "NFKC"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES]}},
        {"pre_tokenizer": split_by(r"\s+|\S+")},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}},
        {"model": {"type": "BPE", "dropout": 0.1}},
        {"added_tokens": [{"content": "<|end of text|>"}]},
        {"added_tokens": [{"content": "<mask>", "lstrip": True}]},
        {"added_tokens": [{"content": "<mask>", "rstrip": True}]},
        {"added_tokens": [{"content": "<mask>", "single_word": True}]},
        {"pre_tokenizer": {"type": "ByteLevel", "use_regex": True}},  # a space before a text
        {"pre_tokenizer": of_parts(parts=3)},
        {"pre_tokenizer": of_parts({"type": "Digits"})},
        {"pre_tokenizer": of_parts({"behavior": "Removed"})},
        {"pre_tokenizer": of_parts({"invert": True})},
        {"pre_tokenizer": of_parts({"pattern": {"String": " "}})},
        {"pre_tokenizer": of_parts({"pattern": None})},
        {"pre_tokenizer": of_parts(level={"type": "Metaspace"})},
        {"pre_tokenizer": of_parts(level={"use_regex": True})},
        {"pre_tokenizer": of_parts(level={"add_prefix_space": True})},
        {"pre_tokenizer": of_parts(without="use_regex")},
        {"pre_tokenizer": of_parts(without="add_prefix_space")},
    ],
)
def test_texts_are_not_split_for_tokenizers_that_look_beyond_a_word(
    changes: dict[str, object],
) -> None:
    assert split_pattern(definition()) is not None
    assert split_pattern(definition(**changes)) is None


def test_absent_keys_of_a_pre_tokenizer_have_the_librarys_defaults() -> None:
    words = {"type": "ByteLevel", "add_prefix_space": False}
    assert split_pattern({"pre_tokenizer": words}) is not None  # it splits as GPT-2 does
    plain = of_parts()
    del plain["pretokenizers"][0]["invert"]  # type: ignore[index]
    assert split_pattern({"pre_tokenizer": plain, "normalizer": None}) is not None


@pytest.mark.parametrize("made", [ByteTokenizer(), NullTokenizer(99)])
def test_plain_tokenizers_split_texts(
    made: ByteTokenizer | NullTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "SEGMENT_CHARACTERS", 7)
    text = " ".join(map(str, range(99)))
    cut = list(made.split_text(text))
    assert len(cut) > 20
    assert list(chain.from_iterable(map(made.encode, cut))) == made.encode(text)


def test_a_split_document_is_one_sequence(
    tokenizer: HuggingFaceTokenizer, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "SEGMENT_CHARACTERS", 100)
    monkeypatch.setattr(encoding, "AT_ONCE", 300)
    long = "".join(texts[:40])
    lines = [json.dumps({"text": [long, "", "b", long[:900]]}), json.dumps({"text": "short"})]
    chunk = LinesChunk("a", 0, 1, "\n".join(lines).encode(), 0)
    (made,) = encoding.TextEncoder(tokenizer, ("text",), append_eod=True)(chunk).outputs
    wanted = [tokenizer.encode(text) for text in (long, "b", long[:900], "short")]
    wanted[2] += [tokenizer.eod_id or 0]
    wanted[3] += [tokenizer.eod_id or 0]
    assert made.tokens.tolist() == list(chain.from_iterable(wanted))
    assert made.lengths.tolist() == list(map(len, wanted))
    assert made.sequences.tolist() == [3, 1]
