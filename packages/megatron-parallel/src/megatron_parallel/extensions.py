"""What installed distributions bring under an entry-point group, found by name.

A package that can be extended from outside (kinds of models, update rules) has one `Extensions` and
looks names up there; it imports an object only when that is asked for. An object that needs
settings of its own brings `Section`s of them. Nothing here imports torch.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, TypeVar


class Named(Protocol):
    """A description that says under which name it is found."""

    @property
    def name(self) -> str:
        """The name of its entry point."""


Described = TypeVar("Described", bound=Named)


@dataclass(frozen=True)
class Section:
    """A section of settings that an extension brings to the configuration of a run.

    Attributes:
        name: Of the section in files of settings, such as `masked_lm`.
        config: Frozen dataclass whose fields are the settings. Their metadata has `help`, and may
            have `flag`, `unit` and `choices`. It is imported without torch.
        title: Of its group of flags in `--help` and in the documentation.
    """

    name: str
    config: type[Any]
    title: str


@dataclass(frozen=True)
class Extensions:
    """The objects of one entry-point group.

    Attributes:
        group: Name of the entry-point group, such as `megatron.models`.
        what: What an object of the group is, for messages: `kind of model`.
        error: Exception that is raised for a name that cannot be used.
        builtin: Objects of the package itself, which need no entry point: `package.module:object`
            by name.
    """

    group: str
    what: str
    error: type[ValueError]
    builtin: Mapping[str, str] = field(default_factory=dict)

    def entries(self) -> dict[str, EntryPoint]:
        """Entry points by name, sorted.

        Raises `error` if two distributions bring different objects under one name.
        """
        found = {name: EntryPoint(name, value, self.group) for name, value in self.builtin.items()}
        for entry in entry_points(group=self.group):
            other = found.setdefault(entry.name, entry)
            if other.value != entry.value:
                raise self.error(
                    f"two distributions bring the {self.what} {entry.name!r}: {other.value} and "
                    f"{entry.value}; uninstall one"
                )
        return dict(sorted(found.items()))

    def __contains__(self, name: str) -> bool:
        """Whether there is an object of that name. One of `builtin` is found without a search."""
        return name in self.builtin or name in self.entries()

    def find(self, name: str) -> EntryPoint:
        """Returns the entry point of that name. Raises `error` if there is none."""
        known = self.entries()
        if name not in known:
            raise self.error(self.unknown_name_message(name))
        return known[name]

    def load(self, name: str) -> Any:
        """The object of that name. Raises `error` if there is none or it cannot be imported."""
        entry = self.find(name)
        try:
            return entry.load()
        except (ImportError, AttributeError) as error:
            raise self.error(
                f"the {self.what} {name!r} is {entry.value}, which cannot be imported: {error}; "
                "repair or uninstall the distribution that brings it"
            ) from error

    def load_instance(self, name: str, cls: type[Described]) -> Described:
        """Returns the object of that name, which is a `cls` and has the name of its entry point.

        Raises `error` as `load`, and if it is something else.
        """
        found = self.load(name)
        if not isinstance(found, cls) or found.name != name:
            raise self.error(
                f"the entry point {name!r} of {self.group} is {self.find(name).value}, which is no "
                f"{cls.__name__} of that name"
            )
        return found

    def unknown_name_message(self, name: str, shown: str | None = None) -> str:
        """One line that says that `name` is not there, with the names that are.

        `shown` stands for the name in the line. Defaults to its `repr`.
        """
        known = list(self.entries())
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return (
            f"no {self.what} {shown or repr(name)}{hint}; installed are "
            f"{', '.join(known) or 'none'}; install the distribution that brings it"
        )
