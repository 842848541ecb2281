"""Attention in plain torch, and the pair of block functions for ring attention.

    scores = cap(scale * q k^T) + bias - slope * distance    p = softmax of the allowed    out = p v

`blocks.py` describes the pair.
"""

import math

import torch
from torch import Tensor

from megatron_kernels.ops.attention.call import AttentionCall
from megatron_kernels.ops.attention.dropout import DropoutLike
from megatron_kernels.ops.precision import upcast


def reference(call: AttentionCall) -> Tensor:
    """Returns the output of the forward block pass without its lse, differentiable by autograd."""
    return _forward(call)[0]


def reference_forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Returns out and lse of one block; out is differentiable by autograd."""
    out, lse = _forward(call)
    return out, lse.detach()


@torch.no_grad()
def reference_backward(
    call: AttentionCall, dout: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of one block from the final out and lse."""
    q, k, v, dropout = call.q, call.k, call.v, call.dropout
    groups = k.shape[2]
    capped = _capped(call)
    p = _probabilities(_masked(capped, call), _grouped(lse, groups))
    gradient, final = (_by_group(upcast(x), groups) for x in (dout, out))
    dv = torch.einsum("bgmst,sbgmd->tbgd", _dropped(p, dropout), gradient)
    dp = _dropped(torch.einsum("sbgmd,tbgd->bgmst", gradient, upcast(v)), dropout)
    share = (gradient * final).sum(-1).permute(1, 2, 3, 0)[..., None]
    dscores = call.scale() * p * (dp - share)
    if cap := call.scores.softcap:
        dscores = dscores * (1 - (capped / cap) ** 2)
    dq = torch.einsum("bgmst,tbgd->sbgmd", dscores, upcast(k)).flatten(2, 3)
    dk = torch.einsum("bgmst,sbgmd->tbgd", dscores, _by_group(upcast(q), groups))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    allowed = _masked(_capped(call), call)
    lse = torch.logsumexp(allowed, -1)
    sinks = call.scores.sinks
    if sinks is not None:  # one more key for each row, with a value of zero
        lse = torch.logaddexp(lse, _by_head(sinks, call.k))
    p = _probabilities(allowed, lse)
    # p is not copied
    out = torch.einsum("bgmst,tbgd->bgmsd", _dropped(p, call.dropout), upcast(call.v))
    return out.permute(3, 0, 1, 2, 4).flatten(2, 3).to(call.q.dtype), _ungrouped(lse)


def _capped(call: AttentionCall) -> Tensor:
    """Returns scaled and bounded products `[b, g, n/g, s, t]`."""
    heads = _by_group(upcast(call.q), call.k.shape[2])
    products = torch.einsum("sbgmd,tbgd->bgmst", heads, upcast(call.k)) * call.scale()
    cap = call.scores.softcap
    return cap * torch.tanh(products / cap) if cap else products


def _masked(capped: Tensor, call: AttentionCall) -> Tensor:
    """Returns the scores, biased by distance, with -inf where attending is forbidden."""
    scores = call.scores
    if scores.slopes is not None:
        distance = call.mask.distance(*call.extent(), device=call.q.device)[:, None, None]
        capped = capped - _by_head(scores.slopes, call.k)[..., None] * distance
    if scores.bias is not None:
        capped = capped + upcast(scores.bias).reshape(-1, *capped.shape[1:])
    return capped.masked_fill(~call.allowed()[:, None, None], -math.inf)


def _by_head(x: Tensor, k: Tensor) -> Tensor:
    """Returns `[n]` as `[g, n/g, 1]`, in float32 or float64."""
    return upcast(x).view(k.shape[2], -1, 1)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """Returns exp(scores - lse), with zeros for a row that may attend to nothing (lse = -inf)."""
    safe = torch.where(torch.isneginf(lse), 0, lse)
    return torch.exp(scores - safe[..., None])


def _dropped(p: Tensor, dropout: DropoutLike | None) -> Tensor:
    return p if dropout is None else dropout(p.flatten(1, 2)).reshape(p.shape)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """Returns `[s, b, n, ...]` as `[s, b, g, n/g, ...]`."""
    s, b, n, *rest = x.shape
    return x.view(s, b, groups, n // groups, *rest)


def _grouped(lse: Tensor, groups: int) -> Tensor:
    """Returns `[s, b, n]` as `[b, g, n/g, s]`."""
    return _by_group(lse, groups).permute(1, 2, 3, 0)


def _ungrouped(lse: Tensor) -> Tensor:
    """Returns `[b, g, n/g, s]` as `[s, b, n]`."""
    return lse.permute(3, 0, 1, 2).flatten(2)
