"""The scan of Mamba-2, forward (Dao and Gu 2024, section 6), in three kernels.

1. Steps: softplus and limits of `dt`, and the sums of logarithms in each chunk.
2. States: a program has some channels of a head's state and adds one chunk after the other. It
   stores the state before each chunk. The paper's chunk states and their passing are one kernel
   here, so that no state is written, read, and written again.
3. Outputs: a program has a chunk and computes the heads of a group one after another, so that
   `B` and `C` are read, and multiplied with each other, once for these heads.

With bfloat16, heads of 64 channels, states of 128 and chunks of 64, a state has twice the bytes of
the values of its chunk. The second kernel reads values once and writes states, the third reads
both and writes outputs: 7 times the bytes of the values, which bound the third kernel (about 50
floating-point operations a byte). The second kernel is bound by its chain of chunks if heads and
samples are few, since a chunk waits for the one before it.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from megatron_kernels.triton_kernels.launch import (
    accumulator_dtype,
    power_of_two,
)
from megatron_kernels.triton_kernels.rows import load_rows, store_rows
from megatron_kernels.triton_kernels.ssd_parts import (
    UNSPECIALIZED,
    block,
    decay_between,
    decay_from_start,
    decay_to_end,
    document_before,
    end_of_chunk,
    group_options,
    heads_of_program,
    limit_numbers,
    limited,
    load_documents,
    operands,
    softplus,
    splits_of_heads,
    tile_options,
    tiling,
    token_options,
)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _steps(
    DT, A, BIAS, DOCUMENTS, STEP, LOG, s, batch, heads, dt_s, dt_b, dt_n,
    low, low_rest, high, high_rest, HAS_BIAS: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    LIMITED: tl.constexpr, ACC: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Computes steps and logarithms `[b, n, s]` of some heads in a chunk. Bound by memory."""
    blocks = tl.cdiv(heads, HEADS)
    line = tl.program_id(0) // blocks
    sample = (line % batch).to(tl.int64)
    head = tl.program_id(0) % blocks * HEADS + tl.arange(0, HEADS)
    token = line // batch * TOKENS + tl.arange(0, TOKENS)
    known = (head < heads)[None, :] & (token < s)[:, None]
    at = token.to(tl.int64)[:, None] * dt_s + head[None, :] * dt_n
    x = tl.load(DT + sample * dt_b + at, mask=known, other=0.0).to(ACC)
    if HAS_BIAS:
        x += tl.load(BIAS + head, mask=head < heads, other=0.0).to(ACC)[None, :]
    step = limited(softplus(x), low, low_rest, high, high_rest, LIMITED, ACC)
    _, real = load_documents(DOCUMENTS, sample, token, s, HAS_DOCUMENTS)
    step = tl.where(real[:, None], step, 0.0)
    rate = tl.load(A + head, mask=head < heads, other=0.0).to(ACC)
    log = tl.cumsum(step * rate[None, :], axis=0)
    into = (sample * heads + head)[None, :] * s + token[:, None]
    tl.store(STEP + into, step, mask=known)
    tl.store(LOG + into, log, mask=known)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _states(
    X, B, DOCUMENTS, STEP, LOG, INITIAL, STATES, FINAL, s, batch, heads, per_group,
    x_s, x_b, x_n, b_s, b_b, b_g,
    HAS_INITIAL: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    WIDE_D: tl.constexpr, WIDE_K: tl.constexpr, ACC: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Stores the state `[d, k]` of a head before each chunk, and the one after the last."""
    tiles_k: tl.constexpr = (K + WIDE_K - 1) // WIDE_K
    tiles: tl.constexpr = (D + WIDE_D - 1) // WIDE_D * tiles_k
    line = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    sample, head = line // heads, line % heads
    of_d = tile // tiles_k * WIDE_D + tl.arange(0, WIDE_D)
    of_k = tile % tiles_k * WIDE_K + tl.arange(0, WIDE_K)
    inside = (of_d < D)[:, None] & (of_k < K)[None, :]
    at = line * (D * K) + of_d[:, None] * K + of_k[None, :]
    X += sample * x_b + head * x_n
    B += sample * b_b + head // per_group * b_g
    state = tl.zeros((WIDE_D, WIDE_K), ACC)
    if HAS_INITIAL:
        state = tl.load(INITIAL + at, mask=inside, other=0.0).to(ACC)
    for start in range(0, s, TOKENS):
        tl.store(STATES + at, state.to(STATES.dtype.element_ty), mask=inside)
        STATES += tl.full((), batch * heads, tl.int64) * (D * K)
        token = start + tl.arange(0, TOKENS)
        step = tl.load(STEP + line * s + token, mask=token < s, other=0.0)
        log = tl.load(LOG + line * s + token, mask=token < s, other=0.0)
        document, _ = load_documents(DOCUMENTS, sample, token, s, HAS_DOCUMENTS)
        before = document_before(DOCUMENTS, sample, start, s, HAS_DOCUMENTS)
        total, final = end_of_chunk(log, document, token, tl.minimum(start + TOKENS, s) - 1)
        step *= decay_to_end(log, document, total, final, HAS_DOCUMENTS)
        x = load_rows(X, token, of_d, x_s, s, D, True, ACC) * step[:, None]
        if HAS_DOCUMENTS:  # a NaN of another document would stay
            x = tl.where((document == final)[:, None], x, 0.0)
            state = tl.where(final == before, state, 0.0)
        b = load_rows(B, token, of_k, b_s, s, K, True, OPERAND)
        added = tl.dot(tl.trans(x).to(OPERAND), b, input_precision=PRECISION, out_dtype=ACC)
        state = state * tl.exp(total) + added
    tl.store(FINAL + at, state, mask=inside)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _outputs(
    X, B, C, SCALE, DOCUMENTS, STEP, LOG, STATES, Y, s, batch, heads, per_group,
    x_s, x_b, x_n, b_s, b_b, b_g, c_s, c_b, c_g,
    HAS_SCALE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, ACC: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, TOKENS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """Computes the outputs of ``MEMBERS`` heads in a chunk from its values and the state before."""
    first, group, line, sample = heads_of_program(batch, heads, per_group, MEMBERS)
    start = line // batch * TOKENS
    token = start + tl.arange(0, TOKENS)
    of_d, of_k = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_K)
    b = load_rows(B + sample * b_b + group * b_g, token, of_k, b_s, s, K, True, OPERAND)
    c = load_rows(C + sample * c_b + group * c_g, token, of_k, c_s, s, K, True, OPERAND)
    scores = tl.dot(c, tl.trans(b), input_precision=PRECISION, out_dtype=ACC)
    document, real = load_documents(DOCUMENTS, sample, token, s, HAS_DOCUMENTS)
    before = document_before(DOCUMENTS, sample, start, s, HAS_DOCUMENTS)
    for member in range(MEMBERS):
        head = (first + member).to(tl.int64)
        of_head = sample * heads + head
        step = tl.load(STEP + of_head * s + token, mask=token < s, other=0.0)
        log = tl.load(LOG + of_head * s + token, mask=token < s, other=0.0)
        x = load_rows(X + sample * x_b + head * x_n, token, of_d, x_s, s, D, True, OPERAND)
        AT = STATES + (line // batch * batch * heads + of_head) * (D * K)
        state = load_rows(AT, of_d, of_k, K, D, K, True, OPERAND)
        y = tl.dot(c, tl.trans(state), input_precision=PRECISION, out_dtype=ACC)
        y *= decay_from_start(log, document, before, HAS_DOCUMENTS)[:, None]
        weights = scores * step[None, :] * decay_between(
            token[None, :], token[:, None], log[None, :], log[:, None],
            document[None, :], document[:, None], s, HAS_DOCUMENTS,
        )  # fmt: skip
        y += tl.dot(weights.to(OPERAND), x, input_precision=PRECISION, out_dtype=ACC)
        if HAS_SCALE:
            y += tl.load(SCALE + head).to(ACC) * x.to(ACC)
        if HAS_DOCUMENTS:
            y = tl.where(real[:, None], y, 0.0)
        INTO = Y + sample * heads * D + head * D
        store_rows(INTO, y.to(Y.dtype.element_ty), token, of_d, batch * heads * D, s, D)


def ssd_forward(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    documents: Tensor | None,
    state: Tensor | None,
    chunk: int,
    limits: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns outputs, last state, states before chunks, steps and logarithms of decays.

    Args:
        x: Values `[s, b, n, d]`, channels next to one another in memory; at least one token.
        dt: Steps `[s, b, n]`, with any strides.
        a: Rates `[n]`, contiguous, as all that follow but `b` and `c`.
        b: `[s, b, g, k]`, channels next to one another.
        c: Likewise.
        d: Factor of `x` in the output `[n]`.
        dt_bias: Bias of the steps `[n]`.
        documents: `[b, s]`, int32, as the module describes.
        state: State before the first token `[b, n, d, k]`.
        chunk: Tokens of a chunk.
        limits: Smallest and largest step; empty if there are none.
    """
    s, batch, heads, width = x.shape
    groups, channels = b.shape[2:]
    wide = accumulator_dtype(x.dtype)
    y = x.new_empty(x.shape)
    final = x.new_empty(batch, heads, width, channels, dtype=wide)
    step, log = (x.new_empty(batch, heads, s, dtype=wide) for _ in range(2))
    size, chunks = tiling(x, chunk), triton.cdiv(s, chunk)
    states = x.new_empty(chunks, *final.shape, dtype=operands(x.dtype).states)
    options, tiles = token_options(x, documents, chunk), tile_options(x, channels)
    sizes = (s, batch, heads, heads // groups)
    of_x, of_b, of_c = (each.stride()[:3] for each in (x, b, c))
    some = power_of_two(min(heads, 32))
    _steps[(chunks * batch * triton.cdiv(heads, some),)](
        dt, a, dt_bias, documents, step, log, *sizes[:3], *dt.stride(), *limit_numbers(limits),
        HAS_BIAS=dt_bias is not None, LIMITED=bool(limits), HEADS=some, **options, num_warps=4,
    )  # fmt: skip
    of_d, of_k = (min(size.width, block(each)) for each in (width, channels))
    programs = batch * heads * triton.cdiv(width, of_d) * triton.cdiv(channels, of_k)
    _states[(programs,)](
        x, b, documents, step, log, state, states, final, *sizes, *of_x, *of_b,
        HAS_INITIAL=state is not None, WIDE_D=of_d, WIDE_K=of_k, **options, **tiles,
        num_warps=size.warps[0], num_stages=size.stages[0],
    )  # fmt: skip
    splits = splits_of_heads(x.device, chunks * batch * groups, heads // groups)
    _outputs[(chunks * batch * groups * splits,)](
        x, b, c, d, documents, step, log, states, y, *sizes, *of_x, *of_b, *of_c,
        HAS_SCALE=d is not None, **options, **tiles,
        **group_options(x, channels, heads // groups // splits),
        num_warps=size.warps[1], num_stages=size.stages[1],
    )  # fmt: skip
    return y, final, states, step, log
