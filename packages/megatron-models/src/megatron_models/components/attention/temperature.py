"""Factors of queries that grow with the position (Nakanishi 2025, "Scalable-Softmax")."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def query_factors(
    positions: Int[Tensor, "s b_or_1"], scale: float, floor: int, dtype: torch.dtype
) -> Float[Tensor, "s b_or_1 1 1"]:
    """Returns the factor of the query at each position, as Llama 4 computes it.

    Args:
        positions: Positions of the queries.
        scale: Weight of the logarithm.
        floor: Number of positions after which the factor changes.
        dtype: Dtype of the queries.

    Returns:
        ``scale * ln(1 + floor((p + 1) / floor)) + 1`` in at least float32.
    """
    steps = torch.div(positions + 1, floor, rounding_mode="floor").double()
    factors = torch.log1p(steps) * scale + 1.0
    return factors.to(torch.promote_types(dtype, torch.float32))[..., None, None]
