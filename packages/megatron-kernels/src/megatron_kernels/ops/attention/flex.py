"""Attention by torch's FlexAttention, which compiles a kernel for any mask and score function.

It computes what `scaled_dot_product_attention` does not, or only by writing out all scores:
soft-cap, slopes, sinks, and a bias with any mask. Blocks of 128 queries and 128 keys without an
allowed pair are skipped.

On CUDA it has both passes. On a CPU it has no backward pass, and no log-sum-exp, which sinks need
(torch 2.13). The first call of a shape compiles for seconds to a minute.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from megatron_kernels._compat import missing_gpu_reason
from megatron_kernels.ops.attention.call import AttentionCall
from megatron_kernels.ops.attention.scores import Scores
from megatron_kernels.ops.attention.short_halves import adjacent

NAME: Final = "flex"
"""Name of the backend."""

_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)


def flex(call: AttentionCall) -> Tensor:
    """Calls `flex_attention`, compiled; in compiled code as a part of it."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    call = call.without_unused_keys()
    q, k, v, scores = call.q, call.k, call.v, call.scores
    attend: Callable[..., Any] = flex_attention
    if not torch.compiler.is_compiling():
        attend = compiled(q.device.type)
    heads = [adjacent(x).permute(1, 2, 0, 3) for x in (q, k, v)]
    found = attend(
        *heads,
        score_mod=_score_function(call),
        block_mask=_block_mask(call),
        scale=scores.scale,
        enable_gqa=q.shape[2] != k.shape[2],
        return_aux=None if scores.sinks is None else AuxRequest(lse=True),
    )
    out: Tensor
    if scores.sinks is None:
        out = found
    else:  # they have a share of the softmax, and no value
        lse = found[1].lse
        share = torch.sigmoid(lse - scores.sinks.to(lse.dtype)[:, None])
        out = (found[0] * share[..., None]).to(q.dtype)
    return out.permute(2, 0, 1, 3)


@functools.cache
def compiled(device: str) -> Callable[..., Any]:
    """Returns the compiled function. Importing the compiler takes seconds, so a call does it.

    Its kernel for CPUs cannot be compiled for sizes that vary (torch 2.13).
    """
    from torch.nn.attention.flex_attention import flex_attention

    found: Callable[..., Any] = torch.compile(
        flex_attention, dynamic=False if device == "cpu" else None
    )
    return found


def _block_mask(call: AttentionCall) -> Any:
    """Returns the mask by blocks, or None if every query may attend to every key."""
    from torch.nn.attention.flex_attention import create_block_mask

    queries, keys, _ = call.extent()
    allowed, is_causal = call.lower_mask()
    if allowed is None and not is_causal:
        return None
    # Lambdas, since it counts the arguments of functions by their code.
    rule: Callable[..., Tensor] = lambda _, __, query, key: query >= key  # noqa: E731
    samples = 1
    if allowed is not None:
        samples = len(allowed)
        rule = lambda sample, _, query, key: allowed[sample if samples > 1 else 0, query, key]  # noqa: E731
    return create_block_mask(rule, samples, None, queries, keys, device=call.q.device)


def _score_function(call: AttentionCall) -> Callable[..., Tensor] | None:
    """Returns what becomes of a scaled product, or None if nothing does."""
    mask, scores, query_offset = call.mask, call.scores, call.query_offset
    if not scores.softcap and scores.slopes is None and scores.bias is None:
        return None
    distances = None
    if scores.slopes is not None and mask.positions is not None:
        distances = mask.distance(*call.extent(), device=call.q.device)
    cap = None
    if scores.softcap:  # torch refuses a captured number that differs from that of an earlier call
        cap = torch.full((), scores.softcap, dtype=torch.float32, device=call.q.device)
    return lambda score, sample, head, query, key: _changed(
        score, (sample, head, query, key), scores, cap, distances, query_offset
    )


def _changed(
    score: Tensor,
    at: tuple[Tensor, Tensor, Tensor, Tensor],
    scores: Scores,
    cap: Tensor | None,
    distances: Tensor | None,
    query_offset: int,
) -> Tensor:
    """Returns a scaled product after soft-cap, bias and slopes."""
    sample, head, query, key = at
    if cap is not None:
        score = cap * torch.tanh(score / cap)
    if scores.bias is not None:
        score = score + scores.bias[sample if len(scores.bias) > 1 else 0, head, query, key]
    if scores.slopes is not None:
        if distances is None:
            distance = (query + query_offset - key).abs()
        else:
            distance = distances[sample if len(distances) > 1 else 0, query, key]
        score = score - scores.slopes[head] * distance
    return score


def flex_unsupported_reason(call: AttentionCall) -> str | None:
    """Returns why `flex` does not support a call."""
    q, k, v, scores = call.q, call.k, call.v, call.scores
    reason = call.unsupported_option("sinks", "softcap", "slopes", "bias")
    if reason is not None:
        return reason
    if q.dtype not in _DTYPES:
        return f"needs float32, float16 or bfloat16, q is {q.dtype}"
    if 0 in (*q.shape, *k.shape):
        return "it does not support empty tensors"
    if q.is_cuda:
        return missing_gpu_reason(q)
    if q.device.type != "cpu":
        return f"needs a CPU or CUDA tensor, q is on {q.device.type}"
    if scores.sinks is not None:
        return "on a CPU it does not support sinks"
    given = (q, k, v, scores.bias, scores.slopes)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        return "on a CPU it has no backward pass"
    return None
