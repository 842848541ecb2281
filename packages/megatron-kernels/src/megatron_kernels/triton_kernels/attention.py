"""Attention forward: one program for some queries of a head, over the keys that they may see.

The softmax is computed online (Milakov and Gimelshein 2018; Dao, FlashAttention-2, section 3.1): a
program holds the largest score so far, the sum of exponentials and the weighted sum of values, and
never writes scores. Scores are to the base 2. The log-sum-exp that is returned is natural.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from megatron_kernels.triton_kernels.attention_launch import FORWARD, UNSPECIALIZED, Call, tiling
from megatron_kernels.triton_kernels.attention_parts import (
    LOG2_E,
    PRECISION,
    apply_mask,
    kept,
    key_numbers,
    load_ids,
    load_positions,
    load_prefix,
    query_words,
    scaled,
    tokens_in_reach,
    with_slope,
)
from megatron_kernels.triton_kernels.launch import accumulator_dtype
from megatron_kernels.triton_kernels.rows import load_rows, store_rows


@triton.jit
def _over_keys(
    acc, peak, total, q, query_id, query_position, word0, word1,
    K, V, KEY_IDS, KEY_POSITIONS, ALLOWED, COLUMNS, rows, head,
    start, end, s, t, k_s, v_s, window, chunk, prefix, first, length, least, scale, cap, slope,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, PREFIX: tl.constexpr,
    DOCUMENTS: tl.constexpr, HAS_POSITIONS: tl.constexpr, DENSE: tl.constexpr,
    SLOPES: tl.constexpr, SOFTCAP: tl.constexpr, DROPS: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    ACC: tl.constexpr, OPERAND: tl.constexpr, STEPS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Returns the three running values after the keys from start to end, tile by tile."""
    channels = tl.arange(0, BLOCK_D)
    of_values = tl.arange(0, BLOCK_DV)
    for at in range(start, end, STEPS):
        keys = at + tl.arange(0, STEPS)
        k = load_rows(K, keys, channels, k_s, t, D, MASKED, OPERAND)
        x = scaled(
            tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=ACC), scale, cap, SOFTCAP
        )
        if MASKED or SLOPES:
            key_position = load_positions(KEY_POSITIONS, keys, t, 0, HAS_POSITIONS)[None, :]
            x = with_slope(x, query_position[:, None], key_position, slope, SLOPES)
        if MASKED:
            key_id = load_ids(KEY_IDS, keys, t, DOCUMENTS)[None, :]
            inside = (keys < t)[None, :]
            if DENSE:
                inside = inside & (rows < s)[:, None]
            pairs = ALLOWED + rows.to(tl.int64)[:, None] * t + keys[None, :]
            x = apply_mask(
                x, inside, query_id[:, None], key_id, query_position[:, None], key_position, pairs,
                window, chunk, prefix, CAUSAL, WINDOW, CHUNK, PREFIX, DOCUMENTS, DENSE,
            )  # fmt: skip
        top = tl.maximum(peak, tl.max(x, axis=1))
        safe = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(x - safe[:, None])
        shrink = tl.exp2(peak - safe)
        total = total * shrink + tl.sum(p, axis=1)
        if DROPS:
            number = key_numbers(COLUMNS, keys, t, first, head, length, HAS_COLUMNS)
            p = tl.where(kept(word0[:, None], number[None, :], word1[:, None], least), p, 0.0)
        v = load_rows(V, keys, of_values, v_s, t, DV, MASKED, OPERAND)
        acc = acc * shrink[:, None]
        acc += tl.dot(p.to(OPERAND), v, input_precision=PRECISION, out_dtype=ACC)
        peak = top
    return acc, peak, total


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _forward(
    Q, K, V, OUT, LSE, SINKS,
    QUERY_IDS, KEY_IDS, QUERY_POSITIONS, KEY_POSITIONS, PREFIXES, ALLOWED, SLOPE, WORD0, WORD1,
    COLUMNS, s, t, batch, heads, per_group, q_s, q_b, q_n, k_s, k_b, k_n, v_s, v_b, v_n,
    query_ids_b, key_ids_b, query_positions_b, key_positions_b, allowed_b, columns_b,
    offset, window, chunk, prefix, first, length, site0, site1, least, scale, cap, factor,
    HAS_SINKS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, PREFIX: tl.constexpr,
    DOCUMENTS: tl.constexpr, HAS_POSITIONS: tl.constexpr, DENSE: tl.constexpr,
    SLOPES: tl.constexpr, SOFTCAP: tl.constexpr, DROPS: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    ACC: tl.constexpr, OPERAND: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(s, ROWS)
    block = blocks - 1 - tl.program_id(0) % blocks  # the longest first, if causal
    line = tl.program_id(0) // blocks
    sample = (line // heads).to(tl.int64)
    head = line % heads
    group = (head // per_group).to(tl.int64)
    K += sample * k_b + group * k_n
    V += sample * v_b + group * v_n
    KEY_IDS += sample * key_ids_b
    KEY_POSITIONS += sample * key_positions_b
    ALLOWED += sample * allowed_b
    COLUMNS += sample * columns_b
    prefix = load_prefix(PREFIXES, prefix, sample, PREFIX)
    rows = block * ROWS + tl.arange(0, ROWS)
    Q += sample * q_b + head.to(tl.int64) * q_n
    q = load_rows(Q, rows, tl.arange(0, BLOCK_D), q_s, s, D, True, OPERAND)
    query_id = load_ids(QUERY_IDS + sample * query_ids_b, rows, s, DOCUMENTS)
    query_position = load_positions(
        QUERY_POSITIONS + sample * query_positions_b, rows, s, offset, HAS_POSITIONS
    )
    start, full_start, full_end, end = tokens_in_reach(
        KEY_IDS, KEY_POSITIONS, query_id, query_position, rows < s, t, 0, window, chunk, prefix,
        True, CAUSAL, WINDOW, CHUNK, PREFIX, DOCUMENTS, HAS_POSITIONS, DENSE, STEPS,
    )  # fmt: skip
    word0 = rows.to(tl.uint32)
    word1 = word0
    if DROPS:
        word0, word1 = query_words(WORD0, WORD1, rows, sample, batch, s, site0, site1)
    slope = 0.0
    if SLOPES:
        slope = tl.load(SLOPE + head).to(ACC)
    acc = tl.zeros((ROWS, BLOCK_DV), ACC)
    peak = tl.full((ROWS,), float("-inf"), ACC)
    total = tl.zeros((ROWS,), ACC)
    if HAS_SINKS:  # one more key, with a value of zero
        peak = tl.zeros((ROWS,), ACC) + tl.load(SINKS + head).to(ACC) * LOG2_E
        total += 1.0
    if WINDOW:
        acc, peak, total = _over_keys(
            acc, peak, total, q, query_id, query_position, word0, word1,
            K, V, KEY_IDS, KEY_POSITIONS, ALLOWED, COLUMNS, rows, head, start, full_start, s, t,
            k_s, v_s, window, chunk, prefix, first, length, least, scale, cap, slope,
            D, DV, BLOCK_D, BLOCK_DV, CAUSAL, WINDOW, CHUNK, PREFIX, DOCUMENTS, HAS_POSITIONS,
            DENSE, SLOPES, SOFTCAP, DROPS, HAS_COLUMNS, ACC, OPERAND, STEPS, True,
        )  # fmt: skip
    if not (DOCUMENTS or HAS_POSITIONS or CHUNK or DENSE):
        acc, peak, total = _over_keys(
            acc, peak, total, q, query_id, query_position, word0, word1,
            K, V, KEY_IDS, KEY_POSITIONS, ALLOWED, COLUMNS, rows, head, full_start, full_end, s, t,
            k_s, v_s, window, chunk, prefix, first, length, least, scale, cap, slope,
            D, DV, BLOCK_D, BLOCK_DV, CAUSAL, WINDOW, CHUNK, PREFIX, DOCUMENTS, HAS_POSITIONS,
            DENSE, SLOPES, SOFTCAP, DROPS, HAS_COLUMNS, ACC, OPERAND, STEPS, False,
        )  # fmt: skip
    acc, peak, total = _over_keys(
        acc, peak, total, q, query_id, query_position, word0, word1,
        K, V, KEY_IDS, KEY_POSITIONS, ALLOWED, COLUMNS, rows, head, full_end, end, s, t,
        k_s, v_s, window, chunk, prefix, first, length, least, scale, cap, slope,
        D, DV, BLOCK_D, BLOCK_DV, CAUSAL, WINDOW, CHUNK, PREFIX, DOCUMENTS, HAS_POSITIONS,
        DENSE, SLOPES, SOFTCAP, DROPS, HAS_COLUMNS, ACC, OPERAND, STEPS, True,
    )  # fmt: skip
    out = acc * (factor / tl.where(total == 0.0, 1.0, total))[:, None]
    OUT += sample * heads * DV + head * DV
    out = out.to(OUT.dtype.element_ty)
    store_rows(OUT, out, rows, tl.arange(0, BLOCK_DV), batch * heads * DV, s, DV)
    lse = peak / LOG2_E + tl.log(total)
    tl.store(LSE + line.to(tl.int64) * s + rows, lse, mask=rows < s)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    tensors: Sequence[Tensor | None],
    numbers: Sequence[int],
    factors: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Returns out `[s, b, n, dv]` and lse `[b, n, s]`. The other arguments are those of `Call`."""
    s, b, n, d = q.shape
    out = q.new_empty(s, b, n, v.shape[-1])
    lse = q.new_empty(b, n, s, dtype=accumulator_dtype(q.dtype))
    call = Call(q, k, v, tensors, numbers, factors)
    size = tiling(FORWARD, q, max(d, v.shape[-1]))
    if lse.numel():
        _forward[(triton.cdiv(s, size.rows) * b * n,)](
            q, k, v, out, lse, q if sinks is None else sinks, *call.arguments(),
            HAS_SINKS=sinks is not None, **call.options(), ROWS=size.rows, STEPS=size.steps,
            num_warps=size.num_warps, num_stages=size.num_stages,
        )  # fmt: skip
    return out, lse
