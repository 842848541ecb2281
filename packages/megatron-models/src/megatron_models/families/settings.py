"""How a family expresses the fields of a model's configuration, as data for both directions.

A setting relates one of our fields to the fields of a ``config.json``. Import and export are both
derived from it (`Family.config_from_hf`, `Family.config_to_hf`), so they cannot disagree.
"""

import dataclasses
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from megatron_models.errors import ConfigError

HFConfig: TypeAlias = Mapping[str, Any]
"""Content of a ``config.json``."""

REQUIRED: Final = object()
"""Stands for a missing value: a configuration without the field is refused."""


@dataclass(frozen=True)
class Mapped:
    """A field of the ``config.json`` that has our value.

    Attributes:
        name: The name of their field.
        absent: Our value if the file lacks the field, which is the default of their code.
        null: Our value if the field is null.
    """

    name: str
    absent: Any = REQUIRED
    null: Any = REQUIRED

    @property
    def hf_fields(self) -> tuple[str, ...]:
        """The fields of the ``config.json`` that it reads."""
        return (self.name,)

    def read(self, title: str, field: str, hf_config: HFConfig) -> dict[str, Any]:
        """Returns our field."""
        found = hf_config.get(self.name, self.absent)
        found = self.null if found is None else found
        if found is REQUIRED:
            raise ConfigError(f"the {title} configuration lacks {self.name!r}")
        return {field: found}

    def write(self, field: str, config: object) -> dict[str, Any]:
        """Returns their field."""
        return {self.name: getattr(config, field)}


@dataclass(frozen=True)
class Translated:
    """A field of the ``config.json`` that spells our value differently.

    Attributes:
        name: The name of their field.
        pairs: Pairs of their value and ours. Export writes the first pair with our value.
        absent: Their value if the file lacks the field.
    """

    name: str
    pairs: tuple[tuple[Any, Any], ...]
    absent: Any

    @property
    def hf_fields(self) -> tuple[str, ...]:
        """The fields of the ``config.json`` that it reads."""
        return (self.name,)

    def read(self, title: str, field: str, hf_config: HFConfig) -> dict[str, Any]:
        """Returns our field."""
        found = hf_config.get(self.name, self.absent)
        for hf_value, value in self.pairs:
            if type(hf_value) is type(found) and hf_value == found:
                return {field: value}
        raise unsupported_hf_field(
            title, self.name, found, [hf_value for hf_value, _ in self.pairs]
        )

    def write(self, field: str, config: object) -> dict[str, Any]:
        """Returns their field."""
        found = getattr(config, field)
        for hf_value, value in self.pairs:
            if value == found:
                return {self.name: hf_value}
        known = list(dict.fromkeys(value for _, value in self.pairs))
        raise unsupported_field(field, " or ".join(map(repr, known)), found)


@dataclass(frozen=True)
class Constant:
    """A field of ours with one value in all models of the family, absent from their file."""

    value: Any
    hf_fields: tuple[str, ...] = ()

    def read(self, title: str, field: str, hf_config: HFConfig) -> dict[str, Any]:
        """Returns our field."""
        return {field: self.value}

    def write(self, field: str, config: object) -> dict[str, Any]:
        """Returns nothing, or refuses another value."""
        if getattr(config, field) != self.value:
            raise unsupported_field(field, repr(self.value), getattr(config, field))
        return {}


@dataclass(frozen=True)
class Derived:
    """A field of ours that always has the value derived from other fields when left at 0."""

    hf_fields: tuple[str, ...] = ()

    def read(self, title: str, field: str, hf_config: HFConfig) -> dict[str, Any]:
        """Returns our field as 0."""
        return {field: 0}

    def write(self, field: str, config: Any) -> dict[str, Any]:
        """Returns nothing, or refuses another value."""
        expected = getattr(dataclasses.replace(config, **{field: 0}), field)
        if getattr(config, field) != expected:
            raise unsupported_field(field, repr(expected), getattr(config, field))
        return {}


@dataclass(frozen=True)
class Unused:
    """A field of ours that no model of the family uses; export ignores its value.

    Attributes:
        source: Their field from which it is read. None leaves the default.
    """

    source: str | None = None

    @property
    def hf_fields(self) -> tuple[str, ...]:
        """The fields of the ``config.json`` that it reads."""
        return () if self.source is None else (self.source,)

    def read(self, title: str, field: str, hf_config: HFConfig) -> dict[str, Any]:
        """Returns our field."""
        found = hf_config.get(self.source) if self.source is not None else None
        return {} if found is None else {field: found}

    def write(self, field: str, config: object) -> dict[str, Any]:
        """Returns nothing."""
        return {}


Setting: TypeAlias = Mapped | Translated | Constant | Derived | Unused


@dataclass(frozen=True)
class Custom:
    """Several fields that no `Setting` relates: a function for each direction.

    Attributes:
        fields: Our fields that ``write`` reads.
        hf_fields: Their fields that ``read`` reads.
        read: Maps the family's title and a ``config.json`` to our fields. Raises ConfigError.
        write: Maps a configuration to their fields. Raises UnsupportedFieldError.
    """

    fields: tuple[str, ...]
    hf_fields: tuple[str, ...]
    read: Callable[[str, HFConfig], Mapping[str, Any]]
    write: Callable[[Any], Mapping[str, Any]]


class UnsupportedFieldError(ConfigError):
    """Raised if a field of ours has a value that no model of a family has."""


def unsupported_field(name: str, expected: str, found: object) -> UnsupportedFieldError:
    """Returns the error for a field of ours; ``expected`` describes the allowed values."""
    return UnsupportedFieldError(f"{name} = {expected}, this one has {reprlib.repr(found)}")


def unsupported_hf_field(title: str, name: str, found: object, known: Sequence[Any]) -> ConfigError:
    """Returns the error for a field of theirs with an unknown value."""
    return ConfigError(
        f"{title} models with {name} = {reprlib.repr(found)} are not supported, only "
        + " or ".join(map(repr, known))
    )


def default_of(entry: "dataclasses.Field[Any]") -> Any:
    """Returns the default of a field, or `REQUIRED`."""
    if entry.default is not dataclasses.MISSING:
        return entry.default
    if entry.default_factory is not dataclasses.MISSING:
        return entry.default_factory()
    return REQUIRED
