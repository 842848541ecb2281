"""The configuration of gated delta nets. Importing this module does not import torch."""

from dataclasses import dataclass, field

from megatron_parallel.nearest import nearest_multiples

from megatron_models.components.fields import flag
from megatron_models.components.stream import StreamConfig
from megatron_models.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig(StreamConfig):
    """Heads and convolution of a gated delta net (Yang et al. 2024, "Gated Delta Networks").

    Names and defaults are those of Megatron-LM's flags.
    """

    linear_conv_kernel_dim: int = field(
        default=4,
        metadata=flag(
            "--linear-conv-kernel-dim",
            "gated delta net: tokens that the convolution of queries, keys and values reads, its "
            "own included",
            positive=True,
            unit="tokens",
        ),
    )
    linear_key_head_dim: int = field(
        default=128,
        metadata=flag(
            "--linear-key-head-dim",
            "gated delta net: width of a query or key head",
            positive=True,
            unit="channels",
            small=4,
        ),
    )
    linear_value_head_dim: int = field(
        default=128,
        metadata=flag(
            "--linear-value-head-dim",
            "gated delta net: width of a value head",
            positive=True,
            unit="channels",
            small=6,
        ),
    )
    linear_num_key_heads: int = field(
        default=16,
        metadata=flag(
            "--linear-num-key-heads",
            "gated delta net: number of query and of key heads",
            positive=True,
            small=2,
        ),
    )
    linear_num_value_heads: int = field(
        default=32,
        metadata=flag(
            "--linear-num-value-heads",
            "gated delta net: number of value heads, a multiple of the key heads, each of which "
            "serves the same number of them",
            positive=True,
            small=4,
        ),
    )

    def _check(self) -> None:
        super()._check()
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ConfigError(
                "{linear_num_value_heads} is not a multiple of {linear_num_key_heads}; every key "
                "head serves the same number of value heads; use {linear_num_value_heads:name} "
                f"{nearest_multiples(self.linear_num_value_heads, self.linear_num_key_heads)}",
                vars(self),
            )

    @property
    def linear_key_size(self) -> int:
        """Width of all query heads together, and of all key heads."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_size(self) -> int:
        """Width of all value heads together."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def linear_value_heads_per_key(self) -> int:
        """Value heads that one key head serves."""
        return self.linear_num_value_heads // self.linear_num_key_heads

    @property
    def linear_group_value_size(self) -> int:
        """Width of the value heads of one key head."""
        return self.linear_value_heads_per_key * self.linear_value_head_dim

    @property
    def linear_group_conv_size(self) -> int:
        """Channels of the convolution for one key head: query, key, values."""
        return 2 * self.linear_key_head_dim + self.linear_group_value_size

    @property
    def linear_group_gated_size(self) -> int:
        """Those of the convolution, and the gates of the values."""
        return self.linear_group_conv_size + self.linear_group_value_size

    @property
    def linear_group_logit_size(self) -> int:
        """Logits of beta and decay for one key head."""
        return 2 * self.linear_value_heads_per_key
