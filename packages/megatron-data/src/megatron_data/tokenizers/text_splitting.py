"""Long texts in pieces that give the tokens of the whole.

The `tokenizers` library takes some 125 bytes of memory for each byte of a text, and one thread for
each text. All its models work within the words of a pre-tokenizer, so a text may be cut wherever a
word is known to end and whatever follows is cut into words as if the text began there. Where that
is follows from the pattern that finds the words; each rule below says why.

Normalisation keeps to its side of such a cut: it is next to a space or a line end, which no
composition and no reordering of marks crosses.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

SplitPattern: TypeAlias = re.Pattern[str]
"""Finds the empty strings at which a text may be cut."""

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

# No alternative of GPT2's pattern has white space after anything else, and none looks back: a word
# ends before every space and line end that follows a letter, a digit or a full stop. The only
# look-ahead is that of white space, which is never the last thing before such a cut. (The stops
# are those of Chinese and Japanese, which are written without spaces.)
_STOPS = "\u3002\uff01\uff1f\u2026"
_BEFORE_SPACE = re.compile(rf"(?<=[^\W_])(?=[ \n])|(?<=[{_STOPS}])(?=\n)")

# Of Llama 3's and Qwen 2's patterns the same holds after letters and digits, but punctuation takes
# the line ends behind it. The letters are ASCII, because two libraries may know different ones. A
# word also ends between a line end and a letter or digit: the line ends that close white space are
# taken by `\s*[\r\n]+` before any look-ahead is tried, or by the punctuation before them, in both
# cases all of them, and no alternative goes on behind a line end with a letter.
_AROUND_LINE_END = re.compile(r"(?<=[A-Za-z0-9])(?=[ \n])|(?<=\n)(?=[^\W_])")

# Pre-tokenizers that drop white space and look at nothing beyond it.
_AT_SPACE = re.compile(r"(?<=[^\W_])(?=[ \n])")
_DROP_SPACE = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")

_SPLITS = {GPT2: _BEFORE_SPACE, LLAMA3: _AROUND_LINE_END, QWEN2: _AROUND_LINE_END}
_NORMALIZERS = (None, "NFC", "BertNormalizer")


def split_pattern(definition: Mapping[str, Any]) -> SplitPattern | None:
    """Returns where texts may be cut for a tokenizer; None if no such place is known.

    Args:
        definition: content of a `tokenizer.json`.
    """
    normalizer: Mapping[str, Any] = definition.get("normalizer") or {}
    model: Mapping[str, Any] = definition.get("model") or {}
    if (
        normalizer.get("type") not in _NORMALIZERS
        or model.get("dropout")
        or any(map(_reaches_out, definition.get("added_tokens") or ()))
    ):
        return None
    return _pattern_of_words(definition.get("pre_tokenizer") or {})


def _pattern_of_words(words: Mapping[str, Any]) -> SplitPattern | None:
    if words.get("type") in _DROP_SPACE:
        return _AT_SPACE
    if words.get("type") == "ByteLevel" and words.get("use_regex", True):
        return None if words.get("add_prefix_space", True) else _BEFORE_SPACE
    parts: list[Mapping[str, Any]] = words.get("pretokenizers") or []
    if words.get("type") != "Sequence" or len(parts) != 2:
        return None
    split, level = parts
    if (
        split.get("type") != "Split"
        or split.get("behavior") != "Isolated"
        or split.get("invert", False)
        or level.get("type") != "ByteLevel"
        or level.get("use_regex", True)
        or level.get("add_prefix_space", True)
    ):
        return None
    return _SPLITS.get((split.get("pattern") or {}).get("Regex", ""))


def _reaches_out(token: Mapping[str, Any]) -> bool:
    """Whether a token that is kept whole takes white space with it, or looks at what is beside."""
    flags = ("lstrip", "rstrip", "single_word")
    return any(map(token.get, flags)) or re.search(r"\s", str(token.get("content"))) is not None


def split_text(text: str, size: int, places: SplitPattern) -> Iterator[str]:
    """Cuts a text into pieces of at least `size` characters but for the last."""
    start = 0
    while end := places.search(text, start + size):
        yield text[start : end.start()]
        start = end.start()
    yield text[start:]
