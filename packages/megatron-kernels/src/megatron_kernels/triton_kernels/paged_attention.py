"""Attention over blocks of keys: parts of a sequence in parallel, then the sum of the parts.

A program computes all queries of one group of heads over `PART` keys of a sequence, with the online
softmax of FlashAttention (Dao 2023, section 3.1). It writes its output and its log-sum-exp; the
second kernel weights the outputs of all parts, as Flash-Decoding does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_kernels.triton_kernels.launch import accumulator, accumulator_dtype, power_of_two

PART: int = 512
"""Keys of a program. The same for every batch, so that a sequence is always cut alike."""

KEYS: int = 64
"""Keys that a program holds at a time."""

_PRECISIONS = {
    torch.float64: "exact",
    torch.float32: "ieee",
    torch.float16: "tf32",  # which has all bits of keys and values in 16 bits
    torch.bfloat16: "tf32",
}
"""How products are computed, by dtype."""


@triton.jit
def _product(a, b, PRECISION: tl.constexpr):
    """Multiplies matrices in their dtype; float64 without tensor cores."""
    if PRECISION == "exact":
        return tl.sum(a[:, :, None] * b[None, :, :], 1)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _attend_to_part(
    Q, K, V, TABLES, LENGTHS, SLOPES, OUT, LSE, s, sequences, heads, d, dv, block_size, columns,
    window, scale, softcap, k_block, k_entry, k_group, v_block, v_entry, v_group,
    PER_GROUP: tl.constexpr, HAS_SLOPES: tl.constexpr, CAPS: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PART: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    row, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(LENGTHS + row)
    index = tl.arange(0, ROWS)
    query, head = index // PER_GROUP, group * PER_GROUP + index % PER_GROUP
    real = query < s
    position = length - s + query
    c, cv = tl.arange(0, D), tl.arange(0, DV)
    at = ((query * sequences + row) * heads + head).to(tl.int64)
    of_queries = real[:, None] & (c < d)[None, :]
    q = tl.load(Q + at[:, None] * d + c[None, :], mask=of_queries, other=0.0).to(ACC)
    slope = tl.zeros((ROWS,), ACC)
    if HAS_SLOPES:
        slope = tl.load(SLOPES + head, mask=real, other=0.0).to(ACC)
    end = tl.minimum((part + 1) * PART, length)
    first = tl.maximum(length - s - window + 1 - part * PART, 0) // KEYS * KEYS + part * PART
    largest = tl.full((ROWS,), float("-inf"), ACC)
    total = tl.zeros((ROWS,), ACC)
    out = tl.zeros((ROWS, DV), ACC)
    for start in range(first, end, KEYS):
        t = start + tl.arange(0, KEYS)
        inside = t < end
        block = tl.load(TABLES + row.to(tl.int64) * columns + t // block_size, mask=inside, other=0)
        entry = t % block_size
        of_key = block.to(tl.int64) * k_block + entry * k_entry + group * k_group
        k = tl.load(
            K + of_key[None, :] + c[:, None], mask=inside[None, :] & (c < d)[:, None], other=0.0
        )
        scores = _product(q, k.to(ACC), PRECISION) * scale
        if CAPS:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        distance = position[:, None] - t[None, :]
        scores -= slope[:, None] * tl.abs(distance)
        seen = inside[None, :] & (distance >= 0) & (distance < window)
        scores = tl.where(seen, scores, float("-inf"))
        peak = tl.maximum(largest, tl.max(scores, 1))
        finite = tl.where(peak == float("-inf"), 0.0, peak)
        p = tl.exp(scores - finite[:, None])
        factor = tl.exp(largest - finite)
        total = total * factor + tl.sum(p, 1)
        of_value = block.to(tl.int64) * v_block + entry * v_entry + group * v_group
        v = tl.load(
            V + of_value[:, None] + cv[None, :],
            mask=inside[:, None] & (cv < dv)[None, :],
            other=0.0,
        )
        out = out * factor[:, None] + _product(p, v.to(ACC), PRECISION)
        largest = peak
    empty = total == 0
    whole = tl.where(empty, 1.0, total)
    at += part.to(tl.int64) * s * sequences * heads
    stored = real[:, None] & (cv < dv)[None, :]
    tl.store(OUT + at[:, None] * dv + cv[None, :], out / whole[:, None], mask=stored)
    lse = tl.where(empty, float("-inf"), largest + tl.log(whole))
    tl.store(LSE + at, lse, mask=real)


@triton.jit
def _add_parts(
    OUT, LSE, LENGTHS, SINKS, Y, rows, sequences, heads, dv, PART: tl.constexpr,
    HAS_SINKS: tl.constexpr, DV: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cv = tl.arange(0, DV)
    length = tl.load(LENGTHS + row // heads % sequences)
    parts = (length + PART - 1) // PART
    largest = tl.full((), float("-inf"), ACC)
    total = tl.zeros((), ACC)
    if HAS_SINKS:
        largest = tl.load(SINKS + row % heads).to(ACC)
        total = tl.full((), 1.0, ACC)
    y = tl.zeros((DV,), ACC)
    for part in range(parts):
        at = part * rows + row
        lse = tl.load(LSE + at)
        peak = tl.maximum(largest, lse)
        finite = tl.where(peak == float("-inf"), 0.0, peak)
        factor, weight = tl.exp(largest - finite), tl.exp(lse - finite)
        own = tl.load(OUT + at * dv + cv, mask=cv < dv, other=0.0)
        total = total * factor + weight
        y = y * factor + own * weight
        largest = peak
    y = y / tl.where(total == 0, 1.0, total)
    tl.store(Y + row * dv + cv, y, mask=cv < dv)


def paged_attend(
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
    """Returns attention of the last tokens of sequences; 0 is no window and no cap."""
    s, sequences, heads, d = q.shape
    block_size, groups, dv = k.shape[1], k.shape[2], v.shape[-1]
    y = q.new_empty(s, sequences, heads, dv)
    if not y.numel():
        return y
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    tables, lengths = tables.contiguous(), lengths.contiguous()
    columns = tables.shape[1]
    parts = max(1, triton.cdiv(columns * block_size, PART))
    acc = accumulator(q.dtype)
    rows = s * sequences * heads
    dtype = accumulator_dtype(q.dtype)
    out = torch.empty(parts, rows, dv, dtype=dtype, device=q.device)
    lse = torch.empty(parts, rows, dtype=dtype, device=q.device)
    per_group = heads // groups
    wide = max(16, power_of_two(dv))
    _attend_to_part[(sequences, groups, parts)](
        q, k, v, tables, lengths, slopes, out, lse, s, sequences, heads, d, dv, block_size, columns,
        window or 2**30, scale, softcap, *k.stride()[:3], *v.stride()[:3],
        PER_GROUP=per_group, HAS_SLOPES=slopes is not None, CAPS=softcap > 0,
        ROWS=max(16, power_of_two(s * per_group)), KEYS=16 if q.dtype == torch.float64 else KEYS,
        D=max(16, power_of_two(d)), DV=wide, PART=PART, ACC=acc, PRECISION=_PRECISIONS[q.dtype],
    )  # fmt: skip
    _add_parts[(rows,)](
        out, lse, lengths, sinks, y, rows, sequences, heads, dv,
        PART=PART, HAS_SINKS=sinks is not None, DV=wide, ACC=acc,
    )  # fmt: skip
    return y
