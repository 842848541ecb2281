"""Families of models that other distributions describe, found without importing them by name."""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol

from megatron_ckpt.errors import CheckpointError, did_you_mean, shorten

if TYPE_CHECKING:  # the operations take torch, and a family's configuration does not
    from megatron_ckpt.ops.ignored import Ignored
    from megatron_ckpt.ops.rows import RowData
    from megatron_ckpt.store.manifest import ModelRecord

GROUP = "megatron.families"
_NEAREST = 3  # families named where none fits


class Family(Protocol):
    """What conversion needs to know of a family; ``megatron_models.families`` has such objects."""

    @property
    def name(self) -> str:
        """The family's name, as stored in checkpoints."""

    @property
    def kind(self) -> str:
        """The kind of models that it describes, as stored in checkpoints."""

    @property
    def architectures(self) -> Sequence[str]:
        """Values of ``architectures`` in a ``config.json`` of the family."""

    @property
    def ignored(self) -> "Sequence[Ignored]":
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
    def config_version(self) -> int:
        """The version of what `to_json` of a configuration gives."""

    @property
    def config_from_record(self) -> Callable[[Mapping[str, Any], int], Any]:
        """Make a model configuration of its own JSON and the version of that."""

    @property
    def differences(self) -> Callable[[Any], Sequence[str]]:
        """Say what of a model configuration the family cannot express; nothing if it can."""

    def active_rows(self, config: Any) -> "Sequence[RowData]":
        """Rows of the parameters that a model of this configuration has."""


def find_family(name: str) -> Family:
    """Returns the family registered under ``name``."""
    known = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in known:
        raise CheckpointError(
            f"no family {shorten(repr(name))}{did_you_mean(name, known)}; {_installed(known)}"
        )
    family: Family = known[name].load()
    return family


def detect_family(architectures: Sequence[str]) -> Family:
    """Returns the family that has one of these architectures.

    Raises:
        CheckpointError: there is none, or there are several.
    """
    known = {entry.name: entry for entry in entry_points(group=GROUP)}
    loaded: dict[str, Family] = {name: known[name].load() for name in sorted(known)}
    found = [name for name, each in loaded.items() if {*architectures} & {*each.architectures}]
    if len(found) == 1:
        return loaded[found[0]]
    wanted = shorten(" or ".join(architectures)) or "a config.json without architectures"
    if found:
        raise CheckpointError(
            f"the families {', '.join(found)} all read {wanted}: choose one by --family"
        )
    raise CheckpointError(f"no family reads {wanted}; {_installed(known)}")


def find_compatible_family(record: "ModelRecord") -> Family:
    """Returns the one family of the record's kind that can express its model.

    Raises:
        CheckpointError: there is none, with what stands in the way of the nearest ones; or there
            are several, with their names.
    """
    known = {entry.name: entry for entry in entry_points(group=GROUP)}
    loaded: dict[str, Family] = {name: known[name].load() for name in sorted(known)}
    families = {name: each for name, each in loaded.items() if each.kind == record.kind}
    if not families:
        raise CheckpointError(
            f"no installed family describes models of kind {shorten(repr(record.kind))}; "
            f"{_installed(known)}"
        )
    found: dict[str, Sequence[str]] = {}
    for name, each in families.items():
        config = each.config_from_record(record.config, record.version)
        found[name] = each.differences(config)
    fitting = [name for name, differences in found.items() if not differences]
    if len(fitting) > 1:
        raise CheckpointError(
            f"the families {', '.join(fitting)} can all express the model: choose one by --family"
        )
    if not fitting:
        nearest = sorted(found, key=lambda name: len(found[name]))[:_NEAREST]
        reasons = "; ".join(_reason(name, found[name]) for name in nearest)
        raise CheckpointError(f"no installed family can express the model: {reasons}")
    return families[fitting[0]]


def _reason(name: str, differences: Sequence[str]) -> str:
    more = f" and {len(differences) - 1} more" if len(differences) > 1 else ""
    return f"{name} has {shorten(differences[0])}{more}"


def _installed(known: Mapping[str, object]) -> str:
    if not known:
        return "none is installed: install megatron-models"
    return f"installed are {', '.join(sorted(known))}"
