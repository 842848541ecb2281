"""Attention over blocks by our Triton kernels."""

import math
from typing import Final

import torch
from torch import Tensor

from megatron_kernels.ops import triton_op
from megatron_kernels.ops.attention.scores import Scores
from megatron_kernels.ops.paged.pages import Pages
from megatron_kernels.ops.triton_op import TritonOp

MOST_ROWS: Final = 128
"""Largest number of queries of a group, all heads counted, that one program holds."""

_ATTEND: Final = TritonOp(
    "paged_attend(Tensor q, Tensor k, Tensor v, Tensor tables, Tensor lengths, int window, "
    "float scale, float softcap, Tensor? slopes, Tensor? sinks) -> Tensor",
    "megatron_kernels.triton_kernels.paged_attention",
    "megatron_kernels.ops.paged.triton",
)


def paged_attend_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    lengths: Tensor,
    window: int,
    scale: float,
    softcap: float,
    slopes: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """Returns the output of `paged_attend` without values."""
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def paged(
    q: Tensor, k: Tensor, v: Tensor, pages: Pages, window: int | None, scores: Scores
) -> Tensor:
    """Reads blocks in place, in parts of a sequence whose results a second kernel adds.

    The parts of a sequence do not depend on the other sequences.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scores.scale is None else scores.scale
    out: Tensor = _ATTEND(
        q.contiguous(),
        k,
        v,
        pages.tables,
        pages.lengths,
        window or 0,
        scale,
        scores.softcap,
        scores.slopes,
        scores.sinks,
    )
    return out


def unsupported_reason(
    q: Tensor, k: Tensor, v: Tensor, pages: Pages, window: int | None, scores: Scores
) -> str | None:
    """Returns why the kernels do not support these arguments."""
    if not (q.dtype == k.dtype == v.dtype):
        return f"q is {q.dtype}, the pools are {k.dtype} and {v.dtype}; they must agree"
    if q.is_cuda and q.dtype == torch.float64:
        return "on CUDA it does not support float64"
    rows = q.shape[0] * (q.shape[2] // k.shape[2])
    if rows > MOST_ROWS:
        return f"supports at most {MOST_ROWS} queries of a group's heads, got {rows}"
    if max(q.shape[-1], v.shape[-1]) > 256:
        return f"supports at most 256 channels of a head, got {max(q.shape[-1], v.shape[-1])}"
    return triton_op.unsupported_reason(q, k, v)
