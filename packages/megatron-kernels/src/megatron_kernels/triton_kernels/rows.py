"""Tiles of tokens: rows whose channels are next to one another in memory."""

import triton
import triton.language as tl


@triton.jit
def load_rows(
    AT, rows, channels, stride, count,
    CHANNELS: tl.constexpr, CHECKS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Returns rows of a head as a tile; zeros beyond the last row (if checked) and channel."""
    pointers = AT + rows.to(tl.int64)[:, None] * stride + channels[None, :]
    if CHECKS:
        inside = (rows < count)[:, None]
        if channels.shape[0] > CHANNELS:
            inside = inside & (channels < CHANNELS)[None, :]
        x = tl.load(pointers, mask=inside, other=0.0)
    elif channels.shape[0] > CHANNELS:
        x = tl.load(pointers, mask=(channels < CHANNELS)[None, :], other=0.0)
    else:
        x = tl.load(pointers)
    return x.to(OPERAND)


@triton.jit
def store_rows(AT, x, rows, channels, stride, count, CHANNELS: tl.constexpr):
    """Stores a tile as rows of a head."""
    inside = (rows < count)[:, None] & (channels < CHANNELS)[None, :]
    tl.store(AT + rows.to(tl.int64)[:, None] * stride + channels[None, :], x, mask=inside)
