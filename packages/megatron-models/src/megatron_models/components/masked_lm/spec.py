"""The head of masked language models as plain data. Importing this module does not import torch."""

from dataclasses import dataclass
from typing import Final

from megatron_parallel import Sharding
from megatron_parallel.sharding import ZEROS, Init
from megatron_parallel.tensor_parallel.specs import ReplicatedSpec

from megatron_models.components.embedding.spec import EmbeddingConfig
from megatron_models.components.head import Head
from megatron_models.components.mixer import (
    LayerPass,
    Parameters,
    ParameterSpec,
    parameters_of,
    prefixed,
)
from megatron_models.components.mlp.spec import GATES, MLPConfig
from megatron_models.components.norm.spec import NormConfig, NormSpec

HEAD: Final = "lm_head"
"""Prefix of the parameters."""


@dataclass(frozen=True)
class MaskedLMSpec(NormConfig, MLPConfig, EmbeddingConfig, Head):
    """``norm(activation(dense(x)))``, which the output matrix reads, and the bias of the logits.

    The activation is that of the feed-forward layers, or of their gates (Devlin et al. 2019).
    """

    @property
    def dense(self) -> ReplicatedSpec:
        """The linear layer ``[h, h]``, which every tensor-parallel rank holds."""
        return ReplicatedSpec(
            self.hidden_size, self.hidden_size, init=Init(scale=self.init_method_std)
        )

    @property
    def norm(self) -> NormSpec:
        """The norm before the output matrix."""
        return self.component(NormSpec)

    @property
    def ungated(self) -> MLPConfig:
        """The configuration of the activation."""
        activation = GATES.get(self.activation, self.activation)
        return MLPConfig(
            num_layers=self.num_layers, hidden_size=self.hidden_size, activation=activation
        )

    def bias(self) -> dict[str, Sharding]:
        """Returns the sharding of the bias of the logits ``[v]``, cut like the output matrix."""
        return {"bias": Sharding((self.vocab_size,), "tp", 0, self.padded_vocab_size, init=ZEROS)}

    def parameters(self, sequence_parallel: bool = False) -> Parameters:
        """Returns the parameters of linear layer, norm and bias."""
        return {
            **{name: ParameterSpec(sharding) for name, sharding in self.bias().items()},
            **prefixed("dense", parameters_of(self.dense, sequence_parallel)),
            **prefixed("norm", self.norm.parameters(sequence_parallel)),
        }

    def activation_bytes(self, layer_pass: LayerPass) -> int:
        """Returns the bytes of the activation, of the norm, and of the output matrix's input."""
        width = layer_pass.stream_tokens * self.hidden_size * layer_pass.saved_bytes.activation
        saved = width * (1 + self.ungated.activation_saves)
        return saved + self.norm.activation_bytes(layer_pass)
