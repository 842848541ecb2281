"""Long texts in pieces that give the tokens of the whole.

The `tokenizers` library takes some 125 bytes of memory for each byte of a text, and one thread for
each text. A byte-level BPE merges only within the words that GPT-2's pattern finds. Each of them
begins with the white space before it, so a word always ends between a letter or digit and a space
or a line end, and whatever follows is cut into words as if the text began there.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

_END_OF_WORD = re.compile(r"(?<=[^\W_])(?=[ \n])")


def can_be_cut(definition: Mapping[str, Any]) -> bool:
    """Whether a tokenizer is known to give the tokens of a text when it is given its `pieces`.

    Args:
        definition: content of a `tokenizer.json`.
    """
    words: Mapping[str, Any] = definition.get("pre_tokenizer") or {}
    model: Mapping[str, Any] = definition.get("model") or {}
    return (
        definition.get("normalizer") is None
        and words.get("type") == "ByteLevel"
        and words.get("use_regex", True)
        and not words.get("add_prefix_space", True)
        and model.get("type", "BPE") == "BPE"
        and not model.get("dropout")
        and not any(map(_reaches_out, definition.get("added_tokens") or ()))
    )


def _reaches_out(token: Mapping[str, Any]) -> bool:
    """Whether a token that is kept whole takes white space with it, or looks at what is beside."""
    flags = ("lstrip", "rstrip", "single_word")
    return any(map(token.get, flags)) or re.search(r"\s", str(token.get("content"))) is not None


def pieces(text: str, size: int) -> Iterator[str]:
    """Cut a text after words, into pieces of at least `size` characters but for the last."""
    start = 0
    while end := _END_OF_WORD.search(text, start + size):
        yield text[start : end.start()]
        start = end.start()
    yield text[start:]
