"""Values collected from defaults, a YAML file and flags, each with its origin.

Precedence is defaults < file < flags. `Values` holds only what was given; what was not given keeps
the default of its dataclass.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_train.config.options import Option


@dataclass(frozen=True)
class Given:
    """A value somebody gave, and where: a flag, ``FILE: section.key``, or how it was derived."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Values:
    """The given values of a run by ``section.name``."""

    given: Mapping[str, Given] = field(default_factory=dict)

    def updated(self, other: "Values") -> "Values":
        """Return these values with those of ``other`` put over them."""
        return Values({**self.given, **other.given})

    def with_derived(self, key: str, value: Any, origin: str) -> "Values":
        """Return these values with ``key`` derived as ``value``, unless it was given."""
        return Values({key: Given(value, origin), **self.given})

    def get(self, key: str) -> Any:
        """Return the given value of ``key``, or None."""
        return self.given[key].value if key in self.given else None

    def section(self, name: str) -> dict[str, Any]:
        """Return the given values of one section by field name."""
        prefix = name + "."
        return {
            key.removeprefix(prefix): given.value
            for key, given in self.given.items()
            if key.startswith(prefix)
        }

    def missing(self, options: tuple[Option, ...]) -> Iterator[Option]:
        """Yield the required options that nobody gave."""
        return (option for option in options if option.required and option.key not in self.given)
