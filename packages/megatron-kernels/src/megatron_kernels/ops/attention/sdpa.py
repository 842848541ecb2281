"""Attention with torch's `scaled_dot_product_attention`."""

import torch
from torch import Tensor
from torch.nn import functional

from megatron_kernels.ops.attention.call import AttentionCall
from megatron_kernels.ops.attention.short_halves import attend, is_short_half


def sdpa(call: AttentionCall) -> Tensor:
    """Lowers the mask to the fastest form for the fused kernels, and calls them on views.

    Causal masks over keys in order need no mask tensor: `is_causal` if queries and keys coincide,
    nothing for a single query. All other masks become a boolean tensor.
    """
    call = call.without_unused_keys()
    q, k, v, scores = call.q, call.k, call.v, call.scores
    bias = scores.bias
    allowed, is_causal = call.lower_mask()
    if is_causal and bias is not None:
        allowed, is_causal = call.allowed(), False
    empty = None
    if allowed is not None:
        allowed = allowed[:, None]
        if (q.device.type != "cpu" or bias is not None) and not call.mask.index_only:
            # Not every CUDA kernel, and none with a bias, returns zeros for a row that may attend
            # to nothing. Such a row attends to all keys here, and its result is dropped. The CPU
            # kernel returns zeros.
            empty = ~allowed.any(-1, keepdim=True)
            allowed = allowed | empty
    added = allowed
    if bias is not None:
        added = bias.to(q.dtype)
        if allowed is not None:
            added = added.masked_fill(~allowed, -torch.inf)
    if q.device.type == "cuda" and (added is not None or not _half(q)):
        # Only flash attention has groups on CUDA, and it takes no mask tensor. With groups, the
        # other kernels would be passed over for separate operations on all scores.
        k, v = (_of_all_heads(x, q) for x in (k, v))
    width = v.shape[-1]
    if q.device.type == "cpu" and width < q.shape[-1]:
        # The fused CPU kernel takes values as wide as queries only. Otherwise all probabilities
        # would be materialized.
        v = functional.pad(v, (0, q.shape[-1] - width))
    if q.device.type == "cpu" and torch.compiler.is_compiling() and _written_alone(k):
        k, v = (_in_order_of_samples(x) for x in (k, v))
    queries, keys, values = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    if added is None and is_short_half(queries, keys):
        out = attend(queries, keys, values, is_causal, scores.scale)
    else:
        out = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=added,
            is_causal=is_causal,
            scale=scores.scale,
            # Faster than repeating keys and values for the heads of their group: forward and
            # backward on a CPU take 8 to 12 % less time with 2 of 8 or 4 of 16 groups, and nothing
            # is copied.
            enable_gqa=q.shape[2] != k.shape[2],
        )
    if empty is not None:
        out = out.masked_fill(empty, 0)
    out = out.permute(2, 0, 1, 3)
    return out if out.shape[-1] == width else out.narrow(-1, 0, width)


def _written_alone(k: Tensor) -> bool:
    """Returns whether keys of 32 or 64 bits are not a view of a fused projection.

    Views would be copied in a pass of their own, which takes longer than it saves.
    """
    return not _half(k) and k.is_contiguous()


def _in_order_of_samples(x: Tensor) -> Tensor:
    """Returns keys or values with the tokens of a sample side by side in memory.

    The kernel reads them once for each block of queries. Tokens that are a multiple of 4 KiB apart
    share few sets of the cache: then forward and backward pass take about a tenth longer. Compiled
    code writes rotated keys in this order at once.
    """
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _half(q: Tensor) -> bool:
    return q.dtype in (torch.float16, torch.bfloat16)


def _of_all_heads(x: Tensor, q: Tensor) -> Tensor:
    """Returns the keys or values of each head of the queries; copies only those of groups."""
    copies = q.shape[2] // x.shape[2]
    return x if copies == 1 else x.repeat_interleave(copies, 2)


def sdpa_unsupported_reason(call: AttentionCall) -> str | None:
    """Returns why `sdpa` does not support a call."""
    if call.dropout is not None:
        return "it supports only its own dropout"
    return call.unsupported_option("bias")
