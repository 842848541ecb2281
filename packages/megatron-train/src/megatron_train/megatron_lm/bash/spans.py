"""Ends of quoted and bracketed text in a Bash script."""

import re

_PARAMETER = re.compile(r"[#!]*(?:[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-])")
_DEEPEST = 40


class UnclosedError(Exception):
    """The text ends before the bracket or quote that is named by ``mark``."""

    def __init__(self, mark: str) -> None:
        super().__init__(mark)
        self.mark = mark


def single_quoted(text: str, start: int) -> int:
    """Returns the index of the quote that closes the single quotes with content from ``start``."""
    end = text.find("'", start)
    if end == -1:
        raise UnclosedError("'")
    return end


def ansi_quoted(text: str, start: int) -> int:
    """Returns the index of the quote that closes ``$'...'`` whose content begins at ``start``."""
    found = re.compile(r"(?:[^'\\]|\\.)*'", re.S).match(text, start)
    if not found:
        raise UnclosedError("'")
    return found.end() - 1


def backquoted(text: str, start: int) -> int:
    """Returns the index of the backquote that closes a command that begins at ``start``."""
    found = re.compile(r"(?:[^`\\]|\\.)*`", re.S).match(text, start)
    if not found:
        raise UnclosedError("`")
    return found.end() - 1


def double_quoted(text: str, start: int, depth: int = 0) -> int:
    """Returns the index of the quote that closes the double quotes with content from ``start``."""
    return _scan(text, start, '"', depth, single=False, double=False)


def command(text: str, start: int, depth: int = 0) -> int:
    """Returns the index of the parenthesis that closes ``$(`` whose content begins at ``start``."""
    return _scan(text, start, ")", depth, single=True, double=True)


def braces(text: str, start: int, depth: int = 0) -> int:
    """Returns the index of the brace that closes ``${`` whose content begins at ``start``.

    A brace in single quotes does not close it, also in double quotes, where they stay in a default.
    """
    found = _PARAMETER.match(text, start)
    index = found.end() if found else start
    if text.startswith("[", index):
        index = _scan(text, index + 1, "]", depth, single=True, double=True) + 1
    return _scan(text, index, "}", depth, single=True, double=True)


def _scan(text: str, index: int, closing: str, depth: int, *, single: bool, double: bool) -> int:
    if depth > _DEEPEST:
        raise UnclosedError(closing)
    opened = 0
    while index < len(text):
        character = text[index]
        if character == closing and not opened:
            return index
        if character == "\\":
            index += 1
        elif character == "'" and single:
            index = single_quoted(text, index + 1)
        elif character == '"' and double:
            index = double_quoted(text, index + 1, depth + 1)
        elif character == "`":
            index = backquoted(text, index + 1)
        elif character == "$":
            index = _dollar(text, index, depth, single=single)
        elif closing == ")" and character == "#" and text[index - 1] in " \t\n;&|(":
            index = (text.find("\n", index) + 1 or len(text)) - 1
        elif closing == ")" and character in "()":
            opened += 1 if character == "(" else -1
        index += 1
    raise UnclosedError(closing)


def _dollar(text: str, index: int, depth: int, *, single: bool) -> int:
    """Returns the index of the last character of an expansion that starts at ``index``."""
    following = text[index + 1 : index + 2]
    if following == "(":
        return command(text, index + 2, depth + 1)
    if following == "{":
        return braces(text, index + 2, depth + 1)
    if following == "'" and single:
        return ansi_quoted(text, index + 2)
    return index + 1 if following in ("#", "$", "*", "@", "?", "!") and following else index
