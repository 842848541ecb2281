"""The record of a model that a checkpoint keeps: its kind, and its configuration with a version.

A checkpoint outlives the code that wrote it. The version says how its configuration is to be read:
each step of `MIGRATIONS` makes the fields of one version from those of the version before.
"""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from megatron_models.config import GPTConfig
from megatron_models.errors import ConfigError

KIND: Final = "gpt"
"""The kind of models that `GPTConfig` describes."""

VERSION: Final = 1
"""The version of configurations that are written now."""


def _unchanged(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """0 to 1: records got a version; the fields are the same."""
    return fields


MIGRATIONS: tuple[Callable[[Mapping[str, Any]], Mapping[str, Any]], ...] = (_unchanged,)
"""At each place, what makes fields of the next version from those of this version."""


class Record(Protocol):
    """What is read of a record; megatron-ckpt's ``ModelRecord`` has it."""

    @property
    def kind(self) -> str:
        """The kind of model."""

    @property
    def version(self) -> int:
        """The version of the configuration."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration as plain values."""


def record_of(config: GPTConfig) -> dict[str, Any]:
    """Return ``kind``, ``version`` and ``config`` of the record that a checkpoint keeps."""
    return {"kind": KIND, "version": VERSION, "config": config.to_dict()}


def config_of(record: Record) -> GPTConfig:
    """Return the configuration in a checkpoint's record, of whatever version.

    Raises:
        ConfigError: a model of another kind, a version that is newer than this package, or fields
            that are no configuration.
    """
    if record.kind != KIND:
        raise ConfigError(
            f"the record is of a model of kind {reprlib.repr(record.kind)}, not {KIND!r}"
        )
    return migrated(record.config, record.version)


def migrated(fields: Mapping[str, Any], version: int) -> GPTConfig:
    """Return the configuration that fields of a version stand for.

    Raises:
        ConfigError: a newer version, or fields that are no configuration.
    """
    if version > VERSION:
        raise ConfigError(
            f"the model configuration has version {version}, this megatron-models reads up to "
            f"{VERSION}: use a newer one"
        )
    for migrate in MIGRATIONS[version:]:
        fields = migrate(fields)
    return GPTConfig.from_dict(fields)
