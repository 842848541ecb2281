"""Attention by flash-attn 2 and 3 (Dao, FlashAttention-2; Shah et al., FlashAttention-3).

Both run on CUDA in float16 and bfloat16. Their causal mask aligns the last query with the last key.
That is ours after keys behind the last query are cut off. Their window counts the keys to the left
and right of a query, ours counts the query itself too. Packed documents are one call over all
tokens, with the offset of each document (`Mask.prepare(backend=...)`).

Their backward pass adds up gradients of queries in any order, unless
`torch.use_deterministic_algorithms` is set.
"""

from collections.abc import Callable
from itertools import accumulate, chain
from typing import Any, Final

import torch
from torch import Tensor

from megatron_kernels.ops.attention.call import AttentionCall
from megatron_kernels.ops.optional import missing_library

FLASH: Final = "flash_attn"
FLASH_3: Final = "flash_attn_3"
"""Names of the backends. They take packed documents by the lengths that the host knows."""

_LARGEST_HEAD: Final = 256
_HOPPER: Final = (9, 0)


def flash(call: AttentionCall) -> Tensor:
    """Calls `flash_attn_func` or `flash_attn_varlen_func` of flash-attn 2."""
    from flash_attn import (  # type: ignore[import-not-found,unused-ignore]
        flash_attn_func,
        flash_attn_varlen_func,
    )

    slopes = call.scores.slopes
    own = {"alibi_slopes": None if slopes is None else slopes.float()}
    return _call(flash_attn_func, flash_attn_varlen_func, call, own)


def flash_3(call: AttentionCall) -> Tensor:
    """Calls `flash_attn_func` or `flash_attn_varlen_func` of flash-attn 3."""
    from flash_attn_interface import (  # type: ignore[import-not-found,unused-ignore]
        flash_attn_func,
        flash_attn_varlen_func,
    )

    return _call(flash_attn_func, flash_attn_varlen_func, call, {})


def _call(
    dense: Callable[..., Any],
    varlen: Callable[..., Any],
    call: AttentionCall,
    own: dict[str, Any],
) -> Tensor:
    """Calls one of the two functions, with the options of its version in ``own``."""
    q, k, v, mask, scores, *_ = call.without_unused_keys()
    reach = -1 if mask.window is None else mask.window - 1
    options = {
        "softmax_scale": scores.scale,
        "softcap": scores.softcap,
        "causal": mask.causal,
        "window_size": (reach, 0 if mask.causal and mask.window is not None else reach),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        **own,
    }
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    if mask.runs is None:
        attended = _output(dense(q, k, v, **options))
        return attended.transpose(0, 1)
    lengths = [abs(length) for length in chain.from_iterable(mask.runs)]
    # The copy of so few bytes does not wait for the device.
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    offsets = offsets.to(q.device, non_blocking=True)
    tokens = (x.flatten(0, 1) for x in (q, k, v))
    out = _output(varlen(*tokens, offsets, offsets, max(lengths), max(lengths), **options))
    out = out.view(*q.shape[:2], *out.shape[1:]).transpose(0, 1)
    if min(chain.from_iterable(mask.runs)) > 0 or mask.document_ids is None:
        return out
    return out.masked_fill((mask.document_ids < 0).t()[..., None, None], 0)


def _output(found: Any) -> Tensor:
    """Returns the output alone. Early versions of flash-attn 3 return the log-sum-exp too."""
    out: Tensor = found[0] if isinstance(found, tuple) else found
    return out


def flash_unsupported_reason(call: AttentionCall) -> str | None:
    """Returns why `flash` does not support a call, cheapest check first."""
    reason = _unsupported_reason(call, "softcap", "slopes")
    return missing_library("flash-attn") if reason is None else reason


def flash_3_unsupported_reason(call: AttentionCall) -> str | None:
    """Returns why `flash_3` does not support a call, cheapest check first."""
    reason = _unsupported_reason(call, "softcap")
    if reason is None and torch.cuda.get_device_capability(call.q.device) != _HOPPER:
        return "needs a GPU of the Hopper generation"
    return missing_library("flash-attn-3") if reason is None else reason


def _unsupported_reason(call: AttentionCall, *options: str) -> str | None:
    """Returns why a version with some options does not support a call."""
    if call.dropout is not None:
        return "it supports only its own dropout"
    if (reason := call.unsupported_option(*options)) is not None:
        return reason
    q, k, v, mask = call.q, call.k, call.v, call.mask
    if not q.is_cuda:
        return f"needs a CUDA tensor, q is on {q.device.type}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"needs float16 or bfloat16, q is {q.dtype}"
    if q.shape[-1] > _LARGEST_HEAD:
        return f"head dimension {q.shape[-1]} is above {_LARGEST_HEAD}"
    if v.shape[-1] != q.shape[-1]:
        return f"value heads of {v.shape[-1]} channels differ from query heads of {q.shape[-1]}"
    if mask.documents_alone(*call.extent()):
        return None
    if not mask.index_only:
        return "the mask has documents of unknown lengths, positions, a prefix, chunks or is dense"
    aligned = call.query_offset + q.shape[0]
    if (mask.causal and k.shape[0] < aligned) or (
        not mask.causal and mask.window is not None and k.shape[0] != aligned
    ):
        return f"{k.shape[0]} keys do not end with query {aligned}"
    return None
