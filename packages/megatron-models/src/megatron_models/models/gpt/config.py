"""The configuration of a GPT model: a frozen dataclass of plain values, checked when created.

Importing this module does not import torch. Field names are the flags of Megatron-LM with ``_`` for
``-``, and defaults are Megatron-LM's, so that its recipes have the same meaning here.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from megatron_models.components.attention.spec import AttentionSpec
from megatron_models.components.dropout_sites import ATTENTION_OUTPUT, MLP_OUTPUT
from megatron_models.components.embedding.spec import EmbeddingConfig, EmbeddingSpec
from megatron_models.components.fields import flag
from megatron_models.components.layer import Sublayer, TrunkSpec
from megatron_models.components.moe.config import MoEConfig
from megatron_models.components.moe.spec import feed_forward
from megatron_models.components.norm.spec import NormConfig, NormSpec
from megatron_models.models.causal_config import CausalConfig


@dataclass(frozen=True, kw_only=True)
class GPTConfig(MoEConfig, NormConfig, CausalConfig):
    """The shape of a decoder-only transformer, without training or parallelism.

    Its fields are those of its components, plus the tying of weights. ``num_query_groups``,
    ``kv_channels`` and ``ffn_hidden_size`` may be left at 0. They are derived when the
    configuration is created, so that a reader always finds the values in use.

    Raises:
        ConfigError: A value has the wrong type or range, or values do not fit together. The message
            names the fields and the values.
    """

    kind: ClassVar[str] = "gpt"

    untie_embeddings_and_output_weights: bool = field(
        default=False,
        metadata=flag(
            "--untie-embeddings-and-output-weights",
            "separate output matrix instead of the token embedding",
        ),
    )

    def trunks(self) -> dict[str, TrunkSpec]:
        """Returns one trunk of embedding, layers and final norm, without a prefix."""
        norm, tied = self.component(NormSpec), not self.untie_embeddings_and_output_weights
        attention = Sublayer("attention", self.component(AttentionSpec), ATTENTION_OUTPUT, norm)
        mlp = {
            experts: Sublayer("mlp", feed_forward(self, experts), MLP_OUTPUT, norm)
            for experts in dict.fromkeys(self.moe_layers)
        }
        layers = {number: (attention, mlp[has]) for number, has in enumerate(self.moe_layers)}
        embedding = self.component(EmbeddingSpec, is_output_weight=tied)
        return {"": TrunkSpec(embedding, layers, norm, self.hidden_size)}

    def output(self) -> EmbeddingConfig | None:
        """Returns the configuration itself if the output matrix is untied, else None."""
        return self if self.untie_embeddings_and_output_weights else None
