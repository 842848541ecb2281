"""The largest attention score of each head, beside a fused kernel that does not return it."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from megatron_kernels.ops.attention.mask import Mask
from megatron_kernels.ops.precision import upcast

ELEMENTS = 2**24
"""The largest number of scores that are in memory at once, except for one query of each sample."""


@torch.no_grad()
def largest_scores(
    q: Float[Tensor, "s b n d"],
    k: Float[Tensor, "t b g d"],
    mask: Mask,
    scale: float | None = None,
    *,
    elements: int = ELEMENTS,
) -> Float[Tensor, " n"]:
    """Returns the largest product ``scale * q k^T`` of each head, over the pairs that may attend.

    It costs the products of queries and keys once more, a third of the work of attention's forward
    pass and its softmax, and has no gradient. Products are in at least float32 and are computed for
    some queries at a time. Under a causal mask only keys up to the last of these queries are read.

    Args:
        q: Queries.
        k: Keys.
        mask: Which pairs may attend.
        scale: Factor of the products. Defaults to ``1 / sqrt(d)``.
        elements: The largest number of scores in memory at once.

    Returns:
        The maxima, in at least float32. -inf for a head without any pair.
    """
    (length, batch, heads, width), (keys, _, groups, _) = q.shape, k.shape
    found = torch.full((groups, heads // groups), -torch.inf, device=q.device)
    found = found.to(torch.promote_types(q.dtype, torch.float32))
    if not q.numel() or not k.numel():
        return found.flatten()
    allowed, causal = mask.lower(length, keys, device=q.device)
    rows = max(1, elements // (batch * heads * keys))
    of_keys = upcast(k)
    for start in range(0, length, rows):
        own = torch.unflatten(upcast(q[start : start + rows]), 2, (groups, -1))
        stop = start + len(own)
        read = of_keys[:stop] if causal else of_keys
        products = torch.einsum("sbgmd,tbgd->bgmst", own, read)
        if causal:
            index = torch.arange(stop, device=q.device)
            products.masked_fill_(index[None] > index[start:, None], -torch.inf)
        elif allowed is not None:
            hidden = ~allowed[:, start:stop]
            products.masked_fill_(hidden[:, None, None], -torch.inf)
        largest = products.amax((0, 3, 4))
        # A NaN is the maximum, as it is of the attention itself.
        found = torch.maximum(found, largest * (1 / math.sqrt(width) if scale is None else scale))
    return found.flatten()
