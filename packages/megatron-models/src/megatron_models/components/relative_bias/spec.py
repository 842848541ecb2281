"""Biases of attention by relative position as plain data. Importing this module loads no torch.

Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer", section 2.1.
"""

from dataclasses import dataclass, field
from typing import Final

from megatron_parallel import Sharding
from megatron_parallel.sharding import Init

from megatron_models.components.embedding.spec import PositionConfig
from megatron_models.components.fields import flag
from megatron_models.components.mixer import Parameters, ParameterSpec
from megatron_models.errors import ConfigError

_FEWEST: Final = 4  # of both directions: one for the distance 0, and one for longer ones
_DEFAULTS: Final = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}


@dataclass(frozen=True, kw_only=True)
class RelativeBiasConfig(PositionConfig):
    """Number and range of the buckets of relative positions."""

    relative_attention_num_buckets: int = field(
        default=_DEFAULTS["relative_attention_num_buckets"],
        metadata=flag(
            "--relative-attention-num-buckets",
            "buckets of relative positions, each with a learned bias for each head",
            positive=True,
            maximum=1 << 20,
            small=8,
        ),
    )
    relative_attention_max_distance: int = field(
        default=_DEFAULTS["relative_attention_max_distance"],
        metadata=flag(
            "--relative-attention-max-distance",
            "distance from which on all relative positions have one bucket",
            positive=True,
            maximum=1 << 20,
            unit="tokens",
            small=10,
        ),
    )

    @property
    def has_relative_bias(self) -> bool:
        """Whether attention scores have learned biases by relative position."""
        return self.position_embedding_type == "relative"

    def _check(self) -> None:
        super()._check()
        if not self.has_relative_bias:
            for name, default in _DEFAULTS.items():
                if getattr(self, name) != default:
                    raise ConfigError(
                        f"{{{name}}} has no effect with {{position_embedding_type}}; leave it out",
                        vars(self),
                    )
            return
        if self.relative_attention_num_buckets < _FEWEST:
            raise ConfigError(
                "{relative_attention_num_buckets} leaves no bucket for long distances; use "
                f"{{relative_attention_num_buckets:name}} {_FEWEST} or more",
                vars(self),
            )
        exact = self.relative_attention_num_buckets // 2
        if self.relative_attention_max_distance <= exact:
            raise ConfigError(
                "{relative_attention_max_distance} must be more than half of "
                "{relative_attention_num_buckets}; use {relative_attention_max_distance:name} "
                f"{exact + 1} or more",
                vars(self),
            )


@dataclass(frozen=True, kw_only=True)
class RelativeBiasSpec(RelativeBiasConfig):
    """A table of biases ``[buckets, n]`` that all layers of a trunk read, cut over heads.

    Every pipeline stage of the trunk holds it.

    Attributes:
        num_attention_heads: Number of heads ``n``.
        bidirectional: Whether half of the buckets are those of keys after the query.
        tied_axis: Axis of the pipeline ranks that hold the table (`Sharding.tied`); empty for one.
    """

    num_attention_heads: int
    bidirectional: bool
    tied_axis: str = ""

    def sharding(self) -> Sharding:
        """Returns the sharding of the table."""
        shape = (self.relative_attention_num_buckets, self.num_attention_heads)
        init, tied = Init(scale=self.init_method_std), self.tied_axis or None
        return Sharding(shape, "tp", 1, init=init, tied=tied)

    def parameters(self) -> Parameters:
        """Returns the table, which has no multiply-adds."""
        return {"weight": ParameterSpec(self.sharding(), looked_up=True)}
