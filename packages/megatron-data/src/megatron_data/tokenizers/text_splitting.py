"""Splits long texts into segments whose tokens are those of the whole text.

The `tokenizers` library needs about 125 bytes of memory per byte of a text, and uses one thread
per text. Its models work within the words of a pre-tokenizer. A text can therefore be split where
a word is known to end and where the words after it do not depend on the text before it. These
points follow from the pattern that finds the words; a comment at each rule below gives the reason.

Normalization does not cross such a point: it is next to a space or a line end, which no
composition and no reordering of marks crosses.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

SplitPattern: TypeAlias = re.Pattern[str]
"""Matches the empty strings at which a text may be split."""
SEGMENT_CHARACTERS = 1 << 18
"""Characters per segment when a long text is split."""

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

# No alternative of GPT-2's pattern has white space after other characters, and none looks behind.
# So a word ends before every space and line end that follows a letter, a digit or a full stop. The
# only look-ahead belongs to white space, which is never the last character before such a split.
# (_STOPS are those of Chinese and Japanese, which are written without spaces.)
_STOPS = "\u3002\uff01\uff1f\u2026"
_BEFORE_SPACE = re.compile(rf"(?<=[^\W_])(?=[ \n])|(?<=[{_STOPS}])(?=\n)")

# The same holds for the patterns of Llama 3 and Qwen 2 after letters and digits, but punctuation
# includes the line ends after it. Only ASCII letters are used, because libraries differ in the
# letters that they know. A word also ends between a line end and a letter or digit: `\s*[\r\n]+`
# or the punctuation before them matches all line ends that close white space, before any
# look-ahead is tried, and no alternative has a letter after a line end.
_AROUND_LINE_END = re.compile(r"(?<=[A-Za-z0-9])(?=[ \n])|(?<=\n)(?=[^\W_])")

# Pre-tokenizers that drop white space and do not look beyond it.
_AT_SPACE = re.compile(r"(?<=[^\W_])(?=[ \n])")
_DROP_SPACE = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")

_SPLITS = {GPT2: _BEFORE_SPACE, LLAMA3: _AROUND_LINE_END, QWEN2: _AROUND_LINE_END}
_NORMALIZERS = (None, "NFC", "BertNormalizer")


def split_pattern(definition: Mapping[str, Any]) -> SplitPattern | None:
    """Returns a pattern for the points at which a tokenizer's texts may be split, or None.

    Args:
        definition: Content of a `tokenizer.json`.
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
    """Returns whether an added token includes white space or depends on adjacent characters."""
    flags = ("lstrip", "rstrip", "single_word")
    return any(map(token.get, flags)) or re.search(r"\s", str(token.get("content"))) is not None


def split_text(text: str, size: int, pattern: SplitPattern) -> Iterator[str]:
    """Splits a text into segments of at least `size` characters; the last may be shorter."""
    start = 0
    while end := pattern.search(text, start + size):
        yield text[start : end.start()]
        start = end.start()
    yield text[start:]
