"""Values collected from defaults, a recipe, a YAML file and flags, each with its origin.

Precedence is defaults < recipe < file < flags. `Values` holds only what was given; what was not
given keeps the default of its dataclass.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_train.config.options import Option
from megatron_train.config.renamed_keys import RENAMED_KEYS


@dataclass(frozen=True)
class GivenValue:
    """A value somebody gave, and where: a flag, ``FILE: section.key``, or how it was derived."""

    value: Any
    origin: str


_ALTERNATIVES: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("training.train_iters",), ("training.train_samples",)),
    (("training.bf16",), ("training.float64",)),
    (
        ("schedule.lr_warmup_iters",),
        ("schedule.lr_warmup_samples",),
        ("schedule.lr_warmup_fraction",),
    ),
    (
        ("data.data_path",),
        ("data.train_data_path", "data.valid_data_path", "data.test_data_path"),
        ("data.mock_data",),
    ),
    (("data.tokenizer_model",), ("data.vocab_file", "data.merge_file")),
)
"""Groups of settings of which a run has those of one side only."""


@dataclass(frozen=True)
class Values:
    """The given values of a run by ``section.name``."""

    given: Mapping[str, GivenValue] = field(default_factory=dict)

    def updated(self, other: "Values") -> "Values":
        """Returns these values with those of ``other`` put over them.

        Of settings that exclude each other, what ``other`` gives displaces what was given here.
        """
        kept = dict(self.given)
        for sides in _ALTERNATIVES:
            chosen = [side for side in sides if any(key in other.given for key in side)]
            displaced = (key for side in sides if chosen and side not in chosen for key in side)
            for key in displaced:
                kept.pop(key, None)
        return Values({**kept, **other.given})

    def with_derived(self, key: str, value: Any, origin: str) -> "Values":
        """Returns these values with ``key`` derived as ``value``, unless it was given."""
        return Values({key: GivenValue(value, origin), **self.given})

    def get(self, key: str) -> Any:
        """Returns the given value of ``key``, or None."""
        return self.given[key].value if key in self.given else None

    def name_in_source(self, option: Option) -> str:
        """Returns what ``option`` was called where it was given: its place in a file, or its flag.

        That is its flag also where an alias set it, or nobody did.
        """
        given = self.given.get(option.key)
        if given is None:
            return option.flag
        place = given.origin.rpartition(": ")[2]
        return given.origin if RENAMED_KEYS.get(place, place) == option.key else option.flag

    def section(self, name: str) -> dict[str, Any]:
        """Returns the given values of one section by field name."""
        prefix = name + "."
        return {
            key.removeprefix(prefix): given.value
            for key, given in self.given.items()
            if key.startswith(prefix)
        }

    def missing(self, options: tuple[Option, ...]) -> Iterator[Option]:
        """Yields the required options that nobody gave."""
        return (option for option in options if option.required and option.key not in self.given)
