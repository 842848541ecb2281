"""The configuration of models for decoding, of any kind. Importing it does not import torch."""

from dataclasses import dataclass

from megatron_models.components.attention.config import AttentionConfig
from megatron_models.components.embedding.spec import OutputConfig
from megatron_models.models.trunk_config import TrunkConfig


@dataclass(frozen=True, kw_only=True)
class CausalConfig(TrunkConfig, AttentionConfig, OutputConfig):
    """The configuration of a model with causal attention over one vocabulary."""
