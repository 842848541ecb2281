"""Escapes of ``$'...'`` in Bash."""

import re

_SIMPLE = {
    "a": "\a",
    "b": "\b",
    "e": "\x1b",
    "E": "\x1b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "?": "?",
}
_ESCAPE = re.compile(
    r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|U([0-9a-fA-F]{1,8})|(.))", re.S
)


def unescape(text: str) -> str | None:
    r"""Returns the content of ``$'...'``; None for a character that is not supported.

    Control characters (``\cX``), NUL and bytes that are no ASCII character are not supported.
    """
    invalid = False

    def character(found: re.Match[str]) -> str:
        nonlocal invalid
        octal, byte, short, long, letter = found.groups()
        if letter is not None:
            invalid |= letter in "cxuU"
            return _SIMPLE.get(letter, "\\" + letter)
        code = int(octal, 8) if octal else int(byte or short or long, 16)
        limit = 0x80 if octal or byte else 0xD800
        if 0 < code < limit:
            return chr(code)
        invalid = True
        return ""

    result = _ESCAPE.sub(character, text)
    return None if invalid else result
