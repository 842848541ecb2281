"""Names of variables that commands may change which are not interpreted."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from megatron_train.megatron_lm.bash.lexer import Part, Token, Word

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:\[[^=]*)?\+?=")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SETTERS = {
    "read",
    "mapfile",
    "readarray",
    "getopts",
    "let",
    "unset",
    "declare",
    "typeset",
    "local",
    "export",
    "readonly",
    "printf",
    "for",
    "select",
}
_RESERVED = {
    "if",
    "then",
    "elif",
    "else",
    "fi",
    "do",
    "done",
    "in",
    "case",
    "esac",
    "while",
    "until",
}


@dataclass
class Changes:
    """What commands may change.

    Attributes:
        names: Names of variables.
        positional: Whether the positional parameters may change.
        everything: Whether any variable may change, as by a sourced file.
    """

    names: set[str] = field(default_factory=set)
    positional: bool = False
    everything: bool = False

    def add(self, other: "Changes") -> None:
        """Adds the changes of ``other``."""
        self.names |= other.names
        self.positional |= other.positional
        self.everything |= other.everything


def changes_of(tokens: Iterable[Token], functions: Mapping[str, Changes]) -> Changes:
    """Returns what the commands of ``tokens`` may change; more names than change are possible.

    Args:
        tokens: The tokens of a construct.
        functions: Changes by each function that is defined.
    """
    changes = Changes()
    all_names = False
    words = set()
    for token in tokens:
        if not isinstance(token, Word):
            changes.names |= set(_NAME.findall(token.text)) if "=" in token.text else set()
            changes.names |= set(_NAME.findall(token.text)) if _counts(token.text) else set()
            continue
        literal = token.literal
        all_names |= literal in _SETTERS
        words |= set(_NAME.findall(_flat(token.parts)))
        changes.positional |= literal in ("set", "shift")
        changes.everything |= literal in ("source", ".", "eval", "shopt", "trap")
        if literal in ("cd", "pushd", "popd"):
            changes.names |= {"PWD", "OLDPWD"}
        if literal == "read":
            changes.names.add("REPLY")
        if literal == "getopts":
            changes.names |= {"OPTARG", "OPTIND"}
        if literal in ("mapfile", "readarray"):
            changes.names.add("MAPFILE")
        if found := _ASSIGNMENT.match(token.prefix):
            changes.names.add(found.group(1))
        for part in _parts(token):
            _add_part(changes, part)
        if literal in functions:
            changes.add(functions[literal])
    if all_names:
        changes.names |= words - _SETTERS - _RESERVED
    return changes


def _counts(text: str) -> bool:
    return "++" in text or "--" in text


def _add_part(changes: Changes, part: Part) -> None:
    if part.kind == "arithmetic" and ("=" in part.text or _counts(part.text)):
        changes.names |= set(_NAME.findall(part.text))
    if part.kind == "parameter" and ("=" in part.text or _counts(part.text)):
        changes.names |= set(_NAME.findall(part.text))


def _parts(word: Word) -> Iterable[Part]:
    for part in word.parts:
        yield part
        yield from part.parts
    for element in word.elements or ():
        yield from _parts(element)


def _flat(parts: Iterable[Part]) -> str:
    return " ".join(part.text + " " + _flat(part.parts) for part in parts)
