"""The entry of GPT in the group ``megatron.models``."""

from collections.abc import Mapping
from typing import Any

from megatron_models.kinds import ModelKind
from megatron_models.models.gpt.config import GPTConfig


def _unversioned(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Migrates version 0 to 1: records got a version, and the fields are the same."""
    return fields


KIND = ModelKind(
    name="gpt",
    config=GPTConfig,
    stages="megatron_models.models.gpt.model:gpt_chunks",
    default_task="gpt",
    summary="a decoder-only language model",
    supports_decoding=True,
    migrations=(_unversioned,),
)
