"""The record of a model in a checkpoint: its kind, and its configuration with a version.

The version selects the migrations that read the configuration (`ModelKind.migrations`), so that
newer code reads older checkpoints.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from megatron_models.kinds import find_kind
from megatron_models.models.model_config import ModelConfig


class Record(Protocol):
    """The fields of a record that are read; megatron-ckpt's ``ModelRecord`` has them."""

    @property
    def kind(self) -> str:
        """Kind of the model."""

    @property
    def version(self) -> int:
        """Version of the configuration."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration as plain values."""


def record_of(config: ModelConfig) -> dict[str, Any]:
    """Returns ``kind``, ``version`` and ``config`` of a checkpoint's record."""
    version = find_kind(config.kind).version
    return {"kind": config.kind, "version": version, "config": config.to_dict()}


def config_of(record: Record) -> ModelConfig:
    """Returns the configuration in a checkpoint's record, of any version.

    Raises:
        ConfigError: The kind is not installed, the version is newer than the kind's, or the fields
            are no valid configuration.
    """
    return find_kind(record.kind).read(record.config, record.version)
