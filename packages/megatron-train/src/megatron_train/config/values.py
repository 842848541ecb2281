"""Values collected from defaults, a recipe, a YAML file and flags, each with its origin.

Precedence is defaults < recipe < file < flags. `Values` has only given values; the others keep the
defaults of their dataclasses.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from megatron_train.config.options import Option
from megatron_train.config.renamed_keys import RENAMED_KEYS


@dataclass(frozen=True)
class GivenValue:
    """A given value and its origin: a flag, ``FILE: section.key``, or a derivation."""

    value: Any
    origin: str


_ALTERNATIVES: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("training.train_iters",), ("training.train_samples",)),
    (("training.bf16",), ("training.fp16",), ("training.float64",)),
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
"""Groups of alternative settings; a run has those of only one alternative."""


@dataclass(frozen=True)
class Values:
    """The given values of a run by key, ``section.name``."""

    given: Mapping[str, GivenValue] = field(default_factory=dict)

    def updated(self, other: "Values") -> "Values":
        """Returns these values overridden by those of ``other``.

        If settings exclude each other, those in ``other`` replace those in ``self``.
        """
        remaining = dict(self.given)
        for alternatives in _ALTERNATIVES:
            given = [keys for keys in alternatives if any(key in other.given for key in keys)]
            replaced = (keys for keys in alternatives if given and keys not in given)
            for key in chain.from_iterable(replaced):
                remaining.pop(key, None)
        return Values({**remaining, **other.given})

    def with_derived(self, key: str, value: Any, origin: str) -> "Values":
        """Returns these values with ``value`` for ``key``, unless ``key`` is given."""
        return Values({key: GivenValue(value, origin), **self.given})

    def get(self, key: str) -> Any:
        """Returns the given value of ``key``; None if there is none."""
        return self.given[key].value if key in self.given else None

    def name_in_source(self, option: Option) -> str:
        """Returns the name that ``option`` was given by: its key in a file, or its flag.

        Returns the flag also if an alias set the option or it was not given.
        """
        given = self.given.get(option.key)
        if given is None:
            return option.flag
        key = given.origin.rpartition(": ")[2]
        return given.origin if RENAMED_KEYS.get(key, key) == option.key else option.flag

    def section(self, name: str) -> dict[str, Any]:
        """Returns the given values of the section ``name`` by field name."""
        prefix = name + "."
        return {
            key.removeprefix(prefix): given.value
            for key, given in self.given.items()
            if key.startswith(prefix)
        }

    def missing(self, options: tuple[Option, ...]) -> Iterator[Option]:
        """Yields the required options that are not given."""
        return (option for option in options if option.required and option.key not in self.given)
