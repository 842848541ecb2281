"""Families of models that other distributions describe, found without importing them by name."""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

from megatron_ckpt.errors import CheckpointError, brief, did_you_mean
from megatron_ckpt.ops.ignored import Ignored
from megatron_ckpt.ops.rows import RowData

GROUP = "megatron.families"


class Family(Protocol):
    """What conversion needs to know of a family; ``megatron_models.families`` has such objects."""

    @property
    def name(self) -> str:
        """The family's name, as stored in checkpoints."""

    @property
    def architectures(self) -> Sequence[str]:
        """Values of ``architectures`` in a ``config.json`` of the family."""

    @property
    def ignored(self) -> Sequence[Ignored]:
        """Foreign tensors that may be there without a row, with what they must hold."""

    @property
    def prefix(self) -> str:
        """Start of the foreign names that files of the headless model leave out."""

    @property
    def config_from_hf(self) -> Callable[[Mapping[str, Any]], Any]:
        """Make a model configuration of a ``config.json``."""

    @property
    def config_to_hf(self) -> Callable[[Any], Mapping[str, Any]]:
        """Make the content of a ``config.json`` of a model configuration."""

    @property
    def config_from_json(self) -> Callable[[Mapping[str, Any]], Any]:
        """Make a model configuration of its own JSON (`to_json` of the configuration undoes it)."""

    def active_rows(self, config: Any) -> Sequence[RowData]:
        """Rows of the parameters that a model of this configuration has."""


def find_family(name: str) -> Family:
    """Return the family registered under ``name``."""
    known = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in known:
        raise CheckpointError(
            f"no family {brief(repr(name))}{did_you_mean(name, known)}; {_installed(known)}"
        )
    family: Family = known[name].load()
    return family


def detect_family(architectures: Sequence[str]) -> Family:
    """Return the family that has one of these architectures."""
    known = {entry.name: entry for entry in entry_points(group=GROUP)}
    for entry in known.values():
        family: Family = entry.load()
        if set(architectures) & set(family.architectures):
            return family
    wanted = brief(" or ".join(architectures)) or "a config.json without architectures"
    raise CheckpointError(f"no family reads {wanted}; {_installed(known)}")


def _installed(known: Mapping[str, object]) -> str:
    if not known:
        return "none is installed: install megatron-models"
    return f"installed are {', '.join(sorted(known))}"
