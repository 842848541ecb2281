"""The configuration of a GPT model: a frozen dataclass of plain values, checked when created.

Importing this module does not import torch.
"""

from dataclasses import dataclass
from typing import ClassVar

from megatron_models.components.embedding.spec import EmbeddingSpec
from megatron_models.components.layer import TrunkSpec
from megatron_models.components.multi_token.spec import MultiTokenSpec
from megatron_models.components.norm.spec import NormSpec
from megatron_models.models.gpt.fields import GPTFields
from megatron_models.models.gpt.layers import (
    first_alike,
    gpt_layer,
    gpt_layers,
    multi_token_layers,
)


@dataclass(frozen=True)
class GPTConfig(GPTFields):
    """The shape of a decoder-only transformer, without training or parallelism.

    Its fields are those of its components. ``num_query_groups``,
    ``kv_channels`` and ``ffn_hidden_size`` may be left at 0. They are derived when the
    configuration is created, so that a reader always finds the values in use.

    Raises:
        ConfigError: A value has the wrong type or range, or values do not fit together. The message
            names the fields and the values.
    """

    kind: ClassVar[str] = "gpt"

    def _check(self) -> None:
        super()._check()
        for number in sorted(set(first_alike(self))):
            gpt_layer(self, number)

    def trunks(self) -> dict[str, TrunkSpec]:
        """Returns one trunk of embedding, layers and final norm, without a prefix."""
        passes = 1 + self.mtp_num_layers
        embedding = self.component(
            EmbeddingSpec, is_output_weight=self.ties_output, output_passes=passes
        )
        norm = self.component(NormSpec) if self.has_final_norm else None
        return {"": TrunkSpec(embedding, gpt_layers(self), norm, self.hidden_size)}

    def multi_token(self) -> tuple[MultiTokenSpec, ...]:
        """Returns the depths of multi-token prediction."""
        return multi_token_layers(self)

    def width_ratios(self) -> dict[str, tuple[float, float]]:
        """Returns the ratios of maximal update parametrization."""
        return self.ratios_of(self.parameters())
