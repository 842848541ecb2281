"""Linear biases of attention by distance, ALiBi (Press et al. 2022, arXiv 2108.12409)."""

import torch
from jaxtyping import Float
from torch import Tensor


def alibi_slopes(
    heads: int, first: int, count: int, *, device: torch.device, dtype: torch.dtype
) -> Float[Tensor, " n"]:
    """Returns the slopes of neighbouring heads, in at least float32.

    For a power of two of heads, the slope of head i, counted from 1, is ``2^(-8 i / heads)``.
    Otherwise the heads beyond the largest power of two ``p`` have every other slope of ``2 p``
    heads, as in the authors' code, Bloom and Falcon.

    Args:
        heads: Number of heads of the model.
        first: Number of the first of these heads, from 0.
        count: Number of these heads.
        device: Device of the result.
        dtype: Dtype of the queries.
    """
    power = 1 << (heads.bit_length() - 1)
    # On the device, without a copy from the host in every layer.
    number = torch.arange(first, first + count, device=device, dtype=torch.float64)
    exponents = torch.where(number < power, number + 1, number - power + 0.5) * (8 / power)
    return torch.exp2(-exponents).to(torch.promote_types(dtype, torch.float32))
