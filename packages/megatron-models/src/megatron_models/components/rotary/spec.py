"""The rotation of one layer as plain data. Importing this module does not import torch."""

from dataclasses import dataclass

from megatron_kernels import LengthScaling, RopeScaling

RotaryScaling = RopeScaling | LengthScaling
"""A rule that scales the frequencies, for all lengths or by the length of a sequence."""


@dataclass(frozen=True)
class RotarySpec:
    """How a mixer rotates queries and keys. Mixers with equal rotations share one table.

    Attributes:
        channels: Rotated channels of a head, an even number; the first ones of the head.
        base: Base of the frequencies (theta).
        interleaved: Whether neighbouring channels are pairs, rather than the two halves.
        scaling: Rule that scales the frequencies for longer contexts, or None.
        axes: For each pair of channels the axis of positions that it turns by: 0 for the time, 1
            for the height, 2 for the width of a token (Qwen2-VL, section 2.1). Empty if a token has
            one position.
    """

    channels: int
    base: float
    interleaved: bool = False
    scaling: RotaryScaling | None = None
    axes: tuple[int, ...] = ()

    def scaling_at(self, length: int) -> RopeScaling | None:
        """Returns the rule for sequences of ``length`` tokens."""
        if isinstance(self.scaling, LengthScaling):
            return self.scaling.at(length)
        return self.scaling
