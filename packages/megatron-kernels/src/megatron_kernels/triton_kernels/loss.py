"""Cross-entropy that reads the logits once in each pass, and writes their gradient once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_kernels.triton_kernels.launch import accumulator, accumulator_dtype, power_of_two

_COLUMNS: int = 4096
"""Largest number of logits that a program has at once."""


@triton.jit
def _forward(
    LOGITS, TARGETS, LOSS, LSE, v, row_stride, ignored, ACC: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    lowest = float("-inf")
    largest = tl.full((BLOCK,), lowest, ACC)
    total = tl.zeros((BLOCK,), ACC)
    for start in range(0, v, BLOCK):
        at = start + columns
        x = tl.load(LOGITS + row * row_stride + at, mask=at < v, other=lowest).to(ACC)
        # Each lane has a maximum and a sum of its own, so lanes meet only at the end.
        larger = tl.maximum(largest, x)
        shift = tl.where(larger == lowest, 0.0, larger)
        total = total * tl.exp(largest - shift) + tl.exp(x - shift)
        largest = larger
    top = tl.max(largest, axis=0)
    shift = tl.where(top == lowest, 0.0, top)
    lse = tl.log(tl.sum(total * tl.exp(largest - shift), axis=0)) + shift
    target = tl.load(TARGETS + row)
    counted = target != ignored
    picked = tl.load(LOGITS + row * row_stride + target, mask=counted, other=0.0).to(ACC)
    tl.store(LSE + row, lse)
    tl.store(LOSS + row, tl.where(counted, lse - picked, 0.0))


@triton.jit
def _backward(
    LOGITS, TARGETS, LSE, DLOSS, DX, v, row_stride, ignored, ACC: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < v
    target = tl.load(TARGETS + row)
    x = tl.load(LOGITS + row * row_stride + at, mask=inside, other=0.0).to(ACC)
    p = tl.exp(x - tl.load(LSE + row)) - tl.where(at == target, 1.0, 0.0)
    dx = tl.where(target == ignored, 0.0, p * tl.load(DLOSS + row))
    tl.store(DX + row * v + at, dx, mask=inside)


def cross_entropy_forward(logits: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Returns the loss and the log-sum-exp of each row of `[rows, v]`."""
    rows, v = logits.shape
    loss = logits.new_empty(rows, dtype=accumulator_dtype(logits.dtype))
    lse = torch.empty_like(loss)
    if rows:
        _forward[(rows,)](
            logits, targets, loss, lse, v, logits.stride(0), ignored,
            ACC=accumulator(logits.dtype), BLOCK=min(power_of_two(v), _COLUMNS), num_warps=8,
        )  # fmt: skip
    return loss, lse


def cross_entropy_backward(
    logits: Tensor, targets: Tensor, lse: Tensor, dloss: Tensor, ignored: int
) -> Tensor:
    """Returns the gradient of the logits."""
    rows, v = logits.shape
    out = logits.new_empty(rows, v)
    if rows:
        block = min(power_of_two(v), _COLUMNS)
        _backward[(rows, triton.cdiv(v, block))](
            logits, targets, lse, dloss, out, v, logits.stride(0), ignored,
            ACC=accumulator(logits.dtype), BLOCK=block, num_warps=8,
        )  # fmt: skip
    return out
