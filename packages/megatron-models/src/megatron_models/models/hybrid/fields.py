"""The fields of a hybrid model's configuration. Importing this module does not import torch."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, get_args

from megatron_models.components.embedding.spec import PositionEmbedding
from megatron_models.components.fields import flag, literal
from megatron_models.components.gated_delta_net.config import GatedDeltaNetConfig
from megatron_models.components.latent_attention.config import LatentAttentionConfig
from megatron_models.components.mamba.config import MambaConfig
from megatron_models.components.moe.config import MoEConfig
from megatron_models.components.norm.spec import NormConfig
from megatron_models.components.sparse_attention.config import SparseAttentionConfig
from megatron_models.components.stream import StreamConfig
from megatron_models.errors import ConfigError
from megatron_models.models.causal_config import CausalConfig
from megatron_models.models.hybrid.pattern import HybridPattern, read_pattern


@dataclass(frozen=True, kw_only=True)
class HybridFields(
    MambaConfig,
    GatedDeltaNetConfig,
    SparseAttentionConfig,
    MoEConfig,
    LatentAttentionConfig,
    NormConfig,
    CausalConfig,
):
    """The fields that the layers of a hybrid model are made from."""

    hybrid_layer_pattern: str = field(
        metadata=flag(
            "--hybrid-layer-pattern",
            "one symbol for each layer: M is Mamba-2, G a gated delta net, * attention, D sparse "
            "attention, - a dense feed-forward layer and E one of experts; | divides pipeline "
            "stages",
        ),
    )
    num_layers: int = field(
        default=0,
        metadata=flag(
            "--num-layers",
            "number of layers; 0: that of hybrid_layer_pattern",
            positive=True,
            derived=True,
            maximum=100_000,
        ),
    )
    position_embedding_type: PositionEmbedding = field(
        default="none",
        metadata=flag(
            "--position-embedding-type",
            "learned absolute positions added to the embedding, rotary positions in attention "
            "(rope, or mrope with a time, a height and a width of each token), linear biases of "
            "attention by distance (alibi), or none",
            choices=get_args(PositionEmbedding),
        ),
    )

    def _fill(self) -> None:
        self._set("num_layers", len(self.pattern.layers))
        super()._fill()

    def _check(self) -> None:
        layers = self.pattern.layers
        if self.num_layers != len(layers):
            raise ConfigError(
                f"{{hybrid_layer_pattern:name}} has {len(layers)} layers, but {{num_layers:name}} "
                f"is {{num_layers:repr}}; use {{num_layers:name}} {len(layers)} or leave it out",
                vars(self),
            )
        if ("E" in layers) != bool(self.num_experts):
            missing = "no layer E" if self.num_experts else "a layer E"
            raise ConfigError(
                f"{{hybrid_layer_pattern:name}} has {missing}, but {{num_experts:name}} is "
                f"{{num_experts:repr}}; use {{num_experts:name}} "
                f"{0 if self.num_experts else 'of at least 1'}",
                vars(self),
            )
        self._check_unused("M", MambaConfig)
        self._check_unused("G", GatedDeltaNetConfig)
        self._check_unused("D", SparseAttentionConfig)
        super()._check()

    def _check_unused(self, symbol: str, component: type[StreamConfig]) -> None:
        """Refuses values of a component's fields if no layer has it."""
        if symbol in self.pattern.layers:
            return
        shared = {each.name for each in dataclasses.fields(StreamConfig)}
        for entry in dataclasses.fields(component):
            if entry.name not in shared and getattr(self, entry.name) != entry.default:
                raise ConfigError(
                    f"{{{entry.name}}} has no effect without a layer {symbol} in "
                    f"{{hybrid_layer_pattern:name}}; leave it at {entry.default!r}",
                    vars(self),
                )

    def _check_pattern(self) -> None:
        if self.moe_layer_freq != "1":
            raise ConfigError(
                "{moe_layer_freq} has no effect with {hybrid_layer_pattern:name}, whose symbol E "
                "selects the layers with experts; leave it out",
                vars(self),
            )

    def fields_for_layers(self, layers: Sequence[int]) -> dict[str, Any]:
        """Returns the fields that differ in a model with only some layers, without ``|``."""
        symbols = "".join(self.pattern.layers[layer] for layer in layers)
        own = {"hybrid_layer_pattern": symbols, "moe_layer_freq": "1"}
        return super().fields_for_layers(layers) | own

    @cached_property
    def pattern(self) -> HybridPattern:
        """The layers and pipeline stages of ``hybrid_layer_pattern``.

        Raises:
            ConfigError: The pattern is invalid.
        """
        try:
            return read_pattern(self.hybrid_layer_pattern)
        except ConfigError as error:
            raise ConfigError(
                f"{{hybrid_layer_pattern:name}} {literal(error)}", vars(self)
            ) from None

    @property
    def has_mamba(self) -> bool:
        """Whether the pattern has a layer of Mamba-2."""
        return "M" in self.pattern.layers

    @cached_property
    def moe_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it has experts."""
        return self._layers_of("E")

    @property
    def mamba_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it is Mamba-2."""
        return self._layers_of("M")

    @property
    def mamba_conv_bias_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it is Mamba-2 with a bias in its convolution."""
        return self._layers_of("M" if self.mamba_conv_bias else "")

    @property
    def mamba_proj_bias_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it is Mamba-2 with biases in its projections."""
        return self._layers_of("M" if self.mamba_proj_bias else "")

    @property
    def attention_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it has attention to all keys."""
        return self._layers_of("*")

    @property
    def dense_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it is a dense feed-forward layer."""
        return self._layers_of("-")

    @property
    def feed_forward_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it is a feed-forward layer, dense or of experts."""
        return self._layers_of("-E")

    def _layers_of(self, symbols: str) -> tuple[bool, ...]:
        return tuple(symbol in symbols for symbol in self.pattern.layers)
