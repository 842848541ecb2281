"""Cross-entropy that reads the logits once in each pass, and writes their gradient once.

A rank may have a part of the vocabulary, whose last columns may be padding.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_kernels.triton_kernels.launch import accumulator, accumulator_dtype, power_of_two

_COLUMNS: int = 4096
"""Largest number of logits that a program has at once."""


@triton.jit
def _forward(
    LOGITS, TARGETS, LSE, PICKED, TOTAL, valid, row_stride, ACC: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    lowest = float("-inf")
    largest = tl.full((BLOCK,), lowest, ACC)
    powers = tl.zeros((BLOCK,), ACC)
    total = tl.zeros((BLOCK,), ACC)
    for start in range(0, valid, BLOCK):
        at = start + columns
        x = tl.load(LOGITS + row * row_stride + at, mask=at < valid, other=lowest).to(ACC)
        # Each lane has a maximum and sums of its own, so lanes meet only at the end.
        larger = tl.maximum(largest, x)
        shift = tl.where(larger == lowest, 0.0, larger)
        powers = powers * tl.exp(largest - shift) + tl.exp(x - shift)
        largest = larger
        total += tl.where(at < valid, x, 0.0)
    top = tl.max(largest, axis=0)
    shift = tl.where(top == lowest, 0.0, top)
    lse = tl.log(tl.sum(powers * tl.exp(largest - shift), axis=0)) + shift
    target = tl.load(TARGETS + row)
    held = (target >= 0) & (target < valid)
    picked = tl.load(LOGITS + row * row_stride + target, mask=held, other=lowest).to(ACC)
    tl.store(LSE + row, lse)
    tl.store(PICKED + row, picked)
    tl.store(TOTAL + row, tl.sum(total, axis=0))


@triton.jit
def _backward(
    LOGITS, TARGETS, LSE, DLOSS, DX, width, valid, row_stride, out_stride,
    AT_TARGET: tl.constexpr, EVERYWHERE: tl.constexpr,  # an argument would be rounded to float32
    ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(LOGITS + row * row_stride + at, mask=at < valid).to(ACC)
    p = tl.exp(x - tl.load(LSE + row)) - EVERYWHERE
    p -= tl.where(at == tl.load(TARGETS + row), AT_TARGET, 0.0)
    dloss = tl.load(DLOSS + row)
    dx = tl.where(dloss == 0.0, 0.0, tl.where(at < valid, p * dloss, 0.0))
    tl.store(DX + row * out_stride + at, dx, mask=at < width)


def vocab_loss_forward(
    logits: Tensor, targets: Tensor, valid: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-sum-exp, logit of the target and sum of each row of `[rows, v]`."""
    rows = len(logits)
    lse = logits.new_empty(rows, dtype=accumulator_dtype(logits.dtype))
    picked, total = torch.empty_like(lse), torch.empty_like(lse)
    if rows:
        _forward[(rows,)](
            logits, targets, lse, picked, total, valid, logits.stride(0),
            ACC=accumulator(logits.dtype), BLOCK=min(power_of_two(valid), _COLUMNS), num_warps=8,
        )  # fmt: skip
    return lse, picked, total


def vocab_loss_backward(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    dloss: Tensor,
    valid: int,
    at_target: float,
    everywhere: float,
) -> Tensor:
    """Returns the gradient of the logits."""
    out = logits.new_empty(logits.shape)
    _write_gradient(logits, targets, lse, dloss, out, valid, at_target, everywhere)
    return out


def vocab_loss_backward_(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    dloss: Tensor,
    valid: int,
    at_target: float,
    everywhere: float,
) -> None:
    """Overwrites the logits with their gradient."""
    _write_gradient(logits, targets, lse, dloss, logits, valid, at_target, everywhere)


def _write_gradient(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    dloss: Tensor,
    out: Tensor,
    valid: int,
    at_target: float,
    everywhere: float,
) -> None:
    rows, width = logits.shape
    if rows and width:
        block = min(power_of_two(width), _COLUMNS)
        _backward[(rows, triton.cdiv(width, block))](
            logits, targets, lse, dloss, out, width, valid, logits.stride(0), out.stride(0),
            AT_TARGET=at_target, EVERYWHERE=everywhere,
            ACC=accumulator(logits.dtype), BLOCK=block, num_warps=8,
        )  # fmt: skip
