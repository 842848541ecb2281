"""Patterns of Bash: ``*``, ``?`` and ``[...]``."""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

_CLASSES = {
    "alpha": "A-Za-z",
    "digit": "0-9",
    "alnum": "A-Za-z0-9",
    "upper": "A-Z",
    "lower": "a-z",
    "space": " \t\n\r\f\v",
    "xdigit": "0-9A-Fa-f",
    "punct": r"!-/:-@\[-`{-~",
    "blank": " \t",
}
_SPECIAL = re.compile(r"[*?\[]")
_MOST_NAMES = 10_000
_MOST_STARS = 6
_LONGEST = 1000


class PatternError(Exception):
    """The pattern is not supported."""


def to_regex(characters: Iterable[tuple[str, bool]]) -> str:
    """Returns a regular expression for a pattern.

    Args:
        characters: Pieces of text; True for those that are quoted and stand for themselves.

    Raises:
        PatternError: A bracket expression is not supported, or the pattern is too long.
    """
    text: list[tuple[str, bool]] = []
    for piece, quoted in characters:
        text += [(character, quoted) for character in piece]
    if len(text) > _LONGEST:
        raise PatternError("the pattern is too long")
    last = max((index for index, each in enumerate(text) if each == ("]", False)), default=-1)
    regex, index = "", 0
    while index < len(text):
        character, quoted = text[index]
        index += 1
        if quoted:
            regex += re.escape(character)
        elif character == "\\":
            regex += re.escape(text[index][0] if index < len(text) else "\\")
            index += 1
        elif character == "*":
            regex += "" if regex.endswith(".*") else ".*"
        elif character == "?":
            regex += "."
        elif character == "[":
            found = _bracket(text, index) if index < last else None
            regex += found[0] if found else r"\["
            index = found[1] if found else index
        else:
            regex += re.escape(character)
    if regex.count(".*") > _MOST_STARS:
        raise PatternError("too many stars")
    return regex


def _bracket(text: Sequence[tuple[str, bool]], start: int) -> tuple[str, int] | None:
    """Returns the regular expression of a bracket expression, and the index after it."""
    index = start
    negated = index < len(text) and text[index] in (("!", False), ("^", False))
    index += negated
    content, first = "", True
    while index < len(text):
        character, quoted = text[index]
        if character == "]" and not quoted and not first:
            return f"[{'^' if negated else ''}{content}]", index + 1
        first = False
        rest = "".join(each for each, _ in text[index : index + 12])
        if found := re.match(r"\[:([a-z]+):\]", rest):
            if found.group(1) not in _CLASSES:
                raise PatternError(found.group())
            content += _CLASSES[found.group(1)]
            index += found.end()
            continue
        if rest[:2] in ("[.", "[="):
            raise PatternError(rest[:2])
        if character in ("/", "\\") and not quoted:
            raise PatternError(character)
        if character == "-" and not quoted:
            low, high = text[index - 1][0], text[index + 1][0] if index + 1 < len(text) else ""
            is_range = bool(content) and high not in ("", "]")
            digits = (low + high).isdigit()
            letters = (low + high).islower() and (low + high).isalpha()
            if is_range and (not (low + high).isascii() or not (digits or letters) or low > high):
                raise PatternError(f"{low}-{high}")  # depends on the locale
            content += "-" if is_range else r"\-"
        else:
            content += re.escape(character)
        index += 1
    return None


def strip(text: str, action: str, matches: re.Pattern[str]) -> str:
    """Removes the shortest or longest prefix (``#``, ``##``) or suffix (``%``, ``%%``)."""
    lengths: Iterable[int] = range(len(text) + 1)
    if action in ("##", "%%"):
        lengths = reversed(range(len(text) + 1))
    for length in lengths:
        if action[0] == "#" and matches.fullmatch(text, 0, length):
            return text[length:]
        if action[0] == "%" and matches.fullmatch(text, len(text) - length):
            return text[: len(text) - length]
    return text


def may_match_files(pieces: Sequence[tuple[str, bool]]) -> bool:
    """Returns whether a file may match the pattern, so that Bash would replace it by names."""
    if not _is_pattern(pieces):
        return False
    parts: list[list[tuple[str, bool]]] = [[]]
    for text, quoted in pieces:
        first, *others = text.split("/")
        parts[-1].append((first, quoted))
        parts += [[(other, quoted)] for other in others]
    absolute = not "".join(text for text, _ in parts[0])
    folders = [Path("/" if absolute else ".")]
    for part in parts:
        if not any(text for text, _ in part):
            continue
        try:
            folders = list(_matching(folders, part))
        except (PatternError, re.error):
            return True
        if len(folders) > _MOST_NAMES:
            return True
    return bool(folders)


def _is_pattern(pieces: Iterable[tuple[str, bool]]) -> bool:
    return any(_SPECIAL.search(text) for text, quoted in pieces if not quoted)


def _matching(folders: Sequence[Path], part: Sequence[tuple[str, bool]]) -> Iterable[Path]:
    """Yields the files in ``folders`` whose names match ``part``, a part of a path."""
    plain = "".join(text for text, _ in part)
    regex = re.compile(to_regex(part), re.S)
    for folder in folders:
        names = [plain]
        if _is_pattern(part):
            try:
                names = [path.name for path in folder.iterdir()]
            except OSError:
                continue
            names = [name for name in names if name[0] != "." or plain[0] == "."]
            names = [name for name in names if regex.fullmatch(name)]
            if plain[0] == "." and (regex.fullmatch(".") or regex.fullmatch("..")):
                names.append("..")  # not in Bash 5.2, but in earlier versions
        yield from (folder / name for name in names if os.path.lexists(folder / name))
