"""Attention by torch's `scaled_dot_product_attention`."""

import torch.nn.functional as F
from torch import Tensor

from megatron_kernels.ops.attention.mask import Mask


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, query_offset: int
) -> Tensor:
    """Lower the mask to what the fused kernels are fastest with, and call them on views.

    Causal masks over keys in order need no mask tensor: `is_causal` when queries and keys coincide,
    nothing at all for a single query. Everything else is written out as a boolean mask.
    """
    queries = q.shape[0]
    if mask.causal and mask.by_index:
        end = (
            query_offset + queries
        )  # no query sees a later key, so a cache may be longer than used
        k, v = k[:end], v[:end]
    keys = k.shape[0]
    allowed, is_causal = None, False
    if not mask.by_index or mask.limits(keys):
        allowed = mask.allowed(queries, keys, query_offset, device=q.device)[:, None]
    elif mask.causal and queries > 1:
        is_causal = query_offset == 0 and queries == keys
        if not is_causal:
            allowed = mask.allowed(queries, keys, query_offset, device=q.device)[:, None]
    empty = None
    if allowed is not None and q.device.type != "cpu" and not mask.by_index:
        # Not every CUDA kernel gives zeros for a row that may attend nowhere: let it attend
        # everywhere and drop the result. The CPU kernel does give zeros, gradients too.
        empty = ~allowed.any(-1, keepdim=True)
        allowed = allowed | empty
    out = F.scaled_dot_product_attention(
        q.permute(1, 2, 0, 3),
        k.permute(1, 2, 0, 3),
        v.permute(1, 2, 0, 3),
        attn_mask=allowed,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    if empty is not None:
        out = out.masked_fill(empty, 0)
    return out.permute(2, 0, 1, 3)
