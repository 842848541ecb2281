"""Softmax of scaled scores, one row in the registers of a program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_kernels.triton_kernels.launch import (
    accumulator,
    exact,
    power_of_two,
    two_floats,
    warps,
)


@triton.jit
def _forward(
    SCORES, ALLOWED, OUT, t, scale, rest,
    MASKED: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < t
    at = row * t + columns
    allowed = inside
    if MASKED:
        allowed = inside & (tl.load(ALLOWED + at, mask=inside) != 0)
    x = tl.load(SCORES + at, mask=allowed).to(ACC) * exact(scale, rest, ACC)
    x = tl.where(allowed, x, float("-inf"))
    top = tl.max(x, axis=0)
    power = tl.exp(x - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(power, axis=0)
    tl.store(OUT + at, power / tl.where(total == 0.0, 1.0, total), mask=inside)


@triton.jit
def _backward(DY, Y, DX, t, scale, rest, ACC: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < t
    at = row * t + columns
    dy = tl.load(DY + at, mask=inside, other=0.0).to(ACC)
    y = tl.load(Y + at, mask=inside, other=0.0).to(ACC)
    dx = exact(scale, rest, ACC) * y * (dy - tl.sum(dy * y, axis=0))
    tl.store(DX + at, dx, mask=inside)


def softmax_forward(scores: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
    """Returns the probabilities; zeros for a row without allowed entries."""
    out, t = torch.empty_like(scores), scores.shape[-1]
    if scores.numel():
        block = power_of_two(t)
        masks = None if allowed is None else allowed.view(torch.uint8)
        _forward[(scores.numel() // t,)](
            scores, masks, out, t, *two_floats(scale), MASKED=allowed is not None,
            ACC=accumulator(scores.dtype), BLOCK=block, num_warps=warps(block),
        )  # fmt: skip
    return out


def softmax_backward(dy: Tensor, y: Tensor, scale: float) -> Tensor:
    """Returns the gradient of the scores."""
    out, t = torch.empty_like(y), y.shape[-1]
    if y.numel():
        block = power_of_two(t)
        _backward[(y.numel() // t,)](
            dy, y, out, t, *two_floats(scale),
            ACC=accumulator(y.dtype), BLOCK=block, num_warps=warps(block),
        )  # fmt: skip
    return out
