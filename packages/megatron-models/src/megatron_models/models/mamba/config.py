"""The configuration of a model of Mamba-2 layers. Importing this module does not import torch."""

from dataclasses import dataclass, field
from typing import ClassVar, get_args

from megatron_models.components.dropout_sites import ATTENTION_OUTPUT
from megatron_models.components.embedding.spec import EmbeddingSpec, PositionEmbedding
from megatron_models.components.fields import flag
from megatron_models.components.layer import Layer, Sublayer, TrunkSpec
from megatron_models.components.mamba.config import MambaConfig
from megatron_models.components.mamba.spec import MambaSpec
from megatron_models.components.norm.spec import NormConfig, NormSpec
from megatron_models.errors import ConfigError
from megatron_models.models.causal_config import CausalConfig


@dataclass(frozen=True, kw_only=True)
class MambaModelConfig(MambaConfig, NormConfig, CausalConfig):
    """The shape of a decoder-only model of Mamba-2 layers, without training or parallelism.

    Each layer is a norm and a Mamba-2 layer beside the residual stream (Dao and Gu, 2024).
    ``mamba_num_heads`` may be left at 0.

    Raises:
        ConfigError: A value has the wrong type or range, or values do not fit together. The message
            names the fields and the values.
    """

    kind: ClassVar[str] = "mamba"

    position_embedding_type: PositionEmbedding = field(
        default="none",
        metadata=flag(
            "--position-embedding-type",
            "learned absolute positions added to the embedding, or none",
            choices=get_args(PositionEmbedding),
        ),
    )

    def _check(self) -> None:
        super()._check()
        if self.position_embedding_type not in ("none", "learned_absolute", "sinusoidal"):
            raise ConfigError(
                "{position_embedding_type} needs attention, which a model of kind 'mamba' does not "
                "have; use none",
                vars(self),
            )

    def trunks(self) -> dict[str, TrunkSpec]:
        """Returns one trunk of embedding, layers and final norm, without a prefix."""
        norm = self.component(NormSpec)
        layer: Layer = (Sublayer("mamba", self.component(MambaSpec), ATTENTION_OUTPUT, norm),)
        layers = dict.fromkeys(range(self.num_layers), layer)
        embedding = self.component(EmbeddingSpec, is_output_weight=self.ties_output)
        return {"": TrunkSpec(embedding, layers, norm, self.hidden_size)}
