"""Attention by the flash-attn library (Dao, FlashAttention-2): CUDA, float16 and bfloat16."""

import torch
from torch import Tensor

from megatron_kernels.ops.attention.dropout import DropoutLike
from megatron_kernels.ops.attention.mask import Mask
from megatron_kernels.ops.attention.scores import Scores
from megatron_kernels.ops.optional import missing_library

_LARGEST_HEAD = 256


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scores: Scores,
    query_offset: int,
    dropout: DropoutLike | None = None,
) -> Tensor:
    """Calls `flash_attn_func` on views `[b, s, n, d]`.

    Its causal mask aligns the last query with the last key. That is ours after keys behind the last
    query are cut off. Its window counts the keys to the left and right of a query, ours counts the
    query itself too. Its backward pass adds up gradients of queries in any order, unless
    `torch.use_deterministic_algorithms` is set.
    """
    from flash_attn import (  # type: ignore[import-not-found,unused-ignore]
        flash_attn_func,
    )

    if mask.causal:
        end = query_offset + q.shape[0]
        k, v = k[:end], v[:end]
    reach = -1 if mask.window is None else mask.window - 1
    out: Tensor = flash_attn_func(
        q.transpose(0, 1),
        k.transpose(0, 1),
        v.transpose(0, 1),
        softmax_scale=scores.scale,
        softcap=scores.softcap,
        alibi_slopes=None if scores.slopes is None else scores.slopes.float(),
        causal=mask.causal,
        window_size=(reach, 0 if mask.causal and mask.window is not None else reach),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out.transpose(0, 1)


def flash_unsupported_reason(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scores: Scores,
    query_offset: int,
    dropout: DropoutLike | None = None,
) -> str | None:
    """Returns why `flash` does not support these arguments, cheapest check first."""
    if dropout is not None:
        return "it supports only its own dropout"
    if scores.sinks is not None:
        return "it does not support sinks"
    if scores.bias is not None:
        return "it does not support a bias"
    if not q.is_cuda:
        return f"needs a CUDA tensor, q is on {q.device.type}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"needs float16 or bfloat16, q is {q.dtype}"
    if q.shape[-1] > _LARGEST_HEAD:
        return f"head dimension {q.shape[-1]} is above {_LARGEST_HEAD}"
    if v.shape[-1] != q.shape[-1]:
        return f"value heads of {v.shape[-1]} channels differ from query heads of {q.shape[-1]}"
    if not mask.index_only:
        return "the mask has documents, positions, a prefix, chunks or is dense"
    aligned = query_offset + q.shape[0]
    if (mask.causal and k.shape[0] < aligned) or (
        not mask.causal and mask.window is not None and k.shape[0] != aligned
    ):
        return f"{k.shape[0]} keys do not end with query {aligned}"
    return missing_library("flash-attn")
