"""Variables of a script that is read, not run."""

import re
from collections.abc import Mapping, Sequence

from megatron_train.errors import TrainError
from megatron_train.megatron_lm.bash.assigned import Changes
from megatron_train.megatron_lm.bash.messages import error_at, note_at

_MOST_CHARACTERS = 1 << 20
_LARGEST_INDEX = 10_000
_OF_THE_SHELL = re.compile(
    r"RANDOM|SRANDOM|SECONDS|LINENO|E?UID|PPID|HOSTNAME|HOSTTYPE|MACHTYPE|OSTYPE|BASH\w*|SHLVL|"
    r"PATH|OLDPWD|OPTIND|OPTERR|PS4|EPOCH\w*|DIRSTACK|GROUPS|SHELLOPTS|FUNCNAME|PIPESTATUS|TERM|_|"
    r"COLUMNS|LINES|SHELL|COMP_WORDBREAKS"
)

Value = str | dict[int, str]
"""A string, or the elements of an array by index."""


def unknown(text: str) -> str:
    """Returns ``text``, a Bash expression, marked as a value that only a run of the script has."""
    return "\0" + text.replace("\0", "") + "\0"


def is_unknown(text: str) -> bool:
    """Returns whether a part of ``text`` is known only when the script runs."""
    return "\0" in text


class Variables:
    """The variables of a script; the environment is never read.

    Args:
        name: Name of the script, for errors.
        positional: Values of ``$1``, ``$2`` and so on.
        initial: Values of further variables, which a sourced file does not change.

    Attributes:
        positional: Values of ``$1``, ``$2`` and so on; None if they are unknown.
        notes: One line for each construct that could not be evaluated.
        unset: Variables that were used without a value, with the line of their first use.
        error_if_unset: Whether the script ends at an unset variable (``set -u``).
        patterns: Whether Bash replaces patterns by names of files (not after ``set -f``).
    """

    def __init__(self, name: str, positional: Sequence[str], initial: Mapping[str, str]) -> None:
        self.name = name
        self.positional: list[str] | None = list(positional)
        self._values: dict[str, Value] = dict(initial)
        self._initial = dict(initial)
        self._readonly: set[str] = set()
        self._all_unknown = False
        self.notes: list[str] = []
        self.unset: dict[str, int] = {}
        self.error_if_unset = False
        self.patterns = True

    def copy(self) -> "Variables":
        """Returns variables of a process of its own; notes are shared."""
        other = Variables(self.name, (), self._initial)
        other.positional = None if self.positional is None else list(self.positional)
        other._values = {
            name: value if isinstance(value, str) else dict(value)
            for name, value in self._values.items()
        }
        other._readonly, other._all_unknown = set(self._readonly), self._all_unknown
        other.notes, other.unset = self.notes, self.unset
        other.error_if_unset, other.patterns = self.error_if_unset, self.patterns
        return other

    def error(self, line: int, text: str) -> TrainError:
        """Returns an error at a line of the script."""
        return error_at(self.name, line, text)

    def note(self, line: int, text: str) -> None:
        """Adds a note on a construct that could not be evaluated; long texts are shortened."""
        entry = note_at(line, text)
        if entry not in self.notes:
            self.notes.append(entry)

    def get(self, name: str) -> Value | None:
        """Returns the value of a variable, or None if it is not set."""
        value = self._values.get(name)
        if value is None and name == "IFS":
            return " \t\n"
        if value is None and (self._all_unknown or _OF_THE_SHELL.fullmatch(name)):
            return unknown(f"${{{name}}}")
        return value

    def ifs(self) -> str:
        """Returns the characters at which words are split."""
        value = self._values.get("IFS")
        if value is None:
            return " \t\n"
        return value if isinstance(value, str) else value.get(0, "")

    def set(self, name: str, value: Value, line: int) -> None:
        """Sets a variable.

        Raises:
            TrainError: The variable is read-only or too long.
        """
        if name in self._readonly:
            raise self.error(line, f"{name} is read-only; remove the second assignment")
        old = self._values.get(name)
        if isinstance(value, str) and isinstance(old, dict):
            value = {**old, 0: value}
        size = len(value) if isinstance(value, str) else sum(map(len, value.values()))
        if size > _MOST_CHARACTERS:
            raise self.error(line, f"the value of {name} is too long")
        self._values[name] = value

    def set_element(self, name: str, index: int, text: str, more: bool, line: int) -> None:
        """Sets or, if ``more``, extends the element ``index`` of an array."""
        old = self._values.get(name, {})
        items = {0: old} if isinstance(old, str) else dict(old)
        if index < 0:
            index += max(items, default=-1) + 1
        if not 0 <= index <= _LARGEST_INDEX:
            raise self.error(line, f"the index {index} of {name} is out of range")
        items[index] = items.get(index, "") + text if more else text
        self.set(name, dict(sorted(items.items())), line)

    def remove(self, name: str, line: int) -> None:
        """Removes a variable."""
        if name in self._readonly:
            raise self.error(line, f"{name} is read-only and cannot be removed")
        self._values.pop(name, None)

    def protect(self, name: str) -> None:
        """Makes a variable read-only."""
        self._readonly.add(name)

    def change(self, changes: Changes) -> None:
        """Makes what commands may change unknown."""
        if changes.everything:
            self._all_unknown = True
            for name in set(self._values) - set(self._initial):
                self._values[name] = unknown(f"${{{name}}}")
        for name in changes.names:
            self._values[name] = unknown(f"${{{name}}}")
        if changes.positional or changes.everything:
            self.positional = None
