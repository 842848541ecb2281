"""Lookup of model families that installed distributions register as entry points."""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol

from megatron_ckpt.errors import CheckpointError, did_you_mean, shorten

if TYPE_CHECKING:  # the operations import torch, which the configuration does not need
    from megatron_ckpt.ops.ignored import Ignored
    from megatron_ckpt.ops.rows import RowData
    from megatron_ckpt.store.manifest import ModelRecord

GROUP = "megatron.families"
_NEAREST = 3  # families named in the error if none fits


class Family(Protocol):
    """A family as conversion sees it; ``megatron_models.families`` implements this protocol."""

    @property
    def name(self) -> str:
        """The name of the family, as stored in checkpoints."""

    @property
    def kind(self) -> str:
        """The kind of the models that the family describes, as stored in checkpoints."""

    @property
    def architectures(self) -> Sequence[str]:
        """The values of ``architectures`` in a ``config.json`` of the family."""

    @property
    def ignored(self) -> "Sequence[Ignored]":
        """Foreign tensors that may exist without a row, with the check of their content."""

    @property
    def prefix(self) -> str:
        """The prefix of foreign names that files of the headless model leave out."""

    @property
    def former_endings(self) -> Mapping[str, str]:
        """Endings of foreign names in older files, and the present ones."""

    @property
    def defers_to(self) -> Sequence[str]:
        """The names of families that are preferred for a model that they can express, too."""

    @property
    def if_absent(self) -> Mapping[str, Mapping[str, Any]]:
        """Patterns of foreign tensors, and the settings that hold for a file without them."""

    @property
    def config_from_hf(self) -> Callable[[Mapping[str, Any]], Any]:
        """A function that returns the model configuration for a ``config.json``."""

    @property
    def config_to_hf(self) -> Callable[[Any], Mapping[str, Any]]:
        """A function that returns the content of a ``config.json`` for a model configuration."""

    @property
    def config_version(self) -> int:
        """The version of the JSON that `to_json` of a configuration returns."""

    @property
    def config_from_record(self) -> Callable[[Mapping[str, Any], int], Any]:
        """A function that returns a model configuration from its JSON and the JSON's version."""

    @property
    def differences(self) -> Callable[[Any], Sequence[str]]:
        """A function that returns what in a model configuration the family cannot express."""

    def active_rows(self, config: Any) -> "Sequence[RowData]":
        """Returns the rows of the parameters that a model with this configuration has."""


def find_family(name: str) -> Family:
    """Returns the family registered under ``name``.

    Raises:
        CheckpointError: No such family is installed.
    """
    known = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in known:
        raise CheckpointError(
            f"no family {shorten(repr(name))}{did_you_mean(name, known)}; {_installed(known)}"
        )
    family: Family = known[name].load()
    return family


def detect_family(architectures: Sequence[str]) -> Family:
    """Returns the family that reads one of these architectures.

    Raises:
        CheckpointError: No installed family does, or several do.
    """
    known = {entry.name: entry for entry in entry_points(group=GROUP)}
    loaded: dict[str, Family] = {name: known[name].load() for name in sorted(known)}
    found = [name for name, each in loaded.items() if {*architectures} & {*each.architectures}]
    if len(found) == 1:
        return loaded[found[0]]
    wanted = shorten(" or ".join(architectures)) or "a config.json without architectures"
    if found:
        raise CheckpointError(
            f"the families {', '.join(found)} all read {wanted}; choose one with --family"
        )
    raise CheckpointError(f"no family reads {wanted}; {_installed(known)}")


def find_compatible_family(record: "ModelRecord") -> Family:
    """Returns the only installed family that can express the model of a record.

    A family that defers to another one is left out if that one can express the model.

    Raises:
        CheckpointError: No family can; the message names what the nearest ones cannot express. Or
            several can; the message names them.
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
    able = [name for name, differences in found.items() if not differences]
    fitting = [name for name in able if not {*families[name].defers_to} & {*able}]
    if len(fitting) > 1:
        raise CheckpointError(
            f"the families {', '.join(fitting)} can all express the model; choose one with --family"
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
        return "no family is installed; install megatron-models"
    return f"installed are {', '.join(sorted(known))}"
