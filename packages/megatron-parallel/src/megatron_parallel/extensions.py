"""Extensions: objects that installed distributions register in an entry-point group.

A package with an extension point (kinds of models, update rules) has one `Extensions` to look up
names. An object is imported only when it is used. An object with settings of its own has `Section`s
for them. This module does not import torch.
"""

import difflib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any, Protocol, TypeVar


def entry_points(group: str) -> EntryPoints:
    """Returns the entry points of a group, of all installed distributions.

    A search reads a file of every distribution, which takes milliseconds. One search finds all
    groups. It is repeated only after the import path or one of its folders has changed, as on
    installation of a distribution.
    """
    return _entry_points(group, tuple((entry, _modified(entry)) for entry in sys.path))


@lru_cache(maxsize=64)
def _entry_points(group: str, path: tuple[tuple[str, int | None], ...]) -> EntryPoints:
    """Returns the entry points of a group; ``path`` is the import path with times of change."""
    found: EntryPoints = _search(path).select(group=group)
    return found


@lru_cache(maxsize=4)
def _search(path: tuple[tuple[str, int | None], ...]) -> Any:
    """Returns the entry points of all groups, in a class that depends on Python's version."""
    del path
    return metadata.entry_points()


def _modified(entry: str) -> int | None:
    """Returns the time of the last change of a folder, in nanoseconds; None if there is none."""
    try:
        # A run asks hundreds of times, and making a Path takes longer than the system call.
        return os.stat(entry or ".").st_mtime_ns  # noqa: PTH116
    except OSError:
        return None


class Named(Protocol):
    """An object with the name of its entry point."""

    @property
    def name(self) -> str:
        """Name of the entry point."""


Described = TypeVar("Described", bound=Named)


@dataclass(frozen=True)
class Section:
    """A section of settings that an extension adds to the configuration of a run.

    Attributes:
        name: Name of the section in configuration files, such as `masked_lm`.
        config: Frozen dataclass whose fields are the settings. Their metadata has `help`, and may
            have `flag`, `unit` and `choices`. Imported without torch.
        title: Title of the group of flags in `--help` and in the documentation.
    """

    name: str
    config: type[Any]
    title: str


@dataclass(frozen=True)
class Extensions:
    """The objects of one entry-point group, by name.

    Attributes:
        group: Name of the entry-point group, such as `megatron.models`.
        what: What an object of the group is, for error messages, such as `kind of model`.
        error: Exception class to raise for a name that cannot be used.
        builtin: Objects of the package itself, which need no entry point: `package.module:object`
            by name.
    """

    group: str
    what: str
    error: type[ValueError]
    builtin: Mapping[str, str] = field(default_factory=dict)

    def entries(self) -> dict[str, EntryPoint]:
        """Returns the entry points by name, sorted.

        Raises:
            ValueError: Two distributions register different objects under one name. An `error`,
                like all exceptions of this class.
        """
        found = {name: EntryPoint(name, value, self.group) for name, value in self.builtin.items()}
        for entry in entry_points(group=self.group):
            other = found.setdefault(entry.name, entry)
            if other.value != entry.value:
                raise self.error(
                    f"two distributions provide the {self.what} {entry.name!r}: {other.value} and "
                    f"{entry.value}; uninstall one"
                )
        return dict(sorted(found.items()))

    def __contains__(self, name: str) -> bool:
        """Returns whether an object has that name. Looks in `builtin` first, without a search."""
        return name in self.builtin or name in self.entries()

    def find(self, name: str) -> EntryPoint:
        """Returns the entry point of that name.

        Raises:
            ValueError: No object has that name.
        """
        known = self.entries()
        if name not in known:
            raise self.error(self.unknown_name_message(name))
        return known[name]

    def load(self, name: str) -> Any:
        """Imports and returns the object of that name.

        Raises:
            ValueError: No object has that name, or it cannot be imported.
        """
        return self._import(self.find(name))

    def load_instance(self, name: str, cls: type[Described]) -> Described:
        """Imports and returns the object of that name, which must be a `cls`.

        Raises:
            ValueError: As for `load`, or the object is not a `cls` with the name of its entry
                point.
        """
        return self._instance(self.find(name), cls)

    def load_instances(self, cls: type[Described]) -> dict[str, Described]:
        """Imports and returns all objects by name, sorted. Searches once.

        Raises:
            ValueError: As for `entries` and `load_instance`.
        """
        return {name: self._instance(entry, cls) for name, entry in self.entries().items()}

    def _instance(self, entry: EntryPoint, cls: type[Described]) -> Described:
        found = self._import(entry)
        if not isinstance(found, cls) or found.name != entry.name:
            raise self.error(
                f"the entry point {entry.name!r} of {self.group} is {entry.value}, which is "
                f"not a {cls.__name__} of that name"
            )
        return found

    def _import(self, entry: EntryPoint) -> Any:
        try:
            return entry.load()
        except (ImportError, AttributeError) as error:
            raise self.error(
                f"the {self.what} {entry.name!r} is {entry.value}, which cannot be imported: "
                f"{error}; repair or uninstall the distribution that provides it"
            ) from error

    def unknown_name_message(self, name: str, shown: str | None = None) -> str:
        """Returns an error message for an unknown name, which lists the known ones.

        Args:
            name: The unknown name.
            shown: How the message shows the name. Defaults to its `repr`.
        """
        known = list(self.entries())
        near = difflib.get_close_matches(name, known)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return (
            f"no {self.what} {shown or repr(name)}{hint}; installed are "
            f"{', '.join(known) or 'none'}; install the distribution that provides it"
        )
