"""How a family spells the fields of a model's configuration, as data that both directions read.

A setting says how one of our fields stands in their ``config.json``. Import and export are derived
from it (`Family.config_from_hf`, `Family.config_to_hf`), so they cannot disagree.
"""

import dataclasses
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from megatron_models.errors import ConfigError

Values: TypeAlias = Mapping[str, Any]
"""Content of a ``config.json``."""

REQUIRED: Final = object()
"""In place of a value: the configuration is refused without the field."""


@dataclass(frozen=True)
class Theirs:
    """Their field ``name`` has our value.

    Attributes:
        name: of their field.
        absent: our value where the file lacks the field: what their code takes then.
        null: our value where the field is null.
    """

    name: str
    absent: Any = REQUIRED
    null: Any = REQUIRED

    @property
    def names(self) -> tuple[str, ...]:
        """Their fields."""
        return (self.name,)

    def read(self, title: str, ours: str, values: Values) -> dict[str, Any]:
        """Returns our field from theirs."""
        found = values.get(self.name, self.absent)
        found = self.null if found is None else found
        if found is REQUIRED:
            raise ConfigError(f"the {title} configuration lacks {self.name!r}")
        return {ours: found}

    def write(self, ours: str, config: object) -> dict[str, Any]:
        """Returns their field from ours."""
        return {self.name: getattr(config, ours)}


@dataclass(frozen=True)
class Spelled:
    """Their field ``name`` has another spelling of our value.

    Attributes:
        name: of their field.
        spellings: pairs of their value and ours; the first one of ours is written.
        absent: their value that a file without the field means.
    """

    name: str
    spellings: tuple[tuple[Any, Any], ...]
    absent: Any

    @property
    def names(self) -> tuple[str, ...]:
        """Their fields."""
        return (self.name,)

    def read(self, title: str, ours: str, values: Values) -> dict[str, Any]:
        """Returns our field from theirs."""
        given = values.get(self.name, self.absent)
        for spelling, value in self.spellings:
            if type(spelling) is type(given) and spelling == given:
                return {ours: value}
        raise unsupported(title, self.name, given, [spelling for spelling, _ in self.spellings])

    def write(self, ours: str, config: object) -> dict[str, Any]:
        """Returns their field from ours."""
        found = getattr(config, ours)
        for spelling, value in self.spellings:
            if value == found:
                return {self.name: spelling}
        known = list(dict.fromkeys(value for _, value in self.spellings))
        raise inexpressible(ours, " or ".join(map(repr, known)), found)


@dataclass(frozen=True)
class Fixed:
    """All models of the family have this value; their file does not say it."""

    value: Any
    names: tuple[str, ...] = ()

    def read(self, title: str, ours: str, values: Values) -> dict[str, Any]:
        """Returns our field."""
        return {ours: self.value}

    def write(self, ours: str, config: object) -> dict[str, Any]:
        """Refuses another value."""
        if getattr(config, ours) != self.value:
            raise inexpressible(ours, repr(self.value), getattr(config, ours))
        return {}


@dataclass(frozen=True)
class Filled:
    """All models of the family have the value that follows from other fields, if left at 0."""

    names: tuple[str, ...] = ()

    def read(self, title: str, ours: str, values: Values) -> dict[str, Any]:
        """Returns our field, to be filled in."""
        return {ours: 0}

    def write(self, ours: str, config: Any) -> dict[str, Any]:
        """Refuses another value."""
        wanted = getattr(dataclasses.replace(config, **{ours: 0}), ours)
        if getattr(config, ours) != wanted:
            raise inexpressible(ours, repr(wanted), getattr(config, ours))
        return {}


@dataclass(frozen=True)
class Unused:
    """No model of the family uses the field, so any value of it is exported as nothing.

    Attributes:
        source: their field that it is read from; None leaves the default.
    """

    source: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Their fields."""
        return () if self.source is None else (self.source,)

    def read(self, title: str, ours: str, values: Values) -> dict[str, Any]:
        """Returns our field."""
        found = values.get(self.source) if self.source is not None else None
        return {} if found is None else {ours: found}

    def write(self, ours: str, config: object) -> dict[str, Any]:
        """Returns nothing."""
        return {}


Setting: TypeAlias = Theirs | Spelled | Fixed | Filled | Unused


@dataclass(frozen=True)
class Odd:
    """Fields of ours and theirs that no `Setting` relates: a function for each direction.

    Attributes:
        ours: our fields that it writes from.
        names: their fields that it reads.
        read: makes ours of the family's title and their values; raises ConfigError.
        write: makes theirs of a configuration; raises InexpressibleError.
    """

    ours: tuple[str, ...]
    names: tuple[str, ...]
    read: Callable[[str, Values], Mapping[str, Any]]
    write: Callable[[Any], Mapping[str, Any]]


class InexpressibleError(ConfigError):
    """A field of ours has a value that no model of a family has."""


def inexpressible(name: str, wanted: str, found: object) -> InexpressibleError:
    """Returns the error for a field of ours; ``wanted`` is what it has to be, in words."""
    return InexpressibleError(f"{name} = {wanted}, this one has {reprlib.repr(found)}")


def unsupported(title: str, name: str, found: object, known: Sequence[Any]) -> ConfigError:
    """Returns the error for a field of theirs whose value is not among the known ones."""
    return ConfigError(
        f"{title} models with {name} = {reprlib.repr(found)} are not supported, only "
        + " or ".join(map(repr, known))
    )


def default_of(entry: "dataclasses.Field[Any]") -> Any:
    """Returns the default of a field; `REQUIRED` where it has none."""
    if entry.default is not dataclasses.MISSING:
        return entry.default
    if entry.default_factory is not dataclasses.MISSING:
        return entry.default_factory()
    return REQUIRED
