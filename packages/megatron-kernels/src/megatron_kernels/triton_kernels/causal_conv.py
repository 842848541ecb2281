"""Causal convolution of each channel over time, in one kernel each way.

A program has some tokens and channels of a sequence. It reads the tile once for each tap, shifted
in time; all but the first reading find it in the cache. Each pass is bound by memory, of which it
reads and writes every tensor once.

Token `-r` is the `r`-th last entry of the state before the first token. Documents come as one
integer for each token: twice the number of its document, and one for padding. The state belongs to
document 0.
"""

import triton
import triton.language as tl
from torch import Tensor

from megatron_kernels.triton_kernels.launch import (
    accumulator,
    accumulator_dtype,
    power_of_two,
    resident_programs,
)

_TOKENS = 16
_CHANNELS = 128
_WARPS = 4
_SCANNED = tl.constexpr(1024)


@triton.jit
def _inputs(
    X, STATE, token, channel, known, s, x_s, channels,
    HAS_STATE: tl.constexpr, TAPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Returns inputs of tokens, up to ``TAPS`` - 1 before the first; zeros if not ``known``."""
    within = (token >= 0) & (token < s)
    at = token.to(tl.int64)[:, None] * x_s + channel[None, :]
    x = tl.load(X + at, mask=within[:, None] & known[None, :], other=0.0).to(ACC)
    if HAS_STATE:
        before = token < 0
        at = (token + TAPS - 1)[:, None] * channels + channel[None, :]
        x += tl.load(STATE + at, mask=before[:, None] & known[None, :], other=0.0).to(ACC)
    return x


@triton.jit
def _codes(DOCUMENTS, token, s):
    """Returns the codes of tokens: 0 before the first, odd for padding and after the last."""
    return tl.load(DOCUMENTS + token, mask=(token >= 0) & (token < s), other=0) | (token >= s)


@triton.jit
def _last_token(DOCUMENTS, s, HAS_DOCUMENTS: tl.constexpr):
    """Returns the last token that is no padding, and its code; -1 and 0 if there is none.

    Without documents, the second is any number.
    """
    last = tl.full((), s, tl.int32) - 1
    if HAS_DOCUMENTS:
        last = tl.full((), -1, tl.int32)
        for start in range(0, s, _SCANNED):
            token = start + tl.arange(0, _SCANNED)
            real = _codes(DOCUMENTS, token, s) % 2 == 0
            last = tl.maximum(last, tl.max(tl.where(real, token, -1), axis=0))
        return last, tl.load(DOCUMENTS + last, mask=last >= 0, other=0)
    return last, last


@triton.jit
def _write_outputs(
    X, WEIGHT, BIAS, DOCUMENTS, STATE, Y, start, channel, known, s, x_s, y_s, channels,
    HAS_BIAS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_STATE: tl.constexpr,
    TAPS: tl.constexpr, ACC: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Computes the outputs of a tile."""
    token = start + tl.arange(0, TOKENS)
    y = tl.zeros((TOKENS, channel.shape[0]), ACC)
    if HAS_BIAS:
        y += tl.load(BIAS + channel, mask=known).to(ACC)[None, :]
    if HAS_DOCUMENTS:
        own = _codes(DOCUMENTS, token, s)
    for tap in tl.static_range(TAPS):
        earlier = token - (TAPS - 1 - tap)
        x = _inputs(X, STATE, earlier, channel, known, s, x_s, channels, HAS_STATE, TAPS, ACC)
        if HAS_DOCUMENTS:
            x = tl.where((_codes(DOCUMENTS, earlier, s) == own)[:, None], x, 0.0)
        y += x * tl.load(WEIGHT + channel * TAPS + tap, mask=known).to(ACC)[None, :]
    if HAS_DOCUMENTS:
        y = tl.where((own % 2 == 0)[:, None], y, 0.0)
    at = token.to(tl.int64)[:, None] * y_s + channel[None, :]
    inside = (token < s)[:, None] & known[None, :]
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=inside)


@triton.jit
def _write_state(
    X, DOCUMENTS, STATE, NEXT, channel, known, s, x_s, channels, HAS_DOCUMENTS: tl.constexpr,
    HAS_STATE: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Writes the inputs that the next tokens need."""
    last, final = _last_token(DOCUMENTS, s, HAS_DOCUMENTS)
    row = tl.arange(0, ROWS)
    token = last - (TAPS - 2) + row
    x = _inputs(X, STATE, token, channel, known, s, x_s, channels, HAS_STATE, TAPS, ACC)
    if HAS_DOCUMENTS:
        x = tl.where((_codes(DOCUMENTS, token, s) == final)[:, None], x, 0.0)
    inside = (row < TAPS - 1)[:, None] & known[None, :]
    at = row[:, None] * channels + channel[None, :]
    tl.store(NEXT + at, x.to(NEXT.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("s", "batch"))
def _forward(
    X, WEIGHT, BIAS, DOCUMENTS, STATE, Y, NEXT, s, batch, channels, x_s, x_b,
    HAS_BIAS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_STATE: tl.constexpr,
    TAPS: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Has programs for tiles of tokens, and programs after them for the next state."""
    columns = tl.cdiv(channels, CHANNELS)
    channel = tl.program_id(0) % columns * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    line = tl.program_id(0) // columns
    sample = (line % batch).to(tl.int64)
    start = line // batch * TOKENS
    X += sample * x_b
    STATE += sample * (TAPS - 1) * channels
    DOCUMENTS += sample * s
    if start < s:
        _write_outputs(
            X, WEIGHT, BIAS, DOCUMENTS, STATE, Y + sample * channels, start, channel, known, s,
            x_s, batch * channels, channels,
            HAS_BIAS, HAS_DOCUMENTS, HAS_STATE, TAPS, ACC, TOKENS,
        )  # fmt: skip
    elif TAPS > 1:
        _write_state(
            X, DOCUMENTS, STATE, NEXT + sample * (TAPS - 1) * channels, channel, known, s, x_s,
            channels, HAS_DOCUMENTS, HAS_STATE, TAPS, ROWS, ACC,
        )  # fmt: skip


@triton.jit(do_not_specialize=("s", "batch"))
def _backward(
    DY, DNEXT, X, WEIGHT, DOCUMENTS, STATE, DX, DSTATE, SUMS, s, batch, channels, parts,
    x_s, x_b, dy_s, dy_b,
    HAS_NEXT: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_STATE: tl.constexpr,
    TAPS: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Computes gradients of inputs of every ``parts``-th tile, and sums for filters and biases.

    ``SUMS`` are `[parts, b, TAPS + 1, c]`: those of the taps, and those of the bias.
    """
    columns = tl.cdiv(channels, CHANNELS)
    channel = tl.program_id(0) % columns * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    line = tl.program_id(0) // columns
    sample = (line % batch).to(tl.int64)
    X += sample * x_b
    DY += sample * dy_b
    STATE += sample * (TAPS - 1) * channels
    DSTATE += sample * (TAPS - 1) * channels
    DNEXT += sample * (TAPS - 1) * channels
    DOCUMENTS += sample * s
    last, final = _last_token(DOCUMENTS, s, HAS_DOCUMENTS)
    row = tl.arange(0, ROWS)
    sums = tl.zeros((ROWS, CHANNELS), ACC)
    first = line // batch * TOKENS - (TAPS - 1)
    for start in range(first, s, parts * TOKENS):
        token = start + tl.arange(0, TOKENS)
        x = _inputs(X, STATE, token, channel, known, s, x_s, channels, HAS_STATE, TAPS, ACC)
        if HAS_DOCUMENTS:
            own = _codes(DOCUMENTS, token, s)
        dx = tl.zeros((TOKENS, CHANNELS), ACC)
        for tap in tl.static_range(TAPS):
            later = token + (TAPS - 1 - tap)
            follows = (later >= 0) & (later < s)
            if HAS_DOCUMENTS:
                follows = follows & (own % 2 == 0) & (_codes(DOCUMENTS, later, s) == own)
            at = later.to(tl.int64)[:, None] * dy_s + channel[None, :]
            dy = tl.load(DY + at, mask=follows[:, None] & known[None, :], other=0.0).to(ACC)
            weight = tl.load(WEIGHT + channel * TAPS + tap, mask=known).to(ACC)
            dx += dy * weight[None, :]
            of_tap = tl.sum(dy * x, axis=0)
            sums += tl.where((row == tap)[:, None], of_tap[None, :], 0.0)
            if tap == TAPS - 1:  # the token itself
                of_bias = tl.sum(dy, axis=0)
                sums += tl.where((row == TAPS)[:, None], of_bias[None, :], 0.0)
        if HAS_NEXT:
            entry = token - last + TAPS - 2
            passes = (entry >= 0) & (entry < TAPS - 1)
            if HAS_DOCUMENTS:
                passes = passes & (own == final)
            at = entry[:, None] * channels + channel[None, :]
            inside = passes[:, None] & known[None, :]
            dx += tl.load(DNEXT + at, mask=inside, other=0.0).to(ACC)
        at = (token.to(tl.int64)[:, None] * batch + sample) * channels + channel[None, :]
        inside = ((token >= 0) & (token < s))[:, None] & known[None, :]
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=inside)
        if HAS_STATE:
            at = (token + TAPS - 1)[:, None] * channels + channel[None, :]
            inside = (token < 0)[:, None] & known[None, :]
            tl.store(DSTATE + at, dx.to(DSTATE.dtype.element_ty), mask=inside)
    at = (line.to(tl.int64) * (TAPS + 1) + row)[:, None] * channels + channel[None, :]
    tl.store(SUMS + at, sums, mask=(row <= TAPS)[:, None] & known[None, :])


def causal_conv_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns outputs `[s, b, c]` and the next state `[b, k-1, c]`, both in the dtype of `x`.

    Args:
        x: Inputs `[s, b, c]`, channels next to one another in memory.
        weight: Filters `[c, k]`, contiguous, as all that follow.
        bias: `[c]`.
        documents: `[b, s]`, int32, as the module describes.
        state: Inputs before the first token `[b, k-1, c]`.
    """
    s, batch, channels = x.shape
    taps = weight.shape[1]
    y, following = x.new_empty(x.shape), x.new_empty(batch, taps - 1, channels)
    if batch * channels:
        wide = min(_CHANNELS, power_of_two(channels))
        programs = (triton.cdiv(s, _TOKENS) + 1) * batch * triton.cdiv(channels, wide)
        _forward[(programs,)](
            x, weight, bias, _or(documents, x), _or(state, x), y, following, s, batch, channels,
            *x.stride()[:2], HAS_BIAS=bias is not None, HAS_DOCUMENTS=documents is not None,
            HAS_STATE=state is not None, TAPS=taps, ROWS=power_of_two(taps),
            ACC=accumulator(x.dtype), TOKENS=_TOKENS, CHANNELS=wide, num_warps=_WARPS,
        )  # fmt: skip
    return y, following


def causal_conv_backward(
    dy: Tensor,
    dnext: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    documents: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of inputs, filters, bias and state; those of None are empty.

    Args:
        dy: Gradient of the outputs `[s, b, c]`, channels next to one another in memory.
        dnext: Gradient of the next state `[b, k-1, c]`, contiguous. None means zero.
        x: As in `causal_conv_forward`, like the arguments without a description.
        weight: Filters.
        bias: Bias.
        documents: Documents.
        state: Inputs before the first token.
    """
    s, batch, channels = x.shape
    taps = weight.shape[1]
    wide = min(_CHANNELS, power_of_two(channels))
    columns = triton.cdiv(channels, wide)
    tiles = triton.cdiv(s + taps - 1, _TOKENS)
    programs = resident_programs(x.device, tiles * batch * columns, _WARPS)
    parts = max(1, min(tiles, programs // max(1, batch * columns)))
    dx = x.new_empty(x.shape)
    dstate = x.new_empty(0) if state is None else state.new_empty(state.shape)
    sums = x.new_empty(parts * batch, taps + 1, channels, dtype=accumulator_dtype(x.dtype))
    if sums.numel():
        _backward[(parts * batch * columns,)](
            dy, _or(dnext, x), x, weight, _or(documents, x), _or(state, x), dx, dstate, sums,
            s, batch, channels, parts, *x.stride()[:2], *dy.stride()[:2],
            HAS_NEXT=dnext is not None, HAS_DOCUMENTS=documents is not None,
            HAS_STATE=state is not None, TAPS=taps, ROWS=power_of_two(taps + 1),
            ACC=accumulator(x.dtype), TOKENS=_TOKENS, CHANNELS=wide, num_warps=_WARPS,
        )  # fmt: skip
    total = sums.sum(0)
    of_bias = x.new_empty(0) if bias is None else total[taps].to(bias.dtype)
    return dx, total[:taps].t().to(weight.dtype).contiguous(), of_bias, dstate


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """Returns another tensor, which is not read, for one that is missing."""
    return other if x is None else x
