"""The rotation of one layer as plain data. Importing this module does not import torch."""

from dataclasses import dataclass

from megatron_kernels import RopeScaling


@dataclass(frozen=True)
class RotarySpec:
    """How a mixer rotates queries and keys. Mixers with equal rotations share one table.

    Attributes:
        channels: Rotated channels of a head, an even number; the first ones of the head.
        base: Base of the frequencies (theta).
        interleaved: Whether neighbouring channels are pairs, rather than the two halves.
        scaling: Rule that scales the frequencies for longer contexts, or None.
    """

    channels: int
    base: float
    interleaved: bool = False
    scaling: RopeScaling | None = None
