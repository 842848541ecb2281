"""The record of a model that a checkpoint keeps: its kind, and its configuration with a version.

A checkpoint outlives the code that wrote it. The version says how its configuration is to be read
(`ModelKind.migrations`).
"""

from collections.abc import Mapping
from typing import Any, Protocol

from megatron_models.kinds import find_kind
from megatron_models.models.model_config import ModelConfig


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


def record_of(config: ModelConfig) -> dict[str, Any]:
    """Returns ``kind``, ``version`` and ``config`` of the record that a checkpoint keeps."""
    version = find_kind(config.kind).version
    return {"kind": config.kind, "version": version, "config": config.to_dict()}


def config_of(record: Record) -> ModelConfig:
    """Returns the configuration in a checkpoint's record, of whatever version.

    Raises:
        ConfigError: a kind that is not installed, a version that is newer than the kind's, or
            fields that are no configuration.
    """
    return find_kind(record.kind).read(record.config, record.version)
