"""Attention by cuDNN, the fastest kernels of torch on GPUs of the Hopper generation and later.

`scaled_dot_product_attention` prefers flash attention, so this calls the operation behind it, which
autograd and torch.compile know. Heads in groups are not copied.
"""

from typing import Final

import torch
from torch import Tensor

from megatron_kernels._compat import is_fake
from megatron_kernels.ops.attention.dropout import DropoutLike
from megatron_kernels.ops.attention.mask import Mask
from megatron_kernels.ops.attention.scores import Scores
from megatron_kernels.ops.attention.short_halves import adjacent

NAME: Final = "cudnn"
"""Name of the backend."""

_HOPPER: Final = (9, 0)
_ALIGNMENT: Final = 8
_LARGEST_HEAD: Final = 128


def cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scores: Scores,
    query_offset: int,
    dropout: DropoutLike | None = None,
) -> Tensor:
    """Calls the operation on views."""
    _, is_causal = mask.lower(q.shape[0], k.shape[0], query_offset, device=q.device)
    heads = (adjacent(x).permute(1, 2, 0, 3) for x in (q, k, v))
    follows = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    out, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads, None, follows, is_causal=is_causal, scale=scores.scale
    )
    result: Tensor = out.permute(2, 0, 1, 3)
    return result


def cudnn_unsupported_reason(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scores: Scores,
    query_offset: int,
    dropout: DropoutLike | None = None,
) -> str | None:
    """Returns why `cudnn` does not support these arguments, or is not the faster kernel here."""
    if not q.is_cuda:
        return f"needs a CUDA tensor, q is on {q.device.type}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"needs float16 or bfloat16, q is {q.dtype}"
    if not is_fake(q) and torch.cuda.get_device_capability(q.device) < _HOPPER:
        return "before the Hopper generation flash attention is as fast"
    if dropout is not None:
        return "it supports only its own dropout"
    if scores.softcap or any(x is not None for x in (scores.sinks, scores.slopes, scores.bias)):
        return "it does not support softcap, sinks, slopes or a bias"
    width = q.shape[-1]
    if v.shape[-1] != width or width % _ALIGNMENT or width > _LARGEST_HEAD:
        return f"heads need up to {_LARGEST_HEAD} channels, a multiple of {_ALIGNMENT}"
    if not mask.index_only or mask.window is not None:
        return "it takes no mask tensor and no window"
    if mask.causal and (query_offset or q.shape[0] != k.shape[0]):
        return "with a causal mask it needs as many keys as queries"
    if q.shape[0] < 2 or 0 in (*q.shape, *k.shape):
        return "it needs at least two queries"
    if torch.are_deterministic_algorithms_enabled():
        return "its backward pass is not deterministic"
    return None
