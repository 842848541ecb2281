"""The configuration of an encoder-decoder, whose two sides differ only in depth.

Importing this module does not import torch.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Final

from megatron_models.components.attention.config import AttentionConfig
from megatron_models.components.attention.span import EVERYTHING
from megatron_models.components.attention.spec import AttentionSpec, CrossAttentionSpec
from megatron_models.components.dropout_sites import (
    ATTENTION_OUTPUT,
    CROSS_ATTENTION_OUTPUT,
    DECODER_EMBEDDING,
    EMBEDDING,
    MLP_OUTPUT,
)
from megatron_models.components.embedding.spec import EmbeddingConfig, EmbeddingSpec, OutputConfig
from megatron_models.components.fields import flag
from megatron_models.components.layer import Layer, Sublayer, TrunkSpec
from megatron_models.components.mlp.spec import MLPConfig, MLPSpec
from megatron_models.components.norm.spec import NormConfig, NormSpec
from megatron_models.errors import ConfigError
from megatron_models.models.model_config import ModelConfig

_UNSUPPORTED: Final = (
    "attention_output_gate",
    "qk_layernorm",
    "qk_l2_norm",
    "attn_temperature_scale",
    "has_alibi",
)
"""Fields of self-attention that cross-attention does not have."""


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(ModelConfig, MLPConfig, NormConfig, AttentionConfig, OutputConfig):
    """The shape of an encoder and a decoder, which differ only in depth.

    ``num_layers`` is the depth of the decoder. The embeddings of encoder and decoder and the output
    matrix are three weights: they are on three pipeline stages, and a weight can be tied over two.

    Raises:
        ConfigError: A value has the wrong type or range, values do not fit together, or an option
            of attention is not supported (sinks).
    """

    kind: ClassVar[str] = "encoder_decoder"

    encoder_num_layers: int = field(
        metadata=flag(
            "--encoder-num-layers", "number of encoder layers", positive=True, maximum=100_000
        )
    )

    def _check(self) -> None:
        super()._check()
        if self.softmax_type != "vanilla":
            raise ConfigError(
                "an encoder-decoder has no attention sinks: {softmax_type}", vars(self)
            )
        for name in _UNSUPPORTED:
            if getattr(self, name):
                raise ConfigError(
                    f"an encoder-decoder does not support {{{name}:name}}; leave it out", vars(self)
                )
        if self.span != EVERYTHING:
            raise ConfigError(
                "an encoder-decoder has no windows: {sliding_window}, {attention_chunk_size}",
                vars(self),
            )

    def trunks(self) -> dict[str, TrunkSpec]:
        """Returns the encoder and the decoder.

        Initial weights of each side depend on its own depth. Dropout numbers the layers of both
        sides consecutively, so that no two layers have the same mask.
        """
        above = self.encoder_num_layers
        encoder = self._trunk(above, (), 0, EMBEDDING)
        return {
            "encoder": encoder,
            "decoder": self._trunk(self.num_layers, self._crossing(), above, DECODER_EMBEDDING),
        }

    def _crossing(self) -> Layer:
        norm, mixer = self.component(NormSpec), self.component(CrossAttentionSpec)
        return (Sublayer("cross_attention", mixer, CROSS_ATTENTION_OUTPUT, norm),)

    def _trunk(self, depth: int, between: Layer, layer_offset: int, site: int) -> TrunkSpec:
        """Returns one side: self-attention, sublayers ``between``, feed-forward layer."""
        norm = self.component(NormSpec, num_layers=depth)
        attention = self.component(AttentionSpec, num_layers=depth)
        layer = (
            Sublayer("attention", attention, ATTENTION_OUTPUT, norm),
            *between,
            Sublayer("mlp", self.component(MLPSpec, num_layers=depth), MLP_OUTPUT, norm),
        )
        return TrunkSpec(
            self.component(EmbeddingSpec, num_layers=depth),
            dict.fromkeys(range(depth), layer),
            norm,
            self.hidden_size,
            layer_offset,
            site,
        )

    def output(self) -> EmbeddingConfig:
        """Returns the configuration itself: the output matrix is never tied."""
        return self
