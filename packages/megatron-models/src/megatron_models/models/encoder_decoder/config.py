"""The configuration of an encoder-decoder such as T5, whose two sides differ only in depth.

Importing this module does not import torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from megatron_parallel import ParallelLayout

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
from megatron_models.components.embedding.spec import (
    EmbeddingConfig,
    EmbeddingSpec,
    TiedOutputConfig,
)
from megatron_models.components.fields import flag
from megatron_models.components.layer import Layer, Sublayer, TrunkSpec
from megatron_models.components.mlp.spec import MLPConfig, MLPSpec
from megatron_models.components.norm.spec import NormConfig, NormSpec
from megatron_models.components.relative_bias.spec import RelativeBiasConfig, RelativeBiasSpec
from megatron_models.errors import ConfigError
from megatron_models.models.model_config import ModelConfig

_UNSUPPORTED: Final = {
    "attention_output_gate": "{attention_output_gate:name}",
    "qk_layernorm": "{qk_layernorm:name}",
    "qk_l2_norm": "{qk_l2_norm:name}",
    "attn_temperature_scale": "{attn_temperature_scale:name}",
    "has_alibi": "{position_embedding_type}",
}
"""Options of self-attention that cross-attention does not have, and their fields in messages."""


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(
    ModelConfig, MLPConfig, NormConfig, AttentionConfig, RelativeBiasConfig, TiedOutputConfig
):
    """The shape of an encoder and a decoder, which differ only in depth.

    ``num_layers`` is the depth of the decoder, and of the encoder unless it has its own. By default
    encoder and decoder share one embedding, which is the output matrix too (T5, Raffel et al.
    2020). With relative positions, each side has one table of biases, which all its layers read.

    Raises:
        ConfigError: A value has the wrong type or range, values do not fit together, or an option
            of attention is not supported (sinks).
    """

    kind: ClassVar[str] = "t5"

    encoder_num_layers: int = field(
        default=0,
        metadata=flag(
            "--encoder-num-layers",
            "number of encoder layers; 0: as many as decoder layers",
            positive=True,
            derived=True,
            maximum=100_000,
        ),
    )
    separate_decoder_embedding: bool = field(
        default=False,
        metadata=flag(
            "--separate-decoder-embedding",
            "embeddings of the decoder that are not those of the encoder; needs "
            "--untie-embeddings-and-output-weights (our name)",
        ),
    )

    def _fill(self) -> None:
        super()._fill()
        self._set("encoder_num_layers", self.num_layers)

    def _check(self) -> None:
        super()._check()
        if self.separate_decoder_embedding and not self.untie_embeddings_and_output_weights:
            raise ConfigError(
                "{separate_decoder_embedding:name} leaves open which embedding is the output "
                "matrix; set {untie_embeddings_and_output_weights:name} too",
                vars(self),
            )
        if self.softmax_type != "vanilla":
            raise ConfigError(
                "an encoder-decoder has no attention sinks: {softmax_type}", vars(self)
            )
        for name, shown in _UNSUPPORTED.items():
            if getattr(self, name):
                raise ConfigError(
                    f"an encoder-decoder does not support {shown}; leave it out", vars(self)
                )
        if self.span != EVERYTHING:
            raise ConfigError(
                "an encoder-decoder has no windows: {sliding_window}, {attention_chunk_size}",
                vars(self),
            )

    def fields_for_layers(self, layers: Sequence[int]) -> dict[str, Any]:
        """Returns the depths of a model with only some of the layers of encoder and decoder."""
        above = sum(layer < self.encoder_num_layers for layer in layers)
        depths = {"encoder_num_layers": above, "num_layers": len(layers) - above}
        return super().fields_for_layers(layers) | depths

    def trunks(self) -> dict[str, TrunkSpec]:
        """Returns the encoder and the decoder.

        Initial weights of each side depend on its own depth. Dropout numbers the layers of both
        sides consecutively, so that no two layers have the same mask.
        """
        above, crossing = self.encoder_num_layers, self._crossing()
        return {
            "encoder": self._trunk(above, (), 0, EMBEDDING, bidirectional=True),
            "decoder": self._trunk(self.num_layers, crossing, above, DECODER_EMBEDDING),
        }

    def _crossing(self) -> Layer:
        norm, mixer = self.component(NormSpec), self.component(CrossAttentionSpec)
        return (Sublayer("cross_attention", mixer, CROSS_ATTENTION_OUTPUT, norm),)

    def _trunk(
        self,
        depth: int,
        between: Layer,
        layer_offset: int,
        site: int,
        *,
        bidirectional: bool = False,
    ) -> TrunkSpec:
        """Returns one side: self-attention, sublayers ``between``, feed-forward layer."""
        norm = self.component(NormSpec, num_layers=depth)
        attention = self.component(AttentionSpec, num_layers=depth, bidirectional=bidirectional)
        layer = (
            Sublayer("attention", attention, ATTENTION_OUTPUT, norm),
            *between,
            Sublayer("mlp", self.component(MLPSpec, num_layers=depth), MLP_OUTPUT, norm),
        )
        own, bias = None, None
        if self.separate_decoder_embedding:
            own = self.component(EmbeddingSpec, num_layers=depth)
        if self.has_relative_bias:
            bias = self.component(RelativeBiasSpec, bidirectional=bidirectional)
        layers = dict.fromkeys(range(depth), layer)
        return TrunkSpec(
            own, layers, norm, self.hidden_size, layer_offset, site, relative_bias=bias
        )

    def shared_embedding(self) -> EmbeddingSpec | None:
        """Returns the embedding of encoder and decoder, unless each has its own."""
        if self.separate_decoder_embedding:
            return None
        tied = not self.untie_embeddings_and_output_weights
        return self.component(EmbeddingSpec, is_output_weight=tied)

    def output(self) -> EmbeddingConfig | None:
        """Returns the configuration itself if the output matrix is untied, else None."""
        return self if self.untie_embeddings_and_output_weights else None

    def check_layout(self, layout: ParallelLayout) -> None:
        """Refuses context parallelism too.

        Raises:
            ConfigError: A component does not fit, or the layout cuts sequences.
        """
        super().check_layout(layout)
        if layout.cp > 1:
            raise ConfigError(
                "{cp} cannot cut the sequences of an encoder-decoder, which has no context "
                "parallelism; use {cp:name} 1",
                {"cp": layout.cp},
            )
