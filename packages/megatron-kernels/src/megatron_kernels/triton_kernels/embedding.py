"""Rows of a part of a vocabulary, and the addition of their gradients without a dense matrix."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_kernels.triton_kernels.launch import ELEMENTS, accumulator

_COLUMNS: int = 256
_STEPS: int = 16
"""Columns of a row that one program adds, and tokens of the row that it reads at once."""


@triton.jit
def _lookup(TOKENS, WEIGHT, OUT, rows, h, start, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(TOKENS + token) - start
    inside = column < h
    own = row + tl.zeros((BLOCK,), tl.int64)
    here = inside & (own >= 0) & (own < rows)
    x = tl.load(WEIGHT + own * h + column, mask=here, other=0.0)
    tl.store(OUT + token * h + column, x, mask=inside)


@triton.jit
def _add(
    ROWS, ORDER, DY, INTO, tokens, rows, h,
    ACC: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Adds the gradients of one row, `STEPS` tokens at a time, always in the same order."""
    number = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < h
    row = tl.load(ROWS + number)
    before = tl.load(ROWS + number - 1, mask=number > 0, other=-1)
    if (row < rows) & (before != row):
        total = tl.zeros((BLOCK,), ACC)
        first = number
        same = True
        while same:
            places = first + tl.arange(0, STEPS)
            own = tl.load(ROWS + places, mask=places < tokens, other=-1) == row
            token = tl.load(ORDER + places, mask=own).to(tl.int64)
            at = DY + token[:, None] * h + column[None, :]
            dy = tl.load(at, mask=own[:, None] & inside[None, :], other=0.0)
            total += tl.sum(dy.to(ACC), axis=0)
            first += STEPS
            same = tl.sum(own.to(tl.int32), axis=0) == STEPS
        at = row.to(tl.int64) * h + column
        total += tl.load(INTO + at, mask=inside).to(ACC)
        tl.store(INTO + at, total, mask=inside)


def vocab_lookup(tokens: Tensor, weight: Tensor, start: int) -> Tensor:
    """Returns the rows of tokens, zeros for those that the part of the vocabulary lacks."""
    rows, h = weight.shape
    out = weight.new_empty(*tokens.shape, h)
    if out.numel():
        grid = (tokens.numel(), triton.cdiv(h, ELEMENTS))
        _lookup[grid](tokens, weight, out, rows, h, start, BLOCK=ELEMENTS)
    return out


def vocab_gradient_add(into: Tensor, tokens: Tensor, dy: Tensor, start: int, first: bool) -> None:
    """Adds the gradients of rows to `into`; if they are the first, overwrites it."""
    if first:
        into.zero_()
    rows, h = into.shape
    if not tokens.numel() or not rows:
        return
    local = tokens.flatten() - start
    absent = (local < 0) | (local >= rows)
    keys, order = torch.sort(local.masked_fill(absent, rows), stable=True)
    grid = (tokens.numel(), triton.cdiv(h, _COLUMNS))
    _add[grid](
        keys, order, dy, into, tokens.numel(), rows, h,
        ACC=accumulator(into.dtype), BLOCK=_COLUMNS, STEPS=_STEPS,
    )  # fmt: skip
