"""The configuration of models of one trunk, of any kind. Importing it does not import torch."""

from dataclasses import dataclass

from megatron_models.components.embedding.spec import PositionConfig
from megatron_models.models.model_config import ModelConfig


@dataclass(frozen=True)
class TrunkConfig(ModelConfig, PositionConfig):
    """The configuration of a model of one trunk (`megatron_models.models.trunk_model`)."""
