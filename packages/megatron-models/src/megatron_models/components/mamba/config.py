"""The configuration of Mamba-2 layers. Importing this module does not import torch."""

from dataclasses import dataclass, field
from typing import Final

from megatron_parallel.nearest import nearest_divisors, nearest_multiples

from megatron_models.components.fields import flag
from megatron_models.components.stream import StreamConfig
from megatron_models.errors import ConfigError

EXPANSION: Final = 2
"""Width of all heads over that of the residual stream, by default."""


@dataclass(frozen=True, kw_only=True)
class MambaConfig(StreamConfig):
    """Heads, groups and state of Mamba-2 layers (Dao and Gu, 2024).

    ``mamba_num_heads`` may be left at 0. It is then derived when the configuration is created.
    """

    mamba_state_dim: int = field(
        default=128,
        metadata=flag(
            "--mamba-state-dim",
            "width of the state of one channel of a Mamba layer",
            positive=True,
            unit="channels",
            small=6,
        ),
    )
    mamba_head_dim: int = field(
        default=64,
        metadata=flag(
            "--mamba-head-dim",
            "width of one head of a Mamba layer",
            positive=True,
            unit="channels",
            small=4,
        ),
    )
    mamba_num_groups: int = field(
        default=8,
        metadata=flag(
            "--mamba-num-groups",
            "groups of heads of a Mamba layer that share what is written to the state and how it "
            "is read",
            positive=True,
            small=2,
        ),
    )
    mamba_num_heads: int = field(
        default=0,
        metadata=flag(
            "--mamba-num-heads",
            f"heads of a Mamba layer; 0: {EXPANSION} x hidden_size / mamba_head_dim",
            positive=True,
            derived=True,
            small=4,
        ),
    )
    mamba_conv_kernel: int = field(
        default=4,
        metadata=flag(
            "--mamba-conv-kernel",
            "tokens that the causal convolution of a Mamba layer reads, the token itself included "
            "(our name)",
            positive=True,
            maximum=64,
            unit="tokens",
        ),
    )
    mamba_conv_bias: bool = field(
        default=True,
        metadata=flag(
            "--no-mamba-conv-bias", "a bias in the convolution of a Mamba layer (our name)"
        ),
    )
    mamba_proj_bias: bool = field(
        default=False,
        metadata=flag(
            "--mamba-proj-bias", "biases in the two projections of a Mamba layer (our name)"
        ),
    )
    mamba_dt_min: float = field(
        default=0.0,
        metadata=flag(
            "--mamba-dt-min", "smallest time step of a token (our name)", nonnegative=True
        ),
    )
    mamba_dt_max: float = field(
        default=0.0,
        metadata=flag(
            "--mamba-dt-max",
            "largest time step of a token; 0: no limit (our name)",
            nonnegative=True,
        ),
    )
    mamba_chunk_size: int = field(
        default=128,
        metadata=flag(
            "--mamba-chunk-size",
            "tokens that the scan of a Mamba layer computes at once (our name)",
            positive=True,
            no_effect=True,
            unit="tokens",
            small=6,
        ),
    )

    def _fill(self) -> None:
        super()._fill()
        if not self.has_mamba:
            return
        width = EXPANSION * self.hidden_size
        if not self.mamba_num_heads and width % self.mamba_head_dim:
            raise ConfigError(
                "{mamba_head_dim} does not divide "
                f"{EXPANSION} x {{hidden_size}}; use {{mamba_head_dim:name}} "
                f"{nearest_divisors(width, self.mamba_head_dim)}, or set {{mamba_num_heads:name}}",
                vars(self),
            )
        self._set("mamba_num_heads", width // self.mamba_head_dim)

    def _check(self) -> None:
        super()._check()
        if not self.has_mamba:
            return
        heads, groups = self.mamba_num_heads, self.mamba_num_groups
        if heads % groups:
            raise ConfigError(
                "{mamba_num_groups} does not divide {mamba_num_heads}; use {mamba_num_groups:name} "
                f"{nearest_divisors(heads, groups)}, or {{mamba_num_heads:name}} "
                f"{nearest_multiples(heads, groups)}",
                vars(self),
            )
        if 0 < self.mamba_dt_max <= self.mamba_dt_min:
            raise ConfigError(
                "{mamba_dt_max} is not above {mamba_dt_min}; use a larger value, or 0 for no limit",
                vars(self),
            )

    @property
    def has_mamba(self) -> bool:
        """Whether the model has a Mamba layer. Without one the fields are not read."""
        return True

    @property
    def mamba_inner_size(self) -> int:
        """Width of all heads of a Mamba layer together."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def mamba_heads_per_group(self) -> int:
        """Heads that share a group."""
        return self.mamba_num_heads // self.mamba_num_groups

    @property
    def mamba_group_width(self) -> int:
        """Width of the heads of a group together."""
        return self.mamba_heads_per_group * self.mamba_head_dim

    @property
    def mamba_states_width(self) -> int:
        """Width of what all groups write to their states, and of how they read them."""
        return self.mamba_num_groups * self.mamba_state_dim

    @property
    def mamba_conv_width(self) -> int:
        """Channels of a group that are convolved: values, B and C."""
        return self.mamba_group_width + 2 * self.mamba_state_dim
