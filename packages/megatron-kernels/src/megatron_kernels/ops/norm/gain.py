"""The gain of a norm, stored as it is or as its difference from 1."""

from torch import Tensor

from megatron_kernels.ops.precision import upcast


def gain_of(weight: Tensor, zero_centered: bool) -> Tensor:
    """Returns the gain: `weight`, or `1 + weight` in at least float32.

    In bfloat16 the sum would lose all but the first bits of a small weight.
    """
    return 1.0 + upcast(weight) if zero_centered else weight
