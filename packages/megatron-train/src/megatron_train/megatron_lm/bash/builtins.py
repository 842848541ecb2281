"""Commands of the shell that change variables."""

import re
from collections.abc import Callable, Sequence

from megatron_train.megatron_lm.bash.assigned import Changes
from megatron_train.megatron_lm.bash.expand import Expander
from megatron_train.megatron_lm.bash.lexer import Part, Word
from megatron_train.megatron_lm.bash.variables import is_unknown

_ASSIGNMENT = re.compile(
    r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?:\[(?P<index>[^\]]+)\])?(?P<more>\+?)=", re.S
)
_BAD_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\[.*\]\+?=", re.S)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HARMLESS_IF_ON = ("h", "m", "b", "B", "H", "C", "E", "T")
_HARMLESS_NAMES = ("xtrace", "verbose", "allexport", "errtrace", "functrace")
_SETS_NAMES = ("read", "mapfile", "readarray", "getopts", "let", "printf")


class Builtins:
    """Commands that change variables.

    Attributes:
        ends_at_failure: Whether the script ends at a command that fails (``set -e``).
        any_failure: Whether a pipeline fails if any command of it does (``set -o pipefail``).
        declarations: Commands whose arguments are assignments.
    """

    declarations = ("export", "declare", "local", "readonly", "typeset")

    def __init__(self, expander: Expander) -> None:
        self._expander = expander
        self._variables = expander.variables
        self.ends_at_failure = False
        self.any_failure = False
        self._commands: dict[str, Callable[[Sequence[str], int], bool | None]] = {
            "shift": self._shift,
            "set": self._set,
            "unset": self._unset,
            "shopt": self._shopt,
            **dict.fromkeys(("true", ":", "echo"), lambda words, line: True),
            "false": lambda words, line: False,
            **dict.fromkeys(("source", "."), self._source),
            **dict.fromkeys(("cd", "pushd", "popd"), self._cd),
            **dict.fromkeys(_SETS_NAMES, self._sets_names),
            **dict.fromkeys(("break", "continue", "alias"), self._unsupported),
        }

    def handles(self, name: str) -> bool:
        """Returns whether `run` runs the command ``name``."""
        return name in self._commands

    def run(self, words: Sequence[str], line: int) -> bool | None:
        """Runs a command; returns whether it succeeds, or None if that is unknown."""
        return self._commands[words[0]](words, line)

    def is_assignment(self, word: Word) -> bool:
        """Returns whether a word assigns a value."""
        prefix = word.prefix
        if _ASSIGNMENT.match(prefix):
            return True
        if _BAD_ASSIGNMENT.match(prefix):
            raise self._variables.error(word.line, f"the assignment {prefix} is not supported")
        return False

    def assign(self, word: Word) -> bool | None:
        """Assigns a value; returns None if a command gives it, whose success is unknown."""
        prefix = word.prefix
        found = _ASSIGNMENT.match(prefix)
        if found is None:
            return True
        name, more, index = found["name"], bool(found["more"]), found["index"]
        if word.elements is not None:
            self._assign_array(word, name, more)
            return True
        text = self._expander.text(word, assigned=True)
        value = text[found.end() :]
        if index is not None:
            number = self._expander.arithmetic(index, word.line)
            if number is None:
                self._variables.change(Changes({name}))
            else:
                self._variables.set_element(name, number, value, more, word.line)
        elif more:
            before = self._variables.get(name)
            if isinstance(before, dict):
                self._variables.set_element(name, 0, value, True, word.line)
            else:
                self._variables.set(name, (before or "") + value, word.line)
        else:
            self._variables.set(name, value, word.line)
        return None if any(part.kind == "command" for part in _all_parts(word)) else True

    def _assign_array(self, word: Word, name: str, more: bool) -> None:
        items: list[str] = []
        for element in word.elements or ():
            items += self._expander.words(element, element=True)
        old = self._variables.get(name) if more else None
        before = {0: old} if isinstance(old, str) else dict(old or {})
        first = max(before, default=-1) + 1
        values = {**before, **{first + index: item for index, item in enumerate(items)}}
        self._variables.set(name, values, word.line)

    def declare(self, command: str, words: Sequence[Word], line: int) -> bool | None:
        """Runs `export`, `declare`, `readonly` and so on."""
        if command == "local":
            raise self._variables.error(line, "'local' outside of a function is not supported")
        names = []
        array = False
        for word in words:
            literal = word.literal
            if literal.startswith(("-", "+")):
                if re.fullmatch("-[xrga]+|--", literal) is None or literal == "-p":
                    raise self._variables.error(line, f"'{command} {literal}' is not supported")
                array |= "a" in literal
                if "r" in literal:
                    command = "readonly"
            elif self.is_assignment(word):
                if word.elements is None and array:
                    raise self._variables.error(line, f"'{command} -a NAME=' is not supported")
                self.assign(word)
                names.append(_NAME.match(word.prefix).group())  # type: ignore[union-attr]
            else:
                names += self._names(command, word, array, line)
        if command == "readonly":
            for name in names:
                self._variables.protect(name)
        return True

    def _names(self, command: str, word: Word, array: bool, line: int) -> list[str]:
        """Handles the words of a declaration that are no assignments as they are written."""
        names = self._expander.words(word)
        for name in names:
            if not _NAME.fullmatch(name):
                raise self._variables.error(line, f"'{command} {name}' is not supported")
            if array and self._variables.get(name) is None:
                self._variables.set(name, {}, line)
        return names

    def _sets_names(self, words: Sequence[str], line: int) -> bool | None:
        """Makes the variables unknown that `read` and similar commands set."""
        if words[0] == "printf" and words[1:2] != ["-v"]:
            return True
        if words[0] == "printf":
            words = words[:3]
        names = {name for word in words[1:] for name in _NAME.findall(word)}
        names |= {"REPLY", "MAPFILE", "OPTARG", "OPTIND"}
        self._variables.change(Changes(names, everything=any(map(is_unknown, words))))
        self._variables.note(line, f"{words[0]} is not run")
        return None

    def _shift(self, words: Sequence[str], line: int) -> bool | None:
        positional = self._variables.positional
        count = words[1] if words[1:] else "1"
        if positional is None or not re.fullmatch("[0-9]{1,4}", count) or len(words) > 2:
            self._variables.positional = None
            return None
        if int(count) > len(positional):
            return False
        del positional[: int(count)]
        return True

    def _set(self, words: Sequence[str], line: int) -> bool | None:
        rest = list(words[1:])
        while rest and rest[0][:1] in ("-", "+") and rest[0] not in ("--", "-"):
            option = rest.pop(0)
            on = option[0] == "-"
            if is_unknown(option):
                raise self._variables.error(line, "'set' with unknown options is not supported")
            for letter in option[1:]:
                if letter == "o":
                    self._set_option(rest.pop(0) if rest else "", on, line)
                else:
                    self._set_option(letter, on, line)
        if rest:
            if rest[0] in ("--", "-") and rest.pop(0) == "-" and not rest:
                return True
            self._variables.positional = rest
        return True

    def _set_option(self, name: str, on: bool, line: int) -> None:
        if name in ("e", "errexit"):
            self.ends_at_failure = on
        elif name == "pipefail":
            self.any_failure = on
        elif name in ("u", "nounset"):
            self._variables.error_if_unset = on
        elif name in ("f", "noglob"):
            self._variables.patterns = not on
        elif name not in _HARMLESS_NAMES and name not in ("x", "v", "a", *_HARMLESS_IF_ON * on):
            raise self._variables.error(line, f"'set' with the option {name!r} is not supported")

    def _unset(self, words: Sequence[str], line: int) -> bool | None:
        for name in words[1:]:
            if name in ("-v", "-f"):
                continue
            found = re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)\[(-?[0-9]{1,6})\]", name)
            value = self._variables.get(found.group(1)) if found else None
            if found and isinstance(value, dict):
                index = int(found.group(2))
                index += max(value, default=-1) + 1 if index < 0 else 0
                items = {key: item for key, item in value.items() if key != index}
                self._variables.set(found.group(1), items, line)
            elif _NAME.fullmatch(name):
                self._variables.remove(name, line)
            else:
                raise self._variables.error(line, f"'unset {name}' is not supported")
        return True

    def _source(self, words: Sequence[str], line: int) -> bool | None:
        changes = Changes(everything=True)
        self._variables.note(
            line,
            f"{' '.join(words[:2])} is not read; all variables are unknown after it, except those "
            "of --set; remove the line if the file sets none",
        )
        self._variables.change(changes)
        return None

    def _cd(self, words: Sequence[str], line: int) -> bool | None:
        self._variables.change(Changes({"PWD", "OLDPWD"}))
        return None

    def _shopt(self, words: Sequence[str], line: int) -> bool | None:
        if words[1:] in (["-s", "expand_aliases"],):
            return True
        raise self._variables.error(line, f"'{' '.join(words[:3])}' is not supported")

    def _unsupported(self, words: Sequence[str], line: int) -> bool | None:
        raise self._variables.error(line, f"{words[0]!r} is not supported")


def _all_parts(word: Word) -> list[Part]:
    return [each for part in word.parts for each in (part, *part.parts)]
