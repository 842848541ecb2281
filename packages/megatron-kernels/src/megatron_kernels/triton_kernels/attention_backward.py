"""Attention backward: one kernel for the gradients of queries, one for those of keys and values.

Both compute the probabilities again from the log-sum-exp (Dao, FlashAttention-2, section 3.1):

    p = exp(x - lse)    dv = (m p)^T dout    dp = m (dout v^T)    dx = p (dp - dout . out)

with the mask m of dropout, 0 or 1 / (1 - rate). Each gradient has one program that adds it up in a
fixed order, over all queries of a group's heads for keys and values: no atomic additions.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_kernels.triton_kernels.attention_launch import (
    KEY_GRADIENT,
    QUERY_GRADIENT,
    UNSPECIALIZED,
    Call,
    tiling,
)
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
from megatron_kernels.triton_kernels.rows import load_rows, store_rows


@triton.jit
def _gradient_of_scores(p, dp, delta, x, cap, SOFTCAP: tl.constexpr):
    """Returns the gradient of the products times the scale, from capped scores to the base 2."""
    dx = p * (dp - delta)
    if SOFTCAP:
        bounded = x / (cap * LOG2_E)
        dx = dx * (1.0 - bounded * bounded)
    return dx


@triton.jit
def _finite_lse(LSE, rows, s):
    """Returns the log-sum-exp to the base 2; infinity gives probabilities of zero.

    It stands for rows beyond the last and for rows that may attend to nothing.
    """
    lse = tl.load(LSE + rows, mask=rows < s, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse) * LOG2_E


@triton.jit
def _over_keys(
    dq, q, dout, lse, delta, query_id, query_position, word0, word1,
    K, V, KEY_IDS, KEY_POSITIONS, ALLOWED, COLUMNS, rows, head,
    start, end, s, t, k_s, v_s, window, chunk, prefix, first, length, least, scale, cap, factor,
    slope,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, PREFIX: tl.constexpr,
    DOCUMENTS: tl.constexpr, HAS_POSITIONS: tl.constexpr, DENSE: tl.constexpr,
    SLOPES: tl.constexpr, SOFTCAP: tl.constexpr, DROPS: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    ACC: tl.constexpr, OPERAND: tl.constexpr, STEPS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Returns the sum of the gradient of queries after the keys from start to end."""
    channels = tl.arange(0, BLOCK_D)
    of_values = tl.arange(0, BLOCK_DV)
    for at in range(start, end, STEPS):
        keys = at + tl.arange(0, STEPS)
        k = load_rows(K, keys, channels, k_s, t, D, MASKED, OPERAND)
        v = load_rows(V, keys, of_values, v_s, t, DV, MASKED, OPERAND)
        capped = scaled(
            tl.dot(q, tl.trans(k), input_precision=PRECISION, out_dtype=ACC), scale, cap, SOFTCAP
        )
        x = capped
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
        p = tl.exp2(x - lse[:, None])
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION, out_dtype=ACC)
        if DROPS:
            number = key_numbers(COLUMNS, keys, t, first, head, length, HAS_COLUMNS)
            keep = kept(word0[:, None], number[None, :], word1[:, None], least)
            dp = tl.where(keep, dp * factor, 0.0)
        dx = _gradient_of_scores(p, dp, delta[:, None], capped, cap, SOFTCAP)
        dq += tl.dot(dx.to(OPERAND), k, input_precision=PRECISION, out_dtype=ACC)
    return dq


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _of_queries(
    Q, K, V, DOUT, OUT, LSE, DELTA, DQ,
    QUERY_IDS, KEY_IDS, QUERY_POSITIONS, KEY_POSITIONS, PREFIXES, ALLOWED, SLOPE, WORD0, WORD1,
    COLUMNS, s, t, batch, heads, per_group, q_s, q_b, q_n, k_s, k_b, k_n, v_s, v_b, v_n,
    query_ids_b, key_ids_b, query_positions_b, key_positions_b, allowed_b, columns_b,
    offset, window, chunk, prefix, first, length, site0, site1, least, scale, cap, factor,
    dout_s, dout_b, dout_n, out_s, out_b, out_n,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, PREFIX: tl.constexpr,
    DOCUMENTS: tl.constexpr, HAS_POSITIONS: tl.constexpr, DENSE: tl.constexpr,
    SLOPES: tl.constexpr, SOFTCAP: tl.constexpr, DROPS: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    ACC: tl.constexpr, OPERAND: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Computes delta = dout . out of each query, and then its gradient."""
    blocks = tl.cdiv(s, ROWS)
    block = blocks - 1 - tl.program_id(0) % blocks  # the longest first, if causal
    line = tl.program_id(0) // blocks
    sample = (line // heads).to(tl.int64)
    head = line % heads
    group = (head // per_group).to(tl.int64)
    wide = head.to(tl.int64)
    K += sample * k_b + group * k_n
    V += sample * v_b + group * v_n
    KEY_IDS += sample * key_ids_b
    KEY_POSITIONS += sample * key_positions_b
    ALLOWED += sample * allowed_b
    COLUMNS += sample * columns_b
    prefix = load_prefix(PREFIXES, prefix, sample, PREFIX)
    rows = block * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, BLOCK_D)
    of_values = tl.arange(0, BLOCK_DV)
    DOUT += sample * dout_b + wide * dout_n
    OUT += sample * out_b + wide * out_n
    dout = load_rows(DOUT, rows, of_values, dout_s, s, DV, True, OPERAND)
    out = load_rows(OUT, rows, of_values, out_s, s, DV, True, OPERAND)
    delta = tl.sum(dout.to(ACC) * out.to(ACC), axis=1)
    tl.store(DELTA + line.to(tl.int64) * s + rows, delta, mask=rows < s)
    q = load_rows(Q + sample * q_b + wide * q_n, rows, channels, q_s, s, D, True, OPERAND)
    lse = _finite_lse(LSE + line.to(tl.int64) * s, rows, s)
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
    dq = tl.zeros((ROWS, BLOCK_D), ACC)
    if WINDOW:
        dq = _over_keys(
            dq, q, dout, lse, delta, query_id, query_position, word0, word1,
            K, V, KEY_IDS, KEY_POSITIONS, ALLOWED, COLUMNS, rows, head, start, full_start, s, t,
            k_s, v_s, window, chunk, prefix, first, length, least, scale, cap, factor, slope,
            D, DV, BLOCK_D, BLOCK_DV, CAUSAL, WINDOW, CHUNK, PREFIX, DOCUMENTS, HAS_POSITIONS,
            DENSE, SLOPES, SOFTCAP, DROPS, HAS_COLUMNS, ACC, OPERAND, STEPS, True,
        )  # fmt: skip
    if not (DOCUMENTS or HAS_POSITIONS or CHUNK or DENSE):
        dq = _over_keys(
            dq, q, dout, lse, delta, query_id, query_position, word0, word1,
            K, V, KEY_IDS, KEY_POSITIONS, ALLOWED, COLUMNS, rows, head, full_start, full_end, s, t,
            k_s, v_s, window, chunk, prefix, first, length, least, scale, cap, factor, slope,
            D, DV, BLOCK_D, BLOCK_DV, CAUSAL, WINDOW, CHUNK, PREFIX, DOCUMENTS, HAS_POSITIONS,
            DENSE, SLOPES, SOFTCAP, DROPS, HAS_COLUMNS, ACC, OPERAND, STEPS, False,
        )  # fmt: skip
    dq = _over_keys(
        dq, q, dout, lse, delta, query_id, query_position, word0, word1,
        K, V, KEY_IDS, KEY_POSITIONS, ALLOWED, COLUMNS, rows, head, full_end, end, s, t,
        k_s, v_s, window, chunk, prefix, first, length, least, scale, cap, factor, slope,
        D, DV, BLOCK_D, BLOCK_DV, CAUSAL, WINDOW, CHUNK, PREFIX, DOCUMENTS, HAS_POSITIONS,
        DENSE, SLOPES, SOFTCAP, DROPS, HAS_COLUMNS, ACC, OPERAND, STEPS, True,
    )  # fmt: skip
    DQ += sample * heads * D + wide * D
    store_rows(DQ, (dq * scale).to(DQ.dtype.element_ty), rows, channels, batch * heads * D, s, D)


@triton.jit
def _over_queries(
    dk, dv, k, v, key_id, key_position, number,
    Q, DOUT, LSE, DELTA, QUERY_IDS, QUERY_POSITIONS, ALLOWED, WORD0, WORD1, keys, sample,
    start, end, s, t, batch, q_s, dout_s, offset, window, chunk, prefix, site0, site1, least,
    scale, cap, factor, slope,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, PREFIX: tl.constexpr,
    DOCUMENTS: tl.constexpr, HAS_POSITIONS: tl.constexpr, DENSE: tl.constexpr,
    SLOPES: tl.constexpr, SOFTCAP: tl.constexpr, DROPS: tl.constexpr,
    ACC: tl.constexpr, OPERAND: tl.constexpr, STEPS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Returns the sums of both gradients after the queries of one head from start to end."""
    channels = tl.arange(0, BLOCK_D)
    of_values = tl.arange(0, BLOCK_DV)
    for at in range(start, end, STEPS):
        rows = at + tl.arange(0, STEPS)
        q = load_rows(Q, rows, channels, q_s, s, D, True, OPERAND)
        dout = load_rows(DOUT, rows, of_values, dout_s, s, DV, True, OPERAND)
        lse = _finite_lse(LSE, rows, s)
        delta = tl.load(DELTA + rows, mask=rows < s, other=0.0)
        capped = scaled(
            tl.dot(k, tl.trans(q), input_precision=PRECISION, out_dtype=ACC), scale, cap, SOFTCAP
        )
        x = capped
        if MASKED or SLOPES:
            query_position = load_positions(QUERY_POSITIONS, rows, s, offset, HAS_POSITIONS)
            query_position = query_position[None, :]
            x = with_slope(x, query_position, key_position[:, None], slope, SLOPES)
        if MASKED:
            query_id = load_ids(QUERY_IDS, rows, s, DOCUMENTS)[None, :]
            inside = (rows < s)[None, :]
            if DENSE:
                inside = inside & (keys < t)[:, None]
            pairs = ALLOWED + rows.to(tl.int64)[None, :] * t + keys[:, None]
            x = apply_mask(
                x, inside, query_id, key_id[:, None], query_position, key_position[:, None], pairs,
                window, chunk, prefix, CAUSAL, WINDOW, CHUNK, PREFIX, DOCUMENTS, DENSE,
            )  # fmt: skip
        p = tl.exp2(x - lse[None, :])
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION, out_dtype=ACC)
        weights = p
        if DROPS:
            word0, word1 = query_words(WORD0, WORD1, rows, sample, batch, s, site0, site1)
            keep = kept(word0[None, :], number[:, None], word1[None, :], least)
            weights = tl.where(keep, p, 0.0)
            dp = tl.where(keep, dp * factor, 0.0)
        dv += tl.dot(weights.to(OPERAND), dout, input_precision=PRECISION, out_dtype=ACC)
        dx = _gradient_of_scores(p, dp, delta[None, :], capped, cap, SOFTCAP)
        dk += tl.dot(dx.to(OPERAND), q, input_precision=PRECISION, out_dtype=ACC)
    return dk, dv


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _of_keys(
    Q, K, V, DOUT, LSE, DELTA, DK, DV_OUT,
    QUERY_IDS, KEY_IDS, QUERY_POSITIONS, KEY_POSITIONS, PREFIXES, ALLOWED, SLOPE, WORD0, WORD1,
    COLUMNS, s, t, batch, heads, per_group, q_s, q_b, q_n, k_s, k_b, k_n, v_s, v_b, v_n,
    query_ids_b, key_ids_b, query_positions_b, key_positions_b, allowed_b, columns_b,
    offset, window, chunk, prefix, first, length, site0, site1, least, scale, cap, factor,
    dout_s, dout_b, dout_n,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, PREFIX: tl.constexpr,
    DOCUMENTS: tl.constexpr, HAS_POSITIONS: tl.constexpr, DENSE: tl.constexpr,
    SLOPES: tl.constexpr, SOFTCAP: tl.constexpr, DROPS: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    ACC: tl.constexpr, OPERAND: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
    MEMBERS: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of some keys and values of a group."""
    blocks = tl.cdiv(t, ROWS)
    block = tl.program_id(0) % blocks  # the longest first, if causal
    line = tl.program_id(0) // blocks
    groups = heads // MEMBERS
    sample = (line // groups).to(tl.int64)
    group = line % groups
    wide = group.to(tl.int64)
    QUERY_IDS += sample * query_ids_b
    QUERY_POSITIONS += sample * query_positions_b
    ALLOWED += sample * allowed_b
    COLUMNS += sample * columns_b
    prefix = load_prefix(PREFIXES, prefix, sample, PREFIX)
    keys = block * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, BLOCK_D)
    of_values = tl.arange(0, BLOCK_DV)
    k = load_rows(K + sample * k_b + wide * k_n, keys, channels, k_s, t, D, True, OPERAND)
    v = load_rows(V + sample * v_b + wide * v_n, keys, of_values, v_s, t, DV, True, OPERAND)
    key_id = load_ids(KEY_IDS + sample * key_ids_b, keys, t, DOCUMENTS)
    key_position = load_positions(
        KEY_POSITIONS + sample * key_positions_b, keys, t, 0, HAS_POSITIONS
    )
    start, full_start, full_end, end = tokens_in_reach(
        QUERY_IDS, QUERY_POSITIONS, key_id, key_position, keys < t, s, offset, window, chunk,
        prefix, False, CAUSAL, WINDOW, CHUNK, PREFIX, DOCUMENTS, HAS_POSITIONS, DENSE, STEPS,
    )  # fmt: skip
    dk = tl.zeros((ROWS, BLOCK_D), ACC)
    dv = tl.zeros((ROWS, BLOCK_DV), ACC)
    for member in range(MEMBERS):
        head = group * MEMBERS + member
        of_head = head.to(tl.int64)
        QUERIES = Q + sample * q_b + of_head * q_n
        ARRIVING = DOUT + sample * dout_b + of_head * dout_n
        statistics = (sample * heads + of_head) * s
        number = keys.to(tl.uint32)
        if DROPS:
            number = key_numbers(COLUMNS, keys, t, first, head, length, HAS_COLUMNS)
        slope = 0.0
        if SLOPES:
            slope = tl.load(SLOPE + head).to(ACC)
        if CAUSAL or WINDOW or CHUNK or DOCUMENTS or HAS_POSITIONS or DENSE:
            dk, dv = _over_queries(
                dk, dv, k, v, key_id, key_position, number, QUERIES, ARRIVING, LSE + statistics,
                DELTA + statistics, QUERY_IDS, QUERY_POSITIONS, ALLOWED, WORD0, WORD1, keys,
                sample, start, full_start, s, t, batch, q_s, dout_s, offset, window, chunk,
                prefix, site0, site1, least, scale, cap, factor, slope,
                D, DV, BLOCK_D, BLOCK_DV, CAUSAL, WINDOW, CHUNK, PREFIX, DOCUMENTS, HAS_POSITIONS,
                DENSE, SLOPES, SOFTCAP, DROPS, ACC, OPERAND, STEPS, True,
            )  # fmt: skip
        if not (DOCUMENTS or HAS_POSITIONS or CHUNK or DENSE):
            dk, dv = _over_queries(
                dk, dv, k, v, key_id, key_position, number, QUERIES, ARRIVING, LSE + statistics,
                DELTA + statistics, QUERY_IDS, QUERY_POSITIONS, ALLOWED, WORD0, WORD1, keys,
                sample, full_start, full_end, s, t, batch, q_s, dout_s, offset, window, chunk,
                prefix, site0, site1, least, scale, cap, factor, slope,
                D, DV, BLOCK_D, BLOCK_DV, CAUSAL, WINDOW, CHUNK, PREFIX, DOCUMENTS, HAS_POSITIONS,
                DENSE, SLOPES, SOFTCAP, DROPS, ACC, OPERAND, STEPS, False,
            )  # fmt: skip
            if WINDOW:
                dk, dv = _over_queries(
                    dk, dv, k, v, key_id, key_position, number, QUERIES, ARRIVING,
                    LSE + statistics, DELTA + statistics, QUERY_IDS, QUERY_POSITIONS, ALLOWED,
                    WORD0, WORD1, keys, sample, full_end, end, s, t, batch, q_s, dout_s, offset,
                    window, chunk, prefix, site0, site1, least, scale, cap, factor, slope,
                    D, DV, BLOCK_D, BLOCK_DV, CAUSAL, WINDOW, CHUNK, PREFIX, DOCUMENTS,
                    HAS_POSITIONS, DENSE, SLOPES, SOFTCAP, DROPS, ACC, OPERAND, STEPS, True,
                )  # fmt: skip
    DK += sample * groups * D + wide * D
    DV_OUT += sample * groups * DV + wide * DV
    store_rows(DK, (dk * scale).to(DK.dtype.element_ty), keys, channels, batch * groups * D, t, D)
    dv = (dv * factor).to(DV_OUT.dtype.element_ty)
    store_rows(DV_OUT, dv, keys, of_values, batch * groups * DV, t, DV)


def attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    tensors: Sequence[Tensor | None],
    numbers: Sequence[int],
    factors: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of queries, keys, values and sinks (empty if there are none).

    Args:
        dout: Gradient of the output `[s, b, n, dv]`, channels next to one another in memory.
        q: As in `attend`, like the arguments without a description.
        k: Keys.
        v: Values.
        out: The output, likewise.
        lse: Log-sum-exp `[b, n, s]`, contiguous.
        sinks: Sinks `[n]`.
        tensors: As in `Call`.
        numbers: As in `Call`.
        factors: As in `Call`.
    """
    s, b, n, d = q.shape
    t, _, groups, width = v.shape
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    delta = torch.empty_like(lse)
    call = Call(q, k, v, tensors, numbers, factors)
    strides = [x.stride(dim) for x in (dout, out) for dim in range(3)]
    if delta.numel():
        size = tiling(QUERY_GRADIENT, q, max(d, width))
        _of_queries[(triton.cdiv(s, size.rows) * b * n,)](
            q, k, v, dout, out, lse, delta, dq, *call.arguments(), *strides,
            **call.options(), ROWS=size.rows, STEPS=size.steps,
            num_warps=size.num_warps, num_stages=size.num_stages,
        )  # fmt: skip
    if dk.numel():
        size = tiling(KEY_GRADIENT, q, max(d, width))
        _of_keys[(triton.cdiv(t, size.rows) * b * groups,)](
            q, k, v, dout, lse, delta, dk, dv, *call.arguments(), *strides[:3],
            **call.options(), ROWS=size.rows, STEPS=size.steps, MEMBERS=n // groups,
            num_warps=size.num_warps, num_stages=size.num_stages,
        )  # fmt: skip
    if sinks is None:
        return dq, dk, dv, lse.new_empty(0)
    share = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse)
    return dq, dk, dv, -(share * delta).sum((0, 2)).to(sinks.dtype)
