"""Tables of the cosines and sines of rotary angles (Su et al., 2021)."""

import torch
from jaxtyping import Int
from megatron_kernels import (
    LinearScaling,
    Llama3Scaling,
    rope_frequencies,
    rope_tables,
)
from torch import Tensor, nn

from megatron_models.components.attention.config import AttentionConfig
from megatron_models.placement import Placement

Angles = tuple[Tensor, Tensor]
"""Cosines and sines, ``[s, 1, r/2]`` or, if they differ between sequences, ``[s, b, r/2]``."""


class RotaryTable(nn.Module):
    """Looks up the cosines and sines of positions. It has no parameters and no stored state.

    The table is float64 for a float64 model and float32 otherwise.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: AttentionConfig, placement: Placement) -> None:
        super().__init__()
        self.config = config
        shape = (config.max_position_embeddings, 1, config.rotary_dim // 2)
        table = torch.float64 if placement.dtype == torch.float64 else torch.float32
        for name in ("cos", "sin"):
            empty = torch.empty(shape, dtype=table, device=placement.resolved_device)
            self.register_buffer(name, empty, persistent=False)
        self.reset()

    def reset(self) -> None:
        """Computes the table on its device. Does nothing on the meta device."""
        if self.cos.is_meta:
            return
        config, scaling = self.config, rope_scaling(self.config)
        frequencies = rope_frequencies(
            config.kv_channels, config.rotary_base, config.rotary_percent, scaling
        )
        positions = torch.arange(config.max_position_embeddings)
        cos, sin = rope_tables(positions, frequencies, self.cos.dtype, scaling)
        self.cos.copy_(cos)
        self.sin.copy_(sin)

    def forward(self, length: int, offset: int, positions: Int[Tensor, "b s"] | None) -> Angles:
        """Returns the angles of ``positions``. Defaults to ``offset`` and the following ones."""
        if positions is None:
            return self.cos[offset : offset + length], self.sin[offset : offset + length]
        index = positions.t()
        return self.cos[index, 0], self.sin[index, 0]


def rope_scaling(config: AttentionConfig) -> LinearScaling | Llama3Scaling | None:
    """Returns the scaling of rotary frequencies, or None."""
    if config.rope_scaling_type == "linear":
        return LinearScaling(config.rope_scaling_factor)
    if config.rope_scaling_type == "llama3":
        return Llama3Scaling(
            factor=config.rope_scaling_factor,
            low_freq_factor=config.rope_scaling_low_freq_factor,
            high_freq_factor=config.rope_scaling_high_freq_factor,
            original_max_position_embeddings=config.rope_scaling_original_length,
        )
    return None
